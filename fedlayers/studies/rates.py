"""Tunes the learning rate before a race: several rates of one good cut are trained, and the best one is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.backends.base import Backend
from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.harmless import Bench
from fedlayers.studies.jobs import Tell, TrainingJob, jobs_of, train
from fedlayers.studies.race import standings, with_evaluations, with_plan_algorithm
from fl_core.config import RunConfig, is_file, resolve
from fl_core.errors import RunError, UsageError, listing
from fl_core.layers import Layer
from fl_core.rows import records

FACTORS = (1.0, 3.0, 10.0, 30.0, 0.3)
"""The rates that are tried, times the default, in the order in which they are taken (``decision.tuned``)."""
COUNT = 4
"""How many rates are tried by default for your own data."""
PROBE = "all_but_last"
"""The cut whose rates are tried."""


@dataclass(frozen=True)
class Rates:
    """The rates that were tried.

    Attributes:
        table: A line for each run: ``lr``, ``seed``, its scores on validation samples, and ``ranked``, higher is
            better.
        lr: The best.
        jobs: The runs that did not diverge.
    """

    table: pd.DataFrame
    lr: float
    jobs: tuple[TrainingJob, ...]

    def text(self) -> str:
        """Return the rates that were tried, and the best. The scores are in ``table``."""
        tried = self.table["lr"]
        told = (
            f"Learning rates tried on validation: {listing(f'{lr:g}' for lr in tried)}."
        )
        told += (
            f" Used: {self.lr:g}. Use it in other runs with the plan: --lr {self.lr:g}."
        )
        if self.lr in (tried.min(), tried.max()):
            told += f" It is the {'largest' if self.lr == tried.max() else 'smallest'} of them: try more with --lr."
        return told

    def to_json(self) -> dict[str, Any]:
        """Return the rates and their scores, for JSON."""
        return {"used": self.lr, "tried": records(self.table)}


def at_rate(
    arms: Sequence[Arm], config: RunConfig, seeds: Sequence[int], out: Path, lr: float
) -> list[TrainingJob]:
    """Return the runs of every arm with every seed at a rate. The rate is in their folders' names."""
    own = config.with_keys(lr=lr)
    return jobs_of(arms, own, seeds, out, f"-lr{lr:g}", quiet=True)


def rate_jobs(
    config: RunConfig, rates: Sequence[float], layers: Sequence[Layer], out: Path
) -> list[TrainingJob]:
    """Return the runs of :data:`PROBE` with the configuration's seed, one for each rate."""
    config = with_evaluations(with_plan_algorithm(config)).with_keys(workers=0)
    probe = arms_of((PROBE, "all"), layers, config.federation.algorithm)[:1]
    seeds = (config.execution.seed,)
    return [job for lr in rates for job in at_rate(probe, config, seeds, out, lr)]


def best_rate(
    jobs: Sequence[TrainingJob], place: Backend, tell: Tell, bench: Bench
) -> Rates:
    """Train the runs to the end, and choose the rate by :meth:`~fedlayers.studies.harmless.Bench.rank_value`.

    Args:
        jobs: of :func:`rate_jobs`.
        bench: the samples of the runs' seed.

    Raises:
        RunError: Training diverged at every rate.
    """
    failed = train(jobs, place, tell)
    sound = [job for job in jobs if job.name not in failed]
    if not sound:
        raise RunError(
            f"training failed at every rate, the first with: {next(iter(failed.values()))}"
        )
    rounds = int(resolve(jobs[0].config).federation.rounds or 1)
    judged = standings(jobs, rounds, failed).judged
    values = {
        job.name: bench.rank_value(bench.of_run(job.path, job.name)) for job in sound
    }
    table = judged.drop(columns=["run", "arm", "score"]).assign(
        ranked=judged["run"].map(values)
    )
    best = float(table.loc[table["ranked"].fillna(-math.inf).idxmax(), "lr"])
    tried = listing(f"{lr:g}" for lr in table["lr"])
    tell(f"learning rates {tried}: {best:g} is used")
    return Rates(table, best, tuple(sound))


def rates_of(
    config: RunConfig, default: float, count: int | None, tell: Tell
) -> tuple[float, ...]:
    """Return the rates to try; none where the rate is given or known.

    By default :data:`COUNT` rates are tried for your own data. A named dataset has its own rate.

    >>> rates_of(RunConfig(dataset="heart"), 0.01, 4, print)
    (0.01, 0.03, 0.1, 0.3)
    >>> rates_of(RunConfig(dataset="heart"), 0.01, None, print)
    ()

    Args:
        default: The rate that the configuration has without a search.
        count: Asked for; 0 for none, None for the default.

    Raises:
        UsageError: Fewer than two, or more than there are.
    """
    if count is not None and count and not 2 <= count <= len(FACTORS):
        raise UsageError(
            f"tune_rates must be from 2 to {len(FACTORS)}, or 0 for none; got {count}. Leave it out."
        )
    if config.training.lr is not None:
        if count:
            tell(f"lr {config.training.lr:g} is given and kept: no rates are tuned")
        return ()
    if count is None:
        count = (
            COUNT if config.own_data is not None or is_file(config.data.dataset) else 0
        )
    return tuple(float(f"{default * factor:.3g}") for factor in FACTORS[:count])
