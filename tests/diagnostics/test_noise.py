"""Per-sample gradient noise against a loop over single samples in float64, by every way of computing it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diagnostics.gradients.noise import COUPLED
from diagnostics.measurement import ClientModel
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.rows import Row
from fl_core.training import losses
from tests.diagnostics.calls import grad_noise
from tests.networks import Wired

CE = losses.build("cross_entropy")
N, C = 11, 3


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.ReLU(inplace=True),  # on the input itself
        nn.Conv2d(1, 4, 3, padding=1, groups=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.LayerNorm(5),
        nn.GELU(),
        nn.Linear(5, C),
    )


def attending() -> Wired:
    """Tokens, an embedding used beside a tied output, attention with a formula for none of its own tensors."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.norm(m.table(x))
        h = h + m.attention(h, h, h, need_weights=False)[0]
        h = m.twice(torch.tanh(m.twice(h))).mean(1)
        return (
            m.head(h) + (h @ m.head.weight.T) ** 2
        )  # the weight is used outside its module too

    parts = {"table": nn.Embedding(7, 4, padding_idx=0), "norm": nn.LayerNorm(4)}
    parts["attention"] = nn.MultiheadAttention(4, 2, batch_first=True)
    return Wired(run, **parts, twice=nn.Linear(4, 4), head=nn.Linear(4, C))


def recurrent() -> Wired:
    lstm = nn.LSTM(4, 5, batch_first=True)
    return Wired(
        lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=lstm, head=nn.Linear(5, C)
    )


def pictures(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 4, 4, generator=g).double(), torch.randint(
        C, (n,), generator=g
    )


def tokens(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randint(7, (n, 5), generator=g), torch.randint(C, (n,), generator=g)


def sequences(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, 4, generator=g).double(), torch.randint(
        C, (n,), generator=g
    )


def built(kind: Any) -> Any:
    torch.manual_seed(0)
    model = kind().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
    return model


def reference(
    model: nn.Module,
    layer: Layer,
    data: tuple[Tensor, Tensor],
    tensors: str,
    loss: losses.Loss,
) -> float:
    """Tr S of the gradients of single samples."""
    params = dict(model.named_parameters())
    own = [
        params[name]
        for name in (layer.weights if tensors == "weights" else layer.parameters)
    ]
    model.eval()
    vectors = []
    for x, y in zip(*data, strict=True):
        value = loss.per_sample(model(x[None].clone()), y[None]).sum()
        grads = torch.autograd.grad(value, own, allow_unused=True)
        filled = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(own, grads, strict=True)
        ]
        vectors.append(torch.cat([g.reshape(-1) for g in filled]))
    return float(torch.stack(vectors).var(0).sum())


def by_layer(rows: Sequence[Row], variant: str = "trace") -> dict[str, Row]:
    return {r["layer"]: r for r in rows if r["variant"] == variant}


@pytest.mark.parametrize(
    ("tensors", "batch", "estimator"),
    [
        ("weights", 1, "auto"), ("all", 4, "auto"), ("weights", 100, "auto"), ("all", 1, "single"),
        ("weights", 4, "single"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "data"),
    [(conv_net, pictures), (attending, tokens), (recurrent, sequences)],
)
def test_noise_is_the_trace_of_the_covariance(
    kind: Any, data: Any, tensors: str, batch: int, estimator: str
) -> None:
    model, loss = (
        built(kind),
        losses.build("player_focal", gamma=1.5) if batch == 4 else CE,
    )
    layers = layers_of(model, data()[0][:2], by="module")
    found = grad_noise(
        [ClientModel("a", model, data(), N)],
        layers,
        loss=loss,
        batch=batch,
        tensors=tensors,
        estimator=estimator,
    )
    for layer in layers:
        made = by_layer(found)[layer.name]
        assert made["status"] == "ok", layer.name
        expected = reference(model, layer, data(), tensors, loss)
        assert made["value"] == pytest.approx(expected, rel=1e-8, abs=1e-14), layer.name
        assert (
            by_layer(found, "per_parameter")[layer.name]["value"]
            == made["value"] / made["n_params"]
        )
        assert made["n_samples"] == N


def test_the_estimator_says_how() -> None:
    ways = {}
    for kind, data in (
        (conv_net, pictures),
        (attending, tokens),
        (recurrent, sequences),
    ):
        model = built(kind)
        layers = layers_of(model, data()[0][:2], by="module")
        found = by_layer(
            grad_noise([ClientModel("a", model, data(), N)], layers, loss=CE)
        )
        ways |= {
            (kind.__name__, name): made["estimator"] for name, made in found.items()
        }
    assert {way for (kind, _), way in ways.items() if kind == "conv_net"} == {"ghost"}
    assert ways["attending", "table"] == ways["attending", "norm"] == "ghost"
    assert (
        ways["attending", "attention"]
        == ways["attending", "twice"]
        == ways["attending", "head"]
        == "single"
    )
    assert (ways["recurrent", "lstm"], ways["recurrent", "head"]) == ("single", "ghost")


def test_ghost_alone_says_where_it_has_no_formula() -> None:
    model = built(recurrent)
    layers = layers_of(model, sequences()[0][:2])
    found = by_layer(
        grad_noise(
            [ClientModel("a", model, sequences(), N)],
            layers,
            loss=CE,
            estimator="ghost",
        )
    )
    assert found["head"]["status"] == "ok"
    assert "no formula" in found["lstm"]["status"]
    assert "lstm" in found["lstm"]["status"]


def test_coupled_samples_have_no_gradients_of_their_own() -> None:
    model = built(conv_net)
    layers = layers_of(model, pictures()[0][:2], by="module")
    found = by_layer(
        grad_noise(
            [ClientModel("a", model, pictures(), N)], layers, loss=CE, mode="train"
        )
    )
    assert found["1"]["status"] == COUPLED  # before the batch normalisation
    assert {found[name]["status"] for name in ("2", "4", "8", "11")} == {"ok"}


def test_equal_samples_have_no_noise_and_one_sample_has_no_covariance() -> None:
    model, (x, y) = built(conv_net), pictures()
    layers = layers_of(model, x[:2])
    same = grad_noise(
        [ClientModel("a", model, (x[:1].repeat(5, 1, 1, 1), y[:1].repeat(5)), 5)],
        layers,
        loss=CE,
        batch=2,
    )
    assert all(0 <= made["value"] < 1e-12 for made in same)
    one = grad_noise([ClientModel("a", model, (x[:1], y[:1]), 1)], layers, loss=CE)
    assert {made["status"] for made in one} == {
        "a covariance needs at least two samples"
    }


def test_a_loss_that_is_not_finite_and_a_bad_option_are_named() -> None:
    model = built(conv_net)
    layers = layers_of(model, pictures()[0][:2])
    with torch.no_grad():
        model[8].weight[0, 0] = torch.nan
    found = grad_noise([ClientModel("a", model, pictures(), N)], layers, loss=CE)
    assert {made["status"] for made in found} == {
        "the loss of client 'a' is not finite"
    }
    with pytest.raises(UsageError, match="mean 'ghost'"):
        grad_noise([], layers, loss=CE, estimator="gost")
    with pytest.raises(UsageError, match="tensors"):
        grad_noise([], layers, loss=CE, tensors="some")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_gradients_of_half_precision_do_not_vanish(dtype: torch.dtype) -> None:
    """A head of small weights makes the gradients of the layers before it small."""
    g = torch.Generator().manual_seed(4)
    data = (
        torch.randn(256, 1, 4, 4, generator=g).to(dtype),
        torch.randint(C, (256,), generator=g),
    )
    model = built(conv_net)
    with torch.no_grad():
        model[11].weight.mul_(0.01)
    model = model.to(dtype)
    layers = layers_of(model, data[0][:2], by="module")
    found = by_layer(
        grad_noise([ClientModel("a", model, data, 256)], layers, loss=CE, tensors="all")
    )
    assert {made["estimator"] for made in found.values()} == {"ghost, all tensors"}
    exact, same = copy.deepcopy(model).double(), (data[0].double(), data[1])
    for layer in layers:
        assert found[layer.name]["value"] == pytest.approx(
            reference(exact, layer, same, "all", CE), rel=0.03
        )
