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


def table_of(table_name: str) -> Asked:
    """Return a table. Those of scikit-learn are dealt to five clients; ``heart`` has four hospitals."""
    from sklearn import datasets

    if table_name == "heart":
        path = Path(fl.__file__).parents[1] / "fl_core/data/named/heart.csv"
        config_keys = {"client_column": "hospital", "label_column": "num"}
        frame = pd.read_csv(path)
        frame["num"] = np.where(frame["num"] > 0, "disease", "healthy")
        return Asked(frame, {**config_keys, "impute": "mean"})
    frame = getattr(datasets, f"load_{table_name}")(as_frame=True).frame
    client_numbers = np.random.default_rng(0).permutation(len(frame)) % CLIENTS
    frame = frame.assign(client=[f"client {k}" for k in client_numbers])
    frame["target"] = frame["target"].map("class {}".format)
    return Asked(frame, {"client_column": "client", "label_column": "target"})


def with_wrong_cells(table: Asked, draw: int) -> pd.DataFrame:
    """Return the table with ten numbers other than 0 multiplied by 1,000; draw 0 as it is."""
    if not draw:
        return table.frame
    role_columns = list(table.keys.values())
    features = table.frame.drop(columns=role_columns, errors="ignore")
    number_columns = features.select_dtypes("number").astype(float)
    nonzero_cells = np.argwhere(np.nan_to_num(number_columns.to_numpy()) != 0)
    generator = np.random.default_rng(draw)
    chosen_cells = nonzero_cells[
        generator.choice(len(nonzero_cells), CELLS, replace=False)
    ]
    changed_values = number_columns.to_numpy(copy=True)
    changed_values[tuple(chosen_cells.T)] *= FACTOR
    return table.frame.assign(
        **dict(zip(number_columns.columns, changed_values.T, strict=True))
    )


def decided(table_name: str, draw: int, first_way: str) -> tuple[Any, ...]:
    """Decide on a table with the wrong cells of a draw, and return its row.

    Args:
        first_way: the way that draw 0 recommends; empty for draw 0.
    """
    table = table_of(table_name)
    config = fl.RunConfig(**table.keys, rounds=ROUNDS, eval_every=ROUNDS)
    config, data = with_own(config, with_wrong_cells(table, draw), "mlp")
    with tempfile.TemporaryDirectory() as folder:
        question = make_question(
            config, data, Path(folder), None, SEEDS, 0, True, no_progress
        )
        question = replace(question, pooled=False)
        with open_backend("", 0, progress=False, live=False) as backend:
            losses = train_ways(question, backend, no_progress).table()
    ways = [*actions_of(question.ways)]
    way = recommended(losses, ways) or BASE_RATE
    way_losses = losses.parts[losses.seeds[0], way, TEST]
    assert isinstance(way_losses, Part)
    error = stratified_mean(
        way_losses.value, way_losses.weight, way_losses.group, way_losses.client
    ).error
    first_way_loss = losses.mean(first_way or way, TEST)
    return table_name, draw, way, losses.mean(way, TEST), error, first_way_loss


def verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each table: the way without wrong cells, how many draws keep it, and how far losses move."""
    table_rows = []
    for table_name, draw_rows in rows.groupby("table", sort=False):
        clean_row = draw_rows[draw_rows["draw"] == 0].iloc[0]
        wrong_rows = draw_rows[draw_rows["draw"] > 0]
        loss_moves = (wrong_rows["loss"] - clean_row["loss"]).abs()
        same_count = (wrong_rows["way"] == clean_row["way"]).sum()
        within_count = (loss_moves < clean_row["error"]).sum()
        other_ways = wrong_rows.loc[
            wrong_rows["way"] != clean_row["way"], "way"
        ].value_counts()
        way_texts = [f"`{way}` {draw_count}" for way, draw_count in other_ways.items()]
        table_rows.append(
            {
                "table": f"`{table_name}`",
                "way without wrong cells": f"`{clean_row['way']}`",
                "its test loss": f"{clean_row['loss']:.3f}",
                "its error": f"{clean_row['error']:.3f}",
                "the way stays": f"{same_count} of {len(wrong_rows)}",
                "other ways": ", ".join(way_texts),
                "the loss moves by less than its error": f"{within_count} of {len(wrong_rows)}",
                "it moves at most": f"{loss_moves.max():.3f}",
            }
        )
    return pd.DataFrame(table_rows)


def written(page: str) -> str:
    """Return the page of results with the table of the stored rows."""
    text_before, _, after_start = page.partition("<!-- rows:verdicts -->\n")
    end_mark = "<!-- end -->"
    _, _, text_after = after_start.partition(end_mark)
    table_text = markdown(verdicts(pd.read_csv(ROWS)))
    return f"{text_before}<!-- rows:verdicts -->\n{table_text}\n{end_mark}{text_after}"


def main(minutes: float = 0.0) -> None:
    """Decide on the tables and draws that have no row yet, and write the page."""
    end_time = time.monotonic() + 60 * minutes
    rows = pd.DataFrame(columns=COLUMNS)
    if ROWS.exists():
        rows = pd.read_csv(ROWS)
    for draw in range(DRAWS + 1):
        for table_name in NAMES:
            stored_draws = rows[rows["table"] == table_name].set_index("draw")
            if draw in stored_draws.index or time.monotonic() > end_time:
                continue
            first_way = str(stored_draws["way"][0]) if draw else ""
            new_row = pd.DataFrame(
                [decided(table_name, draw, first_way)], columns=COLUMNS
            )
            rows = pd.concat([rows, new_row], ignore_index=True)
            ROWS.write_bytes(csv_bytes(rows.round(6)))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
