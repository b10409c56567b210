"""Friedman's and Nemenyi's tests on Demsar's example, and intervals of medians."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from figures.ranking import Ranking, friedman
from figures.verdicts import median_interval
from fl_core import statistics

# Demsar, Statistical Comparisons of Classifiers over Multiple Data Sets, 2006, Table 6: AUC of C4.5 with a tuned
# minimum leaf size (m), confidence (cf), or both, on 14 datasets. Its ranks on the last but one come from more digits
# than it prints: 0.975 of cf is ahead of 0.975 of both.
DEMSAR = pd.DataFrame({
    "C4.5": [0.763, 0.599, 0.954, 0.628, 0.882, 0.936, 0.661, 0.583, 0.775, 1.0, 0.94, 0.619, 0.972, 0.957],
    "C4.5+m": [0.768, 0.591, 0.971, 0.661, 0.888, 0.931, 0.668, 0.583, 0.838, 1.0, 0.962, 0.666, 0.981, 0.978],
    "C4.5+cf": [0.771, 0.59, 0.968, 0.654, 0.886, 0.916, 0.609, 0.563, 0.866, 1.0, 0.965, 0.614, 0.9751, 0.946],
    "both": [0.798, 0.569, 0.967, 0.657, 0.898, 0.931, 0.685, 0.625, 0.875, 1.0, 0.962, 0.669, 0.975, 0.97],
}).T  # fmt: skip


def test_median_interval():
    x = np.random.default_rng(0).permutation(21).astype(float)
    result = median_interval(x)
    assert result == (
        10.0,
        5.0,
        15.0,
    )  # the 6th least and the 6th greatest: Table A of Conover's textbook
    assert median_interval(x, level=0.99)[1:3] == (4.0, 16.0)
    for n in range(1, 6):
        value, *interval = median_interval(range(n))
        assert value == (n - 1) / 2
        assert np.isnan(interval).all()
    assert median_interval(range(5), level=0.9)[1:] == (0.0, 4.0)
    assert np.isnan(median_interval([1.0, math.nan, 2.0])).all()


def test_friedman_on_demsars_example():
    assert statistics.ranks(DEMSAR, True).round(3).tolist() == [
        3.143,
        2.000,
        2.893,
        1.964,
    ]
    result = friedman(DEMSAR)
    assert result.status == "ok"
    assert (result.n_algorithms, result.n_blocks) == (4, 14)
    # the printed value has no correction for ties: of 840 = 14 * (4**3 - 4), the tied values' count**3 - count are 78
    assert result.statistic * (1 - 78 / 840) == pytest.approx(9.28, abs=0.005)
    assert result.p_value == pytest.approx(
        stats.chi2.sf(result.statistic, 3), rel=1e-12
    )


def test_friedman_says_why_there_is_no_value():
    for rows, says in (
        ([[1.0, 2.0], [2.0, 1.0]], "3 algorithms.*2"),
        ([[1.0], [2.0], [3.0]], "2 datasets.*1"),
        ([[1.0, 2.0]] * 3, "tied"),
        ([[1.0, 2.0], [math.nan, 1.0], [3.0, 3.0]], "A1 in D0"),
    ):
        result = friedman(
            pd.DataFrame(rows).rename(index="A{}".format, columns="D{}".format)
        )
        assert re.search(says, result.status)
        assert np.isnan((result.statistic, result.p_value)).all()


def test_nemenyi_on_demsars_example():
    p_values = Ranking(DEMSAR, higher_is_better=True).nemenyi
    # the paper: no pair differs at 5 % (critical difference 1.25); at 10 % (1.12) C4.5 differs from m and from both
    assert p_values.to_numpy().min() > 0.05
    significant = p_values < 0.1
    assert {
        (a, b) for a in significant for b in significant if significant.loc[a, b]
    } == {
        pair
        for other in ("C4.5+m", "both")
        for pair in (("C4.5", other), (other, "C4.5"))
    }
