"""The run directory: what a run writes, atomically and checksummed, and what a reader gets back.

    config.json  environment.json  partition.safetensors   written before any training
    manifest.json                 digests of those three and of the rows' header
    rows.jsonl                    header and rows, flushed after every round
    checkpoints/000010.json       after round 10: digests of every state, length and digest of the rows up to there,
                                  and the round of the checkpoint before it
    blobs/<sha256>.safetensors    tensors, stored once by content
    plan.json                     the layer plan in force, a copy for readers
    timing.jsonl                  wall-clock seconds; not covered, since no two runs agree on them
    lock                          held by the writer

Every file appears by an atomic rename, a checkpoint's manifest last, so that a run killed at any moment leaves the
last complete checkpoint and nothing that could be mistaken for one. No pickle is ever read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save
from torch import Tensor

from fl_core import rows, timing
from fl_core.algorithms.base import State
from fl_core.errors import CorruptError, UsageError
from fl_core.files import (
    json_bytes,
    locked,
    read,
    read_checked,
    read_signed,
    read_tensors,
    sha,
    signed,
    sync,
    write_atomically,
    write_json,
)
from fl_core.tree import Tree, clone, joined, parted

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


# --- reading ---------------------------------------------------------------------------------------------------


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
        return rows.read(self.path / "rows.jsonl", self._last_rows()["bytes"] if self.begun else None)

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
        path = self._checkpoint_path(which)
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
        manifest = self._manifest()
        checked = []
        for name, entry in manifest["files"].items():
            self._checked(name)
            checked.append(f"{name}: {entry['bytes']:,} bytes")
        seen: set[str] = set()
        ends = [manifest["rows"]]
        for which in self.rounds:
            found = self.manifest(which)
            previous = found["previous"]
            if previous is not None and previous not in self.rounds:
                raise CorruptError(f"{self._checkpoint_path(previous)} is missing")
            for entry in found["states"].values():
                if entry["blob"] not in seen:
                    self._trees(entry)
                    seen.add(entry["blob"])
            ends.append(found["rows"])
            checked.append(f"checkpoint after round {which}: {len(found['states'])} states")
        self._check_rows(*ends)
        covered, size = ends[-1]["bytes"], (self.path / "rows.jsonl").stat().st_size
        beyond = f", {size - covered:,} bytes after the last checkpoint not covered" if size > covered else ""
        checked.append(f"{len(seen - {''})} blobs; rows up to {covered:,} bytes{beyond}")
        plan, path = self._plan(), self.path / "plan.json"
        if plan is not None:
            if read(path) != json_bytes(plan):
                raise CorruptError(f"{path} is damaged: it is not the plan of this run")
            checked.append("plan.json")
        return checked

    def _manifest(self) -> dict[str, Any]:
        return read_signed(self.path / "manifest.json")

    def _checkpoint_path(self, which: int) -> Path:
        return self.path / "checkpoints" / f"{which:06d}.json"

    def _checked(self, name: str) -> bytes:
        return read_checked(self.path / name, self._manifest()["files"][name]["sha256"])

    def _plan(self) -> dict[str, Any] | None:
        """The plan in force, which the last checkpoint has, or else the configuration."""
        decided = self.manifest(self.rounds[-1])["states"]["server"]["meta"].get("plan") if self.rounds else None
        return decided or self.config.get("in_force")

    def _last_rows(self) -> dict[str, Any]:
        return (self.manifest(self.rounds[-1]) if self.rounds else self._manifest())["rows"]

    def _check_rows(self, *ends: Mapping[str, Any]) -> None:
        """Check the rows up to each of these ends, which ascend."""
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


# --- writing ---------------------------------------------------------------------------------------------------


class Writer:
    """The one writer of a run directory, from :func:`create` or :func:`reopen`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = Run(path)
        self._rows_bytes = 0
        self._rows_sha = hashlib.sha256()
        self._sound: set[str] = set()  # blobs that this writer has written or found undamaged
        self._clients: dict[str, dict[str, Any]] = {}  # entries of the last checkpoint

    def begin(
        self,
        environment: Mapping[str, Any],
        partition: dict[str, Tensor],
        header: Mapping[str, Any],
        start: dict[str, Tensor] | None = None,
    ) -> None:
        """Write what precedes training: environment, partition, the rows' header, and the manifest over them.

        Args:
            start: weights that were given to start from, by whose copy the run stands on its own.
        """
        write_json(self.path / "environment.json", environment)
        write_atomically(self.path / "partition.safetensors", save(partition))
        line = (rows.dumps({"schema": rows.SCHEMA, **header}) + "\n").encode()
        write_atomically(self.path / "rows.jsonl", line)
        self._count(line)
        if start is not None:
            write_atomically(self.path / START, save(start))
        names = ROOT_FILES if start is None else (*ROOT_FILES, START)
        files = {name: (self.path / name).read_bytes() for name in names}
        manifest = {
            "format": "fedlayers.run/1",
            "files": {name: {"sha256": sha(data), "bytes": len(data)} for name, data in files.items()},
            "rows": self._rows_entry(),
        }
        write_atomically(self.path / "manifest.json", signed(manifest))

    def rewind(self) -> int:
        """Return to the last complete checkpoint, or to round 0: cut the rows there and return the round.

        Raises:
            CorruptError: something that the run goes on from is damaged; nothing is changed then.
        """
        rounds = self.run.rounds
        for name in self.run._manifest()["files"]:
            self.run._checked(name)
        if rounds:
            try:
                self._check_last(rounds[-1])
            except CorruptError as error:
                path = self.run._checkpoint_path(rounds[-1])
                raise CorruptError(f"{error}; remove {path} to go on from the checkpoint before it") from error
        entry = self.run._last_rows()
        self.run._check_rows(entry)
        plan = self.run._plan()
        if plan is not None:
            write_json(self.path / "plan.json", plan)  # only a copy
        self._sweep(rounds)
        with (self.path / "rows.jsonl").open("r+b") as file:
            self._count(file.read(entry["bytes"]))
            file.truncate(entry["bytes"])
        done = rounds[-1] if rounds else 0
        timing.rewind(self.path / "timing.jsonl", done)
        return done

    def _check_last(self, which: int) -> None:
        """Read everything that the run goes on from; what is in it need not be written again."""
        found = self.run.checkpoint(which, lazy=True)
        for part in (found.clients, *found.models.values()):
            for _ in part.values():
                pass
        states = self.run.manifest(which)["states"]
        self._clients = {name: states[f"client/{name}"] for name in found.clients}

    def _sweep(self, rounds: Iterable[int]) -> None:
        """Remove the blobs of a checkpoint that was never finished."""
        try:
            manifests = [self.run.manifest(which) for which in rounds]
        except CorruptError:  # of an earlier checkpoint, which resuming does not need: what it names is not known
            return
        if not {m["previous"] for m in manifests} <= {None, *rounds}:  # nor what a missing one named
            return
        referenced = {entry["blob"] for m in manifests for entry in m["states"].values()}
        for blob in (self.path / "blobs").glob("*.safetensors"):
            if blob.stem not in referenced:
                blob.unlink()

    def add_rows(self, new: Iterable[rows.Row]) -> None:
        """Append rows and hand them to the operating system."""
        data = "".join(rows.dumps(record) + "\n" for record in new).encode()
        with (self.path / "rows.jsonl").open("ab") as file:
            file.write(data)
        self._count(data)

    def add_timing(self, record: Mapping[str, Any]) -> None:
        """Append one record of wall-clock seconds."""
        with (self.path / "timing.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def checkpoint(self, checkpoint: Checkpoint, changed: Collection[str] | None = None) -> None:
        """Save everything after a round; its manifest is written last.

        Tensors are stored by value: those that share memory come back apart.

        Args:
            changed: clients that may differ from the last checkpoint; the others are not looked at. Default: all.
        """
        states = {"server": self._put(checkpoint.server)}
        for name in checkpoint.clients:
            if changed is None or name in changed or name not in self._clients:
                self._clients[name] = self._put(checkpoint.clients[name])
            states[f"client/{name}"] = self._clients[name]
        for kind, trees in checkpoint.models.items():
            states |= {f"{kind}/{name}": self._put(State({"model": trees[name]})) for name in trees}
        sync(self.path / "blobs")
        with (self.path / "rows.jsonl").open("rb") as file:
            os.fsync(file.fileno())  # the manifest must not outlive the rows that it covers
        manifest = {
            "round": checkpoint.round,
            "previous": max((which for which in self.run.rounds if which < checkpoint.round), default=None),
            "rows": self._rows_entry(),
            "states": states,
        }
        write_atomically(self.run._checkpoint_path(checkpoint.round), signed(manifest))

    def _put(self, state: State) -> dict[str, Any]:
        flat = joined(state.trees)
        blob = ""
        if flat:
            data = save(clone(flat))
            blob = sha(data)
            path = self.path / "blobs" / f"{blob}.safetensors"
            if blob not in self._sound:
                if not path.exists() or sha(path.read_bytes()) != blob:
                    write_atomically(path, data, lasting=False)
                self._sound.add(blob)
        return {"blob": blob, "trees": sorted(state.trees), "meta": state.meta}

    def _count(self, data: bytes) -> None:
        self._rows_bytes += len(data)
        self._rows_sha.update(data)

    def _rows_entry(self) -> dict[str, Any]:
        return {"bytes": self._rows_bytes, "sha256": self._rows_sha.hexdigest()}


@contextmanager
def create(path: Path | str, config: Mapping[str, Any]) -> Iterator[Writer]:
    """A new run directory, locked; its configuration is written first, so that a run killed later can be resumed.

    Raises:
        UsageError: ``path`` holds a run, or anything else, or cannot be made.
        BusyError: another process is writing there.
    """
    path = Path(path)
    check_free(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory {path}: {error.strerror}") from error
    with locked(path):
        check_free(path)  # another writer may have come and gone
        write_atomically(path / "config.json", signed(config))
        yield Writer(path)


def check_free(path: Path) -> None:
    """Refuse a directory that holds anything but the traces of a run killed before its first file was complete.

    Raises:
        UsageError: says what is there.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file, not a directory")
    if (path / "config.json").exists():
        raise UsageError(f"{path} already holds a run: resume it, or choose another directory")
    traces = {path / "lock", *path.glob("config.json.*.part")}
    if path.is_dir() and not traces.issuperset(path.iterdir()):
        raise UsageError(f"{path} is not empty; choose another directory")


@contextmanager
def reopen(path: Path | str) -> Iterator[Writer]:
    """An existing run directory, locked, for going on.

    Raises:
        UsageError: no run there.
        BusyError: another process is writing there.
    """
    path = Run(path).path
    with locked(path):
        yield Writer(path)
