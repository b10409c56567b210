"""Pictures of an algorithm's state in a run: attention of prompts, and layers over the rounds."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from diagnostics.plots.drawing import (
    COLOURS,
    Panel,
    canvas,
    check_single,
    heat,
    of_metric,
)

ATTENTION_LABEL = "attention, a row sums to 1"
SHARE = LinearSegmentedColormap.from_list("share", ["white", COLOURS[0]])
SHARES = {
    "trained": "share of clients that train it",
    "retained": "share of clients that keep it",
}


def prompt_attention(frame: pd.DataFrame, ax: Axes, layer: str) -> Axes:
    """Draw one client's attention between features and prompts: a heat map queries x keys (FedPFT, Fig. 6).

    Args:
        frame: rows of one run with the metric ``prompt_attention``. The variant names ``query>key``. The last round
            is drawn.
        layer: of the prompts.
    """
    rows = of_metric(frame, "prompt_attention").query("layer == @layer")
    rows = rows[rows["round"] == rows["round"].max()]
    check_single(rows, ["variant"])
    named = rows["variant"].str.rpartition(">")
    rows = rows.assign(query=named[0], key=named[2])
    rows["query"] = rows["query"].str.removeprefix("sample ")
    rows["key"] = rows["key"].str.removeprefix("prompt ")
    queries, keys = rows["query"].unique(), rows["key"].unique()
    matrix = rows.pivot(index="query", columns="key", values="value").reindex(
        index=queries, columns=keys
    )
    heat(Panel(ax, True, True), matrix, high=1.0, names=(40, 40))
    return ax


def layers_over_rounds(
    frame: pd.DataFrame, metric: str = "trained", ax: Axes | None = None
) -> Axes:
    """Draw a heat map layers (input at the top) x recorded rounds: the share of clients with the metric at 1.

    Args:
        frame: rows of one run with the metric: ``trained`` (else frozen) or ``retained`` (else mixed).
    """
    rows = of_metric(frame, metric)
    check_single(rows, ["client", "layer", "round"])
    shares = (
        rows.groupby(["layer", "round"], sort=False)["value"].mean().unstack("round")
    )
    with canvas(
        ax,
        min(max(2.6 + 0.16 * shares.shape[1], 4.6), 9),
        min(max(1.2 + 0.24 * len(shares), 1.9), 8),
    ) as axes:
        colours = heat(
            Panel(axes, True, True),
            shares.sort_index(axis=1),
            cmap=SHARE,
            names=(40, 16),
        )
        one = rows["client"].nunique() == 1
        axes.figure.colorbar(
            colours, ax=axes, label=f"1 = {metric}" if one else SHARES[metric]
        )
        axes.spines[:].set_visible(True)
        axes.set(ylabel="layer, input at the top", xlabel="round")
    return axes
