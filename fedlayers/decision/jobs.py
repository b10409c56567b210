"""The jobs of a study: every way with every seed is one run. A backend trains them.

Invalid values and folders with other runs are refused before any training.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.backends.local import (
    RAY,
    Backend,
    InProcessBackend,
    Local,
    Result,
    WorkerPool,
    carry_out,
    check_backend,
)
from fedlayers.decision.ways import Way
from fedlayers.run_result import Live, LiveRun
from fedlayers.runs import default_instruments
from fl_core import data as datasets
from fl_core.algorithms import find
from fl_core.config import KEYS, ROUNDS, Own, RunConfig, resolve
from fl_core.data import FederatedData, Partition
from fl_core.data.registry import ROOT_VARIABLE
from fl_core.errors import (
    BusyError,
    DivergedError,
    RunError,
    UsageError,
    about,
    as_list,
    check_value,
    end_unguarded,
    listing,
    plural,
)
from fl_core.models.building import wants_weights
from fl_core.plan import LayerPlan
from fl_core.records import store, writing
from fl_core.rounds.recorder import Logger
from fl_core.rounds.workers import check_sendable
from fl_core.run import own_code, restore, runner
from fl_core.run.task import Task
from fl_core.storage import check_folder, check_no_links
from fl_core.training.losses import LOSSES
from fl_core.tree import Tree

Tell = Callable[[str], None]
PROGRESS_LINES = 4
"""Lines about the progress of a study."""
FREE = ("workers", "device", "data_root", "download")
"""Keys that do not change results."""
SAVE_SECONDS = 10.0
"""Least time between two checkpoints of a run whose configuration does not say how often to save."""


@dataclass(frozen=True)
class TrainingJob:
    """One training run: its directory, configuration, data, model, plan and last round.

    Attributes:
        data, model: objects from Python, as in :class:`fl_core.config.Own`.
        arm: the name of the way that it trains.
        until: the round after which it stops, with a checkpoint; None = its last.
        name: the name of its directory, which is unique within a study.
        away: whether it runs on another machine than the study.
        log: loggers that receive its rows.
        start: the pretrained weights that its configuration names, so that no worker loads them again.
        clients: a function that makes its clients, in this process or at sites.
    """

    path: Path
    config: RunConfig
    data: Any = field(default=None, compare=False, repr=False)
    model: Any = field(default=None, compare=False, repr=False)
    plan: LayerPlan | None = None
    arm: str = ""
    until: int | None = None
    command: str = ""
    away: bool = False
    start: Tree | None = field(default=None, compare=False, repr=False)
    log: tuple[Logger, ...] = field(default=(), compare=False)
    clients: runner.MakesClients = field(default=runner.local_clients, compare=False)

    @property
    def label(self) -> str:
        """Return the job's name without the seed."""
        return self.name.removesuffix(f"-{self.config.execution.seed}")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def words(self) -> str:
        """Return the job's way, rate and seed in words: ``half at 0.01, seed 2``."""
        seed = self.config.execution.seed
        run_name = self.label.replace("-lr", " at ")
        return f"{run_name}, seed {seed}"

    @property
    def resolved(self) -> RunConfig:
        """Return the job's configuration with the dataset's defaults."""
        return resolve(self.config, self.data, self.model)

    @property
    def gpus(self) -> int:
        return int(self.config.execution.device != "cpu")

    @property
    def begun(self) -> bool:
        """Return whether the run's directory exists."""
        return (self.path / "config.json").exists()

    @property
    def finished(self) -> bool:
        """Return whether nothing is left to do."""
        if not self.begun:
            return False
        run = store.Run(self.path)
        last_round = self.until or self.resolved.federation.rounds or 1
        return run.finished or run.rounds[-1:] >= [last_round]

    def is_past(self, done: int) -> bool:
        """Return whether its stored run has more than ``done`` rounds."""
        return self.begun and store.Run(self.path).rounds[-1:] > [done]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Return the rows of the job's run, which has ended. They are read once."""
        return store.Run(self.path).rows()[1]

    @cached_property
    def best_round(self) -> int | None:
        """Return the best round of its run's main model under its stopping rule.

        It is None without a rule, or if the model has no best round.
        """
        rule = store.Run(self.path).stopping_rule()
        if rule is None:
            return None
        return rule.best.get(rule.main)

    def carry_out(self) -> Any:
        """Start or resume the run. A complete run is left as it is. Warnings are hidden: :func:`assembled` gives them.

        Raises:
            UsageError, RunError: as for :func:`fl_core.run.runner.run` and :func:`fl_core.run.runner.resume`.
        """
        with warnings.catch_warnings(action="ignore"):
            if not self.away:
                self._train()
                return
            local_job, root = self, self.config.data.data_root
            if root and not Path(root).is_dir():  # that of another machine
                root = os.environ.get(ROOT_VARIABLE, root)
                local_job = replace(self, config=self.config.with_keys(data_root=root))
            node = f"on node {socket.gethostname()}"
            with about(node), about(node, OSError, RunError):
                local_job._train()

    def _train(self) -> None:
        arguments = {
            name: getattr(self, name)
            for name in ("data", "model", "until", "log", "clients")
        }
        arguments |= {"instruments": default_instruments, "progress": False}
        if self.config.execution.checkpoint_every is None:
            arguments["save_seconds"] = SAVE_SECONDS
        if not self.begun:
            runner.run(
                self.config,
                self.path,
                loaded=self._loaded(),
                initial=self.start,
                plan=self.plan,
                command=self.command,
                announce=False,
                **arguments,
            )
        elif not self.finished:
            runner.resume(
                self.path,
                allow_code=own_code.code_in(self.config),
                data_root=self.config.data.data_root,
                **arguments,
            )

    def with_weights(self) -> TrainingJob:
        """Return the job with its pretrained weights loaded, if there are any.

        The configuration names them. A run that has begun needs none.

        Raises:
            UsageError: the model comes from Python and cannot be sent to another
                process.
        """
        if self.model is not None:
            check_sendable(self.model)
            return self
        if self.begun or not wants_weights(
            self.config.model.model, self.config.model.model_options
        ):
            return self
        return replace(self, start=self.assemble(self._loaded()).start)

    def assemble(self, loaded: FederatedData | None = None) -> Task:
        """Return the task of the run: its data, model and algorithm.

        Args:
            loaded: the configuration's data, if they are loaded already.
        """
        return runner.assemble(
            self.config, data=self.data, model=self.model, plan=self.plan, loaded=loaded
        )

    def _loaded(self) -> FederatedData | None:
        if self.data is not None:
            return None
        return _data(
            self.config.data.dataset,
            json.dumps(self.config.data.load_options()),
            self.config.execution.seed,
        )

    def sent_to(self, path: Path | None) -> TrainingJob:
        """Return the same job for another machine.

        Args:
            path: the job's folder there. With None the job keeps its folder. It then
                has all defaults in its configuration, and is marked as ``away``.
        """
        if path is not None:
            return replace(self, path=path)
        # its paths do not depend on the folder one is in
        return replace(self, config=self.resolved, away=True)


@lru_cache(maxsize=1)
def _data(dataset: str, options: str, seed: int) -> FederatedData:
    """Load the data of a configuration.

    The last ones are cached for runs that have them in common. So ``options`` are JSON:
    those of :func:`fl_core.data.load`, without the seed.
    """
    return datasets.load(dataset, **json.loads(options), seed=seed)


def jobs_of(
    arms: Sequence[Way],
    config: RunConfig,
    seeds: Sequence[int],
    out: Path,
    suffix: str = "",
    **common: Any,
) -> list[TrainingJob]:
    """Return a run for every way and seed. Its folder below ``out`` is named after both.

    Args:
        arms: the ways to train.
        config: the configuration of all runs, which a way's settings change.
        seeds: the seeds. Each way has a run for each of them.
        out: the folder of the runs.
        suffix: added to the folders' names, before the seed.
        common: further attributes of all runs, as of :class:`TrainingJob`.

    Raises:
        UsageError: two runs with one folder.
    """
    jobs: dict[Path, TrainingJob] = {}
    for seed in seeds:
        for arm in arms:
            options = arm.options
            if options is None:
                same_algorithm = arm.algorithm == config.federation.algorithm
                options = config.federation.options if same_algorithm else {}
            run_config = config.with_keys(
                algorithm=arm.algorithm, seed=seed, options=options
            )
            run_config = run_config.with_keys(**arm.settings)
            arguments = common if arm.own_network else {**common, "model": None}
            path = out / f"{arm.folder}{suffix}-{seed}"
            if path in jobs:
                raise UsageError(
                    f"arms must have different folders; got {jobs[path].arm!r} and {arm.name!r}, both in "
                    f"{arm.folder!r}. Rename one of the files."
                )
            jobs[path] = TrainingJob(
                path, run_config, plan=arm.plan, arm=arm.name, **arguments
            )
    return list(jobs.values())


def assembled(
    jobs: Sequence[TrainingJob],
    task: Task | None = None,
    stored: bool = True,
    announced: set[str] | None = None,
) -> Iterator[Task]:
    """Yield the task of each run. Successive runs of one seed share their data.

    Args:
        task: a task whose data are shared by the runs of its seed.
        announced: tables and notes that were announced before; others are announced
            once, and added to it. With None nothing is announced.
        stored: whether directories with other runs are refused.

    Raises:
        UsageError: an invalid value, or a directory with another run.
    """
    for job in jobs:
        same_seed = task and task.config.execution.seed == job.config.execution.seed
        data = None
        if task and same_seed:
            data = task.data
        task = job.assemble(data)
        if stored:
            check_stored(job.path, task)
        if announced is not None:
            task.announce(announced)
        yield task


def train(
    jobs: Sequence[TrainingJob], place: Backend, tell: Tell | None = None
) -> dict[str, str]:
    """Train runs on a backend, and return why some diverged, by the run's name.

    The backend's picture, if any, has a line for each run, or for the seeds of a run.

    The results have the same bits on every backend. A run that is done keeps its last and best checkpoints, if its
    configuration does not say how often to save.

    Args:
        jobs: the runs.
        place: the backend.
        tell: receives a line when a quarter of the runs is done, and one for each run that diverged. Without it
            divergence is an error like any other: it ends the other runs and is raised.

    Raises:
        RunError: a run failed. Errors of other kinds are raised as they are, too.
    """
    failed: dict[str, str] = {}

    def done(result: Result, count: int) -> None:
        job: TrainingJob = result.work
        if tell is not None and isinstance(result.error, DivergedError):
            failed[job.name] = str(result.error)
            tell(f"{job.words} failed: {result.error}")
        elif result.error is not None:
            raise result.error
        elif job.config.execution.checkpoint_every is None:
            with suppress(BusyError):  # the next call cleans what is left
                writing.clean(job.path)
        if result.error is None and place.live is not None:
            place.live.add(str(job.path), job.rows.assign(algorithm=job.label))
        quarter = count * PROGRESS_LINES // len(jobs)
        if tell is not None and quarter > (count - 1) * PROGRESS_LINES // len(jobs):
            tell(f"{count} of {plural(len(jobs), 'run')}: {job.words}")

    works: Iterable[TrainingJob] = jobs
    if isinstance(place, WorkerPool):
        works = (job.with_weights() for job in jobs)
    elif (live := place.live) is not None:
        works = [replace(job, log=(LiveRun(live, job.label),)) for job in jobs]
    try:
        carry_out(works, place, done, total=len(jobs), progress=place.progress)
    finally:
        _data.cache_clear()
    return failed


# --- backends by name -----------------------------------------------------------------------------------------


@contextmanager
def open_backend(
    backend: Backend | str,
    workers: int = 0,
    *,
    parallel: bool = False,
    progress: bool = True,
    live: bool = False,
) -> Iterator[Backend]:
    """Open a backend by name and close it at the end. An open one stays open. No name means this process.

    Args:
        backend: an open backend, its name, or an empty text for this process.
        workers: the configuration's number of workers. With a backend by name it must
            be at most 1.
        parallel: without a name, train the runs side by side in ``workers`` processes, each run without workers.
        progress: show the progress of the runs that are trained there.
        live: draw the runs in the notebook's cell, at most once a second.

    Raises:
        UsageError: an unknown name, a package that is not installed, or several workers
            as well.
    """
    end_unguarded()
    if parallel and workers > 1 and not backend:
        backend, workers = f"local:{workers}", 0
    backend_context: AbstractContextManager[Backend]
    if isinstance(backend, Backend):
        backend_context = nullcontext(backend)
    elif backend and workers > 1:
        raise UsageError(
            "backend trains whole runs side by side, each in one process. Leave workers out."
        )
    else:
        backend_context = closing(_named(backend) if backend else InProcessBackend())
    picture = Live() if live else nullcontext()
    with backend_context as place, picture as place.live:
        place.progress = progress
        yield place


def _named(name: str) -> Backend:
    check_backend(name)
    kind, _, argument = name.partition(":")
    if kind == RAY:
        from fedlayers.backends.cluster import Cluster

        return Cluster(argument)
    if int(argument) > 1:
        return Local(int(argument))
    return InProcessBackend()


# --- before anything is trained --------------------------------------------------------------------------------


def task_kind(config: RunConfig, own: Own) -> str:
    """Return the task of the data from Python, or else that of the dataset's default loss.

    It is one of :data:`fl_core.rows.TASKS`, or :data:`fl_core.rows.POSITIONS` for data
    from Python with labels at positions.
    """
    if own["data"] is not None:
        return str(own["data"].task)
    return LOSSES[str(resolve(config.with_keys(loss=None), **own).training.loss)].task


def seeds_of(
    config: RunConfig, seeds: Sequence[int] | int | None, count: int, apart: int = 0
) -> tuple[int, ...]:
    """Return the given seeds, or ``count`` seeds that start from the configuration's seed plus ``apart``.

    >>> seeds_of(RunConfig(seed=5), None, 3), seeds_of(RunConfig(seed=5), (0, 1), 3)
    ((5, 6, 7), (0, 1))
    >>> seeds_of(RunConfig(seed=5), 2, 3)
    (5, 6)

    Args:
        seeds: a list of seeds, or their number in place of ``count``.

    Raises:
        UsageError: no seed, a repeated one, or a number of seeds that is out of range.
    """
    if seeds is None:
        first_seed = config.execution.seed + apart
        return tuple(range(first_seed, first_seed + count))
    if isinstance(seeds, Integral):
        check_value("seeds", int(seeds), ROUNDS)
        return seeds_of(config, None, int(seeds), apart)
    return as_list("seeds", seeds, distinct=True)


def plan_users(algorithms: Sequence[str], given: bool) -> set[str]:
    """Return the algorithms that use a plan.

    Args:
        given: whether the caller gives them a plan.

    Raises:
        UsageError: a plan is given, and none uses it.
    """
    algorithms_with_plan = {name for name in algorithms if find(name).uses_plan}
    if given and not algorithms_with_plan:
        raise UsageError(
            f"algorithms must have one that uses a plan; got {listing(algorithms)}. Add one, such as fedper."
        )
    return algorithms_with_plan


def study_folder(out: Path | str) -> Path:
    """Return the output folder of a study.

    Raises:
        UsageError: it is a run, a file, or the root of all folders.
        CorruptError: there is a link below the folder.
    """
    out = Path(out)
    check_folder(out)
    check_no_links(out)
    return out


def check_same_data(folder: Path, task: Task) -> None:
    """Refuse a folder with runs of the same seed on other data.

    Raises:
        UsageError: there is such a run. The message names the first.
    """
    seed = task.config.execution.seed
    for path in sorted(folder.glob(f"*-{seed}")):
        if not (path / "config.json").exists():  # it ended before it was a run
            continue
        run = store.Run(path)
        if run.config["seed"] == seed and run.header()["data"] != task.data.digest:
            raise UsageError(
                f"{folder} must hold runs on the same data; got {path.name}, of other data. Choose another folder."
            )


def check_stored(path: Path, task: Task) -> None:
    """Refuse a directory that has anything but this run, begun or complete.

    Args:
        path: the directory.
        task: the run's task.

    Raises:
        UsageError: the directory has other files, or a run with another configuration, plan, data or initial model.
    """
    if not (path / "config.json").exists():
        writing.check_free(path)
        return
    run = store.Run(path)
    restore.check_given(path, run.config, **task.own)
    stored_config, plan = restore.stored_config(run.config)
    config = task.config
    if task.plan is not None:
        config = task.config.with_keys(plan=None)
    for name in [key for key in KEYS if key not in FREE]:
        # a stored tuple is a list
        if json.dumps(stored_config.value(name)) != json.dumps(config.value(name)):
            stored_value = stored_config.value(name)
            own_value = config.value(name)
            raise UsageError(
                f"{path} was run with {name}={stored_value!r}, now it is {own_value!r}. "
                "Choose another directory."
            )
    if (plan and plan.digest) != (task.plan and task.plan.digest):
        plan_text = plan or "its own"
        raise UsageError(
            f"{path} was run under another plan ({plan_text}). Choose another directory."
        )
    restore.check_same_start(task, path, weights=True)


def samples_of(partition: Partition, split: str) -> set[int]:
    """Return the indices, in the source, of all clients' samples in a split."""
    parts = (places[split] for places in partition.indices.values())
    return {*map(int, chain.from_iterable(parts))}
