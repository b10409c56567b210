"""Differences of all pairs of rows: the numbers by hand and by scipy, and how often equal rows are called worse."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fl_core import statistics

RACES = 4_000
ERROR = 3 * (0.05 * 0.95 / RACES) ** 0.5
"""Three standard errors of a simulated rate of 5 %."""
Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]
HEART = [
    [983, 437, 707, 186],
    [437, 917, 765, 145],
    [707, 765, 1083, 124],
    [186, 145, 124, 1679],
]
"""Covariance over 22 seeds of the default arms' macro-F1 on Fed-Heart's validation samples, times 1e6."""


def normal(*spreads):
    return lambda draw, size: draw.normal(size=size) * np.array(spreads)[:, None]


def together(covariance):
    root = np.linalg.cholesky(covariance)
    return lambda draw, size: root @ draw.normal(size=size)


def correlated(rho, *spreads):
    return together(
        np.outer(spreads, spreads) * (rho + (1 - rho) * np.eye(len(spreads)))
    )


def heavy(*spreads):
    return lambda draw, size: draw.standard_t(3, size=size) * np.array(spreads)[:, None]


SHAPES = {
    "equal": normal(0.02, 0.02, 0.02, 0.02),
    "one loud": normal(0.005, 0.005, 0.005, 0.08),
    "seven": normal(0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06),
    "correlated, mixed": correlated(0.7, 0.005, 0.01, 0.03, 0.06),
    "heart": together(np.array(HEART) * 1e-6),
    "t3, one loud": heavy(0.005, 0.005, 0.005, 0.08),
    "skewed": lambda draw, size: 0.02 * draw.exponential(size=size),
}


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_no_worse_is_called_worse_in_at_most_one_of_twenty(shape, seeds):
    """Also where one or two of the others are clearly worse, which takes comparisons out of Holm's correction."""
    draw = np.random.default_rng(seeds)
    rows = 7 if shape == "seven" else 4
    for worse in (0, 1, 2):
        truth = np.arange(rows) < worse
        values = SHAPES[shape](draw, (RACES, rows, seeds)) - truth[:, None]
        found = statistics.pairwise(values)
        claimed = (found.p_value <= 0.05) & (found.difference < 0)
        wrong = claimed & (truth[:, None] <= truth[None, :])
        assert wrong.any(axis=(1, 2)).mean() <= 0.05 + ERROR


def test_each_pair_has_its_own_spread_and_holms_correction():
    values = np.random.default_rng(1).normal(
        [[0.9], [0.5], [0.4]], [[0.01], [0.01], [0.3]], (3, 5)
    )
    found = statistics.pairwise(values)
    pairs = [(0, 1), (0, 2), (1, 2)]
    p = {
        pair: stats.ttest_rel(values[pair[0]], values[pair[1]]).pvalue for pair in pairs
    }
    expected, least = {}, 0.0
    for rank, pair in enumerate(sorted(pairs, key=lambda one: p[one])):
        least = expected[pair] = max(least, min(1.0, p[pair] * (3 - rank)))
    for i, j in pairs:
        difference = values[i] - values[j]
        assert (
            found.p_value[i, j] == found.p_value[j, i] == pytest.approx(expected[i, j])
        )
        assert (
            found.difference[i, j]
            == -found.difference[j, i]
            == pytest.approx(difference.mean())
        )
        half = stats.t.ppf(1 - 0.025 / 3, 4) * difference.std(ddof=1) / np.sqrt(5)
        low = difference.mean() - half
        assert (
            found.low[i, j]
            == -found.high[j, i]
            == pytest.approx(max(low, 0) if expected[i, j] <= 0.05 else low)
        )
