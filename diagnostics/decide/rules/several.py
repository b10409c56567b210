"""Rules that read something else than one curve: several metrics' decisions, costs, or given names."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .base import rule


@rule(
    summary="each of several metrics decides by its own rule; share up to the lower median of their cuts",
    reads="curves",
)
def vote(cuts: Sequence[int]) -> int:
    """Return the median of several cuts.

    The median is their majority if there is one. Of two middle cuts the lower one counts.
    """
    return statistics.median_low(cuts)


def longest_prefix(costs: Sequence[float], budget: float) -> int:
    """Return the greatest number of first layers whose costs sum to no more than the budget.

    The result is 0 if the first layer costs too much.
    """
    total, count = 0.0, 0
    for count, cost in enumerate(costs, 1):
        total += cost
        if total > budget:
            return count - 1
    return count


@rule(summary="share as many first layers as a client's upload a round has bytes for", reads="bytes")
def budget_bytes(costs: Sequence[float], budget: float) -> int:
    """Return the number of first layers whose bytes fit the budget of a client's upload in a round."""
    return longest_prefix(costs, budget)


@rule(summary="share as many first layers as the FLOPs of a training sample allow", reads="flops")
def budget_flops(costs: Sequence[float], budget: float) -> int:
    """Return the number of first layers whose FLOPs fit the budget, forward and backward on one training sample."""
    return longest_prefix(costs, budget)


@rule(summary="share exactly the layers that are named", reads="names")
def manual(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the layers to share, as they are given."""
    return tuple(names)
