"""Compare algorithms over several seeds on the same federation and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from fedlayers.backends.local import Backend
from fedlayers.decision.comparison import Comparison
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
from fedlayers.decision.simple import baseline_rows, rows_of
from fedlayers.decision.tune import Tuned
from fedlayers.decision.ways import Way
from fl_core import rows
from fl_core.config import AUTO, Keys, RunConfig, with_own
from fl_core.data import Partition
from fl_core.display import csv_bytes
from fl_core.errors import UsageError, as_list, check_known, listing, warn
from fl_core.plan import LayerPlan
from fl_core.rows import check_score
from fl_core.run.task import plan_at
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
    """Return the runs of a comparison, checked against stored ones below ``out``. Nothing is written.

    Without ``out`` only the runs themselves are checked.

    Args:
        settings: keys of the configuration that are an algorithm's own, by algorithm.
        announced: as of :func:`~fedlayers.decision.jobs.assembled`.
        common: as of :func:`~fedlayers.decision.jobs.jobs_of`.

    Warns:
        UserWarning: a plan was measured on samples that some seeds test on.

    Raises:
        UsageError: as for :func:`compare`.
    """
    for name in options or {}:
        check_known("algorithm of this comparison", name, algorithms)
    named = config.federation.plan
    given = plan is not None or named is not None
    if plan is None and named not in (None, AUTO):
        config, plan = config.with_keys(plan=None), plan_at(str(named))
    using = plan_users(algorithms, given)
    arms = []
    for name in algorithms:
        own, keys = (settings or {}).get(name, {}), (options or {}).get(name, {})
        if name not in using:
            own = {**own, "plan": None}
        arms.append(Way(name, name, plan if name in using else None, own, keys))
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
    >>> where = tempfile.TemporaryDirectory()
    >>> comparison = compare(config, ["local", "fedavg"], seeds=[0, 1], out=where.name, progress=False)
    >>> comparison.table[["algorithm", "model", "seeds"]].values.tolist()
    [['local', 'personal', 2], ['fedavg', 'global', 2]]

    Args:
        seeds: the default is three, from the configuration's on.
        out: the folder; default ``out/compare``, as of the command.
        data, model, keys: as of :func:`fedlayers.run <fedlayers.runs.run>`.
        options: each algorithm's own configuration, by name.
        plan: for all algorithms that use one, or its path; by default each has its own.
        tuned: the choice of :func:`~fedlayers.decision.tune.tune` for each algorithm, or the path of its file.
        score: by which algorithms are ranked; see :class:`~fedlayers.decision.comparison.Comparison`.
        baselines: add rows of baselines that need no federation (:mod:`fedlayers.decision.simple`).
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.local`);
            default this process.
        live: as of :func:`~fedlayers.decision.choose.choose`.

    Raises:
        UsageError: an unknown name or an invalid value, before the first run.
        RunError: a run failed; the same call resumes from there.
    """
    out = study_folder(out)
    config, own = with_own(config, data, model, **keys)
    algorithms = as_list("algorithms", algorithms, distinct=True)
    seeds = seeds_of(config, seeds, 3)
    kind = task_kind(config, own)
    if score:
        check_score(score, kind)
    if isinstance(plan, str | Path):
        config, plan = config.with_keys(plan=str(plan)), None
    settings: Mapping[str, dict[str, Any]] = {}
    if tuned is not None:
        tuned = tuned if isinstance(tuned, Tuned) else Tuned.load(tuned)
        settings, options = tuned.apply(config, algorithms, seeds, options, **own)
    asked = (config, algorithms, seeds, out, options, plan, settings)
    jobs = compared_jobs(*asked, set(), command=command, **own)
    shown = {"progress": progress, "live": live}
    with open_backend(backend, config.execution.workers, **shown) as place:
        train(jobs, place)
    frames: list[pd.DataFrame] = []
    for k, task in enumerate(assembled(jobs[:: len(algorithms)], stored=False)):
        losses, at = SeedLosses(task), k * len(algorithms)
        frames += [_scored(job, losses) for job in jobs[at : at + len(algorithms)]]
        if baselines:
            frames.append(rows.frame(baseline_rows(losses)))
    task = next(assembled(jobs, stored=False))
    arms: dict[str, list[str]] = {}  # by how they train
    for job in jobs[: len(algorithms)]:
        how = Training.of(job.resolved.training).description
        arms.setdefault(how, []).append(job.arm)
    trained = "; ".join(f"{listing(who)}: {how}" for how, who in arms.items())
    result = Comparison(
        pd.concat(frames, ignore_index=True),
        bool(task.config.federation.patience),
        how if len(arms) == 1 else trained,
        score=score,
    )
    header = {**task.header(command), "runs": len(jobs)}
    rows.write(out / "rows.jsonl", header, rows.records(result.frame))
    write_atomically(out / "table.csv", csv_bytes(result.table))
    return result


def _scored(job: TrainingJob, losses: SeedLosses) -> pd.DataFrame:
    """Return a run's rows: the loss of probabilities is calibrated, and ``training_loss`` is as in training."""
    frame = job.rows
    if losses.kind not in PROBABLE:
        return frame
    frame = frame.assign(metric=frame["metric"].replace("loss", "training_loss"))
    try:
        loaded = losses.load(job.path, job.model)
    except UsageError:
        warn(f"{job.arm} has no loss: its clients hold parts of the model")
        return frame
    one = losses.of_models(job.arm, loaded.models)
    made = rows_of(losses, one, job.arm, loaded.round, loaded.kind, "calibrated")
    found = rows.frame(made)
    return pd.concat([frame, found[found["metric"] == "loss"]], ignore_index=True)


def _warn_of_seen(
    plan: LayerPlan, job: TrainingJob, partitions: Mapping[int, Partition]
) -> None:
    """Warn of seeds whose test samples were used to measure the plan. Each seed draws its own splits."""
    seed = plan.why.seed
    if seed is None or not plan.why.data:
        return
    own = job.config.with_keys(algorithm="fedavg", plan=None, options={}, seed=seed)
    try:
        data = replace(job, config=own, plan=None).assemble().data
    except UsageError:  # the plan was not measured on data of this partition
        return
    if plan.why.data != data.digest:
        return  # measured on other data: which samples it has seen is not known
    seen = samples_of(data.partition, "train")
    if leaking := [
        str(seed)
        for seed, partition in partitions.items()
        if seen & samples_of(partition, "test")
    ]:
        warn(
            f"the plan was measured on training data of seed {seed} that hold test samples of "
            f"{'seeds' if len(leaking) > 1 else 'seed'} {listing(leaking)}; with plan='auto', and under playerfl, "
            "every run decides on its own training data"
        )
