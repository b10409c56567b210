"""Local training: its optimiser, phases and observers, the loop of every algorithm, and tools for steps of their own.

Clients of small perceptrons may train together instead (:mod:`fl_core.rounds.batched`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from fl_core import seeds, tree
from fl_core.config import TrainingConfig
from fl_core.errors import (
    ABOVE_0,
    NonFiniteError,
    UsageError,
    check_fields,
    check_known,
)
from fl_core.layers import Layer, tensor_in_layer
from fl_core.training.losses import Loss
from fl_core.tree import Tree, copy_to_cpu

if TYPE_CHECKING:
    from fl_core.algorithms.base import Algorithm
    from fl_core.data import Split
    from fl_core.training.workspace import Workspace


Batch = tuple[Tensor, Tensor]
"""Samples [b, ...] and their labels [b]."""


def _eager(kind: type[torch.optim.Optimizer]) -> type[Any]:
    """Return an optimiser without the wrappers of ``torch.compile``. They import 750 modules, and slow each step."""
    names = ("add_param_group", "zero_grad", "step")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)


_OPTIMIZERS = {
    "sgd": (_eager(torch.optim.SGD), "momentum"),
    "adam": (_eager(torch.optim.Adam), "amsgrad"),
    "adamw": (_eager(torch.optim.AdamW), "amsgrad"),
}


@dataclass(frozen=True)
class Training:
    """The settings of a client's training: optimiser, rates, batch size and clipping.

    Attributes:
        epochs: passes over the client's training data in a round.
        batch_size: samples a step. The last, smaller batch is used too. Reported losses weight it by its samples.
        lr: learning rate.
        optimizer: ``sgd``, ``adam`` (coupled L2) or ``adamw`` (decoupled).
        momentum: of SGD.
        weight_decay, amsgrad: as in PyTorch.
        max_grad_norm: largest Euclidean norm of a gradient over all that the phase trains. A longer gradient is
            scaled down to it. None = never.
        keep_optimizer: keep the optimiser's state with the client from round to round instead of a new one each. A
            run's default is yes for adam and adamw, whose second moments need more steps than a round has, and no for
            sgd, with momentum too, as FedAvg has it. What is kept is one to three times what the client trains, in
            memory and in every checkpoint (:mod:`fl_core.training.loop`); fine-tuning always begins anew.
    """

    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.01
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    amsgrad: bool = False
    max_grad_norm: float | None = None
    keep_optimizer: bool = False

    @classmethod
    def of(cls, config: TrainingConfig) -> Training:
        """Return the settings of a resolved configuration."""
        names = {each.name for each in fields(cls)}
        return cls(**{key: v for key, v in vars(config).items() if key in names})

    @property
    def description(self) -> str:
        """Optimiser, learning rate and whether the optimiser's state is kept, for tables and reports.

        >>> Training(optimizer="adamw", lr=0.001, amsgrad=True, keep_optimizer=True).description
        'adamw (amsgrad), lr 0.001, optimiser state kept between rounds'
        """
        options = [
            f"{name} {value:g}"
            for name in ("momentum", "weight_decay")
            if (value := getattr(self, name))
        ]
        options += ["amsgrad"] * self.amsgrad
        state = "kept between rounds" if self.keep_optimizer else "new in each round"
        named = (
            f"{self.optimizer} ({', '.join(options)})" if options else self.optimizer
        )
        return f"{named}, lr {self.lr:g}, optimiser state {state}".replace("_", " ")

    def build(
        self, parameters: list[Tensor] | list[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """Return a new optimiser of these tensors or groups of tensors. Adam and AdamW ignore the momentum."""
        kind, own = _OPTIMIZERS[self.optimizer]
        options = {name: getattr(self, name) for name in ("lr", "weight_decay", own)}
        return kind(parameters, fused=True, **options)


@dataclass(frozen=True)
class Group:
    """Tensors of a phase with a learning rate of their own: ``lr``, or the phase's divided by ``lr_divisor``."""

    train: frozenset[str]
    lr: float | None = None
    lr_divisor: float = 1.0


_OWN = ("lr", "momentum", "weight_decay", "optimizer", "max_grad_norm")


@dataclass(frozen=True)
class Phase:
    """One stretch of local training: the trained tensors, its length, and its loss.

    Attributes:
        name: for messages and rows.
        train: names of the tensors that move (parameters, and the buffers of their normalisations); the rest has no
            gradient, is in no optimiser, and its normalisations run in evaluation mode.
        epochs: passes over the training data.
        state_key: which of the client's trees is trained.
        loss: name of the algorithm's method that gives the objective.
        batch_stream: which stream of batches. Phases that have FedAvg or Local as a limit use ``main``.
        observe: names of observers that see parameters and gradients of every step of the first pass: those of the
            loss, not clipped, or with a ``step`` of its own what that follows.
        lr, momentum, weight_decay, optimizer, max_grad_norm: if not the run's.
        groups: tensors among those that train with learning rates of their own; no tensor is in two groups.
        steps: stop after so many batches, if ``epochs`` passes have more.
        step: name of the algorithm's method that makes the step of a batch; default the optimiser's own step along
            the gradient of the loss. See :class:`fl_core.training.loop.Steps`.
    """

    name: str
    train: frozenset[str]
    epochs: int
    state_key: str = "model"
    loss: str = "loss"
    batch_stream: str = "main"
    observe: tuple[str, ...] = ()
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    max_grad_norm: Annotated[float | None, ABOVE_0] = None
    groups: tuple[Group, ...] = ()
    steps: int | None = None
    step: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "train", frozenset(self.train))

    def length(self, batches: int) -> int:
        """Steps of the phase if a pass over the training data has this number of batches."""
        whole = self.epochs * batches
        return whole if self.steps is None else min(self.steps, whole)

    def settings(self, training: Training) -> Training:
        """Return the settings of this phase: the run's, with the phase's own in their place."""
        own = {name: getattr(self, name) for name in _OWN}
        return replace(training, **{k: v for k, v in own.items() if v is not None})


class Observer(Protocol):
    """A named accumulator that sees every step of local training; its result is sent in the reply."""

    def update(self, params: Tree, grads: Tree) -> None:
        """Take in one step, before the optimiser changes the parameters."""

    def result(self) -> dict[str, Any]:
        """The measurement, as JSON."""


def batch_slices(n: int, size: int, whole: bool) -> list[slice]:
    """Slices of at most ``size``; with ``whole`` (batch statistics) a last single sample joins the batch before it."""
    starts = list(range(0, n, size))
    if whole and len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    return [slice(a, b) for a, b in pairwise([*starts, n])]


def _not_here(*args: Any, **options: Any) -> Any:
    raise RuntimeError(
        "this context must belong to a client; got one without data and models. Use it in a client's hook."
    )


@dataclass
class Context:
    """The knowledge and tools of a client, for the hooks that run where it is.

    Attributes:
        algorithm: its name. round: 0-based. client: its position. n_train: its training samples.
        criterion: the run's loss of logits and labels.
        forward: (parameters, x [n, ...]) -> logits [n, C] in the mode of the moment, which is training in
            ``client_start`` and in phases; see :meth:`fl_core.training.workspace.Workspace.forward`.
        infer: the same in evaluation mode and without gradients, of a whole tree.
        features: (parameters, x [n, ...]) -> the input [n, d] of the last linear layer, in the mode of the moment.
        batches: (stream, share=1.0) -> batches of the run's size of that share of the client's training samples,
            drawn without replacement from a stream of that name, which is another one in each round and client.
        score: (whole tree, what it is) -> its ``loss``, ``accuracy`` ... on the client's validation split.
        reference: what the client received, or else began with, on the training device.
        labels: of the client's training samples, int64 [n_train], on the training device.
        trees: what else it received or kept, there too; empty until training begins.
        submodel: names of the tensors that the client has at all; None = all.
        finetuning: whether this is fine-tuning after so many rounds, instead of training in the next.
        observed: what observers measured, by their names.
        work: steps, samples and mean loss, by "phase/quantity".
        scratch: trees that steps keep: the client's own when all phases are done, without gradients.
        parts: of a phase's loss, by name, summed over its samples.
    """

    algorithm: str
    round: int
    client: int
    client_name: str
    n_train: int
    criterion: Loss
    forward: Callable[..., Any]
    reference: Tree
    labels: Tensor
    trees: dict[str, Tree] = field(default_factory=dict)
    infer: Callable[..., Tensor] = _not_here
    features: Callable[..., Tensor] = _not_here
    batches: Callable[..., Iterator[tuple[Tensor, Tensor]]] = _not_here
    score: Callable[[Tree, str], dict[str, float]] = _not_here
    submodel: frozenset[str] | None = None
    finetuning: bool = False
    observed: dict[str, Any] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    scratch: dict[str, Tree] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    def part(self, name: str, loss: Tensor, samples: int) -> Tensor:
        """Record a loss, a mean over ``samples`` samples, as a part of the phase's. Return it unchanged."""
        self.parts[name] = self.parts.get(name, 0.0) + loss.item() * samples
        return loss

    def location(self, phase: str) -> str:
        """Algorithm, round, client and phase, for an error message."""
        when = (
            f"after round {self.round}"
            if self.finetuning
            else f"round {self.round + 1}"
        )
        return f"{self.algorithm}, {when}, client {self.client_name!r}, phase {phase!r}"


MOMENTUM = "momentum_buffer"
Entries = dict[
    str, dict[str, Tensor]
]  # name of a tensor -> key of the optimiser -> value


def entries_of(kept: Tree, phase: Phase) -> Entries:
    """The entries of a phase in a kept tree, by the tensor's name."""
    prefix, found = _prefix(phase), Entries()
    for slot, value in kept.items():
        if slot.startswith(prefix):
            name, _, key = slot.removeprefix(prefix).rpartition("#")
            found.setdefault(name, {})[key] = value
    return found


def to_tree(entries: Mapping[str, Tree], phase: Phase) -> Tree:
    """The tree that keeps these entries of a phase: contiguous copies on the CPU."""
    prefix = _prefix(phase)
    return copy_to_cpu(
        {
            f"{prefix}{n}#{key}": each
            for n, values in entries.items()
            for key, each in values.items()
        }
    )


def read(
    optimizer: torch.optim.Optimizer, names: Sequence[str], params: Sequence[Tensor]
) -> Entries:
    """The optimiser's own state of these tensors, not copied."""
    return {
        name: {
            key: value
            for key, value in optimizer.state[param].items()
            if isinstance(value, Tensor)
        }
        for name, param in zip(names, params, strict=True)
    }


def restore(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    params: Sequence[Tensor],
    entries: Mapping[str, Tree],
) -> None:
    """Put copies of the entries into a new optimiser of these tensors. Tensors without an entry begin fresh."""
    for name, param in zip(names, params, strict=True):
        for key, value in entries.get(name, {}).items():
            optimizer.state[param][key] = _like(value, param)
    if any(
        MOMENTUM in state for state in optimizer.state.values()
    ):  # then a fused step wants one for each,
        for param in params:  # also for what trains for the first time
            optimizer.state[param].setdefault(MOMENTUM, torch.zeros_like(param))


def _prefix(phase: Phase) -> str:
    return f"{phase.state_key}/{phase.name}/"


def _like(value: Tensor, param: Tensor) -> Tensor:
    """A copy on the parameter's device, in its memory layout if it has the same shape."""
    if value.shape != param.shape:
        return value.to(param.device, copy=True)
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)


GATHERED = 1 << 26  # bytes of a client's data that may be copied in each epoch's order


def train(
    workspace: Workspace,
    algorithm: Algorithm,
    phase: Phase,
    source: Tree,
    split: Split,
    training: Training,
    ctx: Context,
    observers: Mapping[str, Callable[[], Observer]],
    kept: Tree | None = None,
) -> tuple[Tree, Tree]:
    """Run one phase from ``source`` on a client's training split.

    Batches are drawn from the stream (run seed, "batches", round, client, ``phase.stream``). Modules such as dropout
    draw from the stream "modules" with the same parts.

    Returns:
        The trained tree, and the optimiser's state as a tree (empty unless ``training.keep_optimizer``).

    Raises:
        NonFiniteError: a loss or a trained tensor is NaN or infinite; names algorithm, round, client, phase and step,
            and the layer whose weights are so, too.
        UsageError: a loss is no tensor of one number.
    """
    workspace.load(source, ctx.submodel)
    seed = algorithm.task_info.seed
    parts = (ctx.round, ctx.client, phase.batch_stream)
    watching = {
        name: observers[
            check_known(f"observer of phase {phase.name!r}", name, observers)
        ]()
        for name in phase.observe
    }
    objective = _scalar(
        algorithm.method(phase, "loss"), f"{ctx.location(phase.name)}: {phase.loss}"
    )
    x = workspace.place(split.x)
    y = split.y.to(workspace.device)
    draws = seeds.torch_generator(seed, "batches", *parts)
    slices = batch_slices(len(y), training.batch_size, whole=workspace.couples)
    left = phase.length(len(slices))
    total, samples, taken = 0.0, 0, 0
    state: Tree = {}
    with (
        workspace.trains(phase.train - algorithm.task_info.frozen) as names,
        seeds.torch_seeded(seeds.seed_of(seed, "modules", *parts)),
    ):
        params: list[Tensor] = [workspace.params[name] for name in names]
        if params and phase.epochs and slices:
            by_name = dict(zip(names, params, strict=True))
            settings = phase.settings(training)
            optimizer = settings.build(_parameter_groups(phase, by_name, settings.lr))
            restore(optimizer, names, params, entries_of(kept or {}, phase))
            steps = Steps(
                by_name,
                workspace,
                optimizer,
                training,
                settings,
                phase,
                ctx,
                objective,
                (x, y),
                seed,
                list(watching.values()),
                algorithm.task_info.layers,
            )
            step = algorithm.method(phase, "step") if phase.step else Steps.plain
            frozen = workspace.frozen_outputs(ctx.client, split.x, x)
            for _ in range(phase.epochs):
                for bx, by, ahead in _batches((x, y, frozen), slices[:left], draws):
                    if ahead is not None:
                        workspace.continue_from(bx, ahead)
                    step(steps, (bx, by), ctx)
                    steps.taken += 1
                left = max(0, left - len(slices))
                steps.observers.clear()  # they see the first epoch
            total = steps.loss
            samples = steps.samples
            taken = steps.taken
            if training.keep_optimizer:
                state = to_tree(read(optimizer, names, params), phase)
    result = workspace.read()
    bad = tree.first_nonfinite(tree.select(result, phase.train), before=source)
    if bad is not None:
        tensor = tensor_in_layer(bad, algorithm.task_info.layers)
        raise NonFiniteError(
            f"{ctx.location(phase.name)}: {tensor} is not finite. Use a smaller lr."
        )
    ctx.observed.update(
        {name: observer.result() for name, observer in watching.items()}
    )
    ctx.work.update({f"{phase.name}/steps": taken, f"{phase.name}/samples": samples})
    if samples:
        ctx.work[f"{phase.name}/loss"] = total / samples
        ctx.work.update(
            {
                f"{phase.name}/loss/{name}": part / samples
                for name, part in ctx.parts.items()
            }
        )
    ctx.parts.clear()
    return result, state


def _scalar(loss: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """The loss unchanged, with an error if its value is not one number."""

    def objective(*args: Any) -> Tensor:
        value = loss(*args)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = (
                f"a tensor of shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else repr(value)
            )
            raise UsageError(
                f"{name} must return a tensor of one number, for the whole batch; got {shown}."
            )
        return value

    return objective


def _batches(
    data: tuple[Tensor, Tensor, Tensor | None],
    slices: list[slice],
    draws: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """One epoch of samples, labels and further values per sample, in a new random order."""
    x, y, extra = data
    order = torch.randperm(len(y), generator=draws).to(y.device)
    x_at, y_at, extra_at = (
        _in_order(values, order) for values in (x, y, y if extra is None else extra)
    )
    for part in slices:
        yield x_at(part), y_at(part), None if extra is None else extra_at(part)


def _in_order(values: Tensor, order: Tensor) -> Callable[[slice], Tensor]:
    """A function from slices of the order to batches. Small data are ordered at once, for speed."""
    if values.nbytes > GATHERED:
        return lambda part: values[order[part]]
    ordered = values[order]
    return lambda part: ordered[part]


def _parameter_groups(phase: Phase, params: Tree, usual: float) -> list[dict[str, Any]]:
    """Return the phase's groups of parameters, with that of the rest, for an optimiser with this usual rate."""
    rest, groups = dict(params), list[dict[str, Any]]()
    for group in phase.groups:
        lr = usual / group.lr_divisor if group.lr is None else group.lr
        own = [rest.pop(name) for name in sorted(group.train & rest.keys())]
        groups.append({"params": own, "lr": lr})
    groups.append({"params": list(rest.values())})
    return [group for group in groups if group["params"]]


def clip_gradients(grads: Tree, most: float) -> dict[str, Tensor]:
    """Gradients scaled down together to a Euclidean norm of at most ``most``.

    If the norm is not finite they stay unchanged, so that the error is found at its origin.
    """
    if not grads or not (norm := get_total_norm(list(grads.values()))).isfinite():
        return dict(grads)
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    return {name: grad * scale for name, grad in grads.items()}


@dataclass
class Steps:
    """The tools of a training step: parameters, gradients, optimiser steps, further batches.

    The step is a method of the algorithm, named by :attr:`Phase.step`. It takes this object, the phase's next batch
    and the context. Without one it is :meth:`plain`.

    Attributes:
        params: the parameters that train, by name: the model's own, to be changed in place without gradients.
        workspace: the model.
        optimizer: the phase's, over ``params``.
        training, settings: the local training of the run, and of the phase.
        phase, ctx: of the client that trains.
        objective: (parameters, batch, ctx) -> the phase's loss.
        data: all training samples and their labels.
        seed: of the run.
        observers: what sees every step.
        layers: of the model.
        taken: batches of the phase that were taken before this one.
        samples, loss: whose gradients were taken, and their summed loss.
    """

    params: Tree
    workspace: Workspace
    optimizer: torch.optim.Optimizer
    training: Training
    settings: Training
    phase: Phase
    ctx: Context
    objective: Callable[..., Tensor]
    data: Batch
    seed: int
    observers: list[Observer]
    layers: Sequence[Layer]
    taken: int = 0
    samples: int = 0
    loss: float = 0.0

    def __post_init__(self) -> None:
        self._draws: dict[str, torch.Generator] = {}
        self._copies: dict[str, torch.optim.Optimizer] = {}

    @property
    def live(self) -> Tree:
        """Return all of the model's tensors by name, without copying."""
        return self.workspace.live

    def gradients(self, batch: tuple[Any, ...], clip: bool = True) -> dict[str, Tensor]:
        """Gradients of the phase's loss on a batch, at the present parameters, for parameters that the loss reaches.

        The loss gets the batch as it is given: samples and labels, and whatever else the two have agreed on.

        Args:
            clip: whether the gradients are clipped as the phase asks; not where differences are taken of them.

        Raises:
            NonFiniteError: the loss is NaN or infinite. The error names the layer of the largest weight.
        """
        loss = self.objective(self.workspace.params, batch, self.ctx)
        params = list(self.params.values())
        for param in params:
            param.grad = None
        if not loss.requires_grad:
            raise UsageError(
                f"{self.ctx.location(self.phase.name)}: {self.phase.loss} must depend on a parameter that trains; "
                "got a constant. Compute it from params, with gradients."
            )
        # lays gradients out in memory as the parameters are, unlike autograd.grad
        loss.backward(inputs=params)
        grads = tuple(param.grad for param in params)
        for param in params:
            param.grad = None
        value, size = loss.item(), len(batch[1])
        reached = {
            name: grad
            for name, grad in zip(self.params, grads, strict=True)
            if grad is not None
        }
        if not math.isfinite(value):
            raise NonFiniteError(
                f"{self.ctx.location(self.phase.name)}: the loss of step {self.taken + 1} is {value}. "
                f"{self._origin(batch[0])}"
            )
        self.loss = self.loss + value * size
        self.samples = self.samples + size
        return self._clipped(reached) if clip else reached

    def _origin(self, x: Tensor) -> str:
        """Return why a loss is not finite: features of the batch [b, ...] are not, or the layer of the largest weight.

        A gradient that is not finite makes weights so, and then the loss of the next step.
        """
        if not tree.is_finite(x):
            return "The batch has features that are not finite."
        params = self.workspace.params.items()
        sizes = {n: float(p.detach().abs().max()) for n, p in params if p.numel()}
        name = max(sizes, key=lambda n: (not math.isfinite(sizes[n]), sizes[n]))
        place = tensor_in_layer(name, self.layers)
        hint = " Use a smaller lr." if self.taken else ""
        return f"The largest weight is {sizes[name]:.3g} in {place}.{hint}"

    def _clipped(self, grads: Tree) -> dict[str, Tensor]:
        longest = self.settings.max_grad_norm
        return dict(grads) if longest is None else clip_gradients(grads, longest)

    def plain(self, batch: Batch, ctx: Context) -> None:
        """Take the step of a phase that names none: observers get the gradients as they are before clipping."""
        self.descend(self.gradients(batch, clip=False), clip=True)

    def descend(self, grads: Tree, clip: bool = False) -> None:
        """Take the optimiser's step along these gradients; a parameter without one stays the same."""
        for observer in self.observers:
            observer.update(self.workspace.params, grads)
        if clip:
            grads = self._clipped(grads)
        for name, param in self.params.items():
            param.grad = grads.get(name)
        self.optimizer.step()
        for param in self.params.values():
            param.grad = None

    def descend_copy(self, name: str, copy: Tree, grads: Tree) -> None:
        """Take a step of copied parameters that the algorithm keeps, by an optimiser like the phase's.

        Args:
            name: of the copy, which has an optimiser of its own from the phase's first batch to its last.
            copy: changed in place; the same tensors in every step, among others perhaps. grads: along which it goes.
        """
        if name not in self._copies:
            tensors = [copy[key] for key in self.params]
            self._copies[name] = self.settings.build(tensors)
        for key in self.params:
            copy[key].grad = grads.get(key)
        self._copies[name].step()
        for key in self.params:
            copy[key].grad = None

    def draw(self, stream: str) -> Batch:
        """Draw a further batch without replacement, independent of the phase's own: the next of the named stream."""
        x, y = self.data
        order = torch.randperm(
            len(y), generator=self.generator("batches", f"/{stream}")
        )
        chosen = order[: self.training.batch_size].to(y.device)
        return x[chosen], y[chosen]

    def generator(self, purpose: str, stream: str = "") -> torch.Generator:
        """The phase's random generator for a purpose, on the CPU; it continues from step to step."""
        if purpose + stream not in self._draws:
            where = f"{self.phase.batch_stream}{stream}"
            self._draws[purpose + stream] = seeds.torch_generator(
                self.seed, purpose, self.ctx.round, self.ctx.client, where
            )
        return self._draws[purpose + stream]
