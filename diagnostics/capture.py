"""Record activations of a model, and read batches of data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fl_core.bounds import at_least, check_value
from fl_core.errors import UsageError, listing
from fl_core.model_contexts import Hook, first_tensor, with_hooks
from fl_core.models.batch_norms import normalises_batches
from fl_core.tree import is_finite

Batch = tuple[Tensor, Tensor]
Data = Any  # a pair (x, y) of tensors, an object with such x and y (a client's split), or a re-iterable loader of pairs


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
                raise UsageError(
                    f"module {path!r} must return a tensor; got {type(output).__name__}."
                )
            recorded[path] = tensor.detach().clone()

        return hook

    with (
        with_hooks(model, {path: hook_for(path) for path in outputs}),
        ExitStack() as stack,
    ):
        stack.callback(
            model.register_forward_pre_hook(
                lambda module, inputs: recorded.clear()
            ).remove
        )
        yield recorded


def batches(
    data: Data, batch: int | None = None, model: nn.Module | None = None
) -> Iterator[Batch]:
    """Yield batches (x [n, ...], y [n]) of data in order.

    Integer labels of any type are converted to int64.

    Args:
        data: a pair (x, y) of tensors, an object with such ``x`` and ``y``, or a re-iterable loader of pairs.
        batch: samples per batch of a pair. None means all at once. A loader keeps its own batches.
        model: the model that takes the batches. If it normalises over a batch, a single sample joins the batch before
            it, as in training.

    Raises:
        UsageError: there are no samples, lengths differ, values are not finite, or the data are an iterator that can be
            read only once. Or the model normalises over a batch, and there is one sample.
    """
    if batch is not None:
        check_value("batch", batch, at_least(1))
    pair = full_batch(data)
    if pair is not None:
        x, y = pair
        size = batch or len(x)
        return join_single(
            ((x[k : k + size], y[k : k + size]) for k in range(0, len(x), size)), model
        )
    if not isinstance(data, Iterable):
        raise UsageError(
            f"data must be a pair (x, y) or a loader of such pairs; got {type(data).__name__}."
        )
    if isinstance(data, Iterator):
        raise UsageError(
            "data must be readable more than once; got an iterator. Pass the pair or the loader itself."
        )
    return join_single(_load_batch(data), model)


def join_single(parts: Iterator[Batch], model: nn.Module | None) -> Iterator[Batch]:
    """Yield batches. If the model normalises over a batch, each single sample joins the batch before it.

    This is the rule of training (:func:`fl_core.training.phases.batch_slices`).

    Raises:
        UsageError: the model normalises over a batch, and there is one sample in all.
    """
    if model is None or not normalises_batches(model, model.training):
        yield from parts
        return
    held = next(parts)
    for x, y in parts:
        if len(x) == 1 or len(held[0]) == 1:
            held = torch.cat([held[0], x]), torch.cat([held[1], y])
        else:
            yield held
            held = x, y
    if len(held[0]) == 1:
        raise UsageError(
            f"samples must be at least 2, since {type(model).__name__} normalises over a batch; got 1."
        )
    yield held


def full_batch(data: Data) -> Batch | None:
    """Return (x, y) if the data are a pair of tensors; None for a loader.

    Raises:
        UsageError: as :func:`batches`.
    """
    if hasattr(data, "x") and hasattr(data, "y"):
        data = (data.x, data.y)
    if (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and any(isinstance(part, Tensor) for part in data)
    ):
        return _check_batch(data, "the data")
    return None


def _load_batch(loader: Iterable[Any]) -> Iterator[Batch]:
    number = -1
    for number, pair in enumerate(loader):
        yield _check_batch(pair, f"batch {number} of the loader")
    if number < 0:
        raise UsageError(
            "the loader must give a batch; got none. Pass one with samples."
        )


def _check_batch(pair: Any, where: str) -> Batch:
    if not (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(part, Tensor) for part in pair)
    ):
        parts = (
            f" of {listing(type(part).__name__ for part in pair)}"
            if isinstance(pair, (tuple, list))
            else ""
        )
        raise UsageError(
            f"{where} must be a pair (x, y) of tensors; got {type(pair).__name__}{parts}."
        )
    x, y = pair
    if x.ndim == 0 or y.ndim == 0 or len(x) == 0:
        raise UsageError(f"{where} must have samples; got none. Leave it out.")
    if len(x) != len(y):
        raise UsageError(
            f"{where} must have a label for each sample; got {len(x)} samples and {len(y)} labels."
        )
    for name, tensor in (("samples", x), ("labels", y)):
        if not is_finite(tensor):
            raise UsageError(
                f"{where}: the {name} must be finite; got NaN or infinity."
            )
    return (
        x,
        y if y.is_floating_point() or y.is_complex() else y.long(),
    )  # losses take no other integers
