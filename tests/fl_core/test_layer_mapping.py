"""Building into a model: where its tensors, its layers and a plan made for the plain model go."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from fl_core import models, seeds, tree
from fl_core.algorithms import base
from fl_core.algorithms.fedper import FedPer
from fl_core.layers import layers_of
from fl_core.plan import Evidence, LayerPlan
from fl_core.run import runner
from fl_core.seeds import seed_of, torch_seeded
from tests.conftest import CONFIG, TOY, network, play, refuses

X = models.example(TOY.shape)


class Gated(nn.Module):
    """A model behind a gate on its inputs, with a spare layer that is never used."""

    def __init__(self, inner, shape, seed):
        super().__init__()
        self.inner, self.spare = inner, nn.Linear(2, 2)
        self.gate = nn.Parameter(
            torch.rand(shape, generator=seeds.torch_generator(seed, "gate"))
        )

    def forward(self, x):
        return self.inner(x * self.gate)


class Adapted(FedPer):
    """FedPer with low-rank adapters inside two layers, and with a personal gate around the model."""

    name = "adapted"
    added_modules: ClassVar = {"gate": "personal", "spare": "shared"}

    @dataclass(frozen=True)
    class Config:
        rank: int = 2
        gate: bool = True

    @classmethod
    def wrap_model(
        cls,
        model,
        config,
        *,
        shape,
        n_classes,
        seed,
    ):
        from peft import LoraConfig, inject_adapter_in_model

        with torch_seeded(seed_of(seed, "adapters")):
            model = inject_adapter_in_model(
                LoraConfig(r=config.rank, target_modules=["fc1", "fc2"]), model
            )
            return Gated(model, shape, seed) if config.gate else model


@pytest.fixture(autouse=True)
def registered():
    base.registry()
    base.ALGORITHMS._members["adapted"] = Adapted
    yield
    del base.ALGORITHMS._members["adapted"]


def task(plan=None, kind="norm", **changes):
    config = CONFIG.with_keys(algorithm="adapted", **changes)
    return runner.assemble(config, data=TOY, model=network(kind), plan=plan)


def plain_layers(kind="norm", by="block"):
    return layers_of(network(kind), X, by=by)


@pytest.mark.parametrize("by", ["block", "module"])
@pytest.mark.parametrize("gate", [True, False])
def test_old_tensors_stay_in_their_layers_and_adapters_join_them(by, gate):
    wrapped_task = task(layer_granularity=by, options={"gate": gate})
    old = plain_layers(by=by)
    conv, *rest = [layer.name for layer in old]
    assert [layer.name for layer in wrapped_task.layers] == [
        conv,
        *(["gate"] * gate),
        *rest,
        *(["spare"] * gate),
    ]
    assert {
        name for layer in wrapped_task.layers for name in layer.tensors
    } == tree.named_tensors(wrapped_task.model).keys()
    places = {layer.name: layer for layer in wrapped_task.layers}
    prefix = "inner." if gate else ""
    wrapped = {f"{fc}.weight": f"{fc}.base_layer.weight" for fc in ("fc1", "fc2")} | {
        "fc2.bias": "fc2.base_layer.bias"
    }
    for layer in old:
        now = places[layer.name]
        tensors = [prefix + wrapped.get(name, name) for name in layer.tensors]
        inside = [f for f in ("fc1", "fc2") if f"{f}.weight" in layer.tensors]
        new = [
            f"{prefix}{fc}.lora_{half}.default.weight" for fc in inside for half in "AB"
        ]
        assert set(now.tensors) == {*tensors, *new}
        assert now.output == prefix + layer.output
        assert now.output in dict(wrapped_task.model.named_modules())
        assert now.used
    if gate:
        assert places["gate"].parameters == ("gate",)
        assert not places["spare"].used
        assert wrapped_task.task_info.never_sent - wrapped_task.task_info.frozen == {
            "gate"
        }


@pytest.mark.parametrize("by", ["block", "module"])
def test_a_plan_for_the_plain_model_is_carried_over(by):
    old = plain_layers(by=by)
    values = tuple(float(k) for k in range(len(old)))
    plain_plan = LayerPlan.prefix(
        old, 1, Evidence(metric="m", values=values, clients={"a": values})
    )
    carried = task(plain_plan).plan
    assert carried is not None
    assert carried.shared == ("conv", "spare")
    assert {"inner.conv.weight", "spare.weight", "spare.bias"} <= carried.body_tensors
    assert {"gate", "inner.fc1.lora_A.default.weight"} <= carried.head_tensors
    value_of = dict(zip(carried.names, carried.why.values, strict=True))
    assert value_of == {
        **dict(zip(plain_plan.names, values, strict=True)),
        "gate": None,
        "spare": None,
    }
    assert carried.why.clients["a"] == carried.why.values
    assert task(carried).plan == carried, (
        "a plan for the built model is obeyed as it is"
    )
    with refuses(r"fc1\.bias.*model: bn1"):
        task(LayerPlan.prefix(plain_layers("plain"), 1))


def test_personal_additions_stay_and_the_rest_travels():
    played = play(algorithm="adapted", model="norm", rounds=2)
    chosen = played.engine.algorithm
    frozen = {
        name for name, p in played.task.model.named_parameters() if not p.requires_grad
    }
    assert frozen, "peft freezes what it adapts"
    gates = [
        state.trees["model"]["gate"]
        for state in played.checkpoints[-1].clients.values()
    ]
    assert not any(torch.equal(gates[0], other) for other in gates[1:])
    assert "gate" not in chosen.shared(base.Round(0), 0)
    server, start = (
        played.checkpoints[-1].server.trees["model"],
        tree.state_dict(task().model),
    )
    assert torch.equal(server["gate"], start["gate"])
    assert not torch.equal(
        server["inner.fc1.lora_B.default.weight"],
        start["inner.fc1.lora_B.default.weight"],
    )
    assert torch.equal(
        server["inner.fc1.base_layer.weight"], start["inner.fc1.base_layer.weight"]
    )
