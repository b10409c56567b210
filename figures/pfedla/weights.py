"""pFedLA's aggregation weights by layer: of one client over rounds (Fig. 5), all pairs (Fig. 6), oneself (Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from diagnostics.plots.drawing import COLOURS
from figures import items
from figures.differences import FEWEST, Difference, last_evaluations, settled
from figures.forms import (
    Line,
    curves,
    key_above,
    marks,
    matrix,
    seeds_and_mean,
    sheet,
)
from figures.items import Drawing, Finding, Item
from figures.pfedla.overlap import (
    CORRELATION,
    LONGER,
    NAME,
    PAPER_ROUNDS,
    SELF,
    SELF_LARGEST,
    WEIGHT,
    chosen_pairs,
    classes,
    self_largest,
    setting,
    shared_classes,
    through_training,
    weights_of,
)
from figures.recipe import where
from figures.verdicts import judged, of_seeds, plain

ACROSS = 4
"""Layers beside each other in Fig. 6."""
PERIODS = ("first third", "middle third", "last third")
ITSELF = "itself, mean of clients"
FULLY_CONNECTED = "fc1"
"""The layer whose weights are largest in the paper's Fig. 7 on CIFAR-10, as its text says."""


def periods(rounds: pd.Series) -> pd.Series:
    """Return the third of training of each recorded round; none for the start, round 0."""
    third_number = np.ceil(len(PERIODS) * rounds.astype(float) / rounds.max()).astype(
        int
    )
    return third_number.map(dict(enumerate(PERIODS, start=1)))


# --- through training (Fig. 5) ---------------------------------------------------------------------------------


def _draw_periods(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    mixing_rows = where(frame, run="pfedla")
    weight_rows = where(mixing_rows, metric=WEIGHT, seed=0)
    class_overlap = shared_classes(mixing_rows)
    layers = list(weight_rows["layer"].unique())
    rows_by_target = {
        ITSELF: weight_rows[weight_rows["client"] == weight_rows["client_b"]]
    }
    for receiver, sender in chosen_pairs(class_overlap):
        pair_rows = where(weight_rows, client=receiver, client_b=sender)
        rows_by_target[
            f"{receiver} ← {sender}, {class_overlap.loc[receiver, sender]:.0%} of its classes"
        ] = pair_rows
    means = {
        target: target_rows.assign(period=periods(target_rows["round"]))
        .pivot_table(values="value", index="period", columns="layer")
        .reindex(index=list(PERIODS), columns=layers)
        for target, target_rows in rows_by_target.items()
    }
    with sheet(7.6, 3.5) as figure:
        axes = figure.subplots(1, len(PERIODS), sharey=True)
        for ax, period in zip(axes, PERIODS, strict=True):
            curves(
                ax,
                [Line(means[target].loc[period], target) for target in rows_by_target],
                names=layers,
                level=1 / len(class_overlap),
                level_look={"label": "equal weights"},
                title=period,
                ylim=(-0.02, 1.02),
            )
        axes[0].set_ylabel("mean weight")
        key_above(figure, 2, panel=axes[0])
    self_weights = through_training(mixing_rows, SELF).drop(index="", level="layer")
    rounds = self_weights.index.get_level_values("round")
    gains = (
        self_weights.xs(rounds.max(), level="round")
        - self_weights.xs(rounds.min(), level="round")
    ).mean()
    changes_text = ", ".join(f"{gain:+.2f}" for gain in gains)
    difference = Difference(gains)
    gain = difference.interval
    changes_text += (
        f"; mean {gain.value:+.2f}, 95 % interval {gain.low:+.2f} to {gain.high:+.2f}"
    )
    most_weights, fewest_weights = (
        means[target].mean() for target in list(rows_by_target)[1:]
    )
    findings = (
        Finding(
            "with training a client's weight on itself rises and its weights on others fall",
            f"on itself {changes_text}",
            difference.above,
        ),
        Finding(
            "in every layer the sender with most common classes has more weight than the one with fewest",
            f"in {int((most_weights > fewest_weights).sum())} of {len(layers)} layers ({FEWEST})",
            None,
        ),
    )
    stacked_means = pd.DataFrame(
        {target: period_means.stack() for target, period_means in means.items()}
    ).stack()
    weight_table = (
        stacked_means.rename("value")
        .rename_axis(["period", "layer", "weight on"])
        .reset_index()
    )
    setting_text = setting(header)
    caption = (
        f"Weights by layer in each third of the training. They are on the client itself and on two senders: the one "
        f"with most common classes and the one with fewest. {setting_text} Seed 0. The paper has 8 clients. One "
        "shares all four classes of the target and another three of them. The paper prints no numbers."
    )
    return Drawing(figure, weight_table, caption, findings)


# --- every pair (Fig. 6) ---------------------------------------------------------------------------------------


def _draw_pairs(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    mixing_rows = where(frame, run="pfedla")
    class_overlap = shared_classes(mixing_rows)
    weight_rows = where(mixing_rows, metric=WEIGHT, seed=0)
    weight_rows = weight_rows[weight_rows["round"] == weight_rows["round"].max()]
    layers = list(weight_rows["layer"].unique())
    row_count = -(-len(layers) // ACROSS)
    with sheet(8.4, 0.7 + 1.75 * row_count) as figure:
        halves: Any = figure.subfigures(1, 2, width_ratios=[1, 2.6])
        classes(halves[0].subplots(), class_overlap)
        axes_grid = halves[1].subplots(row_count, ACROSS, squeeze=False)
        matrices = {layer: weights_of(weight_rows, layer) for layer in layers}
        for ax, (layer, weights) in zip(axes_grid.flat, matrices.items(), strict=False):
            image = matrix(ax, weights, high=1, square=True)
            largest_senders = weights.to_numpy(float).argmax(axis=1)
            for receiver, sender in enumerate(largest_senders):
                colour = "white"
                if receiver == sender:
                    colour = COLOURS[3]
                ax.plot(sender + 0.5, receiver + 0.5, ".", color=colour, markersize=5)
            ax.set(xticks=[], yticks=[], xlabel="", ylabel="")
            largest_share = self_largest(weights)
            ax.set_title(f"{layer}\nitself most: {largest_share:.0%}", fontsize=7.5)
        for spare_ax in axes_grid.flat[len(layers) :]:
            spare_ax.remove()
        used_axes = list(axes_grid.flat[: len(layers)])
        halves[1].colorbar(image, ax=used_axes, shrink=0.7, label="aggregation weight")
    layer_correlations = last_evaluations(
        through_training(mixing_rows, CORRELATION, "pearson")
    )
    verdict = judged(
        {layer: Difference(layer_correlations.loc[layer].dropna()) for layer in layers},
        show=plain,
    )
    self_shares = mixing_rows[
        (mixing_rows["metric"] == SELF_LARGEST) & (mixing_rows["layer"] != "")
    ]
    self_shares = self_shares[self_shares["round"] == self_shares["round"].max()].pivot(
        index="layer", columns="seed", values="value"
    )
    self_shares[0] = {
        layer: self_largest(weights) for layer, weights in matrices.items()
    }
    sentence, holds = of_seeds(
        self_shares.loc[layers], lambda share: bool((share == 1).any())
    )
    findings = (
        verdict.finding(
            "in every layer the weights on others follow the classes in common (r > 0)"
        ),
        Finding(
            "in a layer every client's largest weight is the one on itself",
            f"{sentence}; clients, mean of seeds: "
            + ", ".join(
                f"{layer} {share:.0%}"
                for layer, share in self_shares.loc[layers].mean(axis=1).items()
            ),
            holds,
        ),
    )
    weight_table = weight_rows[["layer", "client", "client_b", "value"]].rename(
        columns={"client": "receiver", "client_b": "sender"}
    )
    setting_text = setting(header)
    caption = (
        "Left: the share of the receiver's classes that the sender has. Right: the weights of every pair of clients "
        "in each layer after the last round. A dot marks a client's largest weight, in colour if it is its own. "
        "The paper shows one layer of 8 clients, its largest weights on the diagonal, and no numbers. "
        f"{setting_text} Seed 0. The paper's neighbours share three classes."
    )
    return Drawing(figure, weight_table, caption, findings)


# --- on oneself (Fig. 7) ---------------------------------------------------------------------------------------


def _draw_selves(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    mixing_rows = where(frame, run="pfedla")
    self_weights = through_training(mixing_rows, SELF).drop(index="", level="layer")
    layers = list(self_weights.index.get_level_values("layer").unique())
    rounds = self_weights.index.get_level_values("round")
    last_weights = self_weights.xs(rounds.max(), level="round")
    with sheet(7.6, 3.4) as figure:
        curve_ax, mark_ax = figure.subplots(1, 2)
        curves(
            curve_ax,
            [Line(self_weights.loc[layer].mean(axis=1), layer) for layer in layers],
            xlabel="round",
            ylabel="weight on oneself",
            ylim=(-0.02, 1.02),
        )
        curve_ax.legend(
            fontsize=6.5, ncols=2, loc="center right", bbox_to_anchor=(1, 0.7)
        )
        marks(
            mark_ax,
            seeds_and_mean(last_weights),
            layers,
            upright=True,
            ylabel="after the last round",
            ylim=(-0.02, 1.02),
        )
    ranked_weights = last_weights.mean(axis=1).sort_values(ascending=False)
    other_layers = [layer for layer in ranked_weights.index if layer != FULLY_CONNECTED]
    verdict = judged(
        {
            f"{FULLY_CONNECTED} - {other_layer}": settled(
                self_weights, FULLY_CONNECTED, other_layer, PAPER_ROUNDS
            )
            for other_layer in other_layers
        },
        show=plain,
    )
    expected = f"the first fully connected layer, {FULLY_CONNECTED}, has the largest weight on CIFAR-10"
    finding = verdict.finding(expected)
    weight_table = (
        last_weights.stack()
        .rename("value")
        .rename_axis(["layer", "seed"])
        .reset_index()
    )
    setting_text = setting(header)
    caption = (
        f"The clients' mean weight on themselves. Left: mean of the seeds. Right: a dot for each seed and a bar for "
        f"their mean. {setting_text} {last_weights.shape[1]} seeds. The paper has one target client and "
        "prints no numbers."
    )
    return Drawing(figure, weight_table, caption, (finding,))


items.register(Item(
    "pfedla.fig5", "A client's mixing weights by layer, through training", source=NAME, draw=_draw_periods,
    seeds=1,
))  # fmt: skip
items.register(
    Item(
        "pfedla.fig6",
        "Mixing weights of each pair of clients, CIFAR-10",
        source=NAME,
        draw=_draw_pairs,
    )
)
items.register(
    Item(
        "pfedla.fig7",
        "The clients' weight on themselves by layer, CIFAR-10",
        source=LONGER,
        draw=_draw_selves,
    )
)
