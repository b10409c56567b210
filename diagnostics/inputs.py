"""Pairs models and data into clients, and checks that they can be measured together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fl_core import tree
from fl_core.errors import UsageError, check_known, listing
from fl_core.model_contexts import first_tensor, set_mode
from fl_core.seeds import seed_of, torch_seeded

from .measurement import ClientModel, Data, batches, to_device

REENTRANT = "CheckpointFunctionBackward"
"""Name of the node that a reentrant checkpoint leaves in autograd's graph."""
_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
)


def check_modules(models: Any) -> None:
    """Refuse anything but a module, several modules, or a module with parameters that have no shape yet.

    Raises:
        UsageError: the message names the type that was given.
    """
    if isinstance(models, nn.Module):
        several: list[Any] = [models]
    elif isinstance(models, Mapping):
        several = list(models.values())
    elif isinstance(models, Sequence):
        several = list(models)
    else:
        several = [models]
    for model in several:
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise UsageError(
                f"models must be torch modules; got the class {model.__name__}. Pass {model.__name__}(...)."
            )
        if not isinstance(model, nn.Module):
            name = f"{model.__name__!r}, a " if hasattr(model, "__name__") else ""
            raise UsageError(
                f"models must be torch modules; got {name}{type(model).__name__}."
            )
        lazy = next(
            (name for name, tensor in model.named_parameters() if is_lazy(tensor)), None
        )
        if lazy is not None:
            raise UsageError(
                f"parameter {lazy!r} of {type(model).__name__} must have a shape; got none yet. Call the model once."
            )


def check_arrays(data: Any, whose: str) -> None:
    """Refuse NumPy arrays instead of a pair of tensors.

    Raises:
        UsageError: the message explains how to convert arrays to tensors.
    """
    parts = {"data": data} if isinstance(data, np.ndarray) else {}
    if isinstance(data, (tuple, list)) and len(data) == 2:
        parts = dict(zip("xy", data, strict=True))
    array = next(
        (name for name, part in parts.items() if isinstance(part, np.ndarray)), None
    )
    if array is not None:
        pair = "(torch.as_tensor(x), torch.as_tensor(y))"
        raise UsageError(
            f"{array} of {whose} must be a tensor; got a NumPy array. Pass {pair}."
        )


def check_inputs(
    subjects: Sequence[ClientModel], seed: int, differentiates: bool
) -> None:
    """Refuse samples that a client's model cannot take, and models through which no gradients flow.

    Two samples of every type and shape pass through their client's model. The models are left as they were.

    Args:
        differentiates: whether gradients will be read.

    Raises:
        UsageError: the message names the client, the module that fails, and its input.
    """
    seen = set()
    for subject in subjects:
        with torch_seeded(seed_of(seed, "diagnose", "example")):
            x, _ = next(batches(subject.data, 2))
        if (x.dtype, x.shape[1:]) not in seen:
            seen.add((x.dtype, x.shape[1:]))
            _check_pass(subject, to_device(subject.model, x[:2]), seed, differentiates)


def _check_pass(
    subject: ClientModel, x: Tensor, seed: int, differentiates: bool
) -> None:
    model = subject.model
    with (
        set_mode(model, "eval"),
        torch_seeded(seed_of(seed, "diagnose", "check")),
        torch.enable_grad(),
    ):
        if differentiates and x.is_floating_point():
            x = (
                x.detach().clone().requires_grad_() * 1
            )  # no leaf, so that the model may work in place
        entered: list[tuple[str, Any]] = []
        try:
            with _watch_modules(model, entered):
                output = model(x)
        except (UsageError, torch.OutOfMemoryError):
            raise
        except _FAILURES as error:
            path, given = entered[-1] if entered else ("", (x,))
            raise UsageError(
                _misfit(subject, path, first_tensor(given), x, error)
            ) from error
        if differentiates and _reentrant(output):
            modules: list[str] = []
            with _watch_modules(model, [], modules):
                model(x)
            where = f"module {modules[0]!r} of " if modules[0] else ""
            raise UsageError(
                f"{where}{type(model).__name__} must not use a reentrant checkpoint, which hides gradients of single "
                "tensors. Pass use_reentrant=False to torch.utils.checkpoint."
            )


def _misfit(
    subject: ClientModel, path: str, given: Tensor | None, x: Tensor, error: Exception
) -> str:
    """Describe why a forward pass failed, and how to fix it."""
    module = subject.model.get_submodule(path)
    where = f"module {path!r}, a {type(module).__name__}," if path else "it"
    shape = "" if given is None else f" on {_kind(given)} {list(given.shape)}"
    reason = (
        str(error).strip().splitlines()[0]
        if str(error).strip()
        else type(error).__name__
    )
    parameter = next(
        (p for p in subject.model.parameters() if p.is_floating_point()), None
    )
    hint = ""
    if parameter is not None and not x.is_floating_point():
        hint = f"; the samples are {_kind(x)} and the model computes in {_kind(parameter)}: x.float() may be meant"
    return (
        f"{type(subject.model).__name__} cannot take the samples of client {subject.client!r}, {_kind(x)} "
        f"{list(x.shape[1:])} each: {where} fails{shape}: {reason}{hint}"
    )


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _reentrant(output: Any, inputs: Any = None) -> bool:
    """Return True if the graph behind an output contains a reentrant checkpoint.

    The search ends at the given inputs.
    """
    ends, starts = (first_tensor(each) for each in (inputs, output))
    waiting = [] if starts is None or starts.grad_fn is None else [starts.grad_fn]
    seen = {*waiting, *([] if ends is None else [ends.grad_fn])}
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == REENTRANT:
            return True
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return False


@contextmanager
def _watch_modules(
    model: nn.Module, entered: list[tuple[str, Any]], reentrant: list[str] | None = None
) -> Iterator[None]:
    """Keep in ``entered`` the modules that have begun and not ended, with their inputs.

    Modules that have ended and contain a reentrant checkpoint are added to ``reentrant``, inner ones first.
    """

    def begin(path: str) -> Any:
        return lambda module, inputs: entered.append((path, inputs))

    def end(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if entered:
                entered.pop()
            if reentrant is not None and _reentrant(output, inputs):
                reentrant.append(path)

        return hook

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(begin(path)).remove)
            stack.callback(module.register_forward_hook(end(path)).remove)
        yield


def client_models(
    models: Any, data: Any, n_train: Any, seed: int
) -> tuple[list[ClientModel], int]:
    """Pair models and data as :func:`diagnostics.diagnosis.diagnose` takes them.

    Returns:
        The clients, and the number of models that were given.

    Raises:
        UsageError: models and data differ in number or names, or models in their tensors.
    """
    check_modules(models)
    model_names, own_models = _names_and_items(
        "models", models, isinstance(models, nn.Module)
    )
    data_names, own_data = _names_and_items("data", data, _is_one(data))
    m, d = len(own_models), len(own_data)
    if m != d and 1 not in (m, d):
        raise UsageError(
            f"models and sets of data must be equally many, or one of either; got {m} models and {d}."
        )
    if model_names and data_names and m != d:
        raise UsageError(
            f"models and data by name must be of the same clients; got {listing(model_names)} and "
            f"{listing(data_names)}. Pass one model, or one set of data, without a name to use it for all."
        )
    if model_names and data_names:
        for name in model_names:
            check_known("client with data", name, data_names)
        own_data = [own_data[data_names.index(name)] for name in model_names]
    count = max(m, d)
    names = next(
        (own for own in (model_names, data_names) if own and len(own) == count),
        [f"client_{k}" for k in range(count)],
    )
    own_models, own_data = own_models * (count // m), own_data * (count // d)
    for name, own in zip(names, own_data, strict=True):
        check_arrays(own, f"client {name!r}")
    first = tree.named_tensors(own_models[0])
    for name, model in zip(names, own_models, strict=True):
        tree.check_same(
            first,
            tree.named_tensors(model),
            f"the model of client {names[0]!r}",
            f"that of client {name!r}",
        )
    return [
        ClientModel(name, model, own, _n_train(n_train, name, k, count, own, seed))
        for k, (name, model, own) in enumerate(
            zip(names, own_models, own_data, strict=True)
        )
    ], m


def _names_and_items(what: str, given: Any, one: bool) -> tuple[list[str], list[Any]]:
    """Return names and items of a mapping, a sequence or a single item.

    Names are empty without a mapping.
    """
    if one:
        return [], [given]
    items = list(given.values()) if isinstance(given, Mapping) else list(given)
    if not items:
        raise UsageError(f"{what} must have at least one entry; got no {what}.")
    return [str(name) for name in given] if isinstance(given, Mapping) else [], items


def _is_one(data: Any) -> bool:
    """Return True for one client's data: a pair of tensors or a loader, not a list or mapping of these."""
    if isinstance(data, (list, tuple)):
        return len(data) == 2 and all(
            isinstance(part, (Tensor, np.ndarray)) for part in data
        )
    return not isinstance(data, Mapping)


def _n_train(given: Any, name: str, k: int, count: int, data: Data, seed: int) -> int:
    if isinstance(given, Mapping):
        return int(given[check_known("client in n_train", name, given)])
    if isinstance(given, Sequence):
        if len(given) != count:
            raise UsageError(
                f"n_train must have one number a client; got {len(given)} numbers for {count} clients."
            )
        return int(given[k])
    if given is not None:
        return int(given)
    with torch_seeded(seed_of(seed, "diagnose", "count")):
        return sum(len(y) for _, y in batches(data, None))
