"""What steers a run: its stopping rule, losses that diverge, the checkpoints to return to, and the choice of a plan.

Clients measure their layers in the first round, and a rule reads the values. An algorithm that decides (PLayer-FL)
measures in its own first round. For any other algorithm that uses a plan, the same measurement can precede its run
(``plan=auto``). Only the plan and its cost remain of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_core import tree
from fl_core.algorithms.base import Algorithm, Round, State
from fl_core.algorithms.fedper import MEASURED, PLayerFL
from fl_core.errors import DivergedError, UsageError, warn
from fl_core.plan import LayerPlan
from fl_core.records.stopping import BEST_ROUND, STATE, StoppingRule, weighted_mean
from fl_core.records.store import Checkpoint, Run
from fl_core.records.writing import Writer
from fl_core.rounds.clients import ClientReply
from fl_core.rounds.engine import EVALUATE, Engine, Listener, rounds_done
from fl_core.rounds.recorder import Costs, Recorder, Timer
from fl_core.rows import label_of
from fl_core.training.phases import Observers
from fl_core.tree import Tree


def rule_of(engine: Engine) -> StoppingRule | None:
    """Return the stopping rule of a run with its scores so far; None without one."""
    rules = (e.rule for e in engine.listeners if isinstance(e, EarlyStopping))
    return next(rules, None)


@dataclass
class EarlyStopping(Listener):
    """A listener that ends a run by its stopping rule, and records each model's best round.

    The rule is stored in the server's state.

    Args:
        rule: the stopping rule. A resumed run's is replaced by the stored one.
        recorder: the listener that records the rows.
        keeps_best: whether the best models are kept in memory, for a run without a directory.

    Attributes:
        best: the server's state and the clients' main models at the best round so far.
            It is None before the first one, or if they are not kept.
        local: the clients' locally trained models at their best round so far, by name;
            empty if they are not kept.
    """

    rule: StoppingRule
    recorder: Recorder
    keeps_best: bool = False
    best: tuple[State, list[Tree]] | None = None
    local: Mapping[str, Tree] = field(default_factory=dict)
    _taken: dict[str, list[tuple[Mapping[str, float], int]]] = field(
        default_factory=dict
    )

    def before_run(self, engine: Engine) -> None:
        if STATE in engine.server.meta:
            self.rule = StoppingRule.from_json(engine.server.meta[STATE])
            engine.stopped = self.rule.stops

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        """Add a client's validation scores to the rule.

        Raises:
            UsageError: before the first round, the client's validation samples do not give the main score.
        """
        client = engine.data.clients[reply.client]
        main_metric = self.rule.metrics[0]
        for model, splits in reply.scores.items():
            if (scores := splits.get("validation")) is None:
                continue
            if rounds_done(rnd) == 0 and math.isnan(scores.get(main_metric, math.nan)):
                metric_label = label_of(main_metric)
                raise UsageError(
                    f"patience must have the validation samples of every client to judge by; {client.name!r} has none "
                    f"with a {metric_label}. Use patience=0, or give that client more samples."
                )
            self._taken.setdefault(model, []).append((scores, len(client.train)))

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        if rnd.exchange != EVALUATE:
            return
        rule, scores_taken = self.rule, self._taken
        self._taken = {}
        if engine.done == 0:
            return
        means = {
            model: {
                name: weighted_mean(
                    (scores.get(name, math.nan), n) for scores, n in pairs
                )
                for name in rule.metrics
            }
            for model, pairs in scores_taken.items()
        }
        rule.add(engine.done, means)
        engine.server.meta[STATE] = rule.to_json()
        engine.stopped = rule.stops
        best_rounds = rule.best
        if self.keeps_best and best_rounds.get(rule.main) == engine.done:
            models = (engine.models(k)[rule.main] for k in range(len(engine.names)))
            copies = [tree.clone(model) for model in models]
            self.best = engine.server.clone(), copies
        if (
            self.keeps_best
            and best_rounds.get("local", best_rounds.get(rule.main)) == engine.done
        ):
            self.local = engine.clients.kept.get("local", {})
        for model, best_round in best_rounds.items() if engine.finished else ():
            self.recorder.row(
                BEST_ROUND,
                best_round,
                engine.done,
                None,
                model=model,
                split="validation",
                estimator=rule.description,
            )


@dataclass
class Saver(Listener):
    """A listener that writes the checkpoints of a run.

    It writes those that the schedule names, unless one comes too early after the one
    before. After the last round, before a pause and after each best round it writes one at
    once. It writes none before the first round.
    """

    _writer: Writer
    _timer: Timer
    _stopping: EarlyStopping | None = None
    # of the last checkpoint, or the beginning
    _since: float = field(default_factory=time.monotonic)

    def after_round(self, engine: Engine) -> None:
        done, schedule = engine.done, engine.schedule
        if done == 0:
            return
        waited_seconds = time.monotonic() - self._since
        # not if the clock went back
        is_early = 0 <= waited_seconds < schedule.save_seconds
        is_due = schedule.saves(done) and (done == schedule.end or not is_early)
        if self._stopping and schedule.evaluates(done):
            is_due |= engine.finished or done in self._stopping.rule.best.values()
        if is_due:
            clients = engine.clients
            with self._timer.charge("save"):
                self._writer.checkpoint(
                    Checkpoint(done, engine.server, clients.states, clients.kept),
                    clients.states.changed,
                )
            clients.states.changed.clear()
            self._since = time.monotonic()


STARTS = "initial_losses"
"""The key of the server's stored state for the clients' losses before the first round."""

DIVERGENCE = "divergence"
"""The metric of a row without a value. Its status states how far a client's loss exceeds the limit in that round."""

TIMES = 20.0
"""A loss has diverged if it is over this many times a reference.

The reference is the larger of the client's initial loss and the uniform predictor's."""


@dataclass
class Divergence(Listener):
    """A listener that records losses above the limit, with one warning.

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
        recorder: the listener that records the rows.
        guess: loss of the uniform predictor.

    Attributes:
        starts: each client's initial loss, stored with the server's state. None: it was not finite, so there is no
            limit.
    """

    _recorder: Recorder | None
    _guess: float
    _noted: bool = False
    _tuned: frozenset[str] = frozenset()  # trained before their first scores
    starts: dict[str, float | None] = field(default_factory=dict)

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
                self._check(engine, reply, done, loss, model=model, split="validation")
            elif model not in self._tuned:
                self.begin(engine.names[reply.client], loss)

    def begin(self, client: str, loss: float) -> None:
        """Record a client's loss before the first round. Of several models' losses the largest counts.

        Args:
            client: the client's name.
            loss: the loss. If it is not finite, the client has no limit.
        """
        largest_loss = self.starts.get(client, loss)
        if largest_loss is None or not math.isfinite(loss):
            self.starts[client] = None
        else:
            self.starts[client] = max(loss, largest_loss)

    def reason_for(self, client: str, loss: float) -> str:
        """Return why a loss has diverged, or an empty text if it has not or is not finite.

        Losses that are not finite raise NonFiniteError in
        :func:`fl_core.training.loop.train`. No loss diverges if the client's initial
        loss was not finite, or the limit is not above 0.

        Args:
            client: the client's name.
            loss: the loss after a round.
        """
        start = self.starts.get(client, -math.inf)
        if start is None or not math.isfinite(loss):
            return ""
        limit, origin = max((self._guess, "of guessing"), (start, "at the start"))
        if not 0 < TIMES * limit < loss:
            return ""
        return f"a loss of {loss:.3g}, over {TIMES:g} times the {limit:.3g} {origin}"

    def _check(
        self, engine: Engine, reply: ClientReply, done: int, loss: float, **columns: str
    ) -> None:
        """Record a loss if it has diverged, and warn of the first such loss of the run.

        Args:
            done: number of completed rounds.
            loss: the client's loss.
            columns: further columns of the row, such as the model and the split.
        """
        name = engine.names[reply.client]
        reason = self.reason_for(name, loss)
        if not reason or self._recorder is None:
            return
        status = f"diverged: {reason}"
        self._recorder.row(
            DIVERGENCE, math.nan, done, reply.client, status=status, **columns
        )
        self._recorder.flush()
        location = f"{engine.algorithm.name}, round {done}, client {name!r}"
        if not self._noted:
            warn(f"{location}: training diverges, with {reason}. Use a smaller lr.")
        self._noted = True


def check_end(run: Run, done: int) -> None:
    """Check that no model of a stored run has diverged at one evaluation, such as the last or the best.

    Args:
        run: the stored run.
        done: number of completed rounds at that evaluation.

    Raises:
        DivergedError: a model has diverged. The message names the first client and model.
    """
    frame = run.rows()[1]
    divergence = frame[
        (frame["metric"] == DIVERGENCE)
        & (frame["round"] == done)
        & (frame["split"] == "validation")
    ]
    if len(divergence):
        first_row = divergence.iloc[0]
        raise DivergedError(
            f"{run.path} ended with models that have diverged; first the {first_row['model']} model of client "
            f"{first_row['client']!r} ({first_row['status']}). Train again with a smaller lr."
        )


# --- the plan ---------------------------------------------------------------------------------------------------

Measurement = dict[str, Any]

Decide = Callable[..., LayerPlan]
"""A function that makes a plan from the layers and the clients' measurements.

A measurement has ``client``, ``weight``, ``layers`` and ``importance``. The keywords are
``names``, ``rule``, ``threshold``, ``seed`` and ``data``."""


@dataclass(frozen=True)
class Instruments:
    """The functions of diagnostics that a run may use. The caller passes them, because fl_core imports no diagnostics.

    Attributes:
        observers: by name, functions that make the observers of local training.
        decide: the function that chooses a plan from measurements. Without it a run
            that must choose is refused.
        check_rule: a function that raises UsageError for the name of a rule that
            ``decide`` does not have. Without it no name is checked.
        measuring: a function of a task that returns the listener that measures the
            layers while a run trains. Without it a run that measures is refused.
    """

    observers: Observers = field(default_factory=dict)
    decide: Decide | None = None
    check_rule: Callable[[str], object] | None = None
    measuring: Callable[[Any], Listener] | None = None


@dataclass(frozen=True)
class PlanSelection(Listener):
    """A listener that chooses the run's plan.

    Attributes:
        instruments: the functions that observe training and choose the plan.
        measure_first: measure before the first round, for an algorithm that does not do so itself.
        rule: name of the rule that chooses the plan.
        threshold: the threshold of that rule.
    """

    instruments: Instruments = field(default_factory=Instruments)
    measure_first: bool = False
    rule: str = "sensitivity_ratio"
    threshold: float = 1.2

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, before any work, a run of an algorithm that must choose a plan and cannot.

        Raises:
            UsageError: there is no function to choose a plan, the rule is unknown, or the model or its training leaves
                nothing to measure.
        """
        if self.instruments.check_rule is not None:
            self.instruments.check_rule(self.rule)
        if not (self.measure_first or algorithm.decides):
            return
        name = algorithm.name
        layers = algorithm.task_info.layers
        self._decide_by(name)
        trained_layers = [
            layer for layer in layers if layer.used and not layer.is_frozen
        ]
        choosable_layers = [layer for layer in trained_layers if layer.weights]
        if len(choosable_layers) < 2:
            raise UsageError(
                f"{name}: the model must have 2 layers to choose between; got {len(choosable_layers)}."
            )
        algorithm.resolve_plan(LayerPlan(layers, ()).with_first(1))
        for layer in trained_layers:
            if set(layer.weights) <= set(layer.frozen):
                raise UsageError(
                    f"layer {layer.name!r} must have weights that train, to be measured; got none. "
                    "Group it with another layer, or give a plan."
                )
        if not algorithm.task_info.epochs:
            raise UsageError("epochs must be at least 1 to choose a plan; got 0.")

    def before_run(self, engine: Engine) -> None:
        """Check that a plan can be chosen, and choose it now if the measurement precedes the run.

        Raises:
            UsageError: as :meth:`check`.
        """
        if engine.done:
            return
        self.check(engine.algorithm)
        if self.measure_first and engine.algorithm.plan is None:
            measuring_engine = Engine(
                PLayerFL(engine.task_info),
                engine.data,
                engine.initial,
                engine.clients.fork(),
                engine.schedule,
                [engine.listener(Costs).apart("plan"), engine.listener(Timer)],
            )
            measuring_engine.measure(measuring_engine.sampled())
            measuring_engine.tell("after_training")
            self._decide(engine, measuring_engine.server.meta.pop(MEASURED))
            engine.clients.begin(engine.algorithm)

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        """Choose the plan after the exchange in which the clients have measured."""
        if engine.algorithm.decides and MEASURED in engine.server.meta:
            self._decide(engine, engine.server.meta.pop(MEASURED))

    def _decide(self, engine: Engine, measured: Sequence[Measurement]) -> None:
        plan = self._decide_by(engine.algorithm.name)(
            engine.task_info.layers,
            measured,
            names=engine.names,
            rule=self.rule,
            threshold=self.threshold,
            seed=engine.task_info.seed,
            data=engine.data.digest,
        )
        checkpoint = tree.digest(engine.initial)
        engine.adopt(plan.with_shared(plan.shared, checkpoint=checkpoint))

    def _decide_by(self, name: str) -> Decide:
        if self.instruments.decide is None:
            raise UsageError(
                f"{name} must have a plan, or instruments to choose one; got neither. Pass a plan, or use fl.run."
            )
        return self.instruments.decide
