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
    layer_metrics = [
        metric_name for metric_name in METRICS if metric_name not in NO_LAYERS
    ]
    with TemporaryDirectory() as folder:
        result = measured_run(federation, seed, rounds, folder)
        for is_shared in (False, True):
            read_metrics = [
                metric_name
                for metric_name in layer_metrics
                if METRICS[metric_name].shared == is_shared
            ]
            report = fl.diagnose(result, metrics=read_metrics, progress=False)
            yield from ((metric_name, report) for metric_name in read_metrics)


def plans(federation: str, seed: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each metric and rule: the plan and what it loses, or why there is none."""
    truth = truth_of(federation, seed)
    assert truth is not None  # by known_seeds
    for metric_name, report in measured(federation, seed, rounds):
        for rule_name, options in RULES.items():
            row = {
                "metric": metric_name,
                "rule": rule_name,
                "rounds": rounds,
                "seed": seed,
            }
            row |= {"federation": federation, "shared": "", "lost": math.nan, "why": ""}
            try:
                plan = fl.select(
                    report, rule_name.split()[0], metric=metric_name, **options
                )
                truth_line = line_of(truth, plan.shared)
                row |= {"shared": truth_line["shared"], "lost": truth_line["rule"]}
            except (RunError, UsageError) as error:
                row["why"] = str(error)
            yield row


def lines(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean points lost of each line, a column a federation; NaN where a seed has no plan.

    ``plans`` counts the different plans in federations with a known answer, of the source with the most of them: those
    of one source train the same network. The constants have 0 rounds.
    """
    lost_table = rows.pivot_table(
        index=[*LINE],
        columns="federation",
        values="lost",
        aggfunc=lambda lost: lost.mean(skipna=False),
        dropna=False,
        sort=False,
    )
    sources = rows["federation"].map(source_of)
    public_rows = rows[sources.isin(["digits", "fashion"]) & (rows["why"] == "")]
    plan_counts = (
        public_rows.groupby([*LINE, sources])["shared"].nunique().groupby([*LINE]).max()
    )
    lost_table.insert(
        0, "plans", plan_counts.reindex(lost_table.index).fillna(0).astype(int)
    )
    seeds = rows.groupby("federation")["seed"].unique()
    constant_rows = []
    for constant in ("fedavg", "head_local", "random"):
        constant_row: dict[str, Any] = {
            "metric": "",
            "rule": constant,
            "rounds": 0,
            "plans": 1,
        }
        for federation in lost_table.columns[1:]:
            truths = [truth_of(federation, int(seed)) for seed in seeds[federation]]
            constant_row[federation] = np.mean(
                [getattr(truth, constant) for truth in truths]
            )
        constant_rows.append(constant_row)
    lost_table = lost_table.dropna(
        how="all", subset=lost_table.columns[1:]
    ).reset_index()
    return pd.concat([pd.DataFrame(constant_rows), lost_table], ignore_index=True)


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
    for rule_line in ranked_lines()[:BEST]:
        held_out = [
            federation for federation in rule_line.lost if federation not in PUBLIC
        ]
        gains = [
            rule_line.head_local[federation] - rule_line.lost[federation]
            for federation in held_out
        ]
        test = stats.ttest_1samp(gains, 0)
        source_gains = pd.Series(gains).groupby([*map(source_of, held_out)]).mean()
        sources_text = plural(len(source_gains), "source")
        source_interval = f"none: {sources_text}"
        if len(source_gains) >= LEAST_SOURCES:
            interval = mean_interval(source_gains)
            source_interval = (
                f"{interval.value:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
            )
        is_same = not any(gains)  # the line names the head everywhere
        judged_lines.append(
            {
                "line": rule_line.name,
                "public": mean_lost(rule_line.lost, "public"),
                "held out": mean_lost(rule_line.lost, "held out"),
                "head_local, held out": mean_lost(rule_line.head_local, "held out"),
                "gain": float(np.mean(gains)),
                "low": test.confidence_interval().low,
                "high": test.confidence_interval().high,
                "p": 1.0 if is_same else test.pvalue,
                "federations": len(held_out),
                "sources": len(source_gains),
                "by source": source_interval,
            }
        )
    judged_table = pd.DataFrame(judged_lines)
    return judged_table.assign(p=holm(judged_table["p"]))


def judged_table() -> str:
    """Return the judgement as a table of a page."""
    judgement = judged()
    gains = zip(judgement["gain"], judgement["low"], judgement["high"], strict=True)
    shown_table = judgement[
        ["line", "public", "held out", "head_local, held out"]
    ].round(2)
    shown_table["better than a local head"] = [
        f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]" for gain, low, high in gains
    ]
    shown_table["p (Holm)"] = numbers(judgement["p"])
    shown_table["federations"] = judgement["federations"]
    shown_table["by source"] = judgement["by source"]
    return markdown(shown_table)


def answer() -> str:
    """Return the page's first sentence: whether a line beats a local head."""
    judgement = judged()
    better_lines = judgement[(judgement["p"] < 0.05) & (judgement["gain"] > 0)]
    if better_lines.empty:
        return "No diagnostic with a rule is shown to name layers better than always keeping the head local."
    return f"{listing(better_lines['line'])} named layers better than always keeping the head local."


def table() -> str:
    """Return the constants and all lines as a table, the best on the public half first.

    Lines without a plan somewhere come last.
    """
    benchmark = read_benchmark()
    federation_names = [
        federation
        for federation in benchmark.columns
        if federation not in (*LINE, "plans")
    ]
    table_rows = []
    for row in benchmark.to_dict("records"):
        lost_points = {
            federation: row[federation]
            for federation in federation_names
            if not math.isnan(row[federation])
        }
        row_names = f"{row['rule']} of {row['metric']}", row["rounds"]
        if not row["metric"]:
            row_names = f"**always {row['rule']}**", "–"
            if row["rule"] == "random":
                row_names = "**a random plan**", "–"
        means = [
            mean_lost(lost_points, split_half) for split_half in ("public", "held out")
        ]
        table_rows.append((*row_names, *means, len(lost_points), row["plans"]))
    columns = [
        "rule and metric",
        "rounds",
        "public",
        "held out",
        "federations",
        "plans",
    ]
    line_table = pd.DataFrame(table_rows, columns=columns)
    line_table["part"] = line_table["federations"] < len(federation_names)
    line_table = line_table.sort_values(["part", "public"], kind="stable").drop(
        columns="part"
    )
    for half_column in ("public", "held out"):
        line_table[half_column] = numbers(line_table[half_column])
    return markdown(line_table)


def ledger() -> str:
    """Return the rows, and the core-hours of the measurements and of the stored truth."""
    rows, truth = pd.read_parquet(ROWS), read_truth()
    hours = [frame["seconds"].sum() / 3600 for frame in (rows, truth)]
    return (
        f"{len(rows)} plans of measurements, {hours[0]:.2f} core-hours. "
        f"{len(truth)} trained plans, {hours[1]:.2f} core-hours.\n"
    )


def wanted() -> Iterator[tuple[str, int, int]]:
    """Yield the federation, seed and rounds of each measurement: the first seed of all federations, then the next."""
    for seed_index in range(BENCHMARK_SEEDS):
        for federation in federations():
            for seed in known_seeds(federation)[seed_index : seed_index + 1]:
                for rounds in ROUNDS:
                    yield federation, seed, rounds


def main(federation: str = "") -> None:
    """Measure what has no rows.

    Args:
        federation: how the names of the federations begin that are measured.
    """
    torch.set_num_threads(1)
    rows = pd.read_parquet(ROWS) if ROWS.exists() else pd.DataFrame()
    done_keys = set()
    if len(rows):
        done_keys = {
            *zip(rows["federation"], rows["seed"], rows["rounds"], strict=True)
        }
    for name, seed, rounds in wanted():
        if (name, seed, rounds) in done_keys or not name.startswith(federation):
            continue
        start = time.process_time()
        new_rows = pd.DataFrame(plans(name, seed, rounds))
        seconds = time.process_time() - start
        new_rows["seconds"] = seconds / len(new_rows)
        rows = pd.concat([rows, new_rows], ignore_index=True)
        part_file = ROWS.with_suffix(".part")
        rows.to_parquet(part_file, index=False, compression="brotli")
        part_file.replace(ROWS)
        say(f"{name} seed {seed} after {rounds}: {seconds:.0f} s")
    BENCHMARK.write_bytes(csv_bytes(lines(rows).round(3)))


if __name__ == "__main__":
    tyro.cli(main)
