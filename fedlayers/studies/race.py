"""Runs a race: several arms on one federation, with the same start and batches, judged on validation samples only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from fedlayers.backends.base import Backend, Result
from fedlayers.studies.arms import Arm
from fedlayers.studies.training_job import TrainingJob, train
from fl_core import statistics
from fl_core.algorithms.base import find
from fl_core.choices import STOPPING_INTERVAL
from fl_core.config import RunConfig
from fl_core.defaults import resolve
from fl_core.errors import DivergedError, UsageError
from fl_core.records import store
from fl_core.scores import MAIN, SCORES, TABLE, label_of, main_score, selecting_scores
from fl_core.task import Task
from fl_core.training.evaluate import scores

EVALUATIONS = 20
"""Default number of evaluations of a race's runs."""
WINDOW = 3
"""Number of evaluated rounds by which an arm is judged, up to the end of the race."""
PLAN_ALGORITHM = "fedper"
"""The algorithm that uses the cuts if the configuration's uses no plan."""
DIGITS = 9
"""Digits of scores that are compared. Later digits differ by rounding."""
Tell = Callable[[str], None]


PROGRESS_LINES = 4
"""Lines about the progress of a race."""


@dataclass(frozen=True)
class Entry:
    """One run of a race: an arm with one seed, and its directory."""

    arm: Arm
    config: RunConfig
    path: Path

    @property
    def key(self) -> tuple[str, int]:
        """The arm's name and the seed."""
        return self.arm.name, self.config.execution.seed

    def to(self, until: int | None) -> TrainingJob:
        """Return the run up to a round. Its notes on the data were given before the race."""
        return TrainingJob(
            self.path,
            self.config,
            self.arm.plan,
            until,
            f"arm {self.arm.name}",
            quiet=True,
        )


class Standing(NamedTuple):
    """The scores of a race at a given round.

    Attributes:
        main: the score that is shown: the task's main one (:data:`fl_core.scores.MAIN`), or the one that selects.
        rounds: a line per arm, seed and evaluated round: the main score and ``loss`` on validation, means over the
            clients weighted by training samples.
        judged: a line per arm and seed: their means over the last evaluated rounds that all arms have, or over those up
            to its best round under a stopping rule. ``score`` is minus the sum of ranks by the scores that select
            among the runs of the seed; higher is better. If an arm makes its model at the end, that is the last round
            alone. NaN for an arm that failed.
        failed: why an arm with a seed has no result, by (arm, seed).
        best: under a stopping rule the best round of each run, by (arm, seed).
        left_out: why a client's samples give no main score with a seed, by (client, seed). The score is the mean over
            the other clients, for all arms alike.
    """

    main: str
    rounds: pd.DataFrame
    judged: pd.DataFrame
    failed: dict[tuple[str, int], str]
    best: Mapping[tuple[str, int], int] = {}
    left_out: Mapping[tuple[str, int], str] = {}

    @property
    def notes(self) -> list[str]:
        """Lines on arms that failed, and on clients that are left out."""
        lines = [
            f"{name} failed with seed {seed}: {why}"
            for (name, seed), why in self.failed.items()
        ]
        word = label_of(self.main)
        return lines + [
            f"{word} leaves out {name} with seed {seed}: {why}"
            for (name, seed), why in self.left_out.items()
        ]


def with_evaluations(config: RunConfig) -> RunConfig:
    """Return the configuration of a race's runs, evaluated after every twentieth of the rounds by default.

    A run's own default may be longer if evaluation is expensive. Then the three rounds that decide would begin far
    before the end of the race.

    >>> with_evaluations(RunConfig(dataset="heart", rounds=100)).execution.eval_every
    5
    """
    if config.execution.eval_every is not None:
        return config
    filled = (
        config
        if config.federation.rounds and config.federation.patience == 0
        else resolve(config)
    )
    every = max(1, int(filled.federation.rounds or 1) // EVALUATIONS)
    return config.with_keys(
        eval_every=min(every, STOPPING_INTERVAL)
        if filled.federation.patience
        else every
    )


def with_plan_algorithm(config: RunConfig) -> RunConfig:
    """Return the configuration with an algorithm that uses cuts: its own, or FedPer."""
    return (
        config
        if find(config.federation.algorithm).uses_plan
        else config.with_keys(algorithm=PLAN_ALGORITHM, options={})
    )


def entries_of(
    arms: Sequence[Arm], config: RunConfig, seeds: Sequence[int], out: Path
) -> list[Entry]:
    """Return the runs of every arm with every seed, below ``out``/arms."""
    entries = []
    for seed in seeds:
        for arm in arms:
            options = (
                config.federation.options
                if arm.algorithm == config.federation.algorithm
                else {}
            )
            entry_config = config.with_keys(
                algorithm=arm.algorithm,
                plan=None,
                seed=seed,
                options=options,
                workers=0,
            )
            entries.append(
                Entry(arm, entry_config, out / "arms" / f"{arm.folder}-{seed}")
            )
    return entries


def check_scored(task: Task) -> None:
    """Refuse a race whose score has no value for any client's validation samples.

    Whether it has one depends on the samples alone, so equal predictions show it.

    Raises:
        UsageError: names the score, and why it has no value.
    """
    metric = task.config.federation.monitor or MAIN[task.data.task]
    width = len(task.data.classes) or 1
    splits = [
        client.validation.y for client in task.data.clients if len(client.validation)
    ]
    values = [
        scores(torch.zeros(len(y), width), y, task.criterion)[metric] for y in splits
    ]
    if values and all(map(math.isnan, values)):
        raise UsageError(
            f"{label_of(metric)} must have a value for a client's validation samples; got none: "
            f"{TABLE[metric].missing}. Give clients more samples."
        )


def run_entries(
    entries: Sequence[Entry], until: int | None, place: Backend, tell: Tell
) -> dict[tuple[str, int], str]:
    """Train all runs further, up to a round (None: to the end). Return why some failed.

    A run whose training diverges has lost its race. Any other failure is an error. The results have the same bits on
    every backend, for any number of parallel runs.

    Args:
        tell: receives a line when a quarter of the runs is done, and one for each run that failed.

    Raises:
        UsageError, RunError: as for :func:`fl_core.runner.run`.
    """
    failed: dict[tuple[str, int], str] = {}
    of_run = {entry.path: entry for entry in entries}

    def note(result: Result, count: int) -> None:
        entry, reason = of_run[result.work.path], ""
        if isinstance(result.error, DivergedError):
            reason = failed[entry.key] = str(result.error)
        elif result.error is not None:
            raise result.error
        if reason:
            tell(
                f"{entry.arm.name}, seed {entry.config.execution.seed} failed: {reason}"
            )
        if count * PROGRESS_LINES // len(entries) > (count - 1) * PROGRESS_LINES // len(
            entries
        ):
            tell(
                f"{count} of {len(entries)} runs: {entry.arm.name}, seed {entry.config.execution.seed}"
            )

    runs = [entry.to(until) for entry in entries]
    train(runs, place, note)
    return failed


def standings(
    entries: Sequence[Entry], until: int, failed: dict[tuple[str, int], str]
) -> Standing:
    """Return the arms' scores after a round of the race, from validation samples alone.

    Raises:
        UsageError: no evaluated round up to there, or no client with a main score.
    """
    by, main = entries[0].config.federation.monitor, ""
    lines: list[dict[str, Any]] = []
    best: dict[tuple[str, int], int] = {}
    left_out: dict[tuple[str, int], str] = {}
    for entry in entries:
        if entry.key in failed:
            continue
        if (at := best_of_run(entry.path)) is not None:
            best[entry.key] = at
        frame = store.Run(entry.path).rows()[1]
        main = by or main_score(frame["metric"].unique())
        left_out |= {
            (client, entry.config.execution.seed): why
            for client, why in without_score(frame, main).items()
        }
        for line in validation_scores(frame, until, (main, "loss")):
            lines.append(
                {"arm": entry.arm.name, "seed": entry.config.execution.seed, **line}
            )
    shown = list(dict.fromkeys((main, "loss")))
    rounds = pd.DataFrame(lines, columns=["arm", "seed", "round", *shown])
    if rounds.empty:
        raise UsageError(
            "an arm must have an evaluated round; got none. Lower --eval-every."
        )
    worst = "min" if SCORES[main] else "max"
    if not TABLE[main].share:  # a score without a bound gets the round's worst
        rounds[main] = rounds[main].fillna(
            rounds.groupby(["seed", "round"])[main].transform(worst)
        )
    rounds[main] = rounds[main].fillna(0.0 if SCORES[main] else 1.0)
    largest = rounds.groupby(["seed", "round"])["loss"].transform("max")
    rounds["loss"] = rounds["loss"].fillna(largest)
    racing = rounds.groupby(["seed", "round"])["arm"].transform("size")
    common = rounds[racing == racing.groupby(rounds["seed"]).transform("max")]
    judged = []
    for entry in entries:
        name, seed = entry.key
        counted = (
            common
            if entry.key not in best
            else rounds[rounds["round"] <= best[entry.key]]
        )
        latest = counted[(counted["arm"] == name) & (counted["seed"] == seed)].tail(
            WINDOW
        )
        means = latest[shown].mean().to_dict()
        judged.append(
            {"arm": name, "seed": seed, "lr": entry.config.training.lr, **means}
        )
    table = with_score(pd.DataFrame(judged), selecting_scores(TABLE[main].task, by))
    return Standing(main, rounds, table, failed, best, left_out)


def with_score(judged: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return the table with ``score``: minus the sum of ranks of each run among those of its seed, by some scores."""
    total = pd.Series(0.0, judged.index)
    for name in by:
        values = judged[name].round(DIGITS)
        total -= values.groupby(judged["seed"]).rank(ascending=not SCORES[name])
    return judged.assign(score=total)


def best_of_run(path: Path) -> int | None:
    """Return the best round of a run's main model under its stopping rule; None without a rule."""
    rule = store.Run(path).stopping_rule()
    return None if rule is None else rule.best.get(rule.main)


def validation_scores(
    frame: pd.DataFrame,
    until: int | None = None,
    metrics: Sequence[str] = (),
) -> list[dict[str, float]]:
    """Return validation scores, in each evaluated round, of the model that a client would use at the end.

    That is ``personal`` if it exists in the last round, else global, as in a comparison. A personal model that is made
    at the end has no other round.

    Args:
        until: the last round that counts; None = all.
        metrics: names; default the score that algorithms are ranked by, and the loss.

    Returns:
        For each round ``round``, the main score of the task and ``loss``, or the metrics asked for: means over the
        clients weighted by training samples. Clients of :func:`without_score` are left out; without any other the score
        is NaN.
    """
    metrics = metrics or (main_score(frame["metric"].unique()), "loss")
    left_out = {metric: list(without_score(frame, metric)) for metric in metrics}
    wanted = (frame["split"] == "validation") & frame["metric"].isin(list(metrics))
    columns = [
        "model",
        "round",
        "client",
        "metric",
        "value",
        "n_train",
    ]  # groups cost by their columns
    scored = frame.loc[wanted, columns]
    scored = scored[(scored["model"] != "local") & (scored["round"] > 0)]
    scored = scored if until is None else scored[scored["round"] <= until]
    at_last = scored.loc[scored["round"] == scored["round"].max(), "model"]
    scored = scored[
        scored["model"] == ("personal" if (at_last == "personal").any() else "global")
    ]
    lines = []
    for index, part in scored.groupby("round"):
        means = dict.fromkeys(metrics, math.nan)
        for metric in metrics:
            own = part[
                (part["metric"] == metric) & ~part["client"].isin(left_out[metric])
            ]
            if len(own):
                means[metric] = statistics.combine(own["value"], own["n_train"])
        lines.append({"round": int(str(index)), **means})
    return lines


def without_score(frame: pd.DataFrame, metric: str) -> dict[str, str]:
    """Return the clients whose validation samples cannot give a score, and why, such as R2 of one sample.

    Such a score is NaN from the start. It depends on the samples alone, and so is missing for every model.
    """
    of_score = (
        (frame["split"] == "validation")
        & (frame["metric"] == metric)
        & (frame["client"] != "")
    )
    scored = frame.loc[of_score, ["client", "value", "status"]]
    unknown = scored.groupby("client", sort=False)["value"].transform(
        lambda values: values.isna().all()
    )
    lacking = scored[unknown & (scored["status"] == TABLE[metric].missing)]
    return dict(zip(lacking["client"], lacking["status"], strict=True))
