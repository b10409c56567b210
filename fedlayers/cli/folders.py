"""Commands on folders of runs: runs, clean."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from fedlayers.cli.arguments import flags, option
from fedlayers.cli.base import Command
from fl_core.config import KEYS, RunConfig
from fl_core.data.columns import READING, Reading
from fl_core.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from fl_core.data.sources import Source
    from fl_core.records.store import Run

ReadingFlags = Annotated[
    RunConfig, flags(without=[key for key in KEYS if key not in READING])
]
Folder = Annotated[
    Positional[Path], option("Run directory, or a folder with runs.", "DIR")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(Command):
    """Check a table of yours, and print how to read it.

    It lists every column, all faults, and one command that works.

    Examples:
        fedlayers check patients.csv --label-column died
    """

    data: Annotated[
        Positional[Path],
        option("Your table, a folder with tables, or A.csv,B.csv.", "DATA"),
    ]
    config: ReadingFlags

    def main(self, line: str) -> None:
        from fl_core.data import frames, tables

        if not (frames.is_table(self.data) or self.data.suffix.lower() == ".jsonl"):
            raise UsageError(
                f"DATA must be a table or a folder of tables; got {str(self.data)!r}."
            )

        def read(settings: Reading) -> Source:
            return tables.read_table(self.data, settings)

        source, faults, settings = tables.find_faults(read, self.config.data)
        print("\n".join(tables.report_faults(source, faults, settings, self.data)))
        if source is not None:
            print(source.table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs(Command):
    """List the runs in a folder, with scores and sizes.

    Examples:
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers runs runs
    """

    dir: Folder

    def main(self, line: str) -> None:
        found = _below(self.dir)

        import pandas as pd

        table = pd.DataFrame([_describe(path, self.dir) for path in found]).fillna("")
        print(table.to_string(index=False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clean(Command):
    """Remove old checkpoints of the runs in a folder.

    The last and the best checkpoint stay. Rows are compressed. All runs can still be resumed.

    Examples:
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers clean runs
    """

    dir: Folder

    def main(self, line: str) -> None:
        found = _below(self.dir)

        from fl_core.errors import BusyError
        from fl_core.records.writing import clean

        before = _size(self.dir)
        for path in found:
            try:
                clean(path)
            except (CorruptError, BusyError, UsageError) as error:
                print(f"{path} stays as it is: {error}")
        after = _size(self.dir)
        print(f"{self.dir}: {before - after:.1f} MB removed, {after:.1f} MB left")


def _below(path: Path) -> list[Path]:
    from fl_core.records.writing import runs_below

    if not path.is_dir():
        raise UsageError(
            f"DIR must be a folder that is there; got {str(path)!r}. Name a run directory or a study's."
        )
    found = runs_below(path)
    if not found:
        raise UsageError(
            f"DIR must hold runs; got none below {str(path)!r}. Name a run directory or a study's."
        )
    return found


def _size(path: Path) -> float:
    """Return the size of a folder in MB. A file with several names counts once."""
    found = [each.lstat() for each in path.rglob("*") if each.is_file()]
    return (
        sum({(each.st_dev, each.st_ino): each.st_size for each in found}.values()) / 1e6
    )


def _describe(path: Path, below: Path) -> dict[str, str]:
    """Return the columns of a run: its algorithm, its rounds, and its test scores after the last evaluation."""
    from fl_core.records.store import Run

    line = {"run": str(path.relative_to(below)), "MB": f"{_size(path):.1f}"}
    try:
        run = Run(path)
        config, rounds = run.config, run.rounds
        line |= {
            "algorithm": config["algorithm"],
            "seed": str(config["seed"]),
            "rounds": f"{max(rounds, default=0)}/{config['rounds']}",
        }
        return line | _scores(run)
    except (CorruptError, UsageError) as error:
        return line | {"status": f"damaged: {error}"}


def _scores(run: Run) -> dict[str, str]:
    """Return each model's score, the mean over clients weighted by training samples."""
    from fl_core import statistics
    from fl_core.scores import SCORES, main_score

    if not run.begun:
        return {"status": "not begun"}
    rows = run.rows()[1]
    rows = rows[(rows["split"] == "test") & (rows["client"] != "")]
    rows = rows[rows["round"] == rows["round"].max()]
    there = set(rows["metric"])
    by = next((name for name in (main_score(there), *SCORES) if name in there), "")
    of_models = rows[rows["metric"] == by].groupby("model")
    return {
        f"{by} {model}": f"{statistics.combine(own['value'], own['n_train']):.4f}"
        for model, own in of_models
    }
