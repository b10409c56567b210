"""Differences between clients that are made on purpose, so that it is known what differs and where."""

from __future__ import annotations

import numpy as np

from fl_core.data.cells import Array
from fl_core.seeds import numpy_generator


def coded_labels(y: Array, client: int, classes: int, seed: int = 0) -> Array:
    """Return labels [n] renamed by a client's own code. Of two classes every second client exchanges them.

    >>> coded_labels(np.array([0, 1, 1]), client=1, classes=2)
    array([1, 0, 0])
    """
    if classes == 2:
        return y if client % 2 == 0 else 1 - y
    code = numpy_generator(seed, "planted labels", client).permutation(classes)
    return code[y]


def permuted_inputs(x: Array, client: int, seed: int = 0) -> Array:
    """Return samples [n, ...] with features in a client's own order: pixels of all channels alike, or columns.

    Columns of a table also change signs.
    """
    draw = numpy_generator(seed, "planted inputs", client)
    if x.ndim == 2:
        order = draw.permutation(x.shape[1])
        signs = draw.choice(np.array([-1, 1], x.dtype), x.shape[1])
        return x[:, order] * signs
    pixels = x.reshape(*x.shape[:-2], -1)
    order = draw.permutation(pixels.shape[-1])
    return pixels[..., order].reshape(x.shape)
