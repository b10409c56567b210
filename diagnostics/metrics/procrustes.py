"""Procrustes angle: how far apart the clients' representations are after the best rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fl_core.rows import Row

from ..representation import moments
from ..representation.comparison import LayerComparison, SimilarityOptions
from ..representation.passes import by_products, by_shifts
from .base import Measurement, metric


@dataclass(frozen=True)
class Procrustes(SimilarityOptions):
    """The options of the Procrustes angle: the samples, and how positions are treated.

    With ``positions="released"`` it is what PLayer-FL's authors computed under the name of sample similarity:

    * Convolutions: the least angle over all circular shifts of one side's maps, with samples x positions as rows
      (:func:`diagnostics.representation.shifts.shifted_procrustes`).
    * Token sequences: the angle of the sums over tokens. They include padding. The authors' were masked.
    * Others: the plain angle.

    The authors' figures added 0.5 to layers after convolutions. This does not. It holds the maps of one layer of all
    models, and passes the probe once a layer.
    """

    treatments: ClassVar[tuple[str, ...]] = ("flatten", "released", "samples", "mean")


@metric(
    description="orthogonal Procrustes angle between the clients' representations of the same samples",
    direction="higher = less similar; 0 = same up to a rotation, pi/2 = unrelated",
    how=(
        "the best rotation; variant `released` is the least angle over all shifts of a convolution's maps, as"
        " PLayer-FL's authors measured"
    ),
    unit="rad",
    variants=("flatten", "released", "samples", "mean"),
    look={"label": "mean Procrustes angle to the others", "meaning": "0 = same representation"},
    pairs=True,
    distance=True,
    requires="samples",
    features="probe",
)
def procrustes(measurement: Measurement, options: Procrustes) -> list[Row]:
    """Return one row a layer and pair of clients: the orthogonal Procrustes angle in radians; 0 = same.

    0 means same up to a rotation, pi / 2 unrelated. See :func:`diagnostics.representation.moments.procrustes_distance`.

    Memory: a forward pass of ``batch`` samples. Each model and layer has n x min(n, d) numbers.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("procrustes", measurement, options)
    if options.positions == "released":
        return comparison.rows(*by_shifts(comparison), estimator="full, least over shifts", unit="rad")
    return comparison.rows(*by_products(comparison, moments.PROCRUSTES), estimator="full", unit="rad")
