"""``python -m benchmarks j1 j2``: run jobs and write their tables; ``list`` names them."""

from __future__ import annotations

import tyro

from benchmarks import measurements, picture, training
from benchmarks.pairs import table
from fl_core.errors import check_known

JOBS = {**measurements.JOBS, **training.JOBS}


def main(jobs: tyro.conf.Positional[tuple[str, ...]], pairs: int | None = None) -> None:
    """Run jobs by name, each in an alternating run with its baseline, and write benchmarks/results/JOB.csv.

    Args:
        jobs: names; or ``list``, or ``plot`` for a picture of the tables that there are.
        pairs: alternating pairs (for coverage: seeds) in place of each job's own number; nothing is written then.
    """
    if jobs == ("list",):
        for name, job in JOBS.items():
            print(f"{name:12} {(job.__doc__ or '').splitlines()[0]}")
        return
    if jobs == ("plot",):
        print(f"wrote {picture.draw()}")
        return
    for name in jobs:
        check_known("benchmark", name, JOBS)
    for name in jobs:
        rows = JOBS[name]() if pairs is None else JOBS[name](pairs)
        if pairs is None:
            print(f"wrote {table(name, rows, f'python -m benchmarks {name}')}")


if __name__ == "__main__":
    tyro.cli(main)
