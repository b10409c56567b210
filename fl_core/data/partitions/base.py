"""Base and registry of all partitionings: the pool of samples, the clients' shares of it, and their splits."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np

from fl_core import seeds
from fl_core.data.arrays import Integers
from fl_core.data.columns import nearly_equal
from fl_core.data.registry import SHARES
from fl_core.errors import Bound, UsageError, check_value, listing, spelled
from fl_core.registry import Registry

if TYPE_CHECKING:
    from fl_core.data.sources import Source

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Partitioning:
    """Base of ways to partition data over clients: frozen dataclasses whose fields are their options.

    A subclass has a ``name`` and overrides :meth:`assign`. A partition depends on the labels, the options and the seed
    alone. The same call gives the same positions on every machine.

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
        name: registry name.
        shares: usual shares of train, validation and test.
        natural: whether clients are natural clients of the data or parts of one. Their number then follows from the
            data.
        groups: whether it keeps samples together that belong together, such as those of a patient.
        pools: whether both sides of an official test set are partitioned together.
        by_class: whether it assigns samples by their classes, which excludes regression.
    """

    name: ClassVar[str] = ""
    shares: ClassVar[tuple[float, float, float]] = SHARES
    natural: ClassVar[bool] = False
    groups: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    by_class: ClassVar[bool] = False

    def count(self, pool: Source, clients: int | None) -> int:
        """Return the number of clients.

        Args:
            clients: the requested number, or None.

        Raises:
            UsageError: the number is missing but needed, or does not fit the data.
        """
        if clients is None:
            raise UsageError(
                f"clients must be given for partition {self.name!r}. Add {spelled(clients=5)}."
            )
        return clients

    def names(self, pool: Source, clients: int) -> tuple[str, ...]:
        """Return the clients' names, in order."""
        return tuple(
            f"client_{number:0{len(str(clients - 1))}d}" for number in range(clients)
        )

    def fitted(self, pool: Source, clients: int) -> Self:
        """Return the same partitioning with the options that follow from the data."""
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
            parts: each client's positions in ``train``.
        """
        return follow([train.labels[part] for part in parts], test.labels, seed)

    def divide(
        self, pool: Source, clients: int, shares: tuple[float, float, float], seed: int
    ) -> list[tuple[Integers, ...]]:
        """Return each client's positions in the pool for train, validation and test.

        By default :meth:`assign` gives each client its samples, and ``shares`` splits them at random. With an official
        test set only the training side is assigned in this way. Then :meth:`follow` assigns the test samples, and only
        the ratio of the first two shares matters.

        Raises:
            UsageError: as :meth:`assign`, or a client has too few samples to split.
        """
        together = pool.is_train is None or self.pools
        train = (
            np.arange(len(pool))
            if together
            else np.flatnonzero(np.asarray(pool.is_train))
        )
        train_pool = pool.take(train)
        parts = self.assign(train_pool, clients, seed)
        tests: list[Integers] = []
        if not together:
            test = np.flatnonzero(~np.asarray(pool.is_train))
            tests = [
                test[part]
                for part in self.follow(train_pool, parts, pool.take(test), seed)
            ]
        names = self.names(pool, clients)
        sizes = list(map(len, parts))
        check_divisible(names, sizes, shares if together else shares[:2])
        divided = []
        for number, (name, part) in enumerate(zip(names, parts, strict=True)):
            test_part = None if together else tests[number]
            divided.append(
                split_groups(
                    name, number, train[part], test_part, shares, seed, pool.groups
                )
            )
        return divided


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

    The shares are of the groups. Without groups each sample is one of its own.

    Args:
        number: the client's place among all.
        test: its samples of an official test set, or None. Only the other samples are then split.

    Raises:
        UsageError: there are too few samples or groups, or a group also has samples of the official test set, of which
            there must be some.
    """
    keys = positions if groups is None else groups[positions]
    distinct, group = np.unique(keys, return_inverse=True)
    if groups is not None and len(distinct) < len(SPLITS):
        raise UsageError(
            f"client {name!r} must have at least {len(SPLITS)} groups; got {len(distinct)}. Leave group_column out."
        )
    if test is not None and not len(test):
        raise UsageError(
            f"client {name!r} must have a sample of the official test set; got none."
        )
    if test is not None and groups is not None and np.isin(groups[test], keys).any():
        raise UsageError(
            f"client {name!r}: a group must not be in the official test set and outside of it."
        )
    shuffled = seeds.numpy_generator(seed, "split", number).permutation(len(distinct))
    sizes = split_sizes(name, len(distinct), shares if test is None else shares[:2])
    drawn = np.split(shuffled, np.cumsum(sizes)[:-1])
    splits = [positions[np.isin(group, part)] for part in drawn]
    return tuple(splits if test is None else [*splits, test])


def follow(
    train_labels: Sequence[Integers], labels: Integers, seed: int
) -> list[Integers]:
    """Assign more samples to clients in the proportions of their training samples of each class.

    Args:
        train_labels: labels of each client's training samples.
        labels: labels of the samples to assign. A class that no client trains on is left out.

    Returns:
        Positions in ``labels`` for each client; a client's count is within one of its exact proportion.
    """
    generator = seeds.numpy_generator(seed, "partition", "test")
    parts: list[list[Integers]] = [[] for _ in train_labels]
    for k in np.unique(labels):
        counts = np.array(
            [(client_labels == k).sum() for client_labels in train_labels]
        )
        if not counts.sum():
            continue
        order = generator.permutation(np.flatnonzero(labels == k))
        cuts = np.rint(np.cumsum(counts) / counts.sum() * len(order)).astype(np.int64)[
            :-1
        ]
        for part, piece in zip(parts, np.split(order, cuts), strict=True):
            part.append(piece)
    return [
        np.sort(np.concatenate(part)) if part else np.empty(0, np.int64)
        for part in parts
    ]


# --- splits ----------------------------------------------------------------------------------------------------


def check_shares(splits: Sequence[float]) -> tuple[float, float, float]:
    """Check the shares of train, validation and test, and return them as three positive numbers with sum 1.

    Raises:
        UsageError: they are not.
    """
    shares = tuple(float(share) for share in splits)
    if (
        len(shares) != 3
        or not all(share > 0 for share in shares)
        or abs(sum(shares) - 1) > 1e-6
    ):
        raise UsageError(
            f"splits must be three positive shares (train, validation, test) with sum 1; got {list(splits)}."
        )
    return shares


def check_divisible(
    names: Sequence[str], sizes: Sequence[int], shares: Sequence[float]
) -> None:
    """Refuse clients that have fewer samples than there are splits.

    Raises:
        UsageError: names these clients.
    """
    few = [
        f"{n} at {name!r}"
        for name, n in zip(names, sizes, strict=True)
        if n < len(shares)
    ]
    if few:
        kinds = ", ".join(SPLITS[: len(shares)])
        way = "Remove its samples, or give them to another client."
        same = [listing(map(repr, group)) for group in nearly_equal(names)]
        if same:
            way = f"Spell clients alike that are one: {'; '.join(same[:3])}. Or r{way[1:]}"
        raise UsageError(
            f"each client must have at least {len(shares)} samples, one for each of {kinds}; got {listing(few, 6)}. "
            f"{way}"
        )


def split_sizes(name: str, n: int, shares: Sequence[float]) -> list[int]:
    """Return the sizes of a client's splits. The later splits are rounded up, and each has at least 1 sample.

    Sizes are computed from the last split to the second. Each share is of the samples that the later splits leave. For
    example 46 samples at 64/16/20 % give 28, 8, 10.

    Raises:
        UsageError: there are fewer samples than splits.
    """
    check_divisible([name], [n], shares)
    sizes: list[int] = []
    left = n
    for k in range(len(shares) - 1, 0, -1):
        wanted = math.ceil(round(left * shares[k] / sum(shares[: k + 1]), 9))
        sizes.insert(0, min(max(wanted, 1), left - k))
        left -= sizes[0]
    return [left, *sizes]


# --- checks ----------------------------------------------------------------------------------------------------


WHOLE = Bound(
    "a whole number from 1",
    lambda value: isinstance(value, numbers.Integral) and int(value) >= 1,
)


def check_classes(classes_per_client: Any, classes: int) -> None:
    """Check that there are no more classes per client than the samples have.

    Raises:
        UsageError: names the value and the number of classes.
    """
    rule = f"a whole number from 1 to {classes}, the number of classes"
    check_value(
        "classes_per_client",
        classes_per_client,
        Bound(rule, lambda few: WHOLE.holds(few) and few <= classes),
    )


def check_clients(
    clients: Any, samples: int, each: int = 1, what: str = "clients"
) -> None:
    """Check that there are at least ``each`` samples for every client.

    Raises:
        UsageError: names the number of clients and the largest possible one.
    """
    check_value(what, clients, WHOLE)
    if clients * each > samples:
        raise UsageError(
            f"{what} must be at most {samples // each} for {samples} samples with {each} for each; got {clients}."
        )
