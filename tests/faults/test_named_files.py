"""A stored configuration cannot make a command read files or folders that the user has not named."""

import numpy as np
import pytest
from safetensors.torch import save_file

from fl_core import models, tree
from fl_core.config import KEYS, Mark, RunConfig, marked
from fl_core.errors import CorruptError
from fl_core.run import runner
from tests.conftest import CONFIG
from tests.faults.injected import edit

SMALL = CONFIG.with_keys(
    dataset="digits", clients=2, max_samples=60, model="mlp", rounds=2
)


@pytest.fixture
def weights(tmp_path):
    """A file of weights for the small model."""
    path = tmp_path / "weights.safetensors"
    save_file(tree.state_dict(models.build("mlp", (1, 8, 8), 10, seed=7)), path)
    return path


@pytest.fixture
def table(tmp_path):
    """A file of data."""
    draw = np.random.default_rng(0)
    path = tmp_path / "own.npz"
    x, y = draw.normal(size=(60, 3)).astype(np.float32), draw.integers(0, 2, 60)
    np.savez(path, x=x, y=y, client=np.repeat(["a", "b"], 30))
    return path


@pytest.fixture
def opened(monkeypatch):
    """The paths that readers of weights, data and plans were asked for."""
    from fl_core import plan
    from fl_core.data import files, loading
    from fl_core.run import initial

    paths = []

    def refused(path, *given, **named):
        paths.append(str(path))
        raise AssertionError(f"reads {path}")

    monkeypatch.setattr(initial, "_of_run", refused)
    monkeypatch.setattr(initial.weights, "read", refused)
    monkeypatch.setattr(plan.LayerPlan, "load", refused)
    monkeypatch.setattr(files, "read", refused)
    monkeypatch.setattr(loading.files, "read", refused)
    return paths


def test_every_key_is_judged():
    """A key whose text is free either has a mark, or is never opened or imported."""
    judged = {"data_root", "init", "model", "plan", "tokenizer", *marked(Mark.CODE)}
    free = {name for name, key in KEYS.items() if key.hint in (str, str | None)}
    assert judged <= free
    unread = {
        "positive",
        "scale",
        "impute",
        "clip",
        "task",
    }
    unread |= {"client_column", "label_column", "text_column", "adapt"}
    unread |= {"group_column", "class_weights", "device", "monitor"}
    words = {"batchnorm", "layer_granularity", "optimizer", "loss"}
    words |= {"client_weights", "stack", "precision"}
    assert free == judged | unread | words


@pytest.mark.parametrize("changes", [{"init": "x"}, {"plan": "x", "given": None}])
def test_a_changed_configuration_reads_nothing(changes, tmp_path, opened):
    """A run has its weights and its plan, and names no file of them."""
    run = tmp_path / "run"
    runner.run(SMALL.with_keys(algorithm="fedper"), run, until=1)
    edit(run, **changes)
    with pytest.raises(CorruptError, match="'x' and has none"):
        runner.resume(run)
    assert not opened


def test_a_run_has_its_weights_and_checks_its_data(tmp_path, weights, table):
    for name, message in (
        ("init", SMALL.with_keys(init=str(weights))),
        ("table", RunConfig(dataset=str(table), rounds=2)),
    ):
        runner.run(message, tmp_path / name, until=1)
        weights.unlink(missing_ok=True)
        assert runner.resume(tmp_path / name).done == 2
