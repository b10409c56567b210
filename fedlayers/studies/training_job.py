"""A whole run as the job of a backend. All studies' runs are made of these."""

from __future__ import annotations

import json
import os.path
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from fedlayers.backends.base import (
    Backend,
    FileBatch,
    Result,
    Sent,
    WorkerPool,
    carry_out,
    changed_files,
    remote_errors,
    write_files,
)
from fedlayers.instruments import default_instruments
from fedlayers.live import LiveRun
from fl_core import data as datasets, runner
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.defaults import resolve
from fl_core.errors import BusyError
from fl_core.models.registry import wants_weights
from fl_core.plan import LayerPlan
from fl_core.plan_selection import Instruments
from fl_core.recorder import Logger
from fl_core.records import store
from fl_core.records.writing import clean
from fl_core.restore import named_files
from fl_core.storage.files import Folder
from fl_core.tree import Tree
from fl_core.workers import check_sendable

SAVE_SECONDS = 10.0
"""Least time between two checkpoints of a run whose configuration does not say how often to save."""


@dataclass(frozen=True)
class TrainingJob:
    """One run: its directory, its configuration, its plan, and its last round.

    Attributes:
        until: the round after which it stops, with a checkpoint; None = its last.
        name: for messages; by default that of its directory.
        quiet: whether the run's notes on its data have been given before.
        away: whether it is on another machine than the one that asked for it.
        start: the pretrained weights of its configuration, so that no worker loads them.
        log: where else its rows are sent.
    """

    path: Path
    config: RunConfig
    plan: LayerPlan | None = None
    until: int | None = None
    command: str = ""
    instruments: Instruments | None = None
    quiet: bool = False
    away: bool = False
    start: Tree | None = field(default=None, compare=False, repr=False)
    log: tuple[Logger, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def gpus(self) -> int:
        return int(self.config.execution.device != "cpu")

    @property
    def begun(self) -> bool:
        """True if its directory exists."""
        return (self.path / "config.json").exists()

    @property
    def finished(self) -> bool:
        """True if nothing is left to do."""
        if not self.begun:
            return False
        run, last = (
            store.Run(self.path),
            self.until
            or int(
                self.config.federation.rounds
                or resolve(self.config).federation.rounds
                or 1
            ),
        )
        return run.rounds[-1:] >= [last] or run.finished

    def carry_out(self) -> None:
        """Start or resume the run. A complete run is left as it is.

        Raises:
            UsageError, RunError: as for :func:`fl_core.runner.run` and :func:`fl_core.runner.resume`.
        """
        with (
            warnings.catch_warnings(action="ignore") if self.quiet else nullcontext(),
            remote_errors(self.away),
        ):
            self._train()

    def _train(self) -> None:
        instruments = self.instruments or default_instruments()
        seconds = (
            SAVE_SECONDS if self.config.execution.checkpoint_every is None else 0.0
        )
        if not self.begun:
            runner.run(
                self.config,
                self.path,
                instruments=instruments,
                loaded=self._data(),
                initial=self.start,
                plan=self.plan,
                command=self.command,
                progress=False,
                until=self.until,
                save_seconds=seconds,
                log=self.log,
            )
        elif not self.finished:
            own = named_files(self.config)  # what the very command names
            runner.resume(
                self.path,
                instruments=instruments,
                **own,
                progress=False,
                until=self.until,
                save_seconds=seconds,
                log=self.log,
            )

    def with_weights(self) -> TrainingJob:
        """Return the run with its pretrained initial weights, if its configuration asks for any."""
        if self.config.own_model is not None:
            check_sendable(self.config.own_model)
            return self
        if self.begun or not wants_weights(
            self.config.model.model, self.config.model.model_options
        ):
            return self
        return replace(
            self,
            start=runner.assemble(
                self.config, plan=self.plan, loaded=self._data()
            ).start,
        )

    def _data(self) -> FederatedData | None:
        if self.config.own_data is not None:
            return None  # it comes with the configuration
        return _data(
            self.config.data.dataset,
            json.dumps(self.config.data.load_options()),
            self.config.execution.seed,
        )

    def sent_to(self, path: Path | None) -> TrainingJob:
        if path is not None:
            return replace(self, path=path)
        return replace(
            self, config=resolve(self.config), away=True
        )  # its paths do not depend on the folder one is in

    @contextmanager
    def held(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with Folder(self.path).locked():
            yield

    def outgoing(self, sent: Sent) -> Iterator[FileBatch]:
        return changed_files(self.path, sent, over=True)

    def incoming(self, sent: Sent, over: bool) -> Iterator[FileBatch]:
        return changed_files(self.path, sent, over)

    def accept(self, parcel: FileBatch) -> None:
        write_files(self.path, parcel)


@lru_cache(maxsize=1)
def _data(dataset: str, options: str, seed: int) -> FederatedData:
    """Load the data of a configuration. The last ones are cached for runs that have them in common."""
    return datasets.load(dataset, **json.loads(options), seed=seed)


def train(
    runs: Sequence[TrainingJob],
    place: Backend,
    done: Callable[[Result, int], None] | None = None,
) -> None:
    """Train runs on a backend. Its picture, if any, has a line for each run, or for the seeds of a run.

    A run that is done keeps its last and best checkpoints, if its configuration does not say how often to save.

    Args:
        done: receives each result; by default an error in one ends the others and is raised.
    """

    def strict(result: Result, count: int) -> None:
        if result.error is not None:
            raise result.error

    def cleaned(result: Result, count: int) -> None:
        if (
            result.error is None
            and result.work.config.execution.checkpoint_every is None
        ):
            with suppress(
                BusyError
            ):  # another process reads or cleans it, and the next call cleans what is left
                clean(result.work.path)
        if result.error is None and place.live is not None:
            frame = store.Run(result.work.path).rows()[1]
            label = _label(result.work, runs)
            place.live.add(str(result.work.path), frame.assign(algorithm=label))
        (done or strict)(result, count)

    works: Iterable[TrainingJob] = runs
    if isinstance(place, WorkerPool):
        works = (run.with_weights() for run in runs)
    elif place.live is not None:
        live = place.live
        works = [replace(x, log=(LiveRun(live, _label(x, runs)),)) for x in runs]
    try:
        carry_out(works, place, cleaned, total=len(runs), progress=place.progress)
    finally:
        _data.cache_clear()


def _label(run: TrainingJob, runs: Sequence[TrainingJob]) -> str:
    """Return a run's name in a picture: the part of its path by which it differs from others, without the seed."""
    root = os.path.commonpath([each.path.parent for each in runs])
    name = run.path.relative_to(root).parts[0]
    return name.removesuffix(f"-{run.config.execution.seed}")
