"""Local training: the one training loop of every algorithm and every executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fl_core import seeds, tree
from fl_core.choices import OPTIMIZERS, PRECISIONS
from fl_core.errors import NonFiniteError, UsageError, check_known
from fl_core.training import optimizer_state
from fl_core.training.context import Context
from fl_core.training.steps import Steps, check_clip, clipped
from fl_core.training.watching import Watch, layer_of
from fl_core.tree import Tree

if TYPE_CHECKING:
    from fl_core.algorithms.base import Algorithm
    from fl_core.data import Split
    from fl_core.execution.workspace import Workspace

GATHERED = 1 << 26  # bytes of a client's data that may be copied in each epoch's order


@dataclass(frozen=True)
class Training:
    """How a client trains: optimiser, rates, batch size and clipping.

    Attributes:
        epochs: passes over the client's training data in a round.
        batch: samples a step; the last, smaller batch is used too, and its step is as long as any, as is usual with
            SGD. What is reported of losses weights it by its samples.
        lr: learning rate.
        optimizer: ``sgd``, ``adam`` (coupled L2) or ``adamw`` (decoupled).
        momentum: of SGD.
        weight_decay, amsgrad: as in PyTorch.
        clip: longest gradient of a loss, by the Euclidean norm over all that the phase trains; a longer one is scaled
            down to it before anything is done with it. None = never.
        keep_optimizer: keep the optimiser's state with the client from round to round instead of a new one each. A
            run's default is yes for adam and adamw, whose second moments need more steps than a round has, and no for
            sgd, with momentum too, as FedAvg has it. What is kept is one to three times what the client trains, in
            memory and in every checkpoint (:mod:`fl_core.training.optimizer_state`); fine-tuning always begins anew.
        precision: ``bf16`` computes the model's passes, forward and backward, with PyTorch's autocast to bfloat16
            (8 bits of mantissa); what comes out of them is float32 again. Weights, gradients, losses, the
            optimiser, averages, evaluation and diagnostics are float32 or float64 in either. It is faster on CPUs
            with AVX512-BF16 or AMX and on GPUs, and slower on others; it is never chosen by timing.
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
    precision: str = "float32"

    def __post_init__(self) -> None:
        check_known("optimizer", self.optimizer, OPTIMIZERS)
        check_known("precision", self.precision, PRECISIONS)
        for name, least in (("epochs", 0), ("batch_size", 1), ("momentum", 0), ("weight_decay", 0)):
            if not getattr(self, name) >= least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name, used in (("momentum", self.optimizer == "sgd"), ("amsgrad", self.optimizer != "sgd")):
            if getattr(self, name) and not used:
                raise UsageError(f"{name}={getattr(self, name)} has no meaning for optimizer {self.optimizer!r}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"lr must be a number above 0, not {self.lr}")
        check_clip(self.max_grad_norm)

    @property
    def description(self) -> str:
        """Optimiser, rate and what becomes of its state, for tables and reports.

        >>> Training(optimizer="adamw", lr=0.001, amsgrad=True, keep_optimizer=True).description
        'adamw (amsgrad), lr 0.001, its state kept from round to round'
        """
        options = [f"{name} {value:g}" for name in ("momentum", "weight_decay") if (value := getattr(self, name))]
        options += ["amsgrad"] * self.amsgrad
        state = "kept from round to round" if self.keep_optimizer else "new in each round"
        named = f"{self.optimizer} ({', '.join(options)})" if options else self.optimizer
        passes = "" if self.precision == PRECISIONS[0] else f", passes in {self.precision}"
        return f"{named}, lr {self.lr:g}, its state {state}{passes}".replace("_", " ")

    @property
    def optimizer_slots(self) -> int:
        """How many numbers of the optimiser a client keeps for each one that trains: 0 to 3."""
        numbers = bool(self.momentum) if self.optimizer == "sgd" else 2 + self.amsgrad
        return int(numbers) if self.keep_optimizer else 0

    def grad_norm_limit(self, phase: Phase) -> float | None:
        """The norm to which gradients are clipped in a phase."""
        return self.max_grad_norm if phase.max_grad_norm is None else phase.max_grad_norm

    def build(
        self,
        parameters: list[Tensor] | list[dict[str, Any]],
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        optimizer: str | None = None,
    ) -> torch.optim.Optimizer:
        """A new optimiser of these tensors or groups of tensors; those that do not train are left out.

        Args:
            lr, momentum, weight_decay, optimizer: in place of this training's; adam and adamw know no momentum and
                ignore one.
        """
        name = self.optimizer if optimizer is None else optimizer
        rate = self.lr if lr is None else lr
        decay = self.weight_decay if weight_decay is None else weight_decay
        if name == "sgd":
            speed = self.momentum if momentum is None else momentum
            return torch.optim.SGD(parameters, lr=rate, momentum=speed, weight_decay=decay, fused=True)
        kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        return kind(parameters, lr=rate, weight_decay=decay, amsgrad=self.amsgrad, fused=True)


@dataclass(frozen=True)
class Group:
    """Tensors of a phase with rates of their own; None stands for the phase's, ``lr`` divided by ``slower``."""

    train: frozenset[str]
    lr: float | None = None
    lr_divisor: float = 1.0
    momentum: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Phase:
    """One stretch of local training: which tensors are trained, for how long, and by which loss.

    Attributes:
        name: for messages and rows.
        train: names of the tensors that move (parameters, and the buffers of their normalisations); the rest has no
            gradient, is in no optimiser, and its normalisations run in evaluation mode.
        epochs: passes over the training data.
        tree: which of the client's trees is trained.
        loss: name of the algorithm's method that gives the objective.
        stream: which stream of batches. Phases that have FedAvg or Local as a limit use ``main``.
        observe: names of observers that see parameters and gradients of every step of the first pass: those of the
            loss, not clipped, or with a ``step`` of its own what that follows.
        lr, momentum, weight_decay, optimizer, clip: if not the run's.
        groups: tensors among those that train with rates of their own; no tensor is in two groups.
        steps: stop after so many batches, if ``epochs`` passes have more.
        step: name of the algorithm's method that makes the step of a batch; default the optimiser's own step along
            the gradient of the loss. See :class:`fl_core.training.steps.Steps`.
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
    max_grad_norm: float | None = None
    groups: tuple[Group, ...] = ()
    steps: int | None = None
    step: str = ""

    def __post_init__(self) -> None:
        check_clip(self.max_grad_norm)

    def length(self, batches: int) -> int:
        """Steps of the phase where a pass over the training data has so many batches."""
        whole = self.epochs * batches
        return whole if self.steps is None else min(self.steps, whole)

    @property
    def rates(self) -> tuple[float | None, float | None, float | None, str | None]:
        """The phase's rates and optimiser, as :meth:`Training.build` takes them."""
        return self.lr, self.momentum, self.weight_decay, self.optimizer


class Observer(Protocol):
    """A named accumulator that sees every step of local training; its result is sent in the reply."""

    def update(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """Take in one step, before the optimiser changes the parameters."""

    def result(self) -> dict[str, Any]:
        """The measurement, as JSON."""


def batch_slices(n: int, size: int, whole: bool) -> list[slice]:
    """Slices of at most ``size``; with ``whole`` (batch statistics) a last single sample joins the batch before it."""
    starts = list(range(0, n, size))
    if whole and len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    return [slice(a, b) for a, b in pairwise([*starts, n])]


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
    watch: Watch | None = None,
) -> tuple[Tree, Tree]:
    """Run one phase from ``source`` on a client's training split.

    Batches are drawn from the stream (run seed, "batches", round, client, ``phase.stream``), and modules that draw
    (dropout) from the stream "modules" of the same parts.

    Args:
        watch: looks at every step for what is not finite first, in a replay.

    Returns:
        The trained tree, and the optimiser's state as a tree (empty unless ``training.keep_optimizer``).

    Raises:
        NonFiniteError: a loss or a trained tensor is NaN or infinite; names algorithm, round, client, phase and step,
            and under ``watch`` what was not finite first.
        UsageError: a loss is no tensor of one number.
    """
    workspace.load(source, ctx.submodel)
    if watch is not None:
        watch.weights()
    seed, parts = algorithm.task_info.seed, (ctx.round, ctx.client, phase.batch_stream)
    watching = {name: observers[check_known("observer", name, observers)]() for name in phase.observe}
    objective = _scalar(algorithm.method(phase.loss), f"{ctx.where(phase.name)}: {phase.loss}")
    x, y = workspace.place(split.x), split.y.to(workspace.device)
    draws = seeds.torch_generator(seed, "batches", *parts)
    slices = batch_slices(len(y), training.batch_size, whole=workspace.couples)
    left = phase.length(len(slices))
    total, samples, steps = 0.0, 0, 0
    state: Tree = {}
    with workspace.trains(phase.train) as names, seeds.torch_seeded(seeds.seed_of(seed, "modules", *parts)):
        params: list[Tensor] = [workspace.params[name] for name in names]
        if params and phase.epochs and slices:
            by_name = dict(zip(names, params, strict=True))
            optimizer = training.build(_grouped(phase, by_name, training), *phase.rates)
            optimizer_state.restore(optimizer, names, params, optimizer_state.entries_of(kept or {}, phase))
            own_steps, accumulators, longest = None, list(watching.values()), training.grad_norm_limit(phase)
            if phase.step:
                data = (x, y)
                own_steps = Steps(
                    phase, workspace, by_name, objective, optimizer, training, ctx, data, seed, accumulators, watch
                )
                step = algorithm.method(phase.step)
            frozen = workspace.frozen(ctx.client, split.x, x)
            for _ in range(phase.epochs):
                for bx, by, ahead in _batches((x, y, frozen), slices[:left], draws):
                    batch = (bx, by)
                    if ahead is not None:
                        workspace.go_on(bx, ahead)
                    if own_steps is not None:
                        step(own_steps, batch, ctx)
                        own_steps.taken += 1
                        if watch is not None:
                            watch.weights("the step")
                        continue
                    if watch is not None:
                        watch.batch(bx, steps + 1)
                    loss = objective(workspace.params, batch, ctx)
                    grads = _gradients(loss, params)
                    value = loss.item()
                    if watch is not None:
                        watch.passes(value, _named(names, grads))
                    if not math.isfinite(value):
                        raise NonFiniteError(f"{ctx.where(phase.name)}: at step {steps + 1}, the loss is {value}")
                    for observer in accumulators:
                        observer.update(workspace.params, _named(names, grads))
                    if longest is not None:
                        for name, grad in clipped(_named(names, grads), longest).items():
                            by_name[name].grad = grad
                    optimizer.step()
                    for param in params:
                        param.grad = None  # its memory serves the next step
                    if watch is not None:
                        watch.weights("the step")
                    del loss, grads
                    size = len(batch[1])
                    total, samples, steps = total + value * size, samples + size, steps + 1
                left = max(0, left - len(slices))
                accumulators.clear()
            if own_steps is not None:
                total, samples, steps = own_steps.loss, own_steps.samples, own_steps.taken
            if training.keep_optimizer:
                state = optimizer_state.to_tree(optimizer_state.read(optimizer, names, params), phase)
    result = workspace.read()
    bad = tree.first_nonfinite(tree.select(result, phase.train))
    if bad is not None:
        layer = layer_of(algorithm.task_info.layers, bad)
        raise NonFiniteError(f"{ctx.where(phase.name)}: {bad!r} (layer {layer!r}) is not finite")
    ctx.observed.update({name: observer.result() for name, observer in watching.items()})
    ctx.work.update({f"{phase.name}/steps": steps, f"{phase.name}/samples": samples})
    if samples:
        ctx.work[f"{phase.name}/loss"] = total / samples
        ctx.work.update({f"{phase.name}/loss/{name}": part / samples for name, part in ctx.parts.items()})
    ctx.parts.clear()
    return result, state


def _scalar(loss: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    """The loss as it is, with an error where it gives something else than one number."""

    def objective(*args: Any) -> Tensor:
        value = loss(*args)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise UsageError(f"{name} returned {shown}; it must return a tensor of one number, of the whole batch")
        return value

    return objective


def _batches(
    data: tuple[Tensor, Tensor, Tensor | None], slices: list[slice], draws: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """One epoch of samples, labels and further values per sample, in a new random order."""
    x, y, extra = data
    order = torch.randperm(len(y), generator=draws).to(y.device)
    x_at, y_at, extra_at = (_in_order(values, order) for values in (x, y, y if extra is None else extra))
    for part in slices:
        yield x_at(part), y_at(part), None if extra is None else extra_at(part)


def _in_order(values: Tensor, order: Tensor) -> Callable[[slice], Tensor]:
    """A function from slices of the order to batches; small data are put in order at once, which is faster."""
    if values.nbytes > GATHERED:
        return lambda part: values[order[part]]
    ordered = values[order]
    return lambda part: ordered[part]


def _grouped(phase: Phase, params: Mapping[str, Tensor], training: Training) -> list[Tensor] | list[dict[str, Any]]:
    """The parameters for the optimiser, in groups if the phase has any."""
    if not phase.groups:
        return list(params.values())
    rest, groups = dict(params), []
    usual = training.lr if phase.lr is None else phase.lr
    for group in phase.groups:
        lr = usual / group.lr_divisor if group.lr is None else group.lr
        rates = {"lr": lr, "momentum": group.momentum, "weight_decay": group.weight_decay}
        set_rates: dict[str, Any] = {key: value for key, value in rates.items() if value is not None}
        groups.append(set_rates | {"params": [rest.pop(name) for name in sorted(group.train & rest.keys())]})
    return [group for group in (*groups, {"params": list(rest.values())}) if group["params"]]


def _gradients(loss: Tensor, params: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of the loss, None for a tensor outside the forward pass; they are also left in ``grad``.

    ``backward`` lays a gradient out in memory as its parameter is, which fused optimisers take for granted.
    """
    if loss.requires_grad:
        loss.backward(inputs=params)
    return tuple(param.grad for param in params)


def _named(names: list[str], grads: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}
