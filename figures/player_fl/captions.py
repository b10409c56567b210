"""The texts of PLayer-FL's tables: captions, the page's table and tests, findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from figures.differences import LEAST_SEEDS, Difference, difference, joint
from figures.items import Finding
from figures.page import markdown, missing_runs, numbers, span
from figures.player_fl.runs import (
    ABSENT,
    BESIDE,
    BY_METHOD,
    CASES,
    LAST,
    METHODS,
    STAND_IN,
    incomparable,
    network,
    tuned_alike,
)
from figures.player_fl.scores import (
    CONTROL,
    DEFAULT,
    INCENTIVE,
    SCORE,
    Cells,
    Table,
    clients,
    friedman_printed,
)
from figures.ranking import ALPHA, Ranking, first_shares
from figures.verdicts import LEAD, RANGE_BELOW, TRAIL, Odds, judged, of_parts, verdict
from fl_core.errors import listing

NAMES = METHODS | BESIDE
SURE = 0.975
"""Share of resampled seeds in which a method must be first to be called so, as for a two-sided test at 5 %."""

# --- words -----------------------------------------------------------------------------------------------------


def sizes(header: Mapping[str, Any], frame: pd.DataFrame) -> str:
    """Describe clients, training samples, rounds, widths and seeds of every dataset."""
    sentences = []
    for dataset, case in CASES.items():
        runs = [
            run
            for run in header["runs"]
            if run.startswith(f"{dataset}.") and header["had"][run]
        ]
        client_rows = frame[(frame["run"].isin(runs)) & (frame["client"] != "")]
        if client_rows.empty:
            continue
        config = header["runs"][runs[0]]["config"]
        sample_counts = client_rows.groupby("client")["n_train"].median()
        seeds_text = span([len(header["had"][run]) for run in runs])
        network_text = network(config)
        sentences.append(
            f"{case.title[0].upper()}{case.title[1:]}: {len(sample_counts)} clients × "
            f"{sample_counts.min():.0f}-{sample_counts.max():.0f} "
            f"training samples and {seeds_text} seeds. They train {network_text} in {config['rounds']} rounds "
            f"with batch {config['batch_size']}."
        )
    return " ".join(sentences)


def placeholder_client(datasets: Sequence[str]) -> str:
    texts = [
        f"{STAND_IN[dataset]}'s next to {CASES[dataset].title}"
        for dataset in datasets
        if dataset in STAND_IN
    ]
    if not texts:
        return ""
    joined_text = ", ".join(texts)
    return f" ({joined_text})"


def missing(header: Mapping[str, Any]) -> str:
    absent_text, runs_text = " and ".join(ABSENT.values()), missing_runs(header)
    return f"{absent_text} are not available.{runs_text}"


def page(
    header: Mapping[str, Any],
    table: Table,
    default_cells: Cells,
    released_cells: Cells,
    frame: pd.DataFrame,
) -> str:
    """Return the page's table, with the paper's values in brackets, and the results of the tests."""
    sections = [
        cells_beside(table, default_cells, released_cells),
        IN_BRACKETS,
        *_random(frame),
    ]
    return "\n\n".join(
        [
            *sections,
            TESTED,
            tests(table, default_cells, released_cells),
            *remarks(header),
        ]
    )


RATES = "Learning rates with the best macro-F1 on validation. The number of rates tried is the same for every method:"
IN_BRACKETS = "Cells are medians over seeds. The paper's values are in brackets."
TESTED = (
    "Friedman's test of the methods has datasets as blocks. The released code has it the other way round and so tests "
    "whether the datasets differ."
)


def cells_beside(table: Table, default_cells: Cells, released_cells: Cells) -> str:
    """Return the measured cells and mean ranks, methods x datasets, with the paper's in brackets."""
    digits = 1 if table.factor == 100 else None
    datasets = list(default_cells.ranking.values.columns)
    methods = (*table.methods, *BESIDE)
    columns: dict[str, list[str]] = {"method": [NAMES[method] for method in methods]}
    published_table, published_ranks = table.printed(), table.printed_ranks()
    for dataset in datasets:
        medians = default_cells.cells.loc[dataset]["value"].reindex(list(methods))
        published_scores = published_table[CASES[dataset].printed]
        measured_texts = [number(score, digits) for score in medians]
        published_texts = [
            number(score, digits) for score in published_scores.reindex(list(methods))
        ]
        columns[CASES[dataset].title] = in_brackets(measured_texts, published_texts)
    for title, reading_cells in (
        ("mean rank", default_cells),
        ("released mean rank", released_cells),
    ):
        measured_ranks = reading_cells.ranking.ranks.reindex(list(methods))
        columns[title] = [number(rank, 1) for rank in measured_ranks]
    published_texts = [
        number(rank, 1) for rank in published_ranks.reindex(list(methods))
    ]
    columns["mean rank"] = in_brackets(columns["mean rank"], published_texts)
    return markdown(columns)


def in_brackets(cells: Iterable[str], published: Iterable[str]) -> list[str]:
    """Return cells, each with its published value in brackets where there is one."""
    bracketed_texts = []
    for cell, published_text in zip(cells, published, strict=True):
        text = cell
        if published_text != "–":
            text += f" ({published_text})"
        bracketed_texts.append(text)
    return bracketed_texts


def tests(table: Table, default_cells: Cells, released_cells: Cells) -> str:
    """Return a table of Friedman's test of the methods and of the datasets, here and of the printed cells."""
    printed_ranking = table.printed_ranking()
    return markdown(
        {
            "treatments": ["methods", "datasets (released code)"],
            "here": [default_cells.ranking.says, _p(released_cells.ranking.transposed)],
            "printed cells": [printed_ranking.says, _p(printed_ranking.transposed)],
            "printed p": [friedman_printed(table) or "–", "–"],
        }
    )


def remarks(header: Mapping[str, Any]) -> list[str]:
    """Return paragraphs on datasets that are not comparable, and on learning rates."""
    case_remarks = [
        f"{CASES[dataset].title} is not comparable: {reason}."
        for dataset, reason in incomparable(header).items()
    ]
    return [*case_remarks, *rates(header)]


def rates(header: Mapping[str, Any]) -> list[str]:
    """Return a paragraph on the learning rates: those of methods that were tuned alike, or one rate by method."""
    return [_tuned(header) if tuned_alike(header) else BY_METHOD]


def _tuned(header: Mapping[str, Any]) -> str:
    """Return a table of the learning rates that tuning chose, methods x datasets."""
    methods = list(dict.fromkeys(run.partition(".")[2] for run in header["runs"]))
    columns = {"method": [NAMES[method] for method in methods]}
    for dataset, case in CASES.items():
        run_records = {
            method: header["runs"].get(f"{dataset}.{method}") for method in methods
        }
        if any(run_records.values()):
            method_rates = [
                record["config"]["lr"] if record else None
                for record in run_records.values()
            ]
            columns[case.title] = numbers(method_rates, "g")
    return "\n\n".join([RATES, markdown(columns)])


def spreads(result: Cells) -> str:
    """Describe the ends of the medians' intervals, by the number of seeds."""
    has_few = result.cells["n"] < RANGE_BELOW
    if has_few.all():
        return "the range of the seeds"
    if not has_few.any():
        return "its 95 % interval"
    datasets = result.cells.index[~has_few].get_level_values("dataset").unique()
    large_titles = ", ".join(CASES[str(dataset)].title for dataset in datasets)
    return f"the range of the seeds (for {large_titles} its 95 % interval)"


def _p(test: Any) -> str:
    if test.status == "ok":
        return f"p = {test.p_value:.2g}"
    return test.status


def number(value: float, digits: int | None) -> str:
    """Return a number with these digits after the point, or with two in all; a dash for none."""
    if not math.isfinite(value):
        return "–"
    if digits is None:
        return f"{value:.2g}"
    return f"{value:.{digits}f}"


def _random(frame: pd.DataFrame) -> list[str]:
    """Return paragraphs on the layers that PLayer-FL shared and on the paper's row Random."""
    plan_rows = frame[frame["metric"] == LAST]
    plan_rows = plan_rows[plan_rows["run"].str.endswith(f".{CONTROL}")]
    columns: dict[str, list[str]] = {"dataset": [], "last shared layer": []}
    for run, run_plans in plan_rows.groupby("run", sort=False):
        columns["dataset"].append(CASES[str(run).partition(".")[0]].title)
        layer_counts = run_plans["layer"].value_counts()
        columns["last shared layer"].append(
            ", ".join(
                f"{layer} in {seed_count}" for layer, seed_count in layer_counts.items()
            )
        )
    paragraphs = []
    if columns["dataset"]:
        paragraphs = [
            f"The last layer that {NAMES[CONTROL]}'s rule shares, with the number of seeds:",
            markdown(columns),
        ]
    return [
        *paragraphs,
        f"{NAMES['playerfl_random']} draws a prefix for each seed. By its development code, the paper's row of that "
        f"name has {NAMES['playerfl_minus']}. The reading `released` does the same.",
    ]


# --- findings --------------------------------------------------------------------------------------------------


def order(
    table: Table, result: Cells, reasons: Mapping[str, str] | None = None
) -> tuple[Finding, ...]:
    """Return findings on whether the table's best method is the best here and, for scores, its lead over baselines.

    A mean rank is claimed of a list of data sets and not of all that there are, so seeds are resampled. Where the
    printed cells of our data sets have another method first, they cannot test the claim.

    Args:
        reasons: datasets that are not comparable with the paper's, each with the reason (:func:`.runs.incomparable`).
    """
    reasons = reasons or {}
    ranks, best_method = result.ranking.ranks, str(table.printed_ranks().idxmin())
    text, holds, remark = "no dataset has all methods", None, _mixed(result, reasons)
    if ranks.notna().all():
        first_method = str(ranks.idxmin())
        text = f"{NAMES[best_method]} {ranks[best_method]:.1f}, which is the least"
        if first_method != best_method:
            text = (
                f"{NAMES[best_method]} {ranks[best_method]:.1f} and {NAMES[first_method]} the least "
                f"with {ranks[first_method]:.1f}"
            )
        published_names = [
            CASES[str(method)].printed for method in result.ranking.blocks.columns
        ]
        published_ranks = Ranking(
            table.printed()[published_names], table.higher_is_better
        ).ranks
        datasets = map(str, result.ranking.blocks.columns)
        narrow_titles = [CASES[method].title for method in datasets if narrower(method)]
        if 2 * len(narrow_titles) > len(published_names) and not remark:
            remark = f"the networks of {listing(narrow_titles)} have a part of the paper's channels"
        if published_ranks[best_method] > published_ranks.min() and not remark:
            remark = f"on these data sets the paper's cells have {NAMES[str(published_ranks.idxmin())]} first"
        if not result.enough:
            text += f". Some runs have fewer than {LEAST_SEEDS} seeds: no order"
        else:
            first_place_shares = first_shares(result.each, result.ranking)
            named_methods = dict.fromkeys(
                [best_method, str(first_place_shares.idxmax())]
            )
            text += ". In resampled seeds " + " and ".join(
                f"{NAMES[method]} is first in {first_place_shares[method]:.0%}"
                for method in named_methods
            )
            holds = verdict(
                first_place_shares[best_method] > SURE,
                first_place_shares[best_method] < 1 - SURE,
            )
    kind_text = ""
    if table.kind != SCORE:
        kind_text = f" of {table.kind}"
    expected = (
        f"{NAMES[best_method]} has the best mean rank{kind_text}, as in {table.place} "
        f"({table.printed_ranks().min():.1f})"
    )
    findings = [Finding(expected, text, holds, remark)]
    if table.kind == SCORE:
        baselines = ["local", "fedavg"]
        if table.metric == "macro_f1":
            baselines.append("playerfl_random")
        findings += [_above(table, result, baseline, reasons) for baseline in baselines]
    return tuple(findings)


def narrower(dataset: str) -> bool:
    """Return whether a dataset's network has fewer channels than the paper's."""
    return float(CASES[dataset].sizes.get("model_options", {}).get("width", 1)) < 1


def _mixed(result: Cells, reasons: Mapping[str, str]) -> str:
    """Return the reason why ranks over datasets are not comparable, or an empty text."""
    ranked_datasets = list(result.ranking.blocks.columns)
    incomparable_count = sum(dataset in reasons for dataset in ranked_datasets)
    if incomparable_count > len(ranked_datasets) / 2:
        return f"{incomparable_count} of the {len(ranked_datasets)} datasets are not"
    return ""


def _above(
    table: Table, result: Cells, baseline: str, reasons: Mapping[str, str]
) -> Finding:
    """Return a finding on PLayer-FL against a baseline, dataset by dataset, paired by seed.

    Datasets that are not comparable (the keys of ``reasons``) decide nothing. Nor do printed ties: differences within
    their ±.
    """
    published_scores, published_spreads = table.printed(), table.printed("spread")
    texts: list[str] = []
    odds: list[Odds] = []
    for dataset in result.ranking.values.columns:
        scores_by_method = result.each[result.each["dataset"] == dataset].pivot(
            index="method", columns="seed", values="value"
        )
        if not {CONTROL, baseline} <= set(scores_by_method.index):
            continue
        gap = difference(scores_by_method, CONTROL, baseline)
        published_name = CASES[dataset].printed
        published_gap = (
            published_scores.loc[CONTROL, published_name]
            - published_scores.loc[baseline, published_name]
        )
        is_tie = abs(published_gap) < math.hypot(
            published_spreads.loc[CONTROL, published_name],
            published_spreads.loc[baseline, published_name],
        )
        low, high = gap.interval.low, gap.interval.high
        measured_text = f"{CASES[dataset].title} {gap.interval.value:+.1f}"
        if not math.isnan(low):
            measured_text += f" ± {(high - low) / 2:.1f}"
        note = ""
        if dataset in reasons:
            note = ", not comparable"
        elif is_tie:
            note = ", a tie"
        texts.append(f"{measured_text} (paper {published_gap:+.1f}{note})")
        if not note:
            odds.append((LEAD if published_gap > 0 else TRAIL).odds(gap))
    verdicts = of_parts(odds)
    agree_count, differ_count, undecided_count = (
        verdicts.count(side_verdict) for side_verdict in (True, False, None)
    )
    counts_text = f"As printed {agree_count}, the other way {differ_count} and undecided {undecided_count}"
    if len(verdicts) > 1:
        counts_text += f" ({len(verdicts)} parts)"
    expected = f"{NAMES[CONTROL]} lies on the same side of {NAMES[baseline]} as in {table.place}"
    if not table.higher_is_better:
        expected += " (less is better)"
    parts_text = "; ".join(texts) or "no runs"
    return Finding(expected, f"{parts_text}. {counts_text}", joint(verdicts))


def evenness(frame: pd.DataFrame, reasons: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return findings on PLayer-FL's gains over Local, client by client, against the other methods that federate.

    Each is judged dataset by dataset, paired by seed, against the mean of the other methods. The paper prints the
    clients above both baselines (Table A.6). Where they are no more than with the others, its own numbers do not claim
    that fewer lose.

    Args:
        reasons: datasets that are not comparable with the paper's, each with the reason; they decide nothing.
    """
    client_scores = clients(frame, DEFAULT)
    client_scores = client_scores[
        (client_scores["metric"] == "macro_f1")
        & ~client_scores["dataset"].isin(list(reasons))
    ]
    spread_gaps: dict[str, Difference] = {}
    loser_gaps: dict[str, Difference] = {}
    published_shares = Table("Table A.6", INCENTIVE, "macro_f1").printed()
    for dataset, dataset_scores in client_scores.groupby("dataset", sort=False):
        case = CASES[str(dataset)]
        scores_by_method = dataset_scores.pivot(
            index=["seed", "client"], columns="method", values="value"
        )
        other_methods = [
            method
            for method in METHODS
            if method not in (CONTROL, "local") and method in scores_by_method
        ]
        if not {CONTROL, "local"} <= set(scores_by_method.columns) or not other_methods:
            continue
        gains = scores_by_method.sub(scores_by_method["local"], axis=0).groupby(
            level="seed"
        )
        loser_shares = (
            (scores_by_method.lt(scores_by_method["local"], axis=0))
            .groupby(level="seed")
            .mean()
        )
        for gaps, values_by_seed in (
            (spread_gaps, gains.std(ddof=0)),
            (loser_gaps, loser_shares),
        ):
            methods_by_seed = pd.DataFrame(
                {
                    CONTROL: values_by_seed[CONTROL],
                    "others": values_by_seed[other_methods].mean(axis=1),
                }
            ).T
            gaps[case.title] = difference(methods_by_seed, CONTROL, "others")
        published_gap = published_shares[case.printed].drop(CONTROL).mean()
        published_gap -= published_shares.loc[CONTROL, case.printed]
        loser_gaps[case.title] = replace(
            loser_gaps[case.title], printed=published_gap / 100
        )
    is_even, fewer_losers = judged(spread_gaps, TRAIL), judged(loser_gaps, TRAIL)
    return (
        is_even.finding(
            f"{NAMES[CONTROL]}'s gains over Local are spread more evenly over clients than the other methods'",
            "standard deviation over clients minus the others' in points: ",
        ),
        fewer_losers.finding(
            f"with {NAMES[CONTROL]} fewer clients lose against Local than with the other methods",
            "share of clients minus the others' in points: ",
        ),
    )


def methods_differ(
    table: Table, result: Cells, reasons: Mapping[str, str] | None = None
) -> Finding:
    """Return a finding on Friedman's test of the methods; ``reasons`` as for :func:`order`."""
    test, printed_p = result.ranking.friedman, friedman_printed(table)
    expected = f"the methods differ by Friedman's test at {ALPHA:g}"
    if printed_p:
        expected += f" ({table.place} prints p {printed_p})"
    is_significant = test.status == "ok" and result.enough and test.p_value < ALPHA
    return Finding(
        expected,
        result.ranking.says,
        True if is_significant else None,
        _mixed(result, reasons or {}),
    )


def printed_ranks(table: Table) -> Finding:
    """Return a finding on whether the printed ranks follow from the printed (rounded) cells."""
    printed_ranking = table.printed_ranking()
    gaps = (printed_ranking.ranks - table.printed_ranks()).abs()
    return Finding(
        f"the mean ranks of {table.place} follow from its cells to within 0.7",
        f"the largest gap is {gaps.max():.1f} at {NAMES[str(gaps.idxmax())]}. Friedman's test of the cells gives "
        f"{printed_ranking.says}",
        bool(gaps.max() <= 0.7 + 1e-9),
    )
