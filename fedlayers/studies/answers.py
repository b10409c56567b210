"""The three answers of a race. Is a split better? Which one? Is it better than guessing?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from fedlayers.studies import inference as sure
from fedlayers.studies.arms import Arm
from fedlayers.studies.inference import Inference
from fl_core.errors import listing
from fl_core.scores import CLASSIFICATION, MAIN, TABLE, in_column, in_points, label_of

NAMES = {"nothing": "sharing nothing", "all": "sharing every layer"}
"""The two extremes in words."""
TOO_WIDE = "too few seeds to bound it"
"""In place of limits that are as wide as all values of a score."""
YES, NO, OPEN = "yes", "no", "open"


class Answers(NamedTuple):
    """The answers of a race.

    Attributes:
        head: what to use, in a sentence.
        lines: the answers in words, without those that are not available.
        split: whether a split is better than sharing nothing and sharing every layer: yes, no, open, or empty if no
            extreme or no split has raced.
        which: the verdict (:data:`~fedlayers.studies.inference.VERDICTS`).
        guessing: whether anything is better than guessing: yes, no, or open.
    """

    head: str
    lines: tuple[str, ...]
    split: str
    which: str
    guessing: str

    @property
    def codes(self) -> dict[str, str]:
        """The three answers as codes."""
        return {"split": self.split, "which": self.which, "guessing": self.guessing}


def answers(race: Inference, arms: Sequence[Arm], used: Arm) -> Answers:
    """Answer the three questions from the numbers of a race.

    Args:
        arms: all that raced.
        used: the arm to use: of those that are not worse, the one that sends least.
    """
    do = f"{used.words[0].upper()}{used.words[1:]}."
    split, which, guessing = _split(race, arms), _which(race, used), _guessing(race)
    found = (
        _split_code(race, arms),
        race.verdict,
        {True: YES, False: NO, None: OPEN}[race.above_chance.significant],
    )
    if race.verdict == sure.NOTHING_LEARNED:
        return Answers(
            guessing, (f"The arm that sends least is used: {used.words}.",), *found
        )
    if race.early is not None:
        head = f"One seed, so no uncertainty can be given. This arm was kept: {used.words}."
        return Answers(head, _present(race.early.line(race.main), guessing), *found)
    if race.verdict == sure.ONE_RACE:
        head = f"One seed, so no uncertainty can be given. The best of this race: {used.words}."
        return Answers(head, _present(split, race.tie, guessing), *found)
    if race.verdict == sure.ALL_DIVERGED:
        head = "Every arm diverged with some seed."
        return Answers(
            head, (f"The one that diverged least is used: {used.words}.",), *found
        )
    return Answers(do, _present(split, which, race.tie, guessing), *found)


def _present(*lines: str) -> tuple[str, ...]:
    return tuple(line for line in lines if line)


def _name_of(arm: Arm) -> str:
    return NAMES.get(arm.extreme, arm.name)


# --- is a split better than nothing, or all? ------------------------------------------------------------------------


def _rivals(race: Inference, arms: Sequence[Arm]) -> tuple[Arm, list[Arm]]:
    """Return the leader and the arms to compare it with: the extremes, and the best split if an extreme leads."""
    by_name = {arm.name: arm for arm in arms}
    leader, *others = (
        by_name[name] for name in (race.remaining[0], *race.differences["arm"])
    )
    extremes = [arm for extreme in NAMES for arm in others if arm.extreme == extreme]
    splits = [arm for arm in others if not arm.extreme]
    return leader, [*splits[: bool(leader.extreme)], *extremes]


def _split_code(race: Inference, arms: Sequence[Arm]) -> str:
    extreme = {arm.name: bool(arm.extreme) for arm in arms}
    if len(set(extreme.values())) < 2:
        return ""
    if race.verdict not in (sure.DECIDED, sure.LEVEL_ARMS, sure.DISAGREE):
        return OPEN
    left = {extreme[name] for name in race.remaining}
    return OPEN if len(left) > 1 else NO if left.pop() else YES


def _split(race: Inference, arms: Sequence[Arm]) -> str:
    leader, rivals = _rivals(race, arms)
    lines = race.differences.set_index("arm")
    phrases = [_against(race, lines.loc[arm.name], _name_of(arm)) for arm in rivals]
    word, name = label_of(race.main), _name_of(leader).replace("sharing", "Sharing")
    best = f"{name} has the best score on validation samples, from {word} and loss together."
    return f"{best} Its {word} is {', '.join(phrases)}." if phrases else ""


def _against(race: Inference, line: pd.Series, name: str) -> str:
    """Compare the leader with another arm, as in ``6.7 points better than sharing nothing``."""
    difference = line["difference"]
    if math.isnan(difference):
        return f"ahead of {name}, which diverged"
    by = in_points(race.main, abs(difference))
    side = "above" if difference >= 0 else "below"
    if math.isnan(line["p_value"]):
        return f"{by} {side} {name}"
    if line["p_value"] <= 1 - sure.LEVEL:
        return f"{by} {'better' if difference > 0 else 'worse'} than {name}"
    low, high = (in_column(race.main, line[end]) for end in ("low", "high"))
    found = (
        TOO_WIDE
        if _is_too_wide(race, max(-line["low"], line["high"]))
        else f"{low} to {high}"
    )
    return f"{by} {side} {name} (no significant difference, {found})"


def _is_too_wide(race: Inference, limit: float) -> bool:
    """Return whether an interval of a difference says nothing: it is as wide as all values of a share."""
    return TABLE[race.main].share and limit >= 1


# --- which split? ---------------------------------------------------------------------------------------------------


def _which(race: Inference, used: Arm) -> str:
    if race.verdict == sure.DECIDED:
        return f"Every other arm has a significantly worse {label_of(race.main)} (95 %, paired by seed)."
    word, stake = label_of(race.main), in_points(race.main, race.at_stake(used.name))
    may = (
        TOO_WIDE
        if _is_too_wide(race, race.at_stake(used.name))
        else f"one may be better by up to {stake}"
    )
    if race.verdict == sure.DISAGREE:
        higher = race.differences[race.differences["high"] <= 0]
        return (
            f"{listing(higher['arm'])}: significantly higher {word} (at most {stake}). "
            f"{used.name} has the better loss and is used."
        )
    return (
        f"{listing(race.remaining)}: no significant difference in {word} ({may}). "
        f"The one that sends least is used: {used.name}."
    )


# --- better than guessing? ------------------------------------------------------------------------------------------


def _guessing(race: Inference) -> str:
    value, low = race.above_chance
    if math.isnan(value) or (math.isnan(low) and value > 0):
        return ""
    if race.main != MAIN[CLASSIFICATION]:
        chance = TABLE[race.main].chance
        what = "guessing" if chance else "predicting the mean"
        number = f"{label_of(race.main)} {in_column(race.main, value + chance)}"
        least = (
            ""
            if math.isnan(low)
            else f", at least {in_column(race.main, low + chance)} with 95 % confidence"
        )
    else:
        what, number = (
            "guessing",
            f"{100 * value:.1f} points of balanced accuracy above it",
        )
        least = (
            ""
            if math.isnan(low)
            else f", at least {100 * low:.1f} with 95 % confidence"
        )
    if race.above_chance.significant:
        return f"Better than {what} on validation samples: {number}{least}."
    return f"No arm is shown to do better than {what} on validation samples (the best: {number}{least})."
