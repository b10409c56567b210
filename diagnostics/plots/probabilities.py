"""Pictures of predicted probabilities of two classes: the ROC curve, and how well probabilities are calibrated."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fl_core.errors import UsageError
from fl_core.names import in_order

from .drawing import FAINT, MEAN, canvas, client_style, legend


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
