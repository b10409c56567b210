"""The report page of an answer: what to do first, then its evidence and its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from diagnostics import plots
from diagnostics.plots.drawing import as_label, check_letters
from diagnostics.plots.page import Page, figure_of
from fedlayers.decision.answer import Answer, bullets, legend, score_name
from fedlayers.decision.comparison import Comparison
from fedlayers.decision.price import format_seconds
from fedlayers.decision.table import BASE_RATE
from fedlayers.decision.training import training_of
from fl_core import __version__
from fl_core.config import OWN
from fl_core.data.partitions.base import SPLITS
from fl_core.display import in_order, printable
from fl_core.errors import RunError, listing, plural
from fl_core.plan import LayerPlan, labels_of
from fl_core.rows import CLASSIFICATION, SCORES, main_score
from fl_core.run.costs import layer_bytes
from fl_core.run.task import Task
from fl_core.storage import format_bytes, write_atomically

COMPARISON_CAPTIONS = {
    "comparison": "Macro-F1 of each algorithm's final model, combined over clients by training samples; mean and 95 % "
    "interval over seeds.",
    "clients": "The same score client by client.",
    "learning": "Macro-F1 over the rounds. An algorithm that adapts to the clients at the end has one point.",
}
CLIENTS_CAPTION = (
    "Loss of each client's test samples: of the recommended way, of local training and of the base rate, in the first "
    "seed. Lower is better."
)


def write_page(answer: Answer, out: Path, command: str = "") -> Path:
    """Write the report page of an answer, and its pictures as PNG next to it. Return the path of the page.

    Args:
        answer: the answer of a decision.
        out: the folder to write to.
        command: the command as it was typed, for the page.

    Raises:
        RunError: the answer was read from a file, without its runs.
    """
    if answer.trained is None:
        raise RunError("a report must have the runs of its answer; got none.")
    question = answer.trained.question
    task = question.task
    name, model = Path(task.config.data.dataset).name, str(task.config.model.model)
    if model == OWN:
        model = "your model"
    page = Page(
        f"Which layers of {model} to federate on {name}", f"**{answer.headline()}**"
    )
    score_title = score_name(answer).capitalize()
    caption = (
        f"{score_title} of each way on {answer.split} samples. Lines are 95 % intervals of "
        "the difference to the recommended way."
    )
    _add(page, out, "answer", draw_answer(answer), caption)
    page.points(map(printable, bullets(answer)))
    if answer.next:
        page.text(
            f"**What to do next:** `{answer.next}` writes the recommended models."
        )
    clients = client_losses(answer)
    if len(clients) > 1:
        _add(page, out, "clients_alone", draw_clients(clients), CLIENTS_CAPTION)
    with page.fold("How sure the decision is"):
        page.table(answer.shown(), legend(answer))
        _add_learning(page, out, answer)
        if answer.rates:
            page.text(answer.rates)
        if answer.not_tried:
            reasons = [f"{way}: {reason}" for way, reason in answer.not_tried.items()]
            page.text("Not tried, or without a result:")
            page.points(map(printable, reasons))
    if len(clients):
        with page.fold("Client by client"):
            page.table(clients.round(3), CLIENTS_CAPTION)
    with page.fold("The question"):
        page.points(overview(task, answer))
    with page.fold("The data"):
        if task.data.table.columns:
            table_summary = task.data.table.summary()
            page.table(
                pd.DataFrame(table_summary.rows, columns=table_summary.columns),
                table_summary.lead,
            )
        if task.data.task == CLASSIFICATION:
            counts = task.data.class_counts()
            axes = plots.partition(counts)
            axes.set_title(partition_title(counts), fontsize=9)
            picture = figure_of(axes)
            _add(page, out, "partition", picture, "Training samples by class.")
    training_text = training_of(answer.trained)
    facts = [
        f"training: {training_text}, {task.config.training.loss}",
        "next to this page: `arms/` (all runs), `models/`, `plans/`, `choice.json`",
        f"fedlayers {__version__}; data `{task.data.digest[:16]}`",
    ]
    if command:
        facts.append(f"command: `{command}`")
    if fedavg_runs := answer.trained.runs.get("fedavg"):
        path = fedavg_runs[question.seeds[0]].job.path
        facts.append(
            "how much of the clients' differences each layer can absorb: "
            f"`fedlayers diagnose {path} --metrics layer_tuning --model personal`"
        )
    with page.fold("Settings"):
        page.points(facts)
    page.glossary(GLOSSARY)
    path = out / "report.html"
    page.write(path)
    return path


def client_losses(answer: Answer) -> pd.DataFrame:
    """Return a line for each client: its test losses in the first seed, and what they show.

    Columns are ``client``, the losses of the recommended way, of ``local``, ``linear_local`` and ``base_rate`` where
    they exist, and ``shown``: whether the client gains or loses. The table is empty without a recommended way, without
    test samples, or for an answer from a file.
    """
    trained = answer.trained
    if trained is None or not answer.way or answer.split != "test":
        return pd.DataFrame()
    seed = trained.question.seeds[0]
    losses = trained.question.losses[seed]
    predictors = {
        name: predictor
        for run_seed, name, predictor in trained.predictors()
        if run_seed == seed
    }
    predictors[BASE_RATE] = losses.base_rate
    names = dict.fromkeys((answer.way, "local", "linear_local", BASE_RATE))
    table = pd.DataFrame(
        {
            name: losses.by_client(predictors[name])["loss"]
            for name in names
            if name in predictors
        }
    )
    table.insert(0, "client", table.index)
    table["shown"] = [answer.clients.get(str(name), "") for name in table.index]
    return table.reset_index(drop=True)


def _add_learning(page: Page, out: Path, answer: Answer) -> None:
    """Add the learning curves of all runs to a page, if the answer has its runs."""
    if answer.trained is None:
        return
    frames = []
    for name, by_seed in answer.trained.runs.items():
        frames += [
            finished_run.job.rows.assign(algorithm=name)
            for finished_run in by_seed.values()
        ]
    frame = pd.concat(frames, ignore_index=True)
    main_metric = main_score(frame["metric"].unique())
    axes = plots.learning(frame, main_metric, split="validation")
    axes.set_title(learning_title(axes, main_metric), fontsize=9)
    picture = figure_of(axes)
    caption = (
        "The main score on validation samples during training, before fine-tuning."
    )
    _add(page, out, "learning", picture, caption)


def learning_title(axes: Axes, score: str) -> str:
    """Return a title for the learning curves: which way has the best score at its last round."""
    curve_by_label = {
        str(line.get_label()): line.get_ydata() for line in axes.get_lines()
    }
    scores = pd.Series(
        {name: float(np.asarray(y)[-1]) for name, y in curve_by_label.items()}
    )
    scores = scores.dropna()
    if scores.empty:
        return "no way has a score at its last round"
    best_name = scores.idxmin()
    if SCORES[score]:
        best_name = scores.idxmax()
    return f"{best_name} is best at its last round: {scores[best_name]:.3g}"


def partition_title(counts: pd.DataFrame) -> str:
    """Return a title for the class counts: which client has the largest share of one class.

    >>> partition_title(pd.DataFrame({"well": [9, 5], "died": [1, 5]}, index=["north", "south"]))
    'north: 90% of its samples are well'
    """
    shares = counts.div(counts.sum(axis=1), axis=0)
    largest = shares.max(axis=1)
    client = largest.idxmax()
    kind = shares.loc[client].idxmax()
    client_name, class_label = as_label(client), as_label(kind)
    return f"{client_name}: {largest[client]:.0%} of its samples are {class_label}"


def _add(page: Page, out: Path, name: str, figure: Figure, caption: str) -> None:
    write_atomically(out / f"{name}.png", page.figure(figure, caption))
    plt.close(figure)


# --- pictures --------------------------------------------------------------------------------------------------


def draw_answer(answer: Answer) -> Figure:
    """Draw each way's score with the interval of its difference to the recommended one, and the plan as a strip.

    About half of the ways, those nearest to the recommended one, set the axis. A way
    far outside it is an arrow at the edge, with its number.
    """
    lines, height = answer.lines, 0.9 + 0.26 * len(answer.lines)
    has_plan = answer.plan is not None
    figure, axes = plt.subplots(
        2 if has_plan else 1,
        squeeze=False,
        figsize=(6.4, height + 1.4 * has_plan),
        height_ratios=[height, 1.4][: 1 + has_plan],
        layout="constrained",
    )
    upper_axes, positions = axes[0, 0], np.arange(len(lines))
    values = np.array([line.value for line in lines])
    gaps = np.array([line.difference for line in lines])
    low = gaps - np.array([line.low for line in lines])
    high = np.array([line.high for line in lines]) - gaps
    colours = ["C0" if line.action or not answer.way else "0.5" for line in lines]
    colours[0] = "C1"
    upper_axes.errorbar(
        values, positions, xerr=np.nan_to_num([low, high]), fmt="none", ecolor=colours
    )
    upper_axes.scatter(values, positions, c=colours, zorder=3)
    upper_axes.axvline(values[0], color="0.7", linewidth=0.8)
    is_way = np.array([bool(line.action) or k == 0 for k, line in enumerate(lines)])
    reach = np.sort(np.abs(gaps[is_way]))[: 2 + is_way.sum() // 2].max(initial=0.0)
    if reach > 0 and np.abs(gaps).max() > 4 * reach:
        edges = values[0] - 1.5 * reach, values[0] + 1.5 * reach
        if values.min() >= 0:
            edges = max(0.0, edges[0]), edges[1]
        mark_beyond(upper_axes, positions, values, edges, answer.digits)
    upper_axes.set_yticks(positions, [as_label(line.way) for line in lines])
    upper_axes.set_title(title_of(answer), fontsize=9)
    better_word = "higher" if SCORES[answer.score] else "lower"
    score_text = score_name(answer)
    upper_axes.set(
        ylim=(len(lines) - 0.5, -0.5),
        xlabel=f"{answer.split} {score_text} ({better_word} is better)",
    )
    if answer.plan is not None:
        plan = LayerPlan(answer.plan.layers, answer.plan.shared)
        count = f"{len(plan.shared)} of {len(plan.names)} layers shared"
        plots.plan(plan, axes[1, 0]).set_title(count, fontsize=9)
    return figure


def title_of(answer: Answer) -> str:
    """Return the title of a picture of the answer: the recommended way and its score."""
    if not answer.way:
        return "No way is recommended"
    value = f"{answer.lines[0].value:.{answer.digits}f}"
    way_label = as_label(answer.way)
    score_text = score_name(answer)
    return f"{way_label} is recommended: {answer.split} {score_text} {value}"


def mark_beyond(
    ax: Axes,
    places: NDArray[np.int64],
    values: NDArray[np.float64],
    edges: tuple[float, float],
    digits: int,
) -> None:
    """End the x axis at two edges. A value beyond an edge is written there, with an arrow.

    Args:
        ax: the Axes to draw on.
        places: position of each value on the y axis, [n].
        values: the values, [n].
        edges: left and right end of the axis.
        digits: digits after the decimal point.
    """
    ax.set_xlim(*edges)
    for place, value in zip(places, values, strict=True):
        if value > edges[1]:
            text, edge, align = f"{value:.{digits}f} →", edges[1], "right"
        elif value < edges[0]:
            text, edge, align = f"← {value:.{digits}f}", edges[0], "left"
        else:
            continue
        text_style: dict[str, Any] = {"va": "center", "ha": align, "fontsize": 8}
        box_style = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(edge, place, text, bbox=box_style, **text_style)


def draw_clients(clients: pd.DataFrame) -> Figure:
    """Draw a line for each client: the losses of :func:`client_losses`, lowest first.

    The recommended way is drawn on top. The ways set the axis: a base rate far outside it is an arrow.
    """
    names = [name for name in clients.columns if name not in ("client", "shown")]
    table = clients.sort_values(names[0], kind="stable")
    figure, ax = plt.subplots(
        figsize=(6.4, 0.9 + 0.22 * len(table)), layout="constrained"
    )
    positions = np.arange(len(table))
    values = table[names].to_numpy(float)
    ax.hlines(positions, values.min(axis=1), values.max(axis=1), color="0.8", zorder=1)
    for place, name in enumerate(names):
        colour = "0.5" if name == BASE_RATE else f"C{(1, 0, 2, 3)[place]}"
        label = as_label(name)
        if not place:
            label += " (recommended)"
        ax.scatter(table[name], positions, color=colour, label=label, zorder=9 - place)
    way_losses = table[[name for name in names if name != BASE_RATE]].to_numpy(float)
    lowest_loss, highest_loss = np.nanmin(way_losses), np.nanmax(way_losses)
    excess = np.nanmax(values) - highest_loss
    if len(names) > 1 and excess > highest_loss - lowest_loss > 0:
        margin = 0.3 * (highest_loss - lowest_loss)
        highest = np.where(
            values.max(axis=1) > highest_loss + margin, values.max(axis=1), np.nan
        )
        mark_beyond(
            ax, positions, highest, (lowest_loss - margin, highest_loss + margin), 2
        )
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.set_yticks(
        positions, [as_label(printable(str(name))) for name in table["client"]]
    )
    ax.set(xlabel="loss on test samples", ylim=(len(table) - 0.5, -0.5))
    if "local" in names[1:]:
        n_lower = int((table[names[0]] < table["local"]).sum())
        client_label = as_label(names[0])
        ax.set_title(
            f"{client_label} has a lower loss than local training at {n_lower} of {plural(len(table), 'client')}",
            fontsize=9,
        )
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8)
    check_letters([ax])
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
    "AUROC": "The probability that a sample of the class gets a higher number than another one. Guessing has 0.5.",
    "base rate": "The share of each class among a client's training samples. Predicting it needs no model.",
    "calibrated": "Of the samples with a predicted probability of 30 %, 30 % are of that class.",
    "client": "A participant with its own data, such as a hospital. Its samples stay with it.",
    "federate": "To train together: clients send parts of their models and get the average back.",
    "fine-tuning": "Epochs that each client trains alone after the last round.",
    "interval": "The range in which the true value lies in 95 of 100 such decisions.",
    "local training": "Each client trains the network alone.",
    "loss": "For classes the log loss of calibrated predictions, else that of training. Lower is better.",
    "plan": "The list of layers that clients share. The other layers stay with each client.",
    "round": "One exchange: clients train, send what they share, and get the average back.",
    "seed": "The number of a repetition. Another seed draws other validation samples, starts and batches.",
    "test sample": "A sample that no training and no choice has seen.",
    "validation sample": "A sample that is not trained on and that choices are judged by.",
    "way": "An algorithm with the layers that it shares, or a simple model.",
}
"""The meanings of a report's terms, by term."""


def overview(task: Task, answer: Answer) -> list[str]:
    """Return lines of Markdown on the setting: the model, the clients, their samples, and the answer's cost."""
    clients = task.data.clients
    counts = []
    for split in SPLITS:
        count = sum(len(client.split(split)) for client in clients)
        counts.append(f"{count:,} {split}")
    total = ", ".join(counts)
    smallest = min(clients, key=lambda client: len(client.train))
    names = listing(in_order([client.name for client in clients]))
    layers = listing(labels_of(task.layers).values())
    cost = answer.cost
    size_text = format_bytes(cost["bytes"])
    time_text = format_seconds(cost["seconds"])
    traffic = (
        f"{cost['rounds']:.0f} rounds in all, {cost['full_runs']:.1f} full runs, "
        f"{size_text} sent and received, {time_text}."
    )
    if answer.plan is not None:
        sizes = layer_bytes(task.layers, task.model)
        shared = sum(sizes[name] for name in answer.plan.shared)
        total_bytes = sum(sizes.values())
        shared_size = format_bytes(shared)
        total_size = format_bytes(total_bytes)
        traffic += (
            f" By this plan a client sends {shared_size} of {total_size} in a round."
        )
    facts = {
        "The question": "Should these clients train one model together, train alone, or share some layers of it? The "
        f"model has {plural(len(task.layers), 'layer')}: {layers}.",
        "Who took part": f"{plural(len(clients), 'client')}: {names}.",
        "How many samples": f"{total}. The smallest client, {smallest.name}, has {len(smallest.train):,} for training.",
        "Time and traffic": traffic,
        "A client that joins later": f"It gets the shared model of {answer.new_client}."
        if answer.new_client
        else "There is no shared model for it.",
    }
    sentences = zip(facts, map(printable, facts.values()), strict=True)
    return [f"**{topic}:** {sentence}" for topic, sentence in sentences]
