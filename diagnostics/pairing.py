"""Pairs models and data, given in any of the forms of :func:`diagnostics.diagnosis.diagnose`, into clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import UsageError, check_known, listing
from fl_core.seeds import seed_of, torch_seeded

from .capture import Data, batches
from .checking import check_arrays, check_modules
from .client_model import ClientModel


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
