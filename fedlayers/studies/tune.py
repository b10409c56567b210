"""Tunes several algorithms alike: equally many settings each, trained to the end and judged on validation samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.backends.base import Backend
from fedlayers.backends.names import open_parallel
from fedlayers.studies.argument_checks import checked_call, seeds_of, task_kind
from fedlayers.studies.arms import Arm
from fedlayers.studies.compare import check_stored, plan_users
from fedlayers.studies.race import (
    WINDOW,
    Entry,
    best_of_run,
    run_entries,
    validation_scores,
)
from fedlayers.studies.runtime_estimate import estimate_cost
from fedlayers.studies.spaces import TRAINING, Point, Search, points, spaces
from fedlayers.studies.tuned import Tuned
from fl_core import __version__, runner
from fl_core.bounds import at_least, check_value
from fl_core.config import RunConfig, in_memory
from fl_core.defaults import resolve
from fl_core.errors import (
    RunError,
    UsageError,
    check_distinct,
    check_known,
    listing,
)
from fl_core.names import csv_bytes
from fl_core.records import store
from fl_core.scores import MAIN, check_score, of_class
from fl_core.storage.files import write_atomically
from fl_core.task import Task
from fl_core.training.evaluate import SCORES

APART = 1000
"""Distance of tuning's first seed from the one that is asked for, so that a comparison uses other seeds."""
TRIALS = 8


@dataclass(frozen=True)
class Trial:
    """One setting of one algorithm.

    Attributes:
        number: from 0; trials of the same number have the same values of common keys.
        point: the values that are tried, by key.
        entries: its runs, one per seed.
    """

    algorithm: str
    number: int
    point: Point
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Tuning:
    """The result of tuning.

    Attributes:
        table: a line per trial, by algorithm: the values tried, ``value`` (the score, mean over seeds; NaN if a run
            failed), ``best`` (whether it is the algorithm's choice), and ``failed`` (why, if it did).
        tuned: the choice, as a comparison takes it.
        spaces: the search spaces, by algorithm.
        positive: the class of two whose AUROC and AUPRC are scored.
    """

    table: pd.DataFrame
    tuned: Tuned
    spaces: Mapping[str, Mapping[str, Search]]
    positive: str = ""

    def text(self) -> str:
        """Return the chosen settings, a line per algorithm."""
        best = self.table[self.table["best"]].drop(columns=["best", "failed"])
        best.insert(1, "tried", [self.tuned.trials[name] for name in best["algorithm"]])
        shown = best.rename(columns={"value": self.tuned.score}).to_string(
            index=False, na_rep="", float_format="%.4g"
        )
        failed = (
            self.table["failed"]
            .astype(bool)
            .groupby(self.table["algorithm"], sort=False)
            .sum()
        )
        notes = [
            f"{count} of {name}'s trials failed: see trials.csv"
            for name, count in failed.items()
            if count
        ]
        legend = (
            f"{self.tuned.score}{of_class(self.tuned.score, self.positive)} on validation samples of seeds "
            f"{listing(map(str, self.tuned.seeds))}: mean over clients, weighted by training samples, and over the "
            f"last {WINDOW} evaluated rounds (a model fine-tuned at the end has one). Test samples were not read."
        )
        return "\n\n".join([shown, *notes, legend])


@checked_call
def tune(
    config: RunConfig,
    algorithms: Sequence[str],
    search: Mapping[str, Any],
    out: Path | str = "out/tune",
    *,
    data: Any = None,
    model: Any = None,
    trials: int = TRIALS,
    seeds: Sequence[int] | None = None,
    score: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    backend: Backend | str = "",
    progress: bool = True,
    live: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Tuning:
    """Search the learning rate and the algorithms' own keys, with the same budget for each algorithm.

    Every algorithm tries ``trials`` settings, drawn at random, or all of them if these are fewer (a grid). Each is
    trained in full, once per seed. The one with the best validation score is chosen. The score is the mean over clients
    weighted by training samples, then over the last three evaluated rounds, then over seeds. An algorithm that
    fine-tunes at the end is judged by its fine-tuned model in the last round.

    Nothing here reads scores on test samples. Data without a test set of their own are split differently in each seed.
    One seed's validation samples are then partly another seed's test samples.

    After a stop, the same call resumes, also with more ``trials``. Below ``out``: ``trials/`` (run directories),
    ``trials.csv`` and ``tuned.json``, which :func:`~fedlayers.studies.compare.compare` takes.

    Args:
        config: of all runs; its ``workers`` train runs side by side.
        out: the folder; default ``out/tune``, as of the command.
        data, model: your own, as of :func:`fedlayers.run <fedlayers.runs.run>`.
        search: what is searched, by key: :func:`~fedlayers.studies.spaces.spaces`.
        trials: settings of each algorithm.
        seeds: of the runs, different from those of a later comparison. The default is the configuration's + 1000.
        score: of :data:`fl_core.training.evaluate.SCORES`; default the main score of the task.
        options: fixed keys of the algorithms, by algorithm.
        backend: where runs are trained; see :func:`~fedlayers.studies.choose.choose`.
        progress: show the runs that are done.
        live: as of :func:`~fedlayers.studies.choose.choose`.
        tell: receives the estimated cost, and a line whenever a run is done.

    Raises:
        UsageError: an unknown name or an invalid value, or runs of other settings below ``out``, before any training.
        RunError: every trial of an algorithm failed.

    >>> import tempfile
    >>> where = tempfile.TemporaryDirectory()
    >>> config = RunConfig(dataset="heart", rounds=2)
    >>> found = tune(config, ["fedavg", "fedprox"], {"lr": "0.001,0.1", "mu": "0.01..1:log"}, where.name, trials=2)
    >>> found.tuned.trials, sorted(found.tuned.options["fedprox"]), sorted(found.tuned.settings["fedavg"])
    ({'fedavg': 2, 'fedprox': 2}, ['mu'], ['lr'])
    """
    out, config = Path(out), in_memory(config, data, model)
    seeds = seeds_of(config, seeds, 1, APART)
    check_value("trials", trials, at_least(1))
    check_distinct("tuning", "algorithm", algorithms)
    check_distinct("tuning", "seed", seeds)
    kind = task_kind(config)
    score = check_score(score or MAIN[kind], kind)
    for name in options or {}:
        check_known("algorithm that is tuned", name, algorithms)
    searched = spaces(search, algorithms, options)
    for key in sorted(
        {key for space in searched.values() for key in space if key in TRAINING}
    ):
        if config.value(key) is not None:
            raise UsageError(f"{key} must be searched or set, not both. Leave one out.")
    using = plan_users(algorithms, given=config.federation.plan is not None)
    tried = []
    for name in algorithms:
        its_config = config if name in using else config.with_keys(plan=None)
        tried += _trials(name, searched, trials, its_config, seeds, options, out)
    tasks = _check(tried)
    entries = [entry for trial in tried for entry in trial.entries]
    planned = tasks[algorithms[0]].config
    rounds = int(planned.federation.rounds or 1)
    by_arm = {trial.entries[0].arm.name: tasks[trial.algorithm] for trial in tried}
    shown = {"progress": progress, "live": live}
    with open_parallel(backend, config.execution.workers, **shown) as place:
        cost = estimate_cost(by_arm, entries, rounds, place.side_by_side).text()
        tell(f"at most {cost}" if planned.federation.patience else cost)
        for name in algorithms:
            count = sum(trial.algorithm == name for trial in tried)
            if count < trials:
                tell(f"{name} has {count} different settings; all are tried")
        failed = run_entries(entries, None, place, tell)
    table = _table(tried, score, failed)
    write_atomically(out / "trials.csv", csv_bytes(table))
    for name in algorithms:
        if not table.loc[table["algorithm"] == name, "best"].any():
            reason = table.loc[table["algorithm"] == name, "failed"].iloc[0]
            raise RunError(f"every trial of {name} failed, the first with: {reason}")
    best = {
        trial.algorithm: trial.point
        for trial, chosen in zip(tried, table["best"], strict=True)
        if chosen
    }
    result = Tuned(
        settings={name: _parts(point)[0] for name, point in best.items()},
        options={name: _parts(point)[1] for name, point in best.items()},
        values={
            str(line["algorithm"]): float(line["value"])
            for _, line in table[table["best"]].iterrows()
        },
        trials={
            name: sum(trial.algorithm == name for trial in tried) for name in algorithms
        },
        score=score,
        dataset=resolve(config).data.dataset,
        rounds=rounds,
        seeds=tuple(seeds),
        version=__version__,
    )
    result.save(out / "tuned.json")
    return Tuning(table, result, searched, tasks[algorithms[0]].data.positive)


def _trials(
    name: str,
    searched: Mapping[str, Mapping[str, Search]],
    trials: int,
    config: RunConfig,
    seeds: Sequence[int],
    options: Mapping[str, Mapping[str, Any]] | None,
    out: Path,
) -> list[Trial]:
    """Return the trials of one algorithm, with their runs below ``out``/trials."""
    found = []
    common = config.with_keys(algorithm=name, workers=0)
    for number, point in enumerate(
        points(searched[name], trials, config.execution.seed)
    ):
        settings, own = _parts(point)
        said = " ".join([name, *(f"{key}={value}" for key, value in point.items())])
        entries = []
        for seed in seeds:
            its_options = {**(options or {}).get(name, {}), **own}
            its_config = common.with_keys(seed=seed, options=its_options, **settings)
            arm = Arm(said, name, None)
            folder = f"{Arm(name, name, None).folder}-{number:03}-{seed}"
            entries.append(Entry(arm, its_config, out / "trials" / folder))
        found.append(Trial(name, number, point, tuple(entries)))
    return found


def _parts(point: Point) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of local training at a point, and the algorithm's own."""
    settings = {key: value for key, value in point.items() if key in TRAINING}
    return settings, {key: value for key, value in point.items() if key not in TRAINING}


def _check(tried: Sequence[Trial]) -> dict[str, Task]:
    """Refuse impossible settings, and directories with other runs. Return each algorithm's first task.

    Warns:
        UserWarning: the first run's notes on its data.
    """
    tasks: dict[str, Task] = {}
    first: Task | None = None
    for trial in tried:
        for place, entry in enumerate(trial.entries):
            if place and not entry.path.exists():
                continue  # as the one of the first seed
            same_data = (
                first.data
                if first is not None
                and entry.config.execution.seed == first.config.execution.seed
                else None
            )
            task = runner.assemble(entry.config, loaded=same_data)
            check_stored(entry.path, task)
            tasks.setdefault(trial.algorithm, task)
            if first is None:
                first = task
                task.announce()
    return tasks


def _table(
    tried: Sequence[Trial], score: str, failed: Mapping[tuple[str, int], str]
) -> pd.DataFrame:
    keys = list(dict.fromkeys(key for trial in tried for key in trial.point))
    lines = []
    for trial in tried:
        reasons = [failed[entry.key] for entry in trial.entries if entry.key in failed]
        values = (
            []
            if reasons
            else [_validation_score(entry, score) for entry in trial.entries]
        )
        value = sum(values) / len(values) if values else float("nan")
        line = {
            "algorithm": trial.algorithm,
            "trial": trial.number,
            **{key: trial.point.get(key) for key in keys},
        }
        if not reasons and pd.isna(value):
            reasons = [f"no finite {score} on validation samples"]
        lines.append(
            {
                **line,
                "value": value,
                "best": False,
                "failed": reasons[0] if reasons else "",
            }
        )
    table = pd.DataFrame(lines)
    for _, part in table.dropna(subset="value").groupby("algorithm", sort=False):
        best = part["value"].idxmax() if SCORES[score] else part["value"].idxmin()
        table.loc[best, "best"] = True
    return table


def _validation_score(entry: Entry, score: str) -> float:
    """Return a run's validation score: the mean over the last evaluated rounds of the model that counts.

    Under a stopping rule they are the last up to the best round.
    """
    rounds = validation_scores(
        store.Run(entry.path).rows()[1], best_of_run(entry.path), metrics=(score,)
    )
    latest = [line.get(score, float("nan")) for line in rounds[-WINDOW:]]
    return sum(latest) / len(latest) if latest else float("nan")
