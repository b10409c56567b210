"""The data of a run: every client's samples as tensors, and warnings about what is unusual in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fl_core import tree
from fl_core.data.columns import ColumnTable
from fl_core.data.names import Names, nearly_equal
from fl_core.data.near_copies import near_copies
from fl_core.data.partitions import SPLITS, Partition
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.sources import NOTED, Source
from fl_core.data.values import Integers
from fl_core.display import MANY, Displayed, Summary, in_order
from fl_core.errors import UsageError, check_known, listing, plural, spelled
from fl_core.models.tokens import SPECIAL, UNKNOWN, TokenShape
from fl_core.rows import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL, task_of
from fl_core.storage import sha


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of one client and split, with their labels or targets.

    Attributes:
        x: contiguous float32 [n, ...]. Texts are int64 token ids [n, length].
        y: class indices, int64 [n]; targets, float32 [n], or float64 if float32 would
            merge different ones; times and events, float32 [n, 2]; labels of 0 and 1,
            float32 [n, L]; or labels at positions and several targets, int64 or float32
            [n, ...].
        groups: the number of what each sample belongs to, such as a patient, int64 [n].
            None means no groups.
    """

    x: Tensor
    y: Tensor
    groups: Integers | None = None

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        # no values: a message may quote it
        x_shape = list(self.x.shape[1:])
        return f"Split({plural(len(self), 'sample')} of shape {x_shape})"


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
        shape: shape of one sample; images are (C, H, W), texts a :class:`fl_core.models.tokens.TokenShape`.
        classes: names of the classes in the order of class indices, or of the labels.
            It is empty if numbers, events or labels at positions are predicted.
        clients: the clients, in order.
        partition: the client and split of each sample.
        source_digest: SHA-256 of the samples, independent of their partition.
        digest: SHA-256 of the samples and of the partition.
        words: the vocabulary of texts in the order of token ids, after the special ones; otherwise None.
        mean, std: one number for each channel, for the normalisation of images in 0..1. They are empty without it.
        images: whether the samples were uint8 images before they were scaled to 0..1.
        preprocessing: the preparation of a table that has a header or was scaled or
            filled. None for other data.
        table: the role or kind of each column of a table, and the inputs that it makes.
        chosen: the positive one of two classes, for AUROC and AUPRC. Empty means the second.
        empty: indices of the classes without any sample. It is used only if the samples
            are on another machine (:attr:`elsewhere`).
        indices: whether labels came from Python as whole numbers without names.
        integers: whether rows [n, d] came from Python as integers, which may be token
            ids.
        kind: the task, if the labels' shape and classes do not show it. Otherwise
            empty.
    """

    name: str
    shape: tuple[int, ...]
    classes: Names
    clients: tuple[ClientData, ...]
    partition: Partition
    source_digest: str
    digest: str
    words: Names | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    images: bool = False
    preprocessing: Preprocessing | None = None
    table: ColumnTable = field(default_factory=ColumnTable)
    chosen: str = ""
    empty: tuple[int, ...] = ()
    indices: bool = False
    integers: bool = False
    kind: str = ""

    def summary(self) -> Summary:
        """Return a table of the number of samples of each client and split."""
        sizes = [
            [client.name, *(len(client.split(split)) for split in SPLITS)]
            for client in self.clients
        ]
        task_text = self.task
        if self.classes:
            task_text = f"{self.n_classes} classes"
        shape = list(self.shape)
        lead = f"{self.name}: {plural(len(sizes), 'client')}, samples of shape {shape}, {task_text}"
        return Summary(lead, ["client", *SPLITS], sizes)

    @property
    def positive(self) -> str:
        """Return the name of the positive one of two classes, or an empty text for another number of classes."""
        if self.n_classes == 2 and self.task == CLASSIFICATION:
            return self.chosen or self.classes[1]
        return ""

    @property
    def positive_index(self) -> int:
        """Return the index of the positive class; 1 if there are not two classes."""
        if self.positive:
            return self.classes.index(self.positive)
        return 1

    def with_positive(self, name: str) -> FederatedData:
        """Return the same data with another positive class.

        Raises:
            UsageError: there is no such class, or there are not two.
        """
        if not self.positive:
            raise UsageError(
                f"positive must be left out without two classes; got {name!r} for {self.name}. Leave it out."
            )
        return replace(self, chosen=check_known("positive class", name, self.classes))

    def with_indices(self, outputs: int) -> FederatedData:
        """Return the same data whose labels are the original whole numbers, as indices of a model's outputs.

        The classes are then named by the indices of all outputs. Data that have these
        classes already are returned unchanged. The names of the present classes must be
        whole numbers (:attr:`indices`).

        Args:
            outputs: the model's number of outputs.

        Raises:
            UsageError: a label is no index of an output.
        """
        codes = [int(name) for name in self.classes]
        invalid_codes = [str(code) for code in codes if not 0 <= code < outputs]
        if invalid_codes:
            raise UsageError(
                f"labels must be from 0 to {outputs - 1}, the indices of the model's {outputs} outputs; got "
                f"{listing(invalid_codes)}. Number them from 0, or change the model."
            )
        if codes == list(range(outputs)):
            return self
        code = torch.tensor(codes)
        return self._changed(
            lambda split: replace(split, y=code[split.y]),
            classes=tuple(map(str, range(outputs))),
        )

    def _splits(self) -> list[Split]:
        """Return all splits of all clients."""
        splits: list[Split] = []
        for client in self.clients:
            splits += [client.split(name) for name in SPLITS]
        return splits

    def with_token_ids(self) -> FederatedData:
        """Return the same data with rows of integers as token ids, int64 [n, length].

        The number of token ids is the largest integer of any split plus 1.
        """
        splits = self._splits()
        n_tokens = 1 + max(int(samples.x.max()) for samples in splits if len(samples))
        return self._changed(
            lambda split: replace(split, x=split.x.long()),
            shape=TokenShape(self.shape, n_tokens),
        )

    def without_samples(self) -> FederatedData:
        """Return the same data with meta tensors, which have sizes and no numbers.

        Groups are left out. ``empty`` keeps the classes without any sample.
        """
        return self._changed(
            lambda split: Split(split.x.to("meta"), split.y.to("meta")),
            empty=tuple(self.absent),
        )

    def _changed(
        self, change: Callable[[Split], Split], **attributes: Any
    ) -> FederatedData:
        """Return a copy of the data in which ``change`` has replaced each split.

        Args:
            change: a function from a split to the new one.
            attributes: new values of other attributes.
        """
        clients = tuple(
            ClientData(client.name, *(change(client.split(name)) for name in SPLITS))
            for client in self.clients
        )
        return replace(self, clients=clients, **attributes)

    @property
    def elsewhere(self) -> bool:
        """Return whether some client's samples are on another machine.

        They are meta tensors here, which have sizes only.
        """
        return any(client.train.y.is_meta for client in self.clients)

    def _check_here(self) -> None:
        """Refuse samples that are on another machine."""
        if self.elsewhere:
            raise UsageError(
                f"samples of {self.name} must be on this machine; got only their sizes. Read them at the clients."
            )

    @property
    def task(self) -> str:
        """Return the task: one of :data:`fl_core.rows.TASKS`, or ``kind`` if that is set."""
        return self.kind or task_of(self.clients[0].train.y.ndim, self.classes)

    @property
    def n_classes(self) -> int:
        """Return the number of classes or labels, even if a client lacks some. It is 0 without classes."""
        return len(self.classes)

    @cached_property
    def absent(self) -> list[int]:
        """Return the indices of classes without any sample. Macro-F1 leaves them out.

        The list is empty if the task is no classification.
        """
        if self.task != CLASSIFICATION:
            return []
        if self.elsewhere:
            return list(self.empty)
        counts = sum(self.class_counts(split) for split in SPLITS)
        return np.flatnonzero(counts.sum() == 0).tolist()

    @property
    def names(self) -> list[str]:
        """Return the names of the clients, in order."""
        return [client.name for client in self.clients]

    @property
    def weights(self) -> tuple[int, ...]:
        """Return the number of training samples of each client."""
        return tuple(len(client.train) for client in self.clients)

    def client(self, name: str) -> ClientData:
        """Return a client by name.

        Raises:
            UsageError: there is no such client.
        """
        names = self.names
        return self.clients[names.index(check_known("client", name, names))]

    def class_counts(self, split: str = "train") -> pd.DataFrame:
        """Count the samples of each client (rows) by class or label (columns).

        Data without names of classes or labels, such as those of a regression or for
        survival, have one column, ``samples``.

        Args:
            split: ``train``, ``validation`` or ``test``.

        Raises:
            UsageError: an unknown split, or there are classes and the samples are
                :attr:`elsewhere`.
        """
        if not self.classes:
            sizes = {client.name: len(client.split(split)) for client in self.clients}
            return pd.DataFrame({"samples": sizes})
        check_known("split", split, SPLITS)
        self._check_here()
        labels = [client.split(split).y.cpu() for client in self.clients]
        several_labels = self.task == MULTILABEL
        counts = [
            y.sum(0).long()
            if several_labels
            else torch.bincount(y, minlength=self.n_classes)
            for y in labels
        ]
        return pd.DataFrame(
            torch.stack(counts).numpy(), index=self.names, columns=list(self.classes)
        )

    @cached_property
    def copies_note(self) -> str:
        """Return a warning about test samples that nearly copy training samples, or "".

        Only samples of numbers are examined. The text is "" for images, texts, columns
        of words, several inputs, samples with groups, and samples on another machine.
        """
        splits = self._splits()
        all_floats = all(split_rows.x.is_floating_point() for split_rows in splits)
        has_groups = any(split_rows.groups is not None for split_rows in splits)
        has_words = any(getattr(self.preprocessing, "categories", ()))
        has_words |= getattr(self.shape, "layout", None) is not None
        if self.elsewhere or self.images or has_groups or has_words or not all_floats:
            return ""
        samples: list[Any] = []
        for split in ("train", "test"):
            x = torch.cat([client.split(split).x for client in self.clients]).numpy()
            indices = self.partition.indices.values()
            positions = np.concatenate([split_rows[split] for split_rows in indices])
            _, first_rows = np.unique(positions, return_index=True)
            samples.append((x[first_rows], positions[first_rows]))
        (train, train_places), (test, test_places) = samples
        return near_copies(train, test, train_places, test_places).note

    @cached_property
    def training_digest(self) -> str:
        """Return one digest over the names and the training samples of all clients.

        A diagnosis records it for data in memory.
        """
        return digest_of(
            {
                client.name: tree.digest({"x": client.train.x, "y": client.train.y})
                for client in self.clients
            }
        )


def digest_of(clients: Mapping[str, str]) -> str:
    """Return one digest over the digests of all clients, which are given by client name."""
    return sha(json.dumps(clients, sort_keys=True).encode())


def gather(
    source: Source, partition: Partition, preprocessing: Preprocessing | None = None
) -> FederatedData:
    """Build a federation's tensors from a source and a partition.

    The vocabulary of texts comes from all clients' training samples together, unless
    the source brings it. A table's preprocessing is fitted on the same samples.

    Args:
        source: all samples.
        partition: the client and split of each sample.
        preprocessing: a stored preparation of a table, used in place of a fitted one.
            None means that it is fitted.

    Raises:
        UsageError: the partition was made for another source, a table cannot be
            prepared, or ``preprocessing`` does not fit the source.
    """
    partition.check(source)
    training_rows = [part["train"] for part in partition.indices.values()]
    owner = np.repeat(np.arange(len(training_rows)), list(map(len, training_rows)))
    whole_source, source = (
        source,
        source.fit(np.concatenate(training_rows), preprocessing, owner),
    )
    clients = tuple(
        ClientData(name, **{split: split_of(source, splits[split]) for split in SPLITS})
        for name, splits in partition.indices.items()
    )
    digest = sha(f"{whole_source.digest}|{partition.digest}".encode())
    attributes = ["name", "shape", "classes", "words", "preprocessing", "table"]
    attributes += ["indices", "kind"]
    return FederatedData(
        **{key: getattr(source, key) for key in attributes},
        clients=clients,
        partition=partition,
        source_digest=whole_source.digest,
        digest=digest,
        mean=source.mean if source.is_image else (),
        std=source.std if source.is_image else (),
        images=source.is_image,
        integers=source.integers and not whole_source.prepares,
    )


def split_of(source: Source, indices: np.ndarray) -> Split:
    """Return the samples of a source at ``indices`` as tensors."""
    groups = None if source.groups is None else source.groups[indices]
    return Split(source.tensor(indices), torch.from_numpy(source.y[indices]), groups)


# --- what is unusual -------------------------------------------------------------------------------------------

LARGE = 1e4
"""The largest feature without a warning. Beyond it a step with an ordinary learning rate is too long."""
USUAL = 2 / 3
"""Share of training samples in the positive class above which a warning proposes the
other."""
REPEATED = 0.01
"""Share of validation or test samples above which equality to training samples is
reported."""
SPREAD = 100.0
"""The largest standard deviation of targets without a warning. The smallest is its inverse."""


def notes(data: FederatedData, alone: bool = False) -> list[str]:
    """Return warnings about a federation's clients, names, classes, scale and repeated samples.

    They also report many unknown words in texts. The list is empty if nothing is
    unusual.

    Args:
        data: the federation. Its samples must not be :attr:`FederatedData.elsewhere`.
        alone: whether clients train locally on purpose, so that no warning says so.

    >>> from fl_core.data import load
    >>> notes(load("heart"))
    []
    """
    sentences = []
    if len(data.names) == 1 and not alone:
        sentences.append(
            "there is one client only: nothing is federated, it trains alone"
        )
    for noun, words in (("clients", data.names), ("classes", data.classes)):
        for group in nearly_equal(words):
            group_names = listing(map(repr, group))
            sentences.append(
                f"the {noun} {group_names} differ by spaces or capitals only; each is one of its own"
            )
    sentences += _of_classes(data)
    largest_feature, place_text = 0.0, ""
    dtypes = getattr(getattr(data.shape, "layout", None), "dtypes", ())
    # unlike ids of tokens
    has_floats = all(dtype.is_floating_point for dtype in dtypes)
    for client in data.clients:
        x = client.train.x
        if has_floats and x.is_floating_point() and x.numel():
            magnitudes = torch.maximum(x.amax(0), -x.amin(0)).flatten()
            if float(magnitudes.max()) > largest_feature:
                largest_feature, k = float(magnitudes.max()), int(magnitudes.argmax())
                inputs = getattr(data.preprocessing, "inputs", ())
                place_text = f"column {inputs[k]!r}" if inputs else f"feature {k} (counted from 0)"  # fmt: skip
    if largest_feature > LARGE:
        place_text = f" in {place_text}" if len(data.shape) == 1 else ""
        sentences.append(
            f"features are as large as {largest_feature:.3g}{place_text}: scale them, or training is likely to diverge"
        )
    if len(words := data.words or ()) > 1:
        ids = torch.cat([client.validation.x.flatten() for client in data.clients])
        n_unknown, n_known = (ids == UNKNOWN).sum(), (ids >= len(SPECIAL)).sum()
        unknown_share = float(n_unknown / (n_unknown + n_known).clamp(min=1))
        if unknown_share > NOTED:
            sentences.append(
                f"{unknown_share:.0%} of the words in validation texts "
                f"are not among the {len(words):,} of training texts"
            )
    keys: dict[str, list[int]] = {}
    for split in SPLITS:
        rows = chain.from_iterable(
            client.split(split).x.numpy() for client in data.clients
        )
        keys[split] = [hash(row.tobytes()) for row in rows]
    training_keys = {*keys["train"]}
    for split in SPLITS[1:]:
        n_repeated = sum(key in training_keys for key in keys[split])
        if n_repeated > REPEATED * len(keys[split]):
            sentences.append(
                f"{n_repeated:,} of {len(keys[split]):,} {split} samples equal a training sample: "
                "scores may be too good"
            )
    if data.copies_note:
        sentences.append(data.copies_note)
    return sentences


def client_notes(data: FederatedData) -> list[str]:
    """Return warnings about clients with one class or target or without an event, and about the targets' scale.

    Only training samples count, and they must not be :attr:`FederatedData.elsewhere`.
    The list is empty if nothing is unusual.
    """
    ys = {client.name: client.train.y for client in data.clients}
    sameness = "of one class only" if data.task == CLASSIFICATION else "whose targets are all equal"  # fmt: skip
    clients_by_fault = {
        f"training samples {sameness}": [name for name, y in ys.items() if len(y.unique(dim=0)) < 2],
    }  # fmt: skip
    if data.task == SURVIVAL:
        event_fault = "no event among its training samples: it learns nothing"
        clients_by_fault[event_fault] = [
            name for name, y in ys.items() if not y[:, 1].any()
        ]
    sentences = []
    for fault, names in clients_by_fault.items():
        if len(names) > MANY:
            clients_text = listing(in_order(names), 3)
            sentences.append(
                f"{len(names)} of {len(ys)} clients have {fault}: {clients_text}"
            )
        else:
            sentences += [f"client {name!r} has {fault}" for name in names]
    if data.task == REGRESSION and not getattr(data.preprocessing, "target", ()):
        spread = float(torch.cat([*ys.values()]).double().std())
        if not 1 / SPREAD <= spread <= SPREAD:
            sentences.append(
                f"the training targets' standard deviation is {spread:.3g}: scale them to about 1, which learning "
                "rates are made for"
            )
    return sentences


def _of_classes(data: FederatedData) -> Iterator[str]:
    """Yield warnings about rare classes, renumbered labels, and the positive class.

    A class is rare if it has no sample, or one. Whole numbers other than 0..C-1 are
    renumbered. AUROC and AUPRC describe the positive one of two classes. A warning says
    so if more than a share :data:`USUAL` of training samples have this class, unless
    the user chose it. Other tasks than classification have no such warnings.
    """
    if data.task != CLASSIFICATION:
        return
    if data.absent:
        empty_classes = [repr(data.classes[k]) for k in data.absent]
        yield f"no sample has class {listing(empty_classes, 6)}: macro-F1 leaves it out"
    if data.indices and data.classes != tuple(map(str, range(data.n_classes))):
        yield (
            f"labels {listing(data.classes, 6)} are the classes 0 to {data.n_classes - 1} of the model, in this order"
        )
    counts = sum(data.class_counts(split).sum() for split in SPLITS)
    single_classes = list(counts.index[counts == 1])
    if 2 * len(single_classes) > data.n_classes:
        yield (
            f"{len(single_classes)} of {data.n_classes} classes have a single sample: "
            "is the label column an identifier, or a number to be predicted?"
        )
    elif single_classes:
        single_names = listing(map(repr, single_classes), 6)
        yield f"a single sample has class {single_names}: is it misspelt, or no label?"
    if data.positive and not data.chosen:
        targets = torch.cat([client.train.y for client in data.clients]).double()
        if targets.mean() > USUAL:
            yield (
                f"AUROC and AUPRC describe {data.positive!r}, the class of {targets.mean():.0%} of samples; "
                f"{spelled(positive=data.classes[0])}?"
            )
