"""Every picture that rows allow, by name: what ``fedlayers plot`` and the reports draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_core.errors import UsageError, check_known, listing
from fl_core.training.evaluate import SCORES

from .. import plots
from ..metrics import METRICS

Drawn = Axes | list[Axes]
Draw = Callable[[pd.DataFrame], Drawn]

OWN: dict[str, dict[str, Draw]] = {
    "aggregation_weight": {
        "aggregation_weights": plots.aggregation_weights,
        "aggregation_history": plots.aggregation_history,
    },
    "prompt_attention": {"prompt_attention": plots.prompt_attention},
    "trained": {"unfreezing": plots.unfreezing},
    "retained": {"retained": partial(plots.unfreezing, metric="retained")},
    "held": {"allocation": plots.allocation},
}
"""The pictures of metrics that are no curve over the layers."""
BESIDES: dict[str, dict[str, tuple[Callable[[pd.DataFrame], bool], Draw]]] = {
    "cka": {"cka_matrices": (lambda rows: bool(rows["value"].notna().any()), plots.cka_matrices)},
    "hessian_spectrum": {"spectral_density": (plots.has_density, plots.spectral_density)},
    "layer_cost": {"costs": (lambda rows: bool((rows["value"] > 0).any()), plots.costs)},
}
"""Pictures beside a metric's curve, and which rows they need."""


def album(frame: pd.DataFrame, metrics: Sequence[str] = ()) -> dict[str, Callable[[], Figure]]:
    """Pictures by name, of the named metrics or of all: scores over rounds and by client, curves over layers, insides.

    Each is drawn when it is called, so that not all need be open at once.

    A metric's curve shows what was seen in training where the rows have that, else the metric's default variant, and
    of several rounds the last.

    Raises:
        UsageError: a metric that the rows do not have, or no picture; when drawn, several values for one place.
    """
    present = list(frame["metric"].unique())
    if not present:
        raise UsageError("there are no rows to draw")
    found: dict[str, Callable[[], Figure]] = {}
    for name in dict.fromkeys(check_known("metric among the rows", name, present) for name in metrics or present):
        for title, draw in _pictures(frame[frame["metric"] == name], name).items():
            found[title] = lambda draw=draw: figure_of(draw(frame))  # type: ignore[misc]
    if not found:
        raise UsageError(f"there is no picture of {listing(metrics or present)}")
    return found


def figure_of(drawn: Drawn) -> Figure:
    """The figure that the axes are on."""
    figure = (drawn[0] if isinstance(drawn, list) else drawn).get_figure(root=True)
    if figure is None:
        raise UsageError("these axes belong to no figure any more")
    return figure


def _pictures(rows: pd.DataFrame, name: str) -> dict[str, Draw]:
    if name == "prompt_attention" and (rows[["client", "layer"]].nunique() > 1).any():
        first, layers = rows["client"].iloc[0], list(rows["layer"].unique())  # of one client, for each set of prompts
        titles = [name if len(layers) == 1 else f"{name}_{layer}" for layer in layers]
        return {
            title: partial(plots.prompt_attention, client=first, layer=layer)
            for title, layer in zip(titles, layers, strict=True)
        }
    if name in OWN:
        return OWN[name]
    pictures: dict[str, Draw] = {}
    if name in SCORES and (rows["layer"] == "").any():
        pictures[name] = lambda frame: plots.learning(frame, name)
        pictures[f"{name}_clients"] = lambda frame: plots.clients(frame, name)
    elif (rows["layer"] != "").any():
        variants = set(rows["variant"])
        usual: Any = METRICS[name].variant if name in METRICS else None
        variant = "training" if "training" in variants else usual if usual in variants else None
        last = rows[rows["round"].isna() | (rows["round"] == rows["round"].max())]
        pictures[name] = lambda frame: plots.metric(last, name, variant=variant)
        pictures |= {title: draw for title, (there, draw) in BESIDES.get(name, {}).items() if there(rows)}
    return pictures
