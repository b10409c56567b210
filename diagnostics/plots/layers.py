"""Pictures of a metric over the layers: a line per client, matrices of client pairs, costs, and features in a plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_core.display import in_order
from fl_core.errors import UsageError, check_known, listing

from ..curve import both_ways
from ..metrics import facts_of, known_metrics
from ..null import NULLS, nulls_in
from ..representation import PAIRS
from .drawing import (
    COLOURS,
    MARKERS,
    MEAN,
    MOST_CLIENTS,
    as_label,
    canvas,
    check_single,
    client_style,
    heat,
    labelled,
    legend,
    missing_notes,
    name_ticks,
    of_metric,
    of_variant,
    panels,
    set_scale,
    stacked,
    weighted_mean,
    with_notes,
)


def metric(
    frame: pd.DataFrame, metric: str, ax: Axes | None = None, variant: str | None = None
) -> Axes:
    """Draw a metric over the layers from input to output: a line per client, and a thick one for all clients.

    The thick line shows the frame's combined rows (client ""). If there are none, it is
    the mean over clients, weighted by their training samples if known. A lone client
    has no thick line. For a metric of pairs a client's value is its mean distance to
    the others. The distance is 1 - value for a similarity such as ``cka``.

    Standard errors above 0 are error bars. If the frame holds nulls
    (:mod:`diagnostics.null`), thin grey lines show the same mean of each of their
    draws. A missing value is a gap with a cross, and a note beneath gives the reason.

    Args:
        frame: rows of one run, seed, round and model of each client, and of nulls.
        metric: any per-layer metric of the frame.
        ax: the Axes to draw on. Default: that of a new figure.
        variant: the variant. Default: the metric's usual one.

    Raises:
        UsageError: a metric or variant does not exist, or a client and layer have several values.
    """
    rows = of_metric(frame, metric)
    metric_facts = facts_of(metric)
    is_paired = metric_facts.pairs or (
        metric not in known_metrics() and bool((rows["client_b"] != "").any())
    )
    is_distance = metric_facts.distance
    name = metric.replace("_", " ")
    rows = of_variant(rows, variant, metric_facts.variants)
    look = metric_facts.look.for_variant(variant)
    layers = list(rows["layer"].unique())
    notes = ["× " + note for note in missing_notes(rows, "layer")]
    gaps = {layers.index(layer) for layer in rows.loc[rows["value"].isna(), "layer"]}
    usual_label = name
    if is_paired:
        distance_label = name if is_distance else f"1 − {name}"
        usual_label = f"mean {distance_label} to the others"
    label = look.label or usual_label
    unit = str(next(iter(rows["unit"]), "")).replace("^2", "²")
    if is_paired:
        check_single(rows, ["client", "client_b", "layer"])
        label += "".join(
            f", {name}"
            for name in rows["variant"].unique()[:1]
            if metric in known_metrics() and name != metric_facts.variant
        )
        rows, unit = _distances(rows, is_distance), unit if is_distance else ""
    elif look is metric_facts.look:
        variants = filter(None, rows["variant"].unique())
        label = ", ".join([label, *(name.replace("_", " ") for name in variants)])
    check_single(rows, ["client", "layer"])
    names = in_order(name for name in rows["client"].unique() if name)
    values, errors = (
        rows.pivot(index="layer", columns="client", values=column).reindex(layers)
        for column in ("value", "stderr")
    )
    mean_label = "mean of clients"
    if "" in values:
        mean_label = "combined"
    if names and "" not in values:
        values[""] = weighted_mean(rows, ["layer"]).reindex(layers)
    nulls = _null_curves(frame, metric, variant, is_paired)
    x_label = with_notes("layer, input to output", notes)
    height = (
        3.0
        + 0.15 * x_label.count("\n")
        + 0.06 * max(map(len, layers)) * (len(layers) > 6)
    )
    with canvas(ax, float(np.clip(2.5 + 0.19 * len(layers), 5, 10)), height) as axes:
        curves: dict[str, pd.Series] = {}
        for title, draws in nulls.items():
            for k, curve in enumerate(draws, 1):
                curves[f"{title}, draw {k}"] = curve
        set_scale(axes, values.assign(**curves), look.log)
        x = np.arange(len(layers))
        for k, name in enumerate(names):
            line = axes.plot(x, values[name], linewidth=1.3, **client_style(k, names))[
                0
            ]
            with_error = (errors[name] > 0) & values[name].notna()
            if with_error.any():
                axes.errorbar(
                    x[with_error],
                    values[name][with_error],
                    errors[name][with_error],
                    fmt="none",
                    ecolor=line.get_color(),
                    elinewidth=1.2,
                )
        if "" in values and len(names) != 1:
            line_order = 3 if len(names) > MOST_CLIENTS else 1.5
            axes.plot(
                x,
                values[""],
                color=MEAN,
                linewidth=2.8,
                marker=".",
                label=mean_label,
                zorder=line_order,
            )
        dashing = cycle(((4, 2), (1, 2), (8, 2, 1, 2), (2, 5)))
        for (title, draws), dashes in zip(nulls.items(), dashing, strict=False):
            for number, curve in enumerate(draws):
                axes.plot(
                    x,
                    curve.reindex(layers),
                    color="0.45",
                    linewidth=0.9,
                    dashes=dashes,
                    label=None if number else f"null: {title}",
                    zorder=1.2,
                )
        for k in gaps:
            axes.text(
                k,
                0.01,
                "×",
                transform=axes.get_xaxis_transform(),
                ha="center",
                color="0.3",
            )
        if is_paired:
            # the margin above the highest value is a share of its distance from 0
            axes.update_datalim([(0.0, 0.0)])
            axes.autoscale_view()
            if not (values < 0).any(axis=None):
                axes.set_ylim(bottom=0.0)
        name_ticks(axes, layers)
        meaning = ", ".join(filter(None, [unit and f"[{unit}]", look.meaning]))
        axes.set(xlabel=x_label, ylabel=f"{label}\n{meaning}".strip())
        legend(axes)
    return axes


def _null_curves(
    frame: pd.DataFrame, metric: str, variant: str | None, paired: bool
) -> dict[str, list[pd.Series]]:
    """Return the mean over clients, by layer, of each draw of each null in a frame, by the null's title.

    A null may lack the variant, such as untrained models for what is seen in training. It then shows the metric's
    default variant, and the title names it.
    """
    metric_facts = facts_of(metric)
    curves: dict[str, list[pd.Series]] = {}
    for null, draws in nulls_in(labelled(frame[frame["metric"] == metric])).items():
        for draw in draws:
            lacks_variant = variant is not None and variant not in set(draw["variant"])
            rows = of_variant(
                draw, None if lacks_variant else variant, metric_facts.variants
            )
            title = NULLS[null].title + (
                f" ({rows['variant'].iloc[0]})" if lacks_variant else ""
            )
            if paired:
                rows = _distances(rows, metric_facts.distance)
            combined_rows = rows[rows["client"] == ""]
            if combined_rows.empty:
                mean = weighted_mean(rows, ["layer"])
            else:
                mean = combined_rows.set_index("layer")["value"]
            curves.setdefault(title, []).append(mean)
    return curves


def _distances(rows: pd.DataFrame, distance: bool) -> pd.DataFrame:
    """Return each client's mean distance to the others in each layer, as rows.

    The mean is missing if the value of a pair is missing.

    Args:
        rows: rows of pairs of clients.
        distance: whether the values are distances. If not, each counts as 1 - value.
    """
    pair_rows = both_ways(rows[rows["client_b"] != ""])
    values = pair_rows["value"] if distance else 1 - pair_rows["value"]
    mean = values.groupby([pair_rows["client"], pair_rows["layer"]], sort=False).mean(
        skipna=False
    )
    return mean.reset_index().assign(
        stderr=np.nan, n_train=np.nan, variant="", metric="pairs"
    )


def cka_matrices(
    frame: pd.DataFrame,
    axes: Figure | Sequence[Axes] | None = None,
    metric: str = "cka",
    variant: str | None = None,
) -> list[Axes]:
    """Draw each layer's CKA as a heat map clients x clients, 1 = same representation, with one colour bar.

    With ``variant="pairs"`` there is a heat map for each pair of clients instead: layers of the first one down, and
    layers of the second one across.

    Args:
        frame: rows of the metric, one a pair of clients and layer.
        axes: a figure to fill, or at least one Axes for each heat map. Default: a new
            figure.
        metric: another similarity of pairs from 0 to 1.
        variant: the variant. Default: the metric's usual one.

    Returns:
        The Axes of the heat maps. Missing values are grey, and a note gives the reason.

    Raises:
        UsageError: the metric or variant does not exist, there are no pairs, a pair and
            layer have several values, or there are too few Axes.
    """
    rows = of_metric(frame, metric)
    if variant == PAIRS:
        rows = rows[rows["variant"].str.startswith(f"{PAIRS} ")]
        titles = rows["client"] + " (down), " + rows["client_b"]
        other_layers = rows["variant"].str.removeprefix(f"{PAIRS} ")
        other_layers = other_layers.replace(rows.attrs.get("labels", {}))
        both_rows = rows.assign(pair=titles, other=other_layers)
        (title, row_column, column), panel_size = ("pair", "layer", "other"), 2.6
        names = list(both_rows[row_column].unique())
    else:
        rows = of_variant(rows, variant, facts_of(metric).variants)
        both_rows = both_ways(rows[rows["client_b"] != ""])
        (title, row_column, column), panel_size = ("layer", "client", "client_b"), 1.4
        names = in_order(both_rows[row_column].unique())
    check_single(both_rows, [title, row_column, column])
    if not names:
        kind_name = variant or "pairs of clients"
        raise UsageError(
            f"rows of {metric} must have {kind_name}; got none "
            f"({listing(rows['status'].unique())}). Measure two models, for 'pairs' with this variant as an option."
        )
    groups = both_rows.groupby(title, sort=False)
    with panels(axes, len(groups), panel_size, panel_size + 0.1) as grid:
        for (name, group_rows), panel in zip(groups, grid, strict=True):
            matrix = group_rows.pivot(index=row_column, columns=column, values="value")
            matrix = matrix.reindex(index=names, columns=names)
            if variant != PAIRS:
                matrix = matrix.mask(np.eye(len(names), dtype=bool), 1.0)
            colours = heat(panel, matrix, square=True)
            panel.ax.set_title(str(name), fontsize=8)
        panel_axes = [panel.ax for panel in grid]
        figure = panel_axes[0].figure
        metric_title = "CKA" if metric == "cka" else metric.replace("_", " ")
        figure.colorbar(
            colours,
            ax=panel_axes,
            shrink=0.8,
            label=f"{metric_title}, 1 = same",
        )
        notes = missing_notes(rows, "layer")
        if notes:
            figure.supxlabel(with_notes("grey: no value", notes), fontsize=8)
    return panel_axes


_KINDS = {
    "bytes": ("sent, each way and round", "B"),
    "forward_flops": ("forward pass", "FLOP a sample"),
    "backward_flops": ("backward pass", "FLOP a sample"),
    "activation_bytes": ("kept for the backward pass", "B a sample"),
}


def costs(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw each layer's share of a network's costs: a bar a kind of cost, its layers from input to output.

    A plan that shares the first layers sends everything left of the border after the last of them. The totals stand
    next to the bars.

    Args:
        frame: rows of ``layer_cost`` of one model.
        ax: the Axes to draw on. Default: that of a new figure.

    Raises:
        UsageError: there are no such rows, they are of several models, or no cost is
            above 0.
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


def spectral_density(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw the density of a Hessian's eigenvalues: how many lie in each of 50 ranges, a line a client.

    Args:
        frame: rows of ``hessian_spectrum``, measured with its options ``density=True`` and ``k=60``. With a small ``k``
            there are few values, and the picture shows only these.
        ax: the Axes to draw on. Default: that of a new figure.

    Raises:
        UsageError: there are no such rows, or they are of several layers.
    """
    rows = of_metric(frame, "hessian_spectrum").dropna(subset="value")
    is_weight = rows["variant"].str.startswith("weight")
    if not is_weight.any():
        raise UsageError(
            "rows of hessian_spectrum must have weights; got none. Measure with its options density=True and k=60."
        )
    counts = (rows["value"] * rows["n_params"])[is_weight]
    values = rows[~is_weight].assign(count=counts.to_numpy())
    check_single(values, ["client", "variant"])
    drawing_options: dict[str, Any] = {"bins": 50, "element": "step", "fill": False}
    import seaborn as sns

    with canvas(ax) as axes:
        sns.histplot(
            values, x="value", weights="count", hue="client", ax=axes, **drawing_options
        )
        axes.set(yscale="log", ylim=(0.1, None), ylabel="number of eigenvalues")
        axes.set_xlabel("eigenvalue of the Hessian [loss/weight²]")
    return axes


def tsne(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw samples embedded in a plane: colour = class, marker = client.

    Large markers show each client's class centres.

    Args:
        frame: from :func:`diagnostics.measure.tsne`.
        ax: the Axes to draw on. Default: that of a new figure.

    Raises:
        UsageError: columns are missing, or there are no samples.
    """
    frame = _with_labels(frame)
    looks = _looks([frame])
    with canvas(ax, 6.2, 4.2) as axes:
        _cloud(axes, frame, looks, True, legend=True)
    return axes


def tsne_panels(
    frames: Mapping[str, pd.DataFrame],
    axes: Figure | Sequence[Axes] | None = None,
    *,
    centres: bool = True,
) -> list[Axes]:
    """Draw several embeddings next to each other (as before and after a layer), with common colours and markers.

    Args:
        frames: {title: frame}, each from :func:`diagnostics.measure.tsne`. Their axes
            are unrelated to each other.
        axes: a figure to fill, or at least one Axes a frame. Default: a new figure.
        centres: whether large markers show each client's class centres.

    Returns:
        The Axes of the frames, in their order.

    Raises:
        UsageError: as :func:`tsne`, there are no frames, or there are too few Axes.
    """
    frames = {title: _with_labels(frame) for title, frame in frames.items()}
    looks = _looks(list(frames.values()))
    with panels(axes, len(frames), 3.1, 2.7, columns=len(frames)) as grid:
        panel_axes = [panel.ax for panel in grid]
        for ax, (title, frame) in zip(panel_axes, frames.items(), strict=True):
            _cloud(ax, frame, looks, centres, legend=ax is panel_axes[-1])
            ax.set_title(title)
    return panel_axes


def _looks(frames: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """Return seaborn's arguments for colours by class and markers by client, for all frames.

    More than :data:`MOST_CLIENTS` clients get no markers of their own.

    Raises:
        UsageError: there are no frames, a column is missing, or a frame has no samples.
    """
    if not frames:
        raise UsageError("there must be features; got none. Embed them first.")
    from ..representation.embedding import COLUMNS  # with torch and scikit-learn

    for frame in frames:
        for column in COLUMNS[:4]:
            check_known("column of the frame", column, frame.columns)
        if frame.empty:
            raise UsageError("there must be samples; got none. Pool some first.")
    all_samples = pd.concat([frame[["client", "class"]] for frame in frames])
    classes = in_order(sorted(all_samples["class"].unique()))
    colours = COLOURS[: len(classes)]
    if len(classes) > len(COLOURS):
        import seaborn as sns

        colours = sns.color_palette("turbo", len(classes))
    looks: dict[str, Any] = {
        "hue": "class",
        "hue_order": classes,
        "palette": dict(zip(classes, colours, strict=True)),
    }
    clients = in_order(all_samples["client"].unique())
    if len(clients) <= MOST_CLIENTS:
        markers = dict(zip(clients, MARKERS, strict=False))
        looks |= {"style": "client", "style_order": clients, "markers": markers}
    return looks


def _with_labels(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of samples whose clients and classes have names as pictures show them."""
    names = {
        key: frame[key].map(as_label) for key in ("client", "class") if key in frame
    }
    return frame.assign(**names)


def _cloud(
    ax: Axes, frame: pd.DataFrame, looks: Mapping[str, Any], centres: bool, legend: bool
) -> None:
    import seaborn as sns

    size = float(np.clip(9000 / len(frame), 5, 26))
    shuffled_samples = frame.sample(
        frac=1, random_state=0
    )  # no client lies under all others
    drawing_options: dict[str, Any] = {"x": "x", "y": "y", "ax": ax, **looks}
    sns.scatterplot(
        shuffled_samples,
        s=size,
        alpha=0.55,
        linewidth=0,
        legend=legend,
        **drawing_options,
    )
    if centres:
        from ..representation.embedding import centroids

        class_centres, edge_style = (
            centroids(frame),
            {"edgecolor": "black", "linewidth": 0.9},
        )
        sns.scatterplot(
            class_centres, s=62, zorder=3, legend=False, **edge_style, **drawing_options
        )
    if legend:
        handles, names = ax.get_legend_handles_labels()
        for handle in handles:
            handle.set_alpha(1)
        columns = 1 + len(names) // 14
        legend_place: dict[str, Any] = {
            "loc": "upper left",
            "bbox_to_anchor": (1.01, 1.02),
        }
        ax.legend(handles, names, borderaxespad=0, ncols=columns, **legend_place)
    alike_note = ", clients drawn alike"
    if "style" in looks:
        alike_note = ""
    centre_note = ""
    if centres:
        centre_note = "\nlarge: centres of client and class"
    perplexity = frame.attrs.get("perplexity")
    method_note = ""
    if perplexity:
        method_note = f", t-SNE, perplexity {perplexity:.3g}"
    label = f"{len(frame)} samples{method_note}{alike_note}{centre_note}"
    ax.set(xticks=[], yticks=[], xlabel=label, ylabel="")
    ax.grid(False)
    ax.spines[:].set_visible(True)
    ax.set_aspect("equal", adjustable="datalim")
