"""Draws depend on what they are for, and on nothing else."""

import pytest
import torch

from fl_core.seeds import seed_of, torch_seeded


def test_seeds_of_earlier_runs_still_hold():
    """Written down: a change of the hash would silently change every run."""
    assert seed_of(0, "batches", 3, 1, "main") == 4773734824482452809
    assert seed_of(7, "model") == 1699993276643476965


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1, "1"), ("1", 1)),
        (("ab", "c"), ("a", "bc")),
        ((12,), (1, 2)),
        ((1,), ("1",)),
        ((), ("",)),
    ],
)
def test_parts_do_not_run_into_each_other(a, b):
    assert seed_of(0, "batches", *a) != seed_of(0, "batches", *b)


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
