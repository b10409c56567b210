"""The check of a run directory: every byte is as it was written, or the faulty file is named."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fl_core.errors import CorruptError, ForeignError
from fl_core.records import timing
from fl_core.stopping import StoppingRule
from fl_core.storage.files import Folder, json_bytes, sha
from fl_core.storage.packing import SUFFIX, open_packed
from fl_core.storage.schema import COUNT, DIGEST

JOURNAL = "journal.jsonl"
"""The blobs of a checkpoint that is being written, announced before they are."""
CLEANED = "cleaned.json"
"""The file that lists checkpoints removed on purpose, and the blobs removed with them."""
NOTE = {"run": DIGEST, "rounds": [COUNT], "blobs": [DIGEST]}
"""The form of that file."""
_CHUNK = 2**20  # bytes of the rows that are held at a time while they are checked
_BLOB = re.compile(r"[0-9a-f]{64}\.safetensors")


class RunFiles(Protocol):
    """The parts of a run directory that its checks read; :class:`fl_core.records.store.Run` has them."""

    path: Path
    folder: Folder

    @property
    def rows_path(self) -> Path: ...
    @property
    def begun(self) -> bool: ...
    @property
    def id(self) -> str: ...
    @property
    def rounds(self) -> list[int]: ...
    @property
    def finished(self) -> bool: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def stopping_rule(self) -> StoppingRule | None: ...
    def begin(self) -> dict[str, Any]: ...
    def plan(self) -> dict[str, Any] | None: ...
    def manifest(self, which: int) -> dict[str, Any]: ...
    def checkpoint_path(self, which: int) -> Path: ...
    def check_files(self) -> list[str]: ...
    def check_trees(self, entry: Mapping[str, Any]) -> None: ...
    def check_rows(self, *ends: Mapping[str, Any]) -> None: ...


def verify(run: RunFiles) -> list[str]:
    """Check every covered byte of a run; see :meth:`fl_core.records.store.Run.verify`."""
    if not run.begun:
        path = run.path / "manifest.json"
        raise CorruptError(f"{path} is missing: the run was never fully created. Resume it to start from round 0.")
    timed = _timed(run)  # first: a writer may be at work, and the checkpoint comes before its round's time
    blobs = [name.removesuffix(".safetensors") for name in run.folder.names("blobs") if _BLOB.fullmatch(name)]
    begun = run.folder.read(JOURNAL).decode(errors="replace").split() if run.folder.has(JOURNAL) else []
    checked = run.check_files()
    seen: set[str] = set()
    ends = [run.begin()["rows"]]
    manifests = {}
    removed = removed_on_purpose(run)
    rounds = dict.fromkeys(run.rounds)
    known = {None, *rounds, *removed["rounds"]}
    for which in rounds:
        found = manifests[which] = run.manifest(which)
        if found["previous"] not in known:
            raise CorruptError(f"{run.checkpoint_path(found['previous'])} is missing")
        for entry in found["states"].values():
            if entry["blob"] not in seen:
                run.check_trees(entry)
                seen.add(entry["blob"])
        ends.append(found["rows"])
        checked.append(f"checkpoint after round {which}: {len(found['states'])} states")
    check_chain(run, manifests)
    run.check_rows(*ends)
    covered = ends[-1]["bytes"]
    size = _bytes_of_rows(run)
    beyond = f", {size - covered:,} bytes after the last checkpoint not covered" if size > covered else ""
    checked.append(f"{len(seen - {''})} blobs; rows up to {covered:,} bytes{beyond}")
    plan = run.plan()
    if plan is not None:
        if run.folder.read("plan.json") != json_bytes(plan):
            raise CorruptError(f"{run.path / 'plan.json'} is damaged: it is not the plan of this run")
        checked.append("plan.json")
    rule = run.stopping_rule()
    for model, best in ({} if rule is None else rule.best).items():
        if best not in rounds:
            raise CorruptError(f"{run.checkpoint_path(best)} is missing: it is the best round of the {model} models")
        checked.append(f"best round of the {model} models: {best}")
    checked.append(_progress(run, timed))
    _check_named(run, {*blobs} - seen - {*begun} - {*removed["blobs"]})
    return checked


def removed_on_purpose(run: RunFiles) -> dict[str, Any]:
    """Return the rounds whose checkpoints were removed on purpose, and the blobs that were removed with them.

    Raises:
        CorruptError: the note is damaged. ForeignError: it is another run's.
    """
    if not run.folder.has(CLEANED):
        return {"rounds": [], "blobs": []}
    found = run.folder.read_signed(CLEANED, NOTE)
    if found["run"] != run.id:
        raise ForeignError(f"{run.path / CLEANED} is another run's")
    return found


def check_rows(run: RunFiles, *ends: Mapping[str, Any]) -> None:
    """Check the rows up to each of these ends; see :meth:`fl_core.records.store.Run.check_rows`."""
    digest, at = hashlib.sha256(), 0
    with open_packed(run.folder, "rows.jsonl") as file:
        for end in ends:
            while at < end["bytes"] and (some := file.read(min(end["bytes"] - at, _CHUNK))):
                digest.update(some)
                at += len(some)
            if at != end["bytes"] or digest.hexdigest() != end["sha256"]:
                raise CorruptError(f"{run.rows_path} is damaged within its first {end['bytes']:,} bytes")


def _bytes_of_rows(run: RunFiles) -> int:
    """Return the number of bytes of the rows, unpacked."""
    if run.rows_path.suffix != SUFFIX:
        return run.folder.size(run.rows_path.name)
    with open_packed(run.folder, "rows.jsonl") as file:
        return sum(map(len, iter(lambda: file.read(_CHUNK), b"")))


def _check_named(run: RunFiles, strange: set[str]) -> None:
    """Refuse whole blobs that no checkpoint names, in a run that is not over: the one that named them is gone.

    Raises:
        CorruptError: names the first, and the checkpoint before the one that is missing.
    """
    last = max(run.rounds, default=0)
    if run.finished or run.begin()["format"] == "fedlayers.run/1":  # which kept no journal
        return
    for blob in sorted(strange):
        name = f"blobs/{blob}.safetensors"
        if run.folder.is_own(name) and sha(run.folder.read(name)) == blob:
            raise CorruptError(
                f"the checkpoint after round {last} in {run.path / 'checkpoints'} is missing: {name} belongs to "
                "it. Resume the run to train those rounds again."
            )


def check_chain(run: RunFiles, manifests: Mapping[int, Mapping[str, Any]]) -> None:
    """Hold every checkpoint against the one that it says it was written after, as far as both are given.

    Raises:
        ForeignError: names the one that does not belong between its neighbours, or both where nothing tells.
    """
    digests = {which: sha(run.folder.read(f"checkpoints/{which:06d}.json")) for which in manifests}

    def follows(later: Mapping[str, Any]) -> bool:
        return later.get("chain") == digests[later["previous"]]

    linked = {k: found for k, found in manifests.items() if found.get("chain") and found["previous"] in manifests}
    for which, found in linked.items():
        if not follows(found):
            path, before = run.checkpoint_path(which), run.checkpoint_path(found["previous"])
            after = [follows(later) for later in linked.values() if later["previous"] == which]
            if not after:
                raise ForeignError(f"{path} and {before} do not belong together: one is of another time or run.")
            raise ForeignError(
                f"{before if any(after) else path} is of another time or run: it does not fit its neighbours."
            )


def is_foreign(run: RunFiles) -> bool:
    """Return whether ``manifest.json`` is another run's, if something else does not fit it.

    The checkpoints show it, because they name their run. Where none does, the manifest is at fault if two of the files
    that it covers differ at once, each of them there.
    """
    known = {found["run"] for found in _sound(run) if "run" in found}
    if known:
        return run.id not in known and len(known) == 1 and _wrong(run) > 0
    begin = run.begin()
    names = [*begin["files"], run.rows_path.name]
    return all(map(run.folder.is_own, names)) and _wrong(run) > 1


def _wrong(run: RunFiles) -> int:
    """Count the files that differ from the manifest."""
    begin = run.begin()
    wrong = 0
    for name, entry in begin["files"].items():
        try:
            run.folder.read_checked(name, entry["sha256"], entry["bytes"])
        except CorruptError:
            wrong += 1
    try:
        run.check_rows(begin["rows"])
    except CorruptError:
        wrong += 1
    return wrong


def _sound(run: RunFiles) -> Iterator[dict[str, Any]]:
    """The checkpoints' manifests that are not damaged, whosever they are."""
    for which in run.rounds:
        try:
            yield run.folder.read_signed(f"checkpoints/{which:06d}.json")
        except CorruptError:
            continue


def _timed(run: RunFiles) -> set[int]:
    return timing.rounds(run.folder.read("timing.jsonl")) if run.folder.has("timing.jsonl") else set()


def _progress(run: RunFiles, timed: set[int]) -> str:
    """Return the number of stored rounds in words.

    Raises:
        CorruptError: a checkpoint was written and is gone: its round's time was taken down, which is done after it.
    """
    config = run.config
    last, asked, every = max(run.rounds, default=0), config.get("rounds"), config.get("checkpoint_every") or 1
    gone = max((k for k in timed if k > last and (k == asked or k % every == 0)), default=0)
    if gone:
        what = "finished" if gone == asked else f"saved round {gone}"
        raise CorruptError(
            f"{run.checkpoint_path(gone)} is missing: the run had {what}, and {last} of {asked} rounds are "
            "left. Resume it to train the others again."
        )
    if last != asked and run.finished:
        return f"{last} of at most {asked} rounds: stopped by the stopping rule"
    return f"{last} of {asked} rounds" + ("" if last == asked else ": not finished, resume continues it")
