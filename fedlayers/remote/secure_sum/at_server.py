"""The server's side of a run with a secure sum: it receives masked updates, and removes the masks of their sum."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from uuid import uuid4

import numpy as np
import torch

from fedlayers.remote import packet_forms, protocol
from fedlayers.remote.codec import Packet, PacketError, fields, most_bytes
from fedlayers.remote.remote_clients import EXTRA_TREES, RemoteClients
from fedlayers.remote.secure_sum.fixed_point import Words, decode_mean
from fedlayers.remote.secure_sum.members import check_enough, context_of, remove_masks, threshold
from fl_core.algorithms.base import Message
from fl_core.errors import UsageError, about, listing
from fl_core.execution.requests import ClientReply, ClientRequest, TrainRequest
from fl_core.tree import Tree


class SummingClients(RemoteClients):
    """Clients at sites whose updates reach the server only as their weighted sum.

    Each reply to an exchange has the mean instead of the client's own message. A client that is late at any step is
    missing in the round. With too few clients for a sum the run ends with an error, and can be resumed.
    """

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        asked = list(requests)
        summed = [request for request in asked if isinstance(request, TrainRequest) and not request.lost]
        clients = {request.client for request in summed}
        replies = {reply.client: reply for reply in super().run(r for r in asked if r.client not in clients)}
        if summed:
            replies |= self._sum_updates({self.names[request.client]: request for request in summed})
        yield from (replies[request.client] for request in asked)

    def fork(self) -> NoReturn:
        raise UsageError("plan must be given with a secure sum; got none. Single clients are not measured.")

    def _sum_updates(self, asked: Mapping[str, TrainRequest]) -> dict[int, ClientReply]:
        """Run one exchange. Return all clients' replies, by client.

        Raises:
            UsageError: too few clients, or they would send different tensors.
            PacketError: a site sent something else than its part.
        """
        tensors = self._tensors(list(asked.values()))
        first = next(iter(asked))
        where = self._where(first, asked[first])
        place = {"run": self.run_id, "lane": self.lane, "to": where["to"]}
        place |= {"sum": uuid4().hex, "group": sorted(asked)}
        context = context_of(place)
        keys = self._step("sum_keys", place, {name: {} for name in asked})
        shares = self._step("sum_shares", place, {name: {"keys": keys} for name in keys})
        for name, each in shares.items():
            if each.keys() != keys.keys() - {name}:
                raise PacketError(
                    f"the reply of site {name!r} must have shares for all other sites; got {listing(sorted(each))}."
                )
        total = np.zeros(sum(tensor.numel() for tensor in tensors.values()), np.uint64)
        packets = {name: self._training(name, asked[name], place, shares) for name in shares}
        found: dict[str, Packet] = {}
        for name, packet in self._in_time(packets, len(asked)):
            total += _words(name, packet, len(total))
            found[name] = packet
        self._check(found, len(asked), "updates")
        agreed = self._step("sum_agree", place, {name: {"survivors": sorted(found)} for name in found})
        signatures = {name: each["signature"] for name, each in agreed.items()}
        revealed = self._step("sum_reveal", place, {name: {"signatures": signatures} for name in agreed})
        remove_masks(total, context, place["group"], keys, shares, found, revealed)
        weight = sum(self.algorithm.task_info.weight(asked[name].client) for name in found)
        mean = Message({"model": decode_mean(total, tensors, weight)})
        replies = {}
        for name, request in asked.items():
            reply = self._take(name, request, found.get(name))
            if not reply.missing:
                reply.message, reply.summed = mean, len(found)
            replies[request.client] = reply
        return replies

    def _uploaded(self, request: TrainRequest) -> Collection[str]:
        return ()  # masked, and taken already

    def _training(
        self, name: str, request: TrainRequest, place: Mapping[str, Any], shares: Mapping[str, Mapping[str, str]]
    ) -> Packet:
        """Return the request to train, with the other members' shares for this one."""
        packet = protocol.request_packet(request, protocol.run_position(self.algorithm, **self._where(name, request)))
        given = {other: shares[other][name] for other in shares if other != name}
        packet.head["secure_sum"] = {"sum": place["sum"], "group": place["group"], "shares": given}
        return packet

    def _tensors(self, asked: Sequence[TrainRequest]) -> Tree:
        """Return the initial tensors under the names that every client uploads."""
        names = {self.algorithm.uploaded(request.rnd, request.client) for request in asked}
        if len(names) > 1:
            raise UsageError("clients of a secure sum must send the same tensors; got others. Use another plan.")
        return {name: self.initial[name] for name in names.pop()}

    def _step(self, kind: str, place: Mapping[str, Any], asked: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Ask each member for its part in one step. Return the parts of the members that replied in time."""
        packets = {name: Packet({"kind": kind, **place, **each}) for name, each in asked.items()}
        parts = {}
        for name, packet in self._in_time(packets, len(place["group"])):
            with about(f"the reply of site {name!r}", PacketError):
                if packet.trees:
                    raise PacketError(f"a step of a secure sum must be without tensors; got {listing(packet.trees)}.")
                parts[name] = fields(packet.head, {"parts": packet_forms.PARTS[kind]})["parts"]
        self._check(parts, len(place["group"]), f"replies to {kind}")
        return parts

    def _in_time(self, packets: Mapping[str, Packet], count: int) -> Iterator[tuple[str, Packet]]:
        """Yield the replies that come in time."""
        most, limits = most_bytes(self.initial, len(self.names) + EXTRA_TREES), self.line.timeouts
        grace = None if limits.grace is None else (max(limits.min_replies, threshold(count)), limits.grace)
        for name, packet in self.line.ask(packets, most, limits.timeout, grace):
            if packet is not None:
                yield name, packet

    def _check(self, found: Collection[str], count: int, what: str) -> None:
        check_enough(found, count, what)
        least = min(self.line.timeouts.min_replies, count)
        if len(found) < least:
            raise UsageError(f"a secure sum must have at least {least} {what} (--min-sites); got {len(found)}.")


def _words(name: str, packet: Packet, count: int) -> Words:
    """Take the masked update out of a reply.

    Raises:
        PacketError: it has none, or another size.
    """
    tree = packet.trees.pop(packet_forms.MASKED, {})
    words = tree.pop("words", torch.empty(0))
    if packet.trees or tree or words.dtype != torch.int64 or words.shape != (count,):
        raise PacketError(f"the reply of site {name!r} must have one masked update of {count:,} numbers; got another.")
    return words.numpy().view(np.uint64)
