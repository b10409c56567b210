"""Federations, rates and runs of the study with tuned rates and finished training, named before any of them is run.

Each run trains to its stop: no better score on validation for :data:`PATIENCE` evaluations. Its score is that of one
best round, found on validation. ``REGISTERED_FINISHED.md`` says what is asked of the runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from figures.decision.families import FAMILIES, READING, dataset_of
from figures.decision.federations import FEDERATIONS
from fl_core.config import RunConfig

PATIENCE = 15
"""Evaluations without a better smoothed score after which a run stops."""
WIDE = (1e-3, 3e-3, 1e-2, 3e-2)
"""Rates of perceptrons on tables."""
LOW = (3e-4, 1e-3, 3e-3, 1e-2)
"""Rates of networks on images."""
CUTS, FORGETFUL, DITTO, RESTARTS = "cuts", "forgetful", "ditto", "restarts"
"""What a run trains: every cut; every cut without the optimiser's state; Ditto; one cut from three more starts."""
STARTS = 3
EVERY = 2
"""Rounds between evaluations."""
MAIN_CUT = "all_but_last"


@dataclass(frozen=True)
class Finished:
    """A federation of the study.

    Attributes:
        title: as it is shown.
        family: the data family; intervals are over these.
        clients: what a client is, in words.
        natural: whether the data name the clients.
        config: FedPer on it, with the most rounds; its rate is the one of somebody who tunes nothing.
        rates: the rates that are tried.
        seeds: how many; each draws partition, start and batches.
        quick: whether a run takes less than about a minute; quick federations are run first.
        extras: whether Ditto and the optimiser without its state are run as well.
    """

    title: str
    family: str
    clients: str
    natural: bool
    config: RunConfig
    rates: tuple[float, ...] = WIDE
    seeds: int = 3
    quick: bool = True
    extras: bool = False


def _config(base: RunConfig, rounds: int, **settings: Any) -> RunConfig:
    options: dict[str, Any] = {"algorithm": "fedper", "keep_optimizer": True, "patience": PATIENCE, **settings}
    return replace(base, rounds=rounds, eval_every=EVERY, checkpoint_every=rounds, **options)


def _table(name: str, *, rounds: int = 200, extras: bool = False, **settings: Any) -> Finished:
    """Return a federation of a converted table: a perceptron with three hidden layers, and natural clients if any."""
    family = FAMILIES[name]
    base = RunConfig(
        dataset=dataset_of(name), model="mlp", model_options={"sizes": (64, 32, 16)}, batch_size=32, lr=1e-3, **READING
    )
    config = _config(base, rounds, **settings)
    return Finished(family.title, name, family.clients, family.natural, config, extras=extras)


def _known(name: str, family: str, natural: bool, *, rounds: int, lr: float = 1e-3, **about: Any) -> Finished:
    """Return one of the 36 federations of before, with the most rounds and the dataset's own rate."""
    old = FEDERATIONS[name]
    config = _config(old.config, rounds, lr=lr)
    return Finished(old.title, family, f"differ in {old.differs}", natural, config, **about)


DEALT: dict[str, Any] = {"partition": "dirichlet", "alpha": 0.5}
STUDY: dict[str, Finished] = {
    # new families with natural clients
    "medpar": _table("medpar"),
    "heart_procedures": _table("heart_procedures"),
    "aids": _table("aids"),
    "nmes": _table("nmes", max_samples=3000),
    "contraception": _table("contraception"),
    "smoking": _table("smoking", extras=True),
    "chemistry": _table("chemistry", max_samples=4000),
    "chile": _table("chile", extras=True),
    "values": _table("values", max_samples=3000),
    "vote_2016": _table("vote_2016", max_samples=3000, extras=True),
    "happiness": _table("happiness", max_samples=3000),
    "loans": _table("loans", max_samples=4000),
    "developers": _table("developers", max_samples=3000),
    "stops": _table("stops", max_samples=3000),
    "flights": _table("flights", max_samples=3000),
    # families of before, natural clients first
    "heart": _known("heart", "heart", True, rounds=200, lr=5e-2, rates=(5e-3, 1.5e-2, 5e-2, 1.5e-1), extras=True),
    "tweets_table": _known("tweets_table", "airline_tweets", True, rounds=200, extras=True),
    "digits_turned": _known("digits_turned", "digits", False, rounds=200, lr=1e-2),
    "digits_dirichlet": _known("digits_dirichlet", "digits", False, rounds=200, lr=1e-2, extras=True),
    # new families without natural clients
    "seer": _table("seer", clients=8, **DEALT),
    "support": _table("support", clients=10, max_samples=3000, **DEALT),
    "metabric": _table("metabric", clients=6, **DEALT),
    "breast_cancer": _table("breast_cancer", clients=4, **DEALT),
    "diabetes": _table("diabetes", clients=4, **DEALT),
    # images, slower
    "mnist_mlp": _known("mnist_mlp", "mnist", False, rounds=150, quick=False),
    "fashion_mnist": _known("fashion_mnist", "fashion_mnist", False, rounds=96, rates=LOW, quick=False),
    "pacs": _known("pacs", "pacs", True, rounds=60, rates=LOW, quick=False),
    "fed_isic": _known("fed_isic", "fed_isic", True, rounds=48, rates=LOW, quick=False),
    "cifar10": _known("cifar10", "cifar10", False, rounds=72, rates=LOW, quick=False),
}
"""By name, in the order in which they are run."""


@dataclass(frozen=True)
class Job:
    """Return the configuration that a stored run trains.

    Attributes:
        federation: its name in :data:`STUDY`.
        kind: one of :data:`CUTS`, :data:`FORGETFUL`, :data:`DITTO` and :data:`RESTARTS`.
    """

    federation: str
    kind: str
    config: RunConfig

    @property
    def name(self) -> str:
        """Return the run's name: ``chile@0.003``, and what else it is."""
        kind = "" if self.kind == CUTS else f"+{self.kind}"
        return f"{self.federation}@{self.config.lr:g}{kind}"


def jobs(name: str) -> Iterator[Job]:
    """Yield every run of a federation: all cuts at each rate first."""
    each = STUDY[name]
    for kind in (CUTS, RESTARTS, *((DITTO, FORGETFUL) if each.extras else ())):
        for rate in (each.config.lr,) if kind == RESTARTS else each.rates:
            own = {"algorithm": "ditto"} if kind == DITTO else {"keep_optimizer": False} if kind == FORGETFUL else {}
            yield Job(name, kind, replace(each.config, lr=rate, **own))


JOBS: dict[str, Job] = {job.name: job for name in STUDY for job in jobs(name)}
