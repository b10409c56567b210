"""Eigenvalues of layers' Hessian blocks against dense decompositions and curvlinops."""

import math

import numpy as np
import pytest
import torch
from curvlinops import HessianLinearOperator
from scipy.sparse.linalg import eigsh
from torch import nn

from diagnostics import plots
from diagnostics.curvature.spectrum import hessian_spectrum
from diagnostics.measure import diagnose
from tests.conftest import refuses
from tests.diagnostics.dense import CE, block, images, loose, mlp, pair, tokens


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def values_of(model, data, layer):
    return np.linalg.eigvalsh(block(model, data, layer.parameters).numpy())[::-1]


@pytest.mark.parametrize(
    ("build_model", "data", "batch"),
    [
        (mlp, pair(9, 4), 4),
        (lambda: mlp(nn.Tanh), pair(9, 4), 100),
        (images, pair(9, 2, 5, 5), 4),
        (tokens, pair(9, 6, tokens=5), 100),
    ],
)
def test_largest_eigenvalues(build_model, data, batch):
    model = build_model()
    layers, how = loose(model), {"loss": CE, "tol": 1e-8, "batch": batch}
    found = hessian_spectrum(model, data, layers, **how)
    for layer, result in zip(layers, found, strict=True):
        truth = values_of(model, data, layer)
        assert result.status == "ok"
        assert result.eigenvalues == pytest.approx(truth[:3], rel=1e-6, abs=1e-9)
        for value, error in zip(result.eigenvalues, result.errors, strict=True):
            assert np.abs(truth - value).min() <= error + 1e-12


def test_the_whole_network_is_one_block_as_in_curvlinops():
    model, data = mlp(nn.Tanh), pair(12, 4)
    options = {"hessian_spectrum": {"k": 2, "tol": 1e-8}}
    how = {"layers": "network", "options": options}
    ours = diagnose(model, data, "hessian_spectrum", **how).frame["value"]
    how = [*model.parameters()], [data]
    operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), *how)
    theirs = eigsh(operator.to_scipy(), k=2, which="LA", return_eigenvectors=False)
    assert list(ours) == pytest.approx(theirs[::-1], rel=1e-6)


def test_a_spectral_density_has_the_moments_of_all_eigenvalues():
    model, data = mlp(nn.Tanh), pair(9, 4)
    truth = np.linalg.eigvalsh(block(model, data, [*model.state_dict()]))
    options = {"hessian_spectrum": {"k": 12, "density": True}}
    few = {"metrics": "hessian_spectrum", "layers": "network"}
    how = few | {"options": options}
    moments = []
    for seed in range(12):
        frame = diagnose(model, data, seed=seed, **how).frame
        value, weight = frame["value"].to_numpy().reshape(-1, 2).T
        assert weight.sum() == pytest.approx(1)
        moments.append([weight @ value, weight @ value**2])
    off = np.mean(moments, axis=0) - [truth.mean(), np.mean(truth**2)]
    assert (np.abs(off) <= 4 * np.std(moments, axis=0) / 12**0.5).all()
    with refuses("k=60"):
        diagnose(model, data, options={"hessian_spectrum": {"density": True}}, **few)
    (line,) = plots.spectral_density(frame).lines
    assert 1 < max(line.get_ydata()) <= len(truth)


def test_train_mode_is_one_batch_s_own_hessian():
    model, data = mlp(lambda: nn.Sequential(nn.ReLU())), pair(12, 4)
    model.insert(1, nn.BatchNorm1d(6).double())
    layer = loose(model)[0]
    how = {"loss": CE, "mode": "train", "k": 1, "tol": 1e-8}
    (ours,) = hessian_spectrum(model, data, [layer], **how)
    truth = values_of(model.train(), data, layer)
    assert ours.eigenvalues[0] == pytest.approx(truth[0], rel=1e-6)


def test_degenerate_layers():
    model, data = mlp(), pair(6, 4)
    with torch.no_grad():
        for name in ("2.weight", "2.bias"):
            model.get_parameter(name).zero_()
    dead, _, head = hessian_spectrum(model, data, loose(model), loss=CE)
    assert dead.eigenvalues == [0.0] * 3
    assert head.eigenvalues[0] > 0
    many = {"hessian_spectrum": {"k": 140}}
    wide = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 1)).double()
    report = diagnose(wide, (data[0], data[0][:, 0]), "hessian_spectrum", options=many)
    status = report.frame.set_index(["layer", "variant"])["status"]
    assert status["2", "top32"] == "layer '2' has 31 eigenvalues"
    assert status["2", "top31"] == status["0", "top140"] == "ok"
    with torch.no_grad():
        model.get_parameter("2.bias")[0] = math.nan
    (lost,) = {r.status for r in hessian_spectrum(model, data, loose(model), loss=CE)}
    assert lost == "the loss is not finite"
