"""Groups of clients whose training moves a layer the same way, and whether chance shows such groups too."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import silhouette_score

from fl_core import tree
from fl_core.data import FederatedData
from fl_core.errors import UsageError, at_least, check_known, check_value, listing
from fl_core.run import runner
from fl_core.run.runner import Task

from .measure import instruments
from .metrics.of_weights import vector_of
from .null import null_data
from .tuning.differ import LEAST_CLIENTS

DRAWS = 59
"""Shuffled federations. With all of them below the real one, chance shows groups in 1 of 60 cases."""


@dataclass(frozen=True)
class Groups:
    """Groups of clients by the updates of one layer.

    Attributes:
        layer: the layer's name.
        of: the group of each client, numbered from 1 in the order of clients. All are in group 1 if none are shown.
        silhouette: of the best grouping, from -1 to 1; higher is better separated. NaN if all updates are equal.
        nulls: the same of each shuffled federation, up to the first that reaches it.
        similarity: cosine of the clients' updates, clients x clients.
    """

    layer: str
    of: dict[str, int]
    silhouette: float
    nulls: tuple[float, ...]
    similarity: pd.DataFrame

    @property
    def significant(self) -> bool:
        """True if no shuffled federation has groups that are as clear."""
        return bool(self.nulls) and all(null < self.silhouette for null in self.nulls)

    def text(self) -> str:
        """Return the groups and the evidence for them."""
        if not self.nulls:
            return f"No groups of clients can be told: all have the same update of {self.layer}."
        most, count = max(self.nulls), len(self.nulls)
        if not self.significant:
            found = f"silhouette {self.silhouette:.2f}; shuffled federation {count} has {most:.2f}"
            return f"No groups of clients are shown by the updates of {self.layer} ({found})."
        found = f"silhouette {self.silhouette:.2f}; {count} shuffled federations have at most {most:.2f}"
        groups = [
            listing(name for name, own in self.of.items() if own == group)
            for group in sorted(set(self.of.values()))
        ]
        return f"Clients form groups by the updates of {self.layer} ({found}): {'; '.join(groups)}."


def best_grouping(similarity: NDArray[np.float64]) -> tuple[NDArray[np.int64], float]:
    """Return the grouping with the greatest silhouette, [clients], and its silhouette.

    Groups come from average linkage of 1 - similarity. Every number of groups from 2 to one less than clients is tried.

    >>> alike = np.kron(np.eye(2), np.full((2, 2), 0.9)) + 0.1 * np.eye(4)
    >>> groups, silhouette = best_grouping(alike)
    >>> groups.tolist(), round(silhouette, 2)
    ([1, 1, 2, 2], 0.9)
    """
    distance = np.clip(1 - similarity, 0, 2)
    np.fill_diagonal(distance, 0)
    joined = linkage(squareform(distance, checks=False), "average")
    tried = [fcluster(joined, count, "maxclust") for count in range(2, len(distance))]
    found = [
        (
            float(silhouette_score(distance, groups, metric="precomputed")),
            -len(set(groups)),
            groups,
        )
        for groups in tried
        if 1 < len(set(groups)) < len(distance)
    ]
    if not found:
        return np.ones(len(distance), int), float("nan")
    value, _, groups = max(found, key=lambda each: each[:2])
    first = {
        group: place for place, group in enumerate(dict.fromkeys(groups.tolist()), 1)
    }
    return np.array([first[group] for group in groups.tolist()]), value


def client_groups(task: Task, layer: str = "", draws: int = DRAWS) -> Groups:
    """Group clients by the directions of a layer's updates in their first local training, from a common start.

    The same is done with samples assigned to clients at random (the null ``clients``). Groups are shown if the real
    silhouette is above that of every draw. Chance shows them in 1 of ``draws`` + 1 federations without any. Five local
    epochs tell clients apart better than one.

    >>> from fl_core.config import RunConfig
    >>> found = client_groups(runner.assemble(RunConfig(dataset="heart")), draws=1)
    >>> found.layer, list(found.of), found.similarity.shape
    ('fc1', ['cleveland', 'hungarian', 'switzerland', 'va'], (4, 4))

    Args:
        layer: name of the layer; default the first, next to the input.
        draws: number of shuffled federations. Each costs as much training as the real one.

    Raises:
        UsageError: fewer than four clients, less than one draw, an unknown layer, or a client whose training does not
            move the layer.
    """
    names = task.data.names
    if len(names) < LEAST_CLIENTS:
        raise UsageError(
            f"clients must be at least {LEAST_CLIENTS} to be grouped; got {len(names)}."
        )
    check_value("draws", draws, at_least(1))
    layers = {each.name: each for each in task.layers if each.weights}
    chosen = layers[
        check_known("layer", layer, layers) if layer else next(iter(layers))
    ]
    start = vector_of(tree.named_tensors(task.model), chosen, "weights")

    def similarity(data: FederatedData) -> NDArray[np.float64]:
        models, _ = runner.train_first_round(
            replace(task, data=data), instruments().observers
        )
        moved = [
            vector_of(tree.named_tensors(models[name]), chosen, "weights") - start
            for name in names
        ]
        lost = [
            name
            for name, vector in zip(names, moved, strict=True)
            if not 0 < float(vector @ vector) < math.inf
        ]
        if lost:
            raise UsageError(
                f"each client's training must move layer {chosen.name!r}, by finite numbers; got no such update of "
                f"{listing(lost)}. Choose another layer."
            )
        return 1 - squareform(
            pdist(np.stack([vector.numpy() for vector in moved]), "cosine")
        )

    real = similarity(task.data)
    groups, silhouette = best_grouping(real)
    nulls: list[float] = []
    while (
        not math.isnan(silhouette)
        and len(nulls) < draws
        and all(null < silhouette for null in nulls)
    ):
        shuffled = null_data(
            task.data, "clients", task.config.execution.seed, len(nulls) + 1
        )
        nulls.append(best_grouping(similarity(shuffled))[1])
    found = Groups(
        chosen.name,
        dict(zip(names, groups.tolist(), strict=True)),
        silhouette,
        tuple(nulls),
        pd.DataFrame(real, index=names, columns=names),
    )
    return found if found.significant else replace(found, of=dict.fromkeys(names, 1))
