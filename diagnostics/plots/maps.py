"""Pictures of what to share: a plan, and the layer map with a panel for each question about sharing.

The map has layers down and rounds across. A panel holds one number a layer and round.
Its band says what the number would be if clients did not differ. The band comes from
the same model on samples that were assigned to the clients at random. Without a
difference, all points of a map lie inside their bands with a probability of 95 %. So a
point outside is more than chance.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fl_core.errors import Bound, UsageError, check_known, check_value
from fl_core.plan import Layer, LayerPlan, labels_of
from fl_core.statistics import LEVEL

from ..curve import layers_in
from ..metrics import facts_of
from ..null import nulls_in, of_null, split_resamples
from .drawing import COLOURS, NICE, canvas, panels as axes_of, small, with_notes

MOST_LAYERS = 500
"""Layers of one picture at most. Each takes about 3 ms to draw, and more have no room."""
FEDERATED, LOCAL, CUT = COLOURS[0], "#f3d9a8", COLOURS[3]
LOOKS = {True: (FEDERATED, ""), False: (LOCAL, "///")}
"""Colour and hatch of a layer, by whether it is shared."""


def check_drawn(names: Sequence[str]) -> None:
    """Refuse a picture of more than :data:`MOST_LAYERS` layers.

    Raises:
        UsageError: there are more. The message has their number.
    """
    if len(names) > MOST_LAYERS:
        raise UsageError(
            f"a picture must have at most {MOST_LAYERS} layers; got {len(names):,}. Print the plan or the table."
        )


def plan(plan: LayerPlan, ax: Axes | None = None) -> Axes:
    """Draw a plan: its layers as boxes from input to output, shared or local, with the values and votes.

    The values that the rule read stand beneath. Each border shows the ratio of the layer after it to the last layer
    before it with a value, bold if above the threshold. The votes show how far each client alone would have federated.
    Values or votes that the plan's evidence lacks are left out.

    Args:
        plan: the plan with its evidence.
        ax: the Axes to draw on. Default: that of a new figure.

    Raises:
        UsageError: a vote is for a layer outside the plan, or the number of values differs from the plan's. Or there
            are more than :data:`MOST_LAYERS` layers.
    """
    names, evidence = plan.names, plan.why
    check_drawn(names)
    if evidence.values and len(evidence.values) != len(names):
        raise UsageError(
            f"the plan's evidence must have a value a layer; got {len(evidence.values)} for {len(names)} layers."
        )
    votes = [names.index(check_known("layer", v, names)) + 1 for v in evidence.votes.values()]  # fmt: skip
    rows: dict[str, list[tuple[float, str, bool]]] = {}
    if evidence.values:
        symbol = facts_of(evidence.metric).look.symbol
        value = symbol or evidence.metric.replace("_", " ") or "value"
        rows[value] = [
            (k + 0.5, _short(v), False) for k, v in enumerate(evidence.values)
        ]
        rows["ratio"] = []
        for k in range(1, len(names)):
            earlier_values = (
                value for value in reversed(evidence.values[:k]) if value is not None
            )
            low, high, ratio = next(earlier_values, None), evidence.values[k], None
            if low and high and low > 0 and high > 0:
                ratio = high / low
            is_above = (ratio or 0.0) > (evidence.threshold or math.inf)
            rows["ratio"].append((k, _short(ratio), is_above))
    if votes:
        counts = Counter(votes).items()
        rows[f"votes of {len(votes)}"] = [(end, str(n), False) for end, n in counts]
    rotation = 90 if len(names) > 10 else 0
    line_height, size = (0.42, 6.5) if rotation else (0.22, 8.0)
    title = [
        f"{len(plan.shared)} of {len(names)} layers federated",
        f"rule {evidence.rule}",
    ]
    title[1] += (
        "" if evidence.threshold is None else f", threshold {evidence.threshold:g}"
    )
    title += [] if evidence.status == "ok" else textwrap.wrap(evidence.status, 50)
    labels = [*plan.by_layer()]
    is_tight = sum(len(name) + 2 for name in labels) > 46
    depth, width = line_height * len(rows), float(np.clip(2 + 0.2 * len(names), 5, 10))
    with canvas(ax, width, 1.4 + depth + 0.5 * is_tight + 0.13 * len(title)) as axes:
        x = np.arange(len(names)) + 0.5
        looks: dict[str, Any] = {"edgecolor": "0.3", "linewidth": 0.6}
        kinds = [LOOKS[name in plan.shared] for name in names]
        colours, hatches = zip(*kinds, strict=True)
        axes.bar(x, 0.4, 0.9, bottom=0.1, color=colours, hatch=hatches, **looks)
        y = [-line_height * (k + 0.5) for k in range(len(rows))]
        for position, cells in zip(y, rows.values(), strict=True):
            for place, text, bold in cells:
                axes.text(
                    place,
                    position,
                    text,
                    ha="center",
                    va="center",
                    fontsize=size,
                    rotation=rotation,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                    weight="bold" if bold else "normal",
                )
        legend_keys: list[Any] = [
            Patch(facecolor=colour, hatch=hatch, label=label, **looks)
            for label, (colour, hatch) in zip(
                ("federated", "local"), (LOOKS[True], LOOKS[False]), strict=True
            )
        ]
        if plan.cut is not None:  # which leaves out the frozen layers
            end = names.index(plan.last_shared) + 1 if plan.last_shared else 0
            legend_keys.append(
                axes.axvline(end, color=CUT, linestyle="--", label="cut", zorder=0.5)
            )
        axes.set(xlim=(-0.05, len(names) + 0.05), ylim=(-depth - 0.05, 0.55))
        axes.set_yticks(y, list(rows))
        axes.set_xticks(
            x, labels, rotation=90 * is_tight, fontsize=small(len(names), 8)
        )
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_title("\n".join(title))
        axes.legend(
            handles=legend_keys, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3
        )
    return axes


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}"


# --- the layer map ---------------------------------------------------------------------------------------------

NULL, PANELS = "clients", 3
"""The null of the bands, and the number of panels with a band.

The bands hold together at :data:`LEVEL`.
"""

CM = 1 / 2.54
PANEL = 4.0
"""The width of a panel in cm; a picture has as many as fit."""
WIDTH = Bound("from 4 to 100", lambda width: PANEL <= width <= 100)
INK, BAND, SHADE, FAINT = COLOURS[0], "0.80", "0.93", "0.55"
MARGIN = 0.1
"""The share of a lane that stays empty above its values, and the same below them."""
HATCH: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": "0.7",
    "linewidth": 0,
    "hatch": "////",
}


@dataclass(frozen=True)
class Panel:
    """One panel of a layer map: a number for each round and layer, and the band of chance.

    Attributes:
        title: the meaning of the number.
        values: rounds x layers. NaN is missing.
        low, high: the ends of the band, rounds x layers; None without a null.
    """

    title: str
    values: pd.DataFrame
    low: pd.DataFrame | None = None
    high: pd.DataFrame | None = None

    @property
    def outside(self) -> pd.DataFrame:
        """Return whether each point lies outside the band, bool, rounds x layers; all False without a band.

        A missing value is not outside.
        """
        if self.low is None or self.high is None:
            return pd.DataFrame(
                False, index=self.values.index, columns=self.values.columns
            )
        return (self.values < self.low) | (self.values > self.high)

    @property
    def zero(self) -> list[str]:
        """Return the names of the layers whose number is exactly 0 in every round.

        Such a 0 comes from the algorithm's construction. For example, the weights of a
        layer that no client trains do not diverge.
        """
        return [name for name in self.values if (self.values[name] == 0).all()]


def layer_map(
    header: Mapping[str, Any], table: pd.DataFrame, width: float = 16.0
) -> Figure:
    """Draw how each layer behaves over the rounds: a numbered lane a layer from input to output, and up to four panels.

    The panels say how far the clients' gradients agree, how far their weights diverge
    in a round, and what one classifier for all would lose. If it was measured, the last
    says what tuning one layer alone recovers. No panel names a layer to keep local. All
    lanes of a panel have one scale, written at its top. A grey band is where clients
    that do not differ would lie. A filled point lies outside its band, a hollow one
    within. Layers that the run kept local are shaded. A layer with 0 by construction is
    hatched. Layers without weights are left out.

    Args:
        header, table: header and rows of the report of :func:`diagnostics.through_time.through_time`.
        width: width of the picture in cm, 4 to 100. A panel takes 4, and the last
            panels are left out if they do not fit.

    Raises:
        UsageError: the report has no metric of the map or no layers, or the width is
            out of range.
    """
    check_value("width", width, WIDTH)
    layers = layers_in(header)
    panels = panels_of(layers, table)
    if not panels:
        raise UsageError(
            "the report must have a metric of the layer map; got none. "
            "Call through_time without metrics."
        )
    weighted = [layer for layer in layers if layer.weights]
    names = [layer.name for layer in weighted]
    check_drawn(names)
    readable_names = labels_of(layers)
    labels = [f"{lane}  {readable_names[name]}" for lane, name in enumerate(names, 1)]
    panels = panels[: max(1, int(width / PANEL))]
    n_panels = len(panels)
    stored_plan = header.get("plan")
    plan = None if stored_plan is None else LayerPlan.from_json(stored_plan).by_layer()
    notes = _legend(panels, plan)
    room = (0.055 * max(map(len, labels)), 0.75 + 0.13 * len(notes))
    size = (width * CM - room[0]) / n_panels, 0.30 * len(names)
    with axes_of(None, n_panels, *size, columns=n_panels, room=room) as grid:
        axes = [panel.ax for panel in grid]
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel.values.columns, panel)
        for k, ax in enumerate(axes):
            for lane, name in enumerate(names):
                if plan is not None and not plan.get(name, True):
                    ax.axhspan(lane, lane + 1, color=SHADE, linewidth=0, zorder=0)
            ax.set(ylim=(len(names), 0))
            ax.set_yticks(np.arange(len(names)) + 0.5, labels if k == 0 else [])
            ax.hlines(range(len(names) + 1), 0, 1, "0.85", linewidth=0.6, zorder=0.5,
                      transform=ax.get_yaxis_transform())  # fmt: skip
            ax.tick_params(axis="y", length=0)
            ax.grid(visible=False)
            ax.spines["left"].set_visible(False)
        figure = axes[0].get_figure(root=True)
        assert figure is not None
        figure.supxlabel("\n".join(notes), fontsize=6, x=0.01, ha="left")
    return figure


def _draw(ax: Axes, names: pd.Index, panel: Panel) -> None:
    """Draw a panel's lanes: the band, the values, and which of them lie outside."""
    shown_tables = [
        values for values in (panel.values, panel.low, panel.high) if values is not None
    ]
    ends = np.concatenate(
        [values.to_numpy(dtype=float).ravel() for values in shown_tables]
    )
    ends = ends[np.isfinite(ends)]
    low, high = (ends.min(), ends.max()) if len(ends) else (0.0, 1.0)
    scale = (1 - 2 * MARGIN) / ((high - low) or 1.0)
    rounds = panel.values.index.to_numpy(dtype=float)
    is_outside = panel.outside
    for position, name in enumerate(names):
        if name in panel.zero:
            ax.axhspan(position, position + 1, **HATCH)
            continue

        def lane(
            table: pd.DataFrame, position: int = position, name: Any = name
        ) -> Any:
            return (
                position
                + 1
                - MARGIN
                - (table[name].to_numpy(dtype=float) - low) * scale
            )

        y = lane(panel.values)
        if not np.isfinite(y).any():
            ax.text(0.5, position + 0.5, "no value", transform=ax.get_yaxis_transform(),
                    ha="center", va="center", fontsize=6, color=FAINT)  # fmt: skip
            continue
        if panel.low is not None and panel.high is not None:
            ends_of = lane(panel.low), lane(panel.high)
            ax.fill_between(rounds, *ends_of, color=BAND, linewidth=0, zorder=1)
            if len(rounds) == 1:
                ax.vlines(rounds, *ends_of, color=BAND, linewidth=5, zorder=1)
        ax.plot(rounds, y, color=INK, linewidth=0.9, marker="", zorder=2)
        if panel.low is None and len(rounds) > 1:
            continue  # a hollow point would claim to lie within a band
        marker = "o"
        if panel.low is None:
            marker = "x"
        for filled in (False, True):
            is_drawn = is_outside[name].to_numpy() == filled
            look: dict[str, Any] = {
                "markersize": 3.2,
                "markeredgewidth": 0.8,
                "zorder": 3,
            }
            ax.plot(rounds[is_drawn], y[is_drawn], marker, color=INK, **look,
                    markerfacecolor=INK if filled else "white")  # fmt: skip
    margin = max((rounds.max() - rounds.min()) * 0.06, 0.5)
    ax.set_xlim(rounds.min() - margin, rounds.max() + margin)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True, steps=NICE))
    ax.set_title(f"{panel.title}\n{low:.2g} to {high:.2g}", fontsize=7)
    ax.tick_params(axis="x", labelsize=6.5)
    ax.set_xlabel("round", fontsize=7)


def _legend(panels: list[Panel], plan: dict[str, bool] | None) -> list[str]:
    """Return the lines beneath the picture, which say what its signs mean."""
    lines = []
    if any(panel.low is not None for panel in panels):
        lines.append(
            f"band: clients that do not differ, {LEVEL:.0%} for all points of a map"
        )
        lines.append("filled: outside the band; hollow: within")
    else:
        lines.append(
            "no band: its null needs one model for all clients, and no named metrics"
        )
    if plan is not None and not all(plan.values()):
        lines.append("shaded: local layers")
    if any(panel.zero for panel in panels):
        lines.append("hatched: zero by construction")
    return with_notes(lines[0], lines[1:], most=5).split("\n")


def panels_of(layers: Sequence[Layer], table: pd.DataFrame) -> list[Panel]:
    """Return the panels of a layer map for which a diagnosis has rows.

    Args:
        layers: all layers of the model.
        table: rows of several rounds, with those of nulls.
    """
    measured_rows, nulls = split_resamples(table)[0], table[of_null(table)]
    names = [layer.name for layer in layers if layer.weights]
    panels = []
    for metric, title, tables in (
        ("grad_similarity", "gradients agree", _of_variants("cosine")),
        ("weight_divergence", "weights part", _of_variants("relative_l2")),
        ("knn_probe", "one classifier loses", _of_variants("own", "pooled")),
        (
            "layer_tuning",
            "tuning it alone recovers",
            _of_variants("share", of_clients=False),
        ),
    ):
        values = tables(measured_rows[measured_rows["metric"] == metric])
        values = values.reindex(columns=names).dropna(axis=0, how="all")
        if values.empty:
            continue
        draws = [
            tables(draw).reindex(index=values.index, columns=names)
            for draw in nulls_in(nulls[nulls["metric"] == metric]).get(NULL, ())
        ]
        panels.append(Panel(title, values, *band(draws)))
    return panels


def _of_variants(
    variant: str, subtracted_variant: str | None = None, of_clients: bool = True
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return a function from rows to their mean over clients, rounds x layers.

    Args:
        variant: the variant that is averaged.
        subtracted_variant: a variant whose mean is subtracted. Default: none.
        of_clients: whether rows of clients are averaged, or those of all clients
            (client "").
    """

    def table(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows[(rows["client"] != "") == of_clients]
        mean = rows.groupby(["variant", "round", "layer"])["value"].mean()
        values = {name: mean[name].unstack() for name in mean.index.unique("variant")}
        variant_values = values.get(variant, pd.DataFrame())
        if subtracted_variant is None:
            return variant_values
        return variant_values - values.get(subtracted_variant, variant_values * np.nan)

    return table


def band(draws: Sequence[pd.DataFrame]) -> tuple[Any, Any]:
    """Return the lower and upper ends of a 95 % prediction band for one more draw, each rounds x layers.

    The level holds over all points of three panels together.

    Draws of a layer have one standard deviation over the rounds. The quantile is Student's, divided by the number of
    points (Bonferroni), and the width counts the error of the mean of few draws.

    Args:
        draws: draws of the null, each rounds x layers. With fewer than two both ends are None.
    """
    if len(draws) < 2:
        return None, None
    from scipy.special import stdtrit

    values = np.stack([draw.to_numpy(dtype=float) for draw in draws])
    n_draws, rounds, layers = values.shape
    freedom = rounds * (n_draws - 1)
    mean = values.mean(axis=0)
    squares = np.nansum((values - mean) ** 2, axis=(0, 1))
    points = PANELS * rounds * layers
    quantile = stdtrit(freedom, 1 - (1 - LEVEL) / (2 * points))
    half_width = quantile * np.sqrt(squares / freedom * (1 + 1 / n_draws))
    axes_of_table = {"index": draws[0].index, "columns": draws[0].columns}
    return pd.DataFrame(mean - half_width, **axes_of_table), pd.DataFrame(
        mean + half_width, **axes_of_table
    )
