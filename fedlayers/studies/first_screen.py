"""The first screen of a choice: what to do, how much better that is than the simplest thing, and for whom it is not.

Three sentences and at most 60 words. The terminal, the notebook and the report begin with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedlayers.studies.arms import Arm, trained_layers
from fedlayers.studies.harmless import (
    BASE_RATE,
    LOSES,
    TEST,
    VALIDATION,
    Bench,
    Predictor,
)
from fl_core.errors import listing, plural
from fl_core.rows import (
    CLASSIFICATION,
    MAIN,
    MULTILABEL,
    SCORES,
    SURVIVAL,
    TABLE,
    in_column,
    in_points,
    label_of,
)
from fl_core.statistics import Interval

NAMED = 3
"""Clients, or layers, that a sentence names at most."""
NOTHING_BETTER = "Nothing here is better than the base rate."
NONE_SHOWN = "No network is shown to be better than the base rate."
KINDS = {"linear": "a linear model", "boosting": "gradient boosting"}

DECIDED, UNDECIDED = "decided", "undecided"
UNSHOWN = "no arm shown to be better than the base rate"
NOTHING = "nothing better than the base rate"


@dataclass(frozen=True)
class Inference:
    """The evidence of a race on its leading arm.

    Attributes:
        verdict: decided: every other arm is significantly worse than the leader, or refused. undecided: some arms show
            no significant difference from the leader, or have no final score. :data:`UNSHOWN`: no arm has a
            significantly lower loss than the base rate. :data:`NOTHING`: every arm has a significantly higher one.
        remaining: the leader, then the arms that are not significantly worse than it.
        differences: a line for each other arm: leader - arm in the score that ranks, its simultaneous 95 % interval,
            ``p_value`` (corrected by Holm for all pairs of arms) and ``excluded``.
        main: the score that ranks, and is compared.
        seeds: number of seeds. With one, the differences hold for this run only.
        refused: the arms whose loss is significantly above the base rate's.
        unfinished: the arms that failed or diverged. They are not excluded.
    """

    verdict: str
    remaining: tuple[str, ...]
    differences: pd.DataFrame
    main: str = MAIN[CLASSIFICATION]
    seeds: int = 1
    refused: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()

    @property
    def leader(self) -> str:
        """The arm with the best score."""
        return self.remaining[0] if self.remaining else ""


@dataclass(frozen=True)
class Facts:
    """The test scores that the first screen names: of the recommended model, and of what stands beside it.

    Attributes:
        score: the score that ranks.
        kind: the task, of :data:`fl_core.rows.TASKS`.
        values: the score by name: ``model``, ``simple`` (the best baseline on each client's samples), ``alone`` (the
            arm that shares nothing) and ``base_rate``. Some may be missing.
        above: how much higher the model's score is than that of each other one, with 95 % intervals. Without a model
            it is the simple model's difference to the base rate.
        simple: the name of the best simple model, chosen on validation samples.
        auroc: of two classes, of the model and of the simple one; and ``events``, ``n``: the positive test samples,
            and all.
        gain: what is shown of each client's loss.
    """

    score: str
    kind: str
    values: Mapping[str, float]
    above: Mapping[str, Interval]
    simple: str = ""
    auroc: Mapping[str, float] | None = None
    events: int = 0
    n: int = 0
    gain: Mapping[str, str] | None = None

    def better(self, name: str) -> bool:
        """Return whether the model is shown to be better than another predictor."""
        return name in self.above and _is_better(self.score, self.above[name])


def _is_better(score: str, found: Interval) -> bool:
    return found.low > 0 if SCORES[score] else found.high < 0


def facts_of(
    bench: Bench,
    model: Predictor | None,
    alone: Predictor | None,
    others: Sequence[Predictor],
    clients: pd.DataFrame,
) -> Facts | None:
    """Return the test scores of a recommended model next to the others; None without test samples."""
    if not bench.labels[TEST]:
        return None
    score = bench.selecting
    own = [one for one in others if one.name.endswith("_own")]
    found: dict[str, Predictor] = {}
    if own:
        found["simple"] = max(own, key=bench.worth)
    if alone is not None:
        found["alone"] = alone
    found["base_rate"] = bench.base_rate
    first = model or found.get("simple")
    everyone = found if model is None else {"model": model, **found}
    values = {name: bench.scores(one, TEST)[score] for name, one in everyone.items()}
    above = {
        name: bench.difference(first, one, TEST, score).interval()
        for name, one in found.items()
        if first is not None and one is not first
    }
    auroc, events, n = dict[str, float](), 0, 0
    data = bench.task.data
    if bench.kind == CLASSIFICATION and data.n_classes == 2:
        labels = bench.labels[TEST].values()
        events = sum(int((y == data.positive_index).sum()) for y in labels)
        n = sum(len(y) for y in labels)
        auroc = {
            name: bench.scores(everyone[name], TEST)["auroc"]
            for name in everyone.keys() & {"model", "simple"}
        }
    gain = (
        dict(zip(clients["client"], clients["gain"], strict=True))
        if len(clients)
        else None
    )
    simple = found["simple"].name if own else ""
    return Facts(score, bench.kind, values, above, simple, auroc, events, n, gain)


def evidence_of(
    found: Inference,
    models: Mapping[int, Mapping[str, Predictor]],
    benches: Mapping[int, Bench],
    leader: Predictor | None,
    others: Sequence[Predictor],
    bench: Bench,
    main: str,
    notes: Mapping[str, str],
) -> pd.DataFrame:
    """Return a line per arm, the leader first, per baseline and for the base rate, on validation samples.

    Args:
        models: of each seed, by arm. bench: of the leader's seed, in which the baselines were fitted.
    """
    by, lines = found.main, []
    names = list(dict.fromkeys((by, main, "auroc")))
    gaps = found.differences.set_index("arm")
    known = {arm for own in models.values() for arm in own}
    order = (found.leader, *gaps.index, *found.refused)
    for arm in filter(known.__contains__, order):
        own = [
            benches[seed].scores(each[arm], VALIDATION)
            for seed, each in models.items()
            if arm in each
        ]
        line: dict[str, Any] = {
            name: np.mean([one.get(name, math.nan) for one in own]) for name in names
        }
        line |= {"name": arm, "note": notes.get(arm, "")}
        if arm in gaps.index:
            gap = gaps.loc[arm]
            line |= {
                "difference": -gap["difference"],
                "low": -gap["high"],
                "high": -gap["low"],
            }
        lines.append(line)
    for one in others:
        scores = bench.scores(one, VALIDATION)
        line = {name: scores.get(name, math.nan) for name in names}
        if leader is not None:
            gap = bench.difference(one, leader, VALIDATION, by).interval()
            line |= dict(zip(("difference", "low", "high"), gap, strict=True))
        lines.append({**line, "name": one.name, "note": ""})
    columns = ["name", *names, "difference", "low", "high", "note"]
    table = pd.DataFrame(lines).reindex(columns=columns)
    return table.drop(columns="auroc") if table["auroc"].isna().all() else table


# --- sentences ------------------------------------------------------------------------------------------------


def first_screen(
    race: Inference, arms: Sequence[Arm], cheapest: str, facts: Facts | None
) -> str:
    """Return the sentences of a race: nothing beats the base rate, a simple model is as good, undecided, or an arm.

    Args:
        arms: all that raced.
        cheapest: of the remaining arms, the one that sends least.
        facts: the test scores. Without them it is what validation samples say.
    """
    by_name = {arm.name: arm for arm in arms}
    leader = by_name.get(race.leader)
    if leader is None or race.verdict not in (DECIDED, UNDECIDED):
        return " ".join(_of_no_arm(race, leader, facts))
    if facts is not None and facts.simple and not facts.better("simple"):
        return " ".join([*_of_simple(facts, way(leader)), _for_whom(facts)]).strip()
    if race.verdict == UNDECIDED:
        rest = [by_name[name] for name in (*race.remaining[1:], *race.unfinished)]
        lines = [_undecided(race, leader, rest, by_name.get(cheapest))]
    else:
        lines = [advice(leader)]
        if race.seeds == 1:
            lines = [f"{lines[0][:-1]}, by one seed."]
    if facts is not None:
        lines += [_beside(facts, race.verdict == DECIDED), _for_whom(facts)]
    return " ".join(filter(None, lines))


def _of_no_arm(race: Inference, leader: Arm | None, facts: Facts | None) -> list[str]:
    """Say that nothing is better than the base rate, and whether a simple model is."""
    lines = [NOTHING_BETTER if leader is None else NONE_SHOWN]
    if facts is None:
        return lines
    loss, base = label(facts), _value(facts, "base_rate")
    if leader is not None and "model" in facts.values:
        lines.append(
            f"On test samples {way(leader)} has {loss} {_value(facts, 'model')}, the base rate {base}"
            f": {_signed(facts.score, facts.above[BASE_RATE])}."
        )
    if facts.simple:
        shown = _value(facts, "simple")
        lines.append(f"{capital(simple_model(facts))} has {shown}.")
        if leader is None and _is_better(facts.score, facts.above[BASE_RATE]):
            lines[0] = "No network here is better than the base rate."
            lines[-1] = (
                f"Use {simple_model(facts)}: its {loss} on test samples is {shown}, the base rate's {base}."
            )
    return lines


def _of_simple(facts: Facts, best: str) -> list[str]:
    """Say that a simple model is as good."""
    loss, gap = label(facts), facts.above["simple"]
    worse = _is_better(facts.score, Interval(-gap.value, -gap.high, -gap.low))
    head = "A simple model is better" if worse else "A simple model is as good"
    side = _signed(facts.score, gap)
    own = f"{_value(facts, 'simple')}{_events(facts, 'simple')}"
    return [
        f"{head}: use {simple_model(facts)}.",
        f"Its {loss} on test samples is {own}; the best network, {best}, has {_value(facts, 'model')} ({side}).",
    ]


def _undecided(
    race: Inference, leader: Arm, rest: Sequence[Arm], cheapest: Arm | None
) -> str:
    """Say between which arms nothing is decided, and which of them is the simplest."""
    seeds = "Undecided, one seed" if race.seeds == 1 else "Undecided"
    others = way(rest[0]) if len(rest) == 1 else f"{len(rest)} other ways"
    line = f"{seeds}: {way(leader)} and {others} may be as good"
    gaps = race.differences.set_index("arm").reindex([arm.name for arm in rest])
    gap = gaps.iloc[0] if len(gaps) else pd.Series({"difference": math.nan})
    if not math.isnan(gap["difference"]):
        ends = Interval(-gap["difference"], -gap["high"], -gap["low"])
        which = "the latter" if len(rest) == 1 else "the next"
        line += f" ({which} {_signed(race.main, ends)} on validation samples)"
    if cheapest is not None and cheapest != leader:
        return f"{line}. {capital(way(cheapest))} sends least."
    return f"{line}."


def _beside(facts: Facts, decided: bool) -> str:
    """Say how much better the model is than the best simple model, and if decided, than training alone."""
    loss = label(facts)
    against = {"alone": "training alone", "base_rate": "the base rate"}
    shown = [name for name in against if name in facts.above]
    if not decided and facts.simple:
        shown = []
    words = [(name, against[name]) for name in shown[:1]]
    if facts.simple:
        words.append(("simple", simple_model(facts)))
    parts = [
        _signed(facts.score, facts.above[name], f" than {other}")
        for name, other in words
    ]
    own = f"{_value(facts, 'model')}{_events(facts, 'model')}"
    return f"{capital(loss)} on test samples: {own}. That is {' and '.join(parts)}."


def _for_whom(facts: Facts) -> str:
    """Say which clients lose, and for which no gain is shown."""
    if not facts.gain:
        return ""
    lose = [name for name, gain in facts.gain.items() if gain == LOSES]
    none = [name for name, gain in facts.gain.items() if gain == ""]
    parts = [f"It is worse for {_named(lose)}"] if lose else []
    if none and len(none) == len(facts.gain):
        parts.append("For no single client is a gain shown")
    elif none:
        parts.append(f"No gain is shown for {_named(none)}")
    return ". ".join([*parts, ""]).strip()


# --- words ----------------------------------------------------------------------------------------------------


def advice(arm: Arm) -> str:
    """Return what to do, in a sentence."""
    own = _own(arm)
    if arm.extreme == "nothing":
        return f"Train alone: share nothing{own}."
    if arm.extreme == "all":
        return f"Share all layers{own}."
    if arm.plan is None:
        return f"Use {arm.algorithm}{own}."
    shared, local = trained_layers(arm.plan)
    return f"Keep {_layers(local)} local and share {_layers(shared)}{own}."


def _own(arm: Arm) -> str:
    """Return an arm's own epochs in words; empty without any, or where all epochs are a client's own."""
    if not arm.epochs or arm.extreme == "nothing":
        return ""
    return f", then {plural(arm.epochs, 'epoch')} of its own"


WAYS = {"grouped": "sharing all layers in each group of clients"}
"""Algorithms without a plan, in words."""


def way(arm: Arm) -> str:
    """Return an arm as a way of training."""
    if arm.extreme == "nothing":
        return "training alone"
    if arm.extreme == "all":
        return f"sharing all layers{_own(arm)}"
    if arm.plan is None:
        return WAYS.get(arm.algorithm, arm.algorithm) + _own(arm)
    shared, _ = trained_layers(arm.plan)
    return f"sharing {_layers(shared)}{_own(arm)}"


def simple_model(facts: Facts) -> str:
    """Return the best simple model in words."""
    kind = KINDS[facts.simple.partition("_")[0]]
    if facts.simple.startswith("linear") and facts.kind in (CLASSIFICATION, MULTILABEL):
        kind = "logistic regression"
    elif facts.simple.startswith("linear") and facts.kind == SURVIVAL:
        kind = "Cox regression"
    return f"{kind} per client"


def label(facts: Facts) -> str:
    """Return the name of the deciding score in a sentence. Of numbers and of survival the loss is no log loss."""
    if facts.score != "loss":
        return label_of(facts.score)
    return "log loss" if facts.kind in (CLASSIFICATION, MULTILABEL) else "loss"


def capital(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def _layers(names: Sequence[str]) -> str:
    return listing(names) if len(names) <= NAMED + 1 else f"{len(names)} layers"


def _named(names: Sequence[str]) -> str:
    if len(names) <= NAMED:
        return listing(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _value(facts: Facts, name: str) -> str:
    share = " %" * TABLE[facts.score].share
    return f"{in_column(facts.score, facts.values[name])}{share}"


def bracket(score: str, low: float, high: float) -> str:
    """Return an interval in brackets; empty if it is unknown, also where no spread was seen.

    >>> bracket("macro_f1", 0.011, 0.029), bracket("macro_f1", 0.0, 0.0)
    (' [1.1, 2.9]', '')
    """
    ends = f" [{in_column(score, low)}, {in_column(score, high)}]"
    return ends if low < high else ""


def _signed(score: str, gap: Interval, than: str = "") -> str:
    """Return the size of a difference, its direction, and the interval of the size."""
    if math.isnan(gap.value):
        return ""
    higher = gap.value >= 0
    ends = gap[1:] if higher else (-gap.high, -gap.low)
    side = f"{'higher' if higher else 'lower'}{than}"
    return f"{in_points(score, abs(gap.value))} {side}{bracket(score, *ends)}"


def _events(facts: Facts, name: str) -> str:
    """Return the AUROC of two classes, and the number of events."""
    value = (facts.auroc or {}).get(name, math.nan)
    if math.isnan(value) or facts.score == "auroc":
        return ""
    return f" (AUROC {in_column('auroc', value)} %, {facts.events} events)"
