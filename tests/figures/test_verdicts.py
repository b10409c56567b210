"""Verdicts: shares of seeds, medians' intervals against ranges, joint claims, evidence of what is not comparable."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from figures.differences import EVALUATIONS, Difference, difference, joint, settled
from figures.items import Finding, set_apart
from figures.papers import published
from figures.verdicts import (
    LEAD,
    LEVEL,
    MARGIN,
    NO_LOWER,
    TRAIL,
    Odds,
    by_seed,
    holm,
    judged,
    little_learned,
    median_ends,
    of_ranges,
    of_seeds,
    of_share,
)
from fl_core.errors import UsageError
from fl_core.statistics import (
    RANGE_BELOW,
    median_interval,
    share_interval,
)


def test_wilsons_interval_is_its_formula() -> None:
    square = float(stats.norm.ppf(0.975)) ** 2
    for successes, trials in ((0, 3), (3, 3), (7, 15), (29, 30)):
        share = successes / trials
        centre = (share + square / (2 * trials)) / (1 + square / trials)
        half = math.sqrt(
            square * (share * (1 - share) / trials + square / (4 * trials**2))
        ) / (1 + square / trials)
        assert share_interval(successes, trials) == pytest.approx(
            (share, centre - half, centre + half), abs=1e-12
        )
    with pytest.raises(UsageError, match="4 of 3"):
        share_interval(4, 3)


def test_few_values_have_a_range_and_no_interval() -> None:
    x = pd.Series(np.random.default_rng(0).normal(size=RANGE_BELOW + 3))
    for n in range(1, RANGE_BELOW):
        assert math.isnan(median_interval(x[:n]).low)
        assert median_ends(x[:n]) == (x[:n].median(), x[:n].min(), x[:n].max())
    assert (
        median_ends(x)
        == median_interval(x)
        == (x.median(), *x.sort_values().iloc[[1, -2]])
    )


@pytest.mark.parametrize(
    ("holding", "verdict"), [(15, True), (8, None), (7, None), (1, False)]
)
def test_the_share_of_seeds_decides(holding: int, verdict: bool | None) -> None:
    curves = pd.DataFrame(
        {k: [1.0, 2.0 if k < holding else 0.5] for k in range(15)}, index=["a", "b"]
    )
    curves[15] = [np.nan, 1.0]
    said, held = of_seeds(curves, lambda curve: curve["b"] > curve["a"])
    assert held is verdict
    assert f"in {holding} of 15 seeds (1 more without a value)" in said


def test_clients_of_a_seed_are_one_observation() -> None:
    columns = pd.MultiIndex.from_product([range(3), list("vwxyz")])
    curves = pd.DataFrame([[1.0] * 15, [2.0] * 15], index=["a", "b"], columns=columns)
    curves.loc["b", (0, "v")] = 0.0
    assert by_seed(curves).loc["b"].tolist() == [2.0] * 3
    assert (
        of_seeds(curves, lambda curve: curve["b"] > curve["a"])[1] is None
    )  # 15 curves would decide


@pytest.mark.parametrize(
    ("low", "high", "verdict", "said"),
    [
        (0, 9, True, "inside"),
        (3, 9, None, "undecided at b"),
        (8, 9, False, "outside at b"),
    ],
)
def test_medians_are_within_ranges_by_their_intervals(
    low: float, high: float, verdict: bool | None, said: str
) -> None:
    values = pd.DataFrame([[1.0] * 9, [1.0, 2, 3, 4, 5, 5, 6, 6, 7]], index=["a", "b"])
    found = of_ranges(
        values, pd.Series({"a": 1.0, "b": low}), pd.Series({"a": 1.0, "b": high})
    )
    assert found[1] is verdict
    assert said in found[0]


def between(values: list[float]) -> Difference:
    return difference(
        pd.DataFrame([values, [0.0] * len(values)], index=["x", "y"]), "x", "y"
    )


def test_an_equivalence_needs_two_one_sided_tests() -> None:
    near, wide, far = (
        [0.001, -0.001, 0.002, 0.0],
        [0.03, -0.04, 0.01],
        [0.05, 0.051, 0.049],
    )
    assert [judged({"": between(each)}, LEVEL).held for each in (near, wide, far)] == [
        True,
        None,
        False,
    ]
    assert between(wide).above is None
    assert judged({"": between(far)}, NO_LOWER).held is True
    assert judged({"": between([0.0, 0.0])}, LEVEL).held is None
    for shift in (-0.004, 0.0, 0.004, 0.008):
        values = [0.003 + shift, 0.006 + shift, 0.002 + shift, 0.004 + shift]
        p = max(
            stats.ttest_1samp(values, -MARGIN, alternative="greater").pvalue,
            stats.ttest_1samp(values, MARGIN, alternative="less").pvalue,
        )
        assert (judged({"": between(values)}, LEVEL).held is True) == (p < 0.05)
    assert [joint(each) for each in ([True, None], [None, False], [True], [])] == [
        None,
        False,
        True,
        None,
    ]


def test_not_comparable_goes_before_every_other_verdict() -> None:
    findings = [Finding("x", "y", held) for held in (True, False, None)]
    assert [each.verdict for each in findings] == ["held", "did not hold", "open"]
    assert {each.verdict for each in set_apart(findings, "other data")} == {
        "not comparable"
    }
    assert (
        str(set_apart(findings, "other data")[0])
        == "not comparable (other data): x. Measured: y."
    )
    assert set_apart(findings, "") == tuple(findings)


def named(**values: list[float]) -> dict[str, Difference]:
    return {name: between(each) for name, each in values.items()}


def test_parts_of_a_joint_claim_are_named_and_corrected() -> None:
    sure, weak = [5.0, 5.1, 4.9, 5.0], [1.0, 3.0, 2.0, 0.1]
    assert stats.ttest_1samp(weak, 0).pvalue > 0.05
    good = [1.0, 3.0, 2.0, 0.9]
    p = stats.ttest_1samp(good, 0).pvalue
    assert 0.025 < p < 0.05
    assert judged(named(x=good)).held is True
    assert judged(named(x=good, y=sure)).held is True  # Holm: the larger p against 5 %
    both = judged(named(x=good, y=good))
    assert both.held is None
    assert both.text.count("undecided") == 2
    assert "2 parts" in both.text
    failed = judged(named(x=[-value for value in sure], y=weak))
    assert failed.held is False
    assert "x -500.0" in failed.text
    assert "below" in failed.text
    assert judged(named(x=sure), TRAIL).held is False
    assert judged(named(x=[0.001, -0.001, 0.002], y=sure), LEVEL).held is False
    assert judged(named(x=[5.0, 5.1])).held is None


def test_holms_procedure_is_statsmodels_rule() -> None:
    p = [0.001, 0.013, 0.02, 0.04, 0.9]
    verdicts = holm([Odds(each, 1 - each) for each in p])
    adjusted = np.maximum.accumulate(
        [min(1, value * (5 - k)) for k, value in enumerate(p)]
    )
    assert [verdict is True for verdict in verdicts] == [
        bool(value < 0.05) for value in adjusted
    ]
    assert holm([Odds(0.9, 0.001), Odds(float("nan"), float("nan"))]) == [False, None]


def test_a_share_of_few_seeds_decides_nothing() -> None:
    assert holm([of_share(0, 3), of_share(3, 3)]) == [None, None]
    assert holm([of_share(0, 10), of_share(5, 10)]) == [False, None]
    assert of_share(10, 10).holds == pytest.approx(2 * 0.5**10)


def test_odds_are_those_of_scipys_tests() -> None:
    values = [0.3, 0.9, 0.2, 0.6]
    assert LEAD.odds(between(values)).holds == pytest.approx(
        stats.ttest_1samp(values, 0).pvalue
    )
    assert NO_LOWER.odds(between(values)).fails == pytest.approx(
        stats.ttest_1samp(values, -MARGIN, alternative="less").pvalue
    )
    assert LEVEL.odds(between([0.0] * 3)) == Odds(0.0, 1.0)


def curves(
    *gaps: list[float], rounds: tuple[int, ...] = (0, 4, 8, 12, 16)
) -> pd.DataFrame:
    """Scores of x, and of y, which are 0, by round; a list a round."""
    index = pd.MultiIndex.from_product([["x", "y"], rounds], names=["run", "round"])
    return pd.DataFrame([*gaps, *([[0.0] * len(gaps[0])] * len(gaps))], index=index)


def test_a_score_is_the_mean_of_the_last_three_evaluations() -> None:
    found = settled(
        curves([9, 9, 9], [9, 9, 9], [1, 2, 3], [2, 3, 4], [3, 4, 5]), "x", "y"
    )
    assert found.interval.value == pytest.approx(3.0)
    assert found.pairs == EVALUATIONS == 3
    once = curves([9, 9, 9], [1, 2, 3], rounds=(0, 40))
    assert settled(once, "x", "y").few == "", "no run has more"
    more = curves(*[[9, 9, 9]] * 5).rename(index={"x": "other", "y": "more"})
    few = settled(pd.concat([once, more]), "x", "y")
    assert (few.above, few.evaluations) == (None, 1)
    assert judged({"": few}).held is None
    assert settled(curves([9, 9, 9], [1, 2, 3], rounds=(0, 40)), "x", "z").pairs == 0


def test_a_difference_that_still_shrinks_is_evidence() -> None:
    shrinking = curves(
        [0, 0, 0],
        [9, 9, 9],
        [-0.30, -0.31, -0.29],
        [-0.2, -0.21, -0.2],
        [-0.10, -0.11, -0.1],
    )
    found = judged({"": settled(shrinking, "x", "y")})
    assert found.held is False
    assert "round 16" in found.incomparable
    growing = curves(
        [0, 0, 0], [9, 9, 9], [0.10, 0.11, 0.1], [0.2, 0.21, 0.2], [0.30, 0.31, 0.29]
    )
    assert judged({"": settled(growing, "x", "y")})[1:] == (True, "")
    steady = settled(
        curves([0, 0, 0], [9, 9, 9], *([[-0.3, -0.31, -0.29]] * 3)), "x", "y"
    )
    assert judged({"": steady}).incomparable == ""


def test_what_has_learned_little_is_no_witness() -> None:
    assert "39 % where the paper has 78 %" in little_learned(
        {"x": (0.39, 0.78), "y": (0.7, 0.78)}, (0.1, 0.1)
    )
    assert "y" not in little_learned({"x": (0.39, 0.78), "y": (0.7, 0.78)}, (0.1, 0.1))
    assert (
        little_learned({"x": (0.5, 0.78), "z": (0.2, float("nan"))}, (0.1, 0.1)) == ""
    )


def test_the_margin_is_about_the_spread_that_papers_print() -> None:
    every = pd.concat([published(paper) for paper in ("player_fl", "fedpft", "pfedla")])
    spread = every.loc[
        every["quantity"].isin(["accuracy", "macro_f1"]), "spread"
    ].dropna()
    assert len(spread) > 300
    assert spread.median() == pytest.approx(0.8, abs=0.05)
    assert pytest.approx(0.01) == MARGIN
