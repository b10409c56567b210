"""Draws depend on what they are for, and on nothing else."""

import numpy as np
import pytest
import torch

from fl_core.seeds import numpy_generator, seed_of, torch_generator, torch_seeded


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


def test_generators_repeat_and_leave_the_global_state_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for make, draw in (
        (torch_generator, lambda g: torch.randn(4, generator=g).tolist()),
        (numpy_generator, lambda g: g.random(4).tolist()),
    ):
        assert draw(make(3, "batches", 1)) == draw(make(3, "batches", 1))
        assert draw(make(3, "batches", 1)) != draw(make(4, "batches", 1))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


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
