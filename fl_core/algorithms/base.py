"""What a federated algorithm is: four answers (what is trained, what travels, how it is mixed, what is evaluated).

The defaults of :class:`Algorithm` are FedAvg; an algorithm overrides one to four of the hooks. Most answers are sets
of tensor names taken from a :class:`~fl_core.plan.LayerPlan`, so most algorithms are a few lines.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from fl_core import tree
from fl_core.algorithms.options import configured
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.registry import Registry
from fl_core.training.local import Context, Phase
from fl_core.tree import Tree


@dataclass
class State:
    """What the server or a client keeps between rounds: trees, and plain JSON data."""

    trees: dict[str, Tree] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class Message:
    """What crosses between server and client, either way; :attr:`bytes` is what the costs count."""

    trees: dict[str, Tree] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def clone(self) -> Message:
        """A copy that shares nothing with the original, as if it had crossed a border."""
        return Message({name: tree.clone(each) for name, each in self.trees.items()}, copy.deepcopy(self.meta))

    @property
    def bytes(self) -> int:
        """Bytes of the tensors, plus 4 for every number in the meta data (measurements travel as float32)."""
        return sum(tree.n_bytes(t) for t in self.trees.values()) + 4 * _count_numbers(self.meta)


def _count_numbers(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_count_numbers(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_count_numbers(v) for v in value)
    return int(isinstance(value, (int, float)) and not isinstance(value, bool))


@dataclass(frozen=True)
class Update:
    """One client's reply as the server sees it; ``weight`` is the client's number of training samples."""

    client: int
    weight: int
    message: Message


@dataclass(frozen=True)
class Round:
    """Where a run stands: the 0-based ``index`` of the round, its exchange, and the clients sampled for it."""

    index: int
    exchange: str = "train"
    sampled: tuple[int, ...] = ()


@dataclass(frozen=True)
class Inside:
    """A number that shows an algorithm at work; the engine makes it a row. Clients are given by their position, None
    where a number is of them all."""

    metric: str
    value: float
    client: int | None = None
    client_b: int | None = None
    layer: str = ""
    variant: str = ""


@dataclass(frozen=True)
class Problem:
    """What an algorithm may know of the task: the model's layers and tensors, the clients' sizes, the local epochs."""

    layers: tuple[Layer, ...]
    local_only: frozenset[str]  # tensors that never travel: buffers (bn="local"), and what build adds as personal
    n_train: tuple[int, ...]
    epochs: int
    seed: int
    norms: frozenset[str] = frozenset()  # parameters and buffers of the batch normalisations
    rounds: int = 0  # of the whole run; 0 = not known
    mean: tuple[float, ...] = ()  # with which images scaled to 0..1 were normalised, a number a channel
    std: tuple[float, ...] = ()
    blocks: tuple[str, ...] = ()  # paths of the residual blocks that a client may do without, input to output

    @property
    def parameters(self) -> frozenset[str]:
        """All names of parameters."""
        return frozenset(name for layer in self.layers for name in layer.parameters)

    @property
    def tensors(self) -> frozenset[str]:
        """All tensor names of the model, buffers included."""
        return frozenset(name for layer in self.layers for name in layer.tensors)

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that no training moves."""
        return frozenset(name for layer in self.layers for name in layer.frozen)


class Algorithm:
    """FedAvg, and the frame of every other algorithm.

    Class attributes:
        name: registry name.
        paper: the source.
        trains, travels, keeps: what is trained, what crosses, and what a client keeps to itself between rounds.
        cost: scalars that a client receives and sends in a round; P = those of the whole model.
        splits: whether it obeys a layer plan.
        least_layers: layers that train which a decision needs to choose between.
        evaluates: name of the model that exists after every round, ``global`` or ``personal``.
        cuts: whether :meth:`build` leaves layers of the model out.
        needs_blocks: whether the model must be made of residual blocks that a client can do without.
        adapts: whether :meth:`finish` makes the personal models whenever clients are evaluated, not just at the end.
        foreseeable: whether what crosses is known before a run, from :meth:`shared` and :meth:`up`.
        adds: for each module or tensor path that :meth:`build` adds to the model, ``shared`` or ``personal``; what
            it puts around a module's weights (an adapter) joins that module's layer unless it is named here.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    trains: ClassVar[str] = "all"
    travels: ClassVar[str] = "all"
    keeps: ClassVar[str] = "nothing"
    cost: ClassVar[str] = "2P"
    splits: ClassVar[bool] = False
    least_layers: ClassVar[int] = 2
    evaluates: ClassVar[str] = "global"
    cuts: ClassVar[bool] = False
    needs_blocks: ClassVar[bool] = False
    adapts: ClassVar[bool] = False
    foreseeable: ClassVar[bool] = True
    adds: ClassVar[Mapping[str, str]] = {}

    @dataclass(frozen=True)
    class Config:
        """Hyper-parameters beyond those of local training; set with ``--set key=value``."""

    def __init__(self, problem: Problem, plan: LayerPlan | None = None, config: Mapping[str, Any] | None = None):
        self.problem = problem
        self.config: Any = configured(type(self), config or {})
        self.plan: LayerPlan | None = plan if plan is None else self.adopt(plan)

    @classmethod
    def under(cls, config: Mapping[str, Any]) -> type[Algorithm]:
        """The class that a configuration asks for: itself, unless it is laid over another algorithm."""
        return cls

    # --- the model ---

    @classmethod
    def build(cls, model: nn.Module, config: Any, *, shape: tuple[int, ...], n_classes: int, seed: int) -> nn.Module:
        """The model that is trained: the given one, or one made of it with second heads, prompts, adapters or gates.

        What it keeps of the given model (all of it, unless it :attr:`cuts`) must be the same tensors, under any name;
        it may change the model in place.
        Every start from a configuration builds again, so what is drawn comes from :mod:`fl_core.seeds`.

        Args:
            config: this algorithm's ``Config``.
            shape: of one sample.
        """
        return model

    # --- the plan ---

    def default_plan(self, layers: tuple[Layer, ...]) -> LayerPlan:
        """The plan of an algorithm that splits and is given none: all layers but the last are shared."""
        return LayerPlan.all_but_last(layers)

    def adopt(self, plan: LayerPlan) -> LayerPlan:
        """What this algorithm makes of a plan that it is given; the plan itself by default."""
        return plan

    @property
    def decides(self) -> bool:
        """Whether the run starts without a plan and the algorithm makes its own."""
        return False

    # --- what there is ---

    def held(self, rnd: Round, client: int) -> frozenset[str]:
        """Names of the tensors that the client has at all. Default: all.

        Blocks that are not among them are left out of its forward pass; anything else cannot be missing.
        """
        return self.problem.tensors

    # --- what travels ---

    def exchanges(self, index: int) -> tuple[str, ...]:
        """The exchanges of a round: each sends to the sampled clients and collects their replies."""
        return ("train",)

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        """Names of the tensors that travel, both ways. Default: all that are held."""
        return self.held(rnd, client) - self.problem.local_only

    def up(self, rnd: Round, client: int) -> frozenset[str]:
        """Names of the tensors that are uploaded, where those are fewer than what is :meth:`shared`."""
        return self.shared(rnd, client)

    def open(self, initial: Tree) -> State:
        """The server's state before the first round. Default: the initial model."""
        return State({"model": initial})

    def send(self, server: State, client: int, rnd: Round) -> Message:
        """What the server sends; the engine clones it."""
        return Message({"model": tree.pick(server.trees["model"], self.shared(rnd, client))})

    # --- what is trained ---

    def start(self, initial: Tree, client: int) -> State:
        """A client's state before its first round: the tensors that do not travel, at their common initial value."""
        return State({"model": tree.pick(initial, self.kept(Round(0), client))})

    def candidates(self, state: State, message: Message) -> dict[str, Tree]:
        """Whole models whose mean loss on the client's validation split decides where training starts; usually none.

        :meth:`begin` finds the losses by the same names in the message's meta data, under ``losses``.
        """
        return {}

    def begin(self, state: State, message: Message, rnd: Round, client: int) -> Tree:
        """Where local training starts: what the client kept, under what it received."""
        return {**state.trees.get("model", {}), **message.trees.get("model", {})}

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        """Local training. Default: one phase over all tensors that are held."""
        return (Phase("train", self.held(rnd, client), self.problem.epochs),)

    def loss(self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """The local objective on one batch (x [b, ...], y [b]): a scalar."""
        x, y = batch
        return ctx.criterion(ctx.forward(params, x), y)

    def reply(self, state: State, trained: dict[str, Tree], ctx: Context, rnd: Round, client: int) -> Message:
        """What the client uploads; it also brings the client's state up to date."""
        state.trees = {**trained, "model": tree.pick(trained["model"], self.kept(rnd, client))}
        return Message({"model": tree.pick(trained["model"], self.up(rnd, client))}, {**ctx.observed})

    def kept(self, rnd: Round, client: int) -> frozenset[str]:
        """Names of the tensors that stay with the client between rounds: those that do not travel."""
        return self.held(rnd, client) - self.shared(rnd, client)

    # --- how it is mixed ---

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        """Take the replies in, one at a time, in the order of the sampled clients. Default: the weighted mean."""
        mean = tree.Mean()
        for update in updates:
            mean.add(update.message.trees["model"], update.weight)
        server.trees["model"].update(mean.result())

    # --- what is evaluated ---

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        """The models of one client after a round, by name: ``global`` and/or ``personal``."""
        return {self.evaluates: {**server.trees["model"], **client.trees["model"]}}

    def insides(self, server: State, rnd: Round) -> Iterable[Inside]:
        """What else is worth recording when all clients are evaluated, of the server as it stands then."""
        return ()

    def look(self, model: nn.Module, x: Tensor, rnd: Round, client: int) -> Iterable[Inside]:
        """What else is worth recording of a client's evaluated model, in evaluation mode, on its test samples x."""
        return ()

    def finish(self, client: int) -> tuple[Phase, ...]:
        """Fine-tuning after the last round, on a copy of the client's model; its result is named ``personal``."""
        return ()

    def tunes(self, done: int) -> bool:
        """Whether :meth:`finish` makes the personal models after this many rounds too, if clients are evaluated then.

        Default: if it :attr:`adapts`.
        """
        return self.adapts


# --- the registry ----------------------------------------------------------------------------------------------


def _from_outside(made: Any, name: str) -> type[Algorithm]:
    if not (isinstance(made, type) and issubclass(made, Algorithm)):
        raise UsageError(f"algorithm {name!r} is not a class made of fl_core.algorithms.Algorithm")
    if not made.name:
        raise UsageError(f"algorithm {name!r} needs a name for its rows: give the class name = '...'")
    return made


ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm", "fl_core.algorithms", "register", _from_outside)


def register(algorithm: type[Algorithm]) -> type[Algorithm]:
    """Class decorator: make an algorithm known under its ``name``.

    Raises:
        UsageError: another algorithm has that name.
    """
    ALGORITHMS.add(algorithm.name, algorithm, algorithm)
    return algorithm


def registry() -> dict[str, type[Algorithm]]:
    """All algorithms by name, each imported."""
    return ALGORITHMS.members()


def find(name: str) -> type[Algorithm]:
    """The algorithm of that name, or the class that ``package.module:Class`` names.

    Raises:
        UsageError: unknown; names the nearest.
    """
    return ALGORITHMS[name]
