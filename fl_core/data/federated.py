"""The data that a run trains and tests on: every client's samples as tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fl_core import tree
from fl_core.data.partitions import SPLITS, Partition
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known
from fl_core.scores import CLASSIFICATION, REGRESSION


@dataclass(frozen=True, eq=False)
class Split:
    """Samples ``x``, contiguous float32 [n, *shape], and their class indices ``y``, int64 [n], or targets, float32 [n].

    Texts are int64 token ids [n, length].
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Split({len(self)} samples of shape {list(self.x.shape[1:])})"  # no values: a message may quote it

    def to(self, device: torch.device | str) -> Split:
        """The same samples on another device; nothing is copied when they are there already."""
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's samples; no sample is in two splits."""

    name: str
    train: Split
    validation: Split
    test: Split

    def split(self, name: str) -> Split:
        """``train``, ``validation`` or ``test`` by name.

        Raises:
            UsageError: another name.
        """
        return getattr(self, check_known("split", name, SPLITS))

    def to(self, device: torch.device | str) -> ClientData:
        """The same client with its tensors on another device."""
        return ClientData(self.name, self.train.to(device), self.validation.to(device), self.test.to(device))


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A dataset partitioned over clients: what a run trains, validates and tests on.

    Attributes:
        name: registry name or path.
        shape: shape of one sample; images are (C, H, W), texts a :class:`fl_core.tokens.TokenShape`.
        classes: names of the classes, in the order of class indices; none: numbers are predicted.
        clients: the clients, in order.
        partition: which sample went where.
        source_digest: SHA-256 of the samples, whoever has them.
        digest: SHA-256 of the samples and of who holds which in which split.
        words: of texts, the vocabulary in the order of token ids, after the special ones; otherwise None.
        mean, std: one number a channel, with which images scaled to 0..1 were normalised; empty = they were not.
        images: whether the samples were uint8 images before they were scaled to 0..1.
        preprocessing: of a table with a header, or one that was scaled or filled, what its numbers went through.
        chosen: of two classes the positive one, whose AUROC and AUPRC are scored; empty = the second.
    """

    name: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    clients: tuple[ClientData, ...]
    partition: Partition
    source_digest: str
    digest: str
    words: tuple[str, ...] | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    images: bool = False
    preprocessing: Preprocessing | None = None
    chosen: str = ""

    @property
    def positive(self) -> str:
        """Name of the positive class, of two; empty where there are more, or none."""
        return (self.chosen or self.classes[1]) if self.n_classes == 2 else ""

    @property
    def positive_index(self) -> int:
        """Index of the positive class; 1 where there is none, which says nothing."""
        return self.classes.index(self.positive) if self.positive else 1

    def with_positive(self, name: str) -> FederatedData:
        """Return the same data with another positive class.

        Raises:
            UsageError: the data have no such class, or not two.
        """
        if self.n_classes != 2:
            raise UsageError(
                f"positive must be left out unless there are two classes; {self.name} has {self.n_classes}."
            )
        return replace(self, chosen=check_known("positive class", name, self.classes))

    @property
    def task(self) -> str:
        """What is predicted: a class, or where there are none a number; of :data:`fl_core.scores.TASKS`."""
        return CLASSIFICATION if self.classes else REGRESSION

    @property
    def n_classes(self) -> int:
        """Number of classes, whether or not every client has samples of each; 0 where numbers are predicted."""
        return len(self.classes)

    @property
    def weights(self) -> tuple[int, ...]:
        """Number of training samples of each client."""
        return tuple(len(client.train) for client in self.clients)

    def client(self, name: str) -> ClientData:
        """A client by name.

        Raises:
            UsageError: there is no such client.
        """
        names = [client.name for client in self.clients]
        return self.clients[names.index(check_known("client", name, names))]

    def class_counts(self, split: str = "train") -> pd.DataFrame:
        """Samples of each class at each client: clients x classes, by name; of numbers one column, ``samples``.

        Raises:
            UsageError: an unknown split.
        """
        if not self.classes:
            sizes = {client.name: len(client.split(split)) for client in self.clients}
            return pd.DataFrame({"samples": sizes})
        counts = [torch.bincount(client.split(split).y, minlength=self.n_classes).cpu() for client in self.clients]
        names = [client.name for client in self.clients]
        return pd.DataFrame(torch.stack(counts).numpy(), index=names, columns=list(self.classes))

    @cached_property
    def training_digest(self) -> str:
        """Digest of every client's training samples, as a diagnosis of tensors in memory has it."""
        return digest_of({each.name: tree.digest({"x": each.train.x, "y": each.train.y}) for each in self.clients})

    def to(self, device: torch.device | str) -> FederatedData:
        """The same data with every client's tensors on another device."""
        return replace(self, clients=tuple(client.to(device) for client in self.clients))


def digest_of(clients: Mapping[str, str]) -> str:
    """Return one digest over the digests of all clients."""
    return hashlib.sha256(json.dumps(clients, sort_keys=True).encode()).hexdigest()


def gather(source: Source, partition: Partition, preprocessing: Preprocessing | None = None) -> FederatedData:
    """Build a federation's tensors from a source and a partition.

    Texts use the vocabulary of all clients' training samples together, and a table's preprocessing is fitted on them,
    unless it is given.

    Raises:
        UsageError: the partition was made for another source.
    """
    partition.check(source)
    train = np.concatenate([part["train"] for part in partition.indices.values()])
    whole, source = source, source.fitted(train, preprocessing)
    clients = tuple(
        ClientData(name, **{split: _split(source, splits[split]) for split in SPLITS})
        for name, splits in partition.indices.items()
    )
    digest = hashlib.sha256(f"{whole.digest}|{partition.digest}".encode()).hexdigest()
    scale = (source.mean, source.std) if source.is_image else ((), ())
    return FederatedData(
        *(source.name, source.shape, source.classes, clients, partition, whole.digest, digest, source.words, *scale),
        images=source.is_image,
        preprocessing=source.preprocessing,
    )


def _split(source: Source, indices: np.ndarray) -> Split:
    return Split(source.tensor(indices), torch.from_numpy(source.y[indices]))
