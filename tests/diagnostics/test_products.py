"""Hessian-vector products through weight normalisation, which torch's own kernel gets wrong."""

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics.curvature.spectrum import hessian_spectrum
from diagnostics.curvature.trace import hessian_trace
from fl_core.layers import Layer
from tests.diagnostics.dense import CE, block, pair
from tests.made import Wired

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

        parameters = [
            nn.Parameter(model.get_parameter(name)) for name in layer.parameters
        ]
        parts = dict(zip(("bias", "g", "v"), parameters, strict=True))
        plain = Wired(written_out, **parts, head=model[2])
        truth = block(plain, DATA, tuple(parts)).numpy()
        (trace,) = hessian_trace(model, DATA, [layer], loss=CE, probes=50)
        assert trace.status == "ok"
        assert abs(trace.trace - truth.trace()) <= 4 * trace.stderr
        (spectrum,) = hessian_spectrum(model, DATA, [layer], loss=CE, tol=1e-12)
        largest = np.linalg.eigvalsh(truth)[::-1][:3]
        assert spectrum.eigenvalues == pytest.approx(largest, rel=1e-9)
