"""The only writer of a run directory, with the layout of :mod:`fl_core.records.store`.

Every file appears by an atomic rename, and a checkpoint's manifest last. A run killed at any moment therefore leaves
its last complete checkpoint and nothing that looks like a later one. When it resumes, incomplete files and tensors of
no checkpoint are removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fl_core import rows
from fl_core.algorithms.base import State
from fl_core.errors import CorruptError, UsageError
from fl_core.records import timing
from fl_core.records.checking import CLEANED, check_rows, removed_on_purpose
from fl_core.records.store import (
    CODE,
    FORMAT,
    ROOT_FILES,
    ROWS,
    START,
    Checkpoint,
    Run,
    blob_name,
    checkpoint_name,
)
from fl_core.storage.files import (
    SUFFIX,
    Folder,
    json_bytes,
    open_packed,
    pack,
    sha,
    sign,
)
from fl_core.storage.schema import merge_trees
from fl_core.tree import clone

_ROWS = (ROWS, ROWS + SUFFIX)
_WRITTEN = (
    *ROOT_FILES,
    START,
    "manifest.json",
    *_ROWS,
    "plan.json",
    "timing.jsonl",
    CLEANED,
    CODE,
)
_PART = re.compile(
    r"(.+)\.[0-9]+\.part"
)  # an incomplete file of the process with that number
_BLOB = re.compile(r"([0-9a-f]{64})\.safetensors")
_MANIFEST = re.compile(r"[0-9]{6,}\.json")


class Writer:
    """The only writer of a run directory, from :func:`create` or :func:`reopen`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = Run(path)
        self.folder = self.run.folder
        self.saved: int | None = None  # the round of the last checkpoint
        self._rows_bytes = 0
        self._rows_sha = hashlib.sha256()
        self._sound: set[str] = set()  # blobs that this writer has written or checked
        self._clients: dict[str, dict[str, Any]] = {}  # entries of the last checkpoint

    def begin(
        self,
        environment: Mapping[str, Any],
        partition: dict[str, Tensor],
        header: Mapping[str, Any],
        start: dict[str, Tensor] | None = None,
    ) -> None:
        """Write the files before training: environment, partition, the rows' header, and the manifest over them.

        Args:
            start: given initial weights. Their copy makes the run independent of their source.
        """
        self.folder.remove("timing.jsonl")  # of an earlier attempt
        self.folder.write("environment.json", json_bytes(environment))
        self.folder.write("partition.safetensors", save(partition))
        line = (rows.dumps({"schema": rows.SCHEMA, **header}) + "\n").encode()
        self.folder.write("rows.jsonl", line)
        self._count(line)
        if start is not None:
            self.folder.write(START, save(start))
        names = ROOT_FILES if start is None else (*ROOT_FILES, START)
        files = {name: self.folder.read(name) for name in names}
        manifest = {
            "format": FORMAT,
            "files": {
                name: {"sha256": sha(data), "bytes": len(data)}
                for name, data in files.items()
            },
            "rows": self._rows_entry(),
        }
        self.folder.write("manifest.json", sign(manifest))

    def rewind(self, accept: Callable[[Checkpoint], None] | None = None) -> int:
        """Return to the last complete checkpoint, or to round 0: cut the rows there and return the round.

        Args:
            accept: receives that checkpoint before anything is changed. It reads all states and raises an error if the
                run cannot resume from it.

        Raises:
            CorruptError: needed files are damaged, or another run's. Nothing is changed then.
        """
        rounds = self.run.rounds
        self.run.check_files()
        with self._or_before(rounds):
            entry = self.run.covered_rows()
        check_rows(self.run, entry)
        with self._or_before(rounds):
            self._check_last(rounds, accept)
        unfinished = self._unfinished_blobs(rounds)
        self.copy_plan()
        for name in unfinished:
            self.folder.remove(name)
        with open_packed(self.folder, ROWS) as file:
            covered = file.read(entry["bytes"])
        self.folder.write(
            ROWS, covered
        )  # a new file, since rows must not be appended to another folder's file
        self.folder.remove(ROWS + SUFFIX)
        self._count(covered)
        done = rounds[-1] if rounds else 0
        if self.folder.has("timing.jsonl"):
            self.folder.write(
                "timing.jsonl", timing.rewound(self.folder.read("timing.jsonl"), done)
            )
        return done

    def copy_plan(self) -> None:
        """Write a copy of the plan in force for readers, if there is one, exactly as the run has stored it."""
        plan = self.run.plan()
        if plan is not None:
            self.folder.write("plan.json", json_bytes(plan))

    @contextmanager
    def _or_before(self, rounds: Sequence[int]) -> Iterator[None]:
        """Let an error state how to resume without the last checkpoint."""
        try:
            yield
        except CorruptError as error:
            if not rounds:
                raise
            path = self.run.checkpoint_path(rounds[-1])
            raise type(error)(
                f"{str(error).removesuffix('.')}. Remove {path} to resume from the checkpoint before it."
            ) from error

    def _check_last(
        self, rounds: Sequence[int], accept: Callable[[Checkpoint], None] | None
    ) -> None:
        """Read everything that the run resumes from. Unchanged clients need not be written again."""
        if not rounds:
            return
        found = self.run.checkpoint(rounds[-1], lazy=True)
        if accept:
            accept(found)
        else:
            for part in (found.clients, *found.models.values()):
                for _ in part.values():
                    pass
        states = self.run.manifest(rounds[-1])["states"]
        self._clients = {name: states[f"client/{name}"] for name in found.clients}

    def _unfinished_blobs(self, rounds: Iterable[int]) -> list[str]:
        """Return the files of tensors that no checkpoint names; none if a damaged checkpoint may name them."""
        named: set[str] = set()
        for which in rounds:
            try:
                states = self.run.manifest(which)["states"]
            except CorruptError:  # of an earlier round, which is not needed
                return []
            named |= {entry["blob"] for entry in states.values()}
        found = map(_BLOB.fullmatch, self.folder.names("blobs"))
        return [
            blob_name(match[1]) for match in found if match and match[1] not in named
        ]

    def add_rows(self, new: Iterable[rows.Row]) -> None:
        """Append rows without waiting for the disk."""
        data = "".join(rows.dumps(record) + "\n" for record in new).encode()
        self.folder.append("rows.jsonl", data)
        self._count(data)

    def note_code(
        self, done: int, changed: Sequence[str], code: Mapping[str, str]
    ) -> None:
        """Record that the run resumes after round ``done`` with changed code."""
        changes = [
            *self.run.code_changes(),
            {"round": done, "changed": [*changed], "code": {**code}},
        ]
        self.folder.write(CODE, sign({"run": self.run.id, "changes": changes}))

    def add_timing(self, record: Mapping[str, Any]) -> None:
        """Append one record of wall-clock seconds."""
        self.folder.append("timing.jsonl", (json.dumps(record) + "\n").encode())

    def checkpoint(
        self, checkpoint: Checkpoint, changed: Collection[str] | None = None
    ) -> None:
        """Save everything after a round, with its manifest last.

        Tensors are stored by value. Those that share memory no longer do so after reading.

        Args:
            changed: clients that may differ from the last checkpoint. The others are skipped. The default is all.
        """
        states = {"server": self._put(checkpoint.server)}
        for name in checkpoint.clients:
            if changed is None or name in changed or name not in self._clients:
                self._clients[name] = self._put(checkpoint.clients[name])
            states[f"client/{name}"] = self._clients[name]
        for kind, trees in checkpoint.models.items():
            states |= {
                f"{kind}/{name}": self._put(State({"model": trees[name]}))
                for name in trees
            }
        self.folder.sync("blobs")
        self.folder.sync(
            "rows.jsonl"
        )  # the manifest must not outlive the rows that it covers
        manifest = {
            "run": self.run.id,
            "round": checkpoint.round,
            "rows": self._rows_entry(),
            "states": states,
        }
        self.folder.write(checkpoint_name(checkpoint.round), sign(manifest))
        self.saved = checkpoint.round

    def _put(self, state: State) -> dict[str, Any]:
        flat = merge_trees(state.trees)
        blob = ""
        if flat:
            data = save(clone(flat))
            blob = sha(data)
            name = blob_name(blob)
            if blob not in self._sound:
                if not self.folder.has(name) or sha(self.folder.read(name)) != blob:
                    self.folder.write(name, data, lasting=False)
                self._sound.add(blob)
        return {"blob": blob, "trees": sorted(state.trees), "meta": state.meta}

    def _count(self, data: bytes) -> None:
        self._rows_bytes += len(data)
        self._rows_sha.update(data)

    def _rows_entry(self) -> dict[str, Any]:
        return {"bytes": self._rows_bytes, "sha256": self._rows_sha.hexdigest()}


@contextmanager
def create(path: Path | str, config: Mapping[str, Any]) -> Iterator[Writer]:
    """Create a locked run directory. Its configuration is written first, so that a killed run can be resumed.

    Raises:
        UsageError: ``path`` contains a run or other files, or cannot be created.
        BusyError: another process is writing there.
    """
    path = Path(path)
    check_free(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"directory {path} cannot be made: {error.strerror}. Choose another one."
        ) from error
    folder = Folder(path)
    with folder.locked():
        check_free(path)  # another writer may have come and gone
        _sweep_parts(folder)
        folder.write("config.json", sign({"format": FORMAT, **config}))
        yield Writer(path)


def check_free(path: Path) -> None:
    """Check that a directory contains at most the traces of a run killed before its first file was complete.

    Raises:
        UsageError: the directory is not free. The message names its contents.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(
            f"{path} must be a directory; got a file. Choose another --out."
        )
    if (path / "config.json").exists():
        raise UsageError(
            f"{path} must be free; got a run. Resume it, or choose another directory."
        )
    traces = {path / "lock", *path.glob("config.json.*.part")}
    if path.is_dir() and not traces.issuperset(path.iterdir()):
        raise UsageError(
            f"{path} must be empty; got other files. Choose another directory."
        )


@contextmanager
def reopen(path: Path | str) -> Iterator[Writer]:
    """Open an existing run directory, locked, to resume it.

    Raises:
        UsageError: there is no run.
        BusyError: another process is writing there.
    """
    run = Run(path)
    with run.folder.locked():
        _sweep_parts(run.folder)
        yield Writer(run.path)


def _sweep_parts(folder: Folder) -> None:
    """Remove incomplete files of a killed writer or a full disk."""
    for below, is_ours in (
        ("", _WRITTEN.__contains__),
        ("checkpoints", _MANIFEST.fullmatch),
        ("blobs", _BLOB.fullmatch),
    ):
        for name in folder.names(below):
            part = _PART.fullmatch(name)
            path = f"{below}/{name}" if below else name
            if part and is_ours(part[1]) and folder.is_own(path):
                folder.remove(path)


def clean(path: Path | str) -> int:
    """Remove all checkpoints of a run but the last and the best, pack its rows, and return the number of freed bytes.

    A stopping rule names the best ones. A note of the removed ones is written first, so that a check of the run does
    not miss them. The run can be resumed, but models of other rounds are gone.

    Raises:
        UsageError: there is no run.
        BusyError: it is running.
        CorruptError: it is damaged. Nothing is removed then.
    """
    if _is_clean(Run(path)):
        return 0
    with reopen(path) as writer:
        run = writer.run
        run.verify()
        needed, noted = _rounds_to_keep(run), removed_on_purpose(run)
        earlier = [which for which in run.rounds if which not in needed]
        kept = {blob for which in needed for blob in _blobs(run.manifest(which))}
        gone = {blob for which in earlier for blob in _blobs(run.manifest(which))} | {
            *noted["blobs"]
        }
        blobs = sorted(blob for blob in gone - kept if run.folder.has(blob_name(blob)))
        if earlier or blobs:
            note = {
                "run": run.id,
                "rounds": sorted({*noted["rounds"], *earlier}),
                "blobs": blobs,
            }
            run.folder.write(CLEANED, sign(note))
        names = [*map(checkpoint_name, earlier), *map(blob_name, blobs)]
        freed = sum(run.folder.size(name) for name in names)
        for name in names:
            run.folder.remove(name)
        if run.folder.has(ROWS):
            freed += pack(run.folder, ROWS, run.covered_rows()["bytes"])
        return freed


def _rounds_to_keep(run: Run) -> set[int]:
    """Return the rounds whose checkpoints stay."""
    rule = run.stopping_rule()
    return {run.rounds[-1], *(() if rule is None else rule.best.values())}


def _is_clean(run: Run) -> bool:
    """Return whether nothing can be removed or packed. A run without a checkpoint has nothing."""
    if not run.rounds:
        return True
    if run.folder.has(ROWS) or not _rounds_to_keep(run).issuperset(run.rounds):
        return False
    return not any(
        run.folder.has(blob_name(blob)) for blob in removed_on_purpose(run)["blobs"]
    )


def _blobs(manifest: dict[str, Any]) -> set[str]:
    """Return the blobs that a checkpoint names."""
    return {entry["blob"] for entry in manifest["states"].values()} - {""}


def runs_below(path: Path) -> list[Path]:
    """Return the run directories in a folder, at any depth, and the folder itself if it is one."""
    return sorted(each.parent for each in path.rglob("config.json"))
