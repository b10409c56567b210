"""Choose the layers to federate: a few arms are trained, and validation samples pick one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from fedlayers.backends.local import Backend, no_progress
from fedlayers.studies.arms import Ways
from fedlayers.studies.baselines import predictors
from fedlayers.studies.choice import (
    Choice,
    Fallback,
    answers,
    infer,
    over_samples,
    paired_estimates,
)
from fedlayers.studies.first_screen import evidence_of, facts_of
from fedlayers.studies.harmless import BASE_RATE, TEST, VALIDATION, Bench, Predictor
from fedlayers.studies.hint import (
    bytes_a_round,
    cost_in_words,
    costs_of,
    in_words,
    measured_cost,
    planned,
    skew_of,
)
from fedlayers.studies.jobs import (
    Tell,
    open_backend,
    samples_of,
    study_folder,
    task_kind,
)
from fedlayers.studies.model_files import store_models
from fedlayers.studies.race import Decided, Trained, decide, standings
from fl_core import __version__, tree
from fl_core.config import RunConfig, RunKeys, with_own
from fl_core.errors import listing
from fl_core.plan import LayerPlan
from fl_core.progress import say
from fl_core.rows import TABLE, check_score, in_column, label_of
from fl_core.statistics import simultaneous
from fl_core.storage import write_json


def choose(
    config: RunConfig | None = None,
    out: Path | str | None = None,
    *,
    data: Any = None,
    model: Any = None,
    arms: Ways = None,
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
    """Share everything first, then both ends where clients differ, and recommend what validation samples say is best.

    :func:`fedlayers.studies.race.decide` has the steps. A run's best round, and its end, follow from the ranks of two
    scores (:data:`fl_core.rows.SELECTION`). Rates, own epochs and arms are ranked by the calibrated validation loss
    (:func:`fl_core.training.evaluate.fit`). A named ``score`` does both instead. An arm is refused if its loss is
    significantly above the base rate's. If all arms are refused, there is no plan and no model.

    With several seeds the arm with the best mean over seeds is recommended, and its best run is the model. Nothing here
    reads test samples before the model is named. Then it is scored on them once, next to the base rate, the baselines
    and the fallback: training alone for those clients whose validation loss is lower alone.

    After a stop, the same call resumes. Below ``out`` are ``arms/`` (run directories), ``models/``, ``choice.json``,
    and ``plan.json`` if the winner uses a plan. The plan has the evidence, and its own epochs. If there is no plan now,
    that of an earlier call is removed.

    Args:
        config: of the runs. Its algorithm uses the cuts if it uses a plan; otherwise FedPer does.
        out: the folder; by default one below ``out`` that is named by a digest of the question.
        data, model, keys: as of :func:`fedlayers.run <fedlayers.runs.run>`.
        arms: what to train in place of the steps; see :func:`~fedlayers.studies.arms.arms_of`.
        seeds: one for a decision about this run; three or more for one about the federation. The default is the
            configuration's.
        thorough: train every cut from both ends.
        score: one of the task's scores (:data:`fl_core.rows.TABLE`), which alone selects.
        tune_rates: number of learning rates to try with all layers shared, 2 to 5, or 0. The default is 4 for your own
            data here, else 0: a named dataset has its own rate. A rate in the configuration is kept.
        baselines: fit the baselines too (:mod:`fedlayers.studies.baselines`).
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.local`);
            default this process, with the configuration's number of ``workers``.
        progress: print the estimated cost and a line whenever a step is done, and show the runs that are done. A
            function receives the lines alone.
        live: draw the runs' main score in the notebook's cell, again at most once a second.

    Raises:
        UsageError: an unknown name or an invalid value, or runs of another configuration below ``out``, before any
            training.
        RunError: every arm failed.

    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> config = RunConfig(dataset="heart", rounds=4, eval_every=1)
    >>> choice = choose(config, where.name, baselines=False, progress=False)
    >>> choice.inference.seeds, {"all", "nothing"} <= set(choice.table["arm"])
    (1, True)
    """
    out = None if out is None else study_folder(out)
    config, own = with_own(config, data, model, **keys)
    tell = progress if callable(progress) else say if progress else no_progress
    if score:
        config = config.with_keys(monitor=check_score(score, task_kind(config, own)))
    began = time.monotonic()
    race = planned(config, own, out, arms, seeds, tune_rates, thorough, tell)
    shown = {"parallel": True, "progress": progress is True, "live": live}
    with open_backend(backend, config.execution.workers, **shown) as place:
        costs = costs_of(race, place.side_by_side)
        tell(cost_in_words(*costs))
        if known := in_words(skew_of(race.task)):
            tell(known)
        found = decide(race, place, tell)
        choice = recommend(found, baselines, tell)
        trained = {job.path: job for job in (*race.probes, *found.jobs)}
        spent = measured_cost(
            race.task, [*trained.values()], place.side_by_side, found.price
        )
    spent = replace(spent, seconds=time.monotonic() - began)
    cost = costs[sum(spent.runs > each.runs for each in costs[:2])]
    return stored(replace(choice, cost=cost, measured=spent), race.out)


def stored(choice: Choice, out: Path) -> Choice:
    """Write the files of a decision. The plan gets its evidence.

    A plan of an earlier decision is removed if there is none now.
    """
    if choice.winner is not None:
        winner = replace(choice.winner, plan=_with_evidence(choice))
        choice = replace(choice, winner=winner)
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
    if plan is None or choice.winner is None:
        return None
    seeds = listing(map(str, choice.standing.judged["seed"].unique()))
    head, lines, main = choice.answers.head, choice.answers.lines, choice.main
    scores = choice.standing.judged.groupby("arm", sort=False)[main].mean(skipna=False)
    told = (f"{arm} {in_column(main, value)}" for arm, value in scores.dropna().items())
    unit = " %" * TABLE[main].share
    used = choice.standing.judged.groupby("arm")["lr"].first()  # NaN: none was tried
    lr = used.fillna(float(task.config.training.lr or 0))[choice.winner.name]
    detail: dict[str, Any] = {"lr": float(lr)}
    if choice.winner.epochs:
        detail |= {"own_epochs": choice.winner.epochs, "own_rate": choice.winner.rate}
    if rates is not None:
        detail["rates"] = rates.tried
    return plan.with_shared(
        plan.shared,
        rule="race",
        metric=task.config.federation.monitor or "calibrated loss",
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


# --- the recommendation: all arms next to the base rate and the baselines ---------------------------------------

REFUSED = "refused: above base rate"
UNSHOWN = "base rate not beaten"


def recommend(found: Decided, with_baselines: bool, tell: Tell) -> Choice:
    """Return the recommendation of a decision whose runs are finished."""
    race = found.race
    tell("judging the runs on validation samples")
    stands = standings(found.jobs, found.failed, found.runs)
    main, by = stands.main, race.benches[race.seeds[0]].selecting
    judged = stands.judged
    models = {
        seed: {one.arm: one.model for one in found.runs if one.seed == seed}
        for seed in race.seeds
    }
    seen = [
        samples_of(race.benches[seed].task.data.partition, VALIDATION)
        for seed in (race.seeds[0], race.seeds[-1])
    ]
    overlap = len(seen[0] & seen[1]) / max(1, len(seen[0]))
    against = beside_base_rate(judged, models, race.benches, overlap)
    shown = against["p_value"] <= 0.05
    refused = [*against.index[shown & (against["above"] > 0)]]
    better = [*against.index[shown & (against["above"] < 0)]]
    sampled = over_samples(
        [
            {
                (one, other): race.benches[seed].difference(
                    by_arm[one], by_arm[other], VALIDATION, by
                )
                for one, other in combinations(by_arm, 2)
            }
            for seed, by_arm in models.items()
        ]
    )
    inference = infer(judged, sampled, refused, by, overlap, better)
    of_arm: dict[str, Trained] = {}  # the best run of each
    for one in sorted(found.runs, key=lambda one: -one.scores["score"]):
        of_arm.setdefault(one.arm, one)
    best = of_arm.get(inference.leader)
    bench = race.benches[race.seeds[0] if best is None else best.seed]
    model = None if best is None else best.model
    notes = found.said
    others = [bench.base_rate]
    if with_baselines:
        tell("fitting the baselines")
        others = list(predictors(bench, notes.append))
    alone = None
    fallback = None
    for arm in race.arms:
        if arm.extreme == "nothing" and best is not None and arm.name != best.arm:
            alone = found.of(arm.name).get(best.seed)
    clients = pd.DataFrame()
    if model is not None and model.outputs[TEST]:
        notes += _left_out(bench, model, main)
        compared = {"model": model, BASE_RATE: bench.base_rate}
        if alone is not None:  # the last is to gain on
            compared["alone"] = alone.model
            fallback = _fallback(bench, model, alone)
        clients = bench.of_clients(compared)
    if fallback is not None:
        notes.append(fallback.text(by))
    unshown_notes = dict.fromkeys(against.index.difference(better), UNSHOWN)
    unshown_notes |= dict.fromkeys(refused, REFUSED)
    rival = None if alone is None else alone.model
    facts = facts_of(bench, model, rival, others, clients)
    store_models(race.out, bench, best, others, alone, fallback)
    arms = tuple(
        replace(arm, epochs=of_arm[arm.name].epochs, rate=of_arm[arm.name].rate)
        if arm.name in of_arm
        else arm
        for arm in race.arms
        if arm.name in set(judged["arm"])
    )
    cheapest = min(
        inference.remaining,
        key=lambda name: bytes_a_round(race.tasks[name]),
        default="",
    )
    return Choice(
        next((arm for arm in arms if arm.name == inference.leader), None),
        arms,
        stands,
        inference,
        best.job.path if best else None,
        race.rounds,
        race.task,
        answers(inference, arms, cheapest, notes, facts),
        rates=found.rates,
        evidence=evidence_of(
            inference, models, race.benches, model, others, bench, main, unshown_notes
        ),
        facts=facts,
        clients=clients,
        runs=found.runs,
        benches=race.benches,
        fallback=fallback,
    )


def _fallback(bench: Bench, model: Predictor, alone: Trained) -> Fallback | None:
    """Return training alone for those clients whose validation loss is lower alone; None without any."""
    shared, single = (
        bench.by_client(one, VALIDATION)["loss"] for one in (model, alone.model)
    )
    names = list(shared.index[single < shared])
    if not names:
        return None
    outputs = {
        split: {
            client: (alone.model if client in names else model).outputs[split][client]
            for client in own
        }
        for split, own in model.outputs.items()
    }
    mixed = Predictor("fallback", outputs)
    gain = bench.difference(mixed, model, TEST, bench.selecting).interval()
    return Fallback(tuple(names), mixed, gain)


def beside_base_rate(
    judged: pd.DataFrame,
    models: Mapping[int, Mapping[str, Predictor]],
    benches: Mapping[int, Bench],
    overlap: float,
) -> pd.DataFrame:
    """Return how much higher each arm's loss is than the base rate's: ``above``, ``low``, ``high`` and ``p_value``.

    They hold together (:func:`fl_core.statistics.simultaneous`), so that refusals and claims have one level for all
    arms. Arms without a model in a seed are left out.

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
    found = simultaneous(paired_estimates(table, pairs, sampled, overlap, free))
    found = found.rename(columns={"difference": "above"})
    return found.set_axis([arm for arm, _ in pairs])


def _left_out(bench: Bench, model: Predictor, main: str) -> list[str]:
    """Name the clients without a score."""
    table = bench.by_client(model)
    lines = []
    for name in dict.fromkeys((main, "auroc")):
        if name in table and (lacking := list(table.index[table[name].isna()])):
            lines.append(
                f"{label_of(name)} leaves out {listing(lacking)}: {TABLE[name].missing}."
            )
    return lines
