"""Compares the scores of two runs: differences paired by seed, their verdicts, and their drawing.

A run's score is the mean of its last three evaluations (:func:`settled`). Some studies store only the last evaluation
of a run. They are judged by that one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import pandas as pd

from figures.page import percent
from fl_core.statistics import Interval, mean_interval

LEAST = 3
"""Seeds below which no order is claimed."""
FEWEST = "fewer than 3 seeds: no order"
EVALUATIONS = 3
"""The last evaluations of a run whose mean is its score; rows that have fewer decide nothing."""
TOO_FEW = "fewer than 3 evaluations"
UNDECIDED = "undecided"
"""The verdict on a difference whose interval has 0 in it: nothing is shown, equality neither."""
NOTHING = Interval(math.nan, math.nan, math.nan)


class Difference(NamedTuple):
    """A run's score minus another's, paired by seed.

    Attributes:
        interval: mean with its 95 % interval.
        bounds: mean with one-sided 95 % bounds (the 90 % interval), by which an equivalence is tested.
        pairs: seeds that both have.
        error: standard error of the mean.
        evaluations: behind each run's score; as many as needed where no run has more.
        moves: evidence that the difference still shrinks over those evaluations; empty without any.
    """

    interval: Interval
    bounds: Interval
    pairs: int
    error: float = math.nan
    evaluations: int = EVALUATIONS
    moves: str = ""

    @property
    def few(self) -> str:
        """Return the reason why no order is claimed, or an empty text."""
        return (
            FEWEST
            if self.pairs < LEAST
            else TOO_FEW
            if self.evaluations < EVALUATIONS
            else ""
        )

    @property
    def how(self) -> str:
        """The verdict, see :func:`outcome`."""
        return "" if self.few else outcome(self.interval, self.pairs)

    @property
    def above(self) -> bool | None:
        """Return whether the run lies above the other; None where that is undecided or has too few pairs."""
        return {"above": True, "below": False}.get(self.how)

    @property
    def text(self) -> str:
        """The difference in percentage points with half its interval, and the verdict in brackets."""
        return (
            f"{percent(*self.interval, sign='+')} ({self.how or self.few})"
            if self.pairs
            else "no pair of runs"
        )

    def level(self, margin: float) -> bool | None:
        """Return whether the two are level: both one-sided tests at 5 % put the difference within the margin.

        False where a one-sided test puts it outside; None where neither is shown, or below three pairs.
        """
        sides = self.no_lower(margin), self.no_higher(margin)
        return False if False in sides else None if None in sides else True

    def no_lower(self, margin: float) -> bool | None:
        """Return whether the run lies no more than the margin below the other, by a one-sided test at 5 %."""
        if self.few:
            return None
        return (
            True
            if self.bounds.low > -margin
            else False
            if self.bounds.high < -margin
            else None
        )

    def no_higher(self, margin: float) -> bool | None:
        """Return whether the run lies no more than the margin above the other, by a one-sided test at 5 %."""
        if self.few:
            return None
        return (
            True
            if self.bounds.high < margin
            else False
            if self.bounds.low > margin
            else None
        )


def difference(scores: pd.DataFrame, run: Hashable, reference: Hashable) -> Difference:
    """A run's score minus the reference's, paired by seed; without pairs all is NaN.

    Args:
        scores: runs x seeds.
    """
    if not {run, reference} <= set(scores.index):
        return Difference(NOTHING, NOTHING, 0)
    return of_each((scores.loc[run] - scores.loc[reference]).dropna())


def last_evaluations(curves: pd.DataFrame) -> pd.DataFrame:
    """Return each row's mean of its last three evaluations, rows x seeds; NaN with fewer.

    Args:
        curves: (row, round) x seeds.
    """
    trained = curves[curves.index.get_level_values(1) > 0].sort_index(
        level=1, sort_remaining=False
    )
    kept = trained.groupby(level=0, sort=False).filter(
        lambda own: len(own) >= EVALUATIONS
    )
    return (
        kept.groupby(level=0, sort=False)
        .tail(EVALUATIONS)
        .groupby(level=0, sort=False)
        .mean()
    )


def settled(curves: pd.DataFrame, run: Hashable, reference: Hashable) -> Difference:
    """A run's score minus the reference's, each the mean of the last three evaluations that both have.

    Args:
        curves: scores of (run, round) x seeds; the start, round 0, is no evaluation.
    """
    if not {run, reference} <= set(curves.index.get_level_values(0)):
        return Difference(NOTHING, NOTHING, 0)
    gaps = (curves.loc[run] - curves.loc[reference]).dropna(how="all").sort_index()
    last = gaps[gaps.index > 0].iloc[-EVALUATIONS:]
    found = of_each(last.mean(skipna=False).dropna())
    most = (
        curves.index[curves.index.get_level_values(1) > 0]
        .get_level_values(0)
        .value_counts()
        .max()
    )
    enough = len(last) >= min(EVALUATIONS, most)
    found = found._replace(evaluations=EVALUATIONS if enough else len(last))
    return found._replace(moves="" if found.few else _shrinks(last))


def of_each(each: pd.Series) -> Difference:
    """The difference that the seeds' values are, one a seed."""
    if each.empty:
        return Difference(NOTHING, NOTHING, 0)
    return Difference(
        mean_interval(each),
        mean_interval(each, level=0.9),
        len(each),
        float(each.sem()),
    )


def _shrinks(gaps: pd.DataFrame) -> str:
    """Evidence that a difference, rounds x seeds, still shrinks from the first to the last of some rounds."""
    if len(gaps) < EVALUATIONS:
        return ""
    change = mean_interval((gaps.iloc[-1] - gaps.iloc[0]).dropna())
    mean = gaps.mean(axis=None)
    if not (change.high < 0 < mean or mean < 0 < change.low):
        return ""
    ends = (f"{gaps.iloc[k].mean():+.2f} at round {gaps.index[k]}" for k in (0, -1))
    return f"the difference still shrinks, {', '.join(ends)}"


def against(scores: pd.DataFrame, run: str, reference: str) -> tuple[Interval, int]:
    """A run's score minus the reference's, paired by seed: mean with 95 % interval, and the number of pairs.

    Args:
        scores: runs x seeds.
    """
    found = difference(scores, run, reference)
    return found.interval, found.pairs


def outcome(difference: Interval, pairs: int) -> str:
    """The verdict on a difference: ``above`` or ``below`` if its interval excludes 0, else :data:`UNDECIDED`.

    It is ``equal`` where all pairs are, and empty below three pairs.
    """
    if pairs < LEAST:
        return ""
    if difference.low == difference.high == 0:
        return "equal"
    return (
        "above" if difference.low > 0 else "below" if difference.high < 0 else UNDECIDED
    )


def joint(verdicts: list[bool | None]) -> bool | None:
    """The verdict on a statement whose parts must all hold: False if one does not, None if one is open."""
    return (
        False
        if False in verdicts
        else True
        if verdicts and None not in verdicts
        else None
    )
