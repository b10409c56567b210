"""Send each run of a comparison to Slurm as a job of its own, by submitit. A job that was cut off resumes its run.

    pip install submitit
    python -m examples.slurm_jobs --dataset heart --algorithms local fedavg fedper --seeds 3 --out runs/heart

``--cluster local`` runs the jobs as processes of this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedlayers as fl
from fl_core.config import RunConfig


def train(config: RunConfig, out: str) -> int:
    """Train one run, or resume it if its directory has one. Return the rounds that it has trained."""
    begun = (Path(out) / "config.json").exists()
    run = (
        fl.resume(out, progress=False) if begun else fl.run(config, out, progress=False)
    )
    return run.done


def submit(
    config: RunConfig,
    algorithms: Sequence[str],
    seeds: int,
    out: Path,
    cluster: str,
    **slurm: Any,
) -> list[Any]:
    """Send one job for each algorithm and seed. Return submitit's jobs.

    Args:
        cluster: ``slurm`` or ``local``. slurm: parameters of submitit's executor, such as ``slurm_partition``.
    """
    from submitit import AutoExecutor

    executor = AutoExecutor(folder=out / "jobs", cluster=cluster)
    executor.update_parameters(cpus_per_task=1, **slurm)
    return [
        executor.submit(
            train,
            config.with_keys(algorithm=name, seed=seed),
            str(out.resolve() / f"{name}-{seed}"),
        )
        for name in algorithms
        for seed in range(seeds)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="heart")
    parser.add_argument(
        "--algorithms", nargs="+", default=["local", "fedavg", "fedper"]
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/slurm"))
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--minutes", type=int, default=60, help="limit of a job")
    asked = parser.parse_args(argv)
    config = RunConfig(dataset=asked.dataset, rounds=asked.rounds)
    out: Path = asked.out
    jobs = submit(
        config,
        asked.algorithms,
        asked.seeds,
        out,
        asked.cluster,
        timeout_min=asked.minutes,
    )
    for job in jobs:
        print(f"job {job.job_id} ended after round {job.result()}")
    print(f"fedlayers runs {out} lists them")


if __name__ == "__main__":
    main()
