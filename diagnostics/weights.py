"""Helpers of the metrics of weights: a layer's weights as one vector, and rows of values.

They need no forward pass, so a layer that the network does not use has values too. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_core.layers import Layer
from fl_core.rows import Row, row

from .client_model import ClientModel, Measurement, Tensors, tensors_of
from .gradients.vectors import entries


@dataclass(frozen=True)
class WeightOptions:
    """The options of weight metrics: which tensors of a layer are read, ``weights`` or ``all``.

    Raises:
        UsageError: the choice of tensors is unknown.
    """

    tensors: Tensors = "weights"


def vector_of(values: Mapping[str, Tensor], layer: Layer, tensors: str) -> Tensor:
    """Return the layer's floating tensors as one float64 vector [n], empty without any."""
    floating = [
        values[name]
        for name in tensors_of(layer, tensors)
        if values[name].is_floating_point()
    ]
    return entries(floating) if floating else torch.empty(0, dtype=torch.float64)


def reason_missing(layer: Layer, tensors: str, *vectors: Tensor) -> str:
    """Return why nothing can be computed from the layer's vectors, or ""."""
    if not all(map(len, vectors)):
        return (
            "the layer has no weights"
            if tensors == "weights"
            else "the layer has no parameters"
        )
    finite = all(bool(v.isfinite().all()) for v in vectors)
    return "" if finite else f"the weights of layer {layer.name!r} are not finite"


def each_layer(
    measurement: Measurement,
) -> Iterator[tuple[ClientModel, dict[str, nn.Parameter], Layer, dict[str, Any]]]:
    """Yield every client's parameters with each layer, and the columns that name client and layer in a row.

    The measurement's progress moves after each client.
    """
    for subject in measurement.subjects:
        params = dict(subject.model.named_parameters())
        for layer in measurement.layers:
            where = {
                "client": subject.client,
                "layer": layer.name,
                "n_train": subject.n_train,
            }
            yield subject, params, layer, where
        measurement.tick(subject.client)


def weight_row(
    metric: str,
    variant: str,
    value: float,
    status: str,
    n: int,
    tensors: str,
    **columns: Any,
) -> Row:
    """Return a row of a metric of ``n`` weights, without a value if ``status`` gives a reason."""
    return row(
        metric,
        None if status else value,
        status=status or "ok",
        variant=variant,
        stderr=None if status else 0.0,
        estimator="weights" + (", all tensors" if tensors == "all" else ""),
        n_params=n,
        **columns,
    )
