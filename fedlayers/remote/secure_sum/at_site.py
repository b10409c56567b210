"""A site's side of a run with a secure sum: each step of a sum is answered once, also after a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedlayers.remote import packet_forms
from fedlayers.remote.codec import Packet, PacketError, fields
from fedlayers.remote.secure_sum.fixed_point import encode_tree
from fedlayers.remote.secure_sum.keys import Identity
from fedlayers.remote.secure_sum.members import Member, context_of
from fl_core.algorithms.base import Message, TaskInfo
from fl_core.errors import UsageError, listing
from fl_core.limits import parsed_json
from fl_core.storage.files import Folder, json_bytes, sha
from fl_core.tree import Tree

FILE = "secure-sum.json"
"""The file of the present sum, with this site's secrets until it has revealed its shares."""
STEPS = ("sum_keys", "sum_shares", "train", "sum_agree", "sum_reveal")


class SiteSums:
    """A site's part in the secure sums of one run. There is one sum at a time, and a new one ends the one before.

    Args:
        folder: the run's, with :data:`FILE`.
        identity: the site's keys. sites: names of the run's sites.

    Raises:
        UsageError: the site has no key.
    """

    def __init__(self, folder: Folder, identity: Identity | None, sites: Sequence[str]) -> None:
        if identity is None:
            raise UsageError(
                "a secure sum needs a key of this site and the public keys of the others; got none. "
                "Put them into the folder sites next to the key."
            )
        self.folder, self.identity, self.sites = folder, identity, sites

    def answer(self, packet: Packet) -> Packet:
        """Answer one step of a sum other than the masked update.

        Raises:
            UsageError, PacketError: out of turn, a second time with other words, or as of :class:`Member`.
        """
        kind = packet.head["kind"]
        asked = fields(packet.head, packet_forms.SUM_FORMS[kind])
        if packet.trees:
            raise PacketError(f"a packet {kind!r} must be without tensors; got {listing(packet.trees)}.")
        if not set(asked["group"]) <= set(self.sites):
            raise PacketError(f"a secure sum must be over sites of its run; got {listing(asked['group'])}.")
        member = self._member(asked, begins=kind == "sum_keys")
        digest = sha(json_bytes(asked))
        acts: dict[str, Callable[[], dict[str, Any]]] = {
            "sum_keys": member.advertise,
            "sum_shares": lambda: member.share(asked["keys"]),
            "sum_agree": lambda: member.agree(asked["survivors"]),
            "sum_reveal": lambda: member.reveal(asked["signatures"]),
        }
        done = self._begin(member, kind, digest)
        if not done:
            member.state["steps"][kind] = {"asked": digest, "reply": acts[kind]()}
            if kind == "sum_reveal":  # the secrets have served
                member.state = {name: member.state[name] for name in ("context", "steps")}
            self._store(member)
        return Packet({"kind": "summed", "parts": member.state["steps"][kind]["reply"]})

    def enter(self, head: Mapping[str, Any], asked: Mapping[str, Any] | None, key: str) -> Member:
        """Return the member that masks the update of a training, before the site trains.

        Args:
            head: of the request. asked: what it says of the sum. key: of the request; another one is refused.

        Raises:
            UsageError, PacketError: as for :meth:`answer`.
        """
        if not asked:
            raise UsageError("updates of this run must be in a secure sum; got a request for one of this site alone.")
        said = fields({**asked, "kind": "train"}, packet_forms.IN_SUM)
        member = self._member({**said, **{name: head[name] for name in ("run", "lane", "to")}})
        if not self._begin(member, "train", key):
            member.receive(said["shares"])
            member.state["steps"]["train"] = {"asked": key}
            self._store(member)
        elif "sum_reveal" in member.state["steps"]:
            raise PacketError("a secure sum must be the present one; got one that has ended.")
        return member

    def mask_update(self, member: Member, message: Message, task: TaskInfo, client: int) -> dict[str, Tree]:
        """Return the trees of a packet with a masked update of the client with this number.

        Raises:
            UsageError: the update has more than the tensors of one model, or too large a value.
        """
        if message.meta or set(message.trees) - {"model"}:
            raise UsageError(
                "an update in a secure sum must be the tensors of one model; the algorithm sends more. "
                "Use another algorithm."
            )
        total = sum(task.weight(each) for each in range(len(task.n_train)))
        words = encode_tree(message.trees.get("model", {}), task.weight(client), total)
        member.mask(words)
        return {packet_forms.MASKED: {"words": torch.from_numpy(words.view("int64"))}}

    def _member(self, asked: Mapping[str, Any], begins: bool = False) -> Member:
        """Return the member of a sum, as it is stored. Its first step begins a new one."""
        place = {name: asked[name] for name in ("run", "lane", "to", "sum", "group")}
        if place["lane"] != "main":
            raise PacketError(f"lane of a secure sum must be 'main'; got {place['lane'][:80]!r}.")
        context = context_of(place)
        state = parsed_json(self.folder.read(FILE)) if self.folder.has(FILE) else {}
        if state.get("context") != context.hex():
            if not begins:
                raise PacketError("a secure sum must be the one of this site's last keys; got another.")
            state = {"context": context.hex(), "steps": {}}
        return Member(self.identity, context, place["group"], state)

    def _begin(self, member: Member, kind: str, digest: str) -> bool:
        """Return whether a step is done already, by the same request.

        Raises:
            UsageError: it was asked for with other words. PacketError: the step before is not done.
        """
        steps = member.state["steps"]
        if kind in steps and steps[kind]["asked"] != digest:
            raise UsageError(f"a step of a secure sum must be asked once; got another request {kind!r}.")
        before = STEPS[: STEPS.index(kind)]
        if not set(before) <= steps.keys():
            raise PacketError(f"a request {kind!r} of a secure sum must come after {before[-1]!r}; it came before.")
        return kind in steps

    def _store(self, member: Member) -> None:
        self.folder.write(FILE, json_bytes(member.state))
