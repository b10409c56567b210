"""Federation sensitivity by hand, by brute force, and where it has no value."""

import json
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from diagnostics.measurement import ClientModel
from diagnostics.sensitivity import SensitivityAccumulator, cumulative
from fl_core.layers import Layer, layers_of
from fl_core.training import losses
from tests.conftest import refuses
from tests.diagnostics.calls import federation_sensitivity
from tests.made import Wired, labelled, mlp

CE = losses.build("cross_entropy")
C = 3


pair = partial(labelled, 20, dtype=torch.float64)


def net(seed=0):
    return mlp(4, 6, 5, C, norm=True, seed=seed).double()


def gradients(model, x, y):
    """The parameters and their gradients, by name."""
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(CE(model(x), y), [*params.values()])
    return params, dict(zip(params, grads, strict=True))


def of_a(model, data, layers, **how):
    """The rows of one client's model."""
    return federation_sensitivity(
        [ClientModel("a", model, data, 20)], layers, loss=CE, **how
    )


def brute(model, x, y, layers, how="pooled"):
    """I_l tensor by tensor."""
    params, grads = gradients(model, x, y)
    values = []
    for layer in layers:
        squares = [(params[n] * grads[n]).square().flatten() for n in layer.weights]
        if how == "pooled":
            values.append(float(torch.cat(squares).mean()))
        else:
            values.append(float(torch.stack([s.mean() for s in squares]).mean()))
    return values


def pick(rows, variant, client="a"):
    return [
        r["value"] for r in rows if r["variant"] == variant and r["client"] == client
    ]


def test_importance_against_brute_force():
    model, (x, y) = net().eval(), pair()
    layers = layers_of(model, x)
    assert [len(layer.weights) for layer in layers] == [2, 1, 1]
    params, grads = gradients(model, x, y)
    for reduce in ("pooled", "mean_of_tensors"):
        seen = SensitivityAccumulator(layers, reduce=reduce)
        seen.update(params, grads)
        expected = brute(model, x, y, layers, reduce)
        assert seen.result()["importance"] == pytest.approx(expected, rel=1e-12)
    seen = SensitivityAccumulator(layers, "all")
    seen.update(params, grads)
    last = torch.cat([(params[n] * grads[n]).flatten() for n in layers[-1].parameters])
    expected = float(last.square().mean())
    assert seen.result()["importance"][-1] == pytest.approx(expected, rel=1e-12)
    with refuses("same model"):
        seen.update({"v": x}, {"v": x})
    with refuses("mean 'pooled'"):
        SensitivityAccumulator([], reduce="pool")


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=8), st.floats(1e-6, 1e6))
def test_cumulative_starts_at_one_never_falls_and_has_no_scale(values, scale):
    s = cumulative(values)
    assert s[0] == 1
    assert np.all(np.diff(s) >= 0)
    assert cumulative(np.array(values) * scale) == pytest.approx(s, rel=1e-9)
    assert s[-1] == pytest.approx(sum(values) / values[0], rel=1e-9)
    nan = np.nan
    for importances, expected in (
        ([0.0, 1.0], [nan, nan]),
        ([None, 1.0], [nan, nan]),
        ([2.0, None, 4.0], [1.0, nan, nan]),
        ([2.0, 0.0, 4.0], [1.0, 1.0, 3.0]),
        ([], []),
    ):
        np.testing.assert_array_equal(cumulative(importances), expected)


def test_the_accumulator_over_an_epoch_of_training_equals_brute_force():
    """At each step's weights, not at the last ones, and also if it moves to another process on the way."""
    model, (x, y) = net(), pair()
    layers = layers_of(model, x)
    seen, expected = SensitivityAccumulator(layers), []
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in zip(x.split(6), y.split(6), strict=True):
        expected.append(brute(model, *batch, layers))
        params, grads = gradients(model, *batch)
        seen.update(params, grads)
        for name, p in params.items():
            p.grad = grads[name]
        optimiser.step()
        seen = pickle.loads(pickle.dumps(seen))
    result = json.loads(json.dumps(seen.result(), allow_nan=False))
    assert result["steps"] == 4
    assert result["layers"] == [layer.name for layer in layers]
    mean = np.mean(expected, 0).tolist()
    assert result["importance"] == pytest.approx(mean, rel=1e-10)
    moved = brute(model, x, y, layers)
    assert result["importance"] != pytest.approx(moved, rel=0.05)


def test_only_layers_that_gradients_reach_are_in_the_result():
    names = {"bias": "a.bias", "l": "w", "frozen": "f", "broken": "b", "idle": "t"}
    layers = [Layer(layer, (name,)) for layer, name in names.items()]
    layers[-1] = Layer("idle", ("t",), tables=("t",))  # no step touches the table
    params = {name: torch.ones(2, 1) for name in names.values()}
    grads = {**params, "b": params["b"] * torch.inf, "t": params["t"] * 0}
    del grads["f"]
    seen = SensitivityAccumulator(layers)
    seen.update(params, grads)
    values = [pytest.approx(1.0), None, 0.0]

    result = seen.result()
    assert result["layers"] == ["l", "broken", "idle"]
    assert (result["importance"], result["steps"]) == (values, 1)
    assert [part["importance"] for part in result["parts"]] == [values]


def test_curves_are_means_over_batches_and_over_clients_by_their_samples():
    models, data = [net(0).eval(), net(1)], [pair(seed=1), pair(seed=2)]
    (x, y), layers = data[0], layers_of(net(), pair()[0])
    parts = zip(x.split(6), y.split(6), strict=True)
    expected = np.mean([brute(models[0], *part, layers) for part in parts], 0)
    rows = of_a(models[0], data[0], layers, batch=6)
    importances = pick(rows, "importance")
    assert importances == pytest.approx(expected.tolist(), rel=1e-12)
    curve = (np.cumsum(expected) / expected[0]).tolist()
    assert pick(rows, "after") == pytest.approx(curve, rel=1e-12)
    subjects = [
        ClientModel(name, *model_and_data, n)
        for name, *model_and_data, n in zip("ab", models, data, (30, 10), strict=True)
    ]
    rows = federation_sensitivity(subjects, layers, loss=CE)
    a, b = (np.array(pick(rows, "after", client=name)) for name in "ab")
    combined = (0.75 * a + 0.25 * b).tolist()
    assert pick(rows, "after", client="") == pytest.approx(combined, rel=1e-12)
    counts = [(r["n_train"], r["n_samples"]) for r in rows if not r["client"]]
    assert counts == [(40, 40)] * 3


def detached(where):
    def run(m, x):
        h = m.first(x)
        h = h.detach() if where == "first" else h
        return m.head(h + m.second(x).detach() if where == "second" else m.second(h))

    sizes = {"first": (4, 4), "second": (4, 4), "head": (4, C), "unused": (1, 1)}
    return Wired(run, **{name: nn.Linear(*size) for name, size in sizes.items()})


def statuses(rows, variant, client="a"):
    return {
        r["layer"]: r["status"]
        for r in rows
        if r["variant"] == variant and r["client"] == client
    }


def test_a_layer_that_no_gradient_reaches_adds_nothing_unless_it_is_the_first():
    torch.manual_seed(0)
    data = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    layers, lost = layers_of(detached("second"), data[0]), "no gradient reaches the "
    rows = of_a(detached("second"), data, layers)
    i, s = pick(rows, "importance"), pick(rows, "after")
    assert s == [1.0, None, pytest.approx(1 + i[2] / i[0]), None]
    assert statuses(rows, "after") == {
        "first": "ok",
        "second": f"{lost}layer",
        "head": "ok",
        "unused": "unused in the forward pass",
    }
    rows = of_a(detached("first"), data, layers)
    assert pick(rows, "after") == [None] * 4
    assert statuses(rows, "after")["head"] == f"{lost}first layer 'first'"
    assert statuses(rows, "importance")["head"] == "ok"
    status = f"client 'a': {lost}first layer 'first'"
    assert statuses(rows, "after", "")["head"] == status


def test_a_first_layer_without_importance_gives_no_values():
    model = net()
    layers = layers_of(model, pair()[0])
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight.zero_()
    rows = of_a(model, pair(), layers)
    assert pick(rows, "importance")[0] == 0
    status = {"the importance of the first layer '0' is 0"}
    assert set(statuses(rows, "after").values()) == status


def bag():
    torch.manual_seed(0)
    parts = {
        "table": nn.Embedding(50, 3, padding_idx=0),
        "place": nn.Embedding(4, 3),
        "head": nn.Linear(3, 2),
    }
    return Wired(
        lambda m, x: m.head((m.table(x) + m.place(torch.arange(4))).mean(1)), **parts
    )


def test_a_table_counts_with_the_rows_that_a_batch_touches():
    model, g = bag().double(), torch.Generator().manual_seed(3)
    x = torch.randint(0, 50, (12, 4), generator=g)
    y = torch.randint(2, (12,), generator=g)
    layers, tables = layers_of(model, x[:2]), ("table.weight", "place.weight")
    assert [layer.tables for layer in layers] == [tables[:1], tables[1:], ()]
    both = Layer("both", tables, tables=tables)
    sums, sizes = dict.fromkeys(tables, 0.0), dict.fromkeys(tables, 0)
    for part in zip(x.split(5), y.split(5), strict=True):
        params, grads = gradients(model, *part)
        looked_up = len(set(part[0].unique().tolist()) - {0})
        for name, touched in zip(tables, (looked_up, 4), strict=True):
            sums[name] += float((params[name] * grads[name]).square().sum())
            sizes[name] += 3 * touched
    for reduce, expected in (
        ("pooled", sum(sums.values()) / sum(sizes.values())),
        ("mean_of_tensors", sum(sums[n] / sizes[n] for n in tables) / 2),
    ):
        rows = of_a(model, (x, y), [both, layers[2]], batch=5, reduce=reduce)
        first, *_ = (r for r in rows if r["variant"] == "importance")
        assert first["value"] == pytest.approx(expected, rel=1e-10)
        assert "touched rows" in first["estimator"]
