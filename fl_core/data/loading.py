"""Loading of a federation by a dataset's name, path or code: open it, take its pool, and partition it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fl_core import seeds
from fl_core.data import files
from fl_core.data.columns import STANDARD, Reading
from fl_core.data.federated import FederatedData, Split, gather
from fl_core.data.partitions import PARTITIONS, Partition, make
from fl_core.data.partitions.papers import rounded
from fl_core.data.partitions.stored_partition import options_of
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.python_data import as_data
from fl_core.data.registry import DATASETS, Location, Recipe, general, path_of
from fl_core.data.sources import Source
from fl_core.errors import UsageError, about, listing
from fl_core.registry import is_outside, parameters_of
from fl_core.rows import CLASSIFICATION


def load(
    dataset: Location | Source,
    *,
    data_root: Location | None = None,
    download: bool = False,
    clients: int | None = None,
    partition: str | None = None,
    alpha: float | None = None,
    classes_per_client: int | None = None,
    samples_per_client: int | None = None,
    dominance: float | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    splits: Sequence[float] | None = None,
    indices: Partition | None = None,
    preprocessing: Preprocessing | None = None,
    **reading: Any,
) -> FederatedData:
    """Load a dataset partitioned over clients, each with train, validation and test samples.

    Options that are None use the recipe's values. Everything is checked before anything is partitioned.

    >>> from fl_core.data import load
    >>> heart = load("heart")
    >>> [(client.name, len(client.train)) for client in heart.clients]
    [('cleveland', 193), ('hungarian', 166), ('switzerland', 28), ('va', 83)]
    >>> digits = load("digits", partition="pathological", classes_per_client=3, clients=4)
    >>> (digits.class_counts() > 0).sum(axis=1).tolist()
    [3, 3, 3, 3]

    Args:
        dataset: a name (see :func:`datasets`); your own function as ``package.module:function`` (see :func:`dataset`),
            which is imported and called; or the path of an .npz, .csv, .parquet or .jsonl file or a folder of images
            (see :func:`fl_core.data.files.read`); or samples that are read already.
        data_root: folder of the named datasets' files. None means the environment's ``FEDLAYERS_DATA_ROOT``.
        download: let torchvision fetch missing files of the datasets that it knows.
        clients: number of clients. Natural clients all take part.
        partition: one of :data:`PARTITIONS`, such as ``iid``, ``dirichlet`` and ``natural``, or your own as
            ``package.module:Class``.
        alpha, classes_per_client, samples_per_client, dominance: of the partitions that have such an option.
        max_samples: size of the pool that is partitioned, the first in file order (see :meth:`Source.first`).
        seed: of the partition.
        splits: shares of train, validation and test. None means the partition's, usually 0.64, 0.16, 0.20.
        indices: a stored partition to use again. Other arguments must agree with it, and its seed is used.
        preprocessing: stored fitted numbers to use again.
        reading: fields of :class:`fl_core.data.columns.Reading`, such as ``client_column``, ``exclude_columns`` and
            ``scale``.

    Raises:
        UsageError: an unknown dataset, missing or bad files, or a partition that does not fit.
        RunError: a download failed.
    """
    source, defaults = opened(dataset, data_root, download, max_samples, **reading)
    options = {
        "alpha": alpha,
        "classes_per_client": classes_per_client,
        "samples_per_client": samples_per_client,
        "dominance": dominance,
    }
    if indices is not None:
        shares = None if splits is None else list(splits)
        _check_agrees(
            indices,
            {"partition": partition, "clients": clients, **options, "splits": shares},
        )
        return gather(source, indices, preprocessing)
    kind = partition or defaults.partition
    partitioning = PARTITIONS[kind]
    if alpha is None and "alpha" in options_of(partitioning):
        options["alpha"] = defaults.alpha
    if clients is None and not partitioning.natural:
        clients = defaults.clients or len(source.owner_names)
    drawn = make(source, kind, clients=clients, seed=seed, splits=splits, **options)
    return gather(source, drawn)


def opened(
    dataset: Location | Source,
    data_root: Location | None = None,
    download: bool = False,
    max_samples: int | None = None,
    **reading: Any,
) -> tuple[Source, Recipe]:
    """Return the pool of a dataset before its partition, and its default settings. Arguments are those of :func:`load`.

    Raises:
        UsageError: an unknown dataset, or missing or bad files.
    """
    how = Reading.with_keys(reading)
    if isinstance(dataset, Source):
        source, defaults = dataset, recipe(dataset)
    elif _is_named(dataset):
        how.check_plain(str(dataset))
        source, defaults = _open(str(dataset), data_root, download, how.task)
    else:
        source = files.read(path_of(dataset), how)
        defaults = recipe(source)
    source = source.with_methods(how.scale or defaults.scale, how.impute)
    if max_samples is None:  # a file may hold fewer samples than the published pool
        max_samples = min(defaults.max_samples or len(source), len(source))
    source = source.first(max_samples)
    return source, defaults


def recipe(
    dataset: Location | Source,
    *,
    data_root: Location | None = None,
    download: bool = False,
    **reading: Any,
) -> Recipe:
    """Return a dataset's default settings. For a path they are general ones, from names and headers alone.

    Your own function is called for it unless its decorator gives a recipe. This needs ``data_root`` and ``download``.
    ``reading`` is as in :func:`load`.

    Raises:
        UsageError: the argument is not a name, a function, or an existing path of a known kind.
    """
    how = Reading.with_keys(reading)
    if isinstance(dataset, Source):
        raw = dataset.columns and dataset.preprocessing is None
        scale = STANDARD if raw else "none"
        has_clients = dataset.owner is not None
        return general(dataset.shape, has_clients, dataset.task, scale=scale)
    if _is_named(dataset):
        return (
            DATASETS[str(dataset)].recipe
            or _open(str(dataset), data_root, download, how.task)[1]
        )
    shape, has_clients, scale = files.peek(path_of(dataset), how)
    return general(shape, has_clients, how.task, scale=scale)


def open_named(
    name: str, *, data_root: Location | None = None, download: bool = False
) -> Source:
    """Open a dataset by its name, or by the place of its function, without partitioning it.

    Args:
        data_root: folder of the files. None means the environment's ``FEDLAYERS_DATA_ROOT``.
        download: let torchvision fetch its files if they are missing.

    Raises:
        UsageError: the name is unknown, or files are missing or invalid. The message names their place.
        RunError: a download failed.
    """
    return _open(name, data_root, download)[0]


def _open(
    name: str, data_root: Location | None, download: bool, task: str = CLASSIFICATION
) -> tuple[Source, Recipe]:
    """Return a named dataset's samples, with its own default settings or the general ones."""
    member = DATASETS[name]
    offered = {"data_root": data_root, "download": download}
    parameters, _ = parameters_of(member.open)
    for parameter, required in parameters.items():
        if required and parameter not in offered:
            raise UsageError(
                f"dataset {name!r} must be a function without required parameters; got {parameter!r}."
            )
    returned = member.open(
        **{key: value for key, value in offered.items() if key in parameters}
    )
    with about(f"dataset {name!r}"):
        data = as_data(returned, Reading(task=task))
        if isinstance(data, FederatedData):
            raise UsageError("a function must return data without a partition.")
    source = replace(data, name=name)
    if task != CLASSIFICATION and source.task != task:
        raise UsageError(
            f"dataset {name!r} must have targets for task {task}; got "
            f"{f'classes {listing(source.classes, 4)}' if source.classes else source.task}."
        )
    recipe = member.recipe or general(
        source.shape, source.owner is not None, source.task
    )
    return replace(
        source, mean=recipe.mean or source.mean, std=recipe.std or source.std
    ), recipe


def _is_named(dataset: Location) -> bool:
    return str(dataset) in DATASETS or is_outside(str(dataset))


def _check_agrees(stored: Partition, asked: Mapping[str, Any]) -> None:
    """Check that options agree with a stored partition. None always agrees."""
    has = {**stored.params, "partition": stored.kind}
    for name, value in asked.items():
        if value is not None and value != has.get(name):
            raise UsageError(
                f"{name} must agree with the stored partition, which has {has.get(name)}; got {value}."
            )


# --- more test samples ---------------------------------------------------------------------------------------

MOST = 400
"""More test samples of a client. With 400, a score's sampling error is small compared with that between runs."""


def extra_test_samples(
    source: Source, data: FederatedData, max_per_client: int = MOST
) -> dict[str, Split]:
    """Draw more test samples for each client from the unused part of a dataset.

    Samples are drawn without replacement and follow the class proportions of all the client's samples. If the partition
    keeps natural clients, samples come from the client's own. Two clients may receive the same sample, since nothing is
    trained on them. The draw depends on the partition's seed alone.

    Args:
        source: the full dataset, as opened before a pool was taken from it.
        data: the federation, created from the first samples of ``source`` (see :meth:`Source.first`).
        max_per_client: maximum number of samples of a client. It gets fewer if one of its classes runs out.

    Returns:
        A dict from client name to samples. Clients without unused samples are omitted.

    Raises:
        UsageError: the federation was not created from this dataset.

    >>> from fl_core.data import load, open_named
    >>> data = load("digits", max_samples=400, partition="dirichlet", alpha=0.5, clients=3)
    >>> further = extra_test_samples(open_named("digits"), data, max_per_client=50)
    >>> {name: len(split) for name, split in further.items()}
    {'client_0': 50, 'client_1': 50, 'client_2': 50}
    """
    pool = source.first_indices(data.partition.n_samples)
    if source.take(pool).digest != data.source_digest:
        raise UsageError(
            f"source must be the dataset of the federation {data.name}; got other samples in {source.name}."
        )
    rest = np.setdiff1d(np.arange(len(source)), pool, assume_unique=True)
    if source.groups is not None:
        rest = rest[~np.isin(source.groups[rest], source.groups[pool])]
    if not len(rest):
        return {}
    train = np.concatenate(
        [pool[parts["train"]] for parts in data.partition.indices.values()]
    )
    encoded = source.fit(train)
    by_owner = source.owner is not None and PARTITIONS[data.partition.kind].natural
    further = {}
    for number, (name, parts) in enumerate(data.partition.indices.items()):
        own = pool[np.concatenate(list(parts.values()))]
        left = rest
        if by_owner and source.owner is not None:
            left = rest[source.owner[rest] == source.owner[own[0]]]
        draw = seeds.numpy_generator(data.partition.seed, "unused", number)
        shares = np.bincount(source.labels[own], minlength=len(source.classes)) / len(
            own
        )
        having = np.bincount(source.labels[left], minlength=len(shares))
        present = np.flatnonzero(shares)
        total = min(
            max_per_client, int((having[present] / shares[present]).min() + 1e-9)
        )
        counts = rounded(shares[present], total, having[present])
        assert counts is not None
        chosen = [
            draw.choice(np.flatnonzero(source.labels[left] == k), n, replace=False)
            for k, n in zip(present, counts, strict=True)
        ]
        rows = np.sort(left[np.concatenate(chosen)])
        if len(rows):
            further[name] = Split(
                encoded.tensor(rows), torch.from_numpy(encoded.y[rows])
            )
    return further
