"""SVCCA: CCA on the principal directions of each side, without directions of little variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fl_core.bounds import SHARE
from fl_core.rows import Row

from ..representation import moments
from ..representation.comparison import LayerComparison, SimilarityOptions
from ..representation.passes import by_products
from .base import Measurement, metric


@dataclass(frozen=True)
class Svcca(SimilarityOptions):
    """The options of SVCCA: the samples, and how much variance the compared directions hold.

    Attributes:
        variance: share of each side's variance that the principal directions hold. The estimator names it.

    Raises:
        UsageError: the variance is not between 0 and 1.
    """

    variance: Annotated[float, SHARE] = moments.VARIANCE


@metric(
    description="mean canonical correlation of the principal directions that hold 99 % of the variance",
    direction="higher = more similar; 1 = same up to a linear map of these",
    how="mean canonical correlation of the directions that hold 99 % of the variance",
    variants=("flatten", "samples", "mean"),
    look={
        "label": "mean 1 − SVCCA to the others",
        "meaning": "0 = same up to a linear map",
    },
    pairs=True,
    requires="samples",
    features="probe",
)
def svcca(measurement: Measurement, options: Svcca) -> list[Row]:
    """Return one row a layer and pair of clients: cca on the main directions of each side.

    See :func:`~diagnostics.metrics.cca.cca` and :func:`diagnostics.representation.moments.svcca_measure`.

    Memory: as of :func:`~diagnostics.metrics.cca.cca`.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("svcca", measurement, options)
    values = by_products(comparison, moments.svcca_measure(options.variance))
    return comparison.rows(
        *values, estimator=f"full, {100 * options.variance:g} % of the variance"
    )
