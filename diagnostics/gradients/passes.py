"""One pass over each client's data whose gradients are shared by all metrics that need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fl_core.errors import check_known, listing, warn
from fl_core.layers import Layer
from fl_core.model_contexts import set_mode
from fl_core.rows import Row
from fl_core.seeds import seed_of, torch_seeded

from ..measurement import (
    ClientModel,
    Measurement,
    batches,
    logits,
    tensors_of,
    whole_groups,
)
from ..null import PARTS, draws, mark_resample


class Meter(Protocol):
    """Accumulates a quantity of the weights and gradients of every batch of one client.

    It keeps sums for each of :data:`diagnostics.null.PARTS` parts of the batches.
    """

    def update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1
    ) -> None:
        """Add a batch of ``n`` samples; tensors that no gradient reaches are missing from ``grads``."""

    @property
    def parts(self) -> int:
        """Number of parts that saw a batch."""

    def redraw(self, times: Sequence[int]) -> Any:
        """Return the meter that would have resulted if each part had come ``times`` times."""


@dataclass(frozen=True)
class Reading:
    """The result of one client's pass: a meter, the numbers of samples and batches, and a fault (or "")."""

    subject: ClientModel
    meter: Any
    n_samples: int
    n_batches: int
    fault: str


class GradientReader(Protocol):
    """The part of a metric that reads batches' gradients in the shared pass."""

    @property
    def tensors(self) -> str:
        """Which of a layer's tensors it reads: one of :data:`diagnostics.measurement.TENSORS`."""

    def meter(self, layers: Sequence[Layer]) -> Meter:
        """Make a new meter for one client."""

    def rows(self, layers: Sequence[Layer], readings: Sequence[Reading]) -> list[Row]:
        """Return the metric's rows, from the meters of all clients."""


def one_pass(
    measurement: Measurement, readers: Sequence[GradientReader], resamples: int = 0
) -> list[Row]:
    """Return rows of all ``readers`` from one forward and backward pass over each client's data.

    Until all clients are read, each client keeps what its meters hold. That is at most the gradient in float64, once
    for all meters, and sums of single numbers.

    Args:
        resamples: number of resamples of each client's batches to add to the rows, from the same pass. They are added
            for each metric of single clients; see :mod:`diagnostics.null`.
            While a client is read, the gradient is then kept for each part. A warning names clients with one batch.

    Raises:
        UsageError: data, labels or model output do not fit, layers belong to another model, or resamples is below 0.
    """
    parts = PARTS if resamples else 1
    layers = measurement.layers
    readings, redrawn, single = [], [], []
    for subject in measurement.subjects:
        read = _read(subject, measurement, readers, parts)
        if resamples:
            if {reading.meter.parts for reading in read} == {1}:
                single.append(subject.client)
            redrawn += _resample_rows(
                layers, readers, read, resamples, measurement.seed
            )
            read = _join_parts(read)
        readings.append(read)
        measurement.tick(subject.client)
    rows = [
        row
        for k, reader in enumerate(readers)
        for row in reader.rows(layers, [pass_[k] for pass_ in readings])
    ]
    if single and any(row["client"] and not row["client_b"] for row in rows):
        warn(
            f"one batch cannot be resampled, and {listing(single)} had one: measure in smaller batches "
            "(batch, or --measure-batch)"
        )
    return rows + redrawn


def _resample_rows(
    layers: Sequence[Layer],
    readers: Sequence[GradientReader],
    read: Sequence[Reading],
    resamples: int,
    seed: int,
) -> list[Row]:
    """Return the rows of one client's resamples, for all readers."""
    rows: list[Row] = []
    meters = {id(r.meter): r.meter for r in read}
    parts = max((meter.parts for meter in meters.values()), default=0)
    client = read[0].subject.client if read else ""
    for number, times in enumerate(draws(parts, resamples, seed, client), 1):
        again = {key: meter.redraw(times) for key, meter in meters.items()}
        for reader, reading in zip(readers, read, strict=True):
            one = replace(reading, meter=again[id(reading.meter)])
            rows += mark_resample(reader.rows(layers, [one]), number, parts)
    return rows


def _join_parts(read: Sequence[Reading]) -> list[Reading]:
    """Return the readings with gradients summed over their parts, since the parts are no longer needed."""
    shared = {id(r.meter): r.meter for r in read if isinstance(r.meter, EpochMeter)}
    whole = {key: meter.redraw([1] * meter.parts) for key, meter in shared.items()}
    return [
        replace(reading, meter=whole.get(id(reading.meter), reading.meter))
        for reading in read
    ]


def _read(
    subject: ClientModel,
    measurement: Measurement,
    readers: Sequence[GradientReader],
    parts: int,
) -> list[Reading]:
    """Pass over one client's data; return a reading for each of the readers."""
    layers, loss, seed = measurement.layers, measurement.loss, measurement.seed
    model, meters = subject.model, _meters(layers, readers, parts)
    data, size = subject.data, measurement.batch
    if parts > 1 and subject.groups is not None and size is not None:
        data = whole_groups(data, subject.groups, size)  # a resample draws batches
    wanted = {
        name
        for reader in readers
        for layer in layers
        for name in tensors_of(layer, reader.tensors)
    }
    n_samples = n_batches = 0
    seeded = torch_seeded(seed_of(seed, "diagnose", subject.client))
    with (
        set_mode(model, measurement.mode),
        seeded,
        torch.enable_grad(),
    ):
        params = _parameters(model, wanted)
        total = torch.zeros(
            (), dtype=torch.float64, device=next(iter(model.parameters())).device
        )
        for x, y in batches(data, size, model):
            value = loss(logits(model, x, y, loss), y)
            grads = _gradients(value, params)
            for meter in {id(meter): meter for meter in meters}.values():
                meter.update(params, grads, len(y))
            total += value.detach()
            n_samples, n_batches = n_samples + len(y), n_batches + 1
    fault = (
        ""
        if bool(torch.isfinite(total))
        else f"the loss of client {subject.client!r} is not finite"
    )
    return [Reading(subject, meter, n_samples, n_batches, fault) for meter in meters]


def _meters(
    layers: Sequence[Layer], readers: Sequence[GradientReader], parts: int
) -> list[Meter]:
    """Return a meter for each reader; readers that only need the gradient of all data share one."""
    whole = EpochMeter(parts)
    meters = [reader.meter(layers) for reader in readers]
    return [whole if isinstance(meter, EpochMeter) else meter for meter in meters]


def _parameters(model: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """Return the named floating parameters, with gradients switched on also for frozen layers."""
    parameters = dict(model.named_parameters())
    for name in sorted(names):
        check_known(f"parameter of {type(model).__name__}", name, parameters)
    params: dict[str, Tensor] = {
        name: p
        for name, p in parameters.items()
        if name in names and p.is_floating_point()
    }
    for p in params.values():
        p.requires_grad_(True)
    return params


def _gradients(value: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients in the parameters on which the loss depends."""
    if not params or not value.requires_grad:
        return {}
    found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    pairs = zip(params, found, strict=True)
    return {name: grad for name, grad in pairs if grad is not None}


def why_unreadable(layer: Layer, tensors: str, reached: bool) -> str:
    """Return why a layer can have no value from gradients, or ""."""
    if not layer.used:
        return "unused in the forward pass"
    if not tensors_of(layer, tensors):
        return (
            "the layer has no weights"
            if tensors == "weights"
            else "the layer has no parameters"
        )
    return "" if reached else "no gradient reaches the layer"


class EpochMeter:
    """The gradient of the mean loss over all data, in float64: 8 bytes per weight and part of the batches."""

    def __init__(self, parts: int = 1) -> None:
        self._sums: list[dict[str, Tensor]] = [{} for _ in range(parts)]
        self._n = [0] * parts
        self._batches = 0

    @torch.no_grad()
    def update(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], n: int = 1
    ) -> None:
        part = self._batches % len(self._sums)
        sums = self._sums[part]
        for name, grad in grads.items():
            if name in sums:
                sums[name].add_(grad, alpha=n)
            else:
                sums[name] = grad.to(torch.float64, copy=True).mul_(
                    n
                )  # others read the gradient too
        self._n[part] += n
        self._batches += 1

    @property
    def parts(self) -> int:
        """Number of parts that saw a batch."""
        return min(self._batches, len(self._sums))

    def redraw(self, times: Sequence[int]) -> EpochMeter:
        """Return the meter of the gradient that would have resulted if each part had come ``times`` times."""
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
        """Return the gradients of the layer's tensors that a gradient reached."""
        whole = self if len(self._sums) == 1 else self.redraw([1] * len(self._sums))
        sums, n = whole._sums[0], whole._n[0]
        return [sums[name] / n for name in tensors_of(layer, tensors) if name in sums]
