"""Statistics of the entries of a layer's gradient: how widely they are spread, and how long the gradient is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_core.errors import check_known
from fl_core.layers import Layer
from fl_core.rows import Row, row
from fl_core.training.losses import Loss

from .gradients import TENSORS, EpochMeter, Meter, Reading, Subject, Tick, entries, measure, quiet, tensors_of, unread
from .resampling import PARTS

REDUCTIONS = ("epoch", "batch")
NORM_VARIANTS = ("norm", "mean", "mean_abs", "norm_batch", "mean_batch", "mean_abs_batch")


class _BatchMeter:
    """A statistic of every batch's own gradient."""

    def __init__(self, layers: Sequence[Layer], tensors: str, statistic: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self._names = {layer.name: tensors_of(layer, tensors) for layer in layers}
        self._statistic = statistic
        self.values: dict[str, list[Tensor]] = {}
        self.sizes: dict[str, int] = {}
        self._batches = 0

    @torch.no_grad()
    def update(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1) -> None:
        for layer, names in self._names.items():
            reached = [grads[name] for name in names if name in grads]
            if reached:
                self.values.setdefault(layer, []).append(self._statistic(reached))
                self.sizes[layer] = sum(grad.numel() for grad in reached)
        self._batches += 1

    @property
    def parts(self) -> int:
        """How many parts the batches are dealt into."""
        return min(self._batches, PARTS)

    def drawn(self, times: Sequence[int]) -> _BatchMeter:
        """The statistics, had the batches of each part come so many times."""
        again = copy.copy(self)
        again.values = {
            layer: [value for k, value in enumerate(own) for _ in range(times[k % len(times)])]
            for layer, own in self.values.items()
        }
        again.values = {layer: own for layer, own in again.values.items() if own}
        return again


def variance(grads: Sequence[Tensor]) -> Tensor:
    """Unbiased variance over all entries of some tensors together (float64; NaN for fewer than two entries)."""
    values = entries(grads)
    return values.var() if len(values) > 1 else values.new_tensor(torch.nan)


@dataclass(frozen=True)
class Statistic:
    """Statistics of the entries of a layer's gradient, one row variant each; subclasses say which.

    * ``reduction="epoch"``: of the gradient of the mean loss over all the data; does not depend on the batch size.
    * ``reduction="batch"``: the mean over batches of each batch's own, with its standard error.
    """

    reduction: str = "epoch"
    tensors: str = "weights"

    name: ClassVar[str]
    unit: ClassVar[str]

    def __post_init__(self) -> None:
        check_known("reduction", self.reduction, REDUCTIONS)
        check_known("choice of tensors", self.tensors, TENSORS)

    @property
    def variants(self) -> tuple[str, ...]:
        """Of the rows, one a statistic."""
        raise NotImplementedError

    def of(self, grads: Sequence[Tensor]) -> Tensor:
        """The statistics of some tensors together, [number of variants], float64."""
        raise NotImplementedError

    def lacking(self, n: int) -> str:
        """Why there are no statistics of ``n`` entries, or ""."""
        return ""

    def meter(self, layers: Sequence[Layer]) -> Meter:
        return EpochMeter() if self.reduction == "epoch" else _BatchMeter(layers, self.tensors, self.of)

    def rows(self, layers: Sequence[Layer], readings: Sequence[Reading]) -> list[Row]:
        return [made for reading in readings for layer in layers for made in self._rows(layer, reading)]

    def _rows(self, layer: Layer, reading: Reading) -> list[Row]:
        values, stderr, n = self._summary(reading.meter, layer)
        status = unread(layer, self.tensors, reached=n > 0) or self.lacking(n)
        if not status and not bool(values.isfinite().all()):
            status = reading.fault or f"the gradient of layer {layer.name!r} is not finite"
        return [
            row(
                self.name,
                None if status else float(values[k]),
                status=status or "ok",
                client=reading.subject.client,
                layer=layer.name,
                variant=variant,
                stderr=None if status or stderr is None else float(stderr[k]),
                estimator=("full_gradient" if self.reduction == "epoch" else "batch_mean")
                + (", all tensors" if self.tensors == "all" else ""),
                unit=self.unit,
                n_params=n,
                n_samples=reading.n_samples,
                n_train=reading.subject.n_train,
            )
            for k, variant in enumerate(self.variants)
        ]

    def _summary(self, meter: Any, layer: Layer) -> tuple[Tensor, Tensor | None, int]:
        """Values and standard errors of the variants, and the number of entries."""
        nothing = torch.full((len(self.variants),), torch.nan, dtype=torch.float64)
        if isinstance(meter, EpochMeter):
            grads = meter.gradients(layer, self.tensors)
            values = self.of(grads) if grads else nothing
            return values, torch.zeros_like(values), sum(grad.numel() for grad in grads)
        if layer.name not in meter.values:
            return nothing, None, 0
        values = torch.stack(meter.values[layer.name])
        stderr = values.std(0) / len(values) ** 0.5 if len(values) > 1 else None
        return values.mean(0), stderr, meter.sizes[layer.name]


@dataclass(frozen=True)
class GradVariance(Statistic):
    """Var(g_l), the spread of the entries of a layer's weight gradient (PLayer-FL, Eq. A.1). At least 0.

    (1 / (n - 1)) sum_j (g_j - mean g)^2 over the n entries of the layer's tensors together, as in the authors'
    released code. Row variants are the reductions, which differ by an order of magnitude (see :class:`Statistic`).
    """

    name: ClassVar[str] = "grad_variance"
    unit: ClassVar[str] = "(loss/weight)^2"

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.reduction,)

    def of(self, grads: Sequence[Tensor]) -> Tensor:
        return variance(grads).reshape(1)

    def lacking(self, n: int) -> str:
        return "a variance needs at least two weights" if n == 1 else ""


def grad_variance(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    reduction: str = "epoch",
    tensors: str = "weights",
) -> list[Row]:
    """One row a client and layer: the variance of the layer's gradient entries (see :class:`GradVariance`).

    Memory: one batch's activations and, of each client until all are read, the gradient in float64, 8 bytes a weight
    (once for all metrics of the pass); with ``reduction="batch"`` one number a batch and layer instead.

    Raises:
        UsageError: an unknown reduction or choice of tensors, and as in :func:`measure`.
    """
    metric = GradVariance(reduction, tensors)
    return measure(subjects, layers, [metric], loss=loss, batch=batch, seed=seed, mode=mode, tick=tick)


@dataclass(frozen=True)
class GradNorm(Statistic):
    """Length and mean of a layer's gradient g with n entries, in loss per weight.

    Row variants: ``norm`` = ||g||_2, at least 0; ``mean`` = (1/n) sum_j g_j, signed; ``mean_abs`` = (1/n) sum_j |g_j|.
    With ``reduction="batch"`` their names end in ``_batch``: the mean length of the batches' own gradients is larger
    than the length of the whole data's, in which the batches' noise has averaged out.
    """

    name: ClassVar[str] = "grad_norm"
    unit: ClassVar[str] = "loss/weight"

    @property
    def variants(self) -> tuple[str, ...]:
        return NORM_VARIANTS[:3] if self.reduction == "epoch" else NORM_VARIANTS[3:]

    def of(self, grads: Sequence[Tensor]) -> Tensor:
        g = entries(grads)
        return torch.stack([torch.linalg.vector_norm(g), g.mean(), g.abs().mean()])


def grad_norm(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    reduction: str = "epoch",
    tensors: str = "weights",
) -> list[Row]:
    """Three rows a client and layer: length and mean of the layer's gradient (see :class:`GradNorm`).

    Memory: as of :func:`grad_variance`.

    Raises:
        UsageError: an unknown reduction or choice of tensors, and as in :func:`measure`.
    """
    metric = GradNorm(reduction, tensors)
    return measure(subjects, layers, [metric], loss=loss, batch=batch, seed=seed, mode=mode, tick=tick)
