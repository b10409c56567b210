"""What a study comes to, in words: what to do, what that gains or costs, and how sure it is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pandas as pd

from fedlayers.studies.certainty import MARGIN, Certainty, one_race
from fedlayers.studies.compare import Comparison
from fl_core import statistics
from fl_core.errors import check_known, listing

AGAINST = {
    "fedavg": "sharing every layer",
    "local": "sharing nothing",
    "majority": "each client's majority class",
}
"""What a choice of layers is held against, by its name among a comparison's algorithms."""
NAMES = {"macro_f1": "macro-F1", "accuracy": "accuracy"}


def worth(result: Comparison, chosen: str) -> pd.DataFrame:
    """What the chosen layers gain on test samples over sharing all, sharing nothing and the majority class.

    Macro-F1 against each, and accuracy against the majority class, which is hard to beat there where classes are
    rare. Differences are paired by seed; the intervals hold together with 95 % (Student's t with Bonferroni's
    correction), and so depend on how many of these there are.

    Args:
        result: in which ``chosen`` and some of :data:`AGAINST` are.

    Returns:
        Columns ``against`` and ``metric`` (names), ``value``, ``low``, ``high`` (0 to 1; no ends with one seed) and
        ``sign``: ``higher``, ``lower``, ``the same`` in every seed, or ``not told apart``.

    Raises:
        UsageError: the chosen one is not in this comparison.
    """
    scores = result.scores.pivot(index=["metric", "algorithm"], columns="seed", values="value")
    present = set(result.table["algorithm"])
    check_known("algorithm of this comparison", chosen, present)
    pairs = [("macro_f1", name) for name in AGAINST if name in present - {chosen}]
    pairs += [("accuracy", "majority")] if "majority" in present else []
    lines = []
    for metric, name in pairs:
        differences = scores.loc[(metric, chosen)] - scores.loc[(metric, name)]
        value, low, high = statistics.mean_interval(differences, comparisons=len(pairs))
        sign = "higher" if low > 0 else "lower" if high < 0 else "not told apart"
        sign = "the same" if (differences == 0).all() else sign
        lines.append([name, metric, value, low, high, sign])
    return pd.DataFrame(lines, columns=["against", "metric", "value", "low", "high", "sign"])


class Lead(NamedTuple):
    """What a report begins with.

    Attributes:
        text: what to do, or that it is not decided, and how sure that is; ``**strong**`` inside.
        gains: a line for each comparison on test samples, and what their intervals are in ``how``.
    """

    text: str
    gains: tuple[str, ...]
    how: str

    def plain(self) -> str:
        """All of it for a terminal."""
        gains = ["On test samples:", *(f"  {gain}" for gain in self.gains), f"  ({self.how})"] if self.gains else []
        return "\n".join([self.text.replace("**", ""), *gains])


def lead(do: str, table: pd.DataFrame, seeds: int, sure: Certainty | None, arms: tuple[str, ...] = ()) -> Lead:
    """The outcome: what to do or that it is not decided, how sure that is, and what it gains or costs.

    It is decided only where repeated races say so, the chosen layers do better than the majority class, and test
    samples tell them apart from sharing all or sharing nothing.

    Args:
        do: what the decision says, such as ``federate conv1; keep fc local``.
        table: as :func:`worth` gives it.
        seeds: how many repetitions.
        sure: what repeated races say; None for a rule's decision, of which nothing is known but the test scores.
        arms: names of what raced.
    """
    gains = tuple(_gain(line) for line in table.itertuples())
    together = f"differences paired over {seeds} seeds; the 95 % intervals hold together (Student's t, Bonferroni)"
    how = together if seeds > 1 else "one seed supports no interval"
    return Lead(" ".join(part for part in _said(do, table, seeds, sure, arms) if part), gains, how)


def _said(do: str, table: pd.DataFrame, seeds: int, sure: Certainty | None, arms: tuple[str, ...]) -> list[str]:
    found = {(line.against, line.metric): str(line.sign) for line in table.itertuples()}
    all_and_none = {name: found.get((name, "macro_f1")) for name in ("fedavg", "local")}
    tie = "" if sure is None else sure.tie
    leader = f"{'The rule says' if sure is None else 'The leader of the race'}: {do}. {tie}".rstrip()
    if seeds < 2:
        what, loss = ("measurement", "") if sure is None else ("race", one_race(arms))
        return [f"**One {what} says: {do}.**", tie, loss, "How sure that is takes more seeds."]
    if found.get(("majority", "macro_f1"), "higher") != "higher" or found.get(("majority", "accuracy")) == "lower":
        return ["**Not decided: no gain over always answering each client's majority class is shown.**", leader]
    if sure is not None and sure.verdict == "all diverged":
        return [f"**{sure.diverged()}**", leader]
    if sure is not None and sure.verdict == "nothing learned":
        return [f"**{sure.guessed()}**", f"Least is sent by this one: {do}."]
    if sure is not None and sure.verdict == "no matter":
        within = f"{listing(sure.left)} are within {100 * MARGIN:g} point of macro-F1 of each other"
        return [f"**It does not matter: {within}.**", f"Least is sent by this one: {do}."]
    if sure is not None and sure.verdict == "not decided":
        return [f"**Not decided between {listing(sure.left)}.**", leader, sure.stake("That")]
    basis = "A rule decided that from one local epoch, which says nothing of how sure it is."
    if sure is not None:
        basis = f"Every other candidate is excluded on validation samples (95 %, paired over {seeds} races)."
    worse = [AGAINST[name] for name, sign in all_and_none.items() if sign == "lower"]
    if worse:
        return [f"**Not decided: on test samples {listing(worse)} is better.**", leader, basis]
    if "higher" not in all_and_none.values():
        others = listing(AGAINST[name] for name, sign in all_and_none.items() if sign is not None)
        return [f"**Not decided: on test samples the choice is not told apart from {others}.**", leader, basis]
    return [f"**{do[0].upper()}{do[1:]}.**", basis, tie]


def _gain(line: Any) -> str:
    points = f"{100 * line.value:+.1f} points of {NAMES[line.metric]}"
    interval = "" if math.isnan(line.low) else f" [{100 * line.low:+.1f}, {100 * line.high:+.1f}], {line.sign}"
    return f"against {AGAINST[line.against]}: {points}{interval}"
