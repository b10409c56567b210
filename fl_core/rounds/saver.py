"""The checkpoints of a run."""

from __future__ import annotations

import time

from fl_core.records.store import Checkpoint
from fl_core.records.writing import Writer
from fl_core.rounds.early_stopping import EarlyStopping
from fl_core.rounds.engine import Engine, Listener
from fl_core.rounds.recorder import Timer


class Saver(Listener):
    """Checkpoints of a run."""

    def __init__(
        self, writer: Writer, timer: Timer, stopping: EarlyStopping | None = None
    ) -> None:
        self._writer, self._timer, self._stopping = writer, timer, stopping
        self._since = time.monotonic()  # of the last checkpoint, or the beginning

    def after_round(self, engine: Engine) -> None:
        done, schedule = engine.done, engine.schedule
        if done == 0:
            return
        waited = time.monotonic() - self._since
        early = 0 <= waited < schedule.save_seconds  # not if the clock went back
        saves = schedule.saves(done) and (done == schedule.end or not early)
        if self._stopping and schedule.evaluates(done):
            saves |= engine.finished or done in self._stopping.rule.best.values()
        if saves:
            clients = engine.clients
            found = Checkpoint(done, engine.server, clients.states, clients.kept)
            with self._timer.charge("save"):
                self._writer.checkpoint(found, clients.states.changed)
            clients.states.changed.clear()
            self._since = time.monotonic()
