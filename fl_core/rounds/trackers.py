"""Send a run's rows to trackers: Trackio, Weights & Biases, TensorBoard. Each needs its package."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from fl_core.errors import UsageError
from fl_core.rounds.recorder import LoggedRun, Logger
from fl_core.rows import Row

NAMED_BY = ("metric", "variant", "model", "split", "client", "client_b", "layer")
"""The columns of a row that make the name of its number."""


def by_round(rows: Sequence[Row]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each round's numbers by name, such as ``macro_f1/personal/test/va``. Missing values are left out."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        name = "/".join(str(row[key]) for key in NAMED_BY if row.get(key))
        value = row["value"]
        if value is not None and math.isfinite(value):
            found.setdefault(int(row["round"]), {})[name] = float(value)
    yield from found.items()


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        top = name.rpartition(".")[2]
        raise UsageError(
            f"log must name an installed tracker; got {top!r}, and {error.name or top} is not installed. "
            f"Install it: pip install {top}."
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
        name = str(run.config.get("algorithm")) if run.path is None else run.path.name
        how = {"resume": "allow", **self.options}
        self.tracker.init(project="fedlayers", name=name, config=config, **how)

    def log(self, rows: Sequence[Row]) -> None:
        """Send a round's numbers."""
        for round, numbers in by_round(rows):
            self.tracker.log(numbers, step=round)

    def close(self, finished: bool) -> None:
        """End the run there."""
        self.tracker.finish()


class Wandb(Trackio):
    """Rows in Weights & Biases. Nothing leaves this machine unless WANDB_MODE is online."""

    package = "wandb"

    def begin(self, run: LoggedRun) -> None:
        """Begin as Trackio does, with an id that a resumed run has again."""
        mode = os.environ.get("WANDB_MODE", "offline")
        self.options = {"mode": mode, **({"id": run.id[:16]} if run.id else {})}
        super().begin(run)


class Tensorboard(Logger):
    """Rows as event files in a folder beside the run, named after it with ``-tensorboard``."""

    def __init__(self) -> None:
        _package("tensorboard")
        self.open = _package("torch.utils.tensorboard").SummaryWriter

    def begin(self, run: LoggedRun) -> None:
        """Open the folder."""
        self.writer = self.open(f"{run.path or 'fedlayers'}-tensorboard")

    def log(self, rows: Sequence[Row]) -> None:
        """Write a round's numbers."""
        for round, numbers in by_round(rows):
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, round)

    def close(self, finished: bool) -> None:
        """Close the file."""
        self.writer.close()
