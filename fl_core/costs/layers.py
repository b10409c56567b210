"""Costs of each layer: bytes, FLOPs of a training step, and memory kept for its backward pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fl_core import tree
from fl_core.costs.flops import count_flops
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.model_contexts import first_tensor, set_mode
from fl_core.seeds import seed_of, torch_seeded

SIZES = ("parameters", "bytes")
WORK = ("forward_flops", "backward_flops", "activation_bytes")
Node = Any  # torch.autograd.graph.Node


def layer_bytes(layers: Sequence[Layer], model: nn.Module) -> dict[str, float]:
    """Return layer -> bytes of all its tensors, buffers included."""
    live = tree.named_tensors(model)
    return {
        x.name: float(sum(live[n].numel() * live[n].element_size() for n in x.tensors))
        for x in layers
    }


@dataclass
class LayerFlops:
    """FLOPs, and bytes kept for the backward pass, by layer, of one training step on all its samples."""

    forward_flops: dict[str, float] = field(default_factory=dict)
    backward_flops: dict[str, float] = field(default_factory=dict)
    activation_bytes: dict[str, float] = field(default_factory=dict)


class _Ledger:
    """A record of the layer that is running, and of the graph node at which it began."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        used = [layer for layer in layers if layer.used] or list(layers)
        self.last = used[0].name if used else ""
        self._stack: list[str | None] = []
        self.numbers, self.names = [-1], [self.last]

    def enter(self, layer: str | None) -> None:
        """Record that a module starts; None if it is not part of a single layer."""
        self._stack.append(layer)
        self.last = layer or self.last
        self._note()

    def leave(self) -> None:
        self._stack.pop()
        running = self._stack[-1] if self._stack else None
        self.last = running or self.last  # a layer goes on after a module inside it
        self._note()

    def _note(self) -> None:
        if self.names[-1] != self.last:
            self.numbers.append(torch._C._autograd._get_sequence_nr())
            self.names.append(self.last)

    def of(self, number: int) -> str:
        """Return the layer that was running when the graph node of this number was made."""
        return self.names[bisect_right(self.numbers, number) - 1]


def step_work(
    model: nn.Module,
    x: Tensor,
    layers: Sequence[Layer],
    *,
    mode: str = "eval",
    seed: int = 0,
) -> LayerFlops:
    """Count FLOPs and kept bytes by layer, for one forward and backward pass over ``x`` [n, ...].

    The model stays unchanged. Every floating parameter is differentiated, also a frozen one. The input is not.
    """
    work, ledger = LayerFlops(), _Ledger(layers)
    x = x.clone()  # of a storage that is no larger
    owners = _owners(model, layers)
    seeded = torch_seeded(seed_of(seed, "diagnose", "cost"))
    with set_mode(model, mode), seeded, torch.enable_grad(), ExitStack() as stack:
        params = [
            p.requires_grad_(True) for p in model.parameters() if p.is_floating_point()
        ]
        counted = {
            t.untyped_storage().data_ptr()
            for t in (*model.parameters(), *model.buffers())
        }
        booked = 0.0

        def book(flops: dict[str, float], layer: str) -> None:
            nonlocal booked
            total = counter.total
            if total != booked:
                flops[layer] = flops.get(layer, 0.0) + total - booked
            booked = total

        def entering(layer: str | None) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                book(work.forward_flops, ledger.last)
                ledger.enter(layer)

            return hook

        def leaving(*_: Any) -> None:
            book(work.forward_flops, ledger.last)
            ledger.leave()

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                kept.append(
                    storage
                )  # alive until the end, so that no other tensor gets its address
                size = float(storage.nbytes())
                work.activation_bytes[ledger.last] = (
                    work.activation_bytes.get(ledger.last, 0.0) + size
                )
            return tensor

        kept: list[Any] = [x.untyped_storage()]
        for path, module in model.named_modules():
            stack.callback(
                module.register_forward_pre_hook(entering(owners.get(path))).remove
            )
            stack.callback(module.register_forward_hook(leaving).remove)
        with count_flops(model) as counter:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                output = first_tensor(model(x))
            book(work.forward_flops, ledger.last)
            if output is None:
                raise UsageError(
                    f"{type(model).__name__} must return a tensor; got none."
                )
            if output.requires_grad and output.grad_fn is not None:
                current = ledger.last

                def starting(layer: str) -> Callable[..., None]:
                    def hook(*_: Any) -> None:
                        nonlocal current
                        book(work.backward_flops, current)
                        current = layer

                    return hook

                for node in nodes(output.grad_fn):
                    node.register_prehook(starting(ledger.of(node._sequence_nr())))
                torch.autograd.grad(output.sum(), params, allow_unused=True)
                book(work.backward_flops, current)
    return work


def _owners(model: nn.Module, layers: Sequence[Layer]) -> dict[str, str]:
    """Return the layer to which each module's work is charged.

    It is the layer of all the module's tensors. If these belong to several layers, it is the layer of the first own
    tensor. A module with nothing but tied tensors is charged to the layer that has them.
    """
    layer_of = {name: layer.name for layer in layers for name in layer.tensors}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first = {id(tensor): layer_of[name] for name, tensor in named if name in layer_of}
    layer_of |= {
        name: first[id(tensor)] for name, tensor in named if id(tensor) in first
    }
    beneath: dict[str, set[str]] = {}
    direct: dict[str, str] = {}
    for name, layer in layer_of.items():
        owner = name.rpartition(".")[0]
        direct.setdefault(owner, layer)
        parts = owner.split(".") if owner else []
        for k in range(len(parts) + 1):
            beneath.setdefault(".".join(parts[:k]), set()).add(layer)
    single = {
        path: next(iter(found)) for path, found in beneath.items() if len(found) == 1
    }
    return {**{path: layer for path, layer in direct.items() if path}, **single}


def nodes(root: Node) -> list[Node]:
    """Return every node of an autograd graph that the root depends on, each after its inputs. The root comes last."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend(
                (node_in, False)
                for node_in, _ in node.next_functions
                if node_in is not None
            )
    return order
