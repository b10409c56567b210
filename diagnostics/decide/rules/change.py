"""The rules that read a curve over the layers, and the manual one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .base import THRESHOLD, rule


def ratios(values: Sequence[float]) -> list[float]:
    """Return S_{l+1} / S_l for l = 1 .. L-1, from values that are all above 0."""
    return [after / before for before, after in pairwise(values)]


def _no_ratio(values: Sequence[float], threshold: float) -> str:
    return "" if max(ratios(values)) > threshold else f"no ratio exceeds {threshold:g}"


@rule(
    summary="share the layers before the first jump S_{l+1}/S_l above the threshold (PLayer-FL)",
    lacks=_no_ratio,
)
def sensitivity_ratio(values: Sequence[float], threshold: float = THRESHOLD) -> int:
    """Return l* = min {l : S_{l+1} / S_l > t}, the number of layers shared (PLayer-FL, Eq. 3).

    The result is L - 1 if no ratio exceeds t. A higher threshold never shares fewer layers. The paper gives no number
    for t. By the ratios in its Fig. 4, 1.2 makes the splits of its Table A.2 on six of its seven datasets. The seventh
    (Heart) takes about 1.9.
    """
    return next(
        (count for count, ratio in enumerate(ratios(values), 1) if ratio > threshold),
        len(values) - 1,
    )


@rule(summary="share the layers before the largest jump S_{l+1}/S_l")
def largest_jump(values: Sequence[float]) -> int:
    """Return l* = argmax S_{l+1} / S_l, the number of layers shared; the first of equals."""
    steps = ratios(values)
    return steps.index(max(steps)) + 1


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


@rule(summary="share exactly the layers that are named", reads="names")
def manual(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the layers to share, as they are given."""
    return tuple(names)
