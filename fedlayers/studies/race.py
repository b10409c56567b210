"""Runs a race: several arms on one federation, with the same start and batches, judged on validation samples only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from fedlayers.studies.jobs import TrainingJob
from fl_core import statistics
from fl_core.algorithms.base import find
from fl_core.bounds import STOPPING_INTERVAL
from fl_core.config import RunConfig, resolve
from fl_core.errors import UsageError
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


class Standing(NamedTuple):
    """The scores of a race at a given round.

    Attributes:
        main: the score that is shown: the task's main one (:data:`fl_core.scores.MAIN`), or the one that selects.
        rounds: a line per run and evaluated round: the main score and ``loss`` on validation, means over the
            clients weighted by training samples.
        judged: a line per run: their means over the last evaluated rounds that all arms have, or over those up
            to its best round under a stopping rule. ``score`` is minus the sum of ranks by the scores that select
            among the runs of the seed; higher is better. If an arm makes its model at the end, that is the last round
            alone. NaN for a run that failed.
        failed: why a run has no result.
        best: under a stopping rule the best round of each run.
        left_out: why a client's samples give no main score with a seed, by (client, seed). The score is the mean over
            the other clients, for all arms alike.
    """

    main: str
    rounds: pd.DataFrame
    judged: pd.DataFrame
    failed: dict[str, str]
    best: Mapping[str, int] = {}
    left_out: Mapping[tuple[str, int], str] = {}

    @property
    def notes(self) -> list[str]:
        """Lines on arms that failed, and on clients that are left out."""
        lines = [f"{run} failed: {why}" for run, why in self.failed.items()]
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
    federation = resolve(config).federation
    every = max(1, int(federation.rounds or 1) // EVALUATIONS)
    if federation.patience:
        every = min(every, STOPPING_INTERVAL)
    return config.with_keys(eval_every=every)


def with_plan_algorithm(config: RunConfig) -> RunConfig:
    """Return the configuration with an algorithm that uses cuts: its own, or FedPer."""
    if find(config.federation.algorithm).uses_plan:
        return config
    return config.with_keys(algorithm=PLAN_ALGORITHM, options={})


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


def standings(
    jobs: Sequence[TrainingJob], until: int, failed: Mapping[str, str]
) -> Standing:
    """Return the runs' scores after a round of the race, from validation samples alone.

    Raises:
        UsageError: no evaluated round up to there, or no client with a main score.
    """
    by, main = jobs[0].config.federation.monitor, ""
    best: dict[str, int] = {}
    left_out: dict[tuple[str, int], str] = {}
    runs = pd.DataFrame(
        {
            "run": [job.name for job in jobs],
            "arm": [job.arm for job in jobs],
            "seed": [job.config.execution.seed for job in jobs],
            "lr": [job.config.training.lr for job in jobs],
        }
    ).astype({"lr": float})
    frames = []
    for job in jobs:
        if job.name in failed:
            continue
        if (at := best_of_run(job.path)) is not None:
            best[job.name] = at
        frame = store.Run(job.path).rows()[1]
        main = by or main_score(frame["metric"].unique())
        for client, why in without_score(frame, main).items():
            left_out[client, job.config.execution.seed] = why
        lines = pd.DataFrame(validation_scores(frame, until, (main, "loss")))
        frames.append(lines.assign(run=job.name))
    shown = list(dict.fromkeys((main, "loss")))
    rounds = pd.concat(frames, ignore_index=True)
    if rounds.empty:
        raise UsageError(
            "an arm must have an evaluated round; got none. Lower --eval-every."
        )
    rounds = runs.merge(rounds, on="run")[["run", "arm", "seed", "round", *shown]]
    of_round = rounds.groupby(["seed", "round"])
    if TABLE[main].share:
        rounds[main] = rounds[main].fillna(0.0 if SCORES[main] else 1.0)
    else:  # a score without a bound gets the round's worst
        worst = of_round[main].transform("min" if SCORES[main] else "max")
        rounds[main] = rounds[main].fillna(worst)
    rounds["loss"] = rounds["loss"].fillna(of_round["loss"].transform("max"))
    racing = of_round["run"].transform("size")
    counted = racing == racing.groupby(rounds["seed"]).transform("max")
    last = rounds["run"].map(best)
    counted = counted.where(last.isna(), rounds["round"] <= last)
    latest = rounds[counted].groupby("run").tail(WINDOW)
    judged = runs.join(latest.groupby("run")[shown].mean(), on="run")
    judged["score"] = 0.0
    for name in selecting_scores(TABLE[main].task, by):
        values = judged[name].round(DIGITS).groupby(judged["seed"])
        judged["score"] -= values.rank(ascending=not SCORES[name])
    return Standing(main, rounds, judged, dict(failed), best, left_out)


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
