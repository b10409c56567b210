"""Rules of one curve that look for a jump between two neighbouring layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
