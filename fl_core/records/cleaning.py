"""Less disk for runs: without checkpoints that nothing resumes from, and with packed rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fl_core.records import writing
from fl_core.records.checking import CLEANED, removed_on_purpose
from fl_core.records.store import ROWS, Run, blob_name, checkpoint_name
from fl_core.storage.files import pack, sign

_BLOB = re.compile(r"([0-9a-f]{64})\.safetensors")


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
    with writing.reopen(path) as writer:
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
