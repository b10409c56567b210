"""Measure every layer metric on the benchmark's federations, let every rule name layers, and store what they lose.

Each federation trains FedAvg for 1, 5 and 20 rounds, as ``fl.regret`` does. All layer metrics are measured once, and
each rule reads each of them. ``rules.parquet`` has a row for each plan, with the processor time of its measurement.
``diagnostics/benchmark.csv`` has the mean points lost of each line in each federation, over its seeds. A line is a
metric, a rule and a number of rounds. Measurements that exist are not made again: ``python -m figures.decision.rules``.

The rule ``above_null`` has no line, because it needs a second measurement on dealt samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
import tyro
from scipy import stats

import fedlayers as fl
from diagnostics.metrics.base import METRICS
from diagnostics.regret import (
    BENCHMARK,
    BENCHMARK_SEEDS,
    LEAST_SOURCES,
    LINE,
    PUBLIC,
    federations,
    known_seeds,
    line_of,
    mean_lost,
    ranked_lines,
    read_benchmark,
    read_truth,
    source_of,
    truth_of,
)
from diagnostics.report import Report
from fedlayers.rule_benchmark import measured_run
from figures.page import markdown, numbers
from fl_core.display import csv_bytes
from fl_core.errors import RunError, UsageError, listing, plural
from fl_core.progress import say
from fl_core.statistics import holm, mean_interval

ROWS = Path(__file__).with_name("rules.parquet")
ROUNDS = 1, 5, 20
RULES: dict[str, dict[str, Any]] = {
    "sensitivity_ratio": {},
    "largest_rise": {},
    "top": {},
    "top k=2": {"k": 2},
}
"""The rules of the lines, with what they are given."""
NO_LAYERS = ("clients_differ", "output_disagreement")
"""Metrics of the whole network."""


def measured(federation: str, seed: int, rounds: int) -> Iterator[tuple[str, Report]]:
    """Yield the layer metrics with a report that has them. Those of the shared model have a report of their own."""
    metrics = [name for name in METRICS if name not in NO_LAYERS]
    with TemporaryDirectory() as folder:
        result = measured_run(federation, seed, rounds, folder)
        for shared in (False, True):
            read = [name for name in metrics if METRICS[name].shared == shared]
            report = fl.diagnose(result, metrics=read, progress=False)
            yield from ((name, report) for name in read)


def plans(federation: str, seed: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each metric and rule: the plan and what it loses, or why there is none."""
    truth = truth_of(federation, seed)
    assert truth is not None  # by known_seeds
    for metric, report in measured(federation, seed, rounds):
        for name, options in RULES.items():
            row = {"metric": metric, "rule": name, "rounds": rounds, "seed": seed}
            row |= {"federation": federation, "shared": "", "lost": math.nan, "why": ""}
            try:
                plan = fl.select(report, name.split()[0], metric=metric, **options)
                line = line_of(truth, plan.shared)
                row |= {"shared": line["shared"], "lost": line["rule"]}
            except (RunError, UsageError) as error:
                row["why"] = str(error)
            yield row


def lines(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean points lost of each line, a column a federation; NaN where a seed has no plan.

    ``plans`` counts the different plans in federations with a known answer, of the source with the most of them: those
    of one source train the same network. The constants have 0 rounds.
    """
    table = rows.pivot_table(
        index=[*LINE],
        columns="federation",
        values="lost",
        aggfunc=lambda lost: lost.mean(skipna=False),
        dropna=False,
        sort=False,
    )
    source = rows["federation"].map(source_of)
    public = rows[source.isin(["digits", "fashion"]) & (rows["why"] == "")]
    plans = public.groupby([*LINE, source])["shared"].nunique().groupby([*LINE]).max()
    table.insert(0, "plans", plans.reindex(table.index).fillna(0).astype(int))
    seeds = rows.groupby("federation")["seed"].unique()
    constants = []
    for constant in ("fedavg", "head_local", "random"):
        line: dict[str, Any] = {"metric": "", "rule": constant, "rounds": 0, "plans": 1}
        for name in table.columns[1:]:
            truths = [truth_of(name, int(seed)) for seed in seeds[name]]
            line[name] = np.mean([getattr(truth, constant) for truth in truths])
        constants.append(line)
    table = table.dropna(how="all", subset=table.columns[1:]).reset_index()
    return pd.concat([pd.DataFrame(constants), table], ignore_index=True)


# --- the page -------------------------------------------------------------------------------------------------------

BEST = 5
"""Lines of the public half that the held-out half judges."""


def judged() -> pd.DataFrame:
    """Return the best lines of the public half, held against a local head in the held-out half.

    Returns:
        A row for each line: mean points lost by half, the gain over a local head with its 95 % interval over
        federations (Student's t), the p-value corrected for the number of lines (Holm), federations and sources.
    """
    judged_lines = []
    for line in ranked_lines()[:BEST]:
        held_out = [name for name in line.lost if name not in PUBLIC]
        gains = [line.head_local[name] - line.lost[name] for name in held_out]
        test = stats.ttest_1samp(gains, 0)
        by_source = pd.Series(gains).groupby([*map(source_of, held_out)]).mean()
        sources = plural(len(by_source), "source")
        source_interval = f"none: {sources}"
        if len(by_source) >= LEAST_SOURCES:
            careful = mean_interval(by_source)
            source_interval = (
                f"{careful.value:+.2f} [{careful.low:+.2f}, {careful.high:+.2f}]"
            )
        is_same = not any(gains)  # the line names the head everywhere
        judged_lines.append(
            {
                "line": line.name,
                "public": mean_lost(line.lost, "public"),
                "held out": mean_lost(line.lost, "held out"),
                "head_local, held out": mean_lost(line.head_local, "held out"),
                "gain": float(np.mean(gains)),
                "low": test.confidence_interval().low,
                "high": test.confidence_interval().high,
                "p": 1.0 if is_same else test.pvalue,
                "federations": len(held_out),
                "sources": len(by_source),
                "by source": source_interval,
            }
        )
    table = pd.DataFrame(judged_lines)
    return table.assign(p=holm(table["p"]))


def judged_table() -> str:
    """Return the judgement as a table of a page."""
    table = judged()
    gains = zip(table["gain"], table["low"], table["high"], strict=True)
    shown = table[["line", "public", "held out", "head_local, held out"]].round(2)
    shown["better than a local head"] = [
        f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]" for gain, low, high in gains
    ]
    shown["p (Holm)"] = numbers(table["p"])
    shown["federations"] = table["federations"]
    shown["by source"] = table["by source"]
    return markdown(shown)


def answer() -> str:
    """Return the page's first sentence: whether a line beats a local head."""
    table = judged()
    better = table[(table["p"] < 0.05) & (table["gain"] > 0)]
    if better.empty:
        return "No diagnostic with a rule is shown to name layers better than always keeping the head local."
    return f"{listing(better['line'])} named layers better than always keeping the head local."


def table() -> str:
    """Return the constants and all lines as a table, the best on the public half first.

    Lines without a plan somewhere come last.
    """
    stored = read_benchmark()
    names = [name for name in stored.columns if name not in (*LINE, "plans")]
    rows_of = []
    for row in stored.to_dict("records"):
        lost = {name: row[name] for name in names if not math.isnan(row[name])}
        what = f"{row['rule']} of {row['metric']}", row["rounds"]
        if not row["metric"]:
            what = f"**always {row['rule']}**", "–"
            if row["rule"] == "random":
                what = "**a random plan**", "–"
        means = [mean_lost(lost, part) for part in ("public", "held out")]
        rows_of.append((*what, *means, len(lost), row["plans"]))
    columns = [
        "rule and metric",
        "rounds",
        "public",
        "held out",
        "federations",
        "plans",
    ]
    lines = pd.DataFrame(rows_of, columns=columns)
    lines["part"] = lines["federations"] < len(names)
    lines = lines.sort_values(["part", "public"], kind="stable").drop(columns="part")
    for half in ("public", "held out"):
        lines[half] = numbers(lines[half])
    return markdown(lines)


def ledger() -> str:
    """Return the rows, and the core-hours of the measurements and of the stored truth."""
    rows, truth = pd.read_parquet(ROWS), read_truth()
    hours = [part["seconds"].sum() / 3600 for part in (rows, truth)]
    return (
        f"{len(rows)} plans of measurements, {hours[0]:.2f} core-hours. "
        f"{len(truth)} trained plans, {hours[1]:.2f} core-hours.\n"
    )


def wanted() -> Iterator[tuple[str, int, int]]:
    """Yield the federation, seed and rounds of each measurement: the first seed of all federations, then the next."""
    for place in range(BENCHMARK_SEEDS):
        for name in federations():
            for seed in known_seeds(name)[place : place + 1]:
                for rounds in ROUNDS:
                    yield name, seed, rounds


def main(federation: str = "") -> None:
    """Measure what has no rows.

    Args:
        federation: how the names of the federations begin that are measured.
    """
    torch.set_num_threads(1)
    rows = pd.read_parquet(ROWS) if ROWS.exists() else pd.DataFrame()
    done = set()
    if len(rows):
        done = {*zip(rows["federation"], rows["seed"], rows["rounds"], strict=True)}
    for name, seed, rounds in wanted():
        if (name, seed, rounds) in done or not name.startswith(federation):
            continue
        began = time.process_time()
        new_rows = pd.DataFrame(plans(name, seed, rounds))
        seconds = time.process_time() - began
        new_rows["seconds"] = seconds / len(new_rows)
        rows = pd.concat([rows, new_rows], ignore_index=True)
        part = ROWS.with_suffix(".part")
        rows.to_parquet(part, index=False, compression="brotli")
        part.replace(ROWS)
        say(f"{name} seed {seed} after {rounds}: {seconds:.0f} s")
    BENCHMARK.write_bytes(csv_bytes(lines(rows).round(3)))


if __name__ == "__main__":
    tyro.cli(main)
