"""Compare algorithms on test samples over several seeds, or settings of each algorithm on validation samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from fedlayers.backends.local import Backend
from fedlayers.decision.comparison import Comparison, headline, scores_of
from fedlayers.decision.jobs import (
    TrainingJob,
    assembled,
    jobs_of,
    open_backend,
    plan_users,
    samples_of,
    seeds_of,
    study_folder,
    task_kind,
    train,
)
from fedlayers.decision.losses import PROBABLE, SeedLosses
from fedlayers.decision.price import estimate_cost
from fedlayers.decision.search import TRAINING, Tuned, parts_of, points, spaces
from fedlayers.decision.simple import baseline_rows, predictors, rows_of
from fedlayers.decision.table import TEST, VALIDATION, LossTable, Part, mean_alone
from fedlayers.decision.ways import Way
from fl_core import __version__, rows
from fl_core.config import AUTO, ROUNDS, RunConfig, with_own
from fl_core.data import Partition
from fl_core.display import csv_bytes
from fl_core.errors import (
    NonFiniteError,
    RunError,
    UsageError,
    as_list,
    check_known,
    check_value,
    listing,
    warn,
)
from fl_core.keys import Keys
from fl_core.plan import LayerPlan
from fl_core.rows import MAIN, check_score, main_score
from fl_core.run.task import Task, plan_at
from fl_core.storage import write_atomically
from fl_core.training.phases import Training


def compared_jobs(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path | None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    plan: LayerPlan | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    announced: set[str] | None = None,
    **common: Any,
) -> list[TrainingJob]:
    """Return the runs of a comparison, after checks against stored runs below ``out``. Nothing is written.

    Without ``out`` only the runs themselves are checked.

    Args:
        config, algorithms, seeds, options, plan: as for :func:`compare`, with all seeds listed.
        out: the folder whose subfolder ``runs`` has the runs.
        settings: keys of the configuration that are an algorithm's own, by algorithm.
        announced: as for :func:`~fedlayers.decision.jobs.assembled`.
        common: as for :func:`~fedlayers.decision.jobs.jobs_of`.

    Warns:
        UserWarning: a plan was measured on samples that some seeds test on.

    Raises:
        UsageError: as for :func:`compare`.
    """
    for name in options or {}:
        check_known("algorithm of this comparison", name, algorithms)
    plan_name = config.federation.plan
    has_plan = plan is not None or plan_name is not None
    if plan is None and plan_name not in (None, AUTO):
        config, plan = config.with_keys(plan=None), plan_at(str(plan_name))
    algorithms_with_plan = plan_users(algorithms, has_plan)
    arms = []
    for name in algorithms:
        own_settings, keys = (
            (settings or {}).get(name, {}),
            (options or {}).get(name, {}),
        )
        if name not in algorithms_with_plan:
            own_settings = {**own_settings, "plan": None}
        arms.append(
            Way(
                name,
                name,
                plan if name in algorithms_with_plan else None,
                own_settings,
                keys,
            )
        )
    jobs = jobs_of(arms, config, seeds, Path(out or "") / "runs", **common)
    partitions = {
        task.config.execution.seed: task.data.partition
        for task in assembled(jobs, stored=out is not None, announced=announced)
    }
    if plan is not None:
        _warn_of_seen(plan, jobs[0], partitions)
    return jobs


def compare(
    config: RunConfig | None = None,
    algorithms: str | Sequence[str] = (),
    seeds: Sequence[int] | int | None = None,
    out: Path | str = "out/compare",
    *,
    data: Any = None,
    model: Any = None,
    options: Mapping[str, dict[str, Any]] | None = None,
    plan: LayerPlan | Path | str | None = None,
    tuned: Tuned | Path | str | None = None,
    score: str = "",
    baselines: bool = False,
    backend: Backend | str = "",
    command: str = "",
    progress: bool = True,
    live: bool = False,
    **keys: Unpack[Keys],
) -> Comparison:
    """Run every algorithm with every seed below ``out``/runs, compare, and write ``rows.jsonl`` and ``table.csv``.

    Finished runs are read and interrupted runs are resumed, so a comparison can be stopped and started again. It
    refuses runs whose configuration, plan, data or initial model differ. All algorithms of a seed have the same initial
    model, data split, client sample and batches.

    >>> config = RunConfig(dataset="heart", rounds=1)
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> comparison = compare(config, ["local", "fedavg"], seeds=[0, 1], out=folder.name, progress=False)
    >>> comparison.table[["algorithm", "model", "seeds"]].values.tolist()
    [['local', 'personal', 2], ['fedavg', 'global', 2]]

    Args:
        config: the configuration of all runs.
        algorithms: names of the algorithms.
        seeds: the seeds, or their number. The default is three, from the configuration's seed on.
        out: the output folder, by default ``out/compare`` as for the command.
        data, model, keys: as for :func:`fedlayers.run <fedlayers.runs.run>`.
        options: each algorithm's own configuration, by name.
        plan: a plan or its path, for all algorithms that use one. By default each uses its own.
        tuned: the choice of :func:`~fedlayers.decision.compare.tune` for each algorithm, or the path of its file.
        score: the score that ranks the algorithms; see :class:`~fedlayers.decision.comparison.Comparison`.
        baselines: add rows of baselines that need no federation (:mod:`fedlayers.decision.simple`).
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.local`);
            default this process.
        command: the user's command, for the record.
        progress: show the runs that are done.
        live: as for :func:`~fedlayers.decision.choose.choose`.

    Raises:
        UsageError: an unknown name or an invalid value, before the first run.
        RunError: a run failed; the same call resumes from there.
    """
    out = study_folder(out)
    config, objects = with_own(config, data, model, **keys)
    algorithms = as_list("algorithms", algorithms, distinct=True)
    seeds = seeds_of(config, seeds, 3)
    kind = task_kind(config, objects)
    if score:
        check_score(score, kind)
    if isinstance(plan, str | Path):
        config, plan = config.with_keys(plan=str(plan)), None
    settings: Mapping[str, dict[str, Any]] = {}
    if tuned is not None:
        tuned = tuned if isinstance(tuned, Tuned) else Tuned.load(tuned)
        settings, options = tuned.apply(config, algorithms, seeds, options, **objects)
    arguments = (config, algorithms, seeds, out, options, plan, settings)
    jobs = compared_jobs(*arguments, set(), command=command, **objects)
    display_options = {"progress": progress, "live": live}
    with open_backend(backend, config.execution.workers, **display_options) as place:
        train(jobs, place)
    score_of_table = score or main_score(set(jobs[0].rows["metric"]))
    table, frame, _ = table_of(jobs, score_of_table, TEST, baselines=baselines)
    task = next(assembled(jobs, stored=False))
    by_training: dict[str, list[str]] = {}
    for job in jobs[: len(algorithms)]:
        training = Training.of(job.resolved.training).description
        by_training.setdefault(training, []).append(job.arm)
    training_texts = list(by_training)
    if len(by_training) > 1:
        training_texts = [
            f"{listing(algorithm_names)}: {training_text}"
            for training_text, algorithm_names in by_training.items()
        ]
    has_stopping_rule = bool(task.config.federation.patience)
    result = Comparison(
        frame, has_stopping_rule, "; ".join(training_texts), table, score=score
    )
    header = {**task.header(command), "runs": len(jobs)}
    rows.write(out / "rows.jsonl", header, rows.records(result.frame))
    write_atomically(out / "table.csv", csv_bytes(result.table))
    return result


def table_of(
    jobs: Sequence[TrainingJob],
    score: str,
    split: str,
    failed: Mapping[str, str] | None = None,
    baselines: bool = False,
) -> tuple[LossTable, pd.DataFrame, dict[str, str]]:
    """Return the table of losses of trained runs, their rows, and why runs have no score, by name.

    Args:
        jobs: the runs, which have ended.
        score: the score that ranks the runs.
        split: the split whose samples are scored. Others are not read.
        failed: {run: why it has no result}. If given, runs without a finite score join
            them. It is not changed.
        baselines: add the simple models (:mod:`fedlayers.decision.simple`).

    Warns:
        UserWarning: the clients of an algorithm hold parts of the model, so that it has
            no calibrated loss.

    Raises:
        UsageError: an output of classes or labels is not finite, and ``failed`` is
            None.
        NonFiniteError: the same for an output of another task.
    """
    parts: dict[tuple[int, str, str], Part] = {}
    frames, missing = [], dict(failed or {})
    by_seed: dict[int, list[TrainingJob]] = {}
    for job in jobs:
        by_seed.setdefault(job.config.execution.seed, []).append(job)
    seed_losses = []
    for seed, seed_jobs in by_seed.items():
        losses = SeedLosses(next(assembled(seed_jobs[:1], stored=False)))
        seed_losses.append(losses)
        for job in seed_jobs:
            if job.name in missing:
                continue
            try:
                frame, part = _scored(job, losses, score, split)
            except (UsageError, NonFiniteError) as error:  # outputs are not finite
                if failed is None:
                    raise
                missing[job.name] = str(error)
                continue
            if failed is not None and math.isnan(part.mean):
                missing[job.name] = f"no finite {score} on {split} samples"
                continue
            frames.append(frame)
            parts[seed, job.arm, split] = part
        if not baselines:
            continue
        for predictor in predictors(losses):
            frames.append(rows.frame(baseline_rows(losses, predictor)))
            parts[seed, predictor.name, split] = losses.part(predictor, split, score)
    overlap = {split: seed_losses[-1].overlap(seed_losses[0], split)}
    table = LossTable(parts, score, overlap, tuple(seed_losses[0].sizes))
    frame = pd.DataFrame()
    if frames:
        frame = pd.concat(frames, ignore_index=True)
    return table, frame, missing


def _scored(
    job: TrainingJob, losses: SeedLosses, score: str, split: str
) -> tuple[pd.DataFrame, Part]:
    """Return a run's rows and its part of the table of losses.

    If the outputs are probabilities, the run's own rows ``loss`` become ``training_loss``.
    If ``split`` is the test split, rows with the calibrated ``loss`` of validation and test
    are added. If clients hold parts of the model, the part has a mean alone. For
    probabilities a warning then says that there is no calibrated loss.

    Args:
        job: the run.
        losses: the samples of its seed.
        score: the score of the part.
        split: the split of the part.

    Raises:
        UsageError: an output of classes or labels is not finite.
        NonFiniteError: an output of another task is not finite.
    """
    frame, has_probabilities = job.rows, losses.kind in PROBABLE
    if has_probabilities:
        frame = frame.assign(metric=frame["metric"].replace("loss", "training_loss"))
    try:
        loaded = losses.load(job.path, job.model)
    except UsageError:
        if has_probabilities:
            warn(f"{job.arm} has no loss: its clients hold parts of the model")
        scores = scores_of(headline(frame, split, job.best_round is not None))
        means = scores.set_index("metric")["value"]
        return frame, mean_alone(float(means.get(score, math.nan)))
    predictor = losses.of_models(job.arm, loaded.models)
    part = losses.part(predictor, split, score)
    if has_probabilities and split == TEST:
        frame_rows = rows_of(
            losses, predictor, job.arm, loaded.round, loaded.kind, "calibrated"
        )
        calibrated = rows.frame(frame_rows)
        calibrated = calibrated[calibrated["metric"] == "loss"]
        frame = pd.concat([frame, calibrated], ignore_index=True)
    return frame, part


def _warn_of_seen(
    plan: LayerPlan, job: TrainingJob, partitions: Mapping[int, Partition]
) -> None:
    """Warn of seeds whose test samples were used to measure the plan.

    Each seed draws its own splits. There is no warning if the plan has no record of its
    data, or was measured on other data.
    """
    seed = plan.why.seed
    if seed is None or not plan.why.data:
        return
    run_config = job.config.with_keys(
        algorithm="fedavg", plan=None, options={}, seed=seed
    )
    try:
        data = replace(job, config=run_config, plan=None).assemble().data
    except UsageError:  # the plan was not measured on data of this partition
        return
    if plan.why.data != data.digest:
        return  # measured on other data: which samples it has seen is not known
    training_samples = samples_of(data.partition, "train")
    if leaking_seeds := [
        str(seed)
        for seed, partition in partitions.items()
        if training_samples & samples_of(partition, "test")
    ]:
        seeds_word = "seeds" if len(leaking_seeds) > 1 else "seed"
        warn(
            f"the plan was measured on training data of seed {seed} that hold test samples of "
            f"{seeds_word} {listing(leaking_seeds)}; with plan='auto', and under playerfl, "
            "every run decides on its own training data"
        )


# --- tuning: a comparison of settings on validation samples ----------------------------------------------------

APART = 1000
"""Distance of tuning's first seed from the one that is asked for, so that a comparison uses other seeds."""
TRIALS = 8


def tune(
    config: RunConfig | None = None,
    algorithms: str | Sequence[str] = (),
    search: Mapping[str, Any] | None = None,
    out: Path | str = "out/tune",
    *,
    data: Any = None,
    model: Any = None,
    trials: int = TRIALS,
    seeds: Sequence[int] | int | None = None,
    score: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    backend: Backend | str = "",
    progress: bool = True,
    live: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    **keys: Unpack[Keys],
) -> Tuned:
    """Search the learning rate and the algorithms' own keys, with the same budget for each algorithm.

    Every algorithm tries ``trials`` settings, drawn at random, or all of them if these are fewer (a grid). Each is
    trained in full, once per seed. The one with the best validation score is chosen. The score is the mean over clients
    weighted by training samples, then over seeds, of the model that a client would use: in its best round under a
    stopping rule, else in its last one.

    Nothing here reads scores on test samples. Data without a test set of their own are split differently in each seed.
    One seed's validation samples are then partly another seed's test samples.

    After a stop, the same call resumes, also with more ``trials``. Below ``out``: ``trials/`` (run directories),
    ``trials.csv`` and ``tuned.json``, which :func:`~fedlayers.decision.compare.compare` takes.

    Args:
        config: the configuration of all runs. Its ``workers`` train runs side by side.
        algorithms: names of the algorithms.
        out: the output folder, by default ``out/tune`` as for the command.
        data, model, keys: as for :func:`fedlayers.run <fedlayers.runs.run>`.
        search: the values to search, by key; see :func:`~fedlayers.decision.search.spaces`.
        trials: the number of settings that each algorithm tries.
        seeds: the seeds of the runs. A later comparison must use others. The default is the configuration's seed +
            1000.
        score: one of :data:`fl_core.rows.SCORES`, by default the main score of the task.
        options: fixed keys of the algorithms, by algorithm.
        backend: where runs are trained; see :func:`~fedlayers.decision.choose.choose`.
        progress: show the runs that are done.
        live: as for :func:`~fedlayers.decision.choose.choose`.
        tell: receives the estimated cost, and a line whenever a run is done.

    Raises:
        UsageError: an unknown name or an invalid value, or runs of other settings below ``out``, before any training.
        RunError: every trial of an algorithm failed.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> config = RunConfig(dataset="heart", rounds=2)
    >>> tuned = tune(config, ["fedavg", "fedprox"], {"lr": "0.001,0.1", "mu": "0.01..1:log"}, folder.name, trials=2)
    >>> tuned.trials, sorted(tuned.settings["fedprox"]), sorted(tuned.settings["fedavg"])
    ({'fedavg': 2, 'fedprox': 2}, ['lr', 'mu'], ['lr'])
    """
    out = study_folder(out)
    config, objects = with_own(config, data, model, **keys)
    seeds = seeds_of(config, seeds, 1, APART)
    check_value("trials", trials, ROUNDS)
    algorithms = as_list("algorithms", algorithms, distinct=True)
    kind = task_kind(config, objects)
    score = check_score(score or MAIN[kind], kind)
    for name in options or {}:
        check_known("algorithm that is tuned", name, algorithms)
    spaces_by_algorithm = spaces(search, algorithms, options)
    for key in sorted({*chain.from_iterable(spaces_by_algorithm.values())}):
        if key in TRAINING and config.value(key) is not None:
            raise UsageError(f"{key} must be searched or set, not both. Leave one out.")
    algorithms_with_plan = plan_users(
        algorithms, given=config.federation.plan is not None
    )
    arms, tested_settings, lines = [], {}, []
    for name in algorithms:
        fixed_settings = {} if name in algorithms_with_plan else {"plan": None}
        points_of_way = points(spaces_by_algorithm[name], trials, config.execution.seed)
        for number, point in enumerate(points_of_way):
            settings, algorithm_options = parts_of(point)
            all_own = {**(options or {}).get(name, {}), **algorithm_options}
            arm = Way(
                f"{name}-{number:03}",
                name,
                None,
                {**fixed_settings, **settings},
                all_own,
            )
            arms.append(arm)
            tested_settings[name, number] = point
            line = {"arm": arm.name, "algorithm": name, "trial": number}
            lines.append({**line, **point})
    settings_table = pd.DataFrame(lines)
    jobs = jobs_of(arms, config.with_keys(workers=0), seeds, out / "trials", **objects)
    tasks: dict[str, Task] = {}
    for job, task in zip(jobs, assembled(jobs, announced=set()), strict=True):
        tasks[job.arm] = task
    first_task = tasks[jobs[0].arm]
    display_options = {"parallel": True, "progress": progress, "live": live}
    with open_backend(backend, config.execution.workers, **display_options) as place:
        cost = estimate_cost(tasks, jobs, place.side_by_side).text()
        tell(f"at most {cost}" if first_task.config.federation.patience else cost)
        failed = train(jobs, place, tell)
    losses, _, failed = table_of(jobs, score, VALIDATION, failed)
    table = _table(
        settings_table,
        losses,
        {job.arm: failed[job.name] for job in jobs if job.name in failed},
    )
    write_atomically(out / "trials.csv", csv_bytes(table))
    best_trials = table[table["best"]].set_index("algorithm")
    for name in algorithms:
        if name not in best_trials.index:
            reason = table.loc[table["algorithm"] == name, "failed"].iloc[0]
            raise RunError(f"every trial of {name} failed, the first with: {reason}")
    result = Tuned(
        settings={
            name: tested_settings[name, best_trials["trial"][name]]
            for name in algorithms
        },
        values={name: float(best_trials["value"][name]) for name in algorithms},
        trials=settings_table.groupby("algorithm", sort=False).size().to_dict(),
        score=score,
        dataset=first_task.config.data.dataset,
        rounds=int(first_task.config.federation.rounds or 1),
        seeds=seeds,
        version=__version__,
        table=table,
    )
    result.save(out / "tuned.json")
    return result


def _table(
    tried: pd.DataFrame, losses: LossTable, failed: Mapping[str, str]
) -> pd.DataFrame:
    """Return the trials with the columns ``value``, ``failed`` and ``best``.

    ``best`` is True for the trial with the best value of each algorithm.

    Args:
        tried: a line for each trial, with its ``arm``, ``algorithm`` and settings.
        losses: the scores of the trials that have a result. ``value`` is the mean over
            seeds, and NaN for other trials.
        failed: why a trial has no result, by its arm; empty text for others.
    """
    table = tried.drop(columns="arm")
    present_ways = set(losses.ways)
    table["value"] = [
        losses.mean(arm, VALIDATION)
        if arm in present_ways and arm not in failed
        else math.nan
        for arm in tried["arm"]
    ]
    table["failed"] = [failed.get(arm, "") for arm in tried["arm"]]
    signed_values = losses.sign * table["value"]
    best_rows = signed_values.dropna().groupby(table["algorithm"]).idxmax()
    table["best"] = table.index.isin(best_rows)
    return table
