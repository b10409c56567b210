"""What may go wrong between a server and its sites: kills, doubles, latecomers, and messages made by hand."""

from __future__ import annotations

import errno
import gc
import json
import pickle
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlayers.remote import federation, protocol
from fedlayers.remote.codec import MAGIC, Packet, PacketError, decode, encode
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.policy import MEGABYTE, Policy
from fedlayers.remote.rpc import RefusedError, TimeoutPolicy, traffic_by_site
from fedlayers.remote.sent_log import SENT, SentLog
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import PresplitData
from fl_core import models, runner, tree
from fl_core.algorithms import Algorithm
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.errors import RunError, UsageError
from fl_core.plan import LayerPlan
from fl_core.records import store
from fl_core.storage.files import Folder, sign
from fl_core.stored_models import load_models
from tests.conftest import TOY, federation as toy, play
from tests.federation.test_in_memory import NAMES, SHORT, comparable, config_for, link, server

LONG = replace(SHORT, rounds=4, checkpoint_every=2)


class Killed(BaseException):
    """The server is gone."""


class Faulty:
    """A link whose sites are asked twice, or asked anew from their folders, or whose server is killed in between."""

    def __init__(self, folder: Path, at: int | None = None, twice: bool = False, fresh: bool = False) -> None:
        self.sites, self.folder, self.at, self.twice, self.fresh = tuple(NAMES), folder, at, twice, fresh
        self.count, self.trained = 0, 0
        self.there = {name: self.site(name) for name in NAMES}

    def site(self, name: str) -> Site:
        return Site(PresplitData(TOY, name), self.folder / name)

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: Any = None
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, request in requests.items():
            self.count += 1
            if self.fresh:
                self.there[name] = self.site(name)
            reply = self.there[name].answer(request)
            if self.twice:
                assert self.there[name].answer(request) == reply
                yield name, reply
            if self.count == self.at:
                raise Killed
            yield name, reply

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", ["playerfl", "local_adaptation"])
def test_a_site_that_is_asked_twice_or_starts_again_each_time_gives_the_same(name: str, tmp_path: Path) -> None:
    wanted = federation.federate(config_for(name), link(tmp_path / "a"), progress=False)
    for kind in ("twice", "fresh"):
        faulty = Faulty(tmp_path / kind, **{kind: True})  # type: ignore[arg-type]
        found = federation.federate(config_for(name), faulty, progress=False)
        assert comparable(found.rows) == comparable(wanted.rows)
        assert server(found) == server(wanted)


def test_a_site_that_forgets_large_models_reads_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has room for one run. Another one comes in between; the first goes on from the site's files."""
    monkeypatch.setattr("fedlayers.remote.site.MOST_HELD", 0)
    config, sites = config_for("ditto"), Faulty(tmp_path / "sites")
    wanted = federation.federate(config, link(tmp_path / "a"), progress=False)
    federation.federate(config, sites, tmp_path / "run", until=1, progress=False)
    first = [weakref.ref(joined.home) for site in sites.there.values() for joined in site._joined.values()]
    gc.disable()  # what is forgotten leaves memory at once
    try:
        federation.federate(replace(config, seed=1), sites, tmp_path / "other", progress=False)
        assert [home() for home in first] == [None] * len(NAMES)
    finally:
        gc.enable()
    found = federation.resume(tmp_path / "run", sites, progress=False)
    assert server(found) == server(wanted)
    assert [len(site._joined) for site in sites.there.values()] == [1] * len(NAMES)


@pytest.mark.parametrize(("name", "at"), [("playerfl", 27), ("ditto", 20), ("fedper", 34)])
def test_a_server_killed_in_the_middle_goes_on_bit_for_bit(name: str, at: int, tmp_path: Path) -> None:
    config = replace(config_for(name), rounds=4, checkpoint_every=2)
    federation.federate(config, link(tmp_path / "s"), tmp_path / "whole" / "run", progress=False)
    out = tmp_path / "killed" / "run"
    with pytest.raises(Killed):
        federation.federate(config, Faulty(tmp_path / "t", at=at), out, progress=False)
    before = store.Run(out).rounds
    found = federation.resume(out, Faulty(tmp_path / "t"), progress=False)
    assert before in ([], [2])
    assert found.done == 4
    whole = tmp_path / "whole" / "run"
    assert (out / "rows.jsonl").read_bytes() == (whole / "rows.jsonl").read_bytes()
    blobs = [{file.name for file in (each / "blobs").iterdir()} for each in (out, whole)]
    assert blobs[0] == blobs[1]
    store.Run(out).verify()
    ordinary = runner.run(config, tmp_path / "ordinary" / "run", data=TOY, instruments=instruments(), progress=False)
    assert server(ordinary) == server(found)
    assert (tmp_path / "ordinary" / "run" / "rows.jsonl").read_bytes().splitlines()[1:] == (
        (out / "rows.jsonl").read_bytes().splitlines()[1:]
    )


def instruments() -> Any:
    from diagnostics.measure import instruments

    return instruments()


def test_a_federations_directory_has_no_clients_tensors_and_says_where_they_are(tmp_path: Path) -> None:
    out = tmp_path / "run"
    federation.federate(config_for("fedper"), link(tmp_path / "s"), out, progress=False)
    checkpoint = store.Run(out).checkpoint()
    assert not any(state.trees for state in checkpoint.clients.values())
    assert checkpoint.models == {}
    heads = [each for name in NAMES for each in (tmp_path / "s" / name).rglob("*.state")]
    assert len(heads) >= len(NAMES)
    for act in (lambda: runner.resume(out), lambda: load_models(out, which="personal")):
        with pytest.raises(UsageError, match="a, b, c, d"):
            act()
    runner.run(SHORT, tmp_path / "ordinary", data=TOY, progress=False)
    with pytest.raises(UsageError, match="fedlayers resume"):
        federation.resume(tmp_path / "ordinary", link(tmp_path / "t"))


# --- hello ---------------------------------------------------------------------------------------------------------


def refused(sites: Mapping[str, Any], config: RunConfig = SHORT) -> str:
    with pytest.raises((UsageError, RunError)) as told:
        federation.federate(config, InMemoryTransport(sites), progress=False)
    assert "\n" not in str(told.value)
    return str(told.value)


def sites_of(folder: Path, **others: FederatedData) -> dict[str, Site]:
    return {name: Site(PresplitData(others.get(name, TOY), name), folder / name) for name in NAMES}


def test_what_does_not_fit_is_refused_at_hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[1, 5, 5]" in refused(sites_of(tmp_path, b=toy(shape=(1, 5, 5))))
    assert "'c'" in refused(sites_of(tmp_path, c=toy(classes=4)))
    swapped = sites_of(tmp_path)
    swapped["a"], swapped["b"] = swapped["b"], swapped["a"]
    assert "got 'b'" in refused(swapped)
    few = {name: Site(PresplitData(TOY, name), tmp_path / name, Policy(least_samples=40)) for name in NAMES}
    assert "got 30" in refused(few)
    only = {name: Site(PresplitData(TOY, name), tmp_path / name, Policy(algorithms=("fedper",))) for name in NAMES}
    assert "'fedavg'" in refused(only)
    hello = {"kind": "hello", "version": "0.1", "session": "", "seq": 1}
    for newest, oldest in ((protocol.OLDEST - 1, 0), (protocol.PROTOCOL + 2, protocol.PROTOCOL + 1)):
        other = Packet({**hello, "protocol": newest, "oldest": oldest})
        assert "fedlayers 0.1" in told(Site(PresplitData(TOY, "a"), tmp_path / "a"), other)
    for head in ({"protocol": 1}, {"protocol": 9, "oldest": 9, "later": 1}):  # an older hello, and a later one
        assert "fedlayers 0.1" in told(Site(PresplitData(TOY, "a"), tmp_path / "a"), Packet({**hello, **head}))


def test_another_version_that_speaks_the_same_protocol_takes_part(tmp_path: Path) -> None:
    more: dict[str, Any] = {}

    class Other(InMemoryTransport):
        def ask(self, requests: Any, timeout: float | None = None, grace: Any = None) -> Any:
            for site, reply in super().ask(requests, timeout):
                packet = decode(reply)
                if packet.head["kind"] == "hello":
                    packet.head |= {"version": "0.1", "torch": "2.0", "protocol": protocol.PROTOCOL + 1, **more}
                yield site, encode(packet)

    with pytest.warns(UserWarning, match=r"'a'.*torch 2\.0"), pytest.warns(UserWarning, match=r"'a'.*fedlayers 0\.1"):
        found = federation.federate(config_for("fedavg"), Other(sites_of(tmp_path)), progress=False)
    assert server(found) == server(federation.federate(config_for("fedavg"), link(tmp_path / "b"), progress=False))
    more |= {"oldest": protocol.PROTOCOL + 1, "later": 1}
    with pytest.raises(UsageError, match=r"'a'.*0\.1"):
        federation.federate(config_for("fedavg"), Other(sites_of(tmp_path)), progress=False)


def test_code_of_the_servers_choice_is_not_imported(tmp_path: Path) -> None:
    for config in (
        replace(SHORT, model="tests.federation.trap:model", model_options={}),
        replace(SHORT, loss="cross_entropy", algorithm="vanilla", options={"base": "tests.federation.trap:Algorithm"}),
    ):
        packet = joining(tmp_path, config={**joined_config(), **changed(config)})
        assert "'tests.federation.trap" in told(Site(PresplitData(TOY, "a"), tmp_path / "a"), packet)


def changed(config: RunConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in ("model", "model_options", "algorithm", "options")}


# --- messages made by hand -----------------------------------------------------------------------------------------


def told(site: Site, packet: Packet | bytes) -> str:
    """The reason for which a site refuses, whatever it is sent."""
    reply = decode(site.answer(packet if isinstance(packet, bytes) else encode(packet)))
    assert reply.head["kind"] == "refused", reply.head
    return str(reply.head["reason"])


class Listening(InMemoryTransport):
    """A loopback that remembers what was asked, and may have one site answer something else."""

    def __init__(self, folder: Path, instead: Callable[[Packet], bytes] | None = None, at: str = "train") -> None:
        super().__init__(sites_of(folder))
        self.asked: dict[str, bytes] = {}
        self.instead, self.at = instead, at

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: Any = None
    ) -> Iterator[tuple[str, bytes | None]]:
        kinds = {decode(request).head["kind"] for request in requests.values()}
        for site, reply in super().ask(requests, timeout):
            for kind in kinds:
                self.asked.setdefault(kind, requests["a"] if "a" in requests else next(iter(requests.values())))
            if self.instead and self.at in kinds and site == "b" and reply is not None:
                yield site, self.instead(decode(reply))
            else:
                yield site, reply


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("listening")
    line = Listening(folder)
    federation.federate(replace(SHORT, participation=1.0, rounds=1), line, progress=False)
    return folder, line.asked


def joined_config() -> dict[str, Any]:
    task = runner.assemble(SHORT, data=TOY)
    return {key: value for key, value in task.config.to_json().items() if key not in (*federation.HERE, "dataset")}


def joining(tmp_path: Path, **changes: Any) -> Packet:
    line = Listening(tmp_path / "joining")
    federation.federate(SHORT, line, progress=False)
    packet = decode(line.asked["join"])
    return Packet({**packet.head, **changes}, packet.trees)


W = "body.0.weight"


def with_tree(packet: Packet, change: Callable[[tree.Tree], tree.Tree]) -> bytes:
    return encode(Packet(packet.head, {name: change(dict(each)) for name, each in packet.trees.items()}))


def first(each: tree.Tree) -> str:
    return sorted(each)[0]


def doubled(each: tree.Tree) -> tree.Tree:
    return {name: tensor.double() for name, tensor in each.items()}


def without(head: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in head.items() if key not in keys}


def raw(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text + body


FORGED: dict[str, tuple[Callable[[Packet], bytes], str]] = {
    "a pickle": (lambda p: pickle.dumps({"kind": "train"}), "mark"),
    "nothing": (lambda p: b"", "mark"),
    "a head that is longer than all": (lambda p: MAGIC + (10**9).to_bytes(8, "little") + b"{}", "at most"),
    "no JSON": (lambda p: MAGIC + (2).to_bytes(8, "little") + b"{x", "head"),
    "deep JSON": (lambda p: MAGIC + (400).to_bytes(8, "little") + b"[" * 200 + b"]" * 200, "nested"),
    "a list": (lambda p: raw({"kind": 3}), "kind"),
    "NaN in the head": (lambda p: raw({**p.head, "trees": [], "seq": float("nan")}), "finite"),
    "an unknown key": (lambda p: encode(Packet({**p.head, "code": "os:system"}, p.trees)), "'code'"),
    "a missing key": (lambda p: encode(Packet(without(p.head, "work", "lane"), p.trees)), "missing"),
    "another type": (lambda p: encode(Packet({**p.head, "meta": "none"}, p.trees)), "meta.*'none'"),
    "another name": (lambda p: with_tree(p, lambda t: {**t, "evil": torch.ones(1)}), "'evil'"),
    "another shape": (lambda p: with_tree(p, lambda t: {**t, first(t): torch.ones(10)}), r"got \[10\]"),
    "another type of number": (lambda p: with_tree(p, doubled), "got torch.float64"),
    "NaN": (lambda p: with_tree(p, lambda t: {**t, first(t): t[first(t)] * torch.nan}), "finite"),
    "infinity": (lambda p: with_tree(p, lambda t: {**t, first(t): t[first(t)] + torch.inf}), "finite"),
    "tensors cut short": (lambda p: encode(p)[:-7], "tensors"),
    "a strange name of a tree": (lambda p: encode(Packet(p.head, {"../x\n": {}})), "name of"),
}  # fmt: skip


def with_head(packet: Packet, **values: Any) -> bytes:
    return encode(Packet({**packet.head, **values}, packet.trees))


def observed(**values: Any) -> list[dict[str, Any]]:
    return [{"metric": "m", "value": 1.0, "client": 1, "client_b": None, "layer": "", "variant": "", **values}]


def with_names(packet: Packet, **trees: list[str]) -> bytes:
    """Add names to the trees of a client's state."""
    found = packet.head["outline"]
    more = {tree: [*found["trees"].get(tree, ()), *names] for tree, names in trees.items()}
    return with_head(packet, outline={**found, "trees": {**found["trees"], **more}})


def with_score(packet: Packet, split: str = "validation", **values: Any) -> bytes:
    """Change scores of the first model of a reply; ``...`` removes one."""
    model, found = next(iter(packet.head["scores"].items()))
    changed = {name: value for name, value in {**found["validation"], **values}.items() if value is not ...}
    return with_head(packet, scores={**packet.head["scores"], model: {**found, split: changed}})


OF_SITES: dict[str, tuple[Callable[[Packet], bytes], str]] = {
    "no update": (lambda p: encode(Packet(p.head)), "update of.*fc1"),
    "an update without a tensor": (lambda p: with_tree(p, lambda t: without(t, first(t))), "update of.*fc1"),
    "a mask as a model": (lambda p: with_tree(p, lambda t: {**t, first(t): t[first(t)].bool()}), "got torch.bool"),
    "an observation of a client that is not there": (
        lambda p: with_head(p, observations=observed(client_b=10**9)), "client_b.*got 1000000000"),
    "an observation of another client": (lambda p: with_head(p, observations=observed(client=0)), "of client 1; got 0"),
    "an observation of no client": (lambda p: with_head(p, observations=observed(client=None)), "client must be"),
    "an observation that is the federation's": (
        lambda p: with_head(p, observations=observed(metric="secure_sum")), "of m, accuracy; got 'secure_sum'"),
    "an observation that no row has": (
        lambda p: with_head(p, observations=observed(metric="accuracy", value=5.0)), "no accuracy has the value 5"),
    "an observation of a long layer": (
        lambda p: with_head(p, observations=observed(layer="x" * 201)), "200 printable"),
    "an observation that moves a cursor": (
        lambda p: with_head(p, observations=observed(variant="\x1b[2J")), "200 printable"),
    "too many observations": (
        lambda p: with_head(p, observations=observed() * (protocol.MOST_OBSERVATIONS + 1)), "20,000; got 20,001"),
    "too much work": (
        lambda p: with_head(p, work={**p.head["work"], **{f"train/loss/{k}": 0 for k in range(1000)}}), "1,000; got"),
    "a state without a tree": (lambda p: with_head(p, outline={"trees": {}, "changed": []}), "the tree 'model'"),
    "a state with a tensor of no model": (lambda p: with_names(p, model=["junk"]), "tensors of the model; got 'junk'"),
    "a state with many tensors": (
        lambda p: with_names(p, optimizer=[f"junk{k}" for k in range(50_000)]), "names in.*got 50,"),
    "a state with many trees": (
        lambda p: with_names(p, **{f"junk{k}": [] for k in range(50_000)}), "names in.*got 50,"),
    "a state with a long name": (lambda p: with_names(p, junk=["x" * 201]), "200 printable"),
    "a state with a long tree": (lambda p: with_names(p, **{"x" * 201: []}), "200 printable"),
    "a state with changed data of a long name": (
        lambda p: with_head(p, outline={**p.head["outline"], "changed": ["x" * 201]}), "200 printable"),
    "no scores": (lambda p: with_head(p, scores={}), "of the models"),
    "scores of another split": (lambda p: with_score(p, split="train"), "on validation, test; got"),
    "a score that is missing": (lambda p: with_score(p, loss=...), "must include loss"),
    "a score that is unknown": (lambda p: with_score(p, charm=1.0), "unknown score.*'charm'"),
    "a share above 1": (lambda p: with_score(p, macro_f1=1e308), "macro_f1 must be between 0 and 1; got 1e"),
    "a loss that is no number": (lambda p: with_score(p, loss=None), "loss must be finite; got nan"),
    "three numbers of privacy": (lambda p: with_head(p, epsilon=[1, 2, 3]), "two numbers"),
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
def test_a_hostile_server_is_refused_by_a_site(forged: str, asked: tuple[Path, dict[str, bytes]]) -> None:
    folder, requests = asked
    make, reason = FORGED[forged]
    site = Site(PresplitData(TOY, "a"), folder / "a")
    before, sent = files_of(folder / "a"), SentLog(folder / "a").check()[0]
    train = decode(requests["train"])
    text = told(site, make(Packet({**train.head, "seq": 10**6}, train.trees)))  # in its turn
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(text)
    assert files_of(folder / "a") == before
    assert [line["reply"] for line in SentLog(folder / "a").check()[0][len(sent) :]] == ["refused"]


def files_of(folder: Path) -> dict[Path, bytes]:
    """The files of a site without the list of its replies, which also has refusals."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != SENT}


@pytest.mark.parametrize("forged", FORGED | OF_SITES)
def test_a_hostile_site_is_told_of_by_name_and_changes_nothing(
    forged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, reason = (FORGED | OF_SITES)[forged]
    out = tmp_path / "run"
    monkeypatch.setattr(Algorithm, "observes", ("m", "accuracy"))
    with pytest.raises(PacketError, match=reason) as told:
        federation.federate(replace(SHORT, rounds=1, participation=1.0), Listening(tmp_path, make), out, progress=False)
    assert "site 'b'" in str(told.value)
    assert store.Run(out).rounds == []


@pytest.mark.parametrize("count", [10**8, 10**12, 2**62])
def test_a_site_cannot_claim_samples_beyond_the_servers_memory(count: int, tmp_path: Path) -> None:
    class Claiming(Listening):
        def ask(self, requests: Mapping[str, bytes], *rest: Any) -> Iterator[tuple[str, bytes | None]]:
            for site, reply in super().ask(requests, *rest):
                packet = decode(reply or b"")
                yield site, with_head(packet, sizes={**packet.head["sizes"], "test": count}) if site == "b" else reply

    with pytest.raises(UsageError, match="site 'b' must have at most 10,000,000 samples"):
        federation.federate(SHORT, Claiming(tmp_path), progress=False)


def test_a_site_forges_no_rows_where_an_algorithm_observes_nothing(tmp_path: Path) -> None:
    line = Listening(tmp_path, lambda p: with_head(p, observations=observed(metric="reply_lost")), "score")
    with pytest.raises(PacketError, match=r"site 'b'.*left out; got 'reply_lost'"):
        federation.federate(replace(SHORT, rounds=1), line, progress=False)


def test_a_site_that_hides_its_state_is_told_of_by_name(tmp_path: Path) -> None:
    line = Listening(tmp_path, lambda p: with_head(p, outline={"trees": {}, "changed": []}))
    with pytest.raises(PacketError, match="state of site 'b' must have the tensor"):
        federation.federate(replace(SHORT, algorithm="fedper", participation=1.0), line, progress=False)


def test_a_site_does_not_do_what_it_is_asked_out_of_turn(asked: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    folder, requests = asked
    site = Site(PresplitData(TOY, "a"), Path(shutil.copytree(folder / "a", tmp_path / "a")))
    train, join = decode(requests["train"]), decode(requests["join"])
    train.head["seq"] = 10**6
    join.head["session"] = train.head["session"] = "f" * 32
    assert decode(site.answer(encode(join))).head["kind"] == "joined"

    def changed(**values: Any) -> Packet:
        return Packet({**train.head, **values}, train.trees)

    assert "joined" in told(site, changed(run="0" * 32))
    assert "joined" in told(site, changed(run="../../b"))
    assert "'000009-train'" in told(site, changed(**{"from": "000009-train"}))
    assert "version" in told(site, changed(to="../../../x", seq=10**6))
    assert "'../x'" in told(site, changed(lane="../x"))
    others = {**train.head["round"], "sampled": [1, 2]}
    assert "client" in told(site, changed(round=others))
    assert "'shell'" in told(site, changed(kind="shell"))
    for other in ("fedavgg", "os:system"):
        reason = told(site, changed(algorithm=other))
        assert "joined" in reason
        assert repr(other) in reason
    assert "'000001-train'" in told(site, changed(to="000001-again"))
    assert decode(site.answer(encode(changed(meta={"n": 1})))).head["kind"] == "done"
    assert "once" in told(site, changed(meta={"n": 2}))
    for again in (site, Site(PresplitData(TOY, "a"), tmp_path / "a")):  # also after a restart
        assert "number" in told(again, changed(seq=1, meta={"n": 2}))


def test_a_run_joins_again_only_with_what_it_has_joined_with(tmp_path: Path) -> None:
    """Otherwise a server could have the head that FedPer keeps uploaded by FedAvg, or under another plan."""
    line = Listening(tmp_path / "s")
    config = replace(SHORT, algorithm="playerfl", plan="auto", participation=1.0, rounds=2)
    federation.federate(config, line, instruments=instruments(), progress=False)
    site, join = Site(PresplitData(TOY, "a"), tmp_path / "s" / "a"), decode(line.asked["join"])
    join.head["session"] = "f" * 32
    for key, value in (
        ("config", {**join.head["config"], "algorithm": "fedavg"}),
        ("config", {**join.head["config"], "rounds": 3}),
        ("sites", join.head["sites"][:2]),
        ("secure_sum", True),
    ):
        reason = told(site, Packet({**join.head, key: value}, join.trees))
        assert f"got another {key}." in reason
    stored = json.loads((tmp_path / "s" / "a" / join.head["run"] / "plan.json").read_text())
    assert decode(site.answer(encode(join))).head["kind"] == "joined"
    train = decode(line.asked["train"])
    train.head |= {"session": "f" * 32, "seq": 10**6}
    plan = LayerPlan.from_json(stored)
    for other in (plan.with_shared(tuple(layer.name for layer in plan.layers)), plan.with_shared(())):
        if other.shared != plan.shared:
            assert "chosen" in told(site, Packet({**train.head, "plan": other.to_json()}, train.trees))


@pytest.mark.parametrize("kind", ["join", "train", "score"])
def test_what_an_earlier_server_asked_is_not_done_again(kind: str, tmp_path: Path) -> None:
    """A request of before the resume comes once more. The site keeps its states, and the run goes on."""
    first, sites = Listening(tmp_path / "s"), tmp_path / "s"
    config = replace(LONG, algorithm="fedper", participation=1.0, checkpoint_every=1)
    federation.federate(config, first, tmp_path / "run", until=1, progress=False)
    second = Listening(sites)
    federation.resume(tmp_path / "run", second, until=2, progress=False)
    site = Site(PresplitData(TOY, "a"), sites / "a")
    before, request = files_of(sites / "a"), decode(first.asked[kind])
    changed = {"meta": {"n": 1}} if kind == "train" else {}  # an answered request has its stored reply
    assert "earlier one" in told(site, Packet({**request.head, **changed}, request.trees))
    assert files_of(sites / "a") == before
    found = federation.resume(tmp_path / "run", second, progress=False)
    assert server(found) == server(federation.federate(config, link(tmp_path / "t"), progress=False))


def test_a_refusal_of_an_earlier_request_does_not_end_a_run(tmp_path: Path) -> None:
    class Replaying(Listening):
        def ask(self, requests: Mapping[str, bytes], *rest: Any) -> Iterator[tuple[str, bytes | None]]:
            for site, reply in super().ask(requests, *rest):
                yield site, encode(Packet({"kind": "refused", "reason": "old", "session": "s", "seq": 0}))
                yield site, reply

    found = federation.federate(config_for("fedavg"), Replaying(tmp_path / "a"), progress=False)
    assert server(found) == server(federation.federate(config_for("fedavg"), link(tmp_path / "b"), progress=False))


def test_many_runs_do_not_fill_the_disk_of_a_site(tmp_path: Path) -> None:
    line = Listening(tmp_path / "s")
    federation.federate(replace(SHORT, participation=1.0, rounds=1), line, progress=False)
    join, folder = decode(line.asked["join"]), tmp_path / "a"
    size = len(line.asked["join"])
    site = Site(PresplitData(TOY, "a"), folder, Policy(disk=4 * size / MEGABYTE))  # type: ignore[arg-type]
    kinds = []
    for number in range(20):
        packet = Packet({**join.head, "run": f"{number:032x}"}, join.trees)
        kinds.append(decode(site.answer(encode(packet))).head["kind"])
    assert kinds[0] == "joined"
    assert "[policy] disk" in told(site, packet)
    assert sum(file.stat().st_size for file in folder.rglob("join")) < 6 * size
    train = decode(line.asked["train"])
    stats = {"algorithm": "playerfl", "round": {**train.head["round"], "exchange": "stats"}, "to": "000001-stats"}
    for lane in ("beside-1", "beside-2"):  # a state for each lane
        found = told(site, Packet({**train.head, "run": "0" * 32, **stats, "lane": lane}, train.trees))
        assert "[policy] disk" in found


def test_what_failed_after_training_is_trained_from_the_same_state_when_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Listening(tmp_path / "listening")
    federation.federate(replace(SHORT, algorithm="fedper", participation=1.0, rounds=1), line, progress=False)
    sites = [Site(PresplitData(TOY, "a"), tmp_path / name) for name in ("whole", "failing")]
    for site in sites:
        site.answer(line.asked["join"])
    with monkeypatch.context() as patch:
        patch.setattr("fedlayers.remote.joined_run.check_trees", lambda *_: raise_from("cannot send"))
        assert "cannot send" in told(sites[1], line.asked["train"])
    wanted, found = (decode(site.answer(line.asked["train"])) for site in sites)
    assert found.trees.keys() == wanted.trees.keys()
    assert all(tree.digest(found.trees[name]) == tree.digest(wanted.trees[name]) for name in wanted.trees)


def disk_full(at: int, asked: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Fail write number ``at`` of a site while it answers. Return the kind of its reply, and the number of writes."""
    count = 0

    def failing(way: Callable[..., None]) -> Callable[..., None]:
        def write(folder: Folder, name: str, *data: bytes) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise OSError(errno.ENOSPC, "No space left on device", name)
            way(folder, name, *data)

        return write

    with monkeypatch.context() as patch:
        for way in ("write", "append"):
            patch.setattr(Folder, way, failing(getattr(Folder, way)))
        return str(decode(asked()).head["kind"]), count


@pytest.mark.parametrize("at", range(1, 7))
def test_a_full_disk_at_a_site_fails_and_asking_again_gives_the_same(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Listening(tmp_path / "listening")
    federation.federate(replace(SHORT, algorithm="fedper", participation=1.0, rounds=1), line, progress=False)
    whole, full = (Site(PresplitData(TOY, "a"), tmp_path / name) for name in ("whole", "full"))
    for site in (whole, full):
        site.answer(line.asked["join"])
    kind, writes = disk_full(at, lambda: full.answer(line.asked["train"]), monkeypatch)
    assert (kind, writes >= at) == ("failed", True)
    assert disk_full(0, lambda: whole.answer(line.asked["train"]), monkeypatch) == ("done", 6), "all writes are tried"
    wanted, found = (decode(site.answer(line.asked["train"])) for site in (whole, full))
    assert found.head["kind"] == "done"
    assert {name: tree.digest(each) for name, each in found.trees.items()} == {
        name: tree.digest(each) for name, each in wanted.trees.items()
    }
    names = {site.folder: sorted(path.name for path in site.folder.rglob("*.*")) for site in (whole, full)}
    assert names[full.folder] == names[whole.folder], "no part of a file is left"


def test_scores_alone_come_back_where_scores_are_asked_for(tmp_path: Path) -> None:
    def tensors(reply: Packet) -> bytes:
        return encode(Packet(reply.head, {"message/model": {"x": torch.ones(1)}}))

    def invented(reply: Packet) -> bytes:
        return encode(Packet({**reply.head, "scores": {"global": {"test": {"sesame": 1.0}}}}))

    for make, reason in ((tensors, "'x'"), (invented, "'sesame'")):
        with pytest.raises(PacketError, match=reason):
            federation.federate(SHORT, Listening(tmp_path / reason[:4], make, "score"), progress=False)


def test_a_site_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="digest"):
        raise_from(told(Site(PresplitData(TOY, "a"), tmp_path / "a"), joining(tmp_path, model="0" * 64)))
    assert "layers" in told(Site(PresplitData(TOY, "a"), tmp_path / "a"), joining(tmp_path, layers=["x"]))
    assert "data_root" in told(
        Site(PresplitData(TOY, "a"), tmp_path / "a"), joining(tmp_path, config={**joined_config(), "data_root": "/"})
    )
    assert "site 2" in told(Site(PresplitData(TOY, "a"), tmp_path / "a"), joining(tmp_path, number=2))


def raise_from(text: str) -> None:
    raise RefusedError(text)


# --- who does not answer -------------------------------------------------------------------------------------------


class Deaf(InMemoryTransport):
    """Site c answers nothing in the second round, or late: with the reply to what it was asked before."""

    def __init__(self, folder: Path, late: bool = False, wakes: int = 10**6) -> None:
        super().__init__(sites_of(folder))
        self.late, self.wakes, self.timeouts = late, wakes, 0
        self.before: bytes | None = None
        self.grace: tuple[int, float] | None = None

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: Any = None
    ) -> Iterator[tuple[str, bytes | None]]:
        for site, request in requests.items():
            head = decode(request).head
            second = head["kind"] == "train" and head["round"]["index"] == 1
            if site == "c" and second and self.timeouts < self.wakes:
                assert timeout == 5.0
                assert grace == (self.grace if len(requests) == 1 else self.grace and (4, 2.0))
                self.timeouts += 1
                if self.late and self.before is not None:
                    yield site, self.before
                yield site, None
                continue
            for name, reply in super().ask({site: request}, timeout):
                if site == "c":
                    self.before = reply
                yield name, reply


def test_a_site_that_is_lost_at_the_start_ends_the_wait(tmp_path: Path) -> None:
    class Lost(InMemoryTransport):
        def ask(self, requests: Any, timeout: float | None = None, grace: Any = None) -> Any:
            assert timeout == 9.0
            for site in requests:
                yield site, None

    limits = TimeoutPolicy(start=9.0)
    with pytest.raises(UsageError, match=r"'a'.*answer"):
        federation.federate(config_for("fedavg"), Lost(sites_of(tmp_path)), timeouts=limits, progress=False)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "playerfl"])
def test_who_does_not_answer_is_left_out_and_named_as_a_lost_reply_is(name: str, late: bool, tmp_path: Path) -> None:
    config = replace(config_for(name), participation=1.0, rounds=3)
    timeouts = TimeoutPolicy(min_replies=2, timeout=5.0)
    found = federation.federate(config, Deaf(tmp_path, late), timeouts=timeouts, progress=False)
    lost = [(row["round"], row["client"], row["variant"]) for row in found.rows if row["metric"] == "reply_lost"]
    assert lost == [(2, "c", "timeout")]
    wanted = play(
        config, data=TOY, model=models.build("mlp", (1, 6, 6), 3, seed=0, options=config.model_options), trace=[(2, 2)]
    )
    assert server(found) == {name: tree.digest(each) for name, each in wanted.engine.server.trees.items()}


@pytest.mark.parametrize("grace", [False, True])
def test_the_least_number_of_replies_is_waited_for(grace: bool, tmp_path: Path) -> None:
    config = replace(config_for("fedavg"), participation=1.0)
    wanted = federation.federate(config, link(tmp_path / "a"), progress=False)
    deaf = Deaf(tmp_path / "b", wakes=3)
    deaf.grace = (1, 2.0) if grace else None  # when it is asked again, one reply is lacking
    limits = TimeoutPolicy(min_replies=4, timeout=5.0, grace=2.0 if grace else None)
    found = federation.federate(config, deaf, timeouts=limits, progress=False)
    assert deaf.timeouts == 3
    assert comparable(found.rows) == comparable(wanted.rows)
    assert server(found) == server(wanted)


def test_every_byte_that_leaves_a_site_is_told(tmp_path: Path) -> None:
    out, line = tmp_path / "run", link(tmp_path / "s")
    federation.federate(replace(SHORT, checkpoint_every=1), line, out, progress=False)
    table = traffic_by_site(out)
    assert table["all"].to_dict() == line.received
    assert list(table.columns) == ["hello", "join", "score", "train", "all"]
    with pytest.raises(UsageError, match="federation's"):
        traffic_by_site(tmp_path)


def test_a_forged_or_damaged_directory_of_a_federation_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    federation.federate(SHORT, link(tmp_path / "s"), out, progress=False)
    others = {name: Site(PresplitData(toy(seed=1), name), tmp_path / "t" / name) for name in NAMES}
    with pytest.raises(UsageError, match="site 'a'"):
        federation.resume(out, InMemoryTransport(others), progress=False)
    fewer = InMemoryTransport({name: Site(PresplitData(TOY, name), tmp_path / "s" / name) for name in NAMES[:3]})
    with pytest.raises(UsageError, match="a, b, c, d"):
        federation.resume(out, fewer, progress=False)
    config = json.loads((out / "config.json").read_text())
    config.pop("sha256")
    config["federation"]["sites"] = "all"
    (out / "config.json").write_bytes(sign(config))
    (out / "manifest.json").unlink()
    for file in (out / "checkpoints").iterdir():
        file.unlink()
    with pytest.raises(RunError, match=r"federation\.sites.*'all'"):
        federation.resume(out, link(tmp_path / "s"), progress=False)
