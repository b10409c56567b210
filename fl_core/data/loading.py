"""Loading of a federation: a dataset by its name, path or code, or data from Python, and their partition."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)

from fl_core import seeds
from fl_core.data import arrays, files
from fl_core.data.faults import located
from fl_core.data.federated import FederatedData, gather
from fl_core.data.names import Names, first_duplicate
from fl_core.data.partitions import PARTITIONS, Partition, make
from fl_core.data.partitions.base import options_of
from fl_core.data.preprocessing import Preprocessing
from fl_core.data.reading import PLAIN, STANDARD, Reading
from fl_core.data.registry import DATASETS, Location, Recipe, general, path_of
from fl_core.data.sources import OWN_NAME, Source, check_lengths, source_of_parts
from fl_core.data.table.prepare import read_table
from fl_core.data.table.read import files_of
from fl_core.errors import UsageError, about, as_list, check_known, listing, warn
from fl_core.models.adapter import (
    ARRAYS,
    IGNORED,
    LABELS,
    as_array,
    is_batch,
    split_labels,
)
from fl_core.models.tokens import FILE
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
    split_seed: int | None = None,
    splits: Sequence[float] | None = None,
    indices: Partition | None = None,
    preprocessing: Preprocessing | None = None,
    **reading: Any,
) -> FederatedData:
    """Load a dataset partitioned over clients, each with train, validation and test samples.

    Options that are None use the values of the recipe, or of the partition if the
    recipe has none. All samples are read and checked before they are partitioned.

    >>> from fl_core.data import load
    >>> heart = load("heart")
    >>> [(client.name, len(client.train)) for client in heart.clients]
    [('cleveland', 193), ('hungarian', 166), ('switzerland', 28), ('va', 83)]
    >>> digits = load("digits", partition="pathological", classes_per_client=3, clients=4)
    >>> (digits.class_counts() > 0).sum(axis=1).tolist()
    [3, 3, 3, 3]

    Args:
        dataset: a name (see :func:`datasets`); your own function as ``package.module:function`` (see :func:`dataset`),
            which is imported and called; or the path of an .npz, .csv, .tsv, .parquet
            or .jsonl file or of a folder of images or tables (see
            :func:`fl_core.data.files.read`); or a :class:`Source` of samples that are
            read already.
        data_root: folder of the named datasets' files. None means the environment's ``FEDLAYERS_DATA_ROOT``.
        download: let torchvision fetch missing files of the datasets that it knows.
            Your own function gets it, too, if it has such a parameter.
        clients: number of clients. Natural clients all take part, so partition
            ``natural`` needs no number.
        partition: one of :data:`PARTITIONS`, such as ``iid``, ``dirichlet`` and ``natural``, or your own as
            ``package.module:Class``.
        alpha, classes_per_client, samples_per_client, dominance: options of some partitions.
        max_samples: size of the pool that is partitioned, the first in file order (see
            :meth:`Source.first`). Without a value in the recipe, None means all
            samples.
        seed: seed of the partition.
        split_seed: seed of the partition over clients and of the test samples, if ``seed`` shall draw only training and
            validation samples.
        splits: shares of train, validation and test. None means the partition's, usually 0.64, 0.16, 0.20.
        indices: a stored partition to use again, in place of its arguments and the seed.
        preprocessing: stored fitted numbers to use again with ``indices``. None means
            that they are fitted.
        reading: fields of :class:`fl_core.data.reading.Reading`, such as ``client_column``, ``exclude_columns`` and
            ``scale``.

    Raises:
        UsageError: an unknown dataset, missing or bad files, a partition that does not
            fit, one of its arguments together with ``indices``, or ``preprocessing``
            without them.
        RunError: a download failed.
    """
    source, defaults = opened(dataset, data_root, download, max_samples, **reading)
    options: dict[str, Any] = {
        "alpha": alpha,
        "classes_per_client": classes_per_client,
        "samples_per_client": samples_per_client,
        "dominance": dominance,
    }
    if indices is not None:
        draw_options = options | {
            "partition": partition,
            "clients": clients,
            "splits": splits,
        }
        draw_options["split_seed"] = split_seed
        for name, value in draw_options.items():
            if value is not None:
                raise UsageError(
                    f"{name} must be left out with a stored partition; got {value}."
                )
        return gather(source, indices, preprocessing)
    if preprocessing is not None:
        raise UsageError(
            "preprocessing must be given with the stored partition of its samples; got none. "
            "Pass indices=, or leave both out."
        )
    partition_name = partition or defaults.partition
    partitioning = PARTITIONS[partition_name]
    if alpha is None and "alpha" in options_of(partitioning):
        options["alpha"] = defaults.alpha
    if clients is None and not partitioning.natural:
        clients = defaults.clients or len(source.owner_names)
    options |= {"clients": clients, "split_seed": split_seed, "splits": splits}
    return gather(source, make(source, partition_name, seed=seed, **options))


def opened(
    dataset: Location | Source,
    data_root: Location | None = None,
    download: bool = False,
    max_samples: int | None = None,
    **reading: Any,
) -> tuple[Source, Recipe]:
    """Return a dataset's samples before their partition, and its default settings.

    The arguments are those of :func:`load`. The methods for scaling and filling are set,
    and nothing is fitted yet.

    Raises:
        UsageError: an unknown dataset, missing or bad files, a setting that is unknown
            or does not fit, or more ``max_samples`` than there are.
        RunError: a download failed.
    """
    settings = Reading.with_keys(reading)
    if isinstance(dataset, Source):
        source, defaults = dataset, recipe(dataset)
    elif _is_named(dataset):
        settings.check_plain(str(dataset))
        source, defaults = _open(str(dataset), data_root, download, settings.task)
    else:
        source, notes = _read(dataset, settings)
        defaults = recipe(source)
        for note in notes:
            warn(note)
    source = source.with_methods(settings.scale or defaults.scale, settings.impute)
    source = replace(source, clip=settings.clip)
    if max_samples is None:  # a file may hold fewer samples than the published pool
        max_samples = min(defaults.max_samples or len(source), len(source))
    return source.first(max_samples), defaults


def recipe(
    dataset: Location | Source,
    *,
    data_root: Location | None = None,
    download: bool = False,
    **reading: Any,
) -> Recipe:
    """Return a dataset's default settings. For a path they depend on the form of its samples.

    Args:
        dataset: as for :func:`load`. A path is read. For a Source the settings follow
            from its samples. Your own function is called only if it is not registered
            by :func:`fl_core.data.dataset`, which gives it a recipe.
        data_root: the folder that your own function gets, if it has this parameter.
        download: whether your own function may fetch files, likewise.
        reading: fields of :class:`fl_core.data.reading.Reading`, which count where
            samples are read.

    Raises:
        UsageError: the dataset is no known name, function or existing path of a known
            kind, its samples do not fit, or a setting is unknown or invalid.
    """
    settings = Reading.with_keys(reading)
    if isinstance(dataset, Source):
        is_raw = dataset.columns and dataset.preprocessing is None
        scale = "none"
        if is_raw:
            scale = STANDARD
        has_clients = dataset.owner is not None
        return general(dataset.shape, has_clients, dataset.task, scale=scale)
    if _is_named(dataset):
        own_recipe = DATASETS[str(dataset)].recipe
        return own_recipe or _open(str(dataset), data_root, download, settings.task)[1]
    return recipe(_read(dataset, settings)[0])


def _read(dataset: Location, reading: Reading) -> tuple[Source, list[str]]:
    """Return the samples of a path, and the warnings that reading them gave.

    The result for the last path stays in memory, since a study has many runs on one
    file. It is used again until the settings other than ``scale``, or the time or size
    of a file, change.

    Raises:
        UsageError: as for :func:`fl_core.data.files.read`, or the path does not exist.
    """
    path, reading = path_of(dataset), replace(reading, scale=None)
    candidates = sorted(path.rglob("*")) if path.is_dir() else files_of(path) or [path]
    key = repr(reading)
    for file in filter(
        Path.is_file, [*candidates, Path(reading.tokenizer or "", FILE)]
    ):
        file_state = file.stat()
        key += f"{file.absolute()}, {file_state.st_mtime_ns}, {file_state.st_size}"
    if key not in _READ:
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            source = files.read(path, reading)
        _READ.clear()
        _READ[key] = source, list(dict.fromkeys(str(note.message) for note in notes))
    source, messages = _READ[key]
    return replace(source, name=str(path)), messages


_READ: dict[str, tuple[Source, list[str]]] = {}


def _open(
    name: str, data_root: Location | None, download: bool, task: str = CLASSIFICATION
) -> tuple[Source, Recipe]:
    """Return a named dataset's samples, with its own or the general default settings.

    Raises:
        UsageError: its function has a required parameter other than ``data_root`` and
            ``download``, returns a federation or invalid samples, or has no targets for
            the task.
    """
    member = DATASETS[name]
    known_arguments = {"data_root": data_root, "download": download}
    parameters, _ = parameters_of(member.open)
    for parameter, required in parameters.items():
        if required and parameter not in known_arguments:
            raise UsageError(
                f"dataset {name!r} must be a function without required parameters; got {parameter!r}."
            )
    own_data = member.open(
        **{key: known_arguments[key] for key in known_arguments if key in parameters}
    )
    with about(f"dataset {name!r}"):
        data = as_data(own_data, Reading(task=task))
        if isinstance(data, FederatedData):
            raise UsageError("a function must return data without a partition.")
    source = replace(data, name=name)
    if task != CLASSIFICATION and source.task != task:
        content = (
            f"classes {listing(source.classes, 4)}" if source.classes else source.task
        )
        raise UsageError(
            f"dataset {name!r} must have targets for task {task}; got {content}."
        )
    has_clients = source.owner is not None
    recipe = member.recipe or general(source.shape, has_clients, source.task)
    mean, std = recipe.mean or source.mean, recipe.std or source.std
    return replace(source, mean=mean, std=std), recipe


def _is_named(dataset: Location) -> bool:
    return str(dataset) in DATASETS or is_outside(str(dataset))


# --- data from Python --------------------------------------------------------------------------------------------

OwnData = FederatedData | Source


def as_data(data: Any, reading: Reading = PLAIN) -> OwnData:
    """Return data from Python as a source. A federation or a source stays as it is.

    For these two ``reading`` is ignored. Each run partitions a source with its own seed.

    >>> import numpy as np
    >>> source = as_data({"north": (np.zeros((4, 2)), [0, 1, 0, 1]), "south": (np.ones((2, 2)), [0, 1])})
    >>> source.owner_names, len(source)
    (('north', 'south'), 6)
    >>> frame = pd.DataFrame({"client": ["a", "a", "b", "b"], "age": [50, 61, 47, 70], "label": [0, 1, 1, 0]})
    >>> as_data(frame).columns
    ('age',)

    Args:
        data: {client: samples}, or samples alone, which a partition assigns to clients. Samples are a pair (x, y) of
            tensors or arrays, a Dataset, a DataLoader, or a dict of inputs with an
            array ``labels``. x may be a tuple or dict of several inputs. Or a pandas
            DataFrame, read like a table in a file.
        reading: the task, whether numbers may be missing, and for a frame also the
            names of its columns. For other samples only ``scale``, ``impute``, ``clip``
            and ``task`` may differ from their defaults.

    Raises:
        UsageError: it is none of these, its samples are invalid, or a setting has no
            meaning for them.
    """
    if isinstance(data, (FederatedData, Source)):
        return data
    if isinstance(data, pd.DataFrame):
        reading.check_unasked("a DataFrame is no text file", "csv")
        return read_table(data, reading, OWN_NAME)
    by_client = isinstance(data, Mapping) and not is_batch(data)
    is_sequence = isinstance(data, list | tuple)
    client_samples: tuple[Any, ...] = ()
    if by_client:
        client_samples = tuple(data.values())
    elif is_sequence:
        client_samples = tuple(data)
    sample_types = (tuple, Dataset, DataLoader)
    if client_samples and all(
        isinstance(samples, pd.DataFrame) for samples in client_samples
    ):
        raise UsageError(
            f"data must be one DataFrame with a column of clients; got {len(client_samples)} DataFrames. Join them: "
            "pd.concat({client: frame, ...}, names=['client'])."
        )
    if is_sequence and (
        len(client_samples) != 2
        or all(isinstance(samples, sample_types) for samples in client_samples)
    ):
        raise UsageError(
            f"data must be one pair (x, y), or {{client: (x, y)}}; got {len(client_samples)} parts without names. "
            "Name the clients: {'client_0': (x, y), ...}."
        )
    has_rows = hasattr(data, "__getitem__") and hasattr(data, "column_names")
    if not has_rows and not isinstance(
        data, (Mapping, tuple, list, Dataset, DataLoader)
    ):
        data_type = type(data).__name__
        raise UsageError(
            f"data must be {{client: (x, y)}}, a DataFrame, or a federation of fl.from_clients; got "
            f"{data_type}. Give one of these. Name a file or a dataset with dataset=."
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
    split_seed: int | None = None,
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
        name: the data's name in records.
        seed, split_seed, splits: how each client's samples are split, see :func:`fl_core.data.partitions.make`.
        scale, impute: how a table's columns are scaled and their missing numbers (NaN) filled. They are fitted on the
            training samples of all clients, see :data:`fl_core.data.reading.SCALES` and
            :data:`fl_core.data.reading.IMPUTES`.
        task: one of :data:`fl_core.rows.TASKS`, such as ``regression`` if y are numbers to predict, without classes.
        groups: {client: group of each sample}, such as patients with several samples. No group is in two splits.

    Raises:
        UsageError: a row is invalid, clients differ in form, a client has too few
            samples or is missing from ``groups``, or scaling does not fit the data. The
            message names the client, and the row where there is one.
    """
    reading = Reading(scale=scale, impute=impute, task=task)
    if classes is not None:
        classes = as_list("classes", classes)
    source = source_from_clients(
        silos, classes=classes, name=name, missing=reading.may_be_missing, task=task
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
    partition = make(source, "natural", seed=seed, split_seed=split_seed, splits=splits)
    return gather(source, partition)


def source_from_clients(silos: Mapping[str, tuple[Any, Any]], **keys: Any) -> Source:
    """Join the samples of all clients, each as a natural client (see :func:`from_clients`).

    >>> source_from_clients({"train": ([[0.0], [1.0]], [0, 1]), "test": ([[2.0]], [0])})
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: clients must be no splits of one dataset; got train, test. Join their samples.
    >>> source_from_clients({})
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: clients must be a dictionary {client: (x, y)} of at least one client; got none.
    >>> source_from_clients({"north": {"train": [], "test": []}})
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: client 'north' must have a pair (x, y), a Dataset or a DataLoader; got dict...

    Args:
        silos: {client: (x, y)}, where a Dataset or DataLoader can stand for (x, y).
        keys: arguments of :func:`fl_core.data.sources.source_of_parts`.

    Raises:
        UsageError: ``silos`` is no such dictionary, or a name or the samples of a client are invalid.
    """
    if not isinstance(silos, Mapping) or not silos:
        got_text = "none" if isinstance(silos, Mapping) else type(silos).__name__
        raise UsageError(
            f"clients must be a dictionary {{client: (x, y)}} of at least one client; got "
            f"{got_text}."
        )
    if "train" in silos and set(silos) <= {*files.SPLIT_FOLDERS}:
        raise UsageError(
            f"clients must be no splits of one dataset; got {listing(silos)}. Join their samples."
        )
    names = client_names(silos)
    pairs = {
        f"client {silo!r}": pair_of(samples, f"client {silo!r}")
        for silo, samples in silos.items()
    }
    source, sizes = source_of_parts(pairs, **keys)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return replace(source, owner=owner, owner_names=names)


def client_names(silos: Iterable[Any]) -> Names:
    """Return clients' names as text.

    Raises:
        UsageError: two names are equal as text, or one is empty or blank.
    """
    names = tuple(map(str, silos))
    if duplicate := first_duplicate(names):
        raise UsageError(
            f"clients' names must be distinct as text; got {duplicate!r} twice."
        )
    if not all(map(str.strip, names)):
        raise UsageError(
            "clients' names must not be empty; got an empty one. Rows use it for all clients together."
        )
    return names


def check_finite(samples: Any, where: str) -> None:
    """Refuse an IterableDataset without a length, or a loader of one: it may be endless.

    Args:
        samples: the dataset or the loader. Other data pass.
        where: the data's name, for the message.

    Raises:
        UsageError: there is no length.
    """
    samples = getattr(samples, "dataset", samples)
    if isinstance(samples, IterableDataset) and not hasattr(samples, "__len__"):
        samples_type = type(samples).__name__
        raise UsageError(
            f"{where} must have a length; got {samples_type} without one. "
            "Give list(itertools.islice(dataset, N))."
        )


def pair_of(samples: Any, where: str) -> tuple[Any, Any]:
    """Return x and y of a pair (x, y), a dict with the key ``labels``, a Dataset, or a DataLoader.

    The parts of a pair or a dict are returned as they are. Samples of a dataset are
    stacked to arrays. A loader's dataset is read in its own order, so that shuffling
    changes nothing. Its own ``collate_fn`` gets all samples at once.

    >>> pair_of([{"x": 1}, {"x": 2}, {"x": 3}], "client 'a'")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: client 'a': a dict of inputs must have the key 'labels'; got x.

    Args:
        samples: the samples in one of these forms.
        where: the data's name, for messages.

    Raises:
        UsageError: it is none of these, an IterableDataset without a length, or holds
            no pairs or pairs of different form. Or its ``collate_fn`` or sampler does
            not fit.
    """
    is_pair = isinstance(samples, tuple | list) and len(samples) == 2
    if is_pair or is_batch(samples):
        return split_labels(samples)
    check_finite(samples, where)
    collate = getattr(samples, "collate_fn", default_collate)
    if isinstance(samples, DataLoader):
        samples = _dataset_of(samples, where)
    no_rows = isinstance(samples, (*ARRAYS, str, Mapping))
    if no_rows or not hasattr(samples, "__getitem__"):
        samples_type = type(samples).__name__
        advice = "Join its parts" if isinstance(samples, Mapping) else "Give a pair"
        raise UsageError(
            f"{where} must have a pair (x, y), a Dataset or a DataLoader; got {samples_type}. "
            f"{advice}."
        )
    has_length = hasattr(samples, "__len__")
    listed_samples = [*islice(samples, len(samples) if has_length else None)]
    if collate not in (default_collate, default_convert):
        return _collated(collate, listed_samples, where)
    if not listed_samples or not isinstance(listed_samples[0], Mapping | tuple | list):
        raise UsageError(
            f"{where}: a Dataset must hold pairs (x, y), at least one. Give x and y of each sample."
        )
    return _stacked(listed_samples, where)


def note_parts(batch: Any, where: str) -> None:
    """Warn which part of a batch is the label if it is a tuple of three or more parts.

    Args:
        batch: a sample, or a batch of samples.
        where: the data's name, for the message.
    """
    if isinstance(batch, tuple | list) and len(batch) > 2:
        warn(
            f"{where}: the last of {len(batch)} parts of a sample is the label, and the {len(batch) - 1} before it are "
            "inputs. If another is the label, give pairs (x, y)."
        )


def _stacked(rows: Sequence[Any], where: str) -> tuple[Any, Any]:
    """Return the inputs and the labels of samples, each stacked to arrays [n, ...].

    Several inputs are a dict or a tuple of arrays, as in the samples. If samples have
    an ``attention_mask``, their sequences may differ in length. They are padded at the
    end: inputs with 0, and labels with :data:`fl_core.models.adapter.IGNORED`.

    Args:
        rows: the samples, each a pair, a tuple that ends with the label, or a dict with
            the key ``labels`` or ``label``.
        where: the data's name, for messages.

    Raises:
        UsageError: samples differ in their keys or shapes, or inputs are no numbers.
    """
    samples: list[dict[Any, Any]] = []
    note_parts(rows[0], where)
    for row in rows:
        if isinstance(row, Mapping) and LABELS not in row and "label" in row:
            row = {LABELS if key == "label" else key: row[key] for key in row}
        with about(where):
            x, y = split_labels(row)
        inputs = x if isinstance(x, Mapping | tuple) else (x,)
        named_inputs = (
            inputs if isinstance(inputs, Mapping) else dict(enumerate(inputs))
        )
        samples.append({**named_inputs, LABELS: y})
        if samples[-1].keys() != samples[0].keys():
            first_keys = listing(map(str, samples[0]))
            last_keys = listing(map(str, samples[-1]))
            raise UsageError(
                f"{where}: all samples must have the keys {first_keys}; got "
                f"{last_keys}."
            )
    arrays_of = {}
    for key in samples[0]:
        arrays = [as_array(sample[key]) for sample in samples]
        if key != LABELS and arrays[0].dtype.kind not in "biuf":
            raise UsageError(
                f"{where}: samples must be numbers; got words or objects for {key}. Tokenise "
                "texts, and remove columns that the model does not take."
            )
        if len({array.shape for array in arrays}) > 1:
            if arrays[0].ndim != 1 or "attention_mask" not in samples[0]:
                raise UsageError(
                    f"{where}: all samples must have one shape; got several for {key}. Resize or pad them, or "
                    "add an attention_mask."
                )
            fill_value = IGNORED if key == LABELS else 0
            length = max(map(len, arrays))
            arrays = [
                np.pad(array, (0, length - len(array)), constant_values=fill_value)
                for array in arrays
            ]
        arrays_of[key] = np.stack(arrays)
    y = arrays_of.pop(LABELS)
    if isinstance(x, Mapping):
        return arrays_of, y
    return tuple(arrays_of.values()) if isinstance(x, tuple) else arrays_of[0], y


def _collated(collate: Any, samples: Any, where: str) -> tuple[Any, Any]:
    """Return inputs and labels of all samples as one batch of a ``collate_fn``.

    What the function draws by torch comes from a fixed seed.

    Raises:
        UsageError: the function fails, or gives another number of labels than samples.
    """
    requirement = (
        f"{where}: collate_fn must make one batch of all {len(samples)} samples"
    )
    with (
        about(requirement, Exception, way="Stack them, or give a Dataset."),
        seeds.torch_seeded(0),
    ):
        batch = collate(samples)
        note_parts(batch, where)
        x, y = split_labels(batch)
        if len(y) != len(samples):
            raise ValueError(f"{len(y)} labels")
    return x, y


def _dataset_of(loader: DataLoader[Any], where: str) -> Dataset[Any]:
    """Return the samples of a loader as a dataset, in an order without chance.

    Raises:
        UsageError: the loader's sampler does not show which samples it takes.
    """
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", batches or loader.sampler)
    if (
        type(sampler) in (SequentialSampler, RandomSampler)
        and not getattr(sampler, "replacement", False)
        and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    ):
        return loader.dataset
    indices = getattr(sampler, "indices", None)
    if indices is None:
        sampler_type = type(sampler).__name__
        raise UsageError(
            f"{where}: a DataLoader must have a sampler with known samples; got {sampler_type}. "
            "Give a Dataset, such as a torch.utils.data.Subset."
        )
    return Subset(loader.dataset, list(indices))
