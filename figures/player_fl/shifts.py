"""The Procrustes angle over circular shifts of maps, as PLayer-FL's authors measured convolutions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diagnostics.measurement import NoValue
from diagnostics.representation.similarity import check_features

_SAMPLES = 64  # whose spectra are held at a time
_SHIFTS = 64  # whose singular values are computed at a time


def unit_maps(x: Tensor) -> Tensor:
    """Return maps [n, *positions, d] centred over samples and positions and scaled to norm 1, in their own type.

    Raises:
        NoValue: there are fewer than two rows, or the maps are not finite or constant.
    """
    rows = x[..., 0].numel()
    if rows < 2:
        raise NoValue(f"{rows} rows, at least 2 are needed")
    means = x.flatten(0, -2).mean(0, dtype=torch.float64)
    x = x - means.to(x.dtype)
    total = torch.linalg.vector_norm(x, dtype=torch.float64).square()
    check_features(total, means.square().sum() * rows, torch.finfo(x.dtype).eps)
    return x / total.sqrt().to(x.dtype)


def least_angle(x: Tensor, y: Tensor) -> float:
    """Return the Procrustes angle with shifts, for maps prepared by :func:`unit_maps`.

    The cross-products of all shifts come from one Fourier transform. Shifts are taken in the order of their Frobenius
    norm f. Since ||.||_* <= sqrt(rank) f, shifts that can no longer win are left out.
    """
    axes = tuple(range(1, x.ndim - 1))
    size = x.shape[1:-1]
    spectrum: Tensor | None = None
    for left, right in zip(x.split(_SAMPLES), y.split(_SAMPLES), strict=True):
        a, b = (torch.fft.rfftn(side.double(), dim=axes) for side in (left, right))
        a, b = (
            side.flatten(1, -2).transpose(0, 1) for side in (a, b)
        )  # [frequencies, n, d]
        part = a.mH @ b
        spectrum = part if spectrum is None else spectrum + part
    assert spectrum is not None  # there are samples
    half = (*size[:-1], size[-1] // 2 + 1)
    products = torch.fft.irfftn(
        spectrum.reshape(*half, *spectrum.shape[1:]),
        s=size,
        dim=tuple(range(len(size))),
    ).flatten(0, -3)
    norms = torch.linalg.matrix_norm(products)
    order = norms.argsort(descending=True)
    most, best = math.sqrt(min(products.shape[1:])), 0.0
    for shifts in order.split(_SHIFTS):
        if most * float(norms[shifts[0]]) <= best:
            break
        best = max(best, float(torch.linalg.svdvals(products[shifts]).sum(1).max()))
    return math.acos(min(best, 1.0))
