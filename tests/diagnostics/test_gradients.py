"""Variance, length and likeness of gradients against plain backward passes in float64, and where there is no value."""

import itertools

import pytest
import torch
from torch import nn

from diagnostics.gradients import cosine, variance
from diagnostics.measurement import READING, ClientModel, Clock
from diagnostics.metrics.of_gradients import GradNorm, GradSimilarity
from fl_core.layers import Layer, layers_of
from fl_core.training import losses
from tests.conftest import refuses
from tests.diagnostics.calls import (
    grad_norm,
    grad_similarity,
    grad_variance,
    one_pass,
)
from tests.made import Wired, cnn, labelled

CE, FOCAL = (
    losses.build("cross_entropy"),
    losses.build("player_focal", gamma=2.0),
)
N, C = 23, 3


def net(seed=0):
    return cnn(2, act=nn.Tanh, seed=seed).double()


def pair(n=N, seed=1):
    return labelled(n, seed, (1, 6, 6), torch.float64)


LAYERS = layers_of(net(), pair()[0][:2])


def clients(models, data=None):
    data = data or [pair()] * len(models)
    parts = zip("abcd", models, data, strict=False)
    return [ClientModel(*model_and_data, N) for model_and_data in parts]


def gradient(model, layer, data, tensors="weights", loss=CE):
    names = layer.weights if tensors == "weights" else layer.parameters
    parameters = [model.get_parameter(name) for name in names]
    gradients = torch.autograd.grad(loss(model.eval()(data[0]), data[1]), parameters)
    return torch.cat([g.reshape(-1) for g in gradients])


def by_layer(rows, variant=""):
    return {r["layer"]: r for r in rows if not variant or r["variant"] == variant}


@pytest.mark.parametrize("tensors", ["weights", "all"])
@pytest.mark.parametrize("loss", [CE, FOCAL], ids=lambda loss: loss.name)
def test_variance_and_lengths_are_those_of_the_full_gradient_whatever_the_batch(
    tensors, loss
):
    model, how = net(), {"loss": loss, "tensors": tensors}
    assert len(LAYERS[0].weights) == 2  # pooled over a convolution and its norm
    for batch in (1, 7, 100):
        rows = grad_variance(clients([model]), LAYERS, batch=batch, **how)
        rows += grad_norm(clients([model]), LAYERS, batch=batch, **how)
        assert len(rows) == 4 * len(LAYERS)
        for layer in LAYERS:
            g = gradient(model, layer, pair(), tensors, loss)
            for variant, expected in (
                ("epoch", g.var()),
                ("norm", g.norm()),
                ("mean", g.mean()),
                ("mean_abs", g.abs().mean()),
            ):
                row = by_layer(rows, variant)[layer.name]
                assert row["value"] == pytest.approx(
                    float(expected), rel=1e-10, abs=1e-15
                )
                stated = (row["stderr"], row["n_samples"], row["n_params"])
                assert stated == (0, N, len(g))


@pytest.mark.parametrize("batch", [5, 23])
def test_by_batches_their_mean_with_its_standard_error(batch):
    """A short last batch counts as its samples do."""
    model, (x, y) = net(), pair(21)
    how = {"loss": CE, "batch": batch, "reduction": "batch"}
    shares = torch.tensor([len(part) for part in x.split(batch)]).double() / len(x)
    n = len(shares)
    for compute, variant, number in (
        (grad_variance, "batch", torch.var),
        (grad_norm, "norm_batch", torch.norm),
    ):
        rows = by_layer(compute(clients([model], [(x, y)]), LAYERS, **how), variant)
        for layer in LAYERS:
            batches = zip(x.split(batch), y.split(batch), strict=True)
            of_batches = [number(gradient(model, layer, part)) for part in batches]
            parts, row = torch.stack(of_batches), rows[layer.name]
            mean = (shares * parts).sum()
            assert row["value"] == pytest.approx(float(mean), rel=1e-10)
            spread = (shares * (parts - mean)).square().sum()
            if n == 1:
                assert row["stderr"] is None
                continue
            error = float((spread * n / (n - 1)).sqrt())
            assert row["stderr"] == pytest.approx(error, rel=1e-10)


@pytest.mark.parametrize("tensors", ["weights", "all"])
def test_similarity_is_the_cosine_of_the_clients_gradients(tensors):
    models, data = [net(k) for k in range(3)], [pair(seed=k) for k in range(3)]
    how = {"loss": CE, "batch": 4, "tensors": tensors}
    rows = grad_similarity(clients(models, data), LAYERS, **how)
    of = {(r["client"], r["client_b"], r["layer"]): r for r in rows}
    assert len(of) == len(rows) == 3 * len(LAYERS)
    for layer, (i, j) in itertools.product(LAYERS, itertools.combinations(range(3), 2)):
        a, b = (gradient(models[k], layer, data[k], tensors) for k in (i, j))
        row = of["abc"[i], "abc"[j], layer.name]
        expected = float(torch.cosine_similarity(a, b, dim=0))
        assert row["value"] == pytest.approx(expected, rel=1e-9)
        stated = (row["variant"], row["status"], row["n_samples"])
        assert stated == ("cosine", "ok", 2 * N)


@pytest.mark.parametrize(
    ("option", "said"), [("tensors", "choice of tensors"), ("reduction", "reduction")]
)
def test_options_of_a_pass_are_within_their_bounds(option, said):
    """Options that are made without their metric are checked, too."""
    with refuses(f"unknown {said} 'x'"):
        one_pass(clients([net()]), LAYERS, [GradNorm(**{option: "x"})], loss=CE)


def test_scale_does_not_matter():
    g = torch.randn(50).double()
    assert cosine(g, 1e-30 * g) == pytest.approx(1)
    assert cosine(g, -3 * g) == pytest.approx(-1)
    tiny = torch.tensor([1.0, 3.0]) * 1e-25  # their squares are no float32
    assert float(variance([tiny])) == pytest.approx(2e-50, rel=1e-6)


def odd():
    """A layer of one weight, one that is cut off, and one that is never called."""
    sizes = {"cut": (2, 2), "single": (1, 1), "head": (2, C), "unused": (2, 2)}
    parts = {name: nn.Linear(*size) for name, size in sizes.items()}
    return Wired(lambda m, x: m.head(m.cut(x).detach() + m.single(x[:, :1])), **parts)


def test_every_layer_without_a_value_says_why():
    models, data = [odd(), odd()], (torch.randn(5, 2), torch.arange(5) % C)
    layers = (*layers_of(models[0], data[0]), Layer("biases", ("head.bias",)))
    expected = {
        "cut": "no gradient reaches the layer",
        "single": "a variance needs at least two weights",
        "head": "ok",
        "unused": "unused in the forward pass",
        "biases": "the layer has no weights",
    }
    for compute in (grad_variance, grad_norm, grad_similarity):
        rows = by_layer(compute(clients(models, [data, data]), layers, loss=CE))
        if compute is not grad_variance:
            expected["single"] = "ok"
        assert {name: r["status"] for name, r in rows.items()} == expected
        for row in rows.values():
            assert (row["value"] is not None) == (row["status"] == "ok")
    models = [net(0), net(1)]
    with torch.no_grad():
        models[1][6].weight.zero_()
    similarities = by_layer(grad_similarity(clients(models), LAYERS, loss=CE))
    start = "the gradient of layer '0' at client 'b' "
    assert similarities["0"]["status"].startswith(start)
    assert similarities["6"]["status"] == "ok"
    alone = grad_similarity(clients(models[:1]), LAYERS, loss=CE)
    assert {r["status"] for r in alone} == {"needs at least two models"}


@pytest.mark.parametrize(
    ("reader", "share"), [(GradNorm(), 1.0), (GradSimilarity(), READING)]
)
def test_a_pass_may_take_the_whole_budget_unless_pairs_are_compared_after_it(
    monkeypatch, reader, share
):
    shares, within = [], Clock.within

    def spy(clock, part):
        shares.append(part)
        return within(clock, part)

    monkeypatch.setattr(Clock, "within", spy)
    one_pass(clients([net(), net()]), LAYERS, [reader], loss=CE)
    assert shares[0] == share
