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
    row_count = x[..., 0].numel()
    if row_count < 2:
        raise NoValue(f"{row_count} rows, at least 2 are needed")
    means = x.flatten(0, -2).mean(0, dtype=torch.float64)
    x = x - means.to(x.dtype)
    squared_norm = torch.linalg.vector_norm(x, dtype=torch.float64).square()
    check_features(
        squared_norm, means.square().sum() * row_count, torch.finfo(x.dtype).eps
    )
    return x / squared_norm.sqrt().to(x.dtype)


def least_angle(x: Tensor, y: Tensor) -> float:
    """Return the Procrustes angle with shifts, for maps prepared by :func:`unit_maps`.

    The cross-products of all shifts come from one Fourier transform. Shifts are taken in the order of their Frobenius
    norm f. Since ||.||_* <= sqrt(rank) f, shifts that can no longer win are left out.
    """
    axes = tuple(range(1, x.ndim - 1))
    size = x.shape[1:-1]
    spectrum: Tensor | None = None
    for x_part, y_part in zip(x.split(_SAMPLES), y.split(_SAMPLES), strict=True):
        a, b = (torch.fft.rfftn(maps.double(), dim=axes) for maps in (x_part, y_part))
        a, b = (
            maps.flatten(1, -2).transpose(0, 1) for maps in (a, b)
        )  # [frequencies, n, d]
        product = a.mH @ b
        spectrum = product if spectrum is None else spectrum + product
    assert spectrum is not None  # there are samples
    half_size = (*size[:-1], size[-1] // 2 + 1)
    products = torch.fft.irfftn(
        spectrum.reshape(*half_size, *spectrum.shape[1:]),
        s=size,
        dim=tuple(range(len(size))),
    ).flatten(0, -3)
    norms = torch.linalg.matrix_norm(products)
    shift_order = norms.argsort(descending=True)
    norm_factor, best_norm = math.sqrt(min(products.shape[1:])), 0.0
    for shifts in shift_order.split(_SHIFTS):
        if norm_factor * float(norms[shifts[0]]) <= best_norm:
            break
        best_norm = max(
            best_norm, float(torch.linalg.svdvals(products[shifts]).sum(1).max())
        )
    return math.acos(min(best_norm, 1.0))
