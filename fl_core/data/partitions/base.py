"""Base and registry of all partitionings, and the partition that they make: the client and the split of each sample."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np

from fl_core import seeds
from fl_core.data.names import Names, nearly_equal
from fl_core.data.registry import SHARES
from fl_core.data.sources import Source
from fl_core.data.values import Integers
from fl_core.errors import (
    COUNT,
    Bound,
    UsageError,
    about,
    check_fields,
    check_type,
    check_value,
    listing,
    spelled,
    validate,
)
from fl_core.registry import Registry
from fl_core.rows import CLASSIFICATION
from fl_core.storage import parsed_json

if TYPE_CHECKING:
    import torch

    from fl_core.tree import Tree

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Partitioning:
    """Base of ways to partition data over clients: frozen dataclasses whose fields are their options.

    A subclass has a ``name`` and overrides :meth:`assign`. A partition never depends on
    the samples ``x``. It depends on the labels, the natural clients, the groups, the
    official test set, the options and the seed. The same call gives the same positions
    on every machine. An option's annotation may have a :class:`fl_core.errors.Bound`.

    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from fl_core.data import Source
    >>> from fl_core.data.partitions import Partitioning
    >>> @dataclass(frozen=True)
    ... class Rounds(Partitioning):
    ...     '''Sample after sample to client after client.'''
    ...     name = "rounds"
    ...     def assign(self, pool, clients, seed):
    ...         return [np.arange(len(pool))[client::clients] for client in range(clients)]
    >>> toy = Source("toy", np.zeros((5, 0)), np.array([0, 1, 0, 1, 0]), ("a", "b"))
    >>> [part.tolist() for part in Rounds().assign(toy, 2, seed=0)]
    [[0, 2, 4], [1, 3]]

    Attributes:
        name: the name in :data:`PARTITIONS`.
        shares: default shares of train, validation and test.
        natural: whether clients are natural clients of the data or parts of one. Their
            number may then be left out.
        groups: whether it keeps samples together that belong together, such as those of a patient.
        pools: whether both sides of an official test set are partitioned together.
        by_class: whether it assigns samples by their classes, so that it is for classification only.
    """

    name: ClassVar[str] = ""
    shares: ClassVar[tuple[float, float, float]] = SHARES
    natural: ClassVar[bool] = False
    groups: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    by_class: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def count(self, pool: Source, clients: int | None) -> int:
        """Return the number of clients.

        By default it is the requested number, which must then be given.

        Args:
            pool: the samples to partition.
            clients: the requested number, or None.

        Raises:
            UsageError: the number is missing but needed, or does not fit the data.
        """
        if clients is None:
            raise UsageError(
                f"clients must be given for partition {self.name!r}. Add {spelled(clients=5)}."
            )
        return clients

    def names(self, pool: Source, clients: int) -> Names:
        """Return the clients' names, in order."""
        return tuple(
            f"client_{number:0{len(str(clients - 1))}d}" for number in range(clients)
        )

    def fitted(self, pool: Source, clients: int) -> Self:
        """Return the partitioning with values for options whose defaults depend on the data.

        These options are None until then. By default the partitioning itself is returned.

        Args:
            pool: the samples to partition.
            clients: the number of clients.
        """
        return self

    def assign(self, pool: Source, clients: int, seed: int) -> list[Integers]:
        """Return each client's samples, as ascending positions in the pool. No sample belongs to two clients.

        Raises:
            UsageError: an option or the number of clients does not fit the samples.
        """
        raise NotImplementedError

    def follow(
        self, train: Source, parts: Sequence[Integers], test: Source, seed: int
    ) -> list[Integers]:
        """Assign the samples of the official test set to clients, as positions in ``test``.

        By default each class is assigned in proportion to the clients' training samples of that class. A class that no
        client trains on is left out.

        Args:
            train: the samples outside of the official test set.
            parts: the positions of each client's samples in ``train``.
            test: the samples of the official test set.
            seed: seed of the draw.
        """
        return follow(
            [train.labels[client_piece] for client_piece in parts], test.labels, seed
        )

    def divide(
        self, pool: Source, clients: int, shares: tuple[float, float, float], seed: int
    ) -> list[tuple[Integers, ...]]:
        """Return each client's positions in the pool for train, validation and test.

        By default :meth:`assign` gives each client its samples, and ``shares`` splits
        them at random. With an official test set only the training side is assigned in
        this way, unless the class ``pools`` both sides. Then :meth:`follow` assigns the
        test samples, and only the ratio of the first two shares matters.

        Raises:
            UsageError: as :meth:`assign`, or a client's samples cannot be split (:func:`split_groups`).
        """
        all_samples = np.ones(len(pool), dtype=bool)
        ignores_test_set = pool.is_train is None or self.pools
        is_training = all_samples if ignores_test_set else np.asarray(pool.is_train)
        train_rows, test_rows = (
            np.flatnonzero(is_training),
            np.flatnonzero(~is_training),
        )
        train_pool = pool.take(train_rows)
        parts = self.assign(train_pool, clients, seed)
        test_parts_of_clients: list[Any] = [None] * len(parts)
        if not ignores_test_set:
            test_parts = self.follow(train_pool, parts, pool.take(test_rows), seed)
            test_parts_of_clients = [test_rows[part] for part in test_parts]
        names = self.names(pool, clients)
        check_divisible(
            names, list(map(len, parts)), shares[: 3 if ignores_test_set else 2]
        )
        return [
            split_groups(
                name,
                k,
                train_rows[part],
                test_parts_of_clients[k],
                shares,
                seed,
                pool.groups,
            )
            for k, (name, part) in enumerate(zip(names, parts, strict=True))
        ]

    def redraw(
        self, pool: Source, number: int, parts: Sequence[Integers], seed: int
    ) -> tuple[Integers, ...]:
        """Return a client's positions for train, validation and test, after a new draw of the first two.

        By default both keep their numbers of groups, and without groups their numbers of samples.

        Args:
            pool: all samples.
            number: the client's number, from 0.
            parts: the client's present positions in the pool for train, validation and test.
            seed: seed of the new draw.
        """
        return redraw_groups(number, parts, seed, pool.groups)


def _adopt(member: Any, name: str) -> type[Partitioning]:
    if not (isinstance(member, type) and hasattr(member, "assign")):
        raise UsageError(
            f"partition {name!r} must be a subclass of fl_core.data.partitions.Partitioning; got {member!r}. "
            "Derive it from that class."
        )
    return member


PARTITIONS: Registry[type[Partitioning]] = Registry(
    "partition", "fl_core.data.partitions", _adopt
)
Member = TypeVar("Member", bound=type[Partitioning])


def partition(partitioning: Member) -> Member:
    """Register a way to partition data under its ``name``, as a class decorator.

    The class is a frozen dataclass and a subclass of :class:`Partitioning`. The first
    line of its docstring describes it in lists.

    Raises:
        UsageError: another partitioning has that name.
    """
    PARTITIONS.add(partitioning.name, partitioning, partitioning)
    return partitioning


def split_groups(
    name: str,
    number: int,
    positions: Integers,
    test: Integers | None,
    shares: tuple[float, float, float],
    seed: int,
    groups: Integers | None,
) -> tuple[Integers, ...]:
    """Draw one client's positions for train, validation and test, such that each group is in one of them.

    Args:
        name: the client's name, for messages.
        number: the client's number, from 0. The draw depends on it and on ``seed``.
        positions: the samples to split, as positions in the pool.
        test: the client's samples of an official test set, or None. If there are any, ``positions`` are only split
            into train and validation.
        shares: shares of train, validation and test in the number of groups.
        groups: the group of each sample of the pool. None means that every sample is a group.

    Raises:
        UsageError: the client has too few samples or groups, none of its samples are in the official test set, or one
            of its groups has samples both in it and outside of it.
    """
    keys = positions if groups is None else groups[positions]
    distinct_groups, group = np.unique(keys, return_inverse=True)
    if groups is not None and len(distinct_groups) < len(SPLITS):
        raise UsageError(
            f"client {name!r} must have at least {len(SPLITS)} groups; "
            f"got {len(distinct_groups)}. Leave group_column out."
        )
    if test is not None and not len(test):
        raise UsageError(
            f"client {name!r} must have a sample of the official test set; got none."
        )
    if test is not None and groups is not None and np.isin(groups[test], keys).any():
        raise UsageError(
            f"client {name!r}: a group must not be in the official test set and outside of it."
        )
    shuffled_groups = seeds.numpy_generator(seed, "split", number).permutation(
        len(distinct_groups)
    )
    sizes = split_sizes(
        name, len(distinct_groups), shares if test is None else shares[:2]
    )
    group_parts = np.split(shuffled_groups, np.cumsum(sizes)[:-1])
    splits = [positions[np.isin(group, group_part)] for group_part in group_parts]
    return tuple(splits if test is None else [*splits, test])


def redraw_groups(
    number: int, parts: Sequence[Integers], seed: int, groups: Integers | None
) -> tuple[Integers, ...]:
    """Draw one client's training and validation samples again, such that each group is in one of them.

    The number of validation groups stays the same.

    Args:
        number: the client's number, from 0. The draw depends on it and on ``seed``.
        parts: the client's positions for train, validation and test. Those for test stay the same.
        groups: the group of each sample of the pool. None means that every sample is a group.

    Returns:
        The new positions for train, validation and test.
    """
    train, validation, test = parts
    positions = np.sort(np.concatenate([train, validation]))
    keys = positions if groups is None else groups[positions]
    distinct_groups = np.unique(keys)
    n_validation = len(np.unique(validation if groups is None else groups[validation]))
    shuffled_groups = seeds.numpy_generator(seed, "split", number).permutation(
        distinct_groups
    )
    is_training = np.isin(keys, shuffled_groups[:n_validation])
    return positions[~is_training], positions[is_training], test


def follow(
    train_labels: Sequence[Integers], labels: Integers, seed: int
) -> list[Integers]:
    """Assign more samples to clients in the proportions of their training samples of each class.

    Args:
        train_labels: labels of each client's training samples.
        labels: labels of the samples to assign. A class that no client trains on is left out.

    Returns:
        Positions in ``labels`` for each client. Of each class a client gets its exact proportion, to within one sample.
    """
    generator = seeds.numpy_generator(seed, "partition", "test")
    client_pieces: list[list[Integers]] = [[] for _ in train_labels]
    for k in np.unique(labels):
        counts = np.array([(labels == k).sum() for labels in train_labels])
        if not counts.sum():
            continue
        order = generator.permutation(np.flatnonzero(labels == k))
        cuts = np.rint(np.cumsum(counts) / counts.sum() * len(order)).astype(np.int64)
        for client_piece, positions in zip(
            client_pieces, np.split(order, cuts[:-1]), strict=True
        ):
            client_piece.append(positions)
    return [
        np.sort(np.concatenate([np.empty(0, np.int64), *client_piece]))
        for client_piece in client_pieces
    ]


# --- splits ----------------------------------------------------------------------------------------------------


def check_shares(splits: Sequence[float]) -> tuple[float, float, float]:
    """Check the shares of train, validation and test, and return them as three positive numbers with sum 1.

    >>> for splits in ((0.8, 0.2), (0.8, 0.0, 0.2), (0.8, 0.3, 0.2)):
    ...     try:
    ...         check_shares(splits)
    ...     except UsageError as error:
    ...         print(error)
    splits must be three positive shares (train, validation, test) with sum 1; got [0.8, 0.2].
    splits must be three positive shares (train, validation, test) with sum 1; got [0.8, 0.0, 0.2].
    splits must be three positive shares (train, validation, test) with sum 1; got [0.8, 0.3, 0.2].

    Raises:
        UsageError: there are not three shares, one is not above 0, or their sum is not 1 (within 1e-6).
    """
    shares = tuple(map(float, splits))
    if len(shares) != 3 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        shares_list = list(splits)
        raise UsageError(
            f"splits must be three positive shares (train, validation, test) with sum 1; got {shares_list}."
        )
    return shares


def check_divisible(
    names: Sequence[str], sizes: Sequence[int], shares: Sequence[float]
) -> None:
    """Refuse clients that have fewer samples than there are splits.

    Args:
        names: the clients' names.
        sizes: the number of samples of each client.
        shares: a share for each split, of which only the number counts.

    Raises:
        UsageError: some clients have too few. The message names them.
    """
    names_with_sizes = zip(names, sizes, strict=True)
    too_few = [f"{n} at {name!r}" for name, n in names_with_sizes if n < len(shares)]
    if too_few:
        split_names = ", ".join(SPLITS[: len(shares)])
        advice = "Remove its samples, or give them to another client."
        near_names = [listing(map(repr, group)) for group in nearly_equal(names)]
        if near_names:
            same_text = "; ".join(near_names[:3])
            advice = f"Spell clients alike that are one: {same_text}. Or r{advice[1:]}"
        raise UsageError(
            f"each client must have at least {len(shares)} samples, one for each of {split_names}; "
            f"got {listing(too_few, 6)}. {advice}"
        )


def split_sizes(name: str, n: int, shares: Sequence[float]) -> list[int]:
    """Return the sizes of a client's splits. Every split has at least 1 sample, and all but the first are rounded up.

    Sizes are computed from the last split to the second. Each share is of the samples that the later splits leave.

    >>> split_sizes("va", 46, (0.64, 0.16, 0.2)), split_sizes("va", 3, (0.64, 0.16, 0.2))
    ([28, 8, 10], [1, 1, 1])

    Sizes sum to ``n``, and differ from their shares by at most two samples.

    >>> draw = np.random.default_rng(0)
    >>> for n in range(3, 300):
    ...     shares = draw.dirichlet([1.0, 1.0, 1.0])
    ...     sizes = np.array(split_sizes("va", n, tuple(shares)))
    ...     assert sizes.min() >= 1 and sizes.sum() == n and (abs(sizes - n * shares) <= 2).all()

    >>> split_sizes("va", 2, (0.64, 0.16, 0.2))
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: each client must have at least 3 samples, ... got 2 at 'va'. Remove its samples, ...

    Args:
        name: the client's name, for the message.
        n: the client's number of samples, or of groups of samples.
        shares: the share of each split, in order.

    Raises:
        UsageError: there are fewer samples than splits.
    """
    check_divisible([name], [n], shares)
    sizes: list[int] = []
    n_left = n
    for k in range(len(shares) - 1, 0, -1):
        split_size = math.ceil(round(n_left * shares[k] / sum(shares[: k + 1]), 9))
        sizes.insert(0, min(max(split_size, 1), n_left - k))
        n_left -= sizes[0]
    return [n_left, *sizes]


# --- checks ----------------------------------------------------------------------------------------------------


WHOLE = Bound(
    "a whole number from 1",
    lambda value: isinstance(value, numbers.Integral) and int(value) >= 1,
)


def check_classes(classes_per_client: Any, classes: int) -> int:
    """Return the number of classes per client, after a check that it is a whole number from 1 to ``classes``.

    Args:
        classes: the number of classes of all samples.

    Raises:
        UsageError: it is no such number. The message names the value and the number of classes.
    """
    rule = f"a whole number from 1 to {classes}, the number of classes"
    number = Bound(rule, lambda number: WHOLE.holds(number) and number <= classes)
    check_value("classes_per_client", classes_per_client, number)
    return classes_per_client


def check_clients(
    clients: Any, samples: int, each: int = 1, what: str = "clients"
) -> None:
    """Check that there are at least ``each`` samples for every client.

    Args:
        clients: the requested number of clients, at least 1.
        samples: number of samples to partition.
        each: the least number of samples of a client.
        what: the noun for what is counted, in the message.

    Raises:
        UsageError: there are fewer samples, or the number is not a whole number from 1. The message names the largest
            possible number of clients.
    """
    check_value(what, clients, WHOLE)
    if clients * each > samples:
        raise UsageError(
            f"{what} must be at most {samples // each} for {samples} samples with {each} for each; got {clients}."
        )


# --- the partition that a run stores ---------------------------------------------------------------------------

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
        params: number of clients, the options of the kind, ``splits``, and ``split_seed`` if it was given, as plain
            numbers and lists.
        seed: seed of all draws, or with ``split_seed`` only of training and validation samples.
        indices: ``indices[client][split]``, ascending int64 positions in the source. No sample occurs twice at a
            client, and no client trains on another's test sample.
        n_samples: number of samples in the source.
        source_digest: :attr:`Source.digest` of the source.
    """

    kind: str
    params: dict[str, Any]
    seed: int
    indices: dict[str, dict[str, Integers]]
    n_samples: int
    source_digest: str

    @property
    def names(self) -> Names:
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
        import torch

        text = bytearray(json.dumps({key: getattr(self, key) for key in META}).encode())
        tree = {"meta": torch.frombuffer(text, dtype=torch.uint8).clone()}
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
        error_types = (KeyError, TypeError, ValueError)
        with about("the tree must be a stored partition", error_types):
            meta = parsed_json(tree["meta"].cpu().numpy().tobytes())
            if fault := validate(meta, META):
                raise ValueError(fault)
            names = meta.pop("names")
            indices = {
                name: {split: _places(tree[f"{number}/{split}"]) for split in SPLITS}
                for number, name in enumerate(names)
            }
            return cls(indices=indices, **meta)

    def check(self, source: Source) -> None:
        """Check that this partition was made for ``source``.

        Raises:
            UsageError: the samples differ in number or content, an index is out of range, a client has a sample twice,
                or a client trains on a test sample.
        """
        if self.source_digest != source.digest:
            raise UsageError(
                f"the stored partition must be of the {len(source)} samples of {source.name}, {source.digest[:12]}; "
                f"got {self.n_samples} other samples, {self.source_digest[:12]}. Pass the data that the run began with."
            )
        clients = self.indices.values()
        test_rows = np.concatenate([splits["test"] for splits in clients])
        other_rows = [splits["train"] for splits in clients]
        other_rows += [splits["validation"] for splits in clients]
        training_rows = np.concatenate(other_rows)
        train_and_test = np.concatenate([test_rows, training_rows])
        is_valid = not len(train_and_test) or (
            train_and_test.min() >= 0 and train_and_test.max() < len(source)
        )
        if is_valid:
            is_tested = np.zeros(len(source), dtype=bool)
            is_tested[test_rows] = True
            is_valid = not is_tested[training_rows].any()
            last_position = np.empty(
                len(source), dtype=np.int64
            )  # place of an index at a client
            for splits in clients:
                positions = np.concatenate(list(splits.values()))
                last_position[positions] = np.arange(len(positions))
                is_valid &= np.array_equal(
                    last_position[positions], np.arange(len(positions))
                )
        if not is_valid:
            raise UsageError(
                f"the stored partition must have indices from 0 to {len(source) - 1}, each once at a client, and no "
                "client may train on the test sample of another; got others, or a sample twice."
            )


def _places(tensor: torch.Tensor) -> Integers:
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.element_size() != 8:
        got_shape = list(tensor.shape)
        raise ValueError(
            f"positions of samples must be whole numbers; got {tensor.dtype} {got_shape}"
        )
    return tensor.cpu().numpy()


def make(
    source: Source,
    kind: str,
    *,
    clients: int | None = None,
    seed: int = 0,
    split_seed: int | None = None,
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
        source: the samples to partition.
        kind: a name of :data:`PARTITIONS`, or ``package.module:Class``.
        clients: number of clients, which most kinds need. For ``natural`` it is None or
            the number of natural clients. For ``natural_dirichlet`` it is a multiple of
            that, by default five times.
        seed: seed of every draw.
        split_seed: seed of the partition over clients and of the test samples. Only the training and validation samples
            of each client are then drawn by ``seed``. None means ``seed``.
        splits: shares of train, validation and test. None means the kind's own, usually 0.64, 0.16, 0.20.
        options: options of the kind, such as ``alpha``. None means the default.

    Raises:
        UsageError: a kind or option is unknown, a value is out of range, a seed is no
            whole number, the kind does not fit the data's task or groups, or a client has too few samples to
            divide.
    """
    check_type("seed", seed, int, numpy=True)
    check_type("split_seed", split_seed, int | None, numpy=True)
    member, settings = PARTITIONS[kind], {}
    accepted = options_of(member)
    for name, value in options.items():
        if value is None:
            continue
        if name not in accepted:
            accepted_names = listing(accepted) or "none"
            raise UsageError(
                f"{name} must be left out with partition {kind!r}; got {value}. Its own options: "
                f"{accepted_names}."
            )
        if isinstance(value, np.generic):
            value = value.item()
        is_whole = type(value) is int and isinstance(getattr(member, name), float)
        settings[name] = float(value) if is_whole else value
    partitioning = member(**settings)
    if member.by_class and source.task != CLASSIFICATION:
        other_names = those_with("by_class", False)
        raise UsageError(
            f"partition {kind!r} must have classes; got {source.name} for task "
            f"{source.task}. Use one of {other_names}."
        )
    if source.groups is not None and not member.groups:
        other_names = those_with("groups", True)
        raise UsageError(
            f"group_column must be left out with partition {kind!r}, which divides groups. "
            f"Use one of {other_names}."
        )
    shares = check_shares(partitioning.shares if splits is None else splits)
    pool = replace(source, x=np.empty((len(source), 0)))
    n_clients = partitioning.count(pool, clients)
    partitioning = partitioning.fitted(pool, n_clients)
    partition_seed = split_seed
    if partition_seed is None:
        partition_seed = seed
    split_rows = partitioning.divide(pool, n_clients, shares, partition_seed)
    if partition_seed != seed:
        split_rows = [
            partitioning.redraw(pool, number, client_rows, seed)
            for number, client_rows in enumerate(split_rows)
        ]
    indices = {
        name: {
            split: np.sort(rows).astype(np.int64)
            for split, rows in zip(SPLITS, client_rows, strict=True)
        }
        for name, client_rows in zip(
            partitioning.names(pool, n_clients), split_rows, strict=True
        )
    }
    params = {"clients": len(indices), **asdict(partitioning), "splits": list(shares)}
    if split_seed is not None:
        params["split_seed"] = int(split_seed)
    return Partition(kind, params, int(seed), indices, len(source), source.digest)


def those_with(trait: str, value: bool) -> str:
    """Return the names of some partitionings as one text for messages, with commas between them.

    Args:
        trait: a class attribute, such as ``natural``. The partitionings are those where it equals ``value``.
    """
    members = PARTITIONS.members().items()
    return listing(name for name, member in members if getattr(member, trait) == value)


def options_of(partitioning: type[Partitioning]) -> Names:
    """Return the names of a partitioning's options, those of its base classes first."""
    return tuple(option.name for option in fields(partitioning))
