"""The outcome of a study in words: what to do, what that gains or costs, and how certain it is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pandas as pd

from fedlayers.studies.answers import NO, OPEN, YES, Answers
from fedlayers.studies.comparison import Comparison
from fl_core import statistics
from fl_core.errors import check_known
from fl_core.scores import SCORES, in_points, label_of

AGAINST = {
    "fedavg": "sharing every layer",
    "local": "sharing nothing",
    "base_rate": "the base rate",
}
"""The algorithms with which a choice of layers is compared, by name."""
ACCURACY = "accuracy"
SAME, LEVEL = "the same", "no significant difference"
COLUMNS = ["against", "metric", "value", "low", "high", "sign", "better"]
NOTHING = pd.DataFrame(columns=COLUMNS)


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
        index=["metric", "algorithm"], columns="seed", values="value"
    )
    present = set(result.table["algorithm"])
    check_known("algorithm of this comparison", chosen, present)
    pairs = [(result.score, name) for name in AGAINST if name in present - {chosen}]
    pairs += (
        [(ACCURACY, "base_rate")]
        if "base_rate" in present
        and ACCURACY in set(scores.index.get_level_values(0))
        and result.score != ACCURACY
        else []
    )
    lines = []
    for metric, name in pairs:
        differences = scores.loc[(metric, chosen)] - scores.loc[(metric, name)]
        value, low, high = statistics.mean_interval(differences, comparisons=len(pairs))
        sign = "higher" if low > 0 else "lower" if high < 0 else LEVEL
        sign = SAME if (differences == 0).all() else sign
        better = (
            OPEN
            if sign in (SAME, LEVEL)
            else YES
            if (sign == "higher") == SCORES[metric]
            else NO
        )
        lines.append([name, metric, value, low, high, sign, better])
    return pd.DataFrame(lines, columns=COLUMNS)


class Headline(NamedTuple):
    """The first lines of a report.

    Attributes:
        head: what to use, or that nothing is shown to have been learned.
        answers: the answers in words, a line each.
        gains: a line for each opponent on test samples, below ``scored``; ``how`` describes their intervals.
        codes: the answers as codes: ``split``, ``which`` and ``guessing`` (:mod:`fedlayers.studies.answers`).
    """

    head: str
    answers: tuple[str, ...]
    scored: str
    gains: tuple[str, ...]
    how: str
    codes: dict[str, str]

    def plain(self) -> str:
        """Return all of it for a terminal."""
        gains = (
            [self.scored, *(f"  {gain}" for gain in self.gains), f"  {self.how}"]
            if self.gains
            else []
        )
        return "\n".join([self.head, *(f"- {line}" for line in self.answers), *gains])


def lead(
    found: Answers, table: pd.DataFrame, seeds: int, by: str = "race chooses"
) -> Headline:
    """Combine the answers of a race or a rule with the gains on test samples.

    Args:
        found: the answers of the race, or :func:`of_rule`.
        table: from :func:`gains`.
        seeds: number of repetitions.
        by: what found the layers of each seed's own run.
    """
    better = _by_score(table)
    lines = [
        f"On test samples {AGAINST[name]} is better."
        for name in ("fedavg", "local")
        if better.get(name) == NO
    ]
    head, codes = found.head, dict(found.codes)
    of_majority = better.get("base_rate", codes["guessing"])
    answers = found.lines
    if of_majority == NO:
        head, answers = (
            "The base rate is better on test samples.",
            (head, *answers),
        )
    elif of_majority == OPEN and seeds > 1:
        lines.append(
            f"On test samples the chosen layers show no significant difference from {AGAINST['base_rate']}."
        )
    codes["guessing"] = codes["guessing"] if codes["guessing"] == NO else of_majority
    together = f"Differences are paired over {seeds} seeds. The 95 % intervals hold together: Student's t, Bonferroni."
    how = together if seeds > 1 else "One seed gives no interval."
    each = [
        f"against {AGAINST[str(name)]}: {'; '.join(map(_gain, own.itertuples()))}"
        for name, own in table.groupby("against", sort=False)
    ]
    whose = "the"
    scored = f"On test samples, the layers that {whose} {by}:"
    return Headline(head, (*answers, *lines), scored, tuple(each), how, codes)


def of_rule(do: str, table: pd.DataFrame, seeds: int) -> Answers:
    """Return the answers if a rule has decided. Which split is not asked; test samples answer the rest.

    Args:
        do: the rule's decision, such as ``federate conv1; keep fc local``.
    """
    better = [code for name, code in _by_score(table).items() if name != "base_rate"]
    split = (
        "" if not better else NO if NO in better else OPEN if OPEN in better else YES
    )
    basis = "A rule decided this from one local epoch. It gives no uncertainty."
    alone = "One seed, so no uncertainty can be given."
    return Answers(
        f"{do[0].upper()}{do[1:]}.",
        (basis, alone) if seeds < 2 else (basis,),
        split,
        "",
        OPEN,
    )


def _by_score(table: pd.DataFrame) -> dict[str, str]:
    """Return for each opponent whether the choice is better, by the comparison's score."""
    first = table.drop_duplicates("against")
    return dict(zip(first["against"], first["better"], strict=True))


def _gain(line: Any) -> str:
    by = f"{'+' if line.value >= 0 else ''}{in_points(line.metric, line.value)} of {label_of(line.metric)}"
    interval = (
        ""
        if math.isnan(line.low)
        else f" [{100 * line.low:+.1f}, {100 * line.high:+.1f}], {line.sign}"
    )
    return f"{by}{interval}"
