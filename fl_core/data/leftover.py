"""Samples of a dataset that a federation left over, as further test samples of its clients."""

from __future__ import annotations

import numpy as np
import torch

from fl_core import seeds
from fl_core.data.arrays import Integers
from fl_core.data.federated import FederatedData, Split
from fl_core.data.partitions import PARTITIONS
from fl_core.data.sources import Source
from fl_core.errors import UsageError

MOST = 400
"""Further test samples of a client: with so many, a score's sampling error is small beside that between runs."""


def unused(whole: Source, data: FederatedData, most: int = MOST) -> dict[str, Split]:
    """Draw further test samples for each client from those of the dataset that no client of the federation has.

    A client's are drawn without replacement, with the class proportions of all its samples, and from its natural owner
    where the partition keeps to owners, so that they are distributed like its test samples. Two clients may be given
    the same sample: nothing is trained on them. The draw depends on the partition's seed alone.

    Args:
        whole: the dataset as it was opened, before a pool was taken from it.
        data: the federation, dealt from the first samples of ``whole`` (see :meth:`Source.first`).
        most: samples a client, at most; fewer where a class that the client has runs out.

    Returns:
        The samples by client's name; a client for whom nothing is left is missing.

    Raises:
        UsageError: the federation was not dealt from this dataset.

    >>> from fl_core.data import load, open_named
    >>> data = load("digits", samples=400, partition="dirichlet", alpha=0.5, clients=3)
    >>> further = unused(open_named("digits"), data, most=50)
    >>> {name: len(split) for name, split in further.items()}
    {'client_0': 50, 'client_1': 50, 'client_2': 50}
    """
    pool = whole.first_indices(data.partition.n_samples)
    if whole.take(pool).digest != data.source_digest:
        raise UsageError(f"{data.name} was not dealt from these {len(whole)} samples of {whole.name}")
    rest = np.setdiff1d(np.arange(len(whole)), pool, assume_unique=True)
    if not len(rest):
        return {}
    train = np.concatenate([pool[parts["train"]] for parts in data.partition.indices.values()])
    encoded = whole.fitted(train)
    by_owner = whole.owner is not None and PARTITIONS[data.partition.kind].natural
    further = {}
    for number, (name, parts) in enumerate(data.partition.indices.items()):
        own = pool[np.concatenate(list(parts.values()))]
        left = rest
        if by_owner and whole.owner is not None:
            left = rest[whole.owner[rest] == whole.owner[own[0]]]
        draw = seeds.numpy_generator(data.partition.seed, "unused", number)
        counts = np.bincount(whole.labels[own], minlength=len(whole.classes))
        chosen = _proportional(whole.labels[left], counts, most, draw)
        if len(chosen):
            rows = left[chosen]
            further[name] = Split(encoded.tensor(rows), torch.from_numpy(encoded.y[rows]))
    return further


def _proportional(labels: Integers, counts: Integers, most: int, draw: np.random.Generator) -> Integers:
    """Positions of samples with classes in the proportions of ``counts``: as many as there are, up to ``most``."""
    present = np.flatnonzero(counts)
    shares = counts[present] / counts.sum()
    having = np.bincount(labels, minlength=len(counts))[present]
    total = min(float(most), float((having / shares).min()))
    wanted = np.floor(shares * total + 1e-9).astype(np.int64)
    missing = int(total) - int(wanted.sum())
    order = np.argsort(-(shares * total - wanted), kind="stable")
    for k in [k for k in order if wanted[k] < having[k]][:missing]:
        wanted[k] += 1
    chosen = [
        draw.choice(np.flatnonzero(labels == label), size=size, replace=False)
        for label, size in zip(present, wanted, strict=True)
    ]
    return np.sort(np.concatenate(chosen)).astype(np.int64)
