"""What is known before training: the label skew of the clients, and what a race would cost."""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import pandas as pd

from diagnostics.label_shift import interval_of
from diagnostics.tuning.copies import EPOCHS, Tuner
from diagnostics.tuning.differ import LEAST_CLIENTS
from diagnostics.tuning.profile import every
from fedlayers.backends.local import no_progress
from fedlayers.studies.arms import FIRST, Ways, arms_of, ends_of
from fedlayers.studies.harmless import Bench
from fedlayers.studies.jobs import (
    FREE,
    Tell,
    TrainingJob,
    assembled,
    check_same_data,
    jobs_of,
    seeds_of,
)
from fedlayers.studies.race import (
    KEPT,
    Race,
    check_scored,
    own_rates,
    rates_of,
    with_evaluations,
    with_plan_algorithm,
)
from fl_core import tree
from fl_core.algorithms.averaging import FedAvg
from fl_core.algorithms.base import Round
from fl_core.config import Own, RunConfig, RunKeys, with_own
from fl_core.display import Displayed, Summary
from fl_core.errors import UsageError, plural
from fl_core.rounds import recorder
from fl_core.rows import CLASSIFICATION
from fl_core.run import runner
from fl_core.run.task import Task
from fl_core.statistics import UNKNOWN, Interval
from fl_core.storage import format_bytes, sha
from fl_core.training import evaluate
from fl_core.training.phases import Training

STEPS = 16
"""Maximum number of training steps that are timed."""


@dataclass(frozen=True, repr=False)
class Hint(Displayed):
    """What is known of a federation before training.

    Attributes:
        skew: the label skew beyond chance, from 0 to 1, with an interval (:func:`skew_of`).
        counts: training samples by client and class.
        cost: of a decision with the same arguments if clients do not differ, if they do, and if they form groups.
    """

    skew: Interval
    counts: pd.DataFrame
    cost: tuple[Cost, Cost, Cost]

    def text(self) -> str:
        """Return the sentence on the skew, and the cost."""
        return "\n".join(filter(None, [in_words(self.skew), cost_in_words(*self.cost)]))

    def summary(self) -> Summary:
        """Return the sentences and the counts."""
        return Summary.of_frame(self.text(), self.counts.rename_axis("client"))


def skew_of(task: Task) -> Interval:
    """Return the label skew of the training samples beyond chance; NaN for a task without classes."""
    return interval_of(task.data) if task.data.task == CLASSIFICATION else UNKNOWN


def in_words(skew: Interval) -> str:
    """Return a label skew, and what it cannot tell; empty without one."""
    if math.isnan(skew.value):
        return ""
    shown = "" if skew.low > 0 else ", not shown"
    return (
        f"Label skew beyond chance, 0 to 1: {skew.value:.2f} [{skew.low:.2f}, {skew.high:.2f}]{shown}. "
        "It cannot see clients that mean different things by one label, or whose inputs differ. "
        "A run can: fl.diagnose(result, metrics=['clients_differ'])."
    )


def hint(
    config: RunConfig | None = None,
    *,
    data: Any = None,
    model: Any = None,
    arms: Ways = None,
    seeds: Sequence[int] | None = None,
    tune_rates: int | None = None,
    **keys: Unpack[RunKeys],
) -> Hint:
    """Return the label skew of a federation, and what :func:`choose` would cost.

    Nothing is trained but a few timed steps.

    >>> import fedlayers as fl
    >>> found = fl.hint(dataset="heart", rounds=10)
    >>> round(found.skew.value, 2), [each.runs for each in found.cost]
    (0.31, [2, 4, 5])

    Args:
        config, data, model, keys: as of :func:`fedlayers.run <fedlayers.runs.run>`.
        arms, seeds, tune_rates: as of :func:`choose`.

    Raises:
        UsageError: an unknown name or an invalid value.
    """
    config, own = with_own(config, data, model, **keys)
    with TemporaryDirectory() as folder:
        out = Path(folder)
        race = planned(config, own, out, arms, seeds, tune_rates, False, no_progress)
    data, counts = race.task.data, pd.DataFrame()
    if data.task == CLASSIFICATION:
        counts = data.class_counts()
    return Hint(skew_of(race.task), counts, costs_of(race, config.execution.workers))


# --- the race before its start ---------------------------------------------------------------------------------


def planned(
    config: RunConfig,
    own: Own,
    out: Path | None,
    arms: Ways,
    seeds: Sequence[int] | None,
    tune_rates: int | None,
    thorough: bool,
    tell: Tell,
) -> Race:
    """Make a decision's tasks, so that errors are found before any training. Arguments are those of :func:`choose`."""
    seeds = seeds_of(config, seeds, 1)
    if config.federation.plan is not None:
        raise UsageError("A race makes its own plans. Name a plan among the arms.")
    config = with_evaluations(with_plan_algorithm(config), own).with_keys(workers=0)
    task = runner.assemble(config.with_keys(seed=seeds[0]), **own)
    task.announce()
    if len(task.data.clients) < 2:
        raise UsageError(
            f"a federation must have at least 2 clients to choose what they share; got {len(task.data.clients)}. "
            "Train this one with fedlayers run --algorithm local."
        )
    named: Any = (*FIRST, *ends_of(task.layers, thorough)) if arms is None else arms
    using, by_hand = config.federation.algorithm, arms is not None
    racing = arms_of(named, task.layers, using, distinct=by_hand)
    ends: tuple[str, ...] = ()
    if not by_hand and not thorough:
        ends = tuple(arm.name for arm in racing if arm.name not in FIRST)
    if out is None:
        keys = {k: v for k, v in task.config.to_json().items() if k not in FREE}
        asked = {"arms": arms, "seeds": seeds, "rates": tune_rates, "all": thorough}
        about = json.dumps({**keys, **task.header(""), **asked}, default=str)
        # equal questions have the same folder
        out = Path("out") / f"choose-{sha(about.encode())[:8]}"
    began = time.perf_counter()
    jobs = jobs_of(racing, config, seeds, out / "arms", **own)
    tasks: dict[str, Task] = {}
    benches: dict[int, Bench] = {}
    check_same_data(out / "arms", task)
    for job, each in zip(jobs, assembled(jobs, task), strict=True):
        tasks.setdefault(job.arm, each)
        if (seed := job.config.execution.seed) not in benches:
            benches[seed] = Bench(each)
            check_scored(benches[seed])
    startup = (time.perf_counter() - began) / len(jobs)
    lr = float(task.config.training.lr or 0)
    rates = rates_of(config, lr, tune_rates, tell, own["data"] is not None)
    given = config, own, out, seeds, task, racing, ends, tasks, benches
    race = Race(*given, [], startup)
    probes = [job for lr in rates for job in race.jobs_at(lr, ["all"], seeds[:1])]
    for job, each in zip(probes, assembled(probes, task), strict=True):
        tasks.setdefault(job.arm, each)
    begun = [job for lr in rates for job in race.jobs_at(lr, [*tasks])]
    list(assembled([job for job in begun if job.path.exists()], task))  # checks them
    return replace(race, probes=probes)


# --- cost ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The cost of a choice, estimated or measured.

    Attributes:
        runs, rounds: the number of runs, and of their rounds in total, with the winner's completion.
        full_runs: the same in runs of full length.
        n_bytes: bytes that all clients together send and receive; in an estimate the maximum.
        seconds: on this machine with the given workers. An estimate counts the steps that the algorithms make. Each
            step takes as long as one of FedAvg, timed at one client. Starts and evaluations are timed, too.
        most: in an estimate, rounds if no run stops by its patience. Runs are taken to improve for as many
            evaluations as they then wait.
    """

    runs: int
    rounds: int
    full_runs: float
    n_bytes: float
    seconds: float
    most: int = 0

    def text(self) -> str:
        """Return the estimated cost in one line."""
        rounds = plural(self.rounds, "round")
        if self.most > self.rounds:
            rounds = f"about {rounds}, at most {self.most}"
        return (
            f"{plural(self.runs, 'run')}, {rounds} ({self.full_runs:.1f} full runs); "
            f"{format_bytes(self.n_bytes)} sent and received, estimated {format_seconds(self.seconds)}"
        )


def cost_in_words(alike: Cost, differ: Cost, grouped: Cost) -> str:
    """Return the estimated cost of a decision if clients do not differ, if they do, and if they form groups."""
    groups = f"; {grouped.full_runs:.1f} full runs if they form groups"
    groups *= grouped != differ
    more = f" If clients differ: {differ.text()}{groups}."
    return f"{alike.text()} of training.{more * (differ != alike)}"


NO_COST = Cost(0, 0, 0.0, 0.0, 0.0)


def costs_of(race: Race, side_by_side: int) -> tuple[Cost, Cost, Cost]:
    """Estimate what all runs cost if clients do not differ, if they do, and if they form groups.

    Groups cost a run for each seed with its own epochs.

    Args:
        side_by_side: runs at a time.
    """
    lr = race.probes[0].config.training.lr if race.probes else None
    began = time.perf_counter()
    bench, model = race.benches[race.seeds[0]], race.task.model
    bench.predictor("start", lambda client, x: evaluate.predict(model, x))
    scored = time.perf_counter() - began
    every = int(race.task.config.execution.eval_every or 1)
    step = seconds_a_step(race.task)

    def cost(names: list[str], grouped: bool = False) -> Cost:
        runs = {job.path: job for job in race.probes[:KEPT]}
        runs |= {job.path: replace(job, until=race.early) for job in race.probes[KEPT:]}
        jobs = race.jobs_at(lr, names)
        own = EPOCHS[-1] * sum(len(own_rates(race.arm(job.arm))) for job in jobs)
        for job in jobs:
            runs.setdefault(job.path, job)
        if grouped:
            same = race.jobs_at(lr, ["all"])  # groups send as much
            runs |= {job.path / "groups": job for job in same}
            own += EPOCHS[-1] * len(same)
        found = estimate_cost(race.tasks, [*runs.values()], side_by_side, own, step)
        # each run is made once more, and evaluated about as often as rounds and own epochs end
        times = found.rounds / every + len(runs) + own
        once = race.startup * len(runs) + scored * times
        seconds = found.seconds + once / _side_by_side(len(runs), side_by_side)
        return replace(found, seconds=seconds)

    names = [arm.name for arm in race.arms]
    known = race.ends and len(race.task.data.clients) >= LEAST_CLIENTS
    first = [name for name in names if name not in race.ends]
    return cost(first), cost(names), cost(names, bool(known))


def estimate_cost(
    tasks: Mapping[str, Task],
    jobs: Sequence[TrainingJob],
    workers: int,
    own_epochs: int = 0,
    step: float | None = None,
) -> Cost:
    """Estimate the cost of runs before they start.

    Args:
        tasks: the task of each arm, by its name.
        jobs: each counts up to its own ``until``, by default to its end.
        workers: the number of runs that train side by side.
        own_epochs: of all clients after the runs, which no other run trains beside.
        step: the seconds of a step; timed by default.
    """
    first = tasks[jobs[0].arm]
    config = first.config
    full = int(config.federation.rounds or 1)
    most = sum(job.until or full for job in jobs)
    waits = int(config.federation.patience or 0) * int(config.execution.eval_every or 1)
    likely = min(full, 2 * waits) if waits else full
    ends = [min(job.until or full, likely) for job in jobs]
    moved = [bytes_a_round(tasks[job.arm]) for job in jobs]
    steps = [round_steps(tasks[job.arm]) for job in jobs]
    together = sum(map(operator.mul, ends, steps)) / _side_by_side(len(jobs), workers)
    epoch = sum(
        math.ceil(n / Training.of(config.training).batch_size)
        for n in first.data.weights
    )
    step = step or seconds_a_step(first)
    seconds = step * (together + own_epochs * epoch)
    n_bytes = sum(map(operator.mul, ends, moved))
    whole = sum(ends) + own_epochs / max(1, int(config.training.epochs or 1))
    return Cost(len(jobs), sum(ends), whole / full, n_bytes, seconds, most)


def measured_cost(
    task: Task, jobs: Sequence[TrainingJob], workers: int, own_epochs: int = 0
) -> Cost:
    """Return the cost of runs from their rows and clocks, and of own epochs. Earlier training counts as well.

    For the other arguments see :func:`estimate_cost`.
    """
    rounds, sent, seconds = 0, 0.0, 0.0
    for job in jobs:
        clock = job.path / "timing.jsonl"
        if not clock.is_file():  # it failed before its first round
            continue
        moved = job.rows["metric"].isin(["bytes_down", "bytes_up"])
        sent += float(job.rows.loc[moved, "value"].sum())
        by_round = recorder.by_round(clock)
        rounds += max(by_round, default=0)
        seconds += math.fsum(each["train"] for each in by_round.values())
    full = int(task.config.federation.rounds or 1)
    seconds /= _side_by_side(len(jobs), workers)
    whole = rounds + own_epochs / max(1, int(task.config.training.epochs or 1))
    return Cost(len(jobs), rounds, whole / full, sent, seconds)


def bytes_a_round(task: Task) -> float:
    """Return the bytes that all sampled clients send and receive in a round.

    If the run itself decides on its layers, it is the maximum.
    """
    algorithm, live = task.algorithm(task.plan), tree.named_tensors(task.model)
    clients, share = range(len(task.data.clients)), task.config.federation.participation
    if not algorithm.static_traffic or algorithm.decides:
        return 2.0 * tree.n_bytes(live) * len(clients) * share
    return share * sum(
        tree.n_bytes(tree.select(live, names(Round(0), client)))
        for client in clients
        for names in (algorithm.shared, algorithm.uploaded)
    )


def round_steps(task: Task) -> float:
    """Return the steps of the sampled clients in the first round, over all phases of local training.

    If the run itself decides on its layers, these are the steps of FedAvg.
    """
    algorithm = task.algorithm(task.plan)
    if algorithm.decides:
        algorithm = FedAvg(task.task_info)
    first = Round(0, sampled=tuple(range(len(task.data.weights))))
    size, steps = Training.of(task.config.training).batch_size, 0.0
    for client, n in enumerate(task.data.weights):
        phases = algorithm.phases(first, client)
        steps += sum(phase.length(math.ceil(n / size)) for phase in phases)
    return steps * task.config.federation.participation


def _side_by_side(runs: int, workers: int) -> int:
    return max(1, min(workers, runs))


def seconds_a_step(task: Task) -> float:
    """Return the seconds of one step at a client of median size, after one untimed epoch of at most :data:`STEPS`."""
    clients = sorted(task.data.clients, key=lambda client: len(client.train))
    own = clients[len(clients) // 2].train
    training = Training.of(task.config.training)
    samples = min(len(own), STEPS * training.batch_size)
    given = task.model, task.criterion, training, [(own, own)], 0, 0
    tuner, began = Tuner(*given, samples=samples), 0.0
    for _ in range(2):
        began = time.perf_counter()
        tuner.tuned(0, every(task.layers), rate=1e-12, epochs=1)
    return (time.perf_counter() - began) / math.ceil(samples / training.batch_size)


def format_seconds(seconds: float) -> str:
    """Format a time in seconds.

    >>> format_seconds(0.04), format_seconds(1.04), format_seconds(48), format_seconds(600)
    ('< 0.1 s', '1.0 s', '48 s', '10 min')
    """
    if seconds < 0.1:
        return "< 0.1 s"
    if seconds < 90:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
