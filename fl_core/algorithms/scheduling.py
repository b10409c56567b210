"""Schedules that add layers to the training one after another, from the input or from the output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fl_core import tree
from fl_core.algorithms import (
    Algorithm,
    AlgorithmWrapper,
    Context,
    Message,
    Observation,
    Phase,
    Round,
    State,
    TaskInfo,
    Tree,
    register,
)
from fl_core.algorithms.fedamp import Mixing
from fl_core.algorithms.pfedhn import PFedHN
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.plan import LayerPlan

FROZEN = "frozen"  # a client's tree of layers that do not train yet
TRAINED = "trained"  # the metric of rows that record which layers train
WHOLE = (
    Mixing,
    PFedHN,
)  # their server makes a whole model for each client, so no layer can be frozen


class Scheduled(AlgorithmWrapper):
    """A schedule for another algorithm that unfreezes the shared layers one by one (Jang and Choi 2024, Alg. 1).

    Layers are counted from the end at which the schedule begins. Shared layer k trains and travels from the 0-based
    round t_k on. Until then it keeps its common initial value. Frozen layers are not sent, since both sides know their
    values. The paper's Algorithm 1 sends them too, with the same result.

    - ``base``: the algorithm that does everything else. The default FedBABU is the paper's method: the head stays at
      its random start until all layers are fine-tuned at the end. Other algorithms with one model at the server are
      possible (section 5.4). Their own keys are given by ``--option`` too.
    - ``unfreeze``: t_1, t_2, ..., one for each shared layer. The paper has 0,100,200 and its ablation 0,50,100. The
      default spreads them evenly over the run, as the paper does for 3 layers and 300 rounds. If all are 0, this is the
      base algorithm.

    Raises:
        UsageError: the numbers of rounds and layers differ, or the base algorithm is unsuitable. That is a schedule, an
            algorithm that chooses a plan while it trains, or one with a model for each client at the server.
    """

    uses_plan = True
    keeps = "the head until the end"
    trains, travels, cost = (
        "the unfrozen layers of the body",
        "what is trained",
        "2 unfrozen",
    )
    forward: ClassVar[bool] = True  # whether the schedule begins at the input

    @dataclass(frozen=True)
    class Config:
        base: str = "fedbabu"
        unfreeze: tuple[int, ...] | None = None

    @classmethod
    def base_algorithm(cls, config: Mapping[str, Any]) -> type[Algorithm]:
        below, over = (
            super().base_algorithm(config),
            config.get("base", cls.Config.base),
        )
        if issubclass(below, Scheduled):
            raise UsageError(
                f"{cls.name}: base must not be a schedule; got {over}. Use such as fedper."
            )
        if below.needs_blocks:
            raise UsageError(
                f"{cls.name}: base must be an algorithm whose clients have the whole model; got {over}. "
                "Use such as fedper."
            )
        if issubclass(below, WHOLE):
            raise UsageError(
                f"{cls.name}: base must be an algorithm with one model at the server; "
                f"got {over}, with one for each client. Use such as fedper."
            )
        return below

    @classmethod
    def scheduled_layers(cls, plan: LayerPlan) -> tuple[Layer, ...]:
        """Return the layers that start to train one after another, first to last."""
        return plan.body if cls.forward else plan.body[::-1]

    def inner_task_info(self) -> TaskInfo:
        """Return the task for the inner algorithm, with frozen layers marked as not trained yet."""
        if self.plan is None:
            return self.task_info
        layers = zip(
            self.scheduled_layers(self.plan), self.rounds_of(self.plan), strict=True
        )
        return replace(
            self.task_info,
            unfreeze_at=tuple(
                (name, since)
                for layer, since in layers
                if since
                for name in layer.tensors
            ),
        )

    def default_plan(self, layers: tuple[Layer, ...]) -> LayerPlan | None:
        plan = super().default_plan(layers)
        if plan is None:
            raise UsageError(
                f"{self.name}: base must have a plan before training; got {self.config.base}. "
                "Use fedper with plan=auto."
            )
        return plan

    def rounds_of(self, plan: LayerPlan) -> tuple[int, ...]:
        """Return the first training round of each scheduled layer."""
        names = [layer.name for layer in self.scheduled_layers(plan)]
        rounds = self.config.unfreeze
        if rounds is None:
            return tuple(
                k * self.task_info.rounds // len(names) for k in range(len(names))
            )
        if len(rounds) != len(names):
            raise UsageError(
                f"{self.name}: unfreeze must have one round for each of the {len(names)} layers {', '.join(names)}; "
                f"got {len(rounds)}."
            )
        return tuple(rounds)

    def frozen(self, rnd: Round) -> frozenset[str]:
        """Return the names of the tensors that still have their initial value in this round."""
        return self.inner.task_info.not_yet_trained(rnd)

    # --- a schedule stores frozen layers separately and does not train them --------------------------------------

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.trees[FROZEN] = tree.select(initial, self.frozen(Round(0)))
        return state

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        state.trees["model"] = {**state.trees["model"], **state.trees[FROZEN]}
        return super().client_start(state, message, ctx, rnd, client)

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        frozen = self.frozen(rnd)
        return tuple(
            replace(phase, train=phase.train - frozen)
            for phase in super().phases(rnd, client)
        )

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        state.trees[FROZEN] = tree.select(state.trees[FROZEN], self.frozen(rnd))
        return message

    def observations(self, server: State, rnd: Round) -> Iterator[Observation]:
        """Record ``trained``: 1 if a layer trained in the round before, else 0."""
        yield from super().observations(server, rnd)
        if rnd.index:
            trained = {
                name
                for phase in self.phases(Round(rnd.index - 1), 0)
                for name in phase.train
            }
            for layer in self.task_info.layers:
                yield Observation(
                    TRAINED,
                    float(not trained.isdisjoint(layer.tensors)),
                    layer=layer.name,
                )


@register
class Vanilla(Scheduled):
    """The schedule from the input to the output."""

    name = "vanilla"
    paper = "Jang and Choi 2024, layer scheduling"


@register
class Anti(Scheduled):
    """The schedule from the output to the input."""

    name = "anti"
    paper = "Jang and Choi 2024, layer scheduling"
    forward = False
