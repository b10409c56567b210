"""The package torch-cka behind the same call: it agrees with our own minibatch CKA, or says why it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_core.layers import layers_of
from tests.diagnostics.calls import cka
from tests.diagnostics.test_similarity import by_layer, clients, net, pair
from tests.diagnostics.test_similarity_options import measured
from tests.networks import Wired


def inplace(seed: int) -> Wired:
    """A tuple, an in-place ReLU on a layer's output, an unused module, and a layer called after another declared."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x.flatten(1)[:, :6]).add_(1).relu_()
        return m.head(m.lstm(h.unsqueeze(1))[0][:, 0])

    torch.manual_seed(seed)
    parts = {
        "head": nn.Linear(5, 3),
        "lstm": nn.LSTM(4, 5, batch_first=True),
        "first": nn.Linear(6, 4),
    }
    return Wired(run, **parts, unused=nn.Linear(2, 2))


@pytest.mark.parametrize("make", [net, inplace, lambda k: inplace(k).double()])
@pytest.mark.parametrize(("batch", "n"), [(12, 48), (10, 42), (10, 43), (64, 30)])
def test_torch_cka_agrees(make: Callable[[int], nn.Module], batch: int, n: int) -> None:
    models = [make(k) for k in range(3)]
    x, y = pair(n)
    x = x.to(next(models[0].parameters()).dtype)
    ours = measured("cka", models, (x, y), batch=batch, estimator="minibatch")
    theirs = measured("cka", models, (x, y), batch=batch, backend="torch_cka")
    assert {r["estimator"] for r in theirs} == {"minibatch, torch_cka"}
    assert [r["status"] for r in theirs] == [r["status"] for r in ours]
    for a, b in zip(ours, theirs, strict=True):
        assert (a["client"], a["client_b"], a["layer"]) == (
            b["client"],
            b["client_b"],
            b["layer"],
        )
        assert b["value"] == (
            None if a["value"] is None else pytest.approx(a["value"], abs=1e-4)
        )
    assert sum(r["status"] == "ok" for r in theirs) >= 9


def test_torch_cka_with_a_shuffling_loader_and_great_scales() -> None:
    loader = DataLoader(TensorDataset(*pair()), batch_size=10, shuffle=True)
    model = net()
    twins = [model, copy.deepcopy(model), net(1)]
    with torch.no_grad():
        twins[1][6].weight *= 1e12
        twins[1][6].bias += 1e14
    hooks = [len(m._forward_hooks) for m in model.modules()]
    model.train()
    rows = cka(
        clients(twins, loader),
        layers_of(model, pair()[0]),
        batch=10,
        backend="torch_cka",
    )
    assert list(by_layer(rows).values()) == pytest.approx([1, 1, 1], abs=1e-4)
    assert by_layer(rows, "c0", "c2")["6"] < 0.95
    assert all(m.training for m in model.modules())
    assert [len(m._forward_hooks) for m in model.modules()] == hooks


def test_torch_cka_says_what_has_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    models = [net(0), net(1), net(2)]
    with torch.no_grad():
        models[1][4].weight.zero_()
        models[1][4].bias.zero_()
    rows = measured("cka", models, batch=12, backend="torch_cka")
    assert (
        by_layer(rows)["4"]
        == "output of layer '4' at client 'c1': constant over the probe"
    )
    assert isinstance(by_layer(rows)["0"], float)
    assert isinstance(by_layer(rows, "c0", "c2")["4"], float)
    assert capsys.readouterr().err == ""  # no bars of its own
