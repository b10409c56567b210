"""Local training: the one trainer that every algorithm and every executor uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fl_core import seeds, tree
from fl_core.errors import NonFiniteError, UsageError, check_known
from fl_core.losses import Loss
from fl_core.tree import Tree

if TYPE_CHECKING:
    from fl_core.algorithms.base import Algorithm
    from fl_core.data import Split

OPTIMIZERS = ("sgd", "adam", "adamw")
_NORM = nn.modules.batchnorm._NormBase  # all that keep running statistics
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Training:
    """How a client trains.

    Attributes:
        epochs: passes over the client's training data in a round.
        batch: samples a step; the last, smaller batch is used too.
        lr: learning rate.
        optimizer: ``sgd``, ``adam`` (coupled L2) or ``adamw`` (decoupled).
        momentum: of SGD.
        weight_decay, amsgrad: as in PyTorch.
        keep_optimizer: keep the optimiser's state with the client from round to round instead of a new one each.
    """

    epochs: int = 1
    batch: int = 32
    lr: float = 0.01
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    amsgrad: bool = False
    keep_optimizer: bool = False

    def __post_init__(self) -> None:
        check_known("optimizer", self.optimizer, OPTIMIZERS)
        for name, least in (("epochs", 0), ("batch", 1), ("momentum", 0), ("weight_decay", 0)):
            if not getattr(self, name) >= least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name, used in (("momentum", self.optimizer == "sgd"), ("amsgrad", self.optimizer != "sgd")):
            if getattr(self, name) and not used:
                raise UsageError(f"{name}={getattr(self, name)} has no meaning for optimizer {self.optimizer!r}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"lr must be a number above 0, not {self.lr}")

    def build(self, parameters: list[Tensor], lr: float | None = None) -> torch.optim.Optimizer:
        """A new optimiser over these tensors; a tensor that does not train is in no optimiser."""
        rate = self.lr if lr is None else lr
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=rate, momentum=self.momentum, weight_decay=self.weight_decay, fused=True
            )
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, lr=rate, weight_decay=self.weight_decay, amsgrad=self.amsgrad, fused=True)


@dataclass(frozen=True)
class Phase:
    """One stretch of local training, as data.

    Attributes:
        name: for messages and rows.
        train: names of the tensors that move (parameters, and the buffers of their normalisations); the rest has no
            gradient, is in no optimiser, and its normalisations run in evaluation mode.
        epochs: passes over the training data.
        tree: which of the client's trees is trained.
        loss: name of the algorithm's method that gives the objective.
        stream: which stream of batches. Phases that have FedAvg or Local as a limit use ``main``.
        observe: names of observers that see every step's parameters and gradients.
        lr: learning rate, if not the run's.
    """

    name: str
    train: frozenset[str]
    epochs: int
    tree: str = "model"
    loss: str = "loss"
    stream: str = "main"
    observe: tuple[str, ...] = ()
    lr: float | None = None


class Observer(Protocol):
    """A named accumulator that local training feeds; its result travels in the reply."""

    def update(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """One step, before the optimiser moves the parameters."""

    def result(self) -> dict[str, Any]:
        """What was measured, as JSON."""


@dataclass
class Context:
    """What a loss may look at, beside the parameters and the batch."""

    algorithm: str
    round: int
    client: int
    client_name: str
    n_train: int
    criterion: Loss
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    reference: Tree  # what the client received, on the training device
    finishing: bool = False  # fine-tuning after that many rounds, instead of training in the next
    observed: dict[str, Any] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)  # steps, samples and mean loss, by "phase/quantity"

    def where(self, phase: str) -> str:
        """The place, for an error message."""
        when = f"after round {self.round}" if self.finishing else f"round {self.round + 1}"
        return f"{self.algorithm}, {when}, client {self.client_name!r}, phase {phase!r}"


class Workspace:
    """A model skeleton on a device: trees go in, are trained or evaluated, and come out as trees."""

    def __init__(self, model: nn.Module, device: str | torch.device = "cpu") -> None:
        self.model = model.to(device)
        self.device = torch.device(device)
        self.live = tree.live(self.model)
        self.params = dict(self.model.named_parameters())
        names = {module: name for name, module in self.model.named_modules()}
        self.couples = any(isinstance(module, _BATCH_NORM) for module in self.model.modules())  # samples of a batch
        self.norms = [
            (module, {f"{names[module]}.{key}".lstrip(".") for key in module.state_dict()})
            for module in self.model.modules()
            if isinstance(module, _NORM)
        ]

    def load(self, source: Tree) -> None:
        """Copy a whole tree in, strictly."""
        tree.load(self.model, source)

    def read(self) -> Tree:
        """The tree as it is now, on the CPU."""
        return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in self.live.items()}

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Logits [n, C]. The skeleton itself runs where ``params`` are its own."""
        if params is self.params:
            return self.model(x)
        return torch.func.functional_call(self.model, dict(params), (x,))

    @contextmanager
    def trains(self, names: frozenset[str]) -> Iterator[list[str]]:
        """Training mode in which exactly these tensors move; yields the trained parameters, sorted."""
        flags = {name: param.requires_grad for name, param in self.params.items()}
        chosen = {name for name in names if flags.get(name)}  # what the model's author froze stays frozen
        try:
            self.model.train()
            for module, own in self.norms:
                module.train(bool(own & names))
            for name, param in self.params.items():
                param.requires_grad_(name in chosen)
                param.grad = None
            yield sorted(chosen)
        finally:
            for name, param in self.params.items():
                param.requires_grad_(flags[name])
                param.grad = None


def batch_slices(n: int, size: int, whole: bool) -> list[slice]:
    """Slices of at most ``size``. With ``whole`` (batch statistics) a last batch of one joins the one before it."""
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
) -> tuple[Tree, Tree]:
    """Run one phase from ``source`` on a client's training split.

    Batches are drawn from the stream (run seed, "batches", round, client, ``phase.stream``), and modules that draw
    (dropout) from the stream "modules" of the same parts.

    Returns:
        The trained tree, and the optimiser's state as a tree (empty unless ``training.keep_optimizer``).

    Raises:
        NonFiniteError: a loss or a trained tensor is NaN or infinite; names algorithm, round, client, phase and layer.
    """
    workspace.load(source)
    seed, parts = algorithm.problem.seed, (ctx.round, ctx.client, phase.stream)
    watching = {name: observers[check_known("observer", name, observers)]() for name in phase.observe}
    objective = getattr(algorithm, phase.loss)
    x, y = split.x.to(workspace.device), split.y.to(workspace.device)
    draws = seeds.torch_generator(seed, "batches", *parts)
    slices = batch_slices(len(y), training.batch, whole=workspace.couples)
    total, samples, steps = 0.0, 0, 0
    state: Tree = {}
    with workspace.trains(phase.train) as names, seeds.torch_seeded(seeds.seed_of(seed, "modules", *parts)):
        params: list[Tensor] = [workspace.params[name] for name in names]
        if params and phase.epochs and slices:
            optimizer = training.build(params, phase.lr)
            _restore(optimizer, names, params, phase, kept or {})
            for _ in range(phase.epochs):
                order = torch.randperm(len(y), generator=draws).to(workspace.device)
                for part in slices:
                    chosen = order[part]
                    loss = objective(workspace.params, (x[chosen], y[chosen]), ctx)
                    grads = _gradients(loss, params)
                    value = loss.item()
                    if not math.isfinite(value):
                        raise NonFiniteError(_explain(workspace, algorithm, phase, ctx, names, grads, value, steps))
                    for param, grad in zip(params, grads, strict=True):
                        param.grad = grad
                    for observer in watching.values():
                        observer.update(workspace.params, _named(names, grads))
                    optimizer.step()
                    total, samples, steps = total + value * len(chosen), samples + len(chosen), steps + 1
            state = _kept(optimizer, names, params, phase) if training.keep_optimizer else {}
    result = workspace.read()
    bad = tree.first_nonfinite(tree.pick(result, phase.train))
    if bad is not None:
        raise NonFiniteError(f"{ctx.where(phase.name)}: {bad!r} (layer {_layer(algorithm, bad)!r}) is not finite")
    ctx.observed.update({name: observer.result() for name, observer in watching.items()})
    ctx.work.update({f"{phase.name}/steps": steps, f"{phase.name}/samples": samples})
    if samples:
        ctx.work[f"{phase.name}/loss"] = total / samples
    return result, state


def _gradients(loss: Tensor, params: list[Tensor]) -> tuple[Tensor | None, ...]:
    """None for a tensor outside the forward pass, also where all of them are."""
    return torch.autograd.grad(loss, params, allow_unused=True) if loss.requires_grad else (None,) * len(params)


def _named(names: list[str], grads: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def _layer(algorithm: Algorithm, name: str) -> str:
    return next((layer.name for layer in algorithm.problem.layers if name in layer.tensors), "?")


def _explain(
    workspace: Workspace,
    algorithm: Algorithm,
    phase: Phase,
    ctx: Context,
    names: list[str],
    grads: tuple[Tensor | None, ...],
    value: float,
    step: int,
) -> str:
    """Where a loss that is not finite comes from: the first bad tensor, else the first bad gradient."""
    text = f"{ctx.where(phase.name)}: the loss is {value} at step {step + 1}"
    named = _named(names, grads)
    in_order = [name for layer in algorithm.problem.layers for name in layer.tensors]
    for kind, tensors in (("tensor", workspace.live), ("gradient of", named)):
        bad = tree.first_nonfinite({name: tensors[name] for name in in_order if name in tensors})
        if bad is not None:
            return f"{text}; first {kind} {bad!r} (layer {_layer(algorithm, bad)!r}) is not finite"
    return f"{text}; all tensors are finite, so the logits or the loss overflow: a smaller lr may help"


def _slot(phase: Phase, name: str, key: str) -> str:
    return f"{phase.tree}/{phase.name}/{name}#{key}"


def _kept(optimizer: torch.optim.Optimizer, names: list[str], params: list[Tensor], phase: Phase) -> Tree:
    return {
        _slot(phase, name, key): value.detach().to("cpu", copy=True)
        for name, param in zip(names, params, strict=True)
        for key, value in optimizer.state[param].items()
        if isinstance(value, Tensor)
    }


def _restore(
    optimizer: torch.optim.Optimizer, names: list[str], params: list[Tensor], phase: Phase, kept: Tree
) -> None:
    for name, param in zip(names, params, strict=True):
        prefix = _slot(phase, name, "")
        found = {key.removeprefix(prefix): value for key, value in kept.items() if key.startswith(prefix)}
        if found:
            optimizer.state[param].update({key: value.to(param.device, copy=True) for key, value in found.items()})
