"""The rows of a run: scores, costs, and losses above the limit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fl_core.data import FederatedData
from fl_core.divergence import DIVERGENCE, Limit
from fl_core.loggers.base import Logger
from fl_core.records.timing import Clock, Pace
from fl_core.records.writing import Writer
from fl_core.rows import Row, row
from fl_core.scores import OF_CLASS, why_missing
from fl_core.training.phases import Phase

CostCounter = defaultdict[
    tuple[int, str, str], float
]  # (client, metric, variant) -> value
BUFFER = 10_000  # rows that wait for the end of a round before they are written
UNITS = {
    "bytes_base": "byte",
    "bytes_down": "byte",
    "bytes_up": "byte",
    "bytes_evaluation": "byte",
    "flops": "FLOP",
}


class Ledger:
    """A writer of a run's rows and its time that also informs loggers.

    Args:
        data: the clients and sizes for the rows.
        columns: of every row.
        flops: (trained tensors, tensors of the client's part of the model) -> FLOPs of training on one sample.
        limit: of losses.
    """

    def __init__(
        self,
        data: FederatedData,
        columns: Mapping[str, Any],
        flops: Callable[[frozenset[str], frozenset[str]], float],
        limit: Limit,
        writer: Writer | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.names = [client.name for client in data.clients]
        self.rows: list[Row] = []
        self.clock, self.pace, self.limit = Clock(), Pace(), limit
        self._data, self._columns, self._flops = data, dict(columns), flops
        self._writer, self._loggers = writer, loggers
        self._unlogged = list[Row]()
        self._steps = 0  # of the current round

    def row(
        self, metric: str, value: float, done: int, client: int | None, **columns: Any
    ) -> None:
        """Record a number after ``done`` rounds, of one client or of none."""
        if client is not None:
            columns |= {
                "client": self.names[client],
                "n_train": len(self._data.clients[client].train),
            }
        columns = {"round": done, "status": why_missing(metric, value), **columns}
        self.rows.append(
            row(metric, value, unit=UNITS.get(metric, ""), **self._columns, **columns)
        )
        if self._loggers:
            self._unlogged.append(self.rows[-1])
        if len(self.rows) >= BUFFER:
            self.flush()

    def scores(
        self,
        client: int,
        model: str,
        scores: Mapping[str, Mapping[str, float]],
        done: int,
    ) -> None:
        """Record a model's scores by split and metric, and check its loss against the limit."""
        for split, values in scores.items():
            n = len(self._data.clients[client].split(split))
            for metric, value in values.items():
                variant = self._data.positive if metric in OF_CLASS else ""
                self.row(
                    metric,
                    value,
                    done,
                    client,
                    model=model,
                    split=split,
                    variant=variant,
                    n_samples=n,
                )
            if split == "validation" and done:
                self._check_loss(values["loss"], done, client, model=model, split=split)
            elif split == "validation" and model not in self.limit.tuned:
                self.limit.begin(self.names[client], values["loss"])

    def _check_loss(self, loss: float, done: int, client: int, **columns: Any) -> None:
        """Record a finite loss above the limit, and warn or stop."""
        reason = self.limit.reason_for(self.names[client], loss)
        if reason:
            self.row(
                DIVERGENCE,
                math.nan,
                done,
                client,
                status=f"diverged: {reason}",
                **columns,
            )
            self.flush()
            self.limit.report(
                f"{self._columns['algorithm']}, round {done}, client {self.names[client]!r}",
                reason,
            )

    def count(
        self,
        work: CostCounter,
        client: int,
        phases: Iterable[Phase],
        submodel: frozenset[str],
        found: Mapping[str, float],
        done: int,
    ) -> None:
        """Add the cost of a client's phases to ``work``. Its training reports the numbers in ``found``."""
        for phase in phases:
            samples = found.get(f"{phase.name}/samples", 0)
            work[client, "steps", ""] += found.get(f"{phase.name}/steps", 0)
            work[client, "flops", ""] += samples * self._flops(phase.train, submodel)
            loss = f"{phase.name}/loss"
            for name in found:
                if name == loss or name.startswith(loss + "/"):
                    work[client, "train_loss", phase.name + name.removeprefix(loss)] = (
                        found[name]
                    )
            if loss in found:
                self._check_loss(
                    found[loss], done, client, split="train", variant=phase.name
                )

    def work(
        self, work: CostCounter, done: int, variant: str = "", rows: bool = True
    ) -> None:
        """Count the steps of local training, and record rows of its cost."""
        self._steps += sum(
            int(value) for (_, metric, _), value in work.items() if metric == "steps"
        )
        if not rows:
            return
        for (client, metric, part), value in sorted(
            work.items()
        ):  # independent of the order of the replies
            self.row(
                metric, value, done, client, split="train", variant=variant or part
            )

    def flush(self) -> None:
        """Write the rows so far into the run directory, if there is one."""
        if self._writer:
            with self.clock.charge("save"):
                self._writer.add_rows(self.rows)
            self.rows = []

    def log(self) -> None:
        """Send new rows to the loggers."""
        for logger in self._loggers:
            logger.log(self._unlogged)
        self._unlogged = []

    def note_time(self, done: int, saved: bool) -> None:
        """Record how the time of a round was spent, and whether a checkpoint was written after it."""
        record = {
            "round": done,
            "steps": self._steps,
            **self.clock.take(),
            "saved": saved,
        }
        self.pace.add(record)
        self._steps = 0
        if self._writer:
            self._writer.add_timing(record)
