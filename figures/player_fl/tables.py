"""PLayer-FL's Tables 1, 2 and A.5-A.12: published and measured values, mean ranks, critical-difference diagrams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from diagnostics.plots.drawing import COLOURS, MARKERS
from figures import items
from figures.forms import PUBLISHED, Kind, key_above, marks, matrix, sheet
from figures.items import Drawing, Finding
from figures.page import markdown, numbers
from figures.papers import published_table
from figures.player_fl.captions import (
    IN_BRACKETS,
    NAMES,
    TESTED,
    cells_beside,
    evenness,
    methods_differ,
    missing,
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
    "table1": Table("Table 1", SCORE, "macro_f1"),
    "tableA5": Table("Table A.5", FAIRNESS, "macro_f1"),
    "tableA6": Table("Table A.6", INCENTIVE, "macro_f1"),
    "tableA7": Table("Table A.7", SCORE, "accuracy"),
    "tableA8": Table("Table A.8", FAIRNESS, "accuracy"),
    "tableA9": Table("Table A.9", INCENTIVE, "accuracy"),
    "tableA10": Table("Table A.10", SCORE, "loss"),
    "tableA11": Table("Table A.11", FAIRNESS, "loss"),
    "tableA12": Table("Table A.12", INCENTIVE, "loss"),
}
TITLES = {
    SCORE: "test {word} of every method on five of the seven data sets",
    FAIRNESS: "variance of test {word} over clients",
    INCENTIVE: "clients that do better by {word} than with Local and with FedAvg",
}
WIDE = 20.0
"""Where the variances of a dataset spread by more than this factor, all panels have a logarithmic axis."""
CODES = "measured, ranked as in the authors' code"
OURS, CODE = (
    {"markersize": 4, "color": COLOURS[k], "marker": MARKERS[k]} for k in (0, 2)
)


def draw(header: Mapping[str, Any], frame: pd.DataFrame, table: Table) -> Drawing:
    """Draw one table of scores: every dataset's cells, mean ranks, and a critical-difference diagram."""
    cells_by_reading = {
        reading.name: cells(frame, table, reading) for reading in READINGS
    }
    default_cells, released_cells = (
        cells_by_reading[DEFAULT.name],
        cells_by_reading[RELEASED.name],
    )
    datasets = list(default_cells.ranking.values.columns)
    table_height = 0.19 * len(table.methods)
    with sheet(8.6, 1.6 + table_height + 2.3) as figure:
        halves: Any = figure.subfigures(2, 1, height_ratios=[1.3 + table_height, 2.3])
        top_figure, bottom_figure = halves
        panels = list(top_figure.subplots(1, len(datasets) + 1))
        for ax, dataset in zip(panels, datasets, strict=False):
            _scores(ax, default_cells, dataset)
        _one_scale(panels[: len(datasets)], logarithmic=table.kind == FAIRNESS)
        _ranks(panels[-1], table, default_cells, released_cells)
        for ax in panels[1:]:
            ax.set_yticklabels([])
        key_above(top_figure, 3, panel=panels[-1])
        diagram(bottom_figure.subplots(), default_cells.ranking, NAMES)
    table_rows = list(chain.from_iterable(map(lines, cells_by_reading.values())))
    spread_text, stand_ins_text = spreads(default_cells), placeholder_client(datasets)
    sizes_text, missing_text = sizes(header, frame), missing(header)
    caption = (
        f"{table.label[0].upper()}{table.label[1:]}: median over seeds with {spread_text}. Scores are of the "
        "test split "
        f"after the last round. Diamonds: {table.place}{stand_ins_text}. Ranks are means over "
        f"{default_cells.ranking.blocks.shape[1]} datasets. Triangles follow the authors' code: {RELEASED.title}. "
        f"{sizes_text} {missing_text}"
    )
    findings = [
        *order(table, default_cells, incomparable(header)),
        methods_differ(table, default_cells, incomparable(header)),
        printed_ranks(table),
    ]
    if table.kind == SCORE and table.metric == "macro_f1":
        findings += evenness(frame, incomparable(header))
    if tuned_alike(header):
        for other_table in (TABLES["tableA5"], TABLES["tableA6"]):
            findings.append(
                order(other_table, cells(frame, other_table), incomparable(header))[0]
            )
    return Drawing(
        figure,
        frame_of(table_rows),
        caption,
        tuple(findings),
        page(header, table, default_cells, released_cells, frame),
    )


# --- panels ----------------------------------------------------------------------------------------------------


def _scores(ax: Axes, result: Cells, dataset: str) -> None:
    """Draw one dataset: measured medians with intervals, and printed values."""
    table = result.table
    printed_values = table.printed()[CASES[dataset].printed].to_frame("value")
    if table.kind == SCORE:
        published_spread = table.printed("spread")[CASES[dataset].printed]
        printed_values["low"] = printed_values["value"] - published_spread
        printed_values["high"] = printed_values["value"] + published_spread
    measured_values = result.cells.loc[dataset].reindex(list(table.methods))
    label = table.label
    if table.kind == INCENTIVE:
        label = "% of clients"
    marks(
        ax,
        [
            Kind(printed_values, offset=0.17, look=PUBLISHED),
            Kind(measured_values[["value", "low", "high"]], offset=-0.17, look=OURS),
        ],
        [METHODS[method] for method in table.methods],
        size=7,
        ylim=(len(printed_values) - 0.4, -0.6),
    )
    _small(ax, CASES[dataset].title, label)


def _small(ax: Axes, title: str, label: str) -> None:
    """Write a panel's title and the label of its x axis in small letters."""
    ax.tick_params(axis="x", labelsize=6.5)
    ax.set_title(title, fontsize=8)
    ax.set_xlabel(label, fontsize=6.5)


def _one_scale(panels: Sequence[Axes], logarithmic: bool) -> None:
    """Give all panels one axis, a logarithmic one if a panel spreads far and none has a value at or below 0.

    Args:
        logarithmic: whether it may be.
    """
    panel_ends = [ax.dataLim.intervalx for ax in panels]
    low, high = min(low for low, _ in panel_ends), max(high for _, high in panel_ends)
    logarithmic = (
        logarithmic and low > 0 and max(high / low for low, high in panel_ends) > WIDE
    )
    for ax in panels:
        if logarithmic:
            exponents = (
                math.floor(math.log10(0.8 * low)),
                math.ceil(math.log10(1.25 * high)),
            )
            ax.set(xscale="log", xlim=(10.0 ** exponents[0], 10.0 ** exponents[1]))
            ax.xaxis.set_minor_formatter(NullFormatter())
        else:
            margin = 0.05 * (high - low)
            ax.set_xlim(low - margin, high + margin)


def _ranks(
    ax: Axes,
    table: Table,
    default_cells: Cells,
    released_cells: Cells,
    title: str = "mean rank",
) -> None:
    """Draw mean ranks (1 is best): printed, measured, and measured by the reading of the authors' code."""
    method_count = len(table.methods)
    kinds = [
        Kind(table.printed_ranks().to_frame("value"), f"paper, {table.place}", 0.2, PUBLISHED),
        Kind(default_cells.ranking.ranks.to_frame("value"), "measured", -0.2, OURS),
        Kind(released_cells.ranking.ranks.to_frame("value"), CODES, 0, CODE),
    ]  # fmt: skip
    marks(
        ax,
        kinds,
        [METHODS[method] for method in table.methods],
        size=7,
        ylim=(method_count - 0.4, -0.6),
        xlim=(0.5, method_count + 0.5),
        xticks=range(1, method_count + 1, 3),
    )
    _small(ax, title, "1 = best")


# --- Table 2 ---------------------------------------------------------------------------------------------------


def _draw_ranks(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    """Draw mean ranks by fairness and by incentive of macro-F1, with critical-difference diagrams."""
    tables = {
        kind: TABLES[name]
        for kind, name in ((FAIRNESS, "tableA5"), (INCENTIVE, "tableA6"))
    }
    cells_by_kind = {
        kind: {reading.name: cells(frame, table, reading) for reading in READINGS}
        for kind, table in tables.items()
    }
    with sheet(7.2, 6.2) as figure:
        panels = figure.subplot_mosaic(
            [[FAIRNESS, INCENTIVE], ["d1", "d1"], ["d2", "d2"]],
            height_ratios=[2.2, 1.7, 1.7],
        )
        for kind, table in tables.items():
            _ranks(
                panels[kind],
                table,
                cells_by_kind[kind][DEFAULT.name],
                cells_by_kind[kind][RELEASED.name],
                f"mean rank of {kind}",
            )
        panels[INCENTIVE].set_yticklabels([])
        handles, _ = panels[FAIRNESS].get_legend_handles_labels()
        figure.legend(
            handles, ["paper, Table 2", "measured", CODES],
            loc="outside upper center", ncols=3, fontsize=7,
        )  # fmt: skip
        for panel_name, kind in (("d1", FAIRNESS), ("d2", INCENTIVE)):
            diagram(
                panels[panel_name], cells_by_kind[kind][DEFAULT.name].ranking, NAMES
            )
            panels[panel_name].set_title(kind, fontsize=8, loc="left")
    table_rows = []
    findings: list[Finding] = []
    for kind, table in tables.items():
        printed_ranks = published_table(
            "player_fl", "Table 2", quantity=f"{kind} mean rank"
        ).iloc[:, 0]
        for reading_cells in cells_by_kind[kind].values():
            ranks = [
                table_row
                for table_row in lines(reading_cells)
                if table_row["quantity"] == "mean rank"
            ]
            quantity_column = {"quantity": f"{kind} mean rank"}
            table_rows += [
                {
                    **table_row,
                    **quantity_column,
                    "published": printed_ranks[table_row["method"]],
                }
                for table_row in ranks
            ]
        default_cells = cells_by_kind[kind][DEFAULT.name]
        findings += [
            *order(table, default_cells, incomparable(header)),
            methods_differ(table, default_cells, incomparable(header)),
        ]
    sizes_text, missing_text = sizes(header, frame), missing(header)
    caption = (
        "Mean ranks over datasets (1 is best) of fairness and incentive. Fairness is the variance of macro-F1 over "
        "clients. Incentive is the share of clients above both Local and FedAvg. Below: critical-difference diagrams. "
        f"{sizes_text} {missing_text}"
    )
    columns = {"method": [NAMES[name] for name in tables[FAIRNESS].methods]}
    for kind, table in tables.items():
        for suffix, ranks in (
            ("", cells_by_kind[kind][DEFAULT.name].ranking.ranks),
            (", released", cells_by_kind[kind][RELEASED.name].ranking.ranks),
            (", paper", table.printed_ranks()),
        ):
            columns[f"{kind}{suffix}"] = numbers(ranks, ".1f")
    text = "\n\n".join([markdown(columns), *rates(header)])
    return Drawing(figure, frame_of(table_rows), caption, tuple(findings), text)


def _title(table: Table) -> str:
    text = TITLES[table.kind].format(word=table.word)
    return f"{text[0].upper()}{text[1:]} (PLayer-FL, {table.place})"


# --- Tables A.5 to A.12 ------------------------------------------------------------------------------------------


def _draw_appendix(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    """Draw the mean ranks of eight tables as two matrices, the paper's and ours; the page has all cells."""
    cells_by_table = {
        table_name: cells(frame, TABLES[table_name]) for table_name in APPENDIX
    }
    released_cells = {
        table_name: cells(frame, TABLES[table_name], RELEASED)
        for table_name in APPENDIX
    }
    column_titles = {}
    for table_name in APPENDIX:
        table = TABLES[table_name]
        short_place = table.place.removeprefix("Table ")
        column_titles[table_name] = f"{short_place}\n{table.word}\n{WORDS[table.kind]}"
    published_ranks = pd.DataFrame(
        {table_name: TABLES[table_name].printed_ranks() for table_name in APPENDIX}
    )
    measured_ranks = pd.DataFrame(
        {
            table_name: cells_by_table[table_name].ranking.ranks
            for table_name in APPENDIX
        }
    )
    method_order = published_ranks.mean(axis=1).sort_values().index
    with sheet(8.6, 4.2) as figure:
        for ax, ranks, title, bar_title in zip(
            figure.subplots(1, 2, sharey=True),
            (published_ranks, measured_ranks),
            ("published", "here"),
            ("", "mean rank, 1 is best"),
            strict=True,
        ):
            table = ranks.loc[method_order].rename(columns=column_titles, index=NAMES)
            matrix(
                ax,
                table,
                texts=table.map("{:.1f}".format),
                colours="Blues_r",
                bar=bar_title,
                vmin=1,
                high=len(METHODS),
                size=6.5,
            )
            ax.set_title(title)
    findings, sections = [], [IN_BRACKETS, TESTED]
    for table_name, table_cells in cells_by_table.items():
        table = TABLES[table_name]
        table_findings = [
            *order(table, table_cells, incomparable(header)),
            methods_differ(table, table_cells, incomparable(header)),
            printed_ranks(table),
        ]
        for finding in table_findings:
            if table.place not in finding.expected:
                finding = replace(
                    finding, expected=f"{table.place}: {finding.expected}"
                )
            findings.append(finding)
        sections += [
            " ".join(["##", _title(table)]),
            cells_beside(table, table_cells, released_cells[table_name]),
            tests(table, table_cells, released_cells[table_name]),
        ]
    row_lists = [
        lines(table_cells)
        for table_cells in (*cells_by_table.values(), *released_cells.values())
    ]
    sizes_text, missing_text = sizes(header, frame), missing(header)
    caption = (
        "Mean ranks of the methods in the eight tables of the appendix, 1 is best. A method without a rank is a "
        f"baseline of that table. {sizes_text} {missing_text}"
    )
    return Drawing(
        figure,
        frame_of(list(chain.from_iterable(row_lists))),
        caption,
        tuple(findings),
        "\n\n".join([*sections, *remarks(header)]),
        _first_of(published_ranks, measured_ranks),
    )


def _first_of(published_ranks: pd.DataFrame, measured_ranks: pd.DataFrame) -> str:
    """Say in how many tables PLayer-FL has the best mean rank, published and here."""
    published_count, measured_count = (
        int((ranks.idxmin() == CONTROL).sum())
        for ranks in (published_ranks, measured_ranks)
    )
    table_count = published_ranks.shape[1]
    return (
        f"**{NAMES[CONTROL]} has the best mean rank in {published_count} of the paper's {table_count} tables, "
        f"and here in {measured_count}.** "
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
