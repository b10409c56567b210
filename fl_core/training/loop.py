"""The loop of local training, the state of its optimiser, and the tools of a step.

Clients of small perceptrons may train together instead (:mod:`fl_core.rounds.batched`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from fl_core import seeds, tree
from fl_core.errors import NonFiniteError, UsageError, check_known
from fl_core.layers import Layer, tensor_in_layer
from fl_core.training.phases import (
    Batch,
    Context,
    Group,
    Observer,
    Observers,
    Phase,
    Training,
)
from fl_core.tree import Tree, copy_to_cpu

if TYPE_CHECKING:
    from fl_core.data import Split
    from fl_core.training.workspace import Workspace


def batch_slices(n: int, size: int, whole: bool) -> list[slice]:
    """Return slices of ``n`` samples into batches of at most ``size``.

    With ``whole``, for a model with batch statistics, a last single sample joins the batch before it, which then has
    ``size`` + 1. Without samples the list is empty.

    >>> batch_slices(7, 3, False)
    [slice(0, 3, None), slice(3, 6, None), slice(6, 7, None)]
    >>> batch_slices(7, 3, True)
    [slice(0, 3, None), slice(3, 7, None)]
    >>> from itertools import product
    >>> for n, size, whole in product(range(60), range(1, 20), (False, True)):
    ...     parts = [range(n)[part] for part in batch_slices(n, size, whole)]
    ...     lengths = [*map(len, parts)]
    ...     assert [k for part in parts for k in part] == [*range(n)]
    ...     assert all(length <= size + whole for length in lengths)
    ...     assert all(length == size for length in lengths[:-1])
    ...     assert not (whole and n > 1 and size > 1) or 1 not in lengths
    """
    starts = list(range(0, n, size))
    if whole and len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    return [slice(a, b) for a, b in pairwise([*starts, n])]


MOMENTUM = "momentum_buffer"
Entries = dict[
    str, dict[str, Tensor]
]  # name of a tensor -> key of the optimiser -> value


def entries_of(stored: Tree, phase: Phase) -> Entries:
    """Return a phase's optimiser state from a tree of :func:`to_tree`, as {tensor: {optimiser key: value}}.

    Entries of other phases are left out. The tensors are not copied.
    """
    prefix, entries = _prefix(phase), Entries()
    for slot, value in stored.items():
        if slot.startswith(prefix):
            name, _, key = slot.removeprefix(prefix).rpartition("#")
            entries.setdefault(name, {})[key] = value
    return entries


def to_tree(entries: Mapping[str, Tree], phase: Phase) -> Tree:
    """Return a phase's optimiser state as one flat tree, to be stored with the client.

    Keys are ``<state key>/<phase>/<tensor>#<optimiser key>``. Tensors are contiguous copies on the CPU.
    :func:`entries_of` is the inverse.
    """
    prefix = _prefix(phase)
    tensors: Tree = {}
    for name, values in entries.items():
        tensors |= {f"{prefix}{name}#{key}": value for key, value in values.items()}
    return copy_to_cpu(tensors)


def read(optimizer: torch.optim.Optimizer, params: Tree) -> Entries:
    """Return the optimiser's own tensors of these parameters, not copied, as {parameter: {optimiser key: tensor}}."""
    return {
        name: {
            key: value
            for key, value in optimizer.state[param].items()
            if isinstance(value, Tensor)
        }
        for name, param in params.items()
    }


def restore(
    optimizer: torch.optim.Optimizer, params: Tree, entries: Mapping[str, Tree]
) -> None:
    """Copy stored entries into a new optimiser. Parameters without an entry begin with a fresh state.

    Args:
        optimizer: an optimiser of ``params`` without a state.
        params: the parameters by name.
        entries: {parameter: {optimiser key: tensor}}, from :func:`entries_of`.
    """
    for name, param in params.items():
        for key, value in entries.get(name, {}).items():
            # its memory layout
            layout_source = param if value.shape == param.shape else value
            state_tensor = torch.empty_like(
                layout_source, dtype=value.dtype, device=param.device
            )
            optimizer.state[param][key] = state_tensor.copy_(value)
    if any(
        MOMENTUM in state for state in optimizer.state.values()
    ):  # then a fused step wants one for each,
        for param in params.values():  # also for what trains for the first time
            optimizer.state[param].setdefault(MOMENTUM, torch.zeros_like(param))


GATHERED = 1 << 26
"""Most bytes of samples that are copied into the order of their batches at once.

That is faster than batch by batch."""


def _prefix(phase: Phase) -> str:
    return f"{phase.state_key}/{phase.name}/"


def train(
    workspace: Workspace,
    phase: Phase,
    source: Tree,
    split: Split,
    training: Training,
    ctx: Context,
    observers: Observers,
    stored: Tree | None = None,
    *,
    loss: Callable[..., object],
    step: Callable[..., object] | None = None,
    seed: int,
    layers: tuple[Layer, ...],
    frozen: frozenset[str] = frozenset(),
) -> tuple[Tree, Tree]:
    """Run one phase from ``source`` on a client's training split.

    Batches are drawn from the stream (run seed, "batches", round, client,
    ``phase.batch_stream``). Modules such as dropout draw from the stream "modules" with
    the same parts. Nothing trains without samples, without epochs, or if no parameter
    of the phase can train.

    Args:
        workspace: the model on its device, which gets the weights of ``source``.
        phase: the tensors that train, for how long, and by which settings.
        source: the weights before the phase, by name.
        split: the client's training samples.
        training: the run's settings of local training.
        ctx: the client's context. It receives the results of observers, and steps, samples and losses.
        observers: makers of the observers that the phase may name.
        stored: the optimiser's state after the client's last round, from :func:`to_tree`. None means a new one.
        loss, step: the methods that the phase names. Without a step it is :meth:`Steps.plain`.
        seed: the run's seed.
        layers: the model's layers.
        frozen: names of tensors that never train.

    Returns:
        The trained tree as a copy on the CPU, and the optimiser's state as a tree. The
        state is empty unless ``training.keep_optimizer``, and if nothing trained.

    Raises:
        NonFiniteError: a loss or a trained tensor is NaN or infinite. The message names algorithm, round, client and
            phase, and the step or the layer.
        UsageError: a loss is no tensor of one number, the phase names an unknown
            observer or tensor, or ``source`` has other names or shapes than the model.
    """
    workspace.load(source, ctx.submodel)
    stream_parts = (ctx.round, ctx.client, phase.batch_stream)
    active_observers = {
        name: observers[
            check_known(f"observer of phase {phase.name!r}", name, observers)
        ](layers)
        for name in phase.observe
    }
    x = workspace.place(split.x)
    y = split.y.to(workspace.device)
    generator = seeds.torch_generator(seed, "batches", *stream_parts)
    slices = batch_slices(len(y), training.batch_size, whole=workspace.couples)
    n_left = phase.length(len(slices))
    total_loss, samples, steps_taken = 0.0, 0, 0
    state: Tree = {}
    with (
        workspace.trains(phase.train - frozen) as names,
        seeds.torch_seeded(seeds.seed_of(seed, "modules", *stream_parts)),
    ):
        params = {name: workspace.params[name] for name in names}
        if params and phase.epochs and slices:
            settings = phase.settings(training)
            optimizer = settings.build(_parameter_groups(phase, params, settings))
            restore(optimizer, params, entries_of(stored or {}, phase))
            steps = Steps(
                params,
                workspace,
                optimizer,
                training,
                settings,
                phase,
                ctx,
                loss,
                (x, y),
                seed,
                list(active_observers.values()),
                layers,
            )
            step = step or Steps.plain
            outputs = workspace.frozen_outputs(ctx.client, split.x, x)
            values = [x, y] if outputs is None else [x, y, outputs]
            is_small = sum(value.nbytes for value in values) <= GATHERED
            for _ in range(phase.epochs):
                order = torch.randperm(len(y), generator=generator).to(y.device)
                ordered_values = values
                if is_small:
                    ordered_values = [value[order] for value in values]
                for batch_slice in slices[:n_left]:
                    rows = batch_slice if is_small else order[batch_slice]
                    batch, labels, *first_outputs = (
                        value[rows] for value in ordered_values
                    )
                    if first_outputs:
                        workspace.continue_from(batch, *first_outputs)
                    step(steps, (batch, labels), ctx)
                    steps.taken += 1
                n_left = max(0, n_left - len(slices))
                steps.observers.clear()  # they see the first epoch
            total_loss, samples, steps_taken = steps.loss, steps.samples, steps.taken
            if training.keep_optimizer:
                state = to_tree(read(optimizer, params), phase)
    result = workspace.read()
    bad_name = tree.first_nonfinite(tree.select(result, phase.train), before=source)
    if bad_name is not None:
        tensor = tensor_in_layer(bad_name, layers)
        location = ctx.location(phase.name)
        raise NonFiniteError(f"{location}: {tensor} is not finite. Use a smaller lr.")
    ctx.observed.update(
        {name: observer.result() for name, observer in active_observers.items()}
    )
    ctx.work.update(
        {f"{phase.name}/steps": steps_taken, f"{phase.name}/samples": samples}
    )
    if samples:
        ctx.work[f"{phase.name}/loss"] = total_loss / samples
        ctx.work.update(
            {
                f"{phase.name}/loss/{name}": batch_slice / samples
                for name, batch_slice in ctx.parts.items()
            }
        )
    ctx.parts.clear()
    return result, state


def _parameter_groups(
    phase: Phase, params: Tree, settings: Training
) -> list[dict[str, Any]]:
    """Return an optimiser's groups of a phase's parameters, with their learning rates.

    These are the groups of the phase, and one of all other parameters. Each is split by
    :attr:`Training.rates`. Empty groups are left out.
    """
    remaining, groups = dict(params), list[dict[str, Any]]()
    for group in (*phase.groups, Group(frozenset(params))):
        lr = group.lr
        if lr is None:
            lr = settings.lr / group.lr_divisor
        for part, factor in (*settings.rates, ("", 1.0)):
            tensors = [
                remaining.pop(n)
                for n in sorted(group.train & remaining.keys())
                if part in n
            ]
            groups.append({"params": tensors, "lr": lr * factor})
    return [group for group in groups if group["params"]]


def clip_gradients(grads: Tree, most: float | None) -> dict[str, Tensor]:
    """Return gradients scaled down together to a Euclidean norm of at most ``most``, unless it is None.

    If the norm is not finite they stay unchanged, so that the error is found at its origin.
    The given gradients are not changed.
    """
    if most is None or not grads:
        return dict(grads)
    if not (norm := get_total_norm(list(grads.values()))).isfinite():
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
        optimizer: the phase's optimiser of ``params``.
        training, settings: the settings of local training, of the run and of the phase.
        phase, ctx: the phase, and the context of the client that trains.
        objective: (parameters, batch, ctx) -> the phase's loss.
        data: all training samples and their labels.
        seed: the run's seed.
        observers: observers that receive every step. After the first epoch there are none.
        layers: the model's layers.
        taken: number of the phase's batches before this one.
        samples, loss: number of samples whose gradients were taken, and their summed loss.
    """

    params: Tree
    workspace: Workspace
    optimizer: torch.optim.Optimizer
    training: Training
    settings: Training
    phase: Phase
    ctx: Context
    objective: Callable[..., object]
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
        """Return the gradients of the phase's loss on a batch, for the present parameters that the loss reaches.

        The loss receives the batch unchanged: samples and labels, and further parts if the algorithm's step adds any.
        Its samples and their loss are added to :attr:`samples` and :attr:`loss`.

        Args:
            batch: samples [b, ...], their labels, and any further parts.
            clip: whether the gradients are clipped as the phase says. Turn it off to compute differences of gradients.

        Returns:
            The gradients by the parameters' names.

        Raises:
            NonFiniteError: the loss is NaN or infinite. The message names the layer of the largest weight, or says that
                the batch has features that are not finite.
            UsageError: the loss is no tensor of one number that depends on what trains.
        """
        device_type, is_lower = (
            self.workspace.device.type,
            self.training.precision == "bf16",
        )
        with torch.autocast(device_type, torch.bfloat16) if is_lower else nullcontext():
            loss = self.objective(self.workspace.params, batch, self.ctx)
        params = list(self.params.values())
        for param in params:
            param.grad = None
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            location = self.ctx.location(self.phase.name)
            raise UsageError(
                f"{location}: {self.phase.loss} must return a tensor of one number, for the "
                f"whole batch, that depends on what trains; got {loss!r:.80}. Compute it from params, with gradients."
            )
        # lays gradients out in memory as the parameters are, unlike autograd.grad
        loss.backward(inputs=params)
        grads = {
            name: param.grad
            for name, param in self.params.items()
            if param.grad is not None
        }
        for param in params:
            param.grad = None
        value, size = loss.item(), len(batch[1])
        if not math.isfinite(value):
            location = self.ctx.location(self.phase.name)
            origin = self._origin(batch[0])
            raise NonFiniteError(
                f"{location}: the loss of step {self.taken + 1} is {value}. {origin}"
            )
        self.loss += value * size
        self.samples += size
        return clip_gradients(grads, self.settings.max_grad_norm if clip else None)

    def _origin(self, x: Tensor) -> str:
        """Return why a loss is not finite: features of the batch [b, ...] are not, or the layer of the largest weight.

        A gradient that is not finite makes weights so, and then the loss of the next step.
        """
        if not tree.is_finite(x):
            return "The batch has features that are not finite."
        params = self.workspace.params.items()
        sizes = {n: float(p.detach().abs().max()) for n, p in params if p.numel()}
        name = max(sizes, key=lambda n: (not math.isfinite(sizes[n]), sizes[n]))
        layer_text = tensor_in_layer(name, self.layers)
        hint = ""
        if self.taken:
            hint = " Use a smaller lr."
        return f"The largest weight is {sizes[name]:.3g} in {layer_text}.{hint}"

    def plain(self, batch: Batch, ctx: Context) -> None:
        """Take the optimiser's step along the loss's gradient. Observers get the gradient before it is clipped.

        Args:
            batch: samples [b, ...] and their labels.
            ctx: the client's context, which is not used.
        """
        self.descend(self.gradients(batch, clip=False), clip=True)

    def descend(self, grads: Tree, clip: bool = False) -> None:
        """Take the optimiser's step along these gradients; a parameter without one stays the same.

        Args:
            grads: gradients by the parameters' names. Observers receive them as they are.
            clip: whether the gradients are then clipped as the phase says.
        """
        for observer in self.observers:
            observer.update(self.workspace.params, grads)
        if clip:
            grads = clip_gradients(grads, self.settings.max_grad_norm)
        for name, param in self.params.items():
            param.grad = grads.get(name)
        self.optimizer.step()
        for param in self.params.values():
            param.grad = None

    def descend_copy(self, name: str, copy: Tree, grads: Tree) -> None:
        """Take a step of copied parameters that the algorithm keeps, by an optimiser like the phase's.

        Args:
            name: name of the copy. Each has its own optimiser from the phase's first batch to its last.
            copy: the parameters, changed in place. Pass the same tensors in every step.
            grads: the gradients to follow.
        """
        if name not in self._copies:
            tensors = {key: copy[key] for key in self.params}
            groups = _parameter_groups(self.phase, tensors, self.settings)
            self._copies[name] = self.settings.build(groups)
        for key in self.params:
            copy[key].grad = grads.get(key)
        self._copies[name].step()
        for key in self.params:
            copy[key].grad = None

    def draw(self, stream: str) -> Batch:
        """Draw a further batch of the client's training samples, without replacement within the batch.

        Args:
            stream: name of a random stream. Each call continues it, independently of the phase's own batches.

        Returns:
            Samples [b, ...] and their labels, where b is the run's batch size, or all samples if there are fewer.
        """
        x, y = self.data
        order = torch.randperm(
            len(y), generator=self.generator("batches", f"/{stream}")
        )
        batch_indices = order[: self.training.batch_size].to(y.device)
        return x[batch_indices], y[batch_indices]

    def generator(self, purpose: str, stream: str = "") -> torch.Generator:
        """Return the phase's random generator for a purpose, on the CPU; it continues from step to step.

        Args:
            purpose: name of what is drawn, such as ``views``.
            stream: a suffix for a further generator of the same purpose.
        """
        key = purpose + stream
        if key not in self._draws:
            stream_name = f"{self.phase.batch_stream}{stream}"
            self._draws[key] = seeds.torch_generator(
                self.seed, purpose, self.ctx.round, self.ctx.client, stream_name
            )
        return self._draws[key]
