"""The choice of a run's layer plan: clients measure in the first round, and a rule reads the values.

An algorithm that decides (PLayer-FL) measures in its own first round. For any other algorithm that uses a plan, the
same measurement can precede its run (``plan=auto``). Only the plan and its cost remain of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fl_core import tree
from fl_core.algorithms.base import Algorithm, Round, State
from fl_core.algorithms.fedper import MEASURED, PLayerFL, Scout
from fl_core.errors import UsageError, check_known
from fl_core.execution.client_backend import LocalClients
from fl_core.layers import Layer
from fl_core.ledger import CostCounter
from fl_core.plan import LayerPlan
from fl_core.registry import is_outside
from fl_core.schedule import sampled_clients
from fl_core.training.phases import Observer
from fl_core.tree import Tree

if TYPE_CHECKING:
    from fl_core.engine import Engine

Measurement = dict[str, Any]


class Decide(Protocol):
    """Turns the clients' measurements of the first round into a plan."""

    def __call__(
        self,
        layers: Sequence[Layer],
        measured: Sequence[Mapping[str, Any]],
        *,
        names: Sequence[str],
        rule: str,
        threshold: float,
        seed: int,
        data: str,
    ) -> LayerPlan:
        """Make a plan of ``measured``. It has ``client``, ``weight``, ``layers`` and ``importance`` of each client."""


@dataclass(frozen=True)
class Instruments:
    """The diagnostics that a run may use, handed in from above: observers by name, and the function that decides."""

    observers: Mapping[str, Callable[[tuple[Layer, ...]], Observer]] = field(
        default_factory=dict
    )
    decide: Decide | None = None
    rules: tuple[str, ...] = ()  # what ``decide`` takes as its rule


@dataclass(frozen=True)
class PlanSelection:
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
        if not (self.measure_first or algorithm.decides):
            return
        name, layers = algorithm.name, algorithm.task_info.layers
        self._decide_by(name)
        if self.instruments.rules and not is_outside(self.rule):
            check_known("rule", self.rule, self.instruments.rules)
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

    def before_training(self, engine: Engine) -> LayerPlan | None:
        """Measure ahead of the first round and decide on the plan; None if not asked for, or if a plan is given."""
        if not self.measure_first or engine.algorithm.plan is not None:
            return None
        scouting, work = run_measuring_exchange(engine)
        engine.record_work(work, variant="plan")
        return self._plan(engine, pop_measurements(scouting.server))

    def after_exchange(self, engine: Engine) -> LayerPlan | None:
        """Decide on the plan once the clients of an algorithm that measures have done so; None before that."""
        if not engine.algorithm.decides or MEASURED not in engine.server.meta:
            return None
        return self._plan(engine, pop_measurements(engine.server))

    def _plan(self, engine: Engine, measured: Sequence[Measurement]) -> LayerPlan:
        plan = self._decide_by(engine.algorithm.name)(
            engine.task_info.layers,
            measured,
            names=engine.names,
            rule=self.rule,
            threshold=self.threshold,
            seed=engine.task_info.seed,
            data=engine.data.digest,
        )
        return plan.with_shared(plan.shared, checkpoint=tree.digest(engine.initial))

    def _decide_by(self, name: str) -> Decide:
        if self.instruments.decide is None:
            raise UsageError(
                f"{name} must have a plan, or instruments to choose one; got neither. Pass a plan, or use fl.run."
            )
        return self.instruments.decide


def pop_measurements(server: State) -> list[Measurement]:
    """Remove the clients' measurements from the server's state and return them."""
    measured: list[Measurement] = server.meta.pop(MEASURED)
    return measured


def run_measuring_exchange(
    engine: Engine, keep: bool = False, clients: tuple[int, ...] | None = None
) -> tuple[Engine, CostCounter]:
    """Run PLayer-FL's measuring exchange with the first round's clients, apart from the engine's own run.

    Args:
        keep: also keep the clients' trained models, and report all that was measured, not just what a decision needs.
        clients: others than the first round's.

    Returns:
        The engine of that exchange, with what was measured in its server's state, and what it cost.
    """
    algorithm = (Scout if keep else PLayerFL)(engine.task_info)
    scouting = engine.fork(algorithm)
    if clients is None:
        clients = sampled_clients(
            engine.task_info.seed, 0, len(engine.names), engine.schedule.participation
        )
    work: CostCounter = defaultdict(float)
    scouting.exchange(
        Round(0, "stats", clients), work, keep_local=clients if keep else ()
    )
    return scouting, work


def first_models(
    engine: Engine, clients: tuple[int, ...] | None = None
) -> tuple[Mapping[str, Tree], dict[str, Measurement]]:
    """Each client's model after PLayer-FL's measuring training, and its measurement, by client; or of some clients."""
    scouting, _ = run_measuring_exchange(engine, keep=True, clients=clients)
    measured = pop_measurements(scouting.server)
    home = scouting.clients
    if not isinstance(home, LocalClients):
        raise UsageError(
            "client models must be in this process to be measured; got a remote backend. Use a plan."
        )
    return home.kept["local"], {engine.names[each["client"]]: each for each in measured}
