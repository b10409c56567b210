"""A logger from outside: it receives a run's rows after every round.

fedlayers run --dataset heart --rounds 2 --logger examples.loggers.last_score:LastScore --out runs/logged
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import fedlayers as fl
from fl_core.rows import Row


class LastScore(fl.Logger):
    """Each client's last test accuracy, a file a client."""

    def begin(self, run: fl.LoggedRun) -> None:
        self.folder = Path(run.path or ".") / "last_scores"
        self.folder.mkdir(exist_ok=True)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["metric"] == "accuracy" and row["split"] == "test":
                (self.folder / row["client"]).write_text(f"{row['value']}\n")
