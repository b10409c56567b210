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


class Skill(NamedTuple):
    """Balanced accuracy above guessing, of all candidates together; of a regression the best candidate's R2.

    Attributes:
        value: mean over candidates and seeds, -1 to 1; about 0 = they guess.
        low: its one-sided 95 % limit over seeds (Student's t): above 0, something was learned. NaN for one seed.
    """

    value: float
    low: float

    @property
    def shown(self) -> bool | None:
        """Whether it is shown that something was learned; None where that cannot be asked: one seed, or no scores."""
        return None if math.isnan(self.low) else self.low > 0


UNKNOWN = Skill(math.nan, math.nan)


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


def above_guessing(scored: pd.DataFrame, guesses: Mapping[str, float]) -> float:
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


def skill(judged: pd.DataFrame) -> Skill:
    """Balanced accuracy above guessing over all candidates and seeds of a race.

    The limit is that of the seeds' means over the candidates, with one degree of freedom less than there are seeds: it
    holds its level whether or not candidates deviate together, as those do that share a seed's split.

    Args:
        judged: a line for each candidate and seed, with NaN in the column ``skill`` where there are no scores: of seeds
            without any, and of candidates that failed with a seed, nothing is counted.

    >>> lines = [{"arm": arm, "seed": seed, "skill": 0.1 + 0.01 * seed} for arm in "ab" for seed in range(3)]
    >>> skill(pd.DataFrame(lines)).shown
    True
    """
    if "skill" not in judged:
        return UNKNOWN
    values = judged.pivot(index="arm", columns="seed", values="skill").dropna(axis=1, how="all").dropna()
    if values.empty:
        return UNKNOWN
    mean, low, _ = statistics.mean_interval(values.mean(), level=2 * LEVEL - 1)
    return Skill(mean, low)


def best_r2(judged: pd.DataFrame) -> Skill:
    """The R2 of the candidate for which the most is shown, 0 = it is as good as predicting the mean.

    An R2 has no lower end, so that one bad candidate would hide all others in a mean over them. The limit is instead
    the highest of the candidates' own, each at the level divided by how many they are (Bonferroni), which allows for
    picking it. With one seed, which has no limit, it is the highest R2. Candidates that failed with a seed count not.

    >>> means = {"a": 0.5, "b": -9}
    >>> lines = [{"arm": arm, "seed": seed, "r2": means[arm] + 0.01 * seed} for arm in means for seed in range(3)]
    >>> best_r2(pd.DataFrame(lines)).shown
    True
    """
    values = judged.pivot(index="arm", columns="seed", values="r2").dropna()
    if values.empty:
        return UNKNOWN
    each = [statistics.mean_interval(of_arm, len(values), 2 * LEVEL - 1) for _, of_arm in values.iterrows()]
    best = max(each, key=lambda one: one.value if math.isnan(one.low) else one.low)
    return Skill(best.value, best.low)
