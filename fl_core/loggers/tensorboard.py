"""Rows as TensorBoard's scalars."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fl_core.loggers.base import LoggedRun, Logger, logger, scalars
from fl_core.rows import Row


@logger
class TensorBoard(Logger):
    """Scalars for `tensorboard --logdir`, in the folder tensorboard of the run's directory.

    Without a directory they are in the default folder of PyTorch's SummaryWriter, below ``runs``. After a resume,
    points of repeated rounds are replaced.
    """

    name = "tensorboard"
    needs = ("tensorboard",)

    def begin(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = None if run.path is None else str(run.path / "tensorboard")
        self.writer = SummaryWriter(
            folder, purge_step=run.done + 1 if run.done else None
        )
        self.writer.add_text(
            "configuration", f"```\n{json.dumps(run.config, indent=1)}\n```", run.done
        )

    def log(self, rows: Sequence[Row]) -> None:
        for each in scalars(rows):
            self.writer.add_scalar(each.curve, each.value, each.round)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()
