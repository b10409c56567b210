"""The models by which clients are compared, and their losses on each other's validation samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_core.rows import CLASSIFICATION, MULTILABEL, OWN, POSITIONS, Row, row
from fl_core.training import evaluate
from fl_core.training.losses import ClassWeighted, Loss
from fl_core.tree import Tree

from .copies import Array, Held, Tuner
from .permutation import (
    PURPOSE,
    CrossLosses,
    Difference,
    blocks,
    permutation_test,
)

FINE_TUNING, LOCAL = "fine-tuning", "local training"
LEAST_CLIENTS = 4
"""The fewest clients that can form groups (:mod:`diagnostics.groups`)."""
HOTTEST = 20.0
"""The highest temperature of the log losses.

If most predictions are wrong, a temperature without a limit would leave no difference.
"""
FEW_CLIENTS = "needs two clients with validation samples"


def neighbours(parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each client the clients whose samples its models predict: those of its block.

    >>> neighbours([[0, 2], [1, 3]])
    [[0, 2], [1, 3], [0, 2], [1, 3]]

    Args:
        parts: the blocks, lists of clients' numbers. Each client is in one block.
    """
    block_of: dict[int, list[int]] = {}
    for block in parts:
        block_of |= {client: list(block) for client in block}
    return [block_of[client] for client in sorted(block_of)]


def fine_tuned(
    alone: Sequence[Tree] | None = None, **tuner_arguments: Any
) -> tuple[CrossLosses, list[str]]:
    """Fine-tune a shared model at each client, and return the losses with the name of each kind of models.

    The kinds are fine-tuning for 1, 2 and 4 epochs, at a third of the learning rate and at the rate itself, and local
    training if ``alone`` is given.

    Args:
        alone: each client's tensors after local training; None without them.
        tuner_arguments: arguments of a :class:`Tuner` of the shared model, without
            ``near``. If there is no shared model, ``starts`` has the clients' own
            weights.

    Returns:
        The losses by kind, client's model and sample, and a name for each kind. All
        kinds of fine-tuning have one name.

    Raises:
        NonFiniteError: a loss or an output is not finite.
        NoValue: the time budget is spent.
    """
    parts = blocks(len(tuner_arguments["clients"]), tuner_arguments["seed"])
    tuner = Tuner(**tuner_arguments, near=neighbours(parts))
    names, rate = frozenset(tuner.starts[0]), tuner.training.lr
    outputs = torch.cat(
        [
            tuner.outputs(names, tuning_rate)
            for tuning_rate in tuner.clock.turns((rate / 3, rate))
        ]
    )
    kinds = [FINE_TUNING] * len(outputs)
    if alone is not None:
        local_tuner = Tuner(
            **(tuner_arguments | {"starts": alone}), near=neighbours(parts)
        )
        outputs = torch.cat([outputs, local_tuner.start[None]])
        kinds.append(LOCAL)
    return cross_losses(tuner.loss, tuner.held, parts, outputs), kinds


def compared(alone: Sequence[Tree] | None = None, **tuner_arguments: Any) -> Difference:
    """Fine-tune a shared model at each client, and test by the losses whether clients differ.

    The arguments and errors are those of :func:`fine_tuned`. Further errors are those
    of :func:`~.permutation.permutation_test`.
    """
    losses, _ = fine_tuned(alone, **tuner_arguments)
    parts = blocks(len(tuner_arguments["clients"]), tuner_arguments["seed"])
    return permutation_test([losses], parts, seed=tuner_arguments["seed"])


def cross_losses(
    loss: Loss, held: Held, parts: Sequence[Sequence[int]], outputs: Tensor
) -> CrossLosses:
    """Return the losses of clients' models on the validation samples of their blocks.

    Losses on samples of other blocks are NaN. The others are those of
    :func:`comparable_losses`.

    Args:
        loss: the loss that trained the models.
        held: the validation samples.
        parts: blocks of clients.
        outputs: outputs of P kinds of models, [P, N, C]. The rows are those of the first client's model for the samples
            of its block, client by client, then those of the second client's model, and so on.
    """
    clients = sum(map(len, parts))
    places = [np.flatnonzero(held.client == k) for k in range(clients)]
    block_places = [
        np.concatenate([places[k] for k in block]) for block in neighbours(parts)
    ]
    sample_positions = np.concatenate(block_places)
    model = np.repeat(np.arange(clients), [len(places) for places in block_places])
    sizes = [len(places) for places in block_places]
    losses = np.full((len(outputs), clients, len(held.client)), np.nan)
    y = held.y[torch.from_numpy(sample_positions)]
    for kind, kind_outputs in enumerate(outputs):
        losses[kind, model, sample_positions] = comparable_losses(
            loss, kind_outputs, y, sizes
        )
    weight = None
    if isinstance(loss, ClassWeighted):
        weight = np.array(loss.weights)[held.y.numpy()]
    share = np.bincount(held.client, held.weight, clients).astype(np.float64)
    return CrossLosses(losses, held.client, share, held.group, weight)


def comparable_losses(
    loss: Loss, outputs: Tensor, y: Tensor, sizes: Sequence[int]
) -> Array:
    """Return losses that can be compared between models and clients, float64 [N].

    A log loss has one temperature, from 1 to 20, for all pairs of a model and a sample. Other tasks have their training
    loss. The risk sets of a survival loss are all samples that a model predicts.

    Args:
        loss: the loss that trained the models.
        outputs: outputs of several models on their samples, one model after another, [N, C].
        y: the labels of the samples, [N, ...].
        sizes: number of samples of each model, whose sum is N.

    Raises:
        UsageError: an output is not finite, for classes or several labels.
    """
    if loss.task in (CLASSIFICATION, MULTILABEL):
        logits = loss.logits(outputs).double()
        if not len(y):
            return np.zeros(0)
        equal_weights = torch.ones(len(y), dtype=torch.float64)
        fitted, _ = evaluate.fit(logits, y, equal_weights, torch.zeros_like(logits))
        temperature = min(max(1.0, fitted), HOTTEST)
        return evaluate.log_losses(logits / temperature, y).numpy()
    pairs = zip(outputs.split(list(sizes)), y.split(list(sizes)), strict=True)
    losses = [
        loss.per_sample(model_outputs, labels).double()
        for model_outputs, labels in pairs
    ]
    return torch.cat(losses).numpy()


def pair_losses(
    loss: Loss, pairs: Sequence[tuple[Tensor, Tensor]], models: int
) -> Array:
    """Return the losses of each model on each sample, float64 [K, n].

    They are those of :func:`comparable_losses`. Labels at positions and losses from
    Python have their training loss.

    Args:
        loss: the loss that trained the models.
        pairs: outputs and labels of the first model on the samples of each client, then of the second one, and so on.
        models: the number K of models.
    """
    if loss.task in (POSITIONS, OWN):
        # outputs of different clients may have different shapes
        losses = [loss.per_sample(*pair).double() for pair in pairs]
        return torch.cat(losses).numpy().reshape(models, -1)
    outputs, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    sizes = [len(labels) // models] * models
    return comparable_losses(loss, outputs, labels, sizes).reshape(models, -1)


def rows_of(difference: Difference, kinds: Sequence[str]) -> list[Row]:
    """Return the rows of the metric ``clients_differ``: the answer (1 or 0), the p-value and the leads.

    Leads are in nats. Without models of local training, their row has no value.

    Args:
        difference: the result of the test.
        kinds: the name of each kind of models, in the order of ``difference.leads``. If several kinds have one name,
            the row is that of the kind with the largest standardised lead.
    """
    values = {"differ": float(difference.shown), "p": difference.p_value}
    evidence = zip(kinds, difference.standardised, difference.leads, strict=True)
    for name, _, lead in sorted(evidence):  # the last of a name stands out most
        values[f"{name}, nats"] = lead
    values["smallest, nats"] = difference.smallest
    test_rows = [
        row(
            PURPOSE,
            value,
            variant=name,
            split="validation",
            n_samples=difference.samples,
        )
        for name, value in values.items()
    ]
    if LOCAL not in kinds:
        status = "no run of local training"
        test_rows.append(row(PURPOSE, None, status=status, variant=f"{LOCAL}, nats"))
    return test_rows
