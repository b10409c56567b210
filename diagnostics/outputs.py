"""The loss that fits a model's outputs and labels: by name, of torch, or one's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fl_core.errors import UsageError
from fl_core.models.adapter import IGNORED
from fl_core.rows import CLASSIFICATION, REGRESSION
from fl_core.training import losses
from fl_core.training.losses import Loss

POSITIONS = "labels at positions"
"""The task of a sequence or an image whose positions have a class each."""
WIDEST = 256
"""Outputs of a sample up to which an exact trace is computed: it takes as many passes."""

_COUPLED = (nn.CrossEntropyLoss, nn.NLLLoss)


@dataclass(frozen=True)
class PositionLoss(Loss):
    """A loss of classes, averaged over the positions of each sample that count.

    Outputs are [n, positions * C], with the classes last, and labels [n, *positions].
    """

    base: Loss
    classes: int
    ignored: int = IGNORED

    task = POSITIONS

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.base.name}, mean over positions"

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        flat = y.reshape(-1)
        counts = flat != self.ignored
        of_class = logits.reshape(len(flat), -1)
        values = self.base.per_sample(of_class, flat.where(counts, 0)) * counts
        counts = counts.reshape(len(y), -1)
        return values.reshape(len(y), -1).sum(1) / counts.sum(1).clamp_min(1)

    def check_batch(self, z: Tensor, y: Tensor) -> None:
        """Refuse labels that are no classes, and outputs of other positions."""
        held = y[y != self.ignored]
        if held.numel() and not 0 <= int(held.min()) <= int(held.max()) < self.classes:
            wrong = int(held.min()) if int(held.min()) < 0 else int(held.max())
            raise UsageError(
                f"labels must be from 0 to {self.classes - 1}, or {self.ignored} where "
                f"none counts; got label {wrong}."
            )
        if z.numel() != y.numel() * self.classes:
            raise UsageError(
                f"outputs must have {self.classes} classes at each of the labels' "
                f"positions {list(y.shape[1:])}; got {z[0].numel()} numbers a sample."
            )


@dataclass(frozen=True)
class EntryLoss(Loss):
    """A loss of numbers, averaged over all entries of each sample."""

    base: Loss

    task = REGRESSION

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.base.name

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        values = self.base.per_sample(logits.reshape(-1, 1), y.reshape(-1))
        return values.reshape(len(y), -1).mean(1)

    def check_batch(self, z: Tensor, y: Tensor) -> None:
        """Refuse targets of another size."""
        if z.numel() != y.numel():
            raise UsageError(
                f"targets must have the outputs' numbers; got {y[0].numel()} targets "
                f"and {z[0].numel()} outputs a sample."
            )


@dataclass(frozen=True)
class OwnLoss(Loss):
    """A torch loss module, or a callable ``loss(output, y)``, sample by sample.

    A module is computed with ``reduction="none"``. With "sum" a sample's loss is the sum
    of its entries, else their mean. Positions that a module ignores do not count. A
    callable is called for each sample alone.

    Attributes:
        shape: of one sample's output, as the model gives it.
        class_axis: the axis that was moved last, if any.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    shape: tuple[int, ...]
    class_axis: int | None = None
    kind: str = REGRESSION

    @property
    def name(self) -> str:  # type: ignore[override]
        if isinstance(self.function, nn.Module):
            how = getattr(self.function, "reduction", "mean")
            return f"{type(self.function).__name__}, {how} over a sample"
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def task(self) -> str:  # type: ignore[override]
        return self.kind

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        output = self._output(logits, y)
        module = self.function
        if not isinstance(module, nn.Module) or not hasattr(module, "reduction"):
            return self._each(output, y)
        alone: Any = copy.deepcopy(module).to(output)  # weights of classes, too
        alone.reduction = "none"
        if y.is_floating_point():  # [n] and [n, 1] would broadcast
            y = y.to(output.dtype).reshape(output.shape)
        values = alone(output, y).reshape(len(y), -1)
        if module.reduction == "sum":
            return values.sum(1)
        if isinstance(module, _COUPLED) and not y.is_floating_point():
            counts = (y != module.ignore_index).reshape(len(y), -1).sum(1)
            return values.sum(1) / counts.clamp_min(1)
        return values.mean(1)

    def _output(self, z: Tensor, y: Tensor) -> Tensor:
        if self.class_axis is None:
            return z.reshape(len(z), *self.shape)
        classes = self.shape[self.class_axis - 1]
        axis = 1 if isinstance(self.function, _COUPLED) else self.class_axis
        return z.reshape(*y.shape, classes).movedim(-1, axis)

    def _each(self, output: Tensor, y: Tensor) -> Tensor:
        def one(z: Tensor, label: Tensor) -> Tensor:
            return torch.as_tensor(self.function(z[None], label[None])).mean()

        try:
            return vmap(one)(output, y)
        except RuntimeError:  # an operation that torch cannot batch, such as .item()
            return torch.stack(
                [one(z, label) for z, label in zip(output, y, strict=True)]
            )

    def check_batch(self, z: Tensor, y: Tensor) -> None:
        """Refuse a function that is no mean or sum of single samples' losses."""
        if isinstance(self.function, nn.Module):
            return
        values = self.per_sample(z, y)
        whole = torch.as_tensor(self.function(self._output(z, y), y)).detach()
        if bool(values.isfinite().all()) and not any(
            torch.allclose(whole.sum(), total, rtol=1e-3, atol=1e-6)
            for total in (values.mean(), values.sum())
        ):
            raise UsageError(
                f"loss {self.name} must be the mean or sum of each sample's own; got "
                f"{whole.sum().item():g} for {len(y)} samples together, and "
                f"{values.mean().item():g} for the mean of each alone."
            )


def class_axis_of(output: Tensor, y: Tensor, given: int | None = None) -> int:
    """Return the axis of the classes in outputs with the positions of labels y [n, ...].

    >>> class_axis_of(torch.zeros(2, 7, 3), torch.zeros(2, 7))
    2
    >>> class_axis_of(torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8))
    1

    Args:
        given: the axis, where the sizes leave a choice.

    Raises:
        UsageError: no axis fits, or two do.
    """
    positions, last = y.shape[1:], output.ndim - 1
    fitting = [
        axis
        for axis in dict.fromkeys((1, last))
        if output.ndim == y.ndim + 1
        and output.shape[1:axis] + output.shape[axis + 1 :] == positions
    ]
    if given is not None:
        fitting = [axis for axis in fitting if given in (axis, axis - output.ndim)]
    if len(fitting) == 1:
        return fitting[0]
    sizes = f"{list(output.shape)} for labels {list(y.shape)}"
    if fitting:
        raise UsageError(
            f"the classes of outputs {sizes} must be told: two axes fit. Pass "
            "options={'class_axis': 1} as in torch, or -1 as in transformers."
        )
    raise UsageError(
        f"outputs must be [n, *positions, C] or [n, C, *positions]; got {sizes}. "
        "Write y[:, 0] for one label in a column."
    )


def fit_loss(
    loss: Any, output: Tensor, y: Tensor, class_axis: int | None, ignored: int
) -> tuple[Loss, int | None]:
    """Return the loss of a model's outputs and labels, and the axis of the classes.

    The axis is None if a sample has one class or numbers. Without a loss it is
    cross-entropy for integers and mse for numbers.

    Args:
        loss: a name, a loss of :mod:`fl_core.training.losses`, a torch module or a callable.
        output: of the first samples, in the model's own shape.

    Raises:
        UsageError: outputs and labels do not fit, or the loss is none of these.
    """
    if isinstance(loss, type) or not (
        loss is None or isinstance(loss, str) or callable(loss)
    ):
        got = (
            f"the class {loss.__name__}"
            if isinstance(loss, type)
            else type(loss).__name__
        )
        raise UsageError(
            f"loss must be a name, a torch loss or a callable loss(output, y); got {got}."
        )
    if not output.is_floating_point() or output.layout != torch.strided:
        raise UsageError(
            f"outputs must be floating numbers; got {output.dtype}, {output.layout}."
        )
    if not output.ndim or len(output) != len(y):
        raise UsageError(
            f"outputs must have an entry for each sample; got {list(output.shape)} for "
            f"{len(y)} samples. Return logits [n, C]."
        )
    numbers = y.is_floating_point()
    positions = not numbers and y.ndim > 1 and output.shape != y.shape
    axis = class_axis_of(output, y, class_axis) if positions else None
    if loss is None and numbers and output.ndim == 2 and output.shape[1] > 1:
        one_hot = y.shape == output.shape and bool(
            (y.square() == y).all() & (y.sum(1) == 1).all()
        )
        if one_hot or (y.ndim == 1 and bool((y == y.round()).all())):
            way = "argmax(1)" if one_hot else "long()"
            raise UsageError(
                f"labels must be class indices [n] for {output.shape[1]} outputs; got {y.dtype} {list(y.shape)}. "
                f"Write y.{way}, or name the loss, such as loss='mse'."
            )
    if loss is None or isinstance(loss, str):
        loss = losses.build(loss or ("mse" if numbers else "cross_entropy"))
    if not isinstance(loss, Loss):
        task = CLASSIFICATION if y.ndim == 1 and not numbers else REGRESSION
        task = POSITIONS if positions else task
        return OwnLoss(loss, tuple(output.shape[1:]), axis, task), axis
    if axis is not None and loss.task == CLASSIFICATION:
        return PositionLoss(loss, output.shape[axis], ignored), axis
    if loss.task == REGRESSION and (output.ndim != 2 or y.ndim != 1):
        return EntryLoss(loss), axis
    if output.ndim > 2:
        raise UsageError(
            f"outputs must be logits [n, C] for labels [n]; got {list(output.shape)}."
        )
    return loss, axis
