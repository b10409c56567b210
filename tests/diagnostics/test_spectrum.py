"""Eigenvalues of layers' Hessian blocks against dense decompositions and curvlinops."""

import math

import numpy as np
import pytest
import torch
from curvlinops import HessianLinearOperator
from scipy.sparse.linalg import eigsh
from torch import nn

from diagnostics import plots
from diagnostics.curvature.spectrum import AGAIN, Lanczos, hessian_spectrum
from diagnostics.measure import diagnose
from fl_core.layers import layers_of
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
    results = hessian_spectrum(model, data, layers, **how)
    for layer, result in zip(layers, results, strict=True):
        truth = values_of(model, data, layer)
        assert result.status == "ok"
        assert result.eigenvalues == pytest.approx(truth[:3], rel=1e-6, abs=1e-9)
        for value, error in zip(result.eigenvalues, result.errors, strict=True):
            assert np.abs(truth - value).min() <= error + 1e-12


def search(matrix, k=3, seed=0, **how):
    """Return a finished search for the largest eigenvalues of a dense matrix."""
    generator = torch.Generator().manual_seed(seed)
    lanczos = Lanczos(len(matrix), k, 1e-6, 100, matrix, generator, **how)
    while not lanczos.done:
        lanczos.add(matrix @ lanczos.basis[-1])
    return lanczos


BULKS = {
    "falling": lambda n: 0.8 * 0.9 ** np.arange(n),
    "even": lambda n: np.linspace(0.7, 0, n),
    "zero": np.zeros,
    "negative": lambda n: -np.linspace(0.1, 2, n),
}


@pytest.mark.parametrize("bulk", BULKS)
@pytest.mark.parametrize("multiplicity", range(1, 7))
def test_repeated_eigenvalues_of_random_blocks(multiplicity, bulk):
    for size, seed in ((12, 0), (80, 1), (300, 2)):
        values = [*[1.3] * multiplicity, *BULKS[bulk](size - multiplicity)]
        draw = np.random.default_rng(seed).normal(size=(size, size))
        basis = np.linalg.qr(draw)[0]
        matrix = torch.from_numpy((basis * values) @ basis.T)
        result = search(matrix, seed=seed)
        truth = np.sort(values)[::-1][:3]
        assert result.values == pytest.approx(truth, rel=1e-5, abs=1e-8)
        assert (np.abs(result.values - truth) <= result.errors + 1e-8).all()


def test_a_second_search_adds_few_products():
    values = 0.7 ** np.arange(200)
    matrix = torch.from_numpy(np.diag(values))
    products = search(matrix).products - search(matrix, repeated=False).products
    assert 0 < products <= 2 * AGAIN


def test_noise_of_float32_gives_no_value():
    values = torch.tensor([*[1.3] * 5, *[0.0] * 2995])
    for seed in range(4):
        result = search(torch.diag(values), seed=seed)
        assert result.values == pytest.approx([1.3] * 3, rel=1e-5)


@pytest.mark.parametrize("outputs", [2, 3, 4, 6])
def test_repeated_eigenvalues_of_a_head_as_in_pyhessian(outputs):
    pyhessian = pytest.importorskip("pyhessian")
    body, head = nn.Linear(4, 5), nn.Linear(5, outputs)
    model = nn.Sequential(body, nn.Tanh(), head)
    x = torch.randn(20, 4)
    data = x, torch.randn(20, outputs)
    layers = layers_of(model, x[:2])
    how = {"loss": nn.MSELoss(), "options": {"hessian_spectrum": {"tol": 1e-6}}}
    frame = diagnose(model, data, "hessian_spectrum", **how).frame
    eigenvalues = frame[frame["layer"] == layers[-1].name]["value"].to_numpy()
    parameters = [*head.parameters()]

    def loss(weight, bias):
        out = nn.functional.linear(torch.tanh(body(x)), weight, bias)
        return nn.functional.mse_loss(out, data[1])

    blocks = torch.autograd.functional.hessian(loss, tuple(parameters))
    rows = [
        torch.cat([part.reshape(one.numel(), -1) for part in row], 1)
        for one, row in zip(parameters, blocks, strict=True)
    ]
    truth = np.linalg.eigvalsh(torch.cat(rows).numpy())[::-1]
    assert eigenvalues == pytest.approx(truth[:3], rel=1e-4)
    body.requires_grad_(False)
    theirs = pyhessian.hessian(
        head, nn.MSELoss(), data=(torch.tanh(body(x)).detach(), data[1]), cuda=False
    )
    values, _ = theirs.eigenvalues(top_n=3, maxIter=2000, tol=1e-9)
    assert eigenvalues == pytest.approx(values, rel=1e-3)


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
