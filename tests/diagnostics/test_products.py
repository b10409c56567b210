"""Hessian-vector products: weight normalisation from its parts, and the checks that find a wrong second derivative."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diagnostics.curvature import model as curvature_model
from diagnostics.curvature.spectrum import hessian_spectrum, spectral_density
from diagnostics.curvature.trace import hessian_trace
from fl_core.errors import RunError
from fl_core.layers import Layer
from fl_core.training.losses import build
from tests.networks import Wired

CE = build("cross_entropy")
DATA = (
    torch.randn(9, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64),
    torch.randint(3, (9,), generator=torch.Generator().manual_seed(7)),
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normed(
    norm: Callable[..., nn.Module] = nn.utils.parametrizations.weight_norm,
    dim: int | None = 0,
) -> nn.Module:
    return nn.Sequential(
        norm(nn.Linear(4, 5), dim=dim), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def first(model: nn.Module) -> Layer:
    return Layer(
        "0",
        tuple(name for name, _ in model.named_parameters() if name.startswith("0.")),
        output="0",
    )


def block(model: nn.Module, layer: Layer, dim: int | None) -> np.ndarray:
    """The first layer's dense Hessian, with the normalisation written out."""
    tensors = [model.get_parameter(name).detach() for name in layer.parameters]
    head = model[2]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([tensor.numel() for tensor in tensors])
        bias, g, v = (
            part.reshape(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        )
        length = (
            v.square().sum().sqrt()
            if dim is None
            else v.square().sum(1 - dim, keepdim=True).sqrt()
        )
        hidden = (DATA[0] @ (g * v / length).T + bias).tanh()
        return CE(hidden @ head.weight.T + head.bias, DATA[1])

    return torch.autograd.functional.hessian(
        loss, torch.cat([tensor.reshape(-1) for tensor in tensors])
    ).numpy()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize(
    "norm",
    [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm],
    ids=["new", "old"],
)
def test_weight_normalisation_against_a_dense_reference(
    norm: Callable[..., nn.Module], dim: int | None
) -> None:
    model = normed(norm, dim)
    layer = first(model)
    truth = block(model, layer, dim)
    (trace,) = hessian_trace(model, DATA, [layer], loss=CE, probes=200)
    assert trace.status == "ok"
    assert abs(trace.trace - truth.trace()) <= 4 * trace.stderr
    (spectrum,) = hessian_spectrum(model, DATA, [layer], loss=CE)
    assert spectrum.eigenvalues == pytest.approx(
        np.linalg.eigvalsh(truth)[::-1][:3], rel=1e-9
    )


def test_torchs_own_weight_normalisation_gets_no_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curvature_model, "_WeightNormFromParts", contextlib.nullcontext)
    model = normed()
    layers = [first(model), Layer("2", ("2.weight", "2.bias"), output="2")]
    wrong, head = hessian_trace(model, DATA, layers, loss=CE)
    assert math.isnan(wrong.trace)
    assert "v.Hu" in wrong.status
    assert head.status == "ok"
    wrong_spectrum, head_spectrum = hessian_spectrum(model, DATA, layers, loss=CE)
    assert wrong_spectrum.eigenvalues == ()
    assert "v.Hu" in wrong_spectrum.status
    assert head_spectrum.status == "ok"
    with pytest.raises(RunError, match=r"v\.Hu"):
        spectral_density(model, DATA, layers[0], loss=CE)


class Cube(torch.autograd.Function):
    """x^3, whose derivative takes 3 x^2 for a constant: the Hessian stays symmetric, and is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x.detach() ** 2


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("estimator", ["activation", "hutchinson"])
@pytest.mark.parametrize("constant", [False, True], ids=["float64", "float32"])
def test_a_symmetric_fault_is_found_by_differences_of_gradients(
    wrong: bool, estimator: str, constant: bool
) -> None:
    """Also in float32, for a model that cannot compute in float64."""
    cube: Any = Cube.apply if wrong else lambda x: x**3
    fixed = torch.eye(5)
    parts = {"body": nn.Linear(4, 5), "head": nn.Linear(5, 3)}
    model = Wired(
        lambda m, x: m.head(cube(m.body(x) @ fixed if constant else m.body(x))), **parts
    )
    layer = Layer("body", ("body.weight", "body.bias"), output="body")
    data = (DATA[0].float(), DATA[1])
    (found,) = hessian_trace(model, data, [layer], loss=CE, estimator=estimator)
    if wrong:
        assert math.isnan(found.trace)
        assert "gradient" in found.status
    else:
        assert found.status == "ok"
    (spectrum,) = hessian_spectrum(model, data, [layer], loss=CE)
    assert (spectrum.status == "ok") == (found.status == "ok")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kinks_and_entries_without_a_gradient_are_no_fault(dtype: torch.dtype) -> None:
    """Dark pixels under a zero bias sit on ReLU's kink; the row of padding is a constant to autograd."""
    images = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    for module in (images[0], images[2]):
        nn.init.zeros_(module.bias)
    x = torch.zeros(6, 1, 8, 8)
    x[:, :, 2:4, 2:4] = torch.randn(6, 1, 2, 2)
    words = Wired(
        lambda m, x: m.head(m.embed(x).mean(1).tanh()),
        embed=nn.Embedding(5, 4, padding_idx=0),
        head=nn.Linear(4, 3),
    )
    for model, samples in ((images, x), (words, torch.arange(24).reshape(6, 4) % 5)):
        model.to(dtype)
        owners = dict.fromkeys(
            name.rpartition(".")[0] for name, _ in model.named_parameters()
        )
        layers = [
            Layer(
                o,
                tuple(f"{o}.{n}" for n, _ in model.get_submodule(o).named_parameters()),
            )
            for o in owners
        ]
        data = samples.to(dtype) if model is images else samples, torch.arange(6) % 3
        results = hessian_trace(
            model, data, layers, loss=CE, estimator="hutchinson", probes=2
        )
        assert {result.status for result in results} == {"ok"}
