"""The log of a federation's processes: lines with time and level, and the state of a run in its directory."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from fl_core.errors import CorruptError
from fl_core.names import printable
from fl_core.storage.files import Folder
from fl_core.storage.schema import COUNT, parsed

LOG = logging.getLogger("fedlayers.federation")
LOG.addHandler(logging.NullHandler())  # silent in a program of somebody else
STATUS = "federation.json"
"""The file of a run directory with the last round, the sites that it missed, and the last error."""
NOTHING: dict[str, Any] = {"time": "", "round": 0, "missing": [], "error": ""}
FORM = {"time": str, "round": COUNT, "missing": [str], "error": str}


def now(seconds: float | None = None) -> str:
    """Return the time in UTC as text, or that of some seconds since 1970."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class _Lines(logging.Formatter):
    """Lines such as ``2026-11-23T08:00:00Z WARNING text``, or as JSON objects.

    >>> record = logging.makeLogRecord({"created": 0.0, "levelname": "INFO", "msg": "site a is connected"})
    >>> _Lines(False).format(record)
    '1970-01-01T00:00:00Z INFO site a is connected'
    >>> _Lines(True).format(record)
    '{"time": "1970-01-01T00:00:00Z", "level": "INFO", "message": "site a is connected"}'
    """

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        parts = {"time": now(record.created), "level": record.levelname}
        parts["message"] = printable(" ".join(record.getMessage().split()))
        return json.dumps(parts) if self.as_json else " ".join(parts.values())


def start(as_json: bool = False) -> None:
    """Write the log of this process to its standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(as_json))
    LOG.handlers[:] = [handler]
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


def warn_new(lines: list[str], before: list[str]) -> list[str]:
    """Log the warnings that were not among those before. Return all of them, for the next call."""
    for line in lines:
        if line not in before:
            LOG.warning(line)
    return lines


def note(path: Path | str, **changes: Any) -> None:
    """Write what has changed into a run directory's :data:`STATUS`."""
    found = dict(NOTHING)
    try:
        found = status(path)
    except CorruptError as error:
        LOG.warning(f"{error}; it is written again")
    found |= {**changes, "time": now()}
    Folder(path).write(STATUS, json.dumps(found).encode() + b"\n", lasting=False)


def status(path: Path | str) -> dict[str, Any]:
    """Return the contents of a run directory's :data:`STATUS`. It is missing before the first stored round.

    Raises:
        CorruptError: it is damaged.
    """
    if not Folder(path).has(STATUS):
        return dict(NOTHING)
    return dict(parsed(Path(path) / STATUS, Folder(path).read(STATUS), FORM))
