"""Federated algorithms: what is trained, what is sent, how it is combined, what is evaluated.

The defaults of :class:`Algorithm` are FedAvg. An algorithm overrides some of its hooks.
What is trained and sent are sets of tensor names. A hook can take them from a
:class:`~fl_core.plan.LayerPlan`, so many algorithms are a few lines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from inspect import iscode, isfunction, signature
from itertools import chain
from typing import Any, ClassVar, Self, cast, get_origin, get_type_hints

from torch import Tensor, nn

from fl_core import tree
from fl_core.buffers import BufferRules
from fl_core.errors import UsageError, check_known, check_options, read_options
from fl_core.layers import Layer
from fl_core.models.papers import Shape
from fl_core.plan import LayerPlan, parameters_in, tensors_in
from fl_core.registry import Registry
from fl_core.training.phases import Batch, Context, Phase
from fl_core.tree import Tree


@dataclass
class _Trees:
    """Base of :class:`State` and :class:`Message`: trees of tensors, and plain data."""

    trees: dict[str, Tree] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def check(self, what: str) -> None:
        """Refuse trees that are no dictionaries of tensors, and meta data that are no JSON.

        Args:
            what: what made the trees, in words for messages.

        Raises:
            UsageError: there is such a tree or entry. The message names it.
        """
        for name, entry in self.trees.items():
            values = entry.values() if isinstance(entry, Mapping) else (None,)
            if not all(isinstance(value, Tensor) for value in values):
                raise UsageError(
                    f"{what}: each of trees must be a dictionary of tensors; got another {name!r}."
                )
        for name, value in self.meta.items():
            if not _is_plain(value):
                raise UsageError(
                    f"{what}: meta must be numbers, texts, lists, and dictionaries by text; got {value!r} as {name!r}. "
                    "Put tensors into trees."
                )

    def clone(self) -> Self:
        """Return a deep copy that shares no tensor with the original, as after a transfer between machines."""
        return type(self)(
            {name: tree.clone(entry) for name, entry in self.trees.items()},
            copy.deepcopy(self.meta),
        )


@dataclass
class State(_Trees):
    """State of the server or a client between rounds: trees and plain JSON data.

    >>> import torch
    >>> client = State({"model": {"head.weight": torch.zeros(3, 8)}}, {"rounds_trained": 1})
    >>> client.meta["rounds_trained"] += 1
    >>> client.trees["model"]["head.weight"].shape
    torch.Size([3, 8])

    Attributes:
        trees: tensors by name in each tree: ``model``, and others that an algorithm stores.
        meta: numbers, texts, lists and dictionaries.
    """


@dataclass
class Message(_Trees):
    """A message between server and client, in either direction. The costs count its :attr:`bytes`.

    >>> import torch
    >>> Message({"model": {"fc.weight": torch.zeros(3, 8)}}, {"loss": 0.7}).bytes  # 24 floats, and a number
    100

    Attributes:
        trees, meta: as in :class:`State`.
    """

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensors, plus 4 for every number in the meta data.

        A number counts as a float32; texts and truth values count nothing. Tensors
        count as in :func:`fl_core.tree.n_bytes`.
        """
        return sum(tree.n_bytes(t) for t in self.trees.values()) + 4 * _count_numbers(
            self.meta
        )


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (str, int, float, type(None)))


def _count_numbers(value: object) -> int:
    if isinstance(value, Mapping):
        return sum(_count_numbers(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_count_numbers(v) for v in value)
    return int(isinstance(value, (int, float)) and not isinstance(value, bool))


@dataclass(frozen=True)
class Update:
    """One client's reply on the server.

    Attributes:
        client: the client's position.
        weight: the client's weight in weighted means (:meth:`TaskInfo.weight`).
        message: the message that the client sent.
        name: the client's name, for error messages.
    """

    client: int
    weight: int
    message: Message
    name: str = ""


@dataclass(frozen=True)
class Round:
    """A position in a run.

    Attributes:
        index: the round, counted from 0. In an evaluation it is the number of completed
            rounds.
        exchange: name of the exchange within the round (:meth:`Algorithm.exchanges`).
        sampled: positions of the clients that take part, ascending. It may be empty
            where no exchange takes place, as in an evaluation.
    """

    index: int
    exchange: str = "train"
    sampled: tuple[int, ...] = ()


@dataclass(frozen=True)
class Observation:
    """One number about an algorithm's behaviour, such as a mixing weight. It becomes a row of the run.

    Attributes:
        metric: name of the number.
        value: the number.
        client: position of the client that it describes. None: the server, or all
            clients.
        client_b: position of the second client, if the number describes a pair, else
            None.
        layer: name of the layer that it describes; empty for the whole model.
        variant: which of several numbers of that name it is; empty for the only one.
    """

    metric: str
    value: float
    client: int | None = None
    client_b: int | None = None
    layer: str = ""
    variant: str = ""


@dataclass(frozen=True)
class TaskInfo:
    """Facts of the task for an algorithm: the model's layers, the clients' sizes, the local epochs.

    Attributes:
        layers: the model's layers, from input to output.
        never_sent: names of the tensors that never travel: frozen and personal ones, and buffers that stay local.
        n_train: number of training samples of each client.
        epochs: local epochs of a round.
        seed: the run's seed.
        norms: names of the parameters and buffers of batch normalisations.
        rounds: rounds of the whole run. 0 means not known.
        mean, std: by channel, the numbers that normalise images with values from 0 to 1.
            Empty without such a normalisation.
        blocks: paths of the residual blocks that a client may lack, from input to
            output. Empty unless the algorithm :attr:`~Algorithm.needs_blocks`.
        unfreeze_at: (tensor, 0-based round from which it trains and travels) pairs.
        uniform: whether averages weigh clients equally.
        n_classes: number of the data's classes or labels. 0 means none, or not known.
        buffers: rules for buffers in a mean.
        may_stop_every: rounds between two evaluations of a stopping rule. 0 means no such rule.
    """

    layers: tuple[Layer, ...]
    never_sent: frozenset[
        str
    ]  # tensors that never travel: frozen ones, buffers (bn="local") and added personal modules
    n_train: tuple[int, ...]
    epochs: int
    seed: int
    # parameters and buffers of the batch normalisations
    norms: frozenset[str] = frozenset()
    rounds: int = 0  # of the whole run; 0 = not known
    mean: tuple[float, ...] = ()  # by channel, for the normalisation of images in 0..1
    std: tuple[float, ...] = ()
    blocks: tuple[
        str, ...
    ] = ()  # paths of the residual blocks that a client may lack, input to output
    unfreeze_at: tuple[
        tuple[str, int], ...
    ] = ()  # tensors and the 0-based round from which they train and travel
    uniform: bool = False  # whether averages weigh clients equally
    n_classes: int = 0  # outputs of the model; 0 = not known
    buffers: BufferRules = field(
        default_factory=BufferRules
    )  # what becomes of buffers in a mean
    may_stop_every: int = 0  # rounds between those after which a stopping rule may end the run; 0 = no such rule

    @property
    def clients(self) -> range:
        """Return the positions of all clients."""
        return range(len(self.n_train))

    def weight(self, client: int) -> int:
        """Return a client's weight in a weighted mean.

        It is the number of its training samples, or 1 if :attr:`uniform`.
        """
        if self.uniform:
            return 1
        return self.n_train[client]

    def may_end(self, done: int) -> bool:
        """Return whether training may end after ``done`` rounds.

        It may after the last round, and after each round in which a stopping rule decides.

        Args:
            done: number of completed rounds.
        """
        return done == self.rounds or (
            self.may_stop_every > 0 and done > 0 and done % self.may_stop_every == 0
        )

    @property
    def parameters(self) -> frozenset[str]:
        """Return the names of all parameters of the model, frozen ones included."""
        return frozenset(parameters_in(self.layers))

    @property
    def tensors(self) -> frozenset[str]:
        """Return the names of all tensors of the model, buffers included."""
        return frozenset(tensors_in(self.layers))

    @property
    def frozen(self) -> frozenset[str]:
        """Return the names of the tensors that no training changes. They are never sent."""
        return frozenset(chain.from_iterable(layer.frozen for layer in self.layers))

    def not_sent(self, rnd: Round) -> frozenset[str]:
        """Return the names of the tensors that are not sent in this round.

        These are :attr:`never_sent`, and the tensors of layers that do not train yet.
        """
        return self.never_sent | self.not_yet_trained(rnd)

    def not_yet_trained(self, rnd: Round) -> frozenset[str]:
        """Return the names of the tensors whose layers do not train yet in this round.

        These tensors keep the initial value and do not travel. Without
        :attr:`unfreeze_at` there are none.
        """
        return frozenset(name for name, since in self.unfreeze_at if rnd.index < since)


class Algorithm:
    """A federated algorithm: FedAvg by default, and others by overriding some of its hooks.

    The table says when the engine calls each hook. *Server* is the process that runs
    :class:`fl_core.rounds.engine.Engine`. *Client* is the process where the client is, which may be a worker. *Both*
    means either, at any time.

    ====================  =======  =====================  ============================================================
    hook                  process  times                  when
    ====================  =======  =====================  ============================================================
    notes                 server   any                    before a run: notes for its user
    for_options           both     any                    before an algorithm is made, to know its class
    wrap_model            both     any                    when the model is built: to run, to resume, to read or export
    setup                 both     any                    when an algorithm is made, with its options and its task
    default_plan          server   any                    before a run that uses a plan and has none
    resolve_plan          server   any                    before a run with a plan, or when a plan is decided
    server_state          server   1 a start              before the first round; on resume the stored one replaces it
    client_state          both     any                    when a client is needed that has not replied yet
    submodel              both     any                    by the other hooks, and to count costs
    shared                both     any                    by the other hooks, and to count costs
    uploaded              both     any                    by the other hooks, and to count costs
    local_tensors         both     any                    by the other hooks
    exchanges             server   1 a round              at the start of a round
    server_message        server   any                    for each sampled client of an exchange, before it trains
    client_start          client   1 a reply              at the start of a client's work
    phases                both     any                    after ``client_start``; at the server to count costs
    loss                  client   any                    for each batch of a phase that names no other method
    client_update         client   1 a reply              when all phases are done
    aggregate             server   1 an exchange          with the first reply; it requests the other replies
    models                both     any                    after ``aggregate``, for each client that is evaluated
    finetuning            both     any                    after a round that is evaluated or saved, and after the last
    observations          server   1 an evaluation        when all clients have been evaluated
    client_observations   client   1 a scored model       when a client's :attr:`evaluates` model has been scored
    ====================  =======  =====================  ============================================================

    ``aggregate`` is called when the first client has replied. Each step of its loop over ``updates`` waits for the next
    reply, and may send to further clients before. If clients train one by one in one process, memory holds only the
    replies that ``aggregate`` keeps. If :meth:`server_message` reads what ``aggregate`` writes, call ``list(updates)``
    before writing.

    A client's state stays where the client is. ``models`` is called there, with the server's state.

    A reply may be lost (:func:`fl_core.rounds.clients.is_lost`). Then ``updates`` has fewer clients than
    ``rnd.sampled``. The next exchange of the round takes only clients that replied. Without any reply ``aggregate`` is
    not called. A client whose reply is lost returns to its state before that exchange. So pairs of values at server
    and client, such as variates, stay equal.

    Hooks are pure. They change only the :class:`State` that they receive, and what they return. This is ``server`` in
    ``aggregate``, and ``state`` in ``client_start`` and ``client_update``. The engine freezes the algorithm object,
    because it is copied to workers and built again on resume. Random draws come from :mod:`fl_core.seeds`.

    Class attributes:
        name: registry name.
        paper: the source.
        trains, travels, keeps: in words, the tensors that are trained, those that are sent, and those that a client
            keeps between rounds.
        cost: scalars that a client receives and sends in a round; P = those of the whole model.
        uses_plan: whether it uses a layer plan.
        evaluates: name of the model that exists after every round, ``global`` or ``personal``.
        step: name of the method that makes the step of a batch, as in :class:`~fl_core.training.phases.Phase`.
        removes_layers: whether :meth:`wrap_model` leaves layers of the model out.
        needs_blocks: whether the model must have residual blocks, which a client can leave out.
        needs_logits: whether it compares the logits of classes. A model with a single output is refused.
        static_traffic: whether the tensors that travel are known before a run, from :meth:`shared` and
            :meth:`uploaded`.
        added_modules: for each module or tensor path that :meth:`wrap_model` adds to the model, ``shared`` or
            ``personal``. An adapter around a module's weights joins that module's layer unless it is named here.

    Args:
        task_info: the facts of the task.
        plan: the plan in force, of an algorithm that :attr:`uses_plan`; see :meth:`resolve_plan`.
        config: values of :class:`Config`'s fields, as themselves or as text.

    Raises:
        UsageError: an unknown key of the configuration, or a value that it cannot have.
            When a class is made: a misspelt hook or one with other arguments, a
            ``Config`` that is no dataclass, or an unknown :attr:`evaluates`.

    FedPer (Arivazhagan et al. 2019), complete: the plan's body travels, its head stays with each client.

    >>> import fedlayers as fl
    >>> @fl.register
    ... class FedPer(fl.Algorithm):
    ...     name, uses_plan, evaluates = "my_fedper", True, "personal"
    ...
    ...     def shared(self, rnd, client):
    ...         return self.plan.body_tensors - self.task_info.not_sent(rnd)
    >>> result = fl.run(dataset="heart", algorithm="my_fedper", rounds=2, progress=False)
    >>> engine = result.engine
    >>> engine.algorithm.plan
    LayerPlan([fc1] [fc2] [fc3] fc4; [] = shared, by all_but_last)
    >>> sorted(engine.algorithm.local_tensors(fl.Round(1), client=0))
    ['fc4.linear.bias', 'fc4.linear.weight']
    >>> sent = engine.algorithm.server_message(engine.server, client=0, rnd=fl.Round(1))
    >>> sent.bytes, sorted({name.partition(".")[0] for name in sent.trees["model"]})
    (7960, ['fc1', 'fc2', 'fc3'])
    >>> scores = result.to_frame().query("round == 2 and metric == 'accuracy' and split == 'test'")
    >>> sorted(scores["model"].unique())
    ['local', 'personal']
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    trains: ClassVar[str] = "all"
    travels: ClassVar[str] = "all"
    keeps: ClassVar[str] = "nothing"
    cost: ClassVar[str] = "2P"
    uses_plan: bool = False
    evaluates: str = "global"
    step: ClassVar[str] = ""
    removes_layers: ClassVar[bool] = False
    needs_blocks: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = False
    static_traffic: bool = True
    added_modules: ClassVar[Mapping[str, str]] = {}

    @dataclass(frozen=True)
    class Config:
        """Hyper-parameters in addition to local training's; set with ``--option key=value``."""

    def __init__(
        self,
        task_info: TaskInfo,
        plan: LayerPlan | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        self.task_info = task_info
        self.options: Mapping[str, Any] = dict(config or {})
        self.config: Any = read_config(type(self), self.options)
        self.plan: LayerPlan | None = plan
        self.setup()

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        _check_hooks(cls)

    def __setattr__(self, name: str, value: object) -> None:
        self._check_frozen(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._check_frozen(name)
        super().__delattr__(name)

    def _check_frozen(self, name: str) -> None:
        if vars(self).get("_frozen"):
            raise UsageError(
                f"{self.name} must not change self.{name} during a run. An algorithm is copied to workers and built "
                "anew on resume; what changes in a run belongs to the State of the server or of a client: State.trees "
                "for tensors, State.meta for plain data"
            )

    def with_plan(self, plan: LayerPlan) -> Algorithm:
        """Return a new instance that uses the given plan exactly as it is (see :meth:`resolve_plan`)."""
        return type(self)(self.task_info, plan, self.options)

    @property
    def decides(self) -> bool:
        """Return whether a run starts without a plan and chooses one from measurements in its first round."""
        return (
            self.uses_plan
            and self.plan is None
            and self.default_plan(self.task_info.layers) is None
        )

    def method(self, phase: Phase, what: str) -> Callable[..., Any]:
        """Return the method of this algorithm that a phase names as its ``loss`` or as its ``step``.

        Args:
            phase: the phase.
            what: the phase's field with the method's name, ``loss`` or ``step``.

        Raises:
            UsageError: there is no such method. The message names the nearest.
        """
        name = getattr(phase, what)
        attribute = getattr(self, name, None)
        if not callable(attribute):
            names = [
                attribute
                for attribute in dir(type(self))
                if attribute[0] != "_" and callable(getattr(type(self), attribute))
            ]
            check_known(f"{what} of phase {phase.name!r}", name, names)
        return cast(Callable[..., Any], attribute)

    def call(self, hook: str, *args: object) -> Any:
        """Call a hook, check its result, and return it.

        The state that ``client_update`` or ``aggregate`` has changed is checked too.

        Args:
            hook: name of the hook.
            args: arguments of the hook.

        Raises:
            UsageError: the result has another type than the hook's in :class:`Algorithm`, trees are no dictionaries of
                tensors, meta data are no JSON, or the hook reads a plan that the algorithm does not use.
        """
        try:
            value = getattr(self, hook)(*args)
        except AttributeError as error:
            lacks_plan = error.obj is None and self.plan is None and not self.uses_plan
            if lacks_plan and error.name in {*dir(LayerPlan), "layers", "shared"}:
                raise UsageError(
                    f"{self.name} must say that it uses a plan, to read self.plan; got uses_plan = False. "
                    "Give the class uses_plan = True."
                ) from error
            raise
        result_type = _returned(hook)
        if not isinstance(value, result_type):
            value_type = type(value).__name__
            raise UsageError(
                f"{self.name}: {hook} must return a {result_type.__name__}; got {value_type}."
            )
        changed_arguments = args[:1] if hook in ("client_update", "aggregate") else ()
        for argument in (value, *changed_arguments):
            if isinstance(argument, _Trees):
                argument.check(f"{self.name}: {hook}")
        return value

    def setup(self) -> None:
        """Check the options against the task, and store what is fixed during a run. Default: do nothing.

        Attributes can be set here, but not during a run (:func:`freeze`).
        """

    def notes(self) -> list[str]:
        """Return warnings about this algorithm for this model and these clients, a plain line each. Default: none."""
        return []

    # --- the model ---

    @classmethod
    def for_options(cls, options: Mapping[str, Any]) -> type[Algorithm]:
        """Return the class that runs with these options. Default: this class.

        A schedule of layers returns a subclass of itself and its base algorithm.
        """
        return cls

    @classmethod
    def wrap_model(
        cls,
        model: nn.Module,
        config: object,
        *,
        shape: Shape,
        n_classes: int,
        seed: int,
    ) -> nn.Module:
        """Return the model that is trained: the given one, or one made from it with heads, prompts, adapters or gates.

        It keeps the given model's tensors, under any name. With :attr:`removes_layers` it may drop some. It may change
        the model in place. Each start of a run builds the model again. So random draws must come from
        :mod:`fl_core.seeds`.

        Args:
            model: the given model.
            config: this algorithm's ``Config``.
            shape: the shape of one sample.
            n_classes: number of the model's outputs.
            seed: the run's seed.
        """
        return model

    # --- the plan ---

    def default_plan(self, layers: tuple[Layer, ...]) -> LayerPlan | None:
        """Return the plan of an algorithm that splits the model, if none is given. Default: keep the last layer local.

        If the result is None, the clients measure in the first round. The plan is then
        chosen from their measurements (:mod:`fl_core.rounds.steering`).

        Args:
            layers: the model's layers, from input to output, with or without those that
                :meth:`wrap_model` adds.
        """
        return LayerPlan.all_but_last(layers)

    def resolve_plan(self, plan: LayerPlan) -> LayerPlan:
        """Return the plan that this algorithm uses in place of a given or decided one. Default: that plan itself.

        Raises:
            UsageError: the algorithm cannot use such a plan.
        """
        return plan

    # --- what there is ---

    def server_state(self, initial: Tree) -> State:
        """Return the server's state before the first round. Default: the initial model."""
        return State({"model": initial})

    def client_state(self, initial: Tree, client: int) -> State:
        """Return a client's state before its first round. Default: its :meth:`local_tensors` of the initial model."""
        return State(
            {"model": tree.select(initial, self.local_tensors(Round(0), client))}
        )

    def submodel(self, rnd: Round, client: int) -> frozenset[str]:
        """Return the names of the tensors of the part of the model that this client has. Default: all.

        Residual blocks and early exits without any of these tensors are left out of the
        client's forward pass. No other tensors may be missing.
        """
        return self.task_info.tensors

    # --- what travels ---

    def exchanges(self, index: int) -> tuple[str, ...]:
        """Return the names of a round's exchanges, in order. Default: one, ``train``.

        In each the server sends to the sampled clients and collects their replies.

        Args:
            index: the round, counted from 0.
        """
        return ("train",)

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        """Return the names of the tensors that travel, both ways.

        Default: all that the client has, without those that are not sent in this round (:meth:`TaskInfo.not_sent`).
        """
        return self.submodel(rnd, client) - self.task_info.not_sent(rnd)

    def uploaded(self, rnd: Round, client: int) -> frozenset[str]:
        """Return the names of the tensors that a client sends back, a part of :meth:`shared`. Default: all of these."""
        return self.shared(rnd, client)

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        """Return the names of the tensors that stay with the client between rounds, because they do not travel.

        Default: those of :meth:`submodel` that are not in :meth:`shared`. Layers that
        are not trained yet are left out.

        Raises:
            UsageError: :meth:`shared` returns no set of names.
        """
        untrained_names, shared_names = (
            self.task_info.not_yet_trained(rnd),
            self.shared(rnd, client),
        )
        if isinstance(shared_names, str) or not isinstance(shared_names, Iterable):
            raise UsageError(
                f"{self.name}: shared must return a set of tensors' names; got {shared_names!r}. Return a frozenset."
            )
        return self.submodel(rnd, client).difference(shared_names, untrained_names)

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        """Return the message that the server sends to one client; the engine clones it.

        Default: the server's model, as far as it is :meth:`shared` with the client.
        """
        return Message(
            {"model": tree.select(server.trees["model"], self.shared(rnd, client))}
        )

    # --- what is trained ---

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        """Return the weights at which local training starts. Default: what the client kept, with what it received.

        Args:
            state: the client's state, which this hook may change.
            message: the message that it received.
            ctx: what the client can compute with: ``ctx.batches`` of its training samples, ``ctx.forward`` (training
                mode) and ``ctx.criterion``, or :meth:`loss` of this algorithm, and ``ctx.score`` of a whole model on
                its validation split. ``ctx.trees`` is still empty.

        Returns:
            The whole tree that the client has (:meth:`submodel`), on the CPU.
        """
        return {**state.trees.get("model", {}), **message.trees.get("model", {})}

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        """Return the phases of a client's local training. Default: one phase over all tensors that the client has."""
        names = self.submodel(rnd, client)
        epochs = self.task_info.epochs
        return (Phase("train", names, epochs, step=self.step),)

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Tensor:
        """Return the local objective on one batch (x [b, ...], y [b, ...]): a scalar.

        Default: the run's loss of the model's outputs and the labels.

        Args:
            params: the model's parameters by name. Those that train require gradients.
            batch: samples and labels.
            ctx: the client's context.
        """
        x, y = batch
        return ctx.criterion(ctx.forward(params, x), y)

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        """Update the client's state after training, and return the message to upload.

        By default the state receives all trained trees, and of the model the
        :meth:`local_tensors`. The message has the :meth:`uploaded` tensors of the
        model, and the results of observers.

        Args:
            state: the client's state, which this hook may change.
            trained: the client's trees after all phases by name, with the model as ``model``.
            ctx: the client's context, with what was observed in training.
        """
        state.trees = {
            **trained,
            "model": tree.select(trained["model"], self.local_tensors(rnd, client)),
        }
        return Message(
            {"model": tree.select(trained["model"], self.uploaded(rnd, client))},
            {**ctx.observed},
        )

    # --- how it is mixed ---

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        """Update the server's state from the replies, one at a time in client order. Default: the weighted mean.

        Each step of the iteration waits for the next reply. By default a tensor is
        averaged over the clients that sent it, by :attr:`Update.weight`. A tensor that
        no client sent stays the same. Buffers follow their rules.

        Args:
            server: the server's state, which is changed.
            updates: the clients' replies.
            rnd: the round and its exchange.
        """
        mean = tree.Mean(self.task_info.buffers)
        for update in updates:
            mean.add(update.message.trees["model"], update.weight)
        server.trees["model"].update(mean.result())

    # --- what is evaluated ---

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        """Return the models of one client after a round, by name: ``global`` and/or ``personal``.

        Default: one model named :attr:`evaluates`. It is the server's model, with the
        tensors that the client has of its own. Tensors from ``server`` count as sent
        for the evaluation.

        Args:
            server: the server's state.
            client: the client's state.
            rnd: the position in the run; ``rnd.index`` is the number of completed rounds.
        """
        return {self.evaluates: {**server.trees["model"], **client.trees["model"]}}

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        """Return the phases that fine-tune a copy of the client's evaluated model. Default: none.

        The copy is named ``personal``. If the first client has no phases, no client
        fine-tunes.

        Args:
            done: rounds completed. The hook is called before the first round, after every round with an evaluation or a
                checkpoint, and after the last one. ``task_info.may_end`` tells which rounds may be the last.
        """
        return ()

    def observations(self, server: State, rnd: Round) -> Iterable[Observation]:
        """Return numbers about the server to record once all clients have been evaluated. Default: none.

        Here ``rnd.index`` is the number of completed rounds.
        """
        return ()

    def client_observations(
        self, model: nn.Module, x: Tensor, rnd: Round, client: int
    ) -> Iterable[Observation]:
        """Return numbers to record about a client's evaluated model. Default: none.

        Args:
            model: the client's model, in evaluation mode.
            x: the client's test samples, [n, ...].
            rnd: the position in the run; ``rnd.index`` is the number of completed rounds.
            client: the client's position.
        """
        return ()


@cache
def _returned(hook: str) -> type:
    """Return the class of a hook's result, from its annotation.

    For ``dict[str, Tree]`` it is ``dict``.
    """
    result_type = get_type_hints(getattr(Algorithm, hook))["return"]
    return get_origin(result_type) or result_type


def _check_hooks(algorithm: type[Algorithm]) -> None:
    """Refuse a hook with other arguments, and a misspelt one.

    A method counts as misspelt if it is new and has a hook's parameters and nearly its
    name. It does not if code of the class or its parents uses the name as an attribute.
    Nor does a name like ``loss`` if a class outside this package has ``phases`` or
    ``finetuning``, since a phase names its loss by a text.

    Raises:
        UsageError: there is such a hook (the message names it), options are no dataclass, or evaluates is unknown.
    """
    check_known(
        f"model of {algorithm.name}", algorithm.evaluates, ("global", "personal")
    )
    options = vars(algorithm).get("Config")
    if options is not None and not is_dataclass(options):
        raise UsageError(
            f"{algorithm.__module__}.{algorithm.__qualname__}: Config must be a dataclass; got a plain class. "
            "Write @dataclass(frozen=True) above it."
        )
    hooks = {
        name: [*signature(hook).parameters]
        for name, hook in vars(Algorithm).items()
        if name[0] != "_" and isfunction(hook)
    }
    used_names, similar = _names_in(*map(vars, algorithm.__mro__)), {*hooks}
    for phases in (algorithm.phases, algorithm.finetuning):
        if not phases.__module__.startswith("fl_core."):
            similar.discard("loss")
    for name, method in vars(algorithm).items():
        if name[0] == "_" or not isfunction(method):
            continue
        class_path = f"{algorithm.__module__}.{algorithm.__qualname__}"
        parameters = signature(method)
        if name in hooks:
            try:
                parameters.bind(*hooks[name])
            except TypeError as error:
                arguments = ", ".join(hooks[name])
                raise UsageError(
                    f"{class_path}: {name} must have the arguments ({arguments}); got {parameters}."
                ) from error
        elif name not in used_names and not any(
            hasattr(parent, name) for parent in algorithm.__mro__[1:]
        ):
            nearest_hooks = get_close_matches(name, similar, 1, 0.7)
            if nearest_hooks and [*parameters.parameters] == hooks[nearest_hooks[0]]:
                raise UsageError(
                    f"{class_path}: a method with the arguments of a hook must be one; got {name!r}. "
                    f"Name it {nearest_hooks[0]!r}, or begin its name with an underscore."
                )


def _names_in(*namespaces: Mapping[str, Any]) -> set[str]:
    """Return the names of attributes and globals that the functions in some namespaces use.

    Names that are texts in the code are not among them.
    """
    names: set[str] = set()
    members = chain.from_iterable(space.values() for space in namespaces)
    codes = [member.__code__ for member in members if isfunction(member)]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += filter(iscode, code.co_consts)
    return names


def freeze(algorithm: Algorithm) -> None:
    """Forbid setting and deleting attributes of an algorithm from now on.

    A later attempt raises a UsageError. The object is copied to worker processes and
    built again when a run resumes, and changed attributes would be lost.
    """
    vars(algorithm)["_frozen"] = True


def read_config(algorithm: type[Algorithm], values: Mapping[str, Any]) -> Any:
    """Return the algorithm's ``Config`` with these values. Other options have defaults.

    Args:
        algorithm: the class of the algorithm.
        values: values by option, as themselves or as text.

    Raises:
        UsageError: an unknown key, or a value of the wrong type.
    """
    options = [field.name for field in fields(algorithm.Config)]
    check_options(algorithm.name, values, options)
    return read_options(algorithm.name, algorithm.Config, values)


def extends_model(algorithm: type[Algorithm]) -> bool:
    """Return whether an algorithm extends or changes the given model: it has a ``wrap_model`` of its own."""
    return algorithm.wrap_model.__func__ is not Algorithm.wrap_model.__func__  # type: ignore[attr-defined]


# --- the registry ----------------------------------------------------------------------------------------------


def _from_outside(algorithm: object, name: str) -> type[Algorithm]:
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise UsageError(
            f"algorithm must be a class made of fl_core.algorithms.Algorithm; got {name!r}."
        )
    return _named(algorithm, repr(name))


def _named(algorithm: type[Algorithm], shown: str) -> type[Algorithm]:
    if not algorithm.name:
        raise UsageError(
            f"algorithm {shown} must have a name for its rows; got none. Give the class name = '...'."
        )
    return algorithm


ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm", "fl_core.algorithms", _from_outside
)


def register(algorithm: type[Algorithm]) -> type[Algorithm]:
    """Register an algorithm by its ``name``. It is a decorator of classes.

    The class is returned unchanged.

    Raises:
        UsageError: another algorithm has that name, or it has none.
    """
    ALGORITHMS.add(_named(algorithm, algorithm.__qualname__).name, algorithm, algorithm)
    return algorithm


def defaults_of(algorithm: type[Algorithm]) -> dict[str, Any]:
    """Return an algorithm's own options with their defaults, {option: default}."""
    return {option.name: option.default for option in fields(algorithm.Config)}


def registry() -> dict[str, type[Algorithm]]:
    """Return all algorithms by name, each imported."""
    return ALGORITHMS.members()


def find(name: str, options: Mapping[str, Any] | None = None) -> type[Algorithm]:
    """Return the class of an algorithm by its name, or by ``package.module:Class``.

    The options can decide the class (:meth:`Algorithm.for_options`).

    Args:
        name: the registered name, or the path of a class.
        options: values of the algorithm's options; None means no options.

    Raises:
        UsageError: there is no such algorithm (the message names the nearest), or it cannot run with the options.
    """
    return ALGORITHMS[name].for_options(options or {})
