"""Updates as whole numbers: fixed point, modulo 2^64, so that sums are exact and masks cancel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_core.errors import NonFiniteError, UsageError
from fl_core.tree import Tree

Words = NDArray[np.uint64]
FRACTION_BITS = 28
STEP = 2.0**-FRACTION_BITS
"""The distance of two values in fixed point."""
SUM_BITS = 62


def encode_tree(tree: Mapping[str, Tensor], weight: int, total: int) -> Words:
    """Return a tree as whole numbers modulo 2^64, times a weight.

    Values are rounded to steps of :data:`STEP`. Tensors follow one another by name.

    >>> words = encode_tree({"fc.bias": torch.tensor([0.5, -1.0])}, weight=3, total=10)
    >>> (words.view(np.int64) / 2**FRACTION_BITS).tolist()
    [1.5, -3.0]

    Args:
        weight: of this client, at least 1.
        total: the weight of all clients. It limits the values, so that no sum leaves 63 bits.

    Raises:
        UsageError: a value is too large. NonFiniteError: a value is NaN or infinite.
    """
    largest = 2.0 ** (SUM_BITS - FRACTION_BITS) / total
    words = np.empty(sum(tensor.numel() for tensor in tree.values()), np.int64)
    end = 0
    for name in sorted(tree):
        values = tree[name].detach().double().flatten()
        size = float(values.abs().max()) if len(values) else 0.0
        if not np.isfinite(size):
            raise NonFiniteError(f"tensor {name!r} of the update must be finite; got NaN or infinity.")
        if size > largest:
            raise UsageError(
                f"values in a secure sum must be at most {largest:.4g}; got {size:.4g} in tensor {name!r}. "
                "Scale the data, or train without a secure sum."
            )
        words[end : end + len(values)] = (values / STEP).round().long().numpy()
        end += len(values)
    words *= weight
    return words.view(np.uint64)


def decode_mean(words: Words, like: Mapping[str, Tensor], weight: int) -> Tree:
    """Return the weighted mean in a sum of encoded trees.

    Args:
        words: the sum, uint64 [n].
        like: tensors with the names, shapes and types of the mean. Those of whole numbers are rounded.
        weight: the summed clients' weight.
    """
    mean: Tree = {}
    end = 0
    for name in sorted(like):
        tensor = like[name]
        part = words[end : end + tensor.numel()].view(np.int64)
        end += tensor.numel()
        values = torch.from_numpy(part.astype(np.float64) * STEP / weight)
        mean[name] = (values if tensor.is_floating_point() else values.round()).to(tensor.dtype).reshape(tensor.shape)
    return mean
