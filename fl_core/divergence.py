"""Divergence of a run: NaN or infinity on the server, and losses that are finite and far too large."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from fl_core import tree
from fl_core.algorithms.base import Round
from fl_core.client_runner import TUNED, ClientReply
from fl_core.errors import DivergedError, NonFiniteError, warn
from fl_core.layers import tensor_in_layer
from fl_core.rows import MULTILABEL
from fl_core.stopping import Listener, rounds_done
from fl_core.training.losses import Loss

if TYPE_CHECKING:
    from fl_core.engine import Engine
    from fl_core.recorder import Recorder
    from fl_core.records.store import Run
    from fl_core.records.writing import Writer

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


class Divergence(Listener):
    """Rows of losses above the limit, with one warning; NaN on the server ends the run.

    The limit of a client's loss is :data:`TIMES` times the larger of its initial loss and the uniform predictor's.

    >>> from fl_core.training.losses import build
    >>> limit = Divergence(None, guessing_loss(build("cross_entropy"), n_classes=2))
    >>> limit.begin("north", 1.5)
    >>> limit.reason_for("north", 30.0)
    ''
    >>> limit.reason_for("north", 31.0)
    'a loss of 31, over 20 times the 1.5 at the start'
    >>> limit.reason_for("south", 31.0)  # of whom no start is known
    'a loss of 31, over 20 times the 0.693 of guessing'

    Args:
        recorder: takes the rows.
        guess: loss of the uniform predictor.
        writer: of the run's directory, with the initial losses of a run that resumes.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        guess: float,
        writer: Writer | None = None,
    ) -> None:
        self._recorder, self._guess, self._writer = recorder, guess, writer
        self._noted = False
        self._resumed = False
        self._tuned: frozenset[str] = frozenset()  # trained before their first scores
        self._starts: dict[str, float] = {}

    def before_run(self, engine: Engine) -> None:
        if engine.algorithm.finetuning(0, 0):
            self._tuned = frozenset({TUNED})
        self._resumed = engine.done > 0

    def on_reply(self, engine: Engine, rnd: Round, reply: ClientReply) -> None:
        done = rounds_done(rnd)
        for key, loss in reply.work.items():
            phase, _, quantity = key.partition("/")
            if quantity == "loss" and reply.message is not None:
                self._check(engine, reply, done, loss, split="train", variant=phase)
        for model, scores in reply.scores.items():
            if "validation" not in scores:
                continue
            loss = scores["validation"]["loss"]
            if done:
                columns = {"model": model, "split": "validation"}
                self._check(engine, reply, done, loss, **columns)
            elif model not in self._tuned:
                self.begin(engine.names[reply.client], loss)

    def after_training(self, engine: Engine) -> None:
        """Check that the server's state has no NaN or infinity, besides those of the initial model.

        Raises:
            NonFiniteError: names the first tensor, and its layer.
        """
        for name, held in engine.server.trees.items():
            bad = tree.first_nonfinite(held, before=engine.initial)
            if bad is not None:
                tensor = tensor_in_layer(bad, engine.task_info.layers)
                raise NonFiniteError(
                    f"{engine.algorithm.name}, round {engine.done}, server, aggregation: {tensor} of {name!r} is not "
                    "finite"
                )

    def begin(self, client: str, loss: float) -> None:
        """Record a loss before the first round. For several models the largest is kept."""
        self._starts[client] = max(loss, self._starts.get(client, -math.inf))

    def reason_for(self, client: str, loss: float) -> str:
        """Return why a loss has diverged, or an empty text. Losses that are not finite are handled elsewhere."""
        if not math.isfinite(loss) or not loss > TIMES * self._guess:
            return ""
        if self._resumed and self._writer:
            self._starts = starts_of(self._writer.run, self._tuned)
            self._resumed = False
        start = self._starts.get(client, -math.inf)
        bound, what = max((self._guess, "of guessing"), (start, "at the start"))
        if not 0 < TIMES * bound < loss:
            return ""
        return f"a loss of {loss:.3g}, over {TIMES:g} times the {bound:.3g} {what}"

    def _check(
        self, engine: Engine, reply: ClientReply, done: int, loss: float, **columns: str
    ) -> None:
        """Record, and report once, a loss that has diverged."""
        name = engine.names[reply.client]
        reason = self.reason_for(name, loss)
        if not reason or self._recorder is None:
            return
        status = f"diverged: {reason}"
        self._recorder.row(
            DIVERGENCE, math.nan, done, reply.client, status=status, **columns
        )
        self._recorder.flush()
        where = f"{engine.algorithm.name}, round {done}, client {name!r}"
        text = f"{where}: training diverges, with {reason}. Use a smaller lr."
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
