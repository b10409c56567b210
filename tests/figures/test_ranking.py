"""Tests after Friedman's, on Demsar's example and by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from figures import ranking
from fl_core import statistics
from tests.fl_core.test_evaluate import DEMSAR


def test_nemenyi_on_demsars_example():
    found = ranking.nemenyi(DEMSAR)
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


def test_holm_is_the_step_down_of_normal_tails():
    generator = np.random.default_rng(1)
    table = pd.DataFrame(
        generator.random((6, 9)) + 0.2 * np.arange(6)[:, None], index=list("abcdef")
    )
    found = ranking.holm(table, "c")
    ranks = table.rank(ascending=False).mean(axis=1)
    others = [name for name in table.index if name != "c"]
    p = {
        name: 2 * stats.norm.sf(abs(ranks[name] - ranks["c"]) / math.sqrt(6 * 7 / 54))
        for name in others
    }
    expected = statistics.holm(list(p.values()))
    assert found[others].to_numpy() == pytest.approx(expected, rel=1e-12)
    assert found["c"] == 1
    assert 0 < min(p.values()) < 0.01
