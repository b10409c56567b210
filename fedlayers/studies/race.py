"""The scores of a race on validation samples, the rates at which its arms race, and a judge that stops arms early.

Sharing pays late, so an early score alone prefers cuts that share little. The judge forecasts what cuts score at the
end. It is a ridge regression on finished runs of eight data families, confirmed on 20 others
(``figures/pictures/decision.judge.md``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedlayers.backends.local import Backend
from fedlayers.studies.arms import CUTS, Arm
from fedlayers.studies.harmless import VALIDATION, Bench, Predictor
from fedlayers.studies.jobs import Tell, TrainingJob, train
from fl_core import rows
from fl_core.algorithms.base import find
from fl_core.config import STOPPING_INTERVAL, Own, RunConfig, is_file, resolve
from fl_core.errors import RunError, UsageError, listing
from fl_core.records import store
from fl_core.records.stopping import moving_mean
from fl_core.rows import (
    CLASSIFICATION,
    MAIN,
    SCORES,
    TABLE,
    in_points,
    label_of,
    main_score,
    selecting_scores,
)
from fl_core.run.task import Task

DEFAULT_EVALUATIONS = 20
"""Default number of evaluations of a race's runs."""
FACTORS = (1.0, 3.0, 10.0, 30.0, 0.3)
"""The rates that are tried, times the default, in the order in which they are taken (``decision.tuned``)."""
COUNT = 4
"""How many rates are tried by default for your own data."""
PROBE = "all_but_last"
"""The cut whose rates are tried."""
PLAN_ALGORITHM = "fedper"
"""The algorithm that uses the cuts if the configuration's uses no plan."""
DIGITS = 9
"""Digits of scores that are compared. Later digits differ by rounding."""


class Standing(NamedTuple):
    """The scores of a race at a given round.

    Attributes:
        main: the score that is shown: the task's main one (:data:`fl_core.rows.MAIN`), or the one that selects.
        rounds: a line per run and evaluated round: the main score and ``loss`` on validation, means over the
            clients weighted by training samples.
        judged: a line per run: their values in its best round under a stopping rule, else in its last one, which is the
            round of its model. ``score`` is minus the sum of ranks by the scores that select among the runs of the
            seed; higher is better. NaN for a run that failed.
        failed: why a run has no result.
        best: under a stopping rule the best round of each run.
        left_out: the rows of clients whose samples give no main score. It is the mean over the other clients, for all
            arms alike.
    """

    main: str
    rounds: pd.DataFrame
    judged: pd.DataFrame
    failed: dict[str, str]
    best: Mapping[str, int]
    left_out: pd.DataFrame

    @property
    def notes(self) -> list[str]:
        """Lines on arms that failed, and on clients that are left out."""
        lines = [f"{run} failed: {why}" for run, why in self.failed.items()]
        return [*lines, *rows.left_out(self.left_out)]


def with_evaluations(config: RunConfig, own: Own) -> RunConfig:
    """Return the configuration of a race's runs, evaluated after every twentieth of the rounds by default.

    A run's own default may be longer if evaluation is expensive. Then few rounds would show where the best one is.

    >>> with_evaluations(RunConfig(dataset="heart", rounds=100), Own(data=None, model=None)).execution.eval_every
    5
    """
    if config.execution.eval_every is not None:
        return config
    federation = resolve(config, **own).federation
    every = max(1, int(federation.rounds or 1) // DEFAULT_EVALUATIONS)
    if federation.patience:
        every = min(every, STOPPING_INTERVAL)
    return config.with_keys(eval_every=every)


def with_plan_algorithm(config: RunConfig) -> RunConfig:
    """Return the configuration with an algorithm that uses cuts: its own, or FedPer."""
    if find(config.federation.algorithm).uses_plan:
        return config
    return config.with_keys(algorithm=PLAN_ALGORITHM, options={})


def check_scored(bench: Bench) -> None:
    """Refuse a race whose score has no value for any client's validation samples.

    Whether it has one depends on the samples alone, so the base rate shows it.

    Raises:
        UsageError: names the score, and why it has no value.
    """
    metric = bench.task.config.federation.monitor or MAIN[bench.kind]
    if math.isnan(bench.scores(bench.base_rate, VALIDATION).get(metric, 0.0)):
        raise UsageError(
            f"{label_of(metric)} must have a value for a client's validation samples; got none: "
            f"{TABLE[metric].missing}. Give clients more samples."
        )


def standings(
    jobs: Sequence[TrainingJob], until: int, failed: Mapping[str, str]
) -> Standing:
    """Return the runs' scores after a round of the race, from validation samples alone.

    Raises:
        UsageError: no evaluated round up to there, or no client with a main score.
    """
    by, main = jobs[0].config.federation.monitor, ""
    best: dict[str, int] = {}
    curves, lines, left_out = [], [], []
    for job in jobs:
        about = {"run": job.name, "arm": job.arm, "seed": job.config.execution.seed}
        lines.append({**about, "lr": job.config.training.lr})
        if job.name in failed:
            continue
        if (at := best_of_run(job.path)) is not None:
            best[job.name] = at
        frame = store.Run(job.path).rows()[1]
        main = by or main_score(frame["metric"].unique())
        own = frame[(frame["split"] == "validation") & (frame["metric"] == main)]
        left_out.append(own[rows.without_score(own)])
        shown = list(dict.fromkeys((main, "loss")))
        curve = validation_scores(frame, shown, until)
        latest = curve if at is None else curve[curve["round"] == at]
        lines[-1] |= latest[shown].tail(1).mean(skipna=False)
        curves.append(curve.assign(**about)[[*about, "round", *shown]])
    rounds, judged = pd.concat(curves, ignore_index=True), pd.DataFrame(lines)
    if rounds.empty:
        raise UsageError(
            "an arm must have an evaluated round; got none. Lower eval_every."
        )
    judged = judged.astype({"lr": float}).assign(score=0.0)
    for name in selecting_scores(TABLE[main].task, by):
        values = judged[name].round(DIGITS).groupby(judged["seed"])
        judged["score"] -= values.rank(ascending=not SCORES[name])
    lacking = pd.concat(left_out, ignore_index=True)
    return Standing(main, rounds, judged, dict(failed), best, lacking)


def best_of_run(path: Path) -> int | None:
    """Return the best round of a run's main model under its stopping rule; None without a rule."""
    rule = store.Run(path).stopping_rule()
    return None if rule is None else rule.best.get(rule.main)


def validation_scores(
    frame: pd.DataFrame, metrics: Sequence[str], until: int | None = None
) -> pd.DataFrame:
    """Return validation scores, in each evaluated round, of the model that a client would use at the end.

    That is ``personal`` if it exists in the last round, else global, as in a comparison. A personal model that is made
    at the end has no other round.

    Args:
        until: the last round that counts; None = all.

    Returns:
        A line for each round: ``round`` and the metrics, means over the clients by training samples, without clients
        whose samples cannot give the score. If there is no other, it is NaN.
    """
    wanted = (frame["split"] == "validation") & frame["metric"].isin(metrics)
    scored = frame[wanted]
    lacking = rows.without_score(scored)
    scored = scored[(scored["model"] != "local") & (scored["round"] > 0)]
    scored = scored if until is None else scored[scored["round"] <= until]
    at_last = scored.loc[scored["round"] == scored["round"].max(), "model"]
    chosen = rows.used_model(set(at_last))
    # groups cost by their columns
    scored = scored.loc[
        scored["model"] == chosen, ["round", "metric", "value", "n_train"]
    ]
    lines = []
    for done, part in scored.groupby("round"):
        of = [part[part["metric"] == metric] for metric in metrics]
        lines.append([done, *(rows.client_mean(each, lacking) for each in of)])
    return pd.DataFrame(lines, columns=["round", *metrics])


# --- finished runs, the best first ---------------------------------------------------------------------------------


def ranked(
    jobs: Sequence[TrainingJob], rounds: int, benches: Mapping[int, Bench]
) -> tuple[pd.DataFrame, dict[str, Predictor]]:
    """Return finished runs with their validation scores, the best first, and their predictors.

    The main score, ``score``, ``loss``, ``above``, ``low`` and ``high`` are those of the run's model
    (:meth:`Bench.line`). Where clients hold parts of it, there is no predictor and no such loss. Then ``score`` is that
    of :class:`Standing` for all runs. Runs that are significantly above the base rate come last.

    Args:
        benches: the samples of each seed.
    """
    stands = standings(jobs, rounds, {})
    runs, main, models = stands.judged.set_index("run"), stands.main, {}
    columns = ["score", "loss", "above", "low", "high"]
    found = pd.DataFrame(index=runs.index, columns=columns, dtype=float)
    for job in jobs:
        bench = benches[job.config.execution.seed]
        with suppress(UsageError):  # its clients hold parts of the model
            one = models[job.name] = bench.of_run(job.path, job.arm)
            line = bench.line(one)
            found.loc[job.name] = pd.Series(line)[columns]
            runs.loc[job.name, main] = line.get(main, math.nan)
    if found["score"].isna().any():
        found["score"] = runs["score"]
    runs[columns] = found
    runs["worse"] = runs["low"] > 0
    order = {"worse": True, "score": False, main: not SCORES[main]}
    return runs.sort_values(
        [*order], ascending=[*order.values()], kind="stable"
    ), models


# --- learning rates: several of one good cut are trained, and the best one is used --------------------------------


@dataclass(frozen=True)
class Rates:
    """The rates that were tried.

    Attributes:
        tried: all of them.
        lr: the best.
        jobs: the runs that did not diverge.
    """

    tried: tuple[float, ...]
    lr: float
    jobs: tuple[TrainingJob, ...] = field(repr=False)

    def text(self) -> str:
        """Return the rates that were tried, and the best."""
        tried = listing(f"{lr:g}" for lr in self.tried)
        told = f"Learning rates tried on validation: {tried}."
        told += f" Used: {self.lr:g}. Use it in other runs: --lr {self.lr:g}."
        for end, name in ((min, "smallest"), (max, "largest")):
            if self.lr == end(self.tried):
                told += f" It is the {name} of them: try more with --lr."
        return told


def best_rate(
    jobs: Sequence[TrainingJob],
    place: Backend,
    tell: Tell,
    benches: Mapping[int, Bench],
) -> Rates:
    """Train the runs to the end, and choose the rate by ``score`` of :func:`ranked`.

    Args:
        jobs: one for each rate.
        benches: the samples of each seed.

    Raises:
        RunError: Training diverged at every rate.
    """
    failed = train(jobs, place, tell)
    sound = [job for job in jobs if job.name not in failed]
    if not sound:
        raise RunError(
            f"training failed at every rate, the first with: {next(iter(failed.values()))}"
        )
    rounds = int(jobs[0].resolved.federation.rounds or 1)
    runs = ranked(sound, rounds, benches)[0]
    tried = tuple(float(job.config.training.lr or 0) for job in jobs)
    best = float(runs.loc[runs["score"].idxmax(), "lr"])
    tell(f"learning rates {listing(f'{lr:g}' for lr in tried)}: {best:g} is used")
    return Rates(tried, best, tuple(sound))


def rates_of(
    config: RunConfig,
    default: float,
    count: int | None,
    tell: Tell,
    from_python: bool = False,
) -> tuple[float, ...]:
    """Return the rates to try; none where the rate is given or known.

    By default :data:`COUNT` rates are tried for your own data. A named dataset has its own rate.

    >>> rates_of(RunConfig(dataset="heart"), 0.01, 4, print)
    (0.01, 0.03, 0.1, 0.3)
    >>> rates_of(RunConfig(dataset="heart"), 0.01, None, print)
    ()

    Args:
        default: The rate that the configuration has without a search.
        count: Asked for; 0 for none, None for the default.
        from_python: Whether the data are, in place of the configuration's.

    Raises:
        UsageError: Fewer than two, or more than there are.
    """
    if count is not None and count and not 2 <= count <= len(FACTORS):
        raise UsageError(
            f"tune_rates must be from 2 to {len(FACTORS)}, or 0 for none; got {count}. Leave it out."
        )
    if config.training.lr is not None:
        if count:
            tell(f"lr {config.training.lr:g} is given and kept: no rates are tuned")
        return ()
    if count is None:
        count = COUNT if from_python or is_file(config.data.dataset) else 0
    return tuple(float(f"{default * factor:.3g}") for factor in FACTORS[:count])


# --- the judge --------------------------------------------------------------------------------------------------------

Array = NDArray[np.float64]
SHARE = 0.15
"""Share of the planned maximum of rounds after which the judge speaks."""
LATEST = 8
"""Evaluations over which a slope is taken."""
ROUNDS, LEAST = 48, 3
"""The fewest planned rounds, and the fewest evaluations up to the judge's round, of the runs that it was fitted on."""
SAMPLES, PIXELS = 10, 32
"""The fewest training samples a class and client, and the largest side of a picture, for which it may speak."""


JUDGE = (-0.01224, 0.554, 0.0391, 0.03405, -0.1745)
"""The judge as it was registered: a constant, and the weights of :func:`features`.

``figures.decision.finished.fit_judge`` fits it on the stored runs.
"""


def forecast(curves: Sequence[Array]) -> Array:
    """Return what each cut (line) will score above each other (column) on held-out samples, in macro-F1 from 0 to 1.

    >>> flat, rising = np.full(5, 0.4), np.linspace(0.2, 0.6, 5)
    >>> forecast([flat, rising]).round(2).tolist()
    [[0.0, -0.06], [0.06, 0.0]]

    Args:
        curves: scores on validation samples by evaluated round, of cuts in order of depth.
    """
    found = np.zeros((len(curves), len(curves)))
    for a, b in combinations(range(len(curves)), 2):
        found[b, a] = JUDGE[0] + float(
            np.dot(JUDGE[1:], features(curves[a], curves[b]))
        )
        found[a, b] = -found[b, a]
    return found


def smooth(curve: Array) -> Array:
    """Return a curve as the stopping rule sees it: means over three evaluations."""
    return np.array(list(moving_mean(dict(enumerate(curve.tolist()))).values()))


def features(shallow: Array, deep: Array) -> Array:
    """Return the judge's numbers of two validation curves up to the same round.

    ``gap`` is the deeper cut's best smoothed score minus the other's. ``slope`` is the difference of gains an
    evaluation. ``level`` is the mean of the two best smoothed scores. ``noise`` is the mean deviation of steps.
    """

    def own(curve: Array) -> Array:
        top, latest = float(np.nanmax(smooth(curve))), curve[-LATEST:]
        if len(latest) < 3:
            return np.array([top, 0.0, 0.0])
        slope = np.polyfit(np.arange(len(latest)), latest, 1)[0]
        return np.array([top, slope, np.std(np.diff(latest))])

    gap, slope, _ = own(deep) - own(shallow)
    level, _, noise = (own(deep) + own(shallow)) / 2
    return np.array([gap, slope, level, noise])


def judged_round(rounds: int, every: int) -> int:
    """Return the last evaluated round up to :data:`SHARE` of the planned rounds; 0 if a run is too short to be judged.

    >>> judged_round(100, 2), judged_round(48, 2), judged_round(40, 1), judged_round(100, 10)
    (14, 6, 0, 0)
    """
    evaluations = int(SHARE * rounds / every + 1e-9)
    return evaluations * every if rounds >= ROUNDS and evaluations >= LEAST else 0


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
        f"this needs at least {ROUNDS} rounds and {LEAST} evaluations in the first "
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
        gains = forecast([of_run[job.name].to_numpy(float) for job in left])
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
    notes = {kept.name: ""} | dict.fromkeys(failed, "failed")
    for job in jobs:
        last = max(store.Run(job.path).rounds, default=0)
        notes.setdefault(job.name, f"not kept, trained to round {last}")
    judged = ended.judged.assign(
        score=ended.judged["arm"].map(value), note=ended.judged["run"].map(notes)
    )
    later = ended.rounds[ended.rounds["round"] > at]
    curves = pd.concat([begun.rounds, later], ignore_index=True)
    early = EarlyStop(at, rounds, kept.arm, lead.to_dict())
    return Standing(main, curves, judged, failed, ended.best, begun.left_out), early
