"""What the best cut gains on FedAvg, by the label skew of 29 federations: ``python -m figures.decision.skew``."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fedlayers.studies.hint import BANDS, label_skew
from figures import items
from figures.decision.finished import NAME
from figures.decision.finished_page import whole
from figures.decision.finished_ways import Part
from figures.items import ROWS
from figures.page import markdown, numbers

COLUMNS = ["run", "seed", "what", "client", "label"]


def table(parts: Sequence[Part]) -> pd.DataFrame:
    """Return a line for each federation: the skew of its held-out labels, and the gain in points, means over seeds."""
    lines = []
    for part in parts:
        path = ROWS / NAME / f"{part.name}.logs.parquet"
        labels = pd.read_parquet(path, columns=COLUMNS)
        found = []
        for _, own in labels.groupby("seed"):
            first = own[
                (own[["run", "what"]] == own[["run", "what"]].iloc[0]).all(axis=1)
            ]
            counts = pd.crosstab(first["client"], first["label"]).to_numpy(float)
            found.append(label_skew(counts))
        fedavg = [part.cuts.tuned(seed, part.cut("all")) for seed in part.seeds]
        gain = float((part.reference() - fedavg).mean())
        lines.append((part.name, sum(found) / len(found), 100 * gain))
    return pd.DataFrame(lines, columns=["federation", "skew", "gain"])


def bands(found: pd.DataFrame) -> list[pd.Series]:
    """Return the gains in each band of the product, sorted."""
    ends = pd.cut(found["skew"], [-1.0, *(end for end, _, _ in BANDS)], right=False)
    return [own.sort_values() for _, own in found.groupby(ends, observed=True)["gain"]]


if __name__ == "__main__":
    item = items.find("decision.tuned")
    shown = table(whole(*item.read(item.path()))[0]).sort_values("skew")
    print(markdown({
        "federation": list(shown["federation"]),
        "label skew": numbers(shown["skew"]),
        "points over FedAvg": numbers(shown["gain"], "+.1f"),
    }))  # fmt: skip
