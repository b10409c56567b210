"""The round: sample, send, train, aggregate, evaluate. Whatever records, stops or saves listens to it.

The first listener chooses the layer plan: clients measure in the first round, and a rule reads the values. An algorithm
that decides (PLayer-FL) measures in its own first round. For any other algorithm that uses a plan, the same measurement
can precede its run (``plan=auto``). Only the plan and its cost remain of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from fl_core import tree
from fl_core.algorithms.base import (
    Algorithm,
    Round,
    TaskInfo,
    Update,
    freeze,
)
from fl_core.algorithms.fedper import MEASURED, PLayerFL
from fl_core.data import FederatedData
from fl_core.errors import NonFiniteError, UsageError, warn
from fl_core.layers import Layer, tensor_in_layer
from fl_core.plan import LayerPlan
from fl_core.records.stopping import (
    EVALUATE,
    FINISH,
    Listener,
    Schedule,
    sampled_clients,
)
from fl_core.records.store import Checkpoint
from fl_core.rounds.clients import (
    SCORED,
    FinetuneRequest,
    LocalClients,
    ScoreRequest,
    TrainRequest,
)
from fl_core.rounds.recorder import Costs, Timer
from fl_core.training.loop import Observer
from fl_core.tree import Tree

if TYPE_CHECKING:
    from fl_core.run.task import Task

LOCAL_MODELS = 100
"""The most locally trained models in a checkpoint, for diagnoses: those of the round's first clients."""
Heard = TypeVar("Heard", bound=Listener)


class Engine:
    """One run of one algorithm on one federation.

    Args:
        algorithm: under the plan in force, if there is one yet. It is frozen from here on.
        data: names and sizes of the clients. The engine reads none of their samples.
        initial: the model before the first round.
        clients: where the clients live.
        listeners: what records, stops and saves, in the order in which it hears.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        initial: Tree,
        clients: LocalClients,
        schedule: Schedule,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.algorithm, self.data, self.initial = algorithm, data, initial
        self.clients, self.schedule, self.listeners = clients, schedule, listeners
        self.names = data.names
        self.server = algorithm.call("server_state", tree.clone(initial))
        self.done = 0
        self.stopped = False
        clients.begin(algorithm)

    @property
    def task_info(self) -> TaskInfo:
        """The facts of the task that the algorithm may know."""
        return self.algorithm.task_info

    @property
    def finished(self) -> bool:
        """True if no round is left to train, by their number or by the stopping rule."""
        return self.done == self.schedule.rounds or self.stopped

    @tree.one_thread()
    def run(self) -> None:
        """Run the remaining rounds, until the last one or the end by the stopping rule.

        Raises:
            NonFiniteError: training or aggregation met NaN or infinity; earlier checkpoints stay.
            UsageError: a decision is needed and no instruments were given, or a client has no validation score that
                the stopping rule needs.
        """
        self.use(self.algorithm)
        try:
            self.tell("before_run")
            if self.done == 0:
                self.tune()
                self.evaluate()
                self.tell("after_round")
            while self.done < self.schedule.end and not self.finished:
                self.step()
        finally:
            self.tell("after_run")

    @tree.one_thread()
    def step(self) -> None:
        """Run one round: train, aggregate, and evaluate where due.

        In one thread: what is done here is small, and a second one would wait for a core that clients train on.
        """
        schedule, done = self.schedule, self.done + 1
        exchanges = self.algorithm.call("exchanges", self.done)
        self.clients.forget()
        sampled = self.sampled()
        for exchange in exchanges:
            last = exchange == exchanges[-1]
            score = SCORED if last and schedule.evaluates(done) else ()
            kept = LOCAL_MODELS if last and schedule.keeps_local(done) else 0
            rnd = Round(self.done, exchange, sampled)
            sampled = self.exchange(rnd, score, sampled[:kept])
        self.done = done
        self.check_finite()
        self.tell("after_training")
        if schedule.evaluates(done) or schedule.saves(done):
            self.tune()
        if schedule.evaluates(done):
            self.evaluate()
        self.tell("after_round")

    def exchange(
        self,
        rnd: Round,
        score: tuple[str, ...] = (),
        keep: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Send to the sampled clients, train them, and aggregate their replies as they come.

        Without any reply the server keeps its state.

        Args:
            score: on which splits locally trained models are scored.
            keep: the clients whose locally trained models are kept.

        Returns:
            The clients that replied.
        """
        replied: list[int] = []

        def requests() -> Iterator[TrainRequest]:
            for client in rnd.sampled:
                message = self.algorithm.call(
                    "server_message", self.server, client, rnd
                )
                self.tell("on_message", rnd, client, message)
                yield TrainRequest(client, rnd, message, score, client in keep)

        def updates() -> Iterator[Update]:
            for reply in self.clients.run(requests()):
                self.tell("on_reply", rnd, reply)
                if reply.message is not None:
                    replied.append(reply.client)
                    weight = self.task_info.weight(reply.client)
                    yield Update(reply.client, weight, reply.message)

        self.tell("before_exchange", rnd)
        replies = updates()
        first = list(islice(replies, 1))
        if first:
            self.algorithm.call("aggregate", self.server, _joined(first, replies), rnd)
        for _ in replies:  # the algorithm may not have asked for all of them
            pass
        self.tell("after_exchange", rnd)
        return tuple(replied)

    def measure(self, clients: tuple[int, ...], keep: bool = False) -> None:
        """Run PLayer-FL's measuring exchange alone. The server's state then has what the clients measured."""
        self.use(self.algorithm)
        self.exchange(Round(0, "stats", clients), keep=clients if keep else ())

    def tune(self) -> None:
        """Let every client fine-tune a copy of its model if the algorithm asks for it now, and keep it."""
        if not self.algorithm.finetuning(self.done, 0):
            return
        rnd = Round(self.done, FINISH, tuple(range(len(self.names))))

        def requests() -> Iterator[FinetuneRequest]:
            for client in rnd.sampled:
                message = self.algorithm.call(
                    "server_message", self.server, client, rnd
                )
                self.tell("on_message", rnd, client, message)
                yield FinetuneRequest(client, self.done, self.server)

        self.tell("before_exchange", rnd)
        for reply in self.clients.run(requests()):
            self.tell("on_reply", rnd, reply)
        self.tell("after_exchange", rnd)

    def evaluate(self) -> None:
        """Score every client's models on validation and test samples."""
        rnd = Round(self.done, EVALUATE, tuple(range(len(self.names))))
        self.tell("before_exchange", rnd)
        requests = (ScoreRequest(k, self.done, self.server) for k in rnd.sampled)
        for reply in self.clients.run(requests):
            self.tell("on_reply", rnd, reply)
        self.tell("after_exchange", rnd)

    # --- around the rounds ---

    def sampled(self) -> tuple[int, ...]:
        """Draw the clients of the next round."""
        count = len(self.names)
        share = self.schedule.participation
        return sampled_clients(self.task_info.seed, self.done, count, share)

    def check_finite(self) -> None:
        """Check that the server's state has no NaN or infinity, besides those of the initial model.

        Raises:
            NonFiniteError: names the first tensor, and its layer.
        """
        for name, held in self.server.trees.items():
            bad = tree.first_nonfinite(held, before=self.initial)
            if bad is not None:
                tensor = tensor_in_layer(bad, self.task_info.layers)
                raise NonFiniteError(
                    f"{self.algorithm.name}, round {self.done}, server, aggregation: {tensor} of {name!r} is not "
                    "finite"
                )

    def tell(self, moment: str, *facts: Any) -> None:
        """Call a hook of every listener."""
        for each in self.listeners:
            getattr(each, moment)(self, *facts)

    def listener(self, kind: type[Heard]) -> Heard:
        """Return the listener of a kind, which must be there."""
        return next(each for each in self.listeners if isinstance(each, kind))

    def use(self, algorithm: Algorithm) -> None:
        """Work with this algorithm from now on, and freeze it."""
        freeze(algorithm)
        self.algorithm = algorithm
        self.clients.use(algorithm)

    def adopt(self, plan: LayerPlan) -> None:
        """Continue with the algorithm rebuilt under the plan that was decided on."""
        in_force = self.algorithm.resolve_plan(plan)
        for note in in_force.notes():
            warn(note)
        self.use(self.algorithm.with_plan(in_force))
        self.server.meta["plan"] = in_force.to_json()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; clients' states are read from it when they are needed."""
        self.server = checkpoint.server
        self.done = checkpoint.round
        self.clients.restore(checkpoint)
        if "plan" in self.server.meta:
            plan = LayerPlan.from_json(self.server.meta["plan"])
            self.algorithm = self.algorithm.with_plan(plan)

    def models(self, client: int) -> Mapping[str, Tree]:
        """Return the present models of one client: global or personal ones, and a fine-tuned one."""
        return self.clients.models(client, self.server, self.done)


def _joined(first: list[Update], others: Iterator[Update]) -> Iterator[Update]:
    """Yield all updates in order; none is kept here."""
    yield first.pop()
    yield from others


Measurement = dict[str, Any]


Decide = Callable[..., LayerPlan]
"""Makes a plan of layers and clients' measurements, each with ``client``, ``weight``, ``layers``, ``importance``."""


@dataclass(frozen=True)
class Instruments:
    """The diagnostics that a run may use, handed in from above.

    Attributes:
        observers: what clients measure while they train, by name.
        decide: the function that decides on a plan. ``check_rule`` refuses a rule that it does not take.
        measuring: makes the listener that measures the layers while a run trains.
    """

    observers: Mapping[str, Callable[[tuple[Layer, ...]], Observer]] = field(
        default_factory=dict
    )
    decide: Decide | None = None
    check_rule: Callable[[str], object] | None = None
    measuring: Callable[[Task], Listener] | None = None


@dataclass(frozen=True)
class PlanSelection(Listener):
    """The choice of a run's plan.

    Attributes:
        measure_first: measure before the first round, for an algorithm that does not do so itself.
        rule, threshold: handed to ``instruments.decide``.
    """

    instruments: Instruments = field(default_factory=Instruments)
    measure_first: bool = False
    rule: str = "sensitivity_ratio"
    threshold: float = 1.2

    def check(self, algorithm: Algorithm) -> None:
        """Refuse a run that needs a decision without anything to decide it, before any work.

        Raises:
            UsageError: no instruments, an unknown rule, or a model or training that leaves nothing to decide on.
        """
        if self.instruments.check_rule is not None:
            self.instruments.check_rule(self.rule)
        if not (self.measure_first or algorithm.decides):
            return
        name = algorithm.name
        layers = algorithm.task_info.layers
        self._decide_by(name)
        moving = [layer for layer in layers if layer.used and not layer.is_frozen]
        choices = [layer for layer in moving if layer.weights]
        if len(choices) < 2:
            raise UsageError(
                f"{name}: the model must have 2 layers to choose between; got {len(choices)}."
            )
        algorithm.resolve_plan(LayerPlan(layers, ()).with_first(1))
        for layer in moving:
            if set(layer.weights) <= set(layer.frozen):
                raise UsageError(
                    f"layer {layer.name!r} must have weights that train, to be measured; got none. "
                    "Group it with another layer, or give a plan."
                )
        if not algorithm.task_info.epochs:
            raise UsageError("epochs must be at least 1 to choose a plan; got 0.")

    def before_run(self, engine: Engine) -> None:
        """Check that a decision can be made, and make it now if the measurement precedes the run."""
        if engine.done:
            return
        self.check(engine.algorithm)
        if self.measure_first and engine.algorithm.plan is None:
            scouting = Engine(
                PLayerFL(engine.task_info),
                engine.data,
                engine.initial,
                engine.clients.fork(),
                engine.schedule,
                [engine.listener(Costs).apart("plan"), engine.listener(Timer)],
            )
            scouting.measure(scouting.sampled())
            scouting.tell("after_training")
            self._decide(engine, scouting.server.meta.pop(MEASURED))
            engine.clients.begin(engine.algorithm)

    def after_exchange(self, engine: Engine, rnd: Round) -> None:
        """Decide on the plan once the clients of an algorithm that measures have done so."""
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
