"""Partitioning of a source over clients, and its result: the client and the split of each sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from fl_core.data.arrays import Integers
from fl_core.data.partitions.base import (
    PARTITIONS,
    SPLITS,
    Partitioning,
    check_shares,
)
from fl_core.data.sources import Source
from fl_core.errors import COUNT, UsageError, listing, validate
from fl_core.rows import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL
from fl_core.storage import parsed_json
from fl_core.tree import Tree

META = {
    "kind": str,
    "params": dict,
    "seed": int,
    "names": [str],
    "n_samples": COUNT,
    "source_digest": str,
}


@dataclass(frozen=True, eq=False)
class Partition:
    """A partition of a source: the client and the split of each sample.

    Attributes:
        kind: the partitioning's name, or ``package.module:Class``.
        params: number of clients, the options of the kind, and ``splits``, as plain numbers and lists.
        seed: of its draws.
        indices: ``indices[client][split]``, ascending int64 positions in the source. No sample occurs twice at a
            client, and no client trains on another's test sample.
        n_samples: size of the source.
        source_digest: :attr:`Source.digest` of the source.
    """

    kind: str
    params: dict[str, Any]
    seed: int
    indices: dict[str, dict[str, Integers]]
    n_samples: int
    source_digest: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return the clients' names, in order."""
        return tuple(self.indices)

    @property
    def digest(self) -> str:
        """Return the SHA-256 over the clients' names and indices."""
        sha = hashlib.sha256()
        for name, splits in self.indices.items():
            for split in SPLITS:
                sha.update(f"{name}|{split}|{len(splits[split])}|".encode())
                sha.update(splits[split].astype("<i8").tobytes())
        return sha.hexdigest()

    def to_tree(self) -> Tree:
        """Return the partition as tensors.

        Indices are int64 in ``<client number>/<split>``. Other data are UTF-8 in ``meta``.
        """
        meta = {
            "kind": self.kind,
            "params": self.params,
            "seed": self.seed,
            "names": self.names,
            "n_samples": self.n_samples,
            "source_digest": self.source_digest,
        }
        tree = {
            "meta": torch.frombuffer(
                bytearray(json.dumps(meta).encode()), dtype=torch.uint8
            ).clone()
        }
        for number, splits in enumerate(self.indices.values()):
            tree |= {
                f"{number}/{split}": torch.from_numpy(splits[split].copy())
                for split in SPLITS
            }
        return tree

    @classmethod
    def from_tree(cls, tree: Tree) -> Partition:
        """Return the partition from the tensors of :meth:`to_tree`.

        Raises:
            UsageError: the tensors are not a stored partition.
        """
        try:
            meta = parsed_json(tree["meta"].cpu().numpy().tobytes())
            if wrong := validate(meta, META):
                raise ValueError(wrong)
            names = meta.pop("names")
            indices = {
                name: {split: _places(tree[f"{number}/{split}"]) for split in SPLITS}
                for number, name in enumerate(names)
            }
            return cls(indices=indices, **meta)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"the tree must be a stored partition; got {type(error).__name__}: {error}."
            ) from error

    def check(self, source: Source) -> None:
        """Check that this partition was made for a source.

        Raises:
            UsageError: the samples differ in number or content, or indices overlap or are out of range.
        """
        if self.n_samples != len(source):
            raise UsageError(
                f"the stored partition must be of {len(source)} samples, as {source.name}; got {self.n_samples}. "
                "Pass the data that the run began with."
            )
        if self.source_digest != source.digest:
            raise UsageError(
                f"the stored partition must be of the samples of {source.name}, digest {source.digest[:12]}; "
                f"got other samples, {self.source_digest[:12]}. Pass the data that the run began with."
            )
        clients = self.indices.values()
        tested = np.concatenate([part["test"] for part in clients])
        others = [part[split] for part in clients for split in SPLITS[:2]]
        sides = (tested, np.concatenate(others))
        every = np.concatenate(sides)
        if every.size and (every.min() < 0 or every.max() >= len(source)):
            raise UsageError(
                f"the stored partition must have indices from 0 to {len(source) - 1}; got others."
            )
        groups = [np.concatenate(list(part.values())) for part in clients]
        groups.append(np.concatenate([np.unique(side) for side in sides]))
        if any(len(np.unique(group)) != len(group) for group in groups):
            raise UsageError(
                "the stored partition must have each sample once at a client, and no client may train on the test "
                "sample of another; got a sample twice."
            )


def _places(tensor: torch.Tensor) -> Integers:
    if tensor.dtype != torch.int64 or tensor.ndim != 1:
        raise ValueError(
            f"positions of samples must be whole numbers; got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.cpu().numpy()


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
    chosen = {}
    for name, value in options.items():
        if value is not None:
            if name not in options_of(partitioning_class):
                own = listing(options_of(partitioning_class)) or "none"
                raise UsageError(
                    f"{name} must be left out with partition {kind!r}; got {value}. Its own options: {own}."
                )
            chosen[name] = value.item() if isinstance(value, np.generic) else value
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
    pool = replace(source, x=np.empty((len(source), 0)))
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
    params = {"clients": len(indices), **asdict(partitioning), "splits": list(shares)}
    return Partition(kind, params, int(seed), indices, len(source), source.digest)


def options_of(partitioning: type[Partitioning]) -> tuple[str, ...]:
    """Return the names of a partitioning's own options."""
    return tuple(option.name for option in fields(partitioning))
