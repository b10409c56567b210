"""Gradient similarity: how alike the directions of the clients' gradients are, layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fl_core.layers import Layer
from fl_core.rows import Row, row

from ..client_model import Tensors
from ..gradients.passes import EpochMeter, Meter, Reading, one_pass, why_unreadable
from ..gradients.vectors import cosine, entries
from .base import Measurement, metric


@dataclass(frozen=True)
class GradSimilarity:
    """The cosine <g_a, g_b> / (||g_a|| ||g_b||) of the gradients of each pair of clients, in [-1, 1].

    Here g is the gradient of the client's mean loss over its data. The clients pull the layer the same way at 1, at
    right angles at 0, and against each other at -1. Every client's gradient is held until all exist: 8 bytes a weight
    and client.

    Raises:
        UsageError: the choice of tensors is unknown.
    """

    tensors: Tensors = "weights"

    def reader(self) -> GradSimilarity:
        """Return the reader of the shared pass: these options themselves."""
        return self

    def meter(self, layers: Sequence[Layer]) -> Meter:
        return EpochMeter()

    def rows(self, layers: Sequence[Layer], readings: Sequence[Reading]) -> list[Row]:
        common = {
            "variant": "cosine",
            "estimator": "full_gradient" + (", all tensors" * (self.tensors == "all")),
        }
        if len(readings) < 2:
            status = "needs at least two clients"
            return [
                row("grad_similarity", None, status=status, layer=layer.name, **common)
                for layer in layers
            ]
        return [
            self._row(layer, a, b, **common)
            for layer in layers
            for a, b in itertools.combinations(readings, 2)
        ]

    def _row(self, layer: Layer, a: Reading, b: Reading, **columns: str) -> Row:
        both = [reading.meter.gradients(layer, self.tensors) for reading in (a, b)]
        status, value, n = "", torch.nan, sum(grad.numel() for grad in both[0])
        for reading, grads in zip((a, b), both, strict=True):
            status = status or why_unreadable(layer, self.tensors, reached=bool(grads))
            length = float(torch.linalg.vector_norm(entries(grads))) if grads else 0.0
            who = f"the gradient of layer {layer.name!r} at client {reading.subject.client!r}"
            if not status and not length > 0:
                status = (
                    reading.fault
                    or f"{who} is {'zero' if length == 0 else 'not finite'}"
                )
            elif not status and length == float("inf"):
                status = reading.fault or f"{who} is not finite"
        if not status and [grad.shape for grad in both[0]] != [
            grad.shape for grad in both[1]
        ]:
            status = f"the gradients of the two clients reach different tensors of layer {layer.name!r}"
        if not status:
            value = cosine(entries(both[0]), entries(both[1]))
        return row(
            "grad_similarity",
            None if status else value,
            status=status or "ok",
            client=a.subject.client,
            client_b=b.subject.client,
            layer=layer.name,
            stderr=None if status else 0.0,
            n_params=n,
            n_samples=a.n_samples + b.n_samples,
            **columns,
        )


@metric(
    description="cosine between the clients' gradients of a layer",
    direction="higher = more alike; 1 = same direction, -1 = opposite",
    how="cosine between all pairs of clients",
    variants=("cosine",),
    look={
        "label": "mean 1 − cosine of gradients to the others",
        "meaning": "0 = same direction",
    },
    pairs=True,
    uses_gradient_pass=True,
)
def grad_similarity(measurement: Measurement, options: GradSimilarity) -> list[Row]:
    """Return one row a pair of clients and layer: the cosine of their gradients (see :class:`GradSimilarity`).

    One model measured on several clients' data has pairs too. They show how the clients disagree at one point.

    Memory: one batch's activations, and the gradient of every client in float64 (8 bytes a weight and client). All
        metrics of the pass share it.

    Raises:
        UsageError: as in :func:`diagnostics.gradients.passes.one_pass`.
    """
    return one_pass(measurement, [options])
