"""The table of losses: each way's score of each sample, in each seed and split, and the rule that reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fl_core import statistics
from fl_core.rows import SCORES
from fl_core.statistics import Estimate

VALIDATION, TEST = "validation", "test"
BASE_RATE, FEDAVG = "base_rate", "fedavg"
LEAST_ERRORS = 1.64
"""Standard errors by which a way must be better than the base rate to be a candidate."""
MARGIN = 0.5
"""Standard errors by which a way must be better than FedAvg to be recommended in its place."""
DIGITS = 9
"""Decimal places of differences that count. Later ones differ by rounding."""
NO_SPREAD = Estimate(math.nan, math.nan, math.nan)


class Part(NamedTuple):
    """The score of one way in one seed and split.

    Attributes:
        mean: the score. It is the weighted mean of the values, unless the score is no mean over samples, such as AUROC.
        value: the score of each sample, or the pseudo-values of a jackknife, float64 [n].
        weight: the weight of each value, [n]. All weights add up to 1. Those of a
            client add up to its share of the training samples, and follow the class
            weights, if any.
        group: the number of each value's group, such as a patient, int [n].
        client: the number of each value's client, int [n].
    """

    mean: float
    value: NDArray[np.float64]
    weight: NDArray[np.float64]
    group: NDArray[np.int64]
    client: NDArray[np.int64]

    @property
    def samples(self) -> int:
        """Return the number of values."""
        return len(self.value)

    def above(self, other: Any, client: int | None = None) -> Estimate | None:
        """Return the paired mean difference to another way's score, with its error over groups within clients.

        Args:
            other: the part of the other way, on the same samples.
            client: the number of the client whose samples count; None for all clients.

        Returns:
            The estimate; None if there are no samples.
        """
        if not self.samples or not other.samples:
            return None
        rows = slice(None) if client is None else self.client == client
        gap = (self.value[rows] - other.value[rows]).round(DIGITS)
        if not len(gap):
            return None
        strata = self.client[rows]
        return statistics.stratified_mean(
            gap, self.weight[rows], self.group[rows], strata
        )


def mean_alone(mean: float) -> Part:
    """Return a :class:`Part` that has a score and no values of samples.

    Errors of its differences come from the spread over seeds.
    """
    no_values = np.zeros(0)
    no_numbers = no_values.astype(np.int64)
    return Part(mean, no_values, no_values, no_numbers, no_numbers)


class SumPart(NamedTuple):
    """The score of one way in one seed and split, whose samples are elsewhere: sums over the groups of each client.

    Attributes:
        mean: the score.
        samples: the number of samples.
        way: the position of the way in the sums below.
        draws: the number of groups of each client, float64 [n_clients].
        sums: for each client the sums over its groups of the weighted losses of K ways, and last of the weights,
            float64 [n_clients, K + 1].
        products: for each client the sums over its groups of products of any two of these, float64 [n_clients, K + 1, K
            + 1].
    """

    mean: float
    samples: int
    way: int
    draws: NDArray[np.float64]
    sums: NDArray[np.float64]
    products: NDArray[np.float64]

    def above(self, other: Any, client: int | None = None) -> Estimate | None:
        """Return the paired mean difference to another way's score, as :meth:`Part.above`."""
        has_draws = self.draws > 0
        if client is not None:
            has_draws &= np.arange(len(has_draws)) == client
        if not has_draws.any():
            return None
        own_place, other_place = self.way, other.way
        sums, products = self.sums[has_draws], self.products[has_draws]
        sums_of_groups = statistics.GroupSums(
            self.draws[has_draws],
            sums[:, -1],
            sums[:, own_place] - sums[:, other_place],
            products[:, -1, -1],
            products[:, own_place, own_place]
            - 2 * products[:, own_place, other_place]
            + products[:, other_place, other_place],
            products[:, own_place, -1] - products[:, other_place, -1],
        )
        return statistics.mean_of_sums(sums_of_groups)


@dataclass(frozen=True, eq=False)
class LossTable:
    """The scores of all ways. Every difference, interval and choice of a decision is computed here.

    Attributes:
        parts: the part of each (seed, way, split). A way is compared if it has a part
            in each seed and split that occurs.
        score: the score that ranks, one of :data:`fl_core.rows.SCORES`.
        overlap: for each split, the share of samples that two seeds have in common.
        clients: the names of the clients, by number.
    """

    parts: Mapping[tuple[int, str, str], Part | SumPart]
    score: str
    overlap: Mapping[str, float]
    clients: tuple[str, ...] = ()

    @property
    def sign(self) -> int:
        """Return 1 if a higher score is better, else -1."""
        if SCORES[self.score]:
            return 1
        return -1

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Return the seeds, in order."""
        return tuple(dict.fromkeys(seed for seed, _, _ in self.parts))

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """Return the splits that have samples."""
        return tuple(dict.fromkeys(split for _, _, split in self.parts))

    @cached_property
    def ways(self) -> tuple[str, ...]:
        """Return the names of the ways with a part in each seed and split.

        The base rate is among them, if the table has it.
        """
        names = dict.fromkeys(way for _, way, _ in self.parts)
        required_parts: list[tuple[int, str]] = []
        for seed in self.seeds:
            required_parts += [(seed, split) for split in self.splits]
        return tuple(
            way
            for way in names
            if all((seed, way, split) in self.parts for seed, split in required_parts)
        )

    def means(self, way: str, split: str) -> NDArray[np.float64]:
        """Return a way's score in each seed, [n_seeds], in the order of :attr:`seeds`."""
        return np.array([self.parts[seed, way, split].mean for seed in self.seeds])

    def mean(self, way: str, split: str) -> float:
        """Return a way's mean score over the seeds."""
        return float(self.means(way, split).mean())

    def gain(self, one: str, other: str, split: str) -> Estimate:
        """Return the mean paired difference of two ways' scores, above 0 if the first way is better.

        The error combines the variance over seeds and that over samples, some of which occur in several seeds
        (:func:`fl_core.statistics.mean_over_seeds`). The spread over seeds is pooled over pairs of ways, without those
        that are worse than the base rate.

        Args:
            one, other: names of the two ways.
            split: the split that is scored.
        """
        gains = self.sign * (self.means(one, split) - self.means(other, split))
        per_seed = [self._above(seed, one, other, split) for seed in self.seeds]
        sampling_error = _pooled(
            [estimate for estimate in per_seed if estimate is not None]
        )
        return statistics.mean_over_seeds(
            gains, sampling_error, self._spread(split), self.overlap[split]
        )

    def by_client(self, one: str, other: str, split: str) -> dict[str, Estimate]:
        """Return the gain of one way over another at each client, by the client's name.

        Clients without samples in a seed are left out. The spread over seeds is pooled
        over the clients. The score must be a mean over samples.

        Args:
            one, other, split: as for :meth:`gain`.
        """
        gains_of, spreads = {}, []
        for number, name in enumerate(self.clients):
            per_seed = [
                self._above(seed, one, other, split, number) for seed in self.seeds
            ]
            estimates = [estimate for estimate in per_seed if estimate is not None]
            if len(estimates) == len(self.seeds):
                gains = np.array([estimate.value for estimate in estimates])
                gains_of[name] = gains, _pooled(estimates)
                spreads.append(gains.var(ddof=1) if len(gains) > 1 else 0.0)
        if not gains_of:
            return {}
        freedom = max(1.0, len(gains_of) * (len(self.seeds) - 1.0))
        pooled_spread = Estimate(math.nan, math.sqrt(np.mean(spreads)), freedom)
        return {
            name: statistics.mean_over_seeds(
                gains, sampling_error, pooled_spread, self.overlap[split]
            )
            for name, (gains, sampling_error) in gains_of.items()
        }

    def _above(
        self, seed: int, one: str, other: str, split: str, client: int | None = None
    ) -> Estimate | None:
        """Return by how much the first way is better than the other in one seed.

        The error is that over groups within clients. The result is None if there are no
        samples.
        """
        first_part, second_part = (self.parts[seed, way, split] for way in (one, other))
        difference = first_part.above(second_part, client)
        if difference is None:
            return None
        return difference._replace(value=self.sign * difference.value)

    def _spread(self, split: str) -> Estimate:
        """Return the standard deviation of a difference over seeds, pooled over pairs of ways.

        Ways that are worse than the base rate are left out, so that one that broke down says nothing of the others.
        The result is 0 with a single seed, or with fewer than two ways.
        """
        if len(self.seeds) == 1:
            return Estimate(math.nan, 0.0, 1.0)
        means = np.stack([self.means(way, split) for way in self.ways])
        if BASE_RATE in self.ways:
            scores = self.sign * means.mean(1)
            means = means[scores >= scores[self.ways.index(BASE_RATE)]]
        variances = [
            (means[k] - means[j]).var(ddof=1)
            for k, j in combinations(range(len(means)), 2)
        ]
        freedom = float(max(1, len(means) - 1) * (len(self.seeds) - 1))
        spread = math.sqrt(float(np.mean(variances))) if variances else 0.0
        return Estimate(math.nan, spread, freedom)


def _pooled(within: Sequence[Estimate]) -> Estimate:
    """Return the sampling error in one seed, from an estimate for each seed.

    The error is the root of the mean variance, and the freedom the mean one. Estimates
    without a spread count with a variance of 0. If none has a spread, all numbers are
    NaN.
    """
    usable_estimates = [
        estimate for estimate in within if not math.isnan(estimate.error)
    ]
    if not usable_estimates:
        return NO_SPREAD
    variance = math.fsum(estimate.error**2 for estimate in usable_estimates) / len(
        within
    )
    freedom = math.fsum(estimate.free for estimate in usable_estimates) / len(
        usable_estimates
    )
    return Estimate(math.nan, math.sqrt(variance), freedom)


# --- the rule --------------------------------------------------------------------------------------------------


def candidates(table: LossTable, ways: Sequence[str]) -> list[str]:
    """Return the ways that are better than the base rate by 1.64 standard errors on validation samples, best first.

    A way whose difference to the base rate has no spread is no candidate. In a table without a base rate all ways are
    candidates.
    """
    better_ways = []
    for way in ways:
        if way not in table.ways:
            continue
        if BASE_RATE not in table.ways:
            better_ways.append(way)
        else:
            gain = table.gain(way, BASE_RATE, VALIDATION)
            if gain.value > LEAST_ERRORS * gain.error:  # False for NaN
                better_ways.append(way)
    order = {way: -table.sign * table.mean(way, VALIDATION) for way in better_ways}
    return sorted(better_ways, key=order.__getitem__)


def recommended(table: LossTable, ways: Sequence[str]) -> str | None:
    """Return the way with the best mean validation score, but FedAvg unless it is beaten; None without a candidate.

    FedAvg with fine-tuning is the default. The best way must be better than FedAvg by
    more than half a standard error of their paired difference. If the difference or its
    error is unknown, FedAvg stays. If FedAvg is no candidate (:func:`candidates`), the
    best way is named.

    Args:
        table: the scores of the ways.
        ways: names of the ways that may be recommended.
    """
    ranked_ways = candidates(table, ways)
    if not ranked_ways:
        return None
    if FEDAVG not in ranked_ways or ranked_ways[0] == FEDAVG:
        return ranked_ways[0]
    gain = table.gain(ranked_ways[0], FEDAVG, VALIDATION)
    is_beaten = gain.value > 0 and gain.value > MARGIN * gain.error
    if is_beaten:
        return ranked_ways[0]
    return FEDAVG
