"""A rule of one curve that looks for one change of level."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .base import THRESHOLD, rule


def change_gains(values: Sequence[float]) -> NDArray[np.float64]:
    """By how much a level of its own for the layers after l = 1 .. L-1 lowers the squared error of the log values.

    With y = log S, m_1 and m_2 the means of the first l and of the other L - l values, the error of two levels is
    below that of one by l (L - l) / L (m_2 - m_1)^2. The sign is that of m_2 - m_1: below 0, the level falls.
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
    """The number of layers before the one change of level in the log values that fits best; L - 1 if none pays.

    Least squares with two levels, each change at the penalty (log t)^2 / 2: what one step by the factor t between
    two layers gains. A change counts where the level rises and the gain of :func:`change_gains` exceeds the penalty;
    of equal gains the first counts. Unlike a ratio of neighbours it sees a rise that several layers share, and does
    not follow one layer that stands out. Higher thresholds share no fewer layers: the change stays, or goes to L - 1.
    """
    gains = change_gains(values)
    best = int(np.argmax(gains))
    return best + 1 if gains[best] > _penalty(threshold) else len(values) - 1
