"""Verdicts: shares of single curves, medians' intervals against ranges, equivalence by two one-sided tests."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from figures.differences import Difference, difference, joint
from figures.items import Finding, set_apart
from figures.verdicts import median_ends, of_curves, of_ranges
from fl_core.errors import UsageError
from fl_core.statistics import RANGE_BELOW, mean_interval, median_interval, share_interval


def test_wilsons_interval_is_scipys() -> None:
    for successes, trials in ((0, 3), (3, 3), (7, 15), (29, 30)):
        known = stats.binomtest(successes, trials).proportion_ci(method="wilson")
        assert share_interval(successes, trials) == pytest.approx((successes / trials, known.low, known.high))
    with pytest.raises(UsageError, match="4 of 3 is no share"):
        share_interval(4, 3)


def test_few_values_have_a_range_and_no_interval() -> None:
    x = pd.Series(np.random.default_rng(0).normal(size=RANGE_BELOW + 3))
    for n in range(1, RANGE_BELOW):
        assert median_interval(x[:n]).status != "ok"
        assert median_ends(x[:n]) == (x[:n].median(), x[:n].min(), x[:n].max())
    assert median_ends(x) == median_interval(x)[:3] == (x.median(), *x.sort_values().iloc[[1, -2]])


@pytest.mark.parametrize(("holding", "verdict"), [(15, True), (8, None), (7, None), (1, False)])
def test_the_share_of_single_curves_decides(holding: int, verdict: bool | None) -> None:
    curves = pd.DataFrame({k: [1.0, 2.0 if k < holding else 0.5] for k in range(15)}, index=["a", "b"])
    curves[15] = [np.nan, 1.0]
    said, held = of_curves(curves, lambda curve: curve["b"] > curve["a"])
    assert held is verdict
    assert f"in {holding} of 15 single curves (1 more without a value)" in said


@pytest.mark.parametrize(
    ("low", "high", "verdict", "said"),
    [(0, 9, True, "inside"), (3, 9, None, "undecided at b"), (8, 9, False, "outside at b")],
)
def test_medians_are_within_ranges_by_their_intervals(low: float, high: float, verdict: bool | None, said: str) -> None:
    values = pd.DataFrame([[1.0] * 9, [1.0, 2, 3, 4, 5, 5, 6, 6, 7]], index=["a", "b"])
    found = of_ranges(values, pd.Series({"a": 1.0, "b": low}), pd.Series({"a": 1.0, "b": high}))
    assert found[1] is verdict
    assert said in found[0]


def between(values: list[float]) -> Difference:
    return difference(pd.DataFrame([values, [0.0] * len(values)], index=["x", "y"]), "x", "y")


def test_an_equivalence_needs_two_one_sided_tests() -> None:
    near, wide, far = between([0.1, -0.1, 0.2, 0.0]), between([3.0, -4.0, 1.0]), between([5.0, 5.1, 4.9])
    assert [each.level(1.0) for each in (near, wide, far)] == [True, None, False]
    assert wide.how == "undecided"
    assert [far.no_lower(1.0), far.no_higher(1.0), between([0.0, 0.0]).level(1.0)] == [True, False, None]
    values = [0.3, 0.9, 0.2, 0.6]
    for margin in (0.4, 0.8, 1.2):
        p = max(
            stats.ttest_1samp(values, -margin, alternative="greater").pvalue,
            stats.ttest_1samp(values, margin, alternative="less").pvalue,
        )
        assert (between(values).level(margin) is True) == (p < 0.05)
    assert mean_interval(values, level=0.9).low > mean_interval(values).low
    assert [joint(each) for each in ([True, None], [None, False], [True], [])] == [None, False, True, None]


def test_not_comparable_goes_before_every_other_verdict() -> None:
    findings = [Finding("x", "y", held) for held in (True, False, None)]
    assert [each.verdict for each in findings] == ["held", "did not hold", "open"]
    assert {each.verdict for each in set_apart(findings, "other data")} == {"not comparable"}
    assert str(set_apart(findings, "other data")[0]) == "not comparable (other data): x. Measured: y."
    assert set_apart(findings, "") == tuple(findings)
