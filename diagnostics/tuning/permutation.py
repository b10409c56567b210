"""An exact test of whether clients differ: models stay as they are, and validation samples change clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_core.errors import UsageError
from fl_core.seeds import numpy_generator
from fl_core.statistics import SIGNIFICANCE

PURPOSE = "clients_differ"
DEALS = 999
"""The default number of random assignments. The smallest p-value is then 1 / (DEALS + 1)."""
AT_ONCE = 50
"""The most random assignments that are scored at a time, which bounds the memory."""
ONE_BLOCK, BLOCK = 9, 5
"""Up to 9 clients are one block. More are drawn to blocks of at most 5."""

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CrossLosses:
    """The losses of clients' models on each other's validation samples, in one seed.

    Attributes:
        losses: the loss of each kind of model, client's model and sample, float64 [P, K, n]. A kind is for instance
            local training, or a number of fine-tuning epochs. It is NaN if a model did not predict a sample.
        client: the number of each sample's client, int [n].
        share: the weight of each client, proportional to its training samples, [K].
        group: the number of each sample's group, such as a patient, int [n]. A number means the same group of one
            client in all seeds. Default: every sample is a group; with several seeds groups are required.
        weight: the relative weight of each sample within its client, [n], such as its class weight. Default: all equal.
    """

    losses: Array
    client: NDArray[np.int64]
    share: Array
    group: NDArray[np.int64] | None = None
    weight: Array | None = None


@dataclass(frozen=True)
class Difference:
    """The result of the test.

    Attributes:
        p_value: (1 + the number of random assignments with a statistic at least as large) / (1 + their number). The
            statistic is the largest standardised lead over the kinds of models.
        leads: for each kind, by how many nats the mean loss of a client's own model is below that of the other clients'
            models at the client's validation samples, mean over seeds.
        standardised: the leads minus their means over the random assignments, divided by their standard deviations. The
            mean is not 0 if clients with more samples have better models.
        kind: the position in ``leads`` of the kind with the largest standardised lead.
        smallest: the smallest lead of this kind that would have been significant.
        samples: number of validation samples, summed over seeds.
        seeds: number of seeds.
    """

    p_value: float
    leads: tuple[float, ...]
    standardised: tuple[float, ...]
    kind: int
    smallest: float
    samples: int
    seeds: int = 1

    @property
    def shown(self) -> bool:
        """Return whether the difference between clients is significant."""
        return self.p_value <= SIGNIFICANCE

    @property
    def lead(self) -> float:
        """Return the lead of the kind that stands out most, nats."""
        return self.leads[self.kind]

    def text(self, loss_name: str = "log loss") -> str:
        """Return the answer in two sentences, with the name of the loss."""
        p = f"{self.p_value:.3f}".lstrip("0")
        if self.shown:
            return (
                f"Clients differ (p = {p}): on its own samples a client's model has a {loss_name} "
                f"{self.lead:.2f} lower than other clients' models. This does not say that local layers help."
            )
        return (
            f"Clients are not shown to differ (p = {p}, {self.samples} validation samples). "
            f"A {loss_name} {self.smallest:.2g} lower would have been shown."
        )


def blocks(clients: int, seed: int) -> list[list[int]]:
    """Return the clients' numbers in random blocks. Models of a block predict all validation samples of the block.

    Up to 9 clients are one block. More are drawn to blocks of at most 5, about equal in
    size. With several seeds take the blocks of the first one.

    >>> blocks(3, seed=0)
    [[0, 1, 2]]
    >>> [len(block) for block in blocks(11, seed=0)]
    [4, 4, 3]
    """
    if clients <= ONE_BLOCK:
        return [list(range(clients))]
    order = numpy_generator(seed, PURPOSE).permutation(clients)
    client_arrays = np.array_split(order, math.ceil(clients / BLOCK))
    return [sorted(block.tolist()) for block in client_arrays]


def permutation_test(
    seeds: Sequence[CrossLosses],
    parts: Sequence[Sequence[int]] | None = None,
    *,
    seed: int = 0,
    deals: int = DEALS,
) -> Difference:
    """Test whether clients differ in more than their samples.

    The lead of a client's own model over the others of its block is sum_i w_i (mean
    over other models of their loss at sample i - own loss). A client's samples have the
    weight of its training samples, together. The null assigns whole groups to clients
    at random, within a block, and each client keeps its number of groups. A sample then
    has the weight of its new client. The assignment is the same for all seeds: a group
    is assigned once, and takes part in each seed in which it is a validation group. A
    client without a sample in an assignment takes no part in it. Leads are averaged
    over seeds. Each kind's lead is standardised by its own null, and the statistic is
    the largest (Westfall and Young 1993).

    With one seed the test is exact, whatever the models learned: if clients have the same distribution, their samples
    are exchangeable. A difference does not say that local layers help.

    >>> losses = np.array([[[0.1] * 20 + [2.0] * 20, [3.0] * 20 + [0.1] * 20]])
    >>> difference = permutation_test([CrossLosses(losses, np.repeat([0, 1], 20), np.array([30.0, 10.0]))])
    >>> difference.p_value, round(difference.lead, 3)
    (0.001, 2.65)

    Args:
        seeds: the losses in each seed, with the same kinds and clients in the same order.
        parts: blocks of clients, the same in all seeds, as of :func:`blocks`. Default: one block.
        seed: seed of the random assignments.
        deals: number of random assignments.

    Raises:
        UsageError: no block has two clients with samples, a loss within a
            block is not finite, a group has two clients, or groups are missing with
            several seeds.
    """
    parts = parts or [range(len(seeds[0].share))]
    owner, groups = _owners(seeds, parts)
    assigned = _deals(owner, parts, seed, deals)
    total = np.zeros((deals + 1, len(seeds[0].losses)))
    for seed_losses, group in zip(seeds, groups, strict=True):
        chunks = np.array_split(assigned, math.ceil(len(assigned) / AT_ONCE))
        total += np.concatenate(
            [_leads(seed_losses, parts, chunk[:, group]) for chunk in chunks]
        )
    total /= len(seeds)
    null = total[1:]
    errors = null.std(axis=0)
    scale = max(float(np.nanmax(np.abs(seed_losses.losses))) for seed_losses in seeds)
    spread = np.where(errors > 1e-12 * scale, errors, np.inf)  # equal models
    standardised = (total - null.mean(axis=0)) / spread
    statistic = standardised.max(axis=1)
    n_reached = int((statistic[1:] >= statistic[0] - 1e-12).sum())
    kind = int(standardised[0].argmax())
    rank = min(deals, math.floor(SIGNIFICANCE * (deals + 1)))
    threshold = np.sort(statistic[1:])[-rank]
    return Difference(
        p_value=(1 + n_reached) / (1 + deals),
        leads=tuple(total[0].tolist()),
        standardised=tuple(standardised[0].tolist()),
        kind=kind,
        smallest=float(null[:, kind].mean() + threshold * errors[kind]),
        samples=sum(len(seed_losses.client) for seed_losses in seeds),
        seeds=len(seeds),
    )


def _owners(
    seeds: Sequence[CrossLosses], parts: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return the client of each validation group, and for each seed the group of each sample.

    The first result is int64 [groups]. The second is a list with an array int64 [n] for
    each seed, whose numbers are positions in the first.

    Raises:
        UsageError: as :func:`permutation_test`.
    """
    if len(seeds) > 1 and any(seed_losses.group is None for seed_losses in seeds):
        raise UsageError(
            "group must be given in each of several seeds; got none. Pass each sample's number in the federation."
        )
    group_names_by_seed = [
        np.arange(len(seed_losses.client))
        if seed_losses.group is None
        else seed_losses.group
        for seed_losses in seeds
    ]
    group = np.unique(np.concatenate(group_names_by_seed), return_inverse=True)[
        1
    ].reshape(-1)
    client = np.concatenate([seed_losses.client for seed_losses in seeds])
    owner = np.zeros(group.max(initial=-1) + 1, dtype=np.int64)
    owner[group] = client
    if (owner[group] != client).any():
        raise UsageError(
            "a group must belong to one client in all seeds; got one with two. "
            "Give groups of each client numbers of their own."
        )
    sizes = [len(np.intersect1d(block, owner)) for block in parts]
    if max(sizes, default=0) < 2:
        raise UsageError(
            "at least 2 clients must have validation samples; got fewer. Add validation samples."
        )
    ends = np.cumsum([len(group_names) for group_names in group_names_by_seed])[:-1]
    return owner, np.split(group, ends)


def _deals(
    owner: NDArray[np.int64], parts: Sequence[Sequence[int]], seed: int, deals: int
) -> NDArray[np.int32]:
    """Return each group's client: the real one, then that of each random assignment, [deals + 1, groups].

    Args:
        owner: the client of each group, [groups].
        parts: blocks of clients, within which groups are assigned.
        seed: seed of the assignments.
        deals: number of random assignments.
    """
    assigned = np.tile(owner.astype(np.int32), (deals + 1, 1))
    draw = numpy_generator(seed, PURPOSE, "deals")
    for block in parts:
        group_positions = np.flatnonzero(np.isin(owner, block))
        assigned[1:, group_positions] = draw.permuted(
            assigned[1:, group_positions], axis=1
        )
    return assigned


def _leads(
    seed_losses: CrossLosses,
    parts: Sequence[Sequence[int]],
    assigned: NDArray[np.int32],
) -> Array:
    """Return the lead of each kind of models in each assignment, [assignments, kinds].

    Args:
        seed_losses: the losses in one seed.
        parts: blocks of clients.
        assigned: the client of each sample in each assignment, [assignments, n].

    Raises:
        UsageError: a loss within a block is not finite.
    """
    leads = np.zeros((len(assigned), len(seed_losses.losses)))
    shares = np.zeros((len(assigned), 1))
    weight = seed_losses.weight
    if weight is None:
        weight = np.ones(len(seed_losses.client))
    for block in parts:
        sample_positions = np.flatnonzero(np.isin(seed_losses.client, block))
        losses = seed_losses.losses[:, list(block)][:, :, sample_positions]
        if not np.isfinite(losses).all():
            raise UsageError(
                "losses must be finite within a block of clients; got NaN or infinity. Lower lr."
            )
        if len(block) < 2:
            continue
        other_losses = (losses.sum(axis=1, keepdims=True) - losses) / (len(block) - 1)
        gaps = other_losses - losses
        for position, client in enumerate(block):
            client_weights = (assigned[:, sample_positions] == client) * weight[
                sample_positions
            ]
            sizes = client_weights.sum(axis=1, keepdims=True)
            sums = client_weights @ gaps[:, position].T
            means = np.divide(sums, sizes, out=np.zeros_like(sums), where=sizes > 0)
            leads += seed_losses.share[client] * means
            shares += seed_losses.share[client] * (sizes > 0)
    return np.divide(leads, shares, out=np.zeros_like(leads), where=shares > 0)
