"""Seek groups of clients where they are known, by clients' own models on each other's samples.

    python -m figures.decision.alike

Rows stand in ``alike.csv``. Those of the method *updates* are by the directions of first updates. Commit be4dbdb5
is the last with its code.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch

import fedlayers as fl
from figures.decision.known_runs import CHOSEN, SEEDS
from fl_core.display import csv_bytes
from fl_core.storage import write_atomically

ROWS = Path(__file__).with_name("alike.csv")
METHOD = "cross losses"
PLANTED = {
    "coded_digits": (1, 2, 3) * 10,
    "known_clusters": (1, 1, 1, 2, 2, 2),
    "known_outlier": (1, 1, 1, 1, 1, 2),
}
"""The groups that were made, one number a client. In other data sets no clients belong together more than others."""


def row(federation: str, seed: int) -> dict[str, object]:
    """Train each client alone, and return the groups by validation samples."""
    result = fl.run(
        dataset=federation, algorithm="local", seed=seed, patience=0, progress=False
    )
    clients = result.engine.data.clients
    cross_scores = fl.cross_scores(
        result, {client.name: client.validation for client in clients}
    )
    alike_groups = cross_scores.alike(seed)
    groups_text = "".join(map(str, alike_groups.groups.values()))
    return {
        "federation": federation,
        "seed": seed,
        "method": METHOD,
        "claimed": alike_groups.significant,
        "groups": groups_text,
        "silhouette": round(alike_groups.silhouette, 3),
    }


def main() -> None:
    """Make the rows of the method again."""
    torch.set_num_threads(1)
    rows = pd.read_csv(ROWS, dtype={"groups": str})
    new_rows = []
    for federation in CHOSEN:
        new_rows += [row(federation, seed) for seed in SEEDS]
    other_rows = rows[rows["method"] != METHOD]
    write_atomically(ROWS, csv_bytes(pd.concat([other_rows, pd.DataFrame(new_rows)])))


if __name__ == "__main__":
    main()
