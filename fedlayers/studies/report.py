"""The report page of a race or a study: the outcome first, then its evidence and its pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from diagnostics import plots
from diagnostics.decide.evidence import in_words
from diagnostics.plots.page import Page, album, figure_of
from diagnostics.report import Report
from fedlayers.studies.choice import Choice
from fedlayers.studies.comparison import Comparison, display_name
from fedlayers.studies.harmless import Predictions, predict
from fedlayers.studies.inference import ALL_DIVERGED, DECIDED, Answers
from fl_core import __version__, restore, rows
from fl_core.config import resolve
from fl_core.costs.layers import layer_bytes
from fl_core.data.partitions.base import SPLITS
from fl_core.display import in_order, printable
from fl_core.errors import listing, plural
from fl_core.plan import LayerPlan
from fl_core.rows import CLASSIFICATION, label_of
from fl_core.storage import format_bytes, write_atomically
from fl_core.task import Task
from fl_core.training.phases import Training

CAPTIONS = {
    "grad_variance": "Variance over the entries of each layer's weight gradient: how unevenly it is trained.",
    "hessian_trace": "Trace of the loss's Hessian in each layer, per parameter: how sharply the loss curves there.",
    "cka": "How differently the clients' models represent the same samples; 0 is the same representation.",
    "federation_sensitivity": "Federation sensitivity of the layers up to each one, relative to the first; the "
    "rule reads the jumps of the combined line.",
}
NULL_CAPTION = " Grey: the same measurement on nulls (shuffled or untrained)."


COMPARISON_CAPTIONS = {
    "comparison": "Macro-F1 of each algorithm's final model, combined over clients by training samples; mean and 95 % "
    "interval over seeds.",
    "clients": "The same score client by client.",
    "learning": "Macro-F1 over the rounds. An algorithm that adapts to the clients at the end has one point.",
}


def write_choice(choice: Choice, out: Path, command: str = "") -> Path:
    """Write the report page of a race, and its pictures as PNG next to it."""
    return write_page(out, choice.task, choice.answers, choice, choice.plan, command)


def write_page(
    out: Path,
    task: Task,
    lead: Answers,
    choice: Choice | None,
    plan: LayerPlan | None,
    command: str,
    run: Path | None = None,
    result: Comparison | None = None,
    report: Report | None = None,
    described: LayerPlan | None = None,
) -> Path:
    """Write the report page of a race or a study, and its pictures as PNG next to it.

    Args:
        lead: the outcome; ``plan`` its plan, and ``choice`` its race, if there was one.
        run: that of the outcome without a race.
        result: a study's comparison; ``report`` its measurement.
        described: the plan that a rule makes of the measurement, if it can.
    """
    config = resolve(task.config)
    name = Path(config.data.dataset).name
    title = f"Which layers of {config.model.model} to federate on {name}"
    page = Page(title, f"**{lead.head}**")
    page.points(overview(task, lead, choice, plan))
    page.text("## Client by client")
    predicted = predict(run if choice is None else choice.run, task.config)
    if isinstance(predicted, str):
        page.text(f"Not available: {printable(predicted)}")
    else:
        _add_predictions(page, out, predicted)
    files = "`arms/` (all runs)"
    if choice is not None:
        _add_race(page, out, choice, lead)
    if result is not None:
        page.text("## Test scores")
        seeds = sorted(result.scores["seed"].unique())
        page.text(f"{plural(len(seeds), 'seed')}: {listing(map(str, seeds))}.")
        if lead.gains:
            page.text(lead.about)
            page.points(lead.gains)
        for name, figure in draw_comparison(result).items():
            _add(page, out, name, figure, COMPARISON_CAPTIONS[name])
        page.table(display_name(result.table), result.legend)
    page.text("## The data")
    if task.data.table.columns:
        shown = task.data.table.summary()
        page.table(pd.DataFrame(shown.rows, columns=shown.columns), shown.lead)
    if task.data.task == CLASSIFICATION:
        picture = figure_of(plots.partition(task.data.class_counts()))
        _add(page, out, "partition", picture, "Training samples by class.")
    if report is not None:
        files = "`rows.jsonl` (the measurement), `comparison/` (all runs, their rows and table)"
        files += ", `race/` (the arms)" if choice is not None else ""
        with page.fold("What one local epoch shows of the layers"):
            _add_description(page, out, report, described, choice is None)
    training = Training.of(config.training)
    facts = [
        f"training: {config.federation.rounds} rounds, local epochs {training.epochs}, batch {training.batch_size}, "
        f"{config.training.loss}, {training.description}",
        f"next to this page: {files}",
        f"fedlayers {__version__}; data `{task.data.digest[:16]}`",
    ]
    if plan is not None:
        facts.append(f"`plan.json`: `{plan.digest[:16]}`, by {plan.why.rule}")
    if command:
        facts.append(f"command: `{command}`")
    with page.fold("Settings"):
        page.points(facts)
    page.glossary(GLOSSARY)
    path = out / "report.html"
    page.write(path)
    return path


def _add_predictions(page: Page, out: Path, predicted: Predictions) -> None:
    table, seed = predicted.table(), predicted.task.config.execution.seed
    shown = table[["client", "train", "test"]].copy()
    shown["macro-F1 %"] = 100 * table["macro_f1"]
    ends = 100 * table[["accuracy", "accuracy_low", "accuracy_high"]]
    shown["accuracy %"] = [
        f"{value:.1f} [{low:.1f}, {high:.1f}]"
        for value, low, high in ends.itertuples(index=False)
    ]
    page.table(
        shown,
        f"The recommended model (seed {seed}) on each client's test samples, with 95 % intervals of accuracy "
        "over these samples. A wide interval means few samples. Train and test: numbers of samples.",
        {"macro-F1 %": ".1f"},
    )
    if (n_classes := predicted.task.data.n_classes) != 2:
        page.text(
            f"Pictures of ROC and calibration are for two classes. These data have {n_classes}."
        )
        return
    positive, curves = predicted.task.data.positive, predicted.roc()
    if len(curves):
        caption = (
            "ROC on the test samples of the same run. The number is the AUROC; guessing has 0.50. The black line "
            "ranks the samples of all clients together. So its AUROC is not the clients' mean, which the text has."
        )
        _add(page, out, "roc", figure_of(plots.roc(curves, positive=positive)), caption)
    else:
        page.text(
            "No client has test samples of both classes, so there is no ROC curve."
        )
    caption = (
        "Calibration: the share of samples of the class against its predicted probability, in groups of equal size, "
        "with 95 % intervals. On the dotted line probabilities can be read as shares."
    )
    picture = figure_of(plots.calibration(predicted.calibration(), positive=positive))
    _add(page, out, "calibration", picture, caption)


def _add_race(page: Page, out: Path, choice: Choice, found: Answers) -> None:
    """Add the section on the certainty of the decision: the arms, their differences, and the cost of the race."""
    main = choice.main
    if len(choice.clients):
        page.table(
            choice.clients,
            "Losses on each client's test samples: of the recommended model, of the base rate, and alone. "
            "`loses`: its loss is higher than alone, beyond chance.",
            dict.fromkeys({"model", "base_rate", "alone"} & set(choice.clients), ".3f"),
        )
    page.text("## How sure the decision is")
    page.points(found.lines)
    seeds = choice.standing.judged["seed"].nunique()
    page.text(
        f"Candidates with the same data, start and batches were trained up to round {choice.until} with "
        f"{plural(seeds, 'seed')} each, and judged on validation samples."
    )
    words = {arm.name: arm.words for arm in choice.arms}
    table = choice.shown()
    table.insert(1, "what", table["arm"].map(words).fillna(""))
    page.table(table, choice.legend)
    caption = f"{label_of(main)} on validation samples while the arms race."
    picture = draw_race(choice.standing.rounds, main)
    _add(page, out, "race", picture, caption[0].upper() + caption[1:])
    if len(choice.of_seed) > 1:
        leaders = {seed: job.arm for seed, job in choice.of_seed.items()}
        page.table(
            _by_choice(leaders, "arm", "seeds"),
            "The choice of each seed's own race. In a study its runs are `own_race`.",
        )
    if choice.rates is not None:
        page.text(choice.rates.text())
    page.text(f"{choice.promise} {choice.cost_line}")


def _add_description(
    page: Page,
    out: Path,
    report: Report,
    described: LayerPlan | None,
    is_decision: bool,
) -> None:
    """Add the section on what one local epoch shows of the layers, and what a rule makes of that."""
    page.text("Every client trains all layers from the same start.")
    if not is_decision:
        page.text("This describes the layers. It is not the basis of the decision.")
    table = pd.concat([report.frame, report.nulls], ignore_index=True)
    for name, draw in album(table).items():
        caption = "CKA between all pairs of clients, layer by layer; 1 is the same representation."
        if name in CAPTIONS:
            caption = CAPTIONS[name] + NULL_CAPTION
        _add(page, out, name, draw(), caption)
    missing = report.frame[report.frame["status"] != "ok"]
    if len(missing):
        page.table(
            missing[["metric", "variant", "client", "layer", "status"]],
            "Values that could not be computed.",
        )
    if described is None:
        return
    page.text(f"### {'The decision' if is_decision else 'The plan of a rule'}")
    why = described.why
    if why.detail.get("null"):
        first, *lines = in_words(
            why.detail["null"], why.variant, full=True
        ).splitlines()
        page.text(first)
        page.points(line.strip() for line in lines)
    picture = figure_of(plots.plan(described))
    caption = "Federated and local layers, and the cut of each client."
    _add(page, out, "plan" if is_decision else "rule", picture, caption)
    page.table(
        _by_choice(why.alternatives, "last federated layer", "thresholds and rules"),
        "Decisions of other thresholds and rules from the same measurement.",
    )


def _by_choice(choices: Mapping[Any, str], what: str, keys: str) -> pd.DataFrame:
    """Return a line for each choice, with the keys (seeds, thresholds) that lead to it.

    Args:
        what, keys: names of the two columns.
    """
    table = pd.DataFrame({what: choices.values(), keys: map(str, choices)})
    return table.groupby(what, sort=False)[keys].agg(listing).reset_index()


def _add(page: Page, out: Path, name: str, figure: Figure, caption: str) -> None:
    write_atomically(out / f"{name}.png", page.figure(figure, caption))
    plt.close(figure)


# --- pictures --------------------------------------------------------------------------------------------------


def to_files() -> None:
    """Draw to files only from now on, even if there is a screen."""
    mpl.use("Agg")


def save(figure: Figure, path: Path, dpi: int = 200, **facts: str) -> None:
    """Save a figure on white without a margin, and close it.

    Args:
        facts: the command and the digest of the data, for the file's metadata. The commit is added.
    """
    facts |= {"commit": str(restore.current_environment()["commit"] or "")}
    figure.savefig(
        path, dpi=dpi, bbox_inches="tight", facecolor="white", metadata=facts
    )
    plt.close(figure)


def draw_race(rounds: pd.DataFrame, main: str) -> Figure:
    """Draw each arm's main score on validation samples over the rounds, with a band over the seeds.

    The name of an arm that was stopped early tells its last round, and what the judge forecast in points.

    Args:
        rounds, main: as in :class:`~fedlayers.studies.race.Standing`.
    """
    if "status" in rounds:
        points = (100 * rounds["forecast"]).map("{:+.1f}".format)
        told = rounds["arm"] + ", " + rounds["status"]
        told += " at " + rounds["trained"].astype(str) + " (" + points + ")"
        rounds = rounds.assign(arm=rounds["arm"].where(rounds["forecast"] == 0, told))
    columns = ("arm", "seed", "round", main)
    found = [
        rows.row(
            main,
            value,
            algorithm=arm,
            seed=seed,
            round=done,
            model="personal",
            split="validation",
        )
        for arm, seed, done, value in rounds[list(columns)].itertuples(index=False)
    ]
    return figure_of(plots.learning(rows.frame(found), main, split="validation"))


def draw_comparison(comparison: Comparison) -> dict[str, Figure]:
    """Draw a comparison's pictures by name: scores with intervals, clients, and learning curves."""
    score = comparison.score
    table = comparison.table.rename(
        columns={score: "value", f"{score}_low": "low", f"{score}_high": "high"}
    )
    table = table.assign(n=table["seeds"])
    return {
        "comparison": figure_of(plots.comparison(table, score)),
        "clients": figure_of(plots.clients(comparison.frame, score)),
        "learning": figure_of(plots.learning(comparison.frame, score)),
    }


# --- the first page --------------------------------------------------------------------------------------------

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
    return [f"**{what}:** {printable(said)}" for what, said in lines.items()]


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
            "or at other learning rates (`--lr`)."
        )
    if verdict == ALL_DIVERGED:
        return "Repeat with a smaller learning rate (`--lr`)."
    shares = plan is None or bool(set(plan.shared) & set(plan.trainable))
    chosen = None if choice is None else choice.winner
    algorithm = "fedper" if chosen is None else chosen.algorithm
    run = f"`fedlayers run --algorithm {algorithm}{' --plan plan.json' * (plan is not None)}`"
    use = (
        f"Train with {run} and the data and options of this race."
        if shares
        else "Each client can train alone: nothing has to be sent."
    )
    if choice is None:
        return f"{use} A race checks the rule: run `fedlayers study` without `--rule`."
    if verdict == DECIDED:
        return f"{use} Check the models on new samples before anybody relies on them."
    more = (
        "`--seeds 5`"
        if choice.inference.seeds == 1
        else "more seeds (`--seeds 10`) or more samples"
    )
    return (
        f"For a surer answer repeat with {more}. Until then: {use[0].lower()}{use[1:]}"
    )
