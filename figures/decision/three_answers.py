"""Decide on three federations, draw the answers, and write their page.

    python -m figures.decision.three_answers measure [activity known_labels heart]
    python -m figures.decision.three_answers repeat --label plain --seed 10
    python -m figures.decision.three_answers

``measure`` decides as ``fedlayers choose`` does by default, and stores the test score of each way in
``three_answers.csv``. ``repeat`` decides on the federations of ``fedlayers demo`` and adds to ``demo_answers.csv``.
Without an argument the picture and the page are made from the rows.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

import fedlayers as fl
from fedlayers.cli.train import DEMO
from fedlayers.decision.answer import Answer
from fedlayers.decision.ways import ALONE, NONE, SHARE_ALL, SHARE_SOME
from figures.decision.known import BLOCK
from figures.forms import Kind, marks, sheet
from figures.page import markdown
from fl_core import models
from fl_core.data import datasets, load
from fl_core.display import csv_bytes

ROWS = Path(__file__).with_name("three_answers.csv")
REPEATS = Path(__file__).with_name("demo_answers.csv")
PAGE = Path(__file__).parents[2] / "docs/results/three_answers.md"
NAMES = ("activity", "known_labels", "heart")
TITLES = {
    SHARE_ALL: "share all layers",
    SHARE_SOME: "share some layers",
    ALONE: "do not federate",
    NONE: "no way is better than the base rate",
}
ORDER = (
    *("fedavg", "head_local", "local"),
    *("linear_fedavg", "linear_local", "boosting_local"),
)
"""Ways from above in the picture."""
CHANGE = 1e-6
"""Standard deviation of what is added to initial weights with ``--changed``."""


def lines_of(federation: str, answer: Answer) -> pd.DataFrame:
    """Return a line for each way with an action: its test score and its difference to the recommended one."""
    way_rows = [
        {"data": federation, "answer": answer.action, **way_line._asdict()}
        for way_line in answer.lines
        if way_line.action
    ]
    return pd.DataFrame(way_rows)


def measure(federations: Sequence[str]) -> None:
    """Decide on federations, and store the test scores in place of earlier ones."""
    rows = pd.read_csv(ROWS) if ROWS.exists() else pd.DataFrame({"data": []})
    for federation in federations:
        with TemporaryDirectory() as folder:
            answer = fl.choose(dataset=federation, out=Path(folder) / "out", seeds=3)
        rows = pd.concat(
            [rows[rows["data"] != federation], lines_of(federation, answer)]
        )
        ROWS.write_bytes(csv_bytes(rows))


def changed_model(dataset_name: str, seed: int) -> nn.Module:
    """Return the network of a dataset, with weights that are changed a little."""
    data, recipe = load(dataset_name), datasets()[dataset_name]
    options = recipe.model_options
    network = models.build(
        recipe.model, data.shape, data.n_classes, seed=seed, options=options
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(CHANGE * torch.randn(weight.shape, generator=generator))
    return network


def repeat(label: str, seed: int, changed: bool, federations: Sequence[str]) -> None:
    """Decide on federations of the demo from a first seed, and add a line for each."""
    for federation in federations:
        start = time.process_time()
        model = None
        if changed:
            model = changed_model(federation, seed)
        arguments: Any = {
            "dataset": federation,
            "seed": seed,
            "seeds": 3,
            "progress": False,
        }
        with TemporaryDirectory() as folder:
            answer = fl.choose(out=Path(folder) / "out", model=model, **arguments)
        new_row = {
            "label": label,
            "seed": seed,
            "data": federation,
            "answer": answer.action,
            "way": answer.way,
            "seconds": round(time.process_time() - start, 1),
        }
        repeats_table = pd.DataFrame([new_row])
        if REPEATS.exists():
            repeats_table = pd.concat([pd.read_csv(REPEATS), repeats_table])
        REPEATS.write_bytes(csv_bytes(repeats_table))


def picture(rows: pd.DataFrame) -> Figure:
    """Draw a column for each federation: a dot for each way, and the interval of its difference to the best."""
    with sheet(6.6, 2.8) as figure:
        panels = figure.subplots(1, len(NAMES), sharey=True)
        for ax, federation in zip(panels, NAMES, strict=True):
            federation_rows = rows[rows["data"] == federation].set_index("way")
            best_way, answer = (
                federation_rows.index[0],
                federation_rows["answer"].iloc[0],
            )
            way_scores = federation_rows[["value", "low", "high"]].reindex(ORDER)
            best_score = way_scores.loc[best_way, "value"]
            way_scores[["low", "high"]] += best_score
            rival_scores = way_scores.drop(index=best_way).reindex(ORDER)
            recommended_score = way_scores.loc[[best_way], ["value"]].reindex(ORDER)
            marks(
                ax,
                [Kind(rival_scores), Kind(recommended_score, look={"marker": "o"})],
                ORDER,
                level=best_score,
                title=f"{federation}:\n{TITLES[answer]}",
            )
        figure.supxlabel("test log loss (lower is better)", fontsize="medium")
    return figure


def scores(rows: pd.DataFrame) -> str:
    """Return the test scores of all ways as a table."""
    table_rows = []
    for row in rows.itertuples():
        is_best = row.way == rows.loc[rows["data"] == row.data, "way"].iloc[0]
        gap = f"{row.difference:+.2f} [{row.low + 0.0:.2f}, {row.high:.2f}]"
        table_rows.append(
            {
                "federation": f"`{row.data}`",
                "way": f"`{row.way}`",
                "test log loss": f"{row.value:.2f}",
                "minus the recommended way, 95 %": "recommended" if is_best else gap,
            }
        )
    return markdown(pd.DataFrame(table_rows))


def repeats(rows: pd.DataFrame) -> str:
    """Return the answers to repeated demos as a table: what they name, and of how many."""
    table_rows = []
    for (label, federation), group_rows in rows.groupby(["label", "data"], sort=False):
        way_counts = group_rows["way"].value_counts()
        table_rows.append(
            {
                "what": label,
                "federation": f"`{federation}`",
                "first seeds": ", ".join(map(str, sorted(group_rows["seed"]))),
                "way": ", ".join(f"`{way}` {n}" for way, n in way_counts.items()),
                "processor seconds": f"{group_rows['seconds'].mean():.0f}",
            }
        )
    return markdown(pd.DataFrame(table_rows))


def written(page: str) -> str:
    """Return the page with its tables made from the rows."""
    tables = {
        "scores": scores(pd.read_csv(ROWS)),
        "repeats": repeats(pd.read_csv(REPEATS)),
    }
    return BLOCK.sub(
        lambda match: f"{match[1]}{tables[match[2]].rstrip()}\n{match[3]}", page
    )


def main() -> None:
    """Measure, repeat, or draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="draw")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--label", default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--changed", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.what == "measure":
        measure(arguments.names or NAMES)
    elif arguments.what == "repeat":
        repeat(
            arguments.label,
            arguments.seed,
            arguments.changed,
            arguments.names or [*DEMO],
        )
    else:
        figure = picture(pd.read_csv(ROWS))
        figure.savefig(PAGE.with_suffix(".png"), dpi=160)
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
