"""Normalisation scale: how strongly a layer passes its normalised channels on."""

from __future__ import annotations

import torch
from torch import nn

from fl_core.rows import Row

from ..gradients.vectors import entries
from ..weights import each_layer, weight_row
from .base import Measurement, metric

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules whose ``weight`` scales what they have normalised."""


@metric(
    description="mean absolute scale of a layer's normalisations, the importance of network slimming",
    direction="higher = the normalised channels are let through stronger",
    how="what network slimming ranks by",
    variants=("mean_abs",),
    look={
        "label": "scale of normalisations",
        "meaning": "higher = let through stronger",
    },
    requires="weights",
)
def bn_scale(measurement: Measurement) -> list[Row]:
    """Return one row a client and layer: (1/n) sum_j |gamma_j| over the scales of the layer's normalisations.

    The value is at least 0. It is network slimming's importance of channels (Liu et al. 2017), averaged over a layer.
    Batch, layer, group and RMS normalisation count. A layer without a scale has no value.

    Memory: one layer's scales of one client at a time.
    """
    rows = []
    for subject, params, layer, where in each_layer(measurement):
        scales = _scales(subject.model)
        gammas = [params[name] for name in layer.parameters if name in scales]
        gamma = entries(gammas) if gammas else torch.empty(0, dtype=torch.float64)
        status = "" if len(gamma) else "no normalisation with a scale in the layer"
        if not status and not bool(gamma.isfinite().all()):
            status = f"the scales of layer {layer.name!r} are not finite"
        value = float(gamma.abs().mean()) if len(gamma) else 0.0
        rows.append(
            weight_row(
                "bn_scale", "mean_abs", value, status, len(gamma), "weights", **where
            )
        )
    return rows


def _scales(model: nn.Module) -> set[str]:
    """Return the names of the scales of a model's normalisations."""
    modules = model.named_modules(remove_duplicate=False)
    return {
        f"{path}.weight".lstrip(".")
        for path, module in modules
        if isinstance(module, NORMS)
    }
