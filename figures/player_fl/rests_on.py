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
    """Friedman's p of each table as printed: columns ``p`` (algorithms compared), ``transposed``, ``low``, ``high``.

    Algorithms are the treatments and datasets the blocks; transposed, it is asked whether the datasets differ. The
    paper prints the bounds.
    """
    published = items.published("player_fl")
    printed = published[published["quantity"] == "friedman p"].set_index("place")
    lines = {}
    for table in TABLES.values():
        word, again = (
            table.metric.removeprefix("macro_").replace("f1", "F1"),
            table.printed_ranking(),
        )
        of_table = printed.reindex([table.place]).iloc[0]
        ends = of_table[["low", "high"]].fillna(of_table["value"])
        lines[table.place] = {
            "words": word if table.kind == SCORE else f"{word}, {table.kind}",
            "printed": friedman_printed(table) or "–",
            "p": again.friedman.p_value,
            "transposed": again.transposed.p_value,
            **ends,
        }
    return pd.DataFrame.from_dict(lines, orient="index")


def choices(frame: pd.DataFrame, dataset: str) -> Curves:
    """Return one network's curves after one epoch by each choice, relative to the first layer.

    They are layers x (seed, client).
    """
    of_first = frame[frame["run"] == run_of(dataset, FIRST)]
    of_variance = of_first[of_first["metric"] == "grad_variance"].assign(
        value=lambda rows: rows["value"] / rows["n_params"]
    )
    curves_of = {
        "trace": curves(of_first, "hessian_trace", "per_parameter", "first"),
        "whole": curves(of_first, "hessian_trace", "absolute", "first"),
        "nuclear": curves(of_first, "hessian_trace", "released", "first"),
        "variance": curves(of_first, "grad_variance", "batch", "first"),
        "divided": curves(of_variance, "grad_variance", "batch", "first"),
        "apart": dissimilarity(of_first),
    }
    if "procrustes" in set(of_first["metric"]):
        curves_of["angle"] = dissimilarity(of_first, "procrustes")
    return curves_of


def with_offset(angle: pd.DataFrame, network: Network) -> pd.DataFrame:
    """Angles with the constant that the code behind the published figure adds after convolutions, from fc1 on."""
    moved = [
        bool(network.last_conv) and layer.startswith("fc") for layer in angle.index
    ]
    return angle.add(OFFSET * np.array(moved, dtype=float), axis=0)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    networks = {dataset: choices(frame, dataset) for dataset in NETWORKS}
    tests = both_ways_round()
    lines, findings = [], []
    for dataset, network_curves in networks.items():
        lines += _lines(NETWORKS[dataset], network_curves)
        findings += _findings(NETWORKS[dataset].at(FIRST), network_curves)
    for place, row in tests.iterrows():
        printed = {
            "quantity": f"Friedman's p, {row['words']}",
            "published_low": row["low"],
            "published_high": row["high"],
            "published_where": place,
            "measured_what": "from the printed values",
        }
        algorithms = {"definition": "algorithms compared", "measured": row["p"]}
        datasets = {"definition": "datasets compared", "measured": row["transposed"]}
        lines += [printed | algorithms, printed | datasets]
    seeds_text = seeds_in_words(header["seeds"])
    caption = (
        f"Each choice next to its alternative after one epoch: medians over clients and "
        f"{seeds_text}. Friedman's test of the paper's printed tables compares the algorithms or "
        "(with the table transposed) the datasets."
    )
    return Drawing(
        None,
        items.table(lines),
        caption,
        (*findings, *_test_findings(tests)),
        _text(networks, tests),
    )


# --- numbers ---------------------------------------------------------------------------------------------------


def _lines(network: Network, curves: Curves) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for name, values in curves.items():
        words = SHOWN.get(
            name, {"apart": "1 - CKA", "angle": "Procrustes angle"}.get(name, name)
        )
        nothing = read_off("", "", list(values.index))
        quantity = words + (" / first" if name in SHOWN else "")
        averaged = f"{values.shape[1]} clients and seeds"
        lines += lines_beside(quantity, network.title, nothing, values, averaged)
    return lines


def _text(networks: Mapping[str, Curves], tests: pd.DataFrame) -> str:
    parts = [
        "[Another page](../player_fl_what_figures_rest_on.md) explains each choice. Here are the numbers.",
        "Friedman's test of the printed tables. The last two columns test whether the algorithms differ and whether "
        "the datasets differ:",
        markdown(
            {
                "table": [
                    f"{place} ({row['words']})" for place, row in tests.iterrows()
                ],
                "printed p": list(tests["printed"]),
                "algorithms compared": numbers(tests["p"], ".2g"),
                "datasets compared": numbers(tests["transposed"], ".2g"),
            }
        ),
    ]
    last = {
        d: {name: network_curves[name].iloc[-1].median() for name in SHOWN}
        for d, network_curves in networks.items()
    }
    parts += [
        "The last layer relative to the first by each choice (median over clients and seeds):",
        markdown(
            {"network": [NETWORKS[dataset].title for dataset in networks]}
            | {
                words: [f"{last[dataset][name]:.3g}" for dataset in networks]
                for name, words in SHOWN.items()
            }
        ),
    ]
    angles = {
        dataset: network_curves
        for dataset, network_curves in networks.items()
        if "angle" in network_curves
    }
    ends: list[Mapping[str, pd.DataFrame]] = [
        network_curves
        | {"moved": with_offset(network_curves["angle"], NETWORKS[dataset])}
        for dataset, network_curves in angles.items()
    ]
    parts += [
        "The largest step between two layers as a share of the whole rise, with the layer at which it ends:",
        markdown(
            {"network": [NETWORKS[dataset].title for dataset in angles]}
            | {
                words: [_step(network_curves[name]) for network_curves in ends]
                for name, words in (
                    ("apart", "1 - CKA"),
                    ("angle", "angle"),
                    ("moved", "angle as published"),
                )
            }
        ),
    ]
    return "\n\n".join(parts)


def _step(values: pd.DataFrame) -> str:
    middle = values.median(axis=1)
    steps = middle.diff().iloc[1:]
    return f"{steps.max() / (middle.max() - middle.min()):.0%} at {steps.idxmax()}"


def _findings(network: Network, curves: Curves) -> list[Finding]:
    middle = {name: values.median(axis=1) for name, values in curves.items()}
    whole = middle["whole"]
    rank_correlation = float(middle["trace"].rank().corr(middle["nuclear"].rank()))
    traces = curves["trace"]
    return [
        seed_by_seed(
            network,
            "the trace of whole layers (not divided by their parameters) is not largest at the last layer",
            lambda curve: bool(curve.iloc[-1] <= curve.iloc[:-1].max()),
            curves["whole"],
            f"by the medians {whole.iloc[-1]:.3g} times the first layer's at the last and at most "
            f"{whole.iloc[:-1].max():.3g} times before it",
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
    first = tests.loc["Table 1", "p"]
    pairs = TABLES["table1"].printed_ranking().nemenyi[CONTROL].drop(CONTROL)
    differing = [NAMES[str(name)] for name in pairs.index[pairs <= ALPHA]]
    significant = tests[tests["high"] <= ALPHA]
    lost = significant[significant["p"] > ALPHA]
    return (
        Finding(
            f"Table 1's methods differ at {ALPHA:g} when the algorithms are compared",
            f"p = {first:.2g}, from the printed cells",
            bool(first < ALPHA),
        ),
        Finding(
            f"in Table 1 {NAMES[CONTROL]}'s mean rank differs from each other method's by Nemenyi's test at {ALPHA:g}",
            f"it differs from {len(differing)} of {len(pairs)} methods, {listing(differing)}; "
            f"Friedman's test has p = {first:.2g}",
            len(differing) == len(pairs),
        ),
        Finding(
            f"what the appendix prints as significant at {ALPHA:g} is significant when the algorithms are compared",
            f"in {len(significant) - len(lost)} of {len(significant)} tables"
            + "".join(
                f"; {place} ({row['words']}) has p = {row['p']:.2g}"
                for place, row in lost.iterrows()
            ),
            bool(lost.empty),
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
