"""FedPFT at the limit where nothing of it is left but the transformation: FedAvg on the same model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import Round, State, TaskInfo, Update, base, find
from fl_core.algorithms.averaging import FedAvg
from fl_core.algorithms.contract import make_config
from fl_core.algorithms.fedpft import FedPFT
from fl_core.client_runner import ClientRunner, TrainRequest
from fl_core.clients import Serial
from fl_core.layer_mapping import BaseModel, ExtendedModel
from fl_core.layers import layers_of
from fl_core.training.losses import build
from fl_core.training.phases import Group, Phase, Training
from tests.conftest import TOY, network
from tests.identities.test_references import double

BARE: dict[str, Any] = {
    "alternate": False,
    "prompts": 0,
    "contrast": False,
    "transform_lr": 0.02,
}
DATA = double(TOY)
TRAININGS = [
    Training(2, 8, 0.05),
    Training(2, 8, 0.05, momentum=0.9, weight_decay=0.01),
    Training(2, 8, 0.01, "adamw"),
]


class OnTheModule(FedAvg):
    """FedAvg with a rate of its own for one part of the model."""

    name = "on_the_module"
    added_modules = FedPFT.added_modules

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        part = frozenset(
            name for name in self.task_info.tensors if name.startswith("transform.")
        )
        every = self.task_info.tensors
        return (
            Phase(
                "train",
                every,
                self.task_info.epochs,
                groups=(Group(part, lr=BARE["transform_lr"]),),
            ),
        )


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    base.registry()
    monkeypatch.setitem(base.ALGORITHMS._members, OnTheModule.name, OnTheModule)


def servers(
    algorithm: str, options: dict[str, Any], kind: str, training: Training
) -> list[tree.Tree]:
    """The server's model after each of three rounds with all clients, in float64."""
    plain, x = network(kind), models.example(TOY.shape)
    before, old = BaseModel(plain), layers_of(plain, x)
    chosen = find("fedpft")
    model = chosen.wrap_model(
        plain,
        make_config(chosen, BARE | options),
        shape=TOY.shape,
        n_classes=TOY.n_classes,
        seed=3,
    )
    built = ExtendedModel(before, model, FedPFT.added_modules, x, "block")
    model = model.double()
    problem = TaskInfo(
        built.layers(old), built.personal, DATA.weights, training.epochs, 3
    )
    made = find(algorithm)(
        problem, None, BARE | options if algorithm == "fedpft" else None
    )
    serial = Serial(
        ClientRunner(model, DATA, training, build("cross_entropy"), problem.layers, {})
    )
    serial.use(made)
    start = tree.state_dict(model)
    server = made.server_state(tree.clone(start))
    states: list[State] = [
        made.client_state(tree.clone(start), c) for c in range(len(DATA.clients))
    ]
    found = []
    for index in range(3):
        rnd = Round(index, "train", tuple(range(len(states))))
        updates = []
        jobs = [
            TrainRequest(
                c, rnd, made.server_message(server, c, rnd).clone(), state=states[c]
            )
            for c in rnd.sampled
        ]
        for result in serial.run(jobs):
            states[result.client] = result.state
            updates.append(
                Update(result.client, DATA.weights[result.client], result.message)
            )
        made.aggregate(server, updates, rnd)
        found.append(tree.clone(server.trees["model"]))
    assert tree.distance(found[-1], start) > 1e-2
    return found


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        pytest.param(kind, each, marks=[pytest.mark.slow] * (k != at), id=f"{kind} {k}")
        for kind, at in (("plain", 1), ("norm", 2))
        for k, each in enumerate(TRAININGS)
    ],
)
def test_without_prompts_and_tasks_it_is_fedavg_on_the_module(
    kind: str, training: Training
) -> None:
    ours, theirs = (
        servers(name, {}, kind, training) for name in ("fedpft", "on_the_module")
    )
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.keys() == yours.keys()
        assert all(
            t.dtype == torch.float64 for t in mine.values() if t.is_floating_point()
        )
        for name in mine:
            torch.testing.assert_close(mine[name], yours[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "away", [{"prompts": 2}, {"transform_lr": 0.03}, {"alternate": True}], ids=str
)
def test_away_from_the_limit_it_is_not(away: dict[str, Any]) -> None:
    ours, theirs = (
        servers("fedpft", away, "plain", TRAININGS[0]),
        servers("on_the_module", {}, "plain", TRAININGS[0]),
    )
    gap = sum(
        float((ours[-1][name] - theirs[-1][name]).abs().sum()) for name in theirs[-1]
    )
    assert gap > 1e-4
