"""Draws scores as lines from the top, each with its interval, next to the published scores."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from diagnostics.plots.drawing import COLOURS, MARKERS
from fl_core.statistics import mean_interval


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
        look: dict[str, Any] = {
            "linestyle": "none",
            "color": COLOURS[k],
            "marker": MARKERS[k],
            "markersize": 4.5,
        }
        keys: dict[float, Hashable] = {
            y + offset: (line, quantity) for y, line in enumerate(lines)
        }
        found = {
            y: mean_interval(values.loc[key].dropna())
            for y, key in keys.items()
            if key in values.index
        }
        for y, interval in found.items():
            ax.hlines(
                y,
                100 * interval.low,
                100 * interval.high,
                color=COLOURS[k],
                linewidth=1.3,
            )
        ax.plot(
            [100 * f.value for f in found.values()], list(found), label=words, **look
        )
        theirs = {
            y: 100 * published[key] for y, key in keys.items() if key in published.index
        }
        if theirs:
            label = "_" if shown else "published"
            ax.plot(
                list(theirs.values()),
                list(theirs),
                **look,
                fillstyle="none",
                label=label,
            )
            shown = True
    ax.set_yticks(range(len(lines)), list(lines.values()))
    ax.set(ylim=(len(lines) - 0.5, -0.5), xlabel="accuracy, %")
