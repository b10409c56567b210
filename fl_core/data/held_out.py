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


def extra_test_samples(source: Source, data: FederatedData, max_per_client: int = MOST) -> dict[str, Split]:
    """Draw further test samples for each client from those of the dataset that no client of the federation has.

    A client's are drawn without replacement, with the class proportions of all its samples, and from its natural owner
    where the partition keeps to owners, so that they are distributed like its test samples. Two clients may be given
    the same sample: nothing is trained on them. The draw depends on the partition's seed alone.

    Args:
        source: the dataset as it was opened, before a pool was taken from it.
        data: the federation, dealt from the first samples of ``source`` (see :meth:`Source.first`).
        max_per_client: samples a client, at most; fewer where a class that the client has runs out.

    Returns:
        The samples by client's name; a client for whom nothing is left is missing.

    Raises:
        UsageError: the federation was not dealt from this dataset.

    >>> from fl_core.data import load, open_named
    >>> data = load("digits", max_samples=400, partition="dirichlet", alpha=0.5, clients=3)
    >>> further = extra_test_samples(open_named("digits"), data, max_per_client=50)
    >>> {name: len(split) for name, split in further.items()}
    {'client_0': 50, 'client_1': 50, 'client_2': 50}
    """
    pool = source.first_indices(data.partition.n_samples)
    if source.take(pool).digest != data.source_digest:
        raise UsageError(f"{data.name} was not dealt from these {len(source)} samples of {source.name}")
    rest = np.setdiff1d(np.arange(len(source)), pool, assume_unique=True)
    if not len(rest):
        return {}
    train = np.concatenate([pool[parts["train"]] for parts in data.partition.indices.values()])
    encoded = source.fitted(train)
    by_owner = source.owner is not None and PARTITIONS[data.partition.kind].natural
    further = {}
    for number, (name, parts) in enumerate(data.partition.indices.items()):
        own = pool[np.concatenate(list(parts.values()))]
        left = rest
        if by_owner and source.owner is not None:
            left = rest[source.owner[rest] == source.owner[own[0]]]
        draw = seeds.numpy_generator(data.partition.seed, "unused", number)
        counts = np.bincount(source.labels[own], minlength=len(source.classes))
        chosen = _proportional(source.labels[left], counts, max_per_client, draw)
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
