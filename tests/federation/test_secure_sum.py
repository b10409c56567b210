"""The secure sum: its arithmetic, what leaves a site, what the server stores, and what a site refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlayers.remote import federation, protocol
from fedlayers.remote.codec import Packet, PacketError, decode, encode
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.policy import Policy
from fedlayers.remote.rpc import RefusedError, TimeoutPolicy
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import PresplitData
from fl_core.algorithms import Algorithm, find, registry
from fl_core.engine import Engine
from fl_core.errors import UsageError
from fl_core.records import store
from fl_core.task import assemble
from tests.conftest import TOY
from tests.federation.test_in_memory import NAMES, config_for

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric import ec

from fedlayers.remote.secure_sum import shamir
from fedlayers.remote.secure_sum.fixed_point import FRACTION_BITS, STEP, decode_mean, encode_tree
from fedlayers.remote.secure_sum.keys import Identity
from fedlayers.remote.secure_sum.members import Member, context_of, remove_masks, threshold

PRIVATE = {name: ec.generate_private_key(ec.SECP384R1()) for name in "abcdefgh"}
PEERS = {name: key.public_key() for name, key in PRIVATE.items()}
WHOLE = replace(config_for("fedavg"), participation=1.0)


def identity(name: str) -> Identity:
    return Identity(name, PRIVATE[name], PEERS)


def sites(folder: Path, **options: Any) -> dict[str, Site]:
    options = {"identity": identity, **options}
    made = {name: {key: each(name) if key == "identity" else each for key, each in options.items()} for name in NAMES}
    return {name: Site(PresplitData(TOY, name), folder / name, **made[name]) for name in NAMES}


# --- arithmetic -----------------------------------------------------------------------------------------------------


def test_any_threshold_of_the_shares_give_the_secret() -> None:
    secret = bytes(range(32))
    shares = dict(enumerate(shamir.make_shares(secret, 3, 5), 1))
    for chosen in combinations(shares, 3):
        assert shamir.combine({x: shares[x] for x in chosen}) == secret
    with pytest.raises(ValueError, match="one secret"):  # two points of a random parabola: any number of 521 bits
        shamir.combine({1: shares[1], 2: shares[2]})


class Unsigned(Identity):
    """An identity for tests of the arithmetic alone."""

    def __init__(self, name: str) -> None:
        self.name = name

    def sign(self, text: bytes) -> bytes:
        return b""

    def check(self, site: str, text: bytes, signature: bytes, what: str) -> None:
        pass


def members(count: int, of: Callable[[str], Identity] = Unsigned) -> tuple[dict[str, Member], dict[str, Any], bytes]:
    group = list("abcdefgh"[:count])
    context = context_of({"sum": "one", "group": group})
    made = {name: Member(of(name), context, group, {}) for name in group}
    return made, {name: member.advertise() for name, member in made.items()}, context


@pytest.mark.tries(1000)
def test_in_1000_patterns_of_dropouts_the_sum_is_exactly_that_of_the_survivors() -> None:
    """A site may be lost before it sends keys, shares, its update, its signature, or the shares that remove masks."""
    draw, few, complete = random.Random(0), 0, 0
    for _ in range(1000):
        count = draw.randint(3, 5)
        group, keys, context = members(count)
        leaves = {name: draw.choice((0, 1, 2, 3, 4, *[5] * 8)) for name in group}
        updates = {name: {"w": torch.randn(3)} for name in group}
        weights = {name: draw.randint(1, 50) for name in group}
        words = {name: encode_tree(updates[name], weights[name], sum(weights.values())) for name in group}
        try:
            keys = {name: each for name, each in keys.items() if leaves[name] > 0}
            shares = {name: group[name].share(keys) for name in keys if leaves[name] > 1}
            for name in shares:
                group[name].receive({other: shares[other][name] for other in shares if other != name})
            survivors = [name for name in shares if leaves[name] > 2]
            masked = {name: words[name].copy() for name in survivors}
            for name in survivors:
                group[name].mask(masked[name])
            agreed = {name: group[name].agree(survivors)["signature"] for name in survivors if leaves[name] > 3}
            revealed = {name: group[name].reveal(agreed) for name in agreed if leaves[name] > 4}
            total = np.sum(list(masked.values()), axis=0, dtype=np.uint64)
            remove_masks(total, context, list(group), keys, shares, survivors, revealed)
        except UsageError:
            assert sum(each > 4 for each in leaves.values()) < threshold(count)
            few += 1
            continue
        expected = [sum(int(words[name].view(np.int64)[k]) for name in survivors) for k in range(3)]
        assert total.view(np.int64).tolist() == expected
        weight = sum(weights[name] for name in survivors)
        mean = decode_mean(total, {"w": torch.zeros(3, dtype=torch.float64)}, weight)["w"]
        assert mean.tolist() == [each * STEP / weight for each in expected]
        exact = sum(weights[name] * updates[name]["w"].double() for name in survivors) / weight
        assert (mean - exact).abs().max() <= STEP
        complete += 1
    assert complete > 300
    assert few > 300


def test_values_that_would_overflow_a_sum_are_refused() -> None:
    largest = 2.0 ** (62 - FRACTION_BITS) / 10
    encode_tree({"w": torch.tensor([largest], dtype=torch.float64)}, 10, 10)
    with pytest.raises(UsageError, match="'w'"):
        encode_tree({"w": torch.tensor([largest * 1.01])}, 1, 10)


def test_one_masked_update_is_uniform() -> None:
    """Chi-square over the values of a byte: 255 degrees of freedom, beyond 350 with probability 0.00007."""
    group, keys, _ = members(3)
    words = encode_tree({"w": torch.zeros(30_000)}, 1, 3)
    plain = chi_square(words)
    shares = {name: member.share(keys) for name, member in group.items()}
    group["a"].receive({other: shares[other]["a"] for other in "bc"})
    group["a"].mask(words)
    assert chi_square(words) < 350 < plain


def chi_square(words: Any) -> float:
    counts = np.bincount(words.view(np.uint8), minlength=256)
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


# --- a hostile server at a site -----------------------------------------------------------------------------------


def with_key(keys: Mapping[str, Any], name: str, **changes: str) -> dict[str, Any]:
    return {**keys, name: {**keys[name], **changes}}


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "too few keys": (lambda k: {name: k[name] for name in "ab"}, "at least 3"),
    "a key twice": (lambda k: with_key(k, "b", mask=k["c"]["mask"]), "twice"),
    "a key of the server": (lambda k: with_key(k, "b", mask="11" * 32), "signed by"),
    "a signature of another site": (lambda k: with_key(k, "b", signature=k["c"]["signature"]), "signed by"),
    "a site that is not in the group": (lambda k: {**k, "f": k["b"]}, "group"),
    "no key of the site itself": (lambda k: {name: k[name] for name in "bcde"}, "group"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_forged_keys_are_refused(forged: str) -> None:
    group, keys, _ = members(5, identity)
    change, reason = FORGED[forged]
    with pytest.raises((PacketError, UsageError), match=reason) as told:
        group["a"].share(change(keys))
    assert "\n" not in str(told.value)
    assert group["a"].share(keys).keys() == set("bcde")


def test_a_signed_key_that_fits_no_other_is_refused_with_the_name_of_its_site() -> None:
    group, keys, _ = members(3, identity)
    weak = {**keys["b"], "mask": "00" * 32}
    weak["signature"] = identity("b").sign(group["b"]._text_to_sign("b", weak)).hex()
    with pytest.raises(PacketError, match="the keys of site 'b'"):
        group["a"].share({**keys, "b": weak})


def test_forged_shares_and_survivors_are_refused() -> None:
    group, keys, _ = members(5)
    shares = {name: member.share(keys) for name, member in group.items()}
    given = {other: shares[other]["a"] for other in "bcde"}
    for wrong, reason in (
        ({**given, "b": given["c"]}, "forged"),
        ({"b": given["b"]}, "at least 3"),
        ({**given, "f": given["b"]}, "'f'"),
    ):
        with pytest.raises((PacketError, UsageError), match=reason):
            group["a"].receive(wrong)
    group["a"].receive(given)
    for survivors, reason in ((["a", "b"], "at least 3"), (["b", "c", "d"], "this site"), (["a", "b", "b"], "a, b, b")):
        with pytest.raises((PacketError, UsageError), match=reason):
            group["a"].agree(survivors)
    signed = dict.fromkeys("abc", "")
    group["a"].agree(list("abc"))
    for wrong, reason in (({"a": "", "b": ""}, "at least 3"), ({**signed, "d": ""}, "'d'")):
        with pytest.raises((PacketError, UsageError), match=reason):
            group["a"].reveal(wrong)
    revealed = group["a"].reveal(signed)
    assert revealed["seeds"].keys() == set("abc")
    assert revealed["masks"].keys() == set("de")


def exchanged(group: Mapping[str, Member], heard: Mapping[str, str] | None = None) -> None:
    """Let all members draw keys and receive shares: from every other one, or from those that a server passes on."""
    keys = {name: member.advertise() for name, member in group.items()}
    shares = {name: member.share(keys) for name, member in group.items()}
    for name, member in group.items():
        passed = (heard or {}).get(name, group)
        member.receive({other: shares[other][name] for other in passed if other != name})


def test_a_server_that_tells_each_member_something_else_gets_no_shares() -> None:
    """The update of a could be read from shares of its seed, and of the keys for masks of the two that it heard of."""
    group, _, _ = members(5, identity)
    exchanged(group, {"a": "bc"})
    told = {"b": "abde", "c": "acde", "d": "ade", "e": "ade"}
    signed = {name: group[name].agree(list(survivors))["signature"] for name, survivors in told.items()}
    for name, survivors in told.items():
        of = [other for other in survivors if other in signed]
        for count in range(1, len(of) + 1):
            for chosen in combinations(of, count):
                with pytest.raises((PacketError, UsageError), match=r"list of survivors of site|must have at least 3"):
                    group[name].reveal({other: signed[other] for other in chosen})


def test_shares_leave_once_more_than_half_have_signed_one_list() -> None:
    group, _, _ = members(5, identity)
    exchanged(group)
    signed = {name: group[name].agree(list("abcd"))["signature"] for name in "abc"}
    assert all(group[name].reveal(signed)["masks"].keys() == {"e"} for name in "abc")
    for forged in (group["b"].identity.sign(b"another text").hex(), signed["c"]):
        with pytest.raises(PacketError, match="list of survivors of site 'b'"):
            group["a"].reveal({**signed, "b": forged})
    exchanged(group)  # the same sum begins again, with other keys
    for name in "abc":
        group[name].agree(list("abcd"))
        with pytest.raises(PacketError, match="list of survivors of site"):
            group[name].reveal(signed)


class Listening(InMemoryTransport):
    """A link that keeps all replies, and site a's last request and reply of each kind. It loses some replies.

    A request to a lost site is delivered; its reply never comes.
    """

    def __init__(self, there: Mapping[str, Any], lost: Mapping[str, str] | None = None) -> None:
        super().__init__(there)
        self.lost, self.replies = dict(lost or {}), list[bytes]()
        self.asked, self.answered = dict[str, bytes](), dict[str, Packet]()

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: Any = None
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, request in requests.items():
            kind = decode(request).head["kind"]
            ((_, reply),) = super().ask({name: request})
            assert reply is not None
            self.replies.append(reply)
            if name == "a":
                self.asked[kind], self.answered[kind] = request, decode(reply)
            yield name, None if kind == self.lost.get(name) else reply


def test_a_site_answers_each_step_once(tmp_path: Path) -> None:
    """Whoever asks again with the same words gets the same reply; with others, a refusal in one line."""
    there = sites(tmp_path)
    line = Listening(there)
    federation.federate(replace(WHOLE, rounds=1), line, progress=False, secure_sum=True)
    wanted, stamp = line.answered, {"session": decode(line.asked["train"]).head["session"], "seq": 10**6}
    for site in (there["a"], sites(tmp_path)["a"]):  # also after a restart
        for kind in ("sum_keys", "sum_shares", "train", "sum_agree", "sum_reveal"):
            packet = decode(line.asked[kind])
            again = decode(site.answer(encode(Packet({**packet.head, **stamp}, packet.trees))))
            assert {**again.head, **stamp} == {**wanted[kind].head, **stamp}
            assert all(each["words"].equal(wanted[kind].trees[name]["words"]) for name, each in again.trees.items())
        for kind, changes in (
            ("sum_shares", {"keys": {}}),
            ("sum_agree", {"survivors": ["a", "b", "c"]}),  # to ask for the other share of d
            ("sum_reveal", {"signatures": {}}),
            ("train", {"lost": False, "score": ["test"]}),
            ("train", {"secure_sum": None}),
            ("sum_shares", {"sum": "another"}),
            ("sum_keys", {"group": ["a", "b"]}),
            ("sum_keys", {"group": ["a", "b", "nobody"]}),
            ("sum_keys", {"lane": "beside-1"}),
        ):
            packet = decode(line.asked[kind])
            reply = decode(site.answer(encode(Packet({**packet.head, **changes, **stamp}, packet.trees))))
            assert reply.head["kind"] == "refused", (kind, changes)
            assert "\n" not in reply.head["reason"]
    (stored,) = (tmp_path / "a").glob("*/secure-sum.json")
    assert json.loads(stored.read_text()).keys() == {"context", "steps"}  # the secrets have gone


def test_scores_of_an_upload_with_tensors_of_the_server_are_refused(tmp_path: Path) -> None:
    """From the losses of such models a server could compute the upload of one client."""
    there = sites(tmp_path)
    line = Listening(there)
    federation.federate(config_for("mr_mtl", rounds=1), line, progress=False, secure_sum=True)
    packet = decode(line.asked["score"])
    ((name, parts),) = packet.head["models"].items()
    assert all(isinstance(part, list) for part in parts.values())  # each tensor is the client's own
    tensor = next(iter(parts))
    mixed = {**parts, tensor: 0}
    start = decode(line.asked["join"]).trees["start"]
    head = {**packet.head, "models": {name: mixed}, "seq": 10**6}
    reply = decode(there["a"].answer(encode(Packet(head, {f"{protocol.SENT}0": {tensor: start[tensor]}}))))
    assert reply.head["kind"] == "refused"
    assert "whole or not at all" in reply.head["reason"]


# --- whole federations ----------------------------------------------------------------------------------------------


def model(engine: Engine) -> dict[str, torch.Tensor]:
    return engine.server.trees["model"]


@pytest.mark.parametrize("name", sorted(name for name, each in registry().items() if each.needs == "sum"))
def test_a_secure_sum_gives_the_plain_mean_within_the_step(name: str, tmp_path: Path) -> None:
    config = config_for(name, rounds=1)
    plain = federation.federate(config, InMemoryTransport(sites(tmp_path / "plain")), progress=False)
    found = federation.federate(config, Listening(sites(tmp_path / "sum")), progress=False, secure_sum=True)
    for key, tensor in model(plain).items():
        assert (tensor - model(found)[key]).abs().max() <= STEP + 2**-24 * tensor.abs().max()
    assert {row["value"] for row in found.rows if row["metric"] == "secure_sum"} == {3.0}
    assert not [row for row in plain.rows if row["metric"] == "secure_sum"]


def test_no_unmasked_update_reaches_the_server(tmp_path: Path) -> None:
    """Neither in a message nor in the run directory. The first updates are those of a plain run, where they do."""
    config = replace(WHOLE, rounds=1)
    names = len(assemble(config, data=TOY).task_info.tensors)
    plain, line = Listening(sites(tmp_path / "a")), Listening(sites(tmp_path / "b"))
    federation.federate(config, plain, tmp_path / "plain", progress=False)
    packets = [decode(reply) for reply in plain.replies]
    updates = [
        tensor.numpy().tobytes()
        for packet in packets
        for tensor in packet.trees.get(protocol.MESSAGE + "model", {}).values()
    ]
    assert len(updates) == len(NAMES) * names
    assert all(any(update in reply for reply in plain.replies) for update in updates)
    federation.federate(config, line, tmp_path / "run", progress=False, secure_sum=True)
    files = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert files
    assert not any(update in data for update in updates for data in (*line.replies, *files))
    local = [file.read_bytes() for file in (tmp_path / "b").rglob("*.state")]
    assert any(updates[0] in data for data in local)  # at its own site it is
    assert store.Run(tmp_path / "run").task_config()["federation"]["secure_sum"] is True


LIMITS = TimeoutPolicy(timeout=5.0)


@pytest.mark.parametrize("kind", ["sum_keys", "sum_shares", "train", "sum_agree", "sum_reveal"])
def test_a_site_that_is_lost_at_any_step_leaves_the_survivors_mean(kind: str, tmp_path: Path) -> None:
    config = replace(WHOLE, rounds=1)
    line = Listening(sites(tmp_path / "sum"), {"c": kind})
    found = federation.federate(config, line, progress=False, secure_sum=True, timeouts=LIMITS)
    summed = {row["client"] for row in found.rows if row["metric"] == "secure_sum"}
    missing = kind not in ("sum_agree", "sum_reveal")  # its update is there
    assert summed == set(NAMES) - ({"c"} if missing else set())
    (tmp_path / "lost.csv").write_text("round,client\n" + "1,c\n" * missing)
    lost = replace(config, dropout_trace=str(tmp_path / "lost.csv"))
    plain = federation.federate(lost, InMemoryTransport(sites(tmp_path / "plain")), progress=False)
    assert all(model(plain)[key].allclose(each, rtol=0, atol=1e-7) for key, each in model(found).items())


@pytest.mark.parametrize("kind", ["sum_keys", "sum_shares", "train", "sum_agree", "sum_reveal"])
def test_too_few_sites_end_in_one_error_and_reveal_nothing(kind: str, tmp_path: Path) -> None:
    line = Listening(sites(tmp_path), dict.fromkeys("bc", kind))
    with pytest.raises(UsageError, match="at least 3") as told:
        federation.federate(WHOLE, line, tmp_path / "run", progress=False, secure_sum=True, timeouts=LIMITS)
    assert "\n" not in str(told.value)
    asked = [decode(reply).head for reply in line.replies]
    assert kind == "sum_reveal" or not any("masks" in head.get("parts", {}) for head in asked)
    assert store.Run(tmp_path / "run").rounds == []


WRONG = {"seeds": dict.fromkeys(NAMES, "01" * 66), "masks": {}}
HOSTILE: dict[str, tuple[str, Callable[[Packet], Packet]]] = {
    "an update of another size": ("train", lambda p: Packet(p.head, {"masked": {"words": torch.arange(3)}})),
    "an update without a mask": ("train", lambda p: Packet(p.head, {"message/model": {}})),
    "shares for nobody": ("sum_shares", lambda p: Packet({**p.head, "parts": {}})),
    "a signature of another list": ("sum_agree", lambda p: Packet({**p.head, "parts": {"signature": "00"}})),
    "shares of another secret": ("sum_reveal", lambda p: Packet({**p.head, "parts": WRONG})),
    "parts of another kind": ("sum_reveal", lambda p: Packet({**p.head, "parts": {"seeds": 3, "masks": {}}})),
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_site_makes_no_sum(hostile: str, tmp_path: Path) -> None:
    kind, change = HOSTILE[hostile]

    class Other(InMemoryTransport):
        def ask(self, requests: Any, timeout: float | None = None, grace: Any = None) -> Any:
            for name, reply in super().ask(requests):
                of = decode(requests[name]).head["kind"]
                yield name, encode(change(decode(reply))) if (name, of) == ("b", kind) else reply

    with pytest.raises((PacketError, RefusedError), match=r"site '.*'b'|site 'b'") as told:  # the one at fault is named
        federation.federate(WHOLE, Other(sites(tmp_path)), tmp_path / "run", progress=False, secure_sum=True)
    assert "\n" not in str(told.value)
    assert store.Run(tmp_path / "run").rounds == []


def test_a_lost_reply_of_a_trace_takes_no_part_in_the_sum(tmp_path: Path) -> None:
    (tmp_path / "lost.csv").write_text("round,client\n1,b\n")
    config = replace(WHOLE, rounds=1, dropout_trace=str(tmp_path / "lost.csv"))
    found = federation.federate(config, Listening(sites(tmp_path)), progress=False, secure_sum=True)
    assert {row["client"] for row in found.rows if row["metric"] == "secure_sum"} == set(NAMES) - {"b"}


def test_a_run_with_a_secure_sum_resumes_with_one(tmp_path: Path) -> None:
    config = replace(WHOLE, checkpoint_every=1)
    federation.federate(config, Listening(sites(tmp_path)), tmp_path / "run", progress=False, secure_sum=True, until=1)
    line = Listening(sites(tmp_path))
    found = federation.resume(tmp_path / "run", line, progress=False)
    assert found.done == 2
    assert {"sum_keys", "sum_shares", "sum_reveal"} <= line.asked.keys()


# --- what is refused before any work ----------------------------------------------------------------------------------


class Silent(InMemoryTransport):
    def ask(self, *_: Any) -> Any:
        raise AssertionError("a site was asked")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "scaffold"}, "'scaffold'"),
        ({"algorithm": "playerfl"}, "'playerfl'"),
        ({"algorithm": "fedper", "plan": "auto"}, "'auto'"),
        ({"participation": 0.5}, "at least 3"),
    ],
)
def test_what_cannot_be_summed_is_refused_before_any_site_is_asked(changes: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason) as told:
        federation.federate(replace(WHOLE, **changes), Silent(sites(tmp_path)), progress=False, secure_sum=True)
    assert "\n" not in str(told.value)


def test_an_algorithm_of_your_own_needs_each_update_unless_it_says_otherwise() -> None:
    class Own(find("fedavg")):  # type: ignore[misc]
        name = "own"

    assert Own.needs == Algorithm.needs == "each"
    with pytest.raises(UsageError, match="'some'"):

        class Wrong(Algorithm):
            name, needs = "wrong", "some"


def test_a_site_may_require_a_secure_sum_and_needs_keys_for_one(tmp_path: Path) -> None:
    strict = sites(tmp_path / "strict", policy=Policy(secure_sum="require"))
    with pytest.raises(RefusedError, match="--secure-sum"):
        federation.federate(WHOLE, InMemoryTransport(strict), progress=False)
    federation.federate(replace(WHOLE, rounds=1), InMemoryTransport(strict), progress=False, secure_sum=True)
    bare = sites(tmp_path / "bare", identity=lambda _: None)
    with pytest.raises(RefusedError, match="key"):
        federation.federate(WHOLE, InMemoryTransport(bare), progress=False, secure_sum=True)
    alone = sites(tmp_path / "alone", identity=lambda name: Identity(name, PRIVATE[name], {}))
    with pytest.raises(RefusedError, match=r"[bcd]\.pub"):
        federation.federate(WHOLE, InMemoryTransport(alone), progress=False, secure_sum=True)
    with pytest.raises(UsageError, match="'never'"):
        Policy(secure_sum="never")
