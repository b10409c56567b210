"""Gradient variance against brute force in float64, and what happens where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diagnostics.gradients.statistics import variance
from diagnostics.measurement import ClientModel
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.rows import Row
from fl_core.training import losses
from tests.diagnostics.calls import grad_variance
from tests.networks import Wired

CE = losses.build("cross_entropy")
N, C = 23, 3


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(32, 5),
        nn.Tanh(),
        nn.Linear(5, C),
    ).double()


def pair(n: int = N, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=g).double(), torch.randint(
        C, (n,), generator=g
    )


def subject(model: nn.Module, data: Any = None, n_train: int = N) -> ClientModel:
    return ClientModel("a", model, pair() if data is None else data, n_train)


def reference(
    model: Any,
    layer: Layer,
    batches: Sequence[tuple[Tensor, Tensor]],
    tensors: str,
    loss: losses.Loss,
) -> list[float]:
    """The variance of the layer's gradient on each batch, from a plain backward pass."""
    values = []
    for x, y in batches:
        model.zero_grad()
        loss(model(x), y).backward()
        names = layer.weights if tensors == "weights" else layer.parameters
        entries = torch.cat(
            [dict(model.named_parameters())[name].grad.reshape(-1) for name in names]
        )
        values.append(
            float(((entries - entries.mean()) ** 2).sum() / (len(entries) - 1))
        )
        model.zero_grad()
    return values


def by_layer(rows: Sequence[Row]) -> dict[str, Row]:
    return {r["layer"]: r for r in rows}


@pytest.mark.parametrize("tensors", ["weights", "all"])
@pytest.mark.parametrize("batch", [1, 4, 7, 100])
@pytest.mark.parametrize(
    "loss", [CE, losses.build("player_focal", gamma=2.0)], ids=lambda loss: loss.name
)
def test_epoch_variance_is_that_of_the_full_gradient_whatever_the_batch(
    tensors: str, batch: int, loss: losses.Loss
) -> None:
    model = net().eval()
    layers = layers_of(model, pair()[0][:2])
    assert (
        len(layers[0].weights) == 2
    )  # the convolution with its normalisation: pooled over two tensors
    rows = by_layer(
        grad_variance([subject(model)], layers, loss=loss, batch=batch, tensors=tensors)
    )
    for layer in layers:
        (expected,) = reference(model, layer, [pair()], tensors, loss)
        assert rows[layer.name]["value"] == pytest.approx(expected, rel=1e-12)
        assert rows[layer.name]["stderr"] == 0
        assert rows[layer.name]["n_samples"] == N
        assert rows[layer.name]["variant"] == "epoch"


def test_batch_variance_is_the_mean_over_batches_with_its_standard_error() -> None:
    model = net().eval()
    layers = layers_of(model, pair()[0][:2])
    x, y = pair()
    parts = [(x[k : k + 5], y[k : k + 5]) for k in range(0, N, 5)]
    rows = by_layer(
        grad_variance([subject(model)], layers, loss=CE, batch=5, reduction="batch")
    )
    for layer in layers:
        expected = torch.tensor(
            reference(model, layer, parts, "weights", CE), dtype=torch.float64
        )
        shares = torch.tensor(
            [len(part[1]) / N for part in parts], dtype=torch.float64
        )  # the last one is short
        mean = float((shares * expected).sum())
        error = (
            (shares * (expected - mean)).square().sum() * len(parts) / (len(parts) - 1)
        ).sqrt()
        assert rows[layer.name]["value"] == pytest.approx(mean, rel=1e-12)
        assert rows[layer.name]["stderr"] == pytest.approx(float(error), rel=1e-10)


def test_float32_agrees_with_float64_and_small_gradients_do_not_vanish() -> None:
    layers = layers_of(net(), pair()[0][:2])
    single = grad_variance([subject(net().float())], layers, loss=CE, batch=5)
    double = grad_variance([subject(net())], layers, loss=CE, batch=5)
    assert [r["value"] for r in single] == pytest.approx(
        [r["value"] for r in double], rel=1e-4
    )
    tiny = torch.tensor([1.0, 3.0]) * 1e-25  # their squares are no float32
    assert float(variance([tiny])) == pytest.approx(2e-50, rel=1e-6)


def test_train_mode_is_seeded_and_is_not_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, C)).double()
    data = (torch.randn(9, 4).double(), torch.randint(C, (9,)))
    layers = layers_of(model, data[0])

    def values(**how: Any) -> list[float]:
        return [
            r["value"]
            for r in grad_variance([subject(model, data)], layers, loss=CE, **how)
        ]

    assert values(mode="train", seed=3) == values(mode="train", seed=3)
    assert values(mode="train", seed=3) != values(mode="train", seed=4)
    assert values(mode="train", seed=3) != values()


def test_a_frozen_layer_is_measured_and_stays_frozen() -> None:
    model, frozen = net(), net()
    for p in frozen[0].parameters():
        p.requires_grad_(False)
    layers = layers_of(model, pair()[0][:2])
    assert [r["value"] for r in grad_variance([subject(frozen)], layers, loss=CE)] == [
        r["value"] for r in grad_variance([subject(model)], layers, loss=CE)
    ]
    assert [p.requires_grad for p in frozen.parameters()] == [False] * 2 + [True] * 6


def odd() -> Wired:
    """A layer of one weight, one that is cut off, one with a bias alone, and one that is never called."""
    sizes = {"cut": (2, 2), "single": (1, 1), "head": (2, C), "unused": (2, 2)}
    parts = {name: nn.Linear(*size) for name, size in sizes.items()}
    return Wired(lambda m, x: m.head(m.cut(x).detach() + m.single(x[:, :1])), **parts)


def test_every_layer_without_a_value_says_why() -> None:
    model = odd()
    data = (torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1]))
    layers = (*layers_of(model, data[0]), Layer("biases", ("head.bias",)))
    rows = by_layer(grad_variance([subject(model, data)], layers, loss=CE))
    assert {name: r["status"] for name, r in rows.items()} == {
        "cut": "no gradient reaches the layer",
        "single": "a variance needs at least two weights",
        "head": "ok",
        "unused": "unused in the forward pass",
        "biases": "the layer has no weights",
    }
    assert [name for name, r in rows.items() if r["value"] is not None] == ["head"]


@pytest.mark.parametrize("reduction", ["epoch", "batch"])
def test_a_loss_that_is_not_finite_is_said(reduction: str) -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = torch.nan
    layers = layers_of(model, pair()[0][:2])
    rows = grad_variance([subject(model)], layers, loss=CE, reduction=reduction)
    assert {(r["value"], r["status"]) for r in rows} == {
        (None, "the loss of client 'a' is not finite")
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduction": "epochs"}, "mean 'epoch'"),
        ({"tensors": "weight"}, "mean 'weights'"),
        ({"mode": "evaluate"}, "mode"),
        ({"batch": 0}, "batch"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], words: str) -> None:
    layers = layers_of(net(), pair()[0][:2])
    with pytest.raises(UsageError, match=words):
        grad_variance([subject(net())], layers, loss=CE, **change)


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        (
            nn.Linear(4, C),
            (torch.randn(3, 4), torch.tensor([0, 1, C])),
            "to 2.*label 3",
        ),
        (nn.Linear(4, C), (torch.randn(3, 4), torch.tensor([0, 1, -1])), "label -1"),
        (nn.Linear(4, C), (torch.randn(3, 4), torch.rand(3)), "class indices"),
        (
            nn.Conv1d(1, 1, 1),
            (torch.randn(3, 1, 4), torch.tensor([0, 1, 1])),
            r"\(3, 1, 4\)",
        ),
        (
            nn.LSTM(4, 4, batch_first=True),
            (torch.randn(3, 2, 4), torch.tensor([0, 1, 1])),
            "tuple",
        ),
    ],
)
def test_data_that_do_not_fit_are_named(
    model: nn.Module, data: tuple[Tensor, Tensor], words: str
) -> None:
    layer = Layer("all", tuple(name for name, _ in model.named_parameters()))
    with pytest.raises(UsageError, match=words):
        grad_variance([subject(model, data)], [layer], loss=CE)
