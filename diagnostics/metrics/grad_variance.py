"""Gradient variance: how widely the entries of a layer's weight gradient spread (PLayer-FL, Eq. A.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fl_core.rows import Row

from ..gradients.passes import one_pass
from ..gradients.statistics import Statistic
from ..gradients.vectors import variance
from .base import Measurement, metric


@dataclass(frozen=True)
class GradVariance(Statistic):
    """The spread Var(g_l) of the entries of a layer's weight gradient. At least 0.

    It is (1 / (n - 1)) sum_j (g_j - mean g)^2 over the n entries of the layer's tensors together, as in the authors'
    released code. Row variants are the reductions. They differ by an order of magnitude (see :class:`Statistic`).

    Raises:
        UsageError: the reduction or the choice of tensors is unknown.
    """

    name: ClassVar[str] = "grad_variance"
    unit: ClassVar[str] = "(loss/weight)^2"

    @property
    def variants(self) -> tuple[str, ...]:
        return (self.reduction,)

    def of(self, grads: Sequence[Tensor]) -> Tensor:
        return variance(grads).reshape(1)

    def why_undefined(self, n: int) -> str:
        return "a variance needs at least two weights" if n == 1 else ""


@metric(
    description="variance over the entries of a layer's weight gradient",
    direction="higher = the entries of the gradient are spread wider",
    how="of the whole epoch's gradient, or batch by batch",
    unit="(loss/weight)^2",
    variants=("epoch", "batch"),
    look={
        "label": "gradient variance",
        "meaning": "higher = spread wider",
        "log": True,
    },
    uses_gradient_pass=True,
)
def grad_variance(measurement: Measurement, options: GradVariance) -> list[Row]:
    """Return one row a client and layer: the variance of the layer's gradient entries (see :class:`GradVariance`).

    Memory: one batch's activations. Until all clients are read, each also keeps the gradient in float64, 8 bytes a
    weight, once for all metrics of the pass. With ``reduction="batch"`` it keeps one number a batch and layer instead.

    Raises:
        UsageError: as in :func:`diagnostics.gradients.passes.one_pass`.
    """
    return one_pass(measurement, [options])
