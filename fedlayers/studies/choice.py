"""The result of a race: how certain it is, what it found in words, the recommended model, and what it cost."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedlayers.studies.arms import Arm
from fedlayers.studies.first_screen import (
    DECIDED,
    NOTHING,
    UNDECIDED,
    UNSHOWN,
    Facts,
    Inference,
    bracket,
    first_screen,
)
from fedlayers.studies.harmless import BASE_RATE, DIGITS, Bench, Predictor
from fedlayers.studies.hint import NO_COST, Cost, format_seconds
from fedlayers.studies.race import Rates, Standing, Trained
from fl_core import __version__, statistics
from fl_core.display import Displayed, Summary
from fl_core.errors import RunError, listing, plural
from fl_core.plan import LayerPlan
from fl_core.rows import (
    CLASSIFICATION,
    MAIN,
    MULTILABEL,
    SCORES,
    column_of,
    in_column,
    label_of,
    records,
)
from fl_core.run.task import Task
from fl_core.statistics import Estimate, Interval
from fl_core.storage import format_bytes

COLUMNS = ["arm", "difference", "low", "high", "p_value", "excluded"]
Pair = tuple[str, str]


def infer(
    judged: pd.DataFrame,
    sampled: Mapping[Pair, Estimate] | None = None,
    refused: Sequence[str] = (),
    main: str = MAIN[CLASSIFICATION],
    overlap: float = 1.0,
    better: Collection[str] | None = None,
) -> Inference:
    """Judge how certain the leading arm is, by the score that ranks on validation samples.

    A difference has the variance over seeds and over samples (:func:`fl_core.statistics.mean_over_seeds`). Holm's
    correction covers all pairs of arms, since the leader is one of them. So at most 5 % of races exclude an arm that is
    no worse (``tests/fedlayers/test_certainty.py``). Without a spread nothing is excluded.

    Args:
        judged, main: as in :class:`~fedlayers.studies.race.Standing`. Arms that failed with a seed are not excluded.
        sampled: of pairs of arms in either order, what their samples say (:func:`over_samples`). Without it one seed
            has no interval.
        refused: arms above the base rate. They cannot lead.
        overlap: the share of its validation samples that a seed has in common with another.
        better: the arms that are shown to be better than the base rate; None if that is unknown.

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
    ranks = judged[["arm", "seed", "score"]].round(DIGITS)
    ranks = ranks.groupby("arm", sort=False)["score"].agg(["count", "mean"])
    ranks = ranks.sort_values(["count", "mean"], ascending=False, kind="stable")
    order = [str(name) for name in ranks.index if name not in set(refused)]
    table = judged.pivot(index="arm", columns="seed", values=main).round(DIGITS)
    whole = [name for name in order if table.loc[name].notna().all()]
    about = {"main": main, "seeds": table.shape[1], "refused": tuple(refused)}
    if not whole and refused:  # what has no final score is no reason to use it
        none = pd.DataFrame(columns=COLUMNS)
        return Inference(NOTHING, (), none, unfinished=tuple(order), **about)
    if not whole:
        raise RunError("every arm diverged with some seed. Lower lr.")
    table, pairs = table.loc[whole], list(combinations(whole, 2))
    there = dict(sampled or {})
    there |= {(other, one): each for (one, other), each in there.items()}
    free = float((len(whole) - 1) * (table.shape[1] - 1))
    found = statistics.simultaneous(
        paired_estimates(table, pairs, there, overlap, free)
    )
    led = found.iloc[: len(whole) - 1].set_axis(whole[1:])
    worse = led["difference"] * (1 if SCORES[main] else -1) > 0
    worse &= led["p_value"] <= 0.05
    left = (whole[0], *led.index[~worse])
    lines = led.reindex(order[1:]).rename_axis("arm").reset_index()
    unfinished = tuple(name for name in order if name not in whole)
    lines["excluded"] = ~lines["arm"].isin([*left, *unfinished])
    verdict = DECIDED if left == (whole[0],) and not unfinished else UNDECIDED
    if better is not None and not better:
        verdict = UNSHOWN
    return Inference(verdict, left, lines[COLUMNS], unfinished=unfinished, **about)


def paired_estimates(
    table: pd.DataFrame,
    pairs: Sequence[Pair],
    sampled: Mapping[Pair, Estimate],
    overlap: float,
    free: float,
) -> list[Estimate]:
    """Return the mean difference over seeds of each pair of arms (:func:`fl_core.statistics.mean_over_seeds`).

    Args:
        table: arms x seeds.
        sampled: as of :func:`infer`.
        free: the freedom of the variance over seeds that is pooled over the pairs.
    """
    differences = [
        (table.loc[one] - table.loc[other]).to_numpy(float) for one, other in pairs
    ]
    spread = 0.0
    if table.shape[1] > 1:
        spread = math.sqrt(np.mean([each.var(ddof=1) for each in differences]))
    pooled = Estimate(math.nan, spread, free)
    return [
        statistics.mean_over_seeds(each, sampled.get(pair, NO_SPREAD), pooled, overlap)
        for pair, each in zip(pairs, differences, strict=True)
    ]


NO_SPREAD = Estimate(math.nan, math.nan, math.nan)


def over_samples(seeds: Sequence[Mapping[Pair, Estimate]]) -> dict[Pair, Estimate]:
    """Return the mean variance and freedom over the samples of a seed, for the pairs that all seeds have."""
    found = {}
    for pair in set.intersection(*(set(one) for one in seeds)):
        known = [one[pair] for one in seeds if not math.isnan(one[pair].error)]
        found[pair] = NO_SPREAD
        if known:
            variance = math.fsum(one.error**2 for one in known) / len(seeds)
            free = math.fsum(one.free for one in known) / len(known)
            found[pair] = Estimate(math.nan, math.sqrt(variance), free)
    return found


# --- in words --------------------------------------------------------------------------------------------------


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
    race: Inference,
    arms: Sequence[Arm],
    cheapest: str = "",
    notes: Sequence[str] = (),
    facts: Facts | None = None,
) -> Answers:
    """Say what a race found.

    Args:
        arms: all that raced.
        cheapest: of the remaining arms, the one that sends least.
        notes: further lines.
        facts: scores on test samples.
    """
    lines = [*notes]
    if race.refused:
        names = listing(race.refused)
        lines.append(f"Refused, with a higher loss than the base rate: {names}.")
    if race.unfinished:
        lines.append(
            f"Not excluded, without a final score: {listing(race.unfinished)}."
        )
    useless = race.verdict in (NOTHING, UNSHOWN)
    return Answers(first_screen(race, arms, cheapest, facts), tuple(lines), useless)


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fallback:
    """Training alone for the clients whose validation loss is lower alone.

    Attributes:
        clients: these clients.
        model: the recommended model, with theirs in its place.
        gain: the score that ranks on test samples, minus the recommended model's.
    """

    clients: tuple[str, ...]
    model: Predictor
    gain: Interval

    def text(self, score: str) -> str:
        """Return who would train alone, and what it changes."""
        change = f"{in_column(score, self.gain.value)}{bracket(score, *self.gain[1:])}"
        return (
            f"Fallback: training alone has a lower validation loss for {listing(self.clients, 3)}. It changes "
            f"{label_of(score)} on test samples by {change}. Export it: --fallback."
        )


@dataclass(frozen=True, repr=False)
class Choice(Displayed):
    """The result of a race.

    Attributes:
        winner: the arm to use; None if nothing is better than the base rate.
        arms: all that raced.
        standing: the scores at the end of the race.
        inference: how certain the decision is.
        run: the directory of the recommended model: the arm's best finished run on validation samples.
        until: the planned rounds of a run.
        task: of the first seed.
        cost: the estimate. ``measured`` is the cost of the runs, with the seconds of this call.
        rates: the learning rates that were tried, where they were tuned.
        evidence: a line per arm, the leader first, per baseline and for the base rate: the score that ranks on
            validation samples (a mean over seeds), its ``difference`` to the leader with an interval, the main score
            and ``auroc``, and a note.
        facts: the test scores of the first screen.
        clients: a line per client on test samples: the recommended model's scores, its loss, that of training alone
            and of the base rate, and what is shown of its ``gain``
            (:meth:`~fedlayers.studies.harmless.Bench.of_clients`).
        answers: what to use, and the evidence.
        runs: the finished runs of all arms and seeds.
        benches: the samples of each seed.
        fallback: training alone for some clients, if that has a lower loss for them.
    """

    winner: Arm | None
    arms: tuple[Arm, ...]
    standing: Standing
    inference: Inference
    run: Path | None
    until: int
    task: Task
    answers: Answers
    cost: Cost = NO_COST
    measured: Cost = NO_COST
    rates: Rates | None = None
    evidence: pd.DataFrame = field(default_factory=pd.DataFrame)
    facts: Facts | None = None
    clients: pd.DataFrame = field(default_factory=pd.DataFrame)
    runs: list[Trained] = field(default_factory=list)
    benches: dict[int, Bench] = field(default_factory=dict)
    fallback: Fallback | None = None

    @property
    def plan(self) -> LayerPlan | None:
        """The layer plan of the recommended arm."""
        return None if self.winner is None else self.winner.plan

    @property
    def recommended(self) -> dict[int, Trained]:
        """The recommended arm's run in each seed."""
        led = self.inference.leader
        return {one.seed: one for one in self.runs if one.arm == led}

    @property
    def of_seed(self) -> dict[int, Trained]:
        """The run that each seed's validation samples alone choose.

        Only this run may be scored on the seed's test samples, which other seeds use for validation.
        """
        known = [one for one in self.runs if one.arm not in self.inference.refused]
        ranked = sorted(known, key=lambda one: one.scores["score"])
        return {one.seed: one for one in ranked}

    @property
    def main(self) -> str:
        """The task's main score, or the one that selects."""
        return self.standing.main

    @property
    def table(self) -> pd.DataFrame:
        """A table with a row per arm, the leader first: its mean scores over the seeds that did not fail."""
        judged = self.standing.judged
        columns = list(dict.fromkeys((self.main, "loss", "score")))
        means = judged.groupby("arm", sort=False)[columns].mean()
        return means.sort_values("score", ascending=False, kind="stable").reset_index()

    def lead(self) -> str:
        """Return what to use, and its evidence, in lines of 88 signs."""
        lines = self.answers.text().splitlines()
        return "\n".join(textwrap.fill(line, 88) for line in lines)

    def summary(self) -> Summary:
        """Return the decision, the scores of the arms, and the plan."""
        layers = None if self.plan is None else self.plan.by_layer()
        table = self.sure() if len(self.evidence) else self.table
        return Summary.of_frame(self.answers.text(), table, layers)

    def text(self) -> str:
        """Return the decision, the table of arms and baselines, and what it cost."""
        table = self.sure().to_string(index=False)
        parts = [self.answers.text(), table, *self.standing.notes, self.legend]
        if self.rates is not None:
            parts.append(self.rates.text())
        return "\n\n".join([*parts, self.cost_line])

    def next_step(self, out: Path, command: str = "") -> str:
        """Return what to do next: a command that can be pasted.

        Args:
            out: the folder of this choice; ``command``: what was typed, empty for a call from Python.
        """
        facts, name, why = self.facts, "", ""
        useless = self.answers.useless
        if facts is not None and not facts.better("simple"):
            name = facts.simple
        if name.startswith("boosting"):
            why = "Gradient boosting cannot be exported. "
            by, other = (
                self.inference.main,
                BASE_RATE if useless else self.inference.leader,
            )
            worth = self.evidence.set_index("name")[by] * (1 if SCORES[by] else -1)
            name = str(worth.reindex(["linear_own", other]).idxmax())
        if name.startswith("linear"):
            return f"{why}`fedlayers export {out} --baseline {name} --out {name}` writes the simple models."
        if useless:
            return "Check labels and columns before any model is used: `fedlayers check` lists them for a table."
        export = f"`fedlayers export {out} --out models` writes the recommended models."
        if why:
            return f"{why}{export}"
        if self.inference.verdict == DECIDED and self.inference.seeds > 1:
            return export
        more = max(3, 2 * self.inference.seeds)
        if command:
            kept = re.sub(r" --seeds[= ]\d+", "", command)
            return f"`{kept} --seeds {more}` is surer. Until then {export}"
        return f"`fl.choose(..., seeds=range({more}))` is surer. Until then {export}"

    def sure(self) -> pd.DataFrame:
        """Return the table of arms, baselines and base rate as text: scores, and the difference to the leader."""
        by, table = self.inference.main, self.evidence
        shown = table[["name"]].rename(columns={"name": "arm"})
        shown[column_of(by)] = [in_column(by, value) for value in table[by]]
        shown["against the leader"] = [
            f"{in_column(by, line.difference)}{bracket(by, line.low, line.high)}"
            for line in table.itertuples()
        ]
        for name in (each for each in (self.main, "auroc") if each in table):
            if name != by:
                shown[column_of(name)] = [in_column(name, each) for each in table[name]]
        shown["note"] = table["note"]
        return shown.replace({"nan": "", "nan [nan, nan]": ""}, regex=False)

    @property
    def cost_line(self) -> str:
        """The estimated and the measured cost."""
        guess = self.cost
        spent = self.measured
        return (
            f"Cost, estimated / measured: {guess.rounds} / {plural(spent.rounds, 'round')}, "
            f"{format_bytes(guess.n_bytes)} / {format_bytes(spent.n_bytes)} sent and received, "
            f"{format_seconds(guess.seconds)} of training / {format_seconds(spent.seconds)} in all."
        )

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

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a dictionary for JSON, as in ``choice.json``."""
        seen = self.inference
        winner = self.winner
        return {
            "winner": winner and winner.name,
            "algorithm": winner and winner.algorithm,
            "shared": self.plan and list(self.plan.shared),
            "run": self.run and f"arms/{self.run.name}",
            "own_epochs": winner and winner.epochs,
            "own_rate": winner and winner.rate,
            "fallback": self.fallback and list(self.fallback.clients),
            "verdict": seen.verdict,
            "left": list(seen.remaining),
            "refused": list(seen.refused),
            "unfinished": list(seen.unfinished),
            "answers": [self.answers.head, *self.answers.lines],
            "evidence": records(self.evidence),
            "clients": records(self.clients),
            "judged": records(self.standing.judged),
            "notes": self.standing.notes,
            "until": self.until,
            "rates": self.rates and self.rates.tried,
            "best_rounds": self.standing.best,
            "foreseen": asdict(self.cost),
            "measured": asdict(self.measured),
            "version": __version__,
        }
