"""The loss for outputs and labels of any form, and checks that they fit each other.

Runs and measurements both use it. :mod:`fl_core.models.adapter` defines the possible
inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError, about, listing, warn
from fl_core.models.adapter import IGNORED, Layout, adapt, output_of, pack
from fl_core.models.building import fitting
from fl_core.rows import CLASSIFICATION, OWN, POSITIONS, REGRESSION
from fl_core.seeds import torch_seeded
from fl_core.training import losses
from fl_core.training.losses import Loss
from fl_core.tree import copied, in_mode, plain

if TYPE_CHECKING:
    from fl_core.data import FederatedData

_COUPLED = (nn.CrossEntropyLoss, nn.NLLLoss)
_SIGMOIDS = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
_SIGNS = (nn.SoftMarginLoss, nn.HingeEmbeddingLoss)
"""Losses of targets of -1 and 1, which have no score but the loss."""
_LANGUAGE = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' classes whose outputs predict the next token."""
_FLAT, _HALVINGS = 1e-6, 50
"""The sum of slopes up to which a loss counts as the least, and the halvings of a search by bisection."""


@dataclass(frozen=True)
class FittedLoss(Loss):
    """A loss of flat outputs [n, outputs] for outputs and labels of any shape.

    Training takes a torch loss's own value of a batch, and the mean over samples of any other loss. Scores and metrics
    take :meth:`per_sample`: a sample's loss is the mean over its entries, or over its positions that count. For a torch
    loss with ``reduction="sum"`` or ``"batchmean"`` it is the sum. A callable returns each sample's loss, [n], which
    may depend on the others of the batch.

    Attributes:
        base: a loss of :mod:`fl_core.training.losses`, a torch loss, or a callable.
        shape: shape of one sample's output, as the model gives it.
        axis: the axis of the classes in a batch's outputs; None without such an axis.
        kind: the task: one of :data:`fl_core.rows.TASKS`, or
            :data:`~fl_core.rows.POSITIONS`, or :data:`~fl_core.rows.OWN`.
        ignored: the label of positions that do not count.
        next_tokens: whether the output at a token is compared with the next label.
        joined: the layout of several outputs side by side in the flat ones, which a
            callable takes as a dict or tuple. None for a single output.
    """

    base: Any
    shape: tuple[int, ...]
    axis: int | None = None
    kind: str = REGRESSION
    ignored: int = IGNORED
    next_tokens: bool = False
    joined: Layout | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        loss_name = getattr(self.base, "name", None) or type(self.base).__name__
        return str(getattr(self.base, "__name__", loss_name))

    @property
    def task(self) -> str:  # type: ignore[override]
        return self.kind

    @property
    def classes(self) -> int:
        """Return the number of classes of each label; 1 without an axis of classes."""
        if self.axis is None:
            return 1
        return self.shape[self.axis - 1]

    def outputs(self, n_classes: int) -> int:
        return prod(self.shape)

    def base_rate(self, y: Tensor) -> Tensor:
        """Return the constant output that predicts labels y best, float64 [outputs].

        For classes it holds, at each position, the logarithms of the smoothed shares (n_k + 1) / (n + C) of all labels.
        Labels that are ignored do not count. For the shares of ``KLDivLoss`` n_k is the sum of class k's shares. For
        other labels the output has the least loss. L-BFGS finds it. Where the loss has kinks, bisections of the slope
        go on from there, for each output by itself.

        Args:
            y: the labels, [n, ...].
        """
        if self.axis is not None:
            counts = torch.bincount(y[y != self.ignored], minlength=self.classes) + 1
            shares = counts.double() / counts.sum()
            return shares.log().repeat(prod(self.shape) // self.classes)
        if isinstance(self.base, nn.KLDivLoss):  # other outputs are no probabilities
            sums = self.targets(y).double().sum(0).reshape(self.shape) + 1
            return (sums / sums.sum(0)).log().flatten()

        def loss(z: Tensor) -> Tensor:
            return self(z.expand(len(y), -1), y)

        def slope(z: Tensor) -> Tensor:
            z = z.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(z), z)
            return gradient

        def closure() -> Tensor:
            z.grad = slope(z)
            return loss(z).detach()

        starts = [torch.zeros(1, prod(self.shape), dtype=torch.float64)]
        if y.numel() == len(y) * prod(self.shape):  # such as rates, which are above 0
            starts.append(y.double().reshape(len(y), -1).mean(0, keepdim=True))
        z = min(starts, key=loss).requires_grad_()
        torch.optim.LBFGS(
            [z],
            max_iter=200,
            tolerance_grad=1e-9,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        ).step(closure)
        z = z.detach()
        if slope(z).abs().sum() > _FLAT:
            reach = y.double().max() - y.double().min()
            low, high = z - reach, z + reach
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                falls = slope(middle) < 0
                low, high = low.where(~falls, middle), high.where(falls, middle)
            z = min(z, (low + high) / 2, key=loss)
        return z[0]

    def labels(self, y: Tensor) -> Tensor:
        """Return the labels that outputs are compared with, in the shape of y.

        With ``next_tokens`` they are those of the next position, and the last one is ignored. Otherwise they are y.
        """
        if not self.next_tokens:
            return y
        ignored = getattr(self.base, "ignore_index", self.ignored)
        return nn.functional.pad(y[:, 1:], (0, 1), value=ignored)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        if self._reduction in (None, "none"):
            return super().__call__(logits, y)
        y = self.labels(y)
        ignored = getattr(self.base, "ignore_index", None)
        if ignored is not None and bool((y == ignored).all()):
            return self.per_sample(logits, y).mean()  # torch gives 0 / 0
        output, y = self._pair(logits, y)
        value: Tensor = self._copy(logits, self.base.reduction)(output, y)
        return value

    def mean_of_samples(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().__call__(logits, y)

    @property
    def _reduction(self) -> str | None:
        """Return the reduction of a torch loss; None for other losses."""
        if isinstance(self.base, Loss):
            return None
        reduction: str | None = getattr(self.base, "reduction", None)
        return reduction

    def _copy(self, logits: Tensor, reduction: str) -> Any:
        """Return the torch loss with another reduction, its weights in the logits' type and on their device."""
        base: Any = copy.deepcopy(self.base).to(logits)
        base.reduction = reduction
        return base

    def _pair(self, logits: Tensor, y: Tensor) -> tuple[Any, Tensor]:
        """Return outputs and labels as the torch loss takes them.

        If there are as many labels as outputs, the labels get the shape of the outputs.
        They get their type too, unless they are lists of classes.
        """
        output = self._output(logits, y)
        if output.numel() != y.numel():
            return output, y
        y = y.reshape(output.shape)  # [n] and [n, 1] would broadcast
        if isinstance(self.base, nn.MultiLabelMarginLoss):
            return output, y  # lists of classes
        return output, y.to(output.dtype)

    def notes(self) -> list[str]:
        """Return a note if a torch loss's mean over a batch is no mean over its samples.

        The result is a list, which is empty otherwise.
        """
        ignored = getattr(self.base, "ignore_index", IGNORED)
        has_weights = isinstance(self.base, _COUPLED) and self.base.weight is not None
        reasons = {
            "weight": has_weights,
            "ignore_index": ignored != IGNORED,
            "reduction='sum'": self._reduction == "sum",
        }
        settings = [name for name, applies in reasons.items() if applies]
        if not settings:
            return []
        return [
            f"{self.name} with {listing(settings)}: training takes its own value of a batch. Scores and metrics "
            "take the mean of the samples' losses"
        ]

    def logits(self, outputs: Tensor) -> Tensor:
        """Return predictions in the targets' unit: probabilities of soft labels, and rates of counts.

        Outputs of other losses are returned unchanged.

        >>> soft = FittedLoss(nn.CrossEntropyLoss(), (2,))
        >>> soft.logits(torch.tensor([[0.0, 0.0]]))
        tensor([[0.5000, 0.5000]])
        """
        if self.kind != REGRESSION:
            return outputs
        if self.has_classes:
            shaped_outputs = outputs.reshape(len(outputs), *self.shape)
            shares = (
                shaped_outputs.softmax(1)
                if isinstance(self.base, _COUPLED)
                else shaped_outputs.exp()
            )
            return shares.reshape(outputs.shape)
        if isinstance(self.base, _SIGMOIDS):
            return outputs.sigmoid()
        log_rates = isinstance(self.base, nn.PoissonNLLLoss) and self.base.log_input
        if log_rates:
            return outputs.exp()
        return outputs

    @property
    def has_classes(self) -> bool:
        """Return whether targets are shares of classes, such as soft labels, [n, C]."""
        shares = isinstance(self.base, (*_COUPLED, nn.KLDivLoss))
        return self.kind == REGRESSION and shares

    def targets(self, y: Tensor) -> Tensor:
        """Return the targets in the unit of :meth:`logits`.

        They are exp(y) for ``KLDivLoss(log_target=True)``, whose targets are log-probabilities, otherwise y.
        """
        log = isinstance(self.base, nn.KLDivLoss) and self.base.log_target
        if log:
            return y.exp()
        return y

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        y, base = self.labels(y), self.base
        reduction = getattr(base, "reduction", None)
        is_counted = y != getattr(base, "ignore_index", self.ignored)
        if isinstance(base, Loss):
            labels = y if self.axis is None else y.where(is_counted, 0)
            values = base.per_sample(
                logits.reshape(-1, self.classes), labels.reshape(-1)
            )
        elif reduction is None:
            return torch.as_tensor(base(self._output(logits, y), y))
        else:
            values = self._copy(logits, "none")(*self._pair(logits, y))
        values, is_counted = values.reshape(len(y), -1), is_counted.reshape(len(y), -1)
        is_summed = reduction in ("sum", "batchmean")
        if self.axis is None or values.shape != is_counted.shape:
            if is_summed:
                return values.sum(1)
            return values.mean(1)
        sums = (values * is_counted).sum(1)
        if is_summed:
            return sums
        return sums / is_counted.sum(1).clamp_min(1)

    def _output(self, z: Tensor, y: Tensor) -> Any:
        """Return flat outputs in the model's own form, with a torch loss's classes at axis 1."""
        if self.axis is not None:
            axis = self.axis
            if isinstance(self.base, _COUPLED):
                axis = 1
            return z.reshape(*y.shape, self.classes).movedim(-1, axis)
        if self.joined is not None:
            positional_parts, named_parts = self.joined.unpack(z, z.dtype)
            return named_parts or positional_parts
        return z.reshape(len(z), *self.shape)

    def check_batch(self, z: Tensor, y: Tensor) -> None:
        """Check that outputs z and labels y fit each other, and that the loss returns one number for each sample.

        Args:
            z: flat outputs, [n, outputs].
            y: labels, [n, ...].

        Raises:
            UsageError: a label is no class, sizes differ, or the loss has another shape than [n].
        """
        labels = y[y != self.ignored]
        if self.axis and len(labels):
            rows = z.new_zeros(len(labels), self.classes)
            losses.CrossEntropy().check_batch(rows, labels)
        if self.kind != OWN and z.numel() != y.numel() * self.classes:
            got_shape = list(y.shape[1:])
            raise UsageError(
                f"outputs must have {self.classes} numbers for each of the labels' entries "
                f"{got_shape}; got {z[0].numel()} numbers a sample."
            )
        values = self.per_sample(z, y)
        if values.shape != y.shape[:1]:
            got_shape = list(values.shape)
            raise UsageError(
                f"loss {self.name} must return a number for each sample, [n]; got {got_shape}. "
                "Leave out the mean, as reduction='none' does."
            )


def class_axis_of(output: Tensor, y: Tensor, given_axis: int | None = None) -> int:
    """Return the axis that holds the classes in outputs: 1 or the last. The other axes are those of labels y [n, ...].

    >>> class_axis_of(torch.zeros(2, 7, 3), torch.zeros(2, 7))
    2
    >>> class_axis_of(torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8))
    1

    Args:
        output: outputs in the model's own form, [n, C, ...] or [n, ..., C].
        y: labels, [n, ...].
        given_axis: the axis, if several fit the sizes. A negative one counts from the end.

    Raises:
        UsageError: no axis fits, or two do.
    """
    positions, last_axis = y.shape[1:], output.ndim - 1
    fitting_axes = [
        axis
        for axis in dict.fromkeys((1, last_axis))
        if output.ndim == y.ndim + 1
        and output.shape[1:axis] + output.shape[axis + 1 :] == positions
    ]
    if given_axis is not None:
        fitting_axes = [
            axis for axis in fitting_axes if given_axis in (axis, axis - output.ndim)
        ]
    if len(fitting_axes) == 1:
        return fitting_axes[0]
    advice = "Write y[:, 0] for one label in a column."
    if fitting_axes:
        advice = "Two axes fit: pass options={'class_axis': 1} as in torch, or -1."
    output_shape = list(output.shape)
    label_shape = list(y.shape)
    raise UsageError(
        f"outputs must be [n, *positions, C] or [n, C, *positions]; got {output_shape} for labels "
        f"{label_shape}. {advice}"
    )


def _joined(output: Any, single: Callable[[], Any]) -> Layout | None:
    """Return how several outputs are laid out side by side in one flat tensor.

    The result is None for one tensor, for an output with logits, and if too few parts
    can be joined. A dict must have two parts that can. A tuple or list must have at least
    two parts, and all must be such.

    Args:
        output: the output for a few samples, in the model's own form.
        single: a function that returns the output for the first sample alone. A part is
            left out if its size for a sample then differs, such as similarities [n, n].
            A warning names the parts of a dict that are left out.
    """
    is_mapping = isinstance(output, Mapping)
    if hasattr(output, "logits") or not isinstance(output, Mapping | tuple | list):
        return None
    outputs, single_output = dict(output if is_mapping else enumerate(output)), single()
    sample_parts = {
        key: output_part
        for key, output_part in outputs.items()
        if isinstance(output_part, Tensor)
        and output_part.is_floating_point()
        and output_part.ndim
        if output_part.shape[1:] == single_output[key].shape[1:]
    }
    if "logits" in sample_parts or len(sample_parts) < (
        2 if is_mapping else max(2, len(outputs))
    ):
        return None
    if left_keys := outputs.keys() - sample_parts.keys():
        left_names = listing(sorted(left_keys))
        warn(
            f"the loss takes {listing(sample_parts)}, and not {left_names}: not numbers of one shape for "
            "each sample"
        )
    return pack(sample_parts if is_mapping else [*sample_parts.values()])[1]


def fit_loss(
    loss: Any,
    model: nn.Module,
    output: Any,
    y: Tensor,
    single: Callable[[], Any],
    class_axis: int | None = None,
    ignored: int = IGNORED,
) -> Loss:
    """Return a loss in the form that fits a model's outputs and labels.

    If none is given, it is cross-entropy for integers and mse for numbers. A
    :class:`FittedLoss` is returned unchanged.

    Args:
        loss: a name, a loss of :mod:`fl_core.training.losses`, a torch module, a
            callable, or None for the default.
        model: the model, whose class tells whether it predicts the next token.
        output: the output for the first samples, in the model's own form.
        y: labels of the same samples, [n, ...].
        single: a function that returns the output for the first sample alone.
        class_axis: the axis of the classes, if several fit the sizes.
        ignored: the label of positions that do not count.

    Raises:
        UsageError: outputs and labels do not fit, or the loss is none of these.
    """
    is_named = loss is None or isinstance(loss, str)
    if isinstance(loss, type) or not (is_named or callable(loss)):
        raise UsageError(
            f"loss must be a name, a torch loss or a callable loss(output, y); got {loss!r:.80}."
        )
    if isinstance(loss, FittedLoss):
        return loss
    is_users = not is_named and not isinstance(loss, Loss)
    if is_users and ignored == IGNORED:
        ignored = getattr(loss, "ignore_index", ignored)
    if (
        is_users
        and not hasattr(loss, "reduction")
        and (layout := _joined(output, single))
    ):
        width = sum(map(prod, layout.shapes))
        return FittedLoss(loss, (width,), kind=OWN, joined=layout)
    output = output_of(output, model)
    are_plain = output.is_floating_point() and output.layout == torch.strided
    if not are_plain or not output.ndim or len(output) != len(y):
        output_shape = list(output.shape)
        raise UsageError(
            f"outputs must be floating numbers, with an entry for each sample; got {output.dtype}, {output.layout}, "
            f"{output_shape} for {len(y)} samples. Return logits [n, C]."
        )
    are_numbers = y.is_floating_point()
    has_positions = not are_numbers and y.ndim > 1 and output.shape != y.shape
    if loss is None and are_numbers and output.ndim == 2 and output.shape[1] > 1:
        are_whole = bool((y == y.round()).all())
        if are_whole and y.shape in (output.shape, output.shape[:1]):
            advice = "Write y.long()."
            if y.ndim > 1:
                advice = "Write y.argmax(1) if it is one-hot, or name the loss, such as loss='mse'."
            got_shape = list(y.shape)
            raise UsageError(
                f"labels must be class indices [n] for {output.shape[1]} outputs; got {y.dtype} {got_shape}. {advice}"
            )
    if is_named:
        loss = losses.build(loss or ("mse" if are_numbers else "cross_entropy"))
    shape = tuple(output.shape[1:])
    # a callable may have its own use for several labels
    if has_positions and (
        output.ndim > y.ndim if is_users else loss.task == CLASSIFICATION
    ):
        axis = class_axis_of(output, y, class_axis)
        is_shifted = y.ndim == 2 and type(model).__name__.endswith(_LANGUAGE)
        return FittedLoss(loss, shape, axis, POSITIONS, ignored, is_shifted)
    if is_users and y.ndim == 1 and not are_numbers and output[0].numel() > 1:
        return FittedLoss(loss, shape, 1, CLASSIFICATION)
    if is_users:
        has_same_size = (
            are_numbers and output.numel() == y.numel() and not isinstance(loss, _SIGNS)
        )
        return FittedLoss(loss, shape, kind=REGRESSION if has_same_size else OWN)
    if loss.task == REGRESSION and (output.ndim != 2 or y.ndim != 1):
        return FittedLoss(loss, shape)
    if output.ndim > 2:
        output_shape = list(output.shape)
        raise UsageError(
            f"outputs must be logits [n, C] for labels [n]; got {output_shape}."
        )
    return loss


def adapted(model: nn.Module, output: Any, loss: Loss) -> Any:
    """Return the model in a form whose outputs are flat, [n, outputs], as the loss takes them.

    A model whose outputs already have this form is returned itself.

    Args:
        model: the model.
        output: the output for a few samples, in the model's own form.
        loss: the loss, as :func:`fit_loss` returns it.
    """
    form = None
    if isinstance(loss, FittedLoss):
        form = loss.joined or loss.axis
    if isinstance(output, Tensor) and output.ndim == 2 and form is None:
        return model
    return adapt(model, None, form)


def fit_module(
    model: nn.Module, data: FederatedData, loss: Any
) -> tuple[nn.Module, Loss]:
    """Return a user's module with flat outputs, and a loss in the form that fits them.

    With a loss of :mod:`fl_core.training.losses`, and one label or number for each sample, both are returned unchanged.

    Args:
        model: the user's module, which is copied unless it is returned unchanged.
        data: the federation. Two training samples of its first client are passed through the model.
        loss: as for :func:`fit_loss`.

    Raises:
        UsageError: outputs, labels and loss do not fit each other.
    """
    if isinstance(loss, Loss) and not data.kind:
        return model, loss
    adapted_model = adapt(
        copied(plain(model)).cpu(), getattr(data.shape, "layout", None)
    )
    split = data.clients[0].train
    x, y = split.x[:2], split.y[:2]
    with (
        fitting(adapted_model, x),
        in_mode(adapted_model, False),
        torch.no_grad(),
        torch_seeded(0),
    ):
        output = adapted_model.own(x)
        loss = fit_loss(
            loss, adapted_model, output, y, lambda: adapted_model.own(x[:1])
        )
        z = adapted(adapted_model, output, loss)(x)
    with about(f"loss {loss.name}", Exception, way="Correct or name another."):
        loss.check_batch(z, y)
        loss(z, y)
    return adapted(adapted_model, output, loss), loss
