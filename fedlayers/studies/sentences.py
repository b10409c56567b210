"""The sentences of a choice or a study: what to do, how certain that is, what it gains, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from fedlayers.studies import inference as sure
from fedlayers.studies.arms import Arm
from fedlayers.studies.inference import Inference
from fl_core import statistics
from fl_core.costs.layers import layer_bytes
from fl_core.data.partitions.base import SPLITS
from fl_core.errors import check_known, listing, plural
from fl_core.limits import format_bytes
from fl_core.names import in_order, printable
from fl_core.plan import LayerPlan
from fl_core.scores import SCORES, in_column, in_points, label_of
from fl_core.task import Task

if TYPE_CHECKING:
    from fedlayers.studies.choice import Choice
    from fedlayers.studies.comparison import Comparison

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
COLUMNS = ["against", "metric", "value", "low", "high", "sign", "better"]


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


# --- the first page of a report --------------------------------------------------------------------------------

GLOSSARY = {
    "accuracy": "The share of samples whose class is predicted right.",
    "arm": "One way to share layers that takes part in a race.",
    "AUROC": "The probability that a sample of the class gets a higher number than another one. Guessing has 0.5.",
    "calibrated": "Of the samples with a predicted probability of 30 %, 30 % are of that class.",
    "CKA": "A number from 0 to 1 for how alike two models represent the same samples.",
    "client": "A participant with its own data, such as a hospital. Its samples stay with it.",
    "confidence interval": "See interval.",
    "federate": "To train together: clients send parts of their models and get the average back.",
    "Hessian": "The second derivative of the loss. Its trace says how sharply the loss curves.",
    "interval": "The range in which the true value lies in 95 of 100 such studies.",
    "layer": "A part of the model. Samples pass the layers one by one.",
    "loss": "The number that training makes small. It is lower for better and for more certain predictions.",
    "macro-F1": "The mean of each class's F1, which counts missed and false predictions. Rare classes count fully.",
    "base rate": "The share of each class among a client's training samples. Predicting it needs no model.",
    "null": "The same measurement where there is nothing to find, such as on shuffled labels.",
    "plan": "The list of layers that clients share. The other layers stay with each client.",
    "point": "The difference between 60 % and 61 %.",
    "race": "A trial of several arms on the same data, judged on validation samples.",
    "ROC": "The true positive rate against the false positive rate, over all thresholds of the probability.",
    "round": "One exchange: clients train, send what they share, and get the average back.",
    "seed": "The number of a repetition. Another seed draws other splits, starts and batches.",
    "sensitivity": "How much the loss changes if a layer's weights change.",
    "test sample": "A sample that no training and no choice has seen.",
    "validation sample": "A sample that is not trained on and that choices are judged by.",
}
"""Terms of a report, for readers from other fields."""
_PURPOSES = {"train": "training", "validation": "validation", "test": "testing"}


def overview(
    task: Task, found: Answers, choice: Choice | None, plan: LayerPlan | None
) -> list[str]:
    """Return the lines of the first page: the data, the outcome, its certainty and cost, and what to do next.

    Args:
        choice: the race; None if a rule decided.
        plan: the one of the outcome, if any.
    """
    clients = task.data.clients
    total = ", ".join(
        f"{sum(len(client.split(split)) for client in clients):,} for {_PURPOSES[split]}"
        for split in SPLITS
    )
    smallest = min(clients, key=lambda client: len(client.train))
    cost = "A measurement decided, so no arm was trained for the decision."
    if choice is not None:
        cost = choice.cost_line
    lines = {
        "The question": "Should these clients train one model together, train alone, or share some layers of it? The "
        f"model has {len(task.layers)} layers: {listing(layer.name for layer in task.layers)}.",
        "Who took part": f"{plural(len(clients), 'client')}: {listing(in_order([c.name for c in clients]))}.",
        "How many samples": f"{total}. The smallest client, {smallest.name}, has {len(smallest.train):,} for training.",
        "The outcome": " ".join(
            [found.head, *(f"On test samples {gain}." for gain in found.gains)]
        ),
        "How sure": " ".join(found.lines),
        "The cost": f"{cost} {_traffic(task, plan)}".strip(),
        "What to do next": _next(found, choice, plan),
    }
    return [f"**{what}:** {printable(said)}" for what, said in lines.items() if said]


def _traffic(task: Task, plan: LayerPlan | None) -> str:
    if plan is None:
        return ""
    sizes = layer_bytes(task.layers, task.model)
    shared, every = sum(sizes[name] for name in plan.shared), sum(sizes.values())
    share = f" ({100 * shared / every:.0f} %)" if every else ""
    return f"By this plan a client sends {format_bytes(shared)} of {format_bytes(every)}{share} in a round."


def _next(found: Answers, choice: Choice | None, plan: LayerPlan | None) -> str:
    verdict = "" if choice is None else choice.inference.verdict
    if found.useless:
        return (
            "Do not use these models yet. Check the labels and the columns. Then train for more rounds (`--rounds`) "
            "or at another learning rate (`--lr`, `choose --tune-rates 4`)."
        )
    if verdict == sure.ALL_DIVERGED:
        return "Repeat with a smaller learning rate (`--lr`)."
    shares = plan is None or bool(set(plan.shared) & set(plan.trainable))
    chosen = None if choice is None else choice.winner
    algorithm = "fedper" if chosen is None else chosen.algorithm
    run = f"`fedlayers run --algorithm {algorithm}{' --plan plan.json' * (plan is not None)}`"
    use = (
        f"Train with {run}."
        if shares
        else "Each client can train alone: nothing has to be sent."
    )
    if choice is None:
        return f"{use} A race checks the rule: run `fedlayers study` without `--rule`."
    if verdict == sure.DECIDED:
        return f"{use} Check the models on new samples before anybody relies on them."
    more = (
        "`--seeds 5`"
        if choice.inference.seeds == 1
        else "more seeds (`--seeds 10`) or more samples"
    )
    return (
        f"For a surer answer repeat with {more}. Until then: {use[0].lower()}{use[1:]}"
    )
