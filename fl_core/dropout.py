"""Client dropout in a simulation: the sampled clients whose replies are lost by chance.

A lost reply belongs to a client that was sampled, received the server's message and trained. Its reply does not arrive
because the client was off, disconnected or too late. The server continues with the other replies. Without any reply it
keeps its state.

The client returns to its whole state before the round. Server and client store halves of the same thing, such as
SCAFFOLD's variates or FedLAMA's pending layers. These may only change together.

Recorded are the row :data:`REPLY_LOST`, the server's message, and the wasted steps and FLOPs. Nothing is recorded that
only the reply contains.
"""

from __future__ import annotations

from collections.abc import Collection

from fl_core import seeds

REPLY_LOST = "reply_lost"
"""The metric of a row about a missing client: 1 if it was sampled and its reply did not arrive in that round."""
CHANCE, TIMEOUT = "chance", "timeout"
"""The causes in such a row: lost in a simulation, or not in time from a real client."""


def draw_lost(
    seed: int, index: int, sampled: Collection[int], rate: float
) -> list[int]:
    """Return the sampled clients whose replies are lost in a round.

    The result for a client depends on the seed, the round and its position alone. A higher rate loses the replies of a
    lower one and more.

    >>> draw_lost(seed=0, index=0, sampled=(0, 3), rate=0.0)
    []

    Args:
        seed: the run's. index: of the round, from 0 on.
        rate: the probability that a reply is lost, from 0 to below 1, independent for each client and round.
    """
    if not rate:
        return []
    return [
        client
        for client in sampled
        if seeds.numpy_generator(seed, "dropout", index, client).random() < rate
    ]
