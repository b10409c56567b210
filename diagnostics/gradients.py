"""Gradients of each client's loss, read in one pass by every metric that needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row
from fl_core.seeds import seed_of, torch_seeded
from fl_core.training.losses import Loss

from .capture import Data, batches, set_mode
from .resampling import PARTS, check_resamples, draws, marked

TENSORS = ("weights", "all")
"""A layer's tensors that a metric reads: parameters without biases, or all parameters."""

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


@runtime_checkable
class SampleMeter(Meter, Protocol):
    """A meter that also sees every sample's share of the gradient, at points of the graph that it names."""

    def watching(
        self, model: nn.Module, params: Mapping[str, Tensor], loss: Loss, x: Tensor, y: Tensor, seed: int
    ) -> AbstractContextManager[None]:
        """Watch the model's forward passes inside the block; ``x`` and ``y`` are the first batch."""

    def edges(self) -> Mapping[str, GradientEdge]:
        """Where in the graph of the last forward pass gradients are wanted."""

    def samples(self, x: Tensor, y: Tensor, grads: Mapping[str, Tensor], deltas: Mapping[str, Tensor]) -> None:
        """Take in one batch: the gradients of its mean loss in the weights, and at the edges that they reach."""


@runtime_checkable
class PartedMeter(Meter, Protocol):
    """A meter that keeps apart what it saw in each of :data:`diagnostics.resampling.PARTS` parts of the batches."""

    @property
    def parts(self) -> int:
        """How many parts saw a batch."""

    def drawn(self, times: Sequence[int]) -> Meter:
        """What it would be, had each of its parts come so many times."""


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
    resamples: int = 0,
) -> list[Row]:
    """Rows of all ``metrics`` from one forward and backward pass over each client's data.

    Kept of a client until all are read: what the metrics' meters hold, at most the gradient in float64 (once for all
    of them), and the sums of single numbers.

    Args:
        layers: layers of every subject's model.
        batch: samples per batch of a pair; a loader's own batches are left as they are.
        seed: of what a pass draws (dropout in train mode, a loader's order).
        mode: ``"eval"`` or ``"train"``; the model is put back as it was.
        resamples: so many resamples of each client's batches to add to the rows, from the same pass, of each metric
            of single clients whose meter is a :class:`PartedMeter`; see :mod:`diagnostics.resampling`. While a client
            is read, the gradient is then kept for each part.

    Raises:
        UsageError: data, labels or model output that do not fit, layers of another model, or resamples below 0.
    """
    parts = PARTS if check_resamples(resamples) else 1
    readings, redrawn = [], []
    for subject in subjects:
        read = _read(subject, layers, metrics, loss=loss, batch=batch, seed=seed, mode=mode, parts=parts)
        if resamples:
            redrawn += _redrawn(layers, metrics, read, resamples, seed)
            read = _joined(read)
        readings.append(read)
        tick(subject.client)
    rows = [row for k, metric in enumerate(metrics) for row in metric.rows(layers, [pass_[k] for pass_ in readings])]
    return rows + redrawn


def _redrawn(
    layers: Sequence[Layer], metrics: Sequence[GradientMetric], read: Sequence[Reading], resamples: int, seed: int
) -> list[Row]:
    """The rows of one client's resamples."""
    rows: list[Row] = []
    meters = {id(r.meter): r.meter for r in read if isinstance(r.meter, PartedMeter)}
    parts = max((meter.parts for meter in meters.values()), default=0)
    for number, times in enumerate(draws(parts, resamples, seed, read[0].subject.client) if read else [], 1):
        again = {key: meter.drawn(times) for key, meter in meters.items()}
        for metric, reading in zip(metrics, read, strict=True):
            if id(reading.meter) in again:
                one = replace(reading, meter=again[id(reading.meter)])
                rows += marked(metric.rows(layers, [one]), number, parts)
    return rows


def _joined(read: Sequence[Reading]) -> list[Reading]:
    """The readings without the parts of the gradient, which they share."""
    shared = {id(r.meter): r.meter for r in read if isinstance(r.meter, EpochMeter)}
    whole = {key: meter.drawn([1] * meter.parts) for key, meter in shared.items()}
    return [replace(reading, meter=whole.get(id(reading.meter), reading.meter)) for reading in read]


def _read(
    subject: Subject,
    layers: Sequence[Layer],
    metrics: Sequence[GradientMetric],
    *,
    loss: Loss,
    batch: int | None,
    seed: int,
    mode: str,
    parts: int,
) -> list[Reading]:
    model, meters = subject.model, _meters(layers, metrics, parts)
    samplers = [meter for meter in meters if isinstance(meter, SampleMeter)]
    wanted = {name for metric in metrics for layer in layers for name in tensors_of(layer, metric.tensors)}
    n_samples = n_batches = 0
    seeded = torch_seeded(seed_of(seed, "diagnose", subject.client))
    with set_mode(model, mode), seeded, torch.enable_grad(), ExitStack() as stack:
        params = _parameters(model, wanted)
        total = torch.zeros((), dtype=torch.float64, device=next(iter(model.parameters())).device)
        for x, y in batches(subject.data, batch):
            x, y = placed(model, x), y.to(total.device)
            for sampler in samplers if n_batches == 0 else ():
                stack.enter_context(sampler.watching(model, params, loss, x, y, seed))
            value = loss(logits(model, x, y), y)
            edges = {(k, name): edge for k, sampler in enumerate(samplers) for name, edge in sampler.edges().items()}
            grads, deltas = _gradients(value, params, edges)
            for meter in {id(meter): meter for meter in meters}.values():
                meter.update(params, grads, len(y))
            for k, sampler in enumerate(samplers):
                sampler.samples(x, y, grads, {name: delta for (j, name), delta in deltas.items() if j == k})
            total += value.detach()
            n_samples, n_batches = n_samples + len(y), n_batches + 1
    fault = "" if bool(torch.isfinite(total)) else f"the loss of client {subject.client!r} is not finite"
    return [Reading(subject, meter, n_samples, n_batches, fault) for meter in meters]


def _meters(layers: Sequence[Layer], metrics: Sequence[GradientMetric], parts: int) -> list[Meter]:
    """A meter for each metric; those that only need the gradient of the whole data share one."""
    whole = EpochMeter(parts)
    meters = [metric.meter(layers) for metric in metrics]
    return [whole if isinstance(meter, EpochMeter) else meter for meter in meters]


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


def _gradients(
    value: Tensor, params: Mapping[str, Tensor], edges: Mapping[tuple[int, str], GradientEdge]
) -> tuple[dict[str, Tensor], dict[tuple[int, str], Tensor]]:
    """The gradients in the parameters and at the edges; what the loss does not depend on is absent."""
    if not params or not value.requires_grad:
        return {}, {}
    targets: list[Any] = [*params.values(), *edges.values()]
    found = torch.autograd.grad(value, targets, allow_unused=True)
    grads = {name: grad for name, grad in zip(params, found[: len(params)], strict=True) if grad is not None}
    return grads, {key: grad for key, grad in zip(edges, found[len(params) :], strict=True) if grad is not None}


def unread(layer: Layer, tensors: str, reached: bool) -> str:
    """Why a layer has no value from gradients, or "" if it can have one."""
    if not layer.used:
        return "unused in the forward pass"
    if not tensors_of(layer, tensors):
        return "the layer has no weights" if tensors == "weights" else "the layer has no parameters"
    return "" if reached else "no gradient reaches the layer"


class EpochMeter:
    """The gradient of the mean loss over all the data, in float64: 8 bytes a weight and part of the batches."""

    def __init__(self, parts: int = 1) -> None:
        self._sums: list[dict[str, Tensor]] = [{} for _ in range(parts)]
        self._n = [0] * parts
        self._batches = 0

    @torch.no_grad()
    def update(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1) -> None:
        part = self._batches % len(self._sums)
        sums = self._sums[part]
        for name, grad in grads.items():
            if name in sums:
                sums[name].add_(grad, alpha=n)
            else:
                sums[name] = grad.to(torch.float64, copy=True).mul_(n)  # others read the gradient too
        self._n[part] += n
        self._batches += 1

    @property
    def parts(self) -> int:
        """How many parts saw a batch."""
        return min(self._batches, len(self._sums))

    def drawn(self, times: Sequence[int]) -> EpochMeter:
        """The gradient, had each part come so many times."""
        joined = EpochMeter()
        for count, n, sums in zip(times, self._n, self._sums, strict=False):
            for name, total in sums.items() if count else ():
                if name in joined._sums[0]:
                    joined._sums[0][name].add_(total, alpha=count)
                else:
                    joined._sums[0][name] = total * count
            joined._n[0] += count * n
        joined._batches = self._batches
        return joined

    def gradients(self, layer: Layer, tensors: str) -> list[Tensor]:
        """Of the layer's tensors that a gradient reached."""
        whole = self if len(self._sums) == 1 else self.drawn([1] * len(self._sums))
        sums, n = whole._sums[0], whole._n[0]
        return [sums[name] / n for name in tensors_of(layer, tensors) if name in sums]


def entries(grads: Sequence[Tensor]) -> Tensor:
    """All entries of some tensors in one row, float64."""
    return torch.cat([grad.detach().reshape(-1).double() for grad in grads])
