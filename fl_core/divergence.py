"""Divergence of a run: NaN or infinity on the server, and losses that are finite and far too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from fl_core import tree
from fl_core.algorithms.base import Algorithm, State
from fl_core.errors import DivergedError, NonFiniteError, warn
from fl_core.layers import tensor_in_layer
from fl_core.scores import MULTILABEL
from fl_core.training.losses import Loss
from fl_core.tree import Tree

if TYPE_CHECKING:
    from fl_core.records.store import Run

DIVERGENCE = "divergence"
"""The metric of a row without a value. Its status states how far a client's loss exceeds the limit in that round."""
TIMES = 20.0
"""A loss has diverged above 20 times the larger of the client's initial loss and the uniform predictor's."""


def guessing_loss(criterion: Loss, n_classes: int) -> float:
    """Return the mean loss of equal logits over the classes, log C for cross-entropy. Without classes it is 0."""
    if n_classes < 2:
        return 0.0
    y = (
        torch.eye(n_classes)
        if criterion.task == MULTILABEL
        else torch.arange(n_classes)
    )
    return float(
        criterion.per_sample(
            torch.zeros(n_classes, criterion.outputs(n_classes)), y
        ).mean()
    )


def check_finite(algorithm: Algorithm, server: State, done: int, initial: Tree) -> None:
    """Check that the server's state has no NaN or infinity after ``done`` rounds, besides those of the initial model.

    Raises:
        NonFiniteError: names the first tensor, and its layer.
    """
    for name, held in server.trees.items():
        bad = tree.first_nonfinite(held, before=initial)
        if bad is not None:
            tensor = tensor_in_layer(bad, algorithm.task_info.layers)
            raise NonFiniteError(
                f"{algorithm.name}, round {done}, server, aggregation: {tensor} of {name!r} is not finite"
            )


class Limit:
    """The bound of each client's loss: :data:`TIMES` times the larger of its initial and its guessing loss.

    >>> from fl_core.training.losses import build
    >>> limit = Limit(guessing_loss(build("cross_entropy"), n_classes=2))
    >>> limit.begin("north", 1.5)
    >>> limit.reason_for("north", 30.0)
    ''
    >>> limit.reason_for("north", 31.0)
    'a loss of 31, over 20 times the 1.5 at the start'
    >>> limit.reason_for("south", 31.0)  # of whom no start is known
    'a loss of 31, over 20 times the 0.693 of guessing'

    Args:
        guess: loss of the uniform predictor. on_divergence: ``note``, once a run, or ``stop``.

    Attributes:
        tuned: models that were trained before their first evaluation. Their losses are not initial ones.
        stored: returns the initial losses of a resumed run. It is called for a suspicious loss.
    """

    def __init__(self, guess: float, on_divergence: str = "note") -> None:
        self.tuned: frozenset[str] = frozenset()
        self.stored: Callable[[], Mapping[str, float]] | None = None
        self._guess, self._stops, self._noted = guess, on_divergence == "stop", False
        self._starts: dict[str, float] = {}

    def begin(self, client: str, loss: float) -> None:
        """Record a loss before the first round. For several models the largest is kept."""
        self._starts[client] = max(loss, self._starts.get(client, -math.inf))

    def reason_for(self, client: str, loss: float) -> str:
        """Return why a loss has diverged, or an empty text. Losses that are not finite are handled elsewhere."""
        if not math.isfinite(loss) or not loss > TIMES * self._guess:
            return ""
        if self.stored is not None:
            self._starts, self.stored = dict(self.stored()), None
        start = self._starts.get(client, -math.inf)
        bound, what = max((self._guess, "of guessing"), (start, "at the start"))
        return (
            f"a loss of {loss:.3g}, over {TIMES:g} times the {bound:.3g} {what}"
            if 0 < TIMES * bound < loss
            else ""
        )

    def report(self, where: str, reason: str) -> None:
        """Warn once that training diverges, or stop the run.

        Raises:
            DivergedError: the run has to stop.
        """
        text = f"{where}: training diverges, with {reason}. Use a smaller lr."
        if self._stops:
            raise DivergedError(text)
        if not self._noted:
            warn(text)
        self._noted = True


def starts_of(run: Run, tuned: Collection[str] = ()) -> dict[str, float]:
    """Return each client's largest validation loss before the first round, from the rows of a stored run.

    Args:
        tuned: models to leave out.
    """
    frame = run.rows()[1]
    chosen = (
        (frame["round"] == 0)
        & (frame["metric"] == "loss")
        & (frame["split"] == "validation")
    )
    chosen &= ~frame["model"].isin(list(tuned))
    losses = frame[chosen].fillna(
        {"value": math.inf}
    )  # a loss that was not finite gives no bound
    return {
        str(client): float(loss)
        for client, loss in losses.groupby("client")["value"].max().items()
    }


def check_end(run: Run, done: int) -> None:
    """Check that no model of a stored run has diverged at its last evaluation, or at its best.

    Args:
        done: the round of that evaluation.

    Raises:
        DivergedError: names the first client and model.
    """
    frame = run.rows()[1]
    found = frame[
        (frame["metric"] == DIVERGENCE)
        & (frame["round"] == done)
        & (frame["split"] == "validation")
    ]
    if len(found):
        first = found.iloc[0]
        raise DivergedError(
            f"{run.path} ended with models that have diverged; first the {first['model']} model of client "
            f"{first['client']!r} ({first['status']}). Train again with a smaller lr."
        )
