"""Train the runs of the tuned and finished study, or pack their rows into one file a federation.

    python -m figures.decision.train_finished --folder out/finished --budget 60
    python -m figures.decision.train_finished --folder out/finished --pack-into figures/rows/decision.finished

The first command resumes after an interruption. The second packs the federations whose runs are all there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import tyro

from figures import recipe
from figures.decision.finished import JOBS, STUDY, jobs
from figures.decision.finished_runs import ITEM, pack, planned
from fl_core.errors import RunError, UsageError

COMMAND = "python -m figures.decision.train_finished"


def main(
    folder: Path,
    only: tuple[str, ...] = (),
    budget: float | None = None,
    pack_into: Path | None = None,
    data_root: str | None = None,
) -> None:
    """Train the runs that are missing, the quick federations first; or pack what is there.

    Args:
        folder: of the runs' files, made if it is not there.
        only: federations to train; default all.
        budget: minutes after which no run is begun.
        pack_into: folder for the packed rows of finished federations; nothing is trained then.
        data_root: default: the environment's FEDLAYERS_DATA_ROOT.
    """
    try:
        if pack_into is not None:
            print(f"packed: {', '.join(pack(folder, pack_into)) or 'nothing is finished yet'}")
            return
        began = time.perf_counter()
        for name in dict.fromkeys(JOBS[run].federation for run, _ in planned(only)):
            left = None if budget is None else budget - (time.perf_counter() - began) / 60
            if left is not None and left <= 0:
                break
            options: dict[str, Any] = {"budget": left, "data_root": data_root, "command": COMMAND}
            names = [job.name for job in jobs(name)]
            recipe.train(ITEM, folder, only=names, seeds=STUDY[name].seeds, **options)
    except (UsageError, RunError) as error:
        print(f"train_finished: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    tyro.cli(main, prog=COMMAND)
