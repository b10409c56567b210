"""Chooses the layers to federate by a race: a few arms are trained, and validation samples pick one."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd

from fedlayers.backends.local import Backend, no_progress
from fedlayers.studies import arms as candidates
from fedlayers.studies.baselines import predictors
from fedlayers.studies.choice import (
    Choice,
    answers,
    infer,
    over_samples,
    paired_estimates,
)
from fedlayers.studies.first_screen import evidence_of, facts_of
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
    open_backend,
    samples_of,
    study_folder,
    task_kind,
    train,
)
from fedlayers.studies.model_files import store_models
from fedlayers.studies.race import (
    EarlyStop,
    Rates,
    Standing,
    best_rate,
    ranked,
    run_judged,
    standings,
)
from fl_core import __version__, tree
from fl_core.config import RunConfig, RunKeys, with_own
from fl_core.display import csv_bytes
from fl_core.errors import RunError, listing
from fl_core.plan import LayerPlan
from fl_core.progress import say
from fl_core.rows import (
    CLASSIFICATION,
    TABLE,
    check_score,
    in_column,
    label_of,
)
from fl_core.statistics import holm
from fl_core.storage import write_atomically, write_json


def choose(
    config: RunConfig | None = None,
    out: Path | str | None = None,
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
    **keys: Unpack[RunKeys],
) -> Choice:
    """Race a few candidates (arms) on the same data, start and batches, and judge them on validation samples.

    A run's best round, and its end, follow from the ranks of two scores (:data:`fl_core.rows.SELECTION`). Rates, arms
    and finished runs are ranked by the calibrated validation loss (:func:`fl_core.training.evaluate.fit`). A
    named ``score`` does both instead. An arm is refused if the interval of that loss is wholly above the base rate's.
    If all arms are refused, there is no plan and no model.

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
        out: the folder; by default one below ``out`` that is named by a digest of the question.
        data, model, keys: as of :func:`fedlayers.run <fedlayers.runs.run>`.
        arms: see :func:`~fedlayers.studies.arms.arms_of`.
        seeds: one for a decision about this run; three or more for one about the federation. The default is the
            configuration's.
        thorough: train all arms to the end. Runs that were stopped early in ``out`` continue.
        score: one of the task's scores (:data:`fl_core.rows.TABLE`), which alone selects.
        tune_rates: number of learning rates to try, 2 to 5 (:mod:`fedlayers.studies.race`), or 0. The first seed tries
            them with all but the last layer shared. Then the arms race at the best. The default is 4 for your own data
            here, else 0. A rate in the configuration is kept, and none is tried.
        baselines: fit the baselines too (:mod:`fedlayers.studies.baselines`).
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
    out = None if out is None else study_folder(out)
    config, own = with_own(config, data, model, **keys)
    tell = progress if callable(progress) else say if progress else no_progress
    if score:
        config = config.with_keys(monitor=check_score(score, task_kind(config, own)))
    began = time.monotonic()
    race = planned(config, own, out, arms, seeds, tune_rates, thorough, tell)
    task, jobs = race.task, race.jobs
    shown = {"parallel": True, "progress": progress is True, "live": live}
    with open_backend(backend, config.execution.workers, **shown) as place:
        cost = race.cost(place.side_by_side)
        tell(cost.text())
        if known := in_words(skew_of(task)):
            tell(known)
        if race.why:
            tell(f"no arm stops early: {race.why}")
        rates, found = None, None
        if race.probes:
            rates = best_rate(race.probes, place, tell, race.benches)
            jobs = race.at_rate(rates.lr)
        if race.at:
            stands, early = run_judged(jobs, race.at, race.rounds, place, tell)
            found = recommend(race, jobs, stands, rates, early, baselines, tell)
            if found.winner is None:
                tell(
                    "no finished run is better than the base rate: all arms train to the end"
                )
        if found is None or found.winner is None:
            jobs, failed = _train_arms(race, jobs, place, tell)
            stands = standings(jobs, race.rounds, failed)
            found = recommend(race, jobs, stands, rates, None, baselines, tell)
        spent = measured_cost(task, race.trained(jobs), place.side_by_side)
    spent = replace(spent, seconds=time.monotonic() - began)
    found = replace(found, cost=cost, measured=spent)
    return stored(found, race.out)


LOWER = (0.3, 0.1)
"""The rates at which arms that diverged train again, times that of the others."""


def _train_arms(
    race: Race, jobs: list[TrainingJob], place: Backend, tell: Tell
) -> tuple[list[TrainingJob], dict[str, str]]:
    """Train all arms, and those that diverge again at lower rates if no rate was asked for.

    Raises:
        RunError: every arm failed.
    """
    failed, given = train(jobs, place, tell), race.config.training.lr is not None
    first = float(jobs[0].config.training.lr or race.task.config.training.lr or 0)
    for factor in () if given else LOWER:
        arms = {job.arm for job in jobs if job.name in failed}
        if not arms:
            break
        lr = float(f"{first * factor:.3g}")
        tell(f"{listing(sorted(arms))} diverged, and trains again at rate {lr:g}")
        lower = [job for job in race.at_rate(lr) if job.arm in arms]
        failed = train(lower, place, tell)
        jobs = [job for job in jobs if job.arm not in arms] + lower
    if len(failed) == len(jobs):
        raise RunError(
            f"every arm failed, the first with: {next(iter(failed.values()))}"
        )
    return jobs, failed


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
    detail: dict[str, Any] = {"lr": float(choice.used.training.lr or 0)}
    if rates is not None:
        detail["rates"] = rates.tried
    ranked = choice.main if choice.trials.empty else "calibrated loss"
    return plan.with_shared(
        plan.shared,
        rule="race",
        metric=task.config.federation.monitor or ranked,
        detail=detail,
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

REFUSED = "refused: significantly above the base rate"
UNSHOWN = "not shown to be better than the base rate"


def recommend(
    race: Race,
    jobs: Sequence[TrainingJob],
    stands: Standing,
    rates: Rates | None,
    early: EarlyStop | None,
    with_baselines: bool,
    tell: Tell,
) -> Choice:
    """Return the recommendation of a race whose runs are finished."""
    main, names = stands.main, [arm.name for arm in race.arms]
    tell("judging the runs on validation samples")
    finished = [job for job in jobs if job.name not in stands.failed]
    if early is not None:
        finished = [job for job in finished if job.arm == early.kept]
    if rates is not None:
        finished += [job for job in rates.jobs if job.arm in names]
    by_run = {job.name: job for job in finished}
    runs, models = ranked(list(by_run.values()), race.rounds, race.benches)
    judges = runs  # trials of rates have the first seed alone
    if len(race.seeds) > 1:
        judges = runs[runs.index.isin([job.name for job in jobs])]
    shown = judges.drop_duplicates(["arm", "seed"])
    columns = list(dict.fromkeys(("run", "lr", main, "loss", "score", "above")))
    keys = ["arm", "seed"]
    own = shown.reset_index()[[*keys, *columns]]
    judged = stands.judged.drop(columns=columns, errors="ignore")
    judged = judged.merge(own, how="left", on=keys)
    seen = [
        samples_of(race.benches[seed].task.data.partition, VALIDATION)
        for seed in (race.seeds[0], race.seeds[-1])
    ]
    overlap = len(seen[0] & seen[1]) / max(1, len(seen[0]))
    there = {
        seed: {str(line.arm): models[line.run] for line in part.itertuples()}
        for seed, part in own[own["run"].isin(models)].groupby("seed")
    }
    against = beside_base_rate(judged, there, race.benches, overlap)
    refused = [name for name in names if name in against.index[against["low"] > 0]]
    passed = against.index[(against["p_value"] <= 0.05) & (against["above"] < 0)]
    better = list(passed) if len(against) else None
    by, sampled = main, None
    if len(there) == len(race.seeds) and set(own["run"]) <= set(models):
        by = race.benches[race.seeds[0]].selecting
        sampled = over_samples(
            [
                {
                    (one, other): race.benches[seed].difference(
                        by_arm[one], by_arm[other], VALIDATION, by
                    )
                    for one, other in combinations(by_arm, 2)
                }
                for seed, by_arm in there.items()
            ]
        )
    found = infer(judged, sampled, refused, by, overlap, better)
    found = replace(found, early=early)
    run = next(iter(runs.index[runs["arm"] == found.leader]), "")
    seed = by_run[run].config.execution.seed if run else race.seeds[0]
    bench, model = race.benches[seed], models.get(run)
    others, notes = [bench.base_rate], list[str]()
    if with_baselines:
        tell("fitting the baselines")
        others = list(predictors(bench, notes.append))
    clients, positives = pd.DataFrame(), pd.DataFrame()
    alone = [arm.name for arm in race.arms if arm.extreme == "nothing"]
    same = runs.index[runs["arm"].isin(alone) & (runs["seed"] == seed)]
    rival = next((models[k] for k in same if k in models), None)
    if found.leader in alone:
        rival = None
    if model is not None and model.outputs[TEST]:
        notes += _left_out(bench, model, main)
        compared = {"model": model, BASE_RATE: bench.base_rate}
        if rival is not None:  # the last is to gain on
            compared["alone"] = rival
        clients = bench.of_clients(compared)
        if bench.kind == CLASSIFICATION and len(race.task.data.classes) == 2:
            positives = bench.positives(model)
    unshown_notes = dict.fromkeys(against.index.difference(passed), UNSHOWN)
    unshown_notes |= dict.fromkeys(refused, REFUSED)
    facts = facts_of(bench, model, rival, others, clients)
    store_models(race.out, bench, by_run.get(run), model, others)
    leaders = shown[~shown["arm"].isin(refused)].drop_duplicates("seed")
    cheapest = min(
        found.remaining, key=lambda name: bytes_a_round(race.tasks[name]), default=""
    )
    led = shown.index[shown["arm"] == found.leader]
    return Choice(
        next((arm for arm in race.arms if arm.name == found.leader), None),
        race.arms,
        stands._replace(judged=judged),
        found,
        by_run[run].path if run else None,
        {by_run[k].config.execution.seed: by_run[k] for k in leaders.index},
        race.rounds if early is None else early.round,
        race.task,
        answers(found, race.arms, cheapest, notes, facts),
        rates=rates,
        trials=_table(
            runs,
            stands.judged,
            refused,
            against.index.difference(passed),
            bench,
            others,
            main,
        ),
        evidence=evidence_of(
            found, there, race.benches, model, others, bench, main, unshown_notes
        ),
        facts=facts,
        clients=clients,
        positives=positives,
        recommended={by_run[k].config.execution.seed: by_run[k] for k in led},
    )


def beside_base_rate(
    judged: pd.DataFrame,
    models: Mapping[int, Mapping[str, Predictor]],
    benches: Mapping[int, Bench],
    overlap: float,
) -> pd.DataFrame:
    """Return how much higher each arm's loss is than the base rate's: ``above``, ``low``, ``high`` and ``p_value``.

    Each interval holds by itself. P-values are corrected by Holm for the number of arms. Arms without a model in a seed
    are left out.

    Args:
        judged: as in :class:`~fedlayers.studies.race.Standing`. models: of each seed, by arm.
    """
    table = judged.pivot(index="arm", columns="seed", values="above").dropna()
    table.loc[BASE_RATE] = 0.0
    pairs = [(str(arm), BASE_RATE) for arm in table.index[:-1]]
    if not pairs:
        return pd.DataFrame(columns=["above", "low", "high", "p_value"])
    sampled = over_samples(
        [
            {
                pair: benches[seed].difference(
                    models[seed][pair[0]], benches[seed].base_rate, VALIDATION
                )
                for pair in pairs
            }
            for seed in table.columns
        ]
    )
    free = table.shape[1] - 1.0  # the base rate is in all pairs
    estimates = paired_estimates(table, pairs, sampled, overlap, free)
    found = pd.DataFrame(
        [one.interval() for one in estimates],
        index=[arm for arm, _ in pairs],
        columns=["above", "low", "high"],
    )
    return found.assign(p_value=holm([one.p_value for one in estimates]))


def _table(
    runs: pd.DataFrame,
    judged: pd.DataFrame,
    refused: Sequence[str],
    unshown: Collection[str],
    bench: Bench,
    others: Sequence[Predictor],
    main: str,
) -> pd.DataFrame:
    """Return a line for each finished run, seed by seed, then for each stopped arm, then for each baseline."""
    runs = runs.sort_values("seed", kind="stable")  # other seeds have other samples
    stopped, seed = pd.DataFrame(), bench.task.config.execution.seed
    if "note" in judged:
        there = (judged["note"] != "") & ~judged["run"].isin(runs.index)
        stopped = judged.loc[there, ["arm", "lr", "seed", "note"]]
    lines = [{"arm": one.name, "seed": seed, **bench.line(one)} for one in others]
    columns = ("arm", "lr", "seed", main, "loss", "above", "low", "high", "note")
    table = pd.concat([runs, stopped, pd.DataFrame(lines)], ignore_index=True)
    table = table.reindex(columns=list(dict.fromkeys(columns)))
    table = table.rename(columns={"arm": "name"}).astype({"note": object})
    worse = table["name"].isin(refused) | (table["low"] > 0)
    table.insert(len(table.columns) - 1, "refused", worse & table["note"].isna())
    unsure = (
        table["above"].notna() & ~(table["high"] < 0) & (table["name"] != BASE_RATE)
    )
    unsure |= table["name"].isin(unshown)
    note = np.select([worse, unsure], [REFUSED, UNSHOWN], "")
    return table.assign(note=table["note"].where(table["note"].notna(), note))


def _left_out(bench: Bench, model: Predictor, main: str) -> list[str]:
    """Name the clients without a score."""
    table, lines = bench.by_client(model), []
    for name in dict.fromkeys((main, "auroc")):
        if name in table and (lacking := list(table.index[table[name].isna()])):
            lines.append(
                f"{label_of(name)} leaves out {listing(lacking)}: {TABLE[name].missing}."
            )
    return lines
