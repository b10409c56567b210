"""The result of a race: how certain it is, what it found in words, the recommended model, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedlayers.studies.arms import Arm
from fedlayers.studies.comparison import gains_of
from fedlayers.studies.hint import NO_COST, Cost
from fedlayers.studies.jobs import TrainingJob
from fedlayers.studies.race import DIGITS, EarlyStop, Rates, Standing
from fl_core import __version__
from fl_core.display import Displayed, Summary
from fl_core.errors import RunError, UsageError, listing, plural
from fl_core.plan import LayerPlan
from fl_core.rows import (
    CLASSIFICATION,
    MAIN,
    MULTILABEL,
    SCORES,
    column_of,
    in_column,
    in_points,
    label_of,
    records,
)
from fl_core.run.task import Task

LEVEL = 0.95
SPREAD = 2.5
"""By what the pooled variance is multiplied, since that of some arms is several times that of others."""
COLUMNS = ["arm", "difference", "low", "high", "p_value", "excluded"]
DECIDED, UNDECIDED = "decided", "undecided"
NOTHING = "nothing better than the base rate"
VERDICTS = {
    DECIDED: "every other arm is significantly worse than the leader",
    UNDECIDED: "some arms show no significant difference from the leader",
    NOTHING: "every arm has a higher loss than the base rate",
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

    Raises:
        RunError: every arm that is not refused failed with some seed.

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
    if not order:
        return Inference(NOTHING, (), pd.DataFrame(columns=COLUMNS), **about)
    if not whole:
        raise RunError("every arm diverged with some seed. Lower --lr.")
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
    """

    head: str
    lines: tuple[str, ...]
    useless: bool = False

    def text(self) -> str:
        """Return all lines for a terminal."""
        return "\n".join([self.head, *(f"- {line}" for line in self.lines)])


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


def bracket(score: str, low: float, high: float) -> str:
    """Return an interval in brackets; empty if it is unknown. Equal ends are no interval: no spread was seen.

    >>> bracket("macro_f1", 0.011, 0.029), bracket("macro_f1", 0.0, 0.0)
    (' [1.1, 2.9]', ', no spread seen')
    """
    if low == high:
        return ", no spread seen"
    ends = f" [{in_column(score, low)}, {in_column(score, high)}]"
    return "" if math.isnan(low) else ends


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
        parts.append(f"{found}{bracket(race.main, line.low, line.high)}")
    if not parts:
        return []
    basis = (
        "this run only, intervals over validation samples"
        if race.seeds == 1
        else "95 % intervals over seeds and validation samples"
    )
    lead, label = names[race.leader], label_of(race.main)
    return [f"On validation samples {lead} has {label} {'; '.join(parts)} ({basis})."]


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Choice(Displayed):
    """The result of a race.

    Attributes:
        winner: the arm to use; None if nothing is better than the base rate.
        arms: all that raced.
        standing: the scores at the end of the race.
        inference: how certain the decision is.
        run: the directory of the recommended model: the arm's best finished run on validation samples.
        of_seed: the run that each seed's validation samples alone choose. Only this run may be scored on the seed's
            test samples, which other seeds use for validation.
        until: the round after which the race was judged.
        task: of the first seed.
        cost: the estimate. ``measured`` is the cost of the runs, with the seconds of this call.
        rates: the learning rates that were tried, where they were tuned.
        trials: a line per finished run and per predictor that needs none: ``name``, ``lr``, ``seed``, its main score
            and ``loss`` on validation, the loss ``above`` the base rate's with its interval, and ``refused``.
        clients: a line per client on test samples: the recommended model's scores, and its loss, that of training alone
            and of the base rate (:meth:`~fedlayers.studies.harmless.Bench.of_clients`).
        positives: for two classes the recommended model's probabilities of the positive one on test samples
            (:meth:`~fedlayers.studies.harmless.Bench.positives`).
        answers: what to use, and the evidence.
        recommended: the recommended arm's run in each seed.
    """

    winner: Arm | None
    arms: tuple[Arm, ...]
    standing: Standing
    inference: Inference
    run: Path | None
    of_seed: dict[int, TrainingJob]
    until: int
    task: Task
    answers: Answers
    cost: Cost = NO_COST
    measured: Cost = NO_COST
    rates: Rates | None = None
    trials: pd.DataFrame = field(default_factory=pd.DataFrame)
    clients: pd.DataFrame = field(default_factory=pd.DataFrame)
    positives: pd.DataFrame = field(default_factory=pd.DataFrame)
    recommended: dict[int, TrainingJob] = field(default_factory=dict)

    @property
    def plan(self) -> LayerPlan | None:
        """The layer plan of the recommended arm."""
        return None if self.winner is None else self.winner.plan

    @property
    def main(self) -> str:
        """The score that arms are compared by."""
        return self.inference.main

    @property
    def table(self) -> pd.DataFrame:
        """A table with a row per arm, the leader first: its mean scores over the seeds that did not fail."""
        judged = self.standing.judged
        columns = list(dict.fromkeys((self.main, "loss", "score")))
        means = judged.groupby("arm", sort=False)[columns].mean()
        return means.sort_values("score", ascending=False, kind="stable").reset_index()

    def gains(self) -> pd.DataFrame:
        """Return what sharing up to a layer gains on validation over sharing nothing (layer, value, low, high)."""
        scores = self.standing.judged.pivot(
            index="seed", columns="arm", values=self.main
        )
        base, last = "", {}
        for arm in self.arms:
            if arm.name not in scores or arm.plan is None:
                continue
            names = arm.plan.trainable
            shared = [name for name in names if name in arm.plan.shared]
            if not shared:
                base = arm.name
            elif shared == list(names[: len(shared)]):
                last[arm.name] = shared[-1]
        if not base:
            raise UsageError(
                "the race must have the arm nothing to show gains; got none. Add it."
            )
        return gains_of(scores, base, last, 1 if SCORES[self.main] else -1)

    def lead(self) -> str:
        """Return what to use, and its evidence, one per line."""
        return self.answers.text()

    def summary(self) -> Summary:
        """Return the decision, the scores of the arms, and the plan."""
        layers = None if self.plan is None else self.plan.by_layer()
        return Summary.of_frame(self.lead(), self.table, layers)

    def text(self) -> str:
        """Return the decision, its evidence, and the table of all runs and predictors."""
        table = self.shown().drop(columns=["above base", "low", "high"])
        parts = [self.lead(), table.to_string(index=False)]
        parts += [*self.standing.notes, self.legend]
        if len(losing := self.losing):
            parts.append(f"Clients that lose by sharing, on test samples: {losing}.")
        if self.rates is not None:
            parts.append(self.rates.text())
        return "\n\n".join([*parts, self.promise, self.cost_line])

    @property
    def promise(self) -> str:
        """What the scores are of, and whether there is a plan."""
        if self.winner is None:
            return (
                "The scores are of the arms' runs. None of them is recommended, so there is no plan.json and no "
                "recommended model."
            )
        told = "The test scores are of the recommended model."
        if self.plan is None:
            return f"{told} {self.winner.algorithm} uses no plan, so there is no plan.json."
        return f"{told} A new run with plan.json may score less."

    @property
    def cost_line(self) -> str:
        """The estimated and the measured cost."""
        return f"{self.cost.compare_line(self.measured)}."

    def shown(self) -> pd.DataFrame:
        """Return the table of all finished runs, stopped arms, the base rate and the baselines as text."""
        forms = dict.fromkeys(("loss", "above", "low", "high"), "{:.3f}".format)
        forms |= {"lr": "{:g}".format, "seed": "{:.0f}".format}
        if self.main != "loss":
            forms[self.main] = partial(in_column, self.main)
        table = self.trials.drop(columns="refused")
        table.loc[table["low"] == table["high"], ["low", "high"]] = math.nan
        for name, form in forms.items():
            table[name] = table[name].map(form).where(table[name].notna(), "")
        titles = {"name": "arm", "lr": "rate", "above": "above base"}
        return table.rename(columns={**titles, self.main: column_of(self.main)})

    @property
    def legend(self) -> str:
        """The meaning of the table."""
        seeds = plural(self.standing.judged["seed"].nunique(), "seed")
        best = "its best round" if self.standing.best else f"round {self.until}"
        by, how = self.task.config.federation.monitor or "loss", ""
        if self.task.data.task in (CLASSIFICATION, MULTILABEL):
            how = (
                "The loss is calibrated by a temperature and a weight of the base rate, fitted on the other half of "
                "the samples. "
            )
        return (
            f"Validation samples, {seeds}, each run at {best}. Ranked by {label_of(by)}. {how}"
            "The base rate ignores the features."
        )

    @property
    def losing(self) -> str:
        """The clients whose test loss is significantly higher than when they train alone."""
        if self.clients.empty or "loses" not in self.clients:
            return ""
        return ", ".join(self.clients.loc[self.clients["loses"], "client"])

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a dictionary for JSON, as in ``choice.json``."""
        seen, stake = self.inference, self.inference.at_stake()
        winner = self.winner
        return {
            "winner": winner and winner.name,
            "algorithm": winner and winner.algorithm,
            "shared": self.plan and list(self.plan.shared),
            "run": self.run and f"arms/{self.run.name}",
            "verdict": seen.verdict,
            "left": list(seen.remaining),
            "refused": list(seen.refused),
            "answers": [self.answers.head, *self.answers.lines],
            "at_stake": None if pd.isna(stake) else stake,
            "trials": records(self.trials),
            "clients": records(self.clients),
            "judged": records(self.standing.judged),
            "notes": self.standing.notes,
            "until": self.until,
            **({} if seen.early is None else {"early": asdict(seen.early)}),
            "rates": self.rates and self.rates.tried,
            "best_rounds": self.standing.best,
            "foreseen": asdict(self.cost),
            "measured": asdict(self.measured),
            "version": __version__,
        }
