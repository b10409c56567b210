"""Exact Hessian traces of layers with piecewise linear logits, and the check that finds such layers.

The check finds in the autograd graph the parameters that reach the logits through
piecewise linear operations only.

For such a parameter, the second derivative of the logits is zero wherever it exists. The Hessian block of any loss then
equals its generalised Gauss-Newton block (Schraudolph, 2002). Each parameter has its own verdict. For example, the last
layer of a GELU network qualifies. The layers before its last GELU do not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_core.layers import Layer
from fl_core.plan import parameters_in
from fl_core.run.costs import Node, nodes
from fl_core.seeds import torch_generator
from fl_core.training.losses import CrossEntropy, Loss
from fl_core.tree import Tree

from ..measurement import Batch
from .model import (
    Differentiable,
    Tap,
    formula_of,
    owner,
    rademacher,
    record_calls,
    squares,
)

WIDEST = 256
"""The most outputs of a sample for which an exact Hessian trace is computed.

It takes as many passes. Cross-entropy has no such limit.
"""
NARROW = 33
"""The most outputs of a sample for which an exact Gauss-Newton trace is computed.

Estimates take 8 to 32 passes.
"""

# Piecewise linear in all their inputs at once; named as autograd's nodes are, without "Backward0".
_ARITHMETIC = "Add Sub Rsub Neg Sum Mean Cumsum Abs Maximum Minimum Max Min Amax Amin Sort Topk Where MaskedFill"
_ACTIVATIONS = """Relu LeakyRelu Hardtanh Threshold Hardsigmoid Hardshrink Softshrink RreluWithNoise NativeDropout
    Clamp ClampMin ClampMax"""
_RESAMPLING = """MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D
    AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D
    ReplicationPad1D ReplicationPad2D ReplicationPad3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D
    UpsampleLinear1D UpsampleBilinear2D UpsampleTrilinear3D UpsampleBicubic2D PixelShuffle PixelUnshuffle Im2Col"""
_SHAPES = """View UnsafeView ReshapeAlias Transpose T Permute Squeeze Unsqueeze Expand Repeat AsStrided Alias Clone
    ToCopy Slice Select Index IndexSelect Gather Split SplitWithSizes UnsafeSplit Unbind Cat Stack Flip Roll Unfold
    Embedding"""
_JOINTLY = frozenset(
    " ".join((_ARITHMETIC, _ACTIVATIONS, _RESAMPLING, _SHAPES)).split()
)

# Linear in each input of the pair while the other does not depend on the parameter; additive in any further input.
_PRODUCTS = {
    **dict.fromkeys(
        ("Mul", "Mm", "Bmm", "Mv", "Dot", "Linear", "Convolution", "PreluKernel"),
        (0, 1),
    ),
    **dict.fromkeys(("Addmm", "Addmv", "Baddbmm", "Addcmul"), (1, 2)),
}

# Linear in these inputs only: a quotient in its numerator, a normalisation by its input's own statistics in its
# weight and bias.
_ONLY_IN = {"Div": (0,), "NativeLayerNorm": (1, 2), "NativeGroupNorm": (1, 2)}
_BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")

_NAME = re.compile(r"(\w+?)Backward\d+")


def verdicts(logits: Tensor, parameters: Tree) -> tuple[dict[str, str], dict[str, str]]:
    """Return why the logits are not piecewise linear in a parameter, and why samples mix between it and the logits.

    Both results are {parameter: reason} for the parameters that reach the logits. A
    reason is empty if the logits are piecewise linear, or if no mixing was found. An
    operation counts as nonlinear unless it is known to be piecewise linear. A parameter
    that is used more than once (tied) has both reasons. Samples mix after a batch
    normalisation with the batch's own statistics. Other operations that mix samples are
    not detected here. Logits without a graph give two empty results.

    Args:
        logits: the logits [n, C] with their autograd graph.
        parameters: the model's parameters by name.
    """
    if logits.grad_fn is None:
        return {}, {}
    bits = {
        id(tensor): 1 << position for position, tensor in enumerate(parameters.values())
    }
    depends: dict[Node, int] = {}
    uses: Counter[Node] = Counter()
    # parameters (a bit set), why; earliest operation first
    bend_reasons: dict[int, str] = {}
    mix_reasons: dict[int, str] = {}
    for node in nodes(logits.grad_fn):
        inputs = [node_in for node_in, _ in node.next_functions]
        uses.update(node_in for node_in in inputs if node_in is not None)
        reached_by_input = [
            depends[node_in] if node_in is not None else 0 for node_in in inputs
        ]
        leaf = getattr(node, "variable", None)
        depends[node] = (
            bits.get(id(leaf), 0) if leaf is not None else _union(reached_by_input)
        )
        if leaf is None:
            step = _readable(node)
            reason = f"{step} on the way to the logits is not piecewise linear in it"
            bend_reasons.setdefault(_nonlinear(node, reached_by_input), reason)
            if _kind(node) in _BATCH_NORMS and not _is_fixed(node):
                reason = "batch normalisation in train mode ties the samples of a batch"
                mix_reasons.setdefault(reached_by_input[0], reason)
    for node, count in uses.items():
        if count > 1 and hasattr(node, "variable"):
            for reasons in (bend_reasons, mix_reasons):
                reasons.setdefault(depends[node], "it is used more than once")
    reached_bits = {
        name: bits[id(tensor)]
        for name, tensor in parameters.items()
        if depends[logits.grad_fn] & bits[id(tensor)]
    }

    def first(reasons: Mapping[int, str]) -> dict[str, str]:
        return {
            name: next((reason for mask, reason in reasons.items() if mask & bit), "")
            for name, bit in reached_bits.items()
        }

    return first(bend_reasons), first(mix_reasons)


def _is_fixed(node: Node) -> bool:
    """Return True if a batch normalisation is known to use stored statistics."""
    return getattr(node, "_saved_training", True) is False


def _nonlinear(node: Node, reach: list[int]) -> int:
    """Return the parameters (a bit set) in which a node's operation is not piecewise linear.

    Args:
        node: a node of the autograd graph.
        reach: the parameters (a bit set) on which each input depends.
    """
    name = _kind(node)
    if name in _JOINTLY:
        return 0
    if name in _BATCH_NORMS:
        if _is_fixed(node):
            return reach[0] & reach[1]
        return _others(reach, (1, 2))
    if name in _PRODUCTS:
        # a number is no input
        first_mask, second_mask = (
            reach[i] if i < len(reach) else 0 for i in _PRODUCTS[name]
        )
        return first_mask & second_mask
    if name in _ONLY_IN:
        return _others(reach, _ONLY_IN[name])
    return _union(reach)


def _kind(node: Node) -> str:
    matched = _NAME.fullmatch(node.name())
    if matched:
        return matched.group(1)
    return ""


def _others(reach: list[int], allowed: tuple[int, ...]) -> int:
    return _union(
        mask for position, mask in enumerate(reach) if position not in allowed
    )


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _readable(node: Node) -> str:
    return str(node.name()).rpartition("::")[2].partition("Backward")[0] or str(
        node.name()
    )


CHECKED = 4
"""Samples of the first batch that the numerical check of exactness uses."""


@dataclass(frozen=True)
class Verdict:
    """Which layers have an exact trace, and why the others do not.

    Attributes:
        reached: names of the parameters that reach the logits.
        obstacles: layer -> why it has no exact trace. The text is empty if it has one.
        coupled: layer -> why it cannot be treated sample by sample at its outputs. The text is empty if it can.
        n_classes: width of the logits.
    """

    reached: frozenset[str]
    obstacles: dict[str, str]
    coupled: dict[str, str]
    n_classes: int


def decide(
    run: Differentiable,
    first: Batch,
    layers: Sequence[Layer],
    gauss_newton: bool = False,
) -> Verdict:
    """Decide for each layer whether its trace is exact.

    The graph shows where the logits are piecewise linear, and a few samples whether a
    layer's formula holds. The trace of the Gauss-Newton matrix needs the formula, and
    samples that do not mix. The number of outputs is limited, too (:data:`WIDEST`,
    :data:`NARROW`).

    Args:
        run: the model as a function of its tensors.
        first: the first batch of the data, of which a few samples are used.
        layers: the layers of the model.
        gauss_newton: whether the trace is that of the Gauss-Newton matrix.

    Raises:
        NoValue: the loss is not finite, or the budget ends before the check.
        UsageError: as :meth:`diagnostics.curvature.model.Differentiable.forward`.
    """
    x, y = first[0][:CHECKED], first[1][:CHECKED]
    names = parameters_in(layers)
    logits, bend_reasons, mix_reasons, doubts = check_formulas(run, x, y, names)

    def first_obstacle(layer: Layer, reasons: Mapping[str, str]) -> str:
        for name in layer.parameters:
            if reason := reasons.get(name):
                return f"{name}: {reason}"
            if name in doubts:
                return doubts[name]
        return ""

    coupled = {layer.name: first_obstacle(layer, mix_reasons) for layer in layers}
    if len(x) < 2:
        coupled = {
            name: reason or "one sample alone cannot show that samples do not mix"
            for name, reason in coupled.items()
        }
    obstacles = {layer.name: first_obstacle(layer, bend_reasons) for layer in layers}
    width, most_outputs = logits.shape[1], WIDEST
    if gauss_newton:
        obstacles, most_outputs = coupled, NARROW
    elif isinstance(run.loss, CrossEntropy):
        most_outputs = width
    if width > most_outputs:
        wide_reason = f"{width} outputs a sample: an exact value takes as many passes"
        obstacles = {name: reason or wide_reason for name, reason in obstacles.items()}
    return Verdict(frozenset(bend_reasons), obstacles, coupled, width)


def check_formulas(
    run: Differentiable, x: Tensor, y: Tensor, names: Iterable[str]
) -> tuple[Tensor, dict[str, str], dict[str, str], dict[str, str]]:
    """Check on a few samples which tensors have a formula for squared per-sample gradients that holds.

    The formula must agree with autograd for single samples. It must also give zero for the other samples. A layer that
    mixes the samples of a batch fails here.

    Args:
        run: the model as a function of its tensors.
        x, y: the samples and their labels, [n, ...].
        names: exact names of the parameters to check.

    Returns:
        A tuple of the logits [n, C], the two dicts of :func:`verdicts`, and {parameter: why it has no such formula}.
        Parameters with a formula, or that do not reach the logits, are not in the last
        dict.

    Raises:
        NoValue: the loss is not finite, or the budget ends before the check.
        UsageError: as :meth:`diagnostics.curvature.model.Differentiable.forward`.
    """
    modules = dict(run.model.named_modules(remove_duplicate=False))
    owners = dict.fromkeys(map(owner, names))
    paths = [path for path in owners if formula_of(modules[path])]
    with record_calls(run.model, paths, len(x), passes=1) as recorded:
        logits, _ = run.forward(x, y, 0)
    bend_reasons, mix_reasons = verdicts(logits, run.parameters)
    taps = {path: tap for path, tap in recorded.items() if tap is not None}
    names = [name for name in names if name in bend_reasons]
    doubts: dict[str, str] = {}
    for name in names:
        if owner(name) not in taps:
            kind = type(modules[owner(name)]).__name__
            doubts[name] = (
                f"{name}: no formula for per-sample gradients in this use of {kind}"
            )
    tapped = {name: run.parameters[name] for name in names if name not in doubts}
    taps = {path: taps[path] for path in dict.fromkeys(map(owner, tapped))}
    # a correct formula differs by rounding alone
    tolerance = math.sqrt(torch.finfo(logits.dtype).eps)
    generator = torch_generator(run.seed, "formula check")
    u = torch.randn(logits.shape, generator=generator).to(logits)
    for sample in range(min(2, len(logits)) if tapped else 0):
        run.clock.check()
        single_cotangent = torch.zeros_like(u)
        single_cotangent[sample] = u[sample]
        gradients = torch.autograd.grad(
            (logits * single_cotangent).sum(), [*tapped.values()], retain_graph=True
        )
        claimed_norms = squares(logits, single_cotangent, taps)
        size = {
            name: gradient.square().sum()
            for name, gradient in zip(tapped, gradients, strict=True)
        }
        for name in tapped:
            other_samples_norms = torch.zeros_like(u[:, 0])
            other_samples_norms[sample] = size[name]
            # beside its module's other parameters: a bias that softmax does not feel has rounding for its gradient
            scale = sum(
                value
                for other_name, value in size.items()
                if owner(other_name) == owner(name)
            )
            if name not in claimed_norms or not bool(
                (
                    (claimed_norms[name] - other_samples_norms).abs()
                    <= tolerance * scale
                ).all()
            ):
                doubts[name] = (
                    f"{name}: the formula for its per-sample gradients does not hold"
                )
    return logits, bend_reasons, mix_reasons, doubts


def exact_terms(
    loss: Loss, logits: Tensor, y: Tensor, taps: Mapping[str, Tap]
) -> Iterator[Tree]:
    """Yield terms {parameter: [n]} that add up, over samples and terms, to the traces of the Gauss-Newton blocks.

    The blocks are those of the loss summed over samples. Without taps there are no
    terms.

    Args:
        loss, logits, y: the loss, the logits [n, C] with their autograd graph, and the
            labels [n, ...].
        taps: the recorded calls of modules by path. Each parameter of these modules has a term.
    """
    combine, signs = factors(loss, logits, y)
    for k in range(signs.shape[1] if taps else 0):
        unit_signs = torch.zeros_like(signs)
        unit_signs[:, k] = 1
        norms_by_name = squares(logits, combine(unit_signs).to(logits.dtype), taps)
        yield {
            name: signs[:, k] * norms.double() for name, norms in norms_by_name.items()
        }


def gauss_newton_terms(
    loss: Loss,
    logits: Tensor,
    y: Tensor,
    taps: Mapping[str, Tap],
    tensors: Tree,
    generator: torch.Generator,
) -> Iterator[Tree]:
    """Yield {parameter: random draw} without end. The mean of a parameter's draws is its Gauss-Newton block's trace.

    With signs r_n of the factors S_n of :func:`factors`, E ||J_n^T S_n r_n||^2 = tr J_n^T S_n S_n^T J_n. Parameters of
    tapped modules have a term for each sample, [n]. For ``tensors`` the gradients are summed over samples, then
    squared.

    Args:
        loss, logits, y: the loss, the logits [n, C] with their autograd graph, and the
            labels [n, ...].
        taps: the recorded calls of modules by path.
        tensors: further parameters by name.
        generator: source of the random signs.
    """
    combine, signs = factors(loss, logits, y)
    while True:
        draw, terms = rademacher(signs, generator), Tree()
        for sign in signs.unique():
            cotangent = combine(draw * (signs == sign)).to(logits.dtype)
            for name, norms in squares(logits, cotangent, taps, tensors).items():
                terms[name] = terms.get(name, 0.0) + sign * norms.double()
        yield terms


# --- the Hessian of the loss in the logits ---------------------------------------------------------------------


Combine = Callable[[Tensor], Tensor]
"""A function from weights r [n, K] to the sums sum_k r_nk s_nk, [n, C], of factors s [n, K, C]."""


def factors(loss: Loss, logits: Tensor, y: Tensor) -> tuple[Combine, Tensor]:
    """Factorise the Hessian of each sample's loss in its logits, d2 loss_n / d logits_n^2 = sum_k sign_nk s_nk s_nk^T.

    Cross-entropy's matrix diag(p) - p p^T has a closed triangular factorisation (Tanabe and Sagae, 1992) with K = C -
    1, and its factors are never formed: memory grows with n C. Any other loss is differentiated twice and decomposed
    into eigenvectors. A null direction that all samples share is left out. Losses of a softmax have one: they ignore a
    shift of all logits.

    Args:
        loss: the loss.
        logits: the logits, [n, C].
        y: the labels of the samples, [n, ...].

    Returns:
        A function from weights r [n, K] to the sums sum_k r_nk s_nk [n, C], and the signs [n, K], each +1 or -1. Both
        are float64.
    """
    logits = logits.detach().double()
    if isinstance(loss, CrossEntropy):
        return _softmax_factors(logits.softmax(-1)), torch.ones_like(logits[:, 1:])
    values, vectors = torch.linalg.eigh(hessians(loss, logits, y))
    order = values.abs().argsort(dim=-1, descending=True)
    values = values.gather(-1, order)
    vectors = vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
    largest = values.abs().amax(0)
    is_kept = (
        largest > largest.amax() * logits.shape[-1] * torch.finfo(torch.float64).eps
    )
    s = (vectors * values.abs().sqrt().unsqueeze(-2))[..., is_kept]
    return lambda r: (s @ r.unsqueeze(-1)).squeeze(-1), values[:, is_kept].sign()


def hessians(loss: Loss, logits: Tensor, y: Tensor) -> Tensor:
    """Return d2 loss_n / d logits_n^2 [n, C, C] by automatic differentiation.

    Each sample's loss must depend on its own logits alone.

    Args:
        loss: the loss.
        logits: the logits, [n, C].
        y: the labels of the samples, [n, ...].
    """
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(
            loss.per_sample(logits, y).sum(), logits, create_graph=True
        )
        rows = [
            torch.autograd.grad(column.sum(), logits, retain_graph=True)[0]
            if column.requires_grad
            else logits * 0
            for column in gradient.unbind(1)
        ]
    matrix = torch.stack(rows, 1).detach()
    return (matrix + matrix.mT) / 2


def _softmax_factors(p: Tensor) -> Combine:
    """Return a function from weights r [n, C - 1] to sums of the factors of diag(p) - p p^T, [n, C].

    The probabilities p are [n, C]. Factor k is c_k (e_k - sum_{i>k} p_i e_i / q_k) with
    q_k = sum_{i>k} p_i and c_k = sqrt(p_k q_k / (p_k + q_k)). So entry i of a sum is
    r_i c_i - p_i sum_{k<i} r_k c_k / q_k.

    >>> p = torch.tensor([[0.5, 0.2, 0.3]]).double()
    >>> combine = _softmax_factors(p)
    >>> s = torch.cat([combine(r) for r in torch.eye(2).double().split(1)])
    >>> torch.allclose(s.mT @ s, torch.diag(p[0]) - p.mT @ p)
    True
    """
    # q is summed from the small end: 1 - sum would cancel
    later_sums = p.flip(-1).cumsum(-1).flip(-1)[:, 1:]
    leading, tiny = p[:, :-1], torch.finfo(p.dtype).tiny
    size = (leading * later_sums / (leading + later_sums).clamp_min(tiny)).sqrt()
    ratio = size / later_sums.clamp_min(tiny)

    def combine(r: Tensor) -> Tensor:
        earlier_sums = F.pad((r * ratio).cumsum(-1), (1, 0))
        return F.pad(r * size, (0, 1)) - p * earlier_sums

    return combine
