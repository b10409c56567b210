"""How certain a race is: paired differences between its arms, over seeds and over samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedlayers.studies.early_stop import EarlyStop
from fedlayers.studies.race import DIGITS
from fl_core.race_evidence import ArmEvidence, RaceEvidence
from fl_core.scores import CLASSIFICATION, MAIN, SCORES

LEVEL = 0.95
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
            ``p_value`` (Holm, over all pairs of arms) and ``excluded``.
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
) -> Inference:
    """Judge how certain the leading arm is, by the main score on validation samples.

    The variance of a difference has two parts. Between seeds it is that of the paired differences, by Student's t.
    Within a seed it is that of a bootstrap over samples, ``within``. One seed has the second part alone, and its result
    holds for this run only. Holm's correction covers all pairs, so at most 5 % of races exclude an arm that is no
    worse.

    Args:
        judged, main: as in :class:`~fedlayers.studies.race.Standing`. Arms that failed with a seed are excluded.
        within: arms x arms, the covariance of their main scores over samples, mean over seeds. Without it one seed has
            no interval.
        refused: arms above the base rate. They cannot lead.

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
    seeds = judged["seed"].nunique()
    order = [name for name in rank_arms(judged, main) if name not in set(refused)]
    table = judged.pivot(index="arm", columns="seed", values=main)
    whole = [name for name in order if table.loc[name].notna().all()]
    about = {"main": main, "seeds": seeds, "refused": tuple(refused)}
    if not whole:
        verdict = NOTHING if not order else ALL_DIVERGED
        left = tuple(name for name in order if table.loc[name].notna().any())
        return Inference(verdict, left, _lines(order, {}, left), **about)
    pairs = _pairs(table.loc[whole], within)
    leader, sign = whole[0], 1 if SCORES[main] else -1
    left = tuple(
        name
        for name in whole
        if name == leader
        or not (
            pairs[leader, name]["p_value"] <= 1 - LEVEL
            and sign * pairs[leader, name]["difference"] > 0
        )
    )
    verdict = DECIDED if len(left) == 1 and len(whole) > 1 else UNDECIDED
    numbers = {name: pairs[leader, name] for name in whole[1:]}
    return Inference(verdict, left, _lines(order, numbers, left), **about)


def _pairs(
    table: pd.DataFrame, within: pd.DataFrame | None
) -> dict[tuple[str, str], dict[str, float]]:
    """Return difference, interval and corrected p-value of all pairs of arms."""
    from scipy import stats

    names, seeds = list(table.index), table.shape[1]
    values = table.to_numpy(float)
    keys, means, errors = [], [], []
    for a, first in enumerate(names):
        for b in range(a + 1, len(names)):
            paired = values[a] - values[b]
            variance = float(paired.var(ddof=1)) / seeds if seeds > 1 else 0.0
            other = names[b]
            if within is not None and {first, other} <= set(within.index):
                part = within.loc[first, first] + within.loc[other, other]
                variance += max(0.0, part - 2 * within.loc[first, other]) / seeds
            elif seeds == 1:
                variance = math.nan
            keys.append((first, other))
            means.append(float(paired.mean()))
            errors.append(math.sqrt(variance))
    free = seeds - 1 if seeds > 1 else np.inf
    mean, error = np.array(means), np.array(errors)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(mean == 0, 0.0, np.abs(mean) / error)
    p = 2 * stats.t.sf(ratio, free)
    corrected, worst = np.ones(len(p)), 0.0
    for place, k in enumerate(np.argsort(p, kind="stable")):
        worst = max(worst, min(1.0, (len(p) - place) * p[k]))
        corrected[k] = worst if np.isfinite(p[k]) else np.nan
    half = stats.t.ppf(1 - (1 - LEVEL) / 2 / max(1, len(p)), free) * error
    found = {}
    for k, (a, b) in enumerate(keys):
        for pair, sign in (((a, b), 1), ((b, a), -1)):
            found[pair] = {
                "difference": sign * mean[k],
                "low": sign * mean[k] - half[k],
                "high": sign * mean[k] + half[k],
                "p_value": corrected[k],
            }
    return found


def _lines(
    order: Sequence[str], numbers: dict[str, dict[str, float]], left: Sequence[str]
) -> pd.DataFrame:
    """Return a line for each arm but the first: its numbers, if any, and ``excluded``."""
    columns = ["difference", "low", "high", "p_value"]
    nothing = dict.fromkeys(columns, math.nan)
    return pd.DataFrame(
        [
            {"arm": name, **numbers.get(name, nothing), "excluded": name not in left}
            for name in order[1:]
        ],
        columns=["arm", *columns, "excluded"],
    )


def evidence_of(
    judged: pd.DataFrame, found: Inference, used: str, until: int
) -> RaceEvidence:
    """Return the evidence of a race for a plan: every arm's mean scores, and its difference from the leader.

    Args:
        judged: as for :func:`infer`, whose result is ``found``.
        used: the arm whose plan it is.
        until: the round after which the race was judged.
    """
    means = judged.groupby("arm")[["loss", "score"]].mean()
    means["value"] = judged.groupby("arm")[found.main].mean()
    columns = ["difference", "low", "high", "p_value"]
    lines = means.join(found.differences.set_index("arm")[columns]).loc[
        rank_arms(judged, found.main)
    ]
    if found.early is not None:
        lines["forecast"] = judged.set_index("arm")["forecast"]
    lines = lines.astype(object).where(np.isfinite(lines.astype(float)), None)
    arms = tuple(
        ArmEvidence(name, **line) for name, line in lines.to_dict("index").items()
    )
    seeds = tuple(int(seed) for seed in judged["seed"].unique())
    return RaceEvidence(found.main, until, seeds, found.verdict, used, arms)
