"""A plan that somebody has edited still trains, and the run reports the change."""

import json
import warnings
from pathlib import Path

import pytest

from fl_core.config import RunConfig
from fl_core.plan import Evidence, LayerPlan
from fl_core.run import runner

CONFIG = RunConfig(
    algorithm="fedper", rounds=2, epochs=1, eval_every=1, checkpoint_every=1
)


@pytest.fixture(scope="module")
def layers():
    return runner.assemble(CONFIG).layers


@pytest.fixture
def decided(layers):
    """A plan as a rule has decided it."""
    return LayerPlan.prefix(
        layers,
        2,
        Evidence(rule="sensitivity_ratio", threshold=1.2, values=(1.0, 1.0, 3.0)),
    )


def edited(plan, path, **changes):
    """The configuration of a run under a plan that was changed in its file."""
    path.write_text(json.dumps({**plan.to_json(), **changes}))
    return CONFIG.with_keys(plan=str(path))


def notes_of(function, *args, **options):
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, progress=False, **options)
    return [
        str(warning.message) for warning in caught if "plan" in str(warning.message)
    ]


def test_a_run_says_that_its_plan_was_edited(decided, tmp_path):
    config = edited(decided, tmp_path / "plan.json", shared=["fc1"])
    (note,) = notes_of(runner.run, config, tmp_path / "run", until=1)
    assert "(was sensitivity_ratio)" in note
    Path(config.federation.plan).unlink()
    engine = runner.resume(tmp_path / "run", progress=False)
    assert engine.algorithm.plan.shared == ("fc1",)
    again = runner.assemble(CONFIG.with_keys(plan=str(tmp_path / "run")))
    assert again.plan == engine.algorithm.plan
    assert engine.algorithm.plan.why.rule == "edited by hand (was sensitivity_ratio)"


def test_a_plan_as_it_was_decided_needs_no_note(decided, tmp_path):
    assert notes_of(runner.run, edited(decided, tmp_path / "plan.json")) == []
