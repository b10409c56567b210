"""pFedLA's aggregation weights by layer: of all pairs of clients (Fig. 6), and on oneself (Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from diagnostics.plots.drawing import COLOURS, FAINT, MARKERS, MEAN, name_ticks, style
from figures import items
from figures.differences import last_evaluations, of_each, settled
from figures.items import Drawing, Finding, Item
from figures.pfedla.overlap import (
    CORRELATION,
    LONGER,
    NAME,
    SELF,
    SELF_LARGEST,
    WEIGHT,
    classes,
    curves,
    others,
    self_largest,
    setting,
    shared_classes,
    weights_of,
)
from figures.verdicts import judged, of_seeds, plain
from fl_core.errors import UsageError

ACROSS = 4
"""Layers beside each other in Fig. 6."""
FULLY_CONNECTED = "fc1"
"""The layer whose weights are largest in the paper's Fig. 7 on CIFAR-10, as its text says."""


def _mixing(header: Mapping[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of pFedLA itself.

    Raises:
        UsageError: it was not run with seed 0, whose weights are drawn.
    """
    if 0 not in header["had"].get("pfedla", []):
        raise UsageError(
            f"{header['item']} must have a run of pfedla with seed 0; got none. Train with --train."
        )
    return frame[frame["run"] == "pfedla"]


def _selves(frame: pd.DataFrame) -> pd.DataFrame:
    """The clients' mean weight on themselves, (layer, round) x seeds; the mean of all layers is left out."""
    selves = frame[(frame["metric"] == SELF) & (frame["layer"] != "")]
    return (
        selves.groupby(["layer", "round", "seed"], sort=False)["value"]
        .mean()
        .unstack("seed")
    )


# --- every pair (Fig. 6) ---------------------------------------------------------------------------------------


def _draw_pairs(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    mixing = _mixing(header, frame)
    shared = shared_classes(mixing)
    drawn = mixing[(mixing["metric"] == WEIGHT) & (mixing["seed"] == 0)]
    drawn = drawn[drawn["round"] == drawn["round"].max()]
    layers = list(drawn["layer"].unique())
    with style():
        deep = -(-len(layers) // ACROSS)
        figure = plt.figure(figsize=(8.4, 0.7 + 1.75 * deep), layout="constrained")
        halves: Any = figure.subfigures(1, 2, width_ratios=[1, 2.6])
        classes(halves[0].subplots(), shared)
        grid = halves[1].subplots(deep, ACROSS, squeeze=False)
        matrices = {layer: weights_of(drawn, layer) for layer in layers}
        high = max(
            matrix.mask(np.eye(len(matrix), dtype=bool)).max(axis=None)
            for matrix in matrices.values()
        )
        for ax, (layer, matrix) in zip(grid.flat, matrices.items(), strict=False):
            others(ax, matrix, high)
            ax.set(xticks=[], yticks=[], xlabel="", ylabel="")
            ax.set_title(
                f"{layer}\non oneself {np.diag(matrix).mean():.2f}", fontsize=7.5
            )
        for spare in grid.flat[len(layers) :]:
            spare.remove()
        shown = list(grid.flat[: len(layers)])
        halves[1].colorbar(
            shown[0].collections[0],
            ax=shown,
            shrink=0.7,
            label="aggregation weight on others",
        )
    follows = last_evaluations(curves(mixing, CORRELATION, "pearson"))
    found = judged(
        {layer: of_each(follows.loc[layer].dropna()) for layer in layers}, show=plain
    )
    largest = mixing[(mixing["metric"] == SELF_LARGEST) & (mixing["layer"] != "")]
    largest = largest[largest["round"] == largest["round"].max()].pivot(
        index="layer", columns="seed", values="value"
    )
    largest[0] = {layer: self_largest(matrix) for layer, matrix in matrices.items()}
    said, held = of_seeds(largest.loc[layers], lambda share: bool((share == 1).all()))
    findings = (
        Finding(
            "in every layer the weights on others follow the classes in common (r > 0)",
            found.text,
            found.held,
        ),
        Finding(
            "every client's largest weight is the one on itself",
            f"{said}; clients, mean of seeds: "
            + ", ".join(
                f"{layer} {share:.0%}"
                for layer, share in largest.loc[layers].mean(axis=1).items()
            ),
            held,
        ),
    )
    table = drawn[["layer", "client", "client_b", "value"]].rename(
        columns={"client": "receiver", "client_b": "sender"}
    )
    caption = (
        "Left: the share of the receiver's classes that the sender has. Right: the weights of every pair of clients "
        "in each layer after the last round. Weights on the client itself are grey. Their mean is written above. "
        f"{setting(header)} Seed 0. The paper shows one layer and 8 clients. Its neighbours share three classes. "
        "It prints no numbers."
    )
    return Drawing(figure, table, caption, findings)


# --- on oneself (Fig. 7) ---------------------------------------------------------------------------------------


def _draw_selves(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    mixing = _mixing(header, frame)
    selves = _selves(mixing)
    layers = list(selves.index.get_level_values("layer").unique())
    rounds = selves.index.get_level_values("round")
    last = selves.xs(rounds.max(), level="round")
    with style():
        figure = plt.figure(figsize=(7.6, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for k, layer in enumerate(layers):
            curve = selves.loc[layer].mean(axis=1)
            left.plot(
                curve.index.astype(float),
                curve,
                color=COLOURS[k % len(COLOURS)],
                marker=MARKERS[k],
                label=layer,
            )
        left.set(xlabel="round", ylabel="weight on oneself", ylim=(-0.02, 1.02))
        left.legend(fontsize=6.5, ncols=2, loc="center right", bbox_to_anchor=(1, 0.7))
        for seed in last.columns:
            right.plot(
                range(len(layers)),
                last[seed],
                linestyle="none",
                marker="o",
                color=FAINT,
                markersize=4,
            )
        right.plot(
            range(len(layers)),
            last.mean(axis=1),
            linestyle="none",
            marker="_",
            color=MEAN,
            markersize=16,
            mew=2,
        )
        right.set(ylabel="after the last round", ylim=(-0.02, 1.02))
        name_ticks(right, layers)
    ranked = last.mean(axis=1).sort_values(ascending=False)
    others = [layer for layer in ranked.index if layer != FULLY_CONNECTED]
    found = judged(
        {
            f"{FULLY_CONNECTED} - {each}": settled(selves, FULLY_CONNECTED, each)
            for each in others
        },
        show=plain,
    )
    expected = f"the first fully connected layer, {FULLY_CONNECTED}, has the largest weight on CIFAR-10"
    finding = Finding(expected, found.text, found.held, found.incomparable)
    table = last.stack().rename("value").rename_axis(["layer", "seed"]).reset_index()
    caption = (
        f"The clients' mean weight on themselves. Left: mean of the seeds. Right: a dot for each seed and a bar for "
        f"their mean. {setting(header)} {last.shape[1]} seeds. The paper has one target client and prints no numbers."
    )
    return Drawing(figure, table, caption, (finding,))


FIG6 = items.register(
    Item(
        "pfedla.fig6",
        "Mixing weights of each pair of clients, CIFAR-10",
        source=NAME,
        draw=_draw_pairs,
    )
)
FIG7 = items.register(
    Item(
        "pfedla.fig7",
        "The clients' weight on themselves by layer, CIFAR-10",
        source=LONGER,
        draw=_draw_selves,
    )
)
