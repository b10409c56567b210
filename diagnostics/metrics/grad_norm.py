"""Gradient norm: how long a layer's weight gradient is, and the mean of its entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_core.rows import Row

from ..gradients.passes import one_pass
from ..gradients.statistics import Statistic
from ..gradients.vectors import entries
from .base import Measurement, metric

STATISTICS = ("norm", "mean", "mean_abs")


@dataclass(frozen=True)
class GradNorm(Statistic):
    """Length and mean of a layer's gradient g with n entries, in loss per weight.

    Row variants:

    * ``norm`` = ||g||_2, at least 0
    * ``mean`` = (1/n) sum_j g_j, signed
    * ``mean_abs`` = (1/n) sum_j |g_j|

    With ``reduction="batch"`` their names end in ``_batch``. The mean length of the batches' own gradients is larger
    than the length of the whole data's gradient. The batches' noise averages out in the latter.

    Raises:
        UsageError: the reduction or the choice of tensors is unknown.
    """

    name: ClassVar[str] = "grad_norm"
    unit: ClassVar[str] = "loss/weight"

    @property
    def variants(self) -> tuple[str, ...]:
        return (
            STATISTICS
            if self.reduction == "epoch"
            else tuple(f"{name}_batch" for name in STATISTICS)
        )

    def of(self, grads: Sequence[Tensor]) -> Tensor:
        g = entries(grads)
        return torch.stack([torch.linalg.vector_norm(g), g.mean(), g.abs().mean()])


@metric(
    description="length and mean of a layer's weight gradient",
    direction="higher = the loss is steeper in the layer's weights",
    how="length, mean and mean size, of the whole epoch's gradient or batch by batch",
    unit="loss/weight",
    variants=("norm", "mean", "mean_abs", "norm_batch", "mean_batch", "mean_abs_batch"),
    look={"label": "gradient norm", "meaning": "higher = steeper", "log": True},
    uses_gradient_pass=True,
)
def grad_norm(measurement: Measurement, options: GradNorm) -> list[Row]:
    """Return three rows a client and layer: length and mean of the layer's gradient (see :class:`GradNorm`).

    Memory: as of :func:`diagnostics.metrics.grad_variance.grad_variance`.

    Raises:
        UsageError: as in :func:`diagnostics.gradients.passes.one_pass`.
    """
    return one_pass(measurement, [options])
