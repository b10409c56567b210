"""Scores above guessing: whether a race's candidates have learned anything.

If nothing can be learned, candidates still differ in macro-F1. Clients that share average their models, and guess one
class more often than clients that train alone. Such a difference is real, but says nothing about layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from fl_core import statistics
from fl_core.data import FederatedData
from fl_core.scores import CLASSIFICATION, TABLE

METRIC = "balanced_accuracy"
LEVEL = 0.95


class AboveChance(NamedTuple):
    """The best candidate's balanced accuracy above guessing. Other tasks use their main score above its chance value.

    Attributes:
        value: the mean over seeds. About 0: no better than guessing, or than predicting the mean.
        low: its one-sided 95 % limit over seeds (Student's t). Above 0, something was learned. NaN for one seed.
    """

    value: float
    low: float

    @property
    def significant(self) -> bool | None:
        """True if something was shown to be learned; None if unknown, with one seed or without scores."""
        return None if math.isnan(self.low) else self.low > 0


UNKNOWN = AboveChance(math.nan, math.nan)


def guessing_accuracy(data: FederatedData) -> dict[str, float]:
    """Return each client's balanced accuracy of guessing: 1 / classes in its validation samples.

    With k classes, predictions that ignore the sample reach a balanced accuracy of at most 1 / k. A client with a
    single class is left out, since every guess is right. For tasks without classes the result is empty.

    >>> from fl_core.data import load
    >>> guessing_accuracy(load("digits", partition="pathological", classes_per_client=2, clients=5))["client_0"]
    0.5
    """
    if data.task != CLASSIFICATION:
        return {}
    present = (data.class_counts("validation") > 0).sum(axis=1)
    return {str(client): 1 / count for client, count in present.items() if count > 1}


def score_above_chance(scored: pd.DataFrame, guesses: Mapping[str, float]) -> float:
    """Return one model's balanced accuracy above guessing in one round: the clients' weighted mean.

    Clients are weighted by training samples.

    Args:
        scored: rows of :data:`METRIC` on validation, one per client.

    Returns:
        NaN if no client has a comparable score.
    """
    usable = scored[scored["client"].isin(list(guesses)) & scored["value"].notna()]
    if usable.empty:
        return math.nan
    return statistics.combine(
        usable["value"] - usable["client"].map(guesses), usable["n_train"]
    )


def best_of(judged: pd.DataFrame, column: str = "skill") -> AboveChance:
    """Return the number of the candidate with the strongest evidence, and its limit.

    Each candidate has its own limit over seeds. Its level is divided by the number of candidates (Bonferroni), because
    the highest is picked. No mean is taken over candidates, so one that collapsed cannot hide the others. One seed has
    no limit; then the highest number wins.

    Args:
        judged: a line per candidate and seed. Seeds without any number are ignored, and so are candidates that failed
            with a seed.
        column: ``skill``, or the main score of a task without classes, such as ``r2``. Its chance value is subtracted.

    >>> means = {"a": 0.5, "b": -9}
    >>> lines = [{"arm": arm, "seed": seed, "r2": means[arm] + 0.01 * seed} for arm in means for seed in range(3)]
    >>> best_of(pd.DataFrame(lines), "r2").significant
    True
    """
    if column not in judged:
        return UNKNOWN
    values = (
        judged.pivot(index="arm", columns="seed", values=column)
        .dropna(axis=1, how="all")
        .dropna()
    )
    if values.empty:
        return UNKNOWN
    if column in TABLE:
        values = values - TABLE[column].chance
    each = [
        statistics.mean_interval(of_arm, len(values), 2 * LEVEL - 1)
        for _, of_arm in values.iterrows()
    ]
    best = max(each, key=lambda one: one.value if math.isnan(one.low) else one.low)
    return AboveChance(best.value, best.low)
