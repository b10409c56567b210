"""Statistics over clients, runs, datasets and algorithms: pure functions of numbers.

A missing or non-finite number is not skipped. Results that depend on it are NaN, or an error gives the reason. Only
:func:`paired` leaves out seeds without one of two values. A table of :func:`ranks` has one row for each algorithm and
one column for each block (a dataset, or a seed). The imports of scipy are local: it is slow, and a run goes without.

>>> for gap in (math.nan, math.inf):
...     values = [1.0, gap, 2.0]
...     found = combine(values, [1, 0, 1]), fairness(values), incentive([1, 2, 3], values, [0, 0, 0], True)
...     print(*found, *mean_interval(values))
nan nan nan nan nan nan
nan nan nan nan nan nan

Each kind of interval in this project has one home. Use

* :func:`mean_interval` for a mean over seeds, datasets or pairs of runs;
* :func:`stratified_mean` for a mean over samples of clients, whose patients stay together;
* :func:`share_interval` for a share of trials, with :func:`design_effect` if they come in groups;
* :func:`paired` for the gain of one algorithm over others, over seeds, all together;
* :func:`simultaneous` for the arms of a race, all arms together;
* ``stability`` of :mod:`diagnostics.curve` for how often a decision stays over resamples;
* :mod:`diagnostics.null` for the band where clients that do not differ would lie;
* ``scatter_ratio`` of :mod:`diagnostics.representation.features` for the error of a ratio, by a jackknife;
* :mod:`diagnostics.label_shift` for the shift of labels that chance gives;
* :mod:`diagnostics.plots.maps` for the band of a layer map;
* :mod:`diagnostics.tuning.profile` for the share that one layer recovers;
* ``median_interval`` of :mod:`figures.verdicts` for a median of papers' or benchmarks' numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.errors import INSIDE, UsageError, check_value
from fl_core.seeds import numpy_generator

LEVEL = 0.95
"""The confidence level of every interval, unless an argument names another."""
TAILS = (0.025, 0.975)
"""The quantiles at the ends of an interval at :data:`LEVEL`."""
SIGNIFICANCE = 0.05
"""The largest p-value at which a difference counts as significant."""

Values: TypeAlias = Sequence[float] | NDArray[np.floating[Any]] | pd.Series


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval, by default at 95 %. Ends that cannot be computed are NaN."""

    value: float
    low: float
    high: float

    def columns(self, name: str) -> dict[str, float]:
        """Return the value and its ends under the names of three columns of a table."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


UNKNOWN = Interval(math.nan, math.nan, math.nan)


class Estimate(NamedTuple):
    """An estimated mean, its standard error and the degrees of freedom of Student's t.

    Error and degrees of freedom are NaN if the values show no spread. There is no interval then.
    """

    value: float
    error: float
    free: float

    @property
    def p_value(self) -> float:
        """Return the two-sided p-value for a mean of 0. It is 1 if the values show no spread."""
        from scipy.special import stdtr

        if math.isnan(self.error):
            return 1.0
        return float(2 * stdtr(self.free, -abs(self.value) / self.error))

    def interval(self, comparisons: int = 1, level: float = LEVEL) -> Interval:
        """Return Student's t interval. Its ends are NaN if the values show no spread.

        Args:
            comparisons: number of intervals that shall hold together at this level
                (Bonferroni).
            level: between 0 and 1.
        """
        from scipy.special import stdtrit

        half_width = (
            -float(stdtrit(self.free, (1 - level) / 2 / comparisons)) * self.error
        )
        return Interval(self.value, self.value - half_width, self.value + half_width)


def combine(values: Values, weights: Values) -> float:
    """Return the weighted mean of clients' values, sum_c p_c m_c with p_c = w_c / sum w.

    It is NaN if a value is missing or not finite, whatever its weight.

    >>> combine([1.0, 3.0], [1, 3]), combine([1.0, math.nan], [1, 3])
    (2.5, nan)

    Args:
        values: one for each client. A Series may have another order of clients than the
            weights' Series.
        weights: the clients' numbers of training samples, at least 0, not all 0.

    Raises:
        UsageError: lengths or clients differ, there are no values, a weight is negative
            or not finite, or the weights sum to 0.
    """
    m, w = _align(values=values, weights=weights)
    if not (np.isfinite(w).all() and (w >= 0).all() and w.sum() > 0):
        raise UsageError(
            f"weights must be finite, at least 0, and not all 0; got {w.tolist()}. Leave out clients without samples."
        )
    if _whole(m):
        return float((w / w.sum()) @ m)
    return math.nan


def mean_interval(
    values: Values, comparisons: int = 1, level: float = LEVEL
) -> Interval:
    """Return the mean with Student's t interval, mean -+ t(p, n - 1) s / sqrt(n). One value has no interval (NaN).

    If a value is missing or not finite, the mean and the ends are NaN.

    This is the interval for any number of blocks. With 4 to 36 normal values it covers the mean in 95 %. A percentile
    bootstrap covers it in 80 % with 4 values, 85 % with 6, 93 % with 24. Skewed values lower both.

    Here p is (1 + level) / 2, 0.975 by default. At level 0.9 each end is a one-sided 95 % bound. Two one-sided tests of
    an equivalence need this.

    The interval is that of SciPy's t-test. Two values 1 apart have a half width of
    t(0.975, 1) / 2 = 12.7062 / 2:

    >>> values = [2, 4, 4, 4, 5, 5, 7, 9]
    >>> [round(end, 4) for end in mean_interval(values)]
    [5.0, 3.2125, 6.7875]
    >>> from scipy import stats
    >>> [round(float(end), 4) for end in stats.ttest_1samp(values, 0).confidence_interval()]
    [3.2125, 6.7875]
    >>> [round(end, 4) for end in mean_interval([0, 1])]
    [0.5, -5.8531, 6.8531]

    Args:
        values: one for each block, such as a seed.
        comparisons: number of intervals that shall hold together at this level (Bonferroni). It divides 1 - p.
        level: between 0 and 1.

    Raises:
        UsageError: there are no values, or the level is not between 0 and 1.
    """
    (x,) = _align(values=values)
    check_value("level", level, INSIDE)
    mean = math.nan
    if _whole(x):
        mean = float(x.mean())
    if len(x) < 2 or not _whole(x):
        return Interval(mean, math.nan, math.nan)
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(x) - 1, 1 - (1 - (1 + level) / 2) / comparisons))
    half_width = quantile * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(mean, mean - half_width, mean + half_width)


def paired(scores: pd.DataFrame, pairs: Sequence[tuple[Any, Any]]) -> pd.DataFrame:
    """Return the differences of pairs of columns, with simultaneous 95 % intervals.

    The intervals are those of :func:`mean_interval`, with Bonferroni's correction for
    the number of pairs. Their ends are NaN for a single seed, and if all differences
    are equal. Without a seed the difference is NaN, too.

    Args:
        scores: a row for each seed, a column for each thing that is compared. A seed without one of two values is left
            out.
        pairs: names of two columns each.

    Returns:
        A line for each pair, first column minus second: ``value``, ``low``, ``high``
        and the number of seeds ``n``.
    """
    rows = []
    for column_a, column_b in pairs:
        gain = (scores[column_a] - scores[column_b]).dropna()
        interval = UNKNOWN
        if len(gain):
            interval = mean_interval(gain, comparisons=len(pairs))
        if interval.low == interval.high:  # no spread, no claim
            interval = Interval(interval.value, math.nan, math.nan)
        rows.append((*interval, len(gain)))
    return pd.DataFrame(rows, columns=["value", "low", "high", "n"])


def halves(
    groups: NDArray[Any], strata: NDArray[np.int64] | None = None, seed: int = 0
) -> NDArray[np.int64]:
    """Split the samples of a federation into two random halves, and return the half of each, 0 or 1.

    A fit on one half is scored on the other. Each stratum is split separately (:func:`halves_of_one`), so that a site
    splits its client's samples as one machine splits those of all.

    >>> halves(np.array([5, 5, 6, 7, 7, 8]), np.array([0, 0, 0, 1, 1, 1])).tolist()
    [0, 0, 1, 1, 1, 0]
    >>> len({tuple(halves(np.arange(13), seed=seed)) for seed in range(20)})
    20
    >>> halves(np.zeros(5))
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: samples to halve must have groups in both halves; got one half alone. Add samples.

    Args:
        groups: the group of each sample; without groups the number of each sample.
        strata: the client's number of each sample. A group belongs to one stratum. None
            means one client for all.
        seed: the seed of the draw.

    Raises:
        UsageError: all groups are in one half, such as a single one.
    """
    if strata is None:
        strata = np.zeros(len(groups), dtype=np.int64)
    half = np.zeros(len(groups), dtype=np.int64)
    for number in np.unique(strata):
        in_stratum = strata == number
        half[in_stratum] = halves_of_one(groups[in_stratum], int(number), seed)
    if len(np.unique(half)) < 2:
        raise UsageError(
            "samples to halve must have groups in both halves; got one half alone. Add samples."
        )
    return half


def halves_of_one(
    groups: NDArray[Any], number: int, seed: int = 0
) -> NDArray[np.int64]:
    """Split a client's samples into two random halves, and return the half of each, 0 or 1.

    A group, such as a patient, stays whole. The halves differ by at most one group. With an odd number of groups, half
    0 of a client with an even number has one more, and half 1 of other clients. So clients with a single sample are
    divided, too. The split depends on the order of the groups' names, the client's number and the seed.

    >>> [halves_of_one(np.array([3]), number).tolist() for number in range(3)]
    [[0], [1], [0]]

    Args:
        groups: the group of each sample; without groups the number of each sample.
        number: the client's number, from 0.
        seed: the seed of the draw.
    """
    distinct_groups, group = np.unique(groups, return_inverse=True)
    order = numpy_generator(seed, "halves", number).permutation(len(distinct_groups))
    half = np.empty(len(distinct_groups), dtype=np.int64)
    half[order] = (np.arange(len(distinct_groups)) + number) % 2
    return half[group]


def stratified_mean(
    values: NDArray[np.floating[Any]],
    weights: NDArray[np.floating[Any]] | None = None,
    groups: NDArray[Any] | None = None,
    strata: NDArray[Any] | None = None,
) -> Estimate:
    """Return the weighted mean of samples, such as paired differences, with a standard error over their groups.

    A group, such as a patient, is one draw. Each stratum, such as a client, keeps its share. The variance is the sum
    over strata of n / (n - 1) times the squared weighted deviations of its n draws from its mean. Strata of a single
    draw have no spread, so they are pooled to one stratum. A lone one joins the stratum with the fewest draws. The
    degrees of freedom are Welch's (1947), at most the sum of n - 1 over strata. Equal values have no spread.

    >>> found = stratified_mean(np.array([1.0, 3.0, 2.0, 2.0]), strata=np.array([0, 0, 1, 1]))
    >>> found.value, found.error, found.free
    (2.0, 0.5, 1.0)
    >>> values = np.arange(9.0) ** 2
    >>> alone, joined = np.repeat([1, 2, 3], [5, 3, 1]), np.repeat([1, 2], [5, 4])
    >>> stratified_mean(values, strata=alone) == stratified_mean(values, strata=joined)
    True

    The error is NaN without a spread: for one value, equal values, or one group.

    >>> some = (np.array([0.2]), None), (np.full(6, 0.1), None), (np.arange(3.0), np.array([7, 7, 7]))
    >>> found = [stratified_mean(each, groups=groups) for each, groups in some]
    >>> [(each.error, each.interval().low, each.p_value) for each in found]
    [(nan, nan, 1.0), (nan, nan, 1.0), (nan, nan, 1.0)]

    Args:
        values: a number for each sample, [n] with n at least 1.
        weights: at least 0, not all 0; equal by default.
        groups: the group of each sample, within its stratum. Every sample is one by default.
        strata: the stratum of each sample. There is one by default.
    """
    n = len(values)
    if weights is None:
        weights = np.ones(n)
    weights = weights / weights.sum()
    stratum = np.zeros(n, int)
    if strata is not None:
        stratum = np.unique(strata, return_inverse=True)[1]
    group = np.arange(n)
    if groups is not None:
        group = np.unique(groups, return_inverse=True)[1]
    _, first_samples, draw_of_sample = np.unique(
        stratum * n + group, return_index=True, return_inverse=True
    )
    stratum = stratum[first_samples]
    stratum = _pool_single(stratum, np.bincount(stratum))
    mean = float(weights @ values)
    sums = np.bincount(draw_of_sample, weights * (values - mean))
    shares = np.bincount(draw_of_sample, weights)
    stratum_shares = np.bincount(stratum, shares)
    centres = np.divide(
        np.bincount(stratum, sums),
        stratum_shares,
        out=np.zeros_like(stratum_shares),
        where=stratum_shares > 0,
    )
    deviations = sums - shares * centres[stratum]
    draws = np.bincount(stratum)
    squares = np.bincount(stratum, deviations**2)
    return _of_strata(mean, draws, squares, 1e-12 * float(np.abs(values).max()))


class GroupSums(NamedTuple):
    """Sums over the groups of each stratum, from which a weighted mean and its error follow.

    Every attribute has one number for each stratum, float64.

    Attributes:
        draws: the number of groups.
        share: the sum of weights.
        total: the sum of weighted values.
        shares: the sum over groups of their squared weights.
        squares: the sum over groups of their squared weighted values.
        products: the sum over groups of their weight times their weighted value.
    """

    draws: NDArray[np.float64]
    share: NDArray[np.float64]
    total: NDArray[np.float64]
    shares: NDArray[np.float64]
    squares: NDArray[np.float64]
    products: NDArray[np.float64]


def mean_of_sums(sums: GroupSums) -> Estimate:
    """Return :func:`stratified_mean` from sums over groups alone, for samples that are on another machine.

    The weights need not sum to 1. The error can differ in the last digits.

    >>> groups = np.array([[0.5, 0.25], [1.5, 0.25]]).T  # the weighted values of two groups, in two strata
    >>> weight = np.full((2, 2), 0.25)
    >>> given = [(weight).sum(0), groups.sum(0), (weight**2).sum(0), (groups**2).sum(0), (weight * groups).sum(0)]
    >>> found = mean_of_sums(GroupSums(np.array([2.0, 2.0]), *given))
    >>> plain = stratified_mean(np.array([2.0, 1.0, 6.0, 1.0]), strata=np.array([0, 0, 1, 1]))
    >>> found.value == plain.value, round(found.error - plain.error, 12), round(found.free - plain.free, 12)
    (True, 0.0, 0.0)
    """
    weight = float(sums.share.sum())
    stratum = _pool_single(np.arange(len(sums.draws)), sums.draws.astype(np.int64))
    draws, share, total, shares, squares, products = (
        np.bincount(stratum, sums_of_stratum) for sums_of_stratum in sums
    )
    centre = total / share
    deviations = squares - 2 * centre * products + centre**2 * shares
    least_error = 1e-7 * math.sqrt(float(squares.sum())) / weight  # of rounding
    mean = float(total.sum()) / weight
    return _of_strata(mean, draws, deviations.clip(min=0) / weight**2, least_error)


def _of_strata(
    mean: float,
    draws: NDArray[Any],
    squares: NDArray[Any],
    least: float,
) -> Estimate:
    """Return the estimate of strata with these numbers of draws and sums of squared deviations.

    Error and degrees of freedom are NaN if the values are equal, or a stratum has a
    single draw.

    Args:
        mean: the weighted mean of all samples.
        draws: the number of draws of each stratum.
        squares: the sum of squared weighted deviations of each stratum's draws.
        least: a standard error up to this size counts as that of equal values.
    """
    degrees = draws - 1
    if not degrees.all():
        return Estimate(mean, math.nan, math.nan)
    variances = draws / degrees * squares
    variance = float(variances.sum())
    if not math.sqrt(variance) > least:
        return Estimate(mean, math.nan, math.nan)
    welch = variance**2 / float((variances**2 / (degrees + 2)).sum()) - 2
    return Estimate(mean, math.sqrt(variance), min(welch, float(degrees.sum())))


def mean_over_seeds(
    differences: NDArray[np.floating[Any]],
    sampled: Estimate,
    pooled: Estimate,
    overlap: float = 1.0,
) -> Estimate:
    """Return the mean over seeds of paired differences, with the variance over seeds and that over samples.

    The variance over few seeds is estimated poorly. So it is averaged with the pooled
    one, each weighted by its degrees of freedom. It is at least the variance over the
    samples that seeds do not share. The variance over shared samples is added once. The
    degrees of freedom are Welch's (1947). One seed has the variance over samples alone,
    so its result holds for that run only. Error and degrees of freedom are NaN if
    nothing varies.

    >>> pooled = Estimate(0.0, 0.2, 6.0)
    >>> found = mean_over_seeds(np.array([0.3, 0.5, 0.4]), Estimate(0.4, 0.1, 80.0), pooled, overlap=0.5)
    >>> round(found.value, 1), round(found.error, 3), round(found.free, 1)
    (0.4, 0.126, 12.6)

    Args:
        differences: one for each seed, at least one.
        sampled: an estimate whose ``error`` is that over the samples of one seed.
        pooled: an estimate whose ``error`` is the standard deviation of such differences over seeds, pooled over all
            pairs.
        overlap: the share of samples that two seeds have in common, 0 to 1.
    """
    n, mean = len(differences), float(differences.mean())
    if n == 1:
        return sampled._replace(value=mean)
    sample_variance = 0.0 if math.isnan(sampled.error) else sampled.error**2
    seed_variance = float(differences.var(ddof=1))
    n_degrees = pooled.free + n - 1
    pooled_variance = (
        pooled.free * pooled.error**2 + (n - 1) * seed_variance
    ) / n_degrees
    variances = (
        max(pooled_variance, (1 - overlap) * sample_variance) / n,
        overlap * sample_variance,
    )
    variance = sum(variances)
    if not math.sqrt(variance) > 1e-12 * float(np.abs(differences).max()):
        return Estimate(mean, math.nan, math.nan)
    denominator = variances[0] ** 2 / pooled.free
    if variances[1]:
        denominator += variances[1] ** 2 / sampled.free
    return Estimate(mean, math.sqrt(variance), variance**2 / denominator)


def _pool_single(
    stratum: NDArray[np.int64], draws: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Pool the strata of a single draw, and return the new stratum of each entry.

    They become one stratum. A lone one joins the stratum with the fewest draws instead. New
    strata are numbered from 0.

    Args:
        stratum: the stratum of each entry, a position in ``draws``, int64 [n].
        draws: the number of draws of each stratum, int64.
    """
    single_strata = np.flatnonzero(draws == 1)
    target = single_strata[0] if len(single_strata) else 0
    if len(single_strata) == 1 and len(draws) > 1:
        target = np.where(draws > 1, draws, draws.sum() + 1).argmin()
    pooled_stratum = np.where(np.isin(stratum, single_strata), target, stratum)
    return np.unique(pooled_stratum, return_inverse=True)[1]


def simultaneous(estimates: Sequence[Estimate]) -> pd.DataFrame:
    """Return differences with simultaneous intervals and p-values.

    P-values are corrected by Holm, and intervals by Bonferroni. An interval that disagrees with its p-value ends at 0.

    Args:
        estimates: all differences that are compared. One without a spread has p-value 1 and no interval.

    Returns:
        A row for each estimate, in order: ``difference``, ``low``, ``high`` and
        ``p_value``.
    """
    intervals = [estimate.interval(len(estimates)) for estimate in estimates]
    table = pd.DataFrame(intervals, columns=["difference", "low", "high"], dtype=float)
    table["p_value"] = holm([estimate.p_value for estimate in estimates])
    is_significant = table["p_value"] <= SIGNIFICANCE
    contains_zero = (table["low"] <= 0) & (table["high"] >= 0)
    for end, sign in (("low", 1), ("high", -1)):
        disagrees = (is_significant == contains_zero) & (sign * table["difference"] > 0)
        table[end] = table[end].mask(disagrees, 0.0)
    return table


def holm(p_values: Values) -> NDArray[np.float64]:
    """Return p-values corrected for their number by Holm's procedure (Holm, 1979); with a NaN among them all are NaN.

    >>> holm([0.01, 0.04, 0.03]).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    order = p.argsort(kind="stable")
    adjusted = np.empty_like(p)
    raised_p = p[order] * np.arange(len(p), 0, -1)
    adjusted[order] = np.maximum.accumulate(raised_p).clip(max=1.0)
    if np.isnan(p).any():
        return np.full_like(p, np.nan)
    return adjusted


def design_effect(values: NDArray[Any], groups: NDArray[Any]) -> float:
    """Return the factor by which groups, such as patients, raise the variance of a mean, at least 1 (Kish, 1965).

    It is the sum of the groups' squared sums of deviations, divided by the sum of squared deviations. If all values are
    equal, it is the mean size of a group.

    >>> design_effect(np.repeat([1.0, 0.0], 50), np.arange(100) // 10), design_effect(np.arange(4), np.arange(4))
    (10.0, 1.0)

    Args:
        values: a number for each sample.
        groups: the group of each sample.
    """
    group = np.unique(groups, return_inverse=True)[1]
    deviations = values - np.mean(values)
    total_squares = float((deviations**2).sum())
    if not total_squares:
        return len(values) / (group.max() + 1)
    sums = np.bincount(group, weights=deviations)
    return max(1.0, float((sums**2).sum()) / total_squares)


def share_interval(successes: int, trials: int, effect: float = 1.0) -> Interval:
    """Return a share, 0 to 1, with Wilson's 95 % interval (Wilson, 1927). For dependent trials it is too narrow.

    An ``effect`` above 1 widens it for them.

    >>> [round(end, 2) for end in share_interval(8, 15)]
    [0.53, 0.3, 0.75]

    Args:
        successes: number of trials that succeeded.
        trials: number of trials.
        effect: the :func:`design_effect` of groups of trials. The number of trials is
            divided by it.

    Raises:
        UsageError: there are no trials, or more successes than trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise UsageError(
            f"successes must be from 0 to the number of trials, at least 1; got {successes} of {trials}."
        )
    z = NormalDist().inv_cdf(TAILS[1])
    n = trials / effect
    share = successes / trials
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half_width = (
        z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2) / (1 + z**2 / n)
    )
    return Interval(share, max(0.0, centre - half_width), min(1.0, centre + half_width))


def fairness(values_per_client: Values) -> float:
    """Return the population variance over clients, (1/C) sum_c (P_c - mean P)^2 (PLayer-FL, Eq. A.5). Lower is fairer.

    It is NaN if a value is missing or not finite.

    >>> fairness([1.0, 3.0]), fairness([2.0, 2.0])
    (1.0, 0.0)

    Raises:
        UsageError: there are no values.
    """
    (x,) = _align(values_per_client=values_per_client)
    if _whole(x):
        return float(x.var())
    return math.nan


def incentive(
    personal: Values, local: Values, fedavg: Values, higher_is_better: bool
) -> float:
    """Return the fraction of clients, 0 to 1, that do strictly better than with local training and than with FedAvg.

    The formula is (1/C) sum_c 1{P_c > max(S_c, G_c)} (PLayer-FL, Eq. A.6). It has < and min if lower is better. A tie
    does not count. The result is NaN if any value is missing. Series must have the same clients in their index, in any
    order.

    >>> personal, local = pd.Series({"a": 1.0, "b": 5.0}), pd.Series({"b": 2.0, "a": 2.0})
    >>> incentive(personal, local, 0 * local, True)
    0.5
    >>> incentive(personal, local.drop("a"), local, True)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: ...same clients...

    Args:
        personal: the score of each client's model by the algorithm.
        local: the score of each client's model by local training.
        fedavg: the score of FedAvg's model at each client.
        higher_is_better: whether a higher score is better.

    Raises:
        UsageError: there are no values, or the clients differ.
    """
    p, s, g = _align(personal=personal, local=local, fedavg=fedavg)
    if not (_whole(p) and _whole(s) and _whole(g)):
        return math.nan
    is_better = (p > np.maximum(s, g)) if higher_is_better else (p < np.minimum(s, g))
    return float(is_better.mean())


def ranks(table: pd.DataFrame, higher_is_better: bool) -> pd.Series:
    """Return each algorithm's mean rank over the blocks. 1 is best, and ties share the mean of their ranks.

    Args:
        table: algorithms (rows) by datasets or seeds (columns).
        higher_is_better: whether a higher value is better.

    >>> import pandas as pd
    >>> table = pd.DataFrame([[0.9, 0.7], [0.8, 0.7], [0.1, 0.2]], index=list("abc"))
    >>> ranks(table, higher_is_better=True).tolist(), ranks(-table, False).tolist()
    ([1.25, 1.75, 3.0], [1.25, 1.75, 3.0])

    Raises:
        UsageError: the table is empty, or a value is missing, so that ranks do not compare.
    """
    if status := incomplete(table):
        raise UsageError(f"no ranks: {status}")
    return (
        table.astype(float)
        .rank(axis=0, method="average", ascending=not higher_is_better)
        .mean(axis=1)
    )


def _align(**values_by_name: Values) -> list[NDArray[np.float64]]:
    """Return values as float64 vectors of equal length (at least 1).

    Series are put in the order of the first Series' index.

    Raises:
        UsageError: lengths differ, there are no values, or Series have other or
            repeated clients.
    """
    order: pd.Index | None = None
    vectors = []
    for name, values in values_by_name.items():
        if isinstance(values, pd.Series):
            if order is None:
                order = values.index
            if not values.index.is_unique or set(values.index) != set(order):
                first_name = next(iter(values_by_name))
                raise UsageError(
                    f"{name} must be of the same clients as {first_name}, each once; got others."
                )
            values = values.loc[order].to_numpy(float, na_value=math.nan)
        vectors.append(np.asarray(values, dtype=float))
    lengths = {
        name: vector.shape for name, vector in zip(values_by_name, vectors, strict=True)
    }
    if any(vector.ndim != 1 for vector in vectors) or len(set(lengths.values())) > 1:
        raise UsageError(f"values must be vectors of one length; got shapes {lengths}.")
    if len(vectors[0]) == 0:
        first_name = next(iter(values_by_name))
        raise UsageError(f"{first_name} must have values; got none.")
    return vectors


def incomplete(table: pd.DataFrame) -> str:
    """Return why :func:`ranks` refuses a table: it is empty, or a value is missing. Return "" if it can be ranked."""
    if table.empty:
        return "the table is empty"
    is_missing = ~np.isfinite(table.to_numpy(float, na_value=math.nan))
    if is_missing.any():
        row, column = np.argwhere(is_missing)[0]
        name = table.columns.name or ""
        block = f"{name} {table.columns[column]}".strip()
        return f"no finite value for {table.index[row]} in {block} ({int(is_missing.sum())} missing)"
    return ""


def _whole(values: NDArray[np.float64]) -> bool:
    return bool(np.isfinite(values).all())
