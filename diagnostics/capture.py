"""Records activations, checks batches, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError, check_known, listing
from fl_core.tree import is_finite

Batch = tuple[Tensor, Tensor]
Data = Any  # a pair (x, y) of tensors, an object with such x and y (a client's split), or a re-iterable loader of pairs
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
def untouched(*models: nn.Module) -> Iterator[None]:
    """Restore models and random state when the block ends, also after an error.

    These are restored:

    * every module's training flag and hooks
    * every parameter's ``requires_grad`` and ``grad``: the same tensor object with the same values
    * buffers, also non-persistent ones: the same objects with the same values
    * torch's CPU generator, and the CUDA generators if CUDA is in use

    Parameter values are not restored, because nothing here writes them. Only buffers and existing gradients are copied.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        for model in models:
            stack.callback(_remember(model))
        yield


def _remember(model: nn.Module) -> Callable[[], None]:
    modules = list(model.modules())
    training = [module.training for module in modules]
    hooks = [{name: dict(getattr(module, name)) for name in _HOOKS} for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    parameters = list(model.parameters())
    flags = [parameter.requires_grad for parameter in parameters]
    grads = [parameter.grad for parameter in parameters]
    tensors = [t for t in (*grads, *(b for held in buffers for b in held.values())) if t is not None]
    values = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for module, mode, held, tables in zip(modules, training, buffers, hooks, strict=True):
            module.training = mode
            module._buffers.clear()
            module._buffers.update(held)
            for name, table in tables.items():  # in place: handles refer to the dictionary itself
                current = getattr(module, name)
                current.clear()
                current.update(table)
        for parameter, flag, grad in zip(parameters, flags, grads, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = grad
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)

    return restore


@contextmanager
def set_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Put the whole model in ``"eval"`` or ``"train"`` mode inside the block.

    Everything is restored afterwards as by :func:`untouched`.

    Raises:
        UsageError: the mode is another one.
    """
    check_known("mode", mode, ("eval", "train"))
    with untouched(model):
        model.train(mode == "train")
        yield


@contextmanager
def hooked(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
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
    if isinstance(output, Mapping):
        output = output.values()
    elif not isinstance(output, (tuple, list)):
        return None
    return next((tensor for tensor in map(first_tensor, output) if tensor is not None), None)


@contextmanager
def activations(
    model: nn.Module, outputs: Sequence[str], *, allow_repeats: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Record the outputs of the named modules in a dictionary.

    Every forward pass of ``model`` refills the dictionary. Its tensors are detached copies in the module's own shape,
    so a later in-place ReLU does not change them. If a module returns several tensors, the first one is recorded. A
    module that a forward pass does not call is absent.

    Args:
        model: the model. Call it inside the block.
        outputs: module paths as in ``named_modules()``. The path "" is the model itself.
        allow_repeats: keep the last call of a module that one forward pass calls more than once.

    Raises:
        UsageError: the model does not have a path, a module is called twice in one pass, or an output has no tensor.
    """
    recorded: dict[str, Tensor] = {}

    def hook_for(path: str) -> Hook:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if path in recorded and not allow_repeats:
                raise UsageError(
                    f"module {path!r} must be called once in a forward pass; got more calls. Its output is ambiguous."
                )
            tensor = first_tensor(output)
            if tensor is None:
                raise UsageError(f"module {path!r} must return a tensor; got {type(output).__name__}.")
            recorded[path] = tensor.detach().clone()

        return hook

    with hooked(model, {path: hook_for(path) for path in outputs}), ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(lambda module, inputs: recorded.clear()).remove)
        yield recorded


def batches(data: Data, batch: int | None = None) -> Iterator[Batch]:
    """Yield batches (x [n, ...], y [n]) of data in order.

    Integer labels of any type are converted to int64.

    Args:
        data: a pair (x, y) of tensors, an object with such ``x`` and ``y``, or a re-iterable loader of pairs.
        batch: samples per batch of a pair. None means all at once. A loader keeps its own batches.

    Raises:
        UsageError: there are no samples, lengths differ, values are not finite, or the data are an iterator that can be
            read only once.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"batch must be at least 1; got {batch}.")
    pair = whole(data)
    if pair is not None:
        x, y = pair
        size = batch or len(x)
        return ((x[start : start + size], y[start : start + size]) for start in range(0, len(x), size))
    if not isinstance(data, Iterable):
        raise UsageError(f"data must be a pair (x, y) or a loader of such pairs; got {type(data).__name__}.")
    if isinstance(data, Iterator):
        raise UsageError("data must be readable more than once; got an iterator. Pass the pair or the loader itself.")
    return _loaded(data)


def whole(data: Data) -> Batch | None:
    """Return (x, y) if the data are a pair of tensors; None for a loader.

    Raises:
        UsageError: as :func:`batches`.
    """
    if hasattr(data, "x") and hasattr(data, "y"):
        data = (data.x, data.y)
    if isinstance(data, (tuple, list)) and len(data) == 2 and any(isinstance(part, Tensor) for part in data):
        return _checked(data, "the data")
    return None


def _loaded(loader: Iterable[Any]) -> Iterator[Batch]:
    number = -1
    for number, pair in enumerate(loader):
        yield _checked(pair, f"batch {number} of the loader")
    if number < 0:
        raise UsageError("The loader gave no batches.")


def _checked(pair: Any, where: str) -> Batch:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
        parts = f" of {listing(type(part).__name__ for part in pair)}" if isinstance(pair, (tuple, list)) else ""
        raise UsageError(f"{where} must be a pair (x, y) of tensors; got {type(pair).__name__}{parts}.")
    x, y = pair
    if x.ndim == 0 or y.ndim == 0 or len(x) == 0:
        raise UsageError(f"{where}: no samples")
    if len(x) != len(y):
        raise UsageError(f"{where} must have a label for each sample; got {len(x)} samples and {len(y)} labels.")
    for name, tensor in (("samples", x), ("labels", y)):
        if not is_finite(tensor):
            raise UsageError(f"{where}: the {name} must be finite; got NaN or infinity.")
    return x, y if y.is_floating_point() or y.is_complex() else y.long()  # losses take no other integers
