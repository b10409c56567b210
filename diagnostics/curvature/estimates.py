"""Estimates of Hessian traces from random signs in the layers' outputs, or in the weights.

A probe costs one Hessian-vector product for all layers. Where a sample's loss depends on its own layer output alone,
every sample draws its own signs, so that the error falls with their number.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_core.seeds import torch_generator

from ..measurement import Data, batches, full_batch
from .exact import CHECKED
from .formulas import draw_of, rademacher
from .model import (
    Differentiable,
    Tap,
    curvature,
    differentiable_once,
    no_second_derivative,
    owner,
    parameter_name,
    record_calls,
    usable,
)

Estimates = dict[str, tuple[float, float]]
"""Layer to (value, standard error)."""

PARTS = 8
"""Batches of a pair at least, where all samples of a batch share their signs."""

CUT = "no second derivative: an operation on the way is marked as differentiable once"


def sampled_traces(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    shared: Collection[str],
    batch: int,
    probes: int,
) -> tuple[Estimates, dict[str, str]]:
    """Estimate traces of all layers by one Hessian-vector product a probe, with signs that are independent.

    A layer's output z_n = A_n theta + c_n is linear in its own parameters. So the block of the mean loss is 1/N sum_n
    A_n^T H_n A_n, with H_n the Hessian of sample n's loss in z_n. This holds for any later layers. Its trace is
    estimated by u_n^T H_n u_n, with draws u_n of covariance A_n A_n^T (:mod:`diagnostics.curvature.formulas`), each
    sample's own. The layers of ``shared`` have v^T H v with signs v in the weights instead, one draw for a batch. In
    eval mode, unless samples mix, a pair is then divided into at least :data:`PARTS` batches, whose errors average out.

    What one layer's draw adds to another's product has mean 0. Its size is that of the other's curvature, which may be
    a hundred times larger. So each draw is divided by the length of the layer's gradients, which grows with the
    curvature. The variance is then about as many times a single layer's as there are layers, whereas a single layer's
    product costs as much as half the network.

    Args:
        shared: layers whose signs lie in the weights.
        probes: at least 2, since the errors come from the differences between them.

    Returns:
        The estimates; layer -> why there is none.
    """
    names = [name for group in layers.values() for name in group]
    layer_of = {name: layer for layer, group in layers.items() for name in group}
    own = [name for name in names if layer_of[name] not in shared]
    weights = [name for name in names if layer_of[name] in shared]
    paths = {owner(name): layer_of[name] for name in own}
    whose = [*paths.values(), *(layer_of[name] for name in weights)]
    pair = full_batch(data) if weights and not run.model.training else None
    if pair is not None and _are_apart(run, *(part[:CHECKED] for part in pair)):
        batch = min(batch, -(-len(pair[1]) // PARTS))
    generator = torch_generator(run.seed, "hessian probes", *layers)
    values, variances = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    n = 0
    for index, (x, y) in enumerate(batches(data, batch, run.model)):
        with record_calls(run.model, [*paths], len(x), passes=1) as recorded:
            _, losses = run.forward(x, y, index)
        taps = usable(recorded, index)
        targets: list[Any] = [taps[path].edge for path in paths]
        targets += [run.parameters[name] for name in weights]
        gradients = torch.autograd.grad(
            losses.sum(), targets, create_graph=True, allow_unused=True
        )
        cut = {
            w for w, g in zip(whose, gradients, strict=True) if differentiable_once(g)
        }
        try:
            if cut:
                raise _NoSecondDerivative(CUT)
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
            sizes = _gradient_sizes(taps, gradients, whose)
            drawn: dict[str, list[Tensor]] = {layer: [] for layer in layers}
            for _ in range(probes):
                u = [
                    draw(generator) / sizes[layer]
                    for draw, layer in zip(draws, whose, strict=True)
                ]
                terms = dict.fromkeys(layers, torch.zeros((), dtype=torch.float64))
                products = _products(gradients, u, targets)
                for k, (layer, a, b) in enumerate(zip(whose, u, products, strict=True)):
                    each = (a * b).double() * sizes[layer] ** 2
                    each = each.flatten(1).sum(1) if k < len(paths) else each.sum()
                    terms[layer] = terms[layer].to(each.device) + each
                for layer, term in terms.items():
                    drawn[layer].append(term)
        except _NoSecondDerivative as reason:
            if len(layers) == 1:
                return {}, dict.fromkeys(layers, str(reason))
            return _each_alone(run, data, layers, shared, batch, probes)
        for layer, some in drawn.items():
            each = torch.stack(some)
            values[layer] += float(each.mean(0).sum())
            variances[layer] += float(each.var(0).sum()) / probes
        n += len(y)
        del losses, gradients, recorded, taps, targets  # the graph, before the next one
    return {
        layer: (values[layer] / n, math.sqrt(variances[layer]) / n) for layer in layers
    }, {}


@torch.no_grad()
def _are_apart(run: Differentiable, x: Tensor, y: Tensor) -> bool:
    """Return True if each sample's loss is the same alone as among the others, up to rounding."""
    together = run.forward(x, y, 0)[1]
    alone = [run.forward(x[k : k + 1], y[k : k + 1], 0)[1] for k in range(len(y))]
    tolerance = math.sqrt(torch.finfo(together.dtype).eps)
    return torch.allclose(together, torch.cat(alone), rtol=tolerance, atol=tolerance)


class _NoSecondDerivative(Exception):
    """Raised if an operation after a layer cannot be differentiated twice. It becomes the layer's status."""


def _each_alone(
    run: Differentiable,
    data: Data,
    layers: Mapping[str, Sequence[str]],
    shared: Collection[str],
    batch: int,
    probes: int,
) -> tuple[Estimates, dict[str, str]]:
    """Estimate the layers one by one, where some have no second derivative."""
    found: Estimates = {}
    failures: dict[str, str] = {}
    for layer, names in layers.items():
        one, failed = sampled_traces(run, data, {layer: names}, shared, batch, probes)
        found |= one
        failures |= failed
    return found, failures


def _products(
    gradients: Sequence[Tensor | None], u: Sequence[Tensor], targets: Sequence[Any]
) -> list[Tensor]:
    try:
        return curvature(gradients, u, targets)
    except RuntimeError as error:
        raise _NoSecondDerivative(no_second_derivative(error)) from error


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
