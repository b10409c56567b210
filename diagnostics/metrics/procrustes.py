"""Procrustes angle: how far apart the clients' representations are after the best rotation."""

from __future__ import annotations

from fl_core.rows import Row

from ..representation import moments
from ..representation.comparison import LayerComparison, SimilarityOptions
from ..representation.passes import by_products
from .base import Measurement, metric


@metric(
    description="orthogonal Procrustes angle between the clients' representations of the same samples",
    direction="higher = less similar; 0 = same up to a rotation, pi/2 = unrelated",
    how="the best rotation",
    unit="rad",
    variants=("flatten", "samples", "mean"),
    look={
        "label": "mean Procrustes angle to the others",
        "meaning": "0 = same representation",
    },
    pairs=True,
    distance=True,
    requires="samples",
    features="probe",
)
def procrustes(measurement: Measurement, options: SimilarityOptions) -> list[Row]:
    """Return one row a layer and pair of clients: the orthogonal Procrustes angle in radians; 0 = same.

    0 means same up to a rotation, pi / 2 unrelated. See :data:`diagnostics.representation.moments.PROCRUSTES`.

    Memory: a forward pass of ``batch`` samples. Each model and layer has n x min(n, d) numbers.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("procrustes", measurement, options)
    return comparison.rows(
        *by_products(comparison, moments.PROCRUSTES), estimator="full", unit="rad"
    )
