"""Whether clients differ in more than their samples: what own epochs and training alone gain over a shared model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fl_core.rows import CLASSIFICATION, MULTILABEL, Row, row
from fl_core.statistics import Estimate, halves, stratified_mean
from fl_core.training import evaluate
from fl_core.training.losses import Loss

from .copies import Array, Held, Mask, crosswise

NAME = "clients_differ"
ERRORS = 2.0
"""Standard errors from which a gain counts."""
UNSURE = 1.5
"""Points of accuracy. With a larger standard error there are too few samples to tell."""
DIFFER, TOO_FEW, NOT_SHOWN = "differ", "too few samples to tell", "not shown"
OWN, ALONE = "own epochs", "training alone"


def calibrated_losses(
    loss: Loss, outputs: Tensor, held: Held, fitted: Mask, scored: Mask
) -> tuple[Array, Array]:
    """Return the log losses of two sets of samples, by the temperature of at least 1 that is best on the first.

    A lower one would make a model surer that errs on none of a few samples. Other tasks have their training loss.
    """
    if loss.task not in (CLASSIFICATION, MULTILABEL):
        found = held.losses(loss, outputs)
        return found[fitted], found[scored]
    logits = loss.logits(outputs).double()
    on = torch.from_numpy(fitted)
    weight = torch.from_numpy(held.weight[fitted])
    none = torch.zeros_like(logits[on])
    temperature, _ = evaluate.fit(logits[on], held.y[on], weight, none)
    found = evaluate.log_losses(logits / max(1.0, temperature), held.y).numpy()
    return found[fitted], found[scored]


def gains(
    loss: Loss,
    held: Held,
    shared: Tensor,
    tuned: Tensor,
    alone: Tensor | None,
    seed: int,
) -> Iterator[tuple[str, str, Estimate]]:
    """Yield what is tried, the score, and its mean gain over the shared model: nats, or shares of right predictions.

    Where no own epoch is chosen the gain is 0 with the error of the first candidate's.

    Args:
        shared: outputs of the shared model on the validation samples [n, C].
        tuned: the same after own epochs, [P, n, C].
        alone: of models that each client trained alone.
    """
    half = halves(held.group, held.client, seed)

    def calibrated(outputs: Tensor, fitted: Mask, scored: Mask) -> tuple[Array, Array]:
        return calibrated_losses(loss, outputs, held, fitted, scored)

    def wrong(outputs: Tensor, fitted: Mask, scored: Mask) -> tuple[Array, Array]:
        found = 1 - held.right(outputs)
        return found[fitted], found[scored]

    scores = {"loss": calibrated}
    if loss.task == CLASSIFICATION:
        scores["accuracy"] = wrong

    def mean(before: Array, after: Array) -> Estimate:
        return stratified_mean(before - after, held.weight, held.group, held.client)

    for name, losses in scores.items():
        tried = {OWN: torch.cat([shared[None], tuned])}
        if alone is not None:
            tried[ALONE] = torch.stack([shared, alone])
        for what, candidates in tried.items():
            given = losses, candidates, held.weight, half
            fixed = None if what == OWN else 1
            choice, before, after = crosswise(*given, fixed)
            found = mean(before, after)
            if not choice.any():
                found = mean(*crosswise(*given, 1)[1:])._replace(value=0.0)
            yield what, name, found


def verdict(found: dict[tuple[str, str], Estimate], score: str) -> str:
    """Return whether clients differ, in one score of :func:`gains`."""
    own = {what: each for (what, name), each in found.items() if name == score}
    for each in own.values():
        if each.value > ERRORS * each.error:
            return DIFFER
    points = found.get((OWN, "accuracy"))
    if points is not None and not 100 * points.error <= UNSURE:
        return TOO_FEW
    return NOT_SHOWN


def rows_of(found: dict[tuple[str, str], Estimate], score: str) -> list[Row]:
    """Return the rows of the gains, and one with the verdict: 1 if clients differ, 0 if it is not shown."""
    made = []
    for (what, name), each in found.items():
        factor = 100 if name == "accuracy" else 1
        error = None if math.isnan(each.error) else factor * each.error
        variant = f"{what}, {'points' if factor > 1 else 'nats'}"
        made.append(
            row(
                NAME,
                factor * each.value,
                stderr=error,
                variant=variant,
                split="validation",
            )
        )
    if (OWN, "loss") in found and ALONE not in {what for what, _ in found}:
        made.append(row(NAME, None, status="no run of training alone", variant=ALONE))
    said = verdict(found, score)
    value, status = (None, said) if said == TOO_FEW else (float(said == DIFFER), "ok")
    return [row(NAME, value, status=status, variant="differ"), *made]
