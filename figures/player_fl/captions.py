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
    """Clients, training samples, rounds, widths and seeds of every dataset."""
    parts = []
    for dataset, case in CASES.items():
        runs = [
            name
            for name in header["runs"]
            if name.startswith(f"{dataset}.") and header["had"][name]
        ]
        rows = frame[(frame["run"].isin(runs)) & (frame["client"] != "")]
        if rows.empty:
            continue
        config = header["runs"][runs[0]]["config"]
        counts = rows.groupby("client")["n_train"].median()
        seeds = span([len(header["had"][name]) for name in runs])
        trained = network(config)
        parts.append(
            f"{case.title[0].upper()}{case.title[1:]}: {len(counts)} clients × {counts.min():.0f}-{counts.max():.0f} "
            f"training samples and {seeds} seeds. They train {trained} in {config['rounds']} rounds "
            f"with batch {config['batch_size']}."
        )
    return " ".join(parts)


def placeholder_client(shown: Sequence[str]) -> str:
    texts = [
        f"{STAND_IN[name]}'s next to {CASES[name].title}"
        for name in shown
        if name in STAND_IN
    ]
    if not texts:
        return ""
    listed = ", ".join(texts)
    return f" ({listed})"


def missing(header: Mapping[str, Any]) -> str:
    absent, runs = " and ".join(ABSENT.values()), missing_runs(header)
    return f"{absent} are not available.{runs}"


def page(
    header: Mapping[str, Any],
    table: Table,
    ours: Cells,
    code: Cells,
    frame: pd.DataFrame,
) -> str:
    """Return the page's table, with the paper's values in brackets, and the results of the tests."""
    text = [cells_beside(table, ours, code), IN_BRACKETS, *_random(frame)]
    return "\n\n".join([*text, TESTED, tests(table, ours, code), *remarks(header)])


RATES = "Learning rates with the best macro-F1 on validation. The number of rates tried is the same for every method:"
IN_BRACKETS = "Cells are medians over seeds. The paper's values are in brackets."
TESTED = (
    "Friedman's test of the methods has datasets as blocks. The released code has it the other way round and so tests "
    "whether the datasets differ."
)


def cells_beside(table: Table, ours: Cells, code: Cells) -> str:
    """Return the measured cells and mean ranks, methods x datasets, with the paper's in brackets."""
    digits = 1 if table.factor == 100 else None
    shown = list(ours.ranking.values.columns)
    methods = (*table.methods, *BESIDE)
    columns: dict[str, list[str]] = {"method": [NAMES[name] for name in methods]}
    printed, ranks = table.printed(), table.printed_ranks()
    for dataset in shown:
        medians = ours.cells.loc[dataset]["value"].reindex(list(methods))
        theirs = printed[CASES[dataset].printed]
        cells = [number(value, digits) for value in medians]
        brackets = [number(value, digits) for value in theirs.reindex(list(methods))]
        columns[CASES[dataset].title] = in_brackets(cells, brackets)
    for title, result in (("mean rank", ours), ("released mean rank", code)):
        measured = result.ranking.ranks.reindex(list(methods))
        columns[title] = [number(rank, 1) for rank in measured]
    brackets = [number(rank, 1) for rank in ranks.reindex(list(methods))]
    columns["mean rank"] = in_brackets(columns["mean rank"], brackets)
    return markdown(columns)


def in_brackets(cells: Iterable[str], published: Iterable[str]) -> list[str]:
    """Return cells, each with its published value in brackets where there is one."""
    texts = []
    for cell, value in zip(cells, published, strict=True):
        text = cell
        if value != "–":
            text += f" ({value})"
        texts.append(text)
    return texts


def tests(table: Table, ours: Cells, code: Cells) -> str:
    """Friedman's test of the methods and of the datasets, here and of the printed cells."""
    printed = table.printed_ranking()
    return markdown(
        {
            "treatments": ["methods", "datasets (released code)"],
            "here": [ours.ranking.says, _p(code.ranking.transposed)],
            "printed cells": [printed.says, _p(printed.transposed)],
            "printed p": [friedman_printed(table) or "–", "–"],
        }
    )


def remarks(header: Mapping[str, Any]) -> list[str]:
    """Paragraphs on datasets that are not comparable, and on learning rates."""
    remarks_on_cases = [
        f"{CASES[name].title} is not comparable: {why}."
        for name, why in incomparable(header).items()
    ]
    return [*remarks_on_cases, *rates(header)]


def rates(header: Mapping[str, Any]) -> list[str]:
    """Return a paragraph on the learning rates: those of methods that were tuned alike, or one rate by method."""
    return [_tuned(header) if tuned_alike(header) else BY_METHOD]


def _tuned(header: Mapping[str, Any]) -> str:
    """The learning rates that tuning chose, methods x datasets."""
    methods = list(dict.fromkeys(run.partition(".")[2] for run in header["runs"]))
    columns = {"method": [NAMES[name] for name in methods]}
    for dataset, case in CASES.items():
        abouts = {name: header["runs"].get(f"{dataset}.{name}") for name in methods}
        if any(abouts.values()):
            rates_of_methods = [
                about["config"]["lr"] if about else None for about in abouts.values()
            ]
            columns[case.title] = numbers(rates_of_methods, "g")
    return "\n\n".join([RATES, markdown(columns)])


def spreads(result: Cells) -> str:
    """Describe the ends of the medians' intervals, by the number of seeds."""
    has_few = result.cells["n"] < RANGE_BELOW
    if has_few.all():
        return "the range of the seeds"
    if not has_few.any():
        return "its 95 % interval"
    names = result.cells.index[~has_few].get_level_values("dataset").unique()
    large = ", ".join(CASES[str(name)].title for name in names)
    return f"the range of the seeds (for {large} its 95 % interval)"


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
    plans = frame[frame["metric"] == LAST]
    plans = plans[plans["run"].str.endswith(f".{CONTROL}")]
    columns: dict[str, list[str]] = {"dataset": [], "last shared layer": []}
    for run, part in plans.groupby("run", sort=False):
        columns["dataset"].append(CASES[str(run).partition(".")[0]].title)
        counts = part["layer"].value_counts()
        columns["last shared layer"].append(
            ", ".join(f"{layer} in {count}" for layer, count in counts.items())
        )
    shared = []
    if columns["dataset"]:
        shared = [
            f"The last layer that {NAMES[CONTROL]}'s rule shares, with the number of seeds:",
            markdown(columns),
        ]
    return [
        *shared,
        f"{NAMES['playerfl_random']} draws a prefix for each seed. By its development code, the paper's row of that "
        f"name has {NAMES['playerfl_minus']}. The reading `released` does the same.",
    ]


# --- findings --------------------------------------------------------------------------------------------------


def order(
    table: Table, result: Cells, cases: Mapping[str, str] | None = None
) -> tuple[Finding, ...]:
    """Findings on whether the table's best method is the best here and, for scores, how far off the baselines are.

    A mean rank is claimed of a list of data sets and not of all that there are, so seeds are resampled. Where the
    printed cells of our data sets have another method first, they cannot test the claim.

    Args:
        cases: datasets that are not comparable with the paper's, each with the reason (:func:`.runs.incomparable`).
    """
    cases = cases or {}
    ranks, best = result.ranking.ranks, str(table.printed_ranks().idxmin())
    text, holds, remark = "no dataset has all methods", None, _mixed(result, cases)
    if ranks.notna().all():
        first = str(ranks.idxmin())
        text = f"{NAMES[best]} {ranks[best]:.1f}, which is the least"
        if first != best:
            text = f"{NAMES[best]} {ranks[best]:.1f} and {NAMES[first]} the least with {ranks[first]:.1f}"
        shown = [CASES[str(name)].printed for name in result.ranking.blocks.columns]
        theirs = Ranking(table.printed()[shown], table.higher_is_better).ranks
        ours = map(str, result.ranking.blocks.columns)
        narrow = [CASES[name].title for name in ours if narrower(name)]
        if 2 * len(narrow) > len(shown) and not remark:
            remark = (
                f"the networks of {listing(narrow)} have a part of the paper's channels"
            )
        if theirs[best] > theirs.min() and not remark:
            remark = f"on these data sets the paper's cells have {NAMES[str(theirs.idxmin())]} first"
        if not result.enough:
            text += f". Some runs have fewer than {LEAST_SEEDS} seeds: no order"
        else:
            shares = first_shares(result.each, result.ranking)
            named = dict.fromkeys([best, str(shares.idxmax())])
            text += ". In resampled seeds " + " and ".join(
                f"{NAMES[name]} is first in {shares[name]:.0%}" for name in named
            )
            holds = verdict(shares[best] > SURE, shares[best] < 1 - SURE)
    what = ""
    if table.kind != SCORE:
        what = f" of {table.kind}"
    expected = f"{NAMES[best]} has the best mean rank{what}, as in {table.place} ({table.printed_ranks().min():.1f})"
    findings = [Finding(expected, text, holds, remark)]
    if table.kind == SCORE:
        others = ["local", "fedavg"]
        if table.metric == "macro_f1":
            others.append("playerfl_random")
        findings += [_above(table, result, other, cases) for other in others]
    return tuple(findings)


def narrower(dataset: str) -> bool:
    """Return whether a dataset's network has fewer channels than the paper's."""
    return float(CASES[dataset].sizes.get("model_options", {}).get("width", 1)) < 1


def _mixed(result: Cells, far: Mapping[str, str]) -> str:
    """Return the reason why ranks over datasets are not comparable, or an empty text."""
    ranked = list(result.ranking.blocks.columns)
    among = sum(name in far for name in ranked)
    if among > len(ranked) / 2:
        return f"{among} of the {len(ranked)} datasets are not"
    return ""


def _above(
    table: Table, result: Cells, baseline: str, far: Mapping[str, str]
) -> Finding:
    """A finding on PLayer-FL against a baseline, dataset by dataset, paired by seed.

    Datasets that are not comparable, ``far``, decide nothing, nor do printed ties: differences within their ±.
    """
    printed, spread = table.printed(), table.printed("spread")
    texts: list[str] = []
    odds: list[Odds] = []
    for dataset in result.ranking.values.columns:
        values = result.each[result.each["dataset"] == dataset].pivot(
            index="method", columns="seed", values="value"
        )
        if not {CONTROL, baseline} <= set(values.index):
            continue
        gap = difference(values, CONTROL, baseline)
        theirs = CASES[dataset].printed
        wanted = printed.loc[CONTROL, theirs] - printed.loc[baseline, theirs]
        tie = abs(wanted) < math.hypot(
            spread.loc[CONTROL, theirs], spread.loc[baseline, theirs]
        )
        low, high = gap.interval.low, gap.interval.high
        measured = f"{CASES[dataset].title} {gap.interval.value:+.1f}"
        if not math.isnan(low):
            measured += f" ± {(high - low) / 2:.1f}"
        why = ""
        if dataset in far:
            why = ", not comparable"
        elif tie:
            why = ", a tie"
        texts.append(f"{measured} (paper {wanted:+.1f}{why})")
        if not why:
            odds.append((LEAD if wanted > 0 else TRAIL).odds(gap))
    sides = of_parts(odds)
    agree, differ, undecided = (sides.count(side) for side in (True, False, None))
    counts = f"As printed {agree}, the other way {differ} and undecided {undecided}"
    if len(sides) > 1:
        counts += f" ({len(sides)} parts)"
    expected = f"{NAMES[CONTROL]} lies on the same side of {NAMES[baseline]} as in {table.place}"
    if not table.higher_is_better:
        expected += " (less is better)"
    parts = "; ".join(texts) or "no runs"
    return Finding(expected, f"{parts}. {counts}", joint(sides))


def evenness(frame: pd.DataFrame, far: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return findings on PLayer-FL's gains over Local, client by client, against the other methods that federate.

    Each is judged dataset by dataset, paired by seed, against the mean of the other methods; ``far`` decides nothing.
    The paper prints the clients above both baselines (Table A.6). Where they are no more than with the others, its own
    numbers do not claim that fewer lose.
    """
    scored = clients(frame, DEFAULT)
    scored = scored[
        (scored["metric"] == "macro_f1") & ~scored["dataset"].isin(list(far))
    ]
    spread: dict[str, Difference] = {}
    losers: dict[str, Difference] = {}
    gaining = Table("Table A.6", INCENTIVE, "macro_f1").printed()
    for dataset, part in scored.groupby("dataset", sort=False):
        case = CASES[str(dataset)]
        values = part.pivot(index=["seed", "client"], columns="method", values="value")
        others = [
            name
            for name in METHODS
            if name not in (CONTROL, "local") and name in values
        ]
        if not {CONTROL, "local"} <= set(values.columns) or not others:
            continue
        gains = values.sub(values["local"], axis=0).groupby(level="seed")
        lost = (values.lt(values["local"], axis=0)).groupby(level="seed").mean()
        for gaps, values_by_seed in ((spread, gains.std(ddof=0)), (losers, lost)):
            both_methods = pd.DataFrame(
                {
                    CONTROL: values_by_seed[CONTROL],
                    "others": values_by_seed[others].mean(axis=1),
                }
            ).T
            gaps[case.title] = difference(both_methods, CONTROL, "others")
        theirs = gaining[case.printed].drop(CONTROL).mean()
        theirs -= gaining.loc[CONTROL, case.printed]
        losers[case.title] = replace(losers[case.title], printed=theirs / 100)
    is_even, fewer = judged(spread, TRAIL), judged(losers, TRAIL)
    return (
        is_even.finding(
            f"{NAMES[CONTROL]}'s gains over Local are spread more evenly over clients than the other methods'",
            "standard deviation over clients minus the others' in points: ",
        ),
        fewer.finding(
            f"with {NAMES[CONTROL]} fewer clients lose against Local than with the other methods",
            "share of clients minus the others' in points: ",
        ),
    )


def methods_differ(
    table: Table, result: Cells, far: Mapping[str, str] | None = None
) -> Finding:
    """Return a finding on Friedman's test of the methods; ``far`` as for :func:`order`."""
    test, printed = result.ranking.friedman, friedman_printed(table)
    expected = f"the methods differ by Friedman's test at {ALPHA:g}"
    if printed:
        expected += f" ({table.place} prints p {printed})"
    differ = test.status == "ok" and result.enough and test.p_value < ALPHA
    return Finding(
        expected,
        result.ranking.says,
        True if differ else None,
        _mixed(result, far or {}),
    )


def printed_ranks(table: Table) -> Finding:
    """Return a finding on whether the printed ranks follow from the printed (rounded) cells."""
    printed = table.printed_ranking()
    gaps = (printed.ranks - table.printed_ranks()).abs()
    return Finding(
        f"the mean ranks of {table.place} follow from its cells to within 0.7",
        f"the largest gap is {gaps.max():.1f} at {NAMES[str(gaps.idxmax())]}. Friedman's test of the cells gives "
        f"{printed.says}",
        bool(gaps.max() <= 0.7 + 1e-9),
    )
