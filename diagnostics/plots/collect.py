"""Collects every picture that can be drawn from given rows, by name, for ``fedlayers plot`` and the reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_core.display import in_file_name
from fl_core.errors import UsageError, check_known, listing
from fl_core.rows import SCORES, SHOWN

from ..metrics.base import metric_or_placeholder
from .costs import costs
from .layers import cka_matrices, metric
from .runs import clients, learning

Drawn = Axes | list[Axes]
Draw = Callable[[pd.DataFrame], Drawn]


STATES = ("aggregation_weight", "prompt_attention", "trained", "retained", "held")
"""What algorithms record of their internal state. It is no curve over the layers, and has no picture here."""
FURTHER: dict[str, tuple[str, Callable[[pd.DataFrame, str], Drawn]]] = {
    "matrices": ("{}_matrices", lambda frame, name: cka_matrices(frame, metric=name)),
    "costs": ("costs", lambda frame, name: costs(frame)),
}
"""Pictures beside a metric's curve, by the name in its look: a title, and a function of the frame and the metric."""


def album(
    frame: pd.DataFrame, metrics: Sequence[str] = ()
) -> dict[str, Callable[[], Figure]]:
    """Return all pictures of the named metrics: scores over rounds and by client, curves over layers.

    By default these are all metrics except the further scores, such as AUROC. Those are many, and some have no value. A
    picture is drawn when it is called, so that not all need be open at once.

    Their names are names of files. A metric's curve shows what was seen in training if the rows have that. Else it
    shows the metric's default variant. Of several rounds it shows the last.

    Raises:
        UsageError: the rows do not have a metric, or it has no picture. When drawn: several values for one place.
    """
    present = list(frame["metric"].unique())
    if not present:
        raise UsageError("rows must not be empty; got none. Measure first.")
    usual = {name for names in SHOWN.values() for name in names}
    wanted = metrics or [
        name for name in present if name in usual or name not in SCORES
    ]
    pictures: dict[str, Callable[[], Figure]] = {}
    for name in dict.fromkeys(
        check_known("metric among the rows", name, present) for name in wanted
    ):
        for title, draw in _pictures(frame[frame["metric"] == name], name).items():
            pictures[in_file_name(title)] = lambda draw=draw: figure_of(draw(frame))  # type: ignore[misc]
    if not pictures:
        raise UsageError(
            f"metrics must have a picture; got {listing(metrics or present)}. Choose others."
        )
    return pictures


def figure_of(drawn: Drawn) -> Figure:
    """Return the matplotlib figure to which the axes belong."""
    figure = (drawn[0] if isinstance(drawn, list) else drawn).get_figure(root=True)
    if figure is None:
        raise UsageError(
            "the axes must belong to a figure; got axes that were removed from theirs."
        )
    return figure


def _pictures(rows: pd.DataFrame, name: str) -> dict[str, Draw]:
    pictures: dict[str, Draw] = {}
    if name in STATES:
        return pictures
    if name in SCORES and (rows["layer"] == "").any():
        pictures[name] = lambda frame: learning(frame, name)
        pictures[f"{name}_clients"] = lambda frame: clients(frame, name)
    elif (rows["layer"] != "").any():
        variants = set(rows["variant"])
        kind = metric_or_placeholder(name)
        variant = next(
            (
                usual
                for usual in (kind.default_variant, kind.variant)
                if usual and usual in variants
            ),
            None,
        )
        last = rows[rows["round"].isna() | (rows["round"] == rows["round"].max())]
        pictures[name] = lambda frame: metric(last, name, variant=variant)
        for title, draw in (FURTHER[beside] for beside in kind.look.beside):
            if (rows["value"] > 0).any():
                pictures[title.format(name)] = lambda frame, draw=draw: draw(
                    frame, name
                )  # type: ignore[misc]
    return pictures
