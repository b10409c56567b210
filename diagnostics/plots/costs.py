"""Pictures of plans, of their costs, and of their regret."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fl_core.errors import UsageError, check_known
from fl_core.plan import LayerPlan
from fl_core.rows import SCORES, TABLE, label_of
from fl_core.statistics import mean_interval

from ..metrics.base import metric_or_placeholder
from .drawing import (
    COLOURS,
    DASHES,
    MARKERS,
    MEAN,
    NICE,
    arm_colours,
    canvas,
    check_single,
    legend,
    missing_notes,
    of_metric,
    panels,
    small,
    stacked,
    with_notes,
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


_KINDS = {
    "bytes": ("sent, each way and round", "B"),
    "forward_flops": ("forward pass", "FLOP a sample"),
    "backward_flops": ("backward pass", "FLOP a sample"),
    "activation_bytes": ("kept for the backward pass", "B a sample"),
}
_STEPS = {
    "naive": ("scalars × batches", "naive count"),
    "flops": ("FLOP", "forward and backward"),
    "moved": ("byte", "sent, down and up"),
}


def costs(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw each layer's share of a network's costs: a bar a kind of cost, its layers from input to output.

    A plan that shares the first layers sends everything left of the border after the last of them. The totals stand
    next to the bars.

    Args:
        frame: rows of ``layer_cost`` of one model.

    Raises:
        UsageError: there are no such rows, or they are of several models.
    """
    rows = of_metric(frame, "layer_cost")
    rows = rows[rows["variant"].isin(list(_KINDS))].drop_duplicates(
        ["layer", "variant", "value"]
    )
    check_single(rows, ["layer", "variant"])
    layers = list(rows["layer"].unique())
    table = rows.pivot(index="variant", columns="layer", values="value")
    table = table.reindex(
        index=[name for name in _KINDS if name in table.index], columns=layers
    )
    total = table.sum(axis=1)
    table, total = table[total > 0], total[total > 0]
    if table.empty:
        raise UsageError(
            "rows of layer_cost must have a cost above 0; got none. Measure again."
        )
    share = table.fillna(0.0).div(total, axis=0)
    totals = [
        ticker.EngFormatter(_KINDS[name][1], places=1)(total[name])
        for name in share.index
    ]
    notes = missing_notes(rows, "layer")
    with canvas(ax, 6.4, 1.1 + 0.36 * len(share) + 0.13 * len(notes)) as axes:
        stacked(axes, share, "{:.0%}".format, linewidth=0.5)
        axes.bar_label(axes.containers[-1], totals, padding=3, fontsize=7.5)  # type: ignore[arg-type]
        axes.set(xlim=(0, 1), yticklabels=[_KINDS[name][0] for name in share.index])
        axes.set_xlabel(
            with_notes(
                "share of the layers, input to output; totals at the right", notes
            )
        )
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=min(len(layers), 6),
            borderaxespad=0.2,
            columnspacing=1.2,
        )
    return axes


def cost_steps(
    table: pd.DataFrame, axes: Figure | Sequence[Axes] | None = None
) -> list[Axes]:
    """Draw the cost of a round for all clients, over the rounds: three panels, a line a run.

    The panels are naive count, FLOPs and bytes. The layer-scheduling paper's Fig. 7 shows the first (Jang and Choi
    2024). Next to each name stands the sum over the rounds relative to the first run's.

    Args:
        table: from :func:`fl_core.costs.cost_steps`.
        axes: a figure to fill, or at least three Axes.

    Raises:
        UsageError: a column is missing, there are no rounds, a cost appears twice, or there are too few Axes.
    """
    for name in ("run", "round", *_STEPS):
        check_known("column of the table", name, table.columns)
    if table.empty:
        raise UsageError("rows must have rounds; got none. Train first.")
    if table.duplicated(["run", "round"]).any():
        raise UsageError("a run must have one cost for each round; got two. Keep one.")
    runs = list(table["run"].unique())
    colours = arm_colours(runs)
    with panels(
        axes,
        len(_STEPS),
        2.4,
        2.0,
        columns=len(_STEPS),
        room=(0.0, 0.9 + 0.12 * len(runs)),
    ) as drawn:
        for (kind, (label, title)), panel in zip(_STEPS.items(), drawn, strict=True):
            values = table.pivot(index="round", columns="run", values=kind)[runs]
            total = values.sum()
            for k, run in enumerate(runs):
                cost = values[run].dropna()
                edges = np.append(
                    cost.index.to_numpy(dtype=np.float64) - 0.5, cost.index[-1] + 0.5
                )
                share = (
                    f"{run}  {total[run] / total[runs[0]]:.2f}"
                    if total[runs[0]]
                    else run
                )
                panel.ax.stairs(
                    cost.to_numpy(dtype=np.float64), edges, baseline=None, label=share, linewidth=1.8,
                    color=colours[k], linestyle=DASHES[k % len(DASHES)],
                )  # fmt: skip
            panel.ax.set_ylim(bottom=0)
            panel.ax.yaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
            panel.ax.xaxis.set_major_locator(
                ticker.MaxNLocator(integer=True, steps=NICE, min_n_ticks=1)
            )
            panel.ax.set(xlabel="round", ylabel=label)
            panel.ax.set_title(title)
            panel.ax.legend(
                title=f"sum, {runs[0]} = 1",
                loc="upper center",
                bbox_to_anchor=(0.5, -0.22),
                alignment="left",
            )
        return [panel.ax for panel in drawn]


def regret(
    scores: pd.DataFrame,
    decisions: pd.DataFrame,
    score: str = "macro_f1",
    ax: Axes | None = None,
) -> Axes:
    """Draw the score of every number of shared layers, with each rule's choices marked, one mark per seed.

    The score is on test samples, as regret is. If there are none, it is on validation samples.

    The axis ends where the score does. The interval of a few seeds may reach beyond, and would flatten all else. A thin
    line is a seed. The dark line is their mean with its 95 % interval. The star is the cut with the best mean. A rule's
    marks stand on the seed's own line, the rules next to one another.

    Args:
        scores: columns ``seed``, ``cut``, ``last`` (the last layer federated) and ``test`` or ``validation``, as in
            :class:`fedlayers.studies.regret.Regret`.
        decisions: columns ``rule``, ``seed`` and ``cut``. A rule without a cut has a note instead of a mark.

    Raises:
        UsageError: a seed lacks cuts, or a choice is no cut.
    """
    split = "test" if "test" in scores else "validation"
    check_known("score", score, SCORES)
    values = scores.pivot(index="cut", columns="seed", values=split).sort_index()
    if values.isna().to_numpy().any() or values.empty:
        raise UsageError(
            "every seed must have a score of every cut; got less. Train the missing cuts."
        )
    decided = decisions.dropna(subset=["cut"])
    for line in decided.itertuples():
        if line.cut not in values.index or line.seed not in values.columns:
            raise UsageError(
                f"{line.rule} cuts at {line.cut:g} with seed {line.seed}, which has no score. Train it first."
            )
    last = scores.drop_duplicates("cut").set_index("cut")["last"]
    rules = list(decisions["rule"].unique())
    undecided = len(decisions) - len(decided)
    notes = (
        [f"{undecided} of {len(decisions)} decisions could not be made"]
        if undecided
        else []
    )
    x = values.index.to_numpy(dtype=np.float64)
    with canvas(
        ax, width=float(np.clip(3.5 + 0.35 * len(x), 5.6, 10)), height=3.6
    ) as axes:
        for seed in values.columns:
            axes.plot(x, values[seed], color="0.8", linewidth=0.9, marker="", zorder=1)
        mean, low, high = np.array(
            [mean_interval(values.loc[cut]) for cut in values.index]
        ).T
        many = f"mean of {values.shape[1]} seeds" if values.shape[1] > 1 else "one seed"
        axes.plot(x, mean, color=MEAN, linewidth=1.6, marker="", label=many, zorder=2)
        if values.shape[1] > 1:
            axes.fill_between(
                x, low, high, color=MEAN, alpha=0.1, linewidth=0, label="95 % interval"
            )
        best = int(np.argmax(mean if SCORES[score] else -mean))
        star = {
            "marker": "*",
            "markersize": 13,
            "color": "white",
            "markeredgecolor": MEAN,
            "linestyle": "none",
        }
        axes.plot(x[best], mean[best], label="best mean", zorder=3, **star)  # type: ignore[arg-type]
        for k, rule in enumerate(rules):
            of_rule = decided[decided["rule"] == rule]
            beside = (k - (len(rules) - 1) / 2) * min(0.12, 0.6 / len(rules))
            y = [values.loc[line.cut, line.seed] for line in of_rule.itertuples()]
            axes.plot(
                of_rule["cut"].to_numpy(dtype=np.float64) + beside,
                y,
                linestyle="none",
                marker=MARKERS[k % len(MARKERS)],
                markersize=5.5,
                color=COLOURS[k % len(COLOURS)],
                markeredgecolor="white",
                markeredgewidth=0.5,
                label=rule,
                zorder=4,
            )
        ticks = [
            f"{cut:.0f}" + (f"\n{last[cut]}" if last[cut] else "\nnothing")
            for cut in values.index
        ]
        upright = sum(len(str(name)) + 2 for name in last) > 46
        axes.set_xticks(
            x, ticks, rotation=90 if upright else 0, fontsize=small(len(ticks), 8)
        )
        bottom, top = axes.get_ylim()
        if score != "r2":  # which has no lower end
            axes.set_ylim(
                max(bottom, -0.02), min(top, 1.02) if TABLE[score].share else top
            )
        better = "higher" if SCORES[score] else "lower"
        axes.set(
            xlabel=with_notes("layers federated, and the last of them", notes),
            ylabel=f"{split} {label_of(score)} ({better} is better)",
        )
        legend(axes)
    return axes
