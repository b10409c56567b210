"""Similarities of two sets of features, by the parts that the metrics of similarity are made of."""

import math
from functools import partial

from diagnostics.measurement import NoValue
from diagnostics.representation.similarity import (
    BANDWIDTH,
    CCA,
    LEAST_SAMPLES,
    PROCRUSTES,
    VARIANCE,
    batch_bounds,
    cka_matrix,
    gram_entries,
    svcca_measure,
)
from figures.player_fl.shifts import least_angle, unit_maps


def linear_cka(
    x,
    y,
    estimator="full",
    batch=None,
    bandwidth=None,
):
    """Return CKA of features x [n, d1] and y [n, d2]; NaN where there is none. A bandwidth makes it radial."""
    places = None
    if estimator == "minibatch":
        places = batch_bounds(len(x), batch or max(len(x), LEAST_SAMPLES))
    try:
        sides = [gram_entries(side, places, bandwidth) for side in (x, y)]
    except NoValue:
        return math.nan
    return float(cka_matrix(sides)[0, 1])


def rbf_cka(x, y, bandwidth=BANDWIDTH, **how):
    """Return CKA with a radial kernel, of this width in median distances."""
    return linear_cka(x, y, bandwidth=bandwidth, **how)


def _between(x, y, measure):
    try:
        value = measure.between(measure.side(x), measure.side(y))
    except NoValue:
        return math.nan
    assert not isinstance(value, str)
    return value


procrustes_distance = partial(_between, measure=PROCRUSTES)
mean_cca = partial(_between, measure=CCA)


def svcca(x, y, variance=VARIANCE):
    """Return the mean canonical correlation of the principal directions that hold ``variance``."""
    return _between(x, y, svcca_measure(variance))


def shifted_procrustes(x, y):
    """Return the smallest Procrustes angle between maps [n, *positions, d] over shifts of y, or NaN."""
    try:
        return least_angle(unit_maps(x), unit_maps(y))
    except NoValue:
        return math.nan
