"""pFedLA's Table 2 on CIFAR-10: its ten methods where every client has all classes, two of them far more often.

Written before it was run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from figures import items
from figures.items import Drawing, View
from figures.pfedla import methods, overlap
from figures.recipe import Recipe, scored_at_end

NAME = "pfedla.dominant"
DOMINANT: dict[str, Any] = {
    "partition": "non_iid_2",
    "classes_per_client": 2,
    "dominance": 0.5,
}
"""What the federation differs in from that of :mod:`figures.pfedla.methods`. How much of a client's images its two
dominant classes have the paper does not say; half is the partition's default."""
_SAME = {
    **{run: scored_at_end(config) for run, config in overlap.RUNS.items()},
    **methods.RUNS,
}
RUNS = {method: _SAME[method].with_keys(**DOMINANT) for method in methods.METHODS}

STUDY = items.register(Recipe(
    NAME, "Accuracy of pFedLA's ten methods where clients have all classes, two of them dominant, CIFAR-10", RUNS,
    seeds=3, budget="some four hours of one core; a run takes 5 to 15 minutes", measure=methods.measure,
    paper_rounds=overlap.PAPER_ROUNDS,
))  # fmt: skip


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    return methods.table(header, frame, list(RUNS), "Table 2")


TABLE2 = items.register(
    View(
        "pfedla.table2",
        "Accuracy of ten methods on CIFAR-10, ten clients with two dominant classes (pFedLA, Table 2)",
        NAME,
        _draw,
    )
)
