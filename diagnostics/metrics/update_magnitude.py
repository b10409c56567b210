"""Update magnitude: how far a layer's weights have moved from the common start of all clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import UsageError, check_known
from fl_core.rows import Row

from ..client_model import tensors_of
from ..weights import WeightOptions, each_layer, reason_missing, vector_of, weight_row
from .base import Measurement, metric


@dataclass(frozen=True)
class UpdateMagnitude(WeightOptions):
    """The options of update magnitude: the initial weights, and which tensors are read.

    Attributes:
        start: the common start, as a model or as tensors by exact name. Without it no row has a value.
    """

    start: Mapping[str, Tensor] | nn.Module | None = None

    @property
    def origin(self) -> Mapping[str, Tensor] | None:
        """The initial weights, by exact name."""
        return (
            tree.named_tensors(self.start)
            if isinstance(self.start, nn.Module)
            else self.start
        )


@metric(
    description="how far a layer's weights have moved from the common start",
    direction="higher = moved further; 0 = not moved",
    how="distance from the common start",
    variants=("relative_l2", "l2"),
    look={"label": "update magnitude", "meaning": "0 = not moved", "log": True},
    requires="weights",
)
def update_magnitude(measurement: Measurement, options: UpdateMagnitude) -> list[Row]:
    """Return two rows a client and layer: how far its weights w have moved from the common start w0.

    The rows are ``relative_l2`` = ||w - w0|| / ||w0|| and ``l2`` = ||w - w0||. Both are at least 0, and 0 means not
    moved.

    Memory: one layer's weights of one client at a time and of the start, in float64.

    Raises:
        UsageError: the start lacks a tensor or has one of another shape.
    """
    origin = options.origin
    rows = []
    for _, params, layer, where in each_layer(measurement):
        status = (
            ""
            if origin is not None
            else "the common start is not known; give it as the option start"
        )
        w, w0 = (
            vector_of(params, layer, options.tensors),
            torch.empty(0, dtype=torch.float64),
        )
        if origin is not None:
            _check_start(
                origin,
                {name: params[name] for name in tensors_of(layer, options.tensors)},
            )
            w0 = vector_of(origin, layer, options.tensors).to(w.device)
            status = reason_missing(layer, options.tensors, w, w0)
        moved = float(torch.linalg.vector_norm(w - w0)) if not status else 0.0
        base = float(torch.linalg.vector_norm(w0))
        zero = (
            ""
            if base or status
            else f"the weights of layer {layer.name!r} were zero at the start"
        )
        for variant, value, why in (
            ("relative_l2", moved / (base or 1.0), zero),
            ("l2", moved, ""),
        ):
            rows.append(
                weight_row(
                    "update_magnitude",
                    variant,
                    value,
                    status or why,
                    len(w),
                    options.tensors,
                    **where,
                )
            )
    return rows


def _check_start(start: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    for name, tensor in params.items():
        check_known("tensor of the start", name, start)
        if start[name].shape != tensor.shape:
            raise UsageError(
                f"{name!r} of the start must be {tuple(tensor.shape)}, as in the model; got {tuple(start[name].shape)}."
            )
