"""Replay what the product took from the study with tuned rates: its bands of label skew.

The study has ended. Its judge of curves is ``fit_judge`` of commit ee7e87b5. Its rows have two files a federation:
rows, and log-probabilities of held-out samples in hundredths of a nat. ``REGISTERED_FINISHED.md`` and
``REGISTERED_JUDGE.md`` define the numbers. Commit 44010171 is the last with the code of the study's page.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fedlayers.studies.hint import label_skew
from figures import packing
from figures.items import ROWS

FOLDER = ROWS / "decision.finished"
CUTS = ("nothing", "quarter", "half", "three_quarters", "all_but_last", "all")
"""By depth."""


def federations() -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name of each federation, and the runs of all its cuts at four rates.

    Scores are macro-F1 on ``validation`` and ``held_out`` samples, weighted by training samples; index seed, place of
    the cut in :data:`CUTS`, rate. A run that diverged has NaN on validation and its seed's least held-out score.
    """
    for path in sorted(FOLDER.glob("*.rows.parquet")):
        lines = []
        for header, frame in packing.read(path):
            lr = header["about"]["config"]["lr"]
            own = frame[frame["estimator"].eq("cuts") & frame["metric"].eq("macro_f1")]
            for (cut, split), each in own.groupby(["variant", "split"], observed=True):
                at = header["seed"], CUTS.index(str(cut)), lr
                mean = np.average(each["value"], weights=each["n_train"])
                lines.append((*at, str(split), mean))
        columns = ["seed", "cut", "lr", "split", "value"]
        runs = pd.DataFrame(lines, columns=columns)
        runs = runs.pivot(index=columns[:3], columns="split", values="value")
        runs = runs.reindex(pd.MultiIndex.from_product(runs.index.levels))
        worst = runs.groupby("seed")["held_out"].transform("min")
        runs["held_out"] = runs["held_out"].fillna(worst)
        yield path.name.partition(".")[0], runs


def gain_over_fedavg(runs: pd.DataFrame) -> float:
    """Return what the best cut gains on sharing all, in points, the mean over seeds.

    A cut's rate is the best on validation in the other seeds. The best cut is the best on their held-out samples.
    """
    found = []
    for seed in runs.index.levels[0]:
        others, own = runs.drop(seed, level="seed"), runs.loc[seed, "held_out"]
        validation = others["validation"].unstack("seed").mean(axis=1, skipna=False)
        tuned = list(validation.groupby("cut").idxmax())
        score = others["held_out"].unstack("seed").mean(axis=1)[tuned]
        found.append(own[score.idxmax()] - own[tuned[-1]])
    return 100 * float(np.mean(found))


def skew_and_gains() -> pd.DataFrame:
    """Return a line for each federation: the skew of its held-out labels, and the gain in points, means over seeds."""
    lines = []
    for name, runs in federations():
        labels = pd.read_parquet(
            FOLDER / f"{name}.logs.parquet",
            columns=["run", "seed", "what", "client", "label"],
        )
        skews = []
        for _, own in labels.groupby("seed"):
            first = (own[["run", "what"]] == own[["run", "what"]].iloc[0]).all(axis=1)
            counts = pd.crosstab(own["client"][first], own["label"][first])
            skews.append(label_skew(counts.to_numpy(float)))
        lines.append((name, np.mean(skews), gain_over_fedavg(runs)))
    return pd.DataFrame(lines, columns=["federation", "skew", "gain"])
