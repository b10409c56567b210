"""Averaging of some layers less often than others, and schedules that train one layer after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar

from fl_core import tree
from fl_core.algorithms import (
    Algorithm,
    Context,
    Message,
    Observation,
    Phase,
    Round,
    State,
    Tree,
    Update,
    find,
    register,
)
from fl_core.algorithms.fedamp import Mixing
from fl_core.algorithms.pfedla import PFedHN
from fl_core.errors import Count, UsageError
from fl_core.layers import Layer
from fl_core.plan import LayerPlan, tensors_in

PENDING = "pending"  # at a client: layers trained since last sent; at the server: their names, by client
DUE = "due"
INTERVALS, DISCREPANCY = "intervals", "discrepancy"


@register
class FedLAMA(Algorithm):
    """FedAvg that averages a layer less often if clients agree on it (Lee et al. 2023, Algorithms 1 and 2).

    The paper's unit of time is tau' local steps. Here it is the local training of ``tau`` rounds. Layer l is averaged
    every tau_l rounds, where tau_l is tau or phi tau. Each average measures the layer's discrepancy

        d_l = mean_i ||w_il - mean_l||^2 / (tau_l dim_l)

    Every phi tau rounds all layers are due and the intervals are chosen again (:func:`long_layers`). The last planned
    round averages all layers. A round in which a stopping rule ends the run need not.

    A layer that is not due stays with its client. The client continues to train it. This holds even if other clients
    have averaged it since, so no local work is lost. With partial participation a client's layer may therefore start
    from an older average. A client sends the layers that are due. It receives layers that it has not trained since it
    last sent them. With phi = 1 and tau = 1 this is FedAvg.

    A layer here is weight and bias. The released code considers kernels only. Frozen parameters do not count. A layer
    that is frozen as a whole is always long.
    """

    name = "fedlama"
    static_traffic = False
    paper = "Lee et al. 2023"
    travels = "the layers that are due"
    keeps = "layers that are not due"
    cost = "from 2P / phi to 2P, with tau = 1"

    @dataclass(frozen=True)
    class Config:
        tau: Count = 1
        phi: Count = 2

    def due_layers(self, server: State, rnd: Round) -> list[str]:
        """Return the names of the layers that are averaged at the end of this round."""
        rounds_done = rnd.index + 1
        return [
            name
            for name, interval in self.intervals(server).items()
            if rounds_done % interval == 0 or rounds_done == self.task_info.rounds
        ]

    def intervals(self, server: State) -> dict[str, int]:
        """Return the rounds between two averages of each layer, as chosen last, {layer: rounds}.

        A layer for which none was chosen yet has ``tau``.
        """
        chosen_intervals = server.meta.get(INTERVALS, {})
        return {
            layer.name: chosen_intervals.get(layer.name, self.config.tau)
            for layer in self.task_info.layers
        }

    def observations(self, server: State, rnd: Round) -> Iterator[Observation]:
        """Yield ``averaging_interval``: the rounds between two averages of each layer, as chosen last."""
        for name, interval in self.intervals(server).items():
            yield Observation("averaging_interval", interval, layer=name)

    def of_layers(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of all tensors of the given layers."""
        layer_names = set(names)
        layers = [layer for layer in self.task_info.layers if layer.name in layer_names]
        return frozenset(tensors_in(layers))

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        pending = self.of_layers(server.meta.get(PENDING, {}).get(str(client), ()))
        names = self.shared(rnd, client) - pending
        return Message(
            {"model": tree.select(server.trees["model"], names)},
            {DUE: self.due_layers(server, rnd)},
        )

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        state.meta[DUE] = message.meta[DUE]
        return {
            **super().client_start(state, message, ctx, rnd, client),
            **state.trees.pop(PENDING, {}),
        }

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        due_tensors = self.of_layers(state.meta.pop(DUE))
        travelling_tensors = self.shared(rnd, client)
        message = super().client_update(state, trained, ctx, rnd, client)
        message.trees["model"] = tree.select(
            trained["model"], travelling_tensors & due_tensors
        )
        state.trees[PENDING] = tree.select(
            trained["model"], travelling_tensors - due_tensors
        )
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        due_names = self.due_layers(server, rnd)
        replies = list(updates)
        super().aggregate(server, replies, rnd)
        waiting_layers = [
            layer for layer in self.task_info.layers if layer.name not in due_names
        ]
        pending = dict(server.meta.get(PENDING, {}))
        # of the pending layers a client keeps those that it was given
        for update in replies:
            travelling_tensors = self.shared(rnd, update.client)
            pending[str(update.client)] = [
                layer.name
                for layer in waiting_layers
                if not travelling_tensors.isdisjoint(layer.tensors)
            ]
        server.meta[PENDING] = {
            client: names for client, names in pending.items() if names
        }
        self._note(
            server, due_names, [update.message.trees["model"] for update in replies]
        )
        if (rnd.index + 1) % (self.config.phi * self.config.tau) == 0:
            self._adjust(server)

    def _note(self, server: State, due: Sequence[str], trees: Sequence[Tree]) -> None:
        discrepancies = server.meta.setdefault(DISCREPANCY, {})
        intervals = self.intervals(server)
        for layer in self.task_info.layers:
            names = [name for name in self._trained(layer) if name in trees[0]]
            if layer.name in due and names:
                mean = tree.select(server.trees["model"], names)
                discrepancy = sum(
                    tree.distance(tree.select(model, names), mean) ** 2
                    for model in trees
                ) / len(trees)
                size = sum(mean[name].numel() for name in names)
                discrepancies[layer.name] = discrepancy / (intervals[layer.name] * size)

    def _adjust(self, server: State) -> None:
        discrepancies: Mapping[str, float] = server.meta[DISCREPANCY]
        sizes = {
            layer.name: sum(
                server.trees["model"][name].numel() for name in self._trained(layer)
            )
            for layer in self.task_info.layers
            if layer.name in discrepancies
        }
        frozen_names = [
            layer.name for layer in self.task_info.layers if layer.is_frozen
        ]
        long_names = {*long_layers(discrepancies, sizes), *frozen_names}
        server.meta[INTERVALS] = {
            name: self.config.tau * (self.config.phi if name in long_names else 1)
            for name in (*sizes, *frozen_names)
        }

    def _trained(self, layer: Layer) -> list[str]:
        return [name for name in layer.parameters if name not in self.task_info.frozen]


def long_layers(
    discrepancy: Mapping[str, float], sizes: Mapping[str, int]
) -> list[str]:
    """Return the layers to average less often by the cut criterion of FedLAMA.

    Layers are sorted by ascending discrepancy. The loss of the first k layers is their
    share delta_k of all discrepancy, each layer's multiplied by its size. Their saving
    is their share lambda_k of all parameters. With the least k for which delta_k > 1 -
    lambda_k, the first k layers are returned, as in the released code.

    >>> sizes = {"a": 10, "b": 10, "c": 80}
    >>> long_layers({"a": 9.0, "b": 2.0, "c": 0.0}, sizes)  # c saves .8 for no loss, c and b .9 for .18
    ['c', 'b']
    >>> long_layers({"a": 0.0, "b": 1.0, "c": 9.0}, sizes), long_layers(dict.fromkeys("abc", 0.0), sizes)
    (['a', 'b', 'c'], [])

    Args:
        discrepancy: d_l by layer, per parameter and round, at least 0. If all are 0, no layer is long.
        sizes: number of parameters by layer.
    """
    # ties: the layer nearer to the input first
    order = sorted(discrepancy, key=lambda name: discrepancy[name])
    cumulative_losses = list(
        accumulate(discrepancy[name] * sizes[name] for name in order)
    )
    cumulative_sizes = list(accumulate(sizes[name] for name in order))
    if not order or not cumulative_losses[-1] > 0:
        return []
    total_loss, total_size = cumulative_losses[-1], cumulative_sizes[-1]
    losses_with_sizes = zip(cumulative_losses, cumulative_sizes, strict=True)
    n_long = next(
        k
        for k, (loss, size) in enumerate(losses_with_sizes)
        if loss * total_size > (total_size - size) * total_loss
    )
    return order[: n_long + 1]


FROZEN = "frozen"  # a client's tree of layers that do not train yet
TRAINED = "trained"  # the metric of rows that record which layers train
WHOLE = (Mixing, PFedHN)
"""Base algorithms that a schedule refuses: their server mixes or generates whole models for the clients."""


class Scheduled(Algorithm):
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
        UsageError: the numbers of rounds and layers differ, or the base algorithm is
            unsuitable. That is a schedule, an algorithm that chooses a plan while it
            trains, one of :data:`WHOLE`, or one that needs residual blocks.
    """

    uses_plan = True
    keeps = "the head until the end"
    trains = "the unfrozen layers of the body"
    travels = "what is trained"
    cost = "2 unfrozen"
    forward: ClassVar[bool] = True  # whether the schedule begins at the input

    @dataclass(frozen=True)
    class Config:
        base: str = "fedbabu"
        unfreeze: tuple[int, ...] | None = None

    @classmethod
    def for_options(cls, options: Mapping[str, Any]) -> type[Algorithm]:
        base = str(options.get("base", cls.Config.base))
        base_class = find(base)
        if base_class.needs_blocks or issubclass(base_class, (Scheduled, *WHOLE)):
            raise UsageError(
                f"{cls.name}: base must be an algorithm with one whole model at the server, and no schedule; "
                f"got {base}. Use such as fedper."
            )
        algorithm: type[Algorithm] = _on_top(cls, base_class)  # type: ignore[arg-type]
        return algorithm

    def __reduce__(self) -> Any:
        schedule = type(self).__bases__[0]
        return _made, (schedule, self.task_info, self.plan, self.options)

    def setup(self) -> None:
        """Store in :attr:`task_info` from which round each layer trains, before the base algorithm's setup."""
        if self.plan is not None:
            layers = self.scheduled_layers(self.plan)
            rounds = self.rounds_of(self.plan)
            start_rounds: list[tuple[str, int]] = []
            for layer, start_round in zip(layers, rounds, strict=True):
                if start_round:
                    start_rounds += [(name, start_round) for name in layer.tensors]
            self.task_info = replace(self.task_info, unfreeze_at=tuple(start_rounds))
        super().setup()

    @classmethod
    def scheduled_layers(cls, plan: LayerPlan) -> tuple[Layer, ...]:
        """Return the layers that start to train one after another, first to last."""
        if cls.forward:
            return plan.body
        return plan.body[::-1]

    def default_plan(self, layers: tuple[Layer, ...]) -> LayerPlan | None:
        plan = super().default_plan(layers)
        if plan is None:
            raise UsageError(
                f"{self.name}: base must have a plan before training; got {self.config.base}. "
                "Use fedper with plan=auto."
            )
        return plan

    def rounds_of(self, plan: LayerPlan) -> tuple[int, ...]:
        """Return the 0-based round from which each of :meth:`scheduled_layers` trains, in their order.

        Without ``unfreeze`` they are spread evenly over the run's rounds, from 0 on.

        Raises:
            UsageError: ``unfreeze`` has another number of rounds than there are layers.
        """
        names = [layer.name for layer in self.scheduled_layers(plan)]
        rounds = self.config.unfreeze
        if rounds is None:
            return tuple(
                k * self.task_info.rounds // len(names) for k in range(len(names))
            )
        if len(rounds) != len(names):
            names_text = ", ".join(names)
            raise UsageError(
                f"{self.name}: unfreeze must have one round for each of the {len(names)} layers {names_text}; "
                f"got {len(rounds)}."
            )
        return tuple(rounds)

    def frozen(self, rnd: Round) -> frozenset[str]:
        """Return the names of the tensors that still have their initial value in this round."""
        return self.task_info.not_yet_trained(rnd)

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
        frozen_tensors = self.frozen(rnd)
        return tuple(
            replace(phase, train=phase.train - frozen_tensors)
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
        """Yield the base algorithm's observations, and ``trained``: 1 if a layer trained in the last round, else 0.

        Before the first round there is no ``trained``.
        """
        yield from super().observations(server, rnd)
        if rnd.index:
            phases = self.phases(Round(rnd.index - 1), 0)
            trained_tensors = frozenset[str]().union(*(phase.train for phase in phases))
            for layer in self.task_info.layers:
                yield Observation(
                    TRAINED,
                    float(not trained_tensors.isdisjoint(layer.tensors)),
                    layer=layer.name,
                )


@cache
def _on_top(schedule: Any, base: Any) -> Any:
    """Return a subclass of a schedule and its base algorithm, which has all options."""
    options = type("Config", (schedule.Config, base.Config), {})
    members: dict[str, Any] = {"Config": dataclass(frozen=True)(options)}
    return type(schedule.__name__, (schedule, base), members)


def _made(schedule: type[Scheduled], *arguments: Any) -> Algorithm:
    """Build a scheduled algorithm again from the contents of its pickle.

    Args:
        schedule: the class of the schedule.
        arguments: facts of the task, plan and options, as :class:`Algorithm` takes
            them.
    """
    return schedule.for_options(arguments[-1])(*arguments)


@register
class Vanilla(Scheduled):
    """The schedule from the input to the output.

    The shared layer nearest to the input trains first. See :class:`Scheduled` for the options.
    """

    name = "vanilla"
    paper = "Jang and Choi 2024, layer scheduling"


@register
class Anti(Scheduled):
    """The schedule from the output to the input.

    The shared layer nearest to the output trains first. See :class:`Scheduled` for the options.
    """

    name = "anti"
    paper = "Jang and Choi 2024, layer scheduling"
    forward = False
