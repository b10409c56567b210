"""Pairs models and data into clients, and checks that they can be measured together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fl_core import tree
from fl_core.data.federated import FederatedData, Split
from fl_core.data.loading import client_names
from fl_core.errors import (
    UsageError,
    about,
    at_least,
    check_known,
    check_value,
    listing,
    warn,
)
from fl_core.models.adapter import (
    ARRAYS,
    IGNORED,
    Adapter,
    Layout,
    adapt,
    as_array,
    check_real,
    check_tables,
    is_batch,
    output_of,
    pack,
    padded,
    pass_notes,
    split_labels,
    tensor,
)
from fl_core.seeds import numpy_generator, seed_of, torch_seeded
from fl_core.training.losses import Loss
from fl_core.tree import first_tensor, plain, set_mode

from .measurement import (
    Batch,
    ClientModel,
    Data,
    batches,
    cannot_take,
    check_outputs,
    example,
    kind_of,
    one_line,
)
from .outputs import fit_loss

if TYPE_CHECKING:
    from .request import Request

READ = 256
"""Samples of a dataset that are read at a time."""


def check_module(model: Any) -> None:
    """Refuse anything but a module whose parameters are real and have a shape.

    Raises:
        UsageError: the message names the type that was given.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"a model must be a torch module; got the class {model.__name__}. Pass {model.__name__}(...)."
        )
    if not isinstance(model, nn.Module):
        name = f"{model.__name__!r}, a " if hasattr(model, "__name__") else ""
        raise UsageError(
            f"a model must be a torch module; got {name}{type(model).__name__}. "
            "Pass models first, then data."
        )
    kind = type(model).__name__
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise UsageError(
                f"parameter {name!r} of {kind} must have a shape and numbers; got none yet. Call the model once, or "
                "load its weights."
            )
    check_real(model)
    with one_line(f"{kind} must be a module of Python code"), set_mode(model, "eval"):
        pass  # which exported modules refuse


@contextmanager
def _watch_modules(model: nn.Module, entered: list[tuple[str, Any]]) -> Iterator[None]:
    """Keep in ``entered`` the modules that have begun and not ended, with their inputs."""

    def begin(path: str) -> Any:
        return lambda module, inputs: entered.append((path, inputs))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if not path:
                continue
            stack.callback(module.register_forward_pre_hook(begin(path)).remove)
            hook = module.register_forward_hook(lambda *_: entered and entered.pop() and None)  # fmt: skip
            stack.callback(hook.remove)
        yield


def client_models(
    models: Any, data: Any, request: Request
) -> tuple[list[ClientModel], int]:
    """Pair models and data as :func:`diagnostics.measure.diagnose` takes them.

    Returns:
        The clients, and the number of models that were given.

    Raises:
        UsageError: models and data differ in number or names, or models in their tensors.
    """
    packed, seed, samples = None, request.seed or 0, request.samples
    n_train = request.n_train
    if isinstance(data, FederatedData):
        packed = getattr(data.shape, "layout", None)
        data = {client.name: client.train for client in data.clients}
    one = not isinstance(models, Mapping | Sequence)
    model_names, own_models = _names_and_items("models", models, one)
    own_models = [plain(model) for model in own_models]
    named = [f"client {name!r}" for name in model_names]
    for who, model in zip(
        named or ["models"] * len(own_models), own_models, strict=True
    ):
        with about(who):
            check_module(model)
    if data is None:
        raise UsageError("data must be given with models; got none. Pass pairs (x, y).")
    data_names, own_data = _names_and_items("data", data, _is_one(data))
    if data_names:
        for name in model_names:
            check_known("client with data", name, data_names)
    m, d = len(own_models), len(own_data)
    if m != d and (1 not in (m, d) or (model_names and data_names)):
        raise UsageError(
            f"models and data must be of the same clients; got {m} models ({listing(model_names) or 'no names'}) and "
            f"{d} sets of data ({listing(data_names) or 'no names'}). Pass one of either without a name."
        )
    if model_names and data_names:
        own_data = [own_data[data_names.index(name)] for name in model_names]
    count = max(m, d)
    own_models, own_data = own_models * (count // m), own_data * (count // d)
    given = [own for own in (model_names, data_names) if len(own) == count]
    names = given[0] if given else [f"client_{k}" for k in range(count)]
    clients = [f"client {name!r}" for name in names]
    check_tables(dict(zip(clients, own_data, strict=True)))
    labels = getattr(own_models[0], "label_names", ())
    if labels == tuple(map(str, range(len(labels)))):
        labels = ()  # a label is its index
    first = tree.named_tensors(own_models[0])
    read: dict[int, tuple[Data, Layout | None]] = {}
    subjects = []
    for name, model, own in zip(names, own_models, own_data, strict=True):
        if not request.across_models:
            mine = tree.named_tensors(model)
            whose = f"the model of client {names[0]!r}", f"that of client {name!r}"
            try:
                tree.check_same(first, mine, *whose)
            except UsageError as error:
                raise UsageError(
                    f"{error} Metrics of pairs that read features alone, such as cka, "
                    "compare other architectures. Ask for no other metric."
                ) from error
        if id(own) not in read:
            with (
                about(f"client {name!r}"),
                one_line("data must be pairs (x, y), datasets or loaders"),
                torch_seeded(seed_of(seed, "diagnose", "read")),
            ):
                read[id(own)] = _read(own, samples, seed, labels)
        found, _ = read[id(own)]
        n = n_train[check_known("client in n_train", name, n_train)] if n_train else 0
        check_value(f"n_train of {name}", n, at_least(0))
        tokens, groups = _next_tokens(found, model), _groups(own, samples, seed)
        subjects.append(ClientModel(name, model, tokens, n, groups))
    layouts = {layout for _, layout in read.values()}
    if len(layouts) > 1:
        raise UsageError("inputs must be of the same kind at all clients; got others.")
    layout = layouts.pop() or packed
    if layout is not None:
        adapted = {id(model): adapt(model, layout) for model in own_models}
        subjects = [replace(s, model=adapted[id(s.model)]) for s in subjects]
    return subjects, m


def fit_outputs(
    subjects: Sequence[ClientModel], request: Request
) -> tuple[list[ClientModel], Loss]:
    """Return the clients with models that return [n, outputs], and the loss that fits them.

    All samples of a client are read once and counted. The first two pass through its model and the loss. If a metric
    reads losses, so do those with the lowest and the highest label.

    Raises:
        UsageError: a model, the loss and the samples do not fit. The message names the client.
    """
    criterion: Loss | None = None
    seed, how = request.seed or 0, (request.class_axis, request.ignore_index)
    axis: int | None = None
    adapted: dict[int, Any] = {}
    ready: list[ClientModel] = []
    for subject in subjects:
        model, data = subject.model, subject.data
        with about(f"client {subject.client!r}"):
            with set_mode(model, request.mode):
                ends, n = _ends(model, data, request.batch, seed, how[1])
            first = example(model, data, seed)
            with (
                set_mode(model, "eval"),
                torch_seeded(seed_of(seed, "diagnose", "check")),
            ):
                output = _outputs(model, first[0])
                raw = output_of(output, model)
                if criterion is None:
                    loss = request.loss
                    if loss is None:  # a model of a run knows its own
                        loss = getattr(model, "training_loss", None)
                    criterion, axis = fit_loss(loss, raw, first[1], *how)
                if output is not raw or raw.ndim != 2 or axis is not None:
                    layout = getattr(model, "layout", None)
                    model = adapted.setdefault(id(model), adapt(model, layout, axis))
                if not request.differentiates:
                    ends = []  # no metric reads the labels' losses
                for x, y in (first, *ends):
                    _check_loss(
                        model, x, y, criterion, request.differentiates and not ready
                    )
                for note in () if ready else pass_notes(model, first[0]):
                    warn(note)
        ready.append(replace(subject, model=model, n_train=subject.n_train or n))
    assert criterion is not None
    return ready, criterion


def _ends(
    model: nn.Module, data: Data, batch: int, seed: int, ignored: int
) -> tuple[list[Batch], int]:
    """Return the sample with the lowest label and that with the highest, each twice, and the number of samples."""
    ends: dict[int, tuple[float, Batch]] = {}
    n = 0
    with torch_seeded(seed_of(seed, "diagnose", "count")):
        for x, y in batches(data, batch, model):
            labels = y.reshape(len(y), -1)
            if y.ndim > 1:
                labels = labels.masked_fill(labels == ignored, 0)
            for sign, values in ((-1, -labels.amin(1)), (1, labels.amax(1))):
                k = int(values.argmax())
                if sign not in ends or float(values[k]) > ends[sign][0]:
                    ends[sign] = float(values[k]), (x[[k, k]], y[[k, k]])
            n += len(y)
    return [pair for _, pair in ends.values()], n


def _outputs(model: nn.Module, x: Tensor) -> Any:
    """Return a model's output in its own form; an error names the module that fails."""
    entered: list[tuple[str, Any]] = []

    def blame() -> str:
        text = cannot_take(model, x)
        like = next((p for p in model.parameters() if p.is_floating_point()), x)
        if not x.is_floating_point() and like is not x:
            text += f". The model computes in {kind_of(like)}: x.float() may be meant"
        if entered:
            path, given = entered[-1]
            tensor = first_tensor(given)
            text += f". Module {path!r}, a {type(model.get_submodule(path)).__name__}, fails"
            if tensor is not None:
                text += f" on {kind_of(tensor)} {list(tensor.shape)}"
        return text

    with one_line(blame), _watch_modules(model, entered), torch.no_grad():
        return model.raw(x) if isinstance(model, Adapter) else model(x)


def _check_loss(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, differentiates: bool
) -> None:
    """Refuse a model and a loss that cannot be computed on samples, or not differentiated in the parameters."""
    inputs: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    if differentiates and x.is_floating_point():
        # a reentrant checkpoint hides its parameters, but not x; the model may work in place on x
        x = x.detach().clone().requires_grad_() * 1
        inputs.append(x)
    with torch.set_grad_enabled(differentiates):
        with one_line(f"{type(model).__name__} must have gradients"):
            for tensor in inputs if differentiates else ():
                tensor.requires_grad_()
            z = model(x)
        labels = f"outputs {list(z.shape)} and labels {kind_of(y)} {list(y.shape)}"
        with one_line(f"loss {loss.name} must take {labels}"):
            check_outputs(model, z, y, loss)
            value = loss(z, y)
        if z.requires_grad and not value.requires_grad:
            raise UsageError(
                f"loss {loss.name} must depend on the outputs; got a constant."
            )
        with one_line(f"{type(model).__name__} must have gradients"):
            if inputs and value.requires_grad:
                torch.autograd.grad(value, inputs, allow_unused=True)


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
    values = as_array(y)
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
    return list(client_names(given)) if isinstance(given, Mapping) else [], items


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
    return isinstance(part, ARRAYS)
