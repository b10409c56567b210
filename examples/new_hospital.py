"""Train three hospitals together, then a fourth alone from their weights: python -m examples.new_hospital FOLDER."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

import fedlayers as fl
from fl_core.data.inputs import Inputs

NEW = "va"
"""The hospital that takes no part in the first run."""
CONFIG = fl.RunConfig(model="mlp", lr=0.01, rounds=10, eval_every=1, patience=0)


def main(folder: str) -> dict[str, float]:
    """Train all runs, print their scores, and return the macro-F1 on test samples of each."""
    with files("fl_core.data").joinpath("named/heart.csv").open() as file:
        table = pd.read_csv(file)
    mine = table["hospital"] == NEW
    columns: dict[str, Any] = {
        "client_column": "hospital",
        "label_column": "num",
        "impute": "median",
    }
    out = Path(folder) / "others"
    others = fl.run(
        CONFIG, out, data=table[~mine], algorithm="fedavg", progress=False, **columns
    )
    scores = {"others": float(others.scores.loc["global", "macro_f1"].mean())}
    print(f"fedavg of the other hospitals: macro-F1 {scores['others']:.3f}, their mean")

    # The new hospital's samples are scaled and filled as those of the federation.
    x = Inputs.from_federation(others.engine.data).samples(table[mine]).x
    own = {NEW: (x, table.loc[mine, "num"].to_numpy())}
    for init in (str(out), None):
        alone = fl.run(CONFIG, data=own, algorithm="local", init=init, progress=False)
        name = "fresh" if init is None else "init"
        scores[name] = float(alone.scores.loc["personal", "macro_f1"].mean())
        print(
            f"local of {NEW} from {'fresh weights' if init is None else init}: macro-F1 {scores[name]:.3f}"
        )
    return scores


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
