"""Gradients and weights as vectors: entries, variance, and the cosine between two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def entries(tensors: Sequence[Tensor]) -> Tensor:
    """Return all entries of some tensors as one vector, float64."""
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def variance(grads: Sequence[Tensor]) -> Tensor:
    """Return the unbiased variance over all entries of some tensors together, float64.

    It is NaN for fewer than two entries.
    """
    values = entries(grads)
    return values.var() if len(values) > 1 else values.new_tensor(torch.nan)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return <a, b> / (||a|| ||b||) in [-1, 1] of two vectors; NaN if one is zero."""
    x, y = (v / torch.linalg.vector_norm(v) for v in (a.double(), b.double()))
    return float(torch.clamp(x @ y.to(x.device), -1.0, 1.0))
