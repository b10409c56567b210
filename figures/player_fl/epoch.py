"""PLayer-FL: its layer-wise measurements after one local epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from diagnostics.decide import select
from diagnostics.plots.drawing import COLOURS, name_ticks, set_scale, style
from diagnostics.representation.probe import probe_set
from figures import items, names
from figures.items import Drawing, Finding, Item
from figures.layerwise import (
    BY_LAYER,
    CUTS,
    SENSITIVITY,
    Definition,
    Epoch,
    band,
    bars,
    by_layer,
    curves,
    cut_lines,
    cuts,
    decides,
    dissimilarity,
    lines_beside,
    panel,
    reference,
    settings,
)
from figures.player_fl.expectations import FLAT, breaks, gradual, grows, largest_step
from figures.verdicts import of_ranges, of_seeds
from fl_core import runner
from fl_core.config import RunConfig

SUBSET = 256
"""Training samples a client for gradient variance and Hessian of Fashion-MNIST."""
BATCH = 64
"""Samples a batch where a published figure rests on one batch."""
JUMP = 10.0
"""A trace that rises by more than this factor jumps."""

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


def _measure_heart(task: runner.Task, run: str) -> pd.DataFrame:
    return Epoch(task).sensitivity((PAPERS if run == PAPERS.run else OURS).variant)


def _measure_fmnist(task: runner.Task, run: str) -> pd.DataFrame:
    epoch = Epoch(task)
    part = epoch.subset(SUBSET)
    parts = [
        epoch.frame("grad_variance", part, reduction="epoch"),
        epoch.frame("grad_variance", part, batch=BATCH, reduction="batch"),
        epoch.frame("hessian_trace", part),
        epoch.frame("cka", probe=probe_set(task.data)),
        epoch.sensitivity("training"),
        epoch.sensitivity("figure"),
    ]
    return pd.concat(parts, ignore_index=True)


# --- drawing ---------------------------------------------------------------------------------------------------


def _draw_heart(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    layers = list(frame["layer"].unique())
    n = header["seeds"]
    expected = reference("player_fl", "heart", SENSITIVITY, layers, "recomputed")
    read_off = reference("player_fl", "heart", SENSITIVITY, layers, "Fig. 4G")
    lines: list[dict[str, Any]] = []
    findings = []
    with style():
        figure = plt.figure(figsize=(7.2, 4.5), layout="constrained")
        axes = figure.subplot_mosaic(
            [["S", "figure"], ["S", "default"]], width_ratios=[1.15, 1]
        )
        ax = axes["S"]
        band(ax, read_off, "published, range over sites")
        for way in (PAPERS, OURS):
            combined = way.combined(frame)
            middle, low, high = (combined.quantile(q) for q in (0.5, 0.05, 0.95))
            x = np.arange(len(layers))
            ax.fill_between(x, low, high, color=way.colour, alpha=0.2, linewidth=0)
            ax.plot(x, middle, color=way.colour, marker="o", label=way.label)
            lines += lines_beside(
                SENSITIVITY,
                way.label,
                read_off,
                combined.T,
                f"{n} seeds of the clients' mean",
            )
            sites = (
                way.rows(frame)
                .groupby(["layer", "client"], sort=False)["value"]
                .median()
                .unstack()
            )
            lines += lines_beside(
                SENSITIVITY,
                way.label,
                read_off,
                sites,
                "sites of their medians over seeds",
                True,
            )
            if way is PAPERS:
                lines += lines_beside(
                    SENSITIVITY,
                    way.label,
                    expected,
                    combined.T,
                    f"{n} seeds of the clients' mean",
                )
                findings += [
                    _falls("S", combined.T, known) for known in (expected, read_off)
                ]
            counts = cuts(combined)
            lines += cut_lines(
                way, counts, "Table A.2: shared up to fc2; no threshold is given"
            )
            findings += [
                decides(way, counts, *expectation)
                for expectation in ((1.2, "fc1", 0.5), (2.0, "fc2", 5 / 6))
            ]
            bars(axes[way.run], counts)
            axes[way.run].set_title(
                f"last shared layer, {way.label.partition(' (')[0]}"
            )
        set_scale(
            ax,
            pd.concat([high, read_off["high"], low], axis=1).astype(float),
            "log",
            True,
        )
        name_ticks(ax, layers)
        ax.set(
            xlabel="layer, input to output",
            ylabel="federation sensitivity S\nfirst layer = 1",
        )
        ax.legend(loc="lower left", bbox_to_anchor=(-0.1, 1.0), borderaxespad=0.2)
        axes["default"].set_xlabel("threshold on the ratio of consecutive layers")
        handles, labels = axes["figure"].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside right upper",
            title="last\nshared",
            alignment="left",
        )
    caption = (
        f"Fed-Heart's {frame['client'].nunique()} hospitals after one local epoch in {n} seeds. Lines are medians and "
        f"bands reach from 5 to 95 % of the seeds. The paper's definition is trained by "
        f"{settings(header, PAPERS.run)}. The default is trained by "
        f"{settings(header, OURS.run)}. Grey: read off the paper's Fig. 4."
    )
    table = items.table(lines)
    curves_ = table[table["measured_what"].str.endswith("clients' mean")]
    return Drawing(
        figure,
        table,
        caption,
        tuple(findings),
        _medians(curves_, {"definition": "definition", "published_where": "published"}),
    )


def _draw_fmnist(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    n = header["seeds"]
    papers, ours = (
        replace(way, run="default") for way in (PAPERS, OURS)
    )  # one run, read in both ways
    one, full = (
        curves(frame, "grad_variance", variant, "min") for variant in ("batch", "epoch")
    )
    trace, undivided = (
        curves(frame, "hessian_trace", variant, "first")
        for variant in ("per_parameter", "absolute")
    )
    apart = dissimilarity(frame)
    s = {d: curves(frame, SENSITIVITY, d.variant) for d in (papers, ours)}
    layers = list(trace.index)
    size, probe = (
        frame.loc[frame["metric"] == name, "n_samples"].max()
        for name in ("hessian_trace", "cka")
    )

    def known(quantity: str, place: str) -> pd.DataFrame:
        return reference("player_fl", "fashion_mnist", quantity, layers, place)

    with style():
        figure = plt.figure(figsize=(7.2, 6.4), layout="constrained")
        (a, b), (c, d) = figure.subplots(2, 2)
        band(a, known("grad_variance / min", "Fig. 1A"), "published")
        batches = {
            f"batches of {BATCH}": (one, PAPERS.colour),
            f"{size} samples at once": (full, OURS.colour),
        }
        panel(
            a, batches, log=True, ylabel="gradient variance\neach client / its smallest"
        )
        band(b, known("hessian_trace / first", "recomputed"), "recomputed")
        panel(
            b,
            {"measured": (trace, OURS.colour)},
            log=True,
            ylabel="Hessian trace per parameter\nfirst layer = 1",
        )
        earlier = known("1 - cka", "recomputed")["low"].astype(float)
        panel(
            c,
            {"measured": (apart, OURS.colour)},
            log=False,
            ylabel="mean 1 − CKA to the others\n0 = the same",
        )
        c.plot(range(len(layers)), earlier, "x", color="0.3", label="recomputed")
        c.legend(loc="upper left", fontsize=7)
        c.set_ylim(bottom=0)
        band(d, known(SENSITIVITY, "Fig. 4A"), "published")
        both = {k.label.partition(" (")[0]: (s[k], k.colour) for k in (papers, ours)}
        panel(d, both, log=True, ylabel="federation sensitivity S\nfirst layer = 1")
        for ax in (c, d):
            ax.set_xlabel("layer, input to output")

    lines: list[dict[str, Any]] = []
    over = f"{len(trace.columns)} clients and seeds"
    for quantity, definition, values, places in (
        (
            "grad_variance / min",
            f"mean over batches of {BATCH}",
            one,
            ("Fig. 1A", "recomputed"),
        ),
        (
            "grad_variance / min",
            f"{size} samples at once",
            full,
            ("Fig. 1A", "recomputed"),
        ),
        ("hessian_trace / first", "per parameter", trace, ("recomputed",)),
        (
            "hessian_nuclear / min",
            "not measured here: trace per parameter / first",
            trace,
            ("Fig. 2A",),
        ),
        ("1 - cka", "linear, mean over the others", apart, ("recomputed",)),
        ("procrustes_angle", "not measured here: 1 - linear CKA", apart, ("Fig. 3A",)),
        (SENSITIVITY, papers.label, s[papers], ("Fig. 4A", "recomputed")),
        (SENSITIVITY, ours.label, s[ours], ("Fig. 4A", "recomputed")),
    ):
        for place in places:
            lines += lines_beside(
                quantity, definition, known(quantity, place), values, over
            )
    empty = known("hessian_trace / first", "recomputed").assign(low=np.nan, high=np.nan)
    empty.attrs["where"] = ""
    lines += lines_beside(
        "hessian_trace / first",
        "whole layer, not divided by its parameters",
        empty,
        undivided,
        over,
    )

    findings = [
        *_variance_findings(one),
        *_hessian_findings(trace, undivided),
        *_apart_findings(apart),
    ]
    for name, quantity, values, places in (
        (
            "gradient variance / smallest",
            "grad_variance / min",
            one,
            ("Fig. 1A", "recomputed"),
        ),
        (
            "Hessian trace per parameter / first",
            "hessian_trace / first",
            trace,
            ("recomputed",),
        ),
        (papers.label, SENSITIVITY, s[papers], ("Fig. 4A", "recomputed")),
    ):
        findings += [_falls(name, values, known(quantity, place)) for place in places]
    for way in (papers, ours):
        combined = way.combined(frame)
        counts = cuts(combined)
        lines += cut_lines(
            way, counts, "Table A.2: shared up to conv3; no threshold is given"
        )
        findings.append(
            _judged(
                f"{way.label}: S stays below {FLAT:g} up to conv3 and rises by more than {FLAT:g} times at fc1",
                s[way],
                lambda curve: breaks(curve, "conv3"),
            )
        )
        findings.append(decides(way, counts, select.THRESHOLD, "conv3", 0.5))
    caption = (
        f"Fashion-MNIST after one local epoch in {n} seeds. Thin lines are clients and seeds. Thick lines are their "
        f"medians. {len(trace.columns) // n} clients have 10,000 images by Dirichlet(0.5). They train "
        f"{names.network(header['runs']['default']['config']['model'])} by {settings(header, 'default')}. Gradient "
        f"variance and the exact Hessian trace use {size} training samples a client. CKA uses {probe} validation "
        f"samples. Grey: ranges over sites. They are read off the paper's Figs. 1 and 4 or recomputed."
    )
    table = items.table(lines)
    shown = table[table["quantity"].ne(CUTS)]
    headings = {
        "quantity": "quantity",
        "definition": "definition",
        "published_where": "published",
    }
    return Drawing(figure, table, caption, tuple(findings), _medians(shown, headings))


def _medians(lines: pd.DataFrame, headings: Mapping[str, str]) -> str:
    return f"{BY_LAYER}\n\n{by_layer(lines, headings)}"


def _falls(name: str, values: pd.DataFrame, known: pd.DataFrame) -> Finding:
    """A finding on whether the medians of curves (layers x curves) are within the ranges of a reference."""
    where = known.attrs["where"].partition(",")[0]
    source = "another computation" if where == "recomputed" else f"the paper's {where}"
    said, held = of_ranges(
        values, known["low"].astype(float), known["high"].astype(float)
    )
    return Finding(
        f"medians of {name} lie within the ranges of {source}",
        said,
        held,
    )


def _judged(
    expected: str,
    values: pd.DataFrame,
    holds: Callable[[pd.Series], bool],
    told: str = "",
) -> Finding:
    """Return a finding on the seeds. ``told`` is added to what was measured."""
    said, held = of_seeds(values, holds)
    return Finding(expected, f"{said}; {told}" if told else said, held)


def _variance_findings(values: pd.DataFrame) -> list[Finding]:
    return [
        _judged(
            "gradient variance is smallest at the last conv layer",
            values,
            lambda curve: curve.idxmin() == "conv3",
        ),
        _judged(
            "gradient variance is at least 10 times its smallest at fc1 and 100 times at fc2",
            values,
            lambda curve: bool(
                curve["fc1"] >= 10 * curve.min() and curve["fc2"] >= 100 * curve.min()
            ),
        ),
    ]


def _hessian_findings(trace: pd.DataFrame, undivided: pd.DataFrame) -> list[Finding]:
    step = (trace.iloc[-1] / trace.iloc[-2]).median()
    return [
        _judged(
            f"Hessian trace per parameter rises by more than {JUMP:g} times at the last layer",
            trace,
            lambda curve: bool(curve.iloc[-1] > JUMP * curve.iloc[-2]),
            f"{step:.3g} times from fc1 to fc2 (median of the clients' ratios)",
        ),
        _judged(
            "without division by the parameters there is no late rise",
            undivided,
            lambda curve: bool(curve.iloc[-1] <= curve.iloc[:-1].max()),
        ),
    ]


def _apart_findings(apart: pd.DataFrame) -> list[Finding]:
    return [
        _judged("1 - CKA grows from each layer to the next", apart, grows),
        _judged(
            "no single step makes more than half of the rise of 1 - CKA",
            apart,
            gradual,
            largest_step(apart),
        ),
    ]


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
items.register(Item(
    "player_fl.fmnist_layers", "Layers of a CNN on Fashion-MNIST after one epoch (PLayer-FL, Figs. 1-4)",
    {"default": RunConfig(dataset="fashion_mnist", keep_optimizer=False)},
    seeds=3, budget="about 5 minutes of one core", measure=_measure_fmnist, draw=_draw_fmnist,
))  # fmt: skip
