"""Estimates of Hessian traces from random signs in the logits, in the layers' outputs, or in the weights.

Each function estimates the trace of the mean loss's Hessian block, for layers by name. It returns values with standard
errors. The functions differ in their conditions and their cost:

* :func:`sign_traces` needs logits that are piecewise linear in the layer. A probe costs one backward pass for all
  layers.
* :func:`output_traces` needs a sample's loss to depend on its own layer output alone. The way from there may be
  nonlinear. A probe costs one Hessian-vector product from the layer's output onwards. Every sample draws its own signs,
  so that the error falls with the number of samples.
* :func:`weight_traces` always works. A probe costs one Hessian-vector product through the weights. All samples share
  its signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fl_core.seeds import torch_generator

from ..measurement import Batch, Data, batches, full_batch
from .exact import factors
from .formulas import draw_of, rademacher
from .model import (
    Differentiable,
    curvature,
    differentiable_once,
    no_second_derivative,
    owner,
    parameter_name,
    record_calls,
    squares,
    usable,
)

Estimates = dict[str, tuple[float, float]]
"""Layer to (value, standard error)."""

STRATUM, STRATA = (
    16,
    10,
)  # samples that get the same number of probes: at least so many, in about so many groups
FLOOR = 0.05  # of the mean gradient: what a sample without one counts as

CUT = "no second derivative: an operation on the way is marked as differentiable once"


def sign_traces(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    batch: int,
    probes: int,
) -> Estimates:
    """Estimate traces of layers that have an exact one, by random combinations of the output Hessian's factors.

    Take factors s_nk of sample n and independent signs r_nk. Then x_n = ||J_n^T sum_k r_nk s_nk||^2 has the mean t_n =
    sum_k ||J_n^T s_nk||^2 (Hutchinson, 1990, in the space of the factors). Factors of negative sign are combined on
    their own and subtracted. The samples' signs are independent: Var(1/N sum x_n) = 1/N^2 sum_n Var x_n.

    With two or more probes, Var x_n comes from the differences within each sample. With one probe, the standard error
    states a bound. K factors have a positive semidefinite Gram matrix M. It gives Var x_n = 4 sum_{k<l} M_kl^2 <= a
    t_n^2 with a = 2 (1 - 1 / K). Since E x_n^2 = Var x_n + t_n^2, the bound is Var x_n <= a / (1 + a) E x_n^2.
    """
    layer_of = {name: layer for layer, names in layers.items() for name in names}
    paths = list(dict.fromkeys(map(owner, layer_of)))
    generator = torch_generator(run.seed, "sign probes")
    values = dict.fromkeys(layers, 0.0)
    variances = dict.fromkeys(layers, 0.0)
    n = 0
    for index, (x, y) in enumerate(batches(data, batch, run.model)):
        with record_calls(run.model, paths, len(x), passes=probes) as taps:
            logits, _ = run.forward(x, y, index)
        usable_taps = usable(taps, index)
        s, signs = factors(run.loss, logits, y)
        a = 2 * (1 - 1 / s.shape[1]) if s.shape[1] else 0.0
        drawn = {
            layer: torch.zeros(
                probes, len(y), dtype=torch.float64, device=logits.device
            )
            for layer in layers
        }
        largest = dict.fromkeys(
            layers, 0.0
        )  # sum of the squares of the parts of either sign
        for probe in range(probes):
            r = rademacher(signs, generator)
            for sign in (1.0, -1.0):
                chosen = r * (signs == sign)
                if not bool(chosen.any()):
                    continue
                cotangent = (chosen.unsqueeze(1) @ s).squeeze(1).to(logits.dtype)
                parts: dict[str, Tensor] = {}
                for name, squared_norms in squares(
                    logits, cotangent, usable_taps
                ).items():
                    if name in layer_of:
                        parts[layer_of[name]] = (
                            parts.get(layer_of[name], 0) + squared_norms.double()
                        )
                for layer, part in parts.items():
                    drawn[layer][probe] += sign * part
                    largest[layer] += float(part.square().sum())
        for layer, sample in drawn.items():
            values[layer] += float(sample.mean(0).sum())
            within = (
                float(sample.var(0).sum()) / probes
                if probes > 1
                else a / (1 + a) * largest[layer]
            )
            variances[layer] += within
        n += len(y)
        del (
            taps,
            usable_taps,
            logits,
        )  # this batch's graph, before the next one's is built
    return {
        layer: (values[layer] / n, math.sqrt(variances[layer]) / n) for layer in layers
    }


def output_traces(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    batch: int,
    probes: int,
) -> tuple[Estimates, dict[str, str]]:
    """Estimate traces of layers that treat samples independently, by random signs in the space of their outputs.

    A layer's output z_n = A_n theta + c_n is linear in its own parameters. So the block of the mean loss is 1/N sum_n
    A_n^T H_n A_n, with H_n the Hessian of sample n's loss in z_n. This holds for any later layers. Its trace is
    estimated by u_n^T H_n u_n, with draws u_n of covariance A_n A_n^T (:mod:`diagnostics.curvature.formulas`). One
    Hessian-vector product gives H_n u_n of all samples. The modules of a layer share it. Their draws are
    independent, so that what one module adds to another's has mean 0.

    In eval mode, samples with a larger gradient at the layer's output get more probes (:func:`_shares`). Samples are
    sorted by that gradient. A small gradient means little curvature and little uncertainty.

    Returns:
        The estimates; layer -> why there is none. The standard error comes from the differences
        between a sample's probes, so there must be two or more.
    """
    paths = {
        layer: list(dict.fromkeys(map(owner, names))) for layer, names in layers.items()
    }
    every = list(dict.fromkeys(path for some in paths.values() for path in some))
    pair = None if run.model.training else full_batch(data)
    sizes = {} if pair is None else _gradient_sizes(run, pair, every, batch)
    n = sum(len(y) for _, y in batches(data, batch)) if pair is None else len(pair[1])
    done: Estimates = {}
    failures: dict[str, str] = {}
    for layer, names in layers.items():
        generator = torch_generator(run.seed, "output probes", layer)
        squares = [sizes[path] for path in paths[layer] if sizes]
        size = (
            torch.stack(squares).sum(0).pow(0.25) if squares else None
        )  # the square root of a norm
        value = variance = 0.0
        try:
            for index, (x, y, count) in enumerate(
                _shares(run.model, data, pair, size, batch, probes)
            ):
                sample = _sample_batch(
                    run, x, y, index, paths[layer], names, count, generator
                )
                value += float(sample.mean(0).sum())
                variance += float(sample.var(0).sum()) / count
        except _NoSecondDerivative as reason:
            failures[layer] = str(reason)
        else:
            done[layer] = value / n, math.sqrt(variance) / n
    return done, failures


class _NoSecondDerivative(Exception):
    """Raised if an operation after a layer cannot be differentiated twice. It becomes the layer's status."""


def _sample_batch(
    run: Differentiable,
    x: Tensor,
    y: Tensor,
    index: int,
    paths: Sequence[str],
    names: Sequence[str],
    probes: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the draws u_n^T H_n u_n of one batch, float64 [probes, n], summed over the layer's modules."""
    with record_calls(run.model, paths, len(x), passes=1) as taps:
        _, losses = run.forward(x, y, index)
    usable_taps = usable(taps, index)
    edges = [usable_taps[path].edge for path in paths]
    deltas = torch.autograd.grad(losses.sum(), edges, create_graph=True)
    if index == 0 and any(map(differentiable_once, deltas)):
        raise _NoSecondDerivative(CUT)
    sample = torch.zeros(probes, len(y), dtype=torch.float64, device=losses.device)
    try:
        draws = [
            draw_of(
                run.model.get_submodule(path),
                usable_taps[path].a,
                parameter_name(path, "weight") in names,
                parameter_name(path, "bias") in names,
            )
            for path in paths
        ]
        for probe in range(probes):
            u = [draw(generator) for draw in draws]
            products = curvature(deltas, u, edges)
            sample[probe] = sum(
                (a * b).flatten(1).double().sum(1)
                for a, b in zip(u, products, strict=True)
            )
    except RuntimeError as error:
        raise _NoSecondDerivative(no_second_derivative(error)) from error
    return sample


def _gradient_sizes(
    run: Differentiable, data: Data, paths: Sequence[str], batch: int
) -> dict[str, Tensor]:
    """Return the squared norm of each sample's gradient at the modules' outputs, [n] by path."""
    parts: dict[str, list[Tensor]] = {path: [] for path in paths}
    for index, (x, y) in enumerate(batches(data, batch, run.model)):
        with record_calls(run.model, paths, len(x), passes=1) as taps:
            _, losses = run.forward(x, y, index)
        usable_taps = usable(taps, index)
        deltas = torch.autograd.grad(
            losses.sum(), [usable_taps[path].edge for path in paths]
        )
        for path, delta in zip(paths, deltas, strict=True):
            parts[path].append(delta.flatten(1).square().sum(1).double())
    return {path: torch.cat(some) for path, some in parts.items()}


def _shares(
    model: nn.Module,
    data: Data,
    pair: Batch | None,
    size: Tensor | None,
    batch: int,
    probes: int,
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield batches with their numbers of probes: ``probes`` per sample on average, at least 2.

    Neyman's allocation has the least variance for a given number of draws. Its c_n is proportional to the standard
    deviation of sample n's draws. The square root of the gradient's norm at the output stands for that deviation. On a
    trained net it gained a factor of 1.4 to 1.9, on an untrained one nothing. The norm itself would lose if it
    misleads. The allocation does not depend on the draws, so the estimate stays unbiased.

    A loader's own batches keep equal shares. So do batches whose masks depend on their number (train mode).
    """
    if pair is None or size is None:
        for x, y in batches(data, batch, model):
            yield x, y, probes
        return
    x, y = pair
    part = min(batch, max(STRATUM, math.ceil(len(y) / STRATA)))
    size = size.clamp_min(float(size.mean()) * FLOOR)
    mean = float(size.mean())
    order = size.argsort()
    for rows in order.split(part):
        share = float(size[rows].mean()) / mean if mean > 0 else 1.0
        rows = rows.to(x.device)
        yield x[rows], y[rows.to(y.device)], max(2, round(probes * share))


def weight_traces(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    batch: int,
    probes: int,
) -> tuple[Estimates, dict[str, str]]:
    """Estimate traces by Hutchinson's v^T H v with random signs v in the weights.

    A probe covers one layer's block. Every batch draws its own probes, so the batches' errors average out. The standard
    error is that of the mean over the probes, so there must be two or more.

    Returns:
        The estimates; layer -> why there is none.
    """
    generators = {
        layer: torch_generator(run.seed, "hessian probes", layer) for layer in layers
    }
    estimates = {layer: torch.zeros(probes, dtype=torch.float64) for layer in layers}

    def probe(
        layer: str, names: Sequence[str], gradients: Mapping[str, Tensor]
    ) -> None:
        block = [run.parameters[name] for name in names]
        for k in range(probes):
            v = [rademacher(tensor, generators[layer]) for tensor in block]
            product = curvature([gradients[name] for name in names], v, block)
            estimates[layer][k] += float(
                sum((a * b).double().sum() for a, b in zip(v, product, strict=True))
            )

    failures, n = by_batch(run, data, layers, batch, probe)
    means = {
        layer: estimate / n
        for layer, estimate in estimates.items()
        if layer not in failures
    }
    return (
        {
            layer: (float(e.mean()), float(e.std()) / math.sqrt(probes))
            for layer, e in means.items()
        },
        failures,
    )


def by_batch(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    batch: int,
    probe: Callable[[str, Sequence[str], Mapping[str, Tensor]], None],
) -> tuple[dict[str, str], int]:
    """Probe every layer in every batch, by the gradients of the batch's summed loss.

    The gradients keep their graph.

    Args:
        layers: names of the parameters of each layer.
        probe: a function of a layer, its parameters' names, and the gradients by name.

    Returns:
        Layer -> why it cannot be probed, and the number of samples.
    """
    names = [name for group in layers.values() for name in group]
    tensors = [run.parameters[name] for name in names]
    failures: dict[str, str] = {}
    n = 0
    for index, (x, y) in enumerate(batches(data, batch, run.model)):
        _, losses = run.forward(x, y, index)
        gradients = torch.autograd.grad(
            losses.sum(), tensors, create_graph=True, allow_unused=True
        )
        gradient = dict(zip(names, gradients, strict=True))
        for layer, group in layers.items():
            if layer in failures:
                continue
            if index == 0 and any(
                differentiable_once(gradient[name]) for name in group
            ):
                failures[layer] = CUT
                continue
            try:
                probe(layer, group, gradient)
            except RuntimeError as error:
                failures[layer] = no_second_derivative(error)
        n += len(y)
        del (
            losses,
            gradients,
            gradient,
        )  # this batch's graph, before the next one's is built
    return failures, n
