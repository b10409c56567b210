"""Pictures of data, of runs and of predictions: classes by client, scores and costs over rounds, clients compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fl_core.display import in_order
from fl_core.errors import UsageError, check_known, listing
from fl_core.rows import TABLE, USED, label_of, positive_in, used_model

from .drawing import (
    COLOURS,
    DASHES,
    MARKERS,
    MEAN,
    NICE,
    arm_colours,
    as_label,
    canvas,
    check_single,
    client_style,
    legend,
    missing_notes,
    of_metric,
    panels,
    small,
    stacked,
    weighted_mean,
    with_notes,
)


def partition(counts: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw which classes each client holds: a stacked bar per client, with its total at the end.

    Args:
        counts: samples, clients x classes, by name (``FederatedData.class_counts``).
        ax: the Axes to draw on. Default: that of a new figure.

    Raises:
        UsageError: there are no clients or classes, or counts are missing or below 0.
    """
    if all(isinstance(name, str) for name in counts.index) and counts.index.is_unique:
        counts = counts.loc[in_order(counts.index)]
    counts = counts.rename(index=as_label, columns=as_label)
    table = counts.to_numpy(dtype=np.float64)
    if not table.size or not (np.isfinite(table) & (table >= 0)).all():
        raise UsageError(
            "counts of samples must be at least 0, for one or more clients and classes; got others."
        )
    n_clients, n_classes = table.shape
    has_numbers, title = n_classes <= 12, str(counts.columns.name or "class")
    total = table.sum(axis=1)
    with canvas(ax, height=float(np.clip(1.0 + 0.26 * n_clients, 2, 9))) as axes:
        shows_numbers = n_clients <= 30
        stacked(
            axes,
            counts,
            lambda count: f"{count:.0f}" if shows_numbers else "",
            linewidth=0.4 * has_numbers,
        )
        total_texts, size = [f"n = {count:.0f}" for count in total], small(n_clients, 7)
        axes.bar_label(axes.containers[-1], total_texts, padding=3, fontsize=size)  # type: ignore[arg-type]
        axes.set(xlim=(0, 1.18 * max(total.max(), 1.0)), xlabel="samples")
        axes.tick_params(axis="y", labelsize=small(n_clients, 8))
        if has_numbers:
            legend(axes, title=title)
        else:
            scale = ScalarMappable(Normalize(-0.5, n_classes - 0.5), "viridis")
            shown_classes = np.unique(
                np.linspace(0, n_classes - 1, 8).round().astype(int)
            )
            bar = axes.figure.colorbar(scale, ax=axes, label=title)
            bar.set_ticks(
                list(shown_classes),
                labels=[str(counts.columns[k]) for k in shown_classes],
            )
    return axes


def learning(
    frame: pd.DataFrame,
    metric: str = "macro_f1",
    model: str | None = None,
    split: str = "test",
    ax: Axes | None = None,
) -> Axes:
    """Draw a score over the rounds, one line per algorithm: the mean over clients, weighted by training samples.

    With several seeds the line is the mean over them, and the band reaches from the lowest to the highest.

    Args:
        frame: rows of one or more runs.
        metric: name of the score.
        model: the model that is scored. Default: each algorithm's personal one, else
            its global one. An algorithm without the named model is left out, and a note
            says so.
        split: ``test``, ``validation`` or ``train``.
        ax: the Axes to draw on. Default: that of a new figure.

    Raises:
        UsageError: a metric, model or split does not exist, or a client and round have
            several values. Also an algorithm has several models, neither personal nor
            global, and ``model`` names none.
    """
    rows, notes = _scores(frame, metric, model, split)
    means = weighted_mean(rows, ["algorithm", "seed", "round"])
    with canvas(ax, width=5.6) as axes:
        seed_counts = set()
        names = list(rows["algorithm"].unique())
        colours = arm_colours(names)
        for k, name in enumerate(names):
            runs = means.loc[name].unstack("seed").sort_index()
            x, marker_step = (
                runs.index.to_numpy(dtype=np.float64),
                max(1, len(runs) // 8),
            )
            colour = colours[k]
            dash = DASHES[colours[:k].count(colour) % len(DASHES)]
            axes.plot(
                x,
                runs.mean(axis=1, skipna=False),
                label=as_label(name),
                markevery=(k % marker_step, marker_step),
                color=colour,
                linestyle=dash,
                marker=MARKERS[k % len(MARKERS)],
            )
            if runs.shape[1] > 1:
                axes.fill_between(
                    x,
                    runs.min(axis=1),
                    runs.max(axis=1),
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                )
            seed_counts.add(runs.shape[1])
        axes.xaxis.set_major_locator(
            ticker.MaxNLocator(integer=True, steps=NICE, min_n_ticks=1)
        )
        axes.set(
            xlabel=with_notes("round", notes),
            ylabel=_score_label(metric, split, positive_in(rows)),
        )
        averaged = "mean over seeds"
        if len(seed_counts) == 1:
            averaged = f"mean of {max(seed_counts)} seeds"
        legend(
            axes,
            title=f"{averaged},\nband: lowest to highest"
            if max(seed_counts) > 1
            else None,
        )
    return axes


def comparison(table: pd.DataFrame, metric: str, ax: Axes | None = None) -> Axes:
    """Draw a table's scores with their intervals, a dot per row in the table's order, with values as text.

    The axis of a share, such as accuracy, ends at 0 and 1, though the interval of a few seeds may reach beyond.

    Args:
        table: columns ``algorithm``, ``value``, ``low`` and ``high`` (ends of the interval, which may be missing) and
            ``n`` (number of runs). A missing value is written as ``no value``.
        metric: name of the values, for the axis.
        ax: the Axes to draw on. Default: that of a new figure.

    Raises:
        UsageError: a column is missing, or an interval does not contain its value.
    """
    for name in ("algorithm", "value", "low", "high", "n"):
        check_known("column of the table", name, table.columns)
    faulty_rows = table[
        (table["low"] > table["value"]) | (table["high"] < table["value"])
    ]
    if len(faulty_rows):
        raise UsageError(
            f"the interval of {listing(faulty_rows['algorithm'])} must contain its value. "
            "Correct the columns low and high."
        )
    ends = np.abs(table[["low", "high"]].to_numpy(float).T - table["value"].to_numpy())
    with canvas(ax, height=float(np.clip(0.8 + 0.24 * len(table), 1.6, 9))) as axes:
        y = range(len(table))
        axes.errorbar(table["value"], y, xerr=ends, fmt="o", color=COLOURS[0])
        for k, row in enumerate(table.itertuples()):
            text = "no value" if pd.isna(row.value) else f"{row.value:.3f}"
            if not pd.isna(row.low + row.high):
                text += f"  [{row.low:.3f}, {row.high:.3f}]"
            placement: dict[str, Any] = {"transform": axes.get_yaxis_transform()}
            axes.text(1.02, k, f"{text}  n = {row.n}", va="center", fontsize=7.5, **placement)  # fmt: skip
        axes.set_yticks(range(len(table)), list(map(as_label, table["algorithm"])))
        axes.set(
            ylim=(len(table) - 0.4, -0.6),
            xlabel=_score_label(
                metric, positive=str(next(iter(table.get("positive", ())), ""))
            ),
        )
        if metric in TABLE and TABLE[metric].share:
            left, right = axes.get_xlim()
            axes.set_xlim(max(left, 0.0), min(right, 1.0))
    return axes


def clients(
    frame: pd.DataFrame,
    metric: str = "macro_f1",
    model: str | None = None,
    split: str = "test",
    ax: Axes | None = None,
) -> Axes:
    """Draw every client's score after the last round, a row per algorithm, to show which clients gain and lose.

    A dot is a client (its mean over seeds). The bar is the mean over clients weighted by training samples. The grey
    band reaches from the worst client to the best. Arguments and errors are those of :func:`learning`.
    """
    rows, notes = _scores(frame, metric, model, split)
    rows = rows[
        rows["round"] == rows.groupby(["algorithm", "seed"])["round"].transform("max")
    ]
    names, client_names = (
        list(rows["algorithm"].unique()),
        in_order(rows["client"].unique()),
    )
    means = (
        weighted_mean(rows, ["algorithm", "seed"])
        .groupby("algorithm")
        .mean(skipna=False)
        .reindex(names)
    )
    scores = (
        rows.groupby(["algorithm", "client"], sort=False)["value"]
        .mean(skipna=False)
        .unstack("client")
    )
    scores, y = scores.reindex(index=names, columns=client_names), np.arange(len(names))
    with canvas(
        ax, width=5.6, height=float(np.clip(0.9 + 0.32 * len(names), 1.8, 9))
    ) as axes:
        axes.hlines(
            y,
            scores.min(axis=1),
            scores.max(axis=1),
            color="0.85",
            linewidth=5,
            zorder=1,
        )
        for k, client in enumerate(client_names):
            axes.plot(
                scores[client],
                y,
                linestyle="none",
                zorder=3,
                **client_style(k, client_names),
            )
        axes.plot(
            means,
            y,
            linestyle="none",
            marker="|",
            markersize=14,
            mew=2,
            color=MEAN,
            label="mean",
            zorder=2,
        )
        axes.set_yticks(y, list(map(as_label, names)))
        axes.set(
            ylim=(len(names) - 0.4, -0.6),
            xlabel=with_notes(_score_label(metric, split, positive_in(rows)), notes),
        )
        axes.grid(axis="y", visible=False)
        legend(axes)
    return axes


def _score_label(metric: str, split: str = "", positive: str = "") -> str:
    score_label = label_of(metric, positive)
    label = f"{split} {score_label}".strip()
    if metric not in TABLE:
        return label
    end = "lower"
    if TABLE[metric].higher_is_better:
        end = "higher"
    return f"{label} ({end} is better)"


def _scores(
    frame: pd.DataFrame, metric: str, model: str | None, split: str
) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of one score and one model for each algorithm, and notes.

    A note names an algorithm without this model, or the reason of a missing value.
    Without clients' rows those of all clients (client "") are returned. A missing seed
    is -1 in the result, and a missing round is 0.

    Raises:
        UsageError: as :func:`learning`.
    """
    rows = of_metric(frame, metric)
    rows = rows[
        (rows["layer"] == "")
        & (rows["split"] == check_known("split", split, rows["split"].unique()))
    ]
    if model is not None:
        check_known("model", model, rows["model"].unique())
    rows_by_model: dict[tuple[str, str], pd.DataFrame] = {}
    notes: list[str] = []
    for name in rows["algorithm"].unique():
        group = rows[rows["algorithm"] == name]
        model_names = list(group["model"].unique())
        model_name = model or used_model(model_names)
        if model is None and model_name not in model_names:
            model_name = model_names[0]
        if model_name not in model_names:
            notes.append(f"{name}: no {model_name} model, only {listing(model_names)}")
        elif model_name not in USED and model is None and len(model_names) > 1:
            raise UsageError(
                f"{name} has the models {listing(model_names)}. Name one of them."
            )
        else:
            group = group[group["model"] == model_name]
            if (group["client"] != "").any():
                rows_by_model[name or "run", model_name] = group[group["client"] != ""]
            else:
                rows_by_model[name or "run", model_name] = group
    several_models = len({model_name for _, model_name in rows_by_model}) > 1
    selected_rows: pd.DataFrame = pd.concat(
        model_rows.assign(
            algorithm=f"{name} ({model_name})" if several_models else name
        )
        for (name, model_name), model_rows in rows_by_model.items()
    )
    selected_rows = selected_rows.assign(
        seed=selected_rows["seed"].fillna(-1), round=selected_rows["round"].fillna(0)
    )
    check_single(selected_rows, ["algorithm", "seed", "round", "client"])
    return selected_rows, notes + missing_notes(selected_rows, "algorithm")


_STEPS = {
    "naive": ("scalars × batches", "naive count"),
    "flops": ("FLOP", "forward and backward"),
    "moved": ("byte", "sent, down and up"),
}


def cost_steps(
    table: pd.DataFrame, axes: Figure | Sequence[Axes] | None = None
) -> list[Axes]:
    """Draw the cost of a round for all clients, over the rounds: three panels, a line a run.

    The panels are naive count, FLOPs and bytes. The layer-scheduling paper's Fig. 7 shows the first (Jang and Choi
    2024). Next to each name stands the sum over the rounds relative to the first run's.

    Args:
        table: from :func:`fl_core.run.costs.cost_steps`.
        axes: a figure to fill, or at least three Axes. Default: a new figure.

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
    ) as grid:
        for (kind, (label, title)), panel in zip(_STEPS.items(), grid, strict=True):
            values = table.pivot(index="round", columns="run", values=kind)[runs]
            total = values.sum()
            for k, run in enumerate(runs):
                cost = values[run].dropna()
                edges = np.append(
                    cost.index.to_numpy(dtype=np.float64) - 0.5, cost.index[-1] + 0.5
                )
                share = run
                if total[runs[0]]:
                    share = f"{run}  {total[run] / total[runs[0]]:.2f}"
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
        return [panel.ax for panel in grid]
