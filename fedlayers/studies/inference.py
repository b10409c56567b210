"""How certain a race is, by paired differences over seeds and over samples, and what it found in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedlayers.studies.arms import Arm
from fedlayers.studies.judge import EarlyStop
from fedlayers.studies.race import DIGITS
from fl_core.errors import listing
from fl_core.rows import (
    CLASSIFICATION,
    MAIN,
    SCORES,
    TABLE,
    in_column,
    in_points,
    label_of,
)

LEVEL = 0.95
SPREAD = 2.5
"""By what the pooled variance is multiplied, since that of some arms is several times that of others."""
COLUMNS = ["arm", "difference", "low", "high", "p_value", "excluded"]
DECIDED, UNDECIDED = "decided", "undecided"
NOTHING, ALL_DIVERGED = "nothing better than the base rate", "all diverged"
VERDICTS = {
    DECIDED: "every other arm is significantly worse than the leader",
    UNDECIDED: "some arms show no significant difference from the leader",
    NOTHING: "every arm has a higher loss than the base rate",
    ALL_DIVERGED: "every arm diverged with some seed",
}


@dataclass(frozen=True)
class Inference:
    """The evidence of a race on its leading arm.

    Attributes:
        verdict: one of :data:`VERDICTS`.
        remaining: the leader, then the arms that are not significantly worse than it.
        differences: a line for each other arm: leader - arm in the main score, its simultaneous 95 % interval,
            ``p_value`` (Tukey, over all pairs of arms) and ``excluded``.
        main: the score that is compared.
        seeds: number of seeds. With one, the differences hold for this run only.
        refused: the arms whose loss is above the base rate's.
        early: where the race was judged early, and the forecasts; None if all arms have a final score.
    """

    verdict: str
    remaining: tuple[str, ...]
    differences: pd.DataFrame
    main: str = MAIN[CLASSIFICATION]
    seeds: int = 1
    refused: tuple[str, ...] = ()
    early: EarlyStop | None = None

    @property
    def leader(self) -> str:
        """The arm with the best score."""
        return self.remaining[0] if self.remaining else ""

    def at_stake(self) -> float:
        """Return how much better another remaining arm may be than the leader, at most; NaN if unknown."""
        if self.verdict == DECIDED:
            return 0.0
        end = "low" if SCORES[self.main] else "high"
        left = self.differences[~self.differences["excluded"]]
        return float(left[end].abs().max()) if len(left) else math.nan


def rank_arms(judged: pd.DataFrame, main: str = MAIN[CLASSIFICATION]) -> list[str]:
    """Return the arms, the best first: by failed seeds, then mean score, then mean main score.

    Args:
        judged, main: as in :class:`~fedlayers.studies.race.Standing`.
    """
    grid = judged.pivot_table(
        index="arm", columns="seed", values=["score", main], dropna=False, sort=False
    )
    sign = -1 if SCORES[main] else 1
    order = pd.DataFrame(
        {
            "failed": grid["score"].isna().sum(axis=1),
            "score": -grid["score"].mean(axis=1).round(DIGITS),
            "main": sign * grid[main].mean(axis=1).round(DIGITS),
        }
    )
    ranked = order.sort_values(["failed", "score", "main"], kind="stable").index
    return [str(name) for name in ranked]


def infer(
    judged: pd.DataFrame,
    within: pd.DataFrame | None = None,
    refused: Sequence[str] = (),
    main: str = MAIN[CLASSIFICATION],
    overlap: float = 1.0,
) -> Inference:
    """Judge how certain the leading arm is, by the main score on validation samples.

    The variance of a difference has two parts. Between seeds it is that of the paired differences, at least
    :data:`SPREAD` times that pooled over all arms. Within a seed it is that of a bootstrap over samples, ``within``:
    a lower bound of the first part, and added once for the samples that seeds have in common. Intervals are Tukey's,
    which hold for all pairs of arms together. So at most 5 % of races exclude an arm that is no worse
    (``tests/fedlayers/test_certainty.py``). One seed has the second part alone, and its result holds for this run only.

    Args:
        judged, main: as in :class:`~fedlayers.studies.race.Standing`. Arms that failed with a seed are excluded.
        within: arms x arms, the covariance of their main scores over samples, mean over seeds. Without it one seed has
            no interval.
        refused: arms above the base rate. They cannot lead.
        overlap: the share of its validation samples that a seed has in common with another.

    >>> seeds, arms = range(4), {"a": 0.60, "b": 0.55, "c": 0.40}
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
    order = [name for name in rank_arms(judged, main) if name not in set(refused)]
    table = judged.pivot(index="arm", columns="seed", values=main)
    whole = [name for name in order if table.loc[name].notna().all()]
    about = {"main": main, "seeds": table.shape[1], "refused": tuple(refused)}
    if not whole:
        verdict = NOTHING if not order else ALL_DIVERGED
        left = tuple(name for name in order if table.loc[name].notna().any())
        lines = pd.DataFrame({"arm": order[1:], "excluded": True}).reindex(
            columns=COLUMNS
        )
        return Inference(verdict, left, lines, **about)
    differences = _differences(table.loc[whole], within, overlap)
    worse = differences["difference"] * (1 if SCORES[main] else -1) > 0
    worse &= differences["p_value"] <= 1 - LEVEL
    left = (whole[0], *differences.index[~worse])
    lines = differences.reindex(order[1:]).rename_axis("arm").reset_index()
    lines["excluded"] = ~lines["arm"].isin(left)
    verdict = DECIDED if len(left) == 1 and len(whole) > 1 else UNDECIDED
    return Inference(verdict, left, lines[COLUMNS], **about)


def _differences(
    table: pd.DataFrame, within: pd.DataFrame | None, overlap: float
) -> pd.DataFrame:
    """Return the first arm's score minus that of each other arm, with interval and p-value, by arm."""
    arms, seeds = table.shape
    values = table.to_numpy(float)
    residuals = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0)
    residuals += values.mean()
    free = (arms - 1) * (seeds - 1) if seeds > 1 else np.inf
    pooled = 2 * float((residuals**2).sum()) / free if arms > 1 else 0.0
    wide = _tukey(arms, free)
    leader, found = table.index[0], {}
    from scipy.stats import studentized_range

    for name in table.index[1:]:
        paired = table.loc[leader] - table.loc[name]
        variance = math.nan if seeds == 1 else 0.0
        if within is not None and {leader, name} <= set(within.index):
            variance = within.loc[leader, leader] + within.loc[name, name]
            variance = max(0.0, variance - 2 * within.loc[leader, name])
        if seeds > 1:
            between = max(float(paired.var()), SPREAD * pooled, variance) / seeds
            variance = between + overlap * variance
        mean, error = float(paired.mean()), math.sqrt(variance)
        ratio = abs(mean) / error if error else math.inf if mean else 0.0
        p_value = studentized_range.sf(ratio * 2**0.5, arms, free)
        found[name] = (mean, mean - wide * error, mean + wide * error, p_value)
    return pd.DataFrame.from_dict(found, orient="index", columns=COLUMNS[1:-1])


@cache
def _tukey(arms: int, free: float) -> float:
    """Return Tukey's quantile of a difference in standard errors."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(LEVEL, max(2, arms), free)) / 2**0.5


# --- in words --------------------------------------------------------------------------------------------------

NAMES = {"nothing": "sharing nothing", "all": "sharing every layer"}
"""The two extremes in words."""
NOTHING_BETTER = "Nothing here is better than the base rate."


class Answers(NamedTuple):
    """The outcome of a race or a study in words.

    Attributes:
        head: what to use, in a sentence.
        lines: its evidence.
        useless: whether the base rate is better.
        gains: a line for each opponent on test samples. ``about`` describes them.
    """

    head: str
    lines: tuple[str, ...]
    useless: bool = False
    gains: tuple[str, ...] = ()
    about: str = ""

    def text(self) -> str:
        """Return all lines for a terminal."""
        gains = (
            [self.about, *(f"  {gain}" for gain in self.gains)] if self.gains else []
        )
        return "\n".join([self.head, *(f"- {line}" for line in self.lines), *gains])


def answers(
    race: Inference, arms: Sequence[Arm], cheapest: str = "", notes: Sequence[str] = ()
) -> Answers:
    """Say what a race found.

    Args:
        arms: all that raced.
        cheapest: of the remaining arms, the one that sends least.
        notes: further lines, such as scores on test samples.
    """
    refused = []
    if race.refused:
        names = listing(race.refused)
        refused = [f"Refused, with a higher loss than the base rate: {names}."]
    if race.verdict == NOTHING:
        return Answers(NOTHING_BETTER, (*refused, *notes), useless=True)
    if race.verdict == ALL_DIVERGED:
        return Answers("Every arm diverged with some seed.", tuple(notes))
    lines = [*notes, *refused, *_compare_leader(race, arms)]
    if race.early is not None:
        lines.append(race.early.line(race.main))
    return Answers(_head(race, arms, cheapest), tuple(lines))


def _head(race: Inference, arms: Sequence[Arm], cheapest: str) -> str:
    by_name = {arm.name: arm for arm in arms}
    leader = by_name[race.leader]
    only = ", in this run only" if race.seeds == 1 else ""
    others = [name for name in race.remaining if name != leader.name]
    undecided = [name for name in others if by_name[name].extreme]
    do = f"{leader.words[0].upper()}{leader.words[1:]}"
    if race.early is not None and not others:
        return f"{do}: the judge kept it, in this run only."
    if not others:
        rest = by_name.keys() - {leader.name, *race.refused}
        words = ["significantly worse"] if rest else []
        words += ["refused"] if race.refused else []
        return f"{do}: every other arm is {' or '.join(words)}{only}."
    if not leader.extreme and not undecided:
        return f"{do}: better than both extremes{only}. {listing(others)}: no significant difference."
    cheap = (
        f", the cheapest is {cheapest}"
        if cheapest != leader.name
        else ", which is also the cheapest"
    )
    stake = race.at_stake()
    lost = (
        ""
        if math.isnan(stake)
        else f" The leader may lose up to {in_points(race.main, stake)} of {label_of(race.main)}{only}."
    )
    return (
        f"Undecided between {listing(race.remaining)}; the leader is {leader.name}"
        f"{cheap}.{lost}"
    )


def _compare_leader(race: Inference, arms: Sequence[Arm]) -> list[str]:
    """Compare the leader with each other arm in one line."""
    names = {arm.name: NAMES.get(arm.extreme, arm.name) for arm in arms}
    parts = []
    for line in race.differences.itertuples():
        name, value = names[str(line.arm)], float(line.difference)
        if math.isnan(value):
            continue
        side = "above" if value >= 0 else "below"
        found = f"{in_points(race.main, abs(value))} {side} {name}"
        if not math.isnan(line.low):
            ends = (in_column(race.main, end) for end in (line.low, line.high))
            found += f" [{', '.join(ends)}]"
        parts.append(found)
    if not parts:
        return []
    basis = (
        "this run only, intervals over validation samples"
        if race.seeds == 1
        else "95 % intervals over seeds and validation samples"
    )
    lead, label = names[race.leader], label_of(race.main)
    return [f"On validation samples {lead} has {label} {'; '.join(parts)} ({basis})."]


def compared(
    scores: Mapping[str, Mapping[str, float]],
    main: str,
    better: str,
    fixed: str,
    left_out: Mapping[str, Sequence[str]],
) -> list[str]:
    """Compare the recommended model on test samples with the base rate and the best baseline.

    Args:
        scores: of the model (first) and the other predictors by name.
        better: the baseline that is significantly better than the model; empty without one.
        fixed: the name of the base rate.
        left_out: by score, the clients whose samples give none.
    """
    name, own = next(iter(scores.items()))
    lines = []
    if better:
        lines.append(
            f"{better} is better on test samples: loss {scores[better]['loss']:.3f}, the model's {own['loss']:.3f}."
        )
    shown = [
        score
        for score in dict.fromkeys((main, "auroc"))
        if score != "loss" and not math.isnan(own.get(score, math.nan))
    ]
    parts = [
        f"{label_of(score)} {in_column(score, own[score])}{' %' * TABLE[score].share}"
        for score in shown
    ]
    parts.append(f"loss {own['loss']:.3f}, the base rate's {scores[fixed]['loss']:.3f}")
    lines.append(f"On test samples {name} has {', '.join(parts)}: means over clients.")
    for score in shown:
        if left_out[score]:
            who, why = listing(left_out[score]), TABLE[score].missing
            lines.append(f"{label_of(score)} leaves out {who}: {why}.")
    return lines
