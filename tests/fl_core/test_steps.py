"""What a phase may say about its steps: rates of its own, groups, a limit, a step of the algorithm's making."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_core import models, seeds, tree
from fl_core.algorithms.averaging import FedAvg
from fl_core.algorithms.base import Round, State, TaskInfo
from fl_core.client_runner import ClientReply, ClientRunner, TrainRequest
from fl_core.layers import layers_of
from fl_core.training.loop import Batch, Steps
from fl_core.training.losses import build
from fl_core.training.phases import Context, Group, Phase, Training
from tests.conftest import TOY, network

HARD = Training(2, 8, 0.05, momentum=0.9, weight_decay=0.05)
LAYERS = layers_of(network("plain"), models.example(TOY.shape))
ALL = frozenset(name for layer in LAYERS for name in layer.tensors)
HEAD = frozenset(LAYERS[-1].tensors)


class Stepping(FedAvg):
    """FedAvg in whatever phases a test gives it."""

    def __init__(self, *phases: Phase, task_info: TaskInfo | None = None) -> None:
        super().__init__(task_info or TaskInfo(LAYERS, frozenset(), TOY.weights, 2, 0))
        self.given = phases

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return self.given


def trained(
    *phases: Phase,
    training: Training = HARD,
    client: int = 1,
) -> ClientReply:
    algorithm = Stepping(*phases)
    client_runner = ClientRunner(
        network("plain"), TOY, training, build("cross_entropy"), LAYERS, {}
    )
    client_runner.algorithm = algorithm
    initial = tree.state_dict(network("plain"))
    rnd = Round(0, "train", (client,))
    message = algorithm.server_message(State({"model": initial}), client, rnd)
    return client_runner.run(
        TrainRequest(
            client,
            rnd,
            message,
            state=algorithm.client_state(initial, client),
            keep=True,
        )
    )


def model(*phases: Phase, **options: Any) -> tree.Tree:
    return trained(*phases, **options).models["local"]


def same(one: tree.Tree, other: tree.Tree) -> bool:
    return tree.digest(one) == tree.digest(other)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "own",
    [
        {"lr": 0.01},
        {"weight_decay": 0.2},
        {"momentum": 0.3},
        {"momentum": 0.0, "lr": 0.2},
    ],
)
def test_rates_of_a_phase_are_in_place_of_the_runs(
    own: dict[str, Any], optimizer: str
) -> None:
    base = replace(
        HARD, optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0
    )
    found = model(Phase("train", ALL, 2, **own), training=base)
    asked = {k: v for k, v in own.items() if optimizer == "sgd" or k != "momentum"}
    assert same(found, model(Phase("train", ALL, 2), training=replace(base, **asked)))
    assert same(found, model(Phase("train", ALL, 2), training=base)) == (not asked)


def test_a_group_trains_at_its_own_rates() -> None:
    """Layers do not meet in a last layer's own gradient: alone at its rate, it moves as in a group."""
    group = Group(HEAD, lr=0.5, momentum=0.1, weight_decay=0.0)
    both = model(Phase("train", ALL, 1, groups=(group,), steps=1))
    rest = model(Phase("train", ALL - HEAD, 1, steps=1))
    alone = model(
        Phase("train", HEAD, 1, steps=1),
        training=replace(HARD, lr=0.5, weight_decay=0.0),
    )
    for name in ALL:
        assert torch.equal(both[name], (alone if name in HEAD else rest)[name])
    plain = model(Phase("train", ALL, 1, steps=1))
    assert not any(torch.equal(both[name], plain[name]) for name in HEAD)


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 7, 99])
def test_a_phase_stops_after_its_steps(steps: int) -> None:
    found = trained(Phase("train", ALL, 2, steps=steps))
    n, per_epoch = (
        len(TOY.clients[1].train),
        -(-len(TOY.clients[1].train) // HARD.batch_size),
    )
    taken = min(steps, 2 * per_epoch)
    assert found.work["train/steps"] == taken
    epochs, rest = divmod(taken, per_epoch)
    assert found.work["train/samples"] == epochs * n + rest * HARD.batch_size
    assert same(found.models["local"], tree.state_dict(network("plain"))) == (
        steps == 0
    )
    whole = trained(Phase("train", ALL, 2))
    assert same(found.models["local"], whole.models["local"]) == (
        steps >= 2 * per_epoch
    )


def test_drawn_batches_are_independent_of_the_phases_and_of_each_other() -> None:
    seen: dict[str, list[Tensor]] = {"phase": [], "a": [], "b": []}

    class Drawing(Stepping):
        def draws(self, steps: Steps, batch: Batch, ctx: Context) -> None:
            seen["phase"].append(batch[0])
            for stream in ("a", "b"):
                x, y = steps.draw(stream)
                assert len(x) == len(y) == HARD.batch_size
                seen[stream].append(x)

    client_runner = ClientRunner(
        network("plain"), TOY, HARD, build("cross_entropy"), LAYERS, {}
    )
    client_runner.algorithm = algorithm = Drawing(Phase("train", ALL, 2, step="draws"))
    initial = tree.state_dict(network("plain"))
    rnd, job_state = Round(3, "train", (1,)), State({"model": {}})
    client_runner.run(
        TrainRequest(
            1,
            rnd,
            algorithm.server_message(State({"model": initial}), 1, rnd),
            state=job_state,
        )
    )
    every = [x for batches in seen.values() for x in batches]
    assert not any(
        torch.equal(every[i], every[j]) for i in range(len(every)) for j in range(i)
    )
    x = TOY.clients[1].train.x
    draws = seeds.torch_generator(0, "batches", 3, 1, "main/a")
    for batch in seen["a"]:
        assert torch.equal(
            batch, x[torch.randperm(len(x), generator=draws)[: HARD.batch_size]]
        )
