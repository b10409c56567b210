"""The sentences of a race: what to share, how certain that is, and how it stands next to simple predictors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedlayers.studies import inference as sure
from fedlayers.studies.arms import Arm
from fedlayers.studies.inference import Inference
from fl_core.errors import listing
from fl_core.scores import in_column, in_points, label_of

NAMES = {"nothing": "sharing nothing", "all": "sharing every layer"}
"""The two extremes in words."""
NOTHING_BETTER = "Nothing here is better than the base rate."
YES, NO, OPEN = "yes", "no", "open"


class Answers(NamedTuple):
    """The outcome of a race in words.

    Attributes:
        head: what to use, in a sentence.
        lines: its evidence.
        split: whether a split is better than sharing nothing and sharing every layer: yes, no, open, or empty if no
            extreme or no split has raced.
        which: the verdict (:data:`~fedlayers.studies.inference.VERDICTS`).
        guessing: whether anything is better than the base rate: yes, no, or open.
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


def answers(
    race: Inference, arms: Sequence[Arm], cheapest: str = "", notes: Sequence[str] = ()
) -> Answers:
    """Say what a race found.

    Args:
        arms: all that raced.
        cheapest: of the remaining arms, the one that sends least.
        notes: further lines, such as scores on test samples.
    """
    guessing = NO if race.verdict == sure.NOTHING else YES if notes else OPEN
    codes = _split_code(race, arms), race.verdict, guessing
    refused = _refused(race)
    if race.verdict == sure.NOTHING:
        return Answers(NOTHING_BETTER, (*refused, *notes), *codes)
    if race.verdict == sure.ALL_DIVERGED:
        return Answers("Every arm diverged with some seed.", tuple(notes), *codes)
    lines = [*refused, *_differences(race, arms)]
    if race.early is not None:
        lines.append(race.early.line(race.main))
    return Answers(_head(race, arms, cheapest), (*notes, *lines), *codes)


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


def _refused(race: Inference) -> list[str]:
    if not race.refused:
        return []
    return [f"Refused, with a higher loss than the base rate: {listing(race.refused)}."]


def _split_code(race: Inference, arms: Sequence[Arm]) -> str:
    extreme = {arm.name: bool(arm.extreme) for arm in arms}
    if len(set(extreme.values())) < 2:
        return ""
    left = {extreme[name] for name in race.remaining}
    if len(left) != 1 or race.verdict not in (sure.DECIDED, sure.UNDECIDED):
        return OPEN
    return NO if left.pop() else YES


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
    parts = [f"{label_of(main)} {in_column(main, own[main])}"]
    parts += [
        f"{label_of(extra)} {in_column(extra, own[extra])}"
        for extra in ("auroc",)
        if extra in own and not math.isnan(own[extra])
    ]
    parts.append(f"loss {own['loss']:.3f}, the base rate's {scores[fixed]['loss']:.3f}")
    return [*lines, f"On test samples {name} has {', '.join(parts)}."]
