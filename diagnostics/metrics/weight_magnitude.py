"""Weight magnitude: how large a layer's weights are."""

from __future__ import annotations

import torch

from fl_core.rows import Row

from ..weights import WeightOptions, each_layer, reason_missing, vector_of, weight_row
from .base import Measurement, metric


@metric(
    description="mean absolute value and length of a layer's weights, the importance of magnitude pruning",
    direction="higher = larger weights",
    how="what magnitude pruning ranks by",
    variants=("mean_abs", "l2"),
    look={"label": "weight magnitude", "meaning": "higher = larger", "log": True},
    requires="weights",
)
def weight_magnitude(measurement: Measurement, options: WeightOptions) -> list[Row]:
    """Return two rows a client and layer: ``mean_abs`` = (1/n) sum_j |w_j| and ``l2`` = ||w||_2 of its n weights.

    Both are at least 0. Magnitude pruning gives a layer's weights this importance (Han et al. 2015; Li et al. 2017).

    Memory: one layer's weights of one client at a time, in float64.
    """
    rows = []
    for _, params, layer, where in each_layer(measurement):
        w = vector_of(params, layer, options.tensors)
        status = reason_missing(layer, options.tensors, w)
        mean = float(w.abs().mean()) if len(w) else 0.0
        for variant, value in (
            ("mean_abs", mean),
            ("l2", float(torch.linalg.vector_norm(w))),
        ):
            rows.append(
                weight_row(
                    "weight_magnitude",
                    variant,
                    value,
                    status,
                    len(w),
                    options.tensors,
                    **where,
                )
            )
    return rows
