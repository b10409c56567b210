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
from tests.fl_core.made import DEMSAR


def test_median_interval():
    x = np.random.default_rng(0).permutation(21).astype(float)
    found = median_interval(x)
    assert found == (
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


# Demsar, Statistical Comparisons of Classifiers over Multiple Data Sets, 2006, Table 6: AUC of C4.5 with a tuned
# minimum leaf size (m), confidence (cf), or both, on 14 datasets. Its ranks on the last but one come from more digits
# than it prints: 0.975 of cf is ahead of 0.975 of both.


def test_friedman_on_demsars_example():
    assert statistics.ranks(DEMSAR, True).round(3).tolist() == [
        3.143,
        2.000,
        2.893,
        1.964,
    ]
    found = friedman(DEMSAR)
    assert found.status == "ok"
    assert (found.n_algorithms, found.n_blocks) == (4, 14)
    # the printed value has no correction for ties: of 840 = 14 * (4**3 - 4), the tied values' count**3 - count are 78
    assert found.statistic * (1 - 78 / 840) == pytest.approx(9.28, abs=0.005)
    assert found.p_value == pytest.approx(stats.chi2.sf(found.statistic, 3), rel=1e-12)


def test_friedman_says_why_there_is_no_value():
    for rows, says in (
        ([[1.0, 2.0], [2.0, 1.0]], "3 algorithms.*2"),
        ([[1.0], [2.0], [3.0]], "2 datasets.*1"),
        ([[1.0, 2.0]] * 3, "tied"),
        ([[1.0, 2.0], [math.nan, 1.0], [3.0, 3.0]], "A1 in D0"),
    ):
        found = friedman(
            pd.DataFrame(rows).rename(index="A{}".format, columns="D{}".format)
        )
        assert re.search(says, found.status)
        assert np.isnan((found.statistic, found.p_value)).all()


def test_nemenyi_on_demsars_example():
    found = Ranking(DEMSAR, higher_is_better=True).nemenyi
    # the paper: no pair differs at 5 % (critical difference 1.25); at 10 % (1.12) C4.5 differs from m and from both
    assert found.to_numpy().min() > 0.05
    significant = found < 0.1
    assert {
        (a, b) for a in significant for b in significant if significant.loc[a, b]
    } == {
        pair
        for other in ("C4.5+m", "both")
        for pair in (("C4.5", other), (other, "C4.5"))
    }
