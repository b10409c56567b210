"""Halves and means of samples in groups and strata: the numbers by loops and by scipy, and how often 0 is left out."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fl_core import statistics

STRATA = np.repeat([4, 0, 7, 2, 9], [1, 1, 4, 12, 7])
GROUPS = np.repeat(np.arange(13), [1, 1, 1, 3, 5, 1, 2, 2, 2, 1, 1, 1, 4])


@pytest.mark.parametrize("seed", range(5))
def test_halves_divide_each_stratum_but_no_group(seed):
    half = statistics.halves(GROUPS, STRATA, seed)
    of_group = {int(group): set(half[group == GROUPS]) for group in GROUPS}
    assert all(len(halves) == 1 for halves in of_group.values())
    first = np.unique(GROUPS, return_index=True)[1]
    for number in set(STRATA):
        of_stratum = first[STRATA[first] == number]
        assert half[of_stratum].sum() == (len(of_stratum) + number % 2) // 2
        alone = statistics.halves_of_one(GROUPS[number == STRATA], int(number), seed)
        assert (half[number == STRATA] == alone).all()
    order = np.random.default_rng(seed).permutation(len(GROUPS))
    assert (half[order] == statistics.halves(GROUPS[order], STRATA[order], seed)).all()
    alone = statistics.halves(np.arange(9), np.arange(9), seed)
    assert alone.sum() == 4


def by_loops(values, weights, groups, strata):
    """Sum n / (n - 1) times the squared sums of groups, stratum by stratum; single draws are one stratum."""
    weights = weights / weights.sum()
    draws = {s: set(groups[strata == s]) for s in set(strata)}
    single = [s for s, numbers in draws.items() if len(numbers) == 1]
    parts = [np.isin(strata, single)] if single else []
    parts += [strata == s for s in draws if s not in single]
    variance = bottom = free = 0.0
    for part in parts:
        centre = np.average(values[part], weights=weights[part])
        pairs = {*zip(strata[part], groups[part], strict=True)}
        sums = [
            sum(weights[k] * (values[k] - centre) for k in np.flatnonzero(one))
            for s, g in pairs
            for one in [(strata == s) & (groups == g)]
        ]
        own = len(sums) / (len(sums) - 1) * sum(deviation**2 for deviation in sums)
        variance, free = variance + own, free + len(sums) - 1
        bottom += own**2 / (len(sums) + 1)
    free = min(free, variance**2 / bottom - 2)
    return weights @ values, math.sqrt(variance), free


@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_that_of_loops(seed):
    draw = np.random.default_rng(seed)
    values, weights = draw.normal(size=25), draw.random(25)
    estimate = statistics.stratified_mean(values, weights, GROUPS, STRATA)
    assert estimate == pytest.approx(by_loops(values, weights, GROUPS, STRATA))


def test_one_stratum_or_one_sample_a_stratum_is_students_test():
    values = np.random.default_rng(0).normal(0.3, 1, 12)
    expected = stats.ttest_1samp(values, 0)
    grouped = (np.repeat(values, 5), None, np.repeat(np.arange(12), 5))
    for arguments in ((values,), (values, None, None, np.arange(12)), grouped):
        estimate = statistics.stratified_mean(*arguments)
        assert estimate.free == pytest.approx(11)
        assert estimate.p_value == pytest.approx(expected.pvalue)
        wide = estimate.interval(level=0.9)
        assert wide[1:] == pytest.approx(tuple(expected.confidence_interval(0.9)))
        together = statistics.mean_interval(values, comparisons=6)
        assert estimate.interval(6) == pytest.approx(together)


def test_gains_are_paired_by_seed_with_intervals_that_hold_together():
    scores = pd.DataFrame(
        {"none": [0.5, 0.6, 0.4], "one": [0.6, 0.8, 0.7], "two": [0.5, 0.5, 0.5]}
    )
    gains = statistics.paired(scores, [("one", "none"), ("two", "none")])
    half = stats.t.ppf(1 - 0.025 / 2, 2) * 0.1 / math.sqrt(3)
    expected = [0.2, 0.2 - half, 0.2 + half, 3]
    assert gains.iloc[0].tolist() == pytest.approx(expected)
