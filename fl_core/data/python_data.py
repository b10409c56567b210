"""Data from Python: dictionaries, frames, pairs, datasets and loaders become a source or a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from fl_core.data import arrays, tables
from fl_core.data.columns import (
    PLAIN,
    WRITTEN,
    Reading,
    first_duplicate,
    located,
)
from fl_core.data.federated import FederatedData, gather
from fl_core.data.partitions import make
from fl_core.data.sources import OWN_NAME, Source, check_lengths, source_of_parts
from fl_core.errors import UsageError, as_list, check_known
from fl_core.models.adapter import is_batch, split_labels
from fl_core.rows import CLASSIFICATION

OwnData = FederatedData | Source


def as_data(data: Any, reading: Reading = PLAIN) -> OwnData:
    """Return data from Python as a source. Each run partitions it with its seed. A federation stays as it is.

    >>> import numpy as np
    >>> source = as_data({"north": (np.zeros((4, 2)), [0, 1, 0, 1]), "south": (np.ones((2, 2)), [0, 1])})
    >>> source.owner_names, len(source)
    (('north', 'south'), 6)
    >>> frame = pd.DataFrame({"client": ["a", "a", "b", "b"], "age": [50, 61, 47, 70], "label": [0, 1, 1, 0]})
    >>> as_data(frame).columns
    ('age',)

    Args:
        data: {client: samples}, or samples alone, which a partition assigns to clients. Samples are a pair (x, y) of
            tensors or arrays, a Dataset or a DataLoader. x may be a tuple or dict of several inputs. Or a pandas
            DataFrame, read like a table in a file.
        reading: the names of a frame's columns, and how numbers are filled.

    Raises:
        UsageError: it is none of these, or its samples are invalid.
    """
    if isinstance(data, (FederatedData, Source)):
        return data
    if isinstance(data, pd.DataFrame):
        reading.check_unasked("a DataFrame is no text file", *WRITTEN)
        return tables.read_or_report(data, reading, OWN_NAME)
    by_client = isinstance(data, Mapping) and not is_batch(data)
    listed = isinstance(data, list | tuple)
    parts = tuple(data.values() if by_client else data if listed else ())
    kinds = (tuple, Dataset, DataLoader)
    if parts and all(isinstance(each, pd.DataFrame) for each in parts):
        raise UsageError(
            f"data must be one DataFrame with a column of clients; got {len(parts)} DataFrames. Join them: "
            "pd.concat({client: frame, ...}, names=['client']).reset_index('client')."
        )
    if listed and (len(parts) != 2 or all(isinstance(each, kinds) for each in parts)):
        raise UsageError(
            f"data must be one pair (x, y), or {{client: (x, y)}}; got {len(parts)} parts without names. "
            "Name the clients: {'client_0': (x, y), ...}."
        )
    if not isinstance(data, (Mapping, tuple, list, Dataset, DataLoader)):
        raise UsageError(
            f"data must be {{client: (x, y)}}, a DataFrame, or a federation of fl.from_clients; got "
            f"{type(data).__name__}. Give one of these. Name a file or a dataset with dataset=."
        )
    reading.check_plain("data= without a DataFrame")
    keys: dict[str, Any] = {"missing": reading.may_be_missing, "task": reading.task}
    if isinstance(data, Mapping) and by_client:
        return source_from_clients(data, **keys)
    return source_of_parts({"": pair_of(data, "data")}, **keys)[0]


def from_clients(
    silos: Mapping[str, tuple[Any, Any]],
    *,
    classes: str | Sequence[str] | None = None,
    name: str = OWN_NAME,
    seed: int = 0,
    splits: Sequence[float] | None = None,
    scale: str = "none",
    impute: str = "none",
    task: str = CLASSIFICATION,
    groups: Mapping[str, Sequence[Any]] | None = None,
) -> FederatedData:
    """Make a federation of clients' tensors or arrays, in the given order, as ``data`` for a run.

    >>> import numpy as np
    >>> from fl_core.data import from_clients
    >>> draw = np.random.default_rng(0)
    >>> wards = {ward: (draw.normal(size=(n, 5)), np.arange(n) % 2) for ward, n in (("north", 50), ("south", 25))}
    >>> data = from_clients(wards, classes=("well", "ill"))
    >>> [(client.name, len(client.train), len(client.test)) for client in data.clients]
    [('north', 32, 10), ('south', 16, 5)]

    Args:
        silos: {client: (x, y)}, checked like an .npz file's arrays (:func:`fl_core.data.files.read`). Images x are
            uint8 [n, H, W] or [n, H, W, C] and are scaled to 0..1. Other x are numbers [n, ...] and not scaled. Labels
            y are whole numbers or words [n], or targets. A Dataset or DataLoader of pairs can stand for (x, y). Several
            inputs of a model are a tuple or dict x. A dict may hold the ``labels``.
        classes: names of labels 0..C-1. The default is the distinct labels of all clients, in ascending order. A module
            of your own takes whole numbers as indices.
        name: of the data, in records.
        seed, splits: of the split of each client's samples, see :func:`fl_core.data.partitions.make`.
        scale, impute: how a table's columns are scaled and their missing numbers (NaN) filled. They are fitted on the
            training samples of all clients, see :data:`fl_core.data.columns.SCALES` and the next.
        task: ``classification``, or ``regression`` if y are numbers to predict, without classes.
        groups: {client: group of each sample}, such as patients with several samples. Each is in one split.

    Raises:
        UsageError: names the client and the first bad row, or the difference between clients.
    """
    how = Reading(scale=scale, impute=impute, task=task)
    if classes is not None:
        classes = as_list("classes", classes)
    source = source_from_clients(
        silos, classes=classes, name=name, missing=how.may_be_missing, task=task
    )
    if groups is not None:
        for client, size in zip(silos, np.bincount(source.owner), strict=True):  # type: ignore[arg-type]
            check_known("client of groups", client, groups)
            with located(f"client {client!r}, groups"):
                check_lengths(range(size), groups[client])
        source = replace(
            source, groups=arrays.nested_groups(groups[client] for client in silos)
        )
    source = source.with_methods(scale, impute)
    return gather(source, make(source, "natural", seed=seed, splits=splits))


def source_from_clients(silos: Mapping[str, tuple[Any, Any]], **keys: Any) -> Source:
    """Join the samples of all clients, each as a natural client (see :func:`from_clients`).

    Args:
        keys: as of :func:`fl_core.data.sources.source_of_parts`.
    """
    if not isinstance(silos, Mapping) or not silos:
        got = "an empty one" if isinstance(silos, Mapping) else type(silos).__name__
        raise UsageError(
            f"clients must be a dictionary {{client: (x, y)}} of at least one client; got {got}."
        )
    names = tuple(map(str, silos))
    twice = first_duplicate(names)
    if twice:
        raise UsageError(
            f"clients' names must be distinct as text; got {twice!r} twice."
        )
    if any(not silo.strip() for silo in names):
        raise UsageError(
            "clients' names must not be empty; got an empty one. Rows use it for all clients together."
        )
    pairs = {
        f"client {silo!r}": pair_of(samples, f"client {silo!r}")
        for silo, samples in silos.items()
    }
    source, sizes = source_of_parts(pairs, **keys)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return replace(source, owner=owner, owner_names=names)


def pair_of(samples: Any, where: str) -> tuple[Any, Any]:
    """Return samples and labels of a pair (x, y), a dict with labels, a Dataset, or a DataLoader.

    A loader's dataset is read in its own order, so that shuffling changes nothing.

    Raises:
        UsageError: it is none of these, or holds no pairs.
    """
    if isinstance(samples, (tuple, list)) and len(samples) == 2:
        return samples[0], samples[1]
    if is_batch(samples):
        return split_labels(samples)
    if isinstance(samples, DataLoader):
        samples = _dataset_of(samples, where)
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        return samples.tensors[0], samples.tensors[1]
    if not isinstance(samples, Dataset):
        raise UsageError(
            f"{where} must have a pair (x, y), a Dataset or a DataLoader; got {type(samples).__name__}. Give a pair."
        )
    count = range(len(samples)) if hasattr(samples, "__len__") else None
    found = list(samples) if count is None else [samples[k] for k in count]  # type: ignore[call-overload]
    pairs = [
        each for each in found if isinstance(each, tuple | list) and len(each) == 2
    ]
    if not found or len(pairs) < len(found) or isinstance(pairs[0][0], Mapping | tuple):
        if not found or not isinstance(found[0], Mapping | tuple | list):
            raise UsageError(
                f"{where}: a Dataset must hold pairs (x, y). Give x and y of each sample."
            )
        return split_labels(default_collate(found))
    x, y = ([np.asarray(each[part]) for each in found] for part in (0, 1))
    if len({(each.shape, each.dtype) for each in x}) > 1:
        raise UsageError(
            f"{where}: all samples must have one shape and type. Resize them first."
        )
    return np.stack(x), np.stack(y)


def _dataset_of(loader: DataLoader[Any], where: str) -> Dataset[Any]:
    """Return the samples of a loader as a dataset, in an order that does not depend on chance."""
    sampler = loader.sampler
    if type(sampler) in (SequentialSampler, RandomSampler):
        return loader.dataset
    indices = getattr(sampler, "indices", None)
    if indices is None:
        raise UsageError(
            f"{where}: a DataLoader must have a sampler with known samples; got {type(sampler).__name__}. "
            "Give a Dataset, such as a torch.utils.data.Subset."
        )
    return Subset(loader.dataset, list(indices))
