"""Checks on a few samples that products with the Hessian are the derivatives of the loss's gradient.

Autograd's second derivatives can be wrong without an error. Torch's kernel for weight normalisation has such a fault.
Two tests find it for each layer. A Hessian is symmetric, so that u.Hv = v.Hu. And Hv is the derivative of the gradient
along v, approximated by a central difference.

The tests compute in float64 where the model can. A step of eps^(1/3) gives a central difference its least error, about
eps^(2/3). The tolerance eps^(1/4) is far above that error and far below a wrong formula's: 1e-4 in float64. Rounding
divided by the step comes on top of it. Where two steps disagree, the gradient jumps between the points, as at a kink of
ReLU. The difference then proves nothing, and symmetry decides alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_core.seeds import torch_generator

from ..capture import Batch
from .exact import CHECKED
from .model import Differentiable, curvature, rademacher

ROUNDING = 100
"""Rounding errors of a gradient, in units of the type's resolution."""
FINER = 16
"""The ratio of the two steps."""


def wrong_products(
    run: Differentiable, first: Batch, layers: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the layers whose Hessian-vector products are wrong, each with the reason.

    Args:
        first: the first batch; the check uses a few of its samples.
        layers: names of the parameters of each layer. Their products must exist.
    """
    if not layers:
        return {}
    x, y = first[0][:CHECKED], first[1][:CHECKED]
    try:
        return _wrong(
            Differentiable(run.model, run.loss, torch.float64, run.seed), x, y, layers
        )
    except (
        RuntimeError,
        TypeError,
    ):  # the model has constants of another type, or the device has no float64
        return _wrong(run.at({}), x, y, layers)


def _wrong(
    run: Differentiable, x: Tensor, y: Tensor, layers: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    everything = [
        name for name, tensor in run.parameters.items() if tensor.requires_grad
    ]
    gradients = _gradients(run, x, y, everything, create_graph=True)
    size = float(_flat([g.detach() for g in gradients.values()]).norm())
    generator = torch_generator(run.seed, "product check")
    reasons = {}
    for layer, names in layers.items():
        block, own = (
            [run.parameters[name] for name in names],
            [gradients[name] for name in names],
        )
        # an entry without a gradient stays as it is: an embedding's padding is a constant to autograd
        felt = [
            _scale(tensor) * (found.detach() != 0).to(tensor)
            for tensor, found in zip(block, own, strict=True)
        ]
        u, v = (
            [rademacher(scale, generator) * scale for scale in felt] for _ in range(2)
        )
        hu, hv = (_flat(curvature(own, w, block)) for w in (u, v))
        if not _symmetric(
            _flat(u), hu, _flat(v), hv, size, torch.finfo(block[0].dtype).eps
        ):
            reasons[layer] = "u.Hv is not v.Hu"
        elif _departs(run, x, y, names, v, hv, size):
            reasons[layer] = "Hv is not the derivative of the gradient"
    return {
        layer: f"the second derivative of an operation is wrong: {reason}"
        for layer, reason in reasons.items()
    }


def _symmetric(
    u: Tensor, hu: Tensor, v: Tensor, hv: Tensor, size: float, eps: float
) -> bool:
    one, other = u * hv, v * hu
    rounding = ROUNDING * eps * size * float(u.norm() + v.norm())
    tolerance = (
        eps**0.5 * float(one.abs().sum() + other.abs().sum()) + rounding
    )  # of sums, whose terms cancel
    return not float((one.sum() - other.sum()).abs()) > tolerance


def _departs(
    run: Differentiable,
    x: Tensor,
    y: Tensor,
    names: Sequence[str],
    v: Sequence[Tensor],
    hv: Tensor,
    size: float,
) -> bool:
    """Return True if differences of gradients converge to something else than ``hv``."""
    eps = torch.finfo(v[0].dtype).eps

    def difference(step: float) -> Tensor:
        ends = []
        for way in (step, -step):
            moved = {
                name: run.parameters[name].detach() + way * w
                for name, w in zip(names, v, strict=True)
            }
            ends.append(_flat(list(_gradients(run.at(moved), x, y, names).values())))
        return (ends[0] - ends[1]) / (2 * step)

    def apart(one: Tensor, other: Tensor, step: float) -> bool:
        tolerance = (
            eps**0.25 * max(float(one.norm()), float(other.norm()))
            + ROUNDING * eps / step * size
        )
        return float((one - other).norm()) > tolerance

    coarse = eps ** (1 / 3)
    fine = coarse / FINER
    first = difference(coarse)
    if not apart(first, hv, coarse):
        return False
    second = difference(fine)
    return apart(second, hv, fine) and not apart(second, first, fine)


def _gradients(
    run: Differentiable,
    x: Tensor,
    y: Tensor,
    names: Sequence[str],
    *,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Return gradients of the summed loss, with zeros for a parameter that does not reach it."""
    tensors = [run.parameters[name] for name in names]
    _, losses = run.forward(x, y, 0)
    found = torch.autograd.grad(
        losses.sum(),
        tensors,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(names, found, strict=True))


def _scale(tensor: Tensor) -> float:
    """Return the root mean square of a tensor, so that a step is relative to it; 1 for zeros."""
    return float(tensor.detach().square().mean().sqrt()) or 1.0


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).double()
