"""FLOPs of a training step, counted on executed operations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fl_core import models
from fl_core.errors import listing, warn
from fl_core.model_contexts import preserve_state
from fl_core.training.workspace import Workspace


def _vectors(a: Tensor, b: Tensor, **_: Any) -> int:
    return 2 * a.numel()


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, mask: list[bool], **_: Any,
) -> int:  # fmt: skip
    """Count the gradients of the input and of the weight. Each takes as many products as the forward pass."""
    positions = prod((x if transposed else grad).shape[2:])
    return 2 * len(x) * positions * weight.numel() * (mask[0] + mask[1])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count softmax(Q K^T) V, without savings by a mask."""
    return (
        2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    )


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """Count two products for each one of the forward pass. A kernel that computes the scores again counts no more."""
    return 2 * _attention(query, key, value)


FUSED = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
FORMULAS: dict[str, Any] = {
    **{str(operation): formula for operation, formula in flop_registry.items()},
    **dict.fromkeys(("aten.dot", "aten.vdot", "aten.mv"), _vectors),
    "aten.convolution_backward": _convolution_backward,
    **{f"aten._scaled_dot_product_{kind}": _attention for kind in FUSED},
    **{
        f"aten._scaled_dot_product_{kind}_backward": _attention_backward
        for kind in FUSED
    },
    "flex_attention_backward": lambda *given, **_: 2 * _attention(*given),
}
"""Operation -> its FLOPs from its arguments: PyTorch's formulas, and those that it lacks or gets wrong."""
PRODUCTS = re.compile(
    r"(mm|mv|dot|qr|matmul|conv(?!ert)\w*|linear|attention|rnn|lstm|gru|linalg|solve|cholesky|eigh?"
    r"|trilinear|euclidean)(_|$)"
)
"""Words in names of operations that contain matrix products."""
POINTWISE = re.compile(r"thnn_|_norm$|_cross$|_diagonal$|_check_errors$")
"""Operations among those that contain none."""
VISIBLE = ("aten", "prim", "prims", "profiler")
"""Namespaces of PyTorch itself. An operation of another one may contain anything."""


class FlopCounter(TorchDispatchMode):
    """A sum of FLOPs, without PyTorch's sums by module.

    The hooks of PyTorch's counter fail for modules that take a parameter. Such modules compute parametrised weights
    (``torch.nn.utils.parametrizations``).

    Attributes:
        total: the FLOPs so far.
        unknown: names of operations that may contain matrix products, and have no formula.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.unknown: set[str] = set()

    def _count(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, packet = kwargs or {}, getattr(func, "overloadpacket", None)
        name = str(packet or func).rstrip("_")  # in place or not
        if packet is not None and name not in FORMULAS:
            with self:
                parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
        out = func(*args, **kwargs)
        if name in FORMULAS:
            self.total += FORMULAS[name](*args, **kwargs, out_val=out)
        elif name.partition(".")[0] not in VISIBLE or (
            PRODUCTS.search(name) and not POINTWISE.search(name)
        ):
            self.unknown.add(name)
        return out


# As a method of the class, PyTorch would wrap it, and each first call would import its compiler.
setattr(FlopCounter, "__torch_dispatch__", FlopCounter._count)  # noqa: B010


@contextmanager
def count_flops(model: nn.Module) -> Iterator[FlopCounter]:
    """Count FLOPs inside the block, and warn after it of operations without a formula.

    Recurrent networks and transformers run operation by operation, not in one fused kernel.
    """
    counter = FlopCounter()
    with ExitStack() as stack:
        stack.callback(
            torch.backends.mha.set_fastpath_enabled,
            torch.backends.mha.get_fastpath_enabled(),
        )
        torch.backends.mha.set_fastpath_enabled(False)
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(
                torch.backends.mkldnn.flags(enabled=False, allow_tf32=None)
            )
        yield stack.enter_context(counter)
    if counter.unknown:
        warn(
            f"FLOPs are counted without {listing(sorted(counter.unknown))}: no formula is known."
        )


def training_flops(
    workspace: Workspace,
    shape: tuple[int, ...],
    trained: frozenset[str],
    held: frozenset[str] | None = None,
) -> float:
    """Return the floating-point operations for one training sample, forward and backward.

    Only the tensors in ``trained`` are trained.

    A batch of two is counted, and the result is halved. Matrix products, convolutions and attention count. A
    multiply-add is two operations. Everything elementwise is zero. A warning names operations that may contain matrix
    products and have no formula. Freezing early layers saves their weight gradients and the backward
    pass below them. Freezing late layers saves their weight gradients only. Blocks that are not ``held`` cost nothing.
    An algorithm's computations outside the model's own pass are not counted, such as views and keys of a second task or
    a teacher.
    """
    workspace.hold(held)
    x = models.example(shape).to(workspace.device)
    if x.is_floating_point():
        x = x.to(next(iter(workspace.params.values())).dtype)
    model = workspace.model
    with (
        preserve_state(model),
        workspace.trains(trained) as names,
        count_flops(model) as counter,
    ):
        logits = workspace.forward(workspace.params, x)
        if logits.requires_grad:
            torch.autograd.grad(
                logits.sum(),
                [workspace.params[name] for name in names],
                allow_unused=True,
            )
    return counter.total / 2
