"""PLayer-FL's federation sensitivity on Fed-Heart after one local epoch, by two definitions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from diagnostics.plots.drawing import COLOURS, set_scale
from figures import items
from figures.forms import Band, Line, curves, matrix, sheet
from figures.items import Drawing, Finding, Item
from figures.layerwise import (
    BY_LAYER,
    SENSITIVITY,
    Definition,
    Epoch,
    by_layer,
    cut_lines,
    cuts,
    decides,
    lines_beside,
    read_off,
    settings,
)
from figures.verdicts import of_ranges
from fl_core.config import RunConfig
from fl_core.run import runner

PAPERS = Definition(
    "figure",
    "figure",
    "the paper's S (one batch of 64 and plain mean)",
    False,
    COLOURS[1],
)
OURS = Definition(
    "default",
    "training",
    "the default S (all batches and weighted mean)",
    True,
    COLOURS[0],
)


def _measure_heart(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    return Epoch(task).sensitivity((PAPERS if run == PAPERS.run else OURS).variant)


# --- drawing ---------------------------------------------------------------------------------------------------


def _draw_heart(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    layers = list(frame["layer"].unique())
    n = header["seeds"]
    recomputed_ranges = read_off("heart", SENSITIVITY, layers, "recomputed")
    published_ranges = read_off("heart", SENSITIVITY, layers, "Fig. 4G")
    table_rows: list[dict[str, Any]] = []
    findings = []
    with sheet(7.2, 4.5) as figure:
        panels = figure.subplot_mosaic(
            [["S", "figure"], ["S", "default"]], width_ratios=[1.15, 1]
        )
        curve_lines = []
        for definition in (PAPERS, OURS):
            sensitivity = definition.combined(frame)
            medians, low, high = (sensitivity.quantile(q) for q in (0.5, 0.05, 0.95))
            look = {"color": definition.colour, "marker": "o"}
            curve_lines.append(
                Line(medians, definition.label, (low, high), look, {"alpha": 0.2})
            )
            table_rows += lines_beside(
                SENSITIVITY,
                definition.label,
                published_ranges,
                sensitivity.T,
                f"{n} seeds of the clients' mean",
            )
            client_medians = (
                definition.rows(frame)
                .groupby(["layer", "client"], sort=False)["value"]
                .median()
                .unstack()
            )
            table_rows += lines_beside(
                SENSITIVITY,
                definition.label,
                published_ranges,
                client_medians,
                "sites of their medians over seeds",
                True,
            )
            if definition is PAPERS:
                table_rows += lines_beside(
                    SENSITIVITY,
                    definition.label,
                    recomputed_ranges,
                    sensitivity.T,
                    f"{n} seeds of the clients' mean",
                )
                findings += [
                    _falls("S", sensitivity.T, ranges)
                    for ranges in (published_ranges, recomputed_ranges)
                ]
            cut_counts = cuts(sensitivity)
            table_rows += cut_lines(
                definition,
                cut_counts,
                "Table A.2: shared up to fc2; no threshold is given",
            )
            findings += [
                decides(definition, cut_counts, *expectation)
                for expectation in ((1.2, "fc1", 0.5), (2.0, "fc2", 5 / 6))
            ]
            shares = cut_counts.div(cut_counts.sum(axis=1), axis=0).T
            shares.columns = [f"{threshold:g}" for threshold in shares]
            matrix(
                panels[definition.run],
                shares,
                texts=shares.map("{:.0%}".format).replace("0%", ""),
                colours="Blues",
                vmin=0,
                high=1,
            )
            definition_name = definition.label.partition(" (")[0]
            panels[definition.run].set_title(
                f"last shared layer, % of seeds, {definition_name}"
            )
        ax = panels["S"]
        curves(
            ax,
            curve_lines,
            names=layers,
            bands=[Band(published_ranges, "published, range over sites")],
            xlabel="layer, input to output",
            ylabel="federation sensitivity S\nfirst layer = 1",
        )
        set_scale(
            ax,
            pd.concat([high, published_ranges["high"], low], axis=1).astype(float),
            True,
        )
        ax.legend(loc="lower left", bbox_to_anchor=(-0.1, 1.0), borderaxespad=0.2)
        panels["default"].set_xlabel("threshold on the ratio of consecutive layers")
    paper_settings = settings(header, PAPERS.run)
    default_settings = settings(header, OURS.run)
    caption = (
        f"Fed-Heart's {frame['client'].nunique()} hospitals after one local epoch in {n} seeds. Lines are medians and "
        f"bands reach from 5 to 95 % of the seeds. The paper's definition is trained by "
        f"{paper_settings}. The default is trained by "
        f"{default_settings}. Grey: read off the paper's Fig. 4."
    )
    table = items.table(table_rows)
    mean_curves = table[table["measured_what"].str.endswith("clients' mean")]
    return Drawing(
        figure,
        table,
        caption,
        tuple(findings),
        _medians(
            mean_curves, {"definition": "definition", "published_where": "published"}
        ),
    )


def _medians(median_rows: pd.DataFrame, headings: Mapping[str, str]) -> str:
    table_text = by_layer(median_rows, headings)
    return f"{BY_LAYER}\n\n{table_text}"


def _falls(quantity: str, values: pd.DataFrame, reference: pd.DataFrame) -> Finding:
    """Return a finding on whether the medians of curves (layers x curves) are within the ranges of a reference."""
    place_name = reference.attrs["where"].partition(",")[0]
    source = f"the paper's {place_name}"
    if place_name == "recomputed":
        source = "a second computation of ours"
    text, holds = of_ranges(
        values, reference["low"].astype(float), reference["high"].astype(float)
    )
    return Finding(
        f"medians of {quantity} lie within the ranges of {source}",
        text,
        holds,
    )


FIGURES = RunConfig(
    dataset="heart", batch_size=128, lr=7.5e-3, optimizer="adamw", amsgrad=True, weight_decay=1e-2,
    loss="cross_entropy",
    keep_optimizer=False,
)  # fmt: skip
items.register(Item(
    "player_fl.heart_sensitivity", "Federation sensitivity on Fed-Heart (PLayer-FL, Fig. 4)",
    {PAPERS.run: FIGURES, OURS.run: RunConfig(dataset="heart", keep_optimizer=False)},
    seeds=30, budget="some seconds", measure=_measure_heart, draw=_draw_heart,
))  # fmt: skip
