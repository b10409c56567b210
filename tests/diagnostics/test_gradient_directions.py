"""Length of gradients and their likeness between clients, against plain backward passes in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diagnostics.gradients.statistics import cosine
from diagnostics.measure import diagnose
from diagnostics.measurement import ClientModel
from diagnostics.metrics.base import METRICS
from diagnostics.metrics.of_gradients import GradNorm, GradSimilarity, GradVariance
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from fl_core.training import losses
from tests.diagnostics.calls import (
    grad_norm,
    grad_similarity,
    grad_variance,
    one_pass as measure,
)

CE = losses.build("cross_entropy")
N, C = 13, 3


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, C)
    ).double()


def pair(seed: int = 1, n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g).double(), torch.randint(C, (n,), generator=g)


def gradient(
    model: nn.Module,
    layer: Layer,
    data: tuple[Tensor, Tensor],
    tensors: str = "weights",
) -> Tensor:
    names = layer.weights if tensors == "weights" else layer.parameters
    own = [dict(model.named_parameters())[name] for name in names]
    return torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(CE(model(data[0]), data[1]), own)]
    )


@pytest.mark.parametrize("tensors", ["weights", "all"])
@pytest.mark.parametrize("batch", [4, 100])
def test_norm_and_means_of_the_whole_gradient(tensors: str, batch: int) -> None:
    model = net()
    layers = layers_of(model, pair()[0][:2])
    found = grad_norm(
        [ClientModel("a", model, pair(), N)],
        layers,
        loss=CE,
        batch=batch,
        tensors=tensors,
    )
    of = {(r["layer"], r["variant"]): r for r in found}
    assert len(found) == 3 * len(layers)
    for layer in layers:
        g = gradient(model, layer, pair(), tensors)
        for variant, expected in zip(
            METRICS["grad_norm"].variants,
            (g.norm(), g.mean(), g.abs().mean()),
            strict=False,
        ):
            assert of[layer.name, variant]["value"] == pytest.approx(
                float(expected), rel=1e-10, abs=1e-15
            )
            assert of[layer.name, variant]["n_params"] == len(g)
            assert of[layer.name, variant]["stderr"] == 0


@pytest.mark.parametrize("batch", [4, 5, 7])
def test_by_batches_the_mean_of_their_norms_with_its_error(batch: int) -> None:
    """A short last batch counts as its samples do: so does repeating each sample's batch once for the sample."""
    model, (x, y) = net(), pair()
    layers = layers_of(model, x[:2])
    found = grad_norm(
        [ClientModel("a", model, (x, y), N)],
        layers,
        loss=CE,
        batch=batch,
        reduction="batch",
    )
    of = {(r["layer"], r["variant"]): r for r in found}
    sizes = torch.tensor([len(part) for part in x.split(batch)]).double()
    for layer in layers:
        pairs = zip(x.split(batch), y.split(batch), strict=True)
        parts = torch.stack([gradient(model, layer, part).norm() for part in pairs])
        made, mean = (
            of[layer.name, "norm_batch"],
            parts.repeat_interleave(sizes.long()).mean(),
        )
        assert made["value"] == pytest.approx(float(mean), rel=1e-10)
        error = (
            ((parts - mean) * sizes / len(x)).square().sum()
            * len(parts)
            / (len(parts) - 1)
        ).sqrt()
        assert made["stderr"] == pytest.approx(float(error), rel=1e-10)
        if len(x) % batch == 0:
            assert made["stderr"] == pytest.approx(
                float(parts.std() / len(parts) ** 0.5), rel=1e-10
            )
        assert made["value"] > float(gradient(model, layer, pair()).norm())
    assert {variant for _, variant in of} == set(METRICS["grad_norm"].variants[3:])


@pytest.mark.parametrize("tensors", ["weights", "all"])
def test_similarity_is_the_cosine_of_the_clients_gradients(tensors: str) -> None:
    models, data = [net(k) for k in range(3)], [pair(k) for k in range(3)]
    layers = layers_of(models[0], data[0][0][:2])
    subjects = [
        ClientModel(name, m, d, N)
        for name, m, d in zip("abc", models, data, strict=True)
    ]
    found = grad_similarity(subjects, layers, loss=CE, batch=4, tensors=tensors)
    of = {(r["client"], r["client_b"], r["layer"]): r for r in found}
    assert len(of) == len(found) == 3 * len(layers)
    for layer in layers:
        for i, j in itertools.combinations(range(3), 2):
            a, b = (gradient(models[k], layer, data[k], tensors) for k in (i, j))
            made = of["abc"[i], "abc"[j], layer.name]
            assert made["value"] == pytest.approx(
                float(torch.cosine_similarity(a, b, dim=0)), rel=1e-9
            )
            assert (made["variant"], made["status"], made["n_samples"]) == (
                "cosine",
                "ok",
                2 * N,
            )


def test_the_same_data_pull_the_same_way_and_scale_does_not_matter() -> None:
    data = {"a": pair(), "b": pair(), "c": pair(7)}
    table = diagnose(net(), data, "grad_similarity", progress=False)
    rows = table.frame.set_index(["client", "client_b", "layer"])["value"].sort_index()
    assert rows["a", "b"].tolist() == pytest.approx([1.0] * 3, abs=1e-12)
    assert (rows["a", "c"].to_numpy() < 1).all()  # one model has pairs: the data differ
    g = torch.randn(50).double()
    assert cosine(g, 1e-30 * g) == pytest.approx(1)
    assert cosine(g, -3 * g) == pytest.approx(-1)
    assert cosine(g, g) <= 1


def test_gradients_that_are_missing_or_zero_have_a_status() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.cut, self.spare = (
                nn.Linear(4, C),
                nn.Linear(4, C),
                nn.Linear(2, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + self.cut(x).detach()

    models = [Part().double() for _ in range(2)]
    layers = layers_of(models[0], pair()[0][:2])
    subjects = [ClientModel(str(k), m, pair(), N) for k, m in enumerate(models)]
    status = {
        r["layer"]: r["status"] for r in grad_similarity(subjects, layers, loss=CE)
    }
    assert status == {
        "used": "ok",
        "cut": "no gradient reaches the layer",
        "spare": "unused in the forward pass",
    }
    assert {
        r["status"] for r in grad_norm(subjects, layers, loss=CE) if r["layer"] == "cut"
    } == {status["cut"]}
    dead = [net(0), net(1)]
    with torch.no_grad():
        dead[1][2].weight.zero_()
    layers = layers_of(dead[0], pair()[0][:2])
    subjects = [
        ClientModel(name, m, pair(), N) for name, m in zip("ab", dead, strict=True)
    ]
    status = {
        r["layer"]: r["status"] for r in grad_similarity(subjects, layers, loss=CE)
    }
    assert status["0"].startswith("the gradient of layer '0' at client 'b' ")
    assert status["4"] == "ok"
    with torch.no_grad():
        dead[1][2].weight.fill_(torch.nan)
    assert {r["status"] for r in grad_similarity(subjects, layers, loss=CE)} == {
        "the loss of client 'b' is not finite"
    }
    alone = grad_similarity(subjects[:1], layers, loss=CE)
    assert {(r["client"], r["status"]) for r in alone} == {
        ("", "needs at least two clients")
    }


def test_metrics_of_the_whole_gradient_share_it() -> None:
    model, seen = net(), []
    layers = layers_of(model, pair()[0][:2])
    subjects, how = (
        [ClientModel(name, model, pair(k), N) for k, name in enumerate("ab")],
        {"loss": CE, "batch": 4},
    )
    metrics: list[Any] = [
        GradVariance(),
        GradNorm(),
        GradSimilarity(),
        GradNorm("batch"),
    ]
    model.register_forward_hook(lambda *_: seen.append(1))
    together = measure(subjects, layers, metrics, **how)
    assert len(seen) == 2 * 4
    alone = [
        *grad_variance(subjects, layers, **how),
        *grad_norm(subjects, layers, **how),
        *grad_similarity(subjects, layers, **how),
        *grad_norm(subjects, layers, reduction="batch", **how),
    ]
    assert together == alone


def test_bad_options_are_named() -> None:
    layers = layers_of(net(), pair()[0][:2])
    with pytest.raises(UsageError, match="mean 'batch'"):
        grad_norm([], layers, loss=CE, reduction="batches")
    with pytest.raises(UsageError, match="tensors"):
        grad_similarity([], layers, loss=CE, tensors="some")
