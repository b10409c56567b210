"""The server's side of clients that live at sites. They send back messages, numbers and names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedlayers.remote import log, metrics, packet_forms, protocol
from fedlayers.remote.codec import Packet, PacketError, check_whole, most_bytes
from fedlayers.remote.log import LOG
from fedlayers.remote.rpc import RpcClient
from fl_core.algorithms.base import Algorithm, State
from fl_core.algorithms.model_template import StateSchema
from fl_core.errors import CorruptError
from fl_core.execution.requests import ClientReply, ClientRequest, TrainRequest
from fl_core.records.store import Checkpoint
from fl_core.records.writing import Writer
from fl_core.storage.schema import validate
from fl_core.tree import Tree

AT_SITE = {"version": str, **packet_forms.OUTLINE}
"""The schema of a checkpoint's entry for a client whose state is at its site."""
BEGINNING = ""  # the version of a state before the client's first round
EXTRA_TREES = 16
"""Maximum number of trees of the model's size in a reply, in addition to one per client."""


class RemoteClients:
    """A client backend at the sites of a link. The server has only the version of each client's state, and names.

    Args:
        names: of the clients, in order; each is a site's. initial: the model before the first round.
        task: the kind of task (:data:`fl_core.scores.TASKS`), which decides the scores of a reply.
        run: the run's name at the sites. lane: which of its exchanges; an early measurement has its own.
        compress: how sites compress their updates (:mod:`fedlayers.remote.compression`); empty = not at all.
    """

    transfer_seconds = 0.0

    def __init__(
        self,
        line: RpcClient,
        names: Sequence[str],
        initial: Tree,
        task: str,
        run: str,
        lane: str = "main",
        compress: str = "",
    ) -> None:
        self.compress = compress
        self.line, self.names, self.initial, self.task = line, list(names), initial, task
        self.run_id, self.lane = run, lane
        self.versions = dict.fromkeys(self.names, BEGINNING)
        self.saved = dict(self.versions)
        self._outlines: dict[int, StateSchema] = {}  # of states after a round
        self._begun: dict[int, tuple[dict[str, Any], StateSchema]] = {}
        self._missing: set[str] = set()
        self._beside = 0

    def begin(self, algorithm: Algorithm) -> None:
        self.use(algorithm)
        self.versions = dict.fromkeys(self.names, BEGINNING)
        self._outlines.clear()

    def use(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self._begun.clear()

    def visible_state(self, client: int) -> State:
        return self._outline(client).state(self._beginning(client)[0])

    def _outline(self, client: int) -> StateSchema:
        return self._outlines.get(client) or self._beginning(client)[1]

    def _beginning(self, client: int) -> tuple[dict[str, Any], StateSchema]:
        """Return the plain data and the outline of a client's state before its first round. The state is made once."""
        if client not in self._begun:
            begun = self.algorithm.client_state(self.initial, client)
            self._begun[client] = begun.meta, StateSchema.from_state(begun, begun.meta)
        return self._begun[client]

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        asked: dict[str, ClientRequest] = {}
        packets: dict[str, Packet] = {}
        for request in requests:  # each client is asked once
            name = self.names[request.client]
            where = protocol.run_position(self.algorithm, **self._where(name, request))
            asked[name], packets[name] = request, protocol.request_packet(request, where)
        coming = self._replies(packets, asked)
        replies: dict[str, Packet | None] = {}
        for name, request in asked.items():
            while name not in replies:
                site, packet = next(coming)
                replies[site] = packet
            yield self._take(name, request, replies.pop(name))

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

    def _take(self, name: str, request: ClientRequest, packet: Packet | None) -> ClientReply:
        if packet is None:
            LOG.warning(f"site {name} did not answer in time")
            self._missing.add(name)
            return ClientReply(request.client, missing=True)
        reply, outline = protocol.reply_of(
            packet, request, self.initial, name, self.task, self.compress, self.algorithm.observes
        )
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
            trees, own = reply.message.trees, self._beginning(request.client)[1].trees
            check_whole(f"the state of site {name!r}", own.get("model", ()), outline.trees.get("model", ()))
            lost = next((tree for tree in self._outline(request.client).trees if tree not in outline.trees), None)
            if lost is not None:
                raise PacketError(f"the state of site {name!r} must have the tree {lost!r}; got none.")
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
            states[name] = State({}, {"version": self.versions[name], **self._outline(client).to_json()})
        writer.checkpoint(Checkpoint(done, server, states, {}))
        self.saved = dict(self.versions)
        self.line.tally.write(writer, done)
        metrics.set_number("rounds_done", done)
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
            if known["version"] != BEGINNING:
                self._outlines[client] = StateSchema.from_json(known)
        self.saved = dict(self.versions)

    def fork(self) -> RemoteClients:
        self._beside += 1
        lane = f"beside-{self._beside}"
        return RemoteClients(self.line, self.names, self.initial, self.task, self.run_id, lane, self.compress)
