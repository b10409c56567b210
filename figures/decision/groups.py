"""Plant groups of clients, and count the seeds with groups found. ``REGISTERED_GROUPS.md`` defines the study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.metrics import adjusted_rand_score

from diagnostics.groups import DRAWS, client_groups
from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.items import Drawing, Finding
from figures.page import markdown, missing_runs
from figures.recipe import Recipe, labels
from fl_core import rows, runner
from fl_core.config import RunConfig, in_memory
from fl_core.data import open_named
from fl_core.seeds import numpy_generator

NAME = "decision.groups"
PLANTED, IID = "planted", "iid"
TITLES = {PLANTED: "turned by four angles", IID: "IID"}
CLIENTS, ANGLES, FIRST, SEEDS, ASKED = 12, 4, 1000, 10, 9
SILHOUETTE, NULL, COUNT, AGREEMENT = "silhouette", "silhouette, shuffled", "groups", "adjusted Rand index"


def configurations() -> dict[str, RunConfig]:
    """Return the local training. It is the same in both cases."""
    config = RunConfig(
        dataset="digits", model="mlp", model_options={"sizes": (64, 32)}, epochs=5, batch_size=32, lr=1e-3
    )
    return {PLANTED: config, IID: config}


def dealt(turned: bool, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return digits assigned to clients at random. Client k has its images turned by k times 90 degrees."""
    source = open_named("digits")
    owner = numpy_generator(seed, "groups of clients").permutation(len(source.y)) % CLIENTS
    parts = {}
    for client in range(CLIENTS):
        x = np.rot90(source.x[owner == client], client % ANGLES * turned, axes=(-2, -1))
        parts[f"client {client}"] = (np.ascontiguousarray(x), source.y[owner == client])
    return parts


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Group the clients of a federation that this seed draws."""
    seed = FIRST + task.config.seed
    config = replace(configurations()[run], dataset=RunConfig().dataset, model=None, seed=seed, patience=0)
    found = client_groups(runner.assemble(in_memory(config, dealt(run == PLANTED, seed), "mlp")))
    truth = [client % ANGLES if run == PLANTED else 0 for client in range(CLIENTS)]
    values = {
        SILHOUETTE: found.silhouette,
        COUNT: len(set(found.of.values())),
        AGREEMENT: adjusted_rand_score(truth, list(found.of.values())),
    }
    lines = [rows.row(name, float(value), layer=found.layer, **labels(task)) for name, value in values.items()]
    for draw, value in enumerate(found.nulls):
        lines.append(rows.row(NULL, value, variant=str(draw), layer=found.layer, **labels(task)))
    return rows.frame(lines)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each run and seed: both silhouettes, how many groups are claimed, and their agreement."""
    grouped = frame.groupby(["run", "seed", "metric"])["value"]
    lines = grouped.max().unstack()
    lines["drawn"] = grouped.size().unstack()[NULL]
    return lines.reset_index()


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    lines = table(frame)
    with style():
        figure = plt.figure(figsize=(6.4, 3.0), layout="constrained")
        ax = figure.subplots()
        for k, (run, title) in enumerate(TITLES.items()):
            own = lines[lines["run"] == run]
            ax.plot(own[NULL], own[SILHOUETTE], MARKERS[k], color=COLOURS[k], markersize=4, label=title)
        ax.axline((0, 0), slope=1, color="0.5", lw=0.9)
        ax.set(xlabel="greatest silhouette of shuffled clients", ylabel="silhouette of the clients")
        figure.legend(loc="outside right upper", fontsize=7)
    of = {run: lines[lines["run"] == run] for run in TITLES}
    right = int((of[PLANTED][AGREEMENT] == 1).sum())
    none = int((of[IID][COUNT] == 1).sum())
    columns = {
        "data": list(TITLES.values()),
        "seeds": [str(len(own)) for own in of.values()],
        "groups claimed": [str(int((own[COUNT] > 1).sum())) for own in of.values()],
        "exactly the planted ones": [str(right), ""],
        "median silhouette": [f"{own[SILHOUETTE].median():.2f}" for own in of.values()],
        "the greatest of a shuffled federation": [f"{own[NULL].max():.2f}" for own in of.values()],
    }
    complete = all(len(own) == SEEDS for own in of.values())
    findings = (
        Finding(
            f"The planted groups are found in at least {ASKED} of {SEEDS} seeds",
            f"{right} of {len(of[PLANTED])}",
            right >= ASKED if complete else None,
        ),
        Finding(
            f"No groups are claimed on IID data in {SEEDS} seeds",
            f"none in {none} of {len(of[IID])}",
            none == SEEDS if complete else None,
        ),
    )
    caption = (
        f"A mark is a seed. Above the line the clients' silhouette exceeds that of all {DRAWS} shuffled federations. "
        "The shuffling ends with the first that reaches it."
    )
    lead = f"**Planted groups of clients are found in {right} of {len(of[PLANTED])} seeds.**"
    text = "The analysis was [registered](../decision/REGISTERED_GROUPS.md) before these seeds."
    text = "\n\n".join([text, markdown(columns) + missing_runs(header)])
    return Drawing(figure, lines, caption, findings, text, lead)


ITEM = items.register(
    Recipe(
        NAME,
        "Groups of clients by their updates",
        configurations(),
        seeds=SEEDS,
        budget="about 5 minutes of one core",
        measure=_measure,
        draw=_draw,
    )
)
