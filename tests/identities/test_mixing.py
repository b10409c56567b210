"""Mixtures at the limits of their weights: alone, and with those of FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import Round, State, TaskInfo, Update, find
from fl_core.client_runner import ClientRunner, TrainRequest
from fl_core.clients import Serial
from fl_core.layers import layers_of
from fl_core.training.losses import build
from fl_core.training.phases import Training
from fl_core.tree import Tree
from tests.conftest import TOY, network
from tests.identities.test_limits import Setting, local, run, settings
from tests.identities.test_references import DATA, check_close, initial, plain_training

SGD: dict[str, Any] = {"epochs": 2, "batch_size": 8, "lr": 0.05}


def rounds(
    algorithm: str,
    training: Training,
    options: dict[str, Any] | None = None,
    *,
    kind: str = "plain",
    count: int = 3,
) -> list[dict[str, Any]]:
    """The server and every client's model after each round with all clients, in float64, with ``bn=local``."""
    model, data = network(kind).double(), DATA
    layers = layers_of(model, models.example(TOY.shape).double())
    buffers = frozenset(name for layer in layers for name in layer.buffers)
    chosen = find(algorithm)(
        TaskInfo(layers, buffers, data.weights, training.epochs, 3), None, options
    )
    serial = Serial(
        ClientRunner(model, data, training, build("cross_entropy"), layers, {})
    )
    serial.use(chosen)
    start = tree.state_dict(model)
    server, states = (
        chosen.server_state(tree.clone(start)),
        [chosen.client_state(tree.clone(start), c) for c in range(len(data.clients))],
    )
    after = []
    for index in range(count):
        rnd = Round(index, "train", tuple(range(len(states))))
        jobs = [
            TrainRequest(
                c, rnd, chosen.server_message(server, c, rnd).clone(), state=states[c]
            )
            for c in rnd.sampled
        ]
        updates = []
        for result in serial.run(jobs):
            states[result.client] = result.state
            updates.append(
                Update(result.client, data.weights[result.client], result.message)
            )
        chosen.aggregate(server, updates, rnd)
        which = chosen.evaluates
        found = [
            tree.clone(chosen.models(server, state, Round(index + 1))[which])
            for state in states
        ]
        after.append({"server": tree.clone(server.trees["model"]), "models": found})
    return after


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for mine, yours in zip(one["models"], other["models"], strict=True):
            assert mine.keys() == yours.keys()
            for name in mine:
                assert mine[name].dtype == (
                    torch.float64 if mine[name].is_floating_point() else torch.int64
                )
                torch.testing.assert_close(mine[name], yours[name], rtol=0, atol=1e-10)


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "pfedla, itself": ("pfedla", {"weights": "self"}),
    "heurpfedla, itself": ("heurpfedla", {"weights": "self", "k": 2}),
    "fedamp, no pull": ("fedamp", {"lam": 0}),
    "heurfedamp, itself, no pull": ("heurfedamp", {"self_weight": 1, "lam": 0}),
    "heurfedamp, itself, no pull, from the cloud": (
        "heurfedamp",
        {"self_weight": 1, "lam": 0, "start": "cloud"},
    ),
}


@settings
@pytest.mark.parametrize("limit", ALONE)
def test_who_weighs_only_itself_is_alone_bit_for_bit(
    limit: str, setting: Setting
) -> None:
    algorithm, options = ALONE[limit]
    assert (
        run(setting, algorithm, options=options).evaluated()
        == local(setting).evaluated()
    )


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        ("plain", Training(**SGD, momentum=0.9, weight_decay=0.01)),
        ("norm", Training(**SGD)),
        ("norm", Training(2, 8, 0.01, "adamw")),
    ],
    ids=["momentum and decay", "batch norm", "batch norm, adamw"],
)
def test_pfedla_with_the_weights_of_fedavg_is_fedavg(
    kind: str, training: Training
) -> None:
    ours = rounds("pfedla", training, {"weights": "samples"}, kind=kind)
    theirs = rounds("fedavg", training, kind=kind)
    same(ours, theirs)
    away = rounds("pfedla", training, {"weights": "learned"}, kind=kind)
    assert all(
        tree.distance(a, b) > 1e-4
        for a, b in zip(away[-1]["models"], theirs[-1]["models"], strict=True)
    )


@settings
@pytest.mark.parametrize("algorithm", ["fedamp", "heurfedamp"])
@pytest.mark.parametrize("start", ["own", "cloud"])
def test_with_a_pull_a_client_is_not_alone(
    algorithm: str, start: str, setting: Setting
) -> None:
    wanted = local(setting)
    found = run(setting, algorithm, options={"lam": 1, "alpha": 10, "start": start})
    trained: set[str] = set()
    for index, checkpoint in enumerate(found.checkpoints):
        again = trained & set(checkpoint.models["local"])
        trained |= again | set(checkpoint.models["local"])
        for k, name in enumerate(found.engine.names):
            if name in again:
                assert found.evaluated()[index][k] != wanted.evaluated()[index][k]


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_fedamps_pull_is_to_the_clients_own_mixture(name: str) -> None:
    """One round in float64 from known uploads, against the arithmetic written plainly."""
    model = network("plain").double()
    layers = layers_of(model, models.example(TOY.shape).double())
    options = {"lam": 0.7, "alpha": 2.0, "sigma": 50.0, "start": "own"}
    chosen = find(name)(
        TaskInfo(layers, frozenset(), DATA.weights, 2, 3), None, options
    )
    draw = torch.Generator().manual_seed(5)
    uploads = [
        {
            n: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=t.dtype)
            for n, t in initial().items()
        }
        for _ in DATA.clients
    ]
    server = chosen.server_state(initial())
    server.trees |= {f"client/{c}": upload for c, upload in enumerate(uploads)}
    serial = Serial(
        ClientRunner(model, DATA, Training(**SGD), build("cross_entropy"), layers, {})
    )
    serial.use(chosen)
    rnd = Round(0, "train", tuple(range(len(uploads))))
    jobs = [
        TrainRequest(
            c,
            rnd,
            chosen.server_message(server, c, rnd).clone(),
            state=State({"model": uploads[c]}),
        )
        for c in rnd.sampled
    ]
    for result in serial.run(jobs):
        client = result.client
        weights = chosen.weights(server, client, rnd)[0]  # type: ignore[attr-defined]
        cloud = {
            n: sum(w * u[n] for w, u in zip(weights, uploads, strict=True))
            for n in uploads[0]
        }

        def pull(now: Tree, _start: Tree, cloud: Any = cloud) -> torch.Tensor:
            return (
                0.7
                / (2 * 2.0)
                * torch.stack([((now[n] - cloud[n]) ** 2).sum() for n in now]).sum()
            )

        check_close(
            result.message.trees["model"],
            plain_training(client, uploads[client], pull=pull),
        )
