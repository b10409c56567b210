"""The report page of a race or a study: the outcome first, then its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from diagnostics import plots
from diagnostics.decide.evidence import in_words
from diagnostics.plots.collect import album, figure_of
from diagnostics.plots.page import Page
from diagnostics.report import Report
from fedlayers.studies.choice import PROMISES, Choice
from fedlayers.studies.comparison import Comparison, display_name, headline
from fedlayers.studies.predictions import Predictions, predict
from fedlayers.studies.sentences import GLOSSARY, Answers, overview
from fedlayers.studies.study_plots import draw_comparison, draw_race
from fl_core import __version__
from fl_core.config import RunConfig
from fl_core.defaults import resolve
from fl_core.errors import listing, plural
from fl_core.names import printable
from fl_core.plan import LayerPlan
from fl_core.scores import CLASSIFICATION, TABLE, column_of, label_of
from fl_core.storage.files import write_atomically
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


def write_choice(choice: Choice, out: Path, command: str = "") -> Path:
    """Write the report page of a race, and its pictures as PNG next to it."""
    predicted = predict(choice.run, choice.task.config)
    return write_page(
        out, choice.task, choice.answers, predicted, choice, choice.plan, command
    )


def write_page(
    out: Path,
    task: Task,
    lead: Answers,
    predicted: Predictions | str,
    choice: Choice | None,
    plan: LayerPlan | None,
    command: str,
    result: Comparison | None = None,
    report: Report | None = None,
    described: LayerPlan | None = None,
    decisions: Mapping[int, str] | None = None,
) -> Path:
    """Write the report page of a race or a study, and its pictures as PNG next to it.

    Args:
        lead: the outcome; ``plan`` its plan, and ``choice`` its race, if there was one.
        predicted: the test predictions of the chosen run, or why there are none.
        result: a study's comparison; ``report`` its measurement.
        described: the plan that a rule makes of the measurement, if it can.
        decisions: the last layer that each seed's own PLayer-FL run shares.
    """
    config = resolve(task.config)
    name = Path(config.data.dataset).name
    title = f"Which layers of {config.model.model} to federate on {name}"
    page = Page(title, f"**{lead.head}**")
    page.points(overview(task, lead, choice, plan))
    page.text("## Client by client")
    if isinstance(predicted, str):
        page.text(f"Not available: {printable(predicted)}")
    else:
        _add_predictions(page, out, predicted, result)
    if choice is not None and len(choice.clients):
        page.table(
            choice.clients,
            "Losses on each client's test samples: of the recommended model, of the base rate, and alone. "
            "`loses`: its loss is higher than alone, beyond chance.",
            dict.fromkeys({"model", "base_rate", "alone"} & set(choice.clients), ".3f"),
        )
    if choice is not None:
        _add_race(page, out, choice, lead)
    if result is not None:
        _add_worth(page, out, result, config, lead)
    page.text("## The data")
    if task.data.table.columns:
        shown = task.data.table.summary()
        page.table(pd.DataFrame(shown.rows, columns=shown.columns), shown.lead)
    if task.data.task == CLASSIFICATION:
        picture = figure_of(plots.partition(task.data.class_counts()))
        _add(page, out, "partition", picture, "Training samples by class.")
    files = "`arms/` (all runs)"
    if report is not None:
        with page.fold("What one local epoch shows of the layers"):
            _add_description(
                page, out, config, report, described, decisions or {}, choice is None
            )
        files = "`rows.jsonl` (the measurement), `comparison/` (all runs, their rows and table)"
        files += ", `race/` (the arms)" if choice is not None else ""
    training = Training.of(config.training)
    facts = [
        f"training: {config.federation.rounds} rounds, local epochs {training.epochs}, batch {training.batch_size}, "
        f"{config.training.loss}, {training.description}",
        f"next to this page: {files}",
        f"fedlayers {__version__}; data `{task.data.digest[:16]}`",
    ]
    if result is not None:
        seeds = sorted(result.scores["seed"].unique())
        facts.append(f"seeds: {', '.join(map(str, seeds))}")
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


def _add_predictions(
    page: Page, out: Path, predicted: Predictions, result: Comparison | None
) -> None:
    table, seed = predicted.table(), predicted.task.config.execution.seed
    shown = table[["client", "train", "test"]].copy()
    shown["macro-F1 %"] = 100 * table["macro_f1"]
    shown["accuracy %"] = [
        f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
        for value, low, high in table[
            ["accuracy", "accuracy_low", "accuracy_high"]
        ].itertuples(index=False)
    ]
    caption = (
        f"The recommended model (seed {seed}) on each client's test samples, with 95 % intervals of accuracy "
        "over these samples. A wide interval means few samples. Train and test: numbers of samples. "
    )
    rivals = []
    if result is not None:
        final = headline(result.frame, best=result.best)
        own = (final["seed"] == seed) & (final["metric"] == "macro_f1")
        for name, title in (("local", "alone %"), ("fedavg", "all shared %")):
            values = final[own & (final["algorithm"] == name)].set_index("client")
            if len(values):
                rivals.append(title)
                shown[title] = 100 * table["client"].map(values["value"])
    if rivals:
        caption += "Alone and all shared: macro-F1 of the runs that share nothing and every layer."
    page.table(shown, caption, dict.fromkeys(["macro-F1 %", *rivals], ".1f"))
    if (n_classes := predicted.task.data.n_classes) != 2:
        page.text(
            f"Pictures of ROC and calibration are for two classes. These data have {n_classes}."
        )
        return
    positive = predicted.task.data.positive
    if len(curves := predicted.roc()):
        caption = "ROC on the test samples of the same run. The number is the AUROC; guessing has 0.50."
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
    seeds = choice.standing.judged["seed"].nunique()
    page.text("## How sure the decision is")
    page.points(found.lines)
    page.text(
        f"Candidates with the same data, start and batches were trained up to round {choice.until} with "
        f"{plural(seeds, 'seed')} each, and judged on validation samples."
    )
    words = {arm.name: arm.words for arm in choice.arms}
    table = choice.trials.rename(columns={"name": "arm", "above": "above base"})
    table.insert(1, "what", [words.get(name, "") for name in table["arm"]])
    score = column_of(choice.main)
    table[score] = table[choice.main] * (100 if TABLE[choice.main].share else 1)
    columns = dict.fromkeys(
        (
            "arm",
            "what",
            "lr",
            "seed",
            score,
            "loss",
            "above base",
            "low",
            "high",
            "note",
        )
    )
    formats = {"lr": "g", "seed": ".0f"}
    formats |= dict.fromkeys(("loss", "above base", "low", "high"), ".3f")
    formats[score] = ".1f" if TABLE[choice.main].share else ".3f"
    page.table(table[list(columns)], choice.legend, formats)
    caption = f"{label_of(choice.main)} on validation samples while the arms race."
    picture = draw_race(choice.standing.rounds, choice.main)
    _add(page, out, "race", picture, caption[0].upper() + caption[1:])
    if len(choice.of_seed) > 1:
        leaders = {seed: job.arm for seed, job in choice.of_seed.items()}
        page.table(
            _by_choice(leaders, "arm", "seeds"),
            "The choice of each seed's own race. In a study its runs are `own_race`.",
        )
    if choice.rates is not None:
        page.text(choice.rates.text())
    page.text(f"{PROMISES} {choice.cost_line}")


def _add_worth(
    page: Page,
    out: Path,
    result: Comparison,
    config: RunConfig,
    lead: Answers,
) -> None:
    """Add the section on test scores."""
    page.text("## Test scores")
    seeds = result.scores["seed"].nunique()
    page.text(
        f"{plural(seeds, 'seed')}, {config.federation.rounds} rounds, test samples."
    )
    if lead.gains:
        page.text(lead.about)
        page.points(lead.gains)
    for name, figure in draw_comparison(result).items():
        _add(page, out, name, figure, COMPARISON_CAPTIONS[name])
    page.table(display_name(result.table), result.legend)


def _add_description(
    page: Page,
    out: Path,
    config: RunConfig,
    report: Report,
    described: LayerPlan | None,
    decisions: Mapping[int, str],
    is_decision: bool,
) -> None:
    """Add the section on what one local epoch shows of the layers, and what a rule makes of that."""
    epochs = plural(int(config.training.epochs or 1), "local epoch")
    page.text(
        f"Every client trains all layers for {epochs} from the same start. "
        + (
            ""
            if is_decision
            else "This describes the layers. It is not the basis of the decision."
        )
    )
    table = (
        pd.concat([report.frame, report.nulls], ignore_index=True)
        if len(report.nulls)
        else report.frame
    )
    for name, draw in album(table).items():
        caption = (
            CAPTIONS[name] + NULL_CAPTION
            if name in CAPTIONS
            else "CKA between all pairs of clients, layer by layer; 1 is the same representation."
        )
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
    if described.why.detail.get("null"):
        first, *lines = in_words(
            described.why.detail["null"], described.why.variant, full=True
        ).splitlines()
        page.text(first)
        page.points(line.strip() for line in lines)
    caption = "Federated and local layers, and the cut of each client."
    _add(
        page,
        out,
        "plan" if is_decision else "rule",
        figure_of(plots.plan(described)),
        caption,
    )
    page.table(
        _by_choice(
            described.why.alternatives, "last federated layer", "thresholds and rules"
        ),
        "Decisions of other thresholds and rules from the same measurement.",
    )
    if decisions:
        page.table(
            _by_choice(decisions, "last federated layer", "seeds"),
            "The decision of each seed's own PLayer-FL run, with its own splits, initial weights and batches.",
        )


COMPARISON_CAPTIONS = {
    "comparison": "Macro-F1 of each algorithm's final model, combined over clients by training samples; mean and 95 % "
    "interval over seeds.",
    "clients": "The same score client by client.",
    "learning": "Macro-F1 over the rounds. An algorithm that adapts to the clients at the end has one point.",
}


def _by_choice(choices: Mapping[Any, str], what: str, keys: str) -> pd.DataFrame:
    """Return a line for each choice, with the keys (seeds, thresholds) that lead to it.

    Args:
        what, keys: names of the two columns.
    """
    found: dict[str, list[str]] = {}
    for key, choice in choices.items():
        found.setdefault(choice, []).append(str(key))
    return pd.DataFrame(
        [(choice, listing(of)) for choice, of in found.items()], columns=[what, keys]
    )


def _add(page: Page, out: Path, name: str, figure: Figure, caption: str) -> None:
    write_atomically(out / f"{name}.png", page.figure(figure, caption))
    plt.close(figure)
