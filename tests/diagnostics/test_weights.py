"""What the weights alone say, against numpy in float64."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics.measurement import ClientModel, NoValue
from diagnostics.metrics.of_weights import _distances
from fl_core.layers import Layer, layers_of
from tests.conftest import refuses
from tests.diagnostics.calls import (
    bn_scale,
    update_magnitude,
    weight_divergence,
    weight_magnitude,
)


def net(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
    )
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.normal_(module.weight)
    return model


X = torch.randn(4, 1, 4, 4)
LAYERS = layers_of(net(), X)


def subjects(*models):
    models = models or tuple(net(k) for k in range(3))
    data = (X, torch.zeros(4).long())
    return [ClientModel(n, m, data, 4) for n, m in zip("abcd", models, strict=False)]


def found(rows):
    """Each row by its clients, layer and variant."""
    keys = ("client", "client_b", "layer", "variant")
    of = {tuple(r[key] for key in keys if r[key]): r for r in rows}
    assert len(of) == len(rows)
    return of


def vector(model, layer, tensors="weights"):
    names = layer.weights if tensors == "weights" else layer.parameters
    arrays = [model.get_parameter(name).detach().double().numpy() for name in names]
    return np.concatenate([values.ravel() for values in arrays])


@pytest.mark.parametrize("tensors", ["weights", "all"])
def test_values_are_those_of_numpy(tensors):
    who, start = subjects(), net(9)
    rows = weight_divergence(who, LAYERS, tensors=tensors)
    rows += update_magnitude(who, LAYERS, start=start.state_dict(), tensors=tensors)
    rows += weight_magnitude(who, LAYERS, tensors=tensors)
    assert update_magnitude(who, LAYERS, start=start, tensors=tensors) == rows[18:36]
    keys = ("metric", "client", "client_b", "layer", "variant")
    of = {tuple(r[key] for key in keys): r["value"] for r in rows}
    norm, expected = np.linalg.norm, {}
    for layer, (s, t) in itertools.product(LAYERS, itertools.combinations(who, 2)):
        a, b = (vector(k.model, layer, tensors) for k in (s, t))
        at = ("weight_divergence", s.client, t.client, layer.name)
        expected[*at, "relative_l2"] = 2 * norm(a - b) / (norm(a) + norm(b))
        expected[*at, "cosine"] = 1 - a @ b / np.sqrt(a @ a * (b @ b))
    for subject, layer in itertools.product(who, LAYERS):
        w, w0 = (vector(m, layer, tensors) for m in (subject.model, start))
        at = (subject.client, "", layer.name)
        expected["update_magnitude", *at, "l2"] = norm(w - w0)
        expected["update_magnitude", *at, "relative_l2"] = norm(w - w0) / norm(w0)
        expected["weight_magnitude", *at, "mean_abs"] = np.abs(w).mean()
        expected["weight_magnitude", *at, "l2"] = norm(w)
    assert of == pytest.approx(expected, rel=1e-10)
    for (client, layer, _), row in found(bn_scale(who, LAYERS)).items():
        place = {"0": 1, "3": 4}.get(layer)
        if place is None:
            assert row["status"] == "no normalisation with a scale in the layer"
            continue
        gamma = who["abc".index(client)].model[place].weight.detach().double().abs()
        assert row["value"] == pytest.approx(float(gamma.mean()), rel=1e-10)


def test_equal_opposite_and_zero_weights():
    models = [net(), net(), net()]
    with torch.no_grad():
        for p in models[1].parameters():
            p.neg_()
        for p in models[2][5].parameters():
            p.zero_()
    who = subjects(*models)
    of = found(weight_divergence(who, LAYERS))
    for *at, value in (
        (*"ab0", "relative_l2", 2),
        (*"ab0", "cosine", 2),
        (*"ac0", "relative_l2", 0),
        (*"ac0", "cosine", 0),
        (*"ac5", "relative_l2", 2),
    ):
        assert of[tuple(at)]["value"] == pytest.approx(value, abs=1e-12)
    zero = "the weights of layer '5' are zero"
    assert of[*"ac5", "cosine"]["status"].startswith(zero)
    twins = weight_divergence(subjects(models[2], models[2]), LAYERS)
    assert [r["status"] != "ok" for r in twins] == [r["layer"] == "5" for r in twins]
    alone = {(r["client"], r["status"]) for r in weight_divergence(who[:1], LAYERS)}
    assert alone == {("", "needs at least two models")}


def test_without_a_start_or_with_another_model_s():
    (status,) = {r["status"] for r in update_magnitude(subjects(), LAYERS)}
    assert "option start" in status
    state = net().state_dict()
    other = {**state, "0.weight": torch.zeros(3, 1, 2, 2)}
    for start, words in (({}, "start"), (other, r"'0.weight'.*\(3, 1, 2, 2\)")):
        with refuses(words):
            update_magnitude(subjects(), LAYERS, start=start)
    zero = {name: torch.zeros_like(t) for name, t in state.items()}
    rows = update_magnitude(subjects(net()), LAYERS, start=zero)
    fine = {r["variant"]: r["status"] == "ok" for r in rows}
    assert fine == {"relative_l2": False, "l2": True}


def test_weights_that_are_missing_have_a_status():
    bare, start = Layer("bare", ("0.bias",)), {"start": net(1)}
    computes = (weight_divergence, update_magnitude, weight_magnitude)
    for compute, how in zip(computes, ({}, start, {}), strict=True):
        statuses = {row["status"] for row in compute(subjects(), [bare], **how)}
        assert statuses == {"the layer has no weights"}


def test_a_pair_of_clients_has_the_reason_of_the_one_without_a_value():
    first, second, zero = (NoValue(word) for word in ("first", "second", "zero"))
    w = torch.ones(3)
    for a, b, reason in (
        (first, w, first),
        (w, second, second),
        (first, second, first),
    ):
        assert _distances(a, b, zero) == dict.fromkeys(
            ("relative_l2", "cosine"), reason
        )
    distances = _distances(w, 2 * w, zero)
    assert distances["cosine"] == pytest.approx(0.0, abs=1e-6)
