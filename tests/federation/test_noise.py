"""The discrete Gaussian that hides what leaves a site."""

from __future__ import annotations

import math
import random
from time import process_time

import numpy as np
import pytest
from scipy import stats

from fedlayers.remote import noise
from fedlayers.remote.noise import SPREAD, discrete_gaussian


def test_a_million_draws_are_normal_and_quick() -> None:
    start = process_time()
    draws = discrete_gaussian(1_000_000)
    seconds = process_time() - start
    assert stats.kstest(draws / SPREAD, "norm").pvalue > 1e-6
    assert stats.chisquare(np.bincount(draws % 64, minlength=64)).pvalue > 1e-6  # the low bits are uniform
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.006
    far = int((np.abs(draws) > 4 * SPREAD).sum())
    assert stats.binomtest(far, len(draws), 2 * stats.norm.sf(4)).pvalue > 1e-6
    assert seconds < 5


@pytest.mark.parametrize("bits", [0, 1, 2])
def test_a_small_spread_has_the_exact_probabilities(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "SPREAD_BITS", bits)
    monkeypatch.setattr(noise, "SPREAD", 2**bits)
    draws = discrete_gaussian(200_000)
    ends = 3 * 2**bits
    every = np.arange(-40 * ends, 40 * ends + 1)
    weights = np.exp(-(every**2) / (2 * 4.0**bits))
    inside = np.abs(every) <= ends
    shares = np.append(weights[inside], weights[~inside].sum()) / weights.sum()
    found = np.bincount(np.where(np.abs(draws) <= ends, draws + ends, 2 * ends + 1), minlength=2 * ends + 2)
    assert stats.chisquare(found, shares * len(draws)).pvalue > 1e-6


def test_probabilities_of_the_parts() -> None:
    count = 200_000
    for x in (0, 1 << 20, 1 << 31, (1 << 32) - 1):
        hits = int(noise._decays(np.full(count, x, np.uint32)).sum())
        assert stats.binomtest(hits, count, math.exp(-x / 2**32)).pvalue > 1e-6
    for k in (1, 2, 3, 7):
        assert stats.binomtest(int(noise._one_in(k, count).sum()), count, 1 / k).pvalue > 1e-6


def test_draws_follow_the_operating_systems_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.seed(0)
    first = discrete_gaussian(100)
    np.random.seed(0)
    assert not np.array_equal(first, discrete_gaussian(100))
    made = []
    for seed in (1, 1, 2):
        monkeypatch.setattr("os.urandom", random.Random(seed).randbytes)
        made.append(discrete_gaussian(100))
    assert np.array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])


def test_no_draws() -> None:
    assert discrete_gaussian(0).shape == (0,)
