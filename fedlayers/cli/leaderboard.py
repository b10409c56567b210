"""The command that shows and extends the leaderboard of methods: leaderboard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fedlayers import catalogue
from fedlayers.cli.arguments import option
from fedlayers.cli.base import Command
from fl_core.errors import RunError, UsageError

if TYPE_CHECKING:
    from fedlayers.leaderboard.methods import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaderboard(Command):
    """Compare personalised methods with equal tuning.

    Add your own method with --algorithm. Each method has at most 8 trials on validation, and three seeds for its
    scores. --run trains what is missing. If it stops, type the same command again: it continues.

    Examples:
        fedlayers leaderboard
        fedlayers leaderboard --again 1 --federations heart
        fedlayers leaderboard --run --federations heart --budget 5
    """

    run: Annotated[bool, option("Train the runs that are missing.")] = False
    budget: Annotated[float, option("Begin no further run after this many minutes.", "MINUTES")] = math.inf
    federations: Annotated[
        tuple[str, ...],
        option(
            "Federations to run and show. Default: all; with your own algorithm, those where all others ran.",
            "NAME [NAME ...]",
        ),
    ] = ()
    algorithm: Annotated[
        str,
        option("Algorithm to add: a name, or package.module:Class. It is shown once its runs are complete.", "NAME"),
    ] = ""
    again: Annotated[
        int, option("Repeat N stored runs, chosen at random, and check that they have the same bits.", "N")
    ] = 0
    out: Annotated[Path, option("Folder for new results.", "DIR")] = Path("out/leaderboard")
    data_root: Annotated[Path | None, option("Folder of the datasets. Default: $FEDLAYERS_DATA_ROOT.", "DIR")] = None

    def main(self, line: str) -> None:
        if self.budget != math.inf and not self.run:
            raise UsageError("budget must be used with --run; got it alone. Add --run.")
        if self.algorithm:
            catalogue.check("algorithm", self.algorithm)

        from fedlayers.leaderboard import analysis, runs
        from fedlayers.leaderboard.federations import FEDERATIONS
        from fedlayers.leaderboard.methods import METHODS, own_method
        from fl_core.errors import check_known

        chosen = [check_known("federation", name, FEDERATIONS) for name in self.federations] or list(FEDERATIONS)
        own = {self.algorithm: own_method(self.algorithm)} if self.algorithm not in ("", *METHODS) else {}
        known = METHODS | own
        if own and self.run and not self.federations:
            there = runs.read(runs.STORED, self.out)
            chosen = [name for name in chosen if runs.complete(there, name) and not runs.absent(name, self.data_root)]
        if self.run:
            count = runs.run(self.out, self.budget, chosen, known, self.data_root, print)
            print(f"{count} new runs in {self.out}")
            if own and not count:
                print("Finished runs are kept. Give an algorithm that you changed another --out.")
        rows = [row for row in runs.read(runs.STORED, self.out) if row["federation"] in chosen]
        if self.again:
            self._again([row for row in rows if row["method"] in known], known)
            return
        if own and not any(runs.complete(rows, name, known) for name in chosen):
            print(f"{self.algorithm} is not in the table: its runs are not complete. Continue with --run.")
            known = METHODS
        scored = analysis.scored_runs(rows, known)
        print("\n".join(analysis.lead(scored)), analysis.display_table(scored).to_string(index=False), sep="\n\n")

    def _again(self, rows: list[dict[str, Any]], methods: Mapping[str, Method]) -> None:
        from fedlayers.leaderboard import runs

        for stored, new in runs.repeat_runs(rows, self.again, data_root=self.data_root, methods=methods):
            same = stored == new
            print(
                f"{stored['federation']} {stored['method']} seed {stored['seed']}: {'same' if same else 'other'} bits"
            )
            if not same:
                raise RunError("a stored run must have the same bits when it is made again; got others.")

    def interrupted(self) -> str:
        return "the same command continues" if self.run else super().interrupted()
