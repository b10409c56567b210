"""Forecasts of what cuts score at the end, from the first part of their curves on validation samples.

Sharing pays late, so an early score alone prefers cuts that share little. The judge is a ridge regression on finished
runs of eight data families. It was confirmed on 20 others (``python -m figures decision.judge``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fl_core.stopping import moving_mean

Array = NDArray[np.float64]
SHARE = 0.15
"""Share of the planned maximum of rounds after which the judge speaks."""
LATEST = 8
"""Evaluations over which a slope is taken."""
ROUNDS, EVALUATIONS = 48, 3
"""The fewest planned rounds, and the fewest evaluations up to the judge's round, of the runs that it was fitted on."""
SAMPLES, PIXELS = 10, 32
"""The fewest training samples a class and client, and the largest side of a picture, for which it may speak."""
FEATURES = ("gap", "slope", "level", "noise")
COEFFICIENTS = {
    "constant": -0.01224,
    "gap": 0.554,
    "slope": 0.0391,
    "level": 0.03405,
    "noise": -0.1745,
}
"""The judge as it was registered, in macro-F1; ``figures.decision.judge.fit`` fits it on the stored runs."""


@dataclass(frozen=True)
class Judge:
    """A linear forecast of what the deeper of two cuts gains at the end, in macro-F1 from 0 to 1.

    Attributes:
        weights: one for each of :data:`FEATURES`.
    """

    constant: float
    weights: tuple[float, ...]

    def gain(self, shallow: Array, deep: Array) -> float:
        """Return what the cut that shares more layers will score above the other on held-out samples."""
        return self.constant + float(np.dot(self.weights, features(shallow, deep)))

    def gains(self, curves: Sequence[Array]) -> Array:
        """Return the forecast gain of each cut (line) on each other (column).

        >>> flat, rising = np.full(5, 0.4), np.linspace(0.2, 0.6, 5)
        >>> FROZEN.gains([flat, rising]).round(2).tolist()
        [[0.0, -0.06], [0.06, 0.0]]

        Args:
            curves: scores on validation samples by evaluated round, of cuts in order of depth.
        """
        found = np.zeros((len(curves), len(curves)))
        for a, b in combinations(range(len(curves)), 2):
            found[b, a] = self.gain(curves[a], curves[b])
            found[a, b] = -found[b, a]
        return found


FROZEN = Judge(COEFFICIENTS["constant"], tuple(COEFFICIENTS[name] for name in FEATURES))
"""The judge as it was registered."""


def smooth(curve: Array) -> Array:
    """Return a curve as the stopping rule sees it: means over three evaluations."""
    return np.array(list(moving_mean(dict(enumerate(curve.tolist()))).values()))


def features(shallow: Array, deep: Array) -> Array:
    """Return the judge's numbers of two validation curves up to the same round.

    ``gap`` is the deeper cut's best smoothed score minus the other's. ``slope`` is the difference of gains an
    evaluation. ``level`` is the mean of the two best smoothed scores. ``noise`` is the mean deviation of steps.
    """

    def own(curve: Array) -> tuple[float, float, float]:
        latest = curve[-LATEST:]
        if len(latest) < 3:
            return float(np.nanmax(smooth(curve))), 0.0, 0.0
        slope = float(np.polyfit(np.arange(len(latest)), latest, 1)[0])
        return float(np.nanmax(smooth(curve))), slope, float(np.std(np.diff(latest)))

    (top_a, slope_a, noise_a), (top_b, slope_b, noise_b) = own(shallow), own(deep)
    return np.array(
        [top_b - top_a, slope_b - slope_a, (top_a + top_b) / 2, (noise_a + noise_b) / 2]
    )


def judged_round(rounds: int, every: int) -> int:
    """Return the last evaluated round up to :data:`SHARE` of the planned rounds; 0 if a run is too short to be judged.

    >>> judged_round(100, 2), judged_round(48, 2), judged_round(40, 1), judged_round(100, 10)
    (14, 6, 0, 0)
    """
    evaluations = int(SHARE * rounds / every + 1e-9)
    return evaluations * every if rounds >= ROUNDS and evaluations >= EVALUATIONS else 0
