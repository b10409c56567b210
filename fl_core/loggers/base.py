"""Destinations for a run's rows during training, next to its directory, and rows as named curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fl_core import statistics
from fl_core.errors import UsageError, needs_package
from fl_core.registry import Registry
from fl_core.rows import Row

REPLY_LOST = "reply_lost"
"""The metric of a row about a missing client: 1 if it was sampled and its reply did not arrive in that round."""
SUMMED = ("bytes_down", "bytes_up", "bytes_evaluation", "flops", "steps", REPLY_LOST)
"""Costs and lost replies, which are summed over clients. Everything else is averaged."""


@dataclass(frozen=True)
class LoggedRun:
    """The run whose rows are logged.

    Attributes:
        path: its directory, or None without one.
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

    It is created without arguments before anything of the run is written, so its needs are checked then. A later error
    ends the run. It can be resumed.

    >>> import fedlayers as fl
    >>> class Printed(fl.Logger):
    ...     name = "printed"
    ...
    ...     def log(self, rows):
    ...         print(rows[0]["round"], sorted({row["metric"] for row in rows if row["unit"]}))
    >>> result = fl.run(dataset="heart", rounds=1, log=[Printed()], progress=False)
    0 ['bytes_evaluation']
    1 ['bytes_down', 'bytes_evaluation', 'bytes_up', 'flops']

    Attributes:
        name: registry name.
        needs: packages that must be installed, and the extra of this package that has them.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()

    def begin(self, run: LoggedRun) -> None:
        """Prepare for logging. The run calls this once, before the first rows."""

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows. The run calls this after the start and after every completed round (:mod:`fl_core.rows`)."""
        raise NotImplementedError

    def close(self, finished: bool) -> None:
        """End logging. The run calls this once, when it is done (``finished``), pauses, or fails."""


def _from_outside(made: Any, name: str) -> type[Logger]:
    if not (isinstance(made, type) and issubclass(made, Logger)):
        raise UsageError(f"logger must be a class made of fl.Logger; got {name!r}.")
    return made


LOGGERS: Registry[type[Logger]] = Registry("logger", "fl_core.loggers", _from_outside)


def logger(made: type[Logger]) -> type[Logger]:
    """Register a logger under its ``name``, as a class decorator.

    Raises:
        UsageError: another logger has that name.
    """
    LOGGERS.add(made.name, made, made)
    return made


@logger
class TensorBoard(Logger):
    """Scalars for `tensorboard --logdir`, in the folder tensorboard of the run's directory.

    Without a directory they are in the default folder of PyTorch's SummaryWriter, below ``runs``. After a resume,
    points of repeated rounds are replaced.
    """

    name = "tensorboard"
    needs = ("tensorboard",)

    def begin(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = None if run.path is None else str(run.path / "tensorboard")
        self.writer = SummaryWriter(
            folder, purge_step=run.done + 1 if run.done else None
        )
        self.writer.add_text(
            "configuration", f"```\n{json.dumps(run.config, indent=1)}\n```", run.done
        )

    def log(self, rows: Sequence[Row]) -> None:
        for each in scalars(rows):
            self.writer.add_scalar(each.curve, each.value, each.round)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()


def loggers_of(asked: str | Logger | Iterable[str | Logger]) -> list[Logger]:
    """Return loggers in the given order, from names, ``package.module:Class``, or objects.

    Raises:
        UsageError: a name is unknown, or a package that it needs is not installed.
    """
    several = [asked] if isinstance(asked, (str, Logger)) else asked
    return [each if isinstance(each, Logger) else _make(each) for each in several]


def _make(name: str) -> Logger:
    found = LOGGERS[name]
    missing = [package for package in found.needs if find_spec(package) is None]
    if missing:
        raise needs_package(f"package {missing[0]}", f"log to {name}", name)
    return found()


@contextmanager
def open_loggers(
    loggers: Iterable[Logger], run: LoggedRun, is_finished: Callable[[], bool]
) -> Iterator[None]:
    """Begin loggers, and close them however the block ends."""
    with ExitStack() as begun:
        for each in loggers:
            each.begin(run)
            begun.callback(_close, each, is_finished)
        yield


def _close(logger: Logger, is_finished: Callable[[], bool]) -> None:
    logger.close(is_finished())


class Scalar(NamedTuple):
    """One point of a curve: its value after a round, NaN if it could not be computed."""

    curve: str
    round: int
    value: float


def scalars(rows: Iterable[Row]) -> Iterator[Scalar]:
    """Yield rows as points of curves.

    A curve is ``METRIC/SPLIT/MODEL/client/NAME``, or ``.../weighted_mean`` or ``/sum`` over clients.

    Parts that a row does not have are left out. Means are weighted by training samples. Costs (:data:`SUMMED`) are
    summed.

    >>> from fl_core.rows import row
    >>> where = {"round": 3, "split": "test", "model": "global"}
    >>> north = row("accuracy", 0.5, client="north", n_train=10, **where)
    >>> for each in scalars([north, row("accuracy", 0.8, client="south", n_train=20, **where)]):
    ...     print(each.curve, each.round, round(each.value, 2))
    accuracy/test/global/client/north 3 0.5
    accuracy/test/global/client/south 3 0.8
    accuracy/test/global/weighted_mean 3 0.7
    """
    together: dict[tuple[str, int], list[Row]] = {}
    for each in rows:
        parts = (
            each[column] for column in ("metric", "variant", "split", "model", "layer")
        )
        curve = "/".join(part for part in parts if part)
        names = [name for name in (each["client"], each["client_b"]) if name]
        yield Scalar(
            "/".join([curve, *(["client", *names] if names else ["value"])]),
            each["round"],
            _value(each),
        )
        if len(names) == 1:
            together.setdefault((curve, each["round"]), []).append(each)
    for (curve, done), found in together.items():
        values, weights = (
            [_value(each) for each in found],
            [each["n_train"] for each in found],
        )
        if found[0]["metric"] in SUMMED:
            yield Scalar(f"{curve}/sum", done, sum(values))
        else:
            yield Scalar(
                f"{curve}/weighted_mean", done, statistics.combine(values, weights)
            )


def _value(row: Row) -> float:
    return math.nan if row["value"] is None else float(row["value"])
