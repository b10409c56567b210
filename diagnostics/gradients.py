"""Gradients of each client's loss, read in one pass by every metric that needs them; and their variance in a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from diagnostics.capture import Data, batches, set_mode
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.losses import Loss
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_seeded

TENSORS = ("weights", "all")
"""A layer's tensors that a metric reads: parameters without biases, or all parameters."""
REDUCTIONS = ("epoch", "batch")

Tick = Callable[[str], None]
"""Called with a client's name when that client is done."""


@dataclass(frozen=True)
class Subject:
    """One client as a metric sees it.

    Attributes:
        client: the name that stands in the rows.
        model: the client's model.
        data: a pair (x [n, ...], y [n]), an object with such ``x`` and ``y``, or a re-iterable loader of pairs.
        n_train: training samples of the client, its weight where clients are combined.
    """

    client: str
    model: nn.Module
    data: Data
    n_train: int


def quiet(client: str) -> None:
    """The tick of a caller who does not want to know."""


def tensors_of(layer: Layer, tensors: str) -> tuple[str, ...]:
    """Names of the layer's parameters that are read: its weights, or all of them."""
    return layer.weights if tensors == "weights" else layer.parameters


class Meter(Protocol):
    """Sees the weights and gradients of every batch of one client."""

    def update(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1) -> None:
        """Take in one batch of ``n`` samples; a tensor that no gradient reaches is absent from ``grads``."""


@dataclass(frozen=True)
class Reading:
    """What one pass over one client's data gave: a meter, how much it saw, and why it is of no use (or "")."""

    subject: Subject
    meter: Any
    n_samples: int
    n_batches: int
    fault: str


class GradientMetric(Protocol):
    """A metric that is computed from the batches' gradients and can share its pass with others."""

    @property
    def tensors(self) -> str: ...

    def meter(self, layers: Sequence[Layer]) -> Meter: ...

    def rows(self, layers: Sequence[Layer], readings: Sequence[Reading]) -> list[Row]: ...


def measure(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    metrics: Sequence[GradientMetric],
    *,
    loss: Loss,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
) -> list[Row]:
    """Rows of all ``metrics`` from one forward and backward pass over each client's data.

    Args:
        layers: layers of every subject's model.
        batch: samples per batch of a pair; a loader's own batches are left as they are.
        seed: of what a pass draws (dropout in train mode, a loader's order).
        mode: ``"eval"`` or ``"train"``; the model is put back as it was.

    Raises:
        UsageError: data, labels or model output that do not fit, or layers of another model.
    """
    readings = []
    for subject in subjects:
        readings.append(_read(subject, layers, metrics, loss=loss, batch=batch, seed=seed, mode=mode))
        tick(subject.client)
    return [row for k, metric in enumerate(metrics) for row in metric.rows(layers, [pass_[k] for pass_ in readings])]


def _read(
    subject: Subject,
    layers: Sequence[Layer],
    metrics: Sequence[GradientMetric],
    *,
    loss: Loss,
    batch: int | None,
    seed: int,
    mode: str,
) -> list[Reading]:
    model, meters = subject.model, [metric.meter(layers) for metric in metrics]
    wanted = {name for metric in metrics for layer in layers for name in tensors_of(layer, metric.tensors)}
    n_samples = n_batches = 0
    with set_mode(model, mode), torch_seeded(seed_of(seed, "diagnose", subject.client)), torch.enable_grad():
        params = _parameters(model, wanted)
        total = torch.zeros((), dtype=torch.float64, device=next(iter(model.parameters())).device)
        for x, y in batches(subject.data, batch):
            x, y = placed(model, x), y.to(total.device)
            value = loss(logits(model, x, y), y)
            grads = _gradients(value, params)
            for meter in meters:
                meter.update(params, grads, len(y))
            total += value.detach()
            n_samples, n_batches = n_samples + len(y), n_batches + 1
    fault = "" if bool(torch.isfinite(total)) else f"the loss of client {subject.client!r} is not finite"
    return [Reading(subject, meter, n_samples, n_batches, fault) for meter in meters]


def placed(model: nn.Module, x: Tensor) -> Tensor:
    """Samples on the model's device, in the model's type if they are floating."""
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)


def logits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The model's output for ``x``, checked to be logits [n, C] that the labels ``y`` [n] fit.

    Raises:
        UsageError: another output, or labels that are not class indices from 0 to C - 1.
    """
    z = model(x)
    if not isinstance(z, Tensor) or z.ndim != 2 or len(z) != len(x):
        found = f"a tensor {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
        raise UsageError(f"{type(model).__name__} gives {found} for {len(x)} samples; logits [n, C] are needed")
    if y.ndim != 1 or y.is_floating_point():
        raise UsageError(f"labels must be class indices [n]; these are {y.dtype} {tuple(y.shape)}")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= z.shape[1]:
        raise UsageError(f"label {low if low < 0 else high} does not fit a model of {z.shape[1]} classes")
    return z


def _parameters(model: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """The named floating parameters, all asking for a gradient: a frozen layer is measured like any other."""
    own = dict(model.named_parameters())
    for name in sorted(names):
        check_known(f"parameter of {type(model).__name__}", name, own)
    params: dict[str, Tensor] = {name: p for name, p in own.items() if name in names and p.is_floating_point()}
    for p in params.values():
        p.requires_grad_(True)
    return params


def _gradients(value: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients by name; parameters that the loss does not depend on are absent."""
    if not params or not value.requires_grad:
        return {}
    found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    return {name: grad for name, grad in zip(params, found, strict=True) if grad is not None}


def unread(layer: Layer, tensors: str, reached: bool) -> str:
    """Why a layer has no value from gradients, or "" if it can have one."""
    if not layer.used:
        return "unused in the forward pass"
    if not tensors_of(layer, tensors):
        return "the layer has no weights" if tensors == "weights" else "the layer has no parameters"
    return "" if reached else "no gradient reaches the layer"


# --- the variance of a layer's gradient ------------------------------------------------------------------------


def variance(grads: Sequence[Tensor]) -> Tensor:
    """Unbiased variance over all entries of some tensors together (float64; NaN for fewer than two entries)."""
    entries = torch.cat([grad.detach().reshape(-1) for grad in grads]).double()
    return entries.var() if len(entries) > 1 else entries.new_tensor(torch.nan)


@dataclass(frozen=True)
class GradVariance:
    """Var(g_l), the spread of the entries of a layer's weight gradient (PLayer-FL, Eq. A.1). At least 0.

    (1 / (n - 1)) sum_j (g_j - mean g)^2 over the n entries of the layer's tensors together, as in the authors'
    released code. Row variants are the reductions, which differ by an order of magnitude:

    * ``"epoch"``: of the gradient of the mean loss over all the data; does not depend on the batch size.
    * ``"batch"``: the mean over batches of the variance of each batch's own gradient, with its standard error.
    """

    reduction: str = "epoch"
    tensors: str = "weights"

    def __post_init__(self) -> None:
        check_known("reduction", self.reduction, REDUCTIONS)
        check_known("choice of tensors", self.tensors, TENSORS)

    def meter(self, layers: Sequence[Layer]) -> Meter:
        return _EpochMeter() if self.reduction == "epoch" else _BatchMeter(layers, self.tensors)

    def rows(self, layers: Sequence[Layer], readings: Sequence[Reading]) -> list[Row]:
        return [self._row(layer, reading) for reading in readings for layer in layers]

    def _row(self, layer: Layer, reading: Reading) -> Row:
        value, stderr, n = reading.meter.of(layer, self.tensors)
        status = unread(layer, self.tensors, reached=n > 0)
        if not status and n == 1:
            status = "a variance needs at least two weights"
        if not status and not torch.isfinite(torch.tensor(value)):
            status = reading.fault or f"the gradient of layer {layer.name!r} is not finite"
        return row(
            "grad_variance",
            None if status else value,
            status=status or "ok",
            client=reading.subject.client,
            layer=layer.name,
            variant=self.reduction,
            stderr=None if status else stderr,
            estimator=("full_gradient" if self.reduction == "epoch" else "batch_mean")
            + (", all tensors" if self.tensors == "all" else ""),
            unit="(loss/weight)^2",
            n_params=n,
            n_samples=reading.n_samples,
            n_train=reading.subject.n_train,
        )


class _EpochMeter:
    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._n = 0

    @torch.no_grad()
    def update(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1) -> None:
        for name, grad in grads.items():
            if name in self._sums:
                self._sums[name].add_(grad, alpha=n)
            else:
                self._sums[name] = grad.to(torch.float64, copy=True).mul_(n)  # others read the gradient too
        self._n += n

    def of(self, layer: Layer, tensors: str) -> tuple[float, float | None, int]:
        sums = [self._sums[name] for name in tensors_of(layer, tensors) if name in self._sums]
        n = sum(total.numel() for total in sums)
        return (float(variance([total / self._n for total in sums])) if sums else torch.nan), 0.0, n


class _BatchMeter:
    def __init__(self, layers: Sequence[Layer], tensors: str) -> None:
        self._names = {layer.name: tensors_of(layer, tensors) for layer in layers}
        self._variances: dict[str, list[Tensor]] = {}
        self._sizes: dict[str, int] = {}

    def update(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1) -> None:
        for layer, names in self._names.items():
            reached = [grads[name] for name in names if name in grads]
            if reached:
                self._variances.setdefault(layer, []).append(variance(reached))
                self._sizes[layer] = sum(grad.numel() for grad in reached)

    def of(self, layer: Layer, tensors: str) -> tuple[float, float | None, int]:
        if layer.name not in self._variances:
            return torch.nan, None, 0
        values = torch.stack(self._variances[layer.name])
        stderr = float(values.std() / len(values) ** 0.5) if len(values) > 1 else None
        return float(values.mean()), stderr, self._sizes[layer.name]


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

    Raises:
        UsageError: an unknown reduction or choice of tensors, and as in :func:`measure`.
    """
    metric = GradVariance(reduction, tensors)
    return measure(subjects, layers, [metric], loss=loss, batch=batch, seed=seed, mode=mode, tick=tick)
