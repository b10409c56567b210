"""Multiply ten cells of a table by 1,000, decide again, and compare: twenty draws of each of three tables.

    python -m figures.decision.resistance [--minutes 60]

A row of ``resistance.csv`` has one table and draw. Draw 0 has no wrong cell. The ten cells of another draw are numbers
other than 0, anywhere in the table: in training, validation and test samples. A row has the recommended way with its
test loss, the error of that loss over patients, and the test loss of the way that draw 0 recommends. Rows that exist
are not made again, and the page of results is written from them.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import tyro

import fedlayers as fl
from fedlayers.backends.local import no_progress
from fedlayers.decision.jobs import open_backend
from fedlayers.decision.table import BASE_RATE, TEST, Part, recommended
from fedlayers.decision.training import make_question, train_ways
from fedlayers.decision.verdict import actions_of
from figures.page import markdown
from fl_core.config import with_own
from fl_core.display import csv_bytes
from fl_core.statistics import stratified_mean

ROWS = Path(__file__).with_name("resistance.csv")
PAGE = Path(__file__).parents[2] / "docs/results/wrong_cells.md"
DRAWS, CELLS, FACTOR = 20, 10, 1000.0
ROUNDS, SEEDS, CLIENTS = 10, 1, 5
COLUMNS = ["table", "draw", "way", "loss", "error", "first_way_loss"]
NAMES = ("breast_cancer", "heart", "wine")


class Asked(NamedTuple):
    """A table, and the keys of its configuration."""

    frame: pd.DataFrame
    keys: dict[str, Any]


def table_of(name: str) -> Asked:
    """Return a table. Those of scikit-learn are dealt to five clients; ``heart`` has four hospitals."""
    from sklearn import datasets

    if name == "heart":
        path = Path(fl.__file__).parents[1] / "fl_core/data/named/heart.csv"
        keys = {"client_column": "hospital", "label_column": "num"}
        frame = pd.read_csv(path)
        frame["num"] = np.where(frame["num"] > 0, "disease", "healthy")
        return Asked(frame, {**keys, "impute": "mean"})
    frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    order = np.random.default_rng(0).permutation(len(frame)) % CLIENTS
    frame = frame.assign(client=[f"client {k}" for k in order])
    frame["target"] = frame["target"].map("class {}".format)
    return Asked(frame, {"client_column": "client", "label_column": "target"})


def with_wrong_cells(table: Asked, draw: int) -> pd.DataFrame:
    """Return the table with ten numbers other than 0 multiplied by 1,000; draw 0 as it is."""
    if not draw:
        return table.frame
    roles = list(table.keys.values())
    features = table.frame.drop(columns=roles, errors="ignore")
    values = features.select_dtypes("number").astype(float)
    places = np.argwhere(np.nan_to_num(values.to_numpy()) != 0)
    generator = np.random.default_rng(draw)
    chosen = places[generator.choice(len(places), CELLS, replace=False)]
    changed = values.to_numpy(copy=True)
    changed[tuple(chosen.T)] *= FACTOR
    return table.frame.assign(**dict(zip(values.columns, changed.T, strict=True)))


def decided(name: str, draw: int, first: str) -> tuple[Any, ...]:
    """Decide on a table with the wrong cells of a draw, and return its row.

    Args:
        first: the way that draw 0 recommends; empty for draw 0.
    """
    table = table_of(name)
    config = fl.RunConfig(**table.keys, rounds=ROUNDS, eval_every=ROUNDS)
    config, data = with_own(config, with_wrong_cells(table, draw), "mlp")
    with tempfile.TemporaryDirectory() as folder:
        work = make_question(
            config, data, Path(folder), None, SEEDS, 0, True, no_progress
        )
        work = replace(work, pooled=False)
        with open_backend("", 0, progress=False, live=False) as place:
            losses = train_ways(work, place, no_progress).table()
    names = [*actions_of(work.ways)]
    way = recommended(losses, names) or BASE_RATE
    part = losses.parts[losses.seeds[0], way, TEST]
    assert isinstance(part, Part)
    error = stratified_mean(part.value, part.weight, part.group, part.client).error
    of_first = losses.mean(first or way, TEST)
    return name, draw, way, losses.mean(way, TEST), error, of_first


def verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each table: the way without wrong cells, how many draws keep it, and how far losses move."""
    lines = []
    for name, of_table in rows.groupby("table", sort=False):
        first = of_table[of_table["draw"] == 0].iloc[0]
        of_draws = of_table[of_table["draw"] > 0]
        moved = (of_draws["loss"] - first["loss"]).abs()
        n_same = (of_draws["way"] == first["way"]).sum()
        n_within = (moved < first["error"]).sum()
        others = of_draws.loc[of_draws["way"] != first["way"], "way"].value_counts()
        names = [f"`{way}` {count}" for way, count in others.items()]
        lines.append(
            {
                "table": f"`{name}`",
                "way without wrong cells": f"`{first['way']}`",
                "its test loss": f"{first['loss']:.3f}",
                "its error": f"{first['error']:.3f}",
                "the way stays": f"{n_same} of {len(of_draws)}",
                "other ways": ", ".join(names),
                "the loss moves by less than its error": f"{n_within} of {len(of_draws)}",
                "it moves at most": f"{moved.max():.3f}",
            }
        )
    return pd.DataFrame(lines)


def written(page: str) -> str:
    """Return the page of results with the table of the stored rows."""
    head, _, rest = page.partition("<!-- rows:verdicts -->\n")
    end = "<!-- end -->"
    _, _, tail = rest.partition(end)
    table = markdown(verdicts(pd.read_csv(ROWS)))
    return f"{head}<!-- rows:verdicts -->\n{table}\n{end}{tail}"


def main(minutes: float = 0.0) -> None:
    """Decide on the tables and draws that have no row yet, and write the page."""
    until = time.monotonic() + 60 * minutes
    rows = pd.DataFrame(columns=COLUMNS)
    if ROWS.exists():
        rows = pd.read_csv(ROWS)
    for draw in range(DRAWS + 1):
        for name in NAMES:
            of_table = rows[rows["table"] == name].set_index("draw")
            if draw in of_table.index or time.monotonic() > until:
                continue
            first = str(of_table["way"][0]) if draw else ""
            line = pd.DataFrame([decided(name, draw, first)], columns=COLUMNS)
            rows = pd.concat([rows, line], ignore_index=True)
            ROWS.write_bytes(csv_bytes(rows.round(6)))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
