"""The trace of each layer's diagonal block of the loss's Hessian: exact if possible, estimated otherwise.

A large trace means a sharp loss in that layer. Let L be the mean loss over all samples. Let f be the logits and theta a
layer's parameters. Then

    tr H_theta = sum over theta's entries of d2 L / d theta_i^2          (PLayer-FL, Eq. A.2: the eigenvalues' sum)

**Exact.** The trace is exact if f is piecewise linear in each of the layer's parameter tensors. Each tensor's block is
then 1/N sum_n J_n^T (d2 loss_n / df_n^2) J_n with J_n = df_n / dtheta. The C x C output Hessians have factors s_nk, so
tr H = 1/N sum_n sum_k sign_nk ||J_n^T s_nk||^2. That takes at most C backward passes of activation gradients. It needs
no weight gradient and no graph of a graph.

**Estimated.** Other layers use Hutchinson's estimator (1990), with its standard error. The random signs lie in the
space of each layer's outputs if samples do not mix. They lie in the space of the weights if samples mix (batch
normalisation in train mode) or if weights are tied.

A Gauss-Newton value is never called a Hessian. A layer is exact only if the autograd graph shows that it is, and a
numerical check that its formula holds.

Hessian traces by the package PyHessian, to cross-check this package's own.

It receives a layer as a module of its own, with the layer's parameters only, and the mean loss. It never
receives the model itself. The probes are drawn and averaged in a way that gives a standard error. This module works
around the following faults:

* PyHessian 0.1 stops by a rule that does not measure its error. It stops after two probes if the trace is negative.
  Here it runs all probes.
* PyHessian leaves a reference cycle from ``backward(create_graph=True)``. It is broken after use.
* PyHessian forces eval mode. Train mode is refused, not ignored.
* PyHessian computes only in the parameters' own floating type.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.seeds import seed_of, torch_generator
from fl_core.training.losses import Loss
from fl_core.tree import set_mode

from ..measurement import Data, batches, call_with, full_batch, why_unreadable
from .exact import CHECKED, Verdict, decide, exact_traces
from .model import (
    CUT,
    Differentiable,
    Estimates,
    NoLoss,
    NoProduct,
    Tap,
    are_coupled,
    curvature,
    differentiable_once,
    draw_of,
    no_second_derivative,
    owner,
    parameter_name,
    rademacher,
    record_calls,
    twice_differentiable,
    usable,
)

PARTS, LEAST = 8, 16
"""Batches of a pair, and samples of each at least, where all samples of a batch share their signs."""


def sampled_traces(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    shared: Collection[str],
    batch: int,
    probes: int,
    error: float,
) -> Estimates:
    """Estimate traces of all layers by one Hessian-vector product a probe, with signs that are independent.

    A layer's output z_n = A_n theta + c_n is linear in its own parameters. So the block of the mean loss is 1/N sum_n
    A_n^T H_n A_n, with H_n the Hessian of sample n's loss in z_n. This holds for any later layers. Its trace is
    estimated by u_n^T H_n u_n, with draws u_n of covariance A_n A_n^T (:mod:`diagnostics.curvature.model`), each
    sample's own. The layers of ``shared`` have v^T H v with signs v in the weights instead, one draw for a batch. In
    eval mode, unless samples mix, a pair is then divided into at least :data:`PARTS` batches, whose errors average out.

    What one layer's draw adds to another's product has mean 0. Its size is that of the other's curvature, which may be
    a hundred times larger. So each draw is divided by the length of the layer's gradients, which grows with the
    curvature. The variance is then about as many times a single layer's as there are layers, whereas a single layer's
    product costs as much as half the network.

    Args:
        shared: layers whose signs lie in the weights.
        probes: number of probes at most, and at least 2: the errors come from the differences between them.
        error: relative standard error of a batch at which no further probe is drawn.

    Raises:
        NoProduct: a layer has no product with its block.
    """
    names = [name for group in layers.values() for name in group]
    layer_of = {name: layer for layer, group in layers.items() for name in group}
    own = [name for name in names if layer_of[name] not in shared]
    weights = [name for name in names if layer_of[name] in shared]
    paths = {owner(name): layer_of[name] for name in own}
    whose = [*paths.values(), *(layer_of[name] for name in weights)]
    pair = full_batch(data) if weights and not run.model.training else None
    if pair is not None:
        part = max(LEAST, -(-len(pair[1]) // PARTS))
        if part < batch and not are_coupled(
            run, *next(batches(pair, CHECKED, run.model))
        ):
            batch = part
    generator = torch_generator(run.seed, "hessian probes", *layers)
    values, variances = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    n, fewest = 0, probes
    total = sum(len(y) for _, y in batches(data, batch))
    for index, x, y in run.batches(data, batch):
        now = time.monotonic()
        ends = now + (run.until - now) * len(y) / (total - n)
        with record_calls(run.model, [*paths], len(x), passes=1) as recorded:
            _, losses = run.forward(x, y, index)
        taps = usable(recorded, index)
        targets: list[Any] = [taps[path].edge for path in paths]
        targets += [run.parameters[name] for name in weights]
        gradients = torch.autograd.grad(
            losses.sum(), targets, create_graph=True, allow_unused=True
        )
        if index == 0 and differentiable_once(gradients):
            raise NoProduct(CUT)
        draws = [
            draw_of(
                run.model.get_submodule(path),
                taps[path].a,
                parameter_name(path, "weight") in own,
                parameter_name(path, "bias") in own,
            )
            for path in paths
        ]
        draws += [partial(rademacher, run.parameters[name]) for name in weights]
        named = {path: taps[path] for path in paths}  # not in the order of calls
        sizes = _gradient_sizes(named, gradients, whose)
        zero = torch.zeros((), dtype=torch.float64)
        means, squares = dict.fromkeys(layers, zero), dict.fromkeys(layers, zero)
        found: dict[str, tuple[float, float]] = {}
        for count in range(1, probes + 1):
            u = [
                draw(generator) / sizes[layer]
                for draw, layer in zip(draws, whose, strict=True)
            ]
            terms = dict.fromkeys(layers, zero)
            products = curvature(gradients, u, targets)
            for k, (layer, a, b) in enumerate(zip(whose, u, products, strict=True)):
                each = (a * b).double() * sizes[layer] ** 2
                each = each.flatten(1).sum(1) if k < len(paths) else each.sum()
                terms[layer] = terms[layer].to(each.device) + each
            for layer, term in terms.items():  # their running means and squares
                off = term - means[layer]
                means[layer] = means[layer] + off / count
                squares[layer] = squares[layer] + off * (term - means[layer])
                spread = float(squares[layer].sum()) / count / max(count - 1, 1)
                found[layer] = float(means[layer].sum()), spread
            small = all(v <= (error * mean) ** 2 for mean, v in found.values())
            late = count > 1 and time.monotonic() > ends
            if late or (small and count >= FEWEST):
                break
        for layer, (mean, spread) in found.items():
            values[layer] += mean
            variances[layer] += spread
        n, fewest = n + len(y), min(fewest, count)
        del losses, gradients, recorded, taps, targets  # the graph, before the next one
    return {
        layer: (values[layer] / n, math.sqrt(variances[layer]) / n, fewest, n)
        for layer in layers
    }


@torch.no_grad()
def _gradient_sizes(
    taps: Mapping[str, Tap], gradients: Sequence[Tensor | None], layers: Sequence[str]
) -> dict[str, float]:
    """Return the length of each layer's gradients, over samples where they are known; 1 for a layer without any."""
    squares = dict.fromkeys(layers, 0.0)
    norms = [tap.norms for tap in taps.values()]
    for k, (layer, gradient) in enumerate(zip(layers, gradients, strict=True)):
        if gradient is not None and k < len(norms):
            squares[layer] += sum(float(v.sum()) for v in norms[k](gradient).values())
        elif gradient is not None:
            squares[layer] += float(gradient.square().sum())
    return {layer: math.sqrt(square) or 1.0 for layer, square in squares.items()}


BACKENDS = ("fedlayers", "pyhessian")


class _Block(nn.Module):
    """A module with only one layer's parameters. The rest of the model is constant."""

    def __init__(self, run: Differentiable, names: Sequence[str]) -> None:
        super().__init__()
        self._run, self._names = run, tuple(names)
        self._rest = {
            name: p.detach() for name, p in run.parameters.items()
        } | run.buffers
        for position, name in enumerate(names):
            self.register_parameter(
                f"p{position}", nn.Parameter(run.parameters[name].detach())
            )

    def forward(self, x: Tensor) -> Tensor:
        own = {
            name: getattr(self, f"p{position}")
            for position, name in enumerate(self._names)
        }
        logits: Tensor = call_with(self._run.model, {**self._rest, **own}, x)
        return logits


def by_pyhessian(
    run: Differentiable,
    data: Data,
    layer: str,
    names: Sequence[str],
    batch: int,
    probes: int,
) -> tuple[float, float, int, int]:
    """Return the estimate of one layer's trace by PyHessian.

    Raises:
        NoProduct: the package gives no value.
    """
    from pyhessian import hessian

    block = _Block(run, names)
    source = [
        (x.to(run.dtype) if run.dtype and x.is_floating_point() else x, y)
        for x, y in batches(data, batch, run.model)
    ]
    cuda = next(block.parameters()).is_cuda
    torch.manual_seed(seed_of(run.seed, "pyhessian probes", layer))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward", UserWarning)
            measured = hessian(block, run.loss, dataloader=source, cuda=cuda)
            # a tolerance that never stops it before the end
            drawn = measured.trace(maxIter=probes, tol=-math.inf)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise NoProduct(
            f"pyhessian gives no value for layer {layer!r}: {reason}"
        ) from error
    finally:
        for parameter in block.parameters():
            parameter.grad = None  # a gradient with a graph that leads back to it
    estimates = torch.tensor(drawn, dtype=torch.float64)
    stderr = float(estimates.std()) / math.sqrt(probes)
    return float(estimates.mean()), stderr, probes, sum(len(y) for _, y in source)


ESTIMATORS = ("auto", "exact", "activation", "hutchinson")
MOST_PROBES = 32
"""Probes at most, where the caller names no number."""
ENTRIES = 2**29
"""Parameters times samples in all probes, by which the default number is 2 to :data:`MOST_PROBES`."""
FEWEST, ERROR = 8, 0.1
"""Probes and relative standard error with which a batch ends, where the caller names no number."""


@dataclass(frozen=True)
class TraceResult:
    """The Hessian trace of one layer.

    Attributes:
        layer: the layer's name.
        trace: trace of the layer's block of the mean loss's Hessian, over weights and biases. NaN if status is not ok.
        stderr: standard error of the trace. 0.0 means exact, NaN means no value.
        estimator: ``"exact"``, or for instance ``"activation(probes=32)"``. Empty without a value.
        n_params: parameters of the layer.
        n_samples: samples of the data.
        status: ``"ok"``, or why there is no value.
        note: why the value is not exact. Empty for an exact value.
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
    probes: int | None = None,
    seed: int = 0,
    mode: str = "eval",
    dtype: torch.dtype | None = None,
    backend: str = "fedlayers",
    until: float = math.inf,
) -> list[TraceResult]:
    """Return the Hessian trace of each layer, in the order of ``layers``.

    The model is left as it was. Frozen parameters are measured too. Some results have no value, and their status gives
    the reason:

    * The layer does not reach the logits.
    * The loss is not finite.
    * An operation has no second derivative.
    * Hessian-vector products of the layer fail the checks of :mod:`diagnostics.curvature.spectrum`.

    Args:
        model: maps a batch to logits [n, C]. Its parameters and the data are on one device.
        data: a pair (x, y), a split, or a loader; see :func:`diagnostics.measurement.batches`. y holds class indices.
        layers: as :func:`fl_core.layers.layers_of` returns them.
        loss: its mean over all samples is differentiated.
        batch: samples at a time, which bounds the memory. A loader keeps its own batches. In ``"eval"`` mode an exact
            value does not depend on it. An estimate then draws other probes, as it does among other layers. In
            ``"train"`` mode batch normalisation sees one batch at a time, and dropout draws one mask a batch from the
            seed. The value is then the mean of the batches' own traces, weighted by size.
        estimator: ``"auto"`` is exact if possible, otherwise activation, otherwise hutchinson. ``"exact"`` and
            ``"activation"`` (random signs in the space of the layers' outputs) use this estimator alone. Where it is
            impossible, a status says so. ``"hutchinson"`` uses random signs in the space of the weights for all layers.
        probes: number of random vectors, at least 2. Default: :data:`MOST_PROBES`, and down to 2 where parameters times
            samples are many. They also end where all errors are below a tenth of the value (:data:`ERROR`).
        seed: seed of the probes and of dropout.
        mode: ``"eval"`` or ``"train"``.
        dtype: compute in this type, for instance ``torch.float64``. Default: the model's own.
        backend: ``"fedlayers"``, or ``"pyhessian"`` as a cross-check, which uses that package's Hessian-vector products
            with weight-space probes in eval mode.
        until: the time at which the budget ends, as of ``time.monotonic``. Then no further batch or probe begins.
            Two probes of the first batch are drawn if it began in time. Results state what they are based on.

    Raises:
        UsageError: labels are not class indices, the model does not return logits [n, C], or data cannot be read.
    """
    run = Differentiable(model, loss, dtype, seed, until)
    ways: dict[str, Way] = {}
    groups: dict[str, dict[str, list[str]]] = {}
    values: Estimates = {}
    failures: dict[str, str] = {}
    with set_mode(model, mode), twice_differentiable(model), torch.enable_grad():
        n = sum(len(y) for _, y in batches(data, batch))
        size = sum(tensor.numel() for tensor in run.parameters.values())
        usual, error = MOST_PROBES, 0.0 if probes else ERROR
        if backend == "fedlayers" and not model.training:
            usual = min(MOST_PROBES, max(2, ENTRIES // (n * size)))
        probes = probes or usual
        try:
            verdict = decide(run, next(batches(data, batch, model)), layers)
            for layer in layers:
                ways[layer.name] = way = _way(verdict, layer, estimator, backend)
                kind = "sampled" if way.how in ("activation", "hutchinson") else way.how
                if way.status == "ok":
                    names = [n for n in layer.parameters if n in verdict.reached]
                    groups.setdefault(kind, {})[layer.name] = names
            shared = {name for name in ways if ways[name].how == "hutchinson"}
            todo = sorted(groups.items())  # exact values first
            while todo:  # the layers of one way are measured together
                kind, group = todo.pop(0)
                try:
                    if kind == "exact":
                        values |= exact_traces(
                            run, data, group, batch, verdict.n_classes
                        )
                    elif kind == "sampled":
                        values |= sampled_traces(
                            run, data, group, shared, batch, probes, error
                        )
                    else:
                        for name, block in group.items():
                            values[name] = by_pyhessian(
                                run, data, name, block, batch, probes
                            )
                except NoProduct as reason:  # of some layer
                    if len(group) == 1:
                        failures |= dict.fromkeys(group, str(reason))
                    else:
                        todo += [(kind, {name: block}) for name, block in group.items()]
        except NoLoss as reason:
            failures |= {e.name: str(reason) for e in layers if e.name not in values}
        except RuntimeError as reason:  # of the loss itself
            failures = {e.name: no_second_derivative(reason) for e in layers}
    results = []
    for layer in layers:
        way = ways.get(layer.name, Way())
        value, stderr, drawn, of = values.get(layer.name, (math.nan, math.nan, 0, n))
        status = failures.get(layer.name, way.status)
        if status == "ok" and not (math.isfinite(value) and math.isfinite(stderr)):
            status = f"the trace of layer {layer.name!r} is not finite"
        if status != "ok":
            value, stderr, drawn, way = math.nan, math.nan, 0, Way(note=way.note)
        how = way.how + (f"(probes={drawn})" if drawn else "")
        results.append(
            TraceResult(
                layer.name, value, stderr, how, run.size(layer), of, status, way.note
            )
        )
    return results


def check_way(estimator: str, backend: str, mode: str) -> None:
    """Refuse an unknown method for the trace (see :func:`hessian_trace`)."""
    check_known("estimator", estimator, ESTIMATORS)
    if check_known("backend", backend, BACKENDS) != "fedlayers":
        if estimator not in ("auto", "hutchinson"):
            raise UsageError(
                f"estimator must be one of weight-space probes with backend {backend!r}; got {estimator!r}."
            )
        if mode != "eval":
            raise UsageError(
                f"mode must be 'eval' with backend {backend!r}; got {mode!r}. Use backend 'fedlayers'."
            )


class Way(NamedTuple):
    """How one layer's trace is obtained.

    Attributes:
        how: the estimator's name; empty without a value.
        note: why no exact value is taken, or ``"as asked"``.
        status: why there is no value.
    """

    how: str = ""
    note: str = ""
    status: str = "ok"


def _way(verdict: Verdict, layer: Layer, estimator: str, backend: str) -> Way:
    bent, coupled = verdict.obstacles[layer.name], verdict.coupled[layer.name]
    if not any(name in verdict.reached for name in layer.parameters):
        return Way(note=bent, status=why_unreadable(layer, "all", False))
    if backend != "fedlayers":
        return Way(backend, "as asked")
    if estimator == "hutchinson":
        return Way(estimator, "as asked")
    if estimator == "activation":
        why = f"no estimate in the space of its outputs: {coupled}"
        return Way("", coupled, why) if coupled else Way(estimator, "as asked")
    if not bent:
        return Way("exact")
    if estimator == "exact":
        return Way(note=bent, status=f"no exact value: {bent}")
    if not coupled:
        return Way("activation", bent)
    return Way("hutchinson", bent if coupled == bent else f"{bent}; {coupled}")
