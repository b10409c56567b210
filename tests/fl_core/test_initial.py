"""Starting weights: a run's global model or a file, a classifier for other classes."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fl_core import models, tree
from fl_core.config import RunConfig
from fl_core.errors import CorruptError
from fl_core.models.tokens import SPECIAL, TokenShape
from fl_core.records import store
from fl_core.run import runner
from fl_core.run.initial import start
from fl_core.run.restore import load_models
from fl_core.run.task import assemble
from tests.conftest import refuses

SHORT = {
    "rounds": 2,
    "batch_size": 16,
    "lr": 0.02,
    "optimizer": "sgd",
    "checkpoint_every": 1,
    "max_samples": 300,
}
DIGITS = RunConfig(dataset="digits", partition="iid", clients=3, **SHORT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on ten digits."""
    path = tmp_path_factory.mktemp("trained") / "run"
    runner.run(DIGITS, path)
    return path


@pytest.fixture(scope="module")
def threes(tmp_path_factory):
    """Images of the digits' shape in three classes."""
    path, draws = (
        tmp_path_factory.mktemp("threes") / "threes.npz",
        np.random.default_rng(0),
    )
    x = draws.standard_normal((150, 1, 8, 8)).astype(np.float32)
    np.savez(path, x=x, y=np.arange(150) % 3, client=np.arange(150) % 2)
    return path


def global_model(path):
    return dict(store.Run(path).checkpoint("last").server.trees["model"])


def three_config(threes, init, **options):
    return RunConfig(
        dataset=str(threes),
        model="mlp",
        init=str(init),
        **{**SHORT, "max_samples": None, **options},
    )


def test_a_run_starts_with_the_shared_layers_of_another(tmp_path):
    """The layers that clients kept are those with which the other run began."""
    path = tmp_path / "fedper"
    runner.run(DIGITS.with_keys(algorithm="fedper"), path)
    begun = tree.state_dict(assemble(DIGITS).model)
    task = assemble(DIGITS.with_keys(algorithm="fedrep", clients=2, init=str(path)))
    wanted, state = global_model(path), tree.state_dict(task.model)
    for name in state:
        assert torch.equal(state[name], wanted[name])
        assert torch.equal(state[name], begun[name]) == name.startswith("fc3."), name
    assert len([note for note in task.said if note.startswith("fc3 start")]) == 1


def test_a_classifier_for_other_classes_stays_fresh_and_that_is_said(trained, threes):
    task = assemble(three_config(threes, trained))
    fresh = tree.state_dict(models.build("mlp", (1, 8, 8), 3, seed=0))
    wanted, state = global_model(trained), tree.state_dict(task.model)
    for name in state:
        assert torch.equal(
            state[name], (fresh if name.startswith("fc3.") else wanted)[name]
        ), name
    assert task.said == (
        f"the classifier 'fc3.linear' starts fresh: {trained} is of 10 classes, the data have 3",
    )
    with pytest.warns(UserWarning, match=r"'fc3\.linear'"):
        runner.run(three_config(threes, trained))


def test_a_model_that_is_one_linear_layer_starts_with_weights_of_a_file(tmp_path):
    """A classifier without a weight of its own has no class to compare."""
    x, notes = torch.ones(2, 4), []
    for classes in (3, 5):
        path = tmp_path / f"{classes}.safetensors"
        save_file(nn.Linear(4, classes).state_dict(), path)
        notes += start(nn.Linear(4, 3), path, x)
    assert notes == [
        f"the classifier starts fresh: {path} is of 5 classes, the data have 3"
    ]
    normed = nn.Sequential(weight_norm(nn.Linear(4, 3, bias=False)))
    save_file(tree.clone(normed.state_dict()), path)
    assert start(normed, path, x) == []
    statistics = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    save_file(tree.clone(statistics.state_dict()), path)
    assert start(statistics, path, x) == [], "a file has no clients with their own"


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrod"])
def test_a_run_stands_on_its_own_copy_of_the_start(
    tmp_path, trained, threes, algorithm
):
    """Resumed after the run that it started from is gone, to the same bits; read back; and verified."""
    first = tmp_path / "first"
    shutil.copytree(trained, first)
    config = three_config(threes, first, algorithm=algorithm)
    with pytest.warns(UserWarning, match="fresh"):
        runner.run(config, tmp_path / "whole")
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", cut)
    (cut / "checkpoints" / "000002.json").unlink()
    shutil.rmtree(first)
    runner.resume(cut)
    whole, again = (
        store.Run(path).manifest(2)["states"] for path in (tmp_path / "whole", cut)
    )
    assert whole == again
    loaded, task = load_models(cut, which="local")
    assert len(loaded) == 2
    stored_start = store.Run(cut).start()
    assert stored_start is not None
    name = "fc2.linear.weight"
    assert torch.equal(stored_start[name], global_model(trained)[name])
    assert any(
        line.startswith("start.safetensors: ") for line in store.Run(cut).verify()
    )
    (cut / store.START).write_bytes(b"x" + (cut / store.START).read_bytes()[1:])
    for reader in (store.Run(cut).verify, lambda: runner.resume(cut)):
        with refuses(r"start\.safetensors.*damaged", CorruptError):
            reader()
    assert store.Run(trained).start() is None
    assert task.config.model.init == str(first)


def test_runs_without_a_global_model_or_a_checkpoint_are_refused(
    tmp_path, trained, threes
):
    amp = DIGITS.with_keys(algorithm="fedamp")
    runner.run(amp, tmp_path / "fedamp")
    (tmp_path / "nothing").mkdir()
    shutil.copytree(trained, tmp_path / "early")
    for checkpoint in (tmp_path / "early" / "checkpoints").iterdir():
        checkpoint.unlink()
    for name, message in (
        ("fedamp", "fedamp"),
        ("nothing", "run.*nothing"),
        ("nowhere", "weights.*nowhere"),
        ("early", "checkpoint"),
    ):
        with refuses(message):
            assemble(three_config(threes, tmp_path / name))


HERE, THERE = ("good", "bad", "slow", "the"), ("the", "cabin", "good")


def run_of(path, model, words):
    """A run on texts whose global model and vocabulary are these."""
    source = path.with_suffix(".jsonl")
    lines = [{"label": k % 2, "text": " ".join(words[k % 2 :])} for k in range(60)]
    source.write_text("\n".join(map(json.dumps, lines)))
    config = RunConfig(
        dataset=str(source),
        partition="iid",
        clients=2,
        rounds=1,
        epochs=0,
        model_options={"width": 4},
        checkpoint_every=1,
    )
    runner.run(config, path, model=model)
    return path


@pytest.mark.filterwarnings("ignore:client:UserWarning")
def test_a_run_of_another_vocabulary_is_refused(tmp_path):
    shape = TokenShape((64,), len(SPECIAL) + len(THERE))
    model = models.build("text_transformer", shape, 2, options={"width": 4})
    path = run_of(tmp_path / "run", model, THERE)
    words = store.Run(path).config["words"]
    assert start(model, path, models.example(shape), words) == []
    with refuses("vocabulary of the data"):
        start(model, path, models.example(shape), HERE)
