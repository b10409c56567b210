"""The server's side of clients that live at sites. They send back messages, numbers and names."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fedlayers.remote import log, metrics, protocol
from fedlayers.remote.codec import Packet, PacketError, check_whole, decode, encode, most_bytes
from fedlayers.remote.link import SiteLink
from fedlayers.remote.log import LOG
from fl_core.algorithms.base import Algorithm, State
from fl_core.algorithms.model_template import StateSchema
from fl_core.errors import CorruptError, NonFiniteError, RunError, UsageError, listing
from fl_core.execution.requests import ClientReply, ClientRequest, TrainRequest
from fl_core.limits import parsed_json
from fl_core.records.store import Checkpoint
from fl_core.records.writing import Writer
from fl_core.rows import dumps, row
from fl_core.storage.files import Folder
from fl_core.storage.schema import Each, validate
from fl_core.tree import Tree

if TYPE_CHECKING:
    import pandas as pd

AT_SITE = {"version": str, "trees": Each([str]), "changed": [str]}
"""The schema of a checkpoint's entry for a client whose state is at its site."""
GRANTED = ("hello", "told", "counted", "joined", "done", "measured", "summed")
BEGINNING = ""  # the version of a state before the client's first round
ASK_AGAIN = 10.0
"""Seconds until a site is asked again whose owner has to allow the request."""
LEFT = "left.jsonl"
"""The file of a federation's run directory with the bytes that left each site."""
EXTRA_TREES = 16
"""Maximum number of trees of the model's size in a reply, in addition to one per client."""


class RefusedError(UsageError):
    """A site's refusal of a request, with its name and reason."""


@dataclass
class TrafficCounter:
    """A count of the bytes and replies that left each site, by kind of reply.

    >>> tally = TrafficCounter()
    >>> tally.add("north", "train", 7960)
    >>> tally.bytes, tally.replies
    ({('north', 'train'): 7960}, {('north', 'train'): 1})
    >>> tally.by_site()
    {'north': 7960}
    """

    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    replies: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, site: str, kind: str, n_bytes: int) -> None:
        """Count one reply."""
        self.bytes[site, kind] = self.bytes.get((site, kind), 0) + n_bytes
        self.replies[site, kind] = self.replies.get((site, kind), 0) + 1

    def by_site(self) -> dict[str, int]:
        """Return the bytes of all kinds together, by site."""
        sites = dict.fromkeys(site for site, _ in self.bytes)
        return {name: sum(n for (site, _), n in self.bytes.items() if site == name) for name in sites}

    def write(self, writer: Writer, done: int) -> None:
        """Append the traffic since the last call to :data:`LEFT`, as rows.

        They are stored apart from the run's rows, since a resumed run has more traffic than an uninterrupted one.
        """
        columns: dict[str, Any] = {"run": writer.path.name, "round": done, "unit": "byte"}
        lines = [
            row("bytes_left", n, client=site, variant=kind, n_samples=self.replies[site, kind], **columns)
            for (site, kind), n in sorted(self.bytes.items())
        ]
        writer.folder.append(LEFT, "".join(dumps(line) + "\n" for line in lines).encode())
        self.bytes.clear()
        self.replies.clear()


@dataclass(frozen=True)
class TimeoutPolicy:
    """A limit on how long to wait for clients.

    >>> TimeoutPolicy(min_replies=0, timeout=60.0)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: min_replies must be at least 1; got 0.

    Attributes:
        min_replies: minimum number of replies to wait for, whatever the time.
        timeout: seconds until the server continues without the others; None = wait for all, for ever.
        grace: seconds that the others have after ``min_replies``; None = until the timeout.
        start: seconds until every site must have answered the questions before the first exchange; None = for ever.
    """

    min_replies: int = 1
    timeout: float | None = None
    grace: float | None = None
    start: float | None = None

    def __post_init__(self) -> None:
        if self.min_replies < 1:
            raise UsageError(f"min_replies must be at least 1; got {self.min_replies}.")
        for name in ("timeout", "grace", "start"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be above 0 s; got {value}. Leave it out to wait without a limit.")


class RpcClient:
    """The server's requests to sites and their replies. All traffic passes here.

    Attributes:
        session: of this process, so that a reply to an earlier process is recognised.
        tally: what left the sites. timeouts: how long to wait for sites.
    """

    def __init__(self, link: SiteLink, timeouts: TimeoutPolicy | None = None) -> None:
        self.timeouts = timeouts or TimeoutPolicy()
        self.link, self.tally, self.session = link, TrafficCounter(), uuid4().hex
        self._seq = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.link.sites)

    def ask(
        self,
        packets: Mapping[str, Packet],
        most: int | None = None,
        timeout: float | None = None,
        grace: tuple[int, float] | None = None,
    ) -> Iterator[tuple[str, Packet | None]]:
        """Yield (site, reply) as replies arrive; None if a site does not answer in time.

        A site whose owner has to allow the request is asked again until it does.

        Args:
            most: maximum bytes of a reply. timeout: seconds; None = wait for ever.
            grace: number of replies, and seconds for the others after these.

        Raises:
            RefusedError: a site refuses. NonFiniteError, RunError: its work failed.
            PacketError: a site sent an invalid reply.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        left, told = dict(packets), False
        while left:
            waiting: dict[str, Packet] = {}
            for site, packet in self._ask(left, most, timeout, grace):
                if packet is not None and packet.head["kind"] == "waiting" and time.monotonic() < end:
                    waiting[site] = left[site]
                    if not told:
                        LOG.info(f"site {site} waits: {str(packet.head.get('reason'))[:200]}")
                else:
                    yield site, None if packet is not None and packet.head["kind"] == "waiting" else packet
            left, told = waiting, True
            if left:
                time.sleep(max(0.0, min(ASK_AGAIN, end - time.monotonic())))
            if time.monotonic() >= end:
                yield from dict.fromkeys(left).items()
                return
            timeout = None if timeout is None else end - time.monotonic()

    def _ask(
        self, packets: Mapping[str, Packet], most: int | None, timeout: float | None, grace: tuple[int, float] | None
    ) -> Iterator[tuple[str, Packet | None]]:
        kinds = {site: packet.head["kind"] for site, packet in packets.items()}
        stamps, asked = {}, {}
        for site, packet in packets.items():
            self._seq += 1
            stamps[site] = {"session": self.session, "seq": self._seq}
            asked[site] = encode(Packet({**packet.head, **stamps[site]}, packet.trees))
            metrics.add("sent_bytes_total", len(asked[site]), site)
        for site, data in self.link.ask(asked, timeout, grace):
            if site not in stamps:  # not asked, or answered already
                continue
            if data is None:
                del stamps[site]
                yield site, None
                continue
            self.tally.add(site, kinds[site], len(data))
            metrics.add("received_bytes_total", len(data), site)
            packet = self._read(site, data, most)
            if packet.head["kind"] in GRANTED and protocol.stamp_of(packet) != stamps[site]:
                continue  # an answer to an earlier request
            del stamps[site]
            if packet.head["kind"] == "waiting" and kinds[site] in ("hello", *protocol.WORK, *protocol.SUM_FORMS):
                raise PacketError(f"the reply of site {site!r} to {kinds[site]} must be an answer; got 'waiting'.")
            check_granted(site, packet)
            yield site, packet
        if stamps:
            raise RunError(f"the link ended without a reply of {listing(sorted(stamps))}. Resume the run.")

    def _read(self, site: str, data: bytes, most: int | None) -> Packet:
        try:
            packet = decode(data, most)
            if packet.head["kind"] not in (*GRANTED, "refused", "failed", "waiting"):
                raise PacketError(f"its kind must be one of {', '.join(GRANTED)}; got {packet.head['kind'][:40]!r}.")
            if packet.head["kind"] in GRANTED:
                protocol.stamp_of(Packet(dict(packet.head)))
        except PacketError as error:
            raise PacketError(f"the reply of site {site!r}: {error}") from error
        return packet


def check_granted(site: str, packet: Packet) -> None:
    """Raise the error in a site's reply, if any.

    Raises:
        RefusedError, NonFiniteError, RunError: as the site reports.
    """
    kind, reason = packet.head["kind"], str(packet.head.get("reason", ""))[:2000]
    if kind == "refused":
        raise RefusedError(f"site {site!r} refuses: {reason}")
    if kind == "failed":
        raise (NonFiniteError if packet.head.get("nonfinite") is True else RunError)(f"site {site!r}: {reason}")


class RemoteClients:
    """A client backend at the sites of a link. The server has only the version of each client's state, and names.

    Args:
        names: of the clients, in order; each is a site's. initial: the model before the first round.
        run: the run's name at the sites. lane: which of its exchanges; an early measurement has its own.
        compress: how sites compress their updates (:mod:`fedlayers.remote.compression`); empty = not at all.
    """

    moved = 0.0

    def __init__(
        self,
        line: RpcClient,
        names: Sequence[str],
        initial: Tree,
        run: str,
        lane: str = "main",
        compress: str = "",
    ) -> None:
        self.compress = compress
        self.line, self.names, self.initial, self.run_id, self.lane = line, list(names), initial, run, lane
        self.versions = dict.fromkeys(self.names, BEGINNING)
        self.saved = dict(self.versions)
        self._outlines: dict[int, StateSchema] = {}
        self._begun: dict[int, dict[str, Any]] = {}
        self._missing: set[str] = set()
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

    def visible_state(self, client: int) -> State:
        if client not in self._begun:
            self._begun[client] = self.algorithm.client_state(self.initial, client).meta
        return self._outline(client).state(self._begun[client])

    def _outline(self, client: int) -> StateSchema:
        if client not in self._outlines:
            begun = self.algorithm.client_state(self.initial, client)
            self._outlines[client] = StateSchema.of(begun, begun.meta)
        return self._outlines[client]

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        asked: dict[str, ClientRequest] = {}
        packets: dict[str, Packet] = {}
        for request in requests:  # each client is asked once
            name = self.names[request.client]
            where = protocol.place(self.algorithm, **self._where(name, request))
            asked[name], packets[name] = request, protocol.request_packet(request, where)
        coming = self._replies(packets, asked)
        replies: dict[str, Packet | None] = {}
        for name, request in asked.items():
            while name not in replies:
                site, packet = next(coming)
                replies[site] = packet
            yield self._taken(name, request, replies.pop(name))

    def _replies(
        self, packets: Mapping[str, Packet], asked: Mapping[str, ClientRequest]
    ) -> Iterator[tuple[str, Packet | None]]:
        """Yield replies as they arrive. After the timeout, ask missing sites again until enough have replied."""
        most = most_bytes(self.initial, len(self.names) + EXTRA_TREES)
        limits = self.line.timeouts
        if limits.timeout is None and limits.grace is None:
            yield from self.line.ask(packets, most)
            return
        count = {name for name, request in asked.items() if not (isinstance(request, TrainRequest) and request.lost)}
        left = dict(packets)
        lacking = min(limits.min_replies, len(count))
        while True:
            grace = None if limits.grace is None else (lacking, limits.grace)
            for site, packet in self.line.ask(left, most, limits.timeout, grace):
                if packet is not None:
                    del left[site]
                    yield site, packet
            lacking = min(limits.min_replies, len(count)) - len(count - left.keys())
            if lacking <= 0:
                break
        yield from dict.fromkeys(left).items()

    def _where(self, name: str, request: ClientRequest) -> dict[str, Any]:
        where = {"run": self.run_id, "lane": self.lane, "from": self.versions[name]}
        if isinstance(request, TrainRequest):
            where |= {"to": f"{request.rnd.index + 1:06d}-{request.rnd.exchange}", "saved": self.saved[name]}
        return where

    def _taken(self, name: str, request: ClientRequest, packet: Packet | None) -> ClientReply:
        if packet is None:
            LOG.warning(f"site {name} did not answer in time")
            self._missing.add(name)
            return ClientReply(request.client, missing=True)
        reply, outline = protocol.reply_of(packet, request, self.initial, name, self.compress)
        self._check_complete(name, request, reply, outline)
        if isinstance(request, TrainRequest) and not request.lost:
            self.versions[name] = f"{request.rnd.index + 1:06d}-{request.rnd.exchange}"
            self._outlines[request.client] = outline
        return reply

    def _check_complete(self, name: str, request: ClientRequest, reply: ClientReply, outline: StateSchema) -> None:
        """Refuse a reply that lacks a part with which the server continues, or that names a client that is not there.

        Raises:
            PacketError: names the site and the part.
        """
        far = next((each.client_b for each in reply.observations if (each.client_b or 0) >= len(self.names)), None)
        if far is not None:
            raise PacketError(f"client_b of site {name!r} must be below {len(self.names)}; got {far}.")
        if isinstance(request, TrainRequest) and not request.lost:
            trees, own = reply.message.trees, self.algorithm.client_state(self.initial, request.client).trees
            check_whole(f"the state of site {name!r}", own.get("model", {}), outline.trees.get("model", ()))
            if "model" in trees or not (trees or reply.message.meta):
                check_whole(f"the update of site {name!r}", self._uploaded(request), trees.get("model", ()))

    def _uploaded(self, request: TrainRequest) -> Collection[str]:
        """Return the names of the tensors that a message with a model must have."""
        return self.algorithm.uploaded(request.rnd, request.client)

    def forget(self) -> None:
        """Do nothing: the server stores no client state."""

    def save(self, writer: Writer, done: int, server: State) -> None:
        states = {}
        for client, name in enumerate(self.names):
            outline = self._outline(client)
            trees = {tree: list(names) for tree, names in outline.trees.items()}
            known = {"version": self.versions[name], "trees": trees, "changed": sorted(outline.changed)}
            states[name] = State({}, known)
        writer.checkpoint(Checkpoint(done, server, states, {}))
        self.saved = dict(self.versions)
        self.line.tally.write(writer, done)
        metrics.put("rounds_done", done)
        log.note(writer.path, round=done, missing=sorted(self._missing), error="")
        self._missing.clear()

    def restore(self, checkpoint: Checkpoint) -> None:
        for client, name in enumerate(self.names):
            known = checkpoint.clients[name].meta
            wrong = validate(known, AT_SITE)
            if wrong:
                raise CorruptError(
                    f"the checkpoint after round {checkpoint.round} is damaged at client {name!r}: {wrong}"
                )
            self.versions[name] = known["version"]
            trees = {tree: tuple(names) for tree, names in known["trees"].items()}
            self._outlines[client] = StateSchema(trees, frozenset(known["changed"]))
        self.saved = dict(self.versions)

    def fork(self) -> RemoteClients:
        self._beside += 1
        return RemoteClients(self.line, self.names, self.initial, self.run_id, f"beside-{self._beside}", self.compress)


def left(*paths: Path | str) -> pd.DataFrame:
    """Return the bytes that left each site in some runs together: sites x kinds of reply, and totals.

    Raises:
        UsageError: a run is not a federation's.
    """
    import pandas as pd

    lines = []
    for path in paths:
        folder = Folder(path)
        if not folder.has(LEFT):
            raise UsageError(
                f"{path} must be a federation's run that has saved a round; got no {LEFT}. Name another directory."
            )
        lines += [parsed_json(line) for line in folder.read(LEFT).splitlines()]
    frame = pd.DataFrame(lines, columns=["client", "variant", "value"]).rename(columns={"variant": "reply"})
    table = frame.pivot_table(index="client", columns="reply", values="value", aggfunc="sum", fill_value=0, sort=False)
    return table.assign(all=table.sum(axis=1)).astype(int)


__all__ = ["RefusedError", "RemoteClients", "RpcClient", "TimeoutPolicy", "TrafficCounter", "left"]
