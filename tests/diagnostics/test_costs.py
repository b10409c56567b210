"""Costs of layers against counts by hand, and what a plan saves."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from diagnostics import plots
from diagnostics.measure import diagnose
from diagnostics.measurement import ClientModel
from fl_core import runner, tree
from fl_core.costs.flops import count_flops
from fl_core.costs.layers import cost_steps, plan_cost, round_costs, step_work
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.plan import LayerPlan
from tests.conftest import CONFIG, TOY, network
from tests.diagnostics.calls import layer_cost
from tests.networks import Wired

N = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),  # 1x6x6 -> 4x4x4
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 5),
        nn.ReLU(),
        nn.Linear(5, N),
    )


X = torch.randn(7, 1, 6, 6)
DATA = (X, torch.zeros(7).long())


def table(
    model: nn.Module, x: Tensor = X, by: str = "block", mode: str = "eval"
) -> dict[str, dict[str, Any]]:
    layers = layers_of(model, x[:2], by=by)
    rows = layer_cost(
        [ClientModel("a", model, (x, torch.zeros(len(x)).long()), 7)], layers, mode=mode
    )
    found: dict[str, dict[str, Any]] = {}
    for r in rows:
        found.setdefault(r["layer"], {})[r["variant"]] = (
            r["value"] if r["status"] == "ok" else r["status"]
        )
    return found


def test_counts_by_hand() -> None:
    found = table(net())
    assert {name: own["parameters"] for name, own in found.items()} == {
        "0": 36 + 4 + 8,
        "4": 325,
        "6": 18,
    }
    # the running mean and variance are sent too; the count of batches is no weight and is not
    assert {name: own["bytes"] for name, own in found.items()} == {
        "0": 48 * 4 + 8 * 4,
        "4": 1300,
        "6": 72,
    }
    forward = {"0": 2 * 16 * 4 * 9, "4": 2 * 64 * 5, "6": 2 * 5 * N}
    assert {name: own["forward_flops"] for name, own in found.items()} == forward
    # a matrix product for the weights and one for the input, which the first layer does not need
    backward = {"0": forward["0"], "4": 2 * forward["4"], "6": 2 * forward["6"]}
    assert {name: own["backward_flops"] for name, own in found.items()} == backward
    # layer 0 keeps its input, the convolution's output and the rectified one; 4 only what it puts out
    assert {name: own["activation_bytes"] for name, own in found.items()} == {
        "0": 4 * (36 + 64 + 64),
        "4": 20,
        "6": 0,
    }


def residual() -> Wired:
    """Work outside every layer's module, a bypass, a fused recurrent layer, a tied weight and a module never called."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.lstm(x)[0]
        h = h + m.attention(h, h, h, need_weights=False)[0]
        h = m.mix(h) + h @ m.mix.weight
        return m.head((h @ h.mT @ h).mean(1))

    parts = {
        "lstm": nn.LSTM(4, 6, batch_first=True),
        "attention": nn.MultiheadAttention(6, 2, batch_first=True),
    }
    return Wired(
        run, **parts, mix=nn.Linear(6, 6), head=nn.Linear(6, N), spare=nn.Linear(9, 9)
    )


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("by", ["block", "module"])
@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_the_layers_sum_to_the_whole(kind: str, by: str, mode: str) -> None:
    model, x = (net(), X) if kind == "plain" else (residual(), torch.randn(4, 5, 4))
    layers = layers_of(model, x[:2], by=by)
    model.train(mode == "train")
    work = step_work(model, x[:2], layers, mode=mode)
    with count_flops(model) as counter:
        out = model(x[:2])
        forward = counter.total
        out.sum().backward()
    assert sum(work.forward_flops.values()) == forward > 0
    assert sum(work.backward_flops.values()) == counter.total - forward > 0
    assert (
        set(work.forward_flops)
        == set(work.backward_flops)
        <= {layer.name for layer in layers if layer.used}
    )


def test_work_belongs_to_the_layer_that_runs_or_ran_last() -> None:
    found = table(residual(), torch.randn(4, 5, 4))
    gates = 2 * 4 * 6 * (4 + 6) * 5
    assert found["lstm"]["forward_flops"] == gates
    assert found["mix"]["forward_flops"] == 2 * (2 * 5 * 6 * 6) + 2 * (2 * 5 * 5 * 6)
    assert found["mix"]["backward_flops"] == 2 * found["mix"]["forward_flops"]
    assert found["head"]["forward_flops"] == 2 * 6 * N
    assert found["spare"]["parameters"] == 90
    assert {
        found["spare"][v]
        for v in ("forward_flops", "backward_flops", "activation_bytes")
    } == {"unused in the forward pass"}


def outer() -> Wired:
    """A module that works with a tensor of its own after a module inside it."""
    return Wired(
        lambda m, x: m.inner(x) @ m.own,
        inner=nn.Linear(4, 6),
        own=nn.Parameter(torch.ones(6, N)),
    )


def test_a_layer_goes_on_after_a_module_inside_it() -> None:
    model = nn.Sequential(outer())
    layers = (
        Layer("inner", ("0.inner.weight", "0.inner.bias")),
        Layer("outer", ("0.own",)),
    )
    work = step_work(model, torch.randn(2, 4), layers)
    assert work.forward_flops == {"inner": 2 * 2 * 4 * 6, "outer": 2 * 2 * 6 * N}
    assert work.backward_flops == {"inner": 2 * 2 * 4 * 6, "outer": 2 * 2 * 2 * 6 * N}


@pytest.mark.parametrize("bias", [False, True])
def test_work_with_a_tied_weight_belongs_to_the_layer_that_has_it_unless_its_module_has_a_tensor(
    bias: bool,
) -> None:
    model = nn.Sequential(
        nn.Linear(6, 4, bias=False), nn.Linear(4, 6), nn.Linear(6, 4, bias=bias)
    )
    model[2].weight = model[0].weight
    found = table(model, torch.randn(7, 6))
    assert {name: own["parameters"] for name, own in found.items()} == {
        "0": 24,
        "1": 30,
    } | ({"2": 4} if bias else {})
    product = 2 * 6 * 4
    forward = (
        {"0": product, "1": product, "2": product}
        if bias
        else {"0": 2 * product, "1": product}
    )
    assert {name: own["forward_flops"] for name, own in found.items()} == forward
    # of the first product there is no gradient of the input
    backward = {name: 2 * value for name, value in forward.items()}
    backward["0"] -= product
    assert {name: own["backward_flops"] for name, own in found.items()} == backward


def test_frozen_layers_cost_as_if_they_trained_and_one_sample_is_enough() -> None:
    model, frozen = net(), net()
    for p in frozen[0].parameters():
        p.requires_grad_(False)
    assert table(frozen) == table(model) == table(model, X[:1])
    assert [p.requires_grad for p in frozen[0].parameters()] == [False, False]
    train = table(model, X[:1], mode="train")
    assert train["0"]["forward_flops"] == table(model)["0"]["forward_flops"]


def test_a_plan_sends_its_body_and_saves_its_head() -> None:
    data = {"a": DATA, "b": DATA}
    report = diagnose(net(), data, "layer_cost", progress=False)
    plan = LayerPlan.prefix(report.layers, 1)
    found = plan_cost(plan, report.frame)
    sent = tree.n_bytes(
        tree.select(tree.state_dict(net()), plan.body_tensors)
    )  # as a run counts what it sends
    every = tree.n_bytes(tree.state_dict(net()))
    assert (found["bytes_up"], found["bytes_down"], found["bytes_all"]) == (
        sent,
        sent,
        every,
    )
    assert found["bytes_saved"] == every - sent
    assert found["saved"] == pytest.approx(1 - sent / every)
    assert (found["layers"], found["layers_shared"]) == (3, 1)
    assert (found["parameters"], found["parameters_shared"]) == (391, 48)
    assert found["training_flops_shared"] == 2304
    assert found["training_flops"] == 2304 + 1920 + 90
    assert plan_cost(LayerPlan.everything(report.layers), report.frame)["saved"] == 0
    by_hand = {name: {"parameters": 1.0, "bytes": 4.0} for name in plan.names}
    assert plan_cost(plan, by_hand)["bytes_saved"] == 8
    assert "training_flops" not in plan_cost(plan, by_hand)


def test_costs_that_do_not_fit_a_plan_are_named() -> None:
    report = diagnose(net(), DATA, ["layer_cost", "weight_magnitude"], progress=False)
    plan = LayerPlan((Layer("other", ("w",)),), ())
    with pytest.raises(UsageError, match="'other'"):
        plan_cost(plan, report.frame)
    with pytest.raises(UsageError, match="layer_cost"):
        plan_cost(plan, report.frame[report.frame["metric"] == "weight_magnitude"])
    with pytest.raises(UsageError, match="bytes"):
        plan_cost(plan, {"other": {"parameters": 1.0}})
    double = report.frame.copy()
    double.loc[len(double)] = {
        **double[double["variant"] == "bytes"].iloc[0].to_dict(),
        "value": 5.0,
    }
    with pytest.raises(UsageError, match=r"two .*'0'"):
        plan_cost(LayerPlan.prefix(report.layers, 1), double)


def tasks(*names: str, **changes: Any) -> dict[str, runner.Task]:
    config = CONFIG.with_keys(rounds=4, **changes)
    return {
        name: runner.assemble(
            config.with_keys(algorithm=name), data=TOY, model=network("plain")
        )
        for name in names
    }


def test_steps_of_several_runs_are_the_costs_of_their_rounds() -> None:
    made = tasks("fedavg", "vanilla", "anti")
    table = cost_steps(made)
    assert list(table["run"].unique()) == list(made)
    assert all(list(part["round"]) == [1, 2, 3, 4] for _, part in table.groupby("run"))
    for name, task in made.items():
        space = task.client_runner().workspace
        costs = round_costs(
            task.algorithm(task.plan),
            space,
            TOY.shape,
            int(task.config.training.batch_size or 1),
        )
        found = table[table["run"] == name][["naive", "flops", "moved"]]
        assert found.to_numpy().tolist() == [list(astuple(cost)) for cost in costs]


def test_costs_of_a_plan_that_is_not_made_yet_are_refused() -> None:
    with pytest.raises(UsageError, match="a plan"):
        cost_steps(tasks("playerfl"))


def test_picture_of_steps_holds_every_round_and_the_sums() -> None:
    mpl.use("Agg")
    table = cost_steps(tasks("fedavg", "vanilla"))
    axes: Any = plots.cost_steps(table)
    for ax, kind in zip(axes, ("naive", "flops", "moved"), strict=True):
        for run, drawn in zip(("fedavg", "vanilla"), ax.patches, strict=True):
            own = table[table["run"] == run]
            np.testing.assert_array_equal(drawn.get_data().values, own[kind])
            np.testing.assert_array_equal(
                drawn.get_data().edges, [0.5, 1.5, 2.5, 3.5, 4.5]
            )
        sums = table.groupby("run")[kind].sum()
        shown = [text.get_text() for text in ax.get_legend().get_texts()]
        assert shown == [
            "fedavg  1.00",
            f"vanilla  {sums['vanilla'] / sums['fedavg']:.2f}",
        ]
    plt.close("all")
    for bad, said in (
        (table.drop(columns="flops"), "flops"),
        (table.iloc[:0], "rounds"),
        (pd.concat([table, table]), "round.*two"),
    ):
        with pytest.raises(UsageError, match=said):
            plots.cost_steps(bad)
