"""FLOPs of a training step, counted on executed operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fl_core import models
from fl_core.model_contexts import preserve_state
from fl_core.training.workspace import Workspace


class FlopCounter(TorchDispatchMode):
    """A sum of FLOPs by PyTorch's own formulas, without its sums by module.

    The hooks of PyTorch's counter fail for modules that take a parameter. Such modules compute parametrised weights
    (``torch.nn.utils.parametrizations``).
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def _count(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, packet = kwargs or {}, getattr(func, "overloadpacket", None)
        if packet is not None and packet not in self._formulas:
            with self:
                parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
        out = func(*args, **kwargs)
        if packet in self._formulas:
            self.total += self._formulas[packet](*args, **kwargs, out_val=out)
        return out


# As a method of the class, PyTorch would wrap it, and each first call would import its compiler.
setattr(FlopCounter, "__torch_dispatch__", FlopCounter._count)  # noqa: B010


def training_flops(
    workspace: Workspace, shape: tuple[int, ...], trained: frozenset[str], held: frozenset[str] | None = None
) -> float:
    """Return the floating-point operations for one training sample, forward and backward.

    Only the tensors in ``trained`` are trained.

    PyTorch's own counter runs on a batch of two, and the result is halved. It counts matrix products, convolutions and
    attention. A multiply-add is two operations. Freezing early layers saves their weight gradients and the backward
    pass below them. Freezing late layers saves their weight gradients only. Blocks that are not ``held`` cost nothing.
    An algorithm's computations outside the model's own pass are not counted, such as views and keys of a second task or
    a teacher.
    """
    workspace.hold(held)
    x = models.example(shape).to(workspace.device)
    if x.is_floating_point():
        x = x.to(next(iter(workspace.params.values())).dtype)
    counter = FlopCounter()
    with preserve_state(workspace.model), workspace.trains(trained) as names, counter:
        logits = workspace.forward(workspace.params, x)
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), [workspace.params[name] for name in names], allow_unused=True)
    return counter.total / 2
