"""Pictures of features by t-SNE, and of predicted probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_core.display import in_order
from fl_core.errors import UsageError, check_known

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


def tsne(frame: pd.DataFrame, ax: Axes | None = None, *, centres: bool = True) -> Axes:
    """Draw samples embedded in a plane: colour = class, marker = client.

    Large markers show each client's class centres.

    Args:
        frame: from :func:`diagnostics.representation.embedding.tsne`.
        centres: draw the centres.

    Raises:
        UsageError: columns are missing, or there are no samples.
    """
    looks = _looks([frame])
    with canvas(ax, 6.2, 4.2) as axes:
        _cloud(axes, frame, looks, centres, legend=True)
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
    looks = _looks(list(frames.values()))
    with panels(axes, len(frames), 3.1, 2.7, columns=len(frames)) as drawn:
        panel_axes = [panel.ax for panel in drawn]
        for ax, (title, frame) in zip(panel_axes, frames.items(), strict=True):
            _cloud(ax, frame, looks, centres, legend=ax is panel_axes[-1])
            ax.set_title(title)
    return panel_axes


def _looks(frames: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """Return how seaborn draws classes and clients over all frames. Many clients are drawn alike."""
    if not frames:
        raise UsageError("there must be features; got none. Embed them first.")
    for frame in frames:
        for column in COLUMNS[:4]:
            check_known("column of the frame", column, frame.columns)
        if frame.empty:
            raise UsageError("there must be samples; got none. Pool some first.")
    together = pd.concat([frame[["client", "class"]] for frame in frames])
    classes = in_order(sorted(together["class"].unique()))
    colours = COLOURS[: len(classes)]
    if len(classes) > len(COLOURS):
        colours = sns.color_palette("turbo", len(classes))
    looks: dict[str, Any] = {
        "hue": "class",
        "hue_order": classes,
        "palette": dict(zip(classes, colours, strict=True)),
    }
    clients = in_order(together["client"].unique())
    if len(clients) <= MOST:
        markers = dict(zip(clients, MARKERS, strict=False))
        looks |= {"style": "client", "style_order": clients, "markers": markers}
    return looks


def _cloud(
    ax: Axes, frame: pd.DataFrame, looks: Mapping[str, Any], centres: bool, legend: bool
) -> None:
    size = float(np.clip(9000 / len(frame), 5, 26))
    mixed = frame.sample(frac=1, random_state=0)  # no client lies under all others
    how: dict[str, Any] = {"x": "x", "y": "y", "ax": ax, **looks}
    sns.scatterplot(mixed, s=size, alpha=0.55, linewidth=0, legend=legend, **how)
    if centres:
        places, edge = centroids(frame), {"edgecolor": "black", "linewidth": 0.9}
        sns.scatterplot(places, s=62, zorder=3, legend=False, **edge, **how)
    if legend:
        handles, names = ax.get_legend_handles_labels()
        columns = 1 + len(names) // 14
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.02)}
        ax.legend(handles, names, borderaxespad=0, ncols=columns, **place)
    alike = "" if "style" in looks else ", clients drawn alike"
    large = "\nlarge: centres of client and class" if centres else ""
    ax.set(xticks=[], yticks=[], xlabel=_said(frame) + alike + large, ylabel="")
    ax.grid(False)
    ax.spines[:].set_visible(True)
    ax.set_aspect("equal", adjustable="datalim")


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
