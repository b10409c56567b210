"""Transfer of a run directory to another machine, also while it is written.

The received files form a directory that can be resumed at any moment. A checkpoint's manifest arrives after all files
that it names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from fl_core.errors import CorruptError
from fl_core.records.store import (
    CODE,
    ROOT_FILES,
    START,
    Run,
    blob_name,
    checkpoint_name,
)
from fl_core.storage.files import Folder, sha

FileBatch = dict[str, bytes]
"""Files that travel together: contents by relative name."""
Sent = MutableMapping[str, str]
"""Files sent already: digests by relative name."""
BYTES = 64 * 2**20
"""Bytes from which a batch is complete. Memory then holds at most this and one file."""
RUN_FILES = re.compile(
    r"[a-z]+\.(json|jsonl|safetensors)|rows\.jsonl\.gz|checkpoints/[0-9]{6,}\.json|blobs/[0-9a-f]{64}\.safetensors"
)


def files_to_resume(path: Path, sent: Sent) -> Iterator[FileBatch]:
    """Yield the files that a run needs to resume elsewhere, without the tensors of checkpoints before the last.

    Args:
        sent: is filled.
    """
    if Folder(path).has("config.json"):
        run = Run(path)
        last = run.rounds[-1:]
        yield from batches(
            run.folder,
            [*_root(run), *_blobs(run, last), *map(checkpoint_name, run.rounds)],
            sent,
        )


def changed_files(path: Path, sent: Sent, over: bool) -> Iterator[FileBatch]:
    """Yield the files that have changed in a run directory since ``sent``, possibly while it is written to.

    Before the run is over, nothing is read unless there is a new checkpoint. Manifests are read first. The rows up to
    that moment then suffice.

    Args:
        sent: is updated.
        over: whether nothing more will be written. Then files outside checkpoints are included.
    """
    if not Folder(path).has("config.json"):
        return
    run = Run(path)
    new = [which for which in run.rounds if checkpoint_name(which) not in sent]
    if new or over:
        names = [
            name
            for which in new
            for name in (*_blobs(run, [which]), checkpoint_name(which))
        ]
        yield from batches(run.folder, [*_root(run), *names], sent)


def _root(run: Run) -> list[str]:
    names = (
        *ROOT_FILES,
        START,
        run.rows_path.name,
        "manifest.json",
        "plan.json",
        CODE,
        "timing.jsonl",
    )
    return [name for name in names if run.folder.has(name)]


def _blobs(run: Run, rounds: list[int]) -> list[str]:
    entries = [
        entry for which in rounds for entry in run.manifest(which)["states"].values()
    ]
    return [
        blob_name(blob)
        for blob in dict.fromkeys(entry["blob"] for entry in entries)
        if blob
    ]


def write_files(
    path: Path, parcel: FileBatch, allowed: re.Pattern[str] = RUN_FILES
) -> None:
    """Write a batch of files below a folder in their order, each atomically.

    Args:
        allowed: matches each name as a whole. The default matches the files of a run directory.

    Raises:
        CorruptError: a name is not allowed in such a folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    folder = Folder(path)
    for name, data in parcel.items():
        if not allowed.fullmatch(name):
            raise CorruptError(
                f"name of a file in {path} must be that of a stored file; got {name!r}."
            )
        folder.write(name, data)


def batches(folder: Folder, names: list[str], sent: Sent) -> Iterator[FileBatch]:
    """Yield those of the named files that have not been sent, or have changed since."""
    parcel: FileBatch = {}
    for name in names:
        if name in sent and "/" in name:  # such files never change
            continue
        data = folder.read(name)
        digest = sha(data)
        if sent.get(name) == digest:
            continue
        sent[name] = digest
        parcel[name] = data
        if sum(map(len, parcel.values())) >= BYTES:
            yield parcel
            parcel = {}
    if parcel:
        yield parcel
