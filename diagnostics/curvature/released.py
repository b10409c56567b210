"""The quantity that PLayer-FL's released code computes as the Hessian's eigenvalue sum: a nuclear norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_core.seeds import torch_generator

from ..capture import Data
from .model import Differentiable, curvature
from .sampled import Estimates, by_batch


def released(
    run: Differentiable, data: Data, layers: Mapping[str, Sequence[str]], batch: int, probes: int
) -> tuple[Estimates, dict[str, str], int]:
    """Return the mean over a layer's weight tensors W of the nuclear norm of H_W v.

    The vector v is Gaussian of unit length. The value is neither a trace nor a sum of eigenvalues. It is at least 0,
    depends on v, and grows as the square root of the rank times ||H v||. The product H_W v is read as a matrix [out,
    rest], and its singular values are added up. For a convolution, each input channel gives a matrix [out, kernel], and
    their sums are averaged (PLayer-FL's released code). H is the Hessian of the mean loss over all samples. The
    released code took one batch.

    Returns:
        Values with their standard errors over ``probes`` draws of v; layer -> why there is no value; the number of
        samples. With one draw, as the authors used, the standard error is NaN.
    """
    names = [name for group in layers.values() for name in group]
    generator = {name: torch_generator(run.seed, "released probe", name) for name in names}
    directions = {name: [_direction(run.parameters[name], generator[name]) for _ in range(probes)] for name in names}
    totals = {
        name: [torch.zeros_like(run.parameters[name], dtype=torch.float64) for _ in range(probes)] for name in names
    }

    def probe(layer: str, names: Sequence[str], gradients: Mapping[str, Tensor]) -> None:
        for name in names:
            for v, total in zip(directions[name], totals[name], strict=True):
                total += curvature([gradients[name]], [v], [run.parameters[name]])[0]

    failures, n = by_batch(run, data, layers, batch, probe)
    estimates = {}
    for layer, group in layers.items():
        if layer not in failures:
            drawn = torch.tensor(
                [[nuclear_norm(total / n) for total in totals[name]] for name in group], dtype=torch.float64
            ).mean(0)
            estimates[layer] = (float(drawn.mean()), float(drawn.std()) / math.sqrt(probes) if probes > 1 else math.nan)
    return estimates, failures, n


def nuclear_norm(product: Tensor) -> float:
    """Return the sum of singular values of a tensor [out, rest].

    For [out, in, kernel] it is their mean over the input channels. A vector counts as one column. The result is NaN if
    an entry is not finite.
    """
    if not bool(torch.isfinite(product).all()):
        return math.nan
    if product.ndim < 3:
        return float(
            torch.linalg.matrix_norm(
                product.reshape(len(product), -1) if product.ndim else product.reshape(1, 1), "nuc"
            )
        )
    slices = product.transpose(0, 1).flatten(2)
    return float(torch.linalg.matrix_norm(slices, "nuc").mean())


def _direction(like: Tensor, generator: torch.Generator) -> Tensor:
    v = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return (v / v.norm()).to(like)
