"""pFedLA with a weight for each layer against pFedLA with one weight for the whole model (Fig. 1).

Six clients train as in Table 1. Both runs have the same hypernetworks but for their last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items
from figures.differences import Difference, settled
from figures.forms import (
    Line,
    curves,
    key_above,
    marks,
    over_seeds,
    seeds_and_mean,
    sheet,
)
from figures.items import Drawing, Item
from figures.page import markdown, means, missing_runs, seeds_behind, seeds_in_words
from figures.pfedla import methods
from figures.pfedla.overlap import BASE, PAPER_ROUNDS, WEIGHT, setting
from figures.recipe import labels, mean_accuracy, tested, trained, where
from figures.verdicts import LEAD, judged, plain
from fl_core import rows
from fl_core.algorithms.fedamp import Mixing
from fl_core.algorithms.pfedla import PFedLA
from fl_core.layers import Layer
from fl_core.run import runner

NAME = "pfedla.fig1"
BY_LAYER, BY_MODEL = "pfedla", "by_model"
TITLES = {BY_LAYER: "weights by layer", BY_MODEL: "weights by model"}
ALL, FIRST = "mean of the clients", "client 1"
LARGE, SMALL = ("fc1", "fc2"), "conv2.conv"
"""Layers to which the paper's client 1 gives a large weight, and the one to which it gives a small weight."""


class PFedLAByModel(PFedLA):
    """pFedLA with one unit, the whole model."""

    @property
    def units(self) -> tuple[Layer, ...]:
        return Mixing.units.__get__(self)


SIX = BASE.with_keys(clients=6)
RUNS = {
    BY_LAYER: SIX.with_keys(algorithm="pfedla"),
    BY_MODEL: SIX.with_keys(algorithm=f"{__name__}:{PFedLAByModel.__name__}"),
}


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record accuracy of all clients and of client 1, and each client's last weights on itself."""
    engine, frame = trained(task)
    accuracies = tested(frame)
    weights = where(frame, metric=WEIGHT)
    is_last = weights["round"] == weights["round"].max()
    is_own = weights["client"] == weights["client_b"]
    return pd.concat(
        [
            rows.frame(list(mean_accuracy(frame, labels(task)))),
            where(accuracies, client=engine.names[0]),
            weights[is_last & is_own],
        ],
        ignore_index=True,
    )


def accuracies(frame: pd.DataFrame, quantity: str) -> dict[str, pd.DataFrame]:
    """Return accuracy of all clients and of client 1, (run, round) x seeds.

    Args:
        quantity: before or after local training, as :mod:`figures.pfedla.methods` has it.
    """
    is_mean = frame["client"] == ""
    rows_by_title = {ALL: frame[is_mean], FIRST: frame[~is_mean]}
    return {
        title: methods.curves(title_rows)[quantity]
        for title, title_rows in rows_by_title.items()
    }


def self_weights(frame: pd.DataFrame) -> pd.DataFrame:
    """Return client 1's last weights on itself, (run, layer) x seeds; the layer of a whole model is empty."""
    first_name = frame.loc[frame["client"] != "", "client"].iloc[0]
    weights = where(frame, metric=WEIGHT, client=first_name)
    return weights.pivot_table(
        index=["run", "layer"], columns="seed", values="value", sort=False
    )


def _lines(accuracy_curves: pd.DataFrame) -> list[Line]:
    """Return each run's accuracy by round with its interval over seeds."""
    lines = []
    for run, title in TITLES.items():
        seed_curves = accuracy_curves.loc[run]
        seed_curves.index = seed_curves.index.astype(float)
        intervals = pd.DataFrame(
            over_seeds(seed_curves, seed_curves.index), seed_curves.index
        )
        ends = intervals["low"], intervals["high"]
        lines.append(Line(seed_curves.mean(axis=1), title, ends))
    return lines


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    before, after = (accuracies(frame, quantity) for quantity in methods.QUANTITIES)
    weights = self_weights(frame)
    by_layer = weights.loc[BY_LAYER]
    with sheet(8.4, 3.0) as figure:
        *curve_axes, weight_ax = figure.subplots(1, 3)
        for ax, (title, accuracy_curves) in zip(
            curve_axes, before.items(), strict=True
        ):
            curves(ax, _lines(accuracy_curves), factor=100, xlabel="round", title=title)
        curve_axes[0].set_ylabel("accuracy %, before local training")
        key_above(figure, 2, panel=curve_axes[0])
        marks(
            weight_ax,
            seeds_and_mean(by_layer),
            list(by_layer.index),
            upright=True,
            level=float(weights.loc[BY_MODEL].mean(axis=None)),
            level_look={"linestyle": "--"},
            ylabel="weight of client 1 on itself",
            ylim=(-0.02, 1.02),
        )
    lead = settled(before[ALL], BY_LAYER, BY_MODEL, PAPER_ROUNDS)
    findings = (
        judged({"": lead}).finding(
            "before local training weights by layer lie above weights by model, mean of the clients",
            "points more: ",
        ),
        judged(
            {
                f"{layer} - {SMALL}": Difference(
                    by_layer.loc[layer] - by_layer.loc[SMALL]
                )
                for layer in LARGE
            },
            LEAD,
            plain,
        ).finding("client 1 has larger weights on itself in fc1 and fc2 than in conv2"),
    )
    scores = {
        (title, quantity): methods.last_evaluations(curves_by_title[title])
        for quantity, curves_by_title in (
            (methods.BEFORE, before),
            (methods.AFTER, after),
        )
        for title in (ALL, FIRST)
    }
    columns = {
        f"{title}, {methods.QUANTITIES[quantity]} %": means(score, list(TITLES))
        for (title, quantity), score in scores.items()
    }
    table = pd.concat(
        {
            f"{title}, {methods.QUANTITIES[quantity]}": score.stack()
            for (title, quantity), score in scores.items()
        }
    )
    weight_columns = {
        "layer": list(by_layer.index),
        "weights by layer": [f"{w:.2f}" for w in by_layer.mean(axis=1)],
        "weights by model": [
            f"{float(weights.loc[BY_MODEL].mean(axis=None)):.2f}"
            for _ in by_layer.index
        ],
    }
    seeds_text = seeds_in_words(seeds_behind(header)).capitalize()
    setting_text, missing_text = setting(header), missing_runs(header)
    caption = (
        "pFedLA with a weight for each layer, and with one weight for the whole model. Left and middle: accuracy "
        "before local training, with 95 % intervals over seeds. Right: client 1's weights on itself after the last "
        "round, a dot for each seed and a bar for the mean. The dashed line is the mean of the weight by model. "
        f"{setting_text} {seeds_text}. The paper has nine classes, names no data set and prints no numbers."
        f"{missing_text}"
    )
    return Drawing(
        figure,
        table.rename("value").rename_axis(["quantity", "run", "seed"]).reset_index(),
        caption,
        findings,
        "\n\n".join([
            markdown({"": list(TITLES.values()), **columns}),
            "Client 1's weights on itself after the last round:",
            markdown(weight_columns),
        ]),
    )  # fmt: skip


items.register(Item(
    NAME, "Layers mixed by weights of their own against whole models, CIFAR-10", RUNS, seeds=8,
    budget="about an hour of one core; a run takes 4 to 6 minutes", measure=_measure, draw=_draw,
))  # fmt: skip
