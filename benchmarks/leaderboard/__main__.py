"""``python -m benchmarks.leaderboard``: show the leaderboard, make missing runs, repeat stored ones, write its page."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import tyro

from benchmarks.leaderboard import analysis, page, runs
from benchmarks.leaderboard.federations import FEDERATIONS
from benchmarks.leaderboard.methods import METHODS, Method, own_method
from fl_core.algorithms.base import find
from fl_core.errors import RunError, UsageError, check_known


def main(
    run: bool = False,
    federations: tuple[str, ...] = (),
    algorithm: str = "",
    again: int = 0,
    write: bool = False,
    out: Path = Path("out/leaderboard/rows.parquet"),
    data_root: Path | None = None,
) -> None:
    """Compare personalised methods with equal tuning. Each has at most 8 trials, and three seeds for its scores.

    Args:
        run: train the runs that are missing. If it stops, type the same command again: it continues.
        federations: to run and show. Default: all; with your own algorithm, those where all others ran.
        algorithm: to add: a name, or package.module:Class. It is shown once its runs are complete.
        again: repeat N stored runs, chosen at random, and check that they have the same bits.
        write: write docs/results/leaderboard.md and its picture from the stored rows.
        out: file for new rows.
        data_root: folder of the datasets. Default: $FEDLAYERS_DATA_ROOT.
    """
    if write:
        print(f"wrote {page.write()}")
        return
    if algorithm:
        find(algorithm)
    chosen = [
        check_known("federation", name, FEDERATIONS) for name in federations
    ] or list(FEDERATIONS)
    own = {algorithm: own_method(algorithm)} if algorithm not in ("", *METHODS) else {}
    known = METHODS | own
    if own and run and not federations:
        there = runs.read(runs.STORED, out)
        chosen = [
            name
            for name in chosen
            if runs.complete(there, name) and not runs.absent(name, data_root)
        ]
    if run:
        count = runs.run(out, chosen, known, data_root, print)
        print(f"{count} new runs in {out}")
        if own and not count:
            print(
                "Finished runs are kept. Give an algorithm that you changed another --out."
            )
    rows = [row for row in runs.read(runs.STORED, out) if row["federation"] in chosen]
    if again:
        _repeat(
            [row for row in rows if row["method"] in known], again, known, data_root
        )
        return
    if own and not any(runs.complete(rows, name, known) for name in chosen):
        print(
            f"{algorithm} is not in the table: its runs are not complete. Continue with --run."
        )
        known = METHODS
    scored = analysis.scored_runs(rows, known)
    print(
        "\n".join(analysis.lead(scored)),
        analysis.display_table(scored).to_string(index=False),
        sep="\n\n",
    )


def _repeat(
    rows: Sequence[runs.Row],
    count: int,
    methods: Mapping[str, Method],
    data_root: Path | None,
) -> None:
    for stored, new in runs.repeat_runs(
        rows, count, data_root=data_root, methods=methods
    ):
        same = stored == new
        print(
            f"{stored['federation']} {stored['method']} seed {stored['seed']}: {'same' if same else 'other'} bits"
        )
        if not same:
            raise RunError(
                "a stored run must have the same bits when it is made again; got others."
            )


def command(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 for a usage error, 1 for a failure, with one line that says why."""
    try:
        tyro.cli(main, prog="python -m benchmarks.leaderboard", args=argv)
    except (UsageError, RunError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    command()
