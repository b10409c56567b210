"""What ends a run early, its stopping rule and losses that diverge, and the checkpoints to which a run returns."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from fl_core.algorithms.base import Round, State
from fl_core.errors import DivergedError, UsageError, warn
from fl_core.records.stopping import BEST_ROUND, STATE, StoppingRule, weighted_mean
from fl_core.records.store import Checkpoint, Run
from fl_core.records.writing import Writer
from fl_core.rounds.clients import ClientReply
from fl_core.rounds.engine import EVALUATE, Engine, Listener, rounds_done
from fl_core.rounds.recorder import Recorder, Timer
from fl_core.rows import label_of
from fl_core.tree import Tree


def rule_of(engine: Engine) -> StoppingRule | None:
    """Return the stopping rule of a run with what it has seen, if there is one."""
    found = [each for each in engine.listeners if isinstance(each, EarlyStopping)]
    return found[0].rule if found else None


class EarlyStopping(Listener):
    """A stopping rule that ends a run, with a row for each model's best round. It is stored in the server's state.

    Args:
        keeps_best: keep the best models here, for a run without a directory.

    Attributes:
        best: the server's state and the clients' main models at the best round so far.
    """

    def __init__(
        self, rule: StoppingRule, recorder: Recorder, keeps_best: bool = False
    ) -> None:
        self.rule, self.recorder, self.keeps_best = rule, recorder, keeps_best
        self.best: tuple[State, list[Tree]] | None = None
        self._taken: dict[str, list[tuple[Mapping[str, float], int]]] = {}

    def before_run(self, engine: Engine) -> None:
        if STATE in engine.server.meta:
            self.rule = StoppingRule.from_json(engine.server.meta[STATE])
            engine.stopped = self.rule.stops

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        """Take in a client's validation scores.

        Raises:
            UsageError: The client has no score before the first round, so that it never will have one.
        """
        client = engine.data.clients[reply.client]
        main = self.rule.metrics[0]
        for model, splits in reply.scores.items():
            if (scores := splits.get("validation")) is None:
                continue
            if rounds_done(rnd) == 0 and math.isnan(scores.get(main, math.nan)):
                raise UsageError(
                    f"patience must have the validation samples of every client to judge by; {client.name!r} has none "
                    f"with a {label_of(main)}. Use patience=0 in a new folder, or give that client more samples."
                )
            self._taken.setdefault(model, []).append((scores, len(client.train)))

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        if rnd.exchange != EVALUATE:
            return
        rule, taken = self.rule, self._taken
        self._taken = {}
        if engine.done == 0:
            return
        means = {
            model: {
                name: weighted_mean((each.get(name, math.nan), n) for each, n in pairs)
                for name in rule.metrics
            }
            for model, pairs in taken.items()
        }
        rule.add(engine.done, means)
        engine.server.meta[STATE] = rule.to_json()
        engine.stopped = rule.stops
        best = rule.best
        if self.keeps_best and best.get(rule.main) == engine.done:
            clients = range(len(engine.names))
            models = [engine.models(client)[rule.main] for client in clients]
            copies = [{n: t.clone() for n, t in model.items()} for model in models]
            self.best = engine.server.clone(), copies
        for model, at in best.items() if engine.finished else ():
            columns = {
                "model": model,
                "split": "validation",
                "estimator": rule.description,
            }
            self.recorder.row(BEST_ROUND, at, engine.done, None, **columns)


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


STARTS = "initial_losses"
"""The key of the server's stored state for the clients' losses before the first round."""

DIVERGENCE = "divergence"
"""The metric of a row without a value. Its status states how far a client's loss exceeds the limit in that round."""

TIMES = 20.0
"""A loss has diverged above 20 times the larger of the client's initial loss and the uniform predictor's."""


class Divergence(Listener):
    """Rows of losses above the limit, with one warning.

    The limit of a client's loss is :data:`TIMES` times the larger of its initial loss and the uniform predictor's.

    >>> from fl_core.training.losses import build, guessing_loss
    >>> limit = Divergence(None, guessing_loss(build("cross_entropy"), n_classes=2))
    >>> limit.begin("north", 1.5)
    >>> limit.reason_for("north", 30.0)
    ''
    >>> limit.reason_for("north", 31.0)
    'a loss of 31, over 20 times the 1.5 at the start'
    >>> limit.reason_for("south", 31.0)  # of whom no start is known
    'a loss of 31, over 20 times the 0.693 of guessing'

    Args:
        recorder: takes the rows.
        guess: loss of the uniform predictor.

    Attributes:
        starts: each client's initial loss, stored with the server's state. None: it was not finite, so there is no
            limit.
    """

    def __init__(self, recorder: Recorder | None, guess: float) -> None:
        self._recorder, self._guess = recorder, guess
        self._noted = False
        self._tuned: frozenset[str] = frozenset()  # trained before their first scores
        self.starts: dict[str, float | None] = {}

    def before_run(self, engine: Engine) -> None:
        if engine.algorithm.finetuning(0, 0):
            self._tuned = frozenset({"personal"})
        self.starts = engine.server.meta.setdefault(STARTS, self.starts)

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        done = rounds_done(rnd)
        for key, loss in reply.work.items():
            phase, _, quantity = key.partition("/")
            if quantity == "loss" and reply.message is not None:
                self._check(engine, reply, done, loss, split="train", variant=phase)
        for model, scores in reply.scores.items():
            if "validation" not in scores:
                continue
            loss = scores["validation"]["loss"]
            if done:
                columns = {"model": model, "split": "validation"}
                self._check(engine, reply, done, loss, **columns)
            elif model not in self._tuned:
                self.begin(engine.names[reply.client], loss)

    def begin(self, client: str, loss: float) -> None:
        """Record a loss before the first round. For several models the largest is kept."""
        before = self.starts.get(client, loss)
        if before is None or not math.isfinite(loss):
            self.starts[client] = None
        else:
            self.starts[client] = max(loss, before)

    def reason_for(self, client: str, loss: float) -> str:
        """Return why a loss has diverged, or an empty text. Losses that are not finite are handled elsewhere."""
        start = self.starts.get(client, -math.inf)
        if start is None or not math.isfinite(loss):
            return ""
        bound, what = max((self._guess, "of guessing"), (start, "at the start"))
        if not 0 < TIMES * bound < loss:
            return ""
        return f"a loss of {loss:.3g}, over {TIMES:g} times the {bound:.3g} {what}"

    def _check(
        self, engine: Engine, reply: ClientReply, done: int, loss: float, **columns: str
    ) -> None:
        """Record, and report once, a loss that has diverged."""
        name = engine.names[reply.client]
        reason = self.reason_for(name, loss)
        if not reason or self._recorder is None:
            return
        status = f"diverged: {reason}"
        self._recorder.row(
            DIVERGENCE, math.nan, done, reply.client, status=status, **columns
        )
        self._recorder.flush()
        where = f"{engine.algorithm.name}, round {done}, client {name!r}"
        text = f"{where}: training diverges, with {reason}. Use a smaller lr."
        if not self._noted:
            warn(text)
        self._noted = True


def check_end(run: Run, done: int) -> None:
    """Check that no model of a stored run has diverged at its last evaluation, or at its best.

    Args:
        done: the round of that evaluation.

    Raises:
        DivergedError: names the first client and model.
    """
    frame = run.rows()[1]
    found = frame[
        (frame["metric"] == DIVERGENCE)
        & (frame["round"] == done)
        & (frame["split"] == "validation")
    ]
    if len(found):
        first = found.iloc[0]
        raise DivergedError(
            f"{run.path} ended with models that have diverged; first the {first['model']} model of client "
            f"{first['client']!r} ({first['status']}). Train again with a smaller lr."
        )
