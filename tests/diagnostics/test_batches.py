"""Batches of a pair or a loader, and what cannot be read."""

import pytest
import torch
from torch import nn

from diagnostics.measurement import ClientModel, Measurement, batches
from diagnostics.metrics.base import LayerProbe
from tests.conftest import refuses
from tests.made import normal

X = normal(6, 2, 5, seed=1)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("batch", [1, 4, 6, 100, None])
def test_batches_of_a_pair_cover_it_in_order(batch):
    parts = list(batches((X, Y), batch))
    assert torch.equal(torch.cat([x for x, _ in parts]), X)
    assert torch.equal(torch.cat([y for _, y in parts]), Y)
    assert max(len(y) for _, y in parts) == min(batch or 6, 6)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:3]), "6 .*3"),
        ([(X, Y), (X * float("nan"), Y)], "batch 1 .*NaN"),
    ],
)
def test_batches_refuses(data, message):
    with refuses(message):
        list(batches(data, 4))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_formula_of_a_layer_reads_batches_of_its_models_type(kind):
    model = nn.Linear(5, 3).to(kind)
    measurement = Measurement([], (), batch=4)
    probe = LayerProbe(ClientModel("a", model, (X[:, 0], Y), 6), measurement)
    assert [(x.dtype, len(y)) for x, y in probe.batches] == [(kind, 4), (kind, 2)]
