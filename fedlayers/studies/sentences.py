"""The sentences of a choice or a study: what to do, how certain that is, what it gains, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedlayers.studies import inference as sure
from fedlayers.studies.arms import Arm
from fedlayers.studies.comparison import Comparison, paired
from fedlayers.studies.inference import Inference
from fl_core.errors import check_known, listing
from fl_core.rows import SCORES, in_column, in_points, label_of

NAMES = {"nothing": "sharing nothing", "all": "sharing every layer"}
"""The two extremes in words."""
AGAINST = {
    "fedavg": NAMES["all"],
    "local": NAMES["nothing"],
    "base_rate": "the base rate",
}
"""The algorithms with which a choice of layers is compared, by name."""
NOTHING_BETTER = "Nothing here is better than the base rate."
YES, NO, OPEN = "yes", "no", "open"
ACCURACY = "accuracy"
SAME, LEVEL = "the same", "no significant difference"


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


# --- of a race -------------------------------------------------------------------------------------------------


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
    if race.verdict == sure.NOTHING:
        return Answers(NOTHING_BETTER, (*refused, *notes), useless=True)
    if race.verdict == sure.ALL_DIVERGED:
        return Answers("Every arm diverged with some seed.", tuple(notes))
    lines = [*notes, *refused, *_differences(race, arms)]
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
        return f"{do}: every other arm is significantly worse{only}."
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


def _differences(race: Inference, arms: Sequence[Arm]) -> list[str]:
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
    lead = names[race.leader]
    return [
        f"{lead[0].upper()}{lead[1:]}, {label_of(race.main)} on validation: {'; '.join(parts)} ({basis})."
    ]


def compared(
    scores: Mapping[str, Mapping[str, float]], main: str, better: str, fixed: str
) -> list[str]:
    """Compare the recommended model on test samples with the base rate and the best baseline.

    Args:
        scores: of the model (first) and the other predictors by name.
        better: the baseline that is significantly better than the model; empty without one.
        fixed: the name of the base rate.
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
    parts = [f"{label_of(score)} {in_column(score, own[score])}" for score in shown]
    parts.append(f"loss {own['loss']:.3f}, the base rate's {scores[fixed]['loss']:.3f}")
    return [*lines, f"On test samples {name} has {', '.join(parts)}."]


# --- of a study ------------------------------------------------------------------------------------------------


def gains(result: Comparison, chosen: str) -> pd.DataFrame:
    """Return what the chosen layers gain on test samples over sharing all, sharing nothing and the base rate.

    Each gain is judged by the comparison's score, by default macro-F1. Accuracy against the base rate has a line
    of its own. It judges nothing, since it is hard to beat if classes are rare. Differences are paired by seed. The 95
    % intervals hold together (Student's t with Bonferroni's correction), so they depend on the number of lines.

    Args:
        result: has ``chosen`` and some of :data:`AGAINST`.

    Returns:
        Columns ``against`` and ``metric`` (names), ``value``, ``low``, ``high`` (0 to 1; no ends with one seed),
        ``sign`` (``higher``, ``lower``, ``the same`` in every seed, or ``no significant difference``) and ``better``:
        yes, no, or open.

    Raises:
        UsageError: the chosen one is not in this comparison.
    """
    scores = result.scores.pivot(
        index="seed", columns=["metric", "algorithm"], values="value"
    )
    present = set(result.table["algorithm"])
    check_known("algorithm of this comparison", chosen, present)
    against = [(result.score, name) for name in AGAINST if name in present - {chosen}]
    if result.score != ACCURACY and (ACCURACY, "base_rate") in scores:
        against.append((ACCURACY, "base_rate"))
    pairs = [((metric, chosen), (metric, name)) for metric, name in against]
    table = paired(scores, pairs)
    table.insert(0, "against", [name for _, name in against])
    table.insert(1, "metric", [metric for metric, _ in against])
    same = [bool((scores[one] == scores[other]).all()) for one, other in pairs]
    signs = [same, table["low"] > 0, table["high"] < 0]
    table["sign"] = np.select(signs, [SAME, "higher", "lower"], LEVEL)
    decided = ~table["sign"].isin([SAME, LEVEL])
    good = (table["sign"] == "higher") == table["metric"].map(SCORES)
    table["better"] = np.where(decided, np.where(good, YES, NO), OPEN)
    return table.drop(columns="n")


def with_gains(
    found: Answers, table: pd.DataFrame, seeds: int, by: str = "race chooses"
) -> Answers:
    """Combine the answers of a race or a rule with the gains on test samples.

    Args:
        table: from :func:`gains`.
        seeds: number of repetitions.
        by: what found the layers of each seed's own run.
    """
    first = table.drop_duplicates("against").set_index("against")["better"]
    lines = [
        f"On test samples {AGAINST[name]} is better."
        for name in ("fedavg", "local")
        if first.get(name) == NO
    ]
    head, own = found.head, found.lines
    better = first.get("base_rate", YES)
    if better == NO:
        head, own = "The base rate is better on test samples.", (head, *own)
    elif better == OPEN and seeds > 1:
        lines.append(
            f"On test samples the chosen layers show {LEVEL} from {AGAINST['base_rate']}."
        )
    how = (
        f"Differences are paired over {seeds} seeds. The 95 % intervals hold together: Student's t, Bonferroni."
        if seeds > 1
        else "One seed gives no interval."
    )
    each = [
        f"against {AGAINST[str(name)]}: {'; '.join(map(_gain, part.itertuples()))}"
        for name, part in table.groupby("against", sort=False)
    ]
    about = f"On test samples, the layers that the {by}. {how}"
    useless = found.useless or better == NO
    return Answers(head, (*own, *lines), useless, tuple(each), about)


def of_rule(do: str, seeds: int) -> Answers:
    """Return the answers if a rule has decided, such as ``federate conv1; keep fc local``."""
    lines = ["A rule decided this from one local epoch. It gives no uncertainty."]
    if seeds < 2:
        lines.append("One seed, so no uncertainty can be given.")
    return Answers(f"{do[0].upper()}{do[1:]}.", tuple(lines))


def _gain(line: Any) -> str:
    by = f"{'+' if line.value >= 0 else ''}{in_points(line.metric, line.value)} of {label_of(line.metric)}"
    interval = (
        ""
        if math.isnan(line.low)
        else f" [{100 * line.low:+.1f}, {100 * line.high:+.1f}], {line.sign}"
    )
    return f"{by}{interval}"
