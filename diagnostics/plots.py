"""Pictures of rows, plans and tables: each function draws on an Axes and returns it.

Nothing is measured here. What is drawn is picked from the frame, or is a mean over clients or seeds that the picture
names. Without an Axes, a figure in the package's own style is made; a given Axes keeps its caller's style. A value
that is missing leaves a gap, and a note beneath the picture says why.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fl_core.errors import UsageError, check_known, listing
from fl_core.plan import LayerPlan

from .metrics import METRICS
from .pictures.costs import cost_steps, costs
from .pictures.drawing import (
    COLOURS,
    MEAN,
    MOST,
    both_ways,
    canvas,
    check_single,
    dress,
    heat,
    legend,
    missing,
    name_ticks,
    of_metric,
    of_variant,
    panels,
    set_scale,
    small,
    style,
    weighted_mean,
    with_notes,
)
from .pictures.features import mismatch, tsne, tsne_panels
from .pictures.insides import aggregation_history, aggregation_weights, allocation, prompt_attention, unfreezing
from .pictures.regret import regret
from .pictures.runs import clients, comparison, learning, partition
from .pictures.spectrum import has_density, spectral_density

__all__ = [
    "aggregation_history",
    "aggregation_weights",
    "allocation",
    "cka_matrices",
    "clients",
    "comparison",
    "cost_steps",
    "costs",
    "has_density",
    "learning",
    "metric",
    "mismatch",
    "partition",
    "plan",
    "prompt_attention",
    "regret",
    "spectral_density",
    "style",
    "tsne",
    "tsne_panels",
    "unfreezing",
]

FEDERATED, LOCAL, CUT = COLOURS[0], "#f3d9a8", COLOURS[3]


@dataclass(frozen=True)
class _Look:
    """How a metric is drawn: its name, what high or low means, on a log axis?, variants in order of choice."""

    label: str
    direction: str = ""
    log: bool = False
    variants: tuple[str, ...] = ()


_LOOKS = {
    "grad_variance": _Look("gradient variance", "higher = spread wider", True, ("epoch", "batch")),
    "hessian_trace": _Look("Hessian trace", "higher = sharper", True, ("per_parameter",)),
    "hessian_spectrum": _Look("Hessian eigenvalue", "higher = sharper", True, ("top1",)),
    "cka": _Look("mean 1 − CKA to the others", "0 = same representation"),
    "rbf_cka": _Look("mean 1 − RBF CKA to the others", "0 = same representation"),
    "procrustes": _Look("mean Procrustes angle to the others", "0 = same representation"),
    "cca": _Look("mean 1 − CCA to the others", "0 = same up to a linear map"),
    "svcca": _Look("mean 1 − SVCCA to the others", "0 = same up to a linear map"),
    "grad_norm": _Look("gradient norm", "higher = steeper", True, ("norm", "norm_batch")),
    "grad_noise": _Look("per-sample gradient noise", "higher = samples disagree more", True, ("trace",)),
    "grad_similarity": _Look("mean 1 − cosine of gradients to the others", "0 = same direction"),
    "weight_divergence": _Look("mean distance of weights to the others", "0 = equal", False, ("relative_l2",)),
    "update_magnitude": _Look("update magnitude", "0 = not moved", True, ("relative_l2",)),
    "weight_magnitude": _Look("weight magnitude", "higher = larger", True, ("mean_abs",)),
    "bn_scale": _Look("scale of normalisations", "higher = let through stronger"),
    "layer_cost": _Look("cost of a layer", "", True, ("parameters",)),
    "federation_sensitivity": _Look(
        "federation sensitivity S", "first layer = 1, higher = matters more", True, ("after", "training", "figure")
    ),
    "linear_probe": _Look("accuracy of a linear probe", "1 = all right", variants=("own", "pooled")),
    "knn_probe": _Look("accuracy of nearest neighbours", "1 = all right", variants=("own", "pooled")),
    "separability": _Look(
        "class scatter, between / within", "higher = classes further apart", True, variants=("own", "pooled")
    ),
}
_IMPORTANCE = _Look("importance I", "higher = matters more", True)


# --- layers ----------------------------------------------------------------------------------------------------


def metric(
    frame: pd.DataFrame,
    metric: str,
    ax: Axes | None = None,
    variant: str | None = None,
    scale: str = "auto",
    normalise: str | None = None,
) -> Axes:
    """One line a client over the layers, from input to output, and a thick line for all clients together.

    The thick line is the frame's combined rows (client ""); where it has none, the mean over clients, weighted by
    their training samples where those are known. For a metric of pairs a client's value is its mean distance to the
    others: 1 - value of a similarity such as ``cka``.
    Standard errors above 0 are error bars.

    Args:
        frame: rows of one run, seed, round and model of each client.
        metric: any per-layer metric of the frame.
        variant: which definition; by default the metric's usual one.
        scale: ``linear``, ``log``, ``symlog``, or ``auto``: log for variances, traces and sensitivities, symlog where
            some of those are not above 0, linear for the rest.
        normalise: ``first`` or ``min`` divides each client's curve by its value at the first layer or by its
            smallest value (the published figures do the latter); a client for which that is not above 0 has no curve.

    Raises:
        UsageError: a metric, variant or scale that is not there, several values for one client and layer, or a log
            scale for values that are not above 0.
    """
    rows = of_metric(frame, metric)
    kind = METRICS.get(metric)
    paired = kind.pairs if kind else bool((rows["client_b"] != "").any())
    distance = kind is not None and kind.distance
    name = metric.replace("_", " ")
    look = _LOOKS.get(metric, _Look(f"mean {'' if distance else '1 − '}{name} to the others" if paired else name))
    rows = of_variant(rows, variant, look.variants or (kind.variants if kind and paired else ()))
    look = _IMPORTANCE if variant == "importance" else look
    layers, notes = list(rows["layer"].unique()), ["× " + note for note in missing(rows, "layer")]
    gaps = {layers.index(layer) for layer in rows.loc[rows["value"].isna(), "layer"]}
    label, unit = look.label, "".join(f"[{name}]" for name in rows["unit"].unique()[:1] if name).replace("^2", "²")
    if paired:
        check_single(rows, ["client", "client_b", "layer"])
        label += "".join(f", {name}" for name in rows["variant"].unique()[:1] if kind and name != kind.variant)
        rows, unit = _distances(rows, distance), unit if distance else ""
    elif variant != "importance":
        label += "".join(f", {name.replace('_', ' ')}" for name in rows["variant"].unique() if name)
    check_single(rows, ["client", "layer"])
    if normalise is not None:
        rows, lost = _normalised(rows, normalise)
        notes += [f"no value above 0 to divide by: {listing(lost)}"] if lost else []
        unit = f"each client / its {'first layer' if normalise == 'first' else 'smallest'}"
    names = [name for name in rows["client"].unique() if name]
    values, errors = (
        rows.pivot(index="layer", columns="client", values=column).reindex(layers) for column in ("value", "stderr")
    )
    together = "combined" if "" in values else "mean of clients"
    if names and "" not in values:
        values[""] = weighted_mean(rows, ["layer"]).reindex(layers)
    below = with_notes("layer, input to output", notes)
    height = 3.0 + 0.15 * below.count("\n") + 0.06 * max(map(len, layers)) * (len(layers) > 6)
    with canvas(ax, float(np.clip(2.5 + 0.19 * len(layers), 5, 10)), height) as axes:
        set_scale(axes, values, scale, look.log)
        x = np.arange(len(layers))
        for k, name in enumerate(names):
            line = axes.plot(x, values[name], linewidth=1.3, **dress(k, names))[0]
            known = np.flatnonzero((errors[name] > 0) & values[name].notna())
            if len(known):
                y, bar, colour = values[name].iloc[known], errors[name].iloc[known], line.get_color()
                axes.errorbar(x[known], y, bar, fmt="none", ecolor=colour, elinewidth=1.2)
        if "" in values and len(names) != 1:
            order = 3 if len(names) > MOST else 1.5
            axes.plot(x, values[""], color=MEAN, linewidth=2.8, marker=".", label=together, zorder=order)
        for k in gaps:
            axes.text(k, 0.01, "×", transform=axes.get_xaxis_transform(), ha="center", color="0.3")
        if paired and scale in ("auto", "linear"):
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0] if (values < 0).any(axis=None) else 0.0))
        name_ticks(axes, layers)
        meaning = ", ".join(filter(None, [unit, "" if normalise else look.direction]))
        axes.set(xlabel=below, ylabel=f"{label}\n{meaning}".strip())
        legend(axes)
    return axes


def _distances(rows: pd.DataFrame, distance: bool) -> pd.DataFrame:
    """Each client's mean distance to the others in each layer, as rows; of a similarity 1 - value."""
    turned = both_ways(rows[rows["client"] != rows["client_b"]])
    apart = turned["value"] if distance else 1 - turned["value"]
    mean = apart.groupby([turned["client"], turned["layer"]], sort=False).mean(skipna=False)
    return mean.reset_index().assign(stderr=np.nan, n_train=np.nan, variant="", metric="pairs")


def _normalised(rows: pd.DataFrame, normalise: str) -> tuple[pd.DataFrame, list[str]]:
    """The clients' rows divided by their reference, and the clients that have none above 0."""
    check_known("normalisation", normalise, ("first", "min"))
    rows = rows[rows["client"] != ""]
    if normalise == "min":
        reference = rows.groupby("client", sort=False)["value"].min()
    else:
        first = rows[rows["layer"] == rows["layer"].iloc[0]]
        reference = first.set_index("client")["value"].reindex(rows["client"].unique())
    reference = reference.where(reference > 0)
    by = rows["client"].map(reference)
    return rows.assign(value=rows["value"] / by, stderr=rows["stderr"] / by), list(reference.index[reference.isna()])


def cka_matrices(
    frame: pd.DataFrame, axes: Figure | Sequence[Axes] | None = None, variant: str | None = None
) -> list[Axes]:
    """A heat map clients x clients of each layer's CKA, 1 = same representation, with one colour bar from 0 to 1.

    Args:
        frame: rows with metric ``cka``, one a pair of clients and layer.
        axes: a figure to fill, or at least one Axes a layer.
        variant: which definition, where the frame has several.

    Raises:
        UsageError: no pairs, several values for one pair and layer, or too few Axes.
    """
    rows = of_variant(of_metric(frame, "cka"), variant, METRICS["cka"].variants)
    check_single(rows, ["client", "client_b", "layer"])
    pairs = both_ways(rows)
    layers, names = list(pairs["layer"].unique()), list(pairs["client"].unique())
    if not names:
        raise UsageError(f"no pairs of clients among the rows of cka: {listing(rows['status'].unique())}")
    with panels(axes, len(layers)) as drawn:
        for layer, panel in zip(layers, drawn, strict=True):
            matrix = pairs[pairs["layer"] == layer].pivot(index="client", columns="client_b", values="value")
            matrix = matrix.reindex(index=names, columns=names)
            if not (pairs["client"] == pairs["client_b"]).any():  # of the same layer, so that each is like itself
                matrix = matrix.mask(np.eye(len(names), dtype=bool), 1.0)
            colours = heat(panel, matrix, square=True)
            panel.ax.set_title(layer, fontsize=8)
        found = [panel.ax for panel in drawn]
        figure = found[0].figure
        figure.colorbar(colours, ax=found, shrink=0.8, label="CKA, 1 = same")
        notes = missing(rows, "layer")
        if notes:
            figure.supxlabel(with_notes("grey: no value", notes), fontsize=8)
    return found


def plan(plan: LayerPlan, ax: Axes | None = None) -> Axes:
    """The decision at one glance: layers as boxes from input to output, what is federated and what stays local.

    Beneath stand the values that the rule read, at each border the ratio of the layer after it to the layer before
    it (bold where above the threshold), and how far each client alone would have federated.

    Raises:
        UsageError: a vote for a layer, or a number of values, that is not the plan's.
    """
    names, why = plan.names, plan.why
    if why.values and len(why.values) != len(names):
        raise UsageError(f"the plan's evidence has {len(why.values)} values for {len(names)} layers")
    ends = {client: names.index(check_known("layer", vote, names)) + 1 for client, vote in why.votes.items()}
    tight = sum(len(name) + 2 for name in names) > 46
    line = 0.22
    numbers: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.0, "rotation": 0}
    numbers["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    if len(names) > 10:
        line, numbers = 0.42, {**numbers, "fontsize": 6.5, "rotation": 90}
    title = [f"{len(plan.shared)} of {len(names)} layers federated", f"rule {why.rule}"]
    title[1] += "" if why.threshold is None else f", threshold {why.threshold:g}"
    title += [] if why.status == "ok" else textwrap.wrap(why.status, 50)
    rows: list[tuple[float, str]] = []  # height in inches and name of each row beneath the boxes
    if why.values:
        value = "S" if why.metric == "federation_sensitivity" else why.metric.replace("_", " ") or "value"
        rows += [(line, value), (line, "ratio")]
    rows += [(0.22, f"vote of {client}") for client in ends]
    if len(ends) > MOST:
        rows[-len(ends) :] = [(0.26, f"votes of {len(ends)} clients")]
    y = -np.cumsum([height for height, _ in rows]) + np.array([height for height, _ in rows]) / 2
    depth = sum(height for height, _ in rows)
    with canvas(ax, float(np.clip(2 + 0.2 * len(names), 5, 10)), 1.4 + depth + 0.5 * tight + 0.13 * len(title)) as axes:
        for k, name in enumerate(names):
            box: dict[str, Any] = {"color": FEDERATED} if name in plan.shared else {"color": LOCAL, "hatch": "///"}
            axes.bar(k + 0.5, 0.4, width=0.9, bottom=0.1, edgecolor="0.3", linewidth=0.6, **box)
        for k, high in enumerate(why.values):
            axes.text(k + 0.5, y[0], _short(high), numbers)
            low = why.values[k - 1] if k else None
            if k:
                ratio = high / low if low is not None and high is not None and low > 0 and high > 0 else None
                above = ratio is not None and why.threshold is not None and ratio > why.threshold
                weight, colour = ("bold", "0.05") if above else ("normal", "0.4")
                axes.text(k, y[1], _short(ratio), numbers, weight=weight, color=colour)
        if len(ends) > MOST:
            for end in sorted(set(ends.values())):
                axes.text(end, y[-1], str(list(ends.values()).count(end)), numbers, rotation=0)
        else:
            for at, end in zip(y[len(y) - len(ends) :], ends.values(), strict=True):
                axes.plot([0.05, end], [at, at], color=FEDERATED, marker="|", markevery=[1], markersize=8)
        if plan.cut is not None:
            axes.axvline(plan.cut, color=CUT, linestyle="--", linewidth=1.5, label="cut", zorder=0.5)
        axes.set(xlim=(-0.05, len(names) + 0.05), ylim=(-depth - 0.05, 0.55))
        axes.set_yticks(list(y), [name for _, name in rows])
        axes.set_xticks(np.arange(len(names)) + 0.5, names, rotation=90 if tight else 0, fontsize=small(len(names), 8))
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set_title("\n".join(title))
        keys: list[Any] = [Patch(facecolor=FEDERATED, edgecolor="0.3", label="federated")]
        keys += [Patch(facecolor=LOCAL, edgecolor="0.3", hatch="///", label="local")]
        keys += [drawn for drawn in axes.lines if drawn.get_label() == "cut"]
        axes.legend(handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3)
    return axes


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
