"""Clients trained together give what they give one by one, and whatever cannot be stacked is trained one by one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_core import models, tree
from fl_core.algorithms import Message, Round, State
from fl_core.algorithms.averaging import FedAvg
from fl_core.data import ClientData, Split
from fl_core.errors import NonFiniteError
from fl_core.rounds import batched
from fl_core.rounds.batched import BatchedClients, stacks
from fl_core.rounds.clients import ClientRunner, Serial, TrainRequest
from fl_core.run import runner
from fl_core.run.runner import executor
from fl_core.training.phases import Training
from tests.conftest import CONFIG, TOY, client_runner_of, network

TRAININGS = {
    "sgd": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "clipped": {"momentum": 0.9, "max_grad_norm": 0.6},
    "weighted": {"class_weights": "1,2,0.5"},
    "adam": {"optimizer": "adam", "lr": 0.01, "amsgrad": True},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


def fine(data):
    """The same samples in float64."""
    clients = [
        ClientData(
            c.name, *(Split(s.x.double(), s.y) for s in (c.train, c.validation, c.test))
        )
        for c in data.clients
    ]
    return replace(data, clients=tuple(clients))


def sites(algorithm="fedavg", model=None, **changes):
    """One by one and together, in float64, with the algorithm loaded."""
    config = CONFIG.with_keys(epochs=2, algorithm=algorithm, **changes)
    model = model or network("plain")
    list(model.children())[1].unused = nn.Parameter(torch.ones(2))
    task = runner.assemble(config, data=TOY, model=model)
    runs = []
    for kind in (Serial, BatchedClients):
        client_runner = ClientRunner(
            task.model.double(),
            fine(TOY),
            Training.of(task.config.training),
            task.criterion,
            {},
        )
        client_runner.workspace.frozen_outputs = lambda *_: None
        runs.append(kind(client_runner))
        runs[-1].use(task.algorithm(task.plan))
    return runs[0], runs[1], task


def jobs(
    task,
    order=(0, 1, 2, 3),
):
    algorithm, initial = task.algorithm(task.plan), tree.state_dict(task.model)
    rnd = Round(0, "train", order)
    for client in order:
        message = algorithm.server_message(
            State({"model": initial}), client, rnd
        ).clone()
        state = algorithm.client_state(initial, client)
        yield TrainRequest(
            client, rnd, message, state=state, score=("test",), keep=True
        )


def assert_alike(ours, theirs):
    assert ours.client == theirs.client
    for pair, wanted in (
        (ours.models["local"], theirs.models["local"]),
        *(
            (ours.message.trees[k], theirs.message.trees[k])
            for k in theirs.message.trees
        ),
        *((ours.state.trees[k], theirs.state.trees[k]) for k in theirs.state.trees),
    ):
        assert list(pair) == list(wanted)
        torch.testing.assert_close(pair, wanted, rtol=0, atol=1e-10)
    assert ours.work == pytest.approx(
        theirs.work, rel=1e-6
    )  # a batch's loss is a float32 where they are added up
    assert ours.work.keys() == theirs.work.keys()
    assert ours.scores["local"]["test"] == pytest.approx(
        theirs.scores["local"]["test"], abs=1e-9
    )


@pytest.fixture
def alone(monkeypatch):
    """Clients whose phases were trained one by one."""
    seen = []
    original = ClientRunner.phase

    def phase(self, part):
        seen.append(part.ctx.client)
        return original(self, part)

    monkeypatch.setattr(ClientRunner, "phase", phase)
    return seen


@pytest.mark.parametrize("which", TRAININGS)
@pytest.mark.parametrize("batch", [8, 7, 1000])
def test_together_is_one_by_one(which, batch, alone):
    """Clients of 18 to 27 samples: unequal numbers of steps, and short last batches."""
    serial, together, task = sites(batch_size=batch, **TRAININGS[which])
    assert len({len(client.train) for client in TOY.clients}) == 4
    wanted = list(serial.run(jobs(task)))
    assert alone == [0, 1, 2, 3]
    replies = list(together.run(jobs(task)))
    assert alone == [0, 1, 2, 3], "nobody is trained alone"
    for ours, theirs in zip(replies, wanted, strict=True):
        assert_alike(ours, theirs)
        assert tree.distance(theirs.models["local"], tree.state_dict(task.model)) > 0.01


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_stacks_of_any_size_give_results_in_order(limit, monkeypatch):
    monkeypatch.setattr(batched, "TOGETHER", limit)
    serial, together, task = sites()
    order = (3, 1, 2, 0, 1)
    replies = list(together.run(jobs(task, order)))
    assert [result.client for result in replies] == list(order)
    for ours, theirs in zip(replies, serial.run(jobs(task, order)), strict=True):
        assert_alike(ours, theirs)


class Own(FedAvg):
    """FedAvg with an objective of its own."""

    name = "own"

    def loss(self, params, batch, ctx):
        return super().loss(params, batch, ctx) * 2


def test_an_objective_of_its_own_is_not_stacked(alone):
    serial, together, task = sites()
    for runs in (serial, together):
        runs.use(Own(task.task_info))
    replies = list(together.run(jobs(task)))
    assert alone == [0, 1, 2, 3]
    for ours, theirs in zip(replies, serial.run(jobs(task)), strict=True):
        assert tree.digest(ours.models["local"]) == tree.digest(theirs.models["local"])


def test_a_client_that_is_not_finite_is_named_after_the_results_before_it(
    alone,
):
    _, together, task = sites()
    broken = {
        name: torch.full_like(value, torch.nan)
        for name, value in tree.state_dict(task.model).items()
    }
    requests = list(jobs(task))
    requests[2] = replace(requests[2], message=Message({"model": broken}))
    results = together.run(requests)
    assert [next(results).client for _ in range(2)] == [0, 1]
    with pytest.raises(
        NonFiniteError,
        match=r"fedavg, round 1, client 'c', phase 'train': .*'fc\d'",
    ):
        next(results)
    assert alone == [2], "it alone is trained again"


LINEAR = nn.Linear(4, 4)
MODELS = {
    "heart": (models.build("heart_mlp", (10,), 5), True),
    "no bias": (nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), LINEAR), True),
    "large": (nn.Sequential(nn.Linear(400, 400)), False),
    "another activation": (nn.Sequential(LINEAR, nn.Tanh()), False),
    "no chain": (LINEAR, False),
    "a layer twice": (nn.Sequential(LINEAR, nn.ReLU(), LINEAR), False),
    "buffers": (network("norm"), False),
    "dropout": (network("drop"), False),
    "unused": (network("unused"), False),
    "another way to flatten": (nn.Sequential(nn.Flatten(2), LINEAR), False),
}


@pytest.mark.parametrize("which", MODELS)
def test_which_models_are_stacked(which):
    model, wanted = MODELS[which]
    assert stacks(model, "cpu") is wanted
    assert stacks(model, "cpu", "on") is (wanted or which == "large")
    assert not stacks(model, "cpu", "off")
    assert not stacks(model, "cuda")


def test_the_choice_is_recorded_and_obeyed():
    for wanted, kind, recorded in (
        ("auto", BatchedClients, "on"),
        ("off", Serial, "off"),
    ):
        task = runner.assemble(
            CONFIG.with_keys(stack=wanted), data=TOY, model=network("plain")
        )
        assert task.config.execution.stack == recorded
        chosen = executor(client_runner_of(task), 0, recorded == "on")
        assert type(chosen) is kind
