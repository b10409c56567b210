"""Compares the scores of two runs: differences paired by seed, their verdicts, and their drawing.

A run's score is the mean of its last three evaluations (:func:`settled`). Some studies store only the last evaluation
of a run. They are judged by that one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

import pandas as pd

from fl_core.statistics import Interval, mean_interval

LEAST_SEEDS = 3
"""Seeds below which no order is claimed."""
FEWEST = "fewer than 3 seeds: no order"
EVALUATIONS = 3
"""The last evaluations of a run whose mean is its score; rows that have fewer decide nothing."""
TOO_FEW = "fewer than 3 evaluations"
UNDECIDED = "undecided"
"""The verdict on a difference whose interval has 0 in it: nothing is shown, equality neither."""


@dataclass(frozen=True)
class Difference:
    """A run's score minus another's, paired by seed.

    Attributes:
        each: a number for each seed that both have.
        evaluations: behind each run's score; as many as needed where no run has more.
        moves: evidence that the difference still shrinks over those evaluations; empty without any.
        printed: the same difference by the paper's printed numbers; NaN where it prints none.
    """

    each: pd.Series
    evaluations: int = EVALUATIONS
    moves: str = ""
    printed: float = math.nan

    @property
    def pairs(self) -> int:
        """Return the number of seeds that both have."""
        return len(self.each)

    @property
    def interval(self) -> Interval:
        """Return the mean with its 95 % interval; NaN without pairs."""
        return self.at(0.95)

    def at(self, level: float) -> Interval:
        """Return the mean with its interval; at the level 0.9 its ends are one-sided 95 % bounds."""
        if self.each.empty:
            return Interval(math.nan, math.nan, math.nan)
        return mean_interval(self.each, level=level)

    @property
    def few(self) -> str:
        """Return the reason why no order is claimed, or an empty text."""
        if self.pairs < LEAST_SEEDS:
            return FEWEST
        if self.evaluations < EVALUATIONS:
            return TOO_FEW
        return ""

    @property
    def equal(self) -> bool:
        """Return whether every pair is equal."""
        return not self.few and self.interval.low == self.interval.high == 0

    @property
    def above(self) -> bool | None:
        """Return whether the run lies above the other by its interval; None if undecided or with too few pairs."""
        if self.few:
            return None
        if self.interval.low > 0:
            return True
        if self.interval.high < 0:
            return False
        return None

    @property
    def how(self) -> str:
        """Return the verdict in a word, ``above``, ``below``, ``equal`` or :data:`UNDECIDED`; or why there is none."""
        verdict_words = {True: "above", False: "below", None: UNDECIDED}
        return self.few or ("equal" if self.equal else verdict_words[self.above])


NOTHING = Difference(pd.Series(dtype=float))
"""The difference of runs that have no seed in common."""


def difference(scores: pd.DataFrame, run: Hashable, reference: Hashable) -> Difference:
    """Return a run's score minus the reference's, paired by seed; without pairs all is NaN.

    Args:
        scores: runs x seeds.
    """
    if not {run, reference} <= set(scores.index):
        return NOTHING
    return Difference((scores.loc[run] - scores.loc[reference]).dropna())


def last_evaluations(curves: pd.DataFrame) -> pd.DataFrame:
    """Return each row's mean of its last three evaluations, rows x seeds; NaN with fewer.

    Args:
        curves: (row, round) x seeds.
    """
    trained_curves = curves[curves.index.get_level_values(1) > 0].sort_index(
        level=1, sort_remaining=False
    )
    long_runs = trained_curves.groupby(level=0, sort=False).filter(
        lambda run_rows: len(run_rows) >= EVALUATIONS
    )
    return (
        long_runs.groupby(level=0, sort=False)
        .tail(EVALUATIONS)
        .groupby(level=0, sort=False)
        .mean()
    )


def settled(
    curves: pd.DataFrame,
    run: Hashable,
    reference: Hashable,
    paper_rounds: float = math.inf,
    printed: float = math.nan,
) -> Difference:
    """Return a run's score minus the reference's, each the mean of the last three evaluations that both have.

    Args:
        curves: scores of (run, round) x seeds; the start, round 0, is no evaluation.
        paper_rounds: the paper's number of rounds. A difference after so many counts though it still shrinks.
        printed: the difference by the paper's printed numbers.
    """
    if not {run, reference} <= set(curves.index.get_level_values(0)):
        return replace(NOTHING, printed=printed)
    gaps = (curves.loc[run] - curves.loc[reference]).dropna(how="all").sort_index()
    last_gaps = gaps[gaps.index > 0].iloc[-EVALUATIONS:]
    gap = Difference(last_gaps.mean(skipna=False).dropna(), printed=printed)
    most_evaluations = (
        curves.index[curves.index.get_level_values(1) > 0]
        .get_level_values(0)
        .value_counts()
        .max()
    )
    has_enough = len(last_gaps) >= min(EVALUATIONS, most_evaluations)
    gap = replace(gap, evaluations=EVALUATIONS if has_enough else len(last_gaps))
    is_ended = gaps.index.max() >= paper_rounds
    return replace(gap, moves="" if gap.few or is_ended else _shrinks(last_gaps))


def _shrinks(gaps: pd.DataFrame) -> str:
    """Evidence that a difference, rounds x seeds, still shrinks from the first to the last of some rounds."""
    if len(gaps) < EVALUATIONS:
        return ""
    change = mean_interval((gaps.iloc[-1] - gaps.iloc[0]).dropna())
    mean = gaps.mean(axis=None)
    if not (change.high < 0 < mean or mean < 0 < change.low):
        return ""
    end_texts = (
        f"{gaps.iloc[k].mean():+.2f} at round {gaps.index[k]}" for k in (0, -1)
    )
    ends_text = ", ".join(end_texts)
    return f"the difference still shrinks, {ends_text}"


def joint(verdicts: list[bool | None]) -> bool | None:
    """Return the verdict on a statement whose parts must all hold: False if one does not, None if one is open."""
    if False in verdicts:
        return False
    if verdicts and None not in verdicts:
        return True
    return None
