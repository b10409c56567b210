"""From finished runs to a recommendation: which arms are refused, which leads, and how its model does on test."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedlayers.studies.baselines import predictors
from fedlayers.studies.choice import Choice
from fedlayers.studies.compare import samples_of
from fedlayers.studies.harmless import (
    BASE_RATE,
    TEST,
    VALIDATION,
    Bench,
    Predictor,
    Z,
)
from fedlayers.studies.inference import NOTHING, Inference, infer
from fedlayers.studies.judge import EarlyStop
from fedlayers.studies.race import Entry, Standing, standings
from fedlayers.studies.rates import Rates, distinct
from fedlayers.studies.runtime_estimate import Cost, bytes_a_round
from fedlayers.studies.sentences import compared
from fl_core.errors import UsageError
from fl_core.scores import SCORES
from fl_core.statistics import UNKNOWN, Interval

if TYPE_CHECKING:
    from fedlayers.studies.choose import Race
    from fl_core.task import Task

REFUSED = "refused: above the base rate"
NO_COST = Cost(0, 0, 0.0, 0.0, 0.0)


@dataclass
class Trial:
    """A finished run, next to the base rate of its seed.

    Attributes:
        main, loss: its scores on validation, smoothed, by which it is ranked.
        tempered: its validation loss after a cross-fitted calibration; ``above`` minus the base rate's, with its
            interval. NaN if its clients hold parts of the model.
        place: by which runs are ranked, higher is better: :meth:`Bench.rank_value`, or minus a sum of ranks.
    """

    entry: Entry
    main: float
    loss: float
    predictor: Predictor | None = None
    tempered: float = math.nan
    above: Interval = UNKNOWN
    place: float = math.nan

    @property
    def arm(self) -> str:
        return self.entry.arm.name

    @property
    def seed(self) -> int:
        return self.entry.config.execution.seed


def recommend(
    race: Race,
    stands: Standing,
    rates: Rates | None,
    early: EarlyStop | None,
    entries: Sequence[Entry],
    until: int,
    with_baselines: bool,
) -> Choice:
    """Return the recommendation of a race whose runs are finished."""
    benches = {seed: Bench(task) for seed, task in race.of_seed.items()}
    bases = {seed: bench.base_rate() for seed, bench in benches.items()}
    trials = _trials(race, stands, rates, early, entries, until)
    for trial in trials:
        _hold_against(trial, benches[trial.seed], bases[trial.seed])
    values = [
        math.nan
        if one.predictor is None
        else benches[one.seed].rank_value(one.predictor)
        for one in trials
    ]
    if not any(map(math.isnan, values)):
        for trial, value in zip(trials, values, strict=True):
            trial.place = value
    refused = _refused(trials)
    representatives = _representatives(trials, entries, refused)
    judged = _judged(stands, representatives)
    sound = judged[~judged["arm"].isin(refused)]
    main = stands.main
    within = _within(representatives, benches, refused, main)
    found = infer(judged, within, refused, main, _overlap(list(race.of_seed.values())))
    if early is not None:
        found = Inference(**{**vars(found), "early": early})
    by_name = {arm.name: arm for arm in race.arms}
    winner, run, notes = None, None, list[str]()
    rows = [_line(trial, refused) for trial in trials]
    clients = pd.DataFrame()
    if found.leader:
        winner = by_name[found.leader]
        own = [trial for trial in trials if trial.arm == winner.name]
        run = _best(own) if own else None
    seed = run.seed if run is not None else next(iter(benches))
    bench, base = benches[seed], bases[seed]
    began = time.monotonic()
    others = list(predictors(bench)) if with_baselines else [base]
    fitting = time.monotonic() - began if with_baselines else 0.0
    rows += [_baseline_line(bench, base, one, main) for one in others]
    if run is not None and run.predictor is not None and run.predictor.test:
        notes = _on_test(bench, run.predictor, base, others, main)
        clients = _clients(bench, run, base, trials)
    elif found.verdict == NOTHING and base.test:
        losses = {one.name: bench.scores(one)["loss"] for one in others}
        told = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        notes = [f"Loss on test samples: {told}."]
    stopped = (
        stands.judged[stands.judged["status"].isin(["stopped", "not kept", "failed"])]
        if early is not None
        else stands.judged.iloc[:0]
    )
    rows[len(trials) : len(trials)] = [
        {
            "name": line.arm,
            "lr": line.lr,
            "seed": line.seed,
            "note": f"{line.status} at round {line.trained}",
        }
        for line in stopped.itertuples()
        if line.arm
        not in {
            trial.arm for trial in trials if trial.entry.config.training.lr == line.lr
        }
    ]
    standing = stands._replace(judged=judged)
    cheapest = min(
        found.remaining, key=lambda name: bytes_a_round(race.tasks[name]), default=""
    )
    return Choice(
        winner,
        race.arms,
        standing,
        found,
        None if run is None else run.entry.path,
        _leaders(sound, representatives, main) if early is None else {},
        until,
        race.task,
        NO_COST,
        NO_COST,
        0.0,
        fitting,
        rates,
        _table(rows, main),
        clients,
        tuple(notes),
        cheapest,
        {
            seed: trial.entry
            for (arm, seed), trial in representatives.items()
            if arm == found.leader
        },
    )


def _trials(
    race: Race,
    stands: Standing,
    rates: Rates | None,
    early: EarlyStop | None,
    entries: Sequence[Entry],
    until: int,
) -> list[Trial]:
    """Return all finished runs of the arms, trials of rates among them, with their places in each seed."""
    names = {arm.name for arm in race.arms}
    finished = [
        entry
        for entry in entries
        if entry.key not in stands.failed
        and (early is None or entry.arm.name == early.kept)
    ]
    probes = [] if rates is None else rates.sound
    finished = distinct([*finished, *(e for e in probes if e.arm.name in names)])
    full = int(race.task.config.federation.rounds or 1)
    named = [  # one arm may have several rates
        replace(entry, arm=replace(entry.arm, name=entry.path.name))
        for entry in finished
    ]
    table = standings(named, full if early is not None else until, {}).judged
    main = stands.main
    return [
        Trial(entry, float(line[main]), float(line["loss"]), place=float(line["score"]))
        for entry, (_, line) in zip(finished, table.iterrows(), strict=True)
    ]


def _hold_against(trial: Trial, bench: Bench, base: Predictor) -> None:
    """Add a run's predictions, and its validation loss above the base rate's."""
    try:
        trial.predictor = bench.of_run(trial.entry.path, trial.arm)
    except UsageError:  # its clients hold parts of the model
        return
    if trial.predictor.validation:
        trial.tempered = bench.scores(trial.predictor, VALIDATION)["loss"]
        trial.above = bench.above(trial.predictor, base, VALIDATION)


def _is_above(trials: Sequence[Trial]) -> bool:
    """Return whether runs have a higher mean loss than the base rate."""
    return bool(pd.Series([trial.above.value for trial in trials]).mean() > 0)


def _refused(trials: list[Trial]) -> list[str]:
    """Return the arms all of whose runs are refused. Refused runs of other arms are left out of the choice."""
    names = list(dict.fromkeys(trial.arm for trial in trials))
    return [
        name for name in names if all(_is_above(own) for own in _by_rate(trials, name))
    ]


def _by_rate(trials: Sequence[Trial], arm: str) -> list[list[Trial]]:
    rates: dict[float, list[Trial]] = {}
    for trial in trials:
        if trial.arm == arm:
            rates.setdefault(float(trial.entry.config.training.lr or 0), []).append(
                trial
            )
    return list(rates.values())


def _best(trials: Sequence[Trial]) -> Trial:
    """Return the run with the best place; runs above the base rate come last."""
    return max(trials, key=lambda one: (not _is_above([one]), one.place, -one.loss))


def _representatives(
    trials: Sequence[Trial], entries: Sequence[Entry], refused: Sequence[str]
) -> dict[tuple[str, int], Trial]:
    """Return the run by which an arm is judged in a seed: with one seed its best, else the one at the common rate."""
    raced = {entry.path for entry in entries}
    seeds = {entry.config.execution.seed for entry in entries}
    found: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        if len(seeds) == 1 or trial.entry.path in raced:
            found.setdefault((trial.arm, trial.seed), []).append(trial)
    return {key: _best(own) for key, own in found.items()}


def _judged(
    stands: Standing,
    representatives: Mapping[tuple[str, int], Trial],
) -> pd.DataFrame:
    """Return the table of arms and seeds by their representatives."""
    table, main = stands.judged.copy(), stands.main
    for k, line in table.iterrows():
        trial = representatives.get((line["arm"], line["seed"]))
        values = dict.fromkeys(("lr", main, "loss", "score"), math.nan)
        if trial is not None:
            values["lr"] = float(trial.entry.config.training.lr or math.nan)
            values |= {main: trial.main, "score": trial.place}
            values["loss"] = trial.tempered if main == "loss" else trial.loss
        table.loc[k, list(values)] = list(values.values())
    return table


def _within(
    representatives: Mapping[tuple[str, int], Trial],
    benches: Mapping[int, Bench],
    refused: Sequence[str],
    main: str,
) -> pd.DataFrame | None:
    """Return the covariance of the arms' main scores over samples, mean over seeds."""
    found = []
    for seed, bench in benches.items():
        many = [
            trial.predictor
            for (arm, own), trial in representatives.items()
            if own == seed and trial.predictor is not None and arm not in refused
        ]
        if len(many) > 1 and all(one.validation for one in many):
            found.append(bench.covariance(many, main))
    if not found:
        return None
    return sum(found[1:], found[0]) / len(found)


def _overlap(tasks: Sequence[Task]) -> float:
    """Return the share of its validation samples that the first seed has in common with the second."""
    first, other = (
        samples_of(task.data.partition, VALIDATION) for task in (tasks[0], tasks[-1])
    )
    return len(first & other) / max(1, len(first))


def _leaders(
    judged: pd.DataFrame,
    representatives: Mapping[tuple[str, int], Trial],
    main: str,
) -> dict[int, Entry]:
    """Return for each seed the run that leads by this seed's validation samples alone."""
    found = {}
    for seed, part in judged.dropna(subset="score").groupby("seed"):
        best = part.sort_values(
            ["score", main], ascending=[False, not SCORES[main]], kind="stable"
        ).iloc[0]
        found[int(str(seed))] = representatives[best["arm"], int(str(seed))].entry
    return found


# --- tables ----------------------------------------------------------------------------------------------------


def _line(trial: Trial, refused: Sequence[str]) -> dict[str, Any]:
    is_refused = trial.arm in refused or _is_above([trial])
    return {
        "name": trial.arm,
        "lr": trial.entry.config.training.lr,
        "seed": trial.seed,
        "main": trial.main,
        "loss": trial.tempered,
        "above": trial.above.value,
        "low": trial.above.low,
        "high": trial.above.high,
        "refused": is_refused,
        "note": REFUSED
        if is_refused
        else "not shown to be better than the base rate"
        if trial.above.high > 0
        else "",
    }


def _baseline_line(
    bench: Bench, base: Predictor, one: Predictor, main: str
) -> dict[str, Any]:
    scores = bench.scores(one, VALIDATION)
    found = bench.above(one, base, VALIDATION)
    above = found.value > 0
    return {
        "name": one.name,
        "main": scores.get(main, math.nan),
        "loss": scores.get("loss", math.nan),
        "above": found.value,
        "low": found.low,
        "high": found.high,
        "refused": above,
        "note": REFUSED if above else "",
    }


def _table(rows: Sequence[Mapping[str, Any]], main: str) -> pd.DataFrame:
    columns = [
        "name",
        "lr",
        "seed",
        "main",
        "loss",
        "above",
        "low",
        "high",
        "refused",
        "note",
    ]
    table = pd.DataFrame(rows).reindex(columns=columns)
    numbers = ["lr", "seed", "main", "loss", "above", "low", "high"]
    table[numbers] = table[numbers].astype(float)
    table["refused"] = [value is True for value in table["refused"]]
    if main == "loss":
        return table.drop(columns="main")
    return table.rename(columns={"main": main})


def _on_test(
    bench: Bench,
    model: Predictor,
    base: Predictor,
    others: Sequence[Predictor],
    main: str,
) -> list[str]:
    """Compare the model with the base rate and the best baseline by validation, on test samples."""
    scores = {"the model": bench.scores(model), base.name: bench.scores(base)}
    better = ""
    rivals = [one for one in others if one.name != BASE_RATE]
    if rivals:
        rival = min(
            rivals,
            key=lambda one: bench.scores(one, VALIDATION)["loss"],
        )
        scores[rival.name] = bench.scores(rival)
        if bench.above(model, rival, TEST).low > 0:
            better = rival.name
    return compared(scores, main, better, base.name)


def _clients(
    bench: Bench, run: Trial, base: Predictor, trials: Sequence[Trial]
) -> pd.DataFrame:
    """Return each client's test losses: by the model, alone and at the base rate; and whether it loses by sharing."""
    assert run.predictor is not None
    alone = [
        trial
        for trial in trials
        if trial.seed == run.seed
        and trial.entry.arm.extreme == "nothing"
        and trial.predictor is not None
    ]
    columns = {
        "model": bench.losses(run.predictor, TEST),
        BASE_RATE: bench.losses(base, TEST),
    }
    if alone and run.entry.arm.extreme != "nothing":
        other = _best(alone).predictor
        assert other is not None
        columns["alone"] = bench.losses(other, TEST)
    lines = []
    for client, own in columns["model"].items():
        line: dict[str, Any] = {
            "client": client,
            "train": bench.sizes[client],
            "test": len(own),
        }
        line |= {name: float(losses[client].mean()) for name, losses in columns.items()}
        if "alone" in columns:
            paired = own - columns["alone"][client]
            error = (
                float(paired.std()) / math.sqrt(len(paired))
                if len(paired) > 1
                else math.inf
            )
            line["loses"] = bool(paired.mean() - Z * error > 0)
        lines.append(line)
    return pd.DataFrame(lines)
