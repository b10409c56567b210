"""The certainty of a race's leader: which arms are significantly worse, and which are not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fedlayers.studies.above_chance import UNKNOWN, AboveChance, best_of
from fedlayers.studies.early_stop import EarlyStop
from fl_core import statistics
from fl_core.race_evidence import ArmEvidence, RaceEvidence
from fl_core.scores import CLASSIFICATION, MAIN, REGRESSION, label_of, main_score

LEVEL = 0.95
DIGITS = 9
"""Digits of scores that are compared. Later digits differ by rounding."""
DECIDED, LEVEL_ARMS, DISAGREE = (
    "decided",
    "no significant difference",
    "score and loss disagree",
)
NOTHING_LEARNED, ALL_DIVERGED, ONE_RACE = "nothing learned", "all diverged", "one race"
VERDICTS = {
    DECIDED: "every arm but the leader is significantly worse than another",
    LEVEL_ARMS: "several arms without a significant difference",
    DISAGREE: "another arm scores significantly higher, but the leader has the better loss",
    NOTHING_LEARNED: "no arm is shown to beat guessing, so no difference says which layers to share",
    ALL_DIVERGED: "every arm diverged with some seed",
    ONE_RACE: "one seed, so no uncertainty is known",
}
NO_PAIRS = pd.DataFrame(
    index=pd.MultiIndex.from_tuples([], names=["arm", "other"]),
    columns=list(statistics.Pairs._fields),
    dtype=float,
)


@dataclass(frozen=True)
class Inference:
    """The evidence of repeated races on the leading arm.

    Attributes:
        verdict: one of :data:`VERDICTS`.
        remaining: the leader, then the arms that are not significantly worse than any other.
        differences: a line for each other arm: leader - arm in the main score, its simultaneous 95 % interval,
            ``p_value`` (Holm, over all pairs of arms) and ``excluded``.
        pairs: the same numbers of all pairs of compared arms, by index (arm, other); empty with one seed.
        above_chance: the best arm's score above guessing, see :class:`fedlayers.studies.above_chance.AboveChance`.
        main: the score that is compared.
        tie: how a tie for the first place was broken, in a sentence.
        early: where the race was judged early, and the forecasts; None if all arms have a final score.
    """

    verdict: str
    remaining: tuple[str, ...]
    differences: pd.DataFrame
    pairs: pd.DataFrame
    above_chance: AboveChance = UNKNOWN
    main: str = MAIN[CLASSIFICATION]
    tie: str = ""
    early: EarlyStop | None = None

    @property
    def usable(self) -> tuple[str, ...]:
        """The arms from which the one that sends least is used; only the leader if nothing is compared."""
        return (
            self.remaining
            if self.verdict in (LEVEL_ARMS, NOTHING_LEARNED)
            else self.remaining[:1]
        )

    def at_stake(self, used: str) -> float:
        """Return how much better another remaining arm may be than the used one, at most; NaN if unknown."""
        if self.verdict == DECIDED:
            return 0.0
        if self.verdict not in (LEVEL_ARMS, DISAGREE):
            return math.nan
        return max(
            float(self.pairs["high"][arm, used])
            for arm in self.remaining
            if arm != used
        )


def rank_arms(judged: pd.DataFrame) -> list[str]:
    """Return the arms, the best first: by the number of failed seeds, then by their mean score over the others.

    Equal scores are ordered by macro-F1, for a regression by R2. They arise if one of two arms has the higher macro-F1
    and the other the lower loss.

    Args:
        judged: as in :class:`~fedlayers.studies.race.Standing`.
    """
    return [str(name) for name in _order(judged).index]


def _order(judged: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each arm, the best first: ``failed`` seeds, and negative mean ``score`` and ``main`` score."""
    main = main_score(judged.columns)
    grid = judged.pivot(index="arm", columns="seed", values=["score", main]).loc[
        judged["arm"].unique()
    ]
    means = {
        "score": -grid["score"].mean(axis=1).round(DIGITS),
        "main": -grid[main].mean(axis=1).round(DIGITS),
    }
    order = pd.DataFrame({"failed": grid["score"].isna().sum(axis=1), **means})
    return order.sort_values(["failed", "score", "main"], kind="stable")


def _tie(judged: pd.DataFrame) -> str:
    """Describe a tie of the leader and another arm that was broken by macro-F1; empty without one."""
    order, word = _order(judged), label_of(main_score(judged.columns))
    level = order[(order["failed"] == 0) & (order["score"] == order["score"].iloc[0])]
    if order["failed"].iloc[0] or level["main"].nunique() < 2:
        return ""
    return f"The first place was a tie of {word} against loss, broken by {word}."


def leader_of(judged: pd.DataFrame) -> str:
    """Return the first of :func:`rank_arms`. An arm that failed with any seed leads only if all did."""
    return rank_arms(judged)[0]


def infer(judged: pd.DataFrame) -> Inference:
    """Judge how certain the leading arm is, by the main score on validation samples, paired by seed.

    Each pair of arms is compared by a paired t test with the spread of its own differences. Holm's correction covers
    all pairs, and so allows for picking the leader. At most 5 % of races exclude an arm that is no worse. That holds
    for normal and heavy-tailed scores of any covariance. For skewed scores of unequal spread it is 8 to 11 %, and more
    if the skew is strong.
    No number is pooled over arms, so a collapsed arm changes nothing for the others.

    Nothing is excluded if no arm is shown to beat guessing (:mod:`fedlayers.studies.above_chance`). A difference in
    macro-F1 then reflects how arms guess. A regression is judged all the same, since a higher R2 is a smaller error
    also below 0.

    Args:
        judged: as in :class:`~fedlayers.studies.race.Standing`. Arms that failed with a seed are excluded, unless all
            did.

    >>> seeds, arms = range(4), {"a": 0.60, "b": 0.59, "c": 0.40}
    >>> noise = [[0.004, -0.001, 0.002, -0.003], [-0.002, 0.003, 0.001, 0.0], [0.0, 0.001, -0.004, 0.002]]
    >>> lines = [
    ...     {"arm": arm, "seed": seed, "macro_f1": mean + noise[k][seed], "score": mean}
    ...     for k, (arm, mean) in enumerate(arms.items())
    ...     for seed in seeds
    ... ]
    >>> seen = infer(pd.DataFrame(lines))
    >>> seen.verdict, seen.remaining
    ('decided', ('a',))
    """
    main = main_score(judged.columns)
    return replace(_certainty(judged, main), main=main, tie=_tie(judged))


def evidence_of(
    judged: pd.DataFrame, found: Inference, used: str, until: int
) -> RaceEvidence:
    """Return the evidence of a race for a plan: every arm's mean scores, and its difference from the leader.

    Args:
        judged: as for :func:`infer`, whose result is ``found``.
        used: the arm whose plan it is.
        until: the round after which the race was judged.
    """
    means = (
        judged.groupby("arm")[[found.main, "loss", "score"]]
        .mean()
        .rename(columns={found.main: "value"})
    )
    columns = ["difference", "low", "high", "p_value"]
    lines = means.join(found.differences.set_index("arm")[columns]).loc[
        rank_arms(judged)
    ]
    if found.early is not None:
        lines["forecast"] = judged.set_index("arm")["forecast"]
    lines = lines.astype(object).where(np.isfinite(lines), None)
    arms = tuple(
        ArmEvidence(name, **line) for name, line in lines.to_dict("index").items()
    )
    seeds = tuple(int(seed) for seed in judged["seed"].unique())
    return RaceEvidence(found.main, until, seeds, found.verdict, used, arms)


def _certainty(judged: pd.DataFrame, main: str) -> Inference:
    order = rank_arms(judged)
    leader = order[0]
    table = judged.pivot(index="arm", columns="seed", values=main).loc[order]
    if (
        "status" in judged
    ):  # a race that was judged early has scores of all arms, and a final score of one
        names = [
            str(name)
            for name in judged.set_index("arm")["score"].loc[order].dropna().index
        ]
        return Inference(
            ONE_RACE,
            tuple(names),
            _lines(leader, order, names),
            NO_PAIRS,
            best_of(judged),
        )
    whole = table.dropna()
    names = [str(name) for name in whole.index]
    learned = best_of(judged, "skill" if main == MAIN[CLASSIFICATION] else main)
    if not names:  # and so is nothing paired by seed
        left = [name for name in order if table.loc[name].notna().any()]
        return Inference(
            ALL_DIVERGED, tuple(left), _lines(leader, order, left), NO_PAIRS, learned
        )
    if table.shape[1] < 2:
        lines = _lines(leader, order, names)
        lines["difference"] = (
            table.loc[leader].mean() - table.loc[lines["arm"]].mean(axis=1).to_numpy()
        )
        return Inference(ONE_RACE, tuple(names), lines, NO_PAIRS, learned)
    pairs = _pairs(names, statistics.pairwise(whole.to_numpy(float), LEVEL))
    shown = pairs[(pairs["p_value"] <= 1 - LEVEL) & (pairs["difference"] < 0)]
    worse = {arm for arm, _ in shown.index}
    verdict, left = (
        LEVEL_ARMS,
        [name for name in names if name == leader or name not in worse],
    )
    if learned.significant is False and main != MAIN[REGRESSION]:
        verdict, left = NOTHING_LEARNED, names
    elif leader in worse:
        verdict = DISAGREE
    elif len(left) == 1:
        verdict = DECIDED
    return Inference(
        verdict, tuple(left), _lines(leader, order, left, pairs), pairs, learned
    )


def _pairs(names: list[str], found: statistics.Pairs) -> pd.DataFrame:
    """Return the numbers of all pairs of arms, by arm and other."""
    index = pd.MultiIndex.from_tuples(
        [(a, b) for a in names for b in names if a != b], names=["arm", "other"]
    )
    apart = ~np.eye(len(names), dtype=bool)
    return pd.DataFrame(
        {name: each[apart] for name, each in found._asdict().items()},
        index=index,
        dtype=float,
    )


def _lines(
    leader: str, order: list[str], left: list[str], pairs: pd.DataFrame = NO_PAIRS
) -> pd.DataFrame:
    """Return a line for each arm but the leader: its numbers against the leader, if any, and ``excluded``."""
    others = [name for name in order if name != leader]
    numbers = pairs.loc[leader] if len(pairs) else pairs.droplevel("arm")
    lines = numbers.reindex(others).rename_axis("arm").reset_index()
    return lines.assign(excluded=[name not in left for name in others])
