"""How certain a race's leader is: which arms are excluded, which remain, and whether that matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import pandas as pd
from scipy import stats

from fedlayers.studies.arms import DEFAULT
from fedlayers.studies.skill import UNKNOWN, Skill, best_r2, skill
from fl_core.scores import CLASSIFICATION, MAIN, REGRESSION, in_column, in_points, label_of, main_score

MARGIN = 0.01
"""Differences of macro-F1 within this are said not to matter: one point."""
LEVEL = 0.95
DIGITS = 9
"""Of scores that are compared: what differs in later ones is rounding."""


class OneRace(NamedTuple):
    """What one race of the default arms, to the end, loses on average against the best cut: macro-F1, 0 to 1, measured.

    Attributes:
        loss, low, high: the mean over federations and its 95 % interval.
        of_random: what a cut drawn at random loses.
        source: where it was measured.
    """

    loss: float
    low: float
    high: float
    of_random: float
    source: str

    def text(self) -> str:
        """The loss in a sentence."""
        low, high = (f"{100 * end:.1f}" for end in (self.low, self.high))
        return (
            f"One race has lost {100 * self.loss:.1f} points of macro-F1 on average [{low}, {high}], where a cut at "
            f"random has lost {100 * self.of_random:.1f} ({self.source})."
        )


ONE_RACE: OneRace | None = OneRace(0.0010, -0.0023, 0.0059, 0.0406, "36 federations, 144 runs")
"""The measured loss of one race, from ``decision.regret`` of the repository's figures; None = not measured."""


def one_race(arms: Sequence[str], whole: bool = True) -> str:
    """What one race of these arms loses on average, in a sentence; empty where that has not been measured.

    Args:
        whole: the arms were trained to the end before they were judged.
    """
    return ONE_RACE.text() if ONE_RACE is not None and tuple(arms) == DEFAULT and whole else ""


@dataclass(frozen=True)
class Certainty:
    """What repeated races say about the leading arm.

    Attributes:
        verdict: ``decided`` (every other arm is excluded), ``no matter`` (those left are within the margin of each
            other), ``not decided``, ``nothing learned`` (no candidate is shown to do better than guessing, so that
            no difference says which layers to share), ``all diverged`` (every candidate did with some seed), or
            ``one race`` (nothing can be said without repetition).
        left: arms that are not excluded, the leader first.
        differences: a line for each other arm: leader - arm in macro-F1 (0 to 1), its simultaneous 95 % interval
            (Tukey's, over all pairs of arms, so that picking the best of them is allowed for), and ``excluded``.
        at_stake: what following the leader may lose against an arm that is left, at most; NaN where that is not known.
        more_seeds: about how many further races would decide, from the deviation seen; None where nothing is to decide,
            they are more than 999, or no number of them would: an arm that is left is above the leader by the margin.
    """

    verdict: str
    left: tuple[str, ...]
    differences: pd.DataFrame
    at_stake: float
    more_seeds: int | None
    skill: Skill = UNKNOWN
    """Balanced accuracy above guessing; of a regression the best candidate's R2."""
    main: str = MAIN[CLASSIFICATION]
    """The score that all this is about."""
    tie: str = ""
    """That the leader's score was another arm's too, and what has decided between them, in a sentence."""

    def guessed(self) -> str:
        """That no candidate is shown to have learned anything, in a sentence."""
        value, low = (f"{100 * number:+.1f}" for number in self.skill)
        return (
            f"Not decided: no candidate is shown to do better than guessing on validation samples (balanced accuracy "
            f"{value} points above it, at least {low} with 95 % confidence)."
        )

    def none_above_mean(self) -> str:
        """That no candidate of a regression is shown to do better than the mean, in a sentence; else empty."""
        value, low = self.skill
        if self.main != MAIN[REGRESSION] or math.isnan(value) or self.skill.shown or (math.isnan(low) and value > 0):
            return ""
        least = "" if math.isnan(low) else f", at least {in_column(self.main, low)} with 95 % confidence"
        return (
            "No candidate is shown to do better than predicting the mean on validation samples (the best has R2 "
            f"{in_column(self.main, value)}{least})."
        )

    def diverged(self) -> str:
        """That no candidate was trained with every seed, in a sentence."""
        return "Not decided: every candidate diverged with some seed."

    def stake(self, who: str) -> str:
        """What following the leader may lose, how many seeds would decide, and which arms are above it, in sentences.

        Args:
            who: what the first sentence begins with, such as ``The leader``.
        """
        left = self.differences[self.differences["arm"].isin(self.left)]
        word = label_of(self.main)
        if self.more_seeds is not None:
            more = f"about {self.more_seeds} more seeds would decide"
        elif (left["difference"] <= -MARGIN).any():
            more = f"no number of seeds would decide, for it has not the highest {word}"
        else:
            more = "more than 999 further seeds would decide"
        parts = [f"{who} may lose up to {in_points(self.main, self.at_stake)} of {word}; {more}."]
        for line in left[left["high"] < 0].itertuples():
            low, high = (in_column(self.main, -end) for end in (line.high, line.low))
            by = f"{in_points(self.main, -line.difference)} [{low}, {high}]"
            parts.append(f"{line.arm} has a higher {word} than the leader, by {by}; the leader leads by its loss.")
        return " ".join(parts)


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


def certainty(judged: pd.DataFrame, margin: float = MARGIN) -> Certainty:
    """How certain the leading arm is, by macro-F1 (of a regression R2) on validation samples, paired by seed.

    With F[a, s] of arm a and seed s, the residuals r = F - arm's mean - seed's mean + mean of all have the pooled
    variance s^2 = sum r^2 / ((A - 1)(S - 1)), and a difference of two arms' means the standard error s sqrt(2 / S).
    An arm is excluded where the leader is above it by more than the studentized range's q sqrt(1 / 2) standard errors.
    Those left do not matter where two one-sided t tests place each pair within the margin. None of this is asked where
    the arms together are not shown to do better than guessing (:mod:`fedlayers.studies.skill`): a difference in
    macro-F1 is then one of how they guess. Of a regression it is asked nevertheless, for a higher R2 is a smaller error
    also below 0; what is not shown is said beside it (:meth:`Certainty.none_above_mean`).

    Args:
        judged: as :class:`~fedlayers.studies.race.Standing` has it; arms that failed with a seed are excluded, unless
            all did.
        margin: of macro-F1, 0 to 1.

    >>> seeds, arms = range(4), {"a": 0.60, "b": 0.59, "c": 0.40}
    >>> noise = [[0.004, -0.001, 0.002, -0.003], [-0.002, 0.003, 0.001, 0.0], [0.0, 0.001, -0.004, 0.002]]
    >>> lines = [
    ...     {"arm": arm, "seed": seed, "macro_f1": mean + noise[k][seed], "score": mean}
    ...     for k, (arm, mean) in enumerate(arms.items())
    ...     for seed in seeds
    ... ]
    >>> seen = certainty(pd.DataFrame(lines))
    >>> seen.verdict, seen.left
    ('decided', ('a',))
    """
    main = main_score(judged.columns)
    sure = replace(_certainty(judged, margin), main=main, tie=_tie(judged))
    return replace(sure, skill=best_r2(judged)) if main == MAIN[REGRESSION] else sure


def _certainty(judged: pd.DataFrame, margin: float) -> Certainty:
    order = ranked(judged)
    leader = order[0]
    table = judged.pivot(index="arm", columns="seed", values=main_score(judged.columns)).loc[judged["arm"].unique()]
    columns = ["arm", "difference", "low", "high", "excluded"]
    if table.isna().any(axis=1).all():  # and so is nothing paired by seed
        left = [name for name in order if table.loc[name].notna().any()]
        lines = [[name, math.nan, math.nan, math.nan, name not in left] for name in order[1:]]
        return Certainty("all diverged", tuple(left), pd.DataFrame(lines, columns=columns), math.nan, None)
    failed = [str(name) for name in table.index[table.isna().any(axis=1)] if name != leader]
    values = table.drop(index=failed)
    others = [str(name) for name in values.index if name != leader]
    n_arms, n_seeds = values.shape
    if n_seeds < 2:
        lines = [
            [name, values.loc[leader].mean() - values.loc[name].mean(), math.nan, math.nan, False] for name in others
        ]
        lines += [[name, math.nan, math.nan, math.nan, True] for name in failed]
        return Certainty("one race", (leader, *others), pd.DataFrame(lines, columns=columns), math.nan, None)
    if not others:
        lines = [[name, math.nan, math.nan, math.nan, True] for name in failed]
        return Certainty("decided", (leader,), pd.DataFrame(lines, columns=columns), 0.0, None)
    grid = values.to_numpy(float)
    residuals = grid - grid.mean(axis=1, keepdims=True) - grid.mean(axis=0, keepdims=True) + grid.mean()
    freedom = (n_arms - 1) * (n_seeds - 1)
    deviation = math.sqrt(float((residuals**2).sum()) / freedom)
    error = deviation * math.sqrt(2 / n_seeds)
    reach = _reach(n_arms, freedom)
    means = values.mean(axis=1)
    lines, left = [], [leader]
    for name in others:
        difference = float(means[leader] - means[name])
        excluded = difference > reach * error
        lines.append([name, difference, difference - reach * error, difference + reach * error, excluded])
        left += [] if excluded else [name]
    lines += [[name, math.nan, math.nan, math.nan, True] for name in failed]
    differences = pd.DataFrame(lines, columns=columns)
    learned = skill(judged)
    if learned.shown is False:
        differences["excluded"] = differences["arm"].isin(failed)
        return Certainty("nothing learned", (leader, *others), differences, math.nan, None, learned)
    if len(left) == 1:
        return Certainty("decided", (leader,), differences, 0.0, None, learned)
    one_sided = float(stats.t.ppf(LEVEL, freedom)) * error
    spread = float(means[left].max() - means[left].min())
    at_stake = float(-differences.loc[~differences["excluded"].astype(bool), "low"].min())
    if spread + one_sided <= margin:
        return Certainty("no matter", tuple(left), differences, at_stake, None, learned)
    more = _more(means, left, deviation, reach, n_seeds, margin)
    return Certainty("not decided", tuple(left), differences, at_stake, more, learned)


@cache
def _reach(n_arms: int, freedom: int) -> float:
    """Standard errors of a difference that all pairs of arms stay within, at the level."""
    return float(stats.studentized_range.ppf(LEVEL, n_arms, freedom)) / math.sqrt(2)


def _more(means: pd.Series, left: list[str], deviation: float, reach: float, n_seeds: int, margin: float) -> int | None:
    """How many further seeds would exclude each remaining arm or put it within the margin; None above 999, or never."""
    needed = 0.0
    for name in left[1:]:
        gap = float(means[left[0]] - means[name])
        resolvable = max(gap / reach, (margin - abs(gap)) / float(stats.norm.ppf(LEVEL)))
        if resolvable <= 0:
            return None
        needed = max(needed, 2 * (deviation / resolvable) ** 2)
    more = math.ceil(needed) - n_seeds
    return max(1, more) if more <= 999 else None
