"""A rule of one curve that looks for one change of level."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .base import THRESHOLD, rule


def change_gains(values: Sequence[float]) -> NDArray[np.float64]:
    """Return how much a second level after layer l = 1 .. L-1 lowers the squared error of the log values.

    Let y = log S. Let m_1 and m_2 be the means of the first l and of the other L - l values. Two levels lower the error
    by l (L - l) / L (m_2 - m_1)^2. The result has the sign of m_2 - m_1. Below 0, the level falls.
    """
    y = np.log(np.asarray(values, dtype=np.float64))
    n = np.arange(1, len(y))
    sums = np.cumsum(y)[:-1]
    height = (y.sum() - sums) / (len(y) - n) - sums / n
    height[np.abs(height) <= 1e-12 * np.abs(y).max()] = 0.0  # level, but for rounding
    return np.sign(height) * height**2 * n * (len(y) - n) / len(y)


def _penalty(threshold: float) -> float:
    return math.log(max(threshold, 1.0)) ** 2 / 2


def _no_change(values: Sequence[float], threshold: float) -> str:
    pays = change_gains(values).max() > _penalty(threshold)
    return "" if pays else f"no rise of level is worth a step by {threshold:g}"


@rule(
    summary="share the layers before the one rise of level that best fits log S, if it pays by the threshold",
    lacks=_no_change,
)
def change_point(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """Return the number of layers before the change of level that best fits the log values.

    Least squares fits two levels. A change costs the penalty (log t)^2 / 2. One step by the factor t between two layers
    gains the same. A change counts if the level rises and the gain of :func:`change_gains` exceeds the penalty. Of
    equal gains the first counts. If no change counts, the result is L - 1.

    Unlike a ratio of neighbours, the rule sees a rise that several layers share. It does not follow one layer that
    stands out. Higher thresholds share no fewer layers: the change stays, or goes to L - 1.
    """
    gains = change_gains(values)
    best = int(np.argmax(gains))
    return best + 1 if gains[best] > _penalty(threshold) else len(values) - 1
