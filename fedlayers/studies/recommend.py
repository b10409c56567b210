"""What a race recommends: all its finished runs next to the base rate and the baselines, and the best one's model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedlayers.studies.baselines import predictors
from fedlayers.studies.choice import NOTHING, Choice, compared, infer
from fedlayers.studies.harmless import (
    BASE_RATE,
    TEST,
    VALIDATION,
    Bench,
    Predictor,
)
from fedlayers.studies.hint import bytes_a_round
from fedlayers.studies.jobs import TrainingJob, samples_of
from fedlayers.studies.race import KEPT, EarlyStop, Rates, Standing, standings
from fl_core.errors import UsageError
from fl_core.rows import CLASSIFICATION, SCORES
from fl_core.task import Task

if TYPE_CHECKING:
    from fedlayers.studies.choose import Race

REFUSED = "refused: above the base rate"
UNSHOWN = "not shown to be better than the base rate"


def recommend(
    race: Race,
    jobs: Sequence[TrainingJob],
    stands: Standing,
    rates: Rates | None,
    early: EarlyStop | None,
    with_baselines: bool,
) -> Choice:
    """Return the recommendation of a race whose runs are finished."""
    main, names = stands.main, [arm.name for arm in race.arms]
    benches = {seed: Bench(task) for seed, task in race.of_seed.items()}
    bases = {seed: bench.base_rate() for seed, bench in benches.items()}
    finished = [job for job in jobs if job.name not in stands.failed]
    if early is not None:
        finished = [job for job in finished if job.arm == early.kept]
    probes = () if rates is None else rates.jobs
    finished += [job for job in probes if job.arm in names]
    by_run = {job.name: job for job in finished}
    runs, models = _ranked(by_run, race.rounds, benches, bases)
    by_rate = runs.groupby(["arm", "lr"], dropna=False)["above"].mean() > 0
    refused = [name for name in names if name in by_rate and by_rate[name].all()]
    raced = runs[runs.index.isin([job.name for job in jobs])]
    several = len(race.seeds) > 1
    shown = (raced if several else runs).drop_duplicates(["arm", "seed"])
    judged = _judged(stands.judged, shown, main)
    sound = judged[~judged["arm"].isin(refused)]
    tables = []
    for seed, bench in benches.items():
        part = sound[(sound["seed"] == seed) & sound["run"].isin(list(models))]
        if len(part) > 1:
            tables.append(bench.covariance([models[k] for k in part["run"]], main))
    within = sum(tables[1:], tables[0]) / len(tables) if tables else None
    overlap = _overlap(list(race.of_seed.values()))
    found = replace(infer(judged, within, refused, main, overlap), early=early)
    own = runs.index[runs["arm"] == found.leader]
    run = str(own[0]) if len(own) else None
    seed = by_run[run].config.execution.seed if run else race.seeds[0]
    bench, base, model = benches[seed], bases[seed], models.get(run or "")
    began = time.monotonic()
    others = list(predictors(bench)) if with_baselines else [base]
    fitting = time.monotonic() - began if with_baselines else 0.0
    notes, clients, positives = [], pd.DataFrame(), pd.DataFrame()
    if model is not None and model.test:
        notes = _on_test(bench, model, base, others, main)
        alone = [arm.name for arm in race.arms if arm.extreme == "nothing"]
        same = runs.index[runs["arm"].isin(alone) & (runs["seed"] == seed)]
        rival = next((models[k] for k in same if k in models), None)
        columns = {"model": model, BASE_RATE: base}
        if rival is not None and found.leader not in alone:
            columns["alone"] = rival
        clients = bench.of_clients(columns)
        if bench.kind == CLASSIFICATION and len(race.task.data.classes) == 2:
            positives = bench.positives(model)
    elif found.verdict == NOTHING and base.test:
        told = (f"{one.name} {bench.scores(one)['loss']:.3f}" for one in others)
        notes = [f"Loss on test samples: {', '.join(told)}."]
    led = found.leader == shown["arm"]
    best = sound.dropna(subset="score").sort_values(
        ["score", main], ascending=[False, not SCORES[main]], kind="stable"
    )
    leaders = best.drop_duplicates("seed") if early is None else best[:0]
    sent = {name: bytes_a_round(race.tasks[name]) for name in found.remaining}
    return Choice(
        next((arm for arm in race.arms if arm.name == found.leader), None),
        race.arms,
        stands._replace(judged=judged),
        found,
        by_run[run].path if run else None,
        {int(line.seed): by_run[line.run] for line in leaders.itertuples()},
        race.rounds if early is None else early.round,
        race.task,
        baseline_seconds=fitting,
        rates=rates,
        trials=_table(
            runs.loc[[*by_run]], stands.judged, refused, bench, base, others, main
        ),
        clients=clients,
        positives=positives,
        notes=tuple(notes),
        cheapest=min(sent, key=sent.__getitem__, default=""),
        recommended={
            by_run[k].config.execution.seed: by_run[k] for k in shown[led].index
        },
    )


def _ranked(
    by_run: Mapping[str, TrainingJob],
    rounds: int,
    benches: Mapping[int, Bench],
    bases: Mapping[int, Predictor],
) -> tuple[pd.DataFrame, dict[str, Predictor]]:
    """Return all finished runs with their scores, the best first, and their predictors.

    ``tempered`` is the calibrated validation loss, ``above`` the same minus the base rate's, with its interval. Runs
    are ranked by ``place``: :meth:`Bench.rank_value`, or minus a sum of ranks if clients hold parts of the model. Runs
    above the base rate come last.
    """
    runs = standings(list(by_run.values()), rounds, {}).judged.set_index("run")
    columns = ["place", "tempered", "above", "low", "high"]
    runs[columns] = math.nan
    models = {}
    for name, job in by_run.items():
        seed = job.config.execution.seed
        bench, base = benches[seed], bases[seed]
        try:
            one = models[name] = bench.of_run(job.path, job.arm)
        except UsageError:  # its clients hold parts of the model
            continue
        loss = bench.scores(one, VALIDATION)["loss"]
        above = bench.above(one, base, VALIDATION)
        runs.loc[name, columns] = [bench.rank_value(one), loss, *above]
    if runs["place"].isna().any():
        runs["place"] = runs["score"]
    runs["worse"] = runs["above"] > 0
    order = {"worse": True, "place": False, "loss": True}
    ranked = runs.sort_values([*order], ascending=[*order.values()], kind="stable")
    return ranked, models


def _judged(judged: pd.DataFrame, shown: pd.DataFrame, main: str) -> pd.DataFrame:
    """Return the table of arms and seeds with the scores of the run that is shown for each."""
    values = (
        shown.reset_index()
        .set_index(["arm", "seed"])
        .assign(score=shown["place"].to_numpy())
    )
    if main == "loss":
        values["loss"] = values["tempered"]
    columns = list(dict.fromkeys(("run", "lr", main, "loss", "score")))
    found = judged.set_index(["arm", "seed"])
    found[columns] = values[columns].reindex(found.index)
    return found.reset_index()


def _overlap(tasks: Sequence[Task]) -> float:
    """Return the share of its validation samples that the first seed has in common with the second."""
    first, other = (
        samples_of(task.data.partition, VALIDATION) for task in (tasks[0], tasks[-1])
    )
    return len(first & other) / max(1, len(first))


def _table(
    runs: pd.DataFrame,
    judged: pd.DataFrame,
    refused: Sequence[str],
    bench: Bench,
    base: Predictor,
    others: Sequence[Predictor],
    main: str,
) -> pd.DataFrame:
    """Return a line for each finished run, then for each arm that a judge stopped, then for each baseline."""
    trials = runs.assign(name=runs["arm"], loss=runs["tempered"])
    stopped = pd.DataFrame()
    if "status" in judged:
        told = judged["status"] + " at round " + judged["trained"].astype(str)
        stopped = judged[["lr", "seed"]].assign(name=judged["arm"], note=told)
        stopped = stopped[(judged["status"] != KEPT) & ~judged["run"].isin(runs.index)]
    lines, seed = [], bench.task.config.execution.seed
    for one in others:
        scores = bench.scores(one, VALIDATION)
        above = bench.above(one, base, VALIDATION)._asdict()
        above["above"] = above.pop("value")
        own = {name: scores.get(name, math.nan) for name in (main, "loss")}
        lines.append({"name": one.name, "seed": seed, **own, **above})
    columns = ("name", "lr", "seed", main, "loss", "above", "low", "high", "note")
    table = pd.concat([trials, stopped, pd.DataFrame(lines)], ignore_index=True)
    table = table.reindex(columns=list(dict.fromkeys(columns))).astype({"note": object})
    worse = table["name"].isin(refused) | (table["above"] > 0)
    table.insert(len(table.columns) - 1, "refused", worse & table["note"].isna())
    note = np.select([worse, table["high"] > 0], [REFUSED, UNSHOWN], "")
    return table.assign(note=table["note"].where(table["note"].notna(), note))


def _on_test(
    bench: Bench,
    model: Predictor,
    base: Predictor,
    others: Sequence[Predictor],
    main: str,
) -> list[str]:
    """Compare the model with the base rate and the best baseline by validation, on test samples."""
    scores = {"the model": bench.scores(model), base.name: bench.scores(base)}
    better = ""
    rivals = [one for one in others if one.name != BASE_RATE]
    if rivals:
        rival = min(
            rivals,
            key=lambda one: bench.scores(one, VALIDATION)["loss"],
        )
        scores[rival.name] = bench.scores(rival)
        if bench.above(model, rival, TEST).low > 0:
            better = rival.name
    missing = {score: bench.without(score, TEST) for score in (main, "auroc")}
    return compared(scores, main, better, base.name, missing)
