"""A metric from outside: how much of a layer's gradient is signal, and how much changes from batch to batch.

fedlayers diagnose --dataset heart --metrics examples.metrics.gradient_snr:gradient_snr
fedlayers plot diagnosis --out pictures
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


@fl.metric(
    description="squared length of a layer's mean gradient over the variance of the parts' gradients",
    direction="higher = the parts of the data agree more on where the layer should go",
    variants=("snr",),
    look={
        "label": "gradient signal-to-noise",
        "meaning": "higher = batches agree more",
        "log": True,
    },
)
def gradient_snr(measurement: fl.Measurement, options: Parts) -> list[fl.Row]:
    """SNR_l = ||m||^2 / (1/(K-1) sum_k ||g_k - m||^2) with m the mean of the K parts' gradients g_k of layer l.

    At least 0, a pure number; one row a client and layer. A layer without trained weights has a row with a status and
    no value. So has a client with fewer samples than parts.
    """
    rows = []
    for subject in measurement.subjects:
        batches = list(fl.batches(subject.data, measurement.batch))
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        for layer in measurement.layers:
            weights = [subject.model.get_parameter(name) for name in layer.weights]
            weights = [weight for weight in weights if weight.requires_grad]
            where = {
                "client": subject.client,
                "n_train": subject.n_train,
                "layer": layer.name,
                "variant": "snr",
            }
            if not weights or not layer.used or len(y) < options.parts:
                why = (
                    "fewer samples than parts"
                    if weights and layer.used
                    else "no weights that train"
                )
                rows.append(
                    fl.row("gradient_snr", None, status=why, n_samples=len(y), **where)
                )
                continue
            gradients = []
            with fl.set_mode(subject.model, measurement.mode):
                for part_x, part_y in zip(
                    x.chunk(options.parts), y.chunk(options.parts), strict=True
                ):
                    loss = measurement.loss(subject.model(part_x), part_y)
                    grads = torch.autograd.grad(loss, weights)
                    gradients.append(
                        torch.cat([grad.flatten().double() for grad in grads])
                    )
            stacked = torch.stack(gradients)
            mean = stacked.mean(dim=0)
            noise = ((stacked - mean) ** 2).sum() / (len(stacked) - 1)
            snr = float(mean.square().sum() / noise) if noise > 0 else None
            status = "ok" if snr is not None else "all parts have the same gradient"
            rows.append(
                fl.row("gradient_snr", snr, status=status, n_samples=len(y), **where)
            )
        measurement.tick(subject.client)
    return rows
