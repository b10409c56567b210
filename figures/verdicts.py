"""Verdicts: of curves, of joint claims by their parts, and the evidence that a claim is not comparable.

A verdict is True (held), False (did not hold) or None (open). The unit is the seed: a seed's clients start from one
model and are no independent observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from figures.differences import UNDECIDED, Difference, joint
from figures.drawing import Finding
from figures.page import percent
from fl_core.statistics import UNKNOWN, Interval, holm, share_interval

HALF = 0.5
TOLERANCE = 5e-3
"""Of published ranges, which are known to two decimals."""
ALPHA = 0.05
MARGIN = 0.01
"""Accuracy within which two count as level, for every paper: one point.

It is about the spread over repeated runs that the papers print behind ±, 0.8 points in the median of all that is
published. Less than that no paper shows."""
LEARNED = 0.5
"""A run that has learned less than this part of what is printed, above guessing, is no witness on the paper."""


RANGE_BELOW = 6
"""The number of values from which two of them can enclose the median with 95 % confidence."""


def median_interval(
    values: Sequence[float] | pd.Series, level: float = 0.95
) -> Interval:
    """Return the median and a confidence interval between two of the values, from their order alone (Conover, 1999).

    The ends are the k-th smallest and the k-th largest value, with the largest k that has the level for any continuous
    distribution. With fewer than 6 values no k is enough at 95 %, and the ends are NaN.

    >>> median_interval([1, 2, 4, 8, 16, 32, 64])
    Interval(value=8.0, low=1.0, high=64.0)
    """
    x = np.asarray(values, dtype=float)
    if not np.isfinite(x).all():
        return UNKNOWN
    interval = stats.quantile_test(x, p=0.5).confidence_interval(level)
    return Interval(float(np.median(x)), float(interval.low), float(interval.high))


def beyond(share: Interval, bound: float = HALF) -> bool | None:
    """Return whether a share is above ``bound``: by its whole interval, or by none of it."""
    if share.low > bound:
        return True
    if share.high < bound:
        return False
    return None


def by_seed(values: pd.DataFrame) -> pd.DataFrame:
    """Return the median over clients of each seed's curves, layers x seeds.

    A seed's clients start from one model, so that only seeds are independent.

    Args:
        values: layers x (seed, client), or layers x seeds; a curve that lacks a value is left out.
    """
    complete_curves = values.dropna(axis=1)
    return complete_curves.T.groupby(level=0, sort=False).median().T


def of_seeds(
    values: pd.DataFrame, holds: Callable[[pd.Series], bool]
) -> tuple[str, bool | None]:
    """Return in how many seeds an expectation holds, as text, and the verdict by Wilson's interval of that share.

    A seed without a whole curve counts neither way and is named.

    Args:
        values: as for :func:`by_seed`.
    """
    seed_curves = by_seed(values)
    lost_count = values.columns.get_level_values(0).nunique() - seed_curves.shape[1]
    lacking_text = ""
    if lost_count:
        lacking_text = f" ({lost_count} more without a value)"
    if seed_curves.empty:
        return f"in no seed is every value known{lacking_text}", None
    holding_count = sum(
        bool(holds(seed_curves.iloc[:, k])) for k in range(seed_curves.shape[1])
    )
    share = share_interval(holding_count, seed_curves.shape[1])
    text = (
        f"in {holding_count} of {seed_curves.shape[1]} seeds{lacking_text}, 95 % interval "
        f"{share.low:.0%} to {share.high:.0%}"
    )
    return text, beyond(share)


def median_ends(values: pd.Series) -> Interval:
    """Return the median with its 95 % interval; of too few values for one, with their range."""
    interval = median_interval(values)
    if not math.isnan(interval.low):
        return interval
    return Interval(
        interval.value, float(values.min(skipna=False)), float(values.max(skipna=False))
    )


def of_ranges(
    values: pd.DataFrame, low: pd.Series, high: pd.Series
) -> tuple[str, bool | None]:
    """Return whether the medians over seeds lie within ranges, by the medians' intervals.

    Held if every interval is inside its range, not if one is disjoint from it. The text names the layers outside.

    Args:
        values: as for :func:`by_seed`.
    """
    layers_outside, layers_across = [], []
    seed_curves = by_seed(values)
    for layer in values.index:
        if seed_curves.shape[1]:
            bounds = median_ends(seed_curves.loc[layer])[1:]
        else:
            bounds = (math.nan, math.nan)
        if not bounds[0] <= bounds[1]:
            layers_across.append(str(layer))
        elif bounds[1] < low[layer] - TOLERANCE or bounds[0] > high[layer] + TOLERANCE:
            layers_outside.append(str(layer))
        elif bounds[0] < low[layer] - TOLERANCE or bounds[1] > high[layer] + TOLERANCE:
            layers_across.append(str(layer))
    sentences = []
    if layers_outside:
        sentences.append("outside at " + ", ".join(layers_outside))
    if layers_across:
        sentences.append("undecided at " + ", ".join(layers_across))
    sentence = "; ".join(sentences) or "inside at every layer"
    holds = verdict(not sentences, bool(layers_outside))
    return f"{sentence} (by the medians' intervals)", holds


# --- joint claims ----------------------------------------------------------------------------------------------


class Odds(NamedTuple):
    """The p-values of one part of a claim: small ``holds`` show that it holds, small ``fails`` that it fails."""

    holds: float
    fails: float


def of_share(successes: int, trials: int) -> Odds:
    """Return the p-values of a share above and below one half, by the exact binomial test."""
    p_values = (
        stats.binomtest(successes, trials, HALF, alternative=alternative).pvalue
        for alternative in ("greater", "less")
    )
    holds, fails = (min(1.0, 2 * float(p_value)) for p_value in p_values)
    return Odds(holds, fails)


class Check(NamedTuple):
    """Describe the difference of every part of a claim.

    Attributes:
        odds: p-values of a difference.
        words: what a part is called that holds, and one that fails.
        bounds: whether it is judged by one-sided bounds, the 90 % interval.
    """

    odds: Callable[[Difference], Odds]
    words: tuple[str, str]
    bounds: bool = False


class JointVerdict(NamedTuple):
    """The verdict on a joint claim.

    Attributes:
        text: every part by name with its difference and corrected verdict.
        held: the verdict.
        incomparable: evidence that the verdict rests on a difference that still shrinks; empty where it does not.
    """

    text: str
    held: bool | None
    incomparable: str

    def finding(self, expected: str, prefix: str = "", reason: str = "") -> Finding:
        """Return the verdict as a finding.

        Args:
            prefix: the beginning of the measured text.
            reason: why it is not comparable, before any such evidence of its own.
        """
        return Finding(
            expected, prefix + self.text, self.held, reason or self.incomparable
        )


def _above(gap: Difference, bound: float) -> float:
    """Return the p-value of a one-sided t test that a difference lies above a bound."""
    mean, standard_error = gap.each.mean(), gap.each.sem()
    if gap.few or standard_error == 0:
        if gap.few:
            return math.nan
        return float(mean <= bound)
    return float(stats.t.sf((mean - bound) / standard_error, gap.pairs - 1))


def _below(gap: Difference, bound: float) -> float:
    """Return the p-value of a one-sided t test that a difference lies below a bound."""
    return _above(replace(gap, each=-gap.each), -bound)


LEAD = Check(
    lambda gap: Odds(2 * _above(gap, 0), 2 * _below(gap, 0)), ("above", "below")
)
TRAIL = Check(
    lambda gap: Odds(2 * _below(gap, 0), 2 * _above(gap, 0)), ("below", "above")
)
LEVEL = Check(
    lambda gap: Odds(
        max(_above(gap, -MARGIN), _below(gap, MARGIN)),
        min(_above(gap, MARGIN), _below(gap, -MARGIN)),
    ),
    ("level", "not level"),
    bounds=True,
)
NO_LOWER = Check(
    lambda gap: Odds(_above(gap, -MARGIN), _below(gap, -MARGIN)),
    ("no lower", "lower"),
    bounds=True,
)
NO_HIGHER = Check(
    lambda gap: Odds(_below(gap, MARGIN), _above(gap, MARGIN)),
    ("no higher", "higher"),
    bounds=True,
)


def verdict(holds: bool, fails: bool) -> bool | None:
    """Return True if a claim holds, False if it fails, and None if neither is shown.

    >>> verdict(True, False), verdict(False, True), verdict(False, False)
    (True, False, None)
    """
    if holds:
        return True
    return False if fails else None


def of_parts(odds: Sequence[Odds]) -> list[bool | None]:
    """Return the verdict on each part of a claim that all of them hold.

    Who claims all parts needs each of them at 5 %, and no correction: if one does not hold, its own test errs in 5 % at
    most (the intersection-union test). Against the claim any one will do, so there parts are corrected (Holm).
    """
    least_p = [1.0 if math.isnan(min(p_pair)) else min(p_pair) for p_pair in odds]
    return [
        verdict(part_odds.holds < ALPHA, p_value < ALPHA)
        for part_odds, p_value in zip(odds, holm(least_p), strict=True)
    ]


def _or_level(odds: Odds, gap: Difference) -> Odds:
    """Let a difference that is level, and does not show the order, count against a printed order of accuracies.

    It is level within half of the printed lead, and within :data:`MARGIN` at most. Without a printed lead nothing
    is level: a lead that the paper does not give may be smaller than any margin.
    """
    margin = min(MARGIN, abs(gap.printed) / 2)
    if odds.holds < ALPHA or math.isnan(gap.printed):
        return odds
    level_p = max(_above(gap, -margin), _below(gap, margin))
    return odds._replace(fails=min(odds.fails, level_p))


def _no_test(gap: Difference, test: Check) -> str:
    """Return why a part tests nothing: the paper's own numbers fail it, or show less than our error."""
    if math.isnan(gap.printed):
        return ""
    lead_text = f"{100 * gap.printed:+.1f} points in the paper"
    if test in (LEAD, TRAIL) and gap.printed * (1 if test is LEAD else -1) <= 0:
        return f"{lead_text}, whose own numbers fail this test"
    interval = gap.at(0.95)
    if test in (LEAD, TRAIL) and abs(gap.printed) < (interval.high - interval.low) / 2:
        return f"{lead_text}, less than our error"
    return ""


def points(values: Interval) -> str:
    """Return a difference of accuracies in percentage points with half its interval."""
    return percent(*values, sign="+")


def plain(values: Interval) -> str:
    """Return a difference with half its interval, in its own unit."""
    return f"{values.value:+.2f}" + (
        "" if math.isnan(values.low) else f" ± {(values.high - values.low) / 2:.2f}"
    )


def judged(
    gaps: Mapping[str, Difference],
    test: Check = LEAD,
    show: Callable[[Interval], str] = points,
) -> JointVerdict:
    """Judge a claim of one or several parts by :func:`of_parts`.

    An order of accuracies, shown in points, fails also where both are level (:func:`_or_level`).
    Each part is asked of the paper's printed numbers first. A part that they fail is no test, and the others are
    judged without it. An open part with a printed lead below our error cannot be tested here. If such parts leave the
    verdict open, they are the evidence.
    A part whose difference still shrinks decides nothing. If it alone made the verdict, that is the evidence.

    Args:
        gaps: the parts' differences by their names; a single part needs none.
        show: how an interval is written.
    """
    reasons = {part_name: _no_test(gap, test) for part_name, gap in gaps.items()}
    odds_by_part = {
        part_name: test.odds(gap)
        for part_name, gap in gaps.items()
        if not reasons[part_name].endswith("test")
    }
    if show is points and not test.bounds:
        odds_by_part = {
            part_name: _or_level(gap_odds, gaps[part_name])
            for part_name, gap_odds in odds_by_part.items()
        }
    verdict_by_part = dict(
        zip(odds_by_part, of_parts(list(odds_by_part.values())), strict=True)
    )
    comparisons = []
    for part_name, gap in gaps.items():
        part_verdict = verdict_by_part.get(part_name)
        unsure_word = gap.few or ("equal" if gap.equal else UNDECIDED)
        verdict_word = (
            unsure_word if part_verdict is None else test.words[not part_verdict]
        )
        verdict_word = verdict_word if part_name in verdict_by_part else "no test"
        if part_verdict is False and gap.interval.low <= 0 <= gap.interval.high:
            verdict_word = "level"
        gap_text = "no pair of runs"
        if gap.pairs:
            gap_text = show(gap.at(0.9) if test.bounds else gap.interval)
        comparisons.append(
            f"{part_name} {gap_text}".strip()
            + (f" ({verdict_word})" if gap.pairs else "")
        )
    notes = [f"{len(gaps)} parts"] * (len(gaps) > 1) + [
        f"90 % intervals, margin {100 * MARGIN:g} point"
    ] * test.bounds
    holds, move_notes = (
        joint(list(verdict_by_part.values())),
        [gap.moves for gap in gaps.values()],
    )
    steady_verdict = joint(
        [
            None if gaps[part_name].moves else part_verdict
            for part_name, part_verdict in verdict_by_part.items()
        ]
    )
    notes_text = ", ".join(notes)
    sentence = "; ".join(comparisons) + (f" ({notes_text})" if notes else "")
    remark = "" if steady_verdict == holds else next(filter(None, move_notes))
    if holds is None and not remark:
        remark = "; ".join(
            f"{part_name} {reasons[part_name]}".strip()
            for part_name in gaps
            if verdict_by_part.get(part_name) is None and reasons[part_name]
        )
    return JointVerdict(sentence, holds, remark)


# --- not comparable --------------------------------------------------------------------------------------------


def little_learned(
    levels: Mapping[str, tuple[float, float]], chance: tuple[float, float]
) -> str:
    """Return evidence that a side of a comparison has learned less than half of what is printed; empty without any.

    Args:
        levels: by name the accuracy measured and the one printed, as shares; a NaN is no evidence.
        chance: the accuracy of guessing, here and in the paper.
    """
    own_chance, paper_chance = chance
    return ", ".join(
        f"{side_name} {100 * measured_share:.0f} % where the paper has {100 * printed_share:.0f} %"
        for side_name, (measured_share, printed_share) in levels.items()
        if (measured_share - own_chance) / (1 - own_chance)
        < LEARNED * (printed_share - paper_chance) / (1 - paper_chance)
    )
