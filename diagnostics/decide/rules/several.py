"""Rules that read something else than one curve: several metrics' decisions, costs, or the names that are given."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .base import rule


@rule(
    summary="each of several metrics decides by its own rule; share up to the lower median of their cuts",
    reads="curves",
)
def vote(cuts: Sequence[int]) -> int:
    """The median of several cuts, which is their majority where there is one; of two middle ones the lower."""
    return statistics.median_low(cuts)


def longest_prefix(costs: Sequence[float], budget: float) -> int:
    """The greatest number of first layers whose costs sum to no more than the budget; 0 if the first is too much."""
    total, count = 0.0, 0
    for count, cost in enumerate(costs, 1):
        total += cost
        if total > budget:
            return count - 1
    return count


@rule(summary="share as many first layers as a client's upload a round has bytes for", reads="bytes")
def budget_bytes(costs: Sequence[float], budget: float) -> int:
    """The number of first layers whose bytes, as a client uploads them in a round, fit the budget."""
    return longest_prefix(costs, budget)


@rule(summary="share as many first layers as the FLOPs of a training sample allow", reads="flops")
def budget_flops(costs: Sequence[float], budget: float) -> int:
    """The number of first layers whose FLOPs, forward and backward on one training sample, fit the budget."""
    return longest_prefix(costs, budget)


@rule(summary="share exactly the layers that are named", reads="names")
def manual(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the layers to share, as they are given."""
    return tuple(names)
