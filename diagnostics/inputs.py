"""Pairs models and data into clients, and checks that they can be measured together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fl_core import tree
from fl_core.costs.layers import nodes
from fl_core.data.federated import FederatedData, Split
from fl_core.errors import UsageError, about, check_known, listing
from fl_core.model_contexts import first_tensor, set_mode
from fl_core.models.adapter import (
    IGNORED,
    Adapter,
    Layout,
    adapt,
    check_real,
    is_batch,
    pack,
    padded,
    plain,
    split_labels,
    tensor,
)
from fl_core.seeds import numpy_generator, seed_of, torch_seeded
from fl_core.training.losses import Loss

from .measurement import ClientModel, Data, batches, to_device
from .outputs import EntryLoss, OwnLoss, PositionLoss, fit_loss

READ = 256
"""Samples of a dataset that are read at a time."""

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


def check_module(model: Any) -> None:
    """Refuse anything but a module whose parameters are real and have a shape.

    Raises:
        UsageError: the message names the type that was given.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"models must be torch modules; got the class {model.__name__}. Pass {model.__name__}(...)."
        )
    if not isinstance(model, nn.Module):
        name = f"{model.__name__!r}, a " if hasattr(model, "__name__") else ""
        raise UsageError(
            f"models must be torch modules; got {name}{type(model).__name__}. "
            "Pass models first, then data."
        )
    lazy = next(
        (name for name, tensor in model.named_parameters() if is_lazy(tensor)), None
    )
    if lazy is not None:
        raise UsageError(
            f"parameter {lazy!r} of {type(model).__name__} must have a shape; got none yet. Call the model once."
        )
    check_real(model)


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
            raise UsageError(
                f"{type(model).__name__} must not use a reentrant checkpoint, which hides gradients of single "
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


def _reentrant(output: Any) -> bool:
    """Return True if the graph behind an output contains a reentrant checkpoint."""
    tensor = first_tensor(output)
    root = None if tensor is None else tensor.grad_fn
    found = () if root is None else nodes(root)
    return any(type(node).__name__ == REENTRANT for node in found)


@contextmanager
def _watch_modules(model: nn.Module, entered: list[tuple[str, Any]]) -> Iterator[None]:
    """Keep in ``entered`` the modules that have begun and not ended, with their inputs."""

    def begin(path: str) -> Any:
        return lambda module, inputs: entered.append((path, inputs))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(begin(path)).remove)
            hook = module.register_forward_hook(lambda *_: entered and entered.pop() and None)  # fmt: skip
            stack.callback(hook.remove)
        yield


def client_models(
    models: Any,
    data: Any,
    n_train: Any,
    seed: int,
    samples: int | None = None,
    same: bool = True,
) -> tuple[list[ClientModel], int]:
    """Pair models and data as :func:`diagnostics.measure.diagnose` takes them.

    Args:
        samples: maximum number of samples of each client, drawn with the seed.
        same: whether all models must have the same tensors.

    Returns:
        The clients, and the number of models that were given.

    Raises:
        UsageError: models and data differ in number or names, or models in their tensors.
    """
    packed = None
    if isinstance(data, FederatedData):
        packed = getattr(data.shape, "layout", None)
        data = {client.name: client.train for client in data.clients}
    one = not isinstance(models, Mapping | Sequence)
    model_names, own_models = _names_and_items("models", models, one)
    own_models = [plain(model) for model in own_models]
    for model in own_models:
        check_module(model)
    if data is None:
        raise UsageError("data must be given with models; got none. Pass pairs (x, y).")
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
    labels = getattr(own_models[0], "label_names", ())
    if labels == tuple(map(str, range(len(labels)))):
        labels = ()  # a label is its index
    read: dict[int, tuple[Data, Layout | None]] = {}
    for name, own in zip(names, own_data * (count // d), strict=True):
        if id(own) not in read:
            with (
                about(f"client {name!r}"),
                torch_seeded(seed_of(seed, "diagnose", "read")),
            ):
                read[id(own)] = _read(own, samples, seed, labels)
    sets = [read[id(own)] for own in own_data * (count // d)]
    own_models = own_models * (count // m)
    first = tree.named_tensors(own_models[0])
    for name, model in zip(names, own_models, strict=True):
        if same:
            tree.check_same(
                first,
                tree.named_tensors(model),
                f"the model of client {names[0]!r}",
                f"that of client {name!r}",
            )
    layout = sets[0][1]
    if any(other != layout for _, other in sets):
        raise UsageError("inputs must be of the same kind at all clients; got others.")
    layout = layout or packed
    adapted = {id(model): model for model in own_models}
    if layout is not None:
        adapted = {key: adapt(model, layout) for key, model in adapted.items()}
    return [
        ClientModel(
            name,
            adapted[id(model)],
            _next_tokens(own, model),
            _n_train(n_train, name, k, count, own, seed),
            _groups(given, samples, seed),
        )
        for k, (name, model, (own, _), given) in enumerate(
            zip(names, own_models, sets, own_data * (count // d), strict=True)
        )
    ], m


def fit_outputs(
    subjects: Sequence[ClientModel], loss: Any, class_axis: int | None, ignored: int
) -> tuple[list[ClientModel], Loss]:
    """Return the clients with models that return [n, outputs], and the loss that fits them.

    Raises:
        UsageError: as :func:`diagnostics.outputs.fit_loss`.
    """
    first = subjects[0]
    x, y = next(batches(first.data, 2))
    x, y = to_device(first.model, x[:2]), y[:2]
    with set_mode(first.model, "eval"), torch.no_grad():
        model = first.model if isinstance(first.model, Adapter) else adapt(first.model)
        raw = model.raw(x)
        itself = first.model(x)
    criterion, axis = fit_loss(loss, raw, y.to(raw.device), class_axis, ignored)
    if isinstance(itself, Tensor) and itself.ndim == 2 and axis is None:
        return list(subjects), criterion
    if raw.ndim > 2 and not isinstance(criterion, PositionLoss | EntryLoss | OwnLoss):
        raise UsageError(
            f"{type(first.model).__name__} must return logits [n, C] for labels [n]; got a tensor {tuple(raw.shape)}."
        )
    made = {
        id(s.model): adapt(s.model, getattr(s.model, "layout", None), axis)
        for s in subjects
    }
    return [replace(s, model=made[id(s.model)]) for s in subjects], criterion


def _read(
    data: Any, samples: int | None, seed: int, labels: Sequence[str]
) -> tuple[Data, Layout | None]:
    """Return one client's data as a pair or a loader of pairs of tensors, and their layout.

    Args:
        labels: names of the model's classes, if labels are such names.
    """
    if isinstance(data, Split):
        labels = ()  # of a federation, so indices already
    if hasattr(data, "x") and hasattr(data, "y"):
        data = (data.x, data.y)
    if isinstance(data, Mapping) or (_is_one(data) and isinstance(data, tuple | list)):
        x, y = split_labels(data)
        x, layout = pack(x)
        return _first_samples((x, _indices(y, labels)), samples, seed), layout
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        if not len(data):  # type: ignore[arg-type]
            raise UsageError("a dataset must have samples; got none. Leave it out.")
        loader = DataLoader(data, batch_size=READ)
        return _joined(loader, samples, seed, labels, whole=True)
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        next(batches(data))  # which refuses it
    first = next(iter(data), None)
    plainly = isinstance(first, tuple | list) and all(
        isinstance(part, Tensor) for part in first
    )
    asks = samples is not None or labels
    if first is None or (plainly and len(first) == 2 and not asks):
        return data, None
    if not isinstance(first, tuple | list | Mapping):
        next(batches(data))
    return _joined(data, samples, seed, labels, whole=samples is not None)


def _indices(y: Any, names: Sequence[str]) -> Tensor:
    """Return labels as a tensor; those that are names of a run's classes as their indices."""
    values = y.cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    words = values.dtype.kind in "UO"
    if words and not names:
        raise UsageError(
            f"labels must be numbers, not words; got {str(values.flat[0])!r}. Pass indices of classes."
        )
    numbered = all(name.lstrip("-").isdigit() for name in names)
    if not words and (not names or not numbered or values.dtype.kind not in "bui"):
        return tensor(y)
    index = {
        check_known("class of the run", str(v), names): tuple(names).index(str(v))
        for v in np.unique(values)
    }
    return torch.tensor([index[str(v)] for v in values.flat]).reshape(values.shape)


def _groups(data: Any, samples: int | None, seed: int) -> np.ndarray | None:
    """Return what each sample of one client belongs to, for the samples of :func:`_read`."""
    groups = getattr(data, "groups", None)
    if groups is None:
        return None
    return _first_samples((torch.as_tensor(groups), data.y), samples, seed)[0].numpy()


def _joined(
    loader: Iterable[Any],
    samples: int | None,
    seed: int,
    labels: Sequence[str],
    whole: bool,
) -> tuple[Data, Layout | None]:
    """Return all batches of a loader, or one pair of the whole."""
    read = list(loader)
    if isinstance(read[0], Mapping):
        read = padded(read)
    pairs, layouts = [], []
    for batch in read:
        x, y = split_labels(batch)
        packed, layout = pack(x)
        pairs.append((packed, _indices(y, labels)))
        layouts.append(layout)
    if any(layout != layouts[0] for layout in layouts):
        raise UsageError(
            "inputs must have one shape in all batches; got others. Pad them alike."
        )
    if not whole:
        return pairs, layouts[0]
    joined = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    return _first_samples(joined, samples, seed), layouts[0]


def _first_samples(pair: Any, samples: int | None, seed: int) -> Any:
    x, y = pair
    if samples is None or len(y) <= samples:
        return pair
    drawn = numpy_generator(seed, "diagnose", "samples").permutation(len(y))[:samples]
    rows = torch.from_numpy(np.sort(drawn))
    return x[rows.to(x.device)], y[rows.to(y.device)]


def _next_tokens(data: Data, model: nn.Module) -> Data:
    """Return labels moved by one position for a causal language model of transformers.

    Its own loss compares the output at a token with the next one.
    """
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return data

    def moved(pair: Any) -> Any:
        x, y = pair
        return x, nn.functional.pad(y[:, 1:], (0, 1), value=IGNORED)

    return moved(data) if isinstance(data, tuple) else [moved(each) for each in data]


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
    """Return True for one client's data: a pair, a batch dict or a loader, not several of these."""
    if isinstance(data, Mapping):
        return is_batch(data)
    if not isinstance(data, (list, tuple)):
        return True
    if len(data) != 2 or not _is_array(data[1]):
        return False
    x = data[0]
    parts = x.values() if isinstance(x, Mapping) else x
    return _is_array(x) or all(map(_is_array, parts))


def _is_array(part: Any) -> bool:
    return isinstance(part, Tensor | np.ndarray)


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
