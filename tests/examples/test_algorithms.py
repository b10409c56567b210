"""The algorithms from outside: named by their place, run, resumed, verified, and equal to what they contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_core import runner, tree
from fl_core.algorithms.base import ALGORITHMS
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.initial import start
from fl_core.models import build, example
from fl_core.records import store
from fl_core.restore import load_models
from tests.conftest import CONFIG, TOY, network, play
from tests.faults.injected import contents, cut_back

HALF_WAY = "examples.algorithms.half_way:HalfWay"
HEART = RunConfig(dataset="heart", rounds=3, epochs=1, eval_every=1, checkpoint_every=1)


@pytest.mark.filterwarnings("ignore:client")
def test_it_runs_is_verified_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "run"
    engine = runner.run(HEART.with_keys(algorithm=HALF_WAY), whole, progress=False)
    assert {
        row["algorithm"] for row in store.Run(whole).rows()[1].to_dict("records")
    } == {engine.algorithm.name}
    assert engine.algorithm.name == ALGORITHMS[HALF_WAY].name
    (tmp_path / "part").mkdir()
    part = cut_back(whole, tmp_path / "part", after=1)
    refusal = rf"'{HALF_WAY}'.*--allow-code {HALF_WAY}"
    with pytest.raises(UsageError, match=refusal):
        runner.resume(part, progress=False)
    with pytest.raises(UsageError, match=refusal):
        load_models(part, which="personal")
    assert runner.resume(part, allow_code=[HALF_WAY], progress=False).done == 3
    assert store.Run(part).verify() == store.Run(whole).verify()
    assert contents(part) == contents(whole)
    (ours, _), (theirs, _) = (
        load_models(run, which="personal", allow_code=HALF_WAY) for run in (whole, part)
    )
    assert {k: tree.digest(tree.state_dict(m)) for k, m in ours.items()} == {
        k: tree.digest(tree.state_dict(m)) for k, m in theirs.items()
    }


def test_a_directory_does_not_choose_what_is_imported_below_a_schedule_or_for_a_start(
    tmp_path: Path,
) -> None:
    config = CONFIG.with_keys(algorithm="vanilla", rounds=1, options={"base": HALF_WAY})
    runner.run(
        config, tmp_path / "run", data=TOY, model=network("plain"), progress=False
    )
    with pytest.raises(UsageError, match=rf"'{HALF_WAY}'.*option base"):
        load_models(tmp_path / "run", data=TOY, model=network("plain"))
    load_models(
        tmp_path / "run", data=TOY, model=network("plain"), allow_code=[HALF_WAY]
    )


@pytest.mark.filterwarnings("ignore:client")
def test_a_run_of_an_outside_algorithm_with_a_global_model_can_be_started_from(
    tmp_path: Path,
) -> None:
    runner.run(
        HEART.with_keys(algorithm=HALF_WAY, rounds=1), tmp_path / "half", progress=False
    )
    model = build("heart_mlp", (10,), 5, seed=3)
    start(model, tmp_path / "half", example((10,)))
    wanted = store.Run(tmp_path / "half").checkpoint().server.trees["model"]
    assert tree.digest(tree.state_dict(model)) == tree.digest(wanted)
    runner.run(
        HEART.with_keys(algorithm="fedala", rounds=1),
        tmp_path / "fedala",
        progress=False,
    )
    with pytest.raises(UsageError, match="global model"):
        start(model, tmp_path / "fedala", example((10,)))


@pytest.mark.parametrize("kind", ["plain", "unused"])
def test_its_limits_are_fedavg_and_local(kind: str) -> None:
    received, own = (
        play(
            algorithm=HALF_WAY,
            options={"share": share},
            model=kind,
            momentum=0.9,
            weight_decay=0.05,
        )
        for share in (0, 1)
    )
    assert (
        received.server()
        == play(
            algorithm="fedavg", model=kind, momentum=0.9, weight_decay=0.05
        ).server()
    )
    assert (
        own.evaluated()
        == play(
            algorithm="local", model=kind, momentum=0.9, weight_decay=0.05
        ).evaluated()
    )
