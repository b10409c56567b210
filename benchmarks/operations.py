"""Counts floating-point operations, repeats them alone, and counts the ones that training one layer needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry


def counted(work: Callable[[], object]) -> int:
    """Count the floating-point operations of a function's matrix products and convolutions.

    A multiplication with its addition counts two.

    >>> counted(lambda: torch.zeros(2, 3) @ torch.zeros(3, 5))
    60
    """
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


class _Kept(TorchDispatchMode):
    """Keeps each call of a matrix product or a convolution, forward or backward, with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in flop_registry:
            self.calls.append(
                (func, tree_map_only(Tensor, Tensor.detach, args), kwargs or {})
            )
        return func(*args, **(kwargs or {}))


def alone(work: Callable[[], object], times: int = 1) -> Callable[[], None]:
    """Return a function that makes the matrix products and convolutions of another one, and nothing else of it.

    >>> a = torch.ones(2, 2)
    >>> counted(alone(lambda: torch.relu(a @ a) + 1, times=3)) == 3 * counted(lambda: a @ a)
    True

    Args:
        times: how often, with the same operands.
    """
    with _Kept() as recorder:
        work()

    @torch.no_grad()
    def again() -> None:
        for _ in range(times):
            for func, args, kwargs in recorder.calls:
                func(*args, **kwargs)

    return again


def least(model: nn.Module, layer: str, x: Tensor, y: Tensor) -> float:
    """Return the least operations of a step that trains one layer alone, as a share of a step that trains all.

    Count the forward pass from that layer on, the backward pass to it and its weights' gradients. Earlier layers are
    frozen and known.

    >>> two = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    >>> x, y = torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)
    >>> least(two, "0", x, y), least(two, "1", x, y)  # of 5 products: 2 forward, 2 of weights, 1 back
    (0.8, 0.4)
    """
    trains_by_name = {
        child_name: parameter.requires_grad
        for child_name, parameter in model.named_parameters()
    }
    try:
        full_operations = counted(lambda: _step(model.requires_grad_(True), x, y))
        for child_name, parameter in model.named_parameters():
            parameter.requires_grad_(child_name.split(".")[0] == layer)
        layer_operations = counted(lambda: _step(model, x, y))
    finally:
        for child_name, parameter in model.named_parameters():
            parameter.requires_grad_(trains_by_name[child_name])
    earlier_operations = 0
    for child_name, child in model.named_children():
        if child_name == layer:
            break
        earlier_operations += _forward(model, child, x)
    return (layer_operations - earlier_operations) / full_operations


def _step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


def _forward(model: nn.Module, child: nn.Module, x: Tensor) -> int:
    """Count the operations of one part of the model in a forward pass."""
    child_inputs: list[Tensor] = []
    handle = child.register_forward_hook(
        lambda _module, inputs, _output: child_inputs.append(inputs[0])
    )
    try:
        with torch.no_grad():
            model(x)
            handle.remove()
            return sum(
                counted(partial(child, child_input)) for child_input in child_inputs
            )
    finally:
        handle.remove()
