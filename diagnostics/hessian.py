"""The trace of each layer's diagonal block of the loss's Hessian: exact where it can be, estimated where it cannot.

A large trace means a sharp loss in that layer. With L the mean loss over all samples, f the logits and theta a
layer's parameters,

    tr H_theta = sum over theta's entries of d2 L / d theta_i^2          (PLayer-FL, Eq. A.2: the eigenvalues' sum)

Exact: where f is piecewise linear in each of the layer's parameter tensors, each tensor's block is
1/N sum_n J_n^T (d2 loss_n / df_n^2) J_n with J_n = df_n / dtheta, so that with the factors s_nk of the C x C output
Hessians tr H = 1/N sum_n sum_k sign_nk ||J_n^T s_nk||^2. That takes at most C backward passes of activation
gradients, no weight gradient and no graph of a graph. Otherwise: Hutchinson's estimator over Rademacher probes
(Hutchinson, 1990), with its standard error. A Gauss-Newton value never goes by the Hessian's name: a layer is exact
only when the autograd graph and a numerical check both say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diagnostics.capture import Data, batches, set_mode
from diagnostics.curvature_exact import decide, exact_traces
from diagnostics.curvature_model import (
    Differentiable,
    LossNotFinite,
    curvature,
    differentiable_once,
    no_second_derivative,
    rademacher,
    twice_differentiable,
)
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.losses import Loss
from fl_core.seeds import torch_generator

ESTIMATORS = ("auto", "exact", "hutchinson")


@dataclass(frozen=True)
class TraceResult:
    """One layer's trace.

    Attributes:
        layer: the layer's name.
        trace: of the layer's block of the mean loss's Hessian, over weights and biases; NaN where status is not ok.
        stderr: standard error of the trace; 0.0 = exact; NaN where there is no value.
        estimator: ``"exact"`` or ``"hutchinson(probes=32)"``; empty where there is no value.
        n_params: parameters of the layer.
        n_samples: samples of the data.
        status: ``"ok"``, or why there is no value.
        note: why the value is not exact; empty where it is.
    """

    layer: str
    trace: float
    stderr: float
    estimator: str
    n_params: int
    n_samples: int
    status: str = "ok"
    note: str = ""

    @property
    def per_parameter(self) -> float:
        """The trace divided by the number of parameters: the mean curvature along a coordinate."""
        return self.trace / self.n_params if self.n_params else math.nan

    @property
    def stderr_per_parameter(self) -> float:
        """Standard error of :attr:`per_parameter`."""
        return self.stderr / self.n_params if self.n_params else math.nan


def hessian_trace(
    model: nn.Module,
    data: Data,
    layers: Sequence[Layer],
    *,
    loss: Loss,
    batch: int = 256,
    estimator: str = "auto",
    probes: int = 32,
    seed: int = 0,
    mode: str = "eval",
    dtype: torch.dtype | None = None,
) -> list[TraceResult]:
    """The Hessian trace of each layer, in the order of ``layers``; the model is left as it was.

    Frozen parameters are measured too. A layer that does not reach the logits, a loss that is not finite, and an
    operation without a second derivative give a result without a value, whose status says why.

    Args:
        model: maps a batch to logits [n, C]. Its parameters and the data are on one device.
        data: a pair (x, y), a split, or a loader; see :func:`diagnostics.capture.batches`. y holds class indices.
        layers: as :func:`fl_core.layers.layers_of` gives them.
        loss: its mean over all samples is what is differentiated.
        batch: samples at a time, which bounds the memory; a loader's own batches stand. In ``"eval"`` mode the value
            does not depend on it. In ``"train"`` mode batch normalisation sees one batch at a time and dropout draws
            one mask a batch (from the seed); the value is the batches' own traces, averaged by size.
        estimator: ``"auto"``: exact where possible, otherwise Hutchinson; or one of them for all layers.
        probes: Hutchinson's probes, at least 2; new ones for every layer and batch.
        seed: of the probes and of dropout.
        mode: ``"eval"`` or ``"train"``.
        dtype: compute in this type, for instance ``torch.float64``; default: the model's own.

    Raises:
        UsageError: an unknown estimator, mode or parameter, fewer than 2 probes, labels that are no class indices,
            a model that does not put out logits [n, C], or data that cannot be read.
    """
    check_known("estimator", estimator, ESTIMATORS)
    if probes < 2:
        raise UsageError(f"{probes} probes; at least 2 are needed for a standard error")
    run = Differentiable(model, loss, dtype, seed)
    for layer in layers:
        for name in layer.parameters:
            check_known("parameter", name, run.parameters)
    with set_mode(model, mode), twice_differentiable(model), torch.enable_grad():
        return _results(run, data, layers, batch, estimator, probes)


def _results(
    run: Differentiable, data: Data, layers: Sequence[Layer], batch: int, estimator: str, probes: int
) -> list[TraceResult]:
    values: dict[str, tuple[float, float]] = {}
    statuses: dict[str, str] = {}
    notes: dict[str, str] = {}
    n = 0
    try:
        verdict = decide(run, next(iter(batches(data, batch))), layers)
        notes = {name: "as asked" if estimator == "hutchinson" else why for name, why in verdict.obstacles.items()}
        exact: dict[str, list[str]] = {}
        estimated: dict[str, list[str]] = {}
        for layer in layers:
            reached = [name for name in layer.parameters if name in verdict.reached]
            if not reached:
                statuses[layer.name] = "unused in the forward pass" if layer.parameters else "no parameters"
            elif not notes[layer.name]:
                exact[layer.name] = reached
            elif estimator == "exact":
                statuses[layer.name] = f"no exact value: {notes[layer.name]}"
            else:
                estimated[layer.name] = reached
        if exact:
            found, n = exact_traces(run, data, exact, batch, verdict.n_classes)
            values |= {name: (value, 0.0) for name, value in found.items()}
        if estimated:
            drawn, failures, n = _hutchinson(run, data, estimated, batch, probes)
            statuses |= failures
            values |= {name: (float(e.mean()), float(e.std()) / math.sqrt(probes)) for name, e in drawn.items()}
    except LossNotFinite as error:
        statuses = {layer.name: f"the loss is not finite: {run.origin(error, layers)}" for layer in layers}
        n = 0
    n = n or sum(len(y) for _, y in batches(data, batch))

    results = []
    for layer in layers:
        size = sum(run.parameters[name].numel() for name in layer.parameters)
        value, stderr = values.get(layer.name, (math.nan, math.nan))
        status = statuses.get(layer.name, "ok")
        if status == "ok" and not (math.isfinite(value) and math.isfinite(stderr)):
            status = f"the trace of layer {layer.name!r} is not finite"
        note = notes.get(layer.name, "")
        if status == "ok":
            how = f"hutchinson(probes={probes})" if note else "exact"
            results.append(TraceResult(layer.name, value, stderr, how, size, n, note=note))
        else:
            results.append(TraceResult(layer.name, math.nan, math.nan, "", size, n, status, note))
    return results


def _hutchinson(
    run: Differentiable, data: Data, layers: Mapping[str, Sequence[str]], batch: int, probes: int
) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """Estimates by layer, float64 [probes]; by layer why there are none; the number of samples.

    A probe covers one layer's block, and every batch draws its own: the batches' errors then average out.
    """
    names = [name for group in layers.values() for name in group]
    tensors = [run.parameters[name] for name in names]
    generators = {layer: torch_generator(run.seed, "hessian probes", layer) for layer in layers}
    estimates = {layer: torch.zeros(probes, dtype=torch.float64) for layer in layers}
    failures: dict[str, str] = {}
    n = 0
    for index, (x, y) in enumerate(batches(data, batch)):
        _, losses = run.forward(x, y, index)
        gradients = torch.autograd.grad(losses.sum(), tensors, create_graph=True, allow_unused=True)
        gradient = dict(zip(names, gradients, strict=True))
        for layer, group in layers.items():
            if layer in failures:
                continue
            if index == 0 and any(differentiable_once(gradient[name]) for name in group):
                failures[layer] = "no second derivative: an operation on the way is marked as differentiable once"
                continue
            block = [run.parameters[name] for name in group]
            try:
                for probe in range(probes):
                    v = [rademacher(tensor, generators[layer]) for tensor in block]
                    product = curvature([gradient[name] for name in group], v, block)
                    estimates[layer][probe] += float(
                        sum((a * b).double().sum() for a, b in zip(v, product, strict=True))
                    )
            except RuntimeError as error:
                failures[layer] = no_second_derivative(error)
        n += len(y)
        del losses, gradients, gradient  # this batch's graph, before the next one's is built
    done = {layer: estimate / n for layer, estimate in estimates.items() if layer not in failures}
    return done, failures, n
