"""Sums that a client sends in place of its losses: at stated temperatures, and over groups of samples.

They are all that the rule needs (:class:`fedlayers.decision.table.SumPart`). A sum is over two samples or more, so no
loss of one sample is among them. Halves and groups of few samples are joined (:func:`halves_of`, :func:`groups_of`),
and a split of one sample is refused (:func:`check_samples`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlayers.decision.losses import PROBABLE, Predictor, SeedLosses
from fedlayers.decision.table import VALIDATION
from fl_core import tree
from fl_core.errors import UsageError
from fl_core.training import evaluate

TEMPERATURES = tuple(2.0 ** (k / 2) for k in range(-4, 17))
"""The 21 temperatures over sites, from 1/4 to 256."""
NEUTRAL = TEMPERATURES.index(1.0)
"""The place of the temperature that changes nothing."""
Array = NDArray[np.float64]


class Calibration(NamedTuple):
    """The temperatures of a way.

    The first two are for the halves of the validation samples, each fitted on the other half. The third is for test
    samples.
    """

    first: float = 1.0
    second: float = 1.0
    test: float = 1.0


UNCALIBRATED = Calibration()
LEAST = 2
"""The fewest samples over whose losses a sum leaves a client."""


# --- at a site -------------------------------------------------------------------------------------------------


def temperatures_of(kind: str) -> tuple[float, ...]:
    """Return the temperatures at which sites compute losses: :data:`TEMPERATURES`, or 1 alone without probabilities.

    Args:
        kind: the kind of task. Outputs are probabilities for those of :data:`fedlayers.decision.losses.PROBABLE`.
    """
    if kind in PROBABLE:
        return TEMPERATURES
    return (1.0,)


def check_samples(losses: SeedLosses, client: str) -> None:
    """Refuse sums over a single sample of a client, which are its loss.

    Args:
        losses: the samples of the seed.
        client: the client's name.

    Raises:
        UsageError: the client has one sample in a split. The message names both.
    """
    for split, labels in losses.labels.items():
        check_count(split, client, len(labels.get(client, ())))


def check_count(split: str, client: str, count: int) -> None:
    """Refuse a split of a client with too few samples to hide the loss of each; none at all are enough.

    Raises:
        UsageError: the split has one sample. The message names it and the client.
    """
    if 0 < count < LEAST:
        raise UsageError(
            f"{split} samples of client {client!r} must be at least {LEAST} in a decision over sites, to hide the "
            f"loss of each; got {count}. Give it more samples, or none."
        )


def halves_of(losses: SeedLosses, client: str) -> NDArray[np.int64]:
    """Return the half, 0 or 1, of each of a client's validation samples, int64 [n].

    It is that of :attr:`SeedLosses.dealt`. If a half would have a single sample, all
    samples are in one half, which depends on the client's number.
    """
    half = losses.dealt[client]
    if np.bincount(half)[half].min() < LEAST:
        return np.full_like(half, list(losses.task.data.names).index(client) % 2)
    return half


def groups_of(losses: SeedLosses, split: str, client: str) -> NDArray[np.int64]:
    """Return the group of each of a client's samples in a split, from 0, int64 [n].

    Two groups of which one has a single sample are one group, because the sums of two
    groups and of their products are the two groups' losses.
    """
    samples = losses.samples[split]
    names = samples.loc[samples["client"] == client, "group"]
    group = np.unique(names, return_inverse=True)[1]
    if group.max() == 1 and np.bincount(group).min() < LEAST:
        return np.zeros_like(group)
    return group


def client_losses(
    losses: SeedLosses, one: Predictor, split: str, client: str, temperature: Tensor
) -> Tensor:
    """Return the loss of each of a client's samples, float64 [n].

    Args:
        losses: the samples of the seed.
        one: the predictor that gives the outputs.
        split: validation or test.
        client: the client's name.
        temperature: the temperature of each sample, [n]. It is ignored if outputs are no probabilities.
    """
    outputs, y = one.outputs[split][client], losses.labels[split][client]
    if losses.kind in PROBABLE:
        return evaluate.log_losses(outputs / temperature[:, None], y)
    if y.is_floating_point():
        y = y.double()
    return losses.task.criterion.of_logits().per_sample(outputs, y).double()


def sums_of_halves(
    losses: SeedLosses, one: Predictor, client: str
) -> list[list[list[float]]]:
    """Return two sums of a client's weighted validation losses, for each half and temperature, [2][T][2].

    The halves are those of :func:`halves_of`, the temperatures those of
    :func:`temperatures_of`. The first of the two sums is over the label's loss. The
    second is over the mean loss of the other classes, which softened targets need
    (:func:`fl_core.training.evaluate.soft_targets`). It is 0 if outputs are no
    probabilities. All sums are 0 if the client has no validation samples.

    Raises:
        UsageError: as for :func:`check_samples`.
    """
    check_samples(losses, client)
    temperatures = temperatures_of(losses.kind)
    if client not in losses.labels[VALIDATION]:
        return [[[0.0, 0.0] for _ in temperatures] for _ in range(2)]
    y, half = losses.labels[VALIDATION][client], halves_of(losses, client)
    weights = losses.weights(client, y).numpy()
    sums_of = []
    with tree.one_thread():
        for temperature in temperatures:
            temperatures_of_samples = torch.full(
                (len(y),), temperature, dtype=torch.float64
            )
            own_losses = client_losses(
                losses, one, VALIDATION, client, temperatures_of_samples
            )
            losses_of_others = torch.zeros_like(own_losses)
            if losses.kind in PROBABLE:
                outputs = one.outputs[VALIDATION][client] / temperature
                losses_of_others = other_losses(outputs, y, own_losses)
            pair = np.stack([own_losses.numpy(), losses_of_others.numpy()]) * weights
            sums_of.append([pair[:, half == number].sum(1) for number in (0, 1)])
    return np.array(sums_of).swapaxes(0, 1).tolist()


def other_losses(outputs: Tensor, y: Tensor, label_losses: Tensor) -> Tensor:
    """Return the mean log loss of the classes that are not the label, or of the opposite labels, float64 [n].

    Args:
        outputs: calibrated logits [n, C].
        y: labels: classes [n], or 0 and 1 [n, C].
        label_losses: the log loss of the label, [n].
    """
    if y.ndim > 1:
        return evaluate.log_losses(outputs, 1 - y.double())
    class_sums = -outputs.log_softmax(1).sum(1)
    return (class_sums - label_losses) / (outputs.shape[1] - 1)


def weights_of_halves(losses: SeedLosses, client: str) -> list[list[float]]:
    """Return two sums over each half of a client's validation samples, [half][sum].

    The first is that of the samples' weights (:meth:`SeedLosses.weights`), the second
    that of their squares. The halves are those of :attr:`SeedLosses.dealt`. All sums
    are 0 if the client has no validation samples.
    """
    if client not in losses.labels[VALIDATION]:
        return [[0.0, 0.0], [0.0, 0.0]]
    half = halves_of(losses, client)
    weights = losses.weights(client, losses.labels[VALIDATION][client]).numpy()
    pair = np.stack([weights, weights**2])
    return [pair[:, half == number].sum(1).tolist() for number in (0, 1)]


def labels_of_halves(losses: SeedLosses, client: str) -> list[list[int]]:
    """Return the distinct labels of a client's validation samples in each half, [2][labels].

    Both lists are empty if outputs are no probabilities, or without validation samples.
    """
    if client not in losses.labels[VALIDATION] or losses.kind not in PROBABLE:
        return [[], []]
    y, half = losses.labels[VALIDATION][client].numpy(), halves_of(losses, client)
    return [np.unique(y[half == number]).astype(int).tolist() for number in (0, 1)]


def group_sums(
    losses: SeedLosses,
    split: str,
    client: str,
    ways: Sequence[tuple[Predictor, Calibration]],
) -> dict[str, Any]:
    """Return a client's sums over its groups of samples, from which intervals follow.

    A group has K + 1 numbers: its weighted loss by each of K ways, and its weight.

    Args:
        losses: the samples of the seed.
        split: validation or test.
        client: the client's name.
        ways: the predictor of each way, with its temperatures.

    Returns:
        ``draws``, the number of groups (:func:`groups_of`); ``sums`` [K + 1] of these numbers over the
        groups; and ``products`` [K + 1, K + 1], the sums over the groups of the
        products of any two numbers. All are 0 if the client has no samples in the
        split.

    Raises:
        UsageError: as for :func:`check_samples`.
    """
    check_samples(losses, client)
    size = len(ways) + 1
    if client not in losses.labels[split]:
        return {"draws": 0, "sums": [0.0] * size, "products": [[0.0] * size] * size}
    y, group = losses.labels[split][client], groups_of(losses, split, client)
    weights = losses.weights(client, y).numpy()
    rows = []
    for predictor, calibration in ways:
        temperature = np.full(len(y), calibration.test)
        if split == VALIDATION:
            temperature = np.array(calibration[:2])[halves_of(losses, client)]
        by_sample = torch.from_numpy(temperature)
        sample_losses = client_losses(losses, predictor, split, client, by_sample)
        rows.append(np.bincount(group, weights * sample_losses.numpy()))
    rows.append(np.bincount(group, weights))
    table = np.stack(rows)
    return {
        "draws": table.shape[1],
        "sums": table.sum(1).tolist(),
        "products": (table @ table.T).tolist(),
    }


# --- at the server ---------------------------------------------------------------------------------------------


def calibration(
    sums: Array, weights: Array, labels: Sequence[Sequence[int]]
) -> tuple[Calibration, float]:
    """Return the temperatures with the least softened loss, and the cross-fitted mean validation loss.

    Each half of the samples is calibrated by the fit on the other half. With samples in one half alone there is one
    fit, and the temperature is at least 1.

    >>> sums, weights = np.zeros((2, 21, 2)), np.array([[4.0, 4.0], [4.0, 4.0]])
    >>> sums[0, :, 0], sums[1, :, 0] = np.abs(np.arange(21) - 6), np.abs(np.arange(21) - 2)
    >>> calibration(sums, weights, [[0, 1], [0, 1]])
    (Calibration(first=0.5, second=2.0, test=0.5), 1.0)

    Args:
        sums: the sums of all clients (:func:`sums_of_halves`), [2, T, 2].
        weights: the weights of all clients (:func:`weights_of_halves`), [2, 2].
        labels: the labels that occur in each half.
    """
    temperatures = TEMPERATURES if sums.shape[1] > 1 else (1.0,)
    coolest_place = _coolest(sums.sum(0), weights.sum(0), {*labels[0], *labels[1]})
    if not weights[:, 0].all():
        coolest_place = max(coolest_place, temperatures.index(1.0))
        places = [coolest_place, coolest_place]
    else:
        fitted = [_coolest(sums[k], weights[k], set(labels[k])) for k in (0, 1)]
        places = fitted[::-1]
    loss = sum(float(sums[half, places[half], 0]) for half in (0, 1))
    first, second, test = (temperatures[place] for place in (*places, coolest_place))
    return Calibration(first, second, test), loss / float(weights[:, 0].sum())


def _coolest(sums: Array, weights: Array, labels: set[int]) -> int:
    """Return the place of the temperature with the least softened loss.

    Of equal ones the lowest counts. With a single label it is :data:`NEUTRAL`. With a
    single temperature it is 0.

    Args:
        sums: sums over the label's loss and over that of other classes, [T, 2].
        weights: the sum of the samples' weights, and of their squares, [2].
        labels: the labels that occur.
    """
    if len(sums) == 1:
        return 0
    if len(labels) < 2:
        return NEUTRAL
    margin = 1 / (weights[0] ** 2 / weights[1] + 2)
    return int(np.argmin((1 - margin) * sums[:, 0] + margin * sums[:, 1]))
