"""The report page of a race or a study: the outcome first, then its evidence and its pictures."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from diagnostics import plots
from diagnostics.plots.page import Page, figure_of
from fedlayers.studies.choice import Answers, Choice
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.first_screen import capital
from fl_core import __version__
from fl_core.config import OWN
from fl_core.data.partitions.base import SPLITS
from fl_core.display import in_order, printable
from fl_core.errors import listing, plural
from fl_core.plan import LayerPlan
from fl_core.rows import CLASSIFICATION, SCORES, label_of
from fl_core.run.costs import layer_bytes
from fl_core.run.task import Task
from fl_core.storage import format_bytes, write_atomically
from fl_core.training.phases import Training

COMPARISON_CAPTIONS = {
    "comparison": "Macro-F1 of each algorithm's final model, combined over clients by training samples; mean and 95 % "
    "interval over seeds.",
    "clients": "The same score client by client.",
    "learning": "Macro-F1 over the rounds. An algorithm that adapts to the clients at the end has one point.",
}


def write_page(
    choice: Choice,
    out: Path,
    command: str = "",
    lead: Answers | None = None,
    result: Comparison | None = None,
) -> Path:
    """Write the report page of a race or a study, and its pictures as PNG next to it.

    Args:
        lead: a study's outcome; by default the race's.
        result: a study's comparison.
    """
    task, lead = choice.task, choice.answers if lead is None else lead
    used = {} if choice.rates is None else {"lr": choice.rates.lr}
    config = task.config.with_keys(**used)
    name, model = Path(config.data.dataset).name, str(config.model.model)
    if model == OWN:
        model = "your model"
    title = f"Which layers of {model} to federate on {name}"
    page = Page(title, f"**{lead.head}**")
    if len(choice.evidence):
        caption = (
            f"{label_of(choice.inference.main)} on validation samples, against the leader's, with 95 % intervals. "
            "Below it are the recommended layers."
        )
        _add(page, out, "answer", draw_answer(choice), caption)
    page.text(f"**What to do next:** {choice.next_step(out, command)}")
    if len(choice.clients) > 1:
        _add(page, out, "clients_alone", draw_clients(choice.clients), CLIENTS_CAPTION)
    with page.fold("How sure the decision is"):
        _add_race(page, out, choice, lead)
    if choice.run is not None:
        with page.fold("Client by client"):
            _add_clients(page, out, choice)
    with page.fold("The question"):
        page.points(overview(task, choice))
    files = "`arms/` (all runs)"
    if result is not None:
        files = "`race/` (the arms), `comparison/` (all runs, their rows and table)"
        page.text("## Test scores of all algorithms")
        seeds = sorted(result.scores["seed"].unique())
        page.text(f"{plural(len(seeds), 'seed')}: {listing(map(str, seeds))}.")
        for name, figure in draw_comparison(result).items():
            _add(page, out, name, figure, COMPARISON_CAPTIONS[name])
        page.table(result.shown(), result.legend)
    with page.fold("The data"):
        if task.data.table.columns:
            shown = task.data.table.summary()
            page.table(pd.DataFrame(shown.rows, columns=shown.columns), shown.lead)
        if task.data.task == CLASSIFICATION:
            picture = figure_of(plots.partition(task.data.class_counts()))
            _add(page, out, "partition", picture, "Training samples by class.")
    training = Training.of(config.training)
    facts = [
        f"training: {plural(int(config.federation.rounds or 0), 'round')}, local epochs {training.epochs}, "
        f"batch {training.batch_size}, {config.training.loss}, {training.description}",
        f"next to this page: {files}",
        f"fedlayers {__version__}; data `{task.data.digest[:16]}`",
    ]
    if command:
        facts.append(f"command: `{command}`")
    if shared := [one.job.path for one in choice.runs if one.arm == "all"]:
        facts.append(
            "how much of the clients' differences each layer can absorb: `fedlayers choose --explain`, or "
            f"`fedlayers diagnose {shared[0]} --metrics layer_tuning --model personal`"
        )
    with page.fold("Settings"):
        page.points(facts)
    page.glossary(GLOSSARY)
    path = out / "report.html"
    page.write(path)
    return path


def _add_clients(page: Page, out: Path, choice: Choice) -> None:
    """Add the section on each client's test samples."""
    table = choice.clients
    if table.empty:
        page.text(
            "Not available: there are no test samples, or no client has the whole model."
        )
        return
    shown = table[["client", "train", "test"]].copy()
    if "macro_f1" in table:
        shown["macro-F1 %"] = (100 * table["macro_f1"]).map("{:.1f}".format)
        ends = 100 * table[["accuracy", "accuracy_low", "accuracy_high"]]
        shown["accuracy %"] = [
            f"{value:.1f} [{low:.1f}, {high:.1f}]"
            for value, low, high in ends.itertuples(index=False)
        ]
    losses = {"model": "loss", "base_rate": "base rate's", "alone": "alone"}
    for name in filter(table.__contains__, losses):
        shown[losses[name]] = table[name].map("{:.3f}".format)
    shown["shown"] = table["gain"].replace("", "no gain shown")
    over = "training alone" if "alone" in table else "the base rate"
    caption = (
        "Train and test: numbers of samples. The base rate's and alone: the losses of the base rate and without "
        f"sharing. Shown: whether the client gains on {over}, or loses against one of them, beyond chance."
    )
    page.table(
        shown,
        f"The recommended model ({choice.run.name if choice.run else ''}) on each client's test samples, with 95 % "
        f"intervals of accuracy over these samples. A wide interval means few samples. {caption}",
    )


def _add_race(page: Page, out: Path, choice: Choice, lead: Answers) -> None:
    """Add the section on the certainty of the decision: the arms, their differences, and the cost of the race."""
    page.table(choice.sure(), choice.legend)
    if lead.lines:
        page.points(map(printable, lead.lines))
    caption = (
        f"{capital(label_of(choice.main))} on validation samples while the arms race."
    )
    frames = [one.job.rows.assign(algorithm=one.arm) for one in choice.runs]
    frame = pd.concat(frames, ignore_index=True)
    picture = figure_of(plots.learning(frame, choice.main, split="validation"))
    _add(page, out, "race", picture, caption)
    if choice.rates is not None:
        page.text(choice.rates.text())


def _add(page: Page, out: Path, name: str, figure: Figure, caption: str) -> None:
    write_atomically(out / f"{name}.png", page.figure(figure, caption))
    plt.close(figure)


# --- pictures --------------------------------------------------------------------------------------------------


CLIENTS_CAPTION = (
    "Loss of each client's test samples: of the recommended model, of training alone where that is another one, and of "
    "the base rate. Lower is better."
)


def draw_answer(choice: Choice) -> Figure:
    """Draw how each arm, baseline and the base rate compare with the leader, and the plan as a strip."""
    by, table = choice.inference.main, choice.evidence
    tall = 0.9 + 0.26 * len(table)
    figure, axes = plt.subplots(
        2 if choice.plan is not None else 1,
        squeeze=False,
        figsize=(6.4, tall + 1.4 * (choice.plan is not None)),
        height_ratios=[tall, 1.4][: 1 + (choice.plan is not None)],
        layout="constrained",
    )
    upper, places = axes[0, 0], np.arange(len(table))
    value = table["difference"].fillna(0.0)
    value = value.where(table["difference"].notna() | (places == 0))
    ends = [value - table["low"], table["high"] - value]
    arms = {arm.name for arm in choice.arms}
    colours = ["C0" if name in arms else "0.5" for name in table["name"]]
    upper.errorbar(value, places, xerr=ends, fmt="none", ecolor=colours)
    upper.scatter(value, places, c=colours, zorder=3)
    upper.axvline(0, color="0.7", linewidth=0.8)
    upper.set_yticks(places, [str(name) for name in table["name"]])
    better = "higher" if SCORES[by] else "lower"
    upper.set(
        ylim=(len(table) - 0.5, -0.5),
        xlabel=f"{label_of(by)} minus the leader's ({better} is better)",
    )
    if choice.plan is not None:
        plan = LayerPlan(choice.plan.layers, choice.plan.shared)
        count = f"{len(plan.shared)} of {len(plan.names)} layers shared"
        plots.plan(plan, axes[1, 0]).set_title(count, fontsize=9)
    return figure


def draw_clients(clients: pd.DataFrame) -> Figure:
    """Draw a line for each client: the loss of the recommended model, of training alone and of the base rate."""
    table = clients.sort_values("model", kind="stable")
    figure, ax = plt.subplots(
        figsize=(6.4, 0.9 + 0.22 * len(table)), layout="constrained"
    )
    names = {"model": "recommended", "alone": "alone", "base_rate": "base rate"}
    known = [name for name in names if name in table]
    places = np.arange(len(table))
    values = table[known].to_numpy(float)
    ax.hlines(places, values.min(axis=1), values.max(axis=1), color="0.8", zorder=1)
    for name, colour in zip(known, ("C0", "C1", "0.5"), strict=False):
        ax.scatter(table[name], places, color=colour, label=names[name], zorder=2)
    ax.set_yticks(places, [printable(str(name)) for name in table["client"]])
    ax.set(xlabel="loss on test samples", ylim=(len(table) - 0.5, -0.5))
    ax.legend(loc="best", fontsize=8)
    return figure


def draw_comparison(comparison: Comparison) -> dict[str, Figure]:
    """Draw a comparison's pictures by name: scores with intervals, clients, and learning curves."""
    frame, score = comparison.frame, comparison.score
    return {
        "comparison": figure_of(comparison.plot()),
        "clients": figure_of(plots.clients(frame, score)),
        "learning": figure_of(plots.learning(frame, score)),
    }


# --- the first page --------------------------------------------------------------------------------------------

GLOSSARY = {
    "arm": "One way to share layers that takes part in a race.",
    "AUROC": "The probability that a sample of the class gets a higher number than another one. Guessing has 0.5.",
    "calibrated": "Of the samples with a predicted probability of 30 %, 30 % are of that class.",
    "client": "A participant with its own data, such as a hospital. Its samples stay with it.",
    "federate": "To train together: clients send parts of their models and get the average back.",
    "interval": "The range in which the true value lies in 95 of 100 such studies.",
    "loss": "For classes the log loss of calibrated predictions, else that of training. Lower is better.",
    "macro-F1": "The mean of each class's F1, which counts missed and false predictions. Rare classes count fully.",
    "base rate": "The share of each class among a client's training samples. Predicting it needs no model.",
    "plan": "The list of layers that clients share. The other layers stay with each client.",
    "race": "A trial of several arms on the same data, judged on validation samples.",
    "round": "One exchange: clients train, send what they share, and get the average back.",
    "seed": "The number of a repetition. Another seed draws other splits, starts and batches.",
    "test sample": "A sample that no training and no choice has seen.",
    "validation sample": "A sample that is not trained on and that choices are judged by.",
}
"""Terms of a report, for readers from other fields."""


def overview(task: Task, choice: Choice) -> list[str]:
    """Return the lines on the question: the model, the clients, their samples, and what the answer cost."""
    clients = task.data.clients
    total = ", ".join(
        f"{sum(len(client.split(split)) for client in clients):,} {split}"
        for split in SPLITS
    )
    smallest = min(clients, key=lambda client: len(client.train))
    lines = {
        "The question": "Should these clients train one model together, train alone, or share some layers of it? The "
        f"model has {plural(len(task.layers), 'layer')}: {listing(layer.label for layer in task.layers)}.",
        "Who took part": f"{plural(len(clients), 'client')}: {listing(in_order([c.name for c in clients]))}.",
        "How many samples": f"{total}. The smallest client, {smallest.name}, has {len(smallest.train):,} for training.",
        "Time and traffic": choice.cost_line,
    }
    if choice.plan is not None:
        sizes = layer_bytes(task.layers, task.model)
        shared, every = (
            sum(sizes[name] for name in choice.plan.shared),
            sum(sizes.values()),
        )
        share = f" ({100 * shared / every:.0f} %)" if every else ""
        lines["Time and traffic"] += (
            f" By this plan a client sends {format_bytes(shared)} of {format_bytes(every)}{share} in a round."
        )
    return [f"**{what}:** {printable(said)}" for what, said in lines.items()]
