"""The picture of regret: the score of every cut, and the cuts that each rule chose."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fl_core.errors import UsageError, check_known
from fl_core.scores import SCORES, TABLE, label_of
from fl_core.statistics import mean_interval

from .drawing import COLOURS, MARKERS, MEAN, canvas, legend, small, with_notes


def regret(
    scores: pd.DataFrame,
    decisions: pd.DataFrame,
    score: str = "macro_f1",
    ax: Axes | None = None,
) -> Axes:
    """Draw the score of every number of shared layers, with each rule's choices marked, one mark per seed.

    The score is on held-out samples, as regret is. If there are none, it is on validation samples.

    The axis ends where the score does. The interval of a few seeds may reach beyond, and would flatten all else. A thin
    line is a seed. The dark line is their mean with its 95 % interval. The star is the cut with the best mean. A rule's
    marks stand on the seed's own line, the rules next to one another.

    Args:
        scores: columns ``seed``, ``cut``, ``last`` (the last layer federated) and ``held_out`` or ``validation``, as in
            :class:`fedlayers.studies.regret.Regret`.
        decisions: columns ``rule``, ``seed`` and ``cut``. A rule without a cut has a note instead of a mark.

    Raises:
        UsageError: a column is missing, a seed lacks cuts, or a choice is no cut.
    """
    split = "held_out" if "held_out" in scores else "validation"
    for table, names in (
        (scores, ("seed", "cut", "last", split)),
        (decisions, ("rule", "seed", "cut")),
    ):
        for name in names:
            check_known("column of the table", name, table.columns)
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
            ylabel=f"{split.replace('_', '-')} {label_of(score)} ({better} is better)",
        )
        legend(axes)
    return axes
