"""A work that needs no training; for processes that import little."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

from fl_core.errors import RunError, UsageError


@dataclass(frozen=True)
class Toy:
    """A work that needs no training: it ends its process so many times, then warns, fails or returns."""

    path: Path
    dies: int = 0
    fails: str = ""

    name = "toy"
    gpus = 0

    def carry_out(self):
        tries = len(list(self.path.iterdir()))
        (self.path / str(tries)).touch()
        if tries < self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails == "exit":
            os._exit(7)
        if self.fails:
            raise {"usage": UsageError, "run": RunError, "other": KeyError}[self.fails](
                "what is wrong"
            )
        warnings.warn("of note", stacklevel=1)
        return os.getpid(), os.environ.get("OMP_NUM_THREADS")
