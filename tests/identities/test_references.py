"""One round of federated training against the same arithmetic written plainly, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from fl_core import models, seeds, tree
from fl_core.algorithms import Round, State, TaskInfo, Update, find
from fl_core.client_runner import ClientRunner, TrainRequest
from fl_core.clients import Serial
from fl_core.data import ClientData, FederatedData, Split
from fl_core.layers import layers_of
from fl_core.plan import LayerPlan
from fl_core.training.losses import build
from fl_core.training.phases import Training
from tests.conftest import TOY, network

SEED, BATCH, EPOCHS, LR = 3, 8, 2, 0.05
Tree = dict[str, Tensor]
Pull = Callable[[Tree, Tree], Tensor]


def double(data: FederatedData) -> FederatedData:
    def split(old: Split) -> Split:
        return Split(old.x.double(), old.y)

    clients = tuple(
        ClientData(c.name, split(c.train), split(c.validation), split(c.test))
        for c in data.clients
    )
    return replace(data, clients=clients)


DATA = double(TOY)


def one_round(
    algorithm: str,
    training: Training,
    plan_cut: int | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[State, list[State]]:
    """The server and the clients after a round of the real thing, in float64."""
    model = network("plain").double()
    layers = layers_of(model, models.example(TOY.shape).double())
    problem = TaskInfo(layers, frozenset(), DATA.weights, training.epochs, SEED)
    plan = None if plan_cut is None else LayerPlan.prefix(layers, plan_cut)
    chosen = find(algorithm)(problem, plan, options)
    serial = Serial(
        ClientRunner(model, DATA, training, build("cross_entropy"), layers, {})
    )
    serial.use(chosen)
    initial = tree.state_dict(model)
    server = State({"model": tree.clone(initial)})
    clients = [
        chosen.client_state(tree.clone(initial), c) for c in range(len(DATA.clients))
    ]
    rnd = Round(0, "train", tuple(range(len(clients))))
    jobs = (
        TrainRequest(c, rnd, chosen.server_message(server, c, rnd), state=clients[c])
        for c in rnd.sampled
    )
    updates = []
    for result in serial.run(jobs):
        clients[result.client] = result.state
        updates.append(
            Update(result.client, DATA.weights[result.client], result.message)
        )
    chosen.aggregate(server, updates, rnd)
    return server, clients


def plain_training(
    client: int,
    start: Tree,
    *,
    momentum: float = 0.0,
    decay: float = 0.0,
    moving: set[str] | None = None,
    stream: str = "main",
    pull: Pull | None = None,
) -> Tree:
    """SGD as in the textbooks, with gradients by autograd on an ordinary function of the weights."""
    weights = {name: value.clone() for name, value in start.items()}
    names = sorted(weights if moving is None else moving)
    speed = {name: torch.zeros_like(weights[name]) for name in names}
    x, y = DATA.clients[client].train.x, DATA.clients[client].train.y
    draws = seeds.torch_generator(SEED, "batches", 0, client, stream)
    for _ in range(EPOCHS):
        order = torch.randperm(len(y), generator=draws)
        for chosen in order.split(BATCH):
            leaves = {
                n: v.clone().requires_grad_(n in names) for n, v in weights.items()
            }
            hidden = x[chosen].flatten(1)
            for fc in ("fc1", "fc2", "fc3"):
                hidden = hidden @ leaves[f"{fc}.weight"].T + leaves[f"{fc}.bias"]
                hidden = hidden if fc == "fc3" else hidden.clamp(min=0)
            loss = -hidden.log_softmax(1)[torch.arange(len(chosen)), y[chosen]].mean()
            if pull is not None:
                loss = loss + pull(leaves, start)
            grads = torch.autograd.grad(loss, [leaves[n] for n in names])
            for name, grad in zip(names, grads, strict=True):
                speed[name] = momentum * speed[name] + grad + decay * weights[name]
                weights[name] = weights[name] - LR * speed[name]
    return weights


def average(trees: list[Tree]) -> Tree:
    weights = np.array(DATA.weights, dtype=float)
    return {
        name: torch.from_numpy(
            np.average([t[name].numpy() for t in trees], axis=0, weights=weights)
        )
        for name in trees[0]
    }


def check_close(found: Tree, wanted: Tree) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-12)


def initial() -> Tree:
    return tree.state_dict(network("plain").double())


def moved(found: Tree) -> bool:
    return all(not torch.equal(value, found[name]) for name, value in initial().items())


def squared(leaves: Tree, start: Tree) -> Tensor:
    return torch.stack(
        [((value - start[name]) ** 2).sum() for name, value in leaves.items()]
    ).sum()


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1)])
def test_fedavg(momentum: float, decay: float) -> None:
    training = Training(EPOCHS, BATCH, LR, momentum=momentum, weight_decay=decay)
    server, _ = one_round("fedavg", training)
    trained = [
        plain_training(c, initial(), momentum=momentum, decay=decay)
        for c in range(len(DATA.clients))
    ]
    check_close(server.trees["model"], average(trained))
    assert moved(server.trees["model"])


@pytest.mark.parametrize("mu", [0.01, 1.0])
def test_fedprox(mu: float) -> None:
    server, _ = one_round("fedprox", Training(EPOCHS, BATCH, LR), options={"mu": mu})
    trained = [
        plain_training(
            c, initial(), pull=lambda now, start: mu / 2 * squared(now, start)
        )
        for c in range(len(DATA.clients))
    ]
    check_close(server.trees["model"], average(trained))


def test_ditto() -> None:
    server, clients = one_round(
        "ditto", Training(EPOCHS, BATCH, LR), options={"lam": 0.8}
    )
    check_close(
        server.trees["model"],
        average([plain_training(c, initial()) for c in range(len(clients))]),
    )
    for c, state in enumerate(clients):
        wanted = plain_training(
            c, initial(), pull=lambda now, start: 0.8 / 2 * squared(now, start)
        )
        check_close(state.trees["personal"], wanted)


def test_fedper() -> None:
    server, clients = one_round("fedper", Training(EPOCHS, BATCH, LR), plan_cut=2)
    trained = [plain_training(c, initial()) for c in range(len(clients))]
    mean = average(trained)
    head = {"fc3.weight", "fc3.bias"}
    check_close(
        server.trees["model"], {n: (initial() if n in head else mean)[n] for n in mean}
    )
    for own, state in zip(trained, clients, strict=True):
        check_close(state.trees["model"], {n: own[n] for n in head})


def test_fedrep() -> None:
    options = {"head_epochs": EPOCHS}
    server, clients = one_round(
        "fedrep",
        Training(2 * EPOCHS, BATCH, LR, momentum=0.9),
        plan_cut=2,
        options=options,
    )
    head = {"fc3.weight", "fc3.bias"}
    trained = []
    for c, state in enumerate(clients):
        first = plain_training(c, initial(), momentum=0.9, moving=head, stream="head")
        trained.append(plain_training(c, first, momentum=0.9, moving=set(first) - head))
        check_close(state.trees["model"], {n: first[n] for n in head})
    mean = average(trained)
    check_close(
        server.trees["model"], {n: (initial() if n in head else mean)[n] for n in mean}
    )


def test_fedbabu() -> None:
    server, _ = one_round(
        "fedbabu", Training(EPOCHS, BATCH, LR, weight_decay=0.1), plan_cut=1
    )
    body = {"fc1.weight", "fc1.bias"}
    mean = average(
        [
            plain_training(c, initial(), decay=0.1, moving=body)
            for c in range(len(DATA.clients))
        ]
    )
    check_close(
        server.trees["model"], {n: (mean if n in body else initial())[n] for n in mean}
    )


@given(
    st.integers(1, 20).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(1, 10_000), min_size=n, max_size=n),
            st.integers(0, 2**31),
            st.just(n),
        )
    )
)
def test_the_weighted_mean_is_numpys(drawn: tuple[list[int], int, int]) -> None:
    weights, seed, n = drawn
    values = np.random.default_rng(seed).standard_normal((n, 3, 2)).astype(np.float32)
    counts = torch.arange(n)
    trees = [
        {"w": torch.from_numpy(v), "count": counts[k]} for k, v in enumerate(values)
    ]
    found = tree.mean(trees, weights)
    wanted = np.average(values.astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(found["w"].numpy(), wanted, rtol=2e-7, atol=1e-7)
    assert found["w"].dtype == torch.float32
    assert found["count"] == n - 1, "integers are not averaged: the largest stands"


def test_the_mean_of_one_tree_is_that_tree_bit_for_bit() -> None:
    one = tree.state_dict(nn.Linear(7, 5))
    assert tree.digest(tree.mean([one], [12_345])) == tree.digest(one)
