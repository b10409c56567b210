"""FedPFT in two other federations: few classes a client (Table 6), and some clients a round (Table 9), CIFAR-10."""

from __future__ import annotations

from functools import partial
from typing import Any

from figures import items
from figures.fedpft import fitted, insides
from figures.fedpft.fitted import ORIGIN, OURS, Table
from figures.fedpft.insides import FEDPFT
from figures.fedpft.parts import measure
from figures.fedpft.pictures import METHODS
from figures.items import View
from figures.recipe import Recipe

NAME = "fedpft.federations"
FEW: dict[str, Any] = {
    "partition": "fedpft_pathological",
    "alpha": None,
    "classes_per_client": 2,
}
"""What Table 6's federation differs in from those of :mod:`figures.fedpft.fitted`."""
SHARES = {"all": 1.0, "90": 0.9, "70": 0.7, "50": 0.5}
"""Clients that take part in a round, as a share of all; by the end of the run's name."""


RUNS = {
    **{
        f"few.{method}": config.with_keys(**FEW)
        for method, config in fitted.RUNS.items()
    },
    **{
        f"part.{name}": insides.RUNS[FEDPFT].with_keys(participation=share)
        for name, share in SHARES.items()
    },
}
TABLES = {
    "fedpft.table6": Table(
        "Table 6",
        {f"few.{method}": METHODS.get(method, method) for method in fitted.RUNS},
        (ORIGIN,),
        (
            (
                f"few.{OURS}",
                [f"few.{method}" for method in fitted.RUNS if method != OURS],
            ),
        ),
        names={f"few.{method}": fitted.called(method) for method in fitted.RUNS},
        settings={f"few.{method}": "2 classes a client" for method in fitted.RUNS},
    ),
    "fedpft.table9": Table(
        "Table 9",
        {f"part.{name}": OURS for name in SHARES},
        (ORIGIN,),
        names={
            f"part.{name}": f"{100 * share:g} % of the clients"
            for name, share in SHARES.items()
        },
        settings={
            f"part.{name}": f"dirichlet 0.1, {100 * share:g} % of the clients"
            for name, share in SHARES.items()
        },
    ),
}

STUDY = items.register(Recipe(
    NAME, "FedPFT where clients have few classes, and where some take part, on CIFAR-10", RUNS, seeds=3,
    budget="some three hours of one core; a run takes 3 to 12 minutes", measure=measure,
    paper={run: config.with_keys(**fitted.OF_PAPER) for run, config in RUNS.items()}, paper_seeds=3,
))  # fmt: skip
WHAT = {
    "fedpft.table6": "Accuracy of six of the thirteen methods, CIFAR-10, two classes a client (FedPFT, Table 6)",
    "fedpft.table9": "Accuracy where some clients take part in a round, CIFAR-10 (FedPFT, Table 9, α = 0.1)",
}
for _name, _table in TABLES.items():
    items.register(
        View(
            _name,
            WHAT[_name],
            NAME,
            partial(fitted.draw, table=_table),
            runs=list(_table.lines),
        )
    )
