"""Verdicts on curves: an expectation is judged on every single one, and the share of them decides, not the median.

A verdict is True (held), False (did not hold) or None (open). Curves of one seed come from one federation, so they hang
together and the intervals are, if anything, too narrow.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from fl_core.statistics import Interval, median_interval, share_interval

HALF = 0.5
TOLERANCE = 5e-3
"""Of published ranges, which are known to two decimals."""


def beyond(share: Interval, least: float = HALF) -> bool | None:
    """Whether a share is above ``least``: by its whole interval, or by none of it."""
    return True if share.low > least else False if share.high < least else None


def of_curves(values: pd.DataFrame, holds: Callable[[pd.Series], bool]) -> tuple[str, bool | None]:
    """In how many curves (columns) an expectation holds, as text, and the verdict by Wilson's interval of that share.

    A curve that lacks a value counts neither way and is named.
    """
    whole = values.dropna(axis=1)
    gone = values.shape[1] - whole.shape[1]
    lacking = f" ({gone} more without a value)" if gone else ""
    if whole.empty:
        return f"in no curve is every value known{lacking}", None
    count = sum(bool(holds(whole.iloc[:, k])) for k in range(whole.shape[1]))
    share = share_interval(count, whole.shape[1])
    said = f"in {count} of {whole.shape[1]} single curves{lacking}, 95 % interval {share.low:.0%} to {share.high:.0%}"
    return said, beyond(share)


def median_ends(values: pd.Series) -> Interval:
    """Return the median with its 95 % interval; of too few values for one, with their range."""
    found = median_interval(values)
    if found.status == "ok":
        return Interval(*found[:3])
    return Interval(found.value, float(values.min(skipna=False)), float(values.max(skipna=False)))


def of_ranges(values: pd.DataFrame, low: pd.Series, high: pd.Series) -> tuple[str, bool | None]:
    """Whether the medians of curves (layers x curves) lie within ranges, by the medians' intervals.

    Held if every interval is inside its range, not if one is disjoint from it. The text names where it is not inside.
    """
    outside, across = [], []
    for layer in values.index:
        ends = median_ends(values.loc[layer])[1:]
        if not ends[0] <= ends[1]:
            across.append(str(layer))
        elif ends[1] < low[layer] - TOLERANCE or ends[0] > high[layer] + TOLERANCE:
            outside.append(str(layer))
        elif ends[0] < low[layer] - TOLERANCE or ends[1] > high[layer] + TOLERANCE:
            across.append(str(layer))
    told = [
        f"outside at {', '.join(outside)}" if outside else "",
        f"undecided at {', '.join(across)}" if across else "",
    ]
    said = "; ".join(filter(None, told)) or "inside at every layer"
    return f"{said} (by the medians' intervals)", False if outside else None if across else True
