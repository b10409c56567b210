"""Label shift: how far clients' label distributions differ, by Cramér's V without what chance adds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.arrays import nested_groups
from fl_core.data.federated import FederatedData
from fl_core.data.loading import as_data, load
from fl_core.display import Displayed, Summary
from fl_core.errors import UsageError
from fl_core.rows import CLASSIFICATION
from fl_core.seeds import numpy_generator
from fl_core.statistics import TAILS, Interval

DEALS = 200
"""Number of random assignments of groups of samples to clients."""
SMALL = 0.1
"""The least value of Cramér's V that is a small effect (Cohen 1988)."""
Array = NDArray[Any]


@dataclass(frozen=True, repr=False)
class LabelShift(Displayed):
    """How far clients' label distributions differ.

    Attributes:
        cramers_v: from 0 (equal distributions) to 1 (each class at one client), with
            the interval of :func:`interval_of`.
        counts: training samples by client and class.
    """

    cramers_v: Interval
    counts: pd.DataFrame

    def text(self) -> str:
        """Return a sentence on the label distributions.

        Unless they are shown to differ, a second one says what this does not rule out.

        >>> counts = pd.DataFrame({"well": [9, 9], "ill": [9, 9]})
        >>> for value in (Interval(0.0, 0.0, 0.05), Interval(0.2, 0.0, 0.4), Interval(0.31, 0.3, 0.32)):
        ...     print(LabelShift(value, counts).text())
        Clients have similar label distributions (Cramér's V 0.00). This does not rule out ...
        No difference between clients' label distributions is shown (Cramér's V 0.20 [0.00, 0.40]). This does not ...
        Clients have different label distributions (Cramér's V 0.31 [0.30, 0.32]).
        """
        value, low, high = (f"{number:.2f}" for number in self.cramers_v)
        further = "This does not rule out concept shift or feature shift."
        if self.cramers_v.low > 0:
            return f"Clients have different label distributions (Cramér's V {value} [{low}, {high}])."
        if self.cramers_v.high < SMALL:
            return f"Clients have similar label distributions (Cramér's V {value}). {further}"
        return (
            f"No difference between clients' label distributions is shown (Cramér's V {value} [{low}, {high}]). "
            f"{further}"
        )

    def summary(self) -> Summary:
        return Summary.of_frame(self.text(), self.counts.rename_axis("client"))


def label_shift(data: Any) -> LabelShift:
    """Return how far the label distributions of clients' training samples differ. Nothing is trained.

    >>> import fedlayers as fl
    >>> shift = fl.label_shift(fl.load("heart"))
    >>> round(shift.cramers_v.value, 2), shift.counts.loc["va"].tolist()
    (0.31, [17, 25, 18, 19, 4])

    Args:
        data: a federation of :func:`fl_core.data.load`, or data from Python as for
            :func:`fl_core.data.loading.as_data`.

    Raises:
        UsageError: the samples have no classes, or there is one client.
    """
    federation_data = as_data(data)
    if isinstance(federation_data, FederatedData):
        federation = federation_data
    else:
        federation = load(federation_data)
    if federation.task != CLASSIFICATION:
        raise UsageError(
            f"data must have classes for a label shift; got task {federation.task}. Compare the targets by a plot."
        )
    if len(federation.clients) < 2:
        raise UsageError(
            "data must have at least 2 clients for a label shift; got 1. Name the column of clients."
        )
    return LabelShift(interval_of(federation), federation.class_counts())


def interval_of(data: FederatedData) -> Interval:
    """Return Cramér's V of clients and classes of the training samples, without what chance adds.

    Whole groups of samples, such as patients, are assigned to the clients at random
    :data:`DEALS` times. If a client has no groups, single samples are assigned. The
    mean :func:`association` of these assignments is subtracted as chance. The lower end
    of the interval subtracts their 97.5 % quantile in place of the mean, and the upper
    end their 2.5 % quantile. A lower end of 0 means that chance alone may give as much.
    """
    splits, classes = [client.train for client in data.clients], data.n_classes
    labels = np.concatenate([split.y.numpy() for split in splits])
    clients = np.repeat(np.arange(len(splits)), [len(split) for split in splits])
    group = np.arange(len(labels))
    if all(split.groups is not None for split in splits):
        group = nested_groups(split.groups for split in splits)
    of_group = clients[np.unique(group, return_index=True)[1]]
    draw = numpy_generator(0, "label skew")

    def counts(client: NDArray[np.int64]) -> NDArray[np.float64]:
        table = np.bincount(client * classes + labels, minlength=len(splits) * classes)
        return table.reshape(len(splits), classes).astype(float)

    table = counts(clients)
    chance = [
        association(counts(draw.permutation(of_group)[group])) for _ in range(DEALS)
    ]
    ends = np.quantile(chance, TAILS[::-1])
    return Interval(
        *(cramers_v(table, statistic) for statistic in (np.mean(chance), *ends))
    )


def association(table: Array) -> float:
    """Return chi-square over n of a table of clients x classes, without empty classes.

    It is NaN if a client has no samples.
    """
    table = table[:, table.sum(axis=0) > 0]
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    return float(((table - expected) ** 2 / expected).sum() / table.sum())


def cramers_v(counts: Array, chance: float) -> float:
    """Return Cramér's V of clients and classes without what chance adds (Bergsma, 2013).

    It is 0 if there is one client, or one class with samples.

    >>> cramers_v(np.array([[30.0, 0.0], [0.0, 30.0]]), 1 / 59), cramers_v(np.array([[30.0, 30.0], [9.0, 9.0]]), 0)
    (1.0, 0.0)

    Args:
        counts: numbers of samples, clients x classes.
        chance: the expected :func:`association` by chance. For independent samples it is (rows - 1) (columns - 1) / (n
            - 1).
    """
    table = counts[:, counts.sum(axis=0) > 0]
    n, (rows, columns) = table.sum(), table.shape
    if min(rows, columns) < 2:
        return 0.0
    excess = max(0.0, association(table) - chance)
    maximum = min(size - (size - 1) ** 2 / (n - 1) for size in (rows, columns)) - 1
    return float(min(1.0, math.sqrt(excess / maximum)))
