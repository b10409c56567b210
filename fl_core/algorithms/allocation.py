"""Depths of the clients' models, and the blocks of the server's model that each client gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from fl_core import seeds
from fl_core.errors import UsageError

TWELFTHS = (12, 10, 8, 6, 4, 3)
"""Depths of FedRA's six kinds of clients, in twelfths of the whole model."""


def fixed_depths(given: Sequence[int], clients: int, blocks: int) -> tuple[int, ...]:
    """Return the number of blocks that each client can hold.

    The clients are split in their order into one group for each depth, as evenly as possible. All clients of a group
    have the same depth. Without given depths the paper's are used, in proportion to the model's and rounded up.

    Raises:
        UsageError: a depth outside 1..blocks, or more depths than clients.
    """
    depths = tuple(given) or tuple(math.ceil(part * blocks / 12) for part in TWELFTHS)
    for depth in given:
        if not 1 <= depth <= blocks:
            raise UsageError(
                f"depths must be from 1 to {blocks}, the number of the model's blocks; got {depth}."
            )
    if len(given) > clients:
        raise UsageError(
            f"depths must have at most one value for each of the {clients} clients; got {len(given)} values."
        )
    return tuple(depths[client * len(depths) // clients] for client in range(clients))


def random_depth(blocks: int, seed: int, index: int, client: int) -> int:
    """Draw a client's depth in a round, uniform over 1..blocks (FedRA, Table 4)."""
    return int(
        seeds.numpy_generator(seed, "depth", index, client).integers(1, blocks + 1)
    )


def draw_depths(
    depth: int, blocks: int, seed: int, index: int, client: int
) -> tuple[int, ...]:
    """Draw the positions of a client's blocks in a round: uniform without replacement, ascending."""
    chosen = seeds.numpy_generator(seed, "allocation", index, client).choice(
        blocks, depth, replace=False
    )
    return tuple(sorted(int(k) for k in chosen))


@lru_cache(maxsize=8)
def draw_cover(
    depths: tuple[tuple[int, int], ...], blocks: int, seed: int, index: int
) -> dict[int, tuple[int, ...]]:
    """Draw the clients' blocks of a round so that together they hold every block (FedRA, Eq. 3).

    Clients take their turns in random order. Each first draws from the blocks without a client. If it can hold more, it
    draws the rest from the other blocks. If the clients together cannot hold every block, no block is drawn twice.

    Args:
        depths: (client, depth) pairs.

    Returns:
        Ascending positions of the blocks by client.
    """
    draws = seeds.numpy_generator(seed, "covering allocation", index)
    missing = set(range(blocks))
    positions = {}
    for place in draws.permutation(len(depths)):
        client, depth = depths[place]
        new = draws.permutation(sorted(missing))[:depth]
        more = draws.permutation(sorted(set(range(blocks)).difference(new)))[
            : depth - len(new)
        ]
        positions[client] = tuple(sorted(int(k) for k in (*new, *more)))
        missing.difference_update(positions[client])
    return positions
