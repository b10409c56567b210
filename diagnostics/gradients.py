"""Gradients of clients: one pass that all metrics share, statistics of its gradients, and how single samples differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fl_core.errors import OneOf, check_fields, check_known, warn
from fl_core.layers import Layer
from fl_core.rows import Row
from fl_core.seeds import seed_of, torch_seeded
from fl_core.tree import Tree, set_mode

from .curvature.exact import CHECKED, check_formulas
from .curvature.model import (
    Differentiable,
    are_coupled,
    owner,
    record_calls,
    squared_norms,
)
from .measurement import (
    READING,
    SPENT,
    ClientModel,
    Measurement,
    NoValue,
    Tensors,
    batches,
    row_or_reason,
    tensors_of,
    whole_groups,
    why_unreadable,
)


class Meter(Protocol):
    """Accumulates a quantity of the weights and gradients of every batch of one client."""

    def update(self, params: Tree, grads: Tree, n: int = 1) -> None:
        """Add a batch of ``n`` samples: its weights and gradients by exact name.

        Tensors that no gradient reaches are missing from ``grads``.
        """


@dataclass(frozen=True)
class Reading:
    """The result of one client's pass over its data.

    Attributes:
        subject: the client.
        meter: what a reader has accumulated.
        n_samples, n_batches: the numbers of samples and batches that were read; 0 if
            the budget ended the pass.
        fault: why the client has no value; empty if it has one.
    """

    subject: ClientModel
    meter: Any
    n_samples: int
    n_batches: int
    fault: str


class GradientReader(Protocol):
    """The part of a metric that reads batches' gradients in the shared pass."""

    @property
    def tensors(self) -> str:
        """Return which tensors of a layer the metric reads: one of :data:`diagnostics.measurement.TENSORS`."""

    @property
    def compares(self) -> bool:
        """Return whether the metric compares clients, which takes time after all are read."""

    def meter(self, layers: Sequence[Layer]) -> Meter:
        """Make a new meter for one client."""

    def rows(self, measurement: Measurement, readings: Sequence[Reading]) -> list[Row]:
        """Return the metric's rows, from the readings of all clients, in the order of the measurement's clients."""


def one_pass(measurement: Measurement, readers: Sequence[GradientReader]) -> list[Row]:
    """Return the rows of all metrics that read gradients, from one forward and backward pass over each client's data.

    Until all clients are read, the meters of each client stay in memory: at most the gradient in float64, once for all
    meters, and sums of single numbers. If the time budget ends a client's pass, the client has no value.

    Args:
        measurement: the clients, layers, loss and batch size.
        readers: the metrics' options. Each makes a meter for each client, and rows from all meters.

    Raises:
        UsageError: an option is out of its bounds, data, labels or model output do not fit, or layers belong to
            another model.
    """
    for reader in readers:
        check_fields(reader)
    readings: list[list[Reading]] = []
    share = READING if any(reader.compares for reader in readers) else 1.0
    with measurement.clock.within(share):
        for subject in measurement.turns():
            if measurement.clock.over:
                break
            readings.append(_read(subject, measurement, readers))
    for subject in measurement.subjects[len(readings) :]:
        readings.append(_unread(subject, measurement, readers))
    rows: list[Row] = []
    for k, reader in enumerate(readers):
        rows += reader.rows(
            measurement, [client_readings[k] for client_readings in readings]
        )
    return rows


def _read(
    subject: ClientModel, measurement: Measurement, readers: Sequence[GradientReader]
) -> list[Reading]:
    """Pass over one client's data, and return a reading for each of the readers.

    If the budget ends before the last batch, they are the readings of :func:`_unread`.
    """
    layers, loss, seed = measurement.layers, measurement.loss, measurement.seed
    model, epoch = subject.model, EpochMeter()  # one for all that read the whole
    meters = [reader.meter(layers) for reader in readers]
    meters = [epoch if isinstance(meter, EpochMeter) else meter for meter in meters]
    data, size = subject.data, measurement.batch
    if measurement.resamples and subject.groups is not None and size is not None:
        data = whole_groups(data, subject.groups, size)  # a resample draws batches
    wanted_names: set[str] = set()
    for reader in readers:
        wanted_names.update(*(tensors_of(layer, reader.tensors) for layer in layers))
    n_samples = n_batches = 0
    seeded = torch_seeded(seed_of(seed, "diagnose", subject.client))
    with set_mode(model, measurement.mode), seeded, torch.enable_grad():
        params = _parameters(model, wanted_names)
        total = torch.zeros(
            (), dtype=torch.float64, device=next(iter(model.parameters())).device
        )
        parts, clock = batches(data, size, model), measurement.clock
        is_complete = True
        for x, y in clock.turns(parts, subject.n_train, lambda part: len(part[1])):
            if clock.over:
                is_complete = False
                break
            z = model(x)
            loss.check_batch(z, y)
            value = loss.mean_of_samples(z, y)
            grads = _gradients(value, params)
            for meter in {id(meter): meter for meter in meters}.values():
                meter.update(params, grads, len(y))
            total += value.detach()
            n_samples, n_batches = n_samples + len(y), n_batches + 1
    if not is_complete:  # a part of the samples gives no value
        return _unread(subject, measurement, readers)
    fault = ""
    if not torch.isfinite(total):
        fault = f"the loss of client {subject.client!r} is not finite"
    return [Reading(subject, meter, n_samples, n_batches, fault) for meter in meters]


def _unread(
    subject: ClientModel, measurement: Measurement, readers: Sequence[GradientReader]
) -> list[Reading]:
    """Return empty readings, for a client that the budget did not reach."""
    meters = [reader.meter(measurement.layers) for reader in readers]
    return [Reading(subject, meter, 0, 0, SPENT) for meter in meters]


def _parameters(model: nn.Module, names: set[str]) -> Tree:
    """Switch on gradients of the named floating parameters, and return them by name.

    Parameters of frozen layers get gradients, too. The model is changed in place.

    Raises:
        UsageError: the model has no parameter of such a name.
    """
    parameters = dict(model.named_parameters())
    for name in sorted(names):
        model_class = type(model).__name__
        check_known(f"parameter of {model_class}", name, parameters)
    params: Tree = {
        name: p
        for name, p in parameters.items()
        if name in names and p.is_floating_point()
    }
    for p in params.values():
        p.requires_grad_(True)
    return params


def _gradients(value: Tensor, params: Tree) -> Tree:
    """Return the gradients by name, for the parameters on which the loss depends."""
    if not params or not value.requires_grad:
        return {}
    gradients = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    pairs = zip(params, gradients, strict=True)
    return {name: grad for name, grad in pairs if grad is not None}


class EpochMeter:
    """The gradient of the mean loss over all data, in float64: 8 bytes per weight."""

    def __init__(self) -> None:
        self._sums: Tree = {}
        self._n = 0

    @torch.no_grad()
    def update(self, params: Tree, grads: Tree, n: int = 1) -> None:
        for name, grad in grads.items():
            if name in self._sums:
                self._sums[name].add_(grad, alpha=n)
            else:  # a copy: others read the gradient too
                self._sums[name] = grad.to(torch.float64, copy=True).mul_(n)
        self._n += n

    def gradients(self, layer: Layer, tensors: str) -> list[Tensor]:
        """Return the mean gradients of a layer's tensors, without tensors that no gradient reached.

        Args:
            layer: the layer.
            tensors: ``weights`` for its weights alone, or ``all``.
        """
        names = tensors_of(layer, tensors)
        return [self._sums[name] / self._n for name in names if name in self._sums]


# --- statistics ------------------------------------------------------------------------------------------------


def entries(tensors: Sequence[Tensor]) -> Tensor:
    """Return all entries of some tensors as one vector, float64."""
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def variance(grads: Sequence[Tensor]) -> Tensor:
    """Return the unbiased variance over all entries of some tensors together, float64.

    It is NaN for fewer than two entries.
    """
    values = entries(grads)
    if len(values) > 1:
        return values.var()
    return values.new_tensor(torch.nan)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return <a, b> / (||a|| ||b||) in [-1, 1] of two vectors; NaN if one is zero."""
    x, y = (v / torch.linalg.vector_norm(v) for v in (a.double(), b.double()))
    return float(torch.clamp(x @ y.to(x.device), -1.0, 1.0))


REDUCTIONS = ("epoch", "batch")


class _BatchMeter:
    """A statistic of each batch's gradient, layer by layer, with the batch's number of samples."""

    def __init__(
        self,
        layers: Sequence[Layer],
        tensors: str,
        statistic: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:
        self._names = {layer.name: tensors_of(layer, tensors) for layer in layers}
        self._statistic = statistic
        self.values: dict[str, list[tuple[Tensor, int]]] = {}
        self.sizes: dict[str, int] = {}

    @torch.no_grad()
    def update(self, params: Tree, grads: Tree, n: int = 1) -> None:
        for layer, names in self._names.items():
            reached_gradients = [grads[name] for name in names if name in grads]
            if reached_gradients:
                self.values.setdefault(layer, []).append(
                    (self._statistic(reached_gradients), n)
                )
                self.sizes[layer] = sum(grad.numel() for grad in reached_gradients)


@dataclass(frozen=True)
class Statistic:
    """Base of metrics that are statistics of the entries of a layer's gradient: their options and rows.

    Each statistic has one row variant.

    * ``reduction="epoch"``: the statistic of the gradient of the mean loss over all the data. It does not depend on the
      batch size.
    * ``reduction="batch"``: the mean over batches of each batch's own statistic, weighted by samples. So a short last
      batch counts as its samples do. The standard error is sqrt(B / (B - 1) sum_b p_b^2 (v_b - mean)^2) with the shares
      p_b of B batches. For equal batches it is s / sqrt(B).

    Attributes:
        reduction: ``epoch`` or ``batch``.
        tensors: ``weights`` for a layer's parameters without biases, ``all`` for all of
            its parameters.
    """

    reduction: Annotated[str, OneOf("reduction", REDUCTIONS)] = "epoch"
    tensors: Tensors = "weights"

    name: ClassVar[str]
    unit: ClassVar[str]
    compares: ClassVar[bool] = False

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the names of the rows' variants, one per statistic."""
        raise NotImplementedError

    def of(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the statistics over all entries of some gradients, [number of variants], float64."""
        raise NotImplementedError

    def why_undefined(self, n: int) -> str:
        """Return why a gradient of ``n`` entries has no statistics, or ""."""
        return ""

    def meter(self, layers: Sequence[Layer]) -> Meter:
        if self.reduction == "epoch":
            return EpochMeter()
        return _BatchMeter(layers, self.tensors, self.of)

    def rows(self, measurement: Measurement, readings: Sequence[Reading]) -> list[Row]:
        if (
            self.reduction == "batch"
            and readings
            and all(reading.n_batches == 1 for reading in readings)
        ):
            warn(
                f"{self.name} with reduction='batch' saw one batch of each client: measure in smaller batches (batch)"
            )
        rows: list[Row] = []
        for reading in readings:
            for layer in measurement.layers:
                rows += self._rows(layer, reading)
        return rows

    def _rows(self, layer: Layer, reading: Reading) -> list[Row]:
        values, stderr, n = self._summary(reading.meter, layer)
        status = why_unreadable(
            layer, self.tensors, reached=bool(n or reading.fault)
        ) or self.why_undefined(n)
        if not status and not values.isfinite().all():
            status = (
                reading.fault or f"the gradient of layer {layer.name!r} is not finite"
            )
        return [
            row_or_reason(
                self.name,
                float(values[k]),
                status,
                client=reading.subject.client,
                layer=layer.name,
                variant=variant,
                stderr=None if stderr is None else float(stderr[k]),
                estimator=(
                    "full_gradient" if self.reduction == "epoch" else "batch_mean"
                )
                + (", all tensors" if self.tensors == "all" else ""),
                unit=self.unit,
                n_params=n,
                n_samples=reading.n_samples,
                n_train=reading.subject.n_train,
            )
            for k, variant in enumerate(self.variants)
        ]

    def _summary(self, meter: Any, layer: Layer) -> tuple[Tensor, Tensor | None, int]:
        """Return one layer's values, their standard errors, and its number of entries.

        There is a value for each variant. Values are NaN if no gradient reached the
        layer. Errors are 0 for the gradient of the whole epoch. They are None for a
        single batch, or for none.
        """
        no_values = torch.full((len(self.variants),), torch.nan, dtype=torch.float64)
        if isinstance(meter, EpochMeter):
            grads = meter.gradients(layer, self.tensors)
            values = no_values
            if grads:
                values = self.of(grads)
            return values, torch.zeros_like(values), sum(grad.numel() for grad in grads)
        if layer.name not in meter.values:
            return no_values, None, 0
        values = torch.stack([value for value, _ in meter.values[layer.name]])
        counts = torch.tensor([n for _, n in meter.values[layer.name]]).to(values)[
            :, None
        ]
        weights = counts / counts.max()  # 1 for every whole batch
        mean, n_batches = (weights * values).sum(0) / weights.sum(), len(values)
        spread = (weights * (values - mean)).square().sum(0).sqrt() / weights.sum()
        stderr = None
        if n_batches > 1:
            stderr = spread * (n_batches / (n_batches - 1)) ** 0.5
        return mean, stderr, meter.sizes[layer.name]


COUPLED = "the samples of a batch are coupled, so that none has a gradient of its own"
HALF = (torch.float16, torch.bfloat16)


@dataclass
class Noise:
    """Sums of a client's gradients and of their squared norms over samples, for each tensor.

    Attributes:
        n_samples: number of the client's samples.
        sizes: number of entries of each tensor that reaches the loss.
        ways: how the norms of each such tensor were found, ``ghost`` or ``single``.
        faults: why a tensor has no norms, by its name.
        fault: why no sums count, such as a spent budget; empty if they do.
        squares, sums: by tensor, the sum of squared norms, and the sum of gradients, float64.
    """

    n_samples: int
    sizes: dict[str, int] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    squares: Tree = field(default_factory=dict)
    sums: Tree = field(default_factory=dict)

    def add(self, name: str, squares: Tensor, total: Tensor) -> None:
        """Add a batch to the sums of a tensor.

        Args:
            name: exact name of the tensor.
            squares: squared norm of each sample's gradient, [n].
            total: the gradient of the sum of the batch's losses, in the tensor's shape.
        """
        self.squares[name] = self.squares.get(name, 0) + squares.double().sum()
        self.sums[name] = self.sums.get(name, 0) + total.double()


def gradient_noise(
    subject: ClientModel, measurement: Measurement, names: Collection[str]
) -> Noise:
    """Sum a client's per-sample gradients and their squared norms for each tensor.

    If the budget ends the pass, the result has a ``fault``, and the sums of the samples
    before it. A loss that is not finite is a ``fault``, too.

    Args:
        subject: the client, with its model and data.
        measurement: the loss, batch size, mode, seed and clock.
        names: exact names of the parameters to read. Parameters of integers are left
            out.

    Raises:
        UsageError: data or labels do not fit the model or the loss.
    """
    model, data = subject.model, subject.data
    # squares of small gradients would vanish in half precision
    has_half = any(p.dtype in HALF for p in model.parameters())
    dtype = None
    if has_half:
        dtype = torch.float32
    run = Differentiable(
        model, measurement.loss, dtype, measurement.seed, measurement.clock
    )
    names = [name for name in names if run.parameters[name].is_floating_point()]
    with set_mode(model, measurement.mode), torch.enable_grad():
        noise = Noise(sum(len(y) for _, y in batches(data, measurement.batch)))
        n, parts = 0, run.batches(data, measurement.batch)
        try:
            for index, x, y in run.clock.turns(
                parts, noise.n_samples, lambda part: len(part[2])
            ):
                if index == 0:
                    checked_samples = x[:CHECKED], y[:CHECKED]
                    _, graph, _, doubts = check_formulas(run, *checked_samples, names)
                    coupled = bool(doubts) and are_coupled(run, *checked_samples)
                    for name in names:
                        if name in graph:
                            noise.sizes[name] = run.parameters[name].numel()
                            noise.ways[name] = "single" if name in doubts else "ghost"
                        if name in doubts and coupled:
                            noise.faults[name] = COUPLED
                _add_batch(noise, run, x, y, index, n)
                n += len(y)
            if n < noise.n_samples:
                noise.fault = SPENT
            noise.n_samples = n
        except NoValue as reason:
            noise.fault = f"client {subject.client!r}: {reason}"
    return noise


def _add_batch(
    noise: Noise, run: Differentiable, x: Tensor, y: Tensor, index: int, n: int
) -> None:
    """Add a batch to the sums of ``noise``, which is changed in place.

    Args:
        noise: the sums.
        run: the client's model and loss.
        x, y: the samples and labels of the batch.
        index: the number of the batch, from 0.
        n: the number of samples before it. It seeds the passes of single samples.

    Raises:
        NoValue: the budget is spent, or a loss is not finite.
    """
    remaining_names = [name for name in noise.ways if name not in noise.faults]
    ghost_names = [name for name in remaining_names if noise.ways[name] == "ghost"]
    paths = list(dict.fromkeys(map(owner, ghost_names)))
    with record_calls(run.model, paths, len(x), passes=1) as recorded:
        _, losses = run.forward(x, y, index)
    taps = {path: tap for path, tap in recorded.items() if tap is not None}
    targets: list[Any] = [tap.edge for tap in taps.values()]
    targets += [run.parameters[name] for name in ghost_names]
    gradients: tuple[Any, ...] = ()
    if targets:
        gradients = torch.autograd.grad(losses.sum(), targets, allow_unused=True)
    norms = squared_norms(dict(zip(taps, gradients, strict=False)), taps)
    for name, gradient in zip(ghost_names, gradients[len(taps) :], strict=True):
        if gradient is not None and name in norms:
            noise.add(name, norms[name], gradient)
        elif gradient is not None:
            noise.faults[name] = f"{name}: its module is used differently in batch {index}"  # fmt: skip
    single_names = [name for name in remaining_names if noise.ways[name] == "single"]
    tensors = [run.parameters[name] for name in single_names]
    for k in run.clock.turns(range(len(y) if single_names else 0), len(y)):
        run.clock.check()
        _, losses = run.forward(x[k : k + 1], y[k : k + 1], n + k)
        gradients = torch.autograd.grad(losses.sum(), tensors, allow_unused=True)
        for name, gradient in zip(single_names, gradients, strict=True):
            if gradient is not None:
                noise.add(name, gradient.double().square(), gradient)
