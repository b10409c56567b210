"""FedPFT beside five methods with more rounds and the paper's clients, CIFAR-10.

After the 12 rounds of :mod:`figures.fedpft.fitted` FedPFT's classifier has learned too little to compare it.
"""

from __future__ import annotations

from functools import partial

from figures import items
from figures.fedpft import fitted
from figures.fedpft.fitted import ALPHA, HALF, OF_CLIENTS, ORIGIN, OURS, REST, Table
from figures.fedpft.pictures import METHODS
from figures.items import Item

NAME = "fedpft.longer"
ROUNDS, TIMES = 80, 20
"""Rounds, and evaluations over them."""
RUNS = {
    run: config.with_keys(
        rounds=ROUNDS,
        eval_every=ROUNDS // TIMES,
        checkpoint_every=ROUNDS,
        **OF_CLIENTS,
    )
    for run, config in fitted.RUNS.items()
}
TABLE = Table(
    "Table 7",
    {run: METHODS.get(run, run) for run in RUNS},
    (ORIGIN,),
    ((OURS, [*REST, HALF]), (HALF, REST)),
)

STUDY = items.register(Item(
    NAME, f"Accuracy of six of the thirteen methods after {ROUNDS} rounds, CIFAR-10 (FedPFT, Table 7, α = {ALPHA:g})",
    RUNS, seeds=5, measure=fitted.measure, draw=partial(fitted.draw, table=TABLE),
    budget="some 20 hours of one core, estimated; a run takes 2 to 4 minutes on a GPU, FedPFT's own about 8",
))  # fmt: skip
