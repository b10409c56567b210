"""Diagnostics on a model of texts: token ids in, against dense references in float64."""

import torch

from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from fl_core import models
from fl_core.tokens import PAD, TokenShape

SHAPE = TokenShape((7,), 12)
LAYERS = {"embedding", "attention", "fc1", "fc2"}


def model(seed=0):
    return models.build(
        "text_transformer", SHAPE, 3, seed=seed, options={"width": 4, "hidden": 6}
    ).double()


def samples(n=10):
    ids = models.example(SHAPE, n)
    for row in range(n):
        ids[row, 3 + row % 5 :] = PAD
    return ids, torch.arange(n) % 3


def test_every_metric_has_a_value_for_every_layer():
    ids, y = samples(40)
    without = {"bn_scale", "update_magnitude", "cca", "output_disagreement"}
    frame = diagnose(
        {"a": model(), "b": model(1)},
        {"a": (ids, y), "b": (ids[:30], y[:30])},
        sorted(set(METRICS) - without),
        progress=False,
    ).frame
    assert frame.groupby("metric")["layer"].agg(set).map(LAYERS.__eq__).all()
    assert set(frame.status) == {"ok"}
    assert frame.value.notna().all()
    exact = frame[(frame.metric == "hessian_trace") & (frame.estimator == "exact")]
    assert set(exact.layer) == {"fc1", "fc2"}  # before them lies a softmax
