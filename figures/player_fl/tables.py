"""PLayer-FL's Tables 1, 2 and A.5-A.12: published and measured values, mean ranks, critical-difference diagrams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.drawing import PUBLISHED
from figures.items import Drawing, Finding
from figures.page import markdown
from figures.papers import published_table
from figures.player_fl.captions import (
    IN_BRACKETS,
    NAMES,
    TESTED,
    cells_beside,
    evenness,
    methods_differ,
    missing,
    number,
    order,
    page,
    placeholder_client,
    printed_ranks,
    rates,
    remarks,
    sizes,
    spreads,
    tests,
)
from figures.player_fl.runs import CASES, METHODS, NAME, incomparable, tuned_alike
from figures.player_fl.scores import (
    CONTROL,
    DEFAULT,
    FAIRNESS,
    INCENTIVE,
    READINGS,
    RELEASED,
    SCORE,
    Cells,
    Table,
    cells,
    frame_of,
    lines,
)
from figures.ranking import diagram

TABLES = {
    f"table{place.removeprefix('Table ').replace('.', '')}": Table(place, kind, metric)
    for place, kind, metric in (
        ("Table 1", SCORE, "macro_f1"),
        ("Table A.5", FAIRNESS, "macro_f1"),
        ("Table A.6", INCENTIVE, "macro_f1"),
        ("Table A.7", SCORE, "accuracy"),
        ("Table A.8", FAIRNESS, "accuracy"),
        ("Table A.9", INCENTIVE, "accuracy"),
        ("Table A.10", SCORE, "loss"),
        ("Table A.11", FAIRNESS, "loss"),
        ("Table A.12", INCENTIVE, "loss"),
    )
}
TITLES = {
    SCORE: "test {word} of every method on five of the seven data sets",
    FAIRNESS: "variance of test {word} over clients",
    INCENTIVE: "clients that do better by {word} than with Local and with FedAvg",
}
WIDE = 20.0
"""Where the variances of a dataset spread by more than this factor, all panels have a logarithmic axis."""
MARK: dict[str, Any] = {"linestyle": "none", "markersize": 4}
CODES = "measured, ranked as in the authors' code"
OURS, CODE = (MARK | {"color": COLOURS[k], "marker": MARKERS[k]} for k in (0, 2))


def draw(header: Mapping[str, Any], frame: pd.DataFrame, table: Table) -> Drawing:
    """Draw one table of scores: every dataset's cells, mean ranks, and a critical-difference diagram."""
    results = {reading.name: cells(frame, table, reading) for reading in READINGS}
    ours, code = results[DEFAULT.name], results[RELEASED.name]
    shown = list(ours.ranking.values.columns)
    with style():
        figure = plt.figure(
            figsize=(8.6, 1.6 + 0.19 * len(table.methods) + 2.3), layout="constrained"
        )
        halves = figure.subfigures(
            2, 1, squeeze=False, height_ratios=[1.3 + 0.19 * len(table.methods), 2.3]
        )
        above, below = halves[:, 0]
        panels = list(above.subplots(1, len(shown) + 1))
        for ax, dataset in zip(panels, shown, strict=False):
            _scores(ax, ours, dataset)
        _one_scale(panels[: len(shown)], logarithmic=table.kind == FAIRNESS)
        _ranks(panels[-1], table, ours, code)
        for ax in panels[1:]:
            ax.set_yticklabels([])
        above.legend(
            *panels[-1].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=3,
            fontsize=7,
        )
        diagram(below.subplots(), ours.ranking, NAMES)
    table_lines = [line for each in results.values() for line in lines(each)]
    caption = (
        f"{table.label[0].upper()}{table.label[1:]}: median over seeds with "
        f"{spreads(ours)}. Scores are of the test split after the last round. Diamonds: {table.place}"
        f"{placeholder_client(shown)}. Ranks are means over {ours.ranking.blocks.shape[1]} datasets. Triangles follow "
        f"the authors' code: {RELEASED.title}. "
        f"{sizes(header, frame)} {missing(header)}"
    )
    findings = [
        *order(table, ours, incomparable(header)),
        methods_differ(table, ours, incomparable(header)),
        printed_ranks(table),
    ]
    if table.kind == SCORE and table.metric == "macro_f1":
        findings += evenness(frame, incomparable(header))
    if tuned_alike(header):
        for also in (TABLES["tableA5"], TABLES["tableA6"]):
            findings.append(order(also, cells(frame, also), incomparable(header))[0])
    return Drawing(
        figure,
        frame_of(table_lines),
        caption,
        tuple(findings),
        page(header, table, ours, code, frame),
    )


# --- panels ----------------------------------------------------------------------------------------------------


def _scores(ax: Axes, result: Cells, dataset: str) -> None:
    """Draw one dataset: measured medians with intervals, and printed values."""
    table, y = result.table, np.arange(len(result.table.methods))
    cells_of = result.cells.loc[dataset].reindex(list(table.methods))
    printed = table.printed()[CASES[dataset].printed]
    if table.kind == SCORE:
        spread = table.printed("spread")[CASES[dataset].printed]
        ax.hlines(
            y + 0.17,
            printed - spread,
            printed + spread,
            color=PUBLISHED["color"],
            linewidth=0.8,
        )
    ax.plot(printed, y + 0.17, **PUBLISHED)
    ax.hlines(
        y - 0.17, cells_of["low"], cells_of["high"], color=OURS["color"], linewidth=1.4
    )
    ax.plot(cells_of["value"], y - 0.17, **OURS)
    ax.set_yticks(y, [METHODS[name] for name in table.methods], fontsize=7)
    ax.tick_params(axis="x", labelsize=6.5)
    ax.set_ylim(len(y) - 0.4, -0.6)
    ax.set_title(CASES[dataset].title, fontsize=8)
    ax.set_xlabel(
        "% of clients" if table.kind == INCENTIVE else table.label, fontsize=6.5
    )


def _one_scale(panels: Sequence[Axes], logarithmic: bool) -> None:
    """Give all panels one axis, a logarithmic one if a panel spreads far and none has a value at or below 0.

    Args:
        logarithmic: whether it may be.
    """
    ends = [ax.dataLim.intervalx for ax in panels]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    logarithmic = (
        logarithmic and low > 0 and max(high / low for low, high in ends) > WIDE
    )
    for ax in panels:
        if logarithmic:
            beyond = (
                math.floor(math.log10(0.8 * low)),
                math.ceil(math.log10(1.25 * high)),
            )
            ax.set(xscale="log", xlim=(10.0 ** beyond[0], 10.0 ** beyond[1]))
            ax.xaxis.set_minor_formatter(NullFormatter())
        else:
            room = 0.05 * (high - low)
            ax.set_xlim(low - room, high + room)


def _ranks(
    ax: Axes, table: Table, ours: Cells, code: Cells, title: str = "mean rank"
) -> None:
    """Draw mean ranks (1 is best): printed, measured, and measured by the reading of the authors' code."""
    y = np.arange(len(table.methods))
    ax.plot(table.printed_ranks(), y + 0.2, label=f"paper, {table.place}", **PUBLISHED)
    ax.plot(ours.ranking.ranks, y - 0.2, label="measured", **OURS)
    ax.plot(code.ranking.ranks, y, label=CODES, **CODE)
    ax.set_yticks(y, [METHODS[name] for name in table.methods], fontsize=7)
    ax.set(
        ylim=(len(y) - 0.4, -0.6),
        xlim=(0.5, len(y) + 0.5),
        xticks=range(1, len(y) + 1, 3),
    )
    ax.tick_params(axis="x", labelsize=6.5)
    ax.set_title(title, fontsize=8)
    ax.set_xlabel("1 = best", fontsize=6.5)


# --- Table 2 ---------------------------------------------------------------------------------------------------


def _draw_ranks(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    """Draw mean ranks by fairness and by incentive of macro-F1, with critical-difference diagrams."""
    parts = {
        kind: TABLES[name]
        for kind, name in ((FAIRNESS, "tableA5"), (INCENTIVE, "tableA6"))
    }
    results = {
        kind: {r.name: cells(frame, table, r) for r in READINGS}
        for kind, table in parts.items()
    }
    with style():
        figure = plt.figure(figsize=(7.2, 6.2), layout="constrained")
        grid = figure.subplot_mosaic(
            [[FAIRNESS, INCENTIVE], ["d1", "d1"], ["d2", "d2"]],
            height_ratios=[2.2, 1.7, 1.7],
        )
        for kind, table in parts.items():
            _ranks(
                grid[kind],
                table,
                results[kind][DEFAULT.name],
                results[kind][RELEASED.name],
                f"mean rank of {kind}",
            )
        grid[INCENTIVE].set_yticklabels([])
        handles, _ = grid[FAIRNESS].get_legend_handles_labels()
        figure.legend(
            handles, ["paper, Table 2", "measured", CODES],
            loc="outside upper center", ncols=3, fontsize=7,
        )  # fmt: skip
        for name, kind in (("d1", FAIRNESS), ("d2", INCENTIVE)):
            diagram(grid[name], results[kind][DEFAULT.name].ranking, NAMES)
            grid[name].set_title(kind, fontsize=8, loc="left")
    table_lines = []
    findings: list[Finding] = []
    for kind, table in parts.items():
        printed = published_table(
            "player_fl", "Table 2", quantity=f"{kind} mean rank"
        ).iloc[:, 0]
        for each in results[kind].values():
            table_lines += [
                {
                    **line,
                    "quantity": f"{kind} mean rank",
                    "published": printed[line["method"]],
                }
                for line in lines(each)
                if line["quantity"] == "mean rank"
            ]
        measured = results[kind][DEFAULT.name]
        findings += [
            *order(table, measured, incomparable(header)),
            methods_differ(table, measured, incomparable(header)),
        ]
    caption = (
        "Mean ranks over datasets (1 is best) of fairness and incentive. Fairness is the variance of macro-F1 over "
        "clients. Incentive is the share of clients above both Local and FedAvg. Below: critical-difference diagrams. "
        f"{sizes(header, frame)} {missing(header)}"
    )
    text = markdown(
        {"method": [NAMES[name] for name in parts[FAIRNESS].methods]}
        | {
            f"{kind}{mark}": [number(value, 1) for value in column]
            for kind, table in parts.items()
            for mark, column in (
                ("", results[kind][DEFAULT.name].ranking.ranks),
                (", released", results[kind][RELEASED.name].ranking.ranks),
                (", paper", table.printed_ranks()),
            )
        }
    )
    text = "\n\n".join([text, *rates(header)])
    return Drawing(figure, frame_of(table_lines), caption, tuple(findings), text)


def _title(table: Table) -> str:
    text = TITLES[table.kind].format(word=table.word)
    return f"{text[0].upper()}{text[1:]} (PLayer-FL, {table.place})"


# --- Tables A.5 to A.12 ------------------------------------------------------------------------------------------


def _draw_appendix(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    """Draw the mean ranks of eight tables as two matrices, the paper's and ours; the page has all cells."""
    results = {name: cells(frame, TABLES[name]) for name in APPENDIX}
    released = {name: cells(frame, TABLES[name], RELEASED) for name in APPENDIX}
    columns = {
        name: f"{TABLES[name].place.removeprefix('Table ')}\n{TABLES[name].word}\n{WORDS[TABLES[name].kind]}"
        for name in APPENDIX
    }
    published = pd.DataFrame({name: TABLES[name].printed_ranks() for name in APPENDIX})
    measured = pd.DataFrame({name: results[name].ranking.ranks for name in APPENDIX})
    best = published.mean(axis=1).sort_values().index
    with style():
        figure = plt.figure(figsize=(8.6, 4.2), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for ax, ranks, title in zip(
            panels, (published, measured), ("published", "here"), strict=True
        ):
            sns.heatmap(
                ranks.loc[best].rename(columns=columns, index=NAMES),
                ax=ax, cmap="Blues_r", annot=True, fmt=".1f", vmin=1, vmax=len(METHODS),
                annot_kws={"fontsize": 6.5}, linewidths=0.5, cbar=ax is panels[-1],
                cbar_kws={"label": "mean rank, 1 is best"},
            )  # fmt: skip
            ax.set(title=title, xlabel="", ylabel="")
            ax.tick_params(length=0, labelsize=6.5)
            ax.grid(False)
    findings, text = [], [IN_BRACKETS, TESTED]
    for name, result in results.items():
        table = TABLES[name]
        judged = [
            *order(table, result, incomparable(header)),
            methods_differ(table, result, incomparable(header)),
            printed_ranks(table),
        ]
        for finding in judged:
            if table.place not in finding.expected:
                finding = replace(
                    finding, expected=f"{table.place}: {finding.expected}"
                )
            findings.append(finding)
        text += [
            f"## {_title(table)}",
            cells_beside(table, result, released[name]),
            tests(table, result, released[name]),
        ]
    lines_of = [lines(result) for result in (*results.values(), *released.values())]
    caption = (
        "Mean ranks of the methods in the eight tables of the appendix, 1 is best. A method without a rank is a "
        f"baseline of that table. {sizes(header, frame)} {missing(header)}"
    )
    return Drawing(
        figure,
        frame_of(list(chain.from_iterable(lines_of))),
        caption,
        tuple(findings),
        "\n\n".join([*text, *remarks(header)]),
        _first_of(published, measured),
    )


def _first_of(published: pd.DataFrame, measured: pd.DataFrame) -> str:
    """Say in how many tables PLayer-FL has the best mean rank, published and here."""
    theirs, ours = (
        int((ranks.idxmin() == CONTROL).sum()) for ranks in (published, measured)
    )
    count = published.shape[1]
    return (
        f"**{NAMES[CONTROL]} has the best mean rank in {theirs} of the paper's {count} tables, and here in {ours}.** "
        "Most of our datasets are not comparable with the paper's."
    )


APPENDIX = tuple(name for name in TABLES if name != "table1")
WORDS = {SCORE: "score", FAIRNESS: "fairness", INCENTIVE: "incentive"}
items.register(
    items.Item(
        name="player_fl.table1",
        title=_title(TABLES["table1"]),
        source=NAME,
        draw=partial(draw, table=TABLES["table1"]),
    )
)
items.register(
    items.Item(
        name="player_fl.appendix",
        title="Accuracy, macro-F1 and loss in the appendix (PLayer-FL, Tables A.5 to A.12)",
        source=NAME,
        draw=_draw_appendix,
        also=tuple(f"player_fl.{name}" for name in APPENDIX),
    )
)
items.register(
    items.Item(
        name="player_fl.table2",
        title="Mean ranks of fairness and incentive (PLayer-FL, Table 2)",
        source=NAME,
        draw=_draw_ranks,
    )
)
