"""Numbers of a federation's process for Prometheus. They are counted always, and served over HTTP when asked for."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from fedlayers.remote.log import LOG
from fl_core.errors import UsageError

ABOUT = {
    "rounds_done": ("Rounds that are stored: at the server of the run, at a site of the last run.", ()),
    "sites_connected": ("Sites that are connected; at a site 1 while it is.", ()),
    "sent_bytes_total": ("Bytes of the messages sent, without the transport's own.", ("site",)),
    "received_bytes_total": ("Bytes of the messages received, without the transport's own.", ("site",)),
    "last_error_timestamp_seconds": ("When the last warning or error was logged, in seconds since 1970.", ()),
}
"""Description and labels of each number, whose name begins with ``fedlayers_``."""
SECONDS = 5.0
"""Time of one request at most."""
_values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in ABOUT}


def set_number(name: str, value: float) -> None:
    """Set a number."""
    _values[name][()] = value


def add(name: str, value: float, *labels: str) -> None:
    """Add to a number with labels."""
    _values[name][labels] = _values[name].get(labels, 0.0) + value


def serve(port: int, host: str) -> int:
    """Answer HTTP requests with the numbers as text, in a thread. Return the port.

    Args:
        port: 0 for a free one.

    Raises:
        UsageError: the port cannot be listened at.
    """
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.registry import Collector

    registry = CollectorRegistry()
    registry.register(type("Numbers", (Collector,), {"collect": lambda self: _families()})())
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        kind: type[_Server] = type("Server", (_Server,), {"address_family": family})
        server = make_server(host, port, make_wsgi_app(registry), kind, _Request)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--metrics-port must be a free port of --metrics-host {host!r}; got {port} ({error}). Choose another."
        ) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    LOG.addHandler(_LastError(logging.WARNING))
    return server.server_port


class _Server(WSGIServer):
    """A server of one request at a time, so that many clients, or slow ones, take no threads or files of a site."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        LOG.debug(f"a request for the metrics of {client_address[0]} failed", exc_info=True)


class _Request(WSGIRequestHandler):
    """A request that ends after :data:`SECONDS`, wherever it is."""

    timeout = SECONDS  # of one read or write

    def handle(self) -> None:
        end = threading.Timer(SECONDS, self._end)
        end.start()
        try:
            super().handle()
        finally:
            end.cancel()

    def _end(self) -> None:
        with suppress(OSError):  # it has ended meanwhile
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: a line a request would fill the log."""


def _families() -> Iterator[Any]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    for name, (about, labels) in ABOUT.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"fedlayers_{name}", about, labels=labels)
        for values, number in list(_values[name].items()):
            family.add_metric(values, number)
        yield family


class _LastError(logging.Handler):
    """Notes the time of each record."""

    def emit(self, record: logging.LogRecord) -> None:
        set_number("last_error_timestamp_seconds", record.created)
