"""The only writer of a run directory, with the layout of :mod:`fl_core.records.store`.

Every file appears by an atomic rename, and a checkpoint's manifest last. Rows and times are then appended to their
files. A run killed at any moment therefore leaves its last complete checkpoint and nothing that looks like a later
one. When it resumes, later rows, incomplete files and tensors of no checkpoint are removed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from fl_core import rows
from fl_core.algorithms.base import State
from fl_core.errors import CorruptError, UsageError, about, spelled
from fl_core.records import store
from fl_core.records.store import (
    BEGINNING,
    CONFIG,
    FORMAT,
    PARTITION,
    ROWS,
    START,
    Checkpoint,
    Run,
    blob_name,
    blobs_of,
    checkpoint_name,
)
from fl_core.storage import Folder, merge_trees, sha, sign
from fl_core.tree import clone

_BLOB = re.compile(r"[0-9a-f]{64}\.safetensors")
_PART = re.compile(
    rf"({_BLOB.pattern}|[0-9]{{6,}}\.json|[a-z]+\.(json|jsonl|safetensors))\.[0-9]+\.part"
)
"""The pattern of an incomplete file's name, which ends with the number of the writing process."""


class Writer:
    """The only writer of a run directory. :func:`create` and :func:`reopen` make it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = Run(path)
        self.folder = self.run.folder
        self._rows_bytes = 0
        self._rows_sha = hashlib.sha256()
        self._clients: dict[str, dict[str, Any]] = {}  # entries of the last checkpoint

    def rewind(self, accept: Callable[[Checkpoint | None], None]) -> int:
        """Return to the last complete checkpoint, or to round 0: cut the rows there and return the round.

        Tensors of no checkpoint are removed.

        Args:
            accept: receives that checkpoint, or None, before anything is changed. It should read all states, and raise
                an error if the run cannot resume from it. Nothing is changed then.

        Raises:
            CorruptError: needed files are damaged, or another run's. Nothing is changed then.
        """
        rounds = self.run.rounds
        self.run.check_files()
        try:
            row_data = self.run.check_rows(self.run.covered_rows())
            accept(self.run.checkpoint(rounds[-1], lazy=True) if rounds else None)
            if rounds:
                states = self.run.manifest(rounds[-1])["states"]
                self._clients = {  # unchanged ones need not be written again
                    name.removeprefix("client/"): entry
                    for name, entry in states.items()
                    if name.startswith("client/")
                }
        except CorruptError as error:
            if not rounds:
                raise
            path = self.run.checkpoint_path(rounds[-1])
            reason = str(error).removesuffix(".")
            raise type(error)(
                f"{reason}. Remove {path} to resume from the checkpoint before it."
            ) from error
        for name in unnamed_blobs(self.run):
            self.folder.remove(name)
        self.folder.write(ROWS, row_data)  # a new file: the old one may be a backup's
        self.count(row_data)
        round_number = rounds[-1] if rounds else 0
        if self.folder.has("timing.jsonl"):
            times = self.folder.read("timing.jsonl")
            self.folder.write("timing.jsonl", times[: times.rfind(b"\n") + 1])
        return round_number

    def add_rows(self, new: Iterable[rows.Row]) -> None:
        """Append rows without waiting for the disk. The next checkpoint covers them."""
        data = "".join(rows.dumps(record) + "\n" for record in new).encode()
        self.folder.append(ROWS, data)
        self.count(data)

    def add_timing(self, record: Mapping[str, Any]) -> None:
        """Append one record of wall-clock seconds."""
        self.folder.append("timing.jsonl", (json.dumps(record) + "\n").encode())

    def checkpoint(
        self, checkpoint: Checkpoint, changed: Collection[str] | None = None
    ) -> None:
        """Save the state after a round. The manifest is written last.

        Tensors are stored by value. Those that share memory no longer do so after reading.

        Args:
            checkpoint: the states and models to save, with their round.
            changed: names of the clients that may differ from the last checkpoint. The
                tensors of the others are not written again. None means all clients.
        """
        states = {"server": self._put(checkpoint.server)}
        for name in checkpoint.clients:
            if changed is None or name in changed or name not in self._clients:
                self._clients[name] = self._put(checkpoint.clients[name])
            states[f"client/{name}"] = self._clients[name]
        for model_kind, trees in checkpoint.models.items():
            states |= {
                f"{model_kind}/{name}": self._put(State({"model": trees[name]}))
                for name in trees
            }
        self.folder.sync("blobs")
        # the manifest must not outlive the rows that it covers
        self.folder.sync("rows.jsonl")
        manifest = {
            "run": self.run.id,
            "round": checkpoint.round,
            "rows": {"bytes": self._rows_bytes, "sha256": self._rows_sha.hexdigest()},
            "states": states,
        }
        self.folder.write(checkpoint_name(checkpoint.round), sign(manifest))

    def _put(self, state: State) -> dict[str, Any]:
        flat_tree = merge_trees(state.trees)
        blob = ""
        if flat_tree:
            data = save(clone(flat_tree))
            blob = sha(data)
            if not self.folder.has(blob_name(blob)):
                self.folder.write(blob_name(blob), data, lasting=False)
        return {"blob": blob, "trees": sorted(state.trees), "meta": state.meta}

    def count(self, data: bytes) -> None:
        """Add rows to those that the next checkpoint covers by its digest.

        Args:
            data: the rows' bytes in the file.
        """
        self._rows_bytes += len(data)
        self._rows_sha.update(data)


@contextmanager
def create(
    path: Path | str,
    config: Mapping[str, Any],
    partition: dict[str, Tensor],
    header: Mapping[str, Any],
    start: dict[str, Tensor] | None = None,
) -> Iterator[Writer]:
    """Create a locked run directory with all that precedes training. Yield its writer.

    ``config.json`` is written last. A directory without it is no run, and free for a
    new one. A UsageError in the ``with`` block before the first checkpoint removes what
    was written:

    >>> with create("refused", {}, {}, {}):
    ...     raise UsageError("clients must have events")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: clients must have events
    >>> Path("refused").exists()
    False

    Args:
        path: the directory, which is created if it does not exist.
        config: the configuration and the environment.
        partition: the tensors of :meth:`fl_core.data.Partition.to_tree`.
        header: the header of the rows.
        start: given initial weights. Their copy makes the run independent of their source.

    Raises:
        UsageError: ``path`` contains a run or other files, or cannot be created.
        BusyError: another process is writing there.
    """
    path = Path(path)
    check_free(path)
    with about(f"directory {path} must be another one", OSError):
        path.mkdir(parents=True, exist_ok=True)
    folder = Folder(path)
    with folder.locked():
        check_free(path)  # another writer may have come and gone
        _sweep_parts(folder)
        files = {PARTITION: save(partition)}
        if start is not None:
            files[START] = save(start)
        header_line = (rows.dumps({"schema": rows.SCHEMA, **header}) + "\n").encode()
        start_config = {
            "format": FORMAT,
            **config,
            "files": {name: sha(data) for name, data in files.items()},
            "rows": {"bytes": len(header_line), "sha256": sha(header_line)},
        }
        for name, data in {
            **files,
            ROWS: header_line,
            CONFIG: sign(start_config),
        }.items():
            folder.write(name, data)
        writer = Writer(path)
        writer.count(header_line)
        try:
            yield writer
        except UsageError:  # refused after all, as by a worker or a site
            for name in () if writer.run.rounds else BEGINNING:
                folder.remove(name)
            with suppress(OSError):  # what others put there stays
                path.rmdir()
            raise


def check_free(path: Path) -> None:
    """Check that a directory is empty, or has only files of a run that was killed before its start was complete.

    Raises:
        UsageError: the directory is not free, or is a file. The message says what is there.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(
            f"{path} must be a directory; got a file. Choose another directory."
        )
    names = {*Folder(path).names()}
    if CONFIG in names:
        raise UsageError(
            f"{path} must be free; got a run. Resume it: fedlayers resume {path}. Or choose another directory."
        )
    run_files = {name for name in names if _PART.fullmatch(name)}
    if "lock" in names:
        run_files |= BEGINNING
    if not names <= run_files:
        raise UsageError(
            f"{path} must be empty; got other files. Choose a new directory: {spelled(out='runs/NAME')}."
        )


@contextmanager
def reopen(path: Path | str) -> Iterator[Writer]:
    """Open an existing run directory, locked, to resume it, and yield its writer.

    Incomplete files of a killed process are removed.

    Raises:
        UsageError: there is no run.
        CorruptError: there are checkpoints, but no configuration.
        BusyError: another process is writing there.
    """
    run = Run(path)
    with run.folder.locked():
        _sweep_parts(run.folder)
        yield Writer(run.path)


def _sweep_parts(folder: Folder) -> None:
    """Remove incomplete files of a killed writer or a full disk."""
    for subfolder in ("", "checkpoints/", "blobs/"):
        for name in filter(_PART.fullmatch, folder.names(subfolder.rstrip("/"))):
            folder.remove(subfolder + name)


def unnamed_blobs(run: Run) -> list[str]:
    """Return the names of the files of tensors that no checkpoint names, relative to the run directory.

    The list is empty if a checkpoint is damaged, since it may name them.
    """
    try:
        manifests = [run.manifest(number) for number in run.rounds]
    except CorruptError:  # of an earlier round, which is not needed
        return []
    named_digests = chain.from_iterable(map(blobs_of, manifests))
    named_files = {f"{blob}.safetensors" for blob in named_digests}
    blob_names = filter(_BLOB.fullmatch, run.folder.names("blobs"))
    return [f"blobs/{name}" for name in blob_names if name not in named_files]


def clean(path: Path | str) -> int:
    """Remove all checkpoints of a run but the last, the best and the early one. Return the number of freed bytes.

    A stopping rule names the best ones. The early one is that of
    :attr:`Run.early_round`. Tensors that no checkpoint names any more are removed too.
    The run can be resumed, but models of other rounds are gone.

    Raises:
        UsageError: there is no run.
        BusyError: it is running.
        CorruptError: it is damaged. Nothing is removed then.
    """
    if not _removable(Run(path)):
        return 0
    with reopen(path) as writer:
        run, n_freed = writer.run, 0
        run.verify()
        while names := _removable(run):  # checkpoints, then what only they named
            for name in names:
                n_freed += run.folder.size(name)
                run.folder.remove(name)
        return n_freed


def _removable(run: Run) -> list[str]:
    """Return the files that can be removed next, as names relative to the directory.

    These are checkpoints that are not needed. If there are none, they are the files of
    tensors that no checkpoint names. A run without a checkpoint has nothing to remove.
    """
    if not run.rounds:
        return []
    rule = run.stopping_rule()
    needed_rounds = {run.rounds[-1], run.early_round}
    if rule is not None:
        needed_rounds.update(rule.best.values())
    earlier_names = [
        checkpoint_name(number) for number in run.rounds if number not in needed_rounds
    ]
    return earlier_names or unnamed_blobs(run)


# --- what a run begins with ------------------------------------------------------------------------------------

RECORDED = (
    "fedlayers",
    "torch",
    "torchvision",
    "timm",
    "peft",
    "numpy",
    "scikit-learn",
)


def current_environment() -> dict[str, Any]:
    """Return :func:`versions`, with the ``platform`` and the working directory's ``commit``."""
    return {**versions(), "platform": platform.platform(), "commit": store.commit()}


def versions() -> dict[str, Any]:
    """Return ``versions``, {package: version}, and the version of ``python``. A run's numbers depend on them.

    The version of a package that is not installed is an empty text.
    """
    return {
        "versions": {name: _version(name) for name in RECORDED},
        "python": platform.python_version(),
    }


@functools.cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
