"""Linear probe: how well a linear classifier separates the classes by a layer's output (Alain and Bengio 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fl_core.bounds import ABOVE_0
from fl_core.rows import Row

from ..representation.classifiers import ProbeOptions, logistic, probe_rows
from ..representation.features import Array
from .base import Measurement, metric


@dataclass(frozen=True, eq=False)
class LinearProbe(ProbeOptions):
    """The options of the linear probe: how it is trained and tested.

    Attributes:
        C: inverse strength of the regularisation, see :func:`diagnostics.representation.classifiers.logistic`.

    Raises:
        UsageError: C is not above 0.
    """

    C: Annotated[float, ABOVE_0] = 1.0


@metric(
    description="accuracy of a logistic regression on a layer's output, on samples that it was not trained on",
    direction="higher = a linear classifier tells the classes apart better; 1 = all right",
    how="judged on validation samples, a holdout or folds; for each client and for all together",
    variants=("own", "pooled"),
    pooled_variants=("pooled",),
    classes=True,
    features="own",
    look={"label": "accuracy of a linear probe", "meaning": "1 = all right"},
)
def linear_probe(measurement: Measurement, options: LinearProbe) -> list[Row]:
    """Return the accuracy, from 0 to 1, of a logistic regression on each layer's flattened output.

    Higher means that a linear classifier separates the classes better. The probe is never tested on samples that
    trained it. The samples of ``test`` are used if given, else a held-out fraction. Else each sample is tested once in
    cross-validation over folds that are stratified by class. The estimator names the way. For variants and error see
    :func:`diagnostics.representation.classifiers.probe_rows`. The error does not include the variation of the training
    samples.

    Memory: a forward pass of ``batch`` samples. The outputs of all layers are stored for at most ``samples`` samples of
        one client, and for ``samples`` of all clients together. One layer at a time has a float64 copy. If a sample has
    more than n features, that layer has n x n numbers instead.

    Raises:
        UsageError: a client has no test data, or data do not fit.
    """

    def classify(x: Array, y: Array, others: Array) -> Array:
        return logistic(x, y, others, options.C)

    return probe_rows(
        "linear_probe",
        classify,
        f"logistic regression, C={options.C:g}",
        measurement,
        options,
    )
