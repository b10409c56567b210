"""The run directory: what a run keeps, checksummed, and what a reader gets back.

    config.json  environment.json  partition.safetensors   written before any training
    manifest.json                 digests of those three and of the rows' header
    rows.jsonl                    header and rows, flushed after every round
    checkpoints/000010.json       after round 10: digests of every state, length and digest of the rows up to there,
                                  and the round of the checkpoint before it
    blobs/<sha256>.safetensors    tensors, stored once by content
    plan.json                     the layer plan in force, a copy for readers
    timing.jsonl                  wall-clock seconds; not covered, since no two runs agree on them
    lock                          held by the writer

:mod:`fl_core.records.writing` writes it; here it is read. No pickle ever is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fl_core import rows
from fl_core.algorithms.base import State
from fl_core.errors import CorruptError, UsageError
from fl_core.records.files import json_bytes, read, read_checked, read_signed, read_tensors
from fl_core.tree import Tree, parted

ROOT_FILES = ("config.json", "environment.json", "partition.safetensors")
START = "start.safetensors"  # of a run that does not start from its seed's weights


@dataclass
class Checkpoint:
    """Everything after a round: the server, every client, and the named model trees kept beside them."""

    round: int
    server: State
    clients: Mapping[str, State]
    models: Mapping[str, Mapping[str, Tree]]  # "local" or "personal" -> client -> tree


V = TypeVar("V")


class _Lazy(Mapping[str, V]):
    """Values that are read from their entries in a manifest when they are asked for."""

    def __init__(self, entries: Mapping[str, Mapping[str, Any]], read: Callable[[Mapping[str, Any]], V]) -> None:
        self._entries, self._read = entries, read

    def __getitem__(self, name: str) -> V:
        return self._read(self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Run:
    """A run directory, for reading.

    Raises:
        UsageError: there is no run at ``path``.
        CorruptError: there is one, without its configuration.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            if (self.path / "manifest.json").is_file():
                raise CorruptError(f"{self.path / 'config.json'} is missing")
            raise UsageError(f"no run at {self.path}: it has no config.json")

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as JSON.

        Raises:
            CorruptError: it is damaged, or another run's.
        """
        if self.begun:
            self._checked("config.json")
        return read_signed(self.path / "config.json")

    @property
    def environment(self) -> dict[str, Any]:
        """What a begun run was made with: versions, platform, device, digests of data and initial model.

        Raises:
            CorruptError: it is damaged.
        """
        found: dict[str, Any] = json.loads(self._checked("environment.json"))
        return found

    @property
    def begun(self) -> bool:
        """Whether everything that precedes training has been written.

        Raises:
            CorruptError: it had been, for there are checkpoints, but the manifest is gone.
        """
        path = self.path / "manifest.json"
        if not path.is_file() and self.rounds:
            raise CorruptError(f"{path} is missing")
        return path.is_file()

    @property
    def rounds(self) -> list[int]:
        """Rounds with a complete checkpoint, ascending."""
        return sorted(int(p.stem) for p in (self.path / "checkpoints").glob("*.json") if p.stem.isdigit())

    def rows(self) -> tuple[dict[str, Any], Any]:
        """Header and tidy frame of the rows.

        Raises:
            CorruptError: a line is damaged. One that was begun after the last checkpoint and not finished is left out.
        """
        return rows.read(self.path / "rows.jsonl", self.covered_rows()["bytes"] if self.begun else None)

    def partition(self) -> dict[str, Tensor]:
        """The stored partition, as :meth:`fl_core.data.Partition.from_tree` takes it.

        Raises:
            CorruptError: it is damaged.
        """
        name = "partition.safetensors"
        return read_tensors(self.path / name, self._manifest()["files"][name]["sha256"])

    def start(self) -> dict[str, Tensor] | None:
        """The weights that the run started from, if they were given; None = its seed's.

        Raises:
            CorruptError: they are damaged.
        """
        entry = self._manifest()["files"].get(START)
        return None if entry is None else read_tensors(self.path / START, entry["sha256"])

    def manifest(self, which: int) -> dict[str, Any]:
        """The manifest of the checkpoint after round ``which``.

        Raises:
            UsageError: there is no such checkpoint; names those that exist.
            CorruptError: it is damaged.
        """
        if which not in self.rounds:
            known = ", ".join(map(str, self.rounds)) or "none yet"
            raise UsageError(f"{self.path} has no checkpoint after round {which}; there are: {known}")
        path = self.checkpoint_path(which)
        found = read_signed(path)
        if found["round"] != which:
            raise CorruptError(f"{path} is damaged: it is the checkpoint after round {found['round']}")
        return found

    def checkpoint(self, which: int | str = "last", lazy: bool = False) -> Checkpoint:
        """Load a checkpoint, every digest checked.

        Args:
            lazy: read a client's state, or a model beside the states, only when it is asked for, and each time anew.

        Raises:
            UsageError: no such checkpoint.
            CorruptError: a byte of it differs from what was written; with ``lazy``, it may come later.
        """
        if which == "last":
            if not self.rounds:
                raise UsageError(f"{self.path} has no checkpoint yet")
            which = self.rounds[-1]
        try:
            manifest = self.manifest(int(which))
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"a round is a number or 'last', not {which!r}") from error
        entries: dict[str, dict[str, Any]] = {}
        for name, entry in manifest["states"].items():
            kind, _, client = name.partition("/")
            entries.setdefault(kind, {})[client] = entry
        server = self._state(entries.pop("server")[""])
        clients: Mapping[str, State] = _Lazy(entries.pop("client", {}), self._state)
        models: dict[str, Mapping[str, Tree]] = {
            kind: _Lazy(found, lambda entry: self._trees(entry)["model"]) for kind, found in entries.items()
        }
        if not lazy:
            clients, models = dict(clients), {kind: dict(found) for kind, found in models.items()}
        return Checkpoint(manifest["round"], server, clients, models)

    def _state(self, entry: Mapping[str, Any]) -> State:
        return State(self._trees(entry), entry["meta"])

    def _trees(self, entry: Mapping[str, Any]) -> dict[str, Tree]:
        blob = entry["blob"]
        flat = read_tensors(self.path / "blobs" / f"{blob}.safetensors", blob) if blob else {}
        return parted(flat, entry["trees"])

    def verify(self) -> list[str]:
        """Check every covered byte.

        Returns:
            What was checked, a line each.

        Raises:
            CorruptError: the first thing that differs from what was written.
        """
        if not self.begun:
            path = self.path / "manifest.json"
            raise CorruptError(f"{path} is missing: the run was never fully created; resume starts it from round 0")
        checked = self.check_files()
        seen: set[str] = set()
        ends = [self._manifest()["rows"]]
        for which in self.rounds:
            found = self.manifest(which)
            previous = found["previous"]
            if previous is not None and previous not in self.rounds:
                raise CorruptError(f"{self.checkpoint_path(previous)} is missing")
            for entry in found["states"].values():
                if entry["blob"] not in seen:
                    self._trees(entry)
                    seen.add(entry["blob"])
            ends.append(found["rows"])
            checked.append(f"checkpoint after round {which}: {len(found['states'])} states")
        self.check_rows(*ends)
        covered, size = ends[-1]["bytes"], (self.path / "rows.jsonl").stat().st_size
        beyond = f", {size - covered:,} bytes after the last checkpoint not covered" if size > covered else ""
        checked.append(f"{len(seen - {''})} blobs; rows up to {covered:,} bytes{beyond}")
        plan, path = self.plan(), self.path / "plan.json"
        if plan is not None:
            if read(path) != json_bytes(plan):
                raise CorruptError(f"{path} is damaged: it is not the plan of this run")
            checked.append("plan.json")
        return checked

    def check_files(self) -> list[str]:
        """Check what was written before any training.

        Returns:
            What was checked, a line each.

        Raises:
            CorruptError: the first file that differs from what was written.
        """
        files = self._manifest()["files"]
        for name in files:
            self._checked(name)
        return [f"{name}: {entry['bytes']:,} bytes" for name, entry in files.items()]

    def _manifest(self) -> dict[str, Any]:
        return read_signed(self.path / "manifest.json")

    def checkpoint_path(self, which: int) -> Path:
        """Where the manifest of the checkpoint after round ``which`` is, or would be."""
        return self.path / "checkpoints" / f"{which:06d}.json"

    def _checked(self, name: str) -> bytes:
        return read_checked(self.path / name, self._manifest()["files"][name]["sha256"])

    def plan(self) -> dict[str, Any] | None:
        """The plan in force, which the last checkpoint has, or else the configuration."""
        decided = self.manifest(self.rounds[-1])["states"]["server"]["meta"].get("plan") if self.rounds else None
        return decided or self.config.get("in_force")

    def covered_rows(self) -> dict[str, Any]:
        """How far the rows are covered, by the last checkpoint or else by the manifest: their bytes and sha256."""
        return (self.manifest(self.rounds[-1]) if self.rounds else self._manifest())["rows"]

    def check_rows(self, *ends: Mapping[str, Any]) -> None:
        """Check the rows up to each of these ends, which ascend.

        Raises:
            CorruptError: they are missing, or differ from what was written.
        """
        path = self.path / "rows.jsonl"
        sha, at = hashlib.sha256(), 0
        try:
            with path.open("rb") as file:
                for end in ends:
                    sha.update(file.read(max(end["bytes"] - at, 0)))
                    at = end["bytes"]
                    if sha.hexdigest() != end["sha256"]:
                        raise CorruptError(f"{path} is damaged within its first {at:,} bytes")
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing") from error
