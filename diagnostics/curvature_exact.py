"""Exact Hessian traces of layers through which the logits are piecewise linear, and the decision which these are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from diagnostics import curvature_linear
from diagnostics.capture import Batch, Data, Hook, batches, hooked
from diagnostics.curvature_model import Differentiable, curvature, no_second_derivative, rademacher
from diagnostics.curvature_norms import Norms, norms_of, supported
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.losses import CrossEntropy, Loss
from fl_core.seeds import torch_generator

CHECKED = 4
"""Samples of the first batch that the numerical check of exactness uses."""


@dataclass(frozen=True)
class Verdict:
    """Which layers have an exact trace.

    Attributes:
        reached: names of the parameters that reach the logits.
        obstacles: for each layer why it has no exact trace; an empty string where it has one.
        n_classes: width of the logits.
    """

    reached: frozenset[str]
    obstacles: dict[str, str]
    n_classes: int


def decide(run: Differentiable, first: Batch, layers: Sequence[Layer]) -> Verdict:
    """Decide layer by layer, from the autograd graph and a numerical check on a few samples of the first batch."""
    x, y = first[0][:CHECKED], first[1][:CHECKED]
    modules = dict(run.model.named_modules(remove_duplicate=False))
    names = [name for layer in layers for name in layer.parameters]
    paths = [path for path in dict.fromkeys(map(_owner, names)) if supported(modules[path])]
    with _tapped(run.model, paths, len(x), passes=1) as taps:
        logits, _ = run.forward(x, y, 0)
    graph = curvature_linear.verdicts(logits, run.parameters)

    def obstacle(name: str) -> str:
        if graph[name]:
            return f"{name}: {graph[name]}"
        if taps.get(_owner(name)) is None:
            kind = type(modules[_owner(name)]).__name__
            return f"{name}: no formula for per-sample gradients in this use of {kind}"
        return ""

    def first_obstacle(layer: Layer, found: Callable[[str], str]) -> str:
        return next(filter(None, (found(name) for name in layer.parameters if name in graph)), "")

    obstacles = {layer.name: first_obstacle(layer, obstacle) for layer in layers}
    candidates = [layer for layer in layers if not obstacles[layer.name]]
    doubts = _check(run, logits, [n for layer in candidates for n in layer.parameters if n in graph], taps)
    obstacles |= {layer.name: first_obstacle(layer, lambda name: doubts.get(name, "")) for layer in candidates}
    return Verdict(frozenset(graph), obstacles, logits.shape[1])


def exact_traces(
    run: Differentiable, data: Data, layers: Mapping[str, Sequence[str]], batch: int, n_classes: int
) -> tuple[dict[str, float], int]:
    """The trace of each layer (name: its parameters) that :func:`decide` found exact, and the number of samples."""
    layer_of = {name: layer for layer, names in layers.items() for name in names}
    paths = list(dict.fromkeys(map(_owner, layer_of)))
    totals: dict[str, Tensor] = {}
    n = 0
    for index, (x, y) in enumerate(batches(data, batch)):
        with _tapped(run.model, paths, len(x), passes=n_classes - 1) as taps:
            logits, _ = run.forward(x, y, index)
        found = {path: tap for path, tap in taps.items() if tap is not None}
        if len(found) < len(taps):
            odd = next(path for path in taps if path not in found)
            raise UsageError(f"module {odd!r} is used differently in batch {index}; ask for estimator 'hutchinson'")
        s, signs = factors(run.loss, logits, y)
        s = s.to(logits.dtype)
        for k in range(s.shape[1] if found else 0):
            for name, squares in _squares(logits, s[:, k], found).items():
                if name in layer_of:
                    term = (signs[:, k] * squares.double()).sum()
                    totals[layer_of[name]] = totals.get(layer_of[name], 0) + term
        n += len(y)
        del taps, found, logits  # this batch's graph, before the next one's is built
    return {layer: float(totals.get(layer, 0.0)) / n for layer in layers}, n


# --- the layers' outputs in the graph --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tap:
    """What one call of a module left: its formula for squared gradients, and where in the graph its output is."""

    norms: Norms
    edge: GradientEdge


@contextmanager
def _tapped(model: nn.Module, paths: Sequence[str], n: int, passes: int) -> Iterator[dict[str, _Tap | None]]:
    """Taps of the modules at ``paths``; None where a module is called twice or in a way that has no formula."""
    taps: dict[str, _Tap | None] = {}

    @torch.no_grad()
    def tap(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> _Tap | None:
        a = inputs[0] if len(inputs) == 1 else None
        if not isinstance(a, Tensor) or a.ndim == 0 or len(a) != n:
            return None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        norms = norms_of(module, a, passes)
        # the edge, not the tensor: an in-place operation may take the tensor further
        return None if norms is None else _Tap(norms, get_gradient_edge(output))

    def hook_for(path: str) -> Hook:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            taps[path] = None if path in taps else tap(module, inputs, output)

        return hook

    with hooked(model, {path: hook_for(path) for path in paths}):
        yield taps


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _squares(logits: Tensor, cotangent: Tensor, taps: Mapping[str, _Tap]) -> dict[str, Tensor]:
    """Per sample, [n], the squared norm of every tapped parameter's gradient of sum(cotangent * logits)."""
    edges = [tap.edge for tap in taps.values()]
    deltas = torch.autograd.grad(logits, edges, cotangent, retain_graph=True, allow_unused=True)
    return {
        f"{path}.{local}": squares
        for (path, tap), delta in zip(taps.items(), deltas, strict=True)
        if delta is not None
        for local, squares in tap.norms(delta).items()
    }


def _check(
    run: Differentiable, logits: Tensor, names: Sequence[str], taps: Mapping[str, _Tap | None]
) -> dict[str, str]:
    """Numerical doubts about exactness, by parameter name; a parameter without one is absent.

    (a) v^T (H - G) v = sum_nc u_nc v^T (d2 f_nc / dtheta^2) v must vanish. u is random in place of the loss's
    gradient, which may be tiny; v is a random direction as long as the parameter, so that the second-order term
    compares with the first-order one. (b) The formula for squared per-sample gradients must agree with autograd for
    single samples, and give the other samples zero (a layer that mixes the samples of a batch does not).
    Where exact, both differ by rounding alone; the tolerance is the square root of the type's resolution.
    """
    doubts: dict[str, str] = {}
    if not names:
        return doubts
    tensors = [run.parameters[name] for name in names]
    tolerance = math.sqrt(torch.finfo(logits.dtype).eps)
    generator = torch_generator(run.seed, "curvature check")
    u = torch.randn(logits.shape, generator=generator).to(logits)

    for sample in range(min(2, len(logits))):
        alone = torch.zeros_like(u)
        alone[sample] = u[sample]
        gradients = torch.autograd.grad(logits, tensors, alone, retain_graph=True)
        owners = {_owner(name) for name in names}
        squares = _squares(logits, alone, {path: tap for path, tap in taps.items() if tap and path in owners})
        for name, gradient in zip(names, gradients, strict=True):
            own = torch.zeros_like(u[:, 0])
            own[sample] = gradient.square().sum()
            if not bool(((squares[name] - own).abs() <= tolerance * own.sum()).all()):
                doubts[name] = f"{name}: the formula for its per-sample gradients does not hold"

    # one tensor a module: its others enter the same sum, so that they share whatever curves it later
    one_each = list({_owner(name): name for name in reversed(names)}.values())
    chosen = [run.parameters[name] for name in one_each]
    gradients = torch.autograd.grad(logits, chosen, u, create_graph=True)
    for name, tensor, gradient in zip(one_each, chosen, gradients, strict=True):
        v = rademacher(tensor, generator) * (float(tensor.detach().square().mean().sqrt()) or 1.0)
        try:
            (second,) = curvature([gradient], [v], [tensor])
            curved = not bool(second.norm() <= tolerance * gradient.detach().norm())
            doubt = f"{name}: the second derivative of the logits is not zero" if curved else ""
        except RuntimeError as error:
            doubt = f"{name}: {no_second_derivative(error)}"
        if doubt:
            doubts |= {other: doubt for other in names if _owner(other) == _owner(name)}
    return doubts


# --- the Hessian of the loss in the logits ---------------------------------------------------------------------


def factors(loss: Loss, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """s [n, K, C] and signs [n, K] (+1 or -1), float64, with sum_k sign_nk s_nk s_nk^T = d2 loss_n / d logits_n^2.

    Cross-entropy's matrix diag(p) - p p^T has a closed triangular factorisation (Tanabe and Sagae, 1992) with
    K = C - 1. Any other loss is differentiated twice and decomposed into eigenvectors; where all samples share a
    null direction (losses of a softmax do not feel a shift of all logits) it is left out.
    """
    logits = logits.detach().double()
    if isinstance(loss, CrossEntropy):
        s = _softmax_factors(logits.softmax(-1))
        return s, torch.ones_like(s[..., 0])
    values, vectors = torch.linalg.eigh(hessians(loss, logits, y))
    order = values.abs().argsort(dim=-1, descending=True)
    values = values.gather(-1, order)
    vectors = vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
    largest = values.abs().amax(0)
    keep = largest > largest.amax() * logits.shape[-1] * torch.finfo(torch.float64).eps
    s = (vectors * values.abs().sqrt().unsqueeze(-2)).mT
    return s[:, keep], values[:, keep].sign()


def hessians(loss: Loss, logits: Tensor, y: Tensor) -> Tensor:
    """d2 loss_n / d logits_n^2, [n, C, C], by automatic differentiation: the samples' losses are independent."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss.per_sample(logits, y).sum(), logits, create_graph=True)
        rows = [
            torch.autograd.grad(column.sum(), logits, retain_graph=True)[0] if column.requires_grad else logits * 0
            for column in gradient.unbind(1)
        ]
    matrix = torch.stack(rows, 1).detach()
    return (matrix + matrix.mT) / 2


def _softmax_factors(p: Tensor) -> Tensor:
    """[n, C - 1, C]; factor k is sqrt(p_k q_k / (p_k + q_k)) (e_k - sum_{i>k} p_i e_i / q_k), q_k = sum_{i>k} p_i."""
    later = p.flip(-1).cumsum(-1).flip(-1)[:, 1:]  # q, summed from the small end: 1 - sum would cancel
    first = p[:, :-1]
    tiny = torch.finfo(p.dtype).tiny
    size = (first * later / (first + later).clamp_min(tiny)).sqrt()
    rest = torch.triu(p.unsqueeze(1).expand(-1, p.shape[1], -1), diagonal=1)[:, :-1]
    direction = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)[:-1] - rest / later.clamp_min(tiny).unsqueeze(-1)
    return size.unsqueeze(-1) * direction
