"""Pictures of comparisons and races, and functions to save them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from diagnostics import plots
from diagnostics.plots.collect import figure_of
from fl_core import rows
from fl_core.records import environment

if TYPE_CHECKING:
    from fedlayers.studies.comparison import Comparison


def to_files() -> None:
    """Draw to files only from now on, even if there is a screen."""
    mpl.use("Agg")


def save(figure: Figure, path: Path, dpi: int = 200, **facts: str) -> None:
    """Save a figure on white without a margin, and close it.

    Args:
        facts: the command and the digest of the data, for the file's metadata. The commit is added.
    """
    facts |= {"commit": str(environment.current_environment()["commit"] or "")}
    figure.savefig(
        path, dpi=dpi, bbox_inches="tight", facecolor="white", metadata=facts
    )
    plt.close(figure)


def draw_race(rounds: pd.DataFrame, main: str) -> Figure:
    """Draw each arm's main score on validation samples over the rounds, with a band over the seeds.

    The name of an arm that was stopped early tells its last round, and what the judge forecast in points.

    Args:
        rounds, main: as in :class:`~fedlayers.studies.race.Standing`.
    """
    if "status" in rounds:
        told = rounds.itertuples()
        names = [
            f"{e.arm}, {e.status} at {e.trained} ({100 * e.forecast:+.1f})"
            if e.forecast
            else e.arm
            for e in told
        ]
        rounds = rounds.assign(arm=names)
    columns = ("arm", "seed", "round", main)
    found = [
        rows.row(
            main,
            value,
            algorithm=arm,
            seed=seed,
            round=done,
            model="personal",
            split="validation",
        )
        for arm, seed, done, value in rounds[list(columns)].itertuples(index=False)
    ]
    return figure_of(plots.learning(rows.frame(found), main, split="validation"))


def draw_comparison(comparison: Comparison) -> dict[str, Figure]:
    """Draw a comparison's pictures by name: scores with intervals, clients, and learning curves."""
    score = comparison.score
    table = comparison.table.rename(
        columns={score: "value", f"{score}_low": "low", f"{score}_high": "high"}
    )
    table = table.assign(n=table["seeds"])
    return {
        "comparison": figure_of(plots.comparison(table, score)),
        "clients": figure_of(plots.clients(comparison.frame, score)),
        "learning": figure_of(plots.learning(comparison.frame, score)),
    }
