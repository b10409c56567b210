"""Losses by name, each with its mean over a batch and its value for every sample.

A loss is an immutable value. Two with the same options are equal, and a loss can be
pickled. Losses of classes and labels are computed from log-sigmoid and log-softmax,
never from the logarithm of a probability. So values and derivatives of every order stay
finite and exact when a probability rounds to 0 or to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_core.errors import (
    ABOVE_0,
    Bound,
    Positive,
    UsageError,
    at_least,
    check_fields,
    check_known,
    check_options,
    check_value,
    listing,
)
from fl_core.rows import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL


@dataclass(frozen=True)
class Loss:
    """Base of losses. A call returns a scalar, the mean of :meth:`per_sample`.

    The arguments of a call are those of :meth:`per_sample`. Lower is better.

    Attributes:
        task: one of :data:`fl_core.rows.TASKS`. ``y`` holds class indices (int64 [n]), numbers (float32 [n]), times and
            events (float32 [n, 2]), or labels of 0 and 1 (float32 [n, C]).
        couples: whether a sample's loss depends on the other samples of its batch.
        binary: whether there must be two classes.
        single: whether a model has one output, whatever the number of classes.
    """

    name: ClassVar[str]
    task: ClassVar[str] = CLASSIFICATION
    couples: ClassVar[bool] = False
    binary: ClassVar[bool] = False
    single: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self, f"{self.name}: ")

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.per_sample(logits, y).mean()

    def mean_of_samples(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean of :meth:`per_sample` over a batch, a scalar.

        It differs from calling the loss where a torch loss reduces a batch in another way, such as by a sum.
        """
        return self(logits, y)

    def notes(self) -> list[str]:
        """Return warnings for a user of the loss, a line each."""
        return []

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, [n], in the logits' type.

        Args:
            logits: a model's outputs, [n, outputs].
            y: targets of the form that :attr:`task` has, with n rows.
        """
        raise NotImplementedError

    def base_rate(self, y: Tensor) -> Tensor:
        """Return the constant prediction with the least mean loss on numbers, float64 [1].

        Only losses of numbers have it. Others raise NotImplementedError.

        >>> y = torch.tensor([0.0, 0.0, 1.0, 11.0])
        >>> [round(float(build(name).base_rate(y)), 3) for name in ("mse", "mae", "huber")]
        [3.0, 0.5, 0.667]

        Args:
            y: the targets [n], in their unit. There must be at least one.
        """
        raise NotImplementedError

    def outputs(self, n_classes: int) -> int:
        """Return the number of outputs that a model needs for ``n_classes`` classes (0: the targets are numbers)."""
        if self.single:
            return 1
        return n_classes

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of all classes or labels, [n, C], from a model's outputs.

        For numbers they are predictions [n, 1], for survival log hazards [n, 1].
        """
        return outputs

    def of_logits(self) -> Loss:
        """Return the same loss for logits of every class, [n, C], in place of a model's outputs."""
        return self

    def check_batch(self, z: Tensor, y: Tensor) -> None:
        """Check that outputs z and targets y fit each other and the loss, because torch would broadcast other shapes.

        Args:
            z: a model's outputs, [n, outputs].
            y: targets of the form that :attr:`task` has, with n rows.

        Raises:
            UsageError: shapes do not fit, there are no samples, or a label is no class index. The message gives the
                shapes or the label.
        """
        shape = {SURVIVAL: (2,), MULTILABEL: z.shape[1:]}.get(self.task, ())
        has_many = self.task in (REGRESSION, SURVIVAL) and z.shape[-1] > 1
        if z.ndim != 2 or has_many or y.shape != (len(z), *shape) or not len(y):
            target_text = "".join(f", {size}" for size in shape)
            advice = ""
            if self.task == CLASSIFICATION and y.shape == z.shape:
                advice = " Write y.argmax(1) if it is one-hot, or loss='multilabel_bce' for several labels of a sample."
            got_shape = list(z.shape)
            label_shape = list(y.shape)
            raise UsageError(
                f"{self.task} must have outputs [n, C], of one number [n, 1], and targets [n{target_text}]; "
                f"got {got_shape} and {label_shape}.{advice}"
            )
        if self.task != CLASSIFICATION:
            return
        if y.is_floating_point():
            label_shape = list(y.shape)
            raise UsageError(
                f"labels must be class indices [n]; got {y.dtype} {label_shape}. Name the loss of other labels."
            )
        classes = self.logits(z).shape[1]
        wrong_labels = [int(end) for end in y.aminmax() if not 0 <= int(end) < classes]
        if wrong_labels:
            raise UsageError(
                f"labels must be from 0 to {classes - 1}, for {classes} outputs; got label {wrong_labels[0]}. "
                "Number them so, or name another loss."
            )

    def check(self, n_classes: int, task: str = "") -> None:
        """Refuse a task that the loss is not for, and options that do not fit ``n_classes`` classes (0: numbers).

        Args:
            n_classes: number of the data's classes; 0 for numbers.
            task: the data's task; empty means classification, or regression without classes.

        Raises:
            UsageError: the kind of task, the number of classes or the length of a list does not fit.
        """
        task = task or (CLASSIFICATION if n_classes else REGRESSION)
        if self.task != task or (self.binary and n_classes != 2):
            fitting_losses = listing(
                name
                for name, loss_class in LOSSES.items()
                if loss_class.task == task and (n_classes == 2 or not loss_class.binary)
            )
            task_text = {
                CLASSIFICATION: f"{n_classes} classes",
                REGRESSION: "numbers",
            }.get(task, f"task {task}")
            raise UsageError(
                f"loss for {task_text} must be one of {fitting_losses}; got {self.name!r}."
            )


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """The cross-entropy -log p_y of a sample with label y, at least 0; a batch's loss is the mean.

    The probabilities are p = softmax(logits).
    """

    name = "cross_entropy"

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, reduction="none")


@dataclass(frozen=True)
class _Weighted(Loss):
    """Base of both focal losses: the class weights ``alpha`` (one number, or one per class) and ``gamma`` >= 0."""

    gamma: Annotated[float, at_least(0)] = 2.0
    alpha: float | tuple[float, ...] = 1.0

    alphas: ClassVar[Bound] = at_least(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, list):
            object.__setattr__(self, "alpha", tuple(self.alpha))
        for value in self._weights():
            check_value(f"{self.name}: alpha", value, self.alphas)

    def check(self, n_classes: int, task: str = "") -> None:
        super().check(n_classes, task)
        if isinstance(self.alpha, tuple) and len(self.alpha) != n_classes:
            raise UsageError(
                f"{self.name}: alpha must have one weight for each of the {n_classes} classes; got {len(self.alpha)}."
            )

    def _weights(self) -> tuple[float, ...]:
        if isinstance(self.alpha, tuple):
            return self.alpha
        return (self.alpha,)

    def _alpha(self, logits: Tensor) -> Tensor:
        """Return one weight for each class, [C], on the logits' device and in their type."""
        self.check(logits.shape[-1])
        return torch.tensor(
            self._weights(), dtype=logits.dtype, device=logits.device
        ).expand(logits.shape[-1])


@dataclass(frozen=True)
class Focal(_Weighted):
    """The focal loss alpha_y (1 - p_y)^gamma (-log p_y) over C classes.

    It is Eq. 5 of Lin et al., Focal Loss for Dense Object Detection. ``alpha`` is one weight for all classes or a tuple
    of one weight for each class, and ``gamma`` is a number. Both are at least 0. ``gamma`` = 0 and ``alpha`` = 1 give
    cross-entropy. The default ``gamma`` = 2 is the one that they recommend.
    """

    name = "focal"

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        alpha = self._alpha(logits)
        margin = _margin(logits, y, _is_target(logits, y))
        return (
            -alpha[y]
            * torch.exp(self.gamma * F.logsigmoid(-margin))
            * F.logsigmoid(margin)
        )


@dataclass(frozen=True)
class PlayerFocal(_Weighted):
    """The focal loss of PLayer-FL's released code. It is not the standard one.

    10 (-log p_y) (1/C) [alpha_y (1 - p_y)^gamma + sum_{j != y} (1 - alpha_j) p_j^gamma]

    ``alpha`` is one weight for all classes or a tuple of one weight for each class, from 0 to 1. ``gamma`` is at least
    0.

    Every other class contributes too, with the complement of its weight. The value is ten times the mean over samples
    and classes.
    """

    gamma: Annotated[float, at_least(0)] = 3.0

    name = "player_focal"
    alphas = Bound("between 0 and 1", lambda alpha: 0 <= alpha <= 1)

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        alpha = self._alpha(logits)
        target = _is_target(logits, y)
        margin = _margin(logits, y, target)
        # log(1 - p_t): log(1 - p_y) at the label, log p_j elsewhere
        log_rest = torch.where(
            target, F.logsigmoid(-margin).unsqueeze(-1), logits.log_softmax(-1)
        )
        weight = torch.where(target, alpha, 1 - alpha) * torch.exp(
            self.gamma * log_rest
        )
        return -10 * weight.mean(-1) * F.logsigmoid(margin)


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """The cross-entropy -log p_y of two classes for models with a single output z, [n, 1]; at least 0.

    The probabilities are p_1 = sigmoid(z) and p_0 = 1 - p_1.

    It is :class:`CrossEntropy` of the logits (0, z). The prediction is class 1 where p_1 is above 0.5.
    """

    name = "bce"
    binary = True
    single = True

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            logits.squeeze(-1), y.reshape(-1).to(logits.dtype), reduction="none"
        )

    def check_batch(self, z: Tensor, y: Tensor) -> None:
        are_binary = y.is_floating_point() and bool((y.square() == y).all())
        super().check_batch(z, y.reshape(-1).long() if are_binary else y)

    def of_logits(self) -> Loss:
        return CrossEntropy()

    def logits(self, outputs: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(outputs), outputs], dim=-1)


@dataclass(frozen=True)
class _OfNumbers(Loss):
    """Base of the losses of a number: a model has one output, [n, 1], and ``y`` [n] holds targets."""

    task = REGRESSION
    single = True


@dataclass(frozen=True)
class SquaredError(_OfNumbers):
    """The squared error (z - y)^2 of a prediction z [n, 1] and a number y [n]; a batch's loss is the mean."""

    name = "mse"

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.squeeze(-1) - y.to(logits.dtype)) ** 2

    def base_rate(self, y: Tensor) -> Tensor:
        return y.double().mean(0, keepdim=True)


@dataclass(frozen=True)
class AbsoluteError(_OfNumbers):
    """The absolute error ``|z - y|`` of a prediction z [n, 1] and a number y [n]; a batch's loss is the mean."""

    name = "mae"

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.squeeze(-1) - y.to(logits.dtype)).abs()

    def base_rate(self, y: Tensor) -> Tensor:
        return torch.tensor([float(np.median(y.double().numpy()))], dtype=torch.float64)


@dataclass(frozen=True)
class Huber(_OfNumbers):
    """The Huber loss of a prediction z [n, 1] and a number y [n] (Huber 1964); a batch's loss is the mean.

    It is (z - y)^2 / 2 up to ``|z - y| = delta`` > 0, and from there ``delta (|z - y| - delta / 2)``.
    """

    delta: Positive = 1.0

    name = "huber"

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(
            logits.squeeze(-1), y.to(logits.dtype), reduction="none", delta=self.delta
        )

    def base_rate(self, y: Tensor) -> Tensor:
        from scipy.optimize import brentq  # few runs need it

        targets = y.double().numpy()

        def slope(constant: float) -> float:
            return float(np.clip(constant - targets, -self.delta, self.delta).sum())

        # the slope rises, and is 0 between the smallest and the largest target
        constant = brentq(slope, targets.min(), targets.max())
        return torch.tensor([constant], dtype=torch.float64)


@dataclass(frozen=True)
class Cox(Loss):
    """The negative log partial likelihood of proportional hazards, with Breslow's treatment of ties; at least 0.

    ``y`` [n, 2] holds times and events: 1 if the event was seen at that time, 0 if the sample was censored then. The
    single output z is the log relative hazard: a higher one means an earlier event. A sample with an event has the loss
    log sum_{j: t_j >= t_i} exp(z_j) - z_i. Samples of equal time are all at risk (Breslow 1974). Censored samples have
    loss 0. Risk sets come from the batch, so a batch should hold several events. The mean is over all samples.
    """

    name = "cox"
    task = SURVIVAL
    couples = True
    single = True

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        z, (time, event) = logits.squeeze(-1), y.unbind(-1)
        late_first = torch.argsort(-time, stable=True)
        # the last sample of an equal time
        at_risk = torch.searchsorted(-time[late_first], -time, right=True) - 1
        return event.to(z.dtype) * (torch.logcumsumexp(z[late_first], 0)[at_risk] - z)


@dataclass(frozen=True)
class MultiLabel(Loss):
    """The binary cross-entropy averaged over a sample's C labels, for models with one output for each label.

    ``y`` [n, C] holds 0 and 1. The probability of label k is p_k = sigmoid(z_k). The loss is at least 0.
    """

    name = "multilabel_bce"
    task = MULTILABEL

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            logits, y.to(logits.dtype), reduction="none"
        ).mean(-1)


@dataclass(frozen=True)
class ClassWeighted(Loss):
    """A loss of classes, ``base``, in which each sample counts w_y times.

    ``weights`` holds a number w above 0 for each class, in the order of classes. The
    mean over a batch divides by its number of samples, not by the sum of their weights.
    So the mean over random batches is an unbiased estimate of the mean over all
    samples. The mean over all clients' samples is the clients' mean, weighted by their
    samples.

    Raises:
        UsageError: a weight is not above 0.
    """

    base: Loss
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        for weight in self.weights:
            check_value("class_weights", weight, ABOVE_0)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name of the weighted loss, marked as weighted."""
        return f"{self.base.name}, class-weighted"

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        weights = torch.tensor(self.weights, dtype=logits.dtype, device=logits.device)
        return weights[y] * self.base.per_sample(logits, y)

    def outputs(self, n_classes: int) -> int:
        return self.base.outputs(n_classes)

    def of_logits(self) -> Loss:
        return ClassWeighted(self.base.of_logits(), self.weights)

    def logits(self, outputs: Tensor) -> Tensor:
        return self.base.logits(outputs)

    def check(self, n_classes: int, task: str = "") -> None:
        if self.base.task != CLASSIFICATION:
            raise UsageError(
                f"class_weights must be left out for {self.base.task}; got loss {self.base.name!r}."
            )
        self.base.check(n_classes, task)
        if len(self.weights) != n_classes:
            raise UsageError(
                f"class_weights must have one weight for each of the {n_classes} classes; got {len(self.weights)}."
            )


@dataclass(frozen=True)
class Standardised(Loss):
    """Another loss of numbers, for a model whose output is (target - centre) / spread.

    >>> loss = Standardised(build("mse"), centre=100.0, spread=10.0)
    >>> outputs, y = torch.tensor([[1.0]]), torch.tensor([120.0])
    >>> loss.per_sample(outputs, y), loss.logits(outputs)
    (tensor([1.]), tensor([[110.]], dtype=torch.float64))

    Attributes:
        base: the loss of the standardised numbers.
        centre, spread: mean and standard deviation of the training targets.
        own_unit: whether predictions are in the targets' unit.
    """

    base: Loss
    centre: float
    spread: float
    own_unit: bool = False

    task = REGRESSION
    single = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name of the loss of the standardised numbers."""
        return self.base.name

    def per_sample(self, logits: Tensor, y: Tensor) -> Tensor:
        targets = (y.double() - self.centre) / self.spread
        scaled_logits = logits
        if self.own_unit:
            scaled_logits = ((logits.double() - self.centre) / self.spread).to(
                logits.dtype
            )
        return self.base.per_sample(scaled_logits, targets)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the predictions [n, 1] in the targets' unit: float64, or the outputs themselves with ``own_unit``."""
        if self.own_unit:
            return outputs
        return outputs.double() * self.spread + self.centre

    def base_rate(self, y: Tensor) -> Tensor:
        standardised = (y.double() - self.centre) / self.spread
        return self.base.base_rate(standardised) * self.spread + self.centre

    def of_logits(self) -> Loss:
        return replace(self, own_unit=True)


LOSSES: dict[str, type[Loss]] = {
    kind.name: kind
    for kind in (
        CrossEntropy,
        Focal,
        PlayerFocal,
        BinaryCrossEntropy,
        SquaredError,
        AbsoluteError,
        Huber,
        Cox,
        MultiLabel,
    )
}


def balanced_weights(counts: Sequence[int], names: Sequence[str]) -> tuple[float, ...]:
    """Return class weights n / (C n_c) from the number of samples of each class, [C]. Each class has the same total.

    The mean weight of a sample is 1 (King and Zeng 2001; ``class_weight="balanced"`` of scikit-learn).

    >>> balanced_weights([90, 10], ["well", "ill"])
    (0.5555555555555556, 5.0)
    >>> from sklearn.utils import compute_class_weight
    >>> labels = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([50, 7, 3])).numpy()
    >>> theirs = compute_class_weight("balanced", classes=labels[[0, 50, 57]], y=labels)
    >>> bool(max(abs(balanced_weights([50, 7, 3], "abc") - theirs)) < 1e-12)
    True
    >>> balanced_weights([50, 0, 3], "abc")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: each class must have a training sample for balanced weights; got none of b. Give ...

    Args:
        counts: number of training samples of each class.
        names: the classes' names in the same order, for the message.

    Raises:
        UsageError: a class has no samples. The message names it.
    """
    empty_classes = [
        name for name, count in zip(names, counts, strict=True) if not count
    ]
    if empty_classes:
        raise UsageError(
            f"each class must have a training sample for balanced weights; got none of {listing(empty_classes)}. "
            "Give class_weights W,W,... instead."
        )
    return tuple(sum(counts) / (len(counts) * count) for count in counts)


def guessing_loss(criterion: Loss, n_classes: int) -> float:
    """Return the mean loss of equal logits over the classes, log C for cross-entropy. Without classes it is 0.

    For several labels it is the loss of logits of 0. It is 0, too, for fewer than 2 classes
    or labels, and for labels at positions.

    >>> round(guessing_loss(build("cross_entropy"), 4), 3), guessing_loss(build("mse"), 1)
    (1.386, 0.0)
    >>> round(guessing_loss(build("bce"), 2), 3)
    0.693
    >>> for name in ("cross_entropy", "focal", "player_focal"):
    ...     equal = build(name)(torch.full((7, 7), 3.0), torch.arange(7))
    ...     assert abs(guessing_loss(build(name), 7) - float(equal)) < 1e-6
    """
    if n_classes < 2 or criterion.task not in (CLASSIFICATION, MULTILABEL):
        return 0.0
    if criterion.task == MULTILABEL:
        y = torch.eye(n_classes)
    else:
        y = torch.arange(n_classes)
    return float(
        criterion.per_sample(
            torch.zeros(n_classes, criterion.outputs(n_classes)), y
        ).mean()
    )


def build(name: str, **options: Any) -> Loss:
    """Return a loss by its name, of :data:`LOSSES`.

    Losses of classes are ``cross_entropy``, ``focal`` (gamma=2, alpha=1),
    ``player_focal`` (gamma=3, alpha=1) and ``bce`` (two classes, one output). Losses of
    numbers are ``mse``, ``mae`` and ``huber`` (delta=1). ``cox`` is for survival, and
    ``multilabel_bce`` for several labels. Options in brackets have their defaults.

    Args:
        name: the loss's name.
        options: options of the loss; ``alpha`` is one number for all classes, or a list with one number for each class.

    Raises:
        UsageError: an unknown name or option, or a value outside its range.
    """
    loss_class = LOSSES[check_known("loss", name, LOSSES)]
    check_options(
        f"loss {name!r}", options, [field.name for field in fields(loss_class)]
    )
    for option, value in options.items():
        if value is None:
            raise UsageError(
                f"{option} of loss {name!r} must have a value; got none. Leave it out."
            )
    return loss_class(**options)


def _is_target(logits: Tensor, y: Tensor) -> Tensor:
    """Mark each sample's label: bool [n, C]."""
    return y.unsqueeze(-1) == torch.arange(logits.shape[-1], device=logits.device)


def _margin(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Return the logit of p_y, [n]: z_y - log sum_{j != y} exp z_j; its sigmoid is p_y, and of its negative 1 - p_y."""
    target_logit = logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return target_logit - logits.masked_fill(target, -torch.inf).logsumexp(-1)
