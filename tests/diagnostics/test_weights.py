"""What the weights alone say, against numpy in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics import measure
from diagnostics.measure import diagnose
from diagnostics.measurement import ClientModel
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.layers import Layer, layers_of
from tests.diagnostics.calls import (
    bn_scale,
    update_magnitude,
    weight_divergence,
    weight_magnitude,
)


def net(seed: int = 0) -> nn.Module:
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


def subjects(count: int = 3) -> list[ClientModel]:
    return [
        ClientModel("abc"[k], net(k), (X, torch.zeros(4).long()), 4)
        for k in range(count)
    ]


def vector(model: nn.Module, layer: Layer, tensors: str) -> Any:
    names = layer.weights if tensors == "weights" else layer.parameters
    return np.concatenate(
        [
            dict(model.named_parameters())[n].detach().double().numpy().ravel()
            for n in names
        ]
    )


@pytest.mark.parametrize("tensors", ["weights", "all"])
def test_divergence_of_every_pair(tensors: str) -> None:
    who = subjects()
    found = weight_divergence(who, LAYERS, tensors=tensors)
    of = {(r["client"], r["client_b"], r["layer"], r["variant"]): r for r in found}
    assert len(of) == len(found) == 3 * 3 * 2
    for layer, (s, t) in itertools.product(LAYERS, itertools.combinations(who, 2)):
        a, b = (vector(k.model, layer, tensors) for k in (s, t))
        both = np.linalg.norm(a) + np.linalg.norm(b)
        expected = {
            "relative_l2": np.linalg.norm(a - b) / both * 2,
            "cosine": 1 - a @ b / np.sqrt(a @ a * (b @ b)),
        }
        for variant, value in expected.items():
            made = of[s.client, t.client, layer.name, variant]
            assert made["value"] == pytest.approx(value, rel=1e-10)
            assert made["n_params"] == len(a)


def test_equal_opposite_and_zero_weights() -> None:
    models = [net(), net(), net()]
    with torch.no_grad():
        for p in models[1].parameters():
            p.neg_()
        for p in models[2][5].parameters():
            p.zero_()
    who = [ClientModel(name, m, None, 1) for name, m in zip("abc", models, strict=True)]
    rows = weight_divergence(who, LAYERS)
    of = {(r["client"] + r["client_b"], r["layer"], r["variant"]): r for r in rows}
    assert of["ab", "0", "relative_l2"]["value"] == pytest.approx(2)
    assert of["ab", "0", "cosine"]["value"] == pytest.approx(2)
    assert of["ac", "0", "relative_l2"]["value"] == 0
    assert of["ac", "0", "cosine"]["value"] == pytest.approx(0, abs=1e-12)
    assert of["ac", "5", "relative_l2"]["value"] == pytest.approx(2)
    assert of["ac", "5", "cosine"]["status"].startswith(
        "the weights of layer '5' are zero"
    )
    twins = weight_divergence([who[2], ClientModel("d", models[2], None, 1)], LAYERS)
    assert [r["status"] != "ok" for r in twins] == [r["layer"] == "5" for r in twins]
    alone = weight_divergence(who[:1], LAYERS)
    assert {(r["client"], r["status"]) for r in alone} == {
        ("", "needs at least two models")
    }


@pytest.mark.parametrize("tensors", ["weights", "all"])
@pytest.mark.parametrize("as_tree", [False, True])
def test_update_from_the_common_start(tensors: str, as_tree: bool) -> None:
    start = net(9)
    given = (
        {name: t.detach() for name, t in start.state_dict().items()}
        if as_tree
        else start
    )
    of = {
        (r["client"], r["layer"], r["variant"]): r["value"]
        for r in update_magnitude(subjects(), LAYERS, start=given, tensors=tensors)
    }
    for subject, layer in itertools.product(subjects(), LAYERS):
        w, w0 = (vector(m, layer, tensors) for m in (subject.model, start))
        length = np.linalg.norm(w - w0)
        assert of[subject.client, layer.name, "l2"] == pytest.approx(length, rel=1e-10)
        assert of[subject.client, layer.name, "relative_l2"] == pytest.approx(
            length / np.linalg.norm(w0), rel=1e-10
        )


def test_without_a_start_or_with_another_model_s() -> None:
    (status,) = {r["status"] for r in update_magnitude(subjects(), LAYERS)}
    assert "option start" in status
    with pytest.raises(UsageError, match="start"):
        update_magnitude(subjects(), LAYERS, start={})
    other = dict(net().state_dict()) | {"0.weight": torch.zeros(3, 1, 2, 2)}
    with pytest.raises(UsageError, match=r"'0.weight'.*\(3, 1, 2, 2\)"):
        update_magnitude(subjects(), LAYERS, start=other)
    zero = {name: torch.zeros_like(t) for name, t in net().state_dict().items()}
    rows = update_magnitude(subjects(1), LAYERS, start=zero)
    assert {r["variant"]: r["status"] == "ok" for r in rows} == {
        "relative_l2": False,
        "l2": True,
    }


def test_after_one_epoch_the_update_is_measured_from_the_task_s_start() -> None:
    task = runner.assemble(
        RunConfig(dataset="heart", algorithm="fedavg", rounds=2, seed=3)
    )
    report = measure.diagnose_task(task, ["update_magnitude"], progress=False)
    models, _ = runner.train_first_round(task, measure.instruments().observers)
    name, model = next(iter(models.items()))
    layer = report.layers[0]
    w, w0 = (vector(m, layer, "weights") for m in (model, task.model))
    expected = np.linalg.norm(w - w0) / np.linalg.norm(w0)
    assert (
        0
        < report.values("update_magnitude").loc[layer.name, name]
        == pytest.approx(expected, rel=1e-10)
    )


def test_magnitudes_and_scales() -> None:
    of = {
        (r["client"], r["layer"], r["variant"]): r["value"]
        for r in weight_magnitude(subjects(), LAYERS)
    }
    scale = {(r["client"], r["layer"]): r for r in bn_scale(subjects(), LAYERS)}
    for subject, layer in itertools.product(subjects(), LAYERS):
        w = vector(subject.model, layer, "weights")
        assert of[subject.client, layer.name, "mean_abs"] == pytest.approx(
            np.abs(w).mean(), rel=1e-10
        )
        assert of[subject.client, layer.name, "l2"] == pytest.approx(
            np.linalg.norm(w), rel=1e-10
        )
        norm = {"0": 1, "3": 4}.get(layer.name)
        made = scale[subject.client, layer.name]
        if norm is None:
            assert made["status"] == "no normalisation with a scale in the layer"
        else:
            gamma = subject.model[norm].weight.detach().double().abs()
            assert made["value"] == pytest.approx(float(gamma.mean()), rel=1e-10)
            assert made["n_params"] == len(gamma)


def test_weights_that_are_missing_or_not_finite_have_a_status() -> None:
    bare, model = Layer("bare", ("0.bias",)), net()
    with torch.no_grad():
        model[5].weight[0, 0] = torch.inf
        model[1].weight[0] = torch.nan
    who = [ClientModel("a", model, None, 1), ClientModel("b", net(), None, 1)]
    for compute, how in (
        (weight_divergence, {}),
        (update_magnitude, {"start": net(1)}),
        (weight_magnitude, {}),
    ):
        rows: Any = compute(who[:2], [bare, LAYERS[2]], **how)  # type: ignore[operator]
        assert {r["status"] for r in rows if r["layer"] == "bare"} == {
            "the layer has no weights"
        }
        assert {
            r["status"] for r in rows if r["layer"] == "5" and r["client"] == "a"
        } == {"the weights of layer '5' are not finite"}
        with pytest.raises(UsageError, match="tensors"):
            compute(who, LAYERS, tensors="some", **how)  # type: ignore[operator]
    assert bn_scale(who[:1], LAYERS[:1])[0]["status"].startswith(
        "the scales of layer '0' "
    )


def test_a_layer_that_no_pass_reaches_has_weights_all_the_same() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    report = diagnose(
        model,
        (torch.randn(5, 4), torch.zeros(5).long()),
        "weight_magnitude",
        progress=False,
    )
    assert report.values("weight_magnitude").notna().all(axis=None)
