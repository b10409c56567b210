"""Whether clients differ in more than their samples: whether a client's own model beats those of other clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_core.errors import check_known
from fl_core.rows import CLASSIFICATION, MULTILABEL, Row, row
from fl_core.seeds import numpy_generator
from fl_core.statistics import Estimate, halves, stratified_mean
from fl_core.training import evaluate
from fl_core.training.losses import Loss
from fl_core.tree import Tree

from .copies import Array, Held, Mask, Tuner, crosswise, estimated

NAME = "clients_differ"
ERRORS = 2.0
"""Standard errors from which a lead counts."""
UNSURE = 1.5
"""Points of accuracy. With a larger standard error there are too few samples to tell."""
FEWEST = 36
"""Validation samples below which the standard error in points is not known, so that there are too few to tell.

With as many six clients with coded labels are called different in 80 % of the runs (``figures/decision/known.py``).
"""
SIDE = 4
"""Neighbours on each side in a drawn circle of clients. Up to 9 clients are all neighbours."""
LEAST_CLIENTS = 4
"""The fewest clients whose groups are sought (:mod:`diagnostics.groups`)."""
DIFFER, TOO_FEW, NOT_SHOWN = "differ", "too few samples to tell", "not shown"
UNITS = {"loss": (1, "nats"), "accuracy": (100, "points")}
OWN, ALONE, OTHERS = "own epochs", "training alone", ", others"


def neighbours(clients: int, seed: int) -> list[list[int]]:
    """Return the clients whose samples each client's models predict: its own, and those of its neighbours.

    >>> neighbours(3, seed=0)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    """
    order = numpy_generator(seed, NAME).permutation(clients)
    circle = [np.roll(order, step) for step in range(-SIDE, SIDE + 1)]
    near = np.stack(circle, axis=1)[order.argsort()]
    return [sorted(set(others.tolist())) for others in near]


def compared(
    alone: Sequence[Tree] | None = None, **given: Any
) -> dict[tuple[str, str], Estimate]:
    """Train own epochs from a shared model, and return what :func:`gains` yields.

    Args:
        alone: of each client the tensors that it trained alone.
        given: the arguments of a :class:`Tuner` of the shared model.

    Raises:
        NonFiniteError: a loss or an output is not finite.
    """
    near = neighbours(len(given["clients"]), given["seed"])
    tuner = Tuner(**given, near=near)
    names, rate = frozenset(tuner.starts[0]), tuner.training.lr
    tuned = torch.cat(
        [tuner.outputs(names, each) for each in tuner.clock.turns((rate / 3, rate))]
    )
    single = None
    if alone is not None:
        single = Tuner(**(given | {"starts": alone}), near=near).start
    shown = tuner.loss, tuner.held, near, tuner.start, tuned, single, tuner.seed
    return {(what, score): each for what, score, each in gains(*shown)}


def gains(
    loss: Loss,
    held: Held,
    near: Sequence[Sequence[int]],
    shared: Tensor,
    tuned: Tensor,
    alone: Tensor | None,
    seed: int,
) -> Iterator[tuple[str, str, Estimate]]:
    """Yield what is compared, the score, and its mean gain: nats, or shares of right predictions.

    ``own epochs`` and ``training alone`` gain over the shared model. Own epochs, or none, are chosen on one half of
    the samples and scored on the other. Where none are chosen the gain is 0 with the error of the first candidate's.

    ``own epochs, others`` and ``training alone, others`` are the lead of a client's own model over its neighbours'
    models, the mean over pairs of clients by the product of their training samples. Without a difference between
    clients its expected value is exactly 0, whatever the models learned: a pair's models change places. The epochs
    with the largest lead on one half are scored on the other. With fewer than :data:`FEWEST` samples the error of a
    lead in accuracy is NaN.

    Args:
        near: the clients whose samples each client's models predict, as of :func:`neighbours`.
        shared: outputs of the shared model [N, C], of each client for the samples of its first neighbour, and so on.
        tuned: the same after own epochs, [P, N, C].
        alone: of models that each client trained alone.
    """
    half = halves(held.group, held.client, seed)
    places = [np.flatnonzero(held.client == k) for k in range(len(near))]
    place = np.concatenate([places[k] for others in near for k in others])
    sizes = [sum(len(places[k]) for k in others) for others in near]
    model = np.repeat(np.arange(len(near)), sizes)
    own = model == held.client[place]
    shares = np.bincount(held.client, held.weight, len(near))
    weight = np.where(own, 0, shares[model])
    pairs = Held(held.y[place], model, weight * held.weight[place], place)

    def losses(outputs: Tensor, fitted: Mask) -> Array:
        if name == "accuracy":
            return 1 - pairs.right(outputs)
        heat = temperature(loss, outputs[own], held, fitted)
        return pairs.losses(loss, outputs, heat)

    def at_own(outputs: Tensor, fitted: Mask, scored: Mask) -> tuple[Array, Array]:
        found = losses(outputs, fitted)[own]
        return found[fitted], found[scored]

    def behind(outputs: Tensor, fitted: Mask, scored: Mask) -> tuple[Array, Array]:
        found = losses(outputs, fitted)
        worse = weight * (found[own][place] - found)
        found = np.bincount(place, worse, len(half)) / pairs.weight.sum()
        return found[fitted], found[scored]

    def mean(values: Array) -> Estimate:
        return stratified_mean(values, held.weight, held.group, held.client)

    tried = {OWN: tuned} if alone is None else {OWN: tuned, ALONE: alone[None]}
    for name in ("loss", "accuracy") if loss.task == CLASSIFICATION else ("loss",):
        for what, candidates in tried.items():
            given = at_own, torch.cat([shared[None], candidates])
            fixed = None if what == OWN else 1
            choice, before, after = crosswise(*given, held.weight, half, fixed)
            found = mean(before - after)
            if not choice.any():
                _, before, after = crosswise(*given, held.weight, half, 1)
                found = mean(before - after)._replace(value=0.0)
            yield what, name, found
            if len(near) > 1:
                *_, best = crosswise(behind, candidates, held.weight, half)
                lead = mean(-best)
                if name == "accuracy" and len(half) < FEWEST:
                    lead = lead._replace(error=math.nan)
                yield what + OTHERS, name, lead


def temperature(loss: Loss, outputs: Tensor, held: Held, fitted: Mask) -> float:
    """Return the best temperature of at least 1 on some samples; 1 for tasks without a log loss.

    A lower one would make a model surer that errs on none of a few samples.
    """
    if loss.task not in (CLASSIFICATION, MULTILABEL):
        return 1.0
    on = torch.from_numpy(fitted)
    logits = loss.logits(outputs).double()[on]
    weight = torch.from_numpy(held.weight[fitted])
    found, _ = evaluate.fit(logits, held.y[on], weight, torch.zeros_like(logits))
    return max(1.0, found)


def verdict(found: dict[tuple[str, str], Estimate], score: str) -> str:
    """Return whether clients differ in one score: one lead over neighbours is above two standard errors."""
    check_known("score", score, {name for _, name in found})
    leads = {key: each for key, each in found.items() if OTHERS in key[0]}
    if not leads:
        return "needs two clients with validation samples"
    for (_, name), lead in leads.items():
        if name == score and lead.value > ERRORS * lead.error:
            return DIFFER
    points = leads.get((OWN + OTHERS, "accuracy"))
    if points is not None and not 100 * points.error <= UNSURE:
        return TOO_FEW
    return NOT_SHOWN


def rows_of(found: dict[tuple[str, str], Estimate], score: str) -> list[Row]:
    """Return a row with the verdict, 1 if clients differ and 0 if it is not shown, and those of what is compared."""
    said = verdict(found, score)
    value = {DIFFER: 1.0, NOT_SHOWN: 0.0}.get(said)
    status = said if value is None else "ok"
    made = [row(NAME, value, status=status, variant="differ")]
    for (what, name), each in found.items():
        factor, unit = UNITS[name]
        made.append(estimated(NAME, f"{what}, {unit}", each, factor))
    if (ALONE, "loss") not in found:
        made.append(row(NAME, None, status="no run of training alone", variant=ALONE))
    return made
