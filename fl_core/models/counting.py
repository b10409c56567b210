"""A counter of parameters and layers during building, when fresh tensors do not use memory yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.parameter import is_lazy

from fl_core import limits
from fl_core.errors import UsageError

LAYERS = 100_000
"""Layers of a model at most. ResNet-1202 has about 2,400; so many as this take 13 s to make."""


@contextmanager
def check_while_building(check: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``check(parameters, layers)`` with the sums so far, for each tensor that a module of this thread receives.

    A layer is a module with tensors of its own. Buffers count as parameters. Tensors of lazy modules do not count: they
    have no shape yet. An error of ``check`` ends the building before the tensor is filled.

    >>> from torch import nn
    >>> found = []
    >>> with check_while_building(lambda parameters, layers: found.append((parameters, layers))):
    ...     _ = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    >>> found
    [(6, 1), (8, 1), (12, 2), (14, 2)]
    """
    thread, seen = threading.get_ident(), dict[int, Any]()
    parameters = layers = 0

    def registered(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal parameters, layers
        if tensor is None or is_lazy(tensor) or threading.get_ident() != thread:
            return
        known = seen.get(id(tensor))
        if known is None or known() is not tensor:
            seen[id(tensor)] = ref(tensor)
            parameters += tensor.numel()
            layers += all(
                each is None
                for each in (*module._parameters.values(), *module._buffers.values())
            )
            check(parameters, layers)

    handles = (
        modules.register_module_parameter_registration_hook(registered),
        modules.register_module_buffer_registration_hook(registered),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def within_bytes(what: str, most: int) -> Iterator[None]:
    """Refuse a model whose parameters and buffers, at 4 bytes each, take more memory, before they are filled.

    A module takes memory and time by itself, so the number of layers has a limit, too.

    Raises:
        UsageError: names ``what`` and both sizes.
    """

    def check(parameters: int, layers: int) -> None:
        if layers > LAYERS:
            raise UsageError(
                f"{what} must have at most {LAYERS:,} layers; got more. Choose smaller sizes."
            )
        if 4 * parameters > most:
            sizes = f"at most {limits.format_bytes(most)} of memory; got {limits.format_bytes(4 * parameters)} or more"
            raise UsageError(f"{what} must take {sizes}. Choose smaller sizes.")

    with check_while_building(check):
        yield
