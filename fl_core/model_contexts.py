"""Set a model's mode or hooks for the time of a block, and leave the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_core.errors import check_known

Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextmanager
def preserve_state(*models: nn.Module) -> Iterator[None]:
    """Restore models and random state when the block ends, also after an error.

    These are restored:

    * every module's training flag and hooks
    * every parameter's values, ``requires_grad`` and ``grad``: the same tensor objects with the same values. A forward
      pass may write parameters, as that of ``nn.Embedding(max_norm=...)`` does.
    * buffers, also non-persistent ones: the same objects with the same values
    * torch's CPU generator, and the CUDA generators if CUDA is in use

    Memory: a copy of all parameters, buffers and existing gradients.
    """
    devices = (
        list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    )
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        for model in models:
            stack.callback(_remember(model))
        yield


def _remember(model: nn.Module) -> Callable[[], None]:
    modules = list(model.modules())
    training = [module.training for module in modules]
    hooks = [
        {name: dict(getattr(module, name)) for name in _HOOKS} for module in modules
    ]
    buffers = [dict(module._buffers) for module in modules]
    parameters = [
        parameter for parameter in model.parameters() if not is_lazy(parameter)
    ]
    flags = [parameter.requires_grad for parameter in parameters]
    grads = [parameter.grad for parameter in parameters]
    tensors = [
        t
        for t in (*parameters, *grads, *(b for held in buffers for b in held.values()))
        if t is not None
    ]
    values = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for module, mode, held, tables in zip(
            modules, training, buffers, hooks, strict=True
        ):
            module.training = mode
            module._buffers.clear()
            module._buffers.update(held)
            for (
                name,
                table,
            ) in tables.items():  # in place: handles refer to the dictionary itself
                current = getattr(module, name)
                current.clear()
                current.update(table)
        for parameter, flag, grad in zip(parameters, flags, grads, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = grad
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.is_sparse or not torch.equal(tensor, value):
                tensor.copy_(value)

    return restore


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set training or evaluation mode inside the block, and restore each module's own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    if any(
        before != training for _, before in modes
    ):  # setting a module's attribute is slow
        model.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            if module.training != before:
                module.training = before


@contextmanager
def set_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Put the whole model in ``"eval"`` or ``"train"`` mode inside the block.

    Everything is restored afterwards as by :func:`preserve_state`.

    Raises:
        UsageError: the mode is another one.
    """
    check_known("mode", mode, ("eval", "train"))
    with preserve_state(model):
        model.train(mode == "train")
        yield


@contextmanager
def with_hooks(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Call ``hooks[path](module, inputs, output)`` after each call of the module at ``path``.

    The path "" is the model itself. The hooks are removed when the block ends, also after an error.

    Raises:
        UsageError: the model does not have the path. The message names the nearest one.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in hooks:
        check_known("module", path, modules)
    with ExitStack() as stack:
        for path, hook in hooks.items():
            stack.callback(modules[path].register_forward_hook(hook).remove)
        yield


def first_tensor(output: Any) -> Tensor | None:
    """Return a module's output tensor: the output itself, or the first tensor in it.

    An LSTM or an attention module returns several tensors, for example.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            tensor = first_tensor(value)
            if tensor is not None:
                return tensor
    return None


def plain(model: Any) -> Any:
    """Return the module inside nn.DataParallel and torch.compile; any other as it is.

    >>> type(plain(nn.DataParallel(nn.Linear(2, 1)))).__name__
    'Linear'
    """
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, parallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, parallel) else model._orig_mod
    return model
