"""Pairs models and data into clients, and checks that they can be measured together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.data import Dataset, IterableDataset

from fl_core import tree
from fl_core.data.federated import FederatedData, Split
from fl_core.data.loading import check_finite, client_names, note_parts, pair_of
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
    Adapter,
    Layout,
    adapt,
    as_array,
    check_real,
    check_tables,
    is_batch,
    pack,
    pass_notes,
    split_labels,
    tensor,
)
from fl_core.models.building import probability_notes
from fl_core.seeds import numpy_generator, seed_of, torch_seeded
from fl_core.training.border import adapted, fit_loss
from fl_core.training.losses import Loss
from fl_core.tree import first_tensor, plain, set_mode

from .measurement import (
    ClientModel,
    Data,
    batches,
    cannot_take,
    example,
    kind_of,
    one_line,
)

if TYPE_CHECKING:
    from .request import Request


FEW = 32
"""Largest number of samples whose outputs show whether a model ends in a softmax."""


@contextmanager
def _watch_modules(model: nn.Module, entered: list[tuple[str, Any]]) -> Iterator[None]:
    """List in ``entered`` the modules whose forward pass has begun and not ended.

    Each entry is the module's path in ``model`` and its inputs. The path is empty for
    modules outside the model. The list is changed in place, within the ``with`` block.
    """
    paths = {module: path for path, module in model.named_modules()}
    begin = register_module_forward_pre_hook(
        lambda module, inputs: entered.append((paths.get(module, ""), inputs))
    )
    with begin, register_module_forward_hook(lambda *_: entered.pop() and None):
        yield


def _check_module(model: object) -> None:
    """Check that a model is a module with real parameters.

    Raises:
        UsageError: it is not. For a class of modules the message advises to call it.
    """
    if not isinstance(model, nn.Module):
        name, advice = getattr(model, "__name__", ""), "models first, then data"
        kind = type(model).__name__
        description = kind
        if name:
            description = f"{name!r}, a {kind}"
        if isinstance(model, type) and issubclass(model, nn.Module):
            description, advice = f"the class {name}", f"{name}(...)"
        raise UsageError(
            f"a model must be a torch module; got {description}. Pass {advice}."
        )
    check_real(model)


def _check_same_clients(
    model_names: Sequence[str], models: int, data_names: Sequence[str], data: int
) -> None:
    """Check that models and data are of the same clients, or one of either is for all.

    Args:
        model_names, data_names: names of clients; empty if there are none.
        models, data: the numbers of models and of sets of data.

    Raises:
        UsageError: a name has no data, or the numbers differ.
    """
    if data_names:
        for name in model_names:
            check_known("client with data", name, data_names)
    both_named = bool(model_names and data_names)
    if models != data and (both_named or 1 not in (models, data)):
        model_names_text = listing(model_names) or "no names"
        data_names_text = listing(data_names) or "no names"
        raise UsageError(
            f"models and data must be of the same clients; got {models} models ({model_names_text}) and "
            f"{data} sets of data ({data_names_text}). Pass one of either without a name."
        )


def _check_same_tensors(
    first: Mapping[str, Any], client: str, other: Mapping[str, Any], other_client: str
) -> None:
    """Check that two clients' models have tensors of the same names and shapes.

    Raises:
        UsageError: they have not. The message names both clients and the first
            difference.
    """
    descriptions = f"the model of client {client!r}", f"that of client {other_client!r}"
    try:
        tree.check_same(first, other, *descriptions)
    except UsageError as error:
        raise UsageError(
            f"{error} Metrics of pairs that read features alone, such as cka, "
            "compare other architectures. Ask for no other metric."
        ) from error


def _paired(
    models: Any, data: Any
) -> tuple[list[str], list[nn.Module], list[Any], int]:
    """Return the names of the clients, a model and data for each, and the number of models that were given.

    One model serves all data, and one set of data all models. Clients without names are
    called client_0, client_1 and so on.

    Raises:
        UsageError: a model is no module, data are missing, or numbers or names differ.
    """
    is_one_model = not isinstance(models, Mapping | Sequence)
    model_names, own_models = _names_and_items("models", models, is_one_model)
    own_models = [plain(model) for model in own_models]
    callers = [f"client {name!r}" for name in model_names]
    callers = callers or ["models"] * len(own_models)
    for caller, model in zip(callers, own_models, strict=True):
        with about(caller):
            _check_module(model)
    if data is None:
        raise UsageError("data must be given with models; got none. Pass pairs (x, y).")
    data_names, own_data = _names_and_items("data", data, _is_one(data))
    n_models, n_data = len(own_models), len(own_data)
    _check_same_clients(model_names, n_models, data_names, n_data)
    if model_names and data_names:
        own_data = [own_data[data_names.index(name)] for name in model_names]
    count = max(n_models, n_data)
    own_models, own_data = (
        own_models * (count // n_models),
        own_data * (count // n_data),
    )
    for names in (model_names, data_names):
        if len(names) == count:
            return names, own_models, own_data, n_models
    return [f"client_{k}" for k in range(count)], own_models, own_data, n_models


def client_models(
    models: Any, data: Any, request: Request
) -> tuple[list[ClientModel], int]:
    """Pair models and data, in the forms of :func:`diagnostics.measure.diagnose`, into clients.

    Args:
        models, data: as for :func:`diagnostics.measure.diagnose`.
        request: the other arguments, checked.

    Returns:
        The clients, and the number of models that were given. If the request has no
        numbers of training samples, they are 0.

    Raises:
        UsageError: models and data differ in number or names, models differ in their
            tensors, data cannot be read, or a client is missing in the request's
            numbers of training samples.
    """
    federation_layout, seed, samples = None, request.seed or 0, request.samples
    n_train = request.n_train
    if isinstance(data, FederatedData):
        federation_layout = getattr(data.shape, "layout", None)
        data = {client.name: client.train for client in data.clients}
    names, own_models, own_data, n_models = _paired(models, data)
    check_tables(
        {
            f"client {k!r}": client_data
            for k, client_data in zip(names, own_data, strict=True)
        }
    )
    labels = getattr(own_models[0], "label_names", ())
    if labels == tuple(map(str, range(len(labels)))):
        labels = ()  # a label is its index
    first_tensors = tree.named_tensors(own_models[0])
    data_by_id: dict[int, tuple[Data, Layout | None]] = {}
    subjects = []
    for name, model, client_data in zip(names, own_models, own_data, strict=True):
        if not request.across_models:
            _check_same_tensors(
                first_tensors, names[0], tree.named_tensors(model), name
            )
        if id(client_data) not in data_by_id:
            with (
                about(f"client {name!r}"),
                one_line("data must be pairs (x, y), datasets or loaders"),
                torch_seeded(seed_of(seed, "diagnose", "read")),
            ):
                data_by_id[id(client_data)] = _read(client_data, samples, seed, labels)
        split, _ = data_by_id[id(client_data)]
        if n_train:
            n = n_train[check_known("client in n_train", name, n_train)]
        else:
            n = 0
        check_value(f"n_train of {name}", n, at_least(0))
        groups = getattr(client_data, "groups", None)
        if groups is not None:
            pair = torch.as_tensor(groups), client_data.y
            groups = _first_samples(pair, samples, seed)[0].numpy()
        subjects.append(ClientModel(name, model, split, n, groups))
    layouts = {layout for _, layout in data_by_id.values()}
    if len(layouts) > 1:
        raise UsageError("inputs must be of the same kind at all clients; got others.")
    layout = layouts.pop() or federation_layout
    if layout is not None:
        adapted_models = {id(model): adapt(model, layout) for model in own_models}
        subjects = [replace(s, model=adapted_models[id(s.model)]) for s in subjects]
    return subjects, n_models


def fit_outputs(
    subjects: Sequence[ClientModel], request: Request
) -> tuple[list[ClientModel], Loss]:
    """Return the clients with models that return [n, outputs], and the loss that fits them.

    All samples of a client are read once. Their number replaces an ``n_train`` of 0.
    The first two samples pass through the client's model and the loss. If a metric
    reads losses or the loss is binary, the loss takes all labels, with the output of
    the first sample. Floating labels of a binary loss become classes, int64 [n], if the
    data are a pair. Warnings say what the model or the loss does unexpectedly.

    Args:
        subjects: the clients with their models and data.
        request: the arguments of the diagnosis. Its loss is used if it has one.
            Otherwise the model's own or a default is used
            (:func:`fl_core.training.border.fit_loss`).

    Raises:
        UsageError: a model, the loss and the samples do not fit. The message names the client.
    """
    criterion: Loss | None = None
    seed, axis_and_ignored = (
        request.seed or 0,
        (request.class_axis, request.ignore_index),
    )
    model_of: dict[int, Any] = {}
    fitted_clients: list[ClientModel] = []
    for subject in subjects:
        model, data = subject.model, subject.data
        with about(f"client {subject.client!r}"):
            first_batch = example(model, data, seed)
            with (
                set_mode(model, "eval"),
                torch_seeded(seed_of(seed, "diagnose", "check")),
            ):
                output = _outputs(model, first_batch[0])
                if criterion is None:
                    loss = request.loss
                    if loss is None:  # a model of a run knows its own
                        loss = getattr(model, "training_loss", None)
                    criterion = fit_loss(
                        loss,
                        model,
                        output,
                        first_batch[1],
                        partial(_outputs, model, first_batch[0][:1]),
                        *axis_and_ignored,
                    )
                adapted_model = adapted(model, output, criterion)
                model = model_of.setdefault(id(model), adapted_model)
                z = _check_loss(
                    model,
                    *first_batch,
                    criterion,
                    request.differentiates and not fitted_clients,
                )
                if not fitted_clients:
                    examples = next(batches(data, FEW, model))[0][:FEW]
                    notes = pass_notes(model, first_batch[0])
                    if request.loss is None or isinstance(request.loss, str):
                        notes += probability_notes(
                            model(examples).detach(), criterion.task
                        )
                    for note in notes:
                        warn(note)
            n = 0
            with (
                set_mode(model, request.mode),
                torch_seeded(seed_of(seed, "diagnose", "count")),
            ):
                for _, y in batches(data, request.batch, model):
                    n += len(y)
                    if request.differentiates or criterion.binary:
                        _loss_of(criterion, z[:1].expand(len(y), -1), y)
            if criterion.binary and isinstance(data, tuple):  # floats are classes
                data = data[0], data[1].reshape(-1).long()
        n = subject.n_train or n
        fitted_clients.append(replace(subject, model=model, data=data, n_train=n))
    assert criterion is not None
    for note in criterion.notes():
        warn(note)
    return fitted_clients, criterion


def _outputs(model: nn.Module, x: Tensor) -> Any:
    """Return a model's output in its own form, without gradients.

    Raises:
        UsageError: the forward pass failed. The message names the module that fails.
    """
    entered: list[tuple[str, Any]] = []

    def blame(error: Exception) -> str:
        text = cannot_take(model, x)
        reference = next((p for p in model.parameters() if p.is_floating_point()), x)
        is_packed = isinstance(model, Adapter) and model.layout
        if re.search("dtype|type", str(error)) and not (
            is_packed or x.is_floating_point()
        ):
            expected_kind = kind_of(reference)
            text += f". The model computes in {expected_kind}: x.float() may be meant"
        if entered:
            path, inputs = entered[-1]
        else:
            path, inputs = ("", ())
        if path:
            tensor = first_tensor(inputs)
            module_class = type(model.get_submodule(path)).__name__
            text += f". Module {path!r}, a {module_class}, fails"
            if tensor is not None:
                got_kind = kind_of(tensor)
                got_shape = list(tensor.shape)
                text += f" on {got_kind} {got_shape}"
        return text

    with one_line(blame), _watch_modules(model, entered), torch.no_grad():
        if isinstance(model, Adapter):
            return model.own(x)
        return model(x)


def _loss_of(loss: Loss, z: Tensor, y: Tensor) -> Tensor:
    z_shape = list(z.shape)
    label_kind = kind_of(y)
    y_shape = list(y.shape)
    labels = f"outputs {z_shape} and labels {label_kind} {y_shape}"
    with one_line(f"loss {loss.name} must take {labels}"):
        loss.check_batch(z, y)
        return loss(z, y)


def _check_loss(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, differentiates: bool
) -> Tensor:
    """Return a model's outputs for samples, after a check that a loss can be computed.

    Args:
        model: the model. If losses are differentiated, its parameters require gradients
            afterwards.
        x, y: the samples and their labels.
        loss: the loss.
        differentiates: whether the loss must also be differentiable in the parameters.

    Raises:
        UsageError: the loss cannot be computed or differentiated, or is constant.
    """
    inputs: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    if differentiates and x.is_floating_point():
        # a reentrant checkpoint hides its parameters, but not x; the model may work in place on x
        x = x.detach().clone().requires_grad_() * 1
        inputs.append(x)
    with torch.set_grad_enabled(differentiates):
        model_class = type(model).__name__
        with one_line(f"{model_class} must have gradients"):
            for tensor in inputs if differentiates else ():
                tensor.requires_grad_()
            z: Tensor = model(x)
        value = _loss_of(loss, z, y)
        if z.requires_grad and not value.requires_grad:
            raise UsageError(
                f"loss {loss.name} must depend on the outputs; got a constant."
            )
        model_class = type(model).__name__
        with one_line(f"{model_class} must have gradients"):
            if inputs and value.requires_grad:
                torch.autograd.grad(value, inputs, allow_unused=True)
    return z.detach()


def _read(
    data: Any, samples: int | None, seed: int, labels: Sequence[str]
) -> tuple[Data, Layout | None]:
    """Return one client's data as a pair or a loader of pairs of tensors, and their layout.

    The layout says how several inputs are packed into one tensor; it is None for one
    input. A Dataset's samples are its items, whatever its attributes are:

    >>> class Scaled(Dataset):
    ...     x, y = torch.ones(2, 3), torch.tensor([0, 1])
    ...     def __len__(self):
    ...         return 2
    ...     def __getitem__(self, k):
    ...         return self.x[k] / 4, self.y[k]
    >>> _read(Scaled(), None, 0, ())[0][0]
    tensor([[0.2500, 0.2500, 0.2500],
            [0.2500, 0.2500, 0.2500]])

    Args:
        data: the samples, in the forms of :func:`diagnostics.measure.diagnose`.
        samples: maximum number of samples; None for all.
        seed: the seed that draws them.
        labels: names of the model's classes, if labels are such names.

    Raises:
        UsageError: the data are of another form, or their values do not fit.
    """
    if isinstance(data, Split):
        labels = ()  # of a federation, so indices already
    has_items = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    if not has_items and hasattr(data, "x") and hasattr(data, "y"):
        data = (data.x, data.y)
    check_finite(data, "data")
    is_pair = isinstance(data, Mapping | tuple | list) and _is_one(data)
    if is_pair or has_items or hasattr(data, "column_names"):
        if is_pair:
            x, y = split_labels(data)
        else:
            x, y = pair_of(data, "data")
        x, layout = pack(x)
        return _first_samples((x, _indices(y, labels)), samples, seed), layout
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        next(batches(data))  # which refuses it
    first_item = next(iter(data), None)
    has_tensors = isinstance(first_item, tuple | list) and all(
        isinstance(part, Tensor) for part in first_item
    )
    is_needed = samples is not None or labels
    if first_item is None or (has_tensors and len(first_item) == 2 and not is_needed):
        return data, None
    if not isinstance(first_item, tuple | list | Mapping):
        next(batches(data))
    return _joined(data, samples, seed, labels, whole=samples is not None)


def _indices(y: Any, names: Sequence[str]) -> Tensor:
    """Return labels as a tensor. Names of a run's classes become their indices.

    Raises:
        UsageError: labels are words and the run has no names, or none of its classes
            has the name.
    """
    values = as_array(y)
    are_words = values.dtype.kind in "UO"
    if are_words and not names:
        raise UsageError(
            f"labels must be numbers, not words; got {str(values.flat[0])!r}. Pass indices of classes."
        )
    names_are_numbers = all(name.lstrip("-").isdigit() for name in names)
    if not are_words and (
        not names or not names_are_numbers or values.dtype.kind not in "bui"
    ):
        return tensor(y)
    index = {
        check_known("class of the run", str(v), names): tuple(names).index(str(v))
        for v in np.unique(values)
    }
    return torch.tensor([index[str(v)] for v in values.flat]).reshape(values.shape)


def _joined(
    loader: Iterable[Any],
    samples: int | None,
    seed: int,
    labels: Sequence[str],
    whole: bool,
) -> tuple[Data, Layout | None]:
    """Return all batches of a loader as pairs of tensors or one pair, and their layout.

    Batches that are dicts become one pair, and its sequences are padded to one length.

    Args:
        loader: the loader. It gives at least one batch.
        samples: maximum number of samples of the whole; None for all.
        seed: the seed that draws them.
        labels: names of the model's classes, if labels are such names.
        whole: whether to join the batches to one pair.

    Raises:
        UsageError: inputs have different shapes or kinds in two batches.
    """
    batches_read = list(loader)
    if isinstance(batches_read[0], Mapping):  # sequences of several lengths are padded
        keys = batches_read[0].keys()
        rows: list[dict[Any, Any]] = []
        for batch in batches_read:
            columns = zip(*batch.values(), strict=True)
            rows += [dict(zip(keys, row, strict=True)) for row in columns]
        batches_read = [pair_of(rows, "data")]
    note_parts(batches_read[0], "data")
    pairs, layouts = [], []
    for batch in batches_read:
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
    joined_pair = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    return _first_samples(joined_pair, samples, seed), layouts[0]


def _first_samples(pair: Any, samples: int | None, seed: int) -> Any:
    x, y = pair
    if samples is None or len(y) <= samples:
        return pair
    chosen_positions = numpy_generator(seed, "diagnose", "samples").permutation(len(y))[
        :samples
    ]
    rows = torch.from_numpy(np.sort(chosen_positions))
    return x[rows.to(x.device)], y[rows.to(y.device)]


def _names_and_items(
    what: str, argument: Any, is_one_item: bool
) -> tuple[list[str], list[Any]]:
    """Return names and items of a mapping, a sequence or a single item.

    Names are empty without a mapping.

    Raises:
        UsageError: there are no items.
    """
    if is_one_item:
        return [], [argument]
    if isinstance(argument, Mapping):
        items = list(argument.values())
    else:
        items = list(argument)
    if not items:
        raise UsageError(f"{what} must have at least one entry; got no {what}.")
    return list(client_names(argument)) if isinstance(argument, Mapping) else [], items


def _is_one(data: Any) -> bool:
    """Return True for one client's data: a pair, a batch dict or a loader, not several of these."""
    if isinstance(data, Mapping):
        return is_batch(data)
    if not isinstance(data, (list, tuple)):
        return True
    if len(data) != 2 or not _is_array(data[1]):
        return False
    x = data[0]
    parts = x
    if isinstance(x, Mapping):
        parts = x.values()
    return _is_array(x) or all(map(_is_array, parts))


def _is_array(part: Any) -> bool:
    return isinstance(part, ARRAYS)
