"""A metric from outside: how much of a layer's gradient is signal, and how much changes from batch to batch.

fedlayers diagnose --dataset heart --metrics examples.metrics.gradient_snr:gradient_snr
fedlayers plot diagnosis --out pictures
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import fedlayers as fl


@dataclass(frozen=True)
class Parts:
    """Into how many parts a client's samples are split; each gives one gradient.

    Raises:
        UsageError: fewer than 2 parts.
    """

    parts: int = 8

    def __post_init__(self) -> None:
        if self.parts < 2:
            raise fl.UsageError(
                f"parts must be at least 2; got {self.parts}. Choose more parts."
            )


@fl.layer_metric(
    description="squared length of a layer's mean gradient over the variance of the parts' gradients",
    direction="higher = the parts of the data agree more on where the layer should go",
    look={
        "label": "gradient signal-to-noise",
        "meaning": "higher = batches agree more",
        "log": True,
    },
)
def gradient_snr(
    model: nn.Module, layer: fl.Layer, probe: fl.LayerProbe, options: Parts
) -> float:
    """SNR_l = ||m||^2 / (1/(K-1) sum_k ||g_k - m||^2) with m the mean of the K parts' gradients g_k of layer l.

    At least 0, a pure number. A layer without trained weights has no value. So has a client with fewer samples than
    parts.
    """
    weights = [model.get_parameter(name) for name in layer.weights]
    weights = [weight for weight in weights if weight.requires_grad]
    x, y = probe.samples
    if not weights:
        raise fl.NoValue("no weights that train")
    if len(y) < options.parts:
        raise fl.NoValue("fewer samples than parts")
    gradients = []
    for part_x, part_y in zip(
        x.chunk(options.parts), y.chunk(options.parts), strict=True
    ):
        loss = probe.loss(model(part_x), part_y)
        grads = torch.autograd.grad(loss, weights)
        gradients.append(torch.cat([grad.flatten().double() for grad in grads]))
    stacked = torch.stack(gradients)
    mean = stacked.mean(dim=0)
    noise = ((stacked - mean) ** 2).sum() / (len(stacked) - 1)
    if not noise:
        raise fl.NoValue("all parts have the same gradient")
    return float(mean.square().sum() / noise)
