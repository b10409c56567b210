"""Pictures of an algorithm's internal state in a run: aggregation weights, attention, trained and held layers.

The rows follow the common schema, with one metric a picture:

* ``aggregation_weight``: the weight in [0, 1] that the receiver ``client`` gives to the sender ``client_b`` in a layer
  and round. The weights of a receiver sum to 1. See pFedLA, Figs. 5 to 7. FedAMP and FedFomo weigh whole models alike.
* ``prompt_attention``: the attention weight in [0, 1] of a query for a key. The variant names them ``query>key``, or
  only the key if there is one query. The weights of a query sum to 1. In FedPFT, Fig. 6, a query is a sample's feature.
  The keys are that feature and the prompts.
* ``trained``: 1 if a layer is trained in a round, 0 if it is frozen. There is a row per client if clients differ. See
  layer scheduling: FedBABU, vanilla and anti scheduling.
* ``retained``: 1 if a client keeps a layer of its own in a round, 0 if it takes the mixture (HeurpFedLA).
* ``held``: 1 if a client has a layer in a round, else 0 (FedRA's allocation matrix).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from fl_core.errors import UsageError, check_known, listing
from fl_core.ordering import in_order

from .drawing import (
    COLOURS,
    FAINT,
    MARKERS,
    MOST,
    NICE,
    Panel,
    canvas,
    check_single,
    heat,
    legend,
    missing_notes,
    of_metric,
    panels,
    with_notes,
)

ATTENTION_LABEL = "attention, a row sums to 1"
SHARE = LinearSegmentedColormap.from_list("share", ["white", COLOURS[0]])
NO_VALUE = "grey: no value"
_TIMELINES = {
    "trained": ("1 = trained, 0 = frozen", "share of clients that train it"),
    "retained": ("1 = kept, 0 = mixed", "share of clients that keep it"),
}
"""Metrics of layers over rounds: what 1 and 0 mean, of one client and of several."""


# --- mixing ----------------------------------------------------------------------------------------------------


def aggregation_weights(
    frame: pd.DataFrame, round: int | None = None, axes: Figure | Sequence[Axes] | None = None
) -> list[Axes]:
    """Draw whose models each client mixes: a heat map receivers x senders per layer (pFedLA, Fig. 6).

    Args:
        frame: rows with the metric ``aggregation_weight`` of one run.
        round: default the last recorded round.
        axes: a figure to fill, or at least one Axes a layer.

    Raises:
        UsageError: there are no such rows or round, a weight is outside [0, 1], a place has two weights, or there are
            too few Axes.
    """
    rows = _of(frame, "aggregation_weight")
    rows, at = _at(rows, round)
    check_single(rows, ["client", "client_b", "layer"])
    names = _names(rows)
    layers = list(rows["layer"].unique())
    size = float(np.clip(0.28 * len(names), 1.5, 3.2))
    with panels(axes, len(layers), size, size + 0.1, room=(1.8, 1.0)) as drawn:
        for layer, panel in zip(layers, drawn, strict=True):
            matrix = rows[rows["layer"] == layer].pivot(index="client", columns="client_b", values="value")
            colours = heat(panel, matrix.reindex(index=names, columns=names), square=True)
            panel.ax.set_title(layer or "whole model", fontsize=8)
            panel.ax.set(xlabel="sender" if panel.below else "", ylabel="receiver" if panel.beside else "")
        panel_axes = [panel.ax for panel in drawn]
        figure = panel_axes[0].figure
        figure.colorbar(colours, ax=panel_axes, shrink=0.8, label=f"aggregation weight{at}, a row sums to 1")
        notes = missing_notes(rows, "layer")
        if notes or len(rows) < len(layers) * len(names) ** 2:
            figure.supxlabel(with_notes(NO_VALUE, notes), fontsize=8)
    return panel_axes


def aggregation_history(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the clients' mean weight on themselves over the rounds, a line per layer (pFedLA, Figs. 5, 7).

    With up to three layers, a band reaches from the lowest client to the highest. A dashed line marks equal weights.

    Args:
        frame: rows with the metric ``aggregation_weight`` of one run.

    Raises:
        UsageError: there are no such rows, a weight is outside [0, 1], or a place has two weights.
    """
    rows = _of(frame, "aggregation_weight")
    check_single(rows, ["client", "client_b", "layer", "round"])
    names, layers = _names(rows), list(rows["layer"].unique())
    selves = rows[rows["client"] == rows["client_b"]]
    if selves.empty:
        raise UsageError("rows of aggregation_weight must have clients' weights for themselves; got none. Add them.")
    groups = selves.groupby(["round", "layer"])["value"]
    mean, low, high = (
        table.unstack("layer").reindex(columns=layers)
        for table in (groups.mean(skipna=False), groups.min(), groups.max())
    )
    x = mean.index.to_numpy(dtype=np.float64)
    with canvas(ax, 4.6, 2.9) as axes:
        for k, layer in enumerate(layers):
            look = _layer_look(k, layers, len(x))
            axes.plot(x, mean[layer], label=layer or "whole model", **look)
            if len(layers) <= 3:
                axes.fill_between(x, low[layer], high[layer], color=look["color"], alpha=0.15, linewidth=0)
        axes.axhline(1 / len(names), color=FAINT, linestyle="--", linewidth=0.9, label="equal weights", zorder=1)
        axes.set_title("self-weight, mean of clients")
        axes.set(ylim=(-0.02, 1.02), ylabel="weight")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=NICE))
        axes.set_xlabel(with_notes("round", missing_notes(selves, "layer")))
        legend(axes, title="layer")
    return axes


def _layer_look(k: int, layers: Sequence[str], points: int) -> dict[str, Any]:
    """Return colour and marker of layer number k; many layers are shaded from input to output."""
    every = max(1, points // 8)
    if len(layers) > MOST:
        return {"color": mpl.colormaps["viridis"](0.95 * k / (len(layers) - 1)), "marker": ""}
    return {"color": COLOURS[k], "marker": MARKERS[k], "markevery": (k % every, every)}


# --- attention -------------------------------------------------------------------------------------------------


def prompt_attention(
    frame: pd.DataFrame,
    client: str | None = None,
    round: int | None = None,
    ax: Axes | None = None,
    layer: str | None = None,
    high: float | None = None,
) -> Axes:
    """Draw one client's attention between features and prompts: a heat map queries x keys (FedPFT, Fig. 6).

    Args:
        frame: rows with the metric ``prompt_attention`` of one run.
        client, layer: the client, and the layer of the prompts. They are needed if the rows are of several.
        round: default the last recorded round.
        high: end of a colour scale that several such pictures share. They then have no colour bar each. Default: the
            largest value.

    Raises:
        UsageError: there are no such rows, client, layer or round, there are several and none is named, a weight is
            outside [0, 1], or a query and key have two weights.
    """
    rows = _of(frame, "prompt_attention")
    for column, chosen in (("client", client), ("layer", layer)):
        if chosen is not None:
            rows = rows[rows[column] == check_known(column, chosen, rows[column].unique())]
        elif rows[column].nunique() > 1:
            raise UsageError(
                f"The rows hold attention of the {column}s {listing(rows[column].unique())}. Name one of them."
            )
    rows, at = _at(rows, round)
    named = rows["variant"].str.rpartition(">")
    rows = rows.assign(query=named[0].where(named[1] == ">", "feature"), key=named[2])
    check_single(rows, ["query", "key"])
    queries, keys = list(rows["query"].unique()), list(rows["key"].unique())
    matrix = rows.pivot(index="query", columns="key", values="value").reindex(index=queries, columns=keys)
    width, height = 2.6 + 0.26 * len(keys), 1.5 + 0.2 * len(queries)
    with canvas(ax, float(np.clip(width, 4, 10)), float(np.clip(height, 2.2, 8))) as axes:
        largest = float(np.nanmax([rows["value"].max(), 1e-3]))
        colours = heat(Panel(axes, True, True), matrix, high=high or largest, names=(40, 40))
        whose = rows["client"].iloc[0]
        if high is None:
            axes.figure.colorbar(colours, ax=axes, label=ATTENTION_LABEL)
        notes = missing_notes(rows, "variant")
        axes.set_title(f"{whose}{at}".removeprefix(", ") + (f", {layer}" if layer else ""))
        axes.set(ylabel="query", xlabel=with_notes("key" if not notes else f"key ({NO_VALUE})", notes))
    return axes


# --- trained and held ------------------------------------------------------------------------------------------


def unfreezing(frame: pd.DataFrame, ax: Axes | None = None, metric: str = "trained") -> Axes:
    """Draw the trained layers of each round: layers (input at the top) x recorded rounds.

    If the rows are of clients, the colour is the share of clients that train the layer.

    Args:
        frame: rows with the metric of one run.
        metric: ``trained``, or ``retained`` for what clients keep.

    Raises:
        UsageError: the metric is another one, there are no such rows, a value is outside [0, 1], or a client, layer and
            round have two values.
    """
    labels = _TIMELINES[check_known("metric over the rounds", metric, _TIMELINES)]
    rows = _of(frame, metric)
    check_single(rows, ["client", "layer", "round"])
    shares = _over_rounds(rows)
    with canvas(ax, *_timeline(shares)) as axes:
        colours = heat(Panel(axes, True, True), shares, cmap=SHARE, names=(40, 16))
        axes.figure.colorbar(colours, ax=axes, label=labels[rows["client"].nunique() > 1])
        _draw_frame(axes)
        notes = missing_notes(rows, "layer")
        axes.set(ylabel="layer, input at the top")
        axes.set_xlabel(with_notes("round" if not notes else f"round ({NO_VALUE})", notes))
    return axes


def allocation(
    frame: pd.DataFrame, round: int | None = None, axes: Figure | Sequence[Axes] | None = None
) -> list[Axes]:
    """Draw which client holds which layer in a round, and each layer's share of clients over the rounds.

    FedRA draws such a matrix every round. Its bound depends on the least number of clients that hold a layer. The
    second panel's title gives that number.

    Args:
        frame: rows with the metric ``held`` of one run.
        round: round of the first panel. Default: the last recorded round.
        axes: a figure to fill, or at least two Axes.

    Raises:
        UsageError: there are no such rows or round, a value is outside [0, 1], a place has two values, or there are too
            few Axes.
    """
    rows = _of(frame, "held")
    check_single(rows, ["client", "layer", "round"])
    now, at = _at(rows, round)
    layers, clients = list(rows["layer"].unique()), in_order(now["client"].unique())
    matrix = now.pivot(index="client", columns="layer", values="value").reindex(index=clients, columns=layers)
    shares = _over_rounds(rows)
    fewest = rows.groupby(["round", "layer"], dropna=False)["value"].sum().min()
    height = float(np.clip(0.2 * max(len(clients), len(layers)), 1.6, 6))
    with panels(axes, 2, 3.2, height, columns=2, room=(1.6, 1.3)) as drawn:
        left, right = (Panel(panel.ax, True, True) for panel in drawn)
        heat(left, matrix, cmap=SHARE, names=(40, 40))
        left.ax.set_title(f"clients and layers{at}")
        left.ax.set(ylabel="client", xlabel="layer, input to output")
        colours = heat(right, shares, cmap=SHARE, names=(40, 16))
        right.ax.set_title(f"least held layer: {fewest:g} client" + "s" * bool(fewest != 1))
        notes = missing_notes(rows, "layer")
        right.ax.set(ylabel="layer, input at the top")
        right.ax.set_xlabel(with_notes("round" if not notes else f"round ({NO_VALUE})", notes))
        for panel in (left, right):
            _draw_frame(panel.ax)
        panel_axes = [left.ax, right.ax]
        panel_axes[0].figure.colorbar(colours, ax=panel_axes, label="1 = held; right: share of clients")
    return panel_axes


def _over_rounds(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over clients: a table layers x rounds."""
    means = rows.groupby(["layer", "round"], sort=False, dropna=False)["value"].mean(skipna=False).unstack("round")
    return means.reindex(index=list(rows["layer"].unique()), columns=sorted(means.columns))


def _timeline(shares: pd.DataFrame) -> tuple[float, float]:
    return float(np.clip(2.6 + 0.16 * shares.shape[1], 4.6, 9)), float(np.clip(1.2 + 0.24 * len(shares), 1.9, 8))


def _draw_frame(ax: Axes) -> None:
    """Draw a frame around a heat map, so that white cells at its edge stand out from the page."""
    ax.spines[:].set_visible(True)


# --- picking rows ----------------------------------------------------------------------------------------------


def _of(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows of a metric; refuse values that are no shares between 0 and 1."""
    rows = of_metric(frame, metric)
    outside = rows[(rows["value"] < 0) | (rows["value"] > 1)]
    if len(outside):
        first = outside.iloc[0]
        raise UsageError(f"{metric} at {first['layer']!r} must be between 0 and 1; got {first['value']:g}.")
    return rows


def _at(rows: pd.DataFrame, round: int | None) -> tuple[pd.DataFrame, str]:
    """Return the rows of one round, by default the last, and its name for a title."""
    present = sorted(rows["round"].dropna().unique())
    if round is None and not present:
        return rows, ""
    chosen = present[-1] if round is None else round
    if chosen not in present:
        metric = rows["metric"].iloc[0]
        raise UsageError(f"round must be one with {metric}: {listing(map(str, present))}; got round {chosen}.")
    return rows[rows["round"] == chosen], f", round {chosen}"


def _names(rows: pd.DataFrame) -> list[str]:
    """Return the names of receivers and senders."""
    return in_order(dict.fromkeys([*rows["client"], *rows["client_b"]]))
