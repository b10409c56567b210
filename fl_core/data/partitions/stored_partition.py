"""A stored partition of a run: the client and the split of every sample."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_core.data.arrays import Integers
from fl_core.data.partitions.base import SPLITS
from fl_core.data.partitions.registry import PARTITIONS
from fl_core.data.sources import Source
from fl_core.errors import UsageError
from fl_core.limits import parsed_json
from fl_core.storage.schema import COUNT, validate
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
        indices: ``indices[client][split]``, ascending int64 positions in the source. No sample occurs twice. Only
            clients of a kind that ``overlaps`` may share samples, and no client trains on another's test sample.
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

    @property
    def _overlaps(self) -> bool:
        """Return whether clients may share samples. A partitioning from outside is not imported, so this is assumed."""
        return self.kind not in PARTITIONS.own or PARTITIONS[self.kind].overlaps

    def check(self, source: Source) -> None:
        """Check that this partition was made for a source.

        Raises:
            UsageError: the samples differ in number or content, or indices overlap or are out of range.
        """
        if self.n_samples != len(source):
            raise UsageError(
                f"the stored partition must be of {len(source)} samples, as {source.name}; got {self.n_samples}."
            )
        if self.source_digest != source.digest:
            raise UsageError(
                f"the stored partition must be of the samples of {source.name}, digest {source.digest[:12]}; "
                f"got other samples, {self.source_digest[:12]}."
            )
        every = np.concatenate(
            [part[split] for part in self.indices.values() for split in SPLITS]
        )
        if every.size and (every.min() < 0 or every.max() >= len(source)):
            raise UsageError(
                f"the stored partition must have indices from 0 to {len(source) - 1}; got others."
            )
        groups = [
            np.concatenate([part[split] for split in SPLITS])
            for part in self.indices.values()
        ]
        if self._overlaps:  # clients may share a sample unless one of them tests on it
            tested, others = (
                np.unique(
                    np.concatenate(
                        [
                            part[split]
                            for part in self.indices.values()
                            for split in splits
                        ]
                    )
                )
                for splits in (("test",), ("train", "validation"))
            )
            groups.append(np.concatenate([tested, others]))
        else:
            groups = [every]
        if any(len(np.unique(group)) != len(group) for group in groups):
            raise UsageError(
                "the stored partition must have each sample once; got a sample twice."
            )


def _places(tensor: torch.Tensor) -> Integers:
    if tensor.dtype != torch.int64 or tensor.ndim != 1:
        raise ValueError(
            f"positions of samples must be whole numbers; got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.cpu().numpy()
