"""The choices behind PLayer-FL's figures, each next to its alternative, on the same models or numbers.

The choices themselves are explained in ``player_fl_what_figures_rest_on.md``; this gives their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from figures import items
from figures.items import Drawing, Finding, Item
from figures.layerwise import curves, dissimilarity, lines_beside, read_off
from figures.page import markdown, numbers, seeds_in_words
from figures.player_fl.captions import NAMES
from figures.player_fl.expectations import OFFSET, seed_by_seed
from figures.player_fl.layers import FIRST, NAME, NETWORKS, Network, run_of
from figures.player_fl.scores import CONTROL, SCORE, friedman_printed
from figures.player_fl.tables import TABLES
from figures.ranking import ALPHA
from fl_core.errors import listing

SHOWN = {
    "trace": "trace per parameter",
    "whole": "trace of the whole layer",
    "nuclear": "nuclear norm of one H v",
    "variance": "gradient variance",
    "divided": "gradient variance, divided again",
}
Curves = dict[str, pd.DataFrame]


def both_ways_round() -> pd.DataFrame:
    """Return Friedman's p of each table: columns ``p`` (algorithms compared), ``transposed``, ``low``, ``high``.

    Algorithms are the treatments and datasets the blocks; transposed, it is asked whether the datasets differ. The
    paper prints the bounds.
    """
    published_rows = items.published("player_fl")
    printed_p = published_rows[published_rows["quantity"] == "friedman p"].set_index(
        "place"
    )
    rows_by_place = {}
    for table in TABLES.values():
        metric_name, ranking = (
            table.metric.removeprefix("macro_").replace("f1", "F1"),
            table.printed_ranking(),
        )
        printed_row = printed_p.reindex([table.place]).iloc[0]
        published_bounds = printed_row[["low", "high"]].fillna(printed_row["value"])
        rows_by_place[table.place] = {
            "words": metric_name
            if table.kind == SCORE
            else f"{metric_name}, {table.kind}",
            "printed": friedman_printed(table) or "–",
            "p": ranking.friedman.p_value,
            "transposed": ranking.transposed.p_value,
            **published_bounds,
        }
    return pd.DataFrame.from_dict(rows_by_place, orient="index")


def choices(frame: pd.DataFrame, dataset: str) -> Curves:
    """Return one network's curves after one epoch by each choice, relative to the first layer.

    They are layers x (seed, client).
    """
    first_rows = frame[frame["run"] == run_of(dataset, FIRST)]
    variance_rows = first_rows[first_rows["metric"] == "grad_variance"].assign(
        value=lambda rows: rows["value"] / rows["n_params"]
    )
    choice_curves = {
        "trace": curves(first_rows, "hessian_trace", "per_parameter", "first"),
        "whole": curves(first_rows, "hessian_trace", "absolute", "first"),
        "nuclear": curves(first_rows, "hessian_trace", "released", "first"),
        "variance": curves(first_rows, "grad_variance", "batch", "first"),
        "divided": curves(variance_rows, "grad_variance", "batch", "first"),
        "apart": dissimilarity(first_rows),
    }
    if "procrustes" in set(first_rows["metric"]):
        choice_curves["angle"] = dissimilarity(first_rows, "procrustes")
    return choice_curves


def with_offset(angle: pd.DataFrame, network: Network) -> pd.DataFrame:
    """Return angles with the constant that the code of the published figure adds after convolutions, from fc1 on."""
    has_offset = [
        bool(network.last_conv) and layer.startswith("fc") for layer in angle.index
    ]
    return angle.add(OFFSET * np.array(has_offset, dtype=float), axis=0)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    curves_by_dataset = {dataset: choices(frame, dataset) for dataset in NETWORKS}
    tests = both_ways_round()
    table_rows, findings = [], []
    for dataset, network_curves in curves_by_dataset.items():
        table_rows += _lines(NETWORKS[dataset], network_curves)
        findings += _findings(NETWORKS[dataset].at(FIRST), network_curves)
    for table_place, row in tests.iterrows():
        shared_columns = {
            "quantity": f"Friedman's p, {row['words']}",
            "published_low": row["low"],
            "published_high": row["high"],
            "published_where": table_place,
            "measured_what": "from the printed values",
        }
        algorithm_columns = {"definition": "algorithms compared", "measured": row["p"]}
        dataset_columns = {
            "definition": "datasets compared",
            "measured": row["transposed"],
        }
        table_rows += [
            shared_columns | algorithm_columns,
            shared_columns | dataset_columns,
        ]
    seeds_text = seeds_in_words(header["seeds"])
    caption = (
        f"Each choice next to its alternative after one epoch: medians over clients and "
        f"{seeds_text}. Friedman's test of the paper's printed tables compares the algorithms or "
        "(with the table transposed) the datasets."
    )
    return Drawing(
        None,
        items.table(table_rows),
        caption,
        (*findings, *_test_findings(tests)),
        _text(curves_by_dataset, tests),
    )


# --- numbers ---------------------------------------------------------------------------------------------------


def _lines(network: Network, curves: Curves) -> list[dict[str, Any]]:
    table_rows: list[dict[str, Any]] = []
    for choice, choice_curves in curves.items():
        quantity_name = SHOWN.get(
            choice,
            {"apart": "1 - CKA", "angle": "Procrustes angle"}.get(choice, choice),
        )
        no_ranges = read_off("", "", list(choice_curves.index))
        quantity = quantity_name + (" / first" if choice in SHOWN else "")
        sample_text = f"{choice_curves.shape[1]} clients and seeds"
        table_rows += lines_beside(
            quantity, network.title, no_ranges, choice_curves, sample_text
        )
    return table_rows


def _text(curves_by_dataset: Mapping[str, Curves], tests: pd.DataFrame) -> str:
    sections = [
        "[Another page](../player_fl_what_figures_rest_on.md) explains each choice. Here are the numbers.",
        "Friedman's test of the printed tables. The last two columns test whether the algorithms differ and whether "
        "the datasets differ:",
        markdown(
            {
                "table": [
                    f"{table_place} ({row['words']})"
                    for table_place, row in tests.iterrows()
                ],
                "printed p": list(tests["printed"]),
                "algorithms compared": numbers(tests["p"], ".2g"),
                "datasets compared": numbers(tests["transposed"], ".2g"),
            }
        ),
    ]
    last_ratios = {
        d: {choice: network_curves[choice].iloc[-1].median() for choice in SHOWN}
        for d, network_curves in curves_by_dataset.items()
    }
    sections += [
        "The last layer relative to the first by each choice (median over clients and seeds):",
        markdown(
            {"network": [NETWORKS[dataset].title for dataset in curves_by_dataset]}
            | {
                label: [
                    f"{last_ratios[dataset][choice]:.3g}"
                    for dataset in curves_by_dataset
                ]
                for choice, label in SHOWN.items()
            }
        ),
    ]
    angle_curves = {
        dataset: network_curves
        for dataset, network_curves in curves_by_dataset.items()
        if "angle" in network_curves
    }
    moved_curves: list[Mapping[str, pd.DataFrame]] = [
        network_curves
        | {"moved": with_offset(network_curves["angle"], NETWORKS[dataset])}
        for dataset, network_curves in angle_curves.items()
    ]
    sections += [
        "The largest step between two layers as a share of the whole rise, with the layer at which it ends:",
        markdown(
            {"network": [NETWORKS[dataset].title for dataset in angle_curves]}
            | {
                label: [
                    _step(network_curves[choice]) for network_curves in moved_curves
                ]
                for choice, label in (
                    ("apart", "1 - CKA"),
                    ("angle", "angle"),
                    ("moved", "angle as published"),
                )
            }
        ),
    ]
    return "\n\n".join(sections)


def _step(values: pd.DataFrame) -> str:
    medians = values.median(axis=1)
    steps = medians.diff().iloc[1:]
    return f"{steps.max() / (medians.max() - medians.min()):.0%} at {steps.idxmax()}"


def _findings(network: Network, curves: Curves) -> list[Finding]:
    medians_by_choice = {
        choice: choice_curves.median(axis=1) for choice, choice_curves in curves.items()
    }
    layer_traces = medians_by_choice["whole"]
    rank_correlation = float(
        medians_by_choice["trace"].rank().corr(medians_by_choice["nuclear"].rank())
    )
    traces = curves["trace"]
    return [
        seed_by_seed(
            network,
            "the trace of whole layers (not divided by their parameters) is not largest at the last layer",
            lambda curve: bool(curve.iloc[-1] <= curve.iloc[:-1].max()),
            curves["whole"],
            f"by the medians {layer_traces.iloc[-1]:.3g} times the first layer's at the last and at most "
            f"{layer_traces.iloc[:-1].max():.3g} times before it",
        ),
        seed_by_seed(
            network,
            "the nuclear norm of H v orders the layers as the trace per parameter does",
            lambda curve: curve.rank().equals(traces[curve.name].rank()),
            curves["nuclear"],
            f"rank correlation of the medians {rank_correlation:.2g}",
        ),
    ]


def _test_findings(tests: pd.DataFrame) -> tuple[Finding, ...]:
    """Return findings on Table 1, on its best method, and on tables of the appendix that print a significant p."""
    table1_p = tests.loc["Table 1", "p"]
    nemenyi_p = TABLES["table1"].printed_ranking().nemenyi[CONTROL].drop(CONTROL)
    different_methods = [
        NAMES[str(method)] for method in nemenyi_p.index[nemenyi_p <= ALPHA]
    ]
    significant_rows = tests[tests["high"] <= ALPHA]
    lost_rows = significant_rows[significant_rows["p"] > ALPHA]
    return (
        Finding(
            f"Table 1's methods differ at {ALPHA:g} when the algorithms are compared",
            f"p = {table1_p:.2g}, from the printed cells",
            bool(table1_p < ALPHA),
        ),
        Finding(
            f"in Table 1 {NAMES[CONTROL]}'s mean rank differs from each other method's by Nemenyi's test at {ALPHA:g}",
            f"it differs from {len(different_methods)} of {len(nemenyi_p)} methods, {listing(different_methods)}; "
            f"Friedman's test has p = {table1_p:.2g}",
            len(different_methods) == len(nemenyi_p),
        ),
        Finding(
            f"what the appendix prints as significant at {ALPHA:g} is significant when the algorithms are compared",
            f"in {len(significant_rows) - len(lost_rows)} of {len(significant_rows)} tables"
            + "".join(
                f"; {table_place} ({row['words']}) has p = {row['p']:.2g}"
                for table_place, row in lost_rows.iterrows()
            ),
            bool(lost_rows.empty),
        ),
    )


items.register(
    Item(
        "player_fl.rests_on",
        "What the figures show and what they rest on (PLayer-FL)",
        source=NAME,
        draw=_draw,
    )
)
