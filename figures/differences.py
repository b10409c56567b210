"""Compares the scores of two runs: their differences paired by seed, and what those decide."""

from __future__ import annotations

import math

import pandas as pd

from fl_core.statistics import Interval, mean_interval

LEAST = 3
"""Seeds below which no order is claimed."""
FEWEST = "fewer than 3 seeds: no order"


def against(scores: pd.DataFrame, run: str, reference: str) -> tuple[Interval, int]:
    """A run's score minus the reference's, paired by seed: mean with 95 % interval, and the number of pairs.

    Args:
        scores: runs x seeds.
    """
    if reference not in scores.index:
        return Interval(math.nan, math.nan, math.nan), 0
    differences = (scores.loc[run] - scores.loc[reference]).dropna()
    if differences.empty:
        return Interval(math.nan, math.nan, math.nan), 0
    return mean_interval(differences), len(differences)


def outcome(difference: Interval, pairs: int) -> str:
    """The verdict on a difference: ``above`` or ``below`` if its interval excludes 0, else ``level``.

    It is ``equal`` where all pairs are, and empty below three pairs.
    """
    if pairs < LEAST:
        return ""
    if difference.low == difference.high == 0:
        return "equal"
    return "above" if difference.low > 0 else "below" if difference.high < 0 else "level"
