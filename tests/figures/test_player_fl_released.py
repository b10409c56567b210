"""The quantities of PLayer-FL's released code: a nuclear norm, the angle over shifts, and one batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diagnostics.measure import diagnose
from diagnostics.measurement import ClientModel
from figures.player_fl.released import Published, _direction, nuclear_norm
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.seeds import torch_generator
from tests.diagnostics.calls import call, one_pass
from tests.diagnostics.test_hessian_estimates import CE, block, images, loose, mlp, pair
from tests.diagnostics.test_sensitivity import brute, net, pair as samples, pick
from tests.networks import Wired

HESSIAN, SENSITIVITY = (
    f"figures.player_fl.released:{name}"
    for name in ("hessian_trace", "federation_sensitivity")
)


def test_released_is_a_nuclear_norm_of_the_product_with_a_unit_vector() -> None:
    model, data = images(), pair(9, 2, 5, 5)
    layers = loose(model)
    client = [ClientModel("a", model, data, 9)]
    (row,) = call(HESSIAN, client, layers[2:3], loss=CE, batch=4, seed=3)
    assert row["estimator"] == "nuclear norm of H v(probes=1)"
    assert row["stderr"] is None
    assert row["n_params"] == 72
    weight = model.get_parameter("3.weight").detach()
    v = _direction(weight, torch_generator(3, "released probe", "3.weight"))
    assert float(v.norm()) == pytest.approx(1)
    product = (block(model, data, ("3.weight",)) @ v.reshape(-1)).reshape(weight.shape)
    norms = [
        np.linalg.svd(product[:, i].reshape(4, 9).numpy(), compute_uv=False).sum()
        for i in range(2)
    ]
    assert row["value"] == pytest.approx(np.mean(norms), rel=1e-10)
    averaged = call(HESSIAN, client, layers, loss=CE, probes=5)
    assert all(r["value"] >= 0 and r["stderr"] > 0 for r in averaged)


@pytest.mark.parametrize("shape", [(5,), (4, 3), (4, 2, 3, 3)])
def test_nuclear_norms(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    columns = x.reshape(len(x), -1)[:, :, None].transpose(1, 2) if x.ndim < 3 else None
    expected = (
        np.linalg.svd(columns.reshape(len(x), -1).numpy(), compute_uv=False).sum()
        if columns is not None
        else np.mean(
            [
                np.linalg.svd(x[:, i].reshape(4, 9).numpy(), compute_uv=False).sum()
                for i in range(2)
            ]
        )
    )
    assert nuclear_norm(x) == pytest.approx(expected)
    assert math.isnan(nuclear_norm(x * math.nan))


def test_released_rows_are_labelled() -> None:
    x, y = pair(8, 4)
    report = diagnose(mlp().float(), (x.float(), y), HESSIAN, progress=False)
    assert set(report.frame["variant"]) == {"released"}
    assert set(report.frame["estimator"]) == {"nuclear norm of H v(probes=1)"}
    assert report.frame["stderr"].isna().all()
    assert report.plot("hessian_trace") is not None
    with pytest.raises(UsageError, match=r"probes.*at least 1"):
        diagnose(
            mlp().float(),
            (x.float(), y),
            HESSIAN,
            progress=False,
            options={"hessian_trace": {"probes": 0}},
        )


def test_a_single_batch_is_drawn_by_seed_and_client() -> None:
    layers = layers_of(net(), samples()[0])

    def values(client: str = "a", **how: Any) -> list[float]:
        rows = call(
            SENSITIVITY,
            [ClientModel(client, net(), samples(), 20)],
            layers,
            loss=CE,
            single_batch=8,
            **how,
        )
        assert {r["n_samples"] for r in rows} == {8}
        assert {r["estimator"] for r in rows} == {"single_batch, mean of tensors"}
        return pick(rows, "importance", client)

    assert values(seed=1) == values(seed=1)
    assert values(seed=1) != values(seed=2)
    assert values("a") != values("b")


def test_the_figure_takes_one_batch_of_64_and_the_mean_over_tensors() -> None:
    model = net().eval()
    layers = layers_of(model, samples()[0])
    one = (
        samples()[0][:1],
        samples()[1][:1],
    )  # 64 draws of one sample: its own gradient
    rows = call(SENSITIVITY, [ClientModel("a", model, one, 1)], layers, loss=CE)
    assert pick(rows, "importance") == pytest.approx(
        brute(model, *one, layers, "mean_of_tensors"), rel=1e-10
    )
    assert {(r["n_samples"], r["estimator"]) for r in rows} == {
        (64, "single_batch, mean of tensors")
    }
    assert {r["variant"] for r in rows} == {"figure", "importance"}


def tokens() -> Wired:
    """A token table looked up by [n, T], positions by [T], kinds by [n]."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.table(x) + m.place(torch.arange(x.shape[1]))
        return m.head(h.mean(1) + m.kind((x[:, 0] > 4).long()))

    torch.manual_seed(1)
    tables = {
        "table": nn.Embedding(9, 3, padding_idx=0),
        "place": nn.Embedding(6, 3),
        "kind": nn.Embedding(2, 3),
    }
    return Wired(run, **tables, head=nn.Linear(3, 2))


@pytest.mark.parametrize("reduce", ["pooled", "mean_of_tensors"])
def test_tables_as_in_the_released_code_by_hand(reduce: str) -> None:
    """Rows of the weights and of the gradient are averaged over the samples, position by position, then multiplied."""
    model = tokens().double()
    g = torch.Generator().manual_seed(3)
    x, y = torch.randint(0, 9, (8, 4), generator=g), torch.randint(2, (8,), generator=g)
    found_layers = layers_of(model, x[:2])
    names = ("table.weight", "place.weight")
    layers = [
        Layer("both", names, tables=names),
        *(each for each in found_layers if each.name in ("kind", "head")),
    ]
    subject = ClientModel("a", model, (x, y), 8)
    rows = one_pass([subject], layers, [Published(reduce=reduce)], loss=CE, batch=4)
    found = {r["layer"]: r for r in rows if r["variant"] == "importance"}
    sums, entries = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    kind = head = 0.0
    for k in (0, 4):
        model.zero_grad()
        CE(model(x[k : k + 4]), y[k : k + 4]).backward()
        w, dw = model.table.weight.detach().tolist(), model.table.weight.grad
        assert dw is not None
        for t in range(4):
            for j in range(3):
                weight = sum(w[i][j] for i in x[k : k + 4, t].tolist()) / 4
                slope = sum(float(dw[i, j]) for i in x[k : k + 4, t].tolist()) / 4
                sums["table.weight"] += (weight * slope) ** 2
                entries["table.weight"] += 1
        whole = {
            name: (p * p.grad).detach().square()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        sums["place.weight"] += float(whole["place.weight"].sum())
        entries["place.weight"] += 18
        kind += float(whole["kind.weight"].mean()) / 2
        head += float(whole["head.weight"].mean()) / 2
    model.zero_grad()
    parts = [sums[name] / entries[name] for name in names]
    expected = (
        sum(sums.values()) / sum(entries.values())
        if reduce == "pooled"
        else sum(parts) / 2
    )
    assert found["both"]["value"] == pytest.approx(expected, rel=1e-10)
    assert found["kind"]["value"] == pytest.approx(kind, rel=1e-10)
    assert found["head"]["value"] == pytest.approx(head, rel=1e-10)
    assert "mean rows, released code" in found["both"]["estimator"]
    assert "mean rows" not in found["head"]["estimator"]
