"""Tools for training steps that algorithms write themselves: several gradients, further batches, copied weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from fl_core import seeds, tree
from fl_core.errors import NonFiniteError
from fl_core.layers import tensor_in_layer
from fl_core.training.context import Context
from fl_core.training.phases import Observer, Phase, Training

if TYPE_CHECKING:
    from fl_core.layers import Layer
    from fl_core.training.workspace import Workspace

Batch = tuple[Tensor, Tensor]  # x [b, ...], y [b]


def clip_gradients(grads: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """Gradients scaled down together to a Euclidean norm of at most ``most``.

    If the norm is not finite they stay unchanged, so that the error is found at its origin.
    """
    if not grads or not (norm := get_total_norm(list(grads.values()))).isfinite():
        return dict(grads)
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    return {name: grad * scale for name, grad in grads.items()}


class Steps:
    """The tools of a training step: parameters, gradients, optimiser steps, further batches.

    The step is a method of the algorithm, named by :attr:`~.phases.Phase.step`, and takes this object, the phase's next
    batch and the context. Without one it is :meth:`plain`.

    Attributes:
        params: the parameters that train, by name: the model's own, to be changed in place without gradients.
        live: all of the model's tensors, by name.
        optimizer: the phase's, over ``params``.
        training: the run's local training.
        longest: norm to which gradients are clipped, or None.
        taken: batches of the phase that were taken before this one.
    """

    def __init__(
        self,
        phase: Phase,
        workspace: Workspace,
        params: Mapping[str, Tensor],
        objective: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        training: Training,
        ctx: Context,
        data: Batch,
        seed: int,
        observers: Sequence[Observer],
        layers: Sequence[Layer],
    ) -> None:
        self.params, self.optimizer, self.training = params, optimizer, training
        self.longest = training.grad_norm_limit(phase)
        self._inputs, self.live = workspace.params, workspace.live
        self.taken, self.samples, self.loss = (
            0,
            0,
            0.0,
        )  # samples whose gradient was taken, and their summed loss
        self._phase, self._objective, self._ctx, self._seed = (
            phase,
            objective,
            ctx,
            seed,
        )
        self._data, self._observers, self._layers = data, observers, layers
        self._draws: dict[str, torch.Generator] = {}
        self._copies: dict[str, torch.optim.Optimizer] = {}

    def gradients(self, batch: tuple[Any, ...], clip: bool = True) -> dict[str, Tensor]:
        """Gradients of the phase's loss on a batch, at the present parameters, for parameters that the loss reaches.

        The loss gets the batch as it is given: samples and labels, and whatever else the two have agreed on.

        Args:
            clip: whether the gradients are clipped as the phase asks; not where differences are taken of them.

        Raises:
            NonFiniteError: the loss is NaN or infinite. The error names the layer of the largest weight.
        """
        loss = self._objective(self._inputs, batch, self._ctx)
        params = list(self.params.values())
        for param in params:
            param.grad = None
        if loss.requires_grad:
            loss.backward(
                inputs=params
            )  # lays gradients out in memory as the parameters are, unlike autograd.grad
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
            where = f"{self._ctx.location(self._phase.name)}: at step {self.taken + 1}, the loss is {value}"
            raise NonFiniteError(f"{where}; {self._origin(batch[0])}")
        self.loss, self.samples = self.loss + value * size, self.samples + size
        return (
            clip_gradients(reached, self.longest)
            if clip and self.longest is not None
            else reached
        )

    def _origin(self, x: Tensor) -> str:
        """Return why a loss is not finite: features of the batch [b, ...] are not, or the layer of the largest weight.

        A gradient that is not finite makes weights so, and then the loss of the next step.
        """
        if not tree.is_finite(x):
            return "the batch has features that are not finite"
        largest = {
            name: float(weights.detach().abs().max())
            for name, weights in self._inputs.items()
            if weights.numel()
        }
        name = max(
            reversed(largest),
            key=lambda name: (not math.isfinite(largest[name]), largest[name]),
        )
        hint = " Use a smaller lr." if self.taken else ""
        return f"the largest weight is {largest[name]:.3g} in {tensor_in_layer(name, self._layers)}.{hint}"

    def plain(self, batch: Batch, ctx: Context) -> None:
        """Take the step of a phase that names none: observers get the gradients as they are before clipping."""
        self.descend(self.gradients(batch, clip=False), clip=True)

    def descend(self, grads: Mapping[str, Tensor], clip: bool = False) -> None:
        """Take the optimiser's step along these gradients; a parameter without one stays the same."""
        for observer in self._observers:
            observer.update(self._inputs, grads)
        if clip and self.longest is not None:
            grads = clip_gradients(grads, self.longest)
        for name, param in self.params.items():
            param.grad = grads.get(name)
        self.optimizer.step()
        for param in self.params.values():
            param.grad = None

    def descend_copy(
        self, name: str, copy: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> None:
        """Take a step of copied parameters that the algorithm keeps, by an optimiser like the phase's.

        Args:
            name: of the copy, which has an optimiser of its own from the phase's first batch to its last.
            copy: changed in place; the same tensors in every step, among others perhaps. grads: along which it goes.
        """
        if name not in self._copies:
            tensors = [copy[key] for key in self.params]
            self._copies[name] = self.training.build(tensors, *self._phase.rates)
        for key in self.params:
            copy[key].grad = grads.get(key)
        self._copies[name].step()
        for key in self.params:
            copy[key].grad = None

    def draw(self, stream: str) -> Batch:
        """Draw a further batch without replacement, independent of the phase's own: the next of the named stream."""
        x, y = self._data
        order = torch.randperm(
            len(y), generator=self.generator("batches", f"/{stream}")
        )
        chosen = order[: self.training.batch_size].to(y.device)
        return x[chosen], y[chosen]

    def generator(self, purpose: str, stream: str = "") -> torch.Generator:
        """The phase's random generator for a purpose, on the CPU; it continues from step to step."""
        if purpose + stream not in self._draws:
            parts = (
                self._ctx.round,
                self._ctx.client,
                f"{self._phase.batch_stream}{stream}",
            )
            self._draws[purpose + stream] = seeds.torch_generator(
                self._seed, purpose, *parts
            )
        return self._draws[purpose + stream]
