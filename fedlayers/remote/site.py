"""A long-running site: its data, its policy, and its runs in a folder. Requests and replies are bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from fedlayers.remote import metrics, packet_forms, protocol, state_store
from fedlayers.remote.codec import Packet, PacketError, decode, encode, encode_parts, fields
from fedlayers.remote.host import Host
from fedlayers.remote.joined_run import JoinedRun, check_same_run
from fedlayers.remote.log import LOG
from fedlayers.remote.policy import MEGABYTE
from fedlayers.remote.sent_log import TO_APPROVE, NotAllowedError, name_of, refusal
from fedlayers.remote.state_store import Turns
from fl_core import tree
from fl_core.errors import RunError, UsageError, check_known
from fl_core.limits import LimitError
from fl_core.names import printable
from fl_core.storage.files import Folder

MOST_RUNS, MOST_HELD = 8, 2**26
"""Runs that a site keeps in memory, and the bytes of their models together. Others are read again when needed.

The last run is kept whatever its size. A run needs about three times the bytes of its model."""
_RUN = re.compile(r"[0-9a-f]{32}")


class Site(Host):
    """A client of federations that answers requests. A bad request is refused; it raises nothing.

    Arguments are those of :class:`~fedlayers.remote.host.Host`.
    """

    @cached_property
    def _joined(self) -> dict[str, JoinedRun]:
        """The runs in memory, the one asked for last at the end."""
        return {}

    def answer(self, request: bytes) -> bytes:
        """Return the reply to a request: its result, or ``refused``, ``failed`` or ``waiting`` with the reason.

        Each reply is written into the site's list of what has left, before it leaves.
        """
        asked: dict[str, Any] = {"kind": "", "run": "", "stamp": {}}
        size = len(request)
        try:
            with self.policy.enforce_limits(self.idle):
                packet = decode(request, self.policy.memory * MEGABYTE)
                key = state_store.key(packet.head, request)
                del request  # the packet holds its tensors
                reply = self._answer(packet, key, size, asked)
                data = encode(reply)
        except Exception as error:  # a site survives any error of a request, and reports it
            if isinstance(error, LimitError):
                self._joined.clear()  # interrupted runs are read again when needed
            reply = refusal(error)
            reply.head |= asked["stamp"]
            data = encode(reply)
            if not isinstance(error, NotAllowedError):
                LOG.warning(f"{reply.head['kind']} {asked['kind'] or 'a request'}: {type(error).__name__}: {error}")
        else:
            LOG.info(f"answered {asked['kind']} {asked['run']} with {len(data)} bytes")
        try:
            self.sent.write(asked["kind"], asked["run"], reply, data)
            metrics.add("received_bytes_total", size, self.name)
            metrics.add("sent_bytes_total", len(data), self.name)
        except (OSError, RunError) as error:  # what cannot be written down does not leave
            LOG.error(str(error))
            return encode(Packet({"kind": "failed", "reason": "the site cannot write down what leaves it"}))
        return data

    def _answer(self, packet: Packet, key: str, size: int, asked: dict[str, Any]) -> Packet:
        stamp, kind = protocol.stamp_of(packet), packet.head["kind"]
        asked |= {"stamp": stamp, "kind": printable(kind[:40]), "run": printable(str(packet.head.get("run", ""))[:40])}
        asks = self.policy.approve == "ask"
        if asks and kind in TO_APPROVE:
            self.approval.check(packet)
        without_run = {"hello": self._hello, "moments": self._moments, "race": self._race}
        if kind in without_run:
            reply = without_run[kind](packet)
        elif kind == "join":
            reply = self._join(packet, stamp)
        else:
            check_known("request", kind, (*without_run, "join", "measure", *packet_forms.WORK, *packet_forms.SUM_FORMS))
            run = packet.head.get("run")
            joined = self._run(run if isinstance(run, str) else "")
            if asks and not self.approval.allows(joined.asked):
                raise UsageError("the site's owner has not allowed this run, or no longer. Resume it to ask again.")
            if asks and kind == "measure":
                self.approval.check(Packet({**packet.head, "of": name_of(joined.asked)}))
            if kind in packet_forms.SUM_FORMS:
                reply = joined.sum_step(packet, **stamp)
            elif kind == "measure":
                reply = joined.measure(packet, key, **stamp)
            else:
                reply = joined.work(packet, key, size, **stamp)
        return Packet({**reply.head, **stamp}, reply.trees)

    def _hello(self, packet: Packet) -> Packet:
        protocol.check_spoken("the server", packet.head)
        fields(packet.head, packet_forms.HELLO)
        self.check_samples()
        self.audit.write("hello")
        return Packet({"kind": "hello", **self.holding.facts(), **protocol.versions(), "torch": protocol.TORCH})

    def _moments(self, packet: Packet) -> Packet:
        asked = fields(packet.head, packet_forms.MOMENTS)
        self.check_samples()
        if self.privacy.active:
            raise UsageError("scale and impute must be none at a site with noise; got others. Leave both out.")
        self.audit.check(asked["number"], asked["seed"])
        found = self.audit.moments(asked["number"], asked["seed"])
        self.audit.write("moments", asked["number"], asked["seed"])
        told = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(found).items()}
        return Packet({"kind": "told", **told})

    def _race(self, packet: Packet) -> Packet:
        asked = fields(packet.head, packet_forms.RACE)
        self.check_samples()
        self.audit.check(asked["number"], asked["seed"])
        for arm in asked["arms"]:
            self.check_algorithm(arm["algorithm"], arm["options"])
            self.policy.check_layers(arm["layers"])
        self.audit.write("race", asked["number"], asked["seed"])
        return Packet({"kind": "counted", "classes": self.holding.classes(asked["number"], asked["seed"])})

    def _join(self, packet: Packet, stamp: Mapping[str, Any]) -> Packet:
        asked = fields(packet.head, packet_forms.JOIN, packet_forms.OPTIONAL)
        if not _RUN.fullmatch(asked["run"]):
            raise PacketError(f"run must match {_RUN.pattern}; got {asked['run'][:80]!r}.")
        path, session = self.folder / asked["run"], stamp["session"]
        self.check_disk()
        check_same_run(Folder(path), packet, self.device)
        Turns(Folder(path), session).check_join(session)
        joined = self._make_run(asked["run"], packet, session)
        path.mkdir(parents=True, exist_ok=True)
        Folder(path).write("join", *encode_parts(Packet({**packet.head, **stamp}, packet.trees)))
        joined.turns.begin(session)
        self._joined[asked["run"]] = joined
        return Packet({"kind": "joined", "sizes": joined.sizes})

    def _run(self, run: str) -> JoinedRun:
        """Return a run that this site has joined, even before its last restart."""
        if run not in self._joined:
            folder = Folder(self.folder / run)
            if not _RUN.fullmatch(run) or not folder.has("join"):
                raise PacketError(f"run must be one that this site has joined; got {run[:80]!r}.")
            packet = decode(folder.read("join"))
            self._joined[run] = self._make_run(run, packet, protocol.stamp_of(packet)["session"])
        self._joined[run] = self._joined.pop(run)  # the last asked for is the last to be forgotten
        return self._joined[run]

    def _make_run(self, run: str, packet: Packet, session: str) -> JoinedRun:
        """Return the site's part of a run. Without room for it, the runs asked for longest ago are forgotten first."""
        more = sum(map(tree.n_bytes, packet.trees.values()))
        self._joined.pop(run, None)
        while self._joined and (len(self._joined) >= MOST_RUNS or self._held_bytes() + more > MOST_HELD):
            self._joined.pop(next(iter(self._joined)))
        return JoinedRun(self, packet, Turns(Folder(self.folder / run), session))

    def _held_bytes(self) -> int:
        return sum(tree.n_bytes(joined.initial) for joined in self._joined.values())
