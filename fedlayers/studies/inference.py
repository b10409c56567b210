"""How certain a race's leader is: which arms are significantly worse, and which are not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd

from fedlayers.studies.above_chance import UNKNOWN, AboveChance, best_of
from fl_core import statistics
from fl_core.scores import CLASSIFICATION, MAIN, REGRESSION, label_of, main_score

LEVEL = 0.95
DIGITS = 9
"""Of scores that are compared: what differs in later ones is rounding."""
DECIDED, LEVEL_ARMS, DISAGREE = "decided", "no significant difference", "score and loss disagree"
NOTHING_LEARNED, ALL_DIVERGED, ONE_RACE = "nothing learned", "all diverged", "one race"
VERDICTS = {
    DECIDED: "every arm but the leader is significantly worse than another",
    LEVEL_ARMS: "several arms are left, without a significant difference between them",
    DISAGREE: "another arm is significantly higher, and the leader leads by its loss",
    NOTHING_LEARNED: "no arm is shown to do better than guessing, so that no difference says which layers to share",
    ALL_DIVERGED: "every arm diverged with some seed",
    ONE_RACE: "one seed, which supports no statement of uncertainty",
}


@dataclass(frozen=True)
class Inference:
    """What repeated races say about the leading arm.

    Attributes:
        verdict: one of :data:`VERDICTS`.
        left: the leader, then the arms that are not significantly worse than any other.
        differences: a line for each other arm: leader - arm in the main score, its simultaneous 95 % interval,
            ``p_value`` (Holm, over all pairs of arms) and ``excluded``.
        pairs: the same numbers of all pairs of compared arms, by index (arm, other); empty with one seed.
        skill: the best arm's balanced accuracy above guessing; of a regression its R2.
        main: the score that all this is about.
        tie: how a tie for the first place was broken, in a sentence.
    """

    verdict: str
    remaining: tuple[str, ...]
    differences: pd.DataFrame
    pairs: pd.DataFrame
    above_chance: AboveChance = UNKNOWN
    main: str = MAIN[CLASSIFICATION]
    tie: str = ""

    @property
    def usable(self) -> tuple[str, ...]:
        """The arms of which the one that sends least is used; only the leader where nothing is compared."""
        return self.remaining if self.verdict in (LEVEL_ARMS, NOTHING_LEARNED) else self.remaining[:1]

    def at_stake(self, used: str) -> float:
        """Return how far another arm of ``left`` may lie above the used one at most; NaN where that is not known."""
        if self.verdict == DECIDED:
            return 0.0
        if self.verdict not in (LEVEL_ARMS, DISAGREE):
            return math.nan
        return max(float(self.pairs["high"][arm, used]) for arm in self.remaining if arm != used)


def ranked(judged: pd.DataFrame) -> list[str]:
    """The arms, the best first: by how many seeds they failed with, then by their mean score over the others.

    Equal scores, as of two arms of which one has the higher macro-F1 and one the lower loss, are told apart by macro-F1
    (of a regression R2).

    Args:
        judged: as :class:`~fedlayers.studies.race.Standing` has it.
    """
    return [str(name) for name in _order(judged).index]


def _order(judged: pd.DataFrame) -> pd.DataFrame:
    """A line for each arm, the best first: ``failed`` seeds, and mean ``score`` and ``main`` score, both negative."""
    main = main_score(judged.columns)
    grid = judged.pivot(index="arm", columns="seed", values=["score", main]).loc[judged["arm"].unique()]
    means = {"score": -grid["score"].mean(axis=1).round(DIGITS), "main": -grid[main].mean(axis=1).round(DIGITS)}
    order = pd.DataFrame({"failed": grid["score"].isna().sum(axis=1), **means})
    return order.sort_values(["failed", "score", "main"], kind="stable")


def _tie(judged: pd.DataFrame) -> str:
    """That the leader and another arm, trained with every seed, have one score and two macro-F1; empty if not so."""
    order, word = _order(judged), label_of(main_score(judged.columns))
    level = order[(order["failed"] == 0) & (order["score"] == order["score"].iloc[0])]
    if order["failed"].iloc[0] or level["main"].nunique() < 2:
        return ""
    return f"The first place was a tie of {word} against loss, broken by {word}."


def leader_of(judged: pd.DataFrame) -> str:
    """The first of :func:`ranked`: an arm that failed with any seed leads only if all did."""
    return ranked(judged)[0]


def infer(judged: pd.DataFrame) -> Inference:
    """Judge how certain the leading arm is, by the main score on validation samples, paired by seed.

    Each pair of arms is compared by a paired t test with the spread of its own differences. Holm's correction covers
    all pairs, so that picking the leader is allowed for: in at most 5 % of races is any arm excluded that is no worse.
    That holds for normal and heavy-tailed scores of any covariance. It was exceeded, at 7 %, by strongly skewed scores
    of unequal spread. No number is pooled over arms, so an arm that collapsed changes nothing for the others.

    Nothing is excluded where no arm is shown to do better than guessing (:mod:`fedlayers.studies.above_chance`). A
    difference in macro-F1 is then one of how arms guess. A regression is judged nevertheless, for a higher R2 is a
    smaller error also below 0.

    Args:
        judged: as :class:`~fedlayers.studies.race.Standing` has it; arms that failed with a seed are excluded, unless
            all did.

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


def _certainty(judged: pd.DataFrame, main: str) -> Inference:
    order = ranked(judged)
    leader = order[0]
    table = judged.pivot(index="arm", columns="seed", values=main).loc[order]
    whole = table.dropna()
    names = [str(name) for name in whole.index]
    learned = best_of(judged, main if main == MAIN[REGRESSION] else "skill")
    if not names:  # and so is nothing paired by seed
        left = [name for name in order if table.loc[name].notna().any()]
        return Inference(ALL_DIVERGED, tuple(left), _lines(leader, order, left), _pairs([], None), learned)
    if table.shape[1] < 2:
        lines = _lines(leader, order, names)
        lines["difference"] = table.loc[leader].mean() - table.loc[lines["arm"]].mean(axis=1).to_numpy()
        return Inference(ONE_RACE, tuple(names), lines, _pairs([], None), learned)
    pairs = _pairs(names, statistics.pairwise(whole.to_numpy(float), LEVEL))
    shown = pairs[(pairs["p_value"] <= 1 - LEVEL) & (pairs["difference"] < 0)]
    worse = {arm for arm, _ in shown.index}
    verdict, left = LEVEL_ARMS, [name for name in names if name == leader or name not in worse]
    if learned.shown is False and main != MAIN[REGRESSION]:
        verdict, left = NOTHING_LEARNED, names
    elif leader in worse:
        verdict = DISAGREE
    elif len(left) == 1:
        verdict = DECIDED
    return Inference(verdict, tuple(left), _lines(leader, order, left, pairs), pairs, learned)


def _pairs(names: list[str], found: statistics.Pairs | None) -> pd.DataFrame:
    """The numbers of all pairs of arms, by arm and other."""
    index = pd.MultiIndex.from_tuples([(a, b) for a in names for b in names if a != b], names=["arm", "other"])
    places = [(i, j) for i in range(len(names)) for j in range(len(names)) if i != j]
    columns = statistics.Pairs._fields
    values = {} if found is None else {name: [getattr(found, name)[place] for place in places] for name in columns}
    return pd.DataFrame(values, index=index, columns=list(columns), dtype=float)


def _lines(leader: str, order: list[str], left: list[str], pairs: pd.DataFrame | None = None) -> pd.DataFrame:
    """A line for each arm but the leader: its numbers against the leader, where there are any, and ``excluded``."""
    others = [name for name in order if name != leader]
    lines = pd.DataFrame({"arm": others}, columns=["arm", *statistics.Pairs._fields], dtype=object)
    if pairs is not None and len(pairs):
        lines = pairs.loc[leader].reindex(others).rename_axis("arm").reset_index()
    numbers = {name: lines[name].astype(float) for name in statistics.Pairs._fields}
    return lines.assign(**numbers, excluded=[name not in left for name in others])
