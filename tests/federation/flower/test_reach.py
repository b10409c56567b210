"""How a site reaches a superlink: through a proxy or not, with a clock that is off, and why its supernode ended.

Also what it does with a request that it cannot receive.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedlayers.remote import flower, keys
from fedlayers.remote.flower.site_process import carry_out, check_reachable, clock_error
from fedlayers.remote.policy import Policy
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import PresplitData
from fl_core import limits
from fl_core.errors import UsageError
from tests.conftest import TOY
from tests.federation.flower.proxy import proxy_to


class Superlink(BaseHTTPRequestHandler):
    """Says what time it is, and no more."""

    behind, date, body = 0.0, "", 0

    def do_GET(self):
        self.send_response(403)
        self.end_headers()
        with suppress(OSError):  # the reader has seen enough
            for _ in range(self.body):
                self.wfile.write(bytes(10**6))

    def date_time_string(self, timestamp=None):
        return self.date or super().date_time_string(time.time() - self.behind)

    def log_message(self, *_):
        pass


@pytest.fixture
def superlink(tmp_path):
    """The port of a server with a certificate for 127.0.0.1 and fed.test, and the authority's certificate."""
    keys.make(tmp_path / "keys", ["127.0.0.1", "fed.test"], ["a"])
    folder = tmp_path / "keys/server"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Superlink) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], folder / "ca.crt"
        server.shutdown()


def test_a_proxy_is_for_other_machines_alone(superlink, monkeypatch):
    port, ca = superlink
    with proxy_to("fed.test") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        check_reachable(f"127.0.0.1:{port}", ca)
        assert proxy.asked == []
        check_reachable(f"fed.test:{port}", ca)
        assert proxy.asked == [f"fed.test:{port}"]
        with pytest.raises(UsageError, match="502"):
            check_reachable(f"other.test:{port}", ca)


@pytest.mark.parametrize("spelling", ["no_proxy", "NO_PROXY"])
def test_hosts_that_need_no_proxy_stay_so(spelling, tmp_path, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(spelling, "intranet.test")
    found = flower.environment(tmp_path)
    for name in ("no_proxy", "NO_PROXY"):
        assert found[name].split(",") == ["intranet.test", *flower.LOOPBACK]


@pytest.mark.parametrize(
    ("behind", "says"), [(0.0, ""), (60.0, "60 s ahead"), (-60.0, ""), (-400.0, "400 s behind"), (7.0, "7 s ahead")]
)
def test_a_clock_that_is_off_is_measured(superlink, monkeypatch, behind, says):
    port, ca = superlink
    monkeypatch.setattr(Superlink, "behind", behind)
    ahead = check_reachable(f"127.0.0.1:{port}", ca)
    assert ahead == pytest.approx(behind, abs=2.0)
    assert says in clock_error(behind)
    assert bool(says) == bool(clock_error(ahead))


@pytest.mark.parametrize("date", ["soon", "Mon, 01 Jan 2024 00:00:00 -0000", f"Mon, 01 Jan 2024 00:00:00 +{9**30}"])
def test_a_date_that_is_none_says_nothing_of_the_clock(superlink, monkeypatch, date):
    port, ca = superlink
    monkeypatch.setattr(Superlink, "date", date)
    assert check_reachable(f"127.0.0.1:{port}", ca) == 0.0


def test_only_the_head_of_a_superlinks_answer_is_read(superlink, monkeypatch):
    port, ca = superlink
    monkeypatch.setattr(Superlink, "body", 10**6)
    assert check_reachable(f"127.0.0.1:{port}", ca) == pytest.approx(0.0, abs=2.0)


class Task:
    """A task of Flower whose request cannot be received."""

    def __init__(self, receive):
        self.receive, self.dropped = receive, False

    def drop(self):
        self.dropped = True


@pytest.mark.skipif(not limits.data_bytes(), reason="memory is limited on Linux only")
def test_a_request_beyond_a_sites_memory_is_dropped(tmp_path, caplog):
    task = Task(lambda: bytearray(4 * 10**8))
    carry_out(Site(PresplitData(TOY, "a"), tmp_path, Policy(memory=100)), task)
    assert task.dropped
    assert "[policy] memory" in caplog.text
    assert len(bytearray(4 * 10**8)) == 4 * 10**8, "the limit ends with the request"


def test_a_request_that_flower_cannot_read_is_dropped(tmp_path, caplog):
    task = Task(lambda: {}["an object of no kind"])
    carry_out(Site(PresplitData(TOY, "a"), tmp_path), task)
    assert task.dropped
    assert "an object of no kind" in caplog.text


def test_another_authority_is_told_from_nobody_there(superlink, tmp_path):
    port, _ = superlink
    keys.make(tmp_path / "others", ["127.0.0.1"], ["a"])
    with pytest.raises(UsageError, match="superlink of"):
        check_reachable(f"127.0.0.1:{port}", tmp_path / "others/server/ca.crt")
    (tmp_path / "ca.crt").write_text("none")
    with pytest.raises(UsageError, match="certificate"):
        check_reachable(f"127.0.0.1:{port}", tmp_path / "ca.crt")


def test_a_supernode_that_ends_by_itself_leaves_its_own_reason():
    code = (
        "import sys, threading, time; from fedlayers.remote.flower import supernode\n"
        "threading.Thread(target=supernode._end_with_parent, daemon=True).start()\n"
        "time.sleep(0.5); sys.exit(3)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(timeout=30) == 3
        assert process.stderr.read() == b""
