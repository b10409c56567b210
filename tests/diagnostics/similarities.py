"""Similarities of two sets of features, by the parts that the metrics of similarity are made of."""

from __future__ import annotations

import math

from torch import Tensor

from diagnostics.representation.probe import LEAST, NoValue, batch_bounds
from diagnostics.representation.similarity import (
    BANDWIDTH,
    CCA,
    PROCRUSTES,
    VARIANCE,
    Measure,
    cka_matrix,
    gram_entries,
    svcca_measure,
)
from figures.player_fl.shifts import least_angle, unit_maps


def linear_cka(
    x: Tensor, y: Tensor, estimator: str = "full", batch: int | None = None
) -> float:
    """Return linear CKA of features x [n, d1] and y [n, d2] of the same n samples; 1 = same, 0 = unrelated.

    * ``"full"``: ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) with columns centred, in [0, 1] (Kornblith et al. 2019, Eq.
      5). This is PLayer-FL, Eq. A.3, without its squared denominator.
    * ``"minibatch"``: HSIC_1(X, Y) / sqrt(HSIC_1(X, X) HSIC_1(Y, Y)). Each HSIC_1 is the unbiased estimator (Song et
      al. 2012, Eq. 5), averaged over batches of ``batch`` samples (Nguyen et al. 2021, Eq. 3). It may fall below 0.

    Both are invariant to rotation, isotropic scale and offset of either side. The value is NaN if one side is constant,
    not finite, or too short.

    Raises:
        UsageError: numbers of samples differ, or ``batch`` is below 4 with ``"minibatch"``.
    """
    return _cka(x, y, estimator, batch, None)


def rbf_cka(
    x: Tensor,
    y: Tensor,
    bandwidth: float = BANDWIDTH,
    estimator: str = "full",
    batch: int | None = None,
) -> float:
    """Return CKA of x [n, d1] and y [n, d2] with k(a, b) = exp(-||a - b||^2 / (2 s^2)); 1 = same, 0 = unrelated.

    The width s is ``bandwidth`` times the median distance between two different samples, each side's own (Kornblith et
    al. 2019, section 3). They use 0.2, 0.4 and 0.8. With ``"minibatch"`` each batch has its own s. Estimators,
    invariances and NaN are those of :func:`linear_cka`. The value is also NaN if more than half of the samples' pairs
    are identical.
    """
    return _cka(x, y, estimator, batch, bandwidth)


def _cka(
    x: Tensor, y: Tensor, estimator: str, batch: int | None, bandwidth: float | None
) -> float:
    places = None
    if estimator == "minibatch":
        places = batch_bounds(len(x), batch or max(len(x), LEAST))
    try:
        sides = [gram_entries(side, places, bandwidth) for side in (x, y)]
    except NoValue:
        return math.nan
    return float(cka_matrix(sides)[0, 1])


def procrustes_distance(x: Tensor, y: Tensor) -> float:
    """Return the orthogonal Procrustes angle between x [n, d1] and y [n, d2] in radians.

    0 means same and pi / 2 unrelated. The angle remains after the best rotation. It is arccos(||X^T Y||_* / (||X||_F
    ||Y||_F)) with columns centred (Williams et al. 2021, without whitening: alpha = 1). It is a metric, invariant to
    rotation, isotropic scale and offset of either side. The value is NaN if one side is constant, not finite, or has
    fewer than 3 samples.
    """
    return _between(x, y, PROCRUSTES)


def mean_cca(x: Tensor, y: Tensor) -> float:
    """Return the mean canonical correlation of x [n, d1] and y [n, d2], in [0, 1].

    A value of 1 means same up to an invertible linear map. The mean is over the min(rank x, rank y) correlations
    (Kornblith et al. 2019, Table 1). The rank is found in float64. It leaves out directions that rounding the features
    in their type can make. Unrelated features of rank r have about sqrt(r / n), not 0. Two ranks that add up to n or
    more force correlations of 1.

    The value is NaN as in :func:`procrustes_distance`. It is also NaN if one side spans all n - 1 directions, as with n
    - 1 features or more. Every correlation is then 1.
    """
    return _between(x, y, CCA)


def svcca(x: Tensor, y: Tensor, variance: float = VARIANCE) -> float:
    """Return :func:`mean_cca` of the fewest principal directions of each side that hold ``variance``.

    See Raghu et al. 2017. The value is invariant to rotation, isotropic scale and offset, but not to any linear map.
    """
    return _between(x, y, svcca_measure(variance))


def _between(x: Tensor, y: Tensor, measure: Measure) -> float:
    try:
        value = measure.between(measure.side(x), measure.side(y))
    except NoValue:
        return math.nan
    assert not isinstance(value, str)
    return value


def shifted_procrustes(x: Tensor, y: Tensor) -> float:
    """Return the smallest Procrustes angle between two maps over shifts, in radians; 0 = same.

    The maps are x [n, *positions, d1] and y [n, *positions, d2]. The angle is the min over s of arccos(||X^T Y_s||_* /
    (||X||_F ||Y||_F)). Samples x positions are the rows, and columns are centred. Y_s is y rolled by s along its
    positions (the convolutional form of Williams et al. 2021).

    A minimum over shifts is never above the angle of the maps as they are. So convolutions look more alike than layers
    without positions. The value is NaN as in :func:`diagnostics.representation.similarity.procrustes_distance`.
    """
    try:
        return least_angle(unit_maps(x), unit_maps(y))
    except NoValue:
        return math.nan
