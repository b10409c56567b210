"""Metrics as functions of clients and layers: ``from tests.diagnostics.calls import cka``."""

from diagnostics import gradients
from diagnostics.measurement import Measurement
from diagnostics.metrics.base import METRICS

SHARED = ("loss", "batch", "seed", "mode", "tick")


def call(name, subjects, layers, **how):
    """The rows of a metric by name; what all metrics share and the metric's own options are told apart here."""
    shared = {key: how.pop(key) for key in SHARED if key in how}
    return METRICS[name](Measurement(subjects, layers, **shared), **how)


def one_pass(subjects, layers, readers, **shared):
    """The rows of several readers of gradients from one pass."""
    return gradients.one_pass(Measurement(subjects, layers, **shared), readers)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def metric(subjects, layers, **how):
        return call(name, subjects, layers, **how)

    return metric
