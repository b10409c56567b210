"""A monitor in loops of others: the rows of a measurement through time, and one line for what cannot be."""

import sys
from copy import deepcopy
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch import nn

import fedlayers as fl
from tests.conftest import refuses
from tests.made import mlp

CLIENTS = ("north", "south")
ROUNDS = (2, 4)


def trained():
    """Return {round: {client: model}} of a plain loop of four rounds, and the clients' samples."""
    draw = torch.Generator().manual_seed(1)
    data = {
        name: (torch.randn(30, 4, generator=draw), torch.arange(30) % 3)
        for name in CLIENTS
    }
    models, samples = {name: mlp(4, 6, 3) for name in CLIENTS}, {}
    for round in range(1, 5):
        for name, model in models.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            x, y = data[name]
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        samples[round] = deepcopy(models)
    return samples, data


def by_steps(monitor, found):
    for round, models in found.items():
        assert (monitor.step(models, round) is None) == (round not in ROUNDS)


def by_trainer(monitor, found):
    pytest.importorskip("transformers", reason="transformers is not installed")
    each_epoch = {name: monitor.trainer_callback(name) for name in CLIENTS}
    for round, models in found.items():
        state = SimpleNamespace(epoch=float(round))
        for name, callback in each_epoch.items():
            callback.on_epoch_end(None, state, None, model=models[name])
            callback.on_train_end(None, state, None, model=models[name])


def by_lightning(monitor, found):
    pytest.importorskip("lightning", reason="lightning is not installed")
    for round, models in found.items():
        for name in reversed(CLIENTS):  # the order in which clients end does not matter
            at = SimpleNamespace(current_epoch=round - 1)
            monitor.lightning_callback(name).on_train_epoch_end(at, models[name])


def without(package, callback):
    """Return a call of a monitor's callback where a package is not installed."""

    def act(monitor, of):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            callback(monitor, "north")

    return act


def by_replies(monitor, models, round, twice=""):
    """Watch a strategy of Flower that receives these clients' models. Return what it aggregates.

    Replies may have a kind of record twice.
    """
    flwr = pytest.importorskip("flwr.app", reason="flwr is not installed")
    strategy = SimpleNamespace(aggregate_train=lambda round, replies: replies)
    replies = [SimpleNamespace(has_content=lambda: False)]
    for number, model in models.items():
        arrays = flwr.ArrayRecord(model.state_dict())
        metrics = flwr.MetricRecord({"partition-id": float(number), "num-examples": 30})
        content = flwr.RecordDict({"arrays": arrays, "metrics": metrics})
        if twice:
            content["again"] = content[twice]
        replies.append(SimpleNamespace(has_content=lambda: True, content=content))
    return monitor.watch(strategy, mlp(4, 6, 3)).aggregate_train(round, iter(replies))


def by_flower(monitor, found):
    for round, models in found.items():
        late = reversed([*enumerate(models.values())])
        assert len(by_replies(monitor, dict(late), round)) == 3


def test_clients_that_took_no_part_have_no_rows():
    models, data = trained()
    monitor = fl.Monitor(data, "grad_norm")
    monitor.step(models[1], 1)
    monitor.step({"south": models[2]["south"]}, 2)
    seen = monitor.report.frame.groupby("round")["client"].agg(set)
    assert seen.tolist() == [{*CLIENTS}, {"south"}]


def test_rounds_that_can_no_longer_be_measured_are_dropped():
    models, data = trained()
    monitor = fl.Monitor(data, "grad_norm")
    for round in (1, 2, 3):
        monitor.add("north", models[round]["north"], round)
    with pytest.warns(UserWarning, match="round 1 is not measured.*south"):
        monitor.add("south", models[2]["south"], 2)
    assert [*monitor._waiting] == [3]
    monitor.add("south", models[3]["south"], 3)
    assert monitor.report.frame["round"].unique().tolist() == [2, 3]


def test_a_round_that_is_named_is_measured_at_the_end_of_training():
    """Round 0, before all training, is one, too."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    models, data = trained()
    monitor = fl.Monitor(data, "grad_norm")
    for name in CLIENTS:
        callback = monitor.trainer_callback(name, 0)
        for event in (callback.on_epoch_end, callback.on_train_end):
            event(None, SimpleNamespace(epoch=3.0), None, model=models[1][name])
    assert monitor.report.frame["round"].unique().tolist() == [0]


@pytest.mark.parametrize("loop", [by_steps, by_trainer, by_lightning, by_flower])
def test_every_loop_gives_the_rows_of_a_measurement_through_time(loop, tmp_path):
    models, data = trained()
    before = [deepcopy(model.state_dict()) for model in models[2].values()]
    monitor = fl.Monitor(data, every=2, out=tmp_path / "rows.jsonl")
    loop(monitor, models)
    wanted = fl.through_time(models, None, data, rounds=ROUNDS, samples=256)
    pd.testing.assert_frame_equal(monitor.report.frame, wanted.frame)
    stored = fl.Report.read(tmp_path / "rows.jsonl")
    assert stored.frame["value"].equals(wanted.frame["value"])
    for tree, model in zip(before, models[2].values(), strict=True):
        assert all(
            tree[key].equal(tensor) for key, tensor in model.state_dict().items()
        )


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (
            lambda watch, of: watch.step(of(4, 6, 3), 2),
            "round must grow; got 2 after 2",
        ),
        (lambda watch, of: watch.step(of(4, 9, 3), 4), "the same layers in all rounds"),
        (lambda watch, of: watch.step(of(5, 6, 3), 4), "round 4: client 'north'"),
        (lambda watch, of: watch.step([mlp(4, 6, 3)], 4), "models must"),
        (lambda watch, of: watch.add("nord", mlp(4, 6, 3), 4), "north"),
        (
            lambda watch, of: watch.add("north", mlp(4, 6, 3), 2),
            "round must grow; got 2 after 2",
        ),
        (
            lambda watch, of: by_replies(watch, {0: mlp(4, 6, 3)}, 4, "arrays"),
            "one record of arrays and one of metrics.*got 2 and 1",
        ),
        (
            lambda watch, of: by_replies(watch, {0: mlp(4, 6, 3)}, 4, "metrics"),
            "one record of arrays and one of metrics.*got 1 and 2",
        ),
        (without("transformers", fl.Monitor.trainer_callback), "'fedlayers.lora.'"),
        (
            without("lightning.pytorch", fl.Monitor.lightning_callback),
            "lightning must be installed.*Run pip install lightning",
        ),
        (lambda watch, of: by_replies(watch, {7: mlp(4, 6, 3)}, 4), "0 to 1; got 7"),
        (
            lambda watch, of: by_replies(watch, {1: mlp(5, 6, 3)}, 4),
            "south.*same shape",
        ),
        (lambda watch, of: by_replies(watch, {1: nn.Bilinear(1, 1, 1)}, 4), "south"),
        (lambda watch, of: fl.Monitor([1]), "data must be"),
        (lambda watch, of: fl.Monitor({"a": 1}, "grad_nrm"), "unknown metric"),
        (lambda watch, of: fl.Monitor({"a": 1}).layer_map(), "have measured a round"),
    ],
)
def test_what_cannot_be_measured_is_one_line(act, said):
    models, data = trained()
    monitor = fl.Monitor(data, "grad_norm", every=2)
    monitor.step(models[2], 2)
    with refuses(said) as error:
        act(
            monitor,
            lambda *widths: dict.fromkeys(CLIENTS, mlp(*widths)),
        )
    assert "\n" not in str(error.value)


def test_lightning_adds_a_model_after_each_epoch_or_as_one_round(monkeypatch):
    """With as much of lightning as is used."""
    package = SimpleNamespace(Callback=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(pytorch=package))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", package)
    monitor = fl.Monitor({"north": 1})
    added = []
    monkeypatch.setattr(monitor, "add", lambda *given: added.append(given))
    trainer = SimpleNamespace(current_epoch=4)
    monitor.lightning_callback("north").on_train_epoch_end(trainer, "model")
    at_the_end = monitor.lightning_callback("north", round=7)
    assert not hasattr(at_the_end, "on_train_epoch_end")
    at_the_end.on_train_end(trainer, "model")
    assert added == [("north", "model", 5), ("north", "model", 7)]
    with refuses("'nort'"):
        monitor.lightning_callback("nort")
