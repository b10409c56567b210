"""The tables that commands print: one line or column per client, or the lowest, median and highest of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from fedlayers.run_result import final_rows
from fl_core.display import MANY, in_order, printable
from fl_core.errors import listing
from fl_core.rows import (
    OF_CLASS,
    SCORES,
    client_mean,
    left_out,
    positive_in,
    without_score,
)

if TYPE_CHECKING:
    from diagnostics.report import Report

_NOTHING = "–"
"""What stands for a missing value."""


def scores(
    frame: pd.DataFrame, round: int, best: Mapping[str, int] | None = None
) -> str:
    """Format the test scores after a round: for each model a line per client, and one for their weighted mean.

    Beyond eight clients it shows the lowest, the median and the highest of each score. The mean is weighted by training
    samples.

    Args:
        frame: the rows of a run.
        best: the best round of each model under a stopping rule, in place of ``round``.
    """
    last = final_rows(frame, round, best)
    title = f"test split, round {round}"
    if best:
        rounds = listing(f"{model} {at}" for model, at in best.items())
        title = f"test split, best round on validation ({rounds})"
    if last.empty:
        return f"{title}: no scores"
    lacking, count = without_score(last), last["client"].nunique()
    condensed = count > MANY
    parts = {}
    for model, rows in last.groupby("model"):
        table = rows.pivot_table(index="client", columns="metric", values="value")
        table = table.reindex(in_order(table.index))
        each = rows.groupby("metric")
        mean = pd.Series({name: client_mean(own, lacking) for name, own in each})
        if condensed:
            table = table.quantile([0.0, 0.5, 1.0])
            table.index = ["lowest", "median", "highest"]
        if len(table) > 1:
            table.loc[f"all {rows['client'].nunique()}"] = mean
        parts[model] = table
    shown = pd.concat(parts, names=["model", "client"]).rename(index=printable)
    positive = positive_in(last)
    of_class = [name for name in OF_CLASS if name in shown]
    if positive and of_class:
        title += f"; {listing(of_class)} of class {printable(positive)!r}"
    if count > 1:
        title += "; all: their mean, weighted by training samples"
    title = "\n".join([title, *left_out(last[lacking & last["metric"].isin(SCORES)])])
    return f"{title}\n{shown.round(4).to_string()}"


def measurements(report: Report, variants: Sequence[tuple[str, str]]) -> str:
    """Format measured values: the clients' own, or their medians for many clients or more than two metrics.

    Args:
        variants: metrics, each with a variant.
    """
    clients = report.frame["client"].replace("", None).nunique()
    if len(variants) > 2 or clients > MANY:
        return _medians(report, variants)
    from diagnostics.metrics.base import metric_or_placeholder

    blocks = []
    for metric, variant in variants:
        about = ", ".join(filter(None, [metric, variant]))
        if direction := metric_or_placeholder(metric).direction:
            about += f" ({direction})"
        own = _rows_of(report, metric, variant)
        if split := " and ".join(filter(None, own["split"].unique())):
            about += f", {split} split"
        if own["client"].any():
            table = report.values(metric, variant)
            table = _text(table[in_order(table.columns)].rename(columns=printable))
        else:
            table = f"no value: {listing(own['status'].unique())}"
        blocks.append(f"{about}\n{table}")
    return "\n\n".join(blocks)


def _medians(report: Report, variants: Sequence[tuple[str, str]]) -> str:
    """Format the medians over clients, layers by metrics: the first metrics that fit, and a legend."""
    there = [each for each in variants if _rows_of(report, *each)["client"].any()]
    columns = {each: report.values(*each).median(axis=1) for each in there[:MANY]}
    names = [layer.name for layer in report.layers]
    table = pd.DataFrame(columns)
    table = table.reindex([name for name in names if name in table.index])
    notes = ["medians over the clients (fedlayers plot shows each client)"]
    if absent := [
        metric for metric, variant in variants if (metric, variant) not in columns
    ]:
        notes.append(f"not shown: {listing(dict.fromkeys(absent))}")
    return f"{_text(table)}\n\n{'; '.join(notes)}"


def _text(table: pd.DataFrame) -> str:
    return str(table.to_string(float_format="{:.4g}".format, na_rep=_NOTHING))


def _rows_of(report: Report, metric: str, variant: str) -> pd.DataFrame:
    frame = report.frame
    return frame[(frame["metric"] == metric) & (frame["variant"] == variant)]
