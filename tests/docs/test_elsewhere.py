"""The blocks of the page on plans elsewhere: each ends with the models of fl.run."""

import importlib.util
import re
from copy import deepcopy
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import fedlayers as fl
from tests.conftest import refuses

PAGE = Path(__file__).parents[2] / "docs" / "elsewhere.md"
WAYS = {"plain": "torch", "flower": "flwr", "nvflare": "nvflare", "fl4health": "fl4health"}  # fmt: skip
RATE, ROUNDS = 0.1, 2
CONFIG = fl.RunConfig(
    dataset="heart",
    algorithm="fedper",
    loss="cross_entropy",
    optimizer="sgd",
    rounds=ROUNDS,
    lr=RATE,
    batch_size=1000,  # more than a client has: one step an epoch
    patience=0,
)


def block(name):
    """Return a function of the page."""
    for text in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        if f"def {name}(" in text:
            exec(text, names := {})
            return names[name]
    raise LookupError(name)


def step(model, client):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(client.train.x), client.train.y).backward()
    optimizer.step()


@pytest.fixture(scope="module")
def of_a_run():
    task = fl.assemble(CONFIG)
    plan = fl.LayerPlan.all_but_last(task.layers)
    return task, plan, fl.run(CONFIG, plan=plan).models


@pytest.mark.parametrize("way", WAYS)
def test_two_rounds_end_with_the_models_of_a_run(way, of_a_run):
    if not importlib.util.find_spec(WAYS[way]):
        pytest.skip(f"{way} is not installed")
    task, plan, wanted = of_a_run
    models = {client.name: deepcopy(task.model) for client in task.data.clients}
    sizes = {client.name: len(client.train) for client in task.data.clients}
    exchange = block(way)
    for _ in range(ROUNDS):
        for client in task.data.clients:
            step(models[client.name], client)
        exchange(models, sizes, plan)
    for name, model in models.items():
        trees = model.state_dict(), wanted[name].state_dict()
        torch.testing.assert_close(*trees, atol=1e-6, rtol=0)


def test_adapters_are_on_the_layers_of_the_plan(of_a_run):
    pytest.importorskip("peft", reason="peft is not installed")
    task = fl.assemble(fl.RunConfig(dataset="heart", adapt="lora:r=2"))
    plan = fl.LayerPlan.all_but_last(task.layers)
    model = block("adapted")(deepcopy(of_a_run[0].model), plan)
    trained = {
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    prefix, suffix = "base_model.model.", ".modules_to_save.default"
    assert {name.removeprefix(prefix).replace(suffix, "") for name in trained} == {
        name for layer in plan.layers for name in layer.tensors
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loop_is_measured_every_second_round(of_a_run):
    task, models = of_a_run[0], deepcopy(of_a_run[2])
    clients = task.data.clients

    def train(models):
        for client in clients:
            step(models[client.name], client)

    data = {client.name: (client.train.x, client.train.y) for client in clients}
    monitor = block("watched")(deepcopy(models), data, 4, train)
    assert set(monitor.report.frame["round"]) == {2, 4}
    assert monitor.layer_map()
    users = [Mock(id=name, model=models[name]) for name in data]
    server = Mock(clients=users, send_models=lambda: train(models))
    report = block("pfllib")(server, data, 4).report
    assert report.frame["value"].equals(monitor.report.frame["value"])


def test_frozen_tensors_travel_in_no_form():
    layers = (
        fl.Layer("a", ("a.weight",), frozen=("a.weight",)),
        fl.Layer("b", ("b.weight", "b.bias")),
        fl.Layer("c", ("c.weight",)),
    )
    plan = fl.LayerPlan(layers, ("a", "b"))
    sent = ["b.weight", "b.bias"]
    assert plan.to("flower") == plan.to("fl4health") == sent
    assert plan.to("names")["shared"] == {"tensors": sent, "modules": ["a", "b"]}
    excluded = plan.to("nvflare")["args"]["exclude_vars"]
    assert excluded == plan.to("names")["local"]["tensors"] == ["a.weight", "c.weight"]
    for form, message in (
        ("peft", "with adapters; got none"),
        ("flowr", "did you mean"),
    ):
        with refuses(message):
            plan.to(form)
