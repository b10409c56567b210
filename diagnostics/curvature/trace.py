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
normalisation in train mode), if weights are tied, or if the layer has no formula for
per-sample gradients.

A Gauss-Newton value is never called a Hessian. A layer is exact only if the autograd graph shows that it is, and a
numerical check that its formula holds.

**PyHessian.** The package PyHessian can compute the traces, too, as a cross-check. It
receives a copy of the model, in which all other layers are frozen, and the mean loss.
It never receives the model itself. The probes are drawn and averaged in a way that
gives a standard error. This module works around the following faults:

* PyHessian 0.1 stops by a rule that does not measure its error. It stops after two probes if the trace is negative.
  Here it runs all probes.
* PyHessian leaves a reference cycle from ``backward(create_graph=True)``. It is broken after use.
* PyHessian forces eval mode. Train mode is refused, not ignored.
* PyHessian computes only in the parameters' own floating type.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_core.layers import Layer
from fl_core.seeds import seed_of, torch_generator
from fl_core.training.losses import Loss
from fl_core.tree import Tree, copied, set_mode

from ..measurement import (
    NO_LIMIT,
    SPENT,
    Clock,
    Data,
    NoValue,
    batches,
    full_batch,
    why_unreadable,
)
from .exact import CHECKED, Verdict, decide, exact_terms, gauss_newton_terms
from .model import (
    CUT,
    Differentiable,
    Estimate,
    Estimates,
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
    squared_norms,
    twice_differentiable,
    usable,
)

PARTS, LEAST = 8, 16
"""The number of batches of a pair, and the fewest samples of each.

They hold where all samples of a batch share their random signs.
"""


def layer_traces(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    shared: Collection[str],
    batch: int,
    kind: str,
    probes: int,
    error: float,
    total: int,
) -> Estimates:
    """Return the trace of all layers by name: exact, or the mean of random probes of all of them at once.

    A layer's output z_n = A_n theta + c_n is linear in its own parameters. So the block
    of the mean loss is 1/N sum_n A_n^T H_n A_n, with H_n the Hessian of sample n's loss
    in z_n. This holds for any later layers. Its trace is estimated by u_n^T H_n u_n,
    with draws u_n of covariance A_n A_n^T (:mod:`diagnostics.curvature.model`), each
    sample's own. The layers of ``shared`` have v^T H v with signs v in the weights
    instead, one draw for a batch. In eval mode, unless samples mix, a pair then has
    smaller batches if ``batch`` is too large. There are :data:`PARTS` batches, or fewer
    of :data:`LEAST` samples each. The batches' errors average out.

    What one layer's draw adds to another's product has mean 0. Its size is that of the other's curvature, which may be
    a hundred times larger. So each draw is divided by the length of the layer's gradients, which grows with the
    curvature. The variance is then about as many times a single layer's as there are layers, whereas a single layer's
    product costs as much as half the network.

    The clock's estimate of the remaining time is within a factor of two on most networks. This example counts
    floating-point operations in place of time:

    >>> from unittest.mock import patch
    >>> from fl_core.layers import layers_of
    >>> from fl_core.run.costs import count_flops
    >>> from fl_core.training.losses import build
    >>> _ = torch.manual_seed(3)
    >>> x, y = torch.randn(64, 6), torch.arange(64) % 5
    >>> for act, gauss_newton in ((nn.ReLU, False), (nn.Tanh, False), (nn.GELU, True)):
    ...     net, ends = nn.Sequential(nn.Linear(6, 20), act(), nn.Linear(20, 20), act(), nn.Linear(20, 5)), []
    ...     def tell(line):
    ...         ends.append(counter.total + float(line.split()[-3]))
    ...     how = {"loss": build("cross_entropy"), "gauss_newton": gauss_newton}
    ...     with count_flops(net) as counter, patch("diagnostics.measurement.time") as clock:
    ...         clock.monotonic.side_effect = lambda: counter.total
    ...         how["clock"] = Clock(tell=tell)
    ...         found = hessian_trace(net, (x, y), layers_of(net, x), **how)
    ...     0.5 <= ends[-1] / counter.total <= 2
    True
    True
    True

    Args:
        run: the model as a function of its tensors.
        data: the samples and their labels.
        layers: name of a layer -> its parameters.
        shared: layers that are probed by random signs in their weights.
        batch: number of samples of a batch.
        kind: ``"exact"`` (see :func:`.exact.exact_terms`), ``"ggn"`` for probes of the Gauss-Newton matrix (see
            :func:`.exact.gauss_newton_terms`), or ``"hessian"`` for probes of the Hessian.
        probes: number of probes at most, and at least 2: the errors come from the differences between them. If exact,
            the number of passes.
        error: relative standard error of a batch at which no further probe is drawn,
            from :data:`FEWEST` probes on. With 0 all probes are drawn.
        total: number of samples in the data.

    Returns:
        The estimates by layer. If the budget ended early, they are of the samples that
        were read, with the standard error of sampling them.

    Raises:
        NoValue: a layer has no product with its block, a loss is not finite, or the
            budget ends before a first value.
        UsageError: a batch uses a module in another way than the first did.
    """
    layer_of: dict[str, str] = {}
    for layer, names in layers.items():
        layer_of |= dict.fromkeys(names, layer)
    unshared = [name for name in layer_of if layer_of[name] not in shared]
    weights = [name for name in layer_of if layer_of[name] in shared]
    paths = {owner(name): layer_of[name] for name in unshared}
    layer_of |= paths
    pair = None
    if weights and not run.model.training:
        pair = full_batch(data)
    if pair is not None:
        samples_of_batch = max(LEAST, -(-len(pair[1]) // PARTS))
        if samples_of_batch < batch and not are_coupled(
            run, *next(batches(pair, CHECKED, run.model))
        ):
            batch = samples_of_batch
    generator = torch_generator(run.seed, "hessian probes", *layers)
    values, variances = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    samples: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    n, fewest_probes, ended = 0, probes, False
    passes = probes
    if kind == "hessian":
        passes = 1
    most_probes = probes
    if error and kind != "exact":
        most_probes = min(probes, USUAL)
    clock, parts = run.clock, run.batches(data, batch)
    for index, x, y in clock.turns(parts, total, lambda item: len(item[2]), share=True):
        with record_calls(run.model, [*paths], len(x), passes) as recorded:
            logits, losses = run.forward(x, y, index)
        taps = usable(recorded, index)
        tensors = {name: run.parameters[name] for name in weights}
        if kind == "exact":
            terms = exact_terms(run.loss, logits, y, taps)
        elif kind == "ggn":
            terms = gauss_newton_terms(run.loss, logits, y, taps, tensors, generator)
        else:
            terms = _hessian_terms(
                run, losses, taps, tensors, unshared, layer_of, generator
            )
        zero = torch.zeros((), dtype=torch.float64)
        means, squares = dict.fromkeys(layers, zero), dict.fromkeys(layers, zero)
        estimates: dict[str, tuple[float, float]] = dict.fromkeys(layers, (0.0, 0.0))
        count = 0
        for count, term in enumerate(
            clock.turns(islice(terms, probes), most_probes), 1
        ):
            sums = dict.fromkeys(layers, zero)
            for name, entries in term.items():
                if name in layer_of:
                    layer = layer_of[name]
                    sums[layer] = sums[layer].to(entries.device) + entries
            for layer, value in sums.items():  # their running means and squares
                deviation = value - means[layer]
                means[layer] = means[layer] + deviation / count
                squares[layer] = squares[layer] + deviation * (value - means[layer])
                spread = float(squares[layer].sum()) / count / max(count - 1, 1)
                estimates[layer] = float(means[layer].sum()), spread
            is_precise = all(v <= (error * mean) ** 2 for mean, v in estimates.values())
            if kind == "exact":
                clock.check()  # a part of the passes has no value
            elif count > 1 and (clock.over or (is_precise and count >= FEWEST)):
                ended |= count < probes and not (is_precise and count >= FEWEST)
                break
        for layer, (mean, spread) in estimates.items():
            exact = kind == "exact"
            values[layer] += mean * count if exact else mean
            variances[layer] += 0 if exact else spread
            sample_values = means[layer] * count if exact else means[layer]
            samples[layer].append(sample_values.detach().cpu())
        n, fewest_probes = n + len(y), min(fewest_probes, count)
        del losses, logits, recorded, taps, terms  # before the next graph
    if n == total:
        return {
            layer: Estimate(
                values[layer] / n,
                math.sqrt(variances[layer]) / n,
                fewest_probes,
                n,
                ended,
            )
            for layer in layers
        }
    # the budget has left samples out: the spread of those that were read has the probes' own in it
    return {
        layer: Estimate(
            values[layer] / n,
            _sampling_error(samples[layer], n, total),
            fewest_probes,
            n,
            True,
        )
        for layer in layers
    }


def _sampling_error(parts: Sequence[Tensor], n: int, total: int) -> float:
    """Return the standard error of a mean over ``n`` of ``total`` samples; NaN if it is unknown.

    It is s / sqrt(n) sqrt(1 - n / total), with the standard deviation s of the samples' values.

    >>> values = [torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0])]
    >>> round(_sampling_error(values, 4, 8), 4)
    0.4082
    >>> _sampling_error([torch.tensor(7.0)], 4, 8)
    nan

    Args:
        parts: the values of each batch's samples, [b]. A sum over a batch tells nothing of its samples.
    """
    if n < 2 or any(batch_values.ndim == 0 for batch_values in parts):
        return math.nan
    spread = float(torch.cat([*parts]).std())
    return spread * math.sqrt((1 - n / total) / n)


def _hessian_terms(
    run: Differentiable,
    losses: Tensor,
    taps: Mapping[str, Tap],
    tensors: Tree,
    perturbed: Collection[str],
    layer_of: Mapping[str, str],
    generator: torch.Generator,
) -> Iterator[Tree]:
    """Yield probes without end: u_n^T H_n u_n [n] of each tapped module, and v^T H v of each tensor.

    A probe is a dict by the module's path or the tensor's name, in float64.

    Args:
        run: the model as a function of its tensors.
        losses: the loss of each sample, [n], with its graph.
        taps: the recorded calls of modules by path.
        tensors: further parameters by name.
        perturbed: the parameters of tapped modules that are perturbed.
        layer_of: the layer of each module and tensor.
        generator: source of the random signs.

    Raises:
        NoValue: an operation cannot be differentiated twice.
    """
    targets: list[Any] = [tap.edge for tap in taps.values()]
    targets += tensors.values()
    gradients = torch.autograd.grad(
        losses.sum(), targets, create_graph=True, allow_unused=True
    )
    if differentiable_once(gradients):
        raise NoValue(CUT)
    draws = [
        draw_of(
            run.model.get_submodule(path),
            tap.a,
            parameter_name(path, "weight") in perturbed,
            parameter_name(path, "bias") in perturbed,
        )
        for path, tap in taps.items()
    ]
    draws += [partial(rademacher, tensor) for tensor in tensors.values()]
    keys = [*taps, *tensors]
    layer_names = [layer_of[key] for key in keys]
    norms = dict.fromkeys(layer_names, 0.0)
    with torch.no_grad():
        gradients_by_key = dict(zip(keys, gradients, strict=True))
        for name, values in squared_norms(gradients_by_key, taps).items():
            if name in layer_of:
                norms[layer_of[name]] += float(values.sum())
    sizes = {layer: math.sqrt(norm) or 1.0 for layer, norm in norms.items()}
    while True:
        u = [
            draw(generator) / sizes[layer]
            for draw, layer in zip(draws, layer_names, strict=True)
        ]
        products = curvature(gradients, u, targets)
        terms = {}
        for key, layer, a, b in zip(keys, layer_names, u, products, strict=True):
            values = (a * b).double() * sizes[layer] ** 2
            terms[key] = values.flatten(1).sum(1) if key in taps else values.sum()
        yield terms


BACKENDS = ("fedlayers", "pyhessian")


def by_pyhessian(
    run: Differentiable,
    data: Data,
    layer: str,
    names: Sequence[str],
    batch: int,
    probes: int,
) -> Estimate:
    """Return the estimate of one layer's trace by PyHessian.

    Args:
        run: the model as a function of its tensors.
        data: the samples and their labels.
        layer: the layer's name, for the seed and for messages.
        names: exact names of the layer's parameters.
        batch: number of samples of a batch.
        probes: number of random vectors.

    Raises:
        NoValue: PyHessian fails, for instance without a second derivative.
    """
    from pyhessian import hessian

    block = copied(run.model).to(run.dtype)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name in names)
    batch_list = [
        (x.to(run.dtype) if run.dtype and x.is_floating_point() else x, y)
        for x, y in batches(data, batch, run.model)
    ]
    is_cuda = next(block.parameters()).is_cuda
    torch.manual_seed(seed_of(run.seed, "pyhessian probes", layer))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward", UserWarning)
            hessian_of_block = hessian(
                block, run.loss, dataloader=batch_list, cuda=is_cuda
            )
            # a tolerance that never stops it before the end
            probe_values = hessian_of_block.trace(maxIter=probes, tol=-math.inf)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise NoValue(
            f"pyhessian gives no value for layer {layer!r}: {reason}"
        ) from error
    finally:
        block.zero_grad()  # gradients with a graph that leads back to them
    estimates = torch.tensor(probe_values, dtype=torch.float64)
    stderr = float(estimates.std()) / math.sqrt(probes)
    count = sum(len(y) for _, y in batch_list)
    return Estimate(float(estimates.mean()), stderr, probes, count)


ESTIMATORS = ("auto", "exact", "activation", "hutchinson")
MOST_PROBES = 32
"""The most probes of a batch, if the caller names no number."""
ENTRIES = 2**29
"""The default number of probes is this divided by parameters times samples.

It is at least 2 and at most :data:`MOST_PROBES`.
"""
FEWEST, ERROR = 8, 0.1
"""The fewest probes of a batch that ends early, and the relative standard error at which it ends.

They hold if the caller names no number of probes.
"""
USUAL = 19
"""The number of probes by which the remaining time is estimated.

The real number is from :data:`FEWEST` to :data:`MOST_PROBES`. At either end the
estimate is wrong by about the same factor.
"""


@dataclass(frozen=True)
class TraceResult:
    """The trace of one layer's block of the Hessian, or of the Gauss-Newton matrix.

    Attributes:
        layer: the layer's name.
        trace: trace of the layer's block for the mean loss, over weights and biases.
            NaN if status is not ok.
        stderr: standard error of the trace. 0.0 means exact, NaN means no value.
        estimator: ``"exact"``, or for instance ``"activation(probes=32)"``. Empty without a value.
        n_params: parameters of the layer.
        n_samples: number of samples that the value is from. It is below that of the
            data if the time budget ended early.
        status: ``"ok"``, or why there is no value.
        note: why the value is not exact. Empty for an exact value, and if the caller
            chose an estimate.
    """

    layer: str
    trace: float
    stderr: float
    estimator: str
    n_params: int
    n_samples: int
    status: str = "ok"
    note: str = ""


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
    clock: Clock = NO_LIMIT,
    gauss_newton: bool = False,
) -> list[TraceResult]:
    """Return the trace of each layer's block of the Hessian, or of the Gauss-Newton matrix, in the order of ``layers``.

    The model is left as it was. Frozen parameters are measured too. Some results have no value, and their status gives
    the reason:

    * The layer does not reach the logits.
    * The loss is not finite.
    * An operation has no second derivative.
    * The trace is not finite.
    * The chosen estimator is impossible for the layer.
    * The time budget ended before the first value.

    Args:
        model: maps a batch to logits [n, C]. Its parameters and the data are on one device.
        data: a pair (x, y), a split, or a loader; see
            :func:`diagnostics.measurement.batches`. y [n, ...] holds the labels that
            the loss takes.
        layers: as :func:`fl_core.layers.layers_of` returns them.
        loss: its mean over all samples is differentiated.
        batch: samples at a time, which bounds the memory. A loader keeps its own batches. In ``"eval"`` mode an exact
            value does not depend on it. An estimate then draws other probes, as it does among other layers. In
            ``"train"`` mode batch normalisation sees one batch at a time, and dropout draws one mask a batch from the
            seed. The value is then the mean of the batches' own traces, weighted by size.
        estimator: ``"auto"`` is exact if possible, otherwise activation, otherwise hutchinson. ``"exact"`` and
            ``"activation"`` (random signs in the space of the layers' outputs) use this estimator alone. Where it is
            impossible, a status says so. ``"hutchinson"`` uses random signs in the space of the weights for all layers.
        probes: number of random vectors, at least 2. Default: :data:`MOST_PROBES`, and
            down to 2 where parameters times samples are many. The default number also
            ends, after :data:`FEWEST` probes or more, where all errors are at most a
            tenth of the value (:data:`ERROR`).
        seed: seed of the probes and of dropout.
        mode: ``"eval"`` or ``"train"``.
        dtype: compute in this type, for instance ``torch.float64``. Default: the model's own.
        backend: ``"fedlayers"``, or ``"pyhessian"`` as a cross-check, which uses that package's Hessian-vector products
            with weight-space probes in eval mode.
        clock: when it is over no further batch or probe begins. Two probes of the first batch are drawn if it began in
            time. A value of a part of the samples has a label that says so, and the standard error of their mean.
        gauss_newton: take the Gauss-Newton matrix (1/N) sum_n J_n^T (d2 loss_n / df_n^2) J_n. Its trace is exact
            for at most :data:`~diagnostics.curvature.exact.NARROW` outputs, if samples
            do not mix and the layer has a formula for per-sample gradients. No layer
            needs a second derivative.

    Raises:
        UsageError: labels do not fit the loss, the model does not return logits [n, C],
            or data cannot be read. Also a later batch uses a module in another way than
            the first did.
    """
    run = Differentiable(model, loss, dtype, seed, clock)
    way_by_layer: dict[str, Way] = {}
    groups: dict[str, dict[str, list[str]]] = {}
    values: Estimates = {}
    with set_mode(model, mode), twice_differentiable(model), torch.enable_grad():
        n = sum(len(y) for _, y in batches(data, batch))
        size = sum(tensor.numel() for tensor in run.parameters.values())
        relative_error = ERROR
        if probes:
            relative_error = 0.0
        probes = probes or max(2, min(MOST_PROBES, ENTRIES // (n * size)))
        try:
            verdict = decide(
                run, next(batches(data, batch, model)), layers, gauss_newton
            )
            for layer in layers:
                way_by_layer[layer.name] = layer_way = _way(
                    verdict, layer, estimator, backend
                )
                kind = layer_way.how
                if kind in ("activation", "hutchinson"):
                    kind = "hessian"
                    if gauss_newton:
                        kind = "ggn"
                if layer_way.status == "ok":
                    names = [n for n in layer.parameters if n in verdict.reached]
                    groups.setdefault(kind, {})[layer.name] = names
            shared = {
                name for name in way_by_layer if way_by_layer[name].how == "hutchinson"
            }
            groups_left = sorted(groups.items())  # exact values first
            while groups_left:  # the layers of one way are measured together
                kind, group = groups_left.pop(0)
                try:
                    if kind == "pyhessian":
                        for name, block in group.items():
                            values[name] = by_pyhessian(
                                run, data, name, block, batch, probes
                            )
                    else:
                        passes = probes
                        if kind == "exact":
                            passes = verdict.n_classes
                        values |= layer_traces(
                            run,
                            data,
                            group,
                            shared,
                            batch,
                            kind,
                            passes,
                            relative_error,
                            n,
                        )
                except NoValue as reason:  # of some layer
                    if len(group) == 1:
                        way_by_layer |= dict.fromkeys(group, Way(status=str(reason)))
                    else:
                        groups_left += [
                            (kind, {name: block}) for name, block in group.items()
                        ]
        except NoValue as reason:
            unmeasured_layers = [
                layer.name for layer in layers if layer.name not in values
            ]
            way_by_layer |= dict.fromkeys(unmeasured_layers, Way(status=str(reason)))
        except RuntimeError as reason:  # of the loss itself
            layer_way = Way(status=no_second_derivative(reason))
            way_by_layer = {layer.name: layer_way for layer in layers}
    results = []
    for layer in layers:
        label, note, status = way_by_layer[layer.name]
        no_estimate = Estimate(math.nan, math.nan, 0, n)
        value, stderr, n_probes, n_reached, ended = values.get(layer.name, no_estimate)
        if status == "ok" and not math.isfinite(value + stderr):
            status = f"the trace of layer {layer.name!r} is not finite"
            if ended and math.isfinite(value):  # without an error it is no estimate
                status = SPENT
        if status != "ok":
            value, stderr, label = math.nan, math.nan, ""
        else:
            label = _label(label, n_probes, n_reached, n, ended)
        results.append(
            TraceResult(
                layer.name,
                value,
                stderr,
                label,
                run.size(layer),
                n_reached,
                status,
                note,
            )
        )
    return results


def _label(label: str, passes: int, n: int, total: int, ended: bool) -> str:
    """Return the text that says how a value was found, for the column ``estimator``.

    A value that the budget cut short has another text.

    Args:
        label: name of the estimator.
        passes: number of probes.
        n, total: numbers of samples that were read, and of all samples.
        ended: whether the budget cut the value short.

    >>> _label("exact", 3, 70, 70, False), _label("exact", 3, 16, 70, True)
    ('exact', 'exact on 16 of 70')
    >>> _label("activation", 8, 70, 70, False), _label("activation", 2, 70, 70, True)
    ('activation(probes=8)', 'activation(ended after 2 probes)')
    """
    if label != "exact":
        label += f"(ended after {passes} probes)" if ended else f"(probes={passes})"
    if n == total:
        return label
    return f"{label} on {n} of {total}"


class Way(NamedTuple):
    """How one layer's trace is obtained.

    Attributes:
        how: the name of the estimator; empty without a value.
        note: why the value is not exact. Empty if the caller chose an estimate.
        status: why there is no value.
    """

    how: str = ""
    note: str = ""
    status: str = "ok"


def _way(verdict: Verdict, layer: Layer, estimator: str, backend: str) -> Way:
    obstacle, coupled = verdict.obstacles[layer.name], verdict.coupled[layer.name]
    if not any(name in verdict.reached for name in layer.parameters):
        return Way(note=obstacle, status=why_unreadable(layer, "all", False))
    if backend != "fedlayers":
        return Way(backend)
    if estimator == "hutchinson":
        return Way(estimator)
    if estimator == "activation":
        no_estimate_reason = f"no estimate in the space of its outputs: {coupled}"
        if coupled:
            return Way("", coupled, no_estimate_reason)
        return Way(estimator)
    if not obstacle:
        return Way("exact")
    if estimator == "exact":
        return Way(note=obstacle, status=f"no exact value: {obstacle}")
    if not coupled:
        return Way("activation", obstacle)
    return Way(
        "hutchinson", obstacle if coupled == obstacle else f"{obstacle}; {coupled}"
    )
