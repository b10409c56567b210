"""Federations with a known answer, made of scikit-learn's digits and of Fashion-MNIST.

What is best there is measured by ``figures/decision``, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fl_core.data.named.small import digits
from fl_core.data.registry import DATASETS, Location, dataset
from fl_core.data.sources import Source
from fl_core.data.values import Array
from fl_core.seeds import numpy_generator

KINDS = {
    "labels": "each client has a code of its own for the ten classes",
    "inputs": "each client has its own order of the pixels",
    "both": "each client has its own code and its own order of the pixels",
    "neither": "nothing differs but the samples",
    "outlier": "the last client alone has a code of its own",
    "clusters": "the first three clients have another code than the others",
}
CLIENTS, SAMPLES = 6, 240
"""Clients of a federation of digits, and training and validation samples of each. The other digits are test samples of
every client."""
CLOTHES = {"clients": 5, "samples": 138, "test": 300}
"""Clients of a federation of Fashion-MNIST, training and validation samples of each,
and test samples. 110 of a client's 138 samples are for training."""


def coded_labels(y: Array, client: int, classes: int) -> Array:
    """Return class indices [n] after a client's own code has renamed them.

    The code is a fixed random permutation of the classes. If there are two classes,
    clients with an odd number exchange them, and the others keep them.

    >>> coded_labels(np.array([0, 1, 1]), client=1, classes=2)
    array([1, 0, 0])

    Args:
        y: class indices [n].
        client: the client's number, from 0.
        classes: the number of classes.
    """
    if classes == 2:
        if client % 2 == 0:
            return y
        return 1 - y
    code = numpy_generator(0, "planted labels", client).permutation(classes)
    return code[y]


def permuted_inputs(x: Array, client: int) -> Array:
    """Return samples [n, ...] with features in a client's own order: pixels of all channels alike, or columns.

    The order is a fixed random permutation. In a table random columns also change their
    sign.

    Args:
        x: a table [n, d], or images [n, H, W] or [n, C, H, W], or [n, H, W, C] if they
            are uint8.
        client: the client's number, from 0.
    """
    generator = numpy_generator(0, "planted inputs", client)
    if x.ndim == 2:
        order = generator.permutation(x.shape[1])
        signs = generator.choice(np.array([-1, 1], x.dtype), x.shape[1])
        return x[:, order] * signs
    channel_axis = 1
    if x.dtype == np.uint8:
        channel_axis = -1
    if x.ndim == 4:
        x = np.moveaxis(x, channel_axis, 1)
    pixels = x.reshape(*x.shape[:-2], -1)
    order = generator.permutation(pixels.shape[-1])
    permuted = pixels[..., order].reshape(x.shape)
    if x.ndim == 4:
        permuted = np.moveaxis(permuted, 1, channel_axis)
    return permuted


def federation(
    plain: Source,
    name: str,
    kind: str,
    clients: int,
    samples: int,
    test: int | None = None,
) -> Source:
    """Return samples with natural clients, which are changed in a known way.

    The draw of samples is fixed. All clients have the same test samples before the
    change.

    Args:
        plain: the samples before the change.
        name: the federation's name.
        kind: the change, one of :data:`KINDS`.
        clients: number of clients.
        samples: training and validation samples of each client.
        test: number of test samples, the same for every client. None means all remaining samples.
    """
    order = np.random.default_rng(0).permutation(len(plain.x))
    client_rows, other_rows = np.split(order, [clients * samples])
    rows_by_client = [
        np.concatenate([rows, other_rows[:test]])
        for rows in np.split(client_rows, clients)
    ]
    xs, ys = [], []
    for client, rows in enumerate(rows_by_client):
        x, y = plain.x[rows], plain.y[rows]
        if kind in ("inputs", "both"):
            x = permuted_inputs(x, client)
        code = {"labels": client, "both": client, "clusters": client // 3}.get(kind)
        if kind == "outlier" and client == clients - 1:
            code = client
        if code is not None:
            y = coded_labels(y, code, len(plain.classes))
        xs.append(x)
        ys.append(y)
    rows_per_client = len(rows_by_client[0])
    return replace(
        plain,
        name=name,
        x=np.concatenate(xs),
        y=np.concatenate(ys),
        owner=np.repeat(np.arange(clients), rows_per_client),
        owner_names=tuple(f"client {k + 1}" for k in range(clients)),
        is_train=np.tile(np.arange(rows_per_client) < samples, clients),
        shuffled=False,
    )


def known(
    name: str, summary: str, opened: Callable[..., Source], **recipe: Any
) -> None:
    """Register a federation as a dataset, with one client for each of its natural clients.

    Args:
        name: the dataset's name.
        summary: the dataset's line in lists.
        opened: the function that returns its samples. Its docstring and its qualified
            name are set to ``summary`` and ``name``.
        recipe: default settings of the dataset.
    """
    opened.__doc__ = summary
    opened.__qualname__ = name
    dataset(
        name,
        clients=None,
        partition="natural",
        batch_size=16,
        note="chosen for a known answer",
        **recipe,
    )(opened)


def of_digits(kind: str, about: str) -> None:
    """Register a federation of scikit-learn's digits, [1, 8, 8], as a dataset ``known_KIND``.

    Args:
        kind: the change of the clients' samples, one of :data:`KINDS`.
        about: this change in words.
    """
    name = f"known_{kind}"

    def opened() -> Source:
        return federation(digits(), name, kind, CLIENTS, SAMPLES)

    summary = f"The digits at six constructed clients: {about}."
    known(name, summary, opened, model="mlp", rounds=40, lr=1e-2)


def of_clothes(kind: str, about: str) -> None:
    """Register a federation of small images of Fashion-MNIST, averaged to 14 x 14, as a dataset ``fashion_KIND``.

    Args:
        kind: the change of the clients' samples, one of :data:`KINDS`.
        about: this change in words.
    """
    name = f"fashion_{kind}"

    def opened(data_root: Location | None, download: bool) -> Source:
        clothes = DATASETS["fashion_mnist"].open(data_root, download)
        blocks = clothes.x.reshape(len(clothes.x), 14, 2, 14, 2)
        x = blocks.mean((2, 4)).round().astype(np.uint8)
        return federation(replace(clothes, x=x), name, kind, **CLOTHES)

    known(
        name,
        f"Small Fashion-MNIST at five constructed clients: {about}.",
        opened,
        model="fmnist_cnn",
        model_options={"width": 0.125},
        rounds=20,
        lr=3e-3,
        mean=(0.2860,),
        std=(0.3530,),
    )


for _kind, _about in KINDS.items():
    of_digits(_kind, _about)
    of_clothes(_kind, _about)
