"""The federations of the leaderboard: quick ones of many data families, natural clients first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from fl_core import data as datasets
from fl_core.config import RunConfig, with_own
from fl_core.data import FederatedData, Source, files
from fl_core.data.columns import LABEL_COLUMN, Reading
from fl_core.data.federated import ClientData, Split
from fl_core.data.loading import as_data
from fl_core.data.partitions import SPLITS
from fl_core.data.registry import Location, find_root
from fl_core.errors import UsageError, check_known
from fl_core.run import runner
from fl_core.run.task import Task

ROUNDS, EVERY, PATIENCE = 24, 2, 4
"""Rounds at most, rounds between evaluations, and evaluations without a better score after which a run stops."""
HELD_OUT = 300
"""Further samples of a client that score it next to its test samples, at most."""
READING: dict[str, Any] = {"scale": "standard", "impute": "mean"}
RECIPE = "python -m figures.decision.convert --only"
"""The command of the repository that writes a table into the data root."""


FILE, TABLE, NAMED = "file", "scikit-learn", "built in"


@dataclass(frozen=True)
class Federation:
    """A federation of the leaderboard.

    Attributes:
        title: as it is shown.
        family: the data family; intervals are over these.
        clients: what a client is, or how samples are assigned to clients.
        natural: whether the data name the clients.
        origin: :data:`FILE`: a table below the data root; :data:`TABLE`: one of scikit-learn; :data:`NAMED`: a dataset.
        dealing: keys of the configuration that assign samples to clients.
    """

    title: str
    family: str
    clients: str
    natural: bool = True
    origin: str = FILE
    dealing: tuple[tuple[str, Any], ...] = ()


def _dealt(
    title: str, family: str, clients: int, alpha: float, origin: str
) -> Federation:
    dealing = (("partition", "dirichlet"), ("clients", clients), ("alpha", alpha))
    return Federation(
        title,
        family,
        f"{clients} by Dirichlet({alpha:g}) of labels",
        False,
        origin,
        dealing,
    )


POOL, LARGER_POOL = (("max_samples", 1200),), (("max_samples", 2000),)
"""Samples that a federation has; the rest of its table gives held-out samples."""
FEDERATIONS: dict[str, Federation] = {
    "values": Federation("World Values Survey", "values", "countries", dealing=POOL),
    "stops": Federation(
        "police stops in Minneapolis", "stops", "precincts", dealing=POOL
    ),
    "smoking": Federation("smoking in the UK", "smoking", "regions", dealing=POOL),
    "heart": Federation("Fed-Heart", "heart", "hospitals", origin=NAMED),
    "chile": Federation("Chilean plebiscite", "chile", "regions", dealing=POOL),
    "developers": Federation(
        "developers: open source", "developers", "countries", dealing=POOL
    ),
    "aids": Federation("AIDS in Australia", "aids", "states", dealing=POOL),
    "flights": Federation(
        "late flights from New York", "flights", "airlines", dealing=LARGER_POOL
    ),
    "contraception": Federation(
        "contraception in Bangladesh", "contraception", "districts"
    ),
    "loans": Federation("grades of loans", "loans", "states", dealing=LARGER_POOL),
    "digits_turned": Federation(
        "digits, turned by client",
        "digits",
        "a quarter of the samples each, turned",
        False,
        NAMED,
    ),
    "digits_dirichlet": _dealt("digits, 8 clients", "digits", 8, 0.3, NAMED),
    "diabetes": _dealt("diabetes, thirds", "diabetes", 4, 0.5, TABLE),
    "breast_cancer": _dealt("breast cancer, Wisconsin", "breast_cancer", 4, 0.5, TABLE),
}
"""By name, in the order in which they are run."""


def rotated_images(plain: Source, name: str) -> Source:
    """Return square images with four clients. Each has a quarter of them, turned by 0, 90, 180 or 270 degrees."""
    directions = ("upright", "left", "down", "right")
    owner = np.random.default_rng(0).permutation(len(plain.y)) % len(directions)
    x = np.array(plain.x)
    for quarter in range(1, len(directions)):
        x[owner == quarter] = np.rot90(x[owner == quarter], quarter, axes=(-2, -1))
    return replace(plain, name=name, x=x, owner=owner, owner_names=directions)


def source_of(name: str, data_root: Location | None = None) -> Source:
    """Open the samples of a federation.

    Args:
        data_root: the folder of the tables. None means the environment's ``FEDLAYERS_DATA_ROOT``.

    Raises:
        UsageError: the federation is unknown, or its table is not there.

    >>> source_of("heart").owner_names
    ('cleveland', 'hungarian', 'switzerland', 'va')
    """
    federation = FEDERATIONS[check_known("federation", name, FEDERATIONS)]
    if federation.origin == NAMED:
        whole = datasets.open_named(federation.family)
        return rotated_images(whole, name) if name == "digits_turned" else whole
    if federation.origin == TABLE:
        source = as_data(_table(name), Reading(**READING))
        assert isinstance(source, Source)
        return replace(source, name=name)
    file = f"families/{name}.csv"
    path = find_root(name, data_root, file) / file
    if not path.is_file():
        raise UsageError(
            f"{name} must have its table at {path}; got none. The repository makes it: {RECIPE} {name}."
        )
    return replace(files.read(path, Reading(**READING)), name=name)


def _table(name: str) -> pd.DataFrame:
    """Return a table of scikit-learn with the column ``label``. A number becomes its third of all rows."""
    from sklearn import datasets as tables

    frame = getattr(tables, f"load_{name}")(as_frame=True).frame
    label = frame.pop("target")
    if name == "diabetes":
        label = pd.Series(
            np.digitize(
                label.rank(method="first") / len(label), [1 / 3, 2 / 3], right=True
            )
        )
    return frame.assign(**{LABEL_COLUMN: label.astype(int).astype(str)})


def config_of(name: str, seed: int) -> RunConfig:
    """Return the configuration of a federation's runs but for the method: one small perceptron, trained to its stop."""
    federation = FEDERATIONS[check_known("federation", name, FEDERATIONS)]
    dealing: dict[str, Any] = {"partition": "natural", **dict(federation.dealing)}
    if federation.origin != NAMED:
        dealing |= READING
    return RunConfig(
        seed=seed, model="mlp", model_options={"sizes": (64, 32, 16)}, batch_size=32, loss="cross_entropy",
        optimizer="adamw", weight_decay=1e-4, amsgrad=True, rounds=ROUNDS, eval_every=EVERY, patience=PATIENCE,
        **dealing,
    )  # fmt: skip


def concat_splits(parts: Iterable[Split | None]) -> Split:
    """Return the samples of all parts that are there."""
    there = [part for part in parts if part is not None]
    x, y = (torch.cat([getattr(part, of) for part in there]) for of in "xy")
    return Split(x, y)


class Scene:
    """A federation with one seed: its task, and the held-out samples of each client.

    Held-out samples are the test samples, and unused samples of the dataset if there are any.
    """

    def __init__(self, name: str, seed: int, data_root: Location | None = None) -> None:
        self.name, self.seed = name, seed
        data = source_of(name, data_root)
        self.config, self.own = with_own(config_of(name, seed), data)
        self.task: Task = runner.assemble(self.config, **self.own)
        source = self.own["data"]
        assert isinstance(source, Source)
        whole = source.with_methods(
            self.config.data.scale or "none", self.config.data.impute
        )
        further = datasets.extra_test_samples(whole, self.task.data, HELD_OUT)
        self.held_out = {
            client.name: concat_splits([client.test, further.get(client.name)])
            for client in self.task.data.clients
        }

    @property
    def data(self) -> FederatedData:
        """Return the federation's samples."""
        return self.task.data

    def pooled(self) -> FederatedData:
        """Return a federation of one client that has the training and validation samples of all."""
        parts = [
            concat_splits([client.split(split) for client in self.data.clients])
            for split in SPLITS
        ]
        dealt = self.data.partition.indices.values()
        indices = {
            "all": {
                split: np.concatenate([each[split] for each in dealt])
                for split in SPLITS
            }
        }
        partition = replace(self.data.partition, indices=indices)
        return replace(
            self.data, clients=(ClientData("all", *parts),), partition=partition
        )
