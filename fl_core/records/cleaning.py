"""Removal of checkpoints that a run directory does not need to be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_core.records import writing
from fl_core.records.checking import CLEANED, cleaned
from fl_core.records.store import blob_name, checkpoint_name
from fl_core.storage.files import signed


def clean(path: Path | str) -> int:
    """Remove all checkpoints of a run but the last and the best, and return the number of freed bytes.

    The best ones are those of a stopping rule. A note of the removed ones is written first, so that a check of the run
    does not miss them. The run can be resumed, but models of other rounds are gone.

    Raises:
        UsageError: there is no run.
        BusyError: it is running.
        CorruptError: it is damaged. Nothing is removed then.
    """
    with writing.reopen(path) as writer:
        run = writer.run
        if not run.rounds:
            return 0
        run.verify()
        rule = run.stopping()
        needed = {run.rounds[-1], *(() if rule is None else rule.best.values())}
        earlier = [which for which in run.rounds if which not in needed]
        kept = {blob for which in needed for blob in _blobs(run.manifest(which))}
        noted = cleaned(run)
        gone = {blob for which in earlier for blob in _blobs(run.manifest(which))} | {*noted["blobs"]}
        blobs = sorted(blob for blob in gone - kept if run.folder.has(blob_name(blob)))
        if not earlier and not blobs:
            return 0
        note = {"run": run.id, "rounds": sorted({*noted["rounds"], *earlier}), "blobs": blobs}
        run.folder.write(CLEANED, signed(note))
        names = [*map(checkpoint_name, earlier), *map(blob_name, blobs)]
        freed = sum(run.folder.size(name) for name in names)
        for name in names:
            run.folder.remove(name)
        return freed


def _blobs(manifest: dict[str, Any]) -> set[str]:
    """Return the blobs that a checkpoint names."""
    return {entry["blob"] for entry in manifest["states"].values()} - {""}


def runs_below(path: Path) -> list[Path]:
    """Return the run directories in a folder, at any depth, and the folder itself if it is one."""
    return sorted(each.parent for each in path.rglob("config.json"))
