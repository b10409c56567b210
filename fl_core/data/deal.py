"""Ways to deal samples to clients, as one array of positions a client.

Each is a function of the labels, its parameters and the seed alone: the same call gives the same positions on every
machine, whatever else a run does.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import numpy as np

from fl_core import seeds
from fl_core.data.arrays import Integers
from fl_core.errors import UsageError, listing

MIN_SIZE = 10
LEAST_CAPPED = 40
"""PFLlib's, for batches of 10: four times as many."""
_DRAWS = 1000


def iid(labels: Integers, clients: int, seed: int) -> list[Integers]:
    """A random permutation cut into ``clients`` parts whose sizes differ by at most one.

    Raises:
        UsageError: fewer samples than clients.
    """
    _check_clients(clients, len(labels))
    order = seeds.numpy_generator(seed, "partition", "iid").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(
    labels: Integers, clients: int, alpha: float, seed: int, *, min_size: int = MIN_SIZE, draws: int = _DRAWS
) -> list[Integers]:
    """Each class is dealt in proportions p ~ Dirichlet(alpha, ..., alpha) over clients (PLayer-FL, appendix).

    Counts are rounded down and the last client takes what remains of a class; which samples they are is random. All
    proportions are drawn anew, at most ``draws`` times, until every client has ``min_size`` samples.

    Raises:
        UsageError: ``alpha`` is not positive, or the smallest client stays below ``min_size``.
    """
    check_alpha(alpha)
    _check_clients(clients, len(labels), min_size)
    generator = seeds.numpy_generator(seed, "partition", "dirichlet")
    members = [np.flatnonzero(labels == k) for k in np.unique(labels)]
    sizes = np.array([len(each) for each in members])
    best = 0
    for _ in range(draws):
        shares = generator.dirichlet(np.full(clients, float(alpha)), size=len(members))
        counts = np.floor(shares * sizes[:, None]).astype(np.int64)
        counts[:, -1] = sizes - counts[:, :-1].sum(1)
        smallest = int(counts.sum(0).min())
        if smallest >= min_size:
            break
        best = max(best, smallest)
    else:
        raise UsageError(
            f"dirichlet partition of {len(labels)} samples over {clients} clients with alpha={float(alpha):g}: "
            f"in {draws} draws the smallest client had at most {best} samples, and {min_size} are needed; "
            f"ask for a larger alpha, fewer clients or more samples, or for partition 'iid'"
        )
    dealt = [
        np.split(generator.permutation(each), np.cumsum(count)[:-1])
        for each, count in zip(members, counts, strict=True)
    ]
    return [np.sort(np.concatenate(parts)) for parts in zip(*dealt, strict=True)]


def pathological(labels: Integers, clients: int, classes_per_client: int, seed: int) -> list[Integers]:
    """Every client holds exactly ``classes_per_client`` classes (McMahan et al. 2017, with classes for shards).

    Numbers of clients that hold a class differ by at most one, and a class's samples are cut evenly between its
    holders. With fewer places than classes, some classes, chosen at random, are held by nobody and left out.

    Raises:
        UsageError: more classes a client than there are, or a class with fewer samples than holders.
    """
    _check_clients(clients, len(labels))
    present, sizes = np.unique(labels, return_counts=True)
    if not _is_whole(classes_per_client) or not 1 <= classes_per_client <= len(present):
        raise UsageError(f"classes_per_client={classes_per_client}: the samples have {len(present)} classes")
    generator = seeds.numpy_generator(seed, "partition", "pathological")
    holders = _holders(len(present), clients, classes_per_client, generator)
    parts: list[list[Integers]] = [[] for _ in range(clients)]
    for k, label in enumerate(present):
        if sizes[k] < len(holders[k]):
            raise UsageError(
                f"pathological partition: class {label} has {sizes[k]} samples for {len(holders[k])} clients; "
                f"ask for fewer clients or fewer classes a client"
            )
        if holders[k]:
            order = generator.permutation(np.flatnonzero(labels == label))
            for client, part in zip(holders[k], np.array_split(order, len(holders[k])), strict=True):
                parts[client].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def _holders(classes: int, clients: int, each: int, generator: np.random.Generator) -> list[list[int]]:
    """For each class the clients that hold it: random, ``each`` classes a client, numbers of holders nearly equal."""
    holders: list[list[int]] = [[] for _ in range(classes)]
    for client in range(clients):
        # the least held classes first, in random order: numbers of holders can never differ by more than one
        order = np.lexsort((generator.random(classes), np.array([len(each) for each in holders])))
        for k in order[:each]:
            holders[k].append(client)
    return holders


def dominated(
    labels: Integers, clients: int, samples: int, classes_per_client: int, dominance: float, seed: int
) -> list[Integers]:
    """Every client holds ``samples`` samples, of which its own few classes make up the share ``dominance``.

    pFedLA (Ma et al. 2022): with dominance 1 a client has ``classes_per_client`` classes and no others (non-IID_1);
    below it the other classes share the rest evenly (non-IID_2). Own classes are random, and equally many clients
    have each, to within one. Within its own classes, and within the others, a client's counts differ by at most one.

    Raises:
        UsageError: more classes a client than there are, a dominance outside 0 to 1, fewer samples than classes to
            hold, or more than a class has.
    """
    _check_clients(clients, len(labels))
    present, sizes = np.unique(labels, return_counts=True)
    if not _is_whole(classes_per_client) or not 1 <= classes_per_client <= len(present):
        raise UsageError(f"classes_per_client={classes_per_client}: the samples have {len(present)} classes")
    if isinstance(dominance, bool) or not isinstance(dominance, numbers.Real) or not 0 < float(dominance) <= 1:
        raise UsageError(f"dominance={dominance!r}: the share of a client's own classes must be above 0 and at most 1")
    held = classes_per_client if dominance == 1 else len(present)
    if not _is_whole(samples) or samples < held:
        raise UsageError(f"samples_per_client={samples!r}: a client needs at least {held}, one of each class it holds")
    generator = seeds.numpy_generator(seed, "partition", "dominated")
    holders = _holders(len(present), clients, classes_per_client, generator)
    own = np.array([[client in each for each in holders] for client in range(clients)])
    mine = round(dominance * samples) if classes_per_client < len(present) else samples
    groups = [
        (client, own[client] == kind, n) for client in range(clients) for kind, n in ((1, mine), (0, samples - mine))
    ]
    counts = np.zeros((clients, len(present)), dtype=np.int64)
    for client, among, n in groups:
        counts[client, among] = n // max(among.sum(), 1)
    even, left = counts.copy(), sizes - counts.sum(0)
    for client, among, n in groups:  # what even counts leave over: one more of the classes of which most is left
        order = np.lexsort((generator.random(len(present)), -left, ~among))
        more = order[: n - counts[client, among].sum()]
        counts[client, more] += 1
        left[more] -= 1
    for client, among, _ in groups:  # where a class then lacks samples, whoever can takes another instead
        for lacking in np.flatnonzero(among & (left < 0) & (counts[client] > even[client])):
            spare = np.flatnonzero(among & (left > 0) & (counts[client] == even[client]))[:1]
            if len(spare) and left[lacking] < 0:
                counts[client, lacking] -= 1
                counts[client, spare] += 1
                left[lacking] += 1
                left[spare] -= 1
    if left.min() < 0:
        scarce = int(left.argmin())
        raise UsageError(
            f"{clients} clients with {samples} samples each would need {int(counts[:, scarce].sum())} of class "
            f"{present[scarce]}, which has {int(sizes[scarce])}; ask for fewer samples_per_client or fewer clients"
        )
    parts: list[list[Integers]] = [[] for _ in range(clients)]
    for k, label in enumerate(present):
        order = generator.permutation(np.flatnonzero(labels == label))
        for client, part in enumerate(np.split(order, np.cumsum(counts[:, k]))[:-1]):
            parts[client].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def natural(owner: Integers, names: Sequence[str]) -> list[Integers]:
    """One client for each natural owner, in the order of ``names``.

    Raises:
        UsageError: an owner without samples, by name.
    """
    parts = [np.flatnonzero(owner == number) for number in range(len(names))]
    empty = [name for name, part in zip(names, parts, strict=True) if not len(part)]
    if empty:
        raise UsageError(f"natural clients without samples to train on: {listing(empty)}; ask for more samples")
    return parts


def natural_dirichlet(
    labels: Integers,
    owner: Integers,
    names: Sequence[str],
    each: int,
    alpha: float,
    seed: int,
    *,
    min_size: int = MIN_SIZE,
    draws: int = _DRAWS,
) -> list[Integers]:
    """Feature and label skew: every natural owner's samples go to ``each`` clients of its own (FedRA's 30 clients).

    Within an owner each class is dealt in proportions p ~ Dirichlet(alpha, ..., alpha) over its clients, class after
    class; a client that has an even share of the owner's samples already gets none of the next class, and p is
    scaled up for the others. All of an owner is drawn anew, at most ``draws`` times, until each of its clients has
    ``min_size`` samples.

    Returns:
        Positions of each client's samples, the clients of the first owner first.

    Raises:
        UsageError: ``alpha`` is not positive, an owner without samples, or one whose smallest client stays below
            ``min_size``.
    """
    check_alpha(alpha)
    found: list[Integers] = []
    for number, mine in enumerate(natural(owner, names)):
        what = f"clients of {names[number]!r}"
        _check_clients(each, len(mine), min_size, what)
        generator = seeds.numpy_generator(seed, "partition", "natural_dirichlet", number)
        parts = _capped(labels[mine], each, float(alpha), generator, min_size, draws, "natural_dirichlet", what)
        found += [np.sort(mine[part]) for part in parts]
    return found


def capped_dirichlet(
    labels: Integers, clients: int, alpha: float, seed: int, *, min_size: int = LEAST_CAPPED, draws: int = _DRAWS
) -> list[Integers]:
    """Label skew with a bound on sizes, as PFLlib's code deals its pool (used by Jang and Choi 2024, it seems).

    Each class is dealt in proportions p ~ Dirichlet(alpha, ..., alpha) over clients, class after class; a client that
    has an even share of all samples already gets none of the next class, and p is scaled up for the others. All is
    drawn anew, at most ``draws`` times, until every client has ``min_size`` samples, or half of an even share where
    that is less.

    Raises:
        UsageError: ``alpha`` is not positive, or the smallest client stays below that.
    """
    check_alpha(alpha)
    _check_clients(clients, len(labels))
    least = min(min_size, len(labels) // clients // 2)
    generator = seeds.numpy_generator(seed, "partition", "capped_dirichlet")
    parts = _capped(labels, clients, float(alpha), generator, least, draws, "capped_dirichlet", "clients")
    return [np.sort(part) for part in parts]


def _capped(
    labels: Integers,
    clients: int,
    alpha: float,
    generator: np.random.Generator,
    min_size: int,
    draws: int,
    kind: str,
    what: str,
) -> list[Integers]:
    """Proportions of a Dirichlet, no further class for who is full: drawn until all have ``min_size`` samples."""
    best = 0
    for _ in range(draws):
        parts = _capped_once(labels, clients, alpha, generator)
        smallest = min(map(len, parts))
        if smallest >= min_size:
            return parts
        best = max(best, smallest)
    raise UsageError(
        f"{kind} partition: in {draws} draws with alpha={alpha:g} the smallest of {clients} {what} had at most {best} "
        f"of {len(labels)} samples, and {min_size} are needed; ask for a larger alpha or fewer clients"
    )


def _capped_once(labels: Integers, clients: int, alpha: float, generator: np.random.Generator) -> list[Integers]:
    parts = [np.empty(0, np.int64) for _ in range(clients)]
    for k in np.unique(labels):
        order = generator.permutation(np.flatnonzero(labels == k))
        wanting = np.array([len(part) * clients < len(labels) for part in parts])
        shares = generator.dirichlet(np.full(clients, alpha)) * wanting
        if not 0 < shares.sum() < math.inf:  # an extreme alpha can put all of a class on a client that is full
            shares = wanting.astype(float)
        cuts = np.floor(np.cumsum(shares / shares.sum())[:-1] * len(order)).astype(np.int64)
        parts = [np.concatenate(pair) for pair in zip(parts, np.split(order, cuts), strict=True)]
    return parts


def follow(train_labels: Sequence[Integers], labels: Integers, seed: int) -> list[Integers]:
    """Deal further samples in the proportions in which training samples of their class were dealt.

    Args:
        train_labels: labels of each client's training samples.
        labels: labels of the samples to deal; a class that no client trains on is left out.

    Returns:
        Positions in ``labels`` for each client; a client's count is within one of its exact proportion.
    """
    generator = seeds.numpy_generator(seed, "partition", "test")
    parts: list[list[Integers]] = [[] for _ in train_labels]
    for k in np.unique(labels):
        counts = np.array([(each == k).sum() for each in train_labels])
        if not counts.sum():
            continue
        order = generator.permutation(np.flatnonzero(labels == k))
        cuts = np.rint(np.cumsum(counts) / counts.sum() * len(order)).astype(np.int64)[:-1]
        for part, piece in zip(parts, np.split(order, cuts), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) if part else np.empty(0, np.int64) for part in parts]


def check_alpha(alpha: float) -> None:
    """Refuse what is no positive number.

    Raises:
        UsageError: it is not.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real) or not 0 < float(alpha) < math.inf:
        raise UsageError(f"alpha={alpha!r}: the concentration must be a positive number")


def check_whole(what: str, value: object) -> None:
    """Refuse what is no whole number from 1.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{what}={value!r}: a whole number from 1 is needed")


def _check_clients(clients: int, samples: int, each: int = 1, what: str = "clients") -> None:
    check_whole(what, clients)
    if clients * each > samples:
        raise UsageError(
            f"{what}={clients}: {samples} samples cannot give {each} to each; ask for at most {samples // each} clients"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
