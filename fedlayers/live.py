"""The picture of runs that train: their main score over the rounds, drawn again in a notebook's cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fl_core import rows
from fl_core.progress import Cell
from fl_core.recorder import LoggedRun, Logger
from fl_core.records.store import Run
from fl_core.rows import Row, main_score

if TYPE_CHECKING:
    import pandas as pd


class Live:
    """One picture of several runs on validation samples, or on test samples if there are no others."""

    def __init__(self) -> None:
        self.cell = Cell()
        self.frames: dict[str, pd.DataFrame] = {}

    def add(self, run: str, frame: pd.DataFrame) -> None:
        """Replace the rows of a run, and draw all runs if the last picture is a second old."""
        self.frames[run] = frame
        if self.cell.due:
            self.draw()

    def draw(self) -> None:
        """Draw a line for each algorithm that the rows name."""
        import pandas as pd

        from diagnostics import plots

        if not self.frames:
            return
        frame = pd.concat(self.frames.values(), ignore_index=True)
        main = main_score(frame["metric"].unique())
        split = "validation" if (frame["split"] == "validation").any() else "test"
        self.cell.show_figure(plots.learning(frame, main, split=split))


class LiveRun(Logger):
    """Adds one run to a picture while it trains.

    Args:
        live: the picture, drawn a last time by its owner.
        label: the run's name there; by default that of its algorithm.
    """

    def __init__(self, live: Live, label: str = "") -> None:
        self.live, self.label = live, label

    def begin(self, run: LoggedRun) -> None:
        """Take the rows that a resumed run has already."""
        self.run = str(run.path)
        self.rows: list[Row] = []
        if run.path is not None and run.done:
            self.rows += rows.records(Run(run.path).rows()[1])

    def log(self, new: Sequence[Row]) -> None:
        """Add the rows of a round."""
        self.rows += new
        if self.live.cell.due:
            self.close(finished=False)

    def close(self, finished: bool) -> None:
        """Give the picture all rows so far."""
        if self.rows:
            frame = rows.frame(self.rows)
            label = self.label or frame["algorithm"]
            self.live.add(self.run, frame.assign(algorithm=label))


@contextmanager
def open_live(shown: bool) -> Iterator[Live | None]:
    """Give a picture, drawn a last time at the end; None if it is not shown."""
    live = Live() if shown else None
    try:
        yield live
    finally:
        if live is not None:
            live.draw()
