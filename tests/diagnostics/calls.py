"""Metrics as functions of clients and layers: ``from tests.diagnostics.calls import cka``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diagnostics.gradients import passes
from diagnostics.measurement import ClientModel, Measurement
from diagnostics.metrics.base import METRICS
from fl_core.layers import Layer
from fl_core.rows import Row

SHARED = ("loss", "batch", "seed", "mode", "tick")


def call(
    name: str, subjects: Sequence[ClientModel], layers: Sequence[Layer], **how: Any
) -> list[Row]:
    """The rows of a metric by name; what all metrics share and the metric's own options are told apart here."""
    shared = {key: how.pop(key) for key in SHARED if key in how}
    return METRICS[name](Measurement(subjects, layers, **shared), **how)


def one_pass(
    subjects: Sequence[ClientModel],
    layers: Sequence[Layer],
    readers: Sequence[Any],
    resamples: int = 0,
    **shared: Any,
) -> list[Row]:
    """The rows of several readers of gradients from one pass."""
    return passes.one_pass(Measurement(subjects, layers, **shared), readers, resamples)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def metric(
        subjects: Sequence[ClientModel], layers: Sequence[Layer], **how: Any
    ) -> list[Row]:
        return call(name, subjects, layers, **how)

    return metric
