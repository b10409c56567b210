"""Partitioning of a source over clients: the client and the split of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from fl_core.data.partitions.base import SPLITS, Partitioning, Pool, check_shares
from fl_core.data.partitions.registry import PARTITIONS
from fl_core.data.partitions.stored_partition import Partition
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known, listing
from fl_core.scores import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL

_PREDICTED = {
    REGRESSION: "numbers",
    SURVIVAL: "times of events",
    MULTILABEL: "several labels",
}


def make(
    source: Source,
    kind: str,
    *,
    clients: int | None = None,
    seed: int = 0,
    splits: Sequence[float] | None = None,
    **options: Any,
) -> Partition:
    """Partition a source over clients, and divide each client's samples into train, validation and test.

    >>> import numpy as np
    >>> from fl_core.data import Source
    >>> toy = Source("toy", np.zeros((60, 2), np.float32), np.arange(60) % 3, ("a", "b", "c"))
    >>> partition = make(toy, "dirichlet", clients=2, alpha=5.0)
    >>> {name: {split: len(rows) for split, rows in parts.items()} for name, parts in partition.indices.items()}
    {'client_0': {'train': 22, 'validation': 6, 'test': 7}, 'client_1': {'train': 16, 'validation': 4, 'test': 5}}

    Args:
        kind: a name of :data:`PARTITIONS`, or ``package.module:Class``.
        clients: number of clients. For ``natural`` it is None or the number of natural clients. For
            ``natural_dirichlet`` it is a multiple of that, by default five times.
        seed: of every draw.
        splits: shares of train, validation and test. None means the kind's own, usually 0.64, 0.16, 0.20.
        options: the kind's own, such as ``alpha``. None means its default.

    Raises:
        UsageError: a kind or option is unknown, a value is out of range, or a client has too few samples to divide.
    """
    partitioning_class = PARTITIONS[kind]
    chosen = {name: value for name, value in options.items() if value is not None}
    _check_options(kind, partitioning_class, chosen)
    partitioning = partitioning_class(**chosen)
    if partitioning_class.by_class and source.task != CLASSIFICATION:
        free = listing(
            name for name, member in PARTITIONS.members().items() if not member.by_class
        )
        raise UsageError(
            f"partition {kind!r} must have classes; got {_PREDICTED[source.task]} to predict in {source.name}. "
            f"Use one of {free}."
        )
    if source.groups is not None and not partitioning_class.groups:
        free = listing(
            name for name, member in PARTITIONS.members().items() if member.groups
        )
        raise UsageError(
            f"group_column must be left out with partition {kind!r}, which divides groups. Use one of {free}."
        )
    shares = check_shares(partitioning.shares if splits is None else splits)
    pool = Pool(
        source.name,
        source.labels,
        source.owner,
        source.owner_names,
        source.is_train,
        source.groups,
    )
    count = partitioning.count(pool, clients)
    partitioning = partitioning.fitted(pool, count)
    divided = partitioning.divide(pool, count, shares, seed)
    indices = {
        name: {
            split: np.sort(part).astype(np.int64)
            for split, part in zip(SPLITS, parts, strict=True)
        }
        for name, parts in zip(partitioning.names(pool, count), divided, strict=True)
    }
    params = {"clients": len(indices), **_plain(partitioning), "splits": list(shares)}
    return Partition(kind, params, int(seed), indices, len(source), source.digest)


def options_of(partitioning: type[Partitioning]) -> tuple[str, ...]:
    """Return the names of a partitioning's own options."""
    return tuple(option.name for option in fields(partitioning))


def _plain(partitioning: Partitioning) -> dict[str, float | int]:
    """Return the options in types that JSON can store."""
    values: dict[str, Any] = asdict(partitioning)
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
    }


def _check_options(
    kind: str, partitioning: type[Partitioning], options: dict[str, Any]
) -> None:
    for name, value in options.items():
        if name not in options_of(partitioning):
            having = {
                other: options_of(member)
                for other, member in PARTITIONS.members().items()
            }
            check_known(
                "option of a partition",
                name,
                sorted({option for own in having.values() for option in own}),
            )
            owners = [other for other, own in having.items() if name in own]
            raise UsageError(
                f"{name} must be left out with partition {kind!r}; got {value}. It belongs to {listing(owners)}."
            )
