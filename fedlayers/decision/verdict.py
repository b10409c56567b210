"""The verdict: the answer that a table of losses gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedlayers.decision.answer import GAINS, LOSES, NONE_SHOWN, Answer, Line
from fedlayers.decision.table import (
    BASE_RATE,
    FEDAVG,
    TEST,
    VALIDATION,
    LossTable,
    recommended,
)
from fedlayers.decision.ways import (
    ALONE,
    NONE,
    SHARE_ALL,
    SHARE_SOME,
    Way,
    trained_layers,
)
from fl_core.plan import LayerPlan
from fl_core.rows import TABLE
from fl_core.statistics import SIGNIFICANCE, Estimate, holm

SIMPLE = ("linear_local", "boosting_local")
"""The simple models of each client."""
POOLED = ("linear_pooled", "boosting_pooled")
"""The simple models of all rows together, which are never recommended."""
LEAST_DIGITS, MOST_DIGITS = 2, 4


def actions_of(ways: Sequence[Way]) -> dict[str, str]:
    """Return the action of each way: ``share_all``, ``share_some`` or ``alone``, also for the simple ways."""
    actions = {way.name: way.action for way in ways}
    return actions | dict.fromkeys(SIMPLE, ALONE)


def answer(
    table: LossTable,
    losses: LossTable,
    actions: Mapping[str, str],
    plans: Mapping[str, LayerPlan | None],
    **facts: Any,
) -> Answer:
    """Return the answer that a table of losses gives.

    Args:
        table: the table of the score that ranks.
        losses: the table of the loss, for the statements on clients.
        actions: the action of each way that may be recommended.
        plans: the plan of each way of the network.
        facts: further attributes of the answer, such as ``task``. Also ``tuning``, the (epochs, learning rate) of
            fine-tuning by way, from which ``fine_tuning`` and ``rate`` are set.
    """
    names = [way for way in actions if way in table.ways]
    way = recommended(table, names) or ""
    split = VALIDATION
    if TEST in table.splits:
        split = TEST
    order = sorted(
        [name for name in table.ways if name != way],
        key=lambda name: -table.sign * table.mean(name, VALIDATION),
    )
    first_way = way or BASE_RATE
    order = [name for name in order if name != first_way]
    lines, digits = _lines(table, first_way, order, split, actions)
    by_name = {line.way: line for line in lines}
    action = NONE
    if way:
        action = actions[way]
    network = recommended(table, [name for name in names if name in plans]) or ""
    rivals = _rivals(table, way, names, actions)
    tuning = facts.pop("tuning", {})
    epochs, rate = tuning.get(way, (0, 0.0))
    plan = plans.get(way)
    clients: dict[str, str] = {}
    fallback: tuple[str, ...] = ()
    if way:
        clients = _clients(losses, way, split)
        if "fallback" not in facts.get("not_tried", {}):
            fallback = _fallback(losses, way)
    shared = [name for name in names if actions[name] == SHARE_ALL]
    return Answer(
        action,
        way,
        lines,
        table.score,
        split,
        digits,
        seeds=table.seeds,
        plan=plan,
        fine_tuning=epochs,
        rate=rate,
        network=network,
        better_than=tuple(by_name[name] for name in rivals),
        also_good=_also_good(lines, action, way),
        pooled=_pooled_line(table, lines, way),
        clients=clients,
        fallback=fallback,
        new_client=recommended(table, shared) or "",
        samples=table.parts[table.seeds[0], first_way, split].samples,
        smallest=_smallest(table, lines),
        layers=_layers(plan),
        **facts,
    )


def _lines(
    table: LossTable,
    first_way: str,
    others: Sequence[str],
    split: str,
    actions: Mapping[str, str],
) -> tuple[tuple[Line, ...], int]:
    """Return the lines of the table with rounded numbers, and their digits after the point.

    Digits are those of :func:`_digits` for the intervals. The printed interval is widened
    where rounding would leave the difference outside.
    """
    unit = 100 if TABLE[table.score].share else 1
    gaps: dict[str, Estimate] = {}
    for name in others:
        gain = table.gain(name, first_way, split)  # above 0: the other is better
        value = unit * table.sign * gain.value
        gaps[name] = Estimate(value, unit * gain.error, gain.free)
    intervals = {name: gap.interval(len(gaps)) for name, gap in gaps.items()}
    digits = _digits([(line.low, line.high) for line in intervals.values()])

    def rounded(name: str) -> float:
        return round(unit * table.mean(name, split), digits)

    lines = [Line(first_way, actions.get(first_way, ""), rounded(first_way))]
    for name in others:
        value = rounded(name)
        difference = round(value - lines[0].value, digits)
        low, high = (round(end, digits) for end in intervals[name][1:])
        low, high = min(low, difference), max(high, difference)
        if math.isnan(intervals[name].low) or low == high:
            low = high = math.nan  # no spread, no claim
        error = gaps[name].error
        line = Line(name, actions.get(name, ""), value, difference, low, high, error)
        lines.append(line)
    return tuple(lines), digits


def _digits(ends: Sequence[tuple[float, float]]) -> int:
    """Return the digits after the point that show two significant digits of each interval's larger end.

    They are from 2 to 4. Ends that are 0 or unknown do not count.

    >>> _digits([(0.39, 1.02), (-0.01, 0.02)]), _digits([(3.0, 12.0)])
    (3, 2)
    """
    digits = [LEAST_DIGITS]
    for low, high in ends:
        size = max(abs(low), abs(high))
        if math.isfinite(size) and size > 0:
            digits.append(1 - math.floor(math.log10(size)))
    return min(MOST_DIGITS, max(digits))


def _rivals(
    table: LossTable, way: str, names: Sequence[str], actions: Mapping[str, str]
) -> list[str]:
    """Return the ways with which the recommended one is compared in words, each once.

    They are local training, the best simple model, the best way of each other action
    and FedAvg. If a way is recommended, the base rate follows. The best is that by
    validation samples.
    """

    def best(ways: Sequence[str]) -> list[str]:
        present_ways = [name for name in ways if name in table.ways and name != way]
        score = {
            name: table.sign * table.mean(name, VALIDATION) for name in present_ways
        }
        if present_ways:
            return [max(present_ways, key=score.__getitem__)]
        return []

    rivals = best(["local"]) + best(SIMPLE)
    for action in (SHARE_ALL, SHARE_SOME, ALONE):
        if not way or actions[way] != action:
            rivals += best([name for name in names if actions[name] == action])
    if way != FEDAVG:
        rivals += best([FEDAVG])
    if way and BASE_RATE in table.ways:
        rivals.append(BASE_RATE)
    return list(dict.fromkeys(rivals))


def _also_good(lines: Sequence[Line], action: str, way: str) -> tuple[Line, ...]:
    """Return at most two lines of other actions within one standard error, those that do not federate first."""
    if not way:
        return ()
    near_lines = [
        line
        for line in lines[1:]
        if line.action not in ("", action)
        and abs(line.difference) <= line.error
        and not line.shown
    ]
    near_lines.sort(key=lambda line: line.action != ALONE)
    return tuple(near_lines[:2])


def _pooled_line(table: LossTable, lines: Sequence[Line], way: str) -> Line | None:
    """Return the line of the best pooled model, if it is shown to be better.

    It must be better than the recommended way. The best is that by validation samples.
    The result is None if it is not better, or no way is recommended.
    """
    pooled_lines = [line for line in lines[1:] if line.way in POOLED]
    if not pooled_lines or not way:
        return None
    best_line = max(
        pooled_lines, key=lambda one: table.sign * table.mean(one.way, VALIDATION)
    )
    is_better = best_line.shown and table.sign * best_line.difference > 0
    if is_better:
        return best_line
    return None


def _clients(losses: LossTable, way: str, split: str) -> dict[str, str]:
    """Return what is shown of each client against local training and its own linear model, corrected by Holm.

    A client loses if one of them is shown to have a lower loss than the way. It gains
    if the way is shown to have a lower loss than both. The recommended way is not
    compared with itself. Clients without samples are left out.
    """
    rivals: list[str] = [
        name
        for name in ("linear_local", "local")
        if name != way and name in losses.ways
    ]
    gains = {rival: losses.by_client(way, rival, split) for rival in rivals}
    keys: list[tuple[str, str]] = []
    for rival in gains:
        keys += [(rival, client) for client in gains[rival]]
    corrected_p_values = holm([gains[rival][client].p_value for rival, client in keys])
    p_values = dict(zip(keys, corrected_p_values, strict=True))
    verdicts = {}
    for client in losses.clients:
        comparisons = [
            (gains[rival][client].value, p_values[rival, client] <= SIGNIFICANCE)
            for rival in rivals
            if client in gains[rival]
        ]
        if not comparisons:
            continue
        verdicts[client] = NONE_SHOWN
        if any(is_shown and value < 0 for value, is_shown in comparisons):
            verdicts[client] = LOSES
        elif all(is_shown and value > 0 for value, is_shown in comparisons):
            verdicts[client] = GAINS
    return verdicts


def _fallback(losses: LossTable, way: str) -> tuple[str, ...]:
    """Return the clients whose validation loss is shown to be lower with local training, corrected by Holm."""
    if way == "local" or "local" not in losses.ways:
        return ()
    gains = losses.by_client("local", way, VALIDATION)
    corrected_p_values = holm([gain.p_value for gain in gains.values()])
    return tuple(
        client
        for (client, gain), p in zip(gains.items(), corrected_p_values, strict=True)
        if gain.value > 0 and p <= SIGNIFICANCE
    )


def _smallest(table: LossTable, lines: Sequence[Line]) -> float:
    """Return the smallest difference to local training that the samples would show.

    It is half the width of the interval. Without local training the difference to
    FedAvg counts, or else that to the base rate. It is NaN without any interval.
    """
    for reference_way in ("local", FEDAVG, BASE_RATE):
        for line in lines[1:]:
            if line.way == reference_way and math.isfinite(line.high):
                return (line.high - line.low) / 2
    return math.nan


def _layers(plan: LayerPlan | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if plan is None:
        return (), ()
    shared, local = trained_layers(plan)
    return tuple(shared), tuple(local)
