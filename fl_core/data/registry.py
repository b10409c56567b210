"""The registry of datasets, their default settings, and the places of their files."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fl_core.data.reading import BETWEEN, TABLES
from fl_core.errors import UsageError, check_known, listing, spelled
from fl_core.kinds import near_path
from fl_core.models.tokens import TokenShape
from fl_core.registry import Registry, is_outside
from fl_core.rows import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL

ROOT_VARIABLE = "FEDLAYERS_DATA_ROOT"
"""The environment variable for the folder of the named datasets' files."""

Location = str | os.PathLike[str]
Opener = Callable[..., Any]
Function = TypeVar("Function", bound=Opener)


SHARES = (0.64, 0.16, 0.20)
"""Default shares of each client's samples for training, validation and test."""


@dataclass(frozen=True)
class Recipe:
    """Default settings of a dataset: its partition over clients, the model, and its training.

    >>> from fl_core.data import datasets
    >>> recipe = datasets()["fashion_mnist"]
    >>> recipe.model, recipe.partition, recipe.alpha, recipe.max_samples
    ('fmnist_cnn', 'dirichlet', 0.5, 10000)

    Attributes:
        clients: number of clients. None means as many as natural clients.
        partition: one of :data:`fl_core.data.PARTITIONS`.
        alpha: concentration of the Dirichlet partition. With a smaller one clients differ more.
        max_samples: size of the pool that is partitioned. None means all samples.
        model: name of the model.
        model_options: the model's options.
        batch_size: samples per batch.
        epochs: local epochs per round.
        rounds: rounds of a run, at most.
        patience: evaluations without a better score after which a run stops. 0 means
            never.
        lr, optimizer, optimizer_options: the optimiser of local training.
        keep_optimizer: whether a client's optimiser has its state of the round before.
        loss, loss_options: the loss of local training.
        scale: scaling of features, of :data:`fl_core.data.reading.SCALES`.
        mean, std: normalisation of images by channel after scaling to 0..1. Empty means
            that of the :class:`fl_core.data.Source`, which is usually none.
        note: source of the values.
    """

    clients: int | None = 5
    partition: str = "dirichlet"
    alpha: float = 0.5
    max_samples: int | None = None
    model: str = "cifar_cnn"
    model_options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 128
    epochs: int = 1
    rounds: int = 100
    patience: int = 0
    lr: float = 1e-3
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] = field(
        default_factory=lambda: {"amsgrad": True, "weight_decay": 1e-4}
    )
    keep_optimizer: bool = False
    loss: str = "cross_entropy"
    loss_options: dict[str, Any] = field(default_factory=dict)
    scale: str = "none"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    note: str = ""


TEXT: dict[str, Any] = {
    "model": "text_transformer",
    "model_options": {"width": 128},
    "batch_size": 64,
    "lr": 1e-3,
}
"""PLayer-FL's model, batch size and FedAvg rate for Sent-140, at a sixth of its width.

The paper starts from a language model's table of 768 columns. A fresh table learns as well with fewer."""


PATIENCE = 10
"""Evaluations without a better validation score after which a run on your own data
stops.

See the figure ``decision.tuned``."""


LOSS_OF = {REGRESSION: "mse", SURVIVAL: "cox", MULTILABEL: "multilabel_bce"}
"""The default loss of each task other than classification."""


def general(
    shape: tuple[int, ...],
    has_clients: bool,
    task: str = CLASSIFICATION,
    stops: bool = True,
    scale: str = "none",
) -> Recipe:
    """Return the default settings for data that bring none.

    Data with natural clients use them. Others are partitioned by Dirichlet(0.5) over 5
    clients. Images get a convolutional network, texts a small transformer, and
    everything else a multilayer perceptron. Other tasks than classification have the
    losses of :data:`LOSS_OF`, or cross entropy if they are not in it. Their partition
    without natural clients is ``iid``.

    Args:
        shape: shape of one sample.
        has_clients: whether the data name natural clients.
        task: one of :data:`fl_core.rows.TASKS`.
        stops: whether a run stops when validation no longer improves (:class:`fl_core.records.stopping.StoppingRule`).
            Otherwise it has 50 rounds.
        scale: scaling of the features.
    """
    settings: dict[str, Any] = {"patience": PATIENCE} if stops else {"rounds": 50}
    settings["scale"] = scale
    if task != CLASSIFICATION:
        settings |= {"loss": LOSS_OF.get(task, "cross_entropy"), "partition": "iid"}
    if has_clients:
        settings |= {"clients": None, "partition": "natural"}
    if isinstance(shape, TokenShape):
        return Recipe(
            **settings, **TEXT, note="general values for texts without a recipe"
        )
    model = "mlp"
    if len(shape) == 3:
        model = "cifar_cnn"
        if shape[0] == 1:
            model = "fmnist_cnn"
    return Recipe(
        **settings,
        model=model,
        batch_size=32,
        note="general values for data without a recipe",
    )


@dataclass(frozen=True)
class Dataset:
    """A dataset registered by name, or found by the path of its function.

    Attributes:
        name: the dataset's name, or ``package.module:function``.
        open: the function that reads the dataset.
        recipe: its default settings. None means the general recipe for its samples.
    """

    name: str
    open: Opener
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.open.__doc__)  # its line in lists


def _adopt(function: Any, name: str) -> Dataset:
    if not callable(function):
        function_type = type(function).__name__
        raise UsageError(
            f"dataset {name!r} must be a function that returns the data; got a {function_type}."
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
    The recipe's ``mean`` and ``std`` normalise its images.

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
        name: the dataset's name.
        recipe: values to start from. None means those of :class:`Recipe`.
        defaults: fields of :class:`Recipe`.

    Raises:
        UsageError: another dataset has that name, or a recipe has no such field.
    """
    for key in defaults:
        check_known(
            f"field of the recipe of dataset {name!r}",
            key,
            [field.name for field in fields(Recipe)],
        )
    full_recipe = replace(recipe or Recipe(), **defaults)

    def add(function: Function) -> Function:
        DATASETS.add(name, Dataset(name, function, full_recipe), function)
        return function

    return add


def is_code(name: str) -> bool:
    """Return whether loading a dataset by this name would import and call the user's own code."""
    return name not in DATASETS and is_outside(name)


def datasets() -> dict[str, Recipe]:
    """Return the default settings of all datasets that have them, by name, in sorted order."""
    members = (DATASETS[name] for name in sorted(DATASETS))
    return {
        member.name: member.recipe for member in members if member.recipe is not None
    }


def path_of(dataset: Location) -> Path:
    """Return the path of a dataset that is no registered name: a file, a folder, or several tables.

    Several tables are one path with commas between their names. Tables that come with
    the package are found without a checkout, too.

    Raises:
        UsageError: the path does not exist or is an address. Or it names several of
            which one is no existing table.
    """
    path, name = Path(dataset), str(dataset)
    # os.path.exists is False for a name that is too long, where Path.exists raises
    package_folder = Path(__file__).with_name("named")
    if not os.path.exists(path) and path.parts[-4:-1] == package_folder.parts[-3:]:
        path = package_folder / path.name
    if os.path.exists(path):
        return path
    if "://" in name:
        raise UsageError(
            f"data must be a file or a folder; got the address {name}. Download it first."
        )
    if BETWEEN in name:
        for path_text in name.split(BETWEEN):
            if path_text in DATASETS:
                raise UsageError(
                    f"data must be one dataset, or tables; got {path_text!r} and more. Name {path_text!r} alone."
                )
            if os.path.isdir(path_text):
                raise UsageError(
                    f"several paths must be tables, one for each client; got the folder {path_text!r}. Name the folder "
                    "alone, or the tables in it."
                )
            if Path(path_text).suffix.lower() not in TABLES or not os.path.isfile(
                path_text
            ):
                hint = near_path(path_text)
                raise UsageError(
                    f"each file must be a table that is there ({listing(TABLES)}); got {path_text!r}. {hint}"
                )
        return path
    if len(path.parts) == 1 and not path.suffix:
        folders = sorted(
            folder.name for folder in Path().glob("[!.]*") if folder.is_dir()
        )
        check_known("dataset or path", name, [*sorted(DATASETS), *folders])
    hint = near_path(path)
    raise UsageError(
        f"data must be a file or a folder; got {path}, which does not exist. {hint}"
    )


# --- the folder of the named datasets' files --------------------------------------------------------------------


def find_root(name: str, data_root: Location | None, files: str) -> Path:
    """Return the data root. It must be an existing folder.

    Args:
        name: name of the dataset, for messages.
        data_root: the folder, or None for that of the environment (:data:`ROOT_VARIABLE`).
        files: the dataset's files below the data root, for messages.

    Raises:
        UsageError: no data root is given, or it does not exist.
    """
    root = data_root or os.environ.get(ROOT_VARIABLE)
    if not root or not Path(root).is_dir():
        root_text = root or "none"
        raise UsageError(
            f"{name} must have a data root, a folder with {files}; got {root_text}. "
            f"Set {ROOT_VARIABLE}, or name it: {spelled(data_root='FOLDER')}."
        )
    return Path(root)


def find_file(
    name: str,
    data_root: Location | None,
    file: str,
    files: str = "",
    way: str = "It cannot be downloaded automatically.",
) -> Path:
    """Return the file of a dataset below the data root.

    Args:
        name: name of the dataset, for messages.
        data_root: the folder, or None for that of the environment.
        file: name of the file below the data root.
        files: all files that can be used, for messages.
        way: how to get them, for messages.

    Raises:
        UsageError: the file does not exist, or there is no data root.
    """
    root = find_root(name, data_root, files or file)
    if not (root / file).is_file():
        file_names = sorted(entry.name for entry in root.iterdir())
        files_text = files or file
        got_text = listing(file_names) or "no files"
        raise UsageError(
            f"{name} must have {files_text} below {root}; got {got_text}. {way}"
        )
    return root / file
