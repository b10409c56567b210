"""Draws the committed benchmark tables as one picture: each ratio with its interval and target."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes

from benchmarks.pairs import RESULTS
from diagnostics.plots.drawing import style
from figures.drawing import save_png
from fl_core.errors import UsageError

KINDS = (
    ("<=", "time relative to the baseline (lower is better)"),
    (">=", "times the baseline's speed (higher is better)"),
)


def read() -> pd.DataFrame:
    """The rows of all stored tables.

    Raises:
        UsageError: there is none.
    """
    tables = [pd.read_csv(path, comment="#") for path in sorted(RESULTS.glob("*.csv"))]
    if not tables:
        raise UsageError(
            f"{RESULTS} must have tables; got none. Run a benchmark first."
        )
    return pd.concat(tables, ignore_index=True)


def draw(path: Path = RESULTS / "benchmarks.png") -> Path:
    """Draw every comparison of times that has a target."""
    frame = read()
    frame = frame[(frame.unit == "time") & frame.target.notna() & frame.ratio.notna()]
    groups = [
        (frame[frame.target.str.startswith(sign)], label) for sign, label in KINDS
    ]
    groups = [(rows, label) for rows, label in groups if len(rows)]
    with style():
        sizes = [len(rows) for rows, _ in groups]
        figure, axes = plt.subplots(
            len(groups),
            figsize=(7.5, 0.8 + 0.36 * sum(sizes) + 0.6 * len(groups)),
            height_ratios=sizes,
            squeeze=False,
        )
        for (rows, label), ax in zip(groups, axes[:, 0], strict=True):
            _panel(ax, rows, label)
        save_png(figure, path, 110, bbox_inches="tight")
        plt.close(figure)
    return path


def _panel(ax: Axes, rows: pd.DataFrame, label: str) -> None:
    for place, row in enumerate(rows.itertuples()):
        met = row.holds == "yes"
        target = float(row.target.split()[1])
        ax.plot([target, target], [place - 0.35, place + 0.35], color="#444444", lw=2)
        ax.plot(
            [row.low, row.high],
            [place, place],
            color="#0072B2" if met else "#D55E00",
            lw=2,
        )
        ax.plot(
            row.ratio,
            place,
            "o" if met else "X",
            color="#0072B2" if met else "#D55E00",
            ms=6,
        )
    ax.set_yticks(
        range(len(rows)),
        [
            f"{row.job}: {row.what}\nagainst {_short(row.baseline)}"
            for row in rows.itertuples()
        ],
    )
    ax.tick_params(axis="y", labelsize=7)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel(f"{label}; stroke: target, cross: missed")
    if rows.high.max() > 8 * rows.low.min():
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(
            ticker.FuncFormatter(lambda value, _: f"{value:g}")
        )
        ax.xaxis.set_minor_locator(ticker.NullLocator())


def _short(text: str, most: int = 64) -> str:
    return (
        text
        if len(text) <= most
        else text[: text[:most].rfind(",")]
        if "," in text[:most]
        else text[:most]
    )
