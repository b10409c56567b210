"""The data of a run: every client's samples as tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fl_core import tree
from fl_core.data.arrays import Integers
from fl_core.data.column_table import ColumnTable
from fl_core.data.partitions import SPLITS, Partition
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.sources import Source
from fl_core.display import Displayed, Summary
from fl_core.errors import UsageError, check_known, listing
from fl_core.rows import CLASSIFICATION, MULTILABEL, task_of
from fl_core.tokens import TokenShape


@dataclass(frozen=True, eq=False)
class Split:
    """Samples ``x``, contiguous float32 [n, *shape], with class indices ``y``, int64 [n], or targets, float32 [n].

    Texts are int64 token ids [n, length]. For survival y are times and events, float32 [n, 2]; for multilabel they are
    0 and 1, float32 [n, C]. ``groups`` says what each sample belongs to, such as a patient, int64 [n].
    """

    x: Tensor
    y: Tensor
    groups: Integers | None = None

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return f"Split({len(self)} samples of shape {list(self.x.shape[1:])})"  # no values: a message may quote it


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's samples. No sample is in two splits."""

    name: str
    train: Split
    validation: Split
    test: Split

    def split(self, name: str) -> Split:
        """Return ``train``, ``validation`` or ``test`` by name.

        Raises:
            UsageError: another name.
        """
        return getattr(self, check_known("split", name, SPLITS))


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData(Displayed):
    """A dataset partitioned over clients, for training, validation and testing.

    Attributes:
        name: registry name or path.
        shape: shape of one sample; images are (C, H, W), texts a :class:`fl_core.tokens.TokenShape`.
        classes: names of the classes in the order of class indices, or of the labels. It is empty if numbers or events
            are predicted.
        clients: the clients, in order.
        partition: the client and split of each sample.
        source_digest: SHA-256 of the samples, independent of their partition.
        digest: SHA-256 of the samples and of the partition.
        words: the vocabulary of texts in the order of token ids, after the special ones; otherwise None.
        mean, std: one number for each channel, for the normalisation of images in 0..1. They are empty without it.
        images: whether the samples were uint8 images before they were scaled to 0..1.
        preprocessing: the preparation of a table that has a header or was scaled or filled.
        table: what each column of a table is taken as, and the inputs that it makes.
        chosen: the positive one of two classes, for AUROC and AUPRC. Empty means the second.
        empty: indices of the classes without any sample, if samples are on other machines.
        indices, integers: whether labels are whole numbers without names, and rows integers, from Python.
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
    table: ColumnTable = field(default_factory=ColumnTable)
    chosen: str = ""
    empty: tuple[int, ...] = ()
    indices: bool = False
    integers: bool = False

    def summary(self) -> Summary:
        """Return the number of samples of each client and split."""
        sizes = [
            [client.name, *(len(client.split(split)) for split in SPLITS)]
            for client in self.clients
        ]
        what = f"{self.n_classes} classes" if self.classes else self.task
        lead = f"{self.name}: {len(sizes)} clients, samples of shape {list(self.shape)}, {what}"
        return Summary(lead, ["client", *SPLITS], sizes)

    @property
    def positive(self) -> str:
        """Return the name of the positive one of two classes, or an empty text for another number of classes."""
        return (
            (self.chosen or self.classes[1])
            if self.n_classes == 2 and self.task == CLASSIFICATION
            else ""
        )

    @property
    def positive_index(self) -> int:
        """Return the index of the positive class. Without one it is 1, without a meaning."""
        return self.classes.index(self.positive) if self.positive else 1

    def with_positive(self, name: str) -> FederatedData:
        """Return the same data with another positive class.

        Raises:
            UsageError: there is no such class, or there are not two.
        """
        if self.n_classes != 2 or self.task != CLASSIFICATION:
            what = (
                f"{self.n_classes} classes"
                if self.task == CLASSIFICATION
                else f"the task {self.task}"
            )
            raise UsageError(
                f"positive must be left out without two classes; got {name!r}. {self.name} has {what}."
            )
        return replace(self, chosen=check_known("positive class", name, self.classes))

    def with_indices(self, outputs: int) -> FederatedData:
        """Return the same data with labels as indices of a model's outputs, as in all of torch.

        Raises:
            UsageError: a label is no index of an output.
        """
        codes = [int(name) for name in self.classes]
        others = [str(code) for code in codes if not 0 <= code < outputs]
        if others:
            raise UsageError(
                f"labels must be from 0 to {outputs - 1}, the indices of the model's {outputs} outputs; got "
                f"{listing(others)}. Number them from 0, or change the model."
            )
        if codes == list(range(outputs)):
            return self
        code = torch.tensor(codes)
        return self._changed(
            lambda split: replace(split, y=code[split.y]),
            classes=tuple(map(str, range(outputs))),
        )

    def with_token_ids(self) -> FederatedData:
        """Return the same data with rows of integers as token ids."""
        parts = [each.split(name) for each in self.clients for name in SPLITS]
        tokens = 1 + max(int(part.x.max()) for part in parts if len(part))
        return self._changed(
            lambda split: replace(split, x=split.x.long()),
            shape=TokenShape(self.shape, tokens),
        )

    def _changed(
        self, change: Callable[[Split], Split], **others: Any
    ) -> FederatedData:
        """Return the same data with each split changed, and other attributes."""
        clients = tuple(
            ClientData(each.name, *(change(each.split(name)) for name in SPLITS))
            for each in self.clients
        )
        return replace(self, clients=clients, **others)

    @property
    def elsewhere(self) -> bool:
        """Return whether a client's samples are on another machine. Here they are meta tensors, with sizes alone."""
        return any(client.train.y.is_meta for client in self.clients)

    @property
    def task(self) -> str:
        """Return the task from :data:`fl_core.rows.TASKS`."""
        return task_of(self.clients[0].train.y.ndim, self.classes)

    @property
    def n_classes(self) -> int:
        """Return the number of classes or labels, even if a client lacks some. It is 0 without classes."""
        return len(self.classes)

    @cached_property
    def absent(self) -> list[int]:
        """Return the indices of classes without any sample. Macro-F1 leaves them out."""
        if self.task != CLASSIFICATION:
            return []
        if self.elsewhere:
            return list(self.empty)
        counts = sum(self.class_counts(split) for split in SPLITS)
        return np.flatnonzero(counts.sum() == 0).tolist()

    @property
    def weights(self) -> tuple[int, ...]:
        """Return the number of training samples of each client."""
        return tuple(len(client.train) for client in self.clients)

    def client(self, name: str) -> ClientData:
        """Return a client by name.

        Raises:
            UsageError: there is no such client.
        """
        names = [client.name for client in self.clients]
        return self.clients[names.index(check_known("client", name, names))]

    def class_counts(self, split: str = "train") -> pd.DataFrame:
        """Count samples by client and class, or by client and label.

        For a regression and survival there is one column, ``samples``.

        Raises:
            UsageError: an unknown split.
        """
        if not self.classes:
            sizes = {client.name: len(client.split(split)) for client in self.clients}
            return pd.DataFrame({"samples": sizes})
        ys = [client.split(split).y.cpu() for client in self.clients]
        several = self.task == MULTILABEL
        counts = [
            y.sum(0).long() if several else torch.bincount(y, minlength=self.n_classes)
            for y in ys
        ]
        names = [client.name for client in self.clients]
        return pd.DataFrame(
            torch.stack(counts).numpy(), index=names, columns=list(self.classes)
        )

    @cached_property
    def training_digest(self) -> str:
        """Return the digest of every client's training samples, as in a diagnosis of tensors in memory."""
        return digest_of(
            {
                each.name: tree.digest({"x": each.train.x, "y": each.train.y})
                for each in self.clients
            }
        )


def digest_of(clients: Mapping[str, str]) -> str:
    """Return one digest over the digests of all clients."""
    return hashlib.sha256(json.dumps(clients, sort_keys=True).encode()).hexdigest()


def gather(
    source: Source,
    partition: Partition,
    preprocessing: Preprocessing | None = None,
) -> FederatedData:
    """Build a federation's tensors from a source and a partition.

    The vocabulary of texts comes from all clients' training samples together. A table's preprocessing is fitted on
    them, unless it is given.

    Raises:
        UsageError: the partition was made for another source.
    """
    partition.check(source)
    train = np.concatenate([part["train"] for part in partition.indices.values()])
    whole, source = source, source.fit(train, preprocessing)
    clients = tuple(
        ClientData(name, **{split: split_of(source, splits[split]) for split in SPLITS})
        for name, splits in partition.indices.items()
    )
    digest = hashlib.sha256(f"{whole.digest}|{partition.digest}".encode()).hexdigest()
    kept = ("name", "shape", "classes", "words", "preprocessing", "table", "indices")
    return FederatedData(
        **{key: getattr(source, key) for key in kept},
        clients=clients,
        partition=partition,
        source_digest=whole.digest,
        digest=digest,
        mean=source.mean if source.is_image else (),
        std=source.std if source.is_image else (),
        images=source.is_image,
        integers=source.integers and not whole.prepares,
    )


def split_of(source: Source, indices: np.ndarray) -> Split:
    """Return some samples of a source as tensors."""
    groups = None if source.groups is None else source.groups[indices]
    return Split(source.tensor(indices), torch.from_numpy(source.y[indices]), groups)
