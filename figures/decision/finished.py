"""Replay what the product took from the study with tuned rates: its bands of label skew.

The study has ended. Its judge of curves is ``fit_judge`` of commit ee7e87b5. Its rows have two files a federation:
rows, and log-probabilities of held-out samples in hundredths of a nat. ``REGISTERED_FINISHED.md`` and
``REGISTERED_JUDGE.md`` define the numbers. Commit 44010171 is the last with the code of the study's page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedlayers.studies.hint import label_skew
from figures import packing
from figures.items import ROWS

FOLDER = ROWS / "decision.finished"
CUTS = ("nothing", "quarter", "half", "three_quarters", "all_but_last", "all")
"""By depth."""


class Federation(NamedTuple):
    """A federation of the study.

    Attributes:
        family: its data family.
        new: whether no way of choosing was developed with the family.
        rounds: that a run had at most.
        runs: macro-F1 on ``validation`` and ``held_out`` samples, weighted by training samples, and the ``curve`` on
            validation; index seed, place of the cut in :data:`CUTS`, rate. A run that diverged has NaN on validation
            and its seed's least score on held-out samples.
    """

    name: str
    family: str
    new: bool
    rounds: int
    runs: pd.DataFrame


def federations() -> Iterator[Federation]:
    """Yield the federations with their runs of all cuts at four rates."""
    for path in sorted(FOLDER.glob("*.rows.parquet")):
        name, lines = path.name.partition(".")[0], []
        for header, frame in packing.read(path):
            config = header["about"]["config"]
            own = frame[frame["estimator"] == "cuts"]
            for cut, run in own.groupby("variant", observed=True):
                score = run[run["metric"] == "macro_f1"]
                curve = run[run["metric"] == "curve"].sort_values("round")
                means = {
                    str(split): np.average(each["value"], weights=each["n_train"])
                    for split, each in score.groupby("split", observed=True)
                }
                at = {"seed": header["seed"], "cut": CUTS.index(str(cut)), "lr": config["lr"]}  # fmt: skip
                curve = curve.set_index("round")["value"]
                lines.append({**at, **means, "curve": curve})
        runs = pd.DataFrame(lines).set_index(["seed", "cut", "lr"])
        runs = runs.reindex(pd.MultiIndex.from_product(runs.index.levels))
        worst = runs.groupby("seed")["held_out"].transform("min")
        runs["held_out"] = runs["held_out"].fillna(worst)
        new = config["dataset"].startswith("figures.decision.families:")
        family = name if new else name.partition("_")[0]
        yield Federation(name, family, new, config["rounds"], runs)


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
    for each in federations():
        labels = pd.read_parquet(
            FOLDER / f"{each.name}.logs.parquet",
            columns=["run", "seed", "what", "client", "label"],
        )
        skews = []
        for _, own in labels.groupby("seed"):
            first = (own[["run", "what"]] == own[["run", "what"]].iloc[0]).all(axis=1)
            counts = pd.crosstab(own["client"][first], own["label"][first])
            skews.append(label_skew(counts.to_numpy(float)))
        lines.append((each.name, np.mean(skews), gain_over_fedavg(each.runs)))
    return pd.DataFrame(lines, columns=["federation", "skew", "gain"])
