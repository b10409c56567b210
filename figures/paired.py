"""Runs beside each other: differences paired by seed, what they decide, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fl_core.statistics import Interval, mean_interval

LEAST = 3
"""Seeds below which no order is claimed."""
FEWEST = "fewer than 3 seeds: no order"


def against(values: pd.DataFrame, run: str, reference: str) -> tuple[Interval, int]:
    """A run's score minus the reference's, paired by seed: mean with 95 % interval, and the number of pairs."""
    if reference not in values.index:
        return Interval(math.nan, math.nan, math.nan), 0
    paired = (values.loc[run] - values.loc[reference]).dropna()
    if paired.empty:
        return Interval(math.nan, math.nan, math.nan), 0
    return mean_interval(paired), len(paired)


def outcome(found: Interval, pairs: int) -> str:
    """``above`` or ``below`` where the interval says so, ``level`` where it holds 0, nothing below three pairs."""
    if pairs < LEAST:
        return ""
    if found.low == found.high == 0:
        return "equal"
    return "above" if found.low > 0 else "below" if found.high < 0 else "level"


def percent(mean: float, low: float, high: float, sign: str = "") -> str:
    """A share in percent with half its interval; a dash where there is none."""
    if math.isnan(mean):
        return "–"
    half = "" if math.isnan(low) else f" ± {100 * (high - low) / 2:.1f}"
    return f"{100 * mean:{sign}.1f}{half}"


def seeds_in_words(count: int) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count} seed{'s' * (count != 1)}"


def markdown(columns: Mapping[str, Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(map(str, cells)) for cells in zip(*columns.values(), strict=True)]
    return "\n".join(f"| {line} |" for line in lines)
