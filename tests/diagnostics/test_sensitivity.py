"""Federation sensitivity by hand, by brute force, and where it has no value."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diagnostics.gradients.importance import SensitivityAccumulator
from diagnostics.gradients.sensitivity import combine, cumulative, recorded_rows
from diagnostics.measurement import ClientModel
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.plan import LayerPlan
from fl_core.rows import Row
from fl_core.training import losses
from tests.diagnostics.calls import federation_sensitivity
from tests.networks import Wired

CE = losses.build("cross_entropy")
C = 3


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.Linear(5, C),
    ).double()


def pair(n: int = 20, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g).double(), torch.randint(C, (n,), generator=g)


def brute(
    model: Any, x: Tensor, y: Tensor, layers: Sequence[Layer], how: str = "pooled"
) -> list[float]:
    """I_l entry by entry."""
    model.zero_grad()
    CE(model(x), y).backward()
    params = {name: p.detach() for name, p in model.named_parameters()}
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    values = []
    for layer in layers:
        tensors = [
            [
                float(w * g) ** 2
                for w, g in zip(params[n].flatten(), grads[n].flatten(), strict=True)
            ]
            for n in layer.weights
        ]
        if how == "pooled":
            values.append(sum(map(sum, tensors)) / sum(map(len, tensors)))
        else:
            values.append(sum(sum(t) / len(t) for t in tensors) / len(tensors))
    model.zero_grad()
    return values


def pick(rows: Sequence[Row], variant: str, client: str = "a") -> list[Any]:
    return [
        r["value"] for r in rows if r["variant"] == variant and r["client"] == client
    ]


def test_a_two_layer_net_by_hand() -> None:
    model: Any = nn.Sequential(
        nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
    ).double()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    x, y = torch.tensor([[1.0]]).double(), torch.tensor([0])
    # h = 2, z = (2, -2), p_0 = 1 / (1 + e^-4), dL/dz = (p_0 - 1, 1 - p_0) = (-q, q)
    q = 1 - 1 / (1 + math.exp(-4))
    first = (2.0 * (-q * 1 + q * -1) * 1.0) ** 2  # w = 2, g = -2q
    second = ((1.0 * -q * 2) ** 2 + (-1.0 * q * 2) ** 2) / 2
    layers = layers_of(model, x)
    rows = federation_sensitivity([ClientModel("a", model, (x, y), 1)], layers, loss=CE)
    assert pick(rows, "importance") == pytest.approx([first, second], rel=1e-12)
    assert pick(rows, "after") == pytest.approx([1.0, 1 + second / first], rel=1e-12)
    assert second / first == pytest.approx(0.25)  # (2q)^2 against (4q)^2


def accumulated(seen: SensitivityAccumulator, params: Any, grads: Any) -> torch.Tensor:
    """The importance of each layer after one step."""
    seen.update(params, grads)
    return seen.importance()


@pytest.mark.parametrize("reduce", ["pooled", "mean_of_tensors"])
def test_importance_against_brute_force(reduce: str) -> None:
    model = net().eval()
    layers = layers_of(model, pair()[0])
    assert [len(layer.weights) for layer in layers] == [2, 1, 1]
    x, y = pair()
    params = dict(model.named_parameters())
    grads = dict(
        zip(
            params,
            torch.autograd.grad(CE(model(x), y), list(params.values())),
            strict=True,
        )
    )
    found = accumulated(SensitivityAccumulator(layers, reduce=reduce), params, grads)
    everything = accumulated(SensitivityAccumulator(layers, "all"), params, grads)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(
        brute(model, x, y, layers, reduce), rel=1e-12
    )
    last = (
        torch.cat([(params[n] * grads[n]).flatten() for n in layers[-1].parameters])
        .square()
        .mean()
    )
    assert float(everything[-1]) == pytest.approx(last.item(), rel=1e-12)


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=8), st.floats(1e-6, 1e6))
def test_cumulative_starts_at_one_never_falls_and_has_no_scale(
    values: list[float], scale: float
) -> None:
    s = cumulative(values)
    assert s[0] == 1
    assert np.all(np.diff(s) >= 0)
    assert cumulative(np.array(values) * scale) == pytest.approx(s, rel=1e-9)
    assert s[-1] == pytest.approx(sum(values) / values[0], rel=1e-9)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 1.0], [np.nan, np.nan]),
        ([np.nan, 1.0], [np.nan, np.nan]),
        ([None, 1.0], [np.nan, np.nan]),
        ([2.0, None, 4.0], [1.0, np.nan, np.nan]),
        ([2.0, 0.0, 4.0], [1.0, 1.0, 3.0]),
        ([], []),
    ],
)
def test_cumulative_where_values_are_missing(
    values: list[float], expected: list[float]
) -> None:
    np.testing.assert_array_equal(cumulative(values), expected)


def test_combine_is_the_weighted_mean_of_normalised_curves() -> None:
    s = [[1.0, 2.0, 5.0], [1.0, 4.0, np.nan]]
    np.testing.assert_allclose(combine(s, [3, 1]), [1.0, 2.5, np.nan])
    for bad in ([1.0], [0.0, 0.0], [1.0, -1.0]):
        with pytest.raises(UsageError):
            combine(s, bad)


def test_the_accumulator_over_an_epoch_of_training_equals_brute_force() -> None:
    model, twin = net(), net()
    layers = layers_of(model, pair()[0])
    x, y = pair()
    seen = SensitivityAccumulator(layers)
    expected = []
    optimiser, other = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin))
    for start in range(0, 20, 6):
        batch = x[start : start + 6], y[start : start + 6]
        expected.append(brute(twin, *batch, layers))
        CE(
            twin(batch[0]), batch[1]
        ).backward()  # brute force ran the same pass; the values do not depend on it
        other.step()
        other.zero_grad()

        params = dict(model.named_parameters())
        found = torch.autograd.grad(
            CE(model(batch[0]), batch[1]), list(params.values())
        )
        seen.update(params, dict(zip(params, found, strict=True)))
        for p, g in zip(params.values(), found, strict=True):
            p.grad = g
        optimiser.step()
    result = json.loads(json.dumps(seen.result(), allow_nan=False))
    assert result["steps"] == 4
    assert result["layers"] == [layer.name for layer in layers]
    assert result["importance"] == pytest.approx(
        np.mean(expected, 0).tolist(), rel=1e-10
    )
    moved = brute(model, x, y, layers)
    assert result["importance"] != pytest.approx(
        moved, rel=0.05
    )  # w and g at each step, not at the end


def test_the_accumulator_survives_pickling_and_goes_on() -> None:
    layers = [Layer("l", ("w",))]
    w, g = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -1.0])}
    first = SensitivityAccumulator(layers)
    first.update(w, g)
    second = pickle.loads(pickle.dumps(first))
    second.update(w, {"w": torch.zeros(2)})
    assert first.result()["importance"] == pytest.approx([6.5], rel=1e-14)
    result = second.result()
    assert (result["layers"], result["steps"]) == (["l"], 2)
    assert result["importance"] == pytest.approx([3.25], rel=1e-14)


def test_only_layers_that_gradients_reach_are_in_the_result() -> None:
    layers = [
        Layer("bias", ("a.bias",)),
        Layer("l", ("w",)),
        Layer("frozen", ("f",)),
        Layer("broken", ("b",)),
    ]
    seen = SensitivityAccumulator(layers)
    params = {name: torch.ones(2) for name in ("a.bias", "w", "f", "b")}
    seen.update(
        params,
        {
            "a.bias": torch.ones(2),
            "w": torch.ones(2),
            "b": torch.tensor([torch.inf, 0.0]),
        },
    )
    values = [pytest.approx(1.0), None]
    parts = [{"steps": 1, "importance": values, "weights": [1.0, 1.0]}]
    assert seen.result() == {
        "layers": ["l", "broken"],
        "importance": values,
        "steps": 1,
        "parts": parts,
    }
    assert seen.importance().isnan().tolist() == [True, False, True, False]


def test_the_accumulator_refuses_another_models_gradients() -> None:
    with pytest.raises(UsageError, match="same model"):
        SensitivityAccumulator([Layer("l", ("w",))]).update(
            {"v": torch.ones(1)}, {"v": torch.ones(1)}
        )
    with pytest.raises(UsageError, match="mean 'pooled'"):
        SensitivityAccumulator([], reduce="pool")
    with pytest.raises(UsageError, match="mean 'weights'"):
        SensitivityAccumulator([], tensors="weight")


def test_after_is_the_mean_over_batches_of_still_weights() -> None:
    model = net().eval()
    layers = layers_of(model, pair()[0])
    x, y = pair()
    expected = np.mean(
        [brute(model, x[k : k + 6], y[k : k + 6], layers) for k in range(0, 20, 6)], 0
    )
    for data, batch in (
        (pair(), 6),
        (DataLoader(TensorDataset(x, y), batch_size=6), None),
    ):
        rows = federation_sensitivity(
            [ClientModel("a", model, data, 20)], layers, loss=CE, batch=batch
        )
        assert pick(rows, "importance") == pytest.approx(expected.tolist(), rel=1e-12)
        assert pick(rows, "after") == pytest.approx(
            (np.cumsum(expected) / expected[0]).tolist(), rel=1e-12
        )
        assert pick(rows, "after", client="") == pick(rows, "after")


def test_the_combined_curve_weighs_clients_by_their_training_samples() -> None:
    subjects = [
        ClientModel("a", net(0), pair(seed=1), 30),
        ClientModel("b", net(1), pair(seed=2), 10),
    ]
    layers = layers_of(net(), pair()[0])
    rows = federation_sensitivity(subjects, layers, loss=CE)
    a, b = (np.array(pick(rows, "after", client=name)) for name in "ab")
    assert pick(rows, "after", client="") == pytest.approx(
        (0.75 * a + 0.25 * b).tolist(), rel=1e-12
    )
    assert [(r["n_train"], r["n_samples"]) for r in rows if not r["client"]] == [
        (40, 40)
    ] * 3


def test_what_was_recorded_in_training_becomes_rows() -> None:
    layers = layers_of(net(), pair()[0])
    names = [layer.name for layer in layers]
    results = {
        "a": {"layers": names, "importance": [2.0, 1.0, 3.0], "steps": 4},
        "b": {"layers": names, "importance": [1.0, 1.0, 4.0], "steps": 4},
    }
    rows = recorded_rows(results, layers, n_train={"a": 1, "b": 3})
    assert pick(rows, "training") == [1.0, 1.5, 3.0]
    assert pick(rows, "training", client="") == [
        1.0,
        0.25 * 1.5 + 0.75 * 2,
        0.25 * 3 + 0.75 * 6,
    ]
    subjects = [ClientModel("a", net(), pair(), 1), ClientModel("b", net(), pair(), 3)]
    through = federation_sensitivity(
        subjects, layers, loss=CE, when="training", recorded=results
    )
    assert [r["value"] for r in through] == [r["value"] for r in rows]
    assert [r["n_params"] for r in through[:2]] == [
        30,
        30,
    ]  # 4 x 6 of the Linear and 6 of its normalisation
    with pytest.raises(UsageError, match="client 'c'"):
        federation_sensitivity(
            [ClientModel("c", net(), pair(), 1)],
            layers,
            loss=CE,
            when="training",
            recorded=results,
        )


def detached(where: str) -> Wired:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        h = h.detach() if where == "first" else h
        return m.head(h + m.second(x).detach() if where == "second" else m.second(h))

    sizes = {"first": (4, 4), "second": (4, 4), "head": (4, C), "unused": (1, 1)}
    return Wired(run, **{name: nn.Linear(*size) for name, size in sizes.items()})


def statuses(rows: Sequence[Row], variant: str, client: str = "a") -> dict[str, str]:
    return {
        r["layer"]: r["status"]
        for r in rows
        if r["variant"] == variant and r["client"] == client
    }


def test_a_layer_that_no_gradient_reaches_adds_nothing_unless_it_is_the_first() -> None:
    torch.manual_seed(0)
    data = (torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    second, first = detached("second"), detached("first")
    layers = layers_of(second, data[0])
    rows = federation_sensitivity([ClientModel("a", second, data, 6)], layers, loss=CE)
    i, s = pick(rows, "importance"), pick(rows, "after")
    assert s == [1.0, None, pytest.approx(1 + i[2] / i[0]), None]
    assert statuses(rows, "after") == {
        "first": "ok",
        "second": "no gradient reaches the layer",
        "head": "ok",
        "unused": "unused in the forward pass",
    }
    rows = federation_sensitivity([ClientModel("a", first, data, 6)], layers, loss=CE)
    assert [s is None for s in pick(rows, "after")] == [True] * 4
    assert (
        statuses(rows, "after")["head"] == "no gradient reaches the first layer 'first'"
    )
    assert statuses(rows, "importance")["head"] == "ok"
    assert (
        statuses(rows, "after", "")["head"]
        == "client 'a': no gradient reaches the first layer 'first'"
    )


def test_a_first_layer_of_no_importance_is_said() -> None:
    model = net()
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[1].weight)
    layers = layers_of(model, pair()[0])
    rows = federation_sensitivity(
        [ClientModel("a", model, pair(), 20)], layers, loss=CE
    )
    assert pick(rows, "importance")[0] == 0
    assert set(statuses(rows, "after").values()) == {
        "the importance of the first layer '0' is 0"
    }
    assert pick(rows, "after") == [None] * 3


def test_one_broken_client_leaves_the_others_values() -> None:
    bad = net(1)
    with torch.no_grad():
        bad[3].weight[0, 0] = torch.nan
    layers = layers_of(net(), pair()[0])
    rows = federation_sensitivity(
        [ClientModel("a", net(), pair(), 1), ClientModel("b", bad, pair(), 1)],
        layers,
        loss=CE,
    )
    assert set(statuses(rows, "after").values()) == {"ok"}
    assert set(statuses(rows, "after", "b").values()) == {
        "the loss of client 'b' is not finite"
    }
    assert set(statuses(rows, "after", "").values()) == {
        "client 'b': the loss of client 'b' is not finite"
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"when": "afterwards"}, "mean 'after'"),
        ({"when": "training"}, "recorded"),
        ({"recorded": {}}, "recorded"),
        ({"embeddings": "released"}, "touched, whole"),
        ({"reduce": "mean"}, "mean_of_tensors"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    layers = layers_of(net(), pair()[0])
    with pytest.raises(UsageError, match=words):
        federation_sensitivity(
            [ClientModel("a", net(), pair(), 20)], layers, loss=CE, **options
        )


def bag() -> Wired:
    torch.manual_seed(0)
    parts = {
        "table": nn.Embedding(50, 3, padding_idx=0),
        "place": nn.Embedding(4, 3),
        "head": nn.Linear(3, 2),
    }
    return Wired(
        lambda m, x: m.head((m.table(x) + m.place(torch.arange(4))).mean(1)), **parts
    )


@pytest.mark.parametrize("reduce", ["pooled", "mean_of_tensors"])
@pytest.mark.parametrize("embeddings", ["touched", "whole"])
def test_a_table_counts_with_the_rows_that_a_batch_touches(
    reduce: str, embeddings: str
) -> None:
    model = bag().double()
    g = torch.Generator().manual_seed(3)
    x, y = (
        torch.randint(0, 50, (12, 4), generator=g),
        torch.randint(2, (12,), generator=g),
    )
    layers = layers_of(model, x[:2])
    assert [layer.tables for layer in layers] == [
        ("table.weight",),
        ("place.weight",),
        (),
    ]
    plan = LayerPlan.prefix(layers, 1)
    assert LayerPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    both = Layer(
        "both",
        ("table.weight", "place.weight"),
        tables=("table.weight", "place.weight"),
    )
    rows = federation_sensitivity(
        [ClientModel("a", model, (x, y), 12)],
        [both, layers[2]],
        loss=CE,
        batch=5,
        reduce=reduce,
        embeddings=embeddings,
    )
    found = {r["layer"]: r for r in rows if r["variant"] == "importance"}
    params = dict(model.named_parameters())
    sums, entries = (
        dict.fromkeys(both.parameters, 0.0),
        dict.fromkeys(both.parameters, 0.0),
    )
    for k in range(0, 12, 5):
        model.zero_grad()
        CE(model(x[k : k + 5]), y[k : k + 5]).backward()
        for name in both.parameters:
            w = params[name]
            touched = (
                set(x[k : k + 5].unique().tolist()) - {0}
                if name == "table.weight"
                else range(4)
            )
            sums[name] += float((w * w.grad).detach().square().sum())
            entries[name] += 3 * len(touched) if embeddings == "touched" else w.numel()
    model.zero_grad()
    parts = [sums[name] / entries[name] for name in both.parameters]
    expected = (
        sum(sums.values()) / sum(entries.values())
        if reduce == "pooled"
        else sum(parts) / 2
    )
    assert found["both"]["value"] == pytest.approx(expected, rel=1e-10)
    assert ("touched rows" in found["both"]["estimator"]) == (embeddings == "touched")
    assert "touched rows" not in found["head"]["estimator"]


def test_a_table_that_no_step_touches_has_no_importance_and_a_bad_treatment_is_named() -> (
    None
):
    layer = Layer("table", ("w",), tables=("w",))
    accumulator = SensitivityAccumulator([layer])
    accumulator.update({"w": torch.ones(5, 2)}, {"w": torch.zeros(5, 2)})
    assert accumulator.importance().tolist() == [0.0]
    with pytest.raises(UsageError, match="mean 'touched'"):
        SensitivityAccumulator([layer], embeddings="touch")
