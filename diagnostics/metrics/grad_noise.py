"""Gradient noise: how much a layer's gradient varies from one sample to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fl_core.bounds import OneOf
from fl_core.layers import Layer
from fl_core.rows import Row, row

from ..client_model import Tensors, tensors_of
from ..gradients.noise import ESTIMATORS, NoiseMeter
from ..gradients.passes import Reading, one_pass, why_unreadable
from .base import Measurement, metric


@dataclass(frozen=True)
class GradNoise:
    """The trace tr S of the covariance of the per-sample gradients g_n of a layer. At least 0.

    S = (1 / (N - 1)) sum_n (g_n - g)(g_n - g)^T with g their mean. So tr S = (sum_n ||g_n||^2 - N ||g||^2) / (N - 1).
    The expected squared error of the gradient of b samples is tr S / b (McCandlish et al. 2018, Eq. 2.5). Row variants
    are ``trace``, and ``per_parameter`` = trace / n_params. Sums are float64. Single norms have the model's type.

    Estimators work tensor by tensor. All are exact for the samples given:

    * ``"ghost"``: norms from the layers' inputs and output gradients of the common pass, without the gradients
      themselves (Goodfellow 2015). It needs a module that has a formula, is called once, and does not mix samples. A
      few samples' own gradients check this.
    * ``"vmap"``: the gradients of 32 samples at a time.
    * ``"single"``: one backward pass a sample, for any model.
    * ``"auto"``: ghost if it holds, else single on a CPU (measured faster there), vmap elsewhere.

    Raises:
        UsageError: the estimator or the choice of tensors is unknown.
    """

    tensors: Tensors = "weights"
    estimator: Annotated[str, OneOf("estimator", ESTIMATORS)] = "auto"

    def reader(self) -> GradNoise:
        """Return the reader of the shared pass: these options themselves."""
        return self

    def meter(self, layers: Sequence[Layer]) -> NoiseMeter:
        names = {
            name
            for layer in layers
            if layer.used
            for name in tensors_of(layer, self.tensors)
        }
        return NoiseMeter(names, self.estimator)

    def rows(self, layers: Sequence[Layer], readings: Sequence[Reading]) -> list[Row]:
        return [
            made
            for reading in readings
            for layer in layers
            for made in self._rows(layer, reading)
        ]

    def _rows(self, layer: Layer, reading: Reading) -> list[Row]:
        meter, n = reading.meter, reading.n_samples
        names = [
            name for name in tensors_of(layer, self.tensors) if name in meter.reached
        ]
        status = why_unreadable(layer, self.tensors, reached=bool(names))
        status = status or ("a covariance needs at least two samples" if n < 2 else "")
        status = (
            status
            or reading.fault
            or next((meter.faults[name] for name in names if name in meter.faults), "")
        )
        value, size = math.nan, sum(meter.reached[name] for name in names)
        if not status:
            squares = math.fsum(float(meter.squares[name]) for name in names)
            mean = math.fsum(
                float((meter.sums[name] / n).square().sum()) for name in names
            )
            value = (
                max(0.0, squares - n * mean) / (n - 1)
                if math.isfinite(squares + mean)
                else math.nan
            )
        if not status and not math.isfinite(value):
            status = f"the gradient of layer {layer.name!r} is not finite"
        ways = [] if status else sorted({meter.ways[name] for name in names})
        return [
            row(
                "grad_noise",
                None if status else value / share,
                status=status or "ok",
                client=reading.subject.client,
                layer=layer.name,
                variant=variant,
                stderr=None if status else 0.0,
                estimator=" + ".join(ways or [self.estimator])
                + (", all tensors" if self.tensors == "all" else ""),
                unit="(loss/weight)^2",
                n_params=size,
                n_samples=n,
                n_train=reading.subject.n_train,
            )
            for variant, share in (("trace", 1), ("per_parameter", size or 1))
        ]


@metric(
    description="trace of the covariance of a layer's per-sample gradients",
    direction="higher = the samples disagree more on the layer's weights",
    how="exact, in the common pass and without forming the gradients where the layer has a formula",
    unit="(loss/weight)^2",
    variants=("trace", "per_parameter"),
    separable=True,
    look={
        "label": "per-sample gradient noise",
        "meaning": "higher = samples disagree more",
        "log": True,
    },
    uses_gradient_pass=True,
)
def grad_noise(measurement: Measurement, options: GradNoise) -> list[Row]:
    """Return two rows a client and layer: the noise of the layer's per-sample gradients (see :class:`GradNoise`).

    Memory: one batch's activations and layer inputs. Until all clients are read, each also keeps the gradient in
    float64. The patches of a convolution are formed for :data:`~diagnostics.gradients.noise.CACHED` elements at a time
    on a CPU, and for a batch elsewhere. The gradients of single samples are formed for
    :data:`~diagnostics.gradients.noise.CHUNK` samples at a time, or one.

    Raises:
        UsageError: as in :func:`diagnostics.gradients.passes.one_pass`.
    """
    return one_pass(measurement, [options])
