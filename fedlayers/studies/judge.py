"""A race that stops early: a judge reads the first part of the arms' validation curves, and keeps one of them.

Sharing pays late, so an early score alone prefers cuts that share little. The judge forecasts what cuts score at the
end. It is a ridge regression on finished runs of eight data families, confirmed on 20 others
(``python -m figures decision.judge``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedlayers.backends.base import Backend
from fedlayers.studies.arms import CUTS, Arm
from fedlayers.studies.jobs import Tell, TrainingJob, train
from fedlayers.studies.race import PLAN_ALGORITHM, Standing, standings
from fl_core.errors import RunError, listing
from fl_core.records import store
from fl_core.rows import CLASSIFICATION, MAIN, in_points, label_of
from fl_core.stopping import moving_mean
from fl_core.task import Task

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


KEPT, STOPPED, NOT_KEPT, FAILED = "kept", "stopped", "not kept", "failed"
"""What became of a run. One that is not kept was trained further by the search of rates, or by an earlier call."""


@dataclass(frozen=True)
class EarlyStop:
    """The decision of a race that stopped early: its round, the kept arm and the forecast gains.

    Attributes:
        round: after which the arms were judged.
        rounds: the planned maximum.
        kept: the arm that was kept.
        gains: what it was forecast to gain on each other arm, in the main score.
    """

    round: int
    rounds: int
    kept: str
    gains: Mapping[str, float]

    def line(self, main: str) -> str:
        """Say what the judge forecast, and that the others have no final score."""
        until = f"round {self.round} of at most {self.rounds}"
        found = (
            f"A judge read the validation scores up to {until}, and kept {self.kept}."
        )
        gains = listing(
            f"{in_points(main, gain)} on {name}" for name, gain in self.gains.items()
        )
        return (
            f"{found} It forecasts these gains in {label_of(main)}: {gains}."
            if gains
            else found
        )


def judged_at(task: Task, arms: Sequence[Arm], seeds: Sequence[int]) -> tuple[int, str]:
    """Return the round after which a race is judged, or 0 and why all arms are trained.

    The judge is used as it was tested: one race of FedPer's cuts by macro-F1, whose runs stop by themselves.
    """
    config = task.config
    unknown = [
        arm.name
        for arm in arms
        if arm.name not in CUTS or arm.algorithm != PLAN_ALGORITHM
    ]
    per_class = sum(task.data.weights) / (
        len(task.data.clients) * max(1, task.data.n_classes)
    )
    at = judged_round(
        int(config.federation.rounds or 1), int(config.execution.eval_every or 1)
    )
    reasons = {
        "several seeds compare the final scores": len(seeds) > 1,
        f"this was tested with {listing(CUTS)} of {PLAN_ALGORITHM} only; got {listing(unknown)}": bool(
            unknown
        ),
        f"this forecasts {label_of(MAIN[CLASSIFICATION])}, which does not decide here": (
            task.data.task != CLASSIFICATION
            or config.federation.monitor not in (None, MAIN[CLASSIFICATION])
        ),
        f"this was fitted with at least {SAMPLES} training samples a class and client; got {per_class:.1f}": (
            per_class < SAMPLES
        ),
        f"this was fitted on tables and on pictures of at most {PIXELS} pixels": (
            task.data.words is not None or max(task.data.shape[1:], default=0) > PIXELS
        ),
        "this needs runs that stop by --patience": not config.federation.patience,
        f"this needs at least {ROUNDS} rounds and {EVALUATIONS} evaluations in the first "
        f"{100 * SHARE:.0f} % of them": not at,
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    return (0, why) if why else (at, "")


def run_judged(
    jobs: Sequence[TrainingJob],
    at: int,
    rounds: int,
    place: Backend,
    tell: Tell,
) -> tuple[Standing, EarlyStop]:
    """Train the arms of one seed up to a round, keep the one that the judge prefers, and train it to its stop.

    If training of the kept arm diverges, the next one is kept. Of the others there is no final score: it is NaN.
    Their runs keep their checkpoints, and continue when they are trained again.

    Args:
        at: the round after which they are judged; ``rounds`` is the planned maximum.

    Raises:
        RunError: every arm failed.
    """
    jobs = sorted(jobs, key=lambda job: len(job.plan.shared) if job.plan else 0)
    failed = train([replace(job, until=at) for job in jobs], place, tell)
    while left := [job for job in jobs if job.name not in failed]:
        begun = standings(left, at, {})
        main = begun.main
        of_run = dict(iter(begun.rounds.groupby("run")[main]))
        gains = FROZEN.gains([of_run[job.name].to_numpy(float) for job in left])
        value = pd.Series(gains.sum(axis=1), [job.arm for job in left])
        kept = left[int(value.to_numpy().argmax())]
        lead = pd.Series(gains[left.index(kept)], value.index).drop(kept.arm)
        others = listing(lead.index) or "no other"
        tell(
            f"round {at} of at most {rounds}: the judge keeps {kept.arm}, and stops {others}"
        )
        reasons = train([kept], place, tell)
        if not reasons:
            break
        failed |= reasons
    else:
        raise RunError(
            f"every arm failed, the first with: {next(iter(failed.values()))}"
        )
    stopped = {job.name: "" for job in jobs if job is not kept}
    ended = standings(jobs, rounds, stopped)
    judged = ended.judged.assign(
        score=ended.judged["arm"].map(value),
        status=[_status(job, kept, failed, at) for job in jobs],
        trained=[max(store.Run(job.path).rounds, default=0) for job in jobs],
        forecast=ended.judged["arm"].map((-lead).to_dict() | {kept.arm: 0.0}),
    )
    later = ended.rounds[ended.rounds["round"] > at]
    about = judged[["run", "status", "trained", "forecast"]]
    curves = pd.concat([begun.rounds, later], ignore_index=True).merge(about, on="run")
    early = EarlyStop(at, rounds, kept.arm, lead.to_dict())
    return Standing(main, curves, judged, failed, ended.best, begun.left_out), early


def _status(
    job: TrainingJob, kept: TrainingJob, failed: Mapping[str, str], at: int
) -> str:
    if job.name in failed:
        return FAILED
    if job is kept:
        return KEPT
    run = store.Run(job.path)
    return NOT_KEPT if run.finished or max(run.rounds, default=0) > at else STOPPED
