"""pFedLA's Fig. 4: the layers that HeurpFedLA leaves with the clients, from stored weights and choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, FAINT, Panel, heat, name_ticks, style
from figures import items
from figures.items import Drawing, Finding, Item
from figures.pfedla.overlap import NAME, RETAINED, SHARE, WEIGHT, setting
from figures.recipe import where
from fl_core.algorithms.pfedla import HeurpFedLA

RUN = "heurpfedla"
MOMENTS = (0, 8, 40)
"""Recorded rounds at which one client's weights are drawn."""


def own_weights(frame: pd.DataFrame) -> pd.DataFrame:
    """The run's rows of clients' weights on themselves, one a client, layer and round."""
    own = where(frame, run=RUN, seed=0)
    weights = own[(own["metric"] == WEIGHT) & (own["client"] == own["client_b"])]
    kept = own.loc[own["metric"] == RETAINED, ["client", "layer", "round", "value"]]
    joined = weights.merge(
        kept.rename(columns={"value": RETAINED}),
        on=["client", "layer", "round"],
        how="outer",
    )
    return joined.astype({"round": int, RETAINED: bool})


def as_chosen(weights: pd.DataFrame) -> pd.Series:
    """Return whether kept layers have the most weight on their client, by client and round."""

    def holds(part: pd.DataFrame) -> bool:
        kept = part[RETAINED]
        return bool(part.loc[kept, "value"].min() >= part.loc[~kept, "value"].max())

    groups = {
        key: holds(part)
        for key, part in weights.groupby(["client", "round"], sort=False)
    }
    return pd.Series(groups, dtype=bool)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    weights = own_weights(frame)
    stored = where(frame, run=RUN, seed=0, metric=RETAINED)
    layers = list(stored["layer"].unique())
    client = str(weights["client"].iloc[0])
    moments = [done for done in MOMENTS if done in set(weights["round"])]
    with style():
        figure = plt.figure(figsize=(7.8, 4.7), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[1, 1.15])
        upper, lower = halves
        above = upper.subplots(1, len(moments), sharey=True, squeeze=False)[0]
        for ax, done in zip(above, moments, strict=True):
            part = (
                where(weights, client=client, round=done).set_index("layer").loc[layers]
            )
            colours = [COLOURS[0] if kept else FAINT for kept in part[RETAINED]]
            ax.bar(range(len(layers)), part["value"], color=colours, width=0.8)
            ax.set(title=f"{client.replace('_', ' ')}, round {done}", ylim=(0, 1.02))
            name_ticks(ax, layers, room=20)
            if done == moments[0]:
                ax.set_ylabel("weight on itself\n(blue: retained)")
        shares = stored.groupby(["layer", "round"], sort=False)["value"].mean()
        below = lower.subplots()
        colours = heat(
            Panel(below, True, True), shares.unstack("round").sort_index(axis=1), cmap=SHARE, names=(40, 16),
        )  # fmt: skip
        figure.colorbar(colours, ax=below, label="share of clients that keep it")
        below.spines[:].set_visible(True)
        below.set(ylabel="layer, input at the top", xlabel="round")
    chosen = as_chosen(weights)
    told = stored.groupby(["client", "round"])["value"].sum()
    k = header["runs"][RUN]["config"]["options"].get("k", HeurpFedLA.Config().k)
    last = where(stored, round=stored["round"].max(), value=1)
    clients = told.index.unique("client").size
    told_last = ", ".join(
        f"{layer} {n} of {clients}" for layer, n in last["layer"].value_counts().items()
    )
    findings = (
        Finding(
            f"every client retains k = {k} layers",
            f"{told.min():g} to {told.max():g} in {len(told)} choices",
            bool((told == k).all()),
        ),
        Finding(
            "it retains the layers with the largest weight on itself",
            f"in {int(chosen.sum())} of {len(chosen)} choices",
            bool(chosen.all()),
        ),
        Finding(
            "all clients retain the same layer",
            f"after the last round {told_last} (one seed: open)",
            None,
        ),
    )
    caption = (
        "Above: one client's weights on itself. It retains the layer with the largest weight and mixes the others. "
        f"Below: the share of clients that retain a layer. {setting(header)} HeurpFedLA has k = {k}. One of the "
        f"study's {header['seeds']} seeds is shown. The paper's figure is a sketch. It does not print which layers its "
        "clients retain."
    )
    table = weights[["client", "round", "layer", "value", RETAINED]].rename(
        columns={"value": "weight on itself"}
    )
    return Drawing(figure, table, caption, findings)


items.register(Item(
    "pfedla.fig4", "The layers that HeurpFedLA retains, round after round", source=NAME, draw=_draw, seeds=1,
))  # fmt: skip
