"""Whether a race's candidates have learned anything: balanced accuracy above guessing; of a regression an R2 above 0.

Where nothing can be learned, candidates still differ in macro-F1: those that share average their models and guess one
class more often than those that train alone. Such a difference is real, and says nothing of which layers to share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from fl_core import statistics
from fl_core.data import FederatedData

METRIC = "balanced_accuracy"
LEVEL = 0.95


class AboveChance(NamedTuple):
    """The best candidate's balanced accuracy above guessing; of a regression its R2.

    Attributes:
        value: the mean over seeds; about 0 = it guesses, or is as good as predicting the mean.
        low: its one-sided 95 % limit over seeds (Student's t): above 0, something was learned. NaN for one seed.
    """

    value: float
    low: float

    @property
    def shown(self) -> bool | None:
        """Whether it is shown that something was learned; None where that cannot be asked: one seed, or no scores."""
        return None if math.isnan(self.low) else self.low > 0


UNKNOWN = AboveChance(math.nan, math.nan)


def guessing(data: FederatedData) -> dict[str, float]:
    """The balanced accuracy of predictions that do not depend on the sample, by client: 1 / classes in validation.

    The mean over k present classes of how often each is predicted is at most 1 / k, whatever is predicted. A client
    with a single class is left out: every guess of it is right. A regression has no classes, and nobody in it.

    >>> from fl_core.data import load
    >>> guessing(load("digits", partition="pathological", classes_per_client=2, clients=5))["client_0"]
    0.5
    """
    if not data.classes:
        return {}
    present = (data.class_counts("validation") > 0).sum(axis=1)
    return {str(client): 1 / count for client, count in present.items() if count > 1}


def score_above_chance(scored: pd.DataFrame, guesses: Mapping[str, float]) -> float:
    """Balanced accuracy above guessing of one model in one round, the mean over clients by training samples.

    Args:
        scored: rows of :data:`METRIC` on validation, one a client.

    Returns:
        NaN where no client has a score that can be compared.
    """
    usable = scored[scored["client"].isin(list(guesses)) & scored["value"].notna()]
    if usable.empty:
        return math.nan
    return statistics.combine(usable["value"] - usable["client"].map(guesses), usable["n_train"])


def best_of(judged: pd.DataFrame, column: str = "skill") -> AboveChance:
    """Return the number of the candidate for which the most is shown, with its limit.

    Each candidate has its own limit over seeds, at the level divided by how many they are (Bonferroni). That allows for
    picking the highest. No mean is taken over candidates, so one that collapsed cannot hide the others. With one seed,
    which has no limit, it is the highest number.

    Args:
        judged: a line for each candidate and seed. Nothing is counted of seeds without any number in the column, nor of
            candidates that failed with a seed.
        column: ``skill``, or of a regression ``r2``.

    >>> means = {"a": 0.5, "b": -9}
    >>> lines = [{"arm": arm, "seed": seed, "r2": means[arm] + 0.01 * seed} for arm in means for seed in range(3)]
    >>> best_of(pd.DataFrame(lines), "r2").shown
    True
    """
    if column not in judged:
        return UNKNOWN
    values = judged.pivot(index="arm", columns="seed", values=column).dropna(axis=1, how="all").dropna()
    if values.empty:
        return UNKNOWN
    each = [statistics.mean_interval(of_arm, len(values), 2 * LEVEL - 1) for _, of_arm in values.iterrows()]
    best = max(each, key=lambda one: one.value if math.isnan(one.low) else one.low)
    return AboveChance(best.value, best.low)
