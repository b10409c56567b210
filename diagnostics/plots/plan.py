"""A picture of a plan."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from fl_core.errors import UsageError, check_known
from fl_core.plan import LayerPlan

from ..metrics.base import metric_or_placeholder
from .drawing import (
    COLOURS,
    canvas,
    small,
)

FEDERATED, LOCAL, CUT = COLOURS[0], "#f3d9a8", COLOURS[3]
LOOKS = {True: (FEDERATED, ""), False: (LOCAL, "///")}
"""Colour and hatch of a layer, by whether it is shared."""


def plan(plan: LayerPlan, ax: Axes | None = None) -> Axes:
    """Draw a plan: its layers as boxes from input to output, shared or local, with the values and votes.

    The values that the rule read stand beneath. Each border shows the ratio of the layer after it to the last layer
    before it with a value, bold if above the threshold. The votes show how far each client alone would have federated.

    Raises:
        UsageError: a vote is for a layer outside the plan, or the number of values differs from the plan's.
    """
    names, why = plan.names, plan.why
    if why.values and len(why.values) != len(names):
        raise UsageError(
            f"the plan's evidence must have a value a layer; got {len(why.values)} for {len(names)} layers."
        )
    votes = [names.index(check_known("layer", v, names)) + 1 for v in why.votes.values()]  # fmt: skip
    rows: dict[str, list[tuple[float, str, bool]]] = {}
    if why.values:
        symbol = metric_or_placeholder(why.metric).look.symbol
        value = symbol or why.metric.replace("_", " ") or "value"
        rows[value] = [(k + 0.5, _short(v), False) for k, v in enumerate(why.values)]
        rows["ratio"] = []
        for k in range(1, len(names)):
            ratio = _ratio(why.values, k)
            above = (ratio or 0.0) > (why.threshold or math.inf)
            rows["ratio"].append((k, _short(ratio), above))
    if votes:
        counts = Counter(votes).items()
        rows[f"votes of {len(votes)}"] = [(end, str(n), False) for end, n in counts]
    upright = 90 if len(names) > 10 else 0
    line, size = (0.42, 6.5) if upright else (0.22, 8.0)
    title = [f"{len(plan.shared)} of {len(names)} layers federated", f"rule {why.rule}"]
    title[1] += "" if why.threshold is None else f", threshold {why.threshold:g}"
    title += [] if why.status == "ok" else textwrap.wrap(why.status, 50)
    tight = sum(len(name) + 2 for name in names) > 46
    depth, wide = line * len(rows), float(np.clip(2 + 0.2 * len(names), 5, 10))
    with canvas(ax, wide, 1.4 + depth + 0.5 * tight + 0.13 * len(title)) as axes:
        x = np.arange(len(names)) + 0.5
        looks: dict[str, Any] = {"edgecolor": "0.3", "linewidth": 0.6}
        kinds = [LOOKS[name in plan.shared] for name in names]
        colours, hatches = zip(*kinds, strict=True)
        axes.bar(x, 0.4, 0.9, bottom=0.1, color=colours, hatch=hatches, **looks)
        y = [-line * (k + 0.5) for k in range(len(rows))]
        for at, cells in zip(y, rows.values(), strict=True):
            for place, text, bold in cells:
                axes.text(
                    place,
                    at,
                    text,
                    ha="center",
                    va="center",
                    fontsize=size,
                    rotation=upright,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                    weight="bold" if bold else "normal",
                )
        keys: list[Any] = [
            Patch(facecolor=colour, hatch=hatch, label=label, **looks)
            for label, (colour, hatch) in zip(
                ("federated", "local"), (LOOKS[True], LOOKS[False]), strict=True
            )
        ]
        if plan.cut is not None:  # which leaves out the frozen layers
            end = names.index(plan.last_shared) + 1 if plan.last_shared else 0
            keys.append(
                axes.axvline(end, color=CUT, linestyle="--", label="cut", zorder=0.5)
            )
        axes.set(xlim=(-0.05, len(names) + 0.05), ylim=(-depth - 0.05, 0.55))
        axes.set_yticks(y, list(rows))
        axes.set_xticks(x, names, rotation=90 * tight, fontsize=small(len(names), 8))
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_title("\n".join(title))
        axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3)
    return axes


def _ratio(values: Sequence[float | None], k: int) -> float | None:
    """Return the ratio of a layer's value to the last one before it; None unless both are above 0."""
    low = next((value for value in reversed(values[:k]) if value is not None), None)
    high = values[k]
    return high / low if low and high and low > 0 and high > 0 else None


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
