"""What a site's owner allows, the list of what has left a site, and what a server stores of its progress."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlayers.cli.main import main
from fedlayers.remote import federation, log, rpc
from fedlayers.remote.codec import Packet, PacketError, decode, encode
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.policy import Policy
from fedlayers.remote.rpc import RpcClient, TimeoutPolicy, check_granted
from fedlayers.remote.sent_log import CONTENTS, MOST_ASKED, MOST_BYTES, SENT, Approval, SentLog, name_of
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import PresplitData
from fl_core.config import RunConfig
from fl_core.errors import CorruptError, RunError, UsageError
from fl_core.storage.files import Folder, sha
from tests.conftest import TOY
from tests.federation.test_in_memory import NAMES, config_for, link, server

ASKED = {"kind": "moments", "number": 0, "seed": 1}


def requests_to(name: str, folder: Path, config: RunConfig) -> dict[str, bytes]:
    """The first request of each kind to a site in a run."""
    found: dict[str, bytes] = {}

    class Noting(InMemoryTransport):
        def ask(self, asked: Any, timeout: float | None = None, grace: Any = None) -> Any:
            for each in (asked[name],) if name in asked else ():
                found.setdefault(decode(each).head["kind"], each)
            yield from super().ask(asked, timeout)

    federation.federate(config, Noting({n: Site(PresplitData(TOY, n), folder / n) for n in NAMES}), progress=False)
    return found


class Keeping(InMemoryTransport):
    """Keeps the replies of site a."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(
            {name: Site(PresplitData(TOY, name), folder / name, **(options if name == "a" else {})) for name in NAMES}
        )
        self.replies: list[bytes] = []

    def ask(self, requests: Any, timeout: float | None = None, grace: Any = None) -> Any:
        for site, reply in super().ask(requests, timeout):
            if site == "a":
                self.replies.append(reply)
            yield site, reply


def test_every_reply_is_in_the_list_of_what_left_with_its_digest(tmp_path: Path) -> None:
    transport = Keeping(tmp_path)
    federation.federate(config_for("fedper"), transport, progress=False)
    lines, last = SentLog(tmp_path / "a").check()
    assert [(line["bytes"], line["digest"]) for line in lines] == [(len(each), sha(each)) for each in transport.replies]
    assert [line["kind"] for line in lines][:2] == ["hello", "join"]
    packets = [decode(each) for each in transport.replies]
    assert [line["tensors"] for line in lines] == [{n: len(tree) for n, tree in each.trees.items()} for each in packets]
    assert any(line["tensors"] for line in lines if line["kind"] == "train")
    assert len({line["run"] for line in lines[1:]}) == 1
    assert last == sha((tmp_path / "a" / SENT).read_bytes().splitlines()[-1])


@pytest.mark.parametrize("how", ["changed", "removed", "swapped", "no object"])
def test_a_list_that_was_changed_is_refused(how: str, tmp_path: Path) -> None:
    for size in range(4):
        SentLog(tmp_path).write("train", "r", Packet({"kind": "done"}), bytes(size))
    lines = (tmp_path / SENT).read_text().splitlines()
    if how == "changed":
        lines[1] = lines[1].replace('"bytes": 1', '"bytes": 2')
    elif how == "removed":
        del lines[1]
    elif how == "swapped":
        lines[1:3] = lines[2:0:-1]
    else:
        lines[1] = "[]"
    (tmp_path / SENT).write_text("\n".join([*lines, ""]))
    with pytest.raises(CorruptError, match=f"{SENT}.*line {2 if how in ('removed', 'swapped', 'no object') else 3}"):
        SentLog(tmp_path).check()
    with pytest.raises(CorruptError):
        SentLog(tmp_path).write("train", "r", Packet({"kind": "done"}), b"")


@pytest.mark.parametrize("how", ["cut", "forged", "removed"])
def test_a_list_that_was_cut_or_written_anew_lacks_a_noted_line(how: str, tmp_path: Path) -> None:
    """Its digests follow one another, so the check passes. A digest that was noted elsewhere shows it."""
    for size in range(4):
        SentLog(tmp_path).write("train", "r", Packet({"kind": "done"}), bytes(size))
    lines, noted = SentLog(tmp_path).check()
    SentLog(tmp_path).write("train", "r", Packet({"kind": "done"}), bytes(4))
    assert len(SentLog(tmp_path).check(noted)[0]) == len(lines) + 1
    whole = (tmp_path / SENT).read_text().splitlines(keepends=True)
    (tmp_path / SENT).write_text("".join(whole[:3]) if how == "cut" else "")
    for size in range(1, 5) if how == "forged" else ():
        SentLog(tmp_path).write("train", "r", Packet({"kind": "done"}), bytes(size))
    SentLog(tmp_path).check()
    with pytest.raises(CorruptError, match=f"{SENT}.*{noted}"):
        SentLog(tmp_path).check(noted)


def test_half_a_line_of_a_crash_is_dropped(tmp_path: Path) -> None:
    SentLog(tmp_path).write("train", "r", Packet({"kind": "done"}), b"1")
    whole = (tmp_path / SENT).read_bytes()
    (tmp_path / SENT).write_bytes(whole + whole[:20])
    assert len(SentLog(tmp_path).check()[0]) == 1
    SentLog(tmp_path).write("train", "r", Packet({"kind": "done"}), b"22")
    assert [line["bytes"] for line in SentLog(tmp_path).check()[0]] == [1, 2]


def test_a_full_disk_leaves_a_list_that_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, append = SentLog(tmp_path), Folder.append

    def full(folder: Folder, name: str, data: bytes) -> None:
        append(folder, name, data[:20])
        raise OSError("disk full")

    sent.write("train", "r", Packet({"kind": "done"}), b"1")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "append", full)
        with pytest.raises(OSError, match="full"):
            sent.write("train", "r", Packet({"kind": "done"}), b"22")
    sent.write("train", "r", Packet({"kind": "done"}), b"333")
    assert [line["bytes"] for line in SentLog(tmp_path).check()[0]] == [1, 3]


def test_what_cannot_be_written_down_does_not_leave(tmp_path: Path) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path)
    tmp_path.joinpath(SENT).mkdir()
    hello = Packet({"kind": "hello", "session": "", "seq": 1, **federation.protocol.versions()})
    reply = decode(site.answer(encode(hello)))
    assert reply.head["kind"] == "failed"
    assert "digest" not in reply.head


def test_words_of_other_libraries_stay_in_the_sites_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path)

    def quotes(packet: Packet) -> Packet:
        raise ValueError("could not convert string to float: 'Ada, 36'")

    monkeypatch.setattr(site, "_hello", quotes)
    monkeypatch.setattr(log.LOG, "propagate", True)
    data = site.answer(encode(Packet({"kind": "hello", "session": "", "seq": 1})))
    assert decode(data).head["kind"] == "failed"
    assert b"Ada" not in data
    assert "Ada" in caplog.text


# --- who allows a run ------------------------------------------------------------------------------------------------


def test_a_site_that_asks_its_owner_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ASK_AGAIN", 0.05)
    config, owner = config_for("fedper"), Approval(tmp_path / "a")
    transport = Keeping(tmp_path, policy=Policy(approve="ask"))
    with pytest.raises(UsageError, match=r"'a'.*answer"):
        federation.federate(config, transport, timeouts=TimeoutPolicy(start=0.3), progress=False)
    assert {decode(each).head["kind"] for each in transport.replies} == {"hello", "waiting"}
    ((name, what),) = owner.waiting().items()
    assert (
        what
        == f"train fedper for {config.rounds} rounds, sharing fc1, fc2, with {', '.join(NAMES)}, each update by itself"
    )

    def allow() -> None:
        time.sleep(0.3)
        owner.allow(name)

    thread = threading.Thread(target=allow)
    thread.start()
    found = federation.federate(config, transport, progress=False)
    thread.join()
    assert not owner.waiting()
    assert server(found) == server(federation.federate(config, link(tmp_path / "always"), progress=False))
    transport.replies.clear()
    federation.federate(config, transport, progress=False)  # the same request is allowed
    assert "waiting" not in {decode(each).head["kind"] for each in transport.replies}
    other = replace(config, rounds=config.rounds + 1)
    with pytest.raises(UsageError, match="answer"):
        federation.federate(other, transport, timeouts=TimeoutPolicy(start=0.3), progress=False)
    assert len(owner.waiting()) == 1


def test_a_permission_is_for_its_text_and_not_for_its_short_name(tmp_path: Path) -> None:
    owner, (one, other) = Approval(tmp_path), (Packet({**ASKED, "seed": seed}) for seed in (1, 2))
    with pytest.raises(RunError):
        owner.check(one)
    owner.allow(name_of(one))
    owner.check(one)
    (tmp_path / "allowed" / name_of(one)).replace(tmp_path / "allowed" / name_of(other))  # as if both had one name
    with pytest.raises(RunError, match="not allowed"):
        owner.check(other)


@pytest.mark.parametrize("way", ["joined before the owner was asked", "withdrawn"])
def test_a_run_that_is_not_allowed_any_more_gets_no_answer(way: str, tmp_path: Path) -> None:
    config, data = config_for("fedper"), PresplitData(TOY, "a")
    policy = Policy(approve="ask" if way == "withdrawn" else "always")
    asked = requests_to("a", tmp_path, config)
    join, train = asked["join"], asked["train"]
    site = Site(data, tmp_path / "other", policy)
    owner = Approval(tmp_path / "other")
    if way == "withdrawn":
        assert decode(site.answer(join)).head["kind"] == "waiting"
        (name,) = owner.waiting()
        owner.allow(name)
    assert decode(site.answer(join)).head["kind"] == "joined"
    assert decode(site.answer(train)).head["kind"] == "done"
    if way == "withdrawn":
        (tmp_path / "other" / "allowed" / name).unlink()
    else:
        site = Site(data, tmp_path / "other", Policy(approve="ask"))
    assert "owner" in decode(site.answer(train)).head.get("reason", "")
    assert decode(site.answer(join)).head["kind"] == "waiting"


def test_measuring_is_allowed_for_one_run(tmp_path: Path) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path, Policy(approve="ask"))
    runs = {}
    for seed in (0, 1):
        join = requests_to("a", tmp_path / str(seed), config_for("fedper", seed=seed))["join"]
        head = decode(join).head
        runs[seed] = {name: head[name] for name in ("run", "session")}
        assert decode(site.answer(join)).head["kind"] == "waiting"
        site.approval.allow(next(iter(site.approval.waiting())))
        assert decode(site.answer(join)).head["kind"] == "joined"
    measure = {"metrics": ["federation_sensitivity"], "options": {}, "measure_batch": 8, "mode": "eval", "layers": None,
               "null": [], "null_draws": 1}  # fmt: skip
    answers = []
    for seed in (0, 0, 1):
        head = {"kind": "measure", **runs[seed], "seq": 9, **measure}
        answers.append(decode(site.answer(encode(Packet(head)))).head["kind"])
        for name in site.approval.waiting() if seed == 0 else ():
            site.approval.allow(name)
    assert answers == ["waiting", "measured", "waiting"]


class Slow(InMemoryTransport):
    """Sites that wait for their owner, and then say nothing. ``limits`` are those of the requests."""

    def __init__(self) -> None:
        super().__init__({})
        self.limits: list[float | None] = []

    def ask(self, requests: Any, timeout: float | None = None, grace: Any = None) -> Any:
        self.limits.append(timeout)
        assert len(self.limits) < 4
        for site in requests:
            yield site, encode(Packet({"kind": "waiting", "reason": ""})) if len(self.limits) == 1 else None


def test_waiting_for_an_owner_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ASK_AGAIN", 0.5)
    packets, slow = dict.fromkeys(NAMES, Packet({"kind": "join"})), Slow()
    assert list(RpcClient(slow).ask(packets, timeout=60.0)) == [(name, None) for name in NAMES]
    first, second = slow.limits
    assert second is not None
    assert first is not None
    assert first <= 60.0
    assert second <= first - 0.5
    short = Slow()
    assert list(RpcClient(short).ask(packets, timeout=0.2)) == [(name, None) for name in NAMES]
    assert len(short.limits) == 1


def test_a_site_cannot_make_the_server_wait_by_work_that_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ASK_AGAIN", 0.0)
    for kind in ("hello", "train", "finetune", "score"):
        with pytest.raises(PacketError, match=f"'a'.*{kind}"):
            list(RpcClient(Slow()).ask({"a": Packet({"kind": kind})}))


def test_requests_that_wait_are_listed_and_have_a_limit(tmp_path: Path) -> None:
    owner = Approval(tmp_path)
    for seed in range(MOST_ASKED):
        with pytest.raises(RunError, match="not allowed"):
            owner.check(Packet({**ASKED, "seed": seed}))
    assert len(owner.waiting()) == MOST_ASKED
    with pytest.raises(UsageError, match=f"{MOST_ASKED} requests"):
        owner.check(Packet({**ASKED, "seed": -1}))
    with pytest.raises(UsageError, match="at most"):
        owner.check(Packet({**ASKED, "more": "x" * MOST_BYTES}))
    for bad in ("../join", "0" * 12):
        with pytest.raises(UsageError, match="RUN"):
            owner.allow(bad)


def test_the_owners_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text('name = "a"\nfolder = "state"\n[data]\ndataset = "heart"\n[policy]\napprove = "ask"\n')
    main(["federation", "audit", str(file)])
    assert "nothing has left" in capsys.readouterr().out
    with pytest.raises(RunError):
        Approval(tmp_path / "state").check(Packet(ASKED))
    main(["federation", "allow", str(file)])
    name = capsys.readouterr().out.split()[0]
    main(["federation", "allow", str(file), name])
    assert f"{name} is allowed" in capsys.readouterr().out
    Approval(tmp_path / "state").check(Packet(ASKED))
    SentLog(tmp_path / "state").write("train", "r1", Packet({"kind": "done"}), b"123")
    main(["federation", "audit", str(file)])
    said = capsys.readouterr().out
    assert all(word in said for word in ("r1", "train", CONTENTS["done"], "1 lines"))


def test_a_servers_words_cannot_steer_the_owners_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, bad = tmp_path / "a.toml", "fedper\x1b[2J\u202e\ud800"
    file.write_text('name = "a"\nfolder = "state"\n[data]\ndataset = "heart"\n[policy]\napprove = "ask"\n')
    monkeypatch.setattr(log.LOG, "handlers", [])
    monkeypatch.setattr(log.LOG, "propagate", False)
    log.start()
    site = Site(PresplitData(TOY, "a"), tmp_path / "state", Policy(approve="ask"))
    join = {"kind": "join", "run": bad, "config": {"algorithm": bad, "rounds": 1}, "sites": [{"name": bad}]}
    for packet in (Packet({**join, "session": "s", "seq": 1}), Packet({"kind": bad, "session": "s", "seq": 2})):
        site.answer(encode(packet))
    for command in ("allow", "audit"):
        main(["federation", command, str(file)])
    said = capsys.readouterr()
    assert said.out.count("fedper\\x1b[2J\\u202e\\ud800") >= 3
    assert "fedper\\x1b" in said.err
    assert all(each.isprintable() or each == "\n" for each in said.out + said.err)


def test_a_sites_words_cannot_steer_the_servers_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(self: object, line: str) -> None:
        check_granted("a", Packet({"kind": "refused", "reason": "no\x1b[2J"}))

    monkeypatch.setattr("fedlayers.cli.federation.Status.main", refuses)
    with pytest.raises(SystemExit):
        main(["federation", "status"])
    assert "no\\x1b[2J" in capsys.readouterr().err


def test_approve_has_two_values() -> None:
    with pytest.raises(UsageError, match="approve"):
        Policy(approve="sometimes")


# --- the log and the status ------------------------------------------------------------------------------------------


def test_a_run_says_which_round_it_stored_and_whom_it_missed(tmp_path: Path) -> None:
    class Deaf(InMemoryTransport):
        def ask(self, requests: Any, timeout: float | None = None, grace: Any = None) -> Any:
            for site, reply in super().ask(requests, timeout):
                asked = decode(requests[site]).head
                yield site, None if site == "c" and asked["kind"] == "train" and asked["round"]["index"] else reply

    sites = {name: Site(PresplitData(TOY, name), tmp_path / name) for name in NAMES}
    config = replace(config_for("fedavg"), participation=1.0, checkpoint_every=1)
    federation.federate(config, Deaf(sites), tmp_path / "run", timeouts=TimeoutPolicy(2, 5.0), progress=False)
    found = log.status(tmp_path / "run")
    assert (found["round"], found["missing"], found["error"]) == (config.rounds, ["c"], "")
    log.note(tmp_path / "run", error="site 'a' refuses")
    assert log.status(tmp_path / "run") == {
        **found,
        "error": "site 'a' refuses",
        "time": log.status(tmp_path / "run")["time"],
    }
    assert log.status(tmp_path) == log.NOTHING
    (tmp_path / "run" / log.STATUS).write_text('{"round": -1}')
    with pytest.raises(CorruptError, match="damaged"):
        log.status(tmp_path / "run")
    log.note(tmp_path / "run", round=1)
    assert log.status(tmp_path / "run")["round"] == 1


def test_the_log_has_time_and_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = log.LOG.handlers[:], log.LOG.propagate, log.LOG.level
    try:
        log.start(as_json=True)
        log.LOG.warning("two\nlines")
        log.start()
        log.LOG.info("one")
    finally:
        log.LOG.handlers[:], log.LOG.propagate = before[:2]
        log.LOG.setLevel(before[2])
    first, second = capsys.readouterr().err.splitlines()
    found = json.loads(first)
    assert (found["level"], found["message"]) == ("WARNING", "two lines")
    assert second.split()[1:] == ["INFO", "one"]
    assert logging.getLogger("fedlayers.federation") is log.LOG
