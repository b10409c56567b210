"""What a model's outputs, labels and a loss may be together, and the loss that fits them.

Runs and diagnoses ask here. :mod:`fl_core.models.adapter` says what inputs may be.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fl_core.errors import UsageError
from fl_core.models.adapter import IGNORED, adapt, output_of
from fl_core.models.building import fitting
from fl_core.rows import CLASSIFICATION, POSITIONS, REGRESSION
from fl_core.seeds import torch_seeded
from fl_core.training import losses
from fl_core.training.losses import Loss
from fl_core.tree import copied, in_mode, plain

if TYPE_CHECKING:
    from fl_core.data import FederatedData

_COUPLED = (nn.CrossEntropyLoss, nn.NLLLoss)
_LANGUAGE = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' classes whose outputs predict the next token."""


@dataclass(frozen=True)
class FittedLoss(Loss):
    """A loss of any outputs and labels, as a loss of flat outputs [n, outputs].

    A sample's loss is the mean over its entries, or over its positions that count. A torch
    loss with ``reduction="sum"`` is summed. A callable is called for each sample alone.

    Attributes:
        base: a loss of :mod:`fl_core.training.losses`, a torch loss, or a callable.
        shape: of one sample's output, as the model gives it.
        axis: the axis of the classes if each position has a label.
        kind: the task.
        ignored: the label of positions that do not count.
        next_tokens: whether the output at a token is compared with the next label.
    """

    base: Any
    shape: tuple[int, ...]
    axis: int | None = None
    kind: str = REGRESSION
    ignored: int = IGNORED
    next_tokens: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        base = self.base
        if isinstance(base, Loss):
            where = "" if self.axis is None else ", mean over positions"
            return f"{base.name}{where}"
        kind = getattr(base, "__name__", type(base).__name__)
        how = getattr(base, "reduction", None)
        return f"{kind}, {how} over a sample" if how else kind

    @property
    def task(self) -> str:  # type: ignore[override]
        return self.kind

    @property
    def classes(self) -> int:
        """Return the number of classes of a position; 1 for numbers."""
        return 1 if self.axis is None else self.shape[self.axis - 1]

    def outputs(self, n_classes: int) -> int:
        return prod(self.shape)

    def base_rate(self, y: Tensor) -> Tensor:
        """Return the constant output that is best without features, float64 [outputs]."""
        if self.axis is None:
            return y.double().mean(0).flatten()
        counts = torch.bincount(y[y != self.ignored], minlength=self.classes) + 1
        shares = counts.double() / counts.sum()
        return shares.log().repeat(prod(self.shape) // self.classes)

    def labels(self, y: Tensor) -> Tensor:
        """Return the labels that outputs are compared with."""
        if not self.next_tokens:
            return y
        return nn.functional.pad(y[:, 1:], (0, 1), value=self.ignored)

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        y, base = self.labels(y), self.base
        how = getattr(base, "reduction", None)
        if isinstance(base, Loss):
            counts = y != self.ignored
            labels = y if self.axis is None else y.where(counts, 0)
            values = base.per_sample(
                logits.reshape(-1, self.classes), labels.reshape(-1)
            )
        elif how is None:
            return self._each(logits, y)
        else:
            alone: Any = copy.deepcopy(base).to(logits)  # weights of classes, too
            alone.reduction = "none"
            counts = y != getattr(base, "ignore_index", self.ignored)
            output = self._output(logits, y)
            if output.numel() == y.numel():  # [n] and [n, 1] would broadcast
                y = y.to(output.dtype).reshape(output.shape)
            values = alone(output, y)
        values, counts = values.reshape(len(y), -1), counts.reshape(len(y), -1)
        if self.axis is None or values.shape != counts.shape:
            return values.sum(1) if how == "sum" else values.mean(1)
        total = (values * counts).sum(1)
        return total if how == "sum" else total / counts.sum(1).clamp_min(1)

    def _output(self, z: Tensor, y: Tensor) -> Any:
        """Return flat outputs in the model's own form, with a torch loss's classes at axis 1."""
        if self.axis is not None:
            axis = 1 if isinstance(self.base, _COUPLED) else self.axis
            return z.reshape(*y.shape, self.classes).movedim(-1, axis)
        return z.reshape(len(z), *self.shape)

    def _each(self, logits: Tensor, y: Tensor) -> Tensor:
        def one(z: Tensor, label: Tensor) -> Tensor:
            output = self._output(z[None], label[None])
            return torch.as_tensor(self.base(output, label[None])).mean()

        try:
            return vmap(one)(logits, y)
        except RuntimeError:  # an operation that torch cannot batch, such as .item()
            return torch.stack(
                [one(z, label) for z, label in zip(logits, y, strict=True)]
            )

    def check_batch(self, z: Tensor, y: Tensor) -> None:
        """Refuse labels that are no classes, other sizes, and a function that mixes samples."""
        if self.axis is not None:
            held = y[y != self.ignored]
            ends = [int(end) for end in held.aminmax()] if held.numel() else []
            wrong = [end for end in ends if not 0 <= end < self.classes]
            if wrong:
                raise UsageError(
                    f"labels must be from 0 to {self.classes - 1}, or {self.ignored} where "
                    f"none counts; got label {wrong[0]}."
                )
        wanted = y.numel() * self.classes
        if (
            isinstance(self.base, Loss) or self.axis is not None
        ) and z.numel() != wanted:
            raise UsageError(
                f"outputs must have {self.classes} numbers for each of the labels' entries "
                f"{list(y.shape[1:])}; got {z[0].numel()} numbers a sample."
            )
        if isinstance(self.base, Loss | nn.Module):
            return
        values, y = self.per_sample(z, y), self.labels(y)
        whole = torch.as_tensor(self.base(self._output(z, y), y)).detach()
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
    loss: Any,
    model: nn.Module,
    output: Any,
    y: Tensor,
    class_axis: int | None = None,
    ignored: int = IGNORED,
) -> Loss:
    """Return the loss of a model's outputs and labels.

    Without a loss it is cross-entropy for integers and mse for numbers.

    Args:
        loss: a name, a loss of :mod:`fl_core.training.losses`, a torch module or a callable.
        output: of the first samples, in the model's own form.

    Raises:
        UsageError: outputs and labels do not fit, or the loss is none of these.
    """
    known = loss is None or isinstance(loss, str) or callable(loss)
    if isinstance(loss, type) or not known:
        raise UsageError(
            f"loss must be a name, a torch loss or a callable loss(output, y); got {loss!r:.80}."
        )
    if isinstance(loss, FittedLoss):
        return loss
    own = loss is not None and not isinstance(loss, str | Loss)
    output = output_of(output, model)
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
    shape = tuple(output.shape[1:])
    if positions and (own or loss.task == CLASSIFICATION):
        axis = class_axis_of(output, y, class_axis)
        moved = y.ndim == 2 and type(model).__name__.endswith(_LANGUAGE)
        return FittedLoss(loss, shape, axis, POSITIONS, ignored, moved)
    if own:
        kind = CLASSIFICATION if y.ndim == 1 and not numbers else REGRESSION
        return FittedLoss(loss, shape, kind=kind)
    if loss.task == REGRESSION and (output.ndim != 2 or y.ndim != 1):
        return FittedLoss(loss, shape)
    if output.ndim > 2:
        raise UsageError(
            f"outputs must be logits [n, C] for labels [n]; got {list(output.shape)}."
        )
    return loss


def adapted(model: nn.Module, output: Any, loss: Loss) -> Any:
    """Return the model as one whose flat outputs [n, outputs] the loss takes.

    Args:
        output: of a few samples, in the model's own form.
    """
    axis = loss.axis if isinstance(loss, FittedLoss) else None
    if isinstance(output, Tensor) and output.ndim == 2 and axis is None:
        return model
    return adapt(model, None, axis)


def fit_module(
    model: nn.Module, data: FederatedData, loss: Loss
) -> tuple[nn.Module, Loss]:
    """Return a user's module with flat outputs, and its loss of labels at positions or of several numbers.

    They are as they came for one label or number a sample.
    """
    split = data.clients[0].train
    if data.task not in (POSITIONS, REGRESSION) or split.y.ndim == 1:
        return model, loss
    made = adapt(copied(plain(model)).cpu(), getattr(data.shape, "layout", None))
    x = split.x[:2]
    with fitting(made, x), in_mode(made, False), torch.no_grad(), torch_seeded(0):
        output = made.own(x)
    loss = fit_loss(loss, made, output, split.y[:2])
    return adapted(made, output, loss), loss
