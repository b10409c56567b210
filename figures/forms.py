"""Four forms of pictures: curves, marks, a matrix and planes. The fifth form is :func:`figures.page.markdown`.

An item says its rows, its axes, the place of the published values, and its lines. The functions here draw them. A
published value is a hollow grey mark in every picture, and a published range is a grey band.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diagnostics.plots.drawing import (
    COLOURS,
    FAINT,
    MARKERS,
    MEAN,
    Panel,
    heat,
    name_ticks,
    style,
)
from diagnostics.plots.layers import tsne_panels
from fl_core.statistics import Interval, mean_interval

Look = Mapping[str, Any]
"""Options of matplotlib for a line or a mark."""
PUBLISHED: Look = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 4.5,
    "color": "0.45",
    "markerfacecolor": "none",
}
"""The look of every published value: a hollow grey mark."""
PUBLISHED_RANGE: Look = {
    "facecolor": "0.85",
    "edgecolor": "0.55",
    "linewidth": 0.6,
    "zorder": 0.5,
}
"""The look of every published range: a grey band."""


@contextmanager
def sheet(width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of this size in inches, in the package's style while it is drawn."""
    with style():
        yield plt.figure(figsize=(width, height), layout="constrained")


def key_above(
    figure: Figure,
    columns: int,
    *,
    panel: Axes | None = None,
    handles: Sequence[Any] = (),
    size: float = 7,
) -> None:
    """Draw a legend above all panels.

    Args:
        panel: the panel whose lines it names; default all panels.
        handles: what it shows instead, each with its label.
    """
    legend_options: dict[str, Any] = {}
    if panel is not None:
        artists, labels = panel.get_legend_handles_labels()
        legend_options = {"handles": artists, "labels": labels}
    if handles:
        legend_options = {"handles": list(handles)}
    figure.legend(
        **legend_options, loc="outside upper center", ncols=columns, fontsize=size
    )


# --- curves ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    Attributes:
        values: y by x; of a frame every column is a line of the same look.
        label: the label in the legend; empty for none.
        ends: lower and upper end of its band, by x; None for none.
        look: options in place of the colour and the marker of its place.
        band: options in place of the band's own look.
    """

    values: pd.Series | pd.DataFrame
    label: str = ""
    ends: tuple[pd.Series, pd.Series] | None = None
    look: Look = field(default_factory=dict)
    band: Look = field(default_factory=dict)


@dataclass(frozen=True)
class Band:
    """A published range, or another one.

    Attributes:
        ends: ``low`` and ``high`` of each place along x; none where they are missing.
        label: the label in the legend; empty for none.
        look: options of matplotlib's ``fill_between``.
    """

    ends: pd.DataFrame
    label: str = ""
    look: Look = field(default_factory=lambda: PUBLISHED_RANGE)


def curves(
    ax: Axes,
    lines: Iterable[Line],
    *,
    names: Sequence[str] = (),
    factor: float = 1,
    bands: Iterable[Band] = (),
    level: float | None = None,
    level_look: Look | None = None,
    verticals: Iterable[float] = (),
    **axes: Any,
) -> None:
    """Draw lines, the k-th in the k-th colour and marker, each with its band.

    Args:
        names: of the places along x, such as layers; default the numbers of the values' index.
        factor: of all values, 100 for shares in percent.
        bands: published ranges, behind the lines.
        level: a value that a dashed line marks.
        level_look: options in place of that line's own look, such as its label.
        verticals: places along x that a dotted line marks.
        axes: labels and limits, as for :meth:`matplotlib.axes.Axes.set`.
    """
    for band in bands:
        low, high = (band.ends[end].astype(float) for end in ("low", "high"))
        ax.fill_between(range(len(low)), low, high, label=band.label, **band.look)
    for position in verticals:
        ax.axvline(position, color="0.75", linewidth=0.9, linestyle=":", zorder=1)
    for k, line in enumerate(lines):
        x: Any = line.values.index.to_numpy()
        if names:
            x = np.arange(len(line.values))
        look = {
            "color": COLOURS[k % len(COLOURS)],
            "marker": MARKERS[k % len(MARKERS)],
            **line.look,
        }
        if line.ends is not None:
            low, high = (factor * end for end in line.ends)
            shade = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            ax.fill_between(x, low, high, **{**shade, **line.band})
        label: Any = line.label
        if isinstance(line.values, pd.DataFrame):  # one name for all its lines
            label = [line.label, *["_"] * (line.values.shape[1] - 1)]
        ax.plot(x, factor * line.values, label=label, **look)
    if level is not None:
        look = {"color": FAINT, "linestyle": "--", "linewidth": 0.9, "zorder": 1}
        ax.axhline(factor * level, **{**look, **(level_look or {})})
    if names:
        name_ticks(ax, names)
    ax.set(**axes)


# --- marks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Marks of one kind, one for each name.

    Attributes:
        values: with the columns ``value``, and ``low`` and ``high`` where there are intervals.
        label: the label in the legend; empty for none.
        offset: distance from the place of the name.
        look: options in place of the colour and the marker of its place.
    """

    values: pd.DataFrame
    label: str = ""
    offset: float = 0
    look: Look = field(default_factory=dict)


def with_intervals(
    intervals: Iterable[Interval],
    label: str = "",
    offset: float = 0,
    look: Look | None = None,
) -> Kind:
    """Return marks with intervals."""
    interval_table = pd.DataFrame(list(intervals), columns=list(Interval._fields))
    return Kind(interval_table, label, offset, look or {})


def from_paper(values: Iterable[float], label: str = "", offset: float = 0) -> Kind:
    """Return published values as marks."""
    return Kind(pd.DataFrame({"value": list(values)}), label, offset, PUBLISHED)


def seeds_and_mean(values: pd.DataFrame) -> list[Kind]:
    """Return a faint dot for each seed and a bar for their mean.

    Args:
        values: rows x seeds.
    """
    dot = {"color": FAINT, "marker": "o", "markersize": 4}
    bar = {"color": MEAN, "marker": "_", "markersize": 16, "mew": 2}
    dots = [Kind(values[seed].to_frame("value"), look=dot) for seed in values]
    return [*dots, Kind(values.mean(axis=1).to_frame("value"), look=bar)]


def over_seeds(values: pd.DataFrame, row_keys: Iterable[Hashable]) -> list[Interval]:
    """Return the mean of each row over its seeds with its interval; NaN for a row that is not there.

    Args:
        values: rows x seeds.
    """
    intervals = []
    for row_key in row_keys:
        scores = pd.Series(dtype=float)
        if row_key in values.index:
            scores = values.loc[row_key].dropna()
        interval = Interval(math.nan, math.nan, math.nan)
        if len(scores):
            interval = mean_interval(scores)
        intervals.append(interval)
    return intervals


def beside_paper(
    values: pd.DataFrame,
    published: pd.Series,
    line_names: Iterable[Hashable],
    quantities: Mapping[str, str],
) -> list[Kind]:
    """Return marks of each quantity with its interval over seeds, and the published ones at the same heights.

    Args:
        values: (line, quantity) x seeds; what is not there is left out.
        published: by (line, quantity); as above.
        line_names: the lines in their order.
        quantities: what each quantity is called in the legend.
    """
    measured_marks: list[Kind] = []
    published_marks: list[Kind] = []
    for k, (quantity, label) in enumerate(quantities.items()):
        offset = 0.22 * (k - (len(quantities) - 1) / 2)
        line_keys = [(line_name, quantity) for line_name in line_names]
        measured_marks.append(
            with_intervals(over_seeds(values, line_keys), label, offset)
        )
        published_values = published.reindex(line_keys)
        if published_values.notna().any():
            published_marks.append(
                from_paper(
                    published_values, "" if published_marks else "published", offset
                )
            )
    return [*measured_marks, *published_marks]


def marks(
    ax: Axes,
    kinds: Iterable[Kind],
    names: Sequence[str],
    *,
    factor: float = 1,
    upright: bool = False,
    level: float | None = None,
    level_look: Look | None = None,
    size: float = 8,
    **axes: Any,
) -> None:
    """Draw marks with their intervals in lines from the top, the k-th kind in the k-th colour and marker.

    Args:
        names: names of the lines, in their order.
        factor: of all values, 100 for shares in percent.
        upright: whether the names stand along x.
        level: a value that a thin line marks.
        level_look: options in place of that line's own look.
        size: size of the names' letters, unless they stand along x.
        axes: labels and limits, as for :meth:`matplotlib.axes.Axes.set`.
    """
    for k, kind in enumerate(kinds):
        look = {
            "linestyle": "none",
            "color": COLOURS[k % len(COLOURS)],
            "marker": MARKERS[k % len(MARKERS)],
            "markersize": 4.5,
            **kind.look,
        }
        scaled_values = factor * kind.values.astype(float)
        positions = np.arange(len(scaled_values)) + kind.offset
        if "low" in scaled_values:
            draw_ends = ax.vlines if upright else ax.hlines
            line_width = 0.8 if look["color"] == PUBLISHED["color"] else 1.4
            draw_ends(
                positions,
                scaled_values["low"],
                scaled_values["high"],
                color=look["color"],
                linewidth=line_width,
            )
        coordinates = [scaled_values["value"], positions]
        if upright:
            coordinates.reverse()
        ax.plot(*coordinates, label=kind.label, **look)
    if level is not None:
        draw_level = ax.axhline if upright else ax.axvline
        look = {"color": FAINT, "linewidth": 0.9, "zorder": 0, **(level_look or {})}
        draw_level(factor * level, **look)
    if upright:
        name_ticks(ax, names)
    else:
        ax.set_yticks(range(len(names)), names, fontsize=size)
        ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set(**axes)


# --- a matrix --------------------------------------------------------------------------------------------------


def matrix(
    ax: Axes,
    table: pd.DataFrame,
    *,
    texts: pd.DataFrame | None = None,
    bar: str = "",
    bar_below: bool = False,
    high: float | None = None,
    colours: Any = "viridis",
    with_names: bool = False,
    size: float = 7.5,
    **looks: Any,
) -> Any:
    """Draw a table as colours, rows from the top; return the image from which a bar of colours is made.

    Args:
        texts: what stands in each cell. Without it numbers do where they fit, and missing values are grey.
        bar: title of a bar of colours; empty for none.
        bar_below: whether the bar lies beneath.
        high: end of the scale; default the largest value.
        with_names: whether a matrix without texts names its rows and columns.
        size: size of the letters of the names.
        looks: further options of seaborn's heat map, for a matrix with texts.
    """
    if high is None:
        high = float(np.nanmax(table.to_numpy(float)))
    if texts is None:
        panel = Panel(ax, with_names, with_names)
        square = bool(looks.get("square"))
        image = heat(
            panel, table, high=high, cmap=colours, square=square, names=(40, 40)
        )
    else:
        sns.heatmap(
            table, ax=ax, cmap=colours, vmax=high, annot=texts.to_numpy(), fmt="",
            cbar=bool(bar), cbar_kws={"label": bar},
            **{"annot_kws": {"fontsize": 6.5}, "linewidths": 0.5, **looks},
        )  # fmt: skip
        ax.set(xlabel="", ylabel="")
        ax.tick_params(length=0, labelsize=size)
        ax.tick_params(axis="y", labelrotation=0)
        ax.grid(visible=False)
        return ax.collections[0]
    if bar and bar_below:
        ax.figure.colorbar(image, ax=ax, location="bottom", shrink=0.8, label=bar)
    elif bar:
        ax.figure.colorbar(image, ax=ax, label=bar)
    return image


# --- planes ----------------------------------------------------------------------------------------------------


def planes(
    frames: Mapping[str, pd.DataFrame],
    axes: Figure | Sequence[Axes],
    *,
    centres: bool = False,
) -> None:
    """Draw the places of samples in planes next to each other, with common colours and markers.

    Args:
        frames: by title, as :func:`figures.planes.plane` returns them.
        axes: a figure to fill, or an Axes for each frame.
        centres: whether the centre of each client's samples of a class is marked.
    """
    for ax in tsne_panels(frames, axes, centres=centres):
        ax.set_xlabel("")
