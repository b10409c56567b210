"""The transport between real processes, with sites that answer what they are asked: faults, refusals, large ones."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from examples.local_federation import FEDLAYERS, Local
from fedlayers.remote import keys
from fedlayers.remote.flower import QUIET
from fedlayers.remote.flower.server import FlowerLink
from fl_core.errors import RunError, UsageError
from tests.federation.flower.proxy import proxy_to

pytestmark = pytest.mark.federation


def echo(federation, name, seconds=0.0, wait=True, folder=None, environment=None):
    """Start a site that answers after some seconds."""
    module = [sys.executable, "-m", "tests.federation.flower.echo"]
    home = federation.folder / f"home-{name}"
    where = [name, federation.place, str(folder or federation.site_keys(name)), str(home), str(seconds)]
    federation.start(name, [*module, *where], environment)
    if wait:
        federation.until(name, "is connected to")


@pytest.fixture
def federation(tmp_path):
    with Local(tmp_path, ["a", "b"], memory=False, hosts=["127.0.0.1", "fed.test"]) as local:
        local.start_superlink()
        yield local


def asked(federation, name):
    return federation.log(name).count("asked")


def later(seconds, do):
    """Do something from another thread."""
    thread = threading.Timer(seconds, do)
    thread.daemon = True
    thread.start()
    return thread


def supernodes(folder):
    """Processes of supernodes whose files lie in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"fedlayers.remote.flower.supernode" in words and any(str(folder).encode() in word for word in words):
            found.append(int(path.parent.name))
    return found


def test_bytes_of_all_sizes_arrive(federation):
    for name in "ab":
        echo(federation, name)
    link = FlowerLink(federation.place, federation.server_keys)
    assert link.sites == ("a", "b")
    for size in (1, 2**20 + 1, 100_000_000):
        payload = os.urandom(size)
        for site, reply in link.ask({"a": payload, "b": payload[:5]}):
            assert reply == site.encode() + b":" + (payload if site == "a" else payload[:5])
    link.close()
    federation.close()
    assert not supernodes(federation.folder)


def test_a_site_that_is_killed_is_asked_again(federation):
    """Before, in and after its work, and both at once; another that is not there is missing after the time-out."""
    for name in "ab":
        echo(federation, name, seconds=3.0)
    link = FlowerLink(federation.place, federation.server_keys)
    federation.kill("a")  # before
    back = later(1.0, lambda: echo(federation, "a", seconds=3.0))
    assert dict(link.ask({"a": b"1", "b": b"1"})) == {"a": b"a:1", "b": b"b:1"}
    back.join()

    def at_work(kill):
        """Kill sites once they were asked, and start them again."""
        before = {name: asked(federation, name) for name in kill}
        while any(asked(federation, name) == before[name] for name in kill):
            time.sleep(0.1)
        for name in kill:
            federation.kill(name)
        for name in kill:
            echo(federation, name, seconds=3.0)

    for killed in ("a", "ab"):
        back = later(0.0, lambda killed=killed: at_work(killed))
        assert dict(link.ask({"a": b"2", "b": b"2"})) == {"a": b"a:2", "b": b"b:2"}
        back.join()
    federation.kill("b")
    assert dict(link.ask({"a": b"3", "b": b"3"}, timeout=25)) == {"a": b"a:3", "b": None}
    link.close()


def test_a_supernode_that_is_killed_comes_back(federation):
    for name in "ab":
        echo(federation, name, seconds=3.0)
    link = FlowerLink(federation.place, federation.server_keys)
    (process,) = supernodes(federation.folder / "home-a")
    later(1.0, lambda: os.kill(process, signal.SIGKILL))
    assert dict(link.ask({"a": b"1", "b": b"1"})) == {"a": b"a:1", "b": b"b:1"}
    link.close()


def test_a_superlink_that_is_killed_and_started_again_loses_nothing(federation, caplog):
    for name in "ab":
        echo(federation, name, seconds=4.0)
    link = FlowerLink(federation.place, federation.server_keys)

    def restart():
        federation.kill("superlink")
        time.sleep(2)
        federation.start_superlink()

    back = later(2.0, restart)
    assert dict(link.ask({"a": b"1", "b": b"1"})) == {"a": b"a:1", "b": b"b:1"}
    back.join()
    assert any("does not answer" in line for line in caplog.messages)
    assert dict(link.ask({"a": b"2"})) == {"a": b"a:2"}
    link.close()


def test_a_late_site_is_waited_for_or_left_out(federation, caplog):
    caplog.set_level(logging.INFO)
    echo(federation, "a")
    with pytest.raises(RunError, match="1 of 2"):
        FlowerLink(federation.place, federation.server_keys, timeout=4)
    link = FlowerLink(federation.place, federation.server_keys, least=1, timeout=4)
    assert link.sites == ("a",)
    link.close()
    caplog.clear()
    later(3.0, lambda: echo(federation, "b"))
    link = FlowerLink(federation.place, federation.server_keys)
    assert link.sites == ("a", "b")
    assert [line for line in caplog.messages if "waiting" in line] == ["waiting for b"]
    link.close()


def test_two_servers_at_once_do_not_mix_their_replies(federation):
    for name in "ab":
        echo(federation, name)
    links = [FlowerLink(federation.place, federation.server_keys) for _ in range(2)]
    got = {}

    def ask(which):
        got[which] = [dict(links[which].ask({"a": bytes([which, turn]), "b": b""})) for turn in range(3)]

    threads = [threading.Thread(target=ask, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in range(2):
        assert [replies["a"] for replies in got[which]] == [b"a:" + bytes([which, turn]) for turn in range(3)]
        links[which].close()


def test_who_is_not_known_is_refused_in_one_line(federation, tmp_path):
    """An unknown key, another authority's certificate, no superlink, another secret, an unknown site, a taken port."""
    strangers = tmp_path / "strangers"
    keys.make(strangers, ["127.0.0.1"], ["a"])
    own = federation.site_keys("a") / "ca.crt"
    (strangers / "sites/a/ca.crt").write_bytes(own.read_bytes())
    for folder, place, says in (
        (strangers / "sites/a", None, r"'a'.*\[code: 2004\]"),
        (None, "127.0.0.1:9", r"127\.0\.0\.1:9"),
    ):
        former, federation.place = federation.place, place or federation.place
        with pytest.raises(RunError, match=says):
            echo(federation, "a", folder=folder)
        federation.place = former
    keys.make(tmp_path / "others", ["127.0.0.1"], ["a"])
    with pytest.raises(RunError, match="superlink of"):
        echo(federation, "a", folder=tmp_path / "others/sites/a")
    with pytest.raises(UsageError, match="superlink of"):
        FlowerLink(federation.place, tmp_path / "others/server")
    (strangers / "server/ca.crt").write_bytes(own.read_bytes())
    with pytest.raises(UsageError, match="secret"):
        FlowerLink(federation.place, strangers / "server")
    with pytest.raises(UsageError, match="'c'"):
        FlowerLink(federation.place, federation.server_keys, sites=["c"])
    with Local(tmp_path / "second", ["a"]) as second:
        second.place = federation.place
        with pytest.raises(RunError, match="listen"):
            second.start_superlink()
    assert not supernodes(tmp_path)


def clock_off(folder, seconds):
    """The environment of a process whose clock is off, for all that it tells Flower."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import datetime\nfrom flwr.supercore import date\ntrue = date.now\n"
        f"date.now = lambda: true() + datetime.timedelta(seconds={seconds})\n"
    )
    return {**QUIET, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_a_clock_that_is_a_minute_ahead_is_named(federation, tmp_path):
    off = clock_off(tmp_path / "off", 60)
    with pytest.raises(RunError, match=r"6\d s ahead"):
        echo(federation, "a", environment=off)
    echo(federation, "a")
    where = ["--superlink", federation.place, "--keys", str(federation.server_keys), "--sites", "a"]
    federation.start("server", [*FEDLAYERS, "federation", "run", *where, "--out", str(tmp_path / "run")], off)
    with pytest.raises(RunError, match=r"6\d s ahead"):
        federation.until("server", "never")


def test_a_site_reaches_its_superlink_through_a_proxy_and_its_supernode_without(federation):
    port = federation.place.rpartition(":")[2]
    with proxy_to("fed.test") as proxy:
        federation.place = f"fed.test:{port}"
        echo(federation, "a", environment={"HTTPS_PROXY": proxy.url, "ALL_PROXY": proxy.url})
        link = FlowerLink(f"127.0.0.1:{port}", federation.server_keys, ["a"])
        assert dict(link.ask({"a": b"1"})) == {"a": b"a:1"}
        link.close()
        assert set(proxy.asked) == {f"fed.test:{port}"}
