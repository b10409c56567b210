"""What is known before training: the label skew of the clients, what it meant elsewhere, and what a race would cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedlayers.studies.runtime_estimate import Cost
from fl_core.display import Displayed, Summary
from fl_core.scores import CLASSIFICATION
from fl_core.task import Task

BANDS = (
    (0.17, "low", "11 of 12 such federations gained at most 1.1 points"),
    (0.35, "middle", "6 of 9 such federations gained at most 1.3 points"),
    (math.inf, "high", "8 of 8 such federations gained at least 1.1 points"),
)
"""The skew below which a band ends, its name, and the gains of the best cut (``figures.decision.skew``)."""


@dataclass(frozen=True, repr=False)
class Hint(Displayed):
    """What is known of a federation before training.

    Attributes:
        skew: the label skew beyond chance, from 0 to 1; NaN for a task without classes.
        counts: training samples by client and class.
        cost: of a race with the same arguments.
    """

    skew: float
    counts: pd.DataFrame
    cost: Cost

    def text(self) -> str:
        """Return the sentence on the skew, and the cost."""
        return "\n".join(filter(None, [in_words(self.skew), self.cost.text()]))

    def summary(self) -> Summary:
        """Return the sentences and the counts."""
        return Summary.of_frame(self.text(), self.counts.reset_index())


def skew_of(task: Task) -> float:
    """Return the label skew of the training samples; NaN for a task without classes."""
    if task.data.task != CLASSIFICATION:
        return math.nan
    return label_skew(task.data.class_counts().to_numpy(float))


def in_words(skew: float) -> str:
    """Return what a label skew meant in other federations; empty without one."""
    if math.isnan(skew):
        return ""
    name, known = next((name, known) for end, name, known in BANDS if skew < end)
    return (
        f"Label skew beyond chance: {skew:.2f}, {name}. On tables and small images {known} of macro-F1 over sharing "
        "every layer, by the best cut. Clients that mean different things by one label do not show in it."
    )


def label_skew(counts: NDArray[np.float64]) -> float:
    """Return Cramér's V of clients and classes without what chance adds (Bergsma, 2013).

    >>> label_skew(np.array([[30.0, 0.0], [0.0, 30.0]])), label_skew(np.array([[30.0, 30.0], [9.0, 9.0]]))
    (1.0, 0.0)

    Args:
        counts: samples, clients x classes.
    """
    table = counts[:, counts.sum(axis=0) > 0]
    n, (rows, columns) = table.sum(), table.shape
    if min(rows, columns) < 2:
        return 0.0
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / n
    association = ((table - expected) ** 2 / expected).sum() / n
    beyond = max(0.0, association - (rows - 1) * (columns - 1) / (n - 1))
    most = min(size - (size - 1) ** 2 / (n - 1) for size in (rows, columns)) - 1
    return float(min(1.0, math.sqrt(beyond / most)))
