"""CKA with a radial kernel. It weighs small distances between samples more than large ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fl_core.bounds import ABOVE_0, OneOf
from fl_core.rows import Row

from ..representation.comparison import LayerComparison, SimilarityOptions
from ..representation.gram import BANDWIDTH, ESTIMATORS
from ..representation.passes import by_grams
from .base import Measurement, metric


@dataclass(frozen=True)
class RbfCka(SimilarityOptions):
    """The options of CKA with a radial kernel; ``positions`` are ``"flatten"`` or ``"mean"``.

    Attributes:
        estimator: ``"full"`` or ``"minibatch"``.
        bandwidth: the kernel's bandwidth as a fraction of the median distance between samples. The estimator names it.

    Raises:
        UsageError: a choice is unknown, or the bandwidth is not above 0.
    """

    estimator: Annotated[str, OneOf("estimator", ESTIMATORS)] = "full"
    bandwidth: Annotated[float, ABOVE_0] = BANDWIDTH

    treatments: ClassVar[tuple[str, ...]] = ("flatten", "mean")

    @property
    def unbiased(self) -> bool:
        return self.estimator == "minibatch"


@metric(
    description="CKA with a radial kernel between the clients' representations of the same samples",
    direction="higher = more similar; 1 = same",
    how="a bandwidth relative to the median distance",
    variants=("flatten", "mean"),
    look={
        "label": "mean 1 − RBF CKA to the others",
        "meaning": "0 = same representation",
    },
    pairs=True,
    requires="samples",
    features="probe",
)
def rbf_cka(measurement: Measurement, options: RbfCka) -> list[Row]:
    """Return one row a layer and pair of clients: CKA with a radial kernel; 1 = same.

    See :mod:`diagnostics.representation.gram`.

    Memory: a forward pass of ``batch`` samples. Each model and layer has n x n numbers (``"minibatch"``: n x batch).

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("rbf_cka", measurement, options)
    values = by_grams(comparison, options.estimator, options.bandwidth)
    return comparison.rows(
        *values,
        estimator=f"{options.estimator}, bandwidth {options.bandwidth:g} x median distance",
    )
