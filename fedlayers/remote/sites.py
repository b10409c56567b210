"""The server's side: clients that live at sites, of whom messages, numbers and names come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fedlayers.remote import protocol
from fedlayers.remote.codec import Packet, decode, encode, most_bytes
from fedlayers.remote.link import SiteLink
from fl_core.algorithms.base import Algorithm, State
from fl_core.algorithms.offers import Outline
from fl_core.errors import NonFiniteError, RunError, UsageError
from fl_core.execution.home import Reply, Request, Train
from fl_core.records.store import Checkpoint
from fl_core.records.writing import Writer
from fl_core.tree import Tree

BEGINNING = ""  # the version of a state before the client's first round
EXTRA_TREES = 16
"""Trees of the model's size that a reply may have besides one for each client."""


class RefusedError(UsageError):
    """A site refuses what it was asked; the message names the site and its reason."""


@dataclass
class Tally:
    """Bytes that left each site, by site and kind of reply, and how many replies.

    >>> tally = Tally()
    >>> tally.add("north", "train", 7960)
    >>> tally.bytes, tally.replies
    ({('north', 'train'): 7960}, {('north', 'train'): 1})
    """

    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    replies: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, site: str, kind: str, n_bytes: int) -> None:
        """Count one reply."""
        self.bytes[site, kind] = self.bytes.get((site, kind), 0) + n_bytes
        self.replies[site, kind] = self.replies.get((site, kind), 0) + 1


class Line:
    """Asks sites, and takes their replies apart; all that crosses passes here.

    Attributes:
        session: of this process: what was asked in an earlier one is never taken for something new.
        tally: what left the sites.
    """

    def __init__(self, link: SiteLink) -> None:
        self.link, self.tally, self.session = link, Tally(), uuid4().hex
        self._seq = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.link.sites)

    def next(self) -> int:
        """The number of the next request, which grows."""
        self._seq += 1
        return self._seq

    def ask(
        self, packets: Mapping[str, Packet], most: int | None = None, timeout: float | None = None
    ) -> Iterator[tuple[str, Packet | None]]:
        """Yield (site, reply) as replies come; None: it did not answer in time.

        Raises:
            RefusedError: a site refuses. NonFiniteError, RunError: its work failed there.
            PacketError: what a site sent is no reply.
        """
        kinds = {site: packet.head["kind"] for site, packet in packets.items()}
        asked = {site: encode(packet) for site, packet in packets.items()}
        waiting = set(asked)
        for site, data in self.link.ask(asked, timeout):
            if site not in waiting:  # nobody asked, or it has answered
                continue
            waiting.discard(site)
            if data is None:
                yield site, None
                continue
            self.tally.add(site, kinds[site], len(data))
            try:
                packet = decode(data, most)
            except RunError as error:
                raise type(error)(f"the reply of site {site!r}: {error}") from error
            check_granted(site, packet)
            yield site, packet
        if waiting:
            raise RunError(f"the link ended without a reply of {', '.join(sorted(waiting))}")


def check_granted(site: str, packet: Packet) -> None:
    """Raise what a site says went wrong.

    Raises:
        RefusedError, NonFiniteError, RunError: as the site says.
    """
    kind, reason = packet.head["kind"], str(packet.head.get("reason", ""))[:2000]
    if kind == "refused":
        raise RefusedError(f"site {site!r} refuses: {reason}")
    if kind == "failed":
        raise (NonFiniteError if packet.head.get("nonfinite") is True else RunError)(f"site {site!r}: {reason}")


class AtSites:
    """A home at the sites of a link: what is here of a client is the version of its state, and names.

    Args:
        names: of the clients, in order; each is a site's. initial: the model before the first round.
        run: what the sites know the run by. lane: which of its exchanges; those of a measurement ahead have their own.
    """

    moved = 0.0

    def __init__(self, line: Line, names: Sequence[str], initial: Tree, run: str, lane: str = "main") -> None:
        self.line, self.names, self.initial, self.run_id, self.lane = line, list(names), initial, run, lane
        self.versions = dict.fromkeys(self.names, BEGINNING)
        self.saved = dict(self.versions)
        self._outlines: dict[int, Outline] = {}
        self._begun: dict[int, dict[str, Any]] = {}
        self._beside = 0

    def begin(self, algorithm: Algorithm) -> None:
        self.use(algorithm)
        self.versions = dict.fromkeys(self.names, BEGINNING)
        self._outlines.clear()

    def use(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self._begun.clear()
        for client, name in enumerate(self.names):
            if self.versions[name] == BEGINNING:
                self._outlines.pop(client, None)

    def outline(self, client: int) -> State:
        if client not in self._begun:
            self._begun[client] = self.algorithm.client_state(self.initial, client).meta
        return self._outline(client).state(self._begun[client])

    def _outline(self, client: int) -> Outline:
        if client not in self._outlines:
            begun = self.algorithm.client_state(self.initial, client)
            self._outlines[client] = Outline.of(begun, begun.meta)
        return self._outlines[client]

    def run(self, requests: Iterable[Request]) -> Iterator[Reply]:
        asked: dict[str, Request] = {}
        packets: dict[str, Packet] = {}
        for request in requests:  # each client is asked once
            name = self.names[request.client]
            where = protocol.place(self.algorithm, **self._where(name, request))
            asked[name], packets[name] = request, protocol.request_packet(request, where)
        replies: dict[str, Packet | None] = {}
        coming = self.line.ask(packets, most_bytes(self.initial, len(self.names) + EXTRA_TREES))
        packets = {name: Packet(packet.head) for name, packet in packets.items()}
        for name, request in asked.items():
            while name not in replies:
                site, packet = next(coming)
                replies[site] = packet
            packet = replies.pop(name)
            assert packet is not None
            yield self._taken(name, request, packet)

    def _where(self, name: str, request: Request) -> dict[str, Any]:
        where = {
            "run": self.run_id,
            "session": self.line.session,
            "seq": self.line.next(),
            "lane": self.lane,
            "from": self.versions[name],
        }
        if isinstance(request, Train):
            where |= {"to": f"{request.rnd.index + 1:06d}-{request.rnd.exchange}", "saved": self.saved[name]}
        return where

    def _taken(self, name: str, request: Request, packet: Packet) -> Reply:
        reply, outline = protocol.reply_of(packet, request, self.initial, name)
        if isinstance(request, Train) and not request.lost:
            self.versions[name] = f"{request.rnd.index + 1:06d}-{request.rnd.exchange}"
            self._outlines[request.client] = outline
        return reply

    def forget(self) -> None:
        """Nothing is kept here."""

    def save(self, writer: Writer, done: int, server: State) -> None:
        states = {}
        for client, name in enumerate(self.names):
            outline = self._outline(client)
            trees = {tree: list(names) for tree, names in outline.trees.items()}
            known = {"version": self.versions[name], "trees": trees, "changed": sorted(outline.changed)}
            states[name] = State({}, known)
        writer.checkpoint(Checkpoint(done, server, states, {}))
        self.saved = dict(self.versions)

    def restore(self, checkpoint: Checkpoint) -> None:
        for client, name in enumerate(self.names):
            known = checkpoint.clients[name].meta
            self.versions[name] = known["version"]
            trees = {tree: tuple(names) for tree, names in known["trees"].items()}
            self._outlines[client] = Outline(trees, frozenset(known["changed"]))
        self.saved = dict(self.versions)

    def beside(self) -> AtSites:
        self._beside += 1
        return AtSites(self.line, self.names, self.initial, self.run_id, f"beside-{self._beside}")


__all__ = ["AtSites", "Line", "RefusedError", "Tally"]
