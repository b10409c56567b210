"""Draws depend on what they are for, and on nothing else."""

import pytest
import torch

from fl_core.seeds import torch_seeded


@pytest.mark.parametrize("fails", [False, True])
def test_seeded_block_draws_its_own_and_restores(fails):
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    drawn = []
    for _ in range(2):
        try:
            with torch_seeded(5):
                drawn.append(torch.rand(3))
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
    assert torch.equal(*drawn)
    assert torch.equal(torch.rand(2), expected)
