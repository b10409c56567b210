"""Federations with a known answer: the digits at six clients, whose labels or inputs differ by construction.

What is best there is measured by `figures/decision/known_runs.py`, not assumed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fl_core.data.cells import Array
from fl_core.data.named.small import digits
from fl_core.data.registry import dataset
from fl_core.data.sources import Source
from fl_core.seeds import numpy_generator

CLIENTS, SAMPLES = 6, 240
"""Clients, and training and validation samples of each. The other digits are test samples of every client."""
KINDS = {
    "labels": "each client has a code of its own for the ten digits",
    "inputs": "each client has its own order of the pixels",
    "both": "each client has its own code and its own order of the pixels",
    "neither": "nothing differs but the samples",
    "outlier": "the last client alone has a code of its own",
    "clusters": "the second three clients have another code than the first three",
}


def coded_labels(y: Array, client: int, classes: int) -> Array:
    """Return labels [n] renamed by a client's own code. Of two classes every second client exchanges them.

    >>> coded_labels(np.array([0, 1, 1]), client=1, classes=2)
    array([1, 0, 0])
    """
    if classes == 2:
        return y if client % 2 == 0 else 1 - y
    code = numpy_generator(0, "planted labels", client).permutation(classes)
    return code[y]


def permuted_inputs(x: Array, client: int) -> Array:
    """Return samples [n, ...] with features in a client's own order: pixels of all channels alike, or columns.

    Columns of a table also change signs.
    """
    draw = numpy_generator(0, "planted inputs", client)
    if x.ndim == 2:
        order = draw.permutation(x.shape[1])
        signs = draw.choice(np.array([-1, 1], x.dtype), x.shape[1])
        return x[:, order] * signs
    pixels = x.reshape(*x.shape[:-2], -1)
    order = draw.permutation(pixels.shape[-1])
    return pixels[..., order].reshape(x.shape)


def federation(kind: str) -> Source:
    """Return the digits at six clients, changed by a kind of :data:`KINDS`. The seed is fixed."""
    plain = digits()
    order = np.random.default_rng(0).permutation(len(plain.x))
    own, test = np.split(order, [CLIENTS * SAMPLES])
    parts = [np.concatenate([part, test]) for part in np.split(own, CLIENTS)]
    xs, ys = [], []
    for client, part in enumerate(parts):
        x, y = plain.x[part], plain.y[part]
        if kind in ("inputs", "both"):
            x = permuted_inputs(x, client)
        code = {"labels": client, "both": client, "clusters": client // 3}.get(kind)
        if kind == "outlier" and client == CLIENTS - 1:
            code = client
        if code is not None:
            y = coded_labels(y, code, len(plain.classes))
        xs.append(x)
        ys.append(y)
    each = len(parts[0])
    return replace(
        plain,
        name=f"known_{kind}",
        x=np.concatenate(xs),
        y=np.concatenate(ys),
        owner=np.repeat(np.arange(CLIENTS), each),
        owner_names=tuple(f"client {k + 1}" for k in range(CLIENTS)),
        is_train=np.tile(np.arange(each) < SAMPLES, CLIENTS),
    )


def known(kind: str, about: str) -> None:
    """Register a kind of federation as a dataset."""

    def opened() -> Source:
        return federation(kind)

    opened.__doc__ = f"The digits at six constructed clients: {about}."
    opened.__qualname__ = f"known_{kind}"
    dataset(
        f"known_{kind}",
        clients=None,
        partition="natural",
        model="mlp",
        batch_size=16,
        rounds=40,
        lr=1e-2,
        note="chosen for a known answer",
    )(opened)


for _kind, _about in KINDS.items():
    known(_kind, _about)
