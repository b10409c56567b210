"""The registry of datasets, each with its default settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fl_core.data.columns import BETWEEN, TABLES
from fl_core.data.recipes import Recipe
from fl_core.errors import UsageError, check_known, listing
from fl_core.registry import Registry, is_outside

ROOT_VARIABLE = "FEDLAYERS_DATA_ROOT"
"""The environment variable for the folder of the named datasets' files."""

Location = str | os.PathLike[str]
Opener = Callable[..., Any]
Function = TypeVar("Function", bound=Opener)


@dataclass(frozen=True)
class Dataset:
    """A dataset registered by name, or found by the path of its function.

    Attributes:
        open: the function under :func:`dataset`.
        recipe: its default settings. None means the general recipe for its samples.
    """

    name: str
    open: Opener
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.open.__doc__)  # its line in lists


def _adopt(function: Any, name: str) -> Dataset:
    if not callable(function):
        raise UsageError(
            f"dataset {name!r} must be a function that returns the data; got a {type(function).__name__}."
        )
    return Dataset(name, function)


DATASETS: Registry[Dataset] = Registry("dataset", "fl_core.data.named", _adopt)


def dataset(
    name: str, recipe: Recipe | None = None, **defaults: Any
) -> Callable[[Function], Function]:
    """Register a function as a dataset, with its default settings, as a decorator.

    The function returns a :class:`~fl_core.data.Source` or a pair (x, y). For natural clients it returns {client: (x,
    y)}, as for :func:`~fl_core.data.from_clients`. Its arguments are ``data_root`` (a folder, or None) and ``download``
    (whether it may fetch files), if it has such parameters. The first line of its docstring describes it in lists.
    Normalisation belongs to the recipe.

    >>> import numpy as np
    >>> from fl_core.data import dataset, load
    >>> @dataset("coins_of_an_example", clients=2, partition="iid", model="mlp", batch_size=8, rounds=5)
    ... def coins():
    ...     '''Coins by their weight.'''
    ...     weight = np.repeat([[2.1], [4.0]], 20, axis=0)
    ...     return weight, (weight > 3).astype(int).ravel()
    >>> [len(client.train) for client in load("coins_of_an_example").clients]
    [12, 12]

    Args:
        recipe: values to start from. None means those of :class:`Recipe`.
        defaults: fields of :class:`Recipe`.

    Raises:
        UsageError: another dataset has that name, or a recipe has no such field.
    """
    for field in defaults:
        check_known(
            f"field of the recipe of dataset {name!r}",
            field,
            [known.name for known in fields(Recipe)],
        )
    filled = replace(recipe or Recipe(), **defaults)

    def add(function: Function) -> Function:
        DATASETS.add(name, Dataset(name, function, filled), function)
        return function

    return add


def is_code(name: str) -> bool:
    """Return whether loading a dataset by this name would import and call the user's own code."""
    return name not in DATASETS and is_outside(name)


def datasets() -> dict[str, Recipe]:
    """Return the default settings of all datasets by name, in sorted order.

    Datasets of installed packages are in :data:`DATASETS` alone, since their recipes are unknown before import.
    """
    known = (
        DATASETS[name] for name in sorted(DATASETS) if name not in DATASETS.entry_points
    )
    return {member.name: member.recipe for member in known if member.recipe is not None}


def path_of(dataset: Location) -> Path:
    """Return the path of a dataset that is no registered name: a file, a folder, or several tables.

    Raises:
        UsageError: it is not there.
    """
    path = Path(dataset)
    if os.path.exists(
        path
    ):  # False for a name that is too long, where Path.exists raises
        return path
    if BETWEEN in str(dataset):
        for part in str(dataset).split(BETWEEN):
            if Path(part).suffix.lower() not in TABLES or not os.path.isfile(part):
                raise UsageError(
                    f"each file must be a table that is there ({listing(TABLES)}); got {part!r}. Correct its path."
                )
        return path
    if len(path.parts) > 1 or path.suffix:
        raise UsageError(
            f"dataset must be a file or a folder; got {path}, which does not exist. Correct its path, "
            "or take a name of fedlayers list datasets."
        )
    check_known("dataset or path", str(dataset), sorted(DATASETS))
    raise AssertionError(dataset)
