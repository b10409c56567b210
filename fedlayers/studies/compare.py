"""Compare algorithms over several seeds on the same federation and budget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.backends.base import Backend
from fedlayers.backends.names import open_backend
from fedlayers.studies.argument_checks import checked_call, seeds_of, task_kind
from fedlayers.studies.baselines import baseline_rows
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.training_job import TrainingJob, train
from fedlayers.studies.tuned import Tuned
from fl_core import restore, rows, runner
from fl_core.algorithms import find
from fl_core.config import KEYS, RunConfig, in_memory
from fl_core.data import Partition
from fl_core.defaults import resolve
from fl_core.errors import UsageError, check_distinct, check_known, listing, warn
from fl_core.names import csv_bytes
from fl_core.plan import LayerPlan
from fl_core.plan_selection import Instruments
from fl_core.records import store, writing
from fl_core.restore import check_given
from fl_core.scores import check_score
from fl_core.storage.files import write_atomically
from fl_core.training.phases import Training

Plans = LayerPlan | Mapping[str, LayerPlan] | None
PART = 1000
"""Rows that are held as records at a time."""


def jobs_of(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path | str | None,
    options: Mapping[str, dict[str, Any]] | None = None,
    plan: Plans = None,
    settings: Mapping[str, dict[str, Any]] | None = None,
) -> list[TrainingJob]:
    """Return the runs of a comparison, checked against stored ones below ``out``. Nothing is written.

    Without ``out`` only the runs themselves are checked.

    Args:
        settings: keys of the configuration that are an algorithm's own, by algorithm.

    Warns:
        UserWarning: a plan was measured on samples that some seeds test on.

    Raises:
        UsageError: as for :func:`compare`.
    """
    check_distinct("a comparison", "algorithm", algorithms)
    check_distinct("a comparison", "seed", seeds)
    for name in options or {}:
        check_known("algorithm of this comparison", name, algorithms)
    plans = (
        dict.fromkeys(algorithms, plan)
        if isinstance(plan, LayerPlan)
        else dict(plan or {})
    )
    using = plan_users(
        algorithms, given=plan is not None or config.federation.plan is not None
    )
    jobs: list[TrainingJob] = []
    dealt: dict[int, tuple[str, Partition]] = {}
    for seed in seeds:
        data = None  # the same for all algorithms of a seed
        for name in algorithms:
            run_config = config.with_keys(
                algorithm=name, seed=seed, options=(options or {}).get(name, {})
            )
            run_config = run_config.with_keys(**(settings or {}).get(name, {}))
            its_plan = plans.get(name) if name in using else None
            run_config = (
                run_config if name in using else run_config.with_keys(plan=None)
            )
            jobs.append(
                TrainingJob(
                    Path(out or "") / "runs" / f"{name}-{seed}", run_config, its_plan
                )
            )
            task = runner.assemble(jobs[-1].config, plan=jobs[-1].plan, loaded=data)
            data = task.data
            dealt[seed] = data.digest, data.partition
            if out is not None:
                check_stored(jobs[-1].path, task)
    for each_plan in {
        id(job.plan): job.plan for job in jobs if job.plan is not None
    }.values():
        _warn_of_seen(each_plan, config, dealt)
    return jobs


def plan_users(algorithms: Sequence[str], given: bool) -> set[str]:
    """Return the algorithms that use a plan.

    Args:
        given: whether a plan is given to them.

    Raises:
        UsageError: a plan is given, and none uses it.
    """
    using = {name for name in algorithms if find(name).uses_plan}
    if given and not using:
        raise UsageError(
            f"algorithms must have one that uses a plan; got {listing(algorithms)}. Add one, such as fedper."
        )
    return using


@checked_call
def compare(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: Sequence[int] | None = None,
    out: Path | str = "out/compare",
    *,
    data: Any = None,
    model: Any = None,
    instruments: Instruments | None = None,
    options: Mapping[str, dict[str, Any]] | None = None,
    plan: Plans = None,
    tuned: Tuned | Path | str | None = None,
    best: bool | None = None,
    score: str = "",
    baselines: bool = False,
    beside: pd.DataFrame | None = None,
    backend: Backend | str = "",
    command: str = "",
    progress: bool = True,
    live: bool = False,
) -> Comparison:
    """Run every algorithm with every seed below ``out``/runs, compare, and write ``rows.jsonl`` and ``table.csv``.

    Finished runs are read and interrupted runs are resumed, so a comparison can be stopped and started again. It
    refuses runs whose configuration, plan, data or initial model differ. All algorithms of a seed have the same initial
    model, data split, client sample and batches.

    >>> config = RunConfig(dataset="heart", rounds=1)
    >>> comparison = compare(config, ["local", "fedavg"], seeds=[0, 1], out="comparison", progress=False)
    >>> comparison.table[["algorithm", "model", "seeds"]].values.tolist()
    [['local', 'personal', 2], ['fedavg', 'global', 2]]

    Args:
        seeds: the default is three, from the configuration's on.
        out: the folder; default ``out/compare``, as of the command.
        data, model: your own, as of :func:`fedlayers.run <fedlayers.runs.run>`.
        instruments: how runs measure and decide; by default the diagnostics.
        options: each algorithm's own configuration, by name.
        plan: one for all algorithms that use one, or one per algorithm by name; the others use their default.
        tuned: the choice of :func:`~fedlayers.studies.tune.tune` for each algorithm, or the path of its file.
        best: score models at their best round on validation (:func:`~fedlayers.studies.comparison.headline`). The runs
            are the same. The default is true under a stopping rule (``patience``).
        score: by which algorithms are ranked; see :class:`~fedlayers.studies.comparison.Comparison`.
        baselines: add rows of baselines that need no federation (:mod:`fedlayers.studies.baselines`).
        beside: rows of other runs with these seeds, to show as a further algorithm.
        backend: where runs are trained: ``local:N``, ``ray`` or ``ray:HOST:PORT`` (:mod:`fedlayers.backends.base`);
            default this process.
        live: as of :func:`~fedlayers.studies.choose.choose`.

    Raises:
        UsageError: an unknown name or an invalid value, before the first run.
        RunError: a run failed; the same call resumes from there.
    """
    out, config = Path(out), in_memory(config, data, model)
    seeds = seeds_of(config, seeds, 3)
    kind = task_kind(config)
    if score:
        check_score(score, kind)
    settings: Mapping[str, dict[str, Any]] = {}
    if tuned is not None:
        tuned = tuned if isinstance(tuned, Tuned) else Tuned.load(tuned)
        settings, options = tuned.apply(config, algorithms, seeds, options)
    jobs = jobs_of(config, algorithms, seeds, out, options, plan, settings)
    shown = {"progress": progress, "live": live}
    with open_backend(backend, config.execution.workers, **shown) as place:
        train(
            [replace(job, instruments=instruments, command=command) for job in jobs],
            place,
        )
    frames = [
        *([] if beside is None else [beside]),
        *(store.Run(job.path).rows()[1] for job in jobs),
    ]
    for job in jobs[:: len(algorithms)] if baselines else ():
        frames.append(
            rows.frame(baseline_rows(runner.assemble(job.config, plan=job.plan)))
        )
    task = runner.assemble(jobs[0].config, plan=jobs[0].plan)
    best = bool(task.config.federation.patience) if best is None else best
    result = Comparison(
        pd.concat(frames, ignore_index=True),
        best,
        _training(jobs[: len(algorithms)]),
        score=score,
    )
    header = {**task.header(command), "runs": len(jobs)}
    parts = (
        rows.records(result.frame[k : k + PART])
        for k in range(0, len(result.frame), PART)
    )
    rows.write(
        out / "rows.jsonl", header, (record for part in parts for record in part)
    )
    write_atomically(out / "table.csv", csv_bytes(result.table))
    return result


def _training(jobs: Sequence[TrainingJob]) -> str:
    """Describe the local training of some runs, per algorithm if they differ."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        names.setdefault(
            Training.of(resolve(job.config).training).description, []
        ).append(job.config.federation.algorithm)
    return (
        next(iter(names))
        if len(names) == 1
        else "; ".join(f"{listing(who)}: {how}" for how, who in names.items())
    )


def _warn_of_seen(
    plan: LayerPlan, config: RunConfig, dealt: Mapping[int, tuple[str, Partition]]
) -> None:
    """Warn of seeds whose test samples were used to measure the plan. Each seed draws its own splits."""
    seed = plan.why.seed
    if seed is None or not plan.why.data:
        return
    if seed not in dealt:
        try:
            data = runner.assemble(
                config.with_keys(algorithm="fedavg", plan=None, options={}, seed=seed)
            ).data
        except UsageError:  # the plan was not measured on data of this partition
            return
        measured = data.digest, data.partition
    else:
        measured = dealt[seed]
    if measured[0] != plan.why.data:
        return  # measured on other data: which samples it has seen is not known
    training_samples = samples_of(measured[1], "train")
    leaking = [
        seed
        for seed, (_, partition) in dealt.items()
        if training_samples & samples_of(partition, "test")
    ]
    if leaking:
        warn(
            f"the plan was measured on training data of seed {seed} that hold test samples of "
            f"{'seeds' if len(leaking) > 1 else 'seed'} {listing(map(str, leaking))}; with --plan auto, and under "
            "playerfl, every run decides on its own training data"
        )


def samples_of(partition: Partition, split: str) -> set[int]:
    """Return the numbers of all clients' samples of a split."""
    return {
        int(place) for places in partition.indices.values() for place in places[split]
    }


def check_stored(path: Path, task: runner.Task) -> None:
    """Refuse a directory with anything other than this run, begun or complete."""
    if not (path / "config.json").exists():
        return writing.check_free(path)
    run = store.Run(path)
    check_given(
        path, run.task_config(), data=task.config.own_data, model=task.config.own_model
    )
    stored, plan = restore.stored_config(run.task_config())
    config = task.config.with_keys(plan=None) if task.plan is not None else task.config
    free = {
        "workers",
        "device",
        "data_root",
        "download",
        "keep_ids",
    }  # these do not change results
    for name in [key for key in KEYS if key not in free]:
        # a stored tuple is a list
        if json.dumps(stored.value(name)) != json.dumps(config.value(name)):
            raise UsageError(
                f"{path} was run with {name}={stored.value(name)!r}, now it is {config.value(name)!r}. "
                "Choose another directory."
            )
    if (plan and plan.digest) != (task.plan and task.plan.digest):
        raise UsageError(
            f"{path} was run under another plan ({plan or 'its own'}). Choose another directory."
        )
    if run.begun:
        began, now = run.header(), task.header("")
        for key, what in {
            "data": "other data",
            "checkpoint": "another initial model",
        }.items():
            if began[key] != now[key]:
                raise UsageError(
                    f"{path} was run with {what}. Choose another directory."
                )
        if began["version"] != now["version"]:
            warn(
                f"{path} was run by fedlayers {began['version']}, this is {now['version']}"
            )
    return None
