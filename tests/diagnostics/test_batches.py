"""Batches of a pair or a loader, and what cannot be read."""

import pytest
import torch

from diagnostics.measurement import batches
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
