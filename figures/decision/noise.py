"""Race on noise and on permuted labels, and count the races that find no difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from fedlayers.studies import inference
from fedlayers.studies.arms import DEFAULT
from fedlayers.studies.choose import choose
from figures import items
from figures.items import Drawing, Finding
from figures.page import markdown, missing_runs, seeds_in_words
from figures.recipe import Recipe, labels
from fl_core import data as datasets, rows, runner
from fl_core.config import RunConfig
from fl_core.data import Source
from fl_core.seeds import numpy_generator

NAME = "decision.noise"
REPETITIONS = 10
ASKED = 9
"""Repetitions in which no difference may be claimed, at least."""
RACES = 3
VERDICT, LEADING, EXCLUDED = "verdict", "leader - arm", "arms excluded"
TITLES = {
    "noise": "noise, IID clients",
    "permuted": "Fed-Heart, labels permuted over all clients",
    "permuted_within": "Fed-Heart, labels permuted within each client",
}
FORMER = {"not decided": inference.LEVEL_ARMS}
"""Verdicts of stored races by today's words."""
BESIDE = "permuted_within"
"""Reported without a promise: clients' shares of classes, which sharing can harm, are still there."""


def configurations() -> dict[str, RunConfig]:
    """The data that each case starts from, and the race's local training."""
    heart = RunConfig(dataset="heart", algorithm="fedper", rounds=20, eval_every=1, keep_optimizer=True)
    return {"noise": replace(heart, partition="iid", clients=4), "permuted": heart, BESIDE: heart}


def null_source(case: str, real: Source, repetition: int) -> dict[str, np.ndarray]:
    """The arrays of an .npz file without anything to learn, or without what tells layers apart; new ones each time."""
    draw = numpy_generator(repetition, "nothing to decide", case)
    if case == "noise":
        return {"x": draw.normal(size=real.x.shape).astype(np.float32), "y": draw.permutation(real.y)}
    y = real.y.copy()
    assert real.owner is not None
    groups = [np.arange(len(y))] if case == "permuted" else [np.flatnonzero(real.owner == k) for k in set(real.owner)]
    for group in groups:
        y[group] = y[draw.permutation(group)]
    return {"x": real.x, "y": y, "client": np.array(real.owner_names)[real.owner]}


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Race three times on new data of this kind; record what is said of the arms."""
    config, lines = task.config, []
    real = datasets.open_named(config.dataset, data_root=config.data_root)
    with TemporaryDirectory() as out:
        path = Path(out) / f"{run}.npz"
        np.savez(path, **null_source(run, real, config.seed))  # type: ignore[arg-type]
        seeds = range(100 * config.seed, 100 * config.seed + RACES)
        choice = choose(
            replace(config, dataset=str(path)),
            Path(out) / "race",
            seeds=tuple(seeds),
        )
    sure = choice.inference
    excluded = int(sure.differences["excluded"].sum())
    lines.append(rows.row(EXCLUDED, excluded, variant=sure.verdict, **labels(task)))
    for line in sure.differences.itertuples():
        half = None if pd.isna(line.high) else float((line.high - line.low) / 2)
        lines.append(
            rows.row(LEADING, line.difference, stderr=half, variant=f"{sure.remaining[0]} - {line.arm}", **labels(task))
        )
    return rows.frame(lines)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    cases = [case for case in TITLES if (frame["run"] == case).any()]
    told = frame[frame["metric"] == EXCLUDED]
    counts = {case: told[told["run"] == case] for case in cases}
    undecided = {case: int((part["value"] == 0).sum()) for case, part in counts.items()}
    with style():
        figure = plt.figure(figsize=(7.4, 3.3), layout="constrained")
        axes = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
        for k, (ax, case) in enumerate(zip(axes, cases, strict=True)):
            part = frame[(frame["run"] == case) & (frame["metric"] == LEADING)]
            place = part["seed"] + (part.groupby("seed").cumcount() - 1) * 0.22
            ax.errorbar(
                place, 100 * part["value"], yerr=100 * part["stderr"], linestyle="none", marker=MARKERS[k],
                color=COLOURS[k], markersize=3.5, lw=0.9,
            )  # fmt: skip
            ax.axhline(0, color="0.5", lw=0.9)
            ax.set_title(TITLES[case].replace(", ", ",\n"), fontsize=8)
            ax.set_xlabel("repetition")
            ax.set_xticks(range(REPETITIONS))
        axes[0].set_ylabel("leader - other arm,\npoints of macro-F1")
    by_difference = {
        case: int((part["value"] - part["stderr"] > 0).groupby(part["seed"]).any().sum())
        for case in cases
        for part in [frame[(frame["run"] == case) & (frame["metric"] == LEADING)]]
    }
    caption = (
        f"{seeds_in_words(header['seeds'])}. Each draws new data and races the {len(DEFAULT)} arms of the default "
        f"{RACES} times to the end. That is a repetition. A mark is the leading arm's macro-F1 minus another's on "
        f"validation with its simultaneous 95 % interval. A repetition has {len(DEFAULT) - 1} marks. If no arm does "
        "significantly better than guessing, none is excluded. That holds even for an interval above 0."
    )
    columns = {
        "data": [TITLES[case] for case in cases],
        "repetitions": [str(len(counts[case])) for case in cases],
        "no difference claimed": [str(undecided[case]) for case in cases],
        "an interval above 0": [str(by_difference[case]) for case in cases],
        "answer of the race": [
            ", ".join(f"{n} x {FORMER.get(word, word)}" for word, n in counts[case]["variant"].value_counts().items())
            for case in cases
        ],
    }
    findings = tuple(
        Finding(
            f"{TITLES[case]}: no difference is claimed in at least {ASKED} of {REPETITIONS} repetitions",
            f"{undecided[case]} of {len(counts[case])}",
            None if len(counts[case]) < REPETITIONS else undecided[case] >= ASKED,
        )
        for case in cases
        if case != BESIDE
    )
    total = sum(len(counts[case]) for case in cases)
    found = sum(undecided[case] for case in cases)
    lead = f"**In {found} of {total} repetitions without signal the race finds no difference.**"
    return Drawing(figure, pd.DataFrame(columns), caption, findings, markdown(columns) + missing_runs(header), lead)


ITEM = items.register(
    Recipe(
        NAME,
        "Races where nothing is to be decided",
        configurations(),
        seeds=REPETITIONS,
        budget="about 15 minutes of one core",
        measure=_measure,
        draw=_draw,
    )
)
