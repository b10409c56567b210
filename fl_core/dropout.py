"""Client dropout in a simulation: which of the sampled clients' replies are lost, by chance or as a trace says.

A lost reply is one of a client that was sampled, received the server's message and trained, and whose answer does not
arrive: it was switched off, cut off, or too late. The server goes on with the other replies, and keeps its state where
there is none. The client goes back to its state before the round, all of it. Halves of one thing lie on either side
(SCAFFOLD's variates, FedLAMA's layers that wait at a client), and only together they may change. Over a network, a
client does the same by keeping its former state until the server's next message says which reply it has.

What is recorded of it: the row :data:`REPLY_LOST`, what the server sent, and the steps and FLOPs that were in vain;
nothing that only the reply could have told.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_core import seeds
from fl_core.errors import UsageError, check_known

REPLY_LOST = "reply_lost"
"""The metric of a row that says who was missing: 1 for a sampled client whose reply did not arrive in that round."""
TIMEOUT = "timeout"
"""The cause in such a row where a real client did not answer in time; a simulation has ``chance`` or ``trace``."""
TRACE_COLUMNS = ("round", "client")


@dataclass(frozen=True)
class Dropout:
    """Whose replies are lost in which round.

    >>> dropout = Dropout(trace=frozenset({(2, 0)}))
    >>> dropout.lost(seed=0, index=1, sampled=(0, 3))
    {0: 'trace'}
    >>> dropout.lost(seed=0, index=0, sampled=(0, 3))
    {}

    Attributes:
        rate: the probability with which a reply is lost, from 0 to below 1, of each client and round independently.
        trace: (round, client) of replies that are lost beside these; rounds count from 1, clients are positions.
    """

    rate: float = 0.0
    trace: frozenset[tuple[int, int]] = frozenset()

    def lost(self, seed: int, index: int, sampled: Collection[int]) -> dict[int, str]:
        """The sampled clients whose replies are lost in a round, each with the cause: ``trace`` or ``chance``.

        A client's fate in a round depends on the seed, the round and its position alone, and a higher rate loses what
        a lower one loses and more.

        Args:
            seed: the run's. index: of the round, from 0 on.
        """
        causes = {client: "trace" for client in sampled if (index + 1, client) in self.trace}
        if self.rate:
            drawn = {client: seeds.numpy_generator(seed, "dropout", index, client).random() for client in sampled}
            causes = {client: "chance" for client in sampled if drawn[client] < self.rate} | causes
        return {client: causes[client] for client in sampled if client in causes}


def read_trace(path: Path | str, clients: Sequence[str]) -> list[tuple[int, str]]:
    """The lost replies that a .csv file lists, as (round, client) in ascending order; rounds count from 1.

    The file has a header with the columns ``round`` and ``client``; further columns are not read.

    Args:
        clients: names of the federation's clients.

    Raises:
        UsageError: no such file, no such columns, a round that is no whole number from 1 on, or an unknown client.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            missing = [name for name in TRACE_COLUMNS if name not in (table.fieldnames or ())]
            if missing:
                raise UsageError(f"{path} is no trace of lost replies: its header has no column {missing[0]!r}")
            return sorted({_lost_reply(record, f"{path}, line {table.line_num}", clients) for record in table})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as a trace of lost replies: {error}") from error


def _lost_reply(record: dict[str, str], place: str, clients: Sequence[str]) -> tuple[int, str]:
    text = (record["round"] or "").strip()
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise UsageError(f"{place}: round {text!r} is no whole number from 1 on")
    return int(text), check_known(f"client ({place})", (record["client"] or "").strip(), clients)
