"""The time of a run: seconds by part, steps per second, and one line with both."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_core import storage
from fl_core.bounds import NUMBER, validate
from fl_core.errors import CorruptError, UsageError
from fl_core.storage import Folder

PARTS = {
    "train": "clients train, and this process waits for them",
    "move": "jobs and results cross the borders of processes; 0 without worker processes",
    "aggregate": "messages are made and replies are mixed",
    "evaluate": "models are scored",
    "save": "rows and checkpoints are written",
    "other": "all the rest",
}
"""The parts of a round's time."""


class Clock:
    """A clock that charges every second to one part: the innermost active one, or ``other``."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._on: list[str] = []
        self._since = time.perf_counter()

    def begin(self, part: str) -> None:
        """Charge the time from now on to a part, until :meth:`end`."""
        self._charge()
        self._on.append(part)

    def end(self) -> None:
        """Go back to the part before."""
        self._charge()
        self._on.pop()

    @contextmanager
    def charge(self, part: str) -> Iterator[None]:
        """Charge the time inside the block to a part. Time in nested parts is charged to the inner one alone."""
        self.begin(part)
        try:
            yield
        finally:
            self.end()

    def shift(self, source: str, target: str, seconds: float) -> None:
        """Move seconds from one part to another."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by part."""
        self._charge()
        found = {part: max(self._seconds[part], 0.0) for part in PARTS}
        self._seconds.clear()
        return found

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self._on[-1] if self._on else "other"] += now - self._since
        self._since = now


@dataclass
class Pace:
    """The time of some rounds: ``steps`` of all clients together, and ``seconds`` by part."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a round's record from ``timing.jsonl``."""
        self.steps += record["steps"]
        for part in PARTS:
            self.seconds[part] += record[part]

    @property
    def total(self) -> float:
        """Return the total seconds."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Return the steps per second over everything, NaN before any time has passed."""
        return self.steps / self.total if self.total else float("nan")

    def shares(self) -> str:
        """Return the parts that took a noticeable share of the time, in words."""
        total = self.total
        shares = {
            part: round(100 * seconds / total) if total else 0
            for part, seconds in self.seconds.items()
        }
        return ", ".join(f"{part} {share} %" for part, share in shares.items() if share)

    def line(self) -> str:
        """Return one line of summary."""
        rate = f"{self.rate:,.{0 if self.rate >= 10 else 1}f}"
        return f"{self.steps:,} client steps in {self.total:,.1f} s, {rate} a second: {self.shares()}"


def read(path: Path | str) -> Pace:
    """Return the pace of a whole run from its ``timing.jsonl``. Of a repeated round only the last record counts.

    Raises:
        UsageError: the file does not exist.
        CorruptError: a line is not a round's record, or the file is a link or too large.
    """
    pace = Pace()
    for record in by_round(path).values():
        pace.add(record)
    return pace


def by_round(path: Path | str) -> dict[int, dict[str, Any]]:
    """Return the record of each round in a ``timing.jsonl``: its ``steps``, and its seconds by part (:data:`PARTS`).

    Raises:
        UsageError, CorruptError: as :func:`read`.
    """
    path, records = Path(path), {}
    folder = Folder(path.parent)
    if not folder.has(path.name):
        raise UsageError(
            f"timing must be a file of a run; got {path}, which does not exist."
        )
    for number, line in enumerate(
        folder.read(path.name, most=storage.JSON_BYTES).splitlines(), 1
    ):
        record = _record(line)
        if record is None:
            raise CorruptError(
                f"{path}, line {number} is damaged: it is not the timing of a round"
            )
        records[int(record["round"])] = record
    return records


def rewound(data: bytes, done: int) -> bytes:
    """Return the timing of a run that resumes after round ``done``, without later or incomplete lines."""
    lines = [(line, _record(line)) for line in data.splitlines()]
    return b"".join(
        line + b"\n" for line, record in lines if record and record["round"] <= done
    )


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = storage.parsed_json(line)
    except ValueError:
        return None
    names = ("round", "steps", *PARTS)
    sound = isinstance(record, dict) and not validate(
        record, dict.fromkeys(names, NUMBER)
    )
    return record if sound else None
