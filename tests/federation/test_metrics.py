"""Numbers of a federation over HTTP, as Prometheus reads them."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from fedlayers.cli.federation import Site as SiteCommand
from fedlayers.cli.superlinks import Sites
from fedlayers.remote import federation, metrics
from fedlayers.remote.log import LOG
from fl_core.errors import UsageError
from tests.federation.test_in_memory import SHORT, link


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_values", {name: {} for name in metrics.ABOUT})
    monkeypatch.setattr(LOG, "handlers", list(LOG.handlers))


def read(port: int) -> dict[str, float]:
    with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        lines = reply.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_rounds_bytes_and_the_last_error_are_served(tmp_path: Path) -> None:
    port = metrics.serve(0, "127.0.0.1")
    assert read(port) == {}
    sites = link(tmp_path / "sites")
    federation.federate(replace(SHORT, participation=1.0), sites, tmp_path / "run", progress=False)
    found = read(port)
    assert found["fedlayers_rounds_done"] == SHORT.rounds == 2
    assert "fedlayers_last_error_timestamp_seconds" not in found
    for site in sites.sites:  # server and sites are one process here, and each counts both ways
        sent, received = (found[f'fedlayers_{way}_bytes_total{{site="{site}"}}'] for way in ("sent", "received"))
        assert sent == received == sites.sent[site] + sites.received[site]
    LOG.warning("something is wrong")
    assert read(port)["fedlayers_last_error_timestamp_seconds"] == pytest.approx(time.time(), abs=10)


def test_it_is_off_by_default_and_for_this_machine_alone() -> None:
    for command in (Sites(), SiteCommand(file=Path("site.toml"))):
        assert (command.metrics_port, command.metrics_host) == (None, "127.0.0.1")


def test_a_port_that_is_taken_or_impossible_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port in (taken.getsockname()[1], 70000):
            with pytest.raises(UsageError, match=str(port)):
                metrics.serve(port, "127.0.0.1")


def test_slow_and_many_clients_take_no_threads_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (metrics, metrics._Request):
        monkeypatch.setattr(place, "SECONDS" if place is metrics else "timeout", 0.5)
    port, threads = metrics.serve(0, "127.0.0.1"), threading.active_count()
    with ExitStack() as opened:
        for _ in range(50):  # the system lets a few wait, and no more
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        time.sleep(0.2)
        assert threading.active_count() <= threads + 1

    def drip(slow: socket.socket) -> None:
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        for _ in range(100):
            time.sleep(0.1)
            slow.sendall(b"x")

    with socket.create_connection(("127.0.0.1", port)) as client, pytest.raises(OSError, match=r"pipe|reset"):
        drip(client)
    assert read(port) == {}


def test_a_name_adds_no_line_and_no_label() -> None:
    port = metrics.serve(0, "127.0.0.1")
    metrics.add("sent_bytes_total", 1, 'a",site="b"} 7\nfedlayers_rounds_done 9\\')
    found = read(port)
    assert list(found.values()) == [1.0]
    assert next(iter(found)).startswith("fedlayers_sent_bytes_total{")


def test_no_host_is_not_every_host() -> None:
    with pytest.raises(UsageError, match="--metrics-host ''"):
        metrics.serve(0, "")
