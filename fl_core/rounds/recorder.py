"""What is recorded of a run: rows of scores and costs, checkpoints, and time by part."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fl_core import rows, storage
from fl_core.algorithms.base import Message, Observation, Round
from fl_core.data import FederatedData
from fl_core.errors import (
    NUMBER,
    UsageError,
    as_list,
    check_known,
    damaged,
    plural,
    validate,
)
from fl_core.records.writing import Writer
from fl_core.registry import import_object
from fl_core.rounds.clients import ClientReply
from fl_core.rounds.engine import EVALUATE, FINISH, Listener, rounds_done
from fl_core.rows import OF_CLASS, Row, why_missing
from fl_core.storage import Folder

if TYPE_CHECKING:
    from fl_core.rounds.engine import Engine

BUFFER = 10_000  # rows that wait for the end of a round before they are written
UNITS = {
    "bytes_base": "byte",
    "bytes_down": "byte",
    "bytes_up": "byte",
    "bytes_evaluation": "byte",
    "flops": "FLOP",
}
PARTS = {
    "train": "clients get messages and train, and replies are mixed",
    "evaluate": "models are scored",
    "save": "rows and checkpoints are written",
    "other": "all the rest",
}
"""The parts of a round's time."""
_TIMING = ("round", "steps", *PARTS)
REPLY_LOST = "reply_lost"
"""The metric of a row about a missing client: 1 if its reply did not arrive in that round or evaluation."""
CHANCE, TIMEOUT = "chance", "timeout"
"""The variants of a row about a lost reply: it was lost by chance, or did not come in time."""


@dataclass
class Pace:
    """The duration of some rounds: ``steps`` of all clients together, and ``seconds`` by part."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a round's record from ``timing.jsonl``: its ``steps``, and its seconds by part (:data:`PARTS`)."""
        self.steps += record["steps"]
        for part in PARTS:
            self.seconds[part] += record[part]

    @property
    def total(self) -> float:
        """Return the total seconds."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Return the client steps per second of total time; NaN before any time has passed."""
        if self.total:
            return self.steps / self.total
        return float("nan")

    def shares(self) -> str:
        """Return each part's share of the time as text, such as ``train 80 %, save 20 %``.

        Parts that round to 0 % are left out.
        """
        total_seconds = self.total
        shares = {
            part: round(100 * seconds / total_seconds) if total_seconds else 0
            for part, seconds in self.seconds.items()
        }
        return ", ".join(f"{part} {share} %" for part, share in shares.items() if share)

    def line(self) -> str:
        """Return one line with the client steps, the seconds, the steps per second and the shares of the parts."""
        digits = 0 if self.rate >= 10 else 1
        rate = f"{self.rate:,.{digits}f}"
        return f"{plural(self.steps, 'client step')} in {self.total:,.1f} s, {rate} a second: {self.shares()}"


def read_pace(path: Path | str) -> Pace:
    """Return the pace of a whole run from its ``timing.jsonl``. Of a repeated round only the last record counts.

    Raises:
        UsageError: the file does not exist.
        CorruptError: a line is not a round's record, or the file is a link or too large.
    """
    pace = Pace()
    for record in by_round(path).values():
        pace.add(record)
    return pace


def by_round(path: Path | str) -> dict[int, dict[str, Any]]:
    """Return the record of each round in a ``timing.jsonl``: its ``steps``, and its seconds by part (:data:`PARTS`).

    Of a repeated round only the last record counts.

    Raises:
        UsageError, CorruptError: as :func:`read_pace`.
    """
    path, records = Path(path), {}
    folder = Folder(path.parent)
    if not folder.has(path.name):
        raise UsageError(
            f"timing must be a file of a run; got {path}, which does not exist."
        )
    for number, line in enumerate(
        folder.read(path.name, most=storage.JSON_BYTES).splitlines(), 1
    ):
        with damaged(f"{path}, line {number}"):
            record = storage.parsed_json(line)
            if fault := validate(record, dict.fromkeys(_TIMING, NUMBER)):
                raise ValueError(fault)
        records[int(record["round"])] = record
    return records


class Timer(Listener):
    """A listener that measures each round's time by part, and writes it to ``timing.jsonl`` if it has a writer.

    Args:
        writer: the writer of the run's directory. None for a run without one.

    Attributes:
        pace: the time of all rounds.
    """

    def __init__(self, writer: Writer | None = None) -> None:
        self.pace = Pace()
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._tuning = 0.0  # seconds of fine-tuning in this round
        self._writer = writer
        self._steps = 0
        self._began = self._exchange = time.perf_counter()

    @contextmanager
    def charge(self, part: str) -> Iterator[None]:
        """Add the time inside the ``with`` block to a part of the round, one of :data:`PARTS`."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start_time

    def before_exchange(self, engine: Engine, rnd: Round) -> None:
        self._exchange = self._without_saving()

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        self._steps += sum(
            int(count) for name, count in reply.work.items() if name.endswith("/steps")
        )

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        seconds = self._without_saving() - self._exchange
        if rnd.exchange == FINISH:
            self._tuning += seconds
        elif rnd.exchange == EVALUATE:
            self.seconds["evaluate"] += seconds
        else:
            self.seconds["train"] += seconds

    def after_round(self, engine: Engine) -> None:
        seconds, time_now = self.seconds, time.perf_counter()
        # fine-tuning is training only at the end of a run
        part = "train" if engine.finished else "evaluate"
        seconds[part] += self._tuning
        self._tuning = 0.0
        seconds["other"] = time_now - self._began - sum(seconds.values())
        seconds = {part: max(0.0, value) for part, value in seconds.items()}
        record = {"round": engine.done, "steps": self._steps, **seconds}
        self.pace.add(record)
        if self._writer:
            self._writer.add_timing(record)
        self._began, self._steps = time_now, 0
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def _without_saving(self) -> float:
        """Return a time that stands still while rows and checkpoints are written."""
        return time.perf_counter() - self.seconds["save"]


@dataclass(frozen=True)
class LoggedRun:
    """The run whose rows are logged.

    Attributes:
        path: the run's directory, or None without one.
        id: the digest that identifies it in its checkpoints; empty without a directory.
        config: its resolved configuration.
        done: completed rounds at its start or resumption. Their rows are not logged again.
    """

    path: Path | None
    id: str
    config: Mapping[str, Any]
    done: int


class Logger:
    """A receiver of a run's rows as they are recorded. Your own logger is a subclass.

    A logger that is named by its class is created without arguments, before anything of
    the run is written. A later error ends the run, which can be resumed.

    >>> import fedlayers as fl
    >>> class Printed(fl.Logger):
    ...     def log(self, rows):
    ...         print(rows[0]["round"], sorted({row["metric"] for row in rows if row["unit"]}))
    >>> result = fl.run(dataset="heart", rounds=1, log=[Printed()], progress=False)
    0 ['bytes_evaluation']
    1 ['bytes_down', 'bytes_evaluation', 'bytes_up', 'flops']
    """

    def begin(self, run: LoggedRun) -> None:
        """Prepare for the rows of a run. The run calls this once, before the first rows."""

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows, which are dicts of the columns in :mod:`fl_core.rows`.

        The run calls this before the first round and after every completed round, with the rows since the last call.
        """
        raise NotImplementedError

    def close(self, finished: bool) -> None:
        """End logging. The run calls this once, when it is done (``finished``), pauses, or fails."""


NAMED_BY = ("metric", "variant", "model", "split", "client", "client_b", "layer")
"""The columns of a row that make the name of its number."""


def numbers_of(rows: Sequence[Row]) -> dict[int, dict[str, float]]:
    """Return each round's numbers by name, {round: {name: value}}. Missing values are left out.

    So are values that are not finite. Of several rows with one name the last counts. A
    round without numbers has no entry.

    A name consists of the row's columns :data:`NAMED_BY` that are not empty, such as ``macro_f1/personal/test/va``.

    >>> values = 0.5, None, math.nan
    >>> numbers_of([{"metric": "cka", "layer": "fc1", "round": k, "value": v} for k, v in enumerate(values)])
    {0: {'cka/fc1': 0.5}}
    """
    numbers: dict[int, dict[str, float]] = {}
    for row in rows:
        name = "/".join(str(row[key]) for key in NAMED_BY if row.get(key))
        value = row["value"]
        if value is not None and math.isfinite(value):
            numbers.setdefault(int(row["round"]), {})[name] = float(value)
    return numbers


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        module_name = name.rpartition(".")[2]
        package = error.name or module_name
        raise UsageError(
            f"log must name an installed tracker; got {module_name!r}, and {package} is not installed. "
            f"Install it: pip install {module_name}."
        ) from error


class Trackio(Logger):
    """Rows in Trackio, on this machine: ``trackio show`` opens them."""

    package = "trackio"
    options: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.tracker = _package(self.package)

    def begin(self, run: LoggedRun) -> None:
        """Begin a run of the project ``fedlayers``, or continue it."""
        config = {
            key: value
            for key, value in run.config.items()
            if isinstance(value, str | int | float)
        }
        name = str(run.config.get("algorithm"))
        if run.path is not None:
            name = run.path.name
        arguments = {"resume": "allow", **self.options}
        self.tracker.init(project="fedlayers", name=name, config=config, **arguments)

    def log(self, rows: Sequence[Row]) -> None:
        """Send the numbers of rows, with the round as the step."""
        for round, numbers in numbers_of(rows).items():
            self.tracker.log(numbers, step=round)

    def close(self, finished: bool) -> None:
        """End the run in Trackio."""
        self.tracker.finish()


class Wandb(Trackio):
    """Rows in Weights & Biases. The environment variable WANDB_MODE is its mode.

    Without it the mode is ``offline``, and nothing leaves this machine.
    """

    package = "wandb"

    def begin(self, run: LoggedRun) -> None:
        """Begin a run of the project ``fedlayers`` with the run's id, so that a resumed run continues it.

        A run without a directory has no id, and always begins a new one.
        """
        mode = os.environ.get("WANDB_MODE", "offline")
        self.options = {"mode": mode, "id": run.id[:16] or None}
        super().begin(run)


class Tensorboard(Logger):
    """Rows as event files in a folder next to the run.

    The folder is named after the run directory with ``-tensorboard``. Without one it is
    ``fedlayers-tensorboard`` in the working directory.
    """

    def __init__(self) -> None:
        _package("tensorboard")
        self.open = _package("torch.utils.tensorboard").SummaryWriter

    def begin(self, run: LoggedRun) -> None:
        """Open the run's folder of event files."""
        name = run.path or "fedlayers"
        self.writer = self.open(f"{name}-tensorboard")

    def log(self, rows: Sequence[Row]) -> None:
        """Write the numbers of rows to the event files, with the round as the step."""
        for round, numbers in numbers_of(rows).items():
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, round)

    def close(self, finished: bool) -> None:
        """Close the event file."""
        self.writer.close()


TRACKERS = {"trackio": Trackio, "wandb": Wandb, "tensorboard": Tensorboard}
"""The trackers that are known by name."""


def loggers_of(destinations: str | Logger | Iterable[str | Logger]) -> list[Logger]:
    """Return loggers in the given order, from objects, names of :data:`TRACKERS`, or ``package.module:Class``.

    Raises:
        UsageError: a name is unknown, its package is not installed, or it leads to no subclass of :class:`Logger`.
    """
    loggers: list[Logger] = []
    for logger in as_list("log", destinations, empty=True):
        if isinstance(logger, str):
            if ":" not in logger:
                check_known("tracker", logger, TRACKERS)
            logger_class = TRACKERS.get(logger) or import_object("logger", logger)
            if not (
                isinstance(logger_class, type) and issubclass(logger_class, Logger)
            ):
                raise UsageError(
                    f"logger must be a class made of fl.Logger; got {logger!r}."
                )
            logger = logger_class()
        loggers.append(logger)
    return loggers


@dataclass
class Recorder(Listener):
    """A listener that records scores and algorithms' observations as rows. Other listeners add rows by :meth:`row`.

    Args:
        data: the clients and sizes for the rows.
        columns: columns with the same value in every row.
        timer: the timer, which counts the time of writing rows.
        writer: the writer of the run directory; None for a run without one.
        loggers: loggers that receive every round's rows once they are complete.
        config: the run's configuration, for the loggers.

    Attributes:
        rows: rows that are not yet in a run directory. Without a directory these are the last ones; frames hold the
            others.
    """

    _data: FederatedData
    _columns: Mapping[str, Any]
    _timer: Timer
    _writer: Writer | None = None
    _loggers: Sequence[Logger] = ()
    _config: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    _frames: list[pd.DataFrame] = field(default_factory=list)
    _begun: ExitStack = field(default_factory=ExitStack)
    _unlogged: list[Row] = field(default_factory=list)
    _observed: list[Observation] = field(default_factory=list)

    def row(
        self, metric: str, value: float, done: int, client: int | None, **columns: Any
    ) -> None:
        """Record a number as a row.

        Args:
            metric: name of the number.
            value: the number. One that is not finite is recorded as a missing value.
            done: number of completed rounds.
            client: the client's position; None for all clients together.
            columns: further columns of the row (:mod:`fl_core.rows`).

        Raises:
            KeyError: there is no such column.
        """
        if client is not None:
            client_data = self._data.clients[client]
            columns |= {"client": client_data.name, "n_train": len(client_data.train)}
        columns = {"round": done, "status": why_missing(metric, value), **columns}
        self.add([rows.row(metric, value, unit=UNITS.get(metric, ""), **columns)])
        if len(self.rows) >= BUFFER:
            self.flush()

    def add(self, new: Sequence[Row]) -> None:
        """Record rows, which are dicts of :mod:`fl_core.rows`. The columns of the run are added to copies of them."""
        complete_rows = [{**row, **self._columns} for row in new]
        self.rows += complete_rows
        if self._loggers:
            self._unlogged += complete_rows

    def flush(self) -> None:
        """Write the rows so far into the run directory.

        Without one, convert many rows to a frame, which takes less memory.
        """
        if self._writer:
            with self._timer.charge("save"):
                self._writer.add_rows(self.rows)
            self.rows = []
        elif len(self.rows) >= BUFFER:
            self._frames.append(rows.frame(self.rows))
            self.rows = []

    def frame(self) -> pd.DataFrame:
        """Return the rows that are not yet in a run directory as a tidy table.

        Without a directory these are all rows of the run.
        """
        last_frame = rows.frame(self.rows)
        if not self._frames:
            return last_frame
        return rows.joined([*self._frames, last_frame])

    def before_run(self, engine: Engine) -> None:
        for logger in self._loggers:
            path, name = None, ""
            if self._writer:
                path = self._writer.path
                name = self._writer.run.id
            logger.begin(LoggedRun(path, name, self._config, engine.done))
            self._begun.callback(lambda begun: begun.close(engine.finished), logger)

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        self._observed += reply.observations
        done = rounds_done(rnd)
        for model, splits in reply.scores.items():
            for split, scores in splits.items():
                n = len(self._data.clients[reply.client].split(split))
                columns = {"model": model, "split": split, "n_samples": n}
                for metric, value in scores.items():
                    variant = ""
                    if metric in OF_CLASS:
                        variant = self._data.positive
                    self.row(
                        metric, value, done, reply.client, variant=variant, **columns
                    )

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        if rnd.exchange != EVALUATE:
            return
        finished_round = Round(engine.done)
        observations = engine.algorithm.call(
            "observations", engine.server, finished_round
        )
        for observation in (*observations, *self._observed):
            if observation.client_b is None:
                other_name = ""
            else:
                other_name = engine.names[observation.client_b]
            self.row(
                observation.metric,
                observation.value,
                engine.done,
                observation.client,
                layer=observation.layer,
                variant=observation.variant,
                client_b=other_name,
            )
        self._observed = []

    def after_round(self, engine: Engine) -> None:
        self.flush()
        for logger in self._loggers:
            logger.log(self._unlogged)
        self._unlogged = []

    def after_run(self, engine: Engine) -> None:
        self._begun.close()


@dataclass
class Costs(Listener):
    """A listener that records each round's costs for each client: bytes, steps, operations and losses of its training.

    Fine-tuning is training in the round that ends the run, planned or by a stopping rule.
    Its rows have the variant :data:`~fl_core.rounds.engine.FINISH`. In other rounds it is
    evaluation, and only its received bytes are recorded.

    Args:
        flops: (trained tensors, tensors of the client's part of the model) -> FLOPs of training on one sample.
        recorder: the listener that records the rows.
        base: bytes of the frozen model that every client receives once, for adapters; 0
            without one.
        variant: the variant of all rows, if these are not the costs of the run's own rounds.
    """

    recorder: Recorder
    flops: Callable[[frozenset[str], frozenset[str]], float]
    base: int = 0
    variant: str = ""
    _work: dict[tuple[int, str, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    # bytes that each client received for fine-tuning in this round
    _tuning_bytes: dict[int, int] = field(default_factory=dict)

    def apart(self, variant: str) -> Costs:
        """Return a listener for another engine, which records that engine's costs as rows of this variant."""
        return Costs(self.recorder, self.flops, variant=variant)

    def before_run(self, engine: Engine) -> None:
        if self.base and engine.done == 0:
            self.recorder.row("bytes_base", self.base, 0, None)

    def on_message(
        self, engine: Engine, rnd: Round, client: int, message: Message
    ) -> None:
        self._work[client, "bytes_down", ""] += message.bytes

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        client, work = reply.client, self._work
        is_evaluation = rnd.exchange == EVALUATE
        if reply.missing and (is_evaluation or rnd.exchange == FINISH):
            self.recorder.row(REPLY_LOST, 1.0, engine.done, client, variant=TIMEOUT)
        if is_evaluation:
            self.recorder.row("bytes_evaluation", reply.received, engine.done, client)
            return
        submodel = engine.task_info.tensors
        if rnd.exchange == FINISH:
            self._tuning_bytes[client] = reply.received
            phases = engine.algorithm.finetuning(engine.done, client)
        else:
            phases = engine.algorithm.phases(rnd, client)
            submodel = engine.algorithm.submodel(rnd, client)
            if reply.message is None:
                work[client, REPLY_LOST, TIMEOUT if reply.missing else CHANCE] = 1.0
            else:
                work[client, "bytes_up", ""] += reply.message.bytes
        for phase in phases:
            samples = reply.work.get(f"{phase.name}/samples", 0)
            work[client, "steps", ""] += reply.work.get(f"{phase.name}/steps", 0)
            work[client, "flops", ""] += samples * self.flops(phase.train, submodel)
            if reply.message is None:
                continue
            for name, value in reply.work.items():
                if name.startswith(f"{phase.name}/loss"):
                    variant_part = name.replace("/loss", "", 1)
                    work[client, "train_loss", variant_part] = value

    def after_training(self, engine: Engine) -> None:
        self._write(engine.done, self.variant)

    def after_round(self, engine: Engine) -> None:
        """Record the costs of the round's fine-tuning, once the stopping rule has decided."""
        if engine.finished:
            self._write(engine.done, FINISH)
        for client, received in self._tuning_bytes.items():
            if not engine.finished:
                self.recorder.row(
                    "bytes_evaluation", received, engine.done, client, variant=FINISH
                )
        self._work.clear()
        self._tuning_bytes.clear()

    def _write(self, done: int, variant: str) -> None:
        for (client, metric, part), value in sorted(self._work.items()):
            self.recorder.row(
                metric, value, done, client, split="train", variant=variant or part
            )
        self._work.clear()
