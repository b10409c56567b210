"""The tables that commands print: one line or column per client, or the lowest, median and highest of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from fedlayers.run_result import final_rows
from fl_core.errors import listing
from fl_core.names import MANY, in_order, printable
from fl_core.scores import OF_CLASS, SCORES, main_score, positive_in

if TYPE_CHECKING:
    from diagnostics.report import Report

LINES = 25
"""The number of lines within which a command shows its result."""
_NOTHING = "–"
"""What stands for a missing value."""
_EDGE = 3
"""Lines of a table that are no values: the title and two lines of names."""


def scores(
    frame: pd.DataFrame,
    round: int,
    best: Mapping[str, int] | None = None,
    most: int = LINES,
) -> str:
    """Format the test scores after a round: for each model a line per client, and one for their weighted mean.

    Beyond eight clients, or ``most`` lines, three clients are shown: the lowest, the median and the highest. They are
    ordered by the main score, or else by the first available one. The mean is weighted by training samples.

    Args:
        frame: the rows of a run.
        best: the best round of each model under a stopping rule, in place of ``round``.
    """
    last = final_rows(frame, round, best)
    when = (
        f"best round on validation ({listing(f'{model} {at}' for model, at in best.items())})"
        if best
        else ""
    )
    title, positive = f"test split, {when or f'round {round}'}", positive_in(last)
    if last.empty:
        return f"{title}: no scores"
    weights = last.groupby("client")["n_train"].first().astype(float)
    parts, lines = (
        {},
        _EDGE + sum(part["client"].nunique() + 1 for _, part in last.groupby("model")),
    )
    for model, rows in last.groupby("model"):
        table = rows.pivot_table(index="client", columns="metric", values="value")
        table = table.reindex(in_order(table.index))
        by = next(
            (
                name
                for name in (main_score(table.columns), *SCORES, *table.columns)
                if name in table.columns
            ),
            "",
        )
        weight = weights[table.index] / weights[table.index].sum()
        everyone = (table.mul(weight, axis=0)).sum(skipna=False)
        if len(table) > (MANY if lines <= most else 3):
            title += (
                ""
                if "lowest" in title
                else f"; lowest, median and highest of the clients by {by}"
            )
            table = table.loc[_extremes(table[by])].rename(_labels(table[by]))
        if len(table) > 1:
            table.loc[f"all {len(weight)}"] = everyone
        parts[model] = table
    shown = pd.concat(parts, names=["model", "client"]).rename(index=printable)
    named = [name for name in OF_CLASS if positive and name in shown]
    title += f"; {listing(named)} of class {printable(positive)!r}" if named else ""
    mean = (
        "; all: their mean, weighted by training samples"
        if any(len(part) > 1 for part in parts.values())
        else ""
    )
    return f"{title}{mean}\n{shown.round(4).to_string()}"


def format_metric(report: Report, metric: str, variant: str) -> str:
    """Format the values of a metric: layers by clients, or each layer's lowest, median and highest of more than eight.

    The condensed table counts the clients that have a value if some lack one. If the metric has no values of clients,
    return the reason.
    """
    own = report.frame[
        (report.frame["metric"] == metric) & (report.frame["variant"] == variant)
    ]
    if not own["client"].any():
        return f"no value: {listing(own['status'].unique())}"
    table = report.values(metric, variant)
    table = table[in_order(table.columns)]
    if table.shape[1] > MANY:
        ranks = {layer: _ends(values.dropna()) for layer, values in table.iterrows()}
        columns = {
            "lowest": table.min(axis=1), "at": [low for low, _ in ranks.values()],
            "median": table.median(axis=1),
            "highest": table.max(axis=1), "at ": [high for _, high in ranks.values()],
            "mean": table.mean(axis=1),
        }  # fmt: skip
        if table.isna().any(axis=None):
            columns["clients"] = [
                f"{count} of {table.shape[1]}" for count in table.count(axis=1)
            ]
        condensed = pd.DataFrame(columns, index=table.index)
        return str(condensed.to_string(float_format="{:.4g}".format, na_rep=_NOTHING))
    return str(table.rename(columns=printable).to_string(float_format="{:.4g}".format))


def measurements(
    report: Report, variants: Sequence[tuple[str, str]], most: int = LINES
) -> str:
    """Format measured values: a table of clients for each metric if these fit, else the medians over clients.

    Args:
        variants: metrics, each with a variant.
        most: number of lines.
    """
    text = "\n\n".join(
        f"{_about(report, *each)}\n{format_metric(report, *each)}" for each in variants
    )
    return text if text.count("\n") < most else _medians(report, variants, most)


def _about(report: Report, metric: str, variant: str) -> str:
    from diagnostics.metrics.base import metric_or_placeholder

    direction = metric_or_placeholder(metric).direction
    about = ", ".join(filter(None, [metric, variant])) + (
        f" ({direction})" if direction else ""
    )
    return ", ".join(filter(None, [about, splits(report, metric, variant)]))


def _medians(report: Report, variants: Sequence[tuple[str, str]], most: int) -> str:
    """Format the medians over clients, layers by metrics: the first metrics and layers that fit, and a legend."""
    columns, lack = {}, ""
    for metric, variant in variants[:MANY]:
        own = report.frame[
            (report.frame["metric"] == metric) & (report.frame["variant"] == variant)
        ]
        if own["client"].any():
            values = report.values(metric, variant)
            columns[metric, variant] = values.median(axis=1)
            lack = " that have a value" if values.isna().any(axis=None) else lack
    layers = [layer.name for layer in report.layers]
    table = pd.DataFrame(columns).reindex(
        [name for name in layers if any(name in each for each in columns.values())]
    )
    room = max(1, most - _EDGE - 2)
    shown = table.head(room).to_string(float_format="{:.4g}".format, na_rep=_NOTHING)
    absent = [
        metric for metric, variant in variants if (metric, variant) not in columns
    ]
    notes = [
        f"medians over the clients{lack} (fedlayers plot, or --metrics with one name, shows each client)",
        f"{len(table) - room} more layers are in the rows" if len(table) > room else "",
        f"not shown: {listing(dict.fromkeys(absent))}" if absent else "",
    ]
    return "\n\n".join([shown, "; ".join(filter(None, notes))])


def splits(report: Report, metric: str, variant: str) -> str:
    """Return the measured samples of a metric, such as ``train split``; empty for weights alone."""
    rows = report.frame[
        (report.frame["metric"] == metric) & (report.frame["variant"] == variant)
    ]
    names = [name for name in rows["split"].unique() if name]
    return f"{' and '.join(names)} split" if names else ""


def _extremes(values: pd.Series) -> list[str]:
    """Return the names of the lowest, the median and the highest. A missing value counts as lowest."""
    order = list(values.sort_values(kind="stable", na_position="first").index)
    return [order[0], order[len(order) // 2], order[-1]]


def _ends(values: pd.Series) -> tuple[str, str]:
    """Return the names of the lowest and the highest; a dash if there are no values."""
    names = _extremes(values) if len(values) else [_NOTHING]
    return printable(names[0]), printable(names[-1])


def _labels(values: pd.Series) -> dict[str, str]:
    return {
        name: f"{rank}: {name}"
        for rank, name in zip(
            ("lowest", "median", "highest"), _extremes(values), strict=True
        )
    }
