"""Noise for privacy: a discrete Gaussian, exact in integers, from the operating system's random bits."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from fl_core.data.arrays import Integers

SPREAD_BITS = 15
SPREAD = 2**SPREAD_BITS
"""The parameter sigma of the draws. Their standard deviation differs from it by less than 1e-100."""
Words = NDArray[np.uint32]
Truths = NDArray[np.bool_]
_WORD = 2**32
_CHUNK = 2**20


def discrete_gaussian(count: int) -> Integers:
    """Draw integers n with probability proportional to exp(-n^2 / (2 SPREAD^2)).

    The method is Algorithm 3 of Canonne, Kamath and Steinke ("The Discrete Gaussian for Differential Privacy", 2020)
    with their Algorithms 1 and 2. It compares and adds integers only. Rounding therefore changes no probability, and no
    result is possible for one data set alone. See Mironov, "On Significance of the Least Significant Bits for
    Differential Privacy", 2012. All random bits come from :func:`os.urandom`, so no seed repeats a draw. The duration
    of a call varies with what is drawn.

    >>> draws = discrete_gaussian(1000)
    >>> draws.dtype, bool(abs(draws.std() / SPREAD - 1) < 0.2)
    (dtype('int64'), True)

    Args:
        count: The number of independent draws.

    Returns:
        The draws, int64 [count].
    """
    parts: list[Integers] = [np.empty(0, np.int64)]
    missing = count
    while missing > 0:
        parts.append(_draw_accepted(min(2 * missing + 16, _CHUNK)))
        missing -= len(parts[-1])
    return np.concatenate(parts)[:count]


def _draw_accepted(count: int) -> Integers:
    """Draw candidates from a discrete Laplace distribution of scale SPREAD, and return the accepted ones."""
    low = _words(count).astype(np.int64) >> (32 - SPREAD_BITS)
    low = low[_decays((low << (32 - SPREAD_BITS)).astype(np.uint32))]
    size = low + SPREAD * _runs(len(low))
    sign = 1 - 2 * (_words(len(low)) & 1).astype(np.int64)
    squares = np.square(size - SPREAD)  # over 2 SPREAD^2 they are the exponent
    bits = 2 * SPREAD_BITS + 1
    whole, rest = squares >> bits, squares & (2**bits - 1)
    keep = _decays((rest << (32 - bits)).astype(np.uint32)) & ((size > 0) | (sign > 0))  # there is one zero only
    far = np.flatnonzero(whole)
    keep[far] &= _runs(len(far)) >= whole[far]
    return (sign * size)[keep]


def _words(count: int) -> Words:
    """Draw uniform 32-bit words."""
    return np.frombuffer(os.urandom(4 * count), np.uint32)


def _decays(exponents: Words) -> Truths:
    """Draw True with probability exp(-x / 2^32) for each 32-bit x (Algorithm 1)."""
    result = np.ones(len(exponents), dtype=bool)
    alive, k = np.arange(len(exponents)), 1
    while len(alive):
        alive = alive[_words(len(alive)) < exponents[alive]]
        alive = alive[_one_in(k, len(alive))]
        k += 1
        result[alive] = k % 2 == 1
    return result


def _one_in(k: int, count: int) -> Truths:
    """Draw True with probability 1 / k."""
    words = _words(count).copy()
    while len(over := np.flatnonzero(words >= _WORD - _WORD % k)):
        words[over] = _words(len(over))
    return words % k == 0


def _runs(count: int) -> Integers:
    """Draw how often in a row an event of probability exp(-1) happens, int64 (the loop of Algorithm 2)."""
    halves, alive = np.zeros(count, np.int64), np.arange(count)
    while len(alive):
        alive = alive[_decays(np.full(len(alive), _WORD // 2, np.uint32))]
        halves[alive] += 1
    return halves // 2  # an event of probability exp(-1) is two of exp(-1/2)
