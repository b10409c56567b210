"""Metrics of the loss: its gradients, with the sensitivity to federation, and its curvature in the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fl_core.errors import ABOVE_0, Bound, OneOf, UsageError, at_least, warn
from fl_core.layers import Layer
from fl_core.rows import Row, row

from ..curvature import spectrum, trace
from ..curvature.trace import BACKENDS, ESTIMATORS
from ..gradients import (
    EpochMeter,
    Noise,
    Reading,
    Statistic,
    cosine,
    entries,
    gradient_noise,
    one_pass,
    variance,
)
from ..measurement import (
    SPENT,
    ClientModel,
    Tensors,
    row_or_reason,
    tensors_of,
    why_unreadable,
)
from ..sensitivity import Sensitivity
from .base import Measurement, metric

STATISTICS = ("norm", "mean", "mean_abs")
LEAST = 10
"""The fewest Lanczos steps of a spectral density."""


@dataclass(frozen=True)
class GradNorm(Statistic):
    """Length and mean of a layer's gradient g with n entries, in loss per weight.

    Row variants:

    * ``norm`` = ||g||_2, at least 0
    * ``mean`` = (1/n) sum_j g_j, signed
    * ``mean_abs`` = (1/n) sum_j |g_j|

    With ``reduction="batch"`` their names end in ``_batch``. The mean length of the
    batches' own gradients is at least the length of the whole data's gradient. In the
    whole gradient the batches' noise averages out. The options are those of
    :class:`~diagnostics.gradients.Statistic`.

    Raises:
        UsageError: the reduction or the choice of tensors is unknown (checked by
            ``Metric.settings``, and by ``one_pass``).
    """

    name: ClassVar[str] = "grad_norm"
    unit: ClassVar[str] = "loss/weight"

    @property
    def variants(self) -> tuple[str, ...]:
        if self.reduction == "epoch":
            return STATISTICS
        return tuple(f"{name}_batch" for name in STATISTICS)

    def of(self, grads: Sequence[Tensor]) -> Tensor:
        g = entries(grads)
        return torch.stack([torch.linalg.vector_norm(g), g.mean(), g.abs().mean()])


@metric(
    description="length and mean of a layer's weight gradient",
    direction="higher = the loss is steeper in the layer's weights",
    differs="high",
    how="length, mean and mean size, of the whole epoch's gradient or batch by batch",
    variants=("norm", "mean", "mean_abs", "norm_batch", "mean_batch", "mean_abs_batch"),
    look={"label": "gradient norm", "meaning": "higher = steeper", "log": True},
    uses_gradient_pass=True,
)
def grad_norm(measurement: Measurement, options: GradNorm) -> list[Row]:
    """Return three rows a client and layer: length and mean of the layer's gradient (see :class:`GradNorm`).

    Memory: as for :func:`diagnostics.metrics.of_gradients.grad_variance`.

    Raises:
        UsageError: as in :func:`diagnostics.gradients.one_pass`.
    """
    return one_pass(measurement, [options])


@dataclass(frozen=True)
class GradVariance(Statistic):
    """The spread Var(g_l) of the entries of a layer's weight gradient. At least 0.

    It is (1 / (n - 1)) sum_j (g_j - mean g)^2 over the n entries of the layer's tensors
    together, as in the released code of PLayer-FL. The row's variant is the reduction.
    The options are those of :class:`~diagnostics.gradients.Statistic`. A layer with a
    single entry has no value.

    Raises:
        UsageError: the reduction or the choice of tensors is unknown (checked by
            ``Metric.settings``, and by ``one_pass``).
    """

    name: ClassVar[str] = "grad_variance"
    unit: ClassVar[str] = "(loss/weight)^2"

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.reduction,)

    def of(self, grads: Sequence[Tensor]) -> Tensor:
        return variance(grads).reshape(1)

    def why_undefined(self, n: int) -> str:
        if n == 1:
            return "a variance needs at least two weights"
        return ""


@metric(
    description="variance over the entries of a layer's weight gradient",
    direction="higher = the entries of the gradient are spread wider",
    differs="high",
    how="of the whole epoch's gradient, or batch by batch",
    variants=("epoch", "batch"),
    look={
        "label": "gradient variance",
        "meaning": "higher = spread wider",
        "log": True,
    },
    uses_gradient_pass=True,
)
def grad_variance(measurement: Measurement, options: GradVariance) -> list[Row]:
    """Return one row a client and layer: the variance of the layer's gradient entries (see :class:`GradVariance`).

    Memory: one batch's activations. Until all clients are read, each also keeps the gradient in float64, 8 bytes a
    weight, once for all metrics of the pass. With ``reduction="batch"`` it keeps one number a batch and layer instead.

    Raises:
        UsageError: as in :func:`diagnostics.gradients.one_pass`.
    """
    return one_pass(measurement, [options])


@dataclass(frozen=True)
class GradSimilarity:
    """The cosine <g_a, g_b> / (||g_a|| ||g_b||) of the gradients of each pair of clients, in [-1, 1].

    Here g is the gradient of the client's mean loss over its data. The clients pull the
    layer the same way at 1, at right angles at 0, and against each other at -1. A pair
    has no value if one gradient is zero, not finite or missing, or if the gradients
    reach different tensors. Every client's gradient is held until all exist: 8 bytes a
    weight and client.

    Attributes:
        tensors: ``weights`` for a layer's parameters without biases, ``all`` for all of
            its parameters.

    Raises:
        UsageError: the choice of tensors is unknown (checked by ``Metric.settings``,
            and by ``one_pass``).
    """

    tensors: Tensors = "weights"

    compares: ClassVar[bool] = True

    def meter(self, layers: Sequence[Layer]) -> EpochMeter:
        return EpochMeter()

    def rows(self, measurement: Measurement, readings: Sequence[Reading]) -> list[Row]:
        common = {
            "variant": "cosine",
            "estimator": "full_gradient" + (", all tensors" * (self.tensors == "all")),
        }
        rows = []
        for layer in measurement.layers:
            gradients = [
                (reading, reading.meter.gradients(layer, self.tensors))
                for reading in readings
            ]
            for pair in itertools.combinations(gradients, 2):
                rows.append(
                    self._row(layer, pair, SPENT * measurement.clock.over, **common)
                )
        return rows

    def _row(self, layer: Layer, pair: Any, status: str, **columns: str) -> Row:
        (a, grads_a), (b, grads_b) = pair
        value, n = torch.nan, sum(grad.numel() for grad in grads_a)
        for reading, grads in pair:
            has_gradient = bool(grads or reading.fault)
            status = status or why_unreadable(layer, self.tensors, has_gradient)
            if status:
                break
            length = float(torch.linalg.vector_norm(entries(grads))) if grads else 0.0
            if not 0 < length < math.inf:
                problem = "not finite"
                if length == 0:
                    problem = "zero"
                status = reading.fault or (
                    f"the gradient of layer {layer.name!r} at client {reading.subject.client!r} is {problem}"
                )
        if not status and [g.shape for g in grads_a] != [g.shape for g in grads_b]:
            status = f"the gradients of the two clients reach different tensors of layer {layer.name!r}"
        if not status:
            value = cosine(entries(grads_a), entries(grads_b))
        return row_or_reason(
            "grad_similarity",
            value,
            status,
            client=a.subject.client,
            client_b=b.subject.client,
            layer=layer.name,
            stderr=0.0,
            n_params=n,
            n_samples=a.n_samples + b.n_samples,
            **columns,
        )


@metric(
    description="cosine between the clients' gradients of a layer",
    direction="higher = more alike; 1 = same direction, -1 = opposite",
    how="cosine between all pairs of clients",
    variants=("cosine",),
    look={
        "label": "mean 1 − cosine of gradients to the others",
        "meaning": "0 = same direction",
    },
    pairs=True,
    uses_gradient_pass=True,
)
def grad_similarity(measurement: Measurement, options: GradSimilarity) -> list[Row]:
    """Return one row a pair of clients and layer: the cosine of their gradients (see :class:`GradSimilarity`).

    One model measured on several clients' data has pairs too. They show how the clients disagree at one point.

    Memory: one batch's activations, and the gradient of every client in float64 (8 bytes a weight and client). All
    metrics of the pass share it.

    Raises:
        UsageError: as in :func:`diagnostics.gradients.one_pass`.
    """
    return one_pass(measurement, [options])


@dataclass(frozen=True)
class GradNoise:
    """The trace tr S of the covariance of the per-sample gradients g_n of a layer. At least 0.

    For N samples with the mean gradient g, S = (1 / (N - 1)) sum_n (g_n - g)(g_n - g)^T. So
    tr S = (sum_n ||g_n||^2 - N ||g||^2) / (N - 1). The expected squared error of the
    gradient of b samples is tr S / b (McCandlish et al. 2018, Eq. 2.5). Row variants are
    ``trace``, and ``per_parameter``: the trace divided by the number of entries. Sums are
    float64. Gradients have the model's type, or float32 for half precision.

    There are two ways, chosen tensor by tensor. The column ``estimator`` names them. Both
    are exact for the samples given, up to rounding:

    * ``ghost``: norms from the layers' inputs and output gradients, without the gradients
      themselves (Goodfellow 2015). It needs a module that has a formula, is called once, and does not mix samples. A
      few samples' own gradients check this.
    * ``single``: one backward pass a sample, for any other tensor.

    Attributes:
        tensors: ``weights`` for a layer's parameters without biases, ``all`` for all of
            its parameters.

    Raises:
        UsageError: the choice of tensors is unknown (checked by ``Metric.settings``).
    """

    tensors: Tensors = "weights"


@metric(
    description="trace of the covariance of a layer's per-sample gradients",
    direction="higher = the samples disagree more on the layer's weights",
    how="exact, without forming the gradients where the layer has a formula",
    variants=("trace", "per_parameter"),
    separable=True,
    look={
        "label": "per-sample gradient noise",
        "meaning": "higher = samples disagree more",
        "log": True,
    },
)
def grad_noise(measurement: Measurement, options: GradNoise) -> list[Row]:
    """Return two rows a client and layer: the noise of the layer's per-sample gradients (see :class:`GradNoise`).

    A client with fewer than two samples has no value. Layers before an operation that
    couples samples, such as a normalisation by batch statistics, have none either. In
    such a network this also holds for layers without a formula.

    Memory: one batch's activations and layer inputs, and one client's gradient in float64. The gradients of single
    samples are formed one at a time.

    Raises:
        UsageError: data or labels do not fit the model or the loss.
    """
    rows = []
    for subject in measurement.turns():
        names_by_layer = {
            layer.name: tensors_of(layer, options.tensors)
            for layer in measurement.layers
        }
        used_layers = [layer.name for layer in measurement.layers if layer.used]
        names = dict.fromkeys(
            chain.from_iterable(names_by_layer[layer] for layer in used_layers)
        )
        noise = gradient_noise(subject, measurement, list(names))
        for layer in measurement.layers:
            tensors = [
                name for name in names_by_layer[layer.name] if name in noise.sizes
            ]
            rows += _noise_rows(layer, noise, tensors, subject, options)
    return rows


def _noise_rows(
    layer: Layer,
    noise: Noise,
    names: Sequence[str],
    subject: ClientModel,
    options: GradNoise,
) -> list[Row]:
    n, size = noise.n_samples, sum(noise.sizes[name] for name in names)
    status = why_unreadable(layer, options.tensors, bool(names or noise.fault))
    status = status or ("a covariance needs at least two samples" if n < 2 else "")
    faults = [noise.fault, *(noise.faults.get(name, "") for name in names)]
    status = status or next(filter(None, faults), "")
    value, methods = math.nan, sorted({noise.ways[name] for name in names})
    if not status:
        squares = sum(float(noise.squares[name]) for name in names)
        mean = sum(float((noise.sums[name] / n).square().sum()) for name in names)
        value = max(0.0, squares - n * mean) / (n - 1)
        if not math.isfinite(squares + mean):
            status = f"the gradient of layer {layer.name!r} is not finite"
    tensors_note = ", all tensors" * (options.tensors == "all")
    return [
        row_or_reason(
            "grad_noise",
            value / share,
            status,
            client=subject.client,
            layer=layer.name,
            variant=variant,
            stderr=0.0,
            estimator=" + ".join(methods) + tensors_note,
            unit="(loss/weight)^2",
            n_params=size,
            n_samples=n,
            n_train=subject.n_train,
        )
        for variant, share in (("trace", 1), ("per_parameter", size or 1))
    ]


@metric(
    description="importance of the layers up to one, relative to the first layer",
    direction="higher = the layers up to here matter more to the loss; 1 at the first layer",
    how="from the gradients of the training epoch itself, or after it",
    variants=("after", "training", "importance"),
    look={
        "label": "federation sensitivity S",
        "meaning": "first layer = 1, higher = matters more",
        "log": True,
        "symbol": "S",
        "variants": {
            "importance": {
                "label": "importance I",
                "meaning": "higher = matters more",
                "log": True,
            }
        },
    },
    uses_gradient_pass=True,
    default_variant="training",
)
def federation_sensitivity(measurement: Measurement, options: Sensitivity) -> list[Row]:
    """Return rows of S_l for each client and combined (client ""), and of I_l for each client.

    I_l = (1 / n_l) sum (w g)^2 has the variant ``"importance"``. It is averaged over
    the data's batches, while the weights w stay fixed. S_l has the variant ``"after"``.
    It is S_l = F_l / F_1 with F_l = sum_{k <= l} I_k (PLayer-FL, Eq. 2). The first
    layer is the first one with trainable weights. S_l is 1 there and never falls. The
    combined S_l is the clients' mean, weighted by training samples. The measurement's
    layers must be all layers of the network, because the sums start at the first.

    Memory: one batch's activations and gradients, and for each tensor one number for each part of the batches.

    Raises:
        UsageError: as in :func:`diagnostics.gradients.one_pass`.
    """
    return one_pass(measurement, [options])


# --- curvature -------------------------------------------------------------------------------------------------

UNIT = "loss/weight^2"


@dataclass(frozen=True)
class GaussNewtonTrace:
    """The options of the Gauss-Newton trace.

    Attributes:
        estimator, probes, dtype: as for :func:`diagnostics.curvature.trace.hessian_trace`.

    Raises:
        UsageError: a choice is unknown, or there are fewer than 2 probes (checked by
            ``Metric.settings``).
    """

    estimator: Annotated[str, OneOf("estimator", ESTIMATORS)] = "auto"
    probes: Annotated[int | None, at_least(2)] = None
    dtype: torch.dtype | None = None


@metric(
    description="trace of a layer's block of the Gauss-Newton matrix: the loss's curvature without the network's own",
    direction="higher = the loss curves more upwards in the layer's weights and biases; never below 0",
    how=(
        "exact for up to 33 outputs of a sample, one backward pass for each; otherwise, and where samples mix or "
        "weights are tied, 8 to 32 random probes, one pass each, with the standard error"
    ),
    variants=("per_parameter", "absolute"),
    separable=True,
    look={"label": "Gauss-Newton trace", "meaning": "higher = sharper", "log": True},
)
def ggn_trace(measurement: Measurement, options: GaussNewtonTrace) -> list[Row]:
    """Return two rows a client and layer: the trace of the layer's Gauss-Newton block, per parameter and undivided.

    The matrix is (1/N) sum_n J_n^T (d2 loss_n / df_n^2) J_n, for the logits f_n and their derivatives J_n in the
    layer's weights and biases (Schraudolph 2002). It leaves out the curvature of the network itself. The trace is at
    least 0 if the loss is convex in the logits, as all but the focal losses are. With cross-entropy it is the trace of
    the Fisher information. Where ``hessian_trace`` is exact, both traces are equal.

    Memory: the activations of ``batch`` samples.

    Raises:
        UsageError: as in :func:`diagnostics.curvature.trace.hessian_trace`.
    """
    return _trace_rows(measurement, options, "ggn_trace", gauss_newton=True)


@dataclass(frozen=True)
class HessianTrace(GaussNewtonTrace):
    """The options of the Hessian trace.

    Attributes:
        estimator, probes, dtype, backend: as for :func:`diagnostics.curvature.trace.hessian_trace`.

    Raises:
        UsageError: a choice is unknown, or there are fewer than 2 probes (checked by
            ``Metric.settings``).
    """

    backend: Annotated[str, OneOf("backend", BACKENDS)] = "fedlayers"

    def check(self, measurement: Measurement) -> None:
        """Check that the backend supports the estimator and the measurement's mode.

        Raises:
            UsageError: the backend is ``"pyhessian"``, and the estimator is neither ``"auto"`` nor ``"hutchinson"``, or
                the mode is not ``"eval"``.
        """
        if self.backend == "fedlayers":
            return
        if self.estimator not in ("auto", "hutchinson"):
            raise UsageError(
                f"estimator must be one of weight-space probes with backend {self.backend!r}; got {self.estimator!r}."
            )
        if measurement.mode != "eval":
            raise UsageError(
                f"mode must be 'eval' with backend {self.backend!r}; got {measurement.mode!r}. Use backend 'fedlayers'."
            )


@metric(
    description="trace of a layer's block of the loss's Hessian, exact where the network allows it",
    direction="higher = the loss curves more upwards in the layer's weights and biases",
    how=(
        "exact where the network is piecewise linear downstream, decided layer by layer; elsewhere "
        "Hutchinson's estimate with its standard error. Layers without an exact value, as those before "
        "attention or a smooth activation, take 2 to 32 Hessian-vector products together, fewer for large models; "
        'the Gauss-Newton trace is less noisy there. `backend="pyhessian"` cross-checks'
    ),
    variants=("per_parameter", "absolute"),
    separable=True,
    look={"label": "Hessian trace", "meaning": "higher = sharper", "log": True},
)
def hessian_trace(measurement: Measurement, options: HessianTrace) -> list[Row]:
    """Return two rows a client and layer: the trace of the layer's Hessian block, per parameter and undivided.

    Both are signed. ``absolute`` is the trace of PLayer-FL's Eq. A.2. ``per_parameter``
    is the trace divided by the number of parameters, as its section 5.1 says. Estimates
    of deep networks can be smaller than their errors. Take :func:`ggn_trace` then.

    Memory: the activations of ``batch`` samples and the graph of their derivatives. The model's device holds one
    client's samples at a time.

    Raises:
        UsageError: as in :func:`diagnostics.curvature.trace.hessian_trace`.
    """
    return _trace_rows(measurement, options, "hessian_trace")


def _trace_rows(
    measurement: Measurement, options: Any, name: str, **settings: Any
) -> list[Row]:
    rows: list[Row] = []
    n_unclear = 0
    trace_arguments = measurement.settings(options)
    for subject in measurement.turns(share=True):
        results = trace.hessian_trace(
            subject.model,
            subject.data,
            measurement.layers,
            **trace_arguments,
            **settings,
        )
        n_unclear += sum(result.stderr > abs(result.trace) for result in results)
        for result in results:
            columns = _columns(subject, result)
            if result.note and result.status == "ok":
                columns["estimator"] += f"; not exact: {result.note}"
            for variant, share in (
                ("per_parameter", result.n_params or 1),
                ("absolute", 1),
            ):
                columns["stderr"] = result.stderr / share
                rows.append(row(name, result.trace / share, variant=variant, **columns))
    if n_unclear:
        warn(
            f"{name} is smaller than its standard error in {n_unclear} of {len(rows) // 2} values. "
            f"The metric ggn_trace is less noisy. More probes take longer, as options={{{name!r}: {{'probes': 64}}}}."
        )
    return rows


def _columns(subject: ClientModel, result: Any) -> dict[str, Any]:
    names = ("layer", "n_params", "n_samples", "estimator", "status")
    columns = {name: getattr(result, name) for name in names}
    return columns | {"client": subject.client, "n_train": subject.n_train, "unit": UNIT}  # fmt: skip


@dataclass(frozen=True)
class HessianSpectrum:
    """The options of the Hessian spectrum: how many eigenvalues, and how precisely they are found.

    Attributes:
        k: number of eigenvalues, from 1 to 1000.
        tol, dtype: as in :func:`diagnostics.curvature.spectrum.hessian_spectrum`.
        density: add rows of weights, for :func:`fl.plots.spectral_density <diagnostics.plots.layers.spectral_density>`.
            Take 40 to 100 for ``k`` then.

    Raises:
        UsageError: ``k`` is out of range, or the tolerance is not above 0 (checked by
            ``Metric.settings``).
    """

    k: Annotated[int, Bound("from 1 to 1000", range(1, 1001).__contains__)] = 3
    tol: Annotated[float, ABOVE_0] = 1e-3
    dtype: torch.dtype | None = None
    density: bool = False

    def check(self, measurement: Measurement) -> None:
        """Check that a density has enough eigenvalues.

        Raises:
            UsageError: ``density`` is set, and ``k`` is below :data:`LEAST`.
        """
        if self.density and self.k < LEAST:
            raise UsageError(
                f"k must be at least {LEAST} for a density; got {self.k}. Pass k=60."
            )


@metric(
    description="largest eigenvalues of a layer's block of the loss's Hessian",
    direction="higher = the loss curves more upwards along the sharpest direction of the layer's weights and biases",
    how="by Lanczos, each with its residual: at most 100 products of the Hessian with a vector a layer",
    variants=("top1", "top2", "top3"),
    separable=True,
    look={"label": "Hessian eigenvalue", "meaning": "higher = sharper", "log": True},
)
def hessian_spectrum(measurement: Measurement, options: HessianSpectrum) -> list[Row]:
    """Return ``k`` rows a client and layer, variants ``top1`` to ``topk``: the largest eigenvalues of the block.

    With the option ``density`` they are those of a Lanczos matrix. Up to ``k`` further
    rows, variants ``weight1`` to ``weightk``, then have their weights.

    They are signed and in descending order. The column ``stderr`` holds the norm of the residual, a bound of the error.
    If fewer than ``k`` eigenvalues are found, the last rows have no value. The block
    may be small, or the time budget spent.

    Memory: the activations of ``batch`` samples and the graph of their derivatives. The
    model's device holds one client's samples at a time. A layer has at most 100 Lanczos
    vectors, each as long as its weights and biases together. With ``density`` there are
    at most ``k``, and for a ``k`` above 100 also without. Each step copies them once.
    With a single batch, layers take their turns: those before are freed, those after
    have one vector each. With several batches all layers have their vectors at once.

    Raises:
        UsageError: as in :func:`diagnostics.curvature.spectrum.hessian_spectrum`.
    """
    rows: list[Row] = []
    settings = measurement.settings(options)
    for subject in measurement.turns(share=True):
        results = spectrum.hessian_spectrum(
            subject.model, subject.data, measurement.layers, **settings
        )
        for rank, result in itertools.product(range(options.k), results):
            columns = _columns(subject, result) | {"variant": f"top{rank + 1}"}
            value, count = None, len(result.eigenvalues)
            if rank < count:
                value, columns["stderr"] = result.eigenvalues[rank], result.errors[rank]
            elif result.status == "ok":
                small = f"layer {result.layer!r} has {count} eigenvalues"
                columns["status"] = SPENT if count < result.n_params else small
            rows.append(row("hessian_spectrum", value, **columns))
            if options.density and rank < count:
                columns |= {"variant": f"weight{rank + 1}", "unit": "", "stderr": None}
                rows.append(row("hessian_spectrum", result.weights[rank], **columns))
    return rows
