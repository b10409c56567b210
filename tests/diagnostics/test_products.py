"""Hessian-vector products: weight normalisation from its parts, and the checks that find a wrong second derivative."""

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics.curvature import model as curvature_model
from diagnostics.curvature.spectrum import hessian_spectrum
from diagnostics.curvature.trace import hessian_trace
from fl_core.layers import Layer
from tests.diagnostics.dense import CE, block, loose, pair
from tests.networks import Wired

DATA = pair(9, 4)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def normed(norm, dim=0):
    """A network whose first layer is normalised, and that layer."""
    parts = [norm(nn.Linear(4, 5), dim=dim), nn.Tanh(), nn.Linear(5, 3)]
    model = nn.Sequential(*parts).double()
    names = [name for name, _ in model.named_parameters() if name.startswith("0.")]
    return model, Layer("0", tuple(names), output="0")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_weight_normalisation_against_a_dense_reference():
    new = nn.utils.parametrizations.weight_norm
    for norm, dim in ((new, 0), (new, 1), (new, None), (nn.utils.weight_norm, 0)):
        model, layer = normed(norm, dim)

        def written_out(m, x, dim=dim):
            square = m.v.square()
            total = square.sum() if dim is None else square.sum(1 - dim, keepdim=True)
            return m.head((x @ (m.g * m.v / total.sqrt()).T + m.bias).tanh())

        own = [nn.Parameter(model.get_parameter(name)) for name in layer.parameters]
        parts = dict(zip(("bias", "g", "v"), own, strict=True))
        plain = Wired(written_out, **parts, head=model[2])
        truth = block(plain, DATA, tuple(parts)).numpy()
        (trace,) = hessian_trace(model, DATA, [layer], loss=CE, probes=200)
        assert trace.status == "ok"
        assert abs(trace.trace - truth.trace()) <= 4 * trace.stderr
        (spectrum,) = hessian_spectrum(model, DATA, [layer], loss=CE)
        largest = np.linalg.eigvalsh(truth)[::-1][:3]
        assert spectrum.eigenvalues == pytest.approx(largest, rel=1e-9)


def test_torchs_own_weight_normalisation_gets_no_value(
    monkeypatch,
):
    monkeypatch.setattr(curvature_model, "_WeightNormFromParts", contextlib.nullcontext)
    model, layer = normed(nn.utils.parametrizations.weight_norm)
    layers = [layer, Layer("2", ("2.weight", "2.bias"), output="2")]
    for measure in (hessian_trace, hessian_spectrum):
        wrong, head = measure(model, DATA, layers, loss=CE)
        assert "derivative of the gradient" in wrong.status
        value = getattr(wrong, "trace", math.nan)
        assert math.isnan(value)
        assert getattr(wrong, "eigenvalues", ()) == ()
        assert head.status == "ok"


class Cube(torch.autograd.Function):
    """x^3, whose derivative takes 3 x^2 for a constant: the Hessian stays symmetric, and is wrong."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x.detach() ** 2


@pytest.mark.parametrize("estimator", ["activation", "hutchinson"])
@pytest.mark.parametrize("constant", [False, True], ids=["float64", "float32"])
def test_a_symmetric_fault_is_found_by_differences_of_gradients(estimator, constant):
    """Also in float32, for a model that cannot compute in float64."""
    fixed = torch.eye(5)
    parts = {"body": nn.Linear(4, 5), "head": nn.Linear(5, 3)}
    layer = Layer("body", ("body.weight", "body.bias"), output="body")
    data = (DATA[0].float(), DATA[1])
    for cube, status in ((Cube.apply, "gradient"), (lambda x: x**3, "ok")):

        def run(m, x, cube=cube):
            h = m.body(x)
            return m.head(cube(h @ fixed if constant else h))

        model = Wired(run, **parts)
        (found,) = hessian_trace(model, data, [layer], loss=CE, estimator=estimator)
        assert status in found.status
        assert math.isnan(found.trace) == (status != "ok")
        (spectrum,) = hessian_spectrum(model, data, [layer], loss=CE)
        assert (spectrum.status == "ok") == (status == "ok")


def test_kinks_and_entries_without_a_gradient_are_no_fault():
    """Dark pixels under a zero bias sit on ReLU's kink; the row of padding is a constant to autograd."""
    parts = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    images = nn.Sequential(*parts)
    nn.init.zeros_(images[0].bias)
    x = torch.zeros(6, 1, 8, 8)
    x[:, :, 2:4, 2:4] = torch.randn(6, 1, 2, 2)
    words = Wired(
        lambda m, x: m.head(m.embed(x).mean(1).tanh()),
        embed=nn.Embedding(5, 4, padding_idx=0),
        head=nn.Linear(4, 3),
    )
    how = {"loss": CE, "estimator": "hutchinson", "probes": 2}
    for dtype in (torch.float32, torch.float64):
        ids = torch.arange(24).reshape(6, 4) % 5
        for model, samples in ((images, x.to(dtype)), (words, ids)):
            data = samples, torch.arange(6) % 3
            results = hessian_trace(model.to(dtype), data, loose(model), **how)
            assert {result.status for result in results} == {"ok"}
