"""What tuning a part of a shared model gains over it, chosen on one half of the samples and scored on the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_core.errors import NonFiniteError
from fl_core.layers import Layer
from fl_core.plan import tensors_in
from fl_core.rows import CLASSIFICATION
from fl_core.seeds import numpy_generator
from fl_core.statistics import TAILS, Estimate, halves, stratified_mean

from .copies import Array, Mask, Tuner, crosswise

BY_CLIENT = 8
"""The fewest clients with which the error of a share comes from draws of clients."""
RESAMPLES = 1000


def every(layers: Sequence[Layer]) -> frozenset[str]:
    """Return the names of all tensors of some layers."""
    return frozenset(tensors_in(layers))


@dataclass(frozen=True, eq=False)
class Gain:
    """The gain of tuning a part over the shared model, for each validation sample.

    Attributes:
        nats: the fall of the loss, [n]. Higher is better.
        right: 1 if tuning turns a wrong prediction into a right one, -1 for the
            reverse, else 0, [n]. It is 0 for tasks without classes.
    """

    nats: Array
    right: Array


class Profile:
    """The gains of a shared model's parts, each tuned alone at every client.

    Args:
        tuner: trains the copies. Its validation samples are split into two random
            halves.

    Raises:
        UsageError: the validation samples have a single group, so that a half is empty.
    """

    def __init__(self, tuner: Tuner) -> None:
        self.tuner, samples = tuner, tuner.held
        self.half = halves(samples.group, samples.client, tuner.seed)

    def of(self, names: frozenset[str]) -> Gain:
        """Return the gain of training the named tensors alone, at three times the run's rate.

        If that diverges, it is the gain at the run's rate. The number of epochs is chosen as in :meth:`chosen`.

        Raises:
            NonFiniteError: the run's rate diverges, too.
            NoValue: the budget is spent.
        """
        rate = self.tuner.training.lr
        try:
            return self.chosen(self.tuner.outputs(names, 3 * rate))
        except NonFiniteError:
            return self.chosen(self.tuner.outputs(names, rate))

    def chosen(self, outputs: Tensor) -> Gain:
        """Return the gain of the best of several candidates over the shared model, which is a candidate too.

        The validation samples are in two halves. Each half chooses the candidate that the other half scores.

        Args:
            outputs: the outputs of P candidates for all n validation samples, [P, n, C].

        Raises:
            NonFiniteError: an output of the shared model is not finite, or a loss.
            NoValue: the budget is spent.
        """
        tuner, samples = self.tuner, self.tuner.held

        def losses(
            outputs_of_candidate: Tensor, fitted: Mask, scored: Mask
        ) -> tuple[Array, Array]:
            by_sample = samples.losses(tuner.loss, outputs_of_candidate)
            return by_sample[fitted], by_sample[scored]

        candidates = torch.cat([tuner.start[None], outputs])
        choice, start_losses, best_losses = crosswise(
            losses, candidates, samples.weight, self.half
        )
        right_gain = np.zeros(len(choice))
        if tuner.loss.task == CLASSIFICATION:
            all_right = samples.right(candidates)
            right_gain = all_right[choice, np.arange(len(choice))] - all_right[0]
        return Gain(start_losses - best_losses, right_gain)

    def mean(self, values: Array) -> Estimate:
        """Return the mean over clients of values [n], weighted by training samples, with its error."""
        samples = self.tuner.held
        return stratified_mean(values, samples.weight, samples.group, samples.client)

    def share(self, part: Gain, whole: Gain) -> Estimate:
        """Return the mean gain of a part in nats, divided by that of the whole network.

        The error is a quarter of the width of a bootstrap's middle 95 %.

        Each draw has exponential weights (Rubin 1981) of the groups within each client.
        With 8 clients or more they are weights of the clients. If all draws agree, the
        error is NaN. The degrees of freedom are always NaN.

        Args:
            part: the gain of the part.
            whole: the gain of all layers together, whose mean is not 0.
        """
        samples, draws = self.tuner.held, numpy_generator(self.tuner.seed, "share")
        unit, stratum = samples.group, np.unique(samples.client, return_inverse=True)[1]
        if len(self.tuner.train) >= BY_CLIENT:
            unit, stratum = stratum, np.zeros_like(stratum)
        units, unit = np.unique(unit, return_inverse=True)
        shares, ratios = np.bincount(stratum, samples.weight), []
        for _ in range(RESAMPLES):
            weight = samples.weight * draws.exponential(size=len(units))[unit]
            parts, wholes = (
                np.bincount(stratum, weight * gain.nats) for gain in (part, whole)
            )
            weights_of_draw = shares / np.bincount(stratum, weight)
            ratios.append((weights_of_draw @ parts) / (weights_of_draw @ wholes))
        low, high = np.quantile(ratios, TAILS)
        ratio = self.mean(part.nats).value / self.mean(whole.nats).value
        return Estimate(ratio, float(high - low) / 4 or math.nan, math.nan)
