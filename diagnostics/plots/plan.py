"""A picture of a plan."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from fl_core.errors import UsageError, check_known
from fl_core.names import in_order
from fl_core.plan import LayerPlan

from ..metrics.base import metric_or_placeholder
from .drawing import (
    COLOURS,
    MOST,
    canvas,
    small,
)

FEDERATED, LOCAL, CUT = COLOURS[0], "#f3d9a8", COLOURS[3]


def plan(plan: LayerPlan, ax: Axes | None = None) -> Axes:
    """Draw a plan: its layers as boxes from input to output, shared or local, with the values and votes.

    The values that the rule read stand beneath. Each border shows the ratio of the layer after it to the last layer
    before it with a value, bold if above the threshold. The votes show how far each client alone would have federated.

    Raises:
        UsageError: a vote is for a layer outside the plan, or the number of values differs from the plan's.
    """
    names, why = plan.names, plan.why
    votes = [(client, why.votes[client]) for client in in_order(why.votes)]
    if why.values and len(why.values) != len(names):
        raise UsageError(
            f"the plan's evidence must have a value a layer; got {len(why.values)} for {len(names)} layers."
        )
    ends = {
        client: names.index(check_known("layer", vote, names)) + 1
        for client, vote in votes
    }
    tight = sum(len(name) + 2 for name in names) > 46
    line = 0.22
    numbers: dict[str, Any] = {
        "ha": "center",
        "va": "center",
        "fontsize": 8.0,
        "rotation": 0,
    }
    numbers["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    if len(names) > 10:
        line, numbers = 0.42, {**numbers, "fontsize": 6.5, "rotation": 90}
    title = [f"{len(plan.shared)} of {len(names)} layers federated", f"rule {why.rule}"]
    title[1] += "" if why.threshold is None else f", threshold {why.threshold:g}"
    title += [] if why.status == "ok" else textwrap.wrap(why.status, 50)
    rows: list[
        tuple[float, str]
    ] = []  # height in inches and name of each row beneath the boxes
    if why.values:
        value = (
            metric_or_placeholder(why.metric).look.symbol
            or why.metric.replace("_", " ")
            or "value"
        )
        rows += [(line, value), (line, "ratio")]
    rows += [(0.22, f"vote of {client}") for client in ends]
    if len(ends) > MOST:
        rows[-len(ends) :] = [(0.26, f"votes of {len(ends)} clients")]
    y = (
        -np.cumsum([height for height, _ in rows])
        + np.array([height for height, _ in rows]) / 2
    )
    depth = sum(height for height, _ in rows)
    with canvas(
        ax,
        float(np.clip(2 + 0.2 * len(names), 5, 10)),
        1.4 + depth + 0.5 * tight + 0.13 * len(title),
    ) as axes:
        for k, name in enumerate(names):
            box: dict[str, Any] = (
                {"color": FEDERATED}
                if name in plan.shared
                else {"color": LOCAL, "hatch": "///"}
            )
            axes.bar(
                k + 0.5,
                0.4,
                width=0.9,
                bottom=0.1,
                edgecolor="0.3",
                linewidth=0.6,
                **box,
            )
        for k, high in enumerate(why.values):
            axes.text(k + 0.5, y[0], _short(high), numbers)
            low = next(
                (value for value in reversed(why.values[:k]) if value is not None), None
            )
            if k:
                ratio = (
                    high / low
                    if low is not None and high is not None and low > 0 and high > 0
                    else None
                )
                above = (
                    ratio is not None
                    and why.threshold is not None
                    and ratio > why.threshold
                )
                weight, colour = ("bold", "0.05") if above else ("normal", "0.4")
                axes.text(k, y[1], _short(ratio), numbers, weight=weight, color=colour)
        if len(ends) > MOST:
            for end in sorted(set(ends.values())):
                axes.text(
                    end, y[-1], str(list(ends.values()).count(end)), numbers, rotation=0
                )
        else:
            for at, end in zip(y[len(y) - len(ends) :], ends.values(), strict=True):
                axes.plot(
                    [0.05, end],
                    [at, at],
                    color=FEDERATED,
                    marker="|",
                    markevery=[1],
                    markersize=8,
                )
        if plan.cut is not None:  # which leaves out the frozen layers
            end = names.index(plan.last_shared) + 1 if plan.last_shared else 0
            axes.axvline(
                end, color=CUT, linestyle="--", linewidth=1.5, label="cut", zorder=0.5
            )
        axes.set(xlim=(-0.05, len(names) + 0.05), ylim=(-depth - 0.05, 0.55))
        axes.set_yticks(list(y), [name for _, name in rows])
        axes.set_xticks(
            np.arange(len(names)) + 0.5,
            names,
            rotation=90 if tight else 0,
            fontsize=small(len(names), 8),
        )
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_title("\n".join(title))
        keys: list[Any] = [
            Patch(facecolor=FEDERATED, edgecolor="0.3", label="federated")
        ]
        keys += [Patch(facecolor=LOCAL, edgecolor="0.3", hatch="///", label="local")]
        keys += [drawn for drawn in axes.lines if drawn.get_label() == "cut"]
        axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3)
    return axes


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
