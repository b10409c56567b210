"""How a site reaches a superlink: through a proxy or not, with a clock that is off, and why its supernode ended."""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedlayers.remote import flower, keys
from fedlayers.remote.flower.site_process import check_reachable, clock_error
from fl_core.errors import UsageError
from tests.federation.flower.proxy import proxy_to


class Superlink(BaseHTTPRequestHandler):
    """Says what time it is, and no more."""

    behind = 0.0

    def do_GET(self):
        self.send_response(403)
        self.end_headers()

    def date_time_string(self, timestamp=None):
        return super().date_time_string(time.time() - self.behind)

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
