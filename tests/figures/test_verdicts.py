"""Verdicts: shares of seeds, medians' intervals against ranges, joint claims, evidence of what is not comparable."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from figures.differences import EVALUATIONS, difference, joint, settled
from figures.items import Finding, set_apart
from figures.papers import published
from figures.verdicts import (
    LEAD,
    LEVEL,
    MARGIN,
    NO_HIGHER,
    NO_LOWER,
    TRAIL,
    Odds,
    by_seed,
    judged,
    little_learned,
    of_parts,
    of_ranges,
    of_seeds,
    of_share,
    plain,
)
from fl_core.statistics import share_interval
from tests.conftest import refuses


def test_the_interval_of_a_share_is_wilsons():
    for successes, trials in ((0, 3), (3, 3), (7, 15), (29, 30)):
        ends = stats.binomtest(successes, trials).proportion_ci(method="wilson")
        interval = share_interval(successes, trials)
        assert interval == pytest.approx((successes / trials, *ends), abs=1e-12)
    with refuses("4 of 3"):
        share_interval(4, 3)


@pytest.mark.parametrize(
    ("holding", "verdict"), [(15, True), (8, None), (7, None), (1, False)]
)
def test_the_share_of_seeds_decides(holding, verdict):
    curves = pd.DataFrame(
        {k: [1.0, 2.0 if k < holding else 0.5] for k in range(15)}, index=["a", "b"]
    )
    curves[15] = [np.nan, 1.0]
    text, holds = of_seeds(curves, lambda curve: curve["b"] > curve["a"])
    assert holds is verdict
    assert f"in {holding} of 15 seeds (1 more without a value)" in text


def test_clients_of_a_seed_are_one_observation():
    columns = pd.MultiIndex.from_product([range(3), list("vwxyz")])
    curves = pd.DataFrame([[1.0] * 15, [2.0] * 15], index=["a", "b"], columns=columns)
    curves.loc["b", (0, "v")] = 0.0
    assert by_seed(curves).loc["b"].tolist() == [2.0] * 3
    _, holds = of_seeds(curves, lambda curve: curve["b"] > curve["a"])
    assert holds is None  # 15 curves would decide


@pytest.mark.parametrize(
    ("low", "high", "verdict", "said"),
    [
        (0, 9, True, "inside"),
        (3, 9, None, "undecided at b"),
        (8, 9, False, "outside at b"),
    ],
)
def test_medians_are_within_ranges_by_their_intervals(low, high, verdict, said):
    values = pd.DataFrame([[1.0] * 9, [1.0, 2, 3, 4, 5, 5, 6, 6, 7]], index=["a", "b"])
    ends = (pd.Series({"a": 1.0, "b": end}) for end in (low, high))
    text, holds = of_ranges(values, *ends)
    assert holds is verdict
    assert said in text


def between(values, printed=math.nan):
    both = pd.DataFrame([values, [0.0] * len(values)], index=["x", "y"])
    return replace(difference(both, "x", "y"), printed=printed)


def held(check=LEAD, **values):
    gaps = {name: between(values_of) for name, values_of in values.items()}
    return judged(gaps, check).held


def test_an_equivalence_needs_two_one_sided_tests():
    near, wide, far = [1e-3, -1e-3, 2e-3, 0], [0.03, -0.04, 0.01], [0.05, 0.051, 0.049]
    assert [held(LEVEL, x=values) for values in (near, wide, far)] == [
        True,
        None,
        False,
    ]
    assert [held(check, x=far) for check in (NO_LOWER, NO_HIGHER)] == [True, False]
    assert held(LEVEL, x=[0.0, 0.0]) is None
    for shift in (-0.004, 0.0, 0.004, 0.008):
        values = [0.003 + shift, 0.006 + shift, 0.002 + shift, 0.004 + shift]
        p = max(
            stats.ttest_1samp(values, -MARGIN, alternative="greater").pvalue,
            stats.ttest_1samp(values, MARGIN, alternative="less").pvalue,
        )
        assert (held(LEVEL, x=values) is True) == (p < 0.05)
        odds = LEAD.odds(between(values))
        assert min(odds) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    cases = ([True, None], [None, False], [True], [])
    assert [joint(case) for case in cases] == [None, False, True, None]


def test_not_comparable_goes_before_every_other_verdict():
    findings = [Finding("x", "y", holds) for holds in (True, False, None)]
    assert [finding.verdict for finding in findings] == ["held", "did not hold", "open"]
    apart = set_apart(findings, "other data")
    assert {finding.verdict for finding in apart} == {"not comparable"}
    assert str(apart[0]) == "not comparable (other data): x. Measured: y."
    assert set_apart(findings, "") == tuple(findings)


def test_parts_of_a_joint_claim_are_named_and_corrected():
    sure, weak, good = (
        [5.0, 5.1, 4.9, 5.0],
        [1.0, 3.0, 2.0, 0.1],
        [1.0, 3.0, 2.0, 0.9],
    )
    assert 0.025 < stats.ttest_1samp(good, 0).pvalue < 0.05
    assert stats.ttest_1samp(weak, 0).pvalue > 0.05
    assert held(x=good) is True
    assert held(x=good, y=good) is True  # each by itself
    both = judged({"x": between(good), "y": between(good)}, TRAIL)  # corrected
    assert (both.held, both.text.count("undecided")) == (None, 2)
    assert "2 parts" in both.text
    assert held(TRAIL, x=good) is False
    wrong = [-value for value in sure]
    failed = judged({"x": between(wrong), "y": between(weak)})
    assert failed.held is False
    assert "x -500.0" in failed.text
    assert "below" in failed.text
    assert held(TRAIL, x=sure) is False
    assert held(LEVEL, x=[0.001, -0.001, 0.002], y=sure) is False
    assert held(x=[5.0, 5.1]) is None


def test_an_order_fails_where_both_are_level():
    level, ahead = [0.001, -0.001, 0.002], [0.002, 0.0021, 0.0019]
    assert held(x=level) is None, "the paper prints no lead"
    assert judged({"x": between(level, 0.03)}).held is False
    assert judged({"x": between(level, -0.03)}, TRAIL).held is False
    assert held(x=ahead) is True
    assert "(level)" in judged({"x": between(level, 0.03)}).text
    assert judged({"x": between(level, 0.03)}, show=plain).held is None  # no accuracies


@pytest.mark.parametrize("lead", [0.0012, 0.01, 0.05])
def test_a_true_lead_is_seldom_called_level(lead):
    draws = np.random.default_rng(0).normal(lead, 0.006, (100, 6))
    wrong = [judged({"x": between(draw, lead)}).held is False for draw in draws]
    assert np.mean(wrong) <= 0.08


def test_what_the_paper_prints_is_asked_first():
    unsure, sure = [0.01, -0.02, 0.02], [-0.05, -0.051, -0.049]
    small = judged({"a": between(unsure, 0.001)})
    assert (small.held, "less than our error" in small.incomparable) == (None, True)
    against = judged({"a": between(sure, -0.03)})
    assert (against.held, "fail this test" in against.incomparable) == (None, True)
    assert judged({"a": between(sure, 0.03)}).held is False
    left = judged({"a": between(sure, 0.03), "b": between(sure, -0.03)}, TRAIL)
    assert (left.held, "a -5.0 ± 0.2 (no test)" in left.text) == (True, True)
    both = judged({"a": between(sure, 0.03), "b": between(unsure, 0.001)})
    assert (both.held, both.incomparable) == (False, "")


def test_all_parts_hold_by_themselves_and_one_refutes_after_holms_correction():
    p = [0.001, 0.013, 0.02, 0.04, 0.9]
    verdicts = of_parts([Odds(p_value, 1 - p_value) for p_value in p])
    assert verdicts == [True, True, True, True, None]
    verdicts = of_parts([Odds(1 - p_value, p_value) for p_value in p])
    assert verdicts == [False, None, None, None, None]
    assert of_parts([Odds(0.9, 0.001), Odds(math.nan, math.nan)]) == [False, None]
    assert of_parts([of_share(0, 3), of_share(3, 3)]) == [None, None]
    assert of_parts([of_share(0, 10), of_share(5, 10)]) == [False, None]
    assert of_share(10, 10).holds == pytest.approx(2 * 0.5**10)
    assert LEVEL.odds(between([0.0] * 3)) == Odds(0.0, 1.0)


def curves(*gaps, rounds=(0, 4, 8, 12, 16)):
    """Scores of x, and of y, which are 0, by round; a list a round."""
    index = pd.MultiIndex.from_product([["x", "y"], rounds], names=["run", "round"])
    return pd.DataFrame([*gaps, *([[0.0] * len(gaps[0])] * len(gaps))], index=index)


def test_a_score_is_the_mean_of_the_last_three_evaluations():
    scores = settled(
        curves([9, 9, 9], [9, 9, 9], [1, 2, 3], [2, 3, 4], [3, 4, 5]), "x", "y"
    )
    assert scores.interval.value == pytest.approx(3.0)
    assert scores.pairs == EVALUATIONS == 3
    once = curves([9, 9, 9], [1, 2, 3], rounds=(0, 40))
    assert settled(once, "x", "y").few == "", "no run has more"
    assert settled(once, "x", "z").pairs == 0
    more = curves(*[[9, 9, 9]] * 5).rename(index={"x": "other", "y": "more"})
    few = settled(pd.concat([once, more]), "x", "y")
    assert (few.above, few.evaluations) == (None, 1)
    assert judged({"": few}).held is None


def test_a_difference_that_still_shrinks_is_evidence():
    def moving(*last, **paper):
        ends = [[value, value - 0.01, value + 0.01] for value in last]
        shown = curves([0] * 3, [9] * 3, *ends)
        return judged({"": settled(shown, "x", "y", **paper)})[1:]

    shrinks, evidence = moving(-0.3, -0.2, -0.1)
    assert shrinks is False
    assert "round 16" in evidence
    assert moving(-0.3, -0.2, -0.1, paper_rounds=16) == (False, "")
    assert moving(0.1, 0.2, 0.3) == (True, "")
    assert moving(-0.3, -0.3, -0.3) == (False, "")


def test_what_has_learned_little_is_no_witness():
    sentence = little_learned({"x": (0.39, 0.78), "y": (0.7, 0.78)}, (0.1, 0.1))
    assert "39 % where the paper has 78 %" in sentence
    assert "y" not in sentence
    nothing = {"x": (0.5, 0.78), "z": (0.2, float("nan"))}
    assert little_learned(nothing, (0.1, 0.1)) == ""


def test_the_margin_is_about_the_spread_that_papers_print():
    every = pd.concat([published(paper) for paper in ("player_fl", "fedpft", "pfedla")])
    scores = every["quantity"].isin(["accuracy", "macro_f1"])
    spread = every.loc[scores, "spread"].dropna()
    assert len(spread) > 300
    assert spread.median() == pytest.approx(0.8, abs=0.05)
    assert pytest.approx(0.01) == MARGIN
