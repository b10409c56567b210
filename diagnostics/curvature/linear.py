"""Finds in the autograd graph the parameters that reach the logits through piecewise linear operations only.

For such a parameter, the second derivative of the logits is zero wherever it exists. The Hessian block of any loss then
equals its generalised Gauss-Newton block (Schraudolph, 2002). Each parameter has its own verdict. For example, the last
layer of a GELU network qualifies. The layers before its last GELU do not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from fl_core.costs.layers import Node, nodes

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


def verdicts(logits: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each parameter that reaches the logits "" or the operation that is not piecewise linear.

    The value is "" if the logits are piecewise linear in the parameter. A parameter without a path to the logits is
    absent. The verdict errs on one side only: an operation counts as nonlinear unless it is known to be piecewise
    linear. So does a parameter that is used more than once (tied).
    """

    def bends(node: Node, reach: list[int]) -> tuple[int, str]:
        return _nonlinear(
            node, reach
        ), f"{_readable(node)} on the way to the logits is not piecewise linear in it"

    return _find_faults(logits, parameters, bends)


def unsupported_parameters(
    logits: Tensor, parameters: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return the parameters that cannot be treated sample by sample at their module's output, with reasons.

    Such a parameter is used more than once (tied), or feeds a batch normalisation by the batch's own statistics. Other
    ways to mix the samples of a batch are not seen here.
    """

    def mixes(node: Node, reach: list[int]) -> tuple[int, str]:
        over_batch = (
            _kind(node) in _BATCH_NORMS
            and getattr(node, "_saved_training", True) is not False
        )
        return (
            reach[0] if over_batch else 0
        ), "batch normalisation in train mode ties the samples of a batch"

    return {
        name: why
        for name, why in _find_faults(logits, parameters, mixes).items()
        if why
    }


def _find_faults(
    logits: Tensor,
    parameters: Mapping[str, Tensor],
    fault: Callable[[Node, list[int]], tuple[int, str]],
) -> dict[str, str]:
    """Return for each parameter that reaches the logits the first faulty operation on its way, or ""."""
    if logits.grad_fn is None:
        return {}
    bits = {
        id(tensor): 1 << position for position, tensor in enumerate(parameters.values())
    }
    depends: dict[Node, int] = {}
    uses: Counter[Node] = Counter()
    blame: dict[int, str] = {}  # parameters (a bit set), why; earliest operation first
    for node in nodes(logits.grad_fn):
        inputs = [node_in for node_in, _ in node.next_functions]
        uses.update(node_in for node_in in inputs if node_in is not None)
        reach = [depends[node_in] if node_in is not None else 0 for node_in in inputs]
        leaf = getattr(node, "variable", None)
        depends[node] = bits.get(id(leaf), 0) if leaf is not None else _union(reach)
        if leaf is None:
            at_fault, why = fault(node, reach)
            if at_fault:
                blame.setdefault(at_fault, why)
    for node, count in uses.items():
        if count > 1 and hasattr(node, "variable"):
            blame.setdefault(depends[node], "it is used more than once")
    reached = depends[logits.grad_fn]
    return {
        name: next((why for bent, why in blame.items() if bent & bits[id(tensor)]), "")
        for name, tensor in parameters.items()
        if reached & bits[id(tensor)]
    }


def _nonlinear(node: Node, reach: list[int]) -> int:
    """Return the parameters (a bit set) that make a node not piecewise linear.

    Args:
        reach: the parameters on which each input depends.
    """
    name = _kind(node)
    if name in _JOINTLY:
        return 0
    if name in _BATCH_NORMS:
        fixed = getattr(node, "_saved_training", True) is False
        return (reach[0] & reach[1]) if fixed else _others(reach, (1, 2))
    if name in _PRODUCTS:
        first, second = (
            reach[i] if i < len(reach) else 0 for i in _PRODUCTS[name]
        )  # a number is no input
        return first & second
    if name in _ONLY_IN:
        return _others(reach, _ONLY_IN[name])
    return _union(reach)


def _kind(node: Node) -> str:
    matched = _NAME.fullmatch(node.name())
    return matched.group(1) if matched else ""


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
