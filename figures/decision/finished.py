"""Federations, rates and runs of the study with tuned rates and finished training.

Each run trains to its stop: no better score on validation for :data:`PATIENCE` evaluations. Its score is that of one
best round, found on validation. ``REGISTERED_FINISHED.md`` says what is asked of the runs. The study has ended. Its
folder of rows has two files a federation: rows, and log-probabilities of held-out samples in hundredths of a nat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from figures import items
from figures.decision.families import FAMILIES, READING, dataset_of
from figures.items import Item
from fl_core.config import RunConfig
from fl_core.errors import UsageError

NAME = "decision.finished"
CODE = "afdc4a9f"
"""The commit that has the code of all studies that have ended."""
PATIENCE = 15
"""Evaluations without a better smoothed score after which a run stops."""
WIDE = (1e-3, 3e-3, 1e-2, 3e-2)
"""Rates of perceptrons on tables."""
LOW = (3e-4, 1e-3, 3e-3, 1e-2)
"""Rates of networks on images."""
CUTS, FORGETFUL, DITTO, RESTARTS, PERSONALISED = (
    "cuts",
    "forgetful",
    "ditto",
    "restarts",
    "personalised",
)
"""What a run trains: every cut; every cut without the optimiser's state; Ditto; one cut from three more starts. FedAvg
with a few own epochs of each client follows the cuts."""
CURVE, STOPPED, SHARED, DECISION = (
    "curve",
    "stopped after",
    "shared layers",
    "decision of a rule",
)
VALIDATION, HELD_OUT = "validation", "held_out"
SEEDS = 3
"""Each draws partition, start and batches."""
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
        extras: whether Ditto and the optimiser without its state are run as well.
    """

    title: str
    family: str
    clients: str
    natural: bool
    config: RunConfig
    rates: tuple[float, ...] = WIDE
    extras: bool = False


def _config(rounds: int, **settings: Any) -> RunConfig:
    options: dict[str, Any] = {
        "algorithm": "fedper",
        "keep_optimizer": True,
        "patience": PATIENCE,
    }
    return RunConfig(
        rounds=rounds, eval_every=EVERY, checkpoint_every=rounds, **options, **settings
    )


def _table(
    name: str, *, rounds: int = 200, extras: bool = False, **settings: Any
) -> Finished:
    """Return a federation of a converted table: a perceptron with three hidden layers, and natural clients if any."""
    family = FAMILIES[name]
    network = {
        "model": "mlp",
        "model_options": {"sizes": (64, 32, 16)},
        "batch_size": 32,
        "lr": 1e-3,
    }
    config = _config(rounds, dataset=dataset_of(name), **network, **READING, **settings)
    return Finished(
        family.title, name, family.clients, family.natural, config, extras=extras
    )


DEALT: dict[str, Any] = {"partition": "dirichlet", "alpha": 0.5}
GREY: dict[str, Any] = {"model_options": {"width": 0.25}, "batch_size": 16, "lr": 1e-3}
COLOUR: dict[str, Any] = {
    "model_options": {"width": 0.125, "dropout": 0.0},
    "batch_size": 16,
    "lr": 1e-3,
}
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
    "heart": Finished(
        "Fed-Heart", "heart", "differ in hospitals", True, _config(200, dataset="heart", lr=5e-2),
        (5e-3, 1.5e-2, 5e-2, 1.5e-1), extras=True,
    ),
    "tweets_table": Finished(
        "tweets as a table, 16 % positive", "airline_tweets", "differ in airlines", True,
        _config(200, dataset="figures.decision.sets:tweets_table", max_samples=2000, lr=1e-3), extras=True,
    ),
    "digits_turned": Finished(
        "digits, turned by client", "digits", "differ in directions", False,
        _config(200, dataset="figures.decision.sets:digits_turned", lr=1e-2),
    ),
    "digits_dirichlet": Finished(
        "digits, 8 clients", "digits", "differ in labels", False,
        _config(200, dataset="digits", partition="dirichlet", clients=8, alpha=0.3, lr=1e-2), extras=True,
    ),
    # new families without natural clients
    "seer": _table("seer", clients=8, **DEALT),
    "support": _table("support", clients=10, max_samples=3000, **DEALT),
    "metabric": _table("metabric", clients=6, **DEALT),
    "breast_cancer": _table("breast_cancer", clients=4, **DEALT),
    "diabetes": _table("diabetes", clients=4, **DEALT),
    # images
    "mnist_mlp": Finished(
        "MNIST, MLP, 12 clients", "mnist", "differ in labels", False,
        _config(150, dataset="mnist", model="mlp", model_options={"sizes": (128, 64)}, partition="dirichlet",
                clients=12, alpha=0.3, max_samples=2400, batch_size=16, lr=1e-3),
    ),
    "fashion_mnist": Finished(
        "Fashion-MNIST", "fashion_mnist", "differ in labels", False,
        _config(96, dataset="fashion_mnist", max_samples=1500, **GREY), LOW,
    ),
    "pacs": Finished("PACS", "pacs", "differ in styles", True, _config(60, dataset="pacs", max_samples=600, **COLOUR),
                     LOW),
    "fed_isic": Finished(
        "Fed-ISIC", "fed_isic", "differ in hospitals", True,
        _config(48, dataset="fed_isic", max_samples=480, **GREY), LOW,
    ),
    "cifar10": Finished(
        "CIFAR-10", "cifar10", "differ in labels", False,
        _config(72, dataset="cifar10", max_samples=1000, **COLOUR), LOW,
    ),
}  # fmt: skip
"""By name, in the order in which they were run."""


@dataclass(frozen=True)
class Job:
    """The configuration that a stored run trained.

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
        return f"{self.federation}@{self.config.training.lr:g}{kind}"


def jobs(name: str) -> Iterator[Job]:
    """Yield every run of a federation: all cuts at each rate first."""
    each = STUDY[name]
    for kind in (CUTS, RESTARTS, *((DITTO, FORGETFUL) if each.extras else ())):
        for rate in (each.config.training.lr,) if kind == RESTARTS else each.rates:
            own = (
                {"algorithm": "ditto"}
                if kind == DITTO
                else {"keep_optimizer": False}
                if kind == FORGETFUL
                else {}
            )
            yield Job(name, kind, each.config.with_keys(lr=rate, **own))


JOBS: dict[str, Job] = {job.name: job for name in STUDY for job in jobs(name)}


def ended(*of_run: object) -> NoReturn:
    """Refuse to train a run.

    Raises:
        UsageError: always, with the commit that trains it.
    """
    raise UsageError(
        f"{NAME} must be drawn from its stored rows; got --train. Commit {CODE} has the code that trains."
    )


ITEM = items.register(Item(
    NAME, "Every cut at four rates, each to its stop", {name: job.config for name, job in JOBS.items()}, seeds=SEEDS,
    budget=f"13 hours of one core at commit {CODE}", measure=ended, prepare=ended,
))  # fmt: skip
