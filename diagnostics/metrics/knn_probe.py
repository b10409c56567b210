"""Nearest-neighbour probe: whether samples of one class lie together in a layer's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fl_core.bounds import OneOf, at_least
from fl_core.rows import Row

from ..representation.classifiers import ProbeOptions, nearest_labels, probe_rows
from ..representation.features import Array, NoValue, constant
from .base import Measurement, metric

DISTANCES = ("cosine", "euclidean")


@dataclass(frozen=True, eq=False)
class KnnProbe(ProbeOptions):
    """The options of the nearest-neighbour probe: neighbours, distance, and the samples to classify.

    Attributes:
        neighbours: how many vote. There is no value unless more samples train, since all would vote.
        distance: ``"cosine"`` or ``"euclidean"``.

    Raises:
        UsageError: there are no neighbours, or the distance is unknown.
    """

    neighbours: Annotated[int, at_least(1)] = 5
    distance: Annotated[str, OneOf("distance", DISTANCES)] = "cosine"


@metric(
    description="accuracy of the vote of the nearest neighbours by a layer's output",
    direction="higher = neighbours are of one class more often; 1 = all right",
    how="judged on validation samples, a holdout or folds; for each client and for all together",
    variants=("own", "pooled"),
    pooled_variants=("pooled",),
    classes=True,
    features="own",
    look={"label": "accuracy of nearest neighbours", "meaning": "1 = all right"},
)
def knn_probe(measurement: Measurement, options: KnnProbe) -> list[Row]:
    """Return the accuracy, from 0 to 1, of the vote of the nearest neighbours by a layer's flattened output.

    The output is used as it is. Higher means that neighbours are of one class more often. Variants, samples and error
    are those of :func:`~diagnostics.metrics.linear_probe.linear_probe`. The estimator names the number of neighbours
    and the distance.

    Memory: as for the linear probe, with n x m distances instead of the n x n numbers.

    Raises:
        UsageError: a client has no test data, or data do not fit.
    """

    def classify(x: Array, y: Array, others: Array) -> Array:
        if constant(np.concatenate([x, others])):
            raise NoValue("constant over the samples")
        if len(x) <= options.neighbours:
            raise NoValue(
                f"{len(x)} samples train, more than {options.neighbours} neighbours are needed"
            )
        return nearest_labels(x, y, others, options.neighbours, options.distance)

    estimator = f"{options.neighbours} nearest, {options.distance}"
    return probe_rows("knn_probe", classify, estimator, measurement, options)
