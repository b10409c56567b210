"""Partitions of single papers: pFedLA's non-IID_1 and non-IID_2, and FedPFT's two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np

from fl_core import seeds
from fl_core.data.partitions.base import (
    WHOLE,
    Partitioning,
    check_classes,
    check_clients,
    partition,
)
from fl_core.data.partitions.general import class_holders
from fl_core.data.values import Bools, Floats, Integers
from fl_core.errors import SHARE, Bound, Positive, UsageError, check_value

if TYPE_CHECKING:
    from fl_core.data.sources import Source


# --- pFedLA (Ma et al. 2022) -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PFedLA(Partitioning):
    """Base of pFedLA's two partitions: clients of equal size, from both sides of an official split together.

    The test share is 30 %. A fifth of the rest is for validation.
    """

    shares = (0.56, 0.14, 0.30)
    pools = True
    by_class = True
    usual_classes: ClassVar[
        tuple[int, int]
    ]  # the paper's classes per client, below and from 100 classes
    classes_per_client: int | None = None
    samples_per_client: int | None = None

    def fitted(self, pool: Source, clients: int) -> Self:
        classes = len(np.unique(pool.labels))
        per_client, samples = self.classes_per_client, self.samples_per_client
        if per_client is None:
            per_client = min(self.usual_classes[classes >= 100], classes)
        if samples is None:
            samples = min(len(pool) // max(clients, 100), 700)
        return replace(self, classes_per_client=per_client, samples_per_client=samples)

    def assign(self, pool: Source, clients: int, seed: int) -> list[Integers]:
        """Return each client's samples, with the share ``dominance`` from its own few classes.

        With dominance 1 a client has ``classes_per_client`` classes only (non-IID_1). Below 1 the other classes share
        the rest evenly (non-IID_2). The own classes are random. Each class is the own class of nearly the same number
        of clients, to within one. A client's counts differ by at most one within its own classes, and within the
        others.

        Raises:
            UsageError: there are too few classes, samples for its classes, or samples of a class.
        """
        labels = pool.labels
        options = self.fitted(pool, clients)
        dominance = getattr(self, "dominance", 1.0)
        check_clients(clients, len(labels))
        class_labels, sizes = np.unique(labels, return_counts=True)
        per_client = check_classes(options.classes_per_client, len(class_labels))
        n_classes = per_client if dominance == 1 else len(class_labels)
        rule = f"at least {n_classes}, one for each of the client's classes"
        sample_bound = Bound(
            rule, lambda count: WHOLE.holds(count) and count >= n_classes
        )
        samples = options.samples_per_client or 0
        check_value("samples_per_client", samples, sample_bound)
        generator = seeds.numpy_generator(seed, "partition", "dominated")
        holders = class_holders(len(class_labels), clients, per_client, generator)
        is_holder = np.array(
            [[k in classes for classes in holders] for k in range(clients)]
        )
        n_dominant = samples
        if per_client < len(class_labels):
            n_dominant = round(dominance * samples)
        groups: list[tuple[int, Any, int]] = []
        for client in range(clients):
            groups.append((client, is_holder[client] == 1, n_dominant))
            groups.append((client, is_holder[client] == 0, samples - n_dominant))
        counts = np.zeros((clients, len(class_labels)), dtype=np.int64)
        for client, may_have, n in groups:
            counts[client, may_have] = n // max(may_have.sum(), 1)
        even_counts, n_left = counts.copy(), sizes - counts.sum(0)
        # the remainder of even counts: one more of the classes with most samples left
        for client, may_have, n in groups:
            order = np.lexsort(
                (generator.random(len(class_labels)), -n_left, ~may_have)
            )
            chosen_classes = order[: n - counts[client, may_have].sum()]
            counts[client, chosen_classes] += 1
            n_left[chosen_classes] -= 1
        # if a class then lacks samples, clients that can take another one instead
        for client, may_have, _ in groups:
            chosen_classes = counts[client] > even_counts[client]
            for lacking_class in np.flatnonzero(
                may_have & (n_left < 0) & chosen_classes
            ):
                chosen_classes = counts[client] > even_counts[client]
                spare_class = np.flatnonzero(may_have & (n_left > 0) & ~chosen_classes)[
                    :1
                ]
                if len(spare_class) and n_left[lacking_class] < 0:
                    for k, change in ((lacking_class, -1), (spare_class, 1)):
                        counts[client, k] += change
                        n_left[k] -= change
        if n_left.min() < 0:
            scarcest = int(n_left.argmin())
            raise UsageError(
                f"class {class_labels[scarcest]} must have {int(counts[:, scarcest].sum())} samples "
                f"for {clients} clients with {samples} each; got {int(sizes[scarcest])}. "
                "Use fewer samples_per_client or fewer clients."
            )
        client_pieces: list[list[Integers]] = [[] for _ in range(clients)]
        for position, label in enumerate(class_labels):
            order = generator.permutation(np.flatnonzero(labels == label))
            pieces = np.split(order, np.cumsum(counts[:, position]))[:-1]
            for pieces_of_client, piece in zip(client_pieces, pieces, strict=True):
                pieces_of_client.append(piece)
        return [
            np.sort(np.concatenate(pieces_of_client))
            for pieces_of_client in client_pieces
        ]


@partition
@dataclass(frozen=True)
class NonIID1(_PFedLA):
    """pFedLA's non-IID_1: clients of equal size, each with samples of a few classes only.

    - ``classes_per_client``: 4 by default, and 12 for 100 classes or more. If there are
      fewer classes, it is all.
    - ``samples_per_client``: by default a hundredth of all, at most 700. It is the same
      for 10 and 100 clients. For more clients it is an even share of all.
    """

    name = "non_iid_1"
    usual_classes = (4, 12)


@partition
@dataclass(frozen=True)
class NonIID2(_PFedLA):
    """pFedLA's non-IID_2: clients of equal size, most of whose samples have a few classes, the rest any other.

    - ``classes_per_client``: 2 by default, and 6 for 100 classes or more. If there are
      fewer classes, it is all.
    - ``dominance``: share of a client's samples from these classes, 0.5 by default. The paper does not state it.
    - ``samples_per_client``: as in ``non_iid_1``.
    """

    name = "non_iid_2"
    usual_classes = (2, 6)
    dominance: Annotated[float, SHARE] = 0.5


# --- FedPFT (Wu et al. 2025) -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FedPFT(Partitioning):
    """Base of FedPFT's two partitions: clients of equal size, with one label distribution in all their splits.

    Each client draws from the whole pool, so clients may share samples. Test samples come from the official test side,
    or otherwise from a part that is set aside first. Nobody trains on them. The paper has 500 training samples a client
    and 100 test samples. The validation split has the same number. Class counts are size x share, rounded by the
    largest remainders. If the pool has too few samples of a class, the client's other classes fill the gap in
    proportion to their shares. A client never has a position twice.
    """

    shares = (5 / 7, 1 / 7, 1 / 7)
    by_class = True
    samples_per_client: Annotated[int, WHOLE] = 500

    def label_distributions(self, classes: int, clients: int, seed: int) -> Floats:
        """Return each client's shares of the classes, [clients, classes]. A row sums to 1."""
        raise NotImplementedError

    def divide(
        self, pool: Source, clients: int, shares: tuple[float, float, float], seed: int
    ) -> list[tuple[Integers, ...]]:
        check_value("clients", clients, WHOLE)
        class_labels = [int(label) for label in np.unique(pool.labels)]
        distributions = self.label_distributions(len(class_labels), clients, seed)
        if pool.is_train is None:
            is_test = held_out(pool.labels, shares[2], seed)
        else:
            is_test = ~np.asarray(pool.is_train)
        per_client = self.samples_per_client / shares[0]
        sizes = [max(1, round(per_client * share)) for share in shares]
        client_splits: list[tuple[Integers, ...]] = [()] * clients
        sides = (("train side", ~is_test, sizes[:2]), ("test side", is_test, sizes[2:]))
        for purpose, is_side, side_sizes in sides:
            rows = [
                np.flatnonzero(is_side & (pool.labels == label))
                for label in class_labels
            ]
            for client, class_shares in enumerate(distributions):
                generator = seeds.numpy_generator(seed, "partition", purpose, client)
                shuffled_rows = list(map(generator.permutation, rows))
                n_left = np.array(list(map(len, rows)))
                for size in side_sizes:
                    counts = rounded(class_shares, size, n_left)
                    if counts is None:
                        raise UsageError(
                            f"each client must have {sum(side_sizes)} samples of its classes; "
                            f"got {int(n_left[class_shares > 0].sum())} that are left. "
                            "Use fewer samples_per_client or more classes_per_client."
                        )
                    drawn_rows = [
                        order[len(order) - n : len(order) - n + k]
                        for order, n, k in zip(
                            shuffled_rows, n_left, counts, strict=True
                        )
                    ]
                    client_splits[client] += (np.sort(np.concatenate(drawn_rows)),)
                    n_left = n_left - counts
        return client_splits

    def redraw(
        self, pool: Source, number: int, parts: Sequence[Integers], seed: int
    ) -> tuple[Integers, ...]:
        """Draw a client's training and validation samples again, with as many of each class as before."""
        train, validation, test = parts
        generator = seeds.numpy_generator(seed, "split", number)
        order = generator.permutation(np.sort(np.concatenate([train, validation])))
        splits: list[list[Integers]] = [[], []]
        for label in np.unique(pool.labels[order]):
            class_rows = order[pool.labels[order] == label]
            n_train = np.count_nonzero(pool.labels[train] == label)
            splits[0].append(class_rows[:n_train])
            splits[1].append(class_rows[n_train:])
        return *map(np.concatenate, splits), test


@partition
@dataclass(frozen=True)
class FedPFTDirichlet(_FedPFT):
    """FedPFT's Dirichlet partition: clients of equal size, each with its own drawn shares of the classes.

    The shares of a client are drawn over classes. In ``dirichlet`` those of a class are drawn over clients
    (Wu et al. 2025, appendix B).

    - ``samples_per_client``: for training. The other splits follow from their shares.
    - ``alpha``: concentration of the Dirichlet. With a smaller one clients differ more.
    """

    name = "fedpft_dirichlet"
    alpha: Positive = 0.5

    def label_distributions(self, classes: int, clients: int, seed: int) -> Floats:
        generator = seeds.numpy_generator(seed, "partition", "label shares")
        return generator.dirichlet(np.full(classes, self.alpha), size=clients)


@partition
@dataclass(frozen=True)
class FedPFTPathological(_FedPFT):
    """FedPFT's pathological partition: clients of equal size, each with equally many samples of a few random classes.

    - ``samples_per_client``: as in ``fedpft_dirichlet``.
    - ``classes_per_client``: a fifth of all by default, rounded down, and at least 1.
    """

    name = "fedpft_pathological"
    classes_per_client: int | None = None

    def fitted(self, pool: Source, clients: int) -> Self:
        if self.classes_per_client is not None:
            return self
        per_client = max(1, len(np.unique(pool.labels)) // 5)
        return replace(self, classes_per_client=per_client)

    def label_distributions(self, classes: int, clients: int, seed: int) -> Floats:
        per_client = check_classes(self.classes_per_client, classes)
        generator = seeds.numpy_generator(seed, "partition", "few classes")
        shares = np.zeros((clients, classes))
        for row in shares:
            row[generator.choice(classes, size=per_client, replace=False)] = (
                1 / per_client
            )
        return shares


def rounded(shares: Floats, size: int, most: Integers) -> Integers | None:
    """Return class counts near ``size * shares`` that sum to ``size``, int64 [classes].

    Args:
        shares: shares of the classes, which sum to 1.
        size: number of samples.
        most: available samples of each class. No count is above it.

    Returns:
        The counts, or None if the classes with a share have too few samples.
    """
    counts = np.zeros(len(shares), dtype=np.int64)
    while counts.sum() < size:
        below_most = (shares > 0) & (counts < most)
        if not below_most.any():
            return None
        n_missing = size - counts.sum()
        exact_counts = (
            np.where(below_most, shares, 0.0) / shares[below_most].sum() * n_missing
        )
        floored_counts = np.floor(exact_counts).astype(np.int64)
        # the largest remainders, then the largest shares
        order = np.lexsort((-shares, floored_counts - exact_counts))
        order = order[below_most[order]]
        floored_counts[order[: n_missing - floored_counts.sum()]] += 1
        counts = np.minimum(counts + floored_counts, most)
    return counts


def held_out(labels: Integers, share: float, seed: int) -> Bools:
    """Draw the test samples, bool [n]: the same share of every class at random, rounded up."""
    generator = seeds.numpy_generator(seed, "partition", "held out")
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        class_rows = generator.permutation(np.flatnonzero(labels == label))
        is_test[class_rows[: math.ceil(round(share * len(class_rows), 9))]] = True
    return is_test
