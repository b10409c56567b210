"""Which clients are alike, by their own models on each other's samples, and whether they form groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.cluster.hierarchy import dendrogram, fcluster, linkage
from scipy.spatial.distance import squareform
from sklearn.metrics import silhouette_score

from fl_core.display import Displayed, Summary
from fl_core.errors import listing
from fl_core.seeds import numpy_generator

from .tuning.differ import LEAST_CLIENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEALS = 19
"""Number of random assignments of the samples to clients.

With 19 of them, chance shows groups in 1 of 20 federations of equal clients.
"""

Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Alike(Displayed):
    """Groups of similar clients, and the evidence for them.

    Attributes:
        leads: clients x clients, in nats: by how much the mean losses of two clients' own models are below those of
            each other's models, the sum over both clients. The diagonal is 0. Values are around 0 for clients of the
            same distribution.
        groups: the group of each client, numbered from 1 in the order of clients. All are in group 1 if none are shown.
        silhouette: the silhouette of the best grouping, from -1 to 1; higher is better
            separated. It is NaN with fewer than 4 clients, or if all distances are
            equal.
        nulls: the silhouette after each random assignment of samples to clients, up to the first that reaches
            ``silhouette``. Empty if that is NaN.
    """

    leads: pd.DataFrame
    groups: dict[str, int]
    silhouette: float
    nulls: tuple[float, ...]

    @property
    def significant(self) -> bool:
        """Return whether no random assignment of samples has groups that are as clear.

        It is False without random assignments.
        """
        return bool(self.nulls) and all(null < self.silhouette for null in self.nulls)

    @property
    def order(self) -> list[str]:
        """Return the clients in the order of the dendrogram: alike ones are next to each other."""
        names = list(self.leads)
        if len(names) < 3:
            return names
        leaves = dendrogram(_tree(_distances(self.leads.to_numpy())), no_plot=True)
        return [names[leaf] for leaf in leaves["leaves"]]

    def text(self) -> str:
        """Return the groups and the evidence for them."""
        count = len(self.nulls)
        if not count:
            return "No groups of clients are shown: there are too few clients, or their models are equal."
        largest, silhouette_text = f"{max(self.nulls):.2f}", f"{self.silhouette:.2f}"
        if not self.significant:
            return (
                f"No groups of clients are shown (silhouette {silhouette_text}; "
                f"{largest} in deal {count} of their samples)."
            )
        names = pd.Series(self.groups)
        groups = "; ".join(listing(names.index[names == k], 6) for k in names.unique())
        evidence = f"silhouette {silhouette_text}; at most {largest} in {count} deals of their samples"
        return f"Clients form groups ({evidence}): {groups}."

    def summary(self) -> Summary:
        """Return the groups, and the leads in the dendrogram's order."""
        table = self.leads.loc[self.order, self.order].round(2)
        table = table.rename_axis(index="lead in nats", columns=None)
        return Summary.of_frame(self.text(), table)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the leads as a heat map in the dendrogram's order, and return its Axes.

        Dark pairs are alike. Leads below 0 are drawn as 0. White lines part the groups.

        Args:
            ax: the Axes to draw on. Default: those of a new figure.
        """
        from .plots.drawing import Panel, canvas, heat

        matrix = self.leads.loc[self.order, self.order].clip(lower=0)
        side_inches = min(2.0 + 0.35 * len(matrix), 9.0)
        high = max(float(matrix.max(axis=None)), 1e-3)
        with canvas(ax, side_inches + 1.0, side_inches) as axes:
            image = heat(Panel(axes, True, True), matrix, high=high, square=True)
            label = "lead of own models (nats)"
            axes.figure.colorbar(image, ax=axes, label=label)
            groups = [self.groups[name] for name in self.order]
            ends = np.flatnonzero(np.diff(groups)) + 1
            axes.hlines(ends, 0, len(groups), colors="white")
            axes.vlines(ends, 0, len(groups), colors="white")
            axes.set(xlabel="client", ylabel="client")
        return axes


def alike(
    losses: Array,
    client: NDArray[np.int64],
    names: Sequence[str],
    group: NDArray[np.int64] | None = None,
    *,
    seed: int = 0,
    deals: int = DEALS,
) -> Alike:
    """Compare each pair of clients by their own models at both clients' samples, and seek groups of clients.

    The lead of clients a and b is L(b, a) - L(a, a) + L(a, b) - L(b, b), where L(j, k) is the mean loss of client j's
    model at client k's samples. If both have the same distribution, and the samples trained no model, its expected
    value is 0, whatever the models learned.

    Groups come from average linkage. The distance of two clients is their lead minus the smallest lead. Groups are
    shown if their silhouette is above that after each random assignment of samples (whole groups) to clients.

    >>> losses = np.ones((4, 8)) - np.kron(np.eye(2), np.full((2, 4), 0.9)) + 0.1 * np.eye(4, 8)
    >>> groups = alike(losses, np.arange(8) // 2, ["a", "b", "c", "d"])
    >>> groups.leads.loc["c"].round(2).tolist()
    [1.75, 1.85, 0.0, 0.0]

    Args:
        losses: the loss of each client's model at each sample, float64 [K, n], comparable between models.
        client: the number of each sample's client [n], in the order of ``names``. Every client has samples.
        names: names of the clients, [K].
        group: the number of each sample's group, such as a patient, [n]. Default: every sample is a group.
        seed: seed of the random assignments.
        deals: largest number of random assignments of samples to clients.
    """
    leads = _leads(losses, client)
    table = pd.DataFrame(leads, index=list(names), columns=list(names))
    one_group = dict.fromkeys(names, 1)
    if len(names) < LEAST_CLIENTS:
        return Alike(table, one_group, math.nan, ())
    groups, silhouette = best_grouping(_distances(leads))
    if math.isnan(silhouette):
        return Alike(table, one_group, math.nan, ())
    group_of_sample = group
    if group_of_sample is None:
        group_of_sample = np.arange(len(client))
    _, first_samples, position = np.unique(
        group_of_sample, return_index=True, return_inverse=True
    )
    draw, nulls = numpy_generator(seed, "alike"), list[float]()
    while len(nulls) < deals and all(null < silhouette for null in nulls):
        new_client = draw.permutation(client[first_samples])[position.reshape(-1)]
        nulls.append(best_grouping(_distances(_leads(losses, new_client)))[1])
    result = Alike(
        table,
        dict(zip(names, groups.tolist(), strict=True)),
        silhouette,
        tuple(nulls),
    )
    if result.significant:
        return result
    return Alike(table, one_group, silhouette, tuple(nulls))


def best_grouping(distance: Array) -> tuple[NDArray[np.int64], float]:
    """Return the grouping with the greatest silhouette, [clients], and its silhouette.

    Groups come from average linkage. Every number of groups from 2 to one less than clients is tried.

    >>> distance = 1 - np.kron(np.eye(2), np.full((2, 2), 0.9)) - 0.1 * np.eye(4)
    >>> groups, silhouette = best_grouping(distance.round(12))
    >>> groups.tolist(), round(silhouette, 2)
    ([1, 1, 2, 2], 0.9)

    Args:
        distance: distances between clients, at least 0, [clients, clients]. If all are
            equal, or there are 2 clients, all clients are in group 1 and the silhouette
            is NaN.
    """
    linkage_matrix = _tree(distance)
    best_groups, silhouette = np.ones(len(distance), dtype=np.int64), math.nan
    for count in range(2, len(distance)):
        groups = fcluster(linkage_matrix, count, "maxclust")
        if not 1 < len(set(groups)) < len(distance):
            continue
        value = float(silhouette_score(distance, groups, metric="precomputed"))
        if math.isnan(silhouette) or value > silhouette:
            best_groups, silhouette = groups, value
    group_numbers = {
        group: k for k, group in enumerate(dict.fromkeys(best_groups.tolist()), 1)
    }
    return np.array(
        [group_numbers[group] for group in best_groups.tolist()]
    ), silhouette


def _leads(losses: Array, client: NDArray[np.int64]) -> Array:
    """Return the lead of each pair of clients, [K, K] (:func:`alike`)."""
    is_of_client = client == np.arange(len(losses))[:, None]
    means = losses @ (is_of_client / is_of_client.sum(axis=1, keepdims=True)).T
    gaps = means - means.diagonal()
    leads: Array = gaps + gaps.T
    return leads


def _distances(leads: Array) -> Array:
    """Return each pair's lead minus the smallest lead of all pairs, [K, K].

    The diagonal is 0. Distances of the size of rounding errors are 0, too.
    """
    pairs = ~np.eye(len(leads), dtype=bool)
    distance = np.where(pairs, leads - leads[pairs].min(), 0.0)
    return distance * (distance > 1e-12 * np.abs(leads).max())


def _tree(distance: Array) -> Array:
    linkage_matrix: Array = linkage(squareform(distance, checks=False), "average")
    return linkage_matrix
