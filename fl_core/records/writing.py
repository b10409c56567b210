"""The one writer of a run directory; its layout is :mod:`fl_core.records.store`'s.

Every file appears by an atomic rename, a checkpoint's manifest last, so that a run killed at any moment leaves the
last complete checkpoint and nothing that could be mistaken for one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fl_core import rows
from fl_core.algorithms.base import State
from fl_core.errors import CorruptError, UsageError
from fl_core.records import timing
from fl_core.records.files import locked, sha, signed, sync, write_atomically, write_json
from fl_core.records.store import ROOT_FILES, START, Checkpoint, Run
from fl_core.tree import clone, joined


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
        self.run.check_files()
        if rounds:
            try:
                self._check_last(rounds[-1])
            except CorruptError as error:
                path = self.run.checkpoint_path(rounds[-1])
                raise CorruptError(f"{error}; remove {path} to go on from the checkpoint before it") from error
        entry = self.run.covered_rows()
        self.run.check_rows(entry)
        plan = self.run.plan()
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
        write_atomically(self.run.checkpoint_path(checkpoint.round), signed(manifest))

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
