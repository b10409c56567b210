"""Compare curves over layers with the curves of nulls. Differences show the sources that a metric depends on.

:mod:`figures.decision.nulls` defines the quantities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from diagnostics.metrics.base import METRICS, metric_or_placeholder
from fl_core.statistics import Interval

DRAWS = 3
NULLS = ("labels", "clients", "fresh")
CHANCE = {"labels": 1 / (DRAWS + 1), "clients": 1 / (DRAWS + 1), "fresh": 0.5}
SAME_DECISION = "same decision"
OTHER = "other start"
IDENTICAL = 1e-6
LEAST = 6
"""Federations from which on a metric has a verdict."""
CONTROL = "digits"
"""Dealt at random from the beginning."""


def shapes(values: pd.DataFrame, log: bool) -> NDArray[np.float64]:
    """Curves [K, L] without their means, over the layers at which all have a value.

    Args:
        values: one line a layer, one column a curve.
        log: whether to take logarithms, where all values are above 0.
    """
    table = values.dropna().to_numpy(float).T
    table = np.log10(table) if log and (table > 0).all() else table
    centred: NDArray[np.float64] = table - table.mean(axis=1, keepdims=True) if table.size else table
    return centred


def gone(curves: NDArray[np.float64]) -> float:
    """Return the share of the first curve's variance that the others lack.

    Curves are [1 + K, L]; a flat one gives NaN.
    """
    real, draws = curves[0], curves[1:]
    size = float(real @ real)
    if curves.shape[1] < 2 or size == 0:
        return float("nan")
    if len(draws) == 1:
        return min(1.0, float(((real - draws[0]) ** 2).sum()) / size)
    others = [np.delete(draws, k, axis=0).mean(axis=0) for k in range(len(draws))]
    away = np.mean([((real - other) ** 2).sum() for other in others])
    apart = np.mean([((draw - other) ** 2).sum() for draw, other in zip(draws, others, strict=True)])
    return float(np.clip((away - apart) / size, 0.0, 1.0))


def _apart(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(((a - b) ** 2).sum())


def odd_one_out(curves: NDArray[np.float64]) -> bool:
    """Return whether the first curve is furthest from the mean of the others."""
    away = [((curve - np.delete(curves, k, axis=0).mean(axis=0)) ** 2).sum() for k, curve in enumerate(curves)]
    return bool(away[0] > max(away[1:]))


@dataclass(frozen=True)
class NullComparison:
    """One metric of one run, compared with one null.

    Attributes:
        gone: see :func:`gone`; NaN where there is nothing to compare.
        differs: odd one out, or moved.
        changed: whether any curve differs from the real one at all.
    """

    gone: float
    differs: bool
    changed: bool


def compare_with_null(frame: pd.DataFrame, metric: str, null: str) -> dict[tuple[str, int], NullComparison]:
    """Every run's metric against a null, by (federation, seed); runs without a value at two layers are missing."""
    part = frame[frame["metric"] == metric]
    marks = part["model"].astype(str)
    wanted = (marks == "") | marks.str.startswith(f"null {null} ")
    wanted |= marks.str.startswith(OTHER) & (null == "fresh")
    found = {}
    for (run, seed), own in part[wanted].groupby(["run", "seed"]):
        variant = _common_variant(own, metric)
        look = metric_or_placeholder(metric).look.for_variant(variant)
        columns = own[own["variant"] == variant].pivot(index="layer", columns="model", values="value")
        curves = shapes(columns[sorted(columns.columns)], look.log)
        if curves.shape[1] < 2:
            continue
        real, others = curves[0], curves[1:]
        if null == "fresh":
            start, further = others[0], others[1:]
            told = bool(all(_apart(real, start) > _apart(start, other) for other in further))
            others = others[:1]
        else:
            told = odd_one_out(curves)
        size = float(np.abs(curves).max())
        changed = bool(size > 0 and np.abs(others - real).max() > IDENTICAL * size)
        found[str(run), int(str(seed))] = NullComparison(gone(np.vstack([real, others])), changed and told, changed)
    return found


def _common_variant(part: pd.DataFrame, metric: str) -> str:
    """The variant that decides, where every curve has it; else the metric's first."""
    of_model = [set(each["variant"]) for _, each in part.groupby("model")]
    common = set.intersection(*of_model)
    return next(name for name in (*metric_or_placeholder(metric).preferred, *sorted(common)) if name in common)


def _share(told: Sequence[bool]) -> Interval:
    """The share of runs, with the exact 95 % interval."""
    ends = stats.binomtest(sum(told), len(told)).proportion_ci(method="exact")
    return Interval(sum(told) / len(told), ends.low, ends.high)


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one line for each metric and null, with the number of runs and the shares.

    ``verdict`` is True (knows), False (cannot know) or None (not shown); ``gone`` is the median over federations of
    means over seeds. Its least and greatest value follow.
    """
    same = frame[frame["metric"] == SAME_DECISION]
    lines = []
    for metric in (name for name in METRICS.members() if (frame["metric"] == name).any()):
        for null in NULLS:
            held = compare_with_null(frame, metric, null)
            counted = {key: each for key, each in held.items() if null != "clients" or key[0] != CONTROL}
            share = _share([h.differs for h in counted.values()]) if counted else None
            by_set = pd.Series({key: h.gone for key, h in counted.items()}, dtype=float).groupby(level=0).mean()
            decided = same[(same["variant"] == metric) & (same["model"] == null)]
            decided = decided[(decided["run"] != CONTROL) | (null != "clients")]["value"].dropna()
            told = share or Interval(float("nan"), float("nan"), float("nan"))
            known_of = None if share is None else True if share.low > CHANCE[null] else None
            if counted and not any(each.changed for each in counted.values()):
                known_of = False
            known_of = known_of if by_set.size >= LEAST else None
            lines.append(
                {
                    "metric": metric, "null": null, "runs": len(counted), "federations": by_set.size,
                    "told_apart": told.value, "told_low": told.low, "told_high": told.high, "chance": CHANCE[null],
                    "gone": by_set.median(), "gone_least": by_set.min(), "gone_greatest": by_set.max(),
                    "same_decision": decided.mean(), "decisions": len(decided), "verdict": known_of,
                }
            )  # fmt: skip
    return pd.DataFrame(lines)
