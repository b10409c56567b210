"""A second witness: PFLlib's scores next to ours in settings of the papers, from the same split and initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items, pfllib, scorecard
from figures.differences import last_evaluations
from figures.items import Drawing, Item
from figures.names import title
from figures.page import markdown, means, missing_runs
from figures.pfedla import overlap
from figures.recipe import labels, tested, trained, where
from figures.scheduling import runs as scheduling
from fl_core import rows
from fl_core.run import runner

SCORE = "accuracy"
OURS, THEIRS = "here", "PFLlib"
PAPERS = {
    "scheduling_fedavg": scheduling.RUNS["cifar10.fedavg"],
    "scheduling_fedper": scheduling.RUNS["cifar10.fedper"],
    "pfedla_fedavg": overlap.RUNS["fedavg"],
}
"""Runs of the papers' studies on CIFAR-10 with plain SGD, which alone PFLlib has."""


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record every client's test accuracy after every evaluation, here and by PFLlib."""
    pfllib.checkout()  # before anything is trained
    accuracy = tested(trained(task)[1])
    personal = accuracy[accuracy["model"] == "personal"]
    ours = accuracy[accuracy["model"] == "global"] if personal.empty else personal
    sizes = dict(zip(ours["client"], ours["n_samples"], strict=True))
    found = {
        OURS: zip(ours["round"], ours["client"], ours["value"], strict=True),
        THEIRS: pfllib.scores(task),
    }
    return rows.frame(
        rows.row(SCORE, value, variant=side, client=client, round=int(done), split="test",
                 n_samples=sizes[client], **labels(task))
        for side, scores in found.items()
        for done, client, value in scores
    )  # fmt: skip


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    cells: dict[str, list[str]] = {
        "paper and method": [],
        f"{OURS} %": [],
        f"{THEIRS} %": [],
    }
    for run in filter(header["had"].get, PAPERS):
        own = where(frame, run=run).groupby(["variant", "round", "seed"])["value"]
        curves = own.mean().unstack("seed")
        rounds = curves.loc[OURS].index  # of its more frequent evaluations
        both = curves[curves.index.get_level_values("round").isin(rounds)]
        paper, _, method = run.partition("_")
        called = f"{scorecard.TITLES[paper]}'s {title(method)}"
        ours, theirs = means(last_evaluations(both), [OURS, THEIRS])
        for column, cell in zip(cells.values(), (called, ours, theirs), strict=True):
            column.append(cell)
    caption = (
        "Mean test accuracy of the clients in settings of the papers, one seed, by the last three evaluations. Both "
        "sides have the same split and initial weights. PFLlib draws batches and clients in its own order, and drops "
        f"batches that are not full.{missing_runs(header)}"
    )
    told = [
        f"{run} {theirs} % by PFLlib and {ours} % here"
        for run, ours, theirs in zip(*cells.values(), strict=True)
    ]
    lead = f"**One seed each: {'; '.join(told)}.** One seed shows no difference."
    return Drawing(None, pd.DataFrame(cells), caption, (), markdown(cells), lead)


items.register(Item(
    "algorithms.pfllib", "PFLlib next to this project in settings of the papers", PAPERS, seeds=1, measure=_measure,
    draw=_draw, partial=True, budget="an hour of one core, with a checkout of PFLlib",
))  # fmt: skip
