"""CCA: how well the clients' representations can be mapped onto each other linearly."""

from __future__ import annotations

from fl_core.rows import Row

from ..representation import moments
from ..representation.comparison import LayerComparison, SimilarityOptions
from ..representation.passes import by_products
from .base import Measurement, metric


@metric(
    description="mean canonical correlation between the clients' representations of the same samples",
    direction="higher = more similar; 1 = same up to a linear map",
    how="mean canonical correlation of all directions",
    variants=("flatten", "samples", "mean"),
    look={
        "label": "mean 1 − CCA to the others",
        "meaning": "0 = same up to a linear map",
    },
    pairs=True,
    requires="samples",
    features="probe",
)
def cca(measurement: Measurement, options: SimilarityOptions) -> list[Row]:
    """Return one row a layer and pair of clients: the mean canonical correlation in [0, 1].

    A value of 1 means same up to a linear map. See :data:`diagnostics.representation.moments.CCA`. A layer without
    fewer features than samples has no value. Use more samples, ``positions="samples"`` or ``"mean"``, or svcca.

    Memory: a forward pass of ``batch`` samples. Each model and layer has n x min(n, d) numbers. With
    ``positions="samples"`` it is M d^2 / 2 for M models.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("cca", measurement, options)
    return comparison.rows(*by_products(comparison, moments.CCA), estimator="full")
