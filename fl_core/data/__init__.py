"""Datasets by name or path, dealt to clients by a seeded partition.

>>> data = load("heart")
>>> [(client.name, len(client.train)) for client in data.clients]
[('cleveland', 193), ('hungarian', 166), ('switzerland', 28), ('va', 83)]
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_core.data import files, named, partitions, tables
from fl_core.data.federated import ClientData, FederatedData, Split, gather
from fl_core.data.named import at_hand, register
from fl_core.data.partitions import Partition
from fl_core.data.recipes import Recipe, general
from fl_core.data.silos import of_silos
from fl_core.data.sources import Source
from fl_core.data.tables import CLIENT_COLUMN, LABEL_COLUMN, TEXT_COLUMN
from fl_core.errors import UsageError, check_known, listing

__all__ = [
    "ClientData",
    "FederatedData",
    "Partition",
    "Recipe",
    "Source",
    "Split",
    "at_hand",
    "datasets",
    "general",
    "load",
    "of_silos",
    "recipe",
    "register",
]

Location = str | os.PathLike[str]


def datasets() -> dict[str, Recipe]:
    """The registered datasets by name, in sorted order."""
    return {name: named.REGISTRY[name][0] for name in sorted(named.REGISTRY)}


def recipe(dataset: Location, *, client_column: str = CLIENT_COLUMN, text_column: str = TEXT_COLUMN) -> Recipe:
    """A dataset's defaults; for a path a general recipe, which reads names and headers only.

    Raises:
        UsageError: neither a registered name nor an existing path of a known kind.
    """
    if str(dataset) in named.REGISTRY:
        return named.REGISTRY[str(dataset)][0]
    return general(*files.glance(_path(dataset), client_column=client_column, text_column=text_column))


def load(
    dataset: Location,
    *,
    data_root: Location | None = None,
    download: bool = False,
    clients: int | None = None,
    partition: str | None = None,
    alpha: float | None = None,
    classes_per_client: int | None = None,
    samples_per_client: int | None = None,
    dominance: float | None = None,
    samples: int | None = None,
    seed: int = 0,
    splits: Sequence[float] | None = None,
    client_column: str = CLIENT_COLUMN,
    label_column: str = LABEL_COLUMN,
    text_column: str = TEXT_COLUMN,
    indices: Partition | None = None,
) -> FederatedData:
    """A dataset dealt to clients, each with train, validation and test samples.

    What is None is the recipe's. Everything is checked before anything is dealt.

    Args:
        dataset: a registered name (see :func:`datasets`), or the path of an .npz, .csv or .jsonl file or a folder of
            images (see :func:`fl_core.data.files.read`).
        data_root: folder of the named datasets' files; None = the environment's ``FEDLAYERS_DATA_ROOT``.
        download: let torchvision fetch missing files of the datasets that it knows.
        clients: number of clients; natural clients all take part.
        partition: ``natural``, ``natural_dirichlet``, ``iid``, ``dirichlet``, ``capped_dirichlet``,
            ``pathological``, ``non_iid_1``, ``non_iid_2``, ``fedpft_dirichlet`` or ``fedpft_pathological``.
        alpha, classes_per_client, samples_per_client, dominance: of the partitions that have them (see
            :func:`fl_core.data.partitions.make`).
        samples: size of the pool that is dealt, the first in file order (see :meth:`Source.first`).
        seed: of the partition.
        splits: shares of train, validation and test; None = the partition's, usually 0.64, 0.16, 0.20.
        client_column, label_column, text_column: columns of a .csv or .jsonl file.
        indices: a stored partition to use again; arguments given beside it must agree with it, its seed holds.

    Raises:
        UsageError: an unknown dataset, missing or bad files, or a partition that does not fit.
        RunError: a download failed.
    """
    if str(dataset) in named.REGISTRY:
        tables.check_columns(str(dataset), client_column, label_column, text_column)
        defaults = recipe(dataset)
        source = named.open_named(str(dataset), data_root=data_root, download=download)
    else:
        source = files.read(
            _path(dataset), client_column=client_column, label_column=label_column, text_column=text_column
        )
        defaults = general(source.shape, source.owner is not None)
    if samples is None:  # a file may hold fewer samples than the published pool
        samples = min(defaults.samples or len(source), len(source))
    source = source.first(samples)
    if indices is not None:
        _check_agrees(
            indices,
            partition=partition,
            clients=clients,
            alpha=alpha,
            classes_per_client=classes_per_client,
            samples_per_client=samples_per_client,
            dominance=dominance,
            splits=None if splits is None else list(splits),
        )
        return gather(source, indices)
    kind = check_known("partition", partition or defaults.partition, partitions.KINDS)
    for name, value, owners in (
        ("alpha", alpha, ("dirichlet", "capped_dirichlet", "natural_dirichlet", "fedpft_dirichlet")),
        ("classes_per_client", classes_per_client, ("pathological", *partitions.PFEDLA, "fedpft_pathological")),
        ("samples_per_client", samples_per_client, (*partitions.PFEDLA, *partitions.FEDPFT)),
        ("dominance", dominance, ("non_iid_2",)),
    ):
        if value is not None and kind not in owners:
            raise UsageError(f"{name}={value} has no meaning for partition {kind!r}; it belongs to {listing(owners)}")
    if clients is None and kind not in partitions.NATURAL:
        clients = defaults.clients or len(source.owner_names)
    made = partitions.make(
        source,
        kind,
        clients=clients,
        alpha=defaults.alpha if alpha is None else alpha,
        classes_per_client=classes_per_client,
        samples_per_client=samples_per_client,
        dominance=0.5 if dominance is None else dominance,
        seed=seed,
        splits=splits,
    )
    return gather(source, made)


def _path(dataset: Location) -> Path:
    path = Path(dataset)
    if path.exists():
        return path
    if len(path.parts) > 1 or path.suffix:
        raise UsageError(f"there is no dataset file or folder at {path}")
    check_known("dataset (and no such path)", str(dataset), sorted(named.REGISTRY))
    raise AssertionError(dataset)


def _check_agrees(stored: Partition, **asked: Any) -> None:
    has = {**stored.params, "partition": stored.kind}
    for name, value in asked.items():
        kept = has.get(name)
        if value is not None and value != kept:
            raise UsageError(f"{name}={value} disagrees with the stored partition, which has {kept}")
