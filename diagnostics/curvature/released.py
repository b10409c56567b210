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
    """Mean over a layer's weight tensors W of the nuclear norm of H_W v, with v Gaussian of unit length.

    Neither a trace nor a sum of eigenvalues: at least 0, grows as the square root of the rank times ||H v||, and hangs
    on v. H_W v is read as a matrix [out, rest] and its singular values are added up; of a convolution, the matrix
    [out, kernel] of each input channel, averaged over the channels (PLayer-FL's released code). H is of the mean loss
    over all samples, where that code took one batch.

    Returns:
        Values with their standard errors over ``probes`` draws of v (NaN for one, which is what the authors used), by
        layer why there is none, and the number of samples.
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
    """The sum of singular values of a tensor [out, rest], or their mean over the input channels of [out, in, kernel].

    A vector counts as one column; NaN where an entry is not finite.
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
