"""Tunes the learning rate of a race: rates of one good cut first, then every cut at the rates that are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.backends.base import Backend
from fedlayers.studies.arms import Arm, arms_of
from fedlayers.studies.inference import ranked
from fedlayers.studies.race import Entry, Tell, entries_of, run_entries, standing
from fl_core.config import RunConfig
from fl_core.errors import RunError, UsageError, listing
from fl_core.layers import Layer
from fl_core.scores import main_score

FACTORS = (1.0, 3.0, 0.3, 10.0, 30.0)
"""The rates that are tried, times the dataset's default, in the order in which they are taken."""
LEFT = 2
"""Rates at which every cut is trained."""
PROBE = "all_but_last"
"""The cut whose rates are tried first."""


@dataclass(frozen=True)
class Rates:
    """The rates of a race.

    Attributes:
        table: A line for each run: ``arm``, ``lr``, ``seed``, and what it was judged by on validation samples.
        chosen: Each arm's rate.
        entries: All runs that were trained for them.
        main: The score beside the loss.
    """

    table: pd.DataFrame
    chosen: Mapping[str, float]
    entries: tuple[Entry, ...]
    main: str

    def text(self) -> str:
        """Return the rates that were tried, and each arm's own, in a line. The scores are in ``table``."""
        tried = listing(f"{lr:g}" for lr in self.table["lr"].unique())
        used = listing(f"{arm} {lr:g}" for arm, lr in self.chosen.items())
        return f"Learning rates tried on validation samples: {tried}. Used: {used}."

    def to_json(self) -> dict[str, Any]:
        """Return the rates and their scores, for JSON."""
        tried = self.table.astype(object).where(self.table.notna(), None)
        return {"chosen": dict(self.chosen), "tried": tried.to_dict("records")}


@dataclass(frozen=True)
class RateSearch:
    """The runs of a search over rates, before they are trained.

    Args:
        config: Of all runs, but for the rate.
        arms: What races.
        rates: That are tried with :data:`PROBE`.
        layers: The model's.
    """

    config: RunConfig
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...]
    layers: Sequence[Layer]
    out: Path

    def first(self) -> list[Entry]:
        """Return the runs of one good cut with the first seed, at every rate."""
        probe = arms_of(("nothing", PROBE), self.layers, self.config.algorithm)[1:]
        return self._at(probe, self.seeds[:1], self.rates)

    def second(self, rates: Sequence[float]) -> list[Entry]:
        """Return the runs of every arm with every seed, at the rates that are left."""
        return self._at(self.arms, self.seeds, rates)

    def at_most(self) -> list[Entry]:
        """Return as many runs as the search has at most, to foresee what they cost."""
        return _distinct([*self.first(), *self.second(self.rates[:LEFT])])

    def run(self, until: int, place: Backend, tell: Tell) -> tuple[list[Entry], Rates]:
        """Train the runs, and choose each arm's rate.

        Returns:
            The runs of the race, one for each arm and seed, and the rates.

        Raises:
            RunError: Training diverged at every rate.
        """
        first = self.first()
        order, judged = self._judged(first, until, place, tell)
        left = [first[order[k]].config.lr for k in range(min(LEFT, len(order)))]
        tell(f"rates left: {listing(f'{lr:g}' for lr in left)}")
        second = self.second([float(lr) for lr in left if lr is not None])
        order, found = self._judged(second, until, place, tell)
        chosen: dict[str, float] = {}
        for k in order:
            chosen.setdefault(second[k].arm.name, float(second[k].config.lr or 0))
        for entry in second:  # an arm that failed at every rate races at the first, and fails
            chosen.setdefault(entry.arm.name, float(entry.config.lr or 0))
        table = pd.concat([judged, found], ignore_index=True).drop_duplicates(["arm", "lr", "seed"])
        raced = [entry for entry in second if entry.config.lr == chosen[entry.arm.name]]
        return raced, Rates(table, chosen, tuple(_distinct([*first, *second])), main_score(table.columns))

    def _judged(
        self, entries: Sequence[Entry], until: int, place: Backend, tell: Tell
    ) -> tuple[list[int], pd.DataFrame]:
        """Train runs; return the first run of each (arm, rate), best first, and what all are judged by."""
        named = [
            replace(each, arm=replace(each.arm, name=f"{each.arm.name} at {each.config.lr:g}")) for each in entries
        ]
        failed = run_entries(named, until, place, tell)
        if len(failed) == len(named):
            raise RunError(f"training failed at every rate, the first with: {next(iter(failed.values()))}")
        judged = standing(named, until, failed).judged
        sound = {name for name, part in judged.groupby("arm") if part["score"].notna().all()}
        place_of = {each.arm.name: k for k, each in reversed(list(enumerate(named)))}
        order = [place_of[name] for name in ranked(judged) if name in sound]
        table = judged.assign(arm=[each.arm.name for each in entries], lr=[each.config.lr for each in entries])
        return order, table.drop(columns=["skill", "score"])

    def _at(self, arms: Sequence[Arm], seeds: Sequence[int], rates: Sequence[float]) -> list[Entry]:
        found = []
        for rate in rates:
            for entry in entries_of(tuple(arms), replace(self.config, lr=rate), seeds, self.out):
                folder = f"{entry.arm.folder}-lr{rate:g}-{entry.config.seed}"
                found.append(replace(entry, path=entry.path.with_name(folder)))
        return found


def rates_of(lr: float, count: int) -> tuple[float, ...]:
    """Return the rates to try: the default and those around it.

    >>> rates_of(0.01, 4)
    (0.01, 0.03, 0.003, 0.1)

    Raises:
        UsageError: Fewer than two, or more than there are.
    """
    if not 2 <= count <= len(FACTORS):
        raise UsageError(f"tune_rates must be from 2 to {len(FACTORS)}, or 0 for none; got {count}.")
    return tuple(float(f"{lr * factor:.3g}") for factor in FACTORS[:count])


def _distinct(entries: Sequence[Entry]) -> list[Entry]:
    return list({entry.path: entry for entry in entries}.values())
