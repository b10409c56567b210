"""Differences between clients that are made on purpose, so that it is known what differs and where."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_core.data.federated import ClientData, FederatedData, Split
from fl_core.data.partitions import SPLITS
from fl_core.errors import UsageError, check_known
from fl_core.rows import CLASSIFICATION
from fl_core.seeds import numpy_generator

Array = NDArray[Any]


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


def turned_inputs(x: Array, client: int, seed: int = 0) -> Array:
    """Return images [n, ..., H, H] turned by a quarter more at each next client."""
    return np.ascontiguousarray(np.rot90(x, client % 4, (-2, -1)))


INPUTS: dict[str, Callable[[Array, int, int], Array]] = {
    "permuted": permuted_inputs,
    "turned": turned_inputs,
}
LABELS = "labels"


def planted(data: FederatedData, change: str, seed: int) -> FederatedData:
    """Return a federation in which each client's labels or inputs are changed its own way, in all splits.

    Args:
        change: ``labels``, ``permuted``, or for square images ``turned``.

    Raises:
        UsageError: the change is unknown, or the samples cannot have it.
    """
    check_known("planted change", change, [LABELS, *INPUTS])
    if change == LABELS and data.task != CLASSIFICATION:
        raise UsageError(f"planted labels must be classes; got {data.task}.")
    if change != LABELS and data.words is not None:
        raise UsageError("planted inputs must be numbers; got texts.")

    def of(split: Split, client: int) -> Split:
        x, y = split.x.numpy(), split.y.numpy()
        if change == LABELS:
            y = coded_labels(y, client, data.n_classes, seed)
        else:
            x = INPUTS[change](x, client, seed)
        return replace(split, x=torch.from_numpy(x), y=torch.from_numpy(y))

    clients = tuple(
        ClientData(each.name, *(of(each.split(name), k) for name in SPLITS))
        for k, each in enumerate(data.clients)
    )
    digest = hashlib.sha256(f"{data.digest}|planted {change}|{seed}".encode())
    return replace(data, clients=clients, digest=digest.hexdigest())
