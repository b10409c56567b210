"""Draw scores as lines from the top, each with its interval, next to the published scores."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from diagnostics.plots.drawing import COLOURS, MARKERS
from figures.drawing import PUBLISHED
from fl_core.statistics import Interval, mean_interval


def spans(
    ax: Axes,
    y: Iterable[float],
    intervals: Sequence[Interval],
    k: int,
    label: str = "",
    factor: float = 100,
) -> None:
    """Draw a mark with its interval at each height, in the k-th colour and marker.

    Args:
        factor: of the values, which are shares by default and drawn in percent.
    """
    heights = list(y)
    low, high = (
        [factor * getattr(interval, end) for interval in intervals]
        for end in ("low", "high")
    )
    ax.hlines(heights, low, high, color=COLOURS[k], linewidth=1.4)
    values = [factor * interval.value for interval in intervals]
    ax.plot(
        values,
        heights,
        linestyle="none",
        label=label,
        color=COLOURS[k],
        marker=MARKERS[k],
        markersize=4.5,
    )


def marks(
    ax: Axes,
    values: pd.DataFrame,
    published: pd.Series,
    lines: Mapping[str, str],
    quantities: Mapping[str, str],
) -> None:
    """Draw every line's quantities: a filled mark with its 95 % interval here, a hollow one published.

    Args:
        values: shares, (line, quantity) x seeds; what is not there is left out.
        published: shares by (line, quantity); as above.
        lines: what each line is called, in their order.
        quantities: what each quantity is called in the legend.
    """
    shown = False
    for k, (quantity, words) in enumerate(quantities.items()):
        offset = 0.22 * (k - (len(quantities) - 1) / 2)
        keys: dict[float, Hashable] = {
            y + offset: (line, quantity) for y, line in enumerate(lines)
        }
        intervals = {
            y: mean_interval(values.loc[key].dropna())
            for y, key in keys.items()
            if key in values.index
        }
        spans(ax, intervals, list(intervals.values()), k, words)
        theirs = {
            y: 100 * published[key] for y, key in keys.items() if key in published.index
        }
        if theirs:
            label = "_" if shown else "published"
            ax.plot(list(theirs.values()), list(theirs), **PUBLISHED, label=label)
            shown = True
    ax.set_yticks(range(len(lines)), list(lines.values()))
    ax.set(ylim=(len(lines) - 0.5, -0.5), xlabel="accuracy, %")
