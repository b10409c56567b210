"""The check of a run directory: every byte is as it was written, or the faulty file is named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fl_core.errors import CorruptError, listing
from fl_core.records import timing
from fl_core.storage.files import SUFFIX, json_bytes, open_packed
from fl_core.storage.schema import COUNT, DIGEST

if TYPE_CHECKING:
    from fl_core.records.store import Run

CLEANED = "cleaned.json"
"""The file that lists checkpoints removed on purpose, and the blobs removed with them."""
NOTE = {"run": DIGEST, "rounds": [COUNT], "blobs": [DIGEST]}
"""The form of that file."""
_CHUNK = 2**20  # bytes of the rows that are held at a time while they are checked


def verify(run: Run) -> list[str]:
    """Check every covered byte of a run; see :meth:`fl_core.records.store.Run.verify`."""
    if not run.begun:
        path = run.path / "manifest.json"
        raise CorruptError(
            f"{path} is missing: the run was never fully created. Resume it to start from round 0."
        )
    saved = _saved_rounds(
        run
    )  # first: a writer may be at work, and the checkpoint comes before its round's time
    checked = run.check_files()
    seen: set[str] = set()
    ends = [run.begin()["rows"]]
    rounds = run.rounds
    if missing := saved - {*rounds, *removed_on_purpose(run)["rounds"]}:
        raise CorruptError(_missing(run, max(missing)))
    for which in rounds:
        found = run.manifest(which)
        for entry in found["states"].values():
            if entry["blob"] not in seen:
                run.check_trees(entry)
                seen.add(entry["blob"])
        ends.append(found["rows"])
        checked.append(f"checkpoint after round {which}: {len(found['states'])} states")
    check_rows(run, *ends)
    covered = ends[-1]["bytes"]
    size = _bytes_of_rows(run)
    beyond = (
        f", {size - covered:,} bytes after the last checkpoint not covered"
        if size > covered
        else ""
    )
    checked.append(f"{len(seen - {''})} blobs; rows up to {covered:,} bytes{beyond}")
    plan = run.plan()
    if plan is not None:
        if run.folder.read("plan.json") != json_bytes(plan):
            raise CorruptError(
                f"{run.path / 'plan.json'} is damaged: it is not the plan of this run"
            )
        checked.append("plan.json")
    rule = run.stopping_rule()
    for model, best in ({} if rule is None else rule.best).items():
        if best not in rounds:
            raise CorruptError(
                f"{run.checkpoint_path(best)} is missing: it is the best round of the {model} models"
            )
        checked.append(f"best round of the {model} models: {best}")
    for change in run.code_changes():
        checked.append(
            f"code of {listing(change['changed'])}: changed after round {change['round']}"
        )
    last, asked = max(rounds, default=0), run.config.get("rounds")
    if last == asked:
        checked.append(f"{last} of {asked} rounds")
    elif run.finished:
        checked.append(
            f"{last} of at most {asked} rounds: stopped by the stopping rule"
        )
    else:
        checked.append(f"{last} of {asked} rounds: not finished, resume continues it")
    return checked


def _missing(run: Run, which: int) -> str:
    last = max(run.rounds, default=0)
    there = f"{run.checkpoint_path(which)} is missing: the run had saved round {which}"
    if which < last:
        return f"{there}. Restore it from a copy."
    return f"{there}, and {last} of {run.config.get('rounds')} are left. Resume it to train the others again."


def removed_on_purpose(run: Run) -> dict[str, Any]:
    """Return the rounds whose checkpoints were removed on purpose, and the blobs that were removed with them.

    Raises:
        CorruptError: the note is damaged, or another run's.
    """
    if not run.folder.has(CLEANED):
        return {"rounds": [], "blobs": []}
    found = run.folder.read_signed(CLEANED, NOTE)
    if found["run"] != run.id:
        raise CorruptError(f"{run.path / CLEANED} is another run's")
    return found


def check_rows(run: Run, *ends: Mapping[str, Any]) -> None:
    """Check the rows up to each of these ascending ends.

    Raises:
        CorruptError: they are missing, or differ from what was written.
    """
    digest, at = hashlib.sha256(), 0
    with open_packed(run.folder, "rows.jsonl") as file:
        for end in ends:
            while at < end["bytes"] and (
                some := file.read(min(end["bytes"] - at, _CHUNK))
            ):
                digest.update(some)
                at += len(some)
            if at != end["bytes"] or digest.hexdigest() != end["sha256"]:
                raise CorruptError(
                    f"{run.rows_path} is damaged within its first {end['bytes']:,} bytes"
                )


def _bytes_of_rows(run: Run) -> int:
    """Return the number of bytes of the rows, unpacked."""
    if run.rows_path.suffix != SUFFIX:
        return run.folder.size(run.rows_path.name)
    with open_packed(run.folder, "rows.jsonl") as file:
        return sum(map(len, iter(lambda: file.read(_CHUNK), b"")))


def _saved_rounds(run: Run) -> set[int]:
    """Return the rounds after which a checkpoint was written, as the run's times tell."""
    return (
        timing.saved_rounds(run.folder.read("timing.jsonl"))
        if run.folder.has("timing.jsonl")
        else set()
    )
