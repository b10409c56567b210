"""Measure what each metric knows: the share of its curve over layers that is gone after something is taken away.

Written before it was run. The eight federations (:data:`SETS`) are small. Seeds 0, 1, ... of all run in turn, two at
most, as time allows. Results do not decide the number of seeds.

In each run every metric is measured after the clients' first local epoch. It is measured again on three *nulls*
(:mod:`diagnostics.null`):

- **labels**: labels permuted over all clients, 3 draws, trained again from the same start;
- **clients**: samples assigned to clients at random, 3 draws, trained again from the same start;
- the **start** itself, untrained. Two other starts, with other initial weights, are measured as well.

A *curve* has a metric's values over the layers. They are averaged over clients by training samples, or over pairs. They
are logarithms if the metric has a logarithmic axis and all values are above 0. The mean over the layers is subtracted,
because decisions read a curve's shape and not its level. If all compared curves have it, the curve is of the variant
that decides.

For each run (a federation with a seed), metric and null:

- *Gone*: the share of the curve's variance over layers that the null does not have. D(a, b) is the sum over layers of
  (a - b)^2, r the real curve, n_k the draws, and m_k the mean of the draws other than k. Then
  gone = (mean_k D(r, m_k) - mean_k D(n_k, m_k)) / D(r, 0), between 0 and 1. The second term is the difference of the
  draws among themselves. The start is one curve s, with gone = D(r, s) / D(r, 0), at most 1.
- *Odd one out* (labels, clients): of the four curves, r and three draws, r is furthest from the mean of the other
  three. If labels or owners had no effect, this would be so in one run of four.
- *Moved* (start): r is further from its own start than that start is from either of the two others.
- *Same decision*: the share of draws from which the metric's own voting rule makes the same plan.

A metric **knows labels** (or **clients**) if more than a quarter of its runs are odd ones out, by the whole 95 %
interval. It **knows training** if more than half of its runs moved, by the whole interval. Runs of one federation are
dependent, so the intervals are, if anything, too narrow. Since the first eight runs the interval is the exact one of
Clopper and Pearson instead of Wilson's. With seven runs, Wilson's lies above a quarter in 7 % of cases by chance.

A metric **cannot know** a thing that changes none of its curves by more than 1e-6 of their size. A metric without any
of these is *not shown*. With fewer than six federations nothing is stated (added after the first three runs). Digits
are assigned at random from the beginning, so a new assignment takes nothing away. They are the check of ``clients`` and
count for labels and training only.

``hessian_spectrum`` is measured on two federations, with one eigenvalue: it takes as long as all others together.
Batch normalisation is in one network only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from diagnostics import measure
from diagnostics.decide import select
from diagnostics.metrics.base import DEFAULT, METRICS
from diagnostics.plots.drawing import style
from diagnostics.report import Report
from figures import items
from figures.decision.curves import (
    CHANCE,
    CONTROL,
    DRAWS,
    LEAST,
    NULLS,
    OTHER,
    SAME_DECISION,
    compare_with_null,
    summary,
)
from figures.items import Drawing, Finding
from figures.page import markdown, missing_runs, seeds_in_words
from figures.recipe import Recipe, labels
from fl_core import models, rows, runner
from fl_core.config import RunConfig
from fl_core.errors import RunError, UsageError, listing

NAME = "decision.nulls"
TITLES = {"labels": "labels", "clients": "who holds what", "fresh": "training"}
NARROW: dict[str, Any] = {"model_options": {"width": 0.25}, "batch_size": 8}
SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "fashion_mnist": ("Fashion-MNIST", {"dataset": "fashion_mnist", "clients": 3, "max_samples": 240, **NARROW}),
    "mnist": ("MNIST", {"dataset": "mnist", "clients": 3, "max_samples": 240, **NARROW}),
    "cifar10": (
        "CIFAR-10",
        {"dataset": "cifar10", "model": "pfedla_cnn", "clients": 3, "max_samples": 240, "batch_size": 8},
    ),
    "fed_isic": ("Fed-ISIC", {"dataset": "fed_isic", "model": "fmnist_cnn", "max_samples": 160, **NARROW}),
    "heart": ("Fed-Heart", {"dataset": "heart"}),
    "airline_tweets": (
        "airline tweets",
        {"dataset": "airline_tweets", "max_samples": 300, "batch_size": 8, "model_options": {"width": 32}},
    ),
    "pacs": ("PACS", {"dataset": "pacs", "model": "fmnist_cnn", "max_samples": 160, **NARROW}),
    CONTROL: ("digits, IID", {"dataset": "digits", "max_samples": 400}),
}
SPECTRUM = "hessian_spectrum"
WITH_SPECTRUM = ("heart", "digits")
OTHER_STARTS = 2
OPTIONS: dict[str, dict[str, Any]] = {SPECTRUM: {"k": 1, "tol": 0.1}, "cca": {"positions": "mean"}}


def configurations() -> dict[str, RunConfig]:
    """The federations, by name; no round is trained but the first, on each client."""
    return {name: RunConfig(algorithm="fedper", rounds=1, **settings) for name, (_, settings) in SETS.items()}


# --- measuring -------------------------------------------------------------------------------------------------


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Every metric's curve, real and of each null, and how often its rule decides the same on a null."""
    metrics = [name for name in METRICS.members() if name != SPECTRUM or run in WITH_SPECTRUM]
    options = {name: given for name, given in OPTIONS.items() if name in metrics}
    report = measure.diagnose_task(task, metrics, null=NULLS, null_draws=DRAWS, options=options, progress=False)
    lines = []
    measured = [("", report.frame), *report.nulls.groupby("model", sort=False)]
    for k in range(1, OTHER_STARTS + 1):
        config = task.config
        model = models.build(
            str(config.model),
            task.data.shape,
            task.data.n_classes,
            seed=1000 * k + config.seed,
            options=config.model_options,
        )
        start = measure.diagnose_init(
            replace(task, model=model), metrics, options={"options": options, "progress": False}
        )
        measured.append((f"{OTHER} {k}", start.frame))
    for mark, table in measured:
        for metric in metrics:
            for variant in measure.shown_variants(replace(report, frame=table), metric):
                for layer, (value, status) in combined(table, metric, variant).items():
                    about = {"model": str(mark), "layer": layer, "variant": variant, "status": status}
                    lines.append(rows.row(metric, value, **about, **labels(task)))
    return rows.frame([*lines, *_decisions(report, metrics, labels(task))])


def combined(table: pd.DataFrame, metric: str, variant: str) -> dict[str, tuple[float | None, str]]:
    """Each layer's value over clients (by training samples) or over pairs, and its status; of six digits."""
    part = table[(table["metric"] == metric) & (table["variant"] == variant) & (table["layer"] != "")]
    single = part[(part["client"] != "") & (part["client"] != part["client_b"])]
    part = part if single.empty else single
    found: dict[str, tuple[float | None, str]] = {}
    for layer, of_layer in part.groupby("layer", sort=False):
        lacking = of_layer[of_layer["status"] != "ok"]
        if len(lacking):
            found[str(layer)] = None, str(lacking["status"].iloc[0])
            continue
        weights = None if (of_layer["client_b"] != "").any() else of_layer["n_train"].fillna(1).to_numpy(float)
        found[str(layer)] = float(f"{np.average(of_layer['value'].to_numpy(float), weights=weights):.6g}"), "ok"
    return found


def _rule_of(metric: str) -> str:
    """Return the rule that decides by a metric."""
    return "sensitivity_ratio" if metric == "federation_sensitivity" else "largest_jump"


def _decisions(report: Report, metrics: Sequence[str], named: Mapping[str, Any]) -> list[rows.Row]:
    """Return the share of a null's draws that give the same plan, for each metric whose rule decides."""
    lines = []
    for metric in metrics:
        try:
            detail = select.select(report, _rule_of(metric), metric=metric).why.detail["null"]
        except (RunError, UsageError) as error:
            lines.append(rows.row(SAME_DECISION, None, variant=metric, status=str(error), **named))
            continue
        lines += [
            rows.row(SAME_DECISION, each["same_draws"] / each["draws"], variant=metric, model=null, **named)
            for null, each in detail.items()
        ]
    return lines


# --- drawing ---------------------------------------------------------------------------------------------------

WORDS = {"labels": "the labels", "clients": "how clients differ", "fresh": "training"}
GONE = {"labels": "labels are permuted", "clients": "samples change clients", "fresh": "nothing is trained"}


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = summary(frame)
    sets = [name for name in SETS if (frame["run"] == name).any()]
    metrics = list(dict.fromkeys(table["metric"]))
    with style():
        figure = plt.figure(figsize=(8.6, 0.23 * len(metrics) + 2.4), layout="constrained")
        axes = figure.subplots(1, len(NULLS), sharey=True)
        for ax, null in zip(axes, NULLS, strict=True):
            colours = _panel(ax, frame, table, null, metrics, sets)
        axes[0].set_yticks(range(len(metrics)), metrics, fontsize=7)
        bar = figure.colorbar(colours, ax=axes, shrink=0.6, pad=0.01)
        bar.set_label("share of the curve's shape\nthat the null does not have", fontsize=7)
        bar.ax.tick_params(labelsize=6.5)
    seeds = header["seeds"]
    caption = (
        f"{len(sets)} federations with {seeds_in_words(seeds)} each after one local epoch. Shade: the share of a "
        "metric's shape over layers that is gone without the information (mean over seeds). Labels are permuted, "
        "samples are assigned to clients at random or nothing is trained. The first two are means of "
        f"{DRAWS} draws minus the differences between draws. Cross: no value at two layers. Dot: in every seed the "
        f"real curve is further from the {DRAWS} draws than they are from each other. By chance this happens in "
        f"{CHANCE['labels'] ** seeds:.0%} of cells. For training the real curve is further from its own start than "
        "that start is from two others. A panel's title counts the metrics that know its information. It uses the "
        "interval of their share of runs."
    )
    known_to = {null: int(table.loc[table["null"] == null, "verdict"].eq(True).sum()) for null in NULLS}
    changed = listing([f"{count} change when {GONE[null]}" for null, count in known_to.items()])
    lead = f"**Of {len(metrics)} metrics {changed}.**"
    return Drawing(figure, table, caption, _findings(table), _page(table, frame) + missing_runs(header), lead)


def _panel(ax: Axes, frame: pd.DataFrame, table: pd.DataFrame, null: str, metrics: list[str], sets: list[str]) -> Any:
    shade = np.full((len(metrics), len(sets)), np.nan)
    for y, metric in enumerate(metrics):
        held = compare_with_null(frame, metric, null)
        for x, name in enumerate(sets):
            own = [each for (run, _), each in held.items() if run == name]
            if not own:
                ax.plot(x, y, marker="x", color="0.6", markersize=4, linestyle="none")
                continue
            shade[y, x] = 0.0 if not any(each.changed for each in own) else np.mean([each.gone for each in own])
            if all(each.differs for each in own):
                ax.plot(
                    x, y, marker="o", color="white" if shade[y, x] > 0.55 else "0.1", markersize=3, linestyle="none"
                )
    colours = ax.imshow(shade, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(len(sets)), [SETS[name][0] for name in sets], rotation=90, fontsize=7)
    ax.set_xticks(np.arange(len(sets) + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(len(metrics) + 1) - 0.5, minor=True)
    ax.grid(False)
    ax.grid(which="minor", color="0.85", linewidth=0.6)
    ax.tick_params(which="both", length=0)
    knows = table[(table["null"] == null) & table["verdict"].eq(True)]["metric"]
    ax.set_title(f"{TITLES[null]}:\nknown to {len(knows)} of {len(metrics)}", fontsize=8)
    return colours


def _verdicts(table: pd.DataFrame, metric: str) -> dict[str, bool | None]:
    part = table[table["metric"] == metric].set_index("null")["verdict"]
    return {null: part[null] for null in NULLS}


def in_words(verdicts: Mapping[str, bool | None]) -> str:
    """Describe the sources that a metric depends on, from its verdicts by null.

    >>> in_words({"labels": True, "clients": None, "fresh": True})
    'knows the labels and training'
    >>> in_words({"labels": False, "clients": False, "fresh": False})
    'describes the network alone'
    >>> in_words({"labels": False, "clients": None, "fresh": None})
    'not shown to know anything of the data'
    """
    knows = [WORDS[null] for null, verdict in verdicts.items() if verdict is True]
    if knows:
        return "knows " + " and ".join([", ".join(knows[:-1]), knows[-1]] if len(knows) > 1 else knows)
    if all(verdict is False for verdict in verdicts.values()):
        return "describes the network alone"
    return "not shown to know anything of the data"


def _percent(value: float) -> str:
    return "–" if pd.isna(value) else f"{100 * value:.0f} %"


def _page(table: pd.DataFrame, frame: pd.DataFrame) -> str:
    metrics = list(dict.fromkeys(table["metric"]))
    columns: dict[str, list[str]] = {"metric": metrics}
    columns["in words"] = [
        in_words(_verdicts(table, metric)) if n >= LEAST else f"open: {n} federation{'s' * (n != 1)}"
        for metric in metrics
        for n in [int(table.loc[table["metric"] == metric, "federations"].max())]
    ]
    for null in NULLS:
        part = table[table["null"] == null].set_index("metric").loc[metrics]
        columns[f"{TITLES[null]}: odd one out"] = [
            "–"
            if not line.runs
            else f"{_percent(line.told_apart)} [{100 * line.told_low:.0f}, {100 * line.told_high:.0f}]"
            for line in part.itertuples()
        ]
        columns[f"{TITLES[null]}: gone"] = [
            "–" if pd.isna(line.gone)
            else f"{_percent(line.gone)} ({100 * line.gone_least:.0f} to {100 * line.gone_greatest:.0f})"
            for line in part.itertuples()
        ]  # fmt: skip
    decisions = {
        "metric": metrics,
        "its rule": [_rule_of(metric) for metric in metrics],
        **{
            f"same without {TITLES[null]}": [
                f"{_percent(line.same_decision)}" + (f" of {line.decisions} runs" if line.decisions else "")
                for line in table[table["null"] == null].set_index("metric").loc[metrics].itertuples()
            ]
            for null in NULLS
        },
    }
    lacking = frame[frame["status"].ne("ok") & frame["model"].eq("") & frame["metric"].ne(SAME_DECISION)]
    reasons = lacking.drop_duplicates("metric")
    return "\n\n".join(
        [
            "*Odd one out*: the share of runs in which the real curve is the odd one out among itself and "
            f"{DRAWS} draws (25 % by chance). For training it is further from its own start than that start is from "
            "two others. Square brackets have the exact 95 % interval. By chance it lies above 25 % in at most one "
            "line of forty.\n\n*Gone*: the share of the shape over layers that the null does not have. Cells have the "
            "median over federations (least to greatest).\n\nThe computation was written down before the run at the "
            "top of `figures/decision/nulls.py`. That file also lists later changes.",
            markdown(columns),
            "How often each metric's voting rule makes the same plan without the information (over draws and runs):",
            markdown(decisions),
            *[f"{line.metric} lacks a value somewhere. An example: {line.status}." for line in reasons.itertuples()],
        ]
    )


def _findings(table: pd.DataFrame) -> tuple[Finding, ...]:
    lines = {(line.metric, line.null): line for line in table.itertuples()}
    found = []
    for metric in DEFAULT:
        for null in NULLS:
            line = lines.get((metric, null))
            if line is not None and line.runs:
                found.append(
                    Finding(
                        f"{metric} knows {WORDS[null]}",
                        f"the odd one out in {_percent(line.told_apart)} of {line.runs} runs "
                        f"[{100 * line.told_low:.0f}, {100 * line.told_high:.0f}] (chance {_percent(line.chance)}). "
                        f"Gone: {_percent(line.gone)} of its shape. Same plan: {_percent(line.same_decision)}",
                        line.verdict,
                    )
                )
    return tuple(found)


ITEM = items.register(
    Recipe(
        NAME,
        "What each measurement knows",
        configurations(),
        seeds=2,
        budget="about an hour of one core",
        measure=_measure,
        draw=_draw,
    )
)
