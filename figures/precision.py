"""Compare accuracy with and without bfloat16 in local training, on the runs of the learning check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.drawing import COLOURS, style
from fedlayers.studies.comparison import headline
from figures import items
from figures.differences import Difference, difference, joint
from figures.items import Drawing, Finding
from figures.learning import CNN
from figures.names import title
from figures.page import markdown, missing_runs, percent, seeds_in_words
from figures.recipe import Recipe, scored_at_end, tested, trained
from fl_core import runner

NAME = "algorithms.bf16"
MARGIN = 0.02
"""Accuracy within which the two precisions count as level."""
METHODS = ("fedavg", "fedper", "ditto", "scaffold", "fedbabu")
"""One model for all, a personal head, a second model a client, control variates, and a head that rests."""
PLAIN, HALF = "float32", "bf16"
BASE = scored_at_end(CNN.with_keys(rounds=20))
"""A third of the learning check's rounds."""
RUNS = {
    f"{method}.{precision}": BASE.with_keys(algorithm=method, precision=precision)
    for method in METHODS
    for precision in (PLAIN, HALF)
}


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    return tested(headline(trained(task)[1]))


def gaps(frame: pd.DataFrame) -> dict[str, Difference]:
    """Return the gain in test accuracy by bfloat16 for each method, paired by seed, as means over clients."""
    means = frame.groupby(["run", "seed"])["value"].mean().unstack("seed")
    both = [
        each
        for each in METHODS
        if {f"{each}.{PLAIN}", f"{each}.{HALF}"} <= set(means.index)
    ]
    return {
        each: difference(means, f"{each}.{HALF}", f"{each}.{PLAIN}") for each in both
    }


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    found = gaps(frame)
    means = frame.groupby("run")["value"].mean()
    with style():
        figure = plt.figure(figsize=(6.4, 3.2), layout="constrained")
        ax = figure.subplots()
        for y, gap in enumerate(found.values()):
            ax.hlines(
                y,
                100 * gap.bounds.low,
                100 * gap.bounds.high,
                color=COLOURS[0],
                linewidth=1.6,
            )
            ax.plot(
                100 * gap.bounds.value,
                y,
                linestyle="none",
                marker="o",
                color=COLOURS[0],
            )
        for side in (-1, 1):
            ax.axvline(side * 100 * MARGIN, color="0.5", linestyle="--", linewidth=0.9)
        ax.axvline(0, color="0.5", linewidth=0.9)
        ax.set_yticks(range(len(found)), [title(each) for each in found])
        ax.set(
            ylim=(len(found) - 0.5, -0.5),
            xlabel="bf16 - float32, points of test accuracy",
        )
    columns = {
        "algorithm": [title(each) for each in found],
        "seeds": [str(gap.pairs) for gap in found.values()],
        "float32 %": [f"{100 * means[f'{each}.{PLAIN}']:.1f}" for each in found],
        "bf16 %": [f"{100 * means[f'{each}.{HALF}']:.1f}" for each in found],
        "difference": [percent(*gap.interval, sign="+") for gap in found.values()],
        "within 2 points": [
            {True: "yes", False: "no", None: "undecided"}[gap.level(MARGIN)]
            for gap in found.values()
        ],
    }
    verdicts = [gap.level(MARGIN) for gap in found.values()]
    finding = Finding(
        f"every algorithm's accuracy with bf16 is that with float32 within {100 * MARGIN:g} points",
        "; ".join(
            f"{title(each)} {percent(*gap.bounds, sign='+')}"
            for each, gap in found.items()
        )
        + " (90 % intervals: two one-sided tests at 5 %)",
        joint(verdicts) if len(found) == len(METHODS) else None,
    )
    config = next(run["config"] for run in header["runs"].values())
    caption = (
        f"Mean test accuracy of {config['clients']} clients with local training in bfloat16 minus that in float32 "
        f"(paired by seed). The ends of the 90 % intervals are two one-sided tests at 5 %. Fashion-MNIST is that of "
        f"the learning check with {config['rounds']} of its {CNN.federation.rounds} rounds "
        f"and {seeds_in_words(header['seeds'])}."
        f"{missing_runs(header)}"
    )
    return Drawing(
        figure, pd.DataFrame(columns), caption, (finding,), markdown(columns)
    )


ITEM = items.register(
    Recipe(
        NAME,
        "Local training in bfloat16 and in float32",
        RUNS,
        seeds=5,
        budget="about 100 minutes of one core that knows bfloat16",
        measure=_measure,
        draw=_draw,
    )
)
