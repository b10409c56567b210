"""The two sides of a secure sum without transport: members mask their updates, and the masks of the sum are removed.

Steps and names follow Bonawitz et al. 2017, Figure 4. Bytes are hexadecimal text, as they travel and are stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedlayers.remote.codec import PacketError
from fedlayers.remote.secure_sum import shamir
from fedlayers.remote.secure_sum.fixed_point import Words
from fedlayers.remote.secure_sum.keys import Identity, add_mask, decrypt, encrypt, new_key, public, shared_secret
from fl_core.errors import UsageError, about, check_distinct, listing

LEAST = 3
"""The smallest number of members of a sum."""
Keys = Mapping[str, Mapping[str, str]]


def threshold(count: int) -> int:
    """Return how many of the members must stay until the end: more than half, and three.

    More than half sign who is in the sum, each member once. So a server cannot get signatures of two different lists.
    In a sum of two each member could compute the other's update.
    """
    return max(LEAST, count // 2 + 1)


def check_group(group: Sequence[str]) -> None:
    """Refuse a group of too few members, or with one twice.

    Raises:
        UsageError: gives their number, or the name.
    """
    check_distinct("a secure sum", "site", group)
    if len(group) < LEAST:
        raise UsageError(
            f"a secure sum must have at least {LEAST} sites in a round; got {len(group)}. Let more take part."
        )


def check_enough(found: Collection[str], count: int, what: str) -> None:
    """Refuse a step with too few members.

    Raises:
        UsageError: gives both numbers.
    """
    if len(found) < threshold(count):
        raise UsageError(
            f"a secure sum of {count} sites must have at least {threshold(count)} {what}; got {len(found)}. "
            "No update was revealed."
        )


def context_of(place: Mapping[str, Any]) -> bytes:
    """Return the digest of a sum's place: run, lane, version, name and group. Signatures and secrets depend on it.

    Raises:
        UsageError: the group is too small, or has a member twice.
    """
    check_group(place["group"])
    return hashlib.sha256(json.dumps(place, sort_keys=True).encode()).digest()


def sign_of(own: str, other: str) -> int:
    """Return the sign with which the mask of two members enters the update of the first one."""
    return 1 if own < other else -1


class Member:
    """One site's part in one sum.

    Attributes:
        state: all that it knows, as JSON data; a member that starts again continues with it.
    """

    def __init__(self, identity: Identity, context: bytes, group: Sequence[str], state: dict[str, Any]) -> None:
        self.identity, self.name, self.context = identity, identity.name, context
        self.group, self.state = sorted(group), state

    def advertise(self) -> dict[str, str]:
        """Draw the secrets of this sum, and return signed public keys: one for masks, one for shares."""
        for name in ("mask", "share"):
            self.state[name] = new_key().hex()
        self.state["seed"] = os.urandom(shamir.SECRET_BYTES).hex()
        keys = {name: public(self._secret(name)).hex() for name in ("mask", "share")}
        self.state["public"] = keys
        return {**keys, "signature": self.identity.sign(self._text_to_sign(self.name, keys)).hex()}

    def share(self, keys: Keys) -> dict[str, str]:
        """Return encrypted shares of the own secrets, one envelope for each other member.

        Raises:
            UsageError: too few keys, or no public key of a site is known here.
            PacketError: a key is forged, repeated, or of nobody in the group.
        """
        check_enough(keys, len(self.group), "keys")
        strange = sorted(keys.keys() - set(self.group))
        if strange or self.name not in keys:
            raise PacketError(f"keys of a secure sum must be of its group and have this site's; got {listing(keys)}.")
        every = [each[kind] for each in keys.values() for kind in ("mask", "share")]
        if len(set(every)) < len(every):
            raise PacketError("keys of a secure sum must differ; got one twice.")
        for name, each in keys.items():
            self.identity.check(name, self._text_to_sign(name, each), raw(each["signature"]), "keys")
        if any(keys[self.name][kind] != own for kind, own in self.state["public"].items()):
            raise PacketError("keys of a secure sum must have this site's own; got others under its name.")
        for name, each in keys.items():
            with about(f"the keys of site {name!r}", PacketError):
                pair_seed(self._secret("mask"), each, self.context)
        self.state["keys"] = {name: dict(each) for name, each in keys.items()}
        least, count = threshold(len(self.group)), len(self.group)
        parts = [shamir.make_shares(self._secret(name), least, count) for name in ("mask", "seed")]
        made = {name: b"".join(part[at] for part in parts) for at, name in enumerate(self.group)}
        self.state["own"] = made[self.name].hex()
        others = [name for name in keys if name != self.name]
        context = b"shares" + self.context
        sealing = {name: shared_secret(self._secret("share"), raw(keys[name]["share"]), context) for name in others}
        self.state["sealing"] = {name: key.hex() for name, key in sealing.items()}
        return {name: encrypt(sealing[name], made[name], sender_and_receiver(self.name, name)).hex() for name in others}

    def receive(self, shares: Mapping[str, str]) -> None:
        """Open the other members' shares.

        Raises:
            UsageError: too few. PacketError: they are forged, or of nobody who sent keys.
        """
        sealing = self.state["sealing"]
        strange = sorted(shares.keys() - sealing.keys())
        if strange:
            raise PacketError(f"shares must be of other members of the sum; got {strange[0][:64]!r}.")
        check_enough([self.name, *shares], len(self.group), "sites with shares")
        found = {
            name: decrypt(bytes.fromhex(sealing[name]), raw(each), sender_and_receiver(name, self.name))
            for name, each in shares.items()
        }
        if any(len(each) != 2 * shamir.SHARE_BYTES for each in found.values()):
            raise PacketError(f"shares of a secure sum must have {2 * shamir.SHARE_BYTES} bytes; got others.")
        self.state["shares"] = {self.name: self.state["own"], **{name: each.hex() for name, each in found.items()}}

    def mask(self, words: Words) -> None:
        """Mask an update in place: by the own seed, and by a secret with each other member that has shared."""
        add_mask(words, self._secret("seed"), 1)
        for name in self.state["shares"]:
            if name != self.name:
                add_mask(words, pair_seed(self._secret("mask"), self.state["keys"][name], self.context),
                         sign_of(self.name, name))  # fmt: skip

    def agree(self, survivors: Sequence[str]) -> dict[str, str]:
        """Sign who is in the sum: keys, members and survivors, as this member was told.

        It is the consistency check of the protocol. Without it a server could tell each member something else.

        Raises:
            UsageError: too few survivors. PacketError: one is no member, or named twice, or this one is missing.
        """
        members = self.state["shares"]
        if len(set(survivors)) < len(survivors) or not {self.name} <= set(survivors) <= members.keys():
            raise PacketError(
                f"survivors of a secure sum must be its members, this site too; got {listing(survivors)}."
            )
        check_enough(survivors, len(self.group), "survivors")
        self.state["survivors"] = sorted(survivors)
        return {"signature": self.identity.sign(self._agreed()).hex()}

    def reveal(self, signatures: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Return one share of each member: of its seed if its update arrived, otherwise of its key for masks.

        Args:
            signatures: of survivors, by name, each under what this member has signed too.

        Raises:
            UsageError: too few signatures. PacketError: one is forged, of another list, or of no survivor.
        """
        members, survivors = self.state["shares"], self.state["survivors"]
        strange = sorted(signatures.keys() - set(survivors))
        if strange:
            raise PacketError(f"signatures must be of survivors of the sum; got one of {strange[0][:64]!r}.")
        check_enough(signatures, len(self.group), "sites that agree")
        for name, signature in signatures.items():
            self.identity.check(name, self._agreed(), raw(signature), "list of survivors")
        half = 2 * shamir.SHARE_BYTES
        seeds = {name: members[name][half:] for name in survivors}
        return {"seeds": seeds, "masks": {name: members[name][:half] for name in members if name not in survivors}}

    def _secret(self, name: str) -> bytes:
        return bytes.fromhex(self.state[name])

    def _agreed(self) -> bytes:
        """Return the text that members sign. The keys bind it to this sum, which could begin again under its name."""
        keys = {name: [each["mask"], each["share"]] for name, each in self.state["keys"].items()}
        told = {"keys": keys, "members": sorted(self.state["shares"]), "survivors": self.state["survivors"]}
        return b"fedlayers secure sum agreed|" + self.context + json.dumps(told, sort_keys=True).encode()

    def _text_to_sign(self, name: str, keys: Mapping[str, str]) -> bytes:
        return b"|".join([b"fedlayers secure sum", self.context.hex().encode(), name.encode(),
                          keys["mask"].encode(), keys["share"].encode()])  # fmt: skip


def remove_masks(
    words: Words,
    context: bytes,
    group: Sequence[str],
    keys: Keys,
    members: Collection[str],
    survivors: Collection[str],
    revealed: Mapping[str, Mapping[str, Mapping[str, str]]],
) -> None:
    """Remove all masks from the sum of the survivors' masked updates, in place.

    Args:
        keys: of all who sent some. members: those who sent shares as well.
        revealed: what each survivor has revealed.

    Raises:
        UsageError: too few survivors revealed anything. PacketError: their shares do not fit.
    """
    check_enough(revealed, len(group), "sites that reveal shares")
    points = {name: at for at, name in enumerate(sorted(group), 1)}
    chosen = sorted(revealed)[: threshold(len(group))]

    def wrong(name: str) -> PacketError:
        return PacketError(
            f"the shares of site {name!r} that {listing(map(repr, chosen))} revealed must be of one secret; got "
            "others. One of these sites is at fault. Resume the run without it."
        )

    def secret(kind: str, name: str) -> bytes:
        try:
            return shamir.combine({points[each]: raw(revealed[each][kind][name]) for each in chosen})
        except (KeyError, ValueError):
            raise wrong(name) from None

    for name in survivors:
        add_mask(words, secret("seeds", name), -1)
    for name in sorted(set(members) - set(survivors)):
        key = secret("masks", name)
        if public(key).hex() != keys[name]["mask"]:
            raise wrong(name)
        for other in survivors:
            add_mask(words, pair_seed(key, keys[other], context), -sign_of(other, name))


def pair_seed(key: bytes, keys: Mapping[str, str], context: bytes) -> bytes:
    """Return the seed of the mask of two members, from a private key and the other's public ones."""
    return shared_secret(key, raw(keys["mask"]), b"mask" + context)


def sender_and_receiver(sender: str, receiver: str) -> bytes:
    """Return the words that bind an envelope to its sender and receiver."""
    return f"from {sender} to {receiver}".encode()


def raw(text: str) -> bytes:
    """Return the bytes of hexadecimal text that arrived.

    Raises:
        PacketError: it is no such text.
    """
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise PacketError(f"bytes of a secure sum must be hexadecimal; got {text[:20]!r}.") from None
