"""Samples of a dataset outside a federation, as more test samples of its clients."""

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
"""More test samples of a client. With 400, a score's sampling error is small compared with that between runs."""


def extra_test_samples(
    source: Source, data: FederatedData, max_per_client: int = MOST
) -> dict[str, Split]:
    """Draw more test samples for each client from the unused part of a dataset.

    Samples are drawn without replacement and follow the class proportions of all the client's samples. If the partition
    keeps natural clients, samples come from the client's own. Two clients may receive the same sample, since nothing is
    trained on them. The draw depends on the partition's seed alone.

    Args:
        source: the full dataset, as opened before a pool was taken from it.
        data: the federation, created from the first samples of ``source`` (see :meth:`Source.first`).
        max_per_client: maximum number of samples of a client. It gets fewer if one of its classes runs out.

    Returns:
        A dict from client name to samples. Clients without unused samples are omitted.

    Raises:
        UsageError: the federation was not created from this dataset.

    >>> from fl_core.data import load, open_named
    >>> data = load("digits", max_samples=400, partition="dirichlet", alpha=0.5, clients=3)
    >>> further = extra_test_samples(open_named("digits"), data, max_per_client=50)
    >>> {name: len(split) for name, split in further.items()}
    {'client_0': 50, 'client_1': 50, 'client_2': 50}
    """
    pool = source.first_indices(data.partition.n_samples)
    if source.take(pool).digest != data.source_digest:
        raise UsageError(
            f"source must be the dataset of the federation {data.name}; got other samples in {source.name}."
        )
    rest = np.setdiff1d(np.arange(len(source)), pool, assume_unique=True)
    if source.groups is not None:
        rest = rest[~np.isin(source.groups[rest], source.groups[pool])]
    if not len(rest):
        return {}
    train = np.concatenate(
        [pool[parts["train"]] for parts in data.partition.indices.values()]
    )
    encoded = source.fit(train)
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
            further[name] = Split(
                encoded.tensor(rows), torch.from_numpy(encoded.y[rows])
            )
    return further


def _proportional(
    labels: Integers, counts: Integers, most: int, draw: np.random.Generator
) -> Integers:
    """Draw positions of samples with classes in the proportions of ``counts``, up to ``most``."""
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
