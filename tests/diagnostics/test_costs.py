"""Costs of layers against counts by hand, and what a plan saves."""

import itertools
from collections import OrderedDict
from functools import partial

import pandas as pd
import pytest
import torch
from torch import nn

from diagnostics import plots
from diagnostics.layer_work import step_work
from diagnostics.measure import diagnose
from diagnostics.measurement import ClientModel
from fl_core import rows, tree
from fl_core.layers import Layer, layers_of
from fl_core.plan import LayerPlan
from fl_core.run import runner
from fl_core.run.costs import cost_steps, count_flops, plan_cost
from tests.conftest import CONFIG, TOY, network, refuses
from tests.diagnostics.calls import layer_cost
from tests.made import Wired, cnn

N = 3


net = partial(cnn, 4)  # 1x6x6 -> 4x4x4 -> 5 -> 3
X = torch.randn(7, 1, 6, 6)
DATA = (X, torch.zeros(7).long())


def table(model, x=X, by="block", mode="eval"):
    layers = layers_of(model, x[:2], by=by)
    rows = layer_cost(
        [ClientModel("a", model, (x, torch.zeros(len(x)).long()), 7)], layers, mode=mode
    )
    costs = {}
    for r in rows:
        costs.setdefault(r["layer"], {})[r["variant"]] = (
            r["value"] if r["status"] == "ok" else r["status"]
        )
    return costs


def test_counts_by_hand():
    costs = table(net())
    forward = {"0": 2 * 16 * 4 * 9, "4": 2 * 64 * 5, "6": 2 * 5 * N}
    for variant, expected in {
        "parameters": {"0": 36 + 4 + 8, "4": 325, "6": 18},
        # the running mean and variance are sent too; the count of batches is no weight
        "bytes": {"0": 48 * 4 + 8 * 4, "4": 1300, "6": 72},
        "forward_flops": forward,
        # one product for the weights, and one for the input, which the first layer does not need
        "backward_flops": {
            "0": forward["0"],
            "4": 2 * forward["4"],
            "6": 2 * forward["6"],
        },
        # layer 0 keeps its input, the convolution's output and the rectified one; 4 only what it puts out
        "activation_bytes": {"0": 4 * (36 + 64 + 64), "4": 20, "6": 0},
    }.items():
        assert {
            name: layer_costs[variant] for name, layer_costs in costs.items()
        } == expected


def residual():
    """Work outside every layer's module, a bypass, a fused recurrent layer, a tied weight and a module never called."""

    def run(m, x):
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


def test_frozen_layers_have_no_backward():
    x = torch.randn(2, 7)
    model = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    first, last = layers_of(model, x)
    work = step_work(model, x, (first, last))
    assert work["backward_flops"] == {last.name: 2 * 2 * 6 * 3}
    assert not model[0].weight.requires_grad


@pytest.mark.parametrize("kind", ["plain", "residual"])
def test_the_layers_sum_to_the_whole(kind):
    model, x = (net(), X) if kind == "plain" else (residual(), torch.randn(4, 5, 4))
    for by, mode in itertools.product(("block", "module"), ("eval", "train")):
        layers = layers_of(model, x[:2], by=by)
        model.train(mode == "train")
        work = step_work(model, x[:2], layers, mode=mode)
        with count_flops(model) as counter:
            out = model(x[:2])
            forward = counter.total
            out.sum().backward()
        assert sum(work["forward_flops"].values()) == forward > 0
        assert sum(work["backward_flops"].values()) == counter.total - forward > 0
        used = {layer.name for layer in layers if layer.used}
        assert set(work["forward_flops"]) == set(work["backward_flops"]) <= used


def test_work_belongs_to_the_layer_that_runs_or_ran_last():
    costs = table(residual(), torch.randn(4, 5, 4))
    mixed = 2 * (2 * 5 * 6 * 6) + 2 * (2 * 5 * 5 * 6)
    for layer, variant, value in (
        ("lstm", "forward_flops", 2 * 4 * 6 * (4 + 6) * 5),
        ("mix", "forward_flops", mixed),
        ("mix", "backward_flops", 2 * mixed),
        ("head", "forward_flops", 2 * 6 * N),
        ("spare", "parameters", 90),
        ("spare", "forward_flops", "unused in the forward pass"),
    ):
        assert costs[layer][variant] == value


class Fixed(nn.Module):
    """A product with a matrix that does not train."""

    def __init__(self, matrix):
        super().__init__()
        self.register_buffer("weight", matrix)

    def forward(self, x):
        return x @ self.weight


def test_the_work_of_tied_tensors_belongs_to_the_layer_that_has_them():
    matrix, x = torch.randn(4, 4), torch.randn(5, 4)
    for first, last in (
        (Fixed(matrix), Fixed(matrix)),
        (nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)),
    ):
        last.weight = first.weight
        parts = {"a": first, "b": nn.Linear(4, 4), "c": last}
        costs = table(nn.Sequential(OrderedDict(parts)), x)
        flops = {
            name: layer_costs["forward_flops"] for name, layer_costs in costs.items()
        }
        assert flops == {"a": 2 * 32, "b": 32}


def test_a_plan_sends_its_body_and_saves_its_head():
    report = diagnose(net(), dict.fromkeys("ab", DATA), "layer_cost")
    plan, state = LayerPlan.prefix(report.layers, 1), tree.state_dict(net())
    cost = plan_cost(plan, report.frame)
    # as a run counts what it sends
    sent, every = (
        tree.n_bytes(tree.select(state, plan.body_tensors)),
        tree.n_bytes(state),
    )
    assert cost == {
        "layers": 3,
        "layers_shared": 1,
        "parameters": 391,
        "parameters_shared": 48,
        "bytes_up": sent,
        "bytes_down": sent,
        "bytes_all": every,
        "bytes_saved": every - sent,
        "saved": pytest.approx(1 - sent / every),
        "training_flops_shared": 2304,
        "training_flops": 2304 + 1920 + 90,
    }
    assert plan_cost(LayerPlan.prefix(report.layers, 9), report.frame)["saved"] == 0


def test_costs_that_do_not_fit_a_plan_are_named():
    report = diagnose(net(), DATA, ["layer_cost", "weight_magnitude"])
    frame, model_plan = report.frame, LayerPlan.prefix(report.layers, 1)
    plan = LayerPlan((Layer("other", ("w",)),), ())
    first = frame[frame["variant"] == "bytes"].iloc[:1].assign(value=5.0)
    for which, costs, words in (
        (plan, frame, "'other'"),
        (plan, frame[frame["metric"] == "weight_magnitude"], "layer_cost"),
        (model_plan, pd.concat([frame, first]), "two .*'0'"),
    ):
        with refuses(words):
            plan_cost(which, costs)
    with refuses("a plan"):  # that is not made yet
        cost_steps(tasks("playerfl"))


def tasks(*names, **changes):
    config = CONFIG.with_keys(rounds=4, **changes)
    return {
        name: runner.assemble(
            config.with_keys(algorithm=name), data=TOY, model=network("plain")
        )
        for name in names
    }


def test_picture_of_steps_holds_every_round_and_the_sums():
    table = cost_steps(tasks("fedavg", "vanilla"))
    axes = plots.cost_steps(table)
    for ax, kind in zip(axes, ("naive", "flops", "moved"), strict=True):
        for run, drawn in zip(("fedavg", "vanilla"), ax.patches, strict=True):
            assert list(drawn.get_data().values) == list(
                table[table["run"] == run][kind]
            )
        sums = table.groupby("run")[kind].sum()
        shown = [text.get_text() for text in ax.get_legend().get_texts()]
        share = sums["vanilla"] / sums["fedavg"]
        assert shown == ["fedavg  1.00", f"vanilla  {share:.2f}"]
    with refuses(r"round.*two"):
        plots.cost_steps(pd.concat([table, table]))


def test_picture_of_layers_holds_their_shares_and_the_totals():
    model, (x, y) = net(), DATA
    layers = layers_of(model, x[:2])
    frame = rows.frame(layer_cost([ClientModel("a", model, (x, y), 7)], layers))
    axes = plots.costs(pd.concat([frame, frame]))
    names = [layer.name for layer in layers]
    kinds = ("bytes", "forward_flops", "backward_flops", "activation_bytes")
    values = frame.pivot(index="variant", columns="layer", values="value")
    values = values.reindex(index=kinds, columns=names).fillna(0)
    shares = values.div(values.sum(axis=1), axis=0)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names
    for name, bars in zip(names, axes.containers, strict=True):
        widths = [bar.get_width() for bar in bars]
        assert widths == pytest.approx([*shares[name]])
    assert axes.get_xlim() == (0, 1)
    written = [text.get_text() for text in axes.texts]
    units = "B", "FLOP a sample", "FLOP a sample", "B a sample"
    for total, unit in zip(values.sum(axis=1), units, strict=True):
        thousands = f"{total / 1000:.1f} k{unit}"
        assert thousands in written or f"{total:.1f} {unit}" in written
    nothing = frame.assign(value=0.0)
    with refuses("above 0; got none"):
        plots.costs(nothing)
    with refuses("2 values of layer_cost"):
        plots.costs(pd.concat([frame, frame.assign(value=1.0)]))
