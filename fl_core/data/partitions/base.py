"""Base of all partitionings: the pool of samples, the clients' shares of it, and their splits."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fl_core import seeds
from fl_core.data.arrays import Integers
from fl_core.data.recipes import SHARES
from fl_core.data.sources import Source
from fl_core.errors import UsageError, listing

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Pool:
    """The samples to partition: labels and natural clients, without features.

    Attributes:
        name: of the data, for messages.
        labels: class indices, int64 [n]; where numbers are to be predicted all 0.
        owner: index of each sample's natural client, int64 [n]; None = there are no natural clients.
        owner_names: names of the natural clients.
        is_train: false for samples of the official test set, bool [n]; None = there is none.
    """

    name: str
    labels: Integers
    owner: Integers | None = None
    owner_names: tuple[str, ...] = ()
    is_train: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, source: Source) -> Pool:
        """The pool of all samples of a source."""
        return cls(source.name, source.labels, source.owner, source.owner_names, source.is_train)

    def take(self, positions: Integers) -> Pool:
        """The pool of these samples only, in this order."""
        owner = None if self.owner is None else self.owner[positions]
        return Pool(self.name, self.labels[positions], owner, self.owner_names)


@dataclass(frozen=True)
class Partitioning:
    """A way to partition data over clients; a frozen dataclass whose fields are its options.

    A member says ``name`` and overrides :meth:`assign`. Which sample goes where is a function of the labels, the
    options and the seed alone: the same call gives the same positions on every machine, whatever else a run does.

    >>> from dataclasses import dataclass
    >>> import numpy as np
    >>> from fl_core.data.partitions import Partitioning, Pool
    >>> @dataclass(frozen=True)
    ... class Rounds(Partitioning):
    ...     '''Sample after sample to client after client.'''
    ...     name = "rounds"
    ...     def assign(self, pool, clients, seed):
    ...         return [np.arange(len(pool))[client::clients] for client in range(clients)]
    >>> [part.tolist() for part in Rounds().assign(Pool("toy", np.array([0, 1, 0, 1, 0])), 2, seed=0)]
    [[0, 2, 4], [1, 3]]

    Attributes:
        name: by which it is asked for.
        shares: usual shares of train, validation and test.
        natural: whether clients are the natural owners of the data, or belong to one each; their number then follows
            from the data.
        pools: whether both sides of an official test set are partitioned together.
        by_class: whether it deals samples by their classes, and so not where numbers are to be predicted.
        overlaps: whether two clients may hold the same sample, though never one's test sample for another's training.
    """

    name: ClassVar[str] = ""
    shares: ClassVar[tuple[float, float, float]] = SHARES
    natural: ClassVar[bool] = False
    pools: ClassVar[bool] = False
    by_class: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False

    def count(self, pool: Pool, clients: int | None) -> int:
        """The number of clients.

        Args:
            clients: the number that was asked for; None = none was.

        Raises:
            UsageError: none was and one is needed, or it does not fit the data.
        """
        if clients is None:
            raise UsageError(f"partition {self.name!r} needs a number of clients")
        return clients

    def names(self, pool: Pool, clients: int) -> tuple[str, ...]:
        """The clients' names, in order."""
        return tuple(f"client_{number:0{len(str(clients - 1))}d}" for number in range(clients))

    def fitted(self, pool: Pool, clients: int) -> Self:
        """The same partitioning with the options filled in that follow from the data."""
        return self

    def assign(self, pool: Pool, clients: int, seed: int) -> list[Integers]:
        """Each client's samples, as ascending positions in the pool; no sample is with two clients.

        Raises:
            UsageError: an option or the number of clients does not fit the samples.
        """
        raise NotImplementedError

    def follow(self, train: Pool, parts: Sequence[Integers], test: Pool, seed: int) -> list[Integers]:
        """Assign the samples of the official test set to clients, as positions in ``test``.

        By default each class's go to the clients in the proportions of their training samples of that class; a class
        that no client trains on is left out.

        Args:
            parts: each client's positions in ``train``.
        """
        return follow([train.labels[part] for part in parts], test.labels, seed)

    def divide(
        self, pool: Pool, clients: int, shares: tuple[float, float, float], seed: int
    ) -> list[tuple[Integers, ...]]:
        """Each client's positions in the pool for train, validation and test.

        By default :meth:`assign` says who has which sample, and each client's are divided at random by ``shares``.
        Of an official test set only the training side is assigned, and :meth:`follow` says who tests on which of the
        others; then only the ratio of the first two shares is used.

        Raises:
            UsageError: as :meth:`assign`; or a client with too few samples to divide.
        """
        together = pool.is_train is None or self.pools
        train = np.arange(len(pool)) if together else np.flatnonzero(np.asarray(pool.is_train))
        train_pool = pool.take(train)
        parts = self.assign(train_pool, clients, seed)
        tests: list[Integers] = []
        if not together:
            test = np.flatnonzero(~np.asarray(pool.is_train))
            tests = [test[part] for part in self.follow(train_pool, parts, pool.take(test), seed)]
        check_divisible(self.names(pool, clients), list(map(len, parts)), shares if together else shares[:2])
        divided = []
        for number, (name, part) in enumerate(zip(self.names(pool, clients), parts, strict=True)):
            if not together and not len(tests[number]):
                raise UsageError(f"client {name!r} has no sample of the official test set of {pool.name}")
            divided.append(split_of(name, number, train[part], None if together else tests[number], shares, seed))
        return divided


def split_of(
    name: str,
    number: int,
    positions: Integers,
    test: Integers | None,
    shares: tuple[float, float, float],
    seed: int,
) -> tuple[Integers, ...]:
    """One client's positions for train, validation and test, drawn for its number among the clients.

    Args:
        test: its samples of an official test set, of which only the others are divided; None = there is none.

    Raises:
        UsageError: too few samples to divide.
    """
    shuffled = seeds.numpy_generator(seed, "split", number).permutation(positions)
    sizes = split_sizes(name, len(positions), shares if test is None else shares[:2])
    splits = np.split(shuffled, np.cumsum(sizes)[:-1])
    return tuple(splits) if test is None else (*splits, test)


def follow(train_labels: Sequence[Integers], labels: Integers, seed: int) -> list[Integers]:
    """Assign further samples to clients in the proportions in which training samples of their class were assigned.

    Args:
        train_labels: labels of each client's training samples.
        labels: labels of the samples to assign; a class that no client trains on is left out.

    Returns:
        Positions in ``labels`` for each client; a client's count is within one of its exact proportion.
    """
    generator = seeds.numpy_generator(seed, "partition", "test")
    parts: list[list[Integers]] = [[] for _ in train_labels]
    for k in np.unique(labels):
        counts = np.array([(client_labels == k).sum() for client_labels in train_labels])
        if not counts.sum():
            continue
        order = generator.permutation(np.flatnonzero(labels == k))
        cuts = np.rint(np.cumsum(counts) / counts.sum() * len(order)).astype(np.int64)[:-1]
        for part, piece in zip(parts, np.split(order, cuts), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) if part else np.empty(0, np.int64) for part in parts]


# --- splits ----------------------------------------------------------------------------------------------------


def check_shares(splits: Sequence[float]) -> tuple[float, float, float]:
    """The shares of train, validation and test as three positive numbers with sum 1.

    Raises:
        UsageError: they are not.
    """
    shares = tuple(float(share) for share in splits)
    if len(shares) != 3 or not all(share > 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise UsageError(
            f"splits={list(splits)}: three positive shares (train, validation, test) with sum 1 are needed"
        )
    return shares


def check_divisible(names: Sequence[str], sizes: Sequence[int], shares: Sequence[float]) -> None:
    """Refuse clients that have fewer samples than there are splits.

    Raises:
        UsageError: names these clients.
    """
    few = [f"{n} at {name!r}" for name, n in zip(names, sizes, strict=True) if n < len(shares)]
    if few:
        kinds = ", ".join(SPLITS[: len(shares)])
        raise UsageError(
            f"each client must have at least {len(shares)} samples, one for each of {kinds}; got {listing(few, 6)}. "
            "Remove its samples, or give them to another client."
        )


def split_sizes(name: str, n: int, shares: Sequence[float]) -> list[int]:
    """Sizes of a client's splits: the later splits rounded up, from the last to the second, and at least 1 each.

    A share is taken of what the splits after it have left over, so that 46 samples at 64/16/20 % give 28, 8, 10.

    Raises:
        UsageError: fewer samples than splits.
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


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number (a bool is not)."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_whole(what: str, value: Any) -> None:
    """Refuse a value that is not a whole number of at least 1.

    Raises:
        UsageError: names the option and its value.
    """
    if not is_whole(value) or value < 1:
        raise UsageError(f"{what}={value!r}: a whole number from 1 is needed")


def check_alpha(alpha: Any) -> None:
    """Refuse a Dirichlet concentration that is not a positive number.

    Raises:
        UsageError: names the value.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real) or not 0 < float(alpha) < math.inf:
        raise UsageError(f"alpha={alpha!r}: the concentration must be a positive number")


def check_classes(classes_per_client: Any, classes: int) -> None:
    """Refuse more classes per client than the samples have.

    Raises:
        UsageError: names the value and the number of classes.
    """
    if not is_whole(classes_per_client) or not 1 <= classes_per_client <= classes:
        raise UsageError(f"classes_per_client={classes_per_client!r}: the samples have {classes} classes")


def check_clients(clients: Any, samples: int, each: int = 1, what: str = "clients") -> None:
    """Refuse so many clients that there are fewer than ``each`` samples for every one.

    Raises:
        UsageError: names the number and the greatest that would do.
    """
    check_whole(what, clients)
    if clients * each > samples:
        raise UsageError(
            f"{what}={clients}: {samples} samples cannot give {each} to each; ask for at most {samples // each} clients"
        )
