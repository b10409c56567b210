"""The first page of a study's report: the outcome in plain words, for readers who train no models."""

from __future__ import annotations

import math

import pandas as pd

from fedlayers.studies import inference, summary
from fedlayers.studies.answers import NO
from fedlayers.studies.choice import Choice
from fedlayers.studies.runtime_estimate import format_seconds
from fl_core.costs.layers import layer_bytes
from fl_core.data.partitions.base import SPLITS
from fl_core.errors import listing, plural
from fl_core.limits import format_bytes
from fl_core.names import in_order, printable
from fl_core.plan import LayerPlan
from fl_core.scores import in_points, label_of
from fl_core.task import Task

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


def overview(
    task: Task,
    lead: summary.Headline,
    gains: pd.DataFrame,
    choice: Choice | None,
    plan: LayerPlan | None,
    seeds: int,
) -> list[str]:
    """Return the lines of the first page: the data, the outcome, its certainty and cost, and what to do next.

    Args:
        lead: the outcome. ``gains`` has the numbers behind it.
        choice: the race; None if a rule decided.
        plan: the one of the outcome, if any.
        seeds: number of repetitions.
    """
    names = in_order([client.name for client in task.data.clients])
    counts = {
        split: [len(client.split(split)) for client in task.data.clients]
        for split in SPLITS
    }
    smallest = min(task.data.clients, key=lambda client: len(client.train))
    total = ", ".join(
        f"{sum(counts[split]):,} for {what}" for split, what in _PURPOSES.items()
    )
    lines = {
        "The question": "Should these clients train one model together, train alone, or share some layers of it? The "
        f"model has {len(task.layers)} layers: {listing(layer.name for layer in task.layers)}.",
        "Who took part": f"{plural(len(names), 'client')}: {listing(names)}.",
        "How many samples": f"{total}. The smallest client, {smallest.name}, has {len(smallest.train):,} for training.",
        "The outcome": f"{lead.head} {_describe_gains(gains)}".strip(),
        "How sure": " ".join(lead.answers)
        if choice is None
        else _describe_certainty(choice, seeds),
        "The cost": " ".join(
            filter(None, [_describe_race(choice), _describe_traffic(task, plan)])
        ),
        "What to do next": _next(lead, choice, plan),
    }
    return [f"**{what}:** {printable(said)}" for what, said in lines.items() if said]


_PURPOSES = {"train": "training", "validation": "validation", "test": "testing"}


def _describe_gains(gains: pd.DataFrame) -> str:
    """Compare the outcome with the other choices in a sentence, each by the comparison's score."""
    parts = []
    for line in gains.drop_duplicates("against").itertuples():
        side = f"{in_points(str(line.metric), abs(line.value))} {'higher' if line.value >= 0 else 'lower'}"
        chance = "may be chance" if line.sign == summary.LEVEL else "beyond chance"
        chance = (
            "one repetition, so it may be chance" if math.isnan(line.low) else chance
        )
        found = "the same" if line.sign == summary.SAME else f"{side} ({chance})"
        parts.append(f"against {summary.AGAINST[str(line.against)]}: {found}")
    return (
        f"On test samples, {label_of(gains['metric'].iloc[0])} {'; '.join(parts)}."
        if parts
        else ""
    )


def _describe_certainty(choice: Choice, seeds: int) -> str:
    found = choice.inference
    if found.verdict == inference.NOTHING:
        return "No arm has a lower loss than the base rate, so none is recommended."
    if found.verdict == inference.ALL_DIVERGED:
        return "Unknown. The training of every arm failed in some repetition."
    if seeds == 1:
        return "For this run only. One repetition cannot show what another would give."
    if found.verdict == inference.DECIDED:
        return (
            f"Sure for these data: in {seeds} repetitions all other arms were worse than "
            f"{found.leader} beyond chance."
        )
    stake = found.at_stake()
    lost = f", by at most {in_points(choice.main, stake)}" if stake > 0 else ""
    return (
        f"Not sure which is best. In {seeds} repetitions {len(found.remaining)} of {len(choice.arms)} arms show no "
        f"significant difference. One may be better in {label_of(choice.main)}{lost}."
    )


def _describe_race(choice: Choice | None) -> str:
    if choice is None:
        return "A measurement decided, so no arm was trained for the decision."
    cost = choice.measured
    sent, took = format_bytes(cost.n_bytes), format_seconds(cost.seconds)
    return f"The race took {cost.rounds:,} rounds, {sent} sent and received, and {took} of training."


def _describe_traffic(task: Task, plan: LayerPlan | None) -> str:
    if plan is None:
        return ""
    sizes = layer_bytes(task.layers, task.model)
    shared, every = sum(sizes[name] for name in plan.shared), sum(sizes.values())
    share = f" ({100 * shared / every:.0f} %)" if every else ""
    return f"By this plan a client sends {format_bytes(shared)} of {format_bytes(every)}{share} in a round."


def _next(lead: summary.Headline, choice: Choice | None, plan: LayerPlan | None) -> str:
    verdict = "" if choice is None else choice.inference.verdict
    if verdict == inference.NOTHING or lead.codes["guessing"] == NO:
        return (
            "Do not use these models yet. Check the labels and the columns. Then train for more rounds (`--rounds`) "
            "or at another learning rate (`--lr`, `choose --tune-rates 4`)."
        )
    if verdict == inference.ALL_DIVERGED:
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
    if verdict == inference.DECIDED:
        return f"{use} Check the models on new samples before anybody relies on them."
    more = (
        "`--seeds 5`"
        if choice.inference.seeds == 1
        else "more seeds (`--seeds 10`) or more samples"
    )
    return (
        f"For a surer answer repeat with {more}. Until then: {use[0].lower()}{use[1:]}"
    )
