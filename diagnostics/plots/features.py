"""Pictures of features by t-SNE, and of predicted probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fl_core.errors import UsageError, check_known
from fl_core.names import in_order

from ..representation.embedding import COLUMNS, centroids
from .drawing import (
    COLOURS,
    FAINT,
    MARKERS,
    MEAN,
    MOST,
    canvas,
    client_style,
    legend,
    panels,
)

SHOWN = 20
"""Classes that the legend names at most."""


def tsne(frame: pd.DataFrame, ax: Axes | None = None, *, centres: bool = True) -> Axes:
    """Draw samples embedded in a plane: colour = class, marker = client.

    Large markers show each client's class centres.

    Args:
        frame: from :func:`diagnostics.representation.embedding.tsne`.
        centres: draw the centres.

    Raises:
        UsageError: columns are missing, or there are no samples.
    """
    colours, markers = _looks([frame])
    with canvas(ax, 6.2, 4.2) as axes:
        _cloud(axes, frame, colours, markers, centres)
        _keys(axes, colours, markers, centres)
        axes.set_xlabel(_said(frame))
    return axes


def tsne_panels(
    frames: Mapping[str, pd.DataFrame],
    axes: Figure | Sequence[Axes] | None = None,
    *,
    centres: bool = True,
) -> list[Axes]:
    """Draw several embeddings next to each other (as before and after a layer), with common colours and markers.

    Args:
        frames: {title: frame}. Their axes are unrelated to each other.
        axes: a figure to fill, or at least one Axes a frame.

    Raises:
        UsageError: as :func:`tsne`, or there are too few Axes.
    """
    colours, markers = _looks(list(frames.values()))
    with panels(axes, len(frames), 3.1, 2.7, columns=len(frames)) as drawn:
        panel_axes = [panel.ax for panel in drawn]
        for ax, (title, frame) in zip(panel_axes, frames.items(), strict=True):
            _cloud(ax, frame, colours, markers, centres)
            ax.set_title(title)
            ax.set_xlabel(_said(frame))
        _keys(panel_axes[-1], colours, markers, centres)
    return panel_axes


def _looks(frames: Sequence[pd.DataFrame]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the colour of each class and the marker of each client over all frames.

    Many clients share one marker.
    """
    if not frames:
        raise UsageError("there must be features; got none. Embed them first.")
    for frame in frames:
        for column in COLUMNS[:4]:
            check_known("column of the frame", column, frame.columns)
        if frame.empty:
            raise UsageError("there must be samples; got none. Pool some first.")
    together = pd.concat([frame[["client", "class"]] for frame in frames])
    classes = sorted(
        together["class"].unique(),
        key=lambda name: (len(str(name)) if str(name).isdigit() else 99, name),
    )
    clients = in_order(together["client"].unique())
    colours = [to_rgb(colour) for colour in COLOURS[: len(classes)]]
    if len(classes) > len(COLOURS):
        colours = [
            to_rgb(mpl.colormaps["turbo"](k / (len(classes) - 1)))
            for k in range(len(classes))
        ]
    markers = dict.fromkeys(clients, MARKERS[0])
    if len(clients) <= MOST:
        markers = dict(zip(clients, MARKERS, strict=False))
    return dict(zip(classes, colours, strict=True)), markers


def _cloud(
    ax: Axes,
    frame: pd.DataFrame,
    colours: Mapping[str, Any],
    markers: Mapping[str, str],
    centres: bool,
) -> None:
    size = float(np.clip(9000 / len(frame), 5, 26))
    mixed = np.random.default_rng(0).permutation(
        len(frame)
    )  # so that no client's samples lie under all others'
    for part in np.array_split(mixed, 12):
        for client, points in frame.iloc[part].groupby("client", sort=False):
            shade = points["class"].map(colours).tolist()
            ax.scatter(
                points["x"],
                points["y"],
                s=size,
                c=shade,
                marker=markers[client],
                alpha=0.55,
                linewidths=0,
            )
    if centres:
        for place in centroids(frame).itertuples(index=False):
            colour = colours[place[1]]
            ax.scatter(
                place.x, place.y, s=62, color=[colour], marker=markers[place.client], edgecolors="black",
                linewidths=0.9, zorder=3,
            )  # fmt: skip
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.spines[:].set_visible(True)
    ax.set_aspect("equal", adjustable="datalim")


def _keys(
    ax: Axes, colours: Mapping[str, Any], markers: Mapping[str, str], centres: bool
) -> None:
    """Draw a legend to the right; many classes and many clients get a column each."""
    plain: dict[str, Any] = {"linestyle": "none", "color": "0.35"}
    blank = Line2D([], [], linestyle="none")
    shown = list(colours.items())[:SHOWN]
    classes: list[tuple[Line2D, str]] = [(blank, "class")]
    classes += [
        (Line2D([], [], linestyle="none", marker="s", color=colour), str(name))
        for name, colour in shown
    ]
    if len(colours) > SHOWN:
        classes.append((blank, f"and {len(colours) - SHOWN} more"))
    clients: list[tuple[Line2D, str]] = [(blank, "client")]
    if len(markers) <= MOST:
        clients += [
            (Line2D([], [], marker=marker, **plain), str(name))
            for name, marker in markers.items()
        ]
    else:
        clients.append(
            (Line2D([], [], marker="o", **plain), f"{len(markers)}, drawn alike")
        )
    if centres:
        large = {**plain, "color": "white", "markeredgecolor": "black", "markersize": 8}
        clients.append(
            (Line2D([], [], marker="o", **large), "centre of client\nand class")
        )
    columns = 1 + (len(classes) + len(clients) > 18)
    longest = max(len(classes), len(clients))
    if columns == 2 and longest <= 18:  # filled one after the other, in equal parts
        classes, clients = (
            [*each, *[(blank, "")] * (longest - len(each))]
            for each in (classes, clients)
        )
    handles, names = zip(*classes, *clients, strict=True)
    legend = ax.legend(
        handles, names, loc="upper left", bbox_to_anchor=(1.01, 1.02), borderaxespad=0, alignment="left",
        ncols=columns, labelspacing=0.3,
    )  # fmt: skip
    for text in legend.get_texts():
        if text.get_text() in ("class", "client"):
            text.set_fontweight("bold")


def _said(frame: pd.DataFrame) -> str:
    perplexity = frame.attrs.get("perplexity")
    return f"{len(frame)} samples" + (
        f", t-SNE, perplexity {perplexity:.3g}" if perplexity else ""
    )


def roc(curves: pd.DataFrame, ax: Axes | None = None, positive: str = "") -> Axes:
    """Draw ROC curves: a line for each client, and a black one for all samples together.

    Args:
        curves: columns ``client`` (empty for all together), ``false_positive``, ``true_positive`` and ``auroc``.
        positive: name of the class whose probability is ranked.

    Raises:
        UsageError: there are no curves.
    """
    if curves.empty:
        raise UsageError(
            "a client must have samples of both classes for a ROC curve; got none. Use more samples."
        )
    names = in_order([name for name in curves["client"].unique() if name])
    with canvas(ax, width=4.2, height=3.4) as axes:
        axes.plot(
            [0, 1],
            [0, 1],
            color=FAINT,
            linestyle=":",
            linewidth=1,
            label="guessing, 0.50",
        )
        for k, name in enumerate([*names, ""]):
            curve = curves[curves["client"] == name]
            if curve.empty:
                continue
            label = f"{name or 'all clients'}, {curve['auroc'].iloc[0]:.2f}"
            how = (
                {**client_style(k, names), "marker": None}
                if name
                else {"color": MEAN, "linewidth": 2.2}
            )
            how |= (
                {"label": label}
                if not str(how.get("label", "")).startswith(("_", "each of"))
                else {}
            )
            axes.plot(curve["false_positive"], curve["true_positive"], **how)
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        of = f" of {positive!r}" if positive else ""
        axes.set(xlabel="false positive rate", ylabel=f"true positive rate{of}")
        legend(axes, title="AUROC")
    return axes


def calibration(
    groups: pd.DataFrame, ax: Axes | None = None, positive: str = ""
) -> Axes:
    """Draw the share of positive samples against their predicted probability, group by group, with intervals.

    Args:
        groups: columns ``predicted``, ``share``, ``low``, ``high`` and ``n``.
        positive: name of the class whose probability is predicted.

    Raises:
        UsageError: there are no groups.
    """
    if groups.empty:
        raise UsageError(
            "there must be predicted probabilities; got none. Predict first."
        )
    share = groups["share"].to_numpy(float)
    ends = np.abs(groups[["low", "high"]].to_numpy(float).T - share)
    with canvas(ax, width=4.2, height=3.4) as axes:
        axes.plot(
            [0, 1], [0, 1], color=FAINT, linestyle=":", linewidth=1, label="calibrated"
        )
        axes.errorbar(
            groups["predicted"],
            share,
            yerr=ends,
            color=MEAN,
            marker="o",
            capsize=2,
            label="all clients",
        )
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        of = f" of {positive!r}" if positive else ""
        axes.set(xlabel=f"predicted probability{of}", ylabel="share of samples")
        legend(axes)
    return axes
