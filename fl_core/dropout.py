"""Client dropout in a simulation: the sampled clients whose replies are lost, by chance or by a trace.

A lost reply belongs to a client that was sampled, received the server's message and trained. Its reply does not arrive
because the client was off, disconnected or too late. The server continues with the other replies. Without any reply it
keeps its state.

The client returns to its whole state before the round. Server and client store halves of the same thing, such as
SCAFFOLD's variates or FedLAMA's pending layers. These may only change together. Over a network a client keeps its
former state until the server's next message names the reply that it has.

Recorded are the row :data:`REPLY_LOST`, the server's message, and the wasted steps and FLOPs. Nothing is recorded that
only the reply contains.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_core import seeds
from fl_core.errors import UsageError, check_known

REPLY_LOST = "reply_lost"
"""The metric of a row about a missing client: 1 if it was sampled and its reply did not arrive in that round."""
TIMEOUT = "timeout"
"""The cause in such a row if a real client did not reply in time. A simulation has ``chance`` or ``trace``."""
TRACE_COLUMNS = ("round", "client")


@dataclass(frozen=True)
class Dropout:
    """The replies that are lost in each round.

    >>> dropout = Dropout(trace=frozenset({(2, 0)}))
    >>> dropout.draw_lost(seed=0, index=1, sampled=(0, 3))
    {0: 'trace'}
    >>> dropout.draw_lost(seed=0, index=0, sampled=(0, 3))
    {}

    Attributes:
        rate: the probability that a reply is lost, from 0 to below 1, independent for each client and round.
        trace: (round, client) of more lost replies. Rounds count from 1, clients are positions.
    """

    rate: float = 0.0
    trace: frozenset[tuple[int, int]] = frozenset()

    def draw_lost(self, seed: int, index: int, sampled: Collection[int]) -> dict[int, str]:
        """Return the sampled clients whose replies are lost in a round, each with the cause: ``trace`` or ``chance``.

        The result for a client depends on the seed, the round and its position alone. A higher rate loses the replies
        of a lower one and more.

        Args:
            seed: the run's. index: of the round, from 0 on.
        """
        causes = {client: "trace" for client in sampled if (index + 1, client) in self.trace}
        if self.rate:
            drawn = {client: seeds.numpy_generator(seed, "dropout", index, client).random() for client in sampled}
            causes = {client: "chance" for client in sampled if drawn[client] < self.rate} | causes
        return {client: causes[client] for client in sampled if client in causes}


def read_trace(path: Path | str, clients: Sequence[str]) -> list[tuple[int, str]]:
    """Return the lost replies in a .csv file, as (round, client) in ascending order. Rounds count from 1.

    The file has a header with the columns ``round`` and ``client``. Other columns are not read.

    Args:
        clients: names of the federation's clients.

    Raises:
        UsageError: the file or a column is missing, a round is not a whole number from 1 on, or a client is unknown.
    """
    if not Path(path).is_file():
        raise UsageError(f"dropout_trace must be a .csv file; got {path}, which does not exist. Correct its path.")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            missing = [name for name in TRACE_COLUMNS if name not in (table.fieldnames or ())]
            if missing:
                raise UsageError(f"{path} must have a column {missing[0]!r} in its header; got none.")
            return sorted({_lost_reply(record, f"{path}, line {table.line_num}", clients) for record in table})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} must be a readable trace of lost replies: {error}. Correct the file.") from error


def _lost_reply(record: dict[str, str], place: str, clients: Sequence[str]) -> tuple[int, str]:
    text = (record["round"] or "").strip()
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise UsageError(f"{place}: the round must be a whole number from 1; got {text!r}.")
    return int(text), check_known(f"client ({place})", (record["client"] or "").strip(), clients)
