"""Common ways to partition data: even, skewed in labels, and by natural clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from fl_core import seeds
from fl_core.data.partitions.base import (
    WHOLE,
    Partitioning,
    check_classes,
    check_clients,
    follow,
    partition,
    those_with,
)
from fl_core.data.values import Integers
from fl_core.errors import Bound, Positive, UsageError, check_value, listing

if TYPE_CHECKING:
    from fl_core.data.sources import Source

_DRAWS, _SHARES = 1000, 20_000_000
"""The maximum number of draws of a partition, and of shares of a class in all draws."""
T = TypeVar("T")


@partition
@dataclass(frozen=True)
class IID(Partitioning):
    """The same distribution for every client: a random permutation cut into parts of equal size.

    Sizes differ by at most one sample. If samples have groups, whole groups are
    distributed, and the clients' numbers of groups differ by at most one.
    """

    name = "iid"
    groups = True

    def assign(self, pool: Source, clients: int, seed: int) -> list[Integers]:
        group_numbers = pool.groups
        if group_numbers is None:
            group_numbers = np.arange(len(pool))
        distinct_groups, group_index = np.unique(group_numbers, return_inverse=True)
        check_clients(clients, len(distinct_groups))
        generator = seeds.numpy_generator(seed, "partition", "iid")
        group_parts = np.array_split(
            generator.permutation(len(distinct_groups)), clients
        )
        return [
            np.flatnonzero(np.isin(group_index, group_part))
            for group_part in group_parts
        ]


@dataclass(frozen=True)
class WithAlpha(Partitioning):
    """Base of partitions with a Dirichlet distribution over classes or clients.

    Attributes:
        min_size: the minimum number of samples of a client. ``capped_dirichlet`` lowers it
            for small data.
        alpha: the concentration of the distribution. With a smaller one clients differ more.
    """

    by_class = True
    min_size: ClassVar[int] = 10
    alpha: Positive = 0.5


@partition
@dataclass(frozen=True)
class Dirichlet(WithAlpha):
    """Label skew: each class is shared out in proportions from a symmetric Dirichlet over clients.

    ``alpha`` is its concentration. With a smaller one clients differ more. Counts are
    rounded down, and the last client takes the rest of a class (PLayer-FL, appendix).
    Samples within a class are drawn at random. All proportions are drawn again until
    every client has 10 samples (``min_size``). After 1,000 draws without success there
    is an error.
    """

    name = "dirichlet"

    def assign(self, pool: Source, clients: int, seed: int) -> list[Integers]:
        labels = pool.labels
        check_clients(clients, len(labels), self.min_size)
        generator = seeds.numpy_generator(seed, "partition", "dirichlet")
        rows_of_class = [np.flatnonzero(labels == k) for k in np.unique(labels)]
        sizes = np.array([len(rows) for rows in rows_of_class])

        def draw() -> tuple[int, Integers]:
            shares = generator.dirichlet(np.full(clients, self.alpha), size=len(sizes))
            counts = np.floor(shares * sizes[:, None]).astype(np.int64)
            counts[:, -1] = sizes - counts[:, :-1].sum(1)
            return int(counts.sum(0).min()), counts

        n_shares = clients * len(sizes)
        counts = _large_enough(
            draw, self.min_size, self.name, len(labels), self.alpha, n_shares
        )
        class_pieces = [
            np.split(generator.permutation(rows), np.cumsum(count)[:-1])
            for rows, count in zip(rows_of_class, counts, strict=True)
        ]
        return [
            np.sort(np.concatenate(client_pieces))
            for client_pieces in zip(*class_pieces, strict=True)
        ]


@partition
@dataclass(frozen=True)
class CappedDirichlet(WithAlpha):
    """Label skew by a Dirichlet, with a bound on the clients' sizes (as PFLlib's code does it).

    ``alpha`` is its concentration. With a smaller one clients differ more. Each class
    is shared out in turn, in proportions from a Dirichlet over clients. A client that
    already has an even share of all samples gets none of the next class. Then the
    proportions are scaled up for the others. All is drawn again, at most 1,000 times,
    until every client has enough samples. Enough are 40, four of PFLlib's batches of
    10, or half of an even share if that is less. Jang and Choi (2024) probably use it.
    """

    name = "capped_dirichlet"
    min_size: ClassVar[int] = 40

    def assign(self, pool: Source, clients: int, seed: int) -> list[Integers]:
        check_clients(clients, len(pool))
        least_size = min(self.min_size, len(pool) // clients // 2)
        generator = seeds.numpy_generator(seed, "partition", "capped_dirichlet")
        return _capped(
            pool.labels, clients, self.alpha, generator, least_size, self.name
        )


@partition
@dataclass(frozen=True)
class Pathological(Partitioning):
    """Samples of a few classes only for every client (McMahan et al. 2017): ``classes_per_client``.

    Every class has nearly the same number of clients, to within one. Its samples are
    split evenly between them. If the clients together take fewer classes than there
    are, random classes are left out. A class with fewer samples than
    clients of it is an error.
    """

    name = "pathological"
    by_class = True
    classes_per_client: int = 2

    def assign(self, pool: Source, clients: int, seed: int) -> list[Integers]:
        labels, per_client = pool.labels, self.classes_per_client
        check_clients(clients, len(labels))
        class_labels, sizes = np.unique(labels, return_counts=True)
        check_classes(per_client, len(class_labels))
        generator = seeds.numpy_generator(seed, "partition", "pathological")
        holders = class_holders(len(class_labels), clients, per_client, generator)
        client_pieces: list[list[Integers]] = [[] for _ in range(clients)]
        for label, size, clients_of_class in zip(
            class_labels, sizes, holders, strict=True
        ):
            if size < len(clients_of_class):
                raise UsageError(
                    f"pathological partition: class {label} must have a sample for each of its {len(clients_of_class)} "
                    f"clients; got {size}. Use fewer clients or fewer classes_per_client."
                )
            if clients_of_class:
                class_rows = generator.permutation(np.flatnonzero(labels == label))
                pieces = np.array_split(class_rows, len(clients_of_class))
                for client, piece in zip(clients_of_class, pieces, strict=True):
                    client_pieces[client].append(piece)
        return [
            np.sort(np.concatenate(pieces_of_client))
            for pieces_of_client in client_pieces
        ]


def class_holders(
    classes: int, clients: int, count: int, generator: np.random.Generator
) -> list[list[int]]:
    """Draw the clients that have each class. Classes differ by at most one in their number of clients.

    Args:
        classes: number of classes.
        clients: number of clients.
        count: number of classes of every client.

    Returns:
        ``holders[class]``: numbers of clients, in ascending order.
    """
    holders: list[list[int]] = [[] for _ in range(classes)]
    for client in range(clients):
        # classes with the fewest clients first, in random order: their numbers differ by at most one
        order = np.lexsort(
            (
                generator.random(classes),
                np.array([len(clients_of_class) for clients_of_class in holders]),
            )
        )
        for k in order[:count]:
            holders[k].append(client)
    return holders


@partition
@dataclass(frozen=True)
class Natural(Partitioning):
    """Feature skew: one client for each natural client of the data, with its own official test samples.

    Without an official test set the samples of each client are split at random.
    """

    name = "natural"
    natural = True
    groups = True

    def count(self, pool: Source, clients: int | None) -> int:
        check_owners(pool)
        owners = len(pool.owner_names)
        if clients not in (None, owners):
            raise UsageError(
                f"clients must be {owners}, the number of natural clients of {pool.name}; "
                f"got {clients}. Leave it out, or use another partition."
            )
        return owners

    def names(self, pool: Source, clients: int) -> tuple[str, ...]:
        return pool.owner_names

    def assign(self, pool: Source, clients: int, seed: int) -> list[Integers]:
        owner = check_owners(pool)
        client_rows = [np.flatnonzero(owner == k) for k in range(len(pool.owner_names))]
        parts_by_name = zip(pool.owner_names, client_rows, strict=True)
        empty_clients = [name for name, rows in parts_by_name if not len(rows)]
        if empty_clients:
            raise UsageError(
                f"natural clients must have samples to train on; "
                f"got none for {listing(empty_clients)}. Use more samples."
            )
        return client_rows

    def follow(
        self, train: Source, parts: Sequence[Integers], test: Source, seed: int
    ) -> list[Integers]:
        owner = check_owners(test)
        return [np.flatnonzero(owner == number) for number in range(len(parts))]


@partition
@dataclass(frozen=True)
class NaturalDirichlet(WithAlpha):
    """Feature and label skew: each natural client's samples go to several clients that differ in labels as well.

    ``alpha`` is the concentration of the Dirichlet over a natural client's parts. With
    a smaller one they differ more. Its samples are shared out as in
    ``capped_dirichlet``, and its official test samples among its own parts. A natural
    client has five parts by default, each of at least 10 samples. FedRA's 30 clients
    are made so.
    """

    name = "natural_dirichlet"
    natural = True

    def count(self, pool: Source, clients: int | None) -> int:
        check_owners(pool)
        owners = len(pool.owner_names)
        if clients is None:
            return 5 * owners
        rule = f"a multiple of {owners}, the number of natural clients of {pool.name}"
        check_value(
            "clients",
            clients,
            Bound(rule, lambda count: WHOLE.holds(count) and count % owners == 0),
        )
        return clients

    def names(self, pool: Source, clients: int) -> tuple[str, ...]:
        names: list[str] = []
        for name in pool.owner_names:
            names += [f"{name}_{k}" for k in range(clients // len(pool.owner_names))]
        return tuple(names)

    def assign(self, pool: Source, clients: int, seed: int) -> list[Integers]:
        per_owner = clients // len(pool.owner_names)
        client_rows: list[Integers] = []
        for number, rows in enumerate(Natural().assign(pool, clients, seed)):
            owner_text = f"of {pool.owner_names[number]!r}"
            check_clients(per_owner, len(rows), self.min_size, f"clients {owner_text}")
            generator = seeds.numpy_generator(seed, "partition", self.name, number)
            labels, subject = pool.labels[rows], f"{self.name} {owner_text}"
            positions_of_parts = _capped(
                labels, per_owner, self.alpha, generator, self.min_size, subject
            )
            client_rows += [rows[positions] for positions in positions_of_parts]
        return client_rows

    def follow(
        self, train: Source, parts: Sequence[Integers], test: Source, seed: int
    ) -> list[Integers]:
        per_owner, test_rows = len(parts) // len(train.owner_names), []
        labels = [train.labels[positions] for positions in parts]
        for number in range(len(train.owner_names)):
            rows = np.flatnonzero(check_owners(test) == number)
            owner_labels = labels[number * per_owner : (number + 1) * per_owner]
            test_rows += [
                rows[positions]
                for positions in follow(owner_labels, test.labels[rows], seed)
            ]
        return test_rows


def check_owners(pool: Source) -> Integers:
    """Return the natural client of each sample, int64 [n], after a check that there are any.

    Raises:
        UsageError: the data name no natural clients. The message lists other partitions.
    """
    if pool.owner is None:
        other_names = those_with("natural", False)
        raise UsageError(
            f"{pool.name} must have natural clients for this partition. Use one of {other_names}."
        )
    return pool.owner


def _capped(
    labels: Integers,
    clients: int,
    alpha: float,
    generator: np.random.Generator,
    min_size: int,
    what: str,
) -> list[Integers]:
    """Return each client's positions, drawn by capped Dirichlet proportions.

    A client with an even share of all samples gets none of the next class. The draw is
    repeated until every client has ``min_size`` samples (:func:`_large_enough`).

    Args:
        labels: class indices [n] of the samples to share out.
        clients: number of clients.
        alpha: concentration of the Dirichlet.
        generator: the generator of the draws.
        min_size: the minimum number of samples of a client.
        what: the partition's name, for the message.

    Raises:
        UsageError: no draw gives every client enough samples.
    """

    def draw() -> tuple[int, list[Integers]]:
        client_rows = [np.empty(0, np.int64) for _ in range(clients)]
        for k in np.unique(labels):
            class_rows = generator.permutation(np.flatnonzero(labels == k))
            needs_samples = np.array(
                [len(rows) * clients < len(labels) for rows in client_rows]
            )
            shares = generator.dirichlet(np.full(clients, float(alpha))) * needs_samples
            if not 0 < shares.sum() < math.inf:  # an extreme alpha: all to a full one
                shares = needs_samples.astype(float)
            cuts = np.cumsum(shares / shares.sum())[:-1] * len(class_rows)
            pieces = np.split(class_rows, np.floor(cuts).astype(np.int64))
            client_rows = [
                np.concatenate(row_arrays)
                for row_arrays in zip(client_rows, pieces, strict=True)
            ]
        return min(map(len, client_rows)), client_rows

    n_shares = clients * len(np.unique(labels))
    division = _large_enough(draw, min_size, what, len(labels), alpha, n_shares)
    return [np.sort(rows) for rows in division]


def _large_enough(
    draw: Callable[[], tuple[int, T]],
    least: int,
    what: str,
    samples: int,
    alpha: float,
    n_shares: int,
) -> T:
    """Return the first draw whose smallest client has enough samples.

    Args:
        draw: a function that returns the smallest client's number of samples, and a
            division.
        least: the minimum number of samples of a client.
        what: the partition's name, for the message.
        samples, alpha: number of all samples and concentration, for the message.
        n_shares: the number of shares in a draw. Large draws are fewer, since their
            sizes hardly differ.

    Raises:
        UsageError: none of the draws has enough. There are :data:`_DRAWS` at most, and
            of :data:`_SHARES` shares altogether.
    """
    largest_minimum = 0
    n_draws = min(_DRAWS, max(1, _SHARES // n_shares))
    for _ in range(n_draws):
        smallest, division = draw()
        if smallest >= least:
            return division
        largest_minimum = max(largest_minimum, smallest)
    raise UsageError(
        f"partition {what}: each client must have at least {least} of {samples} samples with alpha={alpha:g}; "
        f"got at most {largest_minimum} for the smallest in {n_draws} draws. "
        "Use a larger alpha, fewer clients, more samples, or partition 'iid'."
    )
