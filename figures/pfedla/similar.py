"""pFedLA's Fig. 1: mixing by the similarity of layers against that of whole models, without a hypernetwork.

Written before it was run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, FAINT, MARKERS, name_ticks, style
from figures import items
from figures.differences import difference, joint
from figures.items import Drawing, Finding
from figures.page import missing_runs, seeds_in_words
from figures.pfedla import overlap
from figures.pfedla.overlap import WEIGHT
from figures.recipe import Recipe, labels, mean_accuracy, tested, trained
from fl_core import rows, runner
from fl_core.errors import UsageError
from fl_core.statistics import mean_interval

NAME = "pfedla.fig1"
CLIENTS = 6
"""As many as the paper's toy example has."""
LAYERS, MODELS = "layers", "models"
SHARP = 0.1
"""The temperature of a second pair of runs: with the first one's, 1, no weight can be three times another."""
BASE = overlap.BASE.with_keys(algorithm="pfedla", clients=CLIENTS)
UNITS = {LAYERS: "module", MODELS: "model"}
RUNS = {
    f"{run}{name}": BASE.with_keys(
        options={"weights": "similar", "unit": unit, "temperature": temperature}
    )
    for name, temperature in {"": 1.0, "_sharp": SHARP}.items()
    for run, unit in UNITS.items()
}
TITLES = {
    LAYERS: "by layer",
    MODELS: "by model",
    f"{LAYERS}_sharp": f"by layer, temperature {SHARP:g}",
    f"{MODELS}_sharp": f"by model, temperature {SHARP:g}",
}
FIRST, EVERYONE = "client 1", "all clients"
"""Whose accuracy is compared: the first client's, as in the paper, and the mean of all."""
DENSE, CONVOLUTIONS = ("fc1", "fc2"), ("conv1.conv", "conv2.conv")


# --- measuring -------------------------------------------------------------------------------------------------


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """The first client's and the clients' mean accuracy by round, and the first client's last weights on all."""
    _, frame = trained(task)
    named = labels(task)
    first = task.data.clients[0].name
    kept = tested(frame)
    kept = kept[(kept["client"] == first) & (kept["model"] == "personal")]
    weights = frame[(frame["metric"] == WEIGHT) & (frame["client"] == first)]
    weights = weights[weights["round"] == weights["round"].max()]
    return pd.concat(
        [rows.frame(list(mean_accuracy(frame, named))), kept, weights],
        ignore_index=True,
    )


# --- drawing ---------------------------------------------------------------------------------------------------


def accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """Accuracy of what a client receives, (run, whose, round) x seeds."""
    own = frame[(frame["metric"] == "accuracy") & (frame["model"] == "personal")]
    whose = own["client"].eq("").map({True: EVERYONE, False: FIRST})
    own = own.assign(whose=whose, round=own["round"].astype(int))
    return own.pivot_table(
        values="value", index=["run", "whose", "round"], columns="seed"
    )


def selves(frame: pd.DataFrame) -> pd.DataFrame:
    """The first client's last weight on itself, (run, layer) x seeds; the layer of a whole model is empty."""
    own = frame[(frame["metric"] == WEIGHT) & (frame["client"] == frame["client_b"])]
    return own.pivot_table(
        values="value", index=["run", "layer"], columns="seed", sort=False
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs = [run for run in RUNS if run in set(frame["run"])]
    scores, weights = accuracies(frame), selves(frame)
    layers = list(dict.fromkeys(layer for _, layer in weights.index if layer))
    if not layers:
        raise UsageError(
            f"{NAME} must have a run that mixes by layer; got none. Train with --train."
        )
    with style():
        figure = plt.figure(figsize=(7.8, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        for run in runs:
            k = list(RUNS).index(run)
            curve = scores.loc[run, FIRST].mean(axis=1)
            look: dict[str, Any] = {
                "color": COLOURS[k],
                "marker": MARKERS[k],
                "markersize": 3.5,
            }
            left.plot(curve.index.astype(float), 100 * curve, label=TITLES[run], **look)
            own = weights.loc[run].mean(axis=1)
            if run.startswith(MODELS):
                right.axhline(
                    own.iloc[0], color=COLOURS[k], linestyle="--", linewidth=1.2
                )
            else:
                right.plot(
                    range(len(layers)), own.loc[layers], linestyle="none", **look
                )
        right.axhline(
            1 / CLIENTS,
            color=FAINT,
            linestyle=":",
            linewidth=1,
            label="equal weights",
            zorder=1,
        )
        left.set(xlabel="round", ylabel="client 1's accuracy %,\nbefore local training")
        right.set(ylabel="client 1's last weight on itself", ylim=(0, None))
        right.legend(fontsize=7)
        name_ticks(right, layers)
        figure.legend(
            *left.get_legend_handles_labels(),
            loc="outside upper center",
            ncols=2,
            fontsize=7.5,
        )
    table = (
        scores.stack()
        .rename("value")
        .rename_axis(["run", "whose", "round", "seed"])
        .reset_index()
    )
    stored = (
        weights.stack()
        .rename("value")
        .rename_axis(["run", "layer", "seed"])
        .reset_index()
    )
    table = pd.concat(
        [
            table.assign(quantity="accuracy"),
            stored.assign(quantity="weight on itself", whose=FIRST),
        ]
    )
    caption = (
        "Each client receives a weighted mean of all models. Its weights are the softmax of the cosines between its "
        "parameters and theirs. They differ by layer or are the same for the whole model. Left: mean of the seeds. "
        f"Right: marks show layers and dashed lines the whole model. {overlap.setting(header)} "
        f"{seeds_in_words(header['seeds']).capitalize()}. The paper has nine classes. It names no similarity and "
        f"prints no numbers.{missing_runs(header, runs)}"
    )
    return Drawing(figure, table, caption, _findings(scores, weights))


def _findings(scores: pd.DataFrame, weights: pd.DataFrame) -> tuple[Finding, ...]:
    last = scores.index.get_level_values("round").max()
    ends = scores.xs(last, level="round")

    def better(whose: str, words: str) -> Finding:
        values = ends.xs(whose, level="whose")
        gaps = {
            TITLES[f"{LAYERS}{name}"].removeprefix("by layer").removeprefix(", ")
            or "temperature 1": difference(values, f"{LAYERS}{name}", f"{MODELS}{name}")
            for name in ("", "_sharp")
        }
        told = "; ".join(f"{name} {gap.text}" for name, gap in gaps.items())
        return Finding(
            f"mixing by layer is better than by model for {words}",
            f"points {told}",
            joint([gap.above for gap in gaps.values()]),
        )

    own = (
        weights.loc[LAYERS]
        if LAYERS in weights.index.get_level_values("run")
        else pd.DataFrame()
    )
    pairs = [(a, b) for a in DENSE for b in CONVOLUTIONS if {a, b} <= set(own.index)]
    shown = [(layer, mean_interval(own.loc[layer].dropna())) for layer in own.index]
    return (
        better(FIRST, "client 1, as in Fig. 1"),
        better(EVERYONE, "the mean of all clients"),
        Finding(
            "client 1 has more weight on itself in fc1 and fc2 than in the convolutions",
            ", ".join(
                f"{layer} {found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
                for layer, found in shown
            ),
            joint([difference(own, a, b).above for a, b in pairs]),
        ),
    )


STUDY = items.register(Recipe(
    NAME, "Layers mixed by their similarity against whole models (pFedLA, Fig. 1: CIFAR-10, six clients)", RUNS,
    seeds=3, more_seeds=dict.fromkeys(UNITS, 5), measure=_measure, draw=_draw,
    budget="some hour and a half of one core; a run takes 4 to 8 minutes", paper_rounds=overlap.PAPER_ROUNDS,
))  # fmt: skip
