"""Numbers of a federation's process for Prometheus. They are counted always, and served over HTTP when asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

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
_values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in ABOUT}


def put(name: str, value: float) -> None:
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
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.registry import Collector

    registry = CollectorRegistry()
    registry.register(type("Numbers", (Collector,), {"collect": lambda self: _families()})())
    try:
        server, _ = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--metrics-port must be a free port of {host}; got {port} ({error}). Choose another."
        ) from None
    LOG.addHandler(_LastError(logging.WARNING))
    return int(server.server_port)


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
        put("last_error_timestamp_seconds", record.created)
