"""A second witness: PFLlib's scores next to ours in settings of the papers, from the same split and initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items, pfllib
from figures.differences import last_evaluations, settled
from figures.items import Drawing, Item
from figures.page import markdown, means
from figures.pfedla import overlap
from figures.recipe import labels, tested, trained, where
from figures.scheduling import runs as scheduling
from figures.verdicts import LEVEL, MARGIN, judged
from fl_core import rows, runner

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
    scores, gaps = {}, {}
    for run in filter(header["had"].get, PAPERS):
        ours, theirs = (
            where(frame, run=run, variant=side)
            .groupby(["round", "seed"])["value"]
            .mean()
            .unstack("seed")
            for side in (OURS, THEIRS)
        )
        both = {OURS: ours, THEIRS: theirs.reindex(ours.index)}
        gaps[run] = settled(pd.concat(both), THEIRS, OURS)
        scores[run] = last_evaluations(pd.concat(both))
    stored = sum(map(len, header["had"].values()))
    cells = {"run": list(gaps)}
    cells |= {
        f"{which} %": [means(scores[run], [which])[0] for run in gaps]
        for which in (OURS, THEIRS)
    }
    cells["seeds"] = [str(gap.pairs) for gap in gaps.values()]
    caption = (
        "Mean test accuracy of the clients in settings of the papers, by the last three evaluations. Both sides have "
        "the same split and initial weights. PFLlib draws batches and clients in its own order, and drops batches that "
        f"are not full. {stored} of {stored + len(header['missing'])} runs are stored."
    )
    found = judged(gaps, LEVEL).finding(
        f"PFLlib and this project are level within {100 * MARGIN:g} point",
        "PFLlib's points more: ",
    )
    return Drawing(None, pd.DataFrame(cells), caption, (found,), markdown(cells))


items.register(Item(
    "algorithms.pfllib", "PFLlib next to this project in settings of the papers", PAPERS, seeds=5, measure=_measure,
    draw=_draw, partial=True, budget="4 hours of one core, with a checkout of PFLlib",
))  # fmt: skip
