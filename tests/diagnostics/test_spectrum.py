"""Eigenvalues of layers' Hessian blocks against dense decompositions and curvlinops; the density's moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from curvlinops import HessianLinearOperator
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.func import functional_call

from diagnostics.curvature.model import Differentiable
from diagnostics.curvature.spectrum import (
    BlockHessian,
    _lanczos,
    density_mean,
    hessian_spectrum,
    smooth_density,
    spectral_density,
)
from diagnostics.measure import diagnose
from fl_core.errors import RunError, UsageError
from fl_core.layers import Layer
from fl_core.training.losses import build
from tests.diagnostics.test_hessian_estimates import (
    block,
    images,
    loose,
    mlp,
    pair,
    tokens,
)

CE = build("cross_entropy")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def values_of(
    model: nn.Module, data: tuple[Tensor, Tensor], names: tuple[str, ...]
) -> np.ndarray:
    return np.linalg.eigvalsh(block(model, data, names).numpy())[::-1]


@pytest.mark.parametrize(
    ("build_model", "dense", "batch"),
    [
        (mlp, 1000, 4),
        (lambda: mlp(nn.Tanh), 0, 100),
        (images, 0, 4),
        (tokens, 1000, 4),
        (tokens, 0, 100),
    ],
)
def test_largest_eigenvalues(
    build_model: object, dense: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diagnostics.curvature.spectrum.DENSE", dense)
    model: nn.Module = build_model()  # type: ignore[operator]
    data = (
        pair(9, 6, tokens=5)
        if build_model is tokens
        else pair(9, *((4,) if len(model) == 5 else (2, 5, 5)))
    )
    layers = loose(model)
    for layer, result in zip(
        layers,
        hessian_spectrum(model, data, layers, loss=CE, tol=1e-8, batch=batch),
        strict=True,
    ):
        truth = values_of(model, data, layer.parameters)
        assert result.status == "ok"
        small = result.n_params <= max(dense, 4)
        assert result.estimator == (
            "dense" if small else "lanczos(tol=1e-08), error = residual"
        )
        assert result.eigenvalues == pytest.approx(truth[:3], rel=1e-6, abs=1e-9)
        for value, error in zip(result.eigenvalues, result.errors, strict=True):
            assert np.abs(truth - value).min() <= error + 1e-12


def test_curvlinops_finds_the_same() -> None:
    model, data = mlp(nn.Tanh), pair(12, 4)
    layer = loose(model)[0]
    (ours,) = hessian_spectrum(
        model, data, [layer], loss=CE, k=2, tol=1e-8, dtype=torch.float64
    )
    parameters = [model.get_parameter(name) for name in layer.parameters]
    operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [data])
    theirs = eigsh(operator.to_scipy(), k=2, which="LA", return_eigenvectors=False)[
        ::-1
    ]
    assert ours.eigenvalues == pytest.approx(theirs, rel=1e-6)


def test_train_mode_is_one_batch_s_own_hessian() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    ).double()
    data = pair(12, 4)
    (ours,) = hessian_spectrum(
        model, data, loose(model)[:1], loss=CE, mode="train", k=1
    )
    model.train()
    own = {name: p.detach() for name, p in model.named_parameters()}
    weight = own["0.weight"]

    def of(w: Tensor) -> Tensor:
        out = functional_call(
            model, {**own, "0.weight": w.reshape(weight.shape)}, (data[0],)
        )
        return CE(out, data[1])

    truth = np.linalg.eigvalsh(
        torch.autograd.functional.hessian(of, weight.reshape(-1)).numpy()
    )[-1]
    assert ours.eigenvalues[0] == pytest.approx(
        truth, rel=1e-6
    )  # the bias before a batch norm has no effect


def test_degenerate_layers() -> None:
    model = mlp()
    with torch.no_grad():
        for name in ("2.weight", "2.bias"):
            model.get_parameter(name).zero_()
    dead, _, head = hessian_spectrum(model, pair(6, 4), loose(model), loss=CE)
    assert dead.eigenvalues == (0.0, 0.0, 0.0)
    assert head.eigenvalues[0] > 0
    tiny = nn.Sequential(
        nn.Linear(4, 1, bias=False), nn.Linear(1, 2, bias=False)
    ).double()
    frame = diagnose(
        tiny.float(),
        (pair(6, 4)[0].float(), pair(6, 4, classes=2)[1]),
        "hessian_spectrum",
        progress=False,
    )
    status = {
        (r["layer"], r["variant"]): r["status"] for r in frame.frame.to_dict("records")
    }
    assert status["1", "top3"] == "layer '1' has 2 eigenvalues"
    assert status["0", "top3"] == "ok"
    assert frame.plot("hessian_spectrum") is not None
    (nothing,) = hessian_spectrum(model, pair(6, 4), [Layer("none", ())], loss=CE)
    assert nothing.status == "no parameters"
    with torch.no_grad():
        model.get_parameter("2.bias")[0] = math.nan
    assert {
        r.status for r in hessian_spectrum(model, pair(6, 4), loose(model), loss=CE)
    } == {
        "the loss is not finite: parameter '2.bias' of layer '2' holds NaN or infinity"
    }
    with pytest.raises(RunError, match=r"loss.*finite"):
        spectral_density(model, pair(6, 4), loose(model)[0], loss=CE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 0}, "at least 1"),
        ({"tol": 0.0}, "above 0"),
        ({"mode": "evaluation"}, "mode"),
    ],
)
def test_bad_requests(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hessian_spectrum(mlp(), pair(4, 4), loose(mlp()), loss=CE, **change)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_density_of_a_small_block_is_its_spectrum(position: int) -> None:
    model, data = mlp(nn.Tanh), pair(12, 4)
    layer = loose(model)[position]
    truth = values_of(model, data, layer.parameters)
    nodes, weights = spectral_density(
        model, data, layer, loss=CE, steps=20, repeats=2, dtype=torch.float64
    )
    np.testing.assert_allclose(nodes[0], truth[::-1], atol=1e-12)
    assert (weights == 1 / len(truth)).all()
    assert density_mean(nodes, weights) == (pytest.approx(truth.mean(), rel=1e-9), 0.0)
    grid = np.linspace(nodes.min() - 1, nodes.max() + 1, 4000)
    density = smooth_density(grid, nodes, weights, 0.1)
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    assert (density >= 0).all()
    assert np.trapezoid(density * grid, grid) == pytest.approx(
        (weights * nodes).sum(), abs=1e-3
    )


def wide(outputs: int) -> tuple[nn.Module, tuple[Tensor, Tensor], Layer]:
    model = nn.Sequential(
        nn.Linear(4, outputs), nn.Tanh(), nn.Linear(outputs, 3)
    ).double()
    return model, pair(12, 4), loose(model)[0]


def test_a_larger_block_has_the_moments_of_its_spectrum_and_their_error() -> None:
    model, data, layer = wide(40)
    truth = values_of(model, data, layer.parameters)
    nodes, weights = spectral_density(
        model, data, layer, loss=CE, steps=3, repeats=60, dtype=torch.float64
    )
    assert nodes.shape == (60, 3)
    for power in (1, 2):
        moments = (weights * nodes**power).sum(1)
        assert abs(moments.mean() - np.mean(truth**power)) <= 4 * moments.std(
            ddof=1
        ) / math.sqrt(60)
    mean, error = density_mean(nodes, weights)
    assert 0 < abs(mean - truth.mean()) <= 4 * error
    # an error over few repeats, by what the starts of many repeats differ
    means = (weights * nodes).sum(1)
    few = [
        density_mean(nodes[k : k + 4], weights[k : k + 4])[1] for k in range(0, 60, 4)
    ]
    assert np.sqrt(np.mean(np.square(few))) == pytest.approx(
        means.std(ddof=1) / 2, rel=0.2
    )


def test_all_steps_give_the_eigenvalues() -> None:
    model, data, layer = wide(8)
    run = Differentiable(model, CE, torch.float64, 0)
    hessian = BlockHessian(run, data, layer.parameters, 256)
    truth = values_of(model, data, layer.parameters)
    nodes, weights = _lanczos(
        hessian, np.random.default_rng(0).standard_normal(hessian.size), hessian.size
    )
    held = nodes[weights > 1e-3]
    assert all(np.abs(truth - node).min() <= 1e-8 for node in held)
    assert nodes.max() == pytest.approx(truth[0], rel=1e-8)


def test_densities_of_nothing_are_refused() -> None:
    model, data, layer = wide(8)
    for change in ({"steps": 1}, {"repeats": 1}):
        with pytest.raises(UsageError, match="at least"):
            spectral_density(model, data, layer, loss=CE, **change)
    with pytest.raises(UsageError, match="the logits"):
        spectral_density(model, data, Layer("none", ()), loss=CE)
