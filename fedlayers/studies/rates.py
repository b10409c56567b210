"""Tunes the learning rate before a race: several rates of one good cut are trained, and the best one is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.backends.base import Backend
from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.harmless import Bench
from fedlayers.studies.inference import rank_arms
from fedlayers.studies.race import (
    Entry,
    Tell,
    entries_of,
    run_entries,
    standings,
    with_evaluations,
    with_plan_algorithm,
)
from fl_core.config import RunConfig
from fl_core.defaults import is_file, resolve
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
        entries: The runs; ``sound`` those that did not diverge.
    """

    table: pd.DataFrame
    lr: float
    entries: tuple[Entry, ...]
    sound: tuple[Entry, ...] = ()

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


@dataclass(frozen=True)
class RateSearch:
    """The runs of a search over rates, before they are trained.

    Args:
        config: Of all runs, with the seed, but for the rate.
        rates: That are tried with :data:`PROBE`.
        layers: The model's.
    """

    config: RunConfig
    rates: tuple[float, ...]
    layers: Sequence[Layer]
    out: Path

    def entries(self) -> list[Entry]:
        """Return the runs of one good cut, one for each rate."""
        config = with_evaluations(with_plan_algorithm(self.config))
        probe = arms_of((PROBE, "all"), self.layers, config.federation.algorithm)[:1]
        return [
            entry
            for lr in self.rates
            for entry in at_rate(probe, config, (config.execution.seed,), self.out, lr)
        ]

    def run(self, place: Backend, tell: Tell, bench: Bench) -> Rates:
        """Train the runs to the end, and choose the rate by :meth:`~fedlayers.studies.harmless.Bench.rank_value`.

        Where the clients hold parts of the model, the ranks of the scores choose.

        Args:
            bench: the samples of the runs' seed.

        Raises:
            RunError: Training diverged at every rate.
        """
        entries = self.entries()
        named = [
            replace(
                each,
                arm=replace(each.arm, name=f"{PROBE} at {each.config.training.lr:g}"),
            )
            for each in entries
        ]
        failed = run_entries(named, None, place, tell)
        if len(failed) == len(named):
            raise RunError(
                f"training failed at every rate, the first with: {next(iter(failed.values()))}"
            )
        rounds = int(resolve(named[0].config).federation.rounds or 1)
        stands = standings(named, rounds, failed)
        judged = stands.judged
        rate_of = dict(zip((each.arm.name for each in named), self.rates, strict=True))
        sound = [
            entry
            for entry, other in zip(entries, named, strict=True)
            if other.key not in failed
        ]
        ranked: dict[float, float] = {}
        for entry in sound:
            with suppress(UsageError):  # its clients hold parts of the model
                own = bench.of_run(entry.path, entry.arm.name)
                ranked[float(entry.config.training.lr or 0)] = bench.rank_value(own)
        table = judged[["lr", "seed", *judged.columns[3:-1]]].assign(
            ranked=judged["lr"].map(ranked)
        )
        best = rate_of[rank_arms(judged, stands.main)[0]]
        if len(ranked) == len(sound) and not any(map(math.isnan, ranked.values())):
            best = max(ranked, key=ranked.__getitem__)
        tell(
            f"learning rates {listing(f'{lr:g}' for lr in self.rates)}: {best:g} is used"
        )
        return Rates(table, best, tuple(entries), tuple(sound))


def at_rate(
    arms: Sequence[Arm], config: RunConfig, seeds: Sequence[int], out: Path, lr: float
) -> list[Entry]:
    """Return the runs of every arm with every seed at a rate. The rate is in their folders' names."""
    entries = entries_of(tuple(arms), config.with_keys(lr=lr), seeds, out)
    return [
        replace(
            each,
            path=each.path.with_name(
                f"{each.arm.folder}-lr{lr:g}-{each.config.execution.seed}"
            ),
        )
        for each in entries
    ]


def distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Return the runs that are not there already: one run may try a rate and race."""
    return list({entry.path: entry for entry in entries}.values())


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
