"""The losses of one seed whose samples are at sites.

The server requests sums of them, and checks the replies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlayers.decision import sums
from fedlayers.decision.jobs import TrainingJob
from fedlayers.decision.losses import (
    PROBABLE,
    FinishedRun,
    Predictor,
    SeedLosses,
    Tuning,
)
from fedlayers.decision.table import BASE_RATE, VALIDATION, Part, SumPart
from fedlayers.flower.clients import Sites
from fedlayers.flower.federation import LARGEST, Packet, checked
from fl_core.errors import COUNT, NUMBER, UsageError, about
from fl_core.records import store
from fl_core.rounds.clients import SCORED
from fl_core.run.task import Task

Array = NDArray[np.float64]
SUMS = [[[NUMBER]]]
REPLY = {
    "run": str,
    "sums": [(SUMS, None)],
    "base": SUMS,
    "weights": [[NUMBER]],
    "labels": [[COUNT]],
    "excess": NUMBER,
}
PRODUCTS = {
    split: {
        "draws": COUNT,
        "sums": [NUMBER],
        "products": [[NUMBER]],
        "shared": COUNT,
    }
    for split in SCORED
}
ROUNDING = 1e-6
"""The relative error by which sums of float64 may differ."""


@dataclass(frozen=True)
class SitePredictor(Predictor):
    """A predictor whose outputs are at the sites.

    Attributes:
        run, amount: identify its outputs at the sites: the run's name, and the position of the amount of fine-tuning.
        calibration: its temperatures.
        loss: its cross-fitted mean validation loss.
    """

    run: str = ""
    amount: int = 0
    calibration: sums.Calibration = sums.UNCALIBRATED
    loss: float = math.nan


class SiteLosses(SeedLosses):
    """The losses of one seed whose samples stay at the sites, as sums that the sites send.

    So ways are ranked by the loss alone: other scores, and scores of single clients,
    are unknown here.

    Args:
        task: the FedAvg task of this seed, without samples.
        sites: the connected sites.
        first: the seed that drew the test samples.
    """

    def __init__(self, task: Task, sites: Sites, first: int) -> None:
        self.task, self.kind = task, task.data.task
        self.sites, self.first = sites, first
        self.sizes = {client.name: len(client.train) for client in task.data.clients}
        self.heads: dict[str, dict[str, Any]] = {}
        self.replies: dict[str, dict[str, Any]] = {}

    @property
    def splits(self) -> list[str]:
        """Return the splits with samples."""
        clients = self.task.data.clients
        return [s for s in SCORED if any(len(client.split(s)) for client in clients)]

    def finish(
        self,
        job: TrainingJob,
        amounts: Sequence[Tuning] = (Tuning(),),
        parts: Sequence[Sequence[int]] = (),
    ) -> FinishedRun:
        """Return a finished run. Each site fine-tunes its client's model, and stores the outputs.

        Args:
            job: the run, which has ended.
            amounts: the amounts of fine-tuning.
            parts: ignored, since clients' models stay at their sites.

        Raises:
            UsageError: a site's sums are not possible, or a client has only a part of the model.
            RunError: a site fails, or too few reply.
        """
        run = store.Run(job.path)
        checkpoint, task = run.checkpoint(), job.assemble()
        clients = self.sites.clients_of(run, checkpoint, task)
        amount_lists = [list(amount) for amount in amounts]
        packets = clients.score_packets(checkpoint, {"amounts": amount_lists})
        replies = self.sites.ask("query.losses", packets, 0)
        self.heads = {name: replies[name].head for name in self.task.data.names}
        for name, head in self.heads.items():
            self._check_sums(name, head, run.id, len(amounts))
        predictors: dict[Tuning, Predictor] = {}
        for place, amount in enumerate(amounts):
            sums_of_clients = [head["sums"][place] for head in self.heads.values()]
            if None not in sums_of_clients:
                facts = {"run": run.id, "amount": place}
                predictors[amount] = self._predictor(job.arm, sums_of_clients, **facts)
        excess = math.fsum(head["excess"] for head in self.heads.values())
        return FinishedRun(job, predictors, self.kind in PROBABLE and not excess < 0)

    def _check_sums(
        self, name: str, head: Mapping[str, Any], run: str, amounts: int
    ) -> None:
        """Refuse sums of losses that no samples give.

        Args:
            name: the site's name.
            head: the head of its reply, of the form :data:`REPLY`.
            run: the name of the run that was asked for.
            amounts: the number of amounts of fine-tuning.

        Raises:
            UsageError: the sums are not possible. The message names the site.
        """
        checked(name, head, REPLY)
        size, classes = self.sizes[name], max(2, self.task.data.n_classes)
        count = len(self.task.data.client(name).validation)
        shape = (2, len(sums.temperatures_of(self.kind)), 2)
        sums_sent = [
            sums_of_split for sums_of_split in head["sums"] if sums_of_split is not None
        ]
        total = sum(weights[0] for weights in head["weights"] if weights)
        with about(f"site {name!r}"):
            if head["run"] != run or len(head["sums"]) != amounts:
                raise UsageError("losses must be those of the run that was asked.")
            for sums_of_split in (*sums_sent, head["base"]):
                if (
                    _shape(sums_of_split) != shape
                    or np.abs(np.array(sums_of_split)).max() > LARGEST
                ):
                    expected = list(shape)
                    raise UsageError(
                        f"sums of losses must have shape {expected}, and be at most {LARGEST:g}."
                    )
            if _shape(head["weights"]) != (2, 2) or not math.isclose(
                total, size if count else 0, rel_tol=ROUNDING
            ):
                raise UsageError(
                    f"weights must add up to {size:,}, the number of training samples; got {total:g}."
                )
            sums_of_weights = chain.from_iterable(head["weights"])
            possible = all(0.0 <= weight <= size**2 for weight in sums_of_weights)
            if not possible or abs(head["excess"]) > LARGEST:
                raise UsageError("weights and losses must be possible; got others.")
            labels = {*chain.from_iterable(head["labels"])}
            if len(head["labels"]) != 2 or max(labels, default=0) >= classes:
                raise UsageError(
                    f"labels must be two lists of numbers below {classes}; got others."
                )

    def _predictor(
        self, name: str, by_client: Sequence[Any], **where: Any
    ) -> SitePredictor:
        """Return a predictor with the temperatures that all clients' sums together give."""
        heads = self.heads.values()
        total = np.sum([np.array(client_sums) for client_sums in by_client], axis=0)
        weights = np.sum([np.array(head["weights"]) for head in heads], axis=0)
        halves = zip(*(head["labels"] for head in heads), strict=True)
        labels = [sorted({*chain.from_iterable(half)}) for half in halves]
        calibration, loss = sums.calibration(total, weights, labels)
        return SitePredictor(name, {}, calibration=calibration, loss=loss, **where)

    @cached_property
    def base_rate(self) -> Predictor:
        """Return the predictor without features, from each client's training samples.

        A run must have been finished before (:meth:`finish`).
        """
        return self._predictor(
            BASE_RATE, [head["base"] for head in self.heads.values()]
        )

    def worth(self, one: Predictor) -> float:
        """Return the negative of the mean validation loss."""
        assert isinstance(one, SitePredictor)
        return -one.loss

    def parts(
        self, named: Mapping[str, Predictor], split: str, score: str
    ) -> Mapping[str, Part | SumPart]:
        """Return the loss of each predictor in a split, by name. The sites are asked once, with the validation split.

        Args:
            named: the predictors by name, with the base rate.
            split: validation, or after it test.
            score: ignored: only the loss is known.
        """
        predictors = [
            predictor for name, predictor in named.items() if name != BASE_RATE
        ]
        base = named[BASE_RATE]
        assert isinstance(base, SitePredictor)
        if split == VALIDATION:
            packet = Packet(
                {
                    "base": list(base.calibration),
                    "first": self.first,
                    "ways": [
                        {
                            "run": predictor.run,
                            "amount": predictor.amount,
                            "temperatures": list(predictor.calibration),
                        }
                        for predictor in predictors
                        if isinstance(predictor, SitePredictor)
                    ],
                }
            )
            packets = dict.fromkeys(self.task.data.names, packet)
            replies = self.sites.ask("query.products", packets, 0)
            self.replies = {name: replies[name].head for name in packets}
            for name, head in self.replies.items():
                self._check_products(name, head, len(predictors) + 2)
        heads = [head[split] for head in self.replies.values()]
        draws, totals, products = (
            np.array([head[key] for head in heads], dtype=float)
            for key in ("draws", "sums", "products")
        )
        clients = self.task.data.clients
        size = sum(len(client.split(split)) for client in clients)
        order = [BASE_RATE, *(name for name in named if name != BASE_RATE)]
        means = totals.sum(0)[:-1] / totals[:, -1].sum()
        return {
            name: SumPart(float(means[way]), size, way, draws, totals, products)
            for way, name in enumerate(order)
        }

    def _check_products(self, name: str, head: Mapping[str, Any], size: int) -> None:
        """Refuse sums over groups that no samples give.

        Args:
            name: the site's name.
            head: the head of its reply, of the form :data:`PRODUCTS`.
            size: the number of sums: one for each way and the base rate, and one for
                the weights.

        Raises:
            UsageError: the sums are not possible. The message names the site.
        """
        checked(name, head, PRODUCTS)
        for split in SCORED:
            split_head, count = (
                head[split],
                len(self.task.data.client(name).split(split)),
            )
            draws = split_head["draws"]
            with about(f"site {name!r} on {split}"):
                has_shape = _shape(split_head["sums"]) == (size,)
                if not has_shape or _shape(split_head["products"]) != (size, size):
                    raise UsageError(f"sums must be those of {size} columns.")
                total, products = (
                    np.array(split_head["sums"]),
                    np.array(split_head["products"]),
                )
                if (
                    not (draws > 0) == (count > 0)
                    or max(draws, split_head["shared"]) > count
                ):
                    raise UsageError(f"groups must be those of {count:,} samples.")
                least_products = total**2 / max(1, draws) * (1 - ROUNDING)
                is_possible = np.allclose(products, products.T, rtol=ROUNDING, atol=0)
                is_possible &= bool((np.diag(products) >= least_products).all())
                is_possible &= bool(np.abs(products).max(initial=0) <= LARGEST**2)
                share = self.sizes[name] if count else 0
                if not is_possible or not math.isclose(
                    total[-1], share, rel_tol=ROUNDING
                ):
                    raise UsageError(
                        "sums and products over groups must fit each other; got others."
                    )

    def overlap(self, first: SeedLosses, split: str) -> float:
        """Return the share of the first seed's samples in a split that are in the same split of this seed.

        The sites have counted them in their replies for :meth:`parts`, which comes
        first.
        """
        n_shared = sum(head[split]["shared"] for head in self.replies.values())
        clients = first.task.data.clients
        return n_shared / max(1, sum(len(client.split(split)) for client in clients))


def _shape(nested: Any) -> tuple[int, ...]:
    """Return the shape of nested lists; empty if they have several."""
    try:
        return np.array(nested, dtype=float).shape
    except ValueError:
        return ()
