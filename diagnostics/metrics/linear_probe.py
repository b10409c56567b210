"""Linear probe: how well a linear classifier tells the classes by a layer's output (Alain and Bengio 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from fl_core.errors import UsageError
from fl_core.rows import Row

from ..representation.classifiers import ProbeOptions, logistic, probed
from ..representation.features import Array
from .base import Measurement, metric


@dataclass(frozen=True, eq=False)
class LinearProbe(ProbeOptions):
    """The options of the linear probe: how it is trained and judged.

    Attributes:
        C: inverse strength of the regularisation, see :func:`diagnostics.representation.classifiers.logistic`.

    Raises:
        UsageError: a C that is not above 0.
    """

    C: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.C > 0:
            raise UsageError(f"C={self.C}; it must be above 0")


@metric(
    description="accuracy of a logistic regression on a layer's output, on samples that it was not trained on",
    direction="higher = a linear classifier tells the classes apart better; 1 = all right",
    how="judged on validation samples, a holdout or folds; for each client and for all together",
    variants=("own", "pooled"),
    together=("pooled",),
    classes=True,
    features="own",
    look={"label": "accuracy of a linear probe", "meaning": "1 = all right"},
)
def linear_probe(measurement: Measurement, options: LinearProbe) -> list[Row]:
    """Accuracy, from 0 to 1, of a logistic regression on each layer's flattened output.

    Higher = a linear classifier tells the classes apart better. Every sample that counts is one the probe was not
    trained on: of ``test`` if given, else a held-out fraction, else each sample once in cross-validation over folds
    that are stratified by class; the estimator says which. Variants and error: see
    :func:`diagnostics.representation.classifiers.probed`; the error does not count what the training samples vary.

    Memory: a forward pass of ``batch`` samples; of one client the outputs of all layers for at most ``samples``
    samples, of all clients together for as many again; at one layer at a time their float64 copy, or n x n numbers
    where a sample has more than n features.

    Raises:
        UsageError: a client without test data, data that do not fit.
    """

    def classify(x: Array, y: Array, others: Array) -> Array:
        return logistic(x, y, others, options.C)

    return probed("linear_probe", classify, f"logistic regression, C={options.C:g}", measurement, options)
