"""Weight divergence: how far apart the clients' weights of a layer are."""

from __future__ import annotations

import itertools

import torch

from fl_core.rows import Row

from ..gradients.vectors import cosine
from ..weights import WeightOptions, reason_missing, vector_of, weight_row
from .base import Measurement, metric


@metric(
    description="relative or angular distance between the clients' weights of a layer",
    direction="higher = further apart; 0 = equal",
    how="relative distance, or one minus the cosine, of all pairs",
    variants=("relative_l2", "cosine"),
    look={"label": "mean distance of weights to the others", "meaning": "0 = equal"},
    pairs=True,
    distance=True,
    requires="weights",
)
def weight_divergence(measurement: Measurement, options: WeightOptions) -> list[Row]:
    """Return two rows a pair of clients and layer, from the clients' weights a and b of the layer.

    * ``relative_l2``: ||a - b|| / (0.5 (||a|| + ||b||)), in [0, 2]. 0 = equal, higher = further apart.
    * ``cosine``: 1 - <a, b> / (||a|| ||b||), in [0, 2]. 0 = same direction, 1 = at right angles, 2 = opposite.

    Memory: one layer's weights of every client at a time, in float64.
    """
    for subject in measurement.subjects:
        measurement.tick(subject.client)
    variants = ("relative_l2", "cosine")
    subjects = measurement.subjects
    if len(subjects) < 2:
        status = "needs at least two models"
        return [
            weight_row(
                "weight_divergence",
                variant,
                0,
                status,
                0,
                options.tensors,
                layer=layer.name,
            )
            for layer in measurement.layers
            for variant in variants
        ]
    rows = []
    params = [dict(subject.model.named_parameters()) for subject in subjects]
    for layer in measurement.layers:
        vectors = [
            vector_of(own, layer, options.tensors).cpu() for own in params
        ]  # one layer of every client at a time
        for i, j in itertools.combinations(range(len(subjects)), 2):
            a, b = vectors[i], vectors[j]
            status = reason_missing(layer, options.tensors, a, b)
            lengths = [float(torch.linalg.vector_norm(v)) for v in (a, b)]
            zero = subjects[i if not lengths[0] else j].client
            both = sum(lengths)
            distance = (
                float(torch.linalg.vector_norm(a - b)) / (0.5 * both)
                if both and not status
                else 0.0
            )
            angle = 0.0 if 0 in lengths or status else 1 - cosine(a, b)
            whose = (
                f"the weights of layer {layer.name!r} are zero at client {zero!r}"
                if 0 in lengths
                else ""
            )
            where = {
                "client": subjects[i].client,
                "client_b": subjects[j].client,
                "layer": layer.name,
            }
            for variant, value, why in (
                ("relative_l2", distance, "" if both else whose),
                ("cosine", angle, whose),
            ):
                rows.append(
                    weight_row(
                        "weight_divergence",
                        variant,
                        value,
                        status or why,
                        len(a),
                        options.tensors,
                        **where,
                    )
                )
    return rows
