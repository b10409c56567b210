"""FedPFT at the limit where nothing of it is left but the transformation: FedAvg on the same model."""

import pytest
import torch

from fl_core.algorithms import base
from fl_core.algorithms.averaging import FedAvg
from fl_core.algorithms.fedpft import FedPFT
from fl_core.training.phases import Group, Phase
from tests.conftest import play

BARE = {"alternate": False, "prompts": 0, "contrast": False}
TRAININGS = [
    {"momentum": 0.9, "weight_decay": 0.01},
    {"optimizer": "adamw", "lr": 0.01},
]


class OnTheModule(FedAvg):
    """FedAvg with a rate of its own for one part of the model."""

    name = "on_the_module"
    added_modules = FedPFT.added_modules
    Config = FedPFT.Config
    wrap_model = FedPFT.wrap_model

    def phases(self, rnd, client):
        every = self.task_info.tensors
        part = frozenset(name for name in every if name.startswith("transform."))
        group = Group(part, lr=self.config.transform_lr)
        return (Phase("train", every, self.task_info.epochs, groups=(group,)),)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    base.registry()
    monkeypatch.setitem(base.ALGORITHMS._members, OnTheModule.name, OnTheModule)


@pytest.mark.parametrize(
    ("kind", "training"), [*zip(("plain", "norm"), TRAININGS, strict=True)]
)
def test_without_prompts_and_tasks_it_is_fedavg_on_the_module(kind, training):
    options = BARE | {"transform_lr": 0.02}
    ours, theirs = (
        play(algorithm=name, model=kind, options=options, epochs=2, **training)
        for name in ("fedpft", "on_the_module")
    )
    assert len(set(ours.server())) == 3
    for mine, yours in zip(ours.checkpoints, theirs.checkpoints, strict=True):
        trees = mine.server.trees["model"], yours.server.trees["model"]
        torch.testing.assert_close(*trees, rtol=1e-5, atol=1e-6)
