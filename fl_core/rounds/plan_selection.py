"""The choice of a run's layer plan: clients measure in the first round, and a rule reads the values.

An algorithm that decides (PLayer-FL) measures in its own first round. For any other algorithm that uses a plan, the
same measurement can precede its run (``plan=auto``). Only the plan and its cost remain of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_core import tree
from fl_core.algorithms.base import Algorithm, Round
from fl_core.algorithms.fedper import MEASURED, PLayerFL
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.rounds.engine import Engine, Listener
from fl_core.rounds.recorder import Costs, Timer
from fl_core.training.phases import Observer

Measurement = dict[str, Any]

Decide = Callable[..., LayerPlan]
"""Makes a plan of layers and clients' measurements, each with ``client``, ``weight``, ``layers``, ``importance``."""


@dataclass(frozen=True)
class Instruments:
    """The diagnostics that a run may use, handed in from above.

    Attributes:
        observers: what clients measure while they train, by name.
        decide: the function that decides on a plan. ``check_rule`` refuses a rule that it does not take.
        measuring: makes the listener that measures the layers while a run of a task trains.
    """

    observers: Mapping[str, Callable[[tuple[Layer, ...]], Observer]] = field(
        default_factory=dict
    )
    decide: Decide | None = None
    check_rule: Callable[[str], object] | None = None
    measuring: Callable[[Any], Listener] | None = None


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
