"""The work of one training step by layer: operations, and bytes kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.run.costs import Ledger, count_flops, module_layers, nodes
from fl_core.seeds import seed_of, torch_seeded
from fl_core.tree import first_tensor, set_mode

WORK = ("forward_flops", "backward_flops", "activation_bytes")


def step_work(
    model: nn.Module,
    x: Tensor,
    layers: Sequence[Layer],
    *,
    mode: str = "eval",
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Return the FLOPs and the stored activations of each layer, for one forward and backward pass.

    The result is {kind of :data:`WORK`: {layer: number}} for the samples ``x`` [n, ...]
    together. A layer without work of a kind is missing there. The model stays
    unchanged. Gradients of frozen parameters and of the input are not computed, so they
    do not count.

    Args:
        model: the network.
        x: a batch of samples, [n, ...].
        layers: the layers of the network.
        mode: ``eval`` or ``train``.
        seed: seed of dropout.

    Raises:
        UsageError: the model returns no tensor.
    """
    ledger = Ledger(layers)
    work: dict[str, dict[str, float]] = {kind: {} for kind in WORK}
    forward, backward, activations = work.values()
    x = x.clone()  # of a storage that is no larger
    owners = module_layers(model, layers)
    seeded = torch_seeded(seed_of(seed, "diagnose", "cost"))
    with set_mode(model, mode), seeded, torch.enable_grad(), ExitStack() as stack:
        frozen = {*chain.from_iterable(layer.frozen for layer in layers)}
        params = [
            parameter.requires_grad_(name not in frozen)
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        ]
        params = [parameter for parameter in params if parameter.requires_grad]
        counted_storages = {
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
            def hook(*_: object) -> None:
                book(forward, ledger.last)
                ledger.enter(layer)

            return hook

        def leaving(*_: object) -> None:
            book(forward, ledger.last)
            ledger.leave()

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in counted_storages:
                counted_storages.add(storage.data_ptr())
                # alive until the end, so that no other tensor gets its address
                storages.append(storage)
                size = float(storage.nbytes())
                activations[ledger.last] = activations.get(ledger.last, 0.0) + size
            return tensor

        storages: list[Any] = [x.untyped_storage()]
        for path, module in model.named_modules():
            stack.callback(
                module.register_forward_pre_hook(entering(owners.get(path))).remove
            )
            stack.callback(module.register_forward_hook(leaving).remove)
        with count_flops(model) as counter:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                output = first_tensor(model(x))
            book(forward, ledger.last)
            if output is None:
                model_class = type(model).__name__
                raise UsageError(f"{model_class} must return a tensor; got none.")
            if output.requires_grad and output.grad_fn is not None:
                current = ledger.last

                def starting(layer: str) -> Callable[..., None]:
                    def hook(*_: object) -> None:
                        nonlocal current
                        book(backward, current)
                        current = layer

                    return hook

                for node in nodes(output.grad_fn):
                    node.register_prehook(starting(ledger.of(node._sequence_nr())))
                torch.autograd.grad(output.sum(), params, allow_unused=True)
                book(backward, current)
    return work
