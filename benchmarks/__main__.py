"""``python -m benchmarks j1 j2``: run jobs and write their tables; ``list`` names them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from benchmarks import (
    diagnosis,
    machine,
    measurements,
    peers,
    scale,
    startup,
    training,
    transformer,
)
from benchmarks.pairs import table
from fl_core.errors import RunError, UsageError, check_known

JOBS: dict[str, Callable[..., Any]] = {
    **measurements.JOBS,
    **diagnosis.JOBS,
    **training.JOBS,
    **machine.JOBS,
    "startup": startup.startup,
    **transformer.JOBS,
    "peers": peers.peers,
    "scale": scale.scale,
}


def main(jobs: tyro.conf.Positional[tuple[str, ...]], pairs: int | None = None) -> None:
    """Run jobs, each alternating with its baseline, and write benchmarks/results/JOB.csv.

    Args:
        jobs: names of jobs, or ``list``.
        pairs: number of alternating pairs, of seeds (coverage) or of processes a point (scale). No table is written
            then.
    """
    if jobs == ("list",):
        for job_name, job in JOBS.items():
            summary = (job.__doc__ or "").splitlines()[0]
            print(f"{job_name:16} {summary}")
        return
    for job_name in jobs:
        check_known("benchmark", job_name, JOBS)
    for job_name in jobs:
        rows = JOBS[job_name]() if pairs is None else JOBS[job_name](pairs)
        if pairs is None:
            path = table(job_name, rows, f"python -m benchmarks {job_name}")
            print(f"wrote {path}")


def command(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 for a usage error, 1 for a failure, with one line that says why."""
    try:
        tyro.cli(main, prog="python -m benchmarks", args=argv)
    except (UsageError, RunError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    command()
