"""Ways to draw each client's samples from the whole pool, so that two clients may hold the same training sample."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_core import seeds
from fl_core.data.arrays import Integers
from fl_core.data.deal import check_alpha, check_whole
from fl_core.data.sources import Source
from fl_core.errors import UsageError

Floats = NDArray[np.float64]


def label_shares(classes: int, clients: int, alpha: float, seed: int) -> Floats:
    """Each client's label distribution [clients, classes], q ~ Dirichlet(alpha, ..., alpha) over classes.

    FedPFT (Wu et al. 2025, appendix B): the concentration is over classes for every client, unlike
    :func:`fl_core.data.deal.dirichlet`, where it is over clients for every class.

    Raises:
        UsageError: ``alpha`` is not a positive number.
    """
    check_alpha(alpha)
    generator = seeds.numpy_generator(seed, "partition", "label shares")
    return generator.dirichlet(np.full(classes, float(alpha)), size=clients)


def few_shares(classes: int, clients: int, few: int, seed: int) -> Floats:
    """Label distributions [clients, classes] that are even over ``few`` random classes a client and 0 elsewhere.

    Raises:
        UsageError: more classes a client than there are, or fewer than one.
    """
    if isinstance(few, bool) or not isinstance(few, numbers.Integral) or not 1 <= few <= classes:
        raise UsageError(f"classes_per_client={few!r}: the samples have {classes} classes")
    generator = seeds.numpy_generator(seed, "partition", "few classes")
    shares = np.zeros((clients, classes))
    for row in shares:
        row[generator.choice(classes, size=few, replace=False)] = 1 / few
    return shares


def by_shares(
    labels: Integers, classes: Sequence[int], shares: Floats, sizes: Sequence[int], seed: int, purpose: str
) -> list[list[Integers]]:
    """Disjoint draws for every client: ``found[client][k]`` holds exactly ``sizes[k]`` positions, ascending.

    Counts of classes are the largest-remainder rounding of size x share. Where a client would need more of a class
    than the pool has, its other classes take what is missing, in proportion to their shares. No position is twice
    with a client; two clients draw independently.

    Args:
        labels: of the pool. classes: the label of each column of ``shares``.
        purpose: of the seeded stream; one for each pool.

    Raises:
        UsageError: the classes of a client have too few samples.
    """
    members = [np.flatnonzero(labels == label) for label in classes]
    found = []
    for client, row in enumerate(shares):
        generator = seeds.numpy_generator(seed, "partition", purpose, client)
        orders = [generator.permutation(each) for each in members]
        left = np.array([len(each) for each in members])
        parts = []
        for size in sizes:
            counts = _counts(row, size, left)
            if counts is None:
                raise UsageError(
                    f"a client needs {sum(sizes)} samples of its classes, which have {int(left[row > 0].sum())} left; "
                    "ask for fewer samples_per_client or more classes a client"
                )
            taken = [
                order[len(order) - n : len(order) - n + k] for order, n, k in zip(orders, left, counts, strict=True)
            ]
            parts.append(np.sort(np.concatenate(taken)))
            left = left - counts
        found.append(parts)
    return found


def _counts(shares: Floats, size: int, most: Integers) -> Integers | None:
    """Whole numbers near ``size x shares`` with that sum, none above ``most``; None if there are none."""
    counts = np.zeros(len(shares), dtype=np.int64)
    while counts.sum() < size:
        open_ = (shares > 0) & (counts < most)
        if not open_.any():
            return None
        missing = size - counts.sum()
        exact = np.where(open_, shares, 0.0) / shares[open_].sum() * missing
        more = np.floor(exact).astype(np.int64)
        order = np.lexsort((-shares, more - exact))  # the largest remainders, then the largest shares
        order = order[open_[order]]
        more[order[: missing - more.sum()]] += 1
        counts = np.minimum(counts + more, most)
    return counts


def held_out(labels: Integers, share: float, seed: int) -> NDArray[np.bool_]:
    """Which samples form a test side, [n]: of each class that share at random, rounded up."""
    generator = seeds.numpy_generator(seed, "partition", "held out")
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        chosen[members[: math.ceil(round(share * len(members), 9))]] = True
    return chosen


def fedpft(
    source: Source,
    kind: str,
    clients: int,
    alpha: float,
    few: int | None,
    samples: int | None,
    shares: Sequence[float],
    seed: int,
) -> tuple[list[list[Integers]], dict[str, Any]]:
    """FedPFT's partitions: equally many samples and one label distribution for training, validation and test.

    Args:
        kind: ``fedpft_dirichlet`` with ``alpha``, or ``fedpft_pathological`` with ``few`` classes, by default a fifth.
        samples: to train on, default 500; validation and test as ``shares`` ask for beside them.

    Returns:
        Positions [client][split] in the source, and what was asked for.

    Raises:
        UsageError: a parameter out of range, or classes with too few samples.
    """
    samples = 500 if samples is None else samples
    check_whole("clients", clients)
    check_whole("samples_per_client", samples)
    present = [int(label) for label in np.unique(source.y)]
    params: dict[str, Any] = {"clients": int(clients), "samples_per_client": int(samples)}
    if kind == "fedpft_dirichlet":
        wanted = label_shares(len(present), clients, alpha, seed)
        params["alpha"] = float(alpha)
    else:
        few = max(1, len(present) // 5) if few is None else few
        wanted = few_shares(len(present), clients, few, seed)
        params["classes_per_client"] = int(few)
    tests = held_out(source.y, shares[2], seed) if source.is_train is None else ~np.asarray(source.is_train)
    train, validation, test = (max(1, round(samples * share / shares[0])) for share in shares)
    found: list[list[Integers]] = [[] for _ in range(clients)]
    for purpose, side, sizes in (("train side", ~tests, (train, validation)), ("test side", tests, (test,))):
        pool = np.flatnonzero(side)
        for own, parts in zip(found, by_shares(source.y[pool], present, wanted, sizes, seed, purpose), strict=True):
            own += [pool[part].astype(np.int64) for part in parts]
    return found, params
