"""Chooses the layers to federate by a race: a few arms are trained, and validation samples pick one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedlayers.backends.local import Backend, no_progress
from fedlayers.studies import arms as candidates
from fedlayers.studies.baselines import is_table, predictors
from fedlayers.studies.choice import NOTHING, Choice, compared, infer
from fedlayers.studies.harmless import (
    BASE_RATE,
    TEST,
    VALIDATION,
    Bench,
    Predictor,
)
from fedlayers.studies.hint import (
    Race,
    bytes_a_round,
    in_words,
    measured_cost,
    planned,
    skew_of,
)
from fedlayers.studies.jobs import (
    Tell,
    TrainingJob,
    checked_call,
    open_backend,
    samples_of,
    task_kind,
    train,
)
from fedlayers.studies.race import (
    KEPT,
    EarlyStop,
    Rates,
    Standing,
    best_rate,
    run_judged,
    standings,
)
from fl_core import __version__, tree
from fl_core.config import RunConfig, in_memory
from fl_core.display import csv_bytes
from fl_core.errors import RunError, UsageError, listing
from fl_core.plan import LayerPlan
from fl_core.progress import say
from fl_core.rows import (
    CLASSIFICATION,
    SCORES,
    TABLE,
    check_score,
    in_column,
    label_of,
)
from fl_core.storage import write_atomically, write_json
from fl_core.task import Task


@checked_call
def choose(
    config: RunConfig,
    out: Path | str = "out/choose",
    *,
    data: Any = None,
    model: Any = None,
    arms: str | Sequence[str] = candidates.DEFAULT,
    seeds: Sequence[int] | None = None,
    thorough: bool = False,
    score: str = "",
    tune_rates: int | None = None,
    baselines: bool = True,
    backend: Backend | str = "",
    progress: bool | Tell = True,
    live: bool = False,
) -> Choice:
    """Race a few candidates (arms) on the same data, start and batches, and judge them on validation samples.

    A run's best round, and its end, follow from the ranks of two scores (:data:`fl_core.rows.SELECTION`). Rates, arms
    and finished runs are ranked by the calibrated validation loss (:func:`fl_core.training.evaluate.fit`). A
    named ``score`` does both instead. An
    arm is refused if the mean of that loss is above the base rate's. If all arms
    are refused, there is no plan and no model.

    All finished runs count, trials of rates among them. With several seeds the arm with the best mean over seeds at
    its rate is recommended, with one seed the arm of the best run. The recommended model is the best finished run of
    that arm. Nothing here reads test samples before the model is named. Then it is scored on them once, next to the
    base rate and the baselines.

    Under a stopping rule, one seed of FedPer's default cuts is judged early. All arms train to 15 % of the planned
    rounds. A judge (:mod:`fedlayers.studies.race`) then keeps one. It trains to its stop. The others have no final
    score. Every other race trains all arms to the end, and says why.

    After a stop, the same call resumes. Below ``out`` are ``arms/`` (run directories), ``standing.csv``,
    ``choice.json``, and ``plan.json`` if the winner uses a plan. The plan has the race as its evidence. If
    there is no plan now, that of an earlier call is removed.

    Args:
        config: of the runs. Its algorithm uses the cuts if it uses a plan; otherwise FedPer does.
        out: the folder; default ``out/choose``, as of the command.
        data, model: your own, as of :func:`fedlayers.run <fedlayers.runs.run>`.
        arms: see :func:`~fedlayers.studies.arms.arms_of`.
        seeds: one for a decision about this run; three or more for one about the federation. The default is the
            configuration's.
        thorough: train all arms to the end. Runs that were stopped early in ``out`` continue.
        score: one of the task's scores (:data:`fl_core.rows.TABLE`), which alone selects.
        tune_rates: number of learning rates to try, 2 to 5 (:mod:`fedlayers.studies.race`), or 0. The first seed tries
            them with all but the last layer shared. Then the arms race at the best. The default is 4 for your own data
            here, else 0. A rate in the configuration is kept, and none is tried.
        baselines: for tables, fit the baselines too (:mod:`fedlayers.studies.baselines`).
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.local`);
            default this process, with the configuration's number of ``workers``.
        progress: print the estimated cost and a line whenever an arm has finished the race, and show the runs that are
            done. A function receives the lines alone.
        live: draw the runs' main score in the notebook's cell, again at most once a second.

    Raises:
        UsageError: an unknown name or an invalid value, or runs of another configuration below ``out``, before any
            training.
        RunError: every arm failed.

    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> config = RunConfig(dataset="heart", rounds=4, eval_every=1)
    >>> choice = choose(config, where.name, baselines=False, progress=False)
    >>> choice.inference.seeds, len(choice.table)
    (1, 4)
    """
    config = in_memory(config, data, model)
    tell = progress if callable(progress) else say if progress else no_progress
    if score:
        config = config.with_keys(monitor=check_score(score, task_kind(config)))
    race = planned(config, Path(out), arms, seeds, tune_rates, thorough, tell)
    task, jobs = race.task, race.jobs
    table = baselines and is_table(task.data)
    shown = {"parallel": True, "progress": progress is True, "live": live}
    with open_backend(backend, config.execution.workers, **shown) as place:
        cost = race.cost(place.side_by_side)
        most = "at most " if task.config.federation.patience else ""
        tell(f"{most}{cost.text()}")
        if known := in_words(skew_of(task)):
            tell(known)
        if race.why:
            tell(f"no arm stops early: {race.why}")
        began = time.monotonic()
        rates, found = None, None
        if race.probes:
            rates = best_rate(race.probes, place, tell, Bench(task))
            jobs = race.at_rate(rates.lr)
        if race.at:
            stands, early = run_judged(jobs, race.at, race.rounds, place, tell)
            found = recommend(race, jobs, stands, rates, early, table)
            if found.winner is None:
                tell(
                    "no finished run is better than the base rate: all arms train to the end"
                )
        if found is None or found.winner is None:
            failed = train(jobs, place, tell)
            if len(failed) == len(jobs):
                raise RunError(
                    f"every arm failed, the first with: {next(iter(failed.values()))}"
                )
            stands = standings(jobs, race.rounds, failed)
            found = recommend(race, jobs, stands, rates, None, table)
        spent = measured_cost(task, race.trained(jobs), place.side_by_side)
    seconds = time.monotonic() - began
    found = replace(found, cost=cost, measured=spent, seconds=seconds)
    return stored(found, race.out)


def stored(choice: Choice, out: Path) -> Choice:
    """Write a race's files. The plan gets the race as its evidence.

    A plan of an earlier decision is removed if there is none now.
    """
    if choice.winner is not None:
        winner = replace(choice.winner, plan=_with_evidence(choice))
        choice = replace(choice, winner=winner)
    write_atomically(out / "standing.csv", csv_bytes(choice.standing.rounds))
    write_json(out / "choice.json", choice.to_json())
    save_plan(choice.plan, out)
    return choice


def save_plan(plan: LayerPlan | None, out: Path) -> None:
    """Write ``plan.json``. Without a plan, remove that of an earlier decision."""
    if plan is None:
        (out / "plan.json").unlink(missing_ok=True)
    else:
        plan.save(out / "plan.json")


def _with_evidence(choice: Choice) -> LayerPlan | None:
    """Return the winner's plan with the race as its evidence; None if it uses none."""
    task, plan, rates = choice.task, choice.plan, choice.rates
    if plan is None:
        return None
    seeds = listing(map(str, choice.standing.judged["seed"].unique()))
    head, lines, main = choice.answers.head, choice.answers.lines, choice.main
    scores = choice.standing.judged.groupby("arm", sort=False)[main].mean(skipna=False)
    told = (f"{arm} {in_column(main, value)}" for arm, value in scores.dropna().items())
    unit = " %" * TABLE[main].share
    ranked = choice.main if choice.trials.empty else "calibrated loss"
    return plan.with_shared(
        plan.shared,
        rule="race",
        metric=task.config.federation.monitor or ranked,
        detail={} if rates is None else {"rates": rates.to_json()},
        data=task.data.digest,
        checkpoint=tree.digest(tree.state_dict(task.model)),
        seed=task.config.execution.seed,
        version=__version__,
        race=(
            f"race up to round {choice.until}, seeds {seeds}",
            f"mean {label_of(main)}{unit} on validation samples: {listing(told)}",
            head,
            *lines,
        ),
    )


# --- the recommendation: all finished runs next to the base rate and the baselines ------------------------------

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
