"""The smallest metric from outside: a formula of one layer.

fedlayers diagnose --dataset heart --metrics examples.metrics.largest_weight:largest_weight
"""

from __future__ import annotations

from torch import nn

import fedlayers as fl


@fl.layer_metric(
    description="largest absolute weight of a layer",
    direction="higher = larger",
    requires="weights",
)
def largest_weight(model: nn.Module, layer: fl.Layer, probe: fl.LayerProbe) -> float:
    """Max |w| over a layer's weights, at least 0."""
    if not layer.weights:
        raise fl.NoValue("no weights")
    weights = [model.get_parameter(name).detach() for name in layer.weights]
    return max(float(weight.abs().max()) for weight in weights)
