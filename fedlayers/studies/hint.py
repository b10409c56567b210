"""What is known before training: the label skew of the clients, what it meant elsewhere, and what a race would cost."""

from __future__ import annotations

import copy
import json
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from fedlayers.backends.local import no_progress
from fedlayers.studies import arms as candidates
from fedlayers.studies.arms import Arm, arms_of
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
    PROBE,
    check_scored,
    judged_at,
    rates_of,
    with_evaluations,
    with_plan_algorithm,
)
from fl_core import tree
from fl_core.algorithms.averaging import FedAvg
from fl_core.algorithms.base import Round
from fl_core.config import Own, RunConfig, RunKeys, with_own
from fl_core.data.arrays import nested_groups
from fl_core.display import Displayed, Summary
from fl_core.errors import UsageError, plural
from fl_core.records import store
from fl_core.rounds import recorder
from fl_core.rounds.clients import TrainRequest
from fl_core.rows import CLASSIFICATION
from fl_core.run import runner
from fl_core.run.task import Task
from fl_core.seeds import numpy_generator
from fl_core.statistics import UNKNOWN, Interval
from fl_core.storage import format_bytes, sha
from fl_core.training.phases import Phase, Training

BANDS = (
    (0.17, "low", "11 of 12 such federations gained at most 1.1 points"),
    (0.35, "middle", "6 of 9 such federations gained at most 1.3 points"),
    (math.inf, "high", "8 of 8 such federations gained at least 1.1 points"),
)
"""The skew below which a band ends, its name, and the gains of the best cut (``figures.decision.finished``)."""


DEALS = 200
"""How often groups are dealt to clients at random."""
STEPS = 16
"""Maximum number of training steps that are timed."""


@dataclass(frozen=True, repr=False)
class Hint(Displayed):
    """What is known of a federation before training.

    Attributes:
        skew: the label skew beyond chance, from 0 to 1, with an interval (:func:`skew_of`).
        counts: training samples by client and class.
        cost: of a race with the same arguments.
    """

    skew: Interval
    counts: pd.DataFrame
    cost: Cost

    def text(self) -> str:
        """Return the sentence on the skew, and the cost."""
        return "\n".join(filter(None, [in_words(self.skew), self.cost.text()]))

    def summary(self) -> Summary:
        """Return the sentences and the counts."""
        return Summary.of_frame(self.text(), self.counts.rename_axis("client"))


def skew_of(task: Task) -> Interval:
    """Return the label skew of the training samples beyond chance; NaN for a task without classes.

    Whole groups of samples, such as patients, are dealt to the clients at random :data:`DEALS` times. The mean
    association is chance. The ends leave out the largest and smallest 2.5 % of it, so an upper end is what remains if
    chance added little. A low end of 0 means that chance alone may give as much.
    """
    if task.data.task != CLASSIFICATION:
        return UNKNOWN
    parts, classes = [client.train for client in task.data.clients], task.data.n_classes
    labels = np.concatenate([part.y.numpy() for part in parts])
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    group = np.arange(len(labels))
    if all(part.groups is not None for part in parts):
        group = nested_groups(part.groups for part in parts)
    of_group = owners[np.unique(group, return_index=True)[1]]
    draw = numpy_generator(0, "label skew")

    def counts(client: NDArray[np.int64]) -> NDArray[np.float64]:
        table = np.bincount(client * classes + labels, minlength=len(parts) * classes)
        return table.reshape(len(parts), classes).astype(float)

    table = counts(owners)
    dealt = [
        association(counts(draw.permutation(of_group)[group])) for _ in range(DEALS)
    ]
    ends = np.quantile(dealt, [0.975, 0.025])
    return Interval(*(label_skew(table, each) for each in (np.mean(dealt), *ends)))


def in_words(skew: Interval) -> str:
    """Return what a label skew meant in other federations; empty without one."""
    if math.isnan(skew.value):
        return ""
    ends = f"[{skew.low:.2f}, {skew.high:.2f}]"
    found = f"Label skew beyond chance: {skew.value:.2f} {ends}, "
    if skew.low > 0:
        name, known = next(
            (name, known) for end, name, known in BANDS if skew.value < end
        )
        found += f"{name}. On tables and small images {known} of macro-F1 over sharing every layer, by the best cut."
    else:
        found += "not shown."
    return (
        f"{found} It cannot see clients that mean different things by one label, or whose inputs differ. "
        "A run can: fl.diagnose(result, metrics=['clients_differ'])."
    )


def association(table: NDArray[np.float64]) -> float:
    """Return chi-square over n of a table of clients x classes, without empty classes."""
    table = table[:, table.sum(axis=0) > 0]
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    return float(((table - expected) ** 2 / expected).sum() / table.sum())


def label_skew(counts: NDArray[np.float64], chance: float | None = None) -> float:
    """Return Cramér's V of clients and classes without what chance adds (Bergsma, 2013).

    >>> label_skew(np.array([[30.0, 0.0], [0.0, 30.0]])), label_skew(np.array([[30.0, 30.0], [9.0, 9.0]]))
    (1.0, 0.0)

    Args:
        counts: samples, clients x classes.
        chance: the :func:`association` by chance; that of independent samples by default.
    """
    table = counts[:, counts.sum(axis=0) > 0]
    n, (rows, columns) = table.sum(), table.shape
    if min(rows, columns) < 2:
        return 0.0
    if chance is None:
        chance = (rows - 1) * (columns - 1) / (n - 1)
    beyond = max(0.0, association(table) - chance)
    most = min(size - (size - 1) ** 2 / (n - 1) for size in (rows, columns)) - 1
    return float(min(1.0, math.sqrt(beyond / most)))


def hint(
    config: RunConfig | None = None,
    *,
    data: Any = None,
    model: Any = None,
    arms: str | Sequence[str] = candidates.DEFAULT,
    seeds: Sequence[int] | None = None,
    tune_rates: int | None = None,
    **keys: Unpack[RunKeys],
) -> Hint:
    """Return the label skew of a federation, and what :func:`choose` would cost.

    Nothing is trained but a few timed steps.

    >>> import fedlayers as fl
    >>> found = fl.hint(dataset="heart", rounds=10)
    >>> round(found.skew.value, 2), found.cost.runs
    (0.31, 4)

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
    return Hint(skew_of(race.task), counts, race.cost(config.execution.workers))


# --- the race before its start ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """A race before its start.

    Attributes:
        config: of its runs, except algorithm and seed. ``own``: the data and the model beside it.
        out: the folder of its runs.
        task: of the first seed.
        jobs: its runs at the configuration's rate; ``tasks`` what each arm trains, by its name.
        benches: the samples of each seed.
        probes: the runs of a search over rates, if any.
        at: the round after which a judge keeps one arm; 0, and ``why``, if all train to the end.
        startup: seconds that a run took to be made and checked.
    """

    config: RunConfig
    own: Own
    out: Path
    seeds: tuple[int, ...]
    task: Task
    arms: tuple[Arm, ...]
    jobs: list[TrainingJob]
    tasks: dict[str, Task]
    benches: dict[int, Bench]
    probes: list[TrainingJob]
    at: int
    why: str
    startup: float

    @property
    def rounds(self) -> int:
        """The planned maximum of rounds."""
        return int(self.task.config.federation.rounds or 1)

    def at_rate(self, lr: float) -> list[TrainingJob]:
        """Return the runs of all arms at a learning rate."""
        config, out, suffix = (
            self.config.with_keys(lr=lr),
            self.out / "arms",
            f"-lr{lr:g}",
        )
        return jobs_of(self.arms, config, self.seeds, out, suffix, **self.own)

    def trained(self, jobs: Sequence[TrainingJob]) -> list[TrainingJob]:
        """Return the probes and the arms' runs. One run may be both."""
        return list({job.path: job for job in (*self.probes, *jobs)}.values())

    def cost(self, side_by_side: int) -> Cost:
        """Estimate what all runs cost, with a number of them at a time. It is the same for any best rate."""
        jobs = self.jobs
        if self.probes:
            jobs = self.at_rate(float(self.probes[0].config.training.lr or 0))
        whole = {job.path for job in self.probes}
        rest = [
            replace(job, until=self.at or None) for job in jobs if job.path not in whole
        ]
        kept = self.rounds - self.at if self.at else 0
        runs = [*self.probes, *rest]
        found = estimate_cost(self.tasks, runs, side_by_side, kept)
        # each run is made once more, and evaluated about as often as rounds end
        began = time.perf_counter()
        self.benches[self.seeds[0]].of_start()
        each = time.perf_counter() - began
        every = int(self.task.config.execution.eval_every or 1)
        once = self.startup * len(runs) + each * (found.rounds / every + len(runs))
        return replace(
            found, seconds=found.seconds + once / _side_by_side(len(runs), side_by_side)
        )


def planned(
    config: RunConfig,
    own: Own,
    out: Path | None,
    arms: str | Sequence[str],
    seeds: Sequence[int] | None,
    tune_rates: int | None,
    thorough: bool,
    tell: Tell,
) -> Race:
    """Make a race's tasks, so that errors are found before any training. Arguments are those of :func:`choose`."""
    seeds = seeds_of(config, seeds, 1)
    if config.federation.plan is not None:
        raise UsageError("A race makes its own plans. Name a plan among the arms.")
    config = with_evaluations(with_plan_algorithm(config), own).with_keys(workers=0)
    task = runner.assemble(config.with_keys(seed=seeds[0]), **own)
    task.announce()
    racing = arms_of(arms, task.layers, config.federation.algorithm)
    if out is None:
        out = folder_of(task, arms=arms, seeds=seeds, rates=tune_rates, all=thorough)
    began = time.perf_counter()
    jobs = jobs_of(racing, config, seeds, out / "arms", **own)
    tasks: dict[str, Task] = {}
    benches = {seeds[0]: Bench(task)}
    check_scored(benches[seeds[0]])
    check_same_data(out / "arms", task)
    for job, each in zip(jobs, assembled(jobs, task), strict=True):
        tasks.setdefault(job.arm, each)
        if (seed := job.config.execution.seed) not in benches:
            benches[seed] = Bench(each)
            check_scored(benches[seed])
    startup = (time.perf_counter() - began) / len(jobs)
    lr = float(task.config.training.lr or 0)
    rates = rates_of(config, lr, tune_rates, tell, own["data"] is not None)
    probe = arms_of((PROBE, "all"), task.layers, config.federation.algorithm)[:1]
    probes = []
    for lr in rates:
        at_rate, suffix = config.with_keys(lr=lr), f"-lr{lr:g}"
        probes += jobs_of(probe, at_rate, seeds[:1], out / "arms", suffix, **own)
    for job, each in zip(probes, assembled(probes, task), strict=True):
        tasks.setdefault(job.arm, each)
    at, why = (0, "") if thorough else judged_at(task, racing, seeds)
    race = Race(
        config,
        own,
        out,
        seeds,
        task,
        racing,
        jobs,
        tasks,
        benches,
        probes,
        at,
        why,
        startup,
    )
    begun = [job for lr in rates for job in race.at_rate(lr) if job.path.exists()]
    list(assembled(begun, task))  # which checks them
    return race


def folder_of(task: Task, **asked: Any) -> Path:
    """Return the folder of a question that names none, below ``out``: equal questions have the same."""
    keys = {k: v for k, v in task.config.to_json().items() if k not in FREE}
    about = {**keys, **task.header(""), **asked}
    return Path("out") / f"choose-{sha(json.dumps(about, default=str).encode())[:8]}"


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
        took = format_seconds(self.seconds)
        full = (
            f" ({self.full_runs:.1f} full runs)"
            if f"{self.full_runs:.1f}" != f"{self.runs:.1f}"
            else ""
        )
        sent, about = format_bytes(self.n_bytes), "" if took[0] == "<" else "about "
        runs = f"{plural(self.runs, 'run')}, {plural(self.rounds, 'round')} in all"
        if self.most > self.rounds:
            runs = f"{plural(self.runs, 'run')}, about {self.rounds} rounds in all, at most {self.most}"
        return f"{runs}{full}; {sent} sent and received, {about}{took}"

    def compare_line(self, measured: Cost) -> str:
        """Return the estimated and the measured cost in one line."""
        return (
            f"Cost, estimated / measured: {self.rounds} / {measured.rounds} rounds, "
            f"{format_bytes(self.n_bytes)} / {format_bytes(measured.n_bytes)} sent and received, "
            f"{format_seconds(self.seconds)} / {format_seconds(measured.seconds)}"
        )


NO_COST = Cost(0, 0, 0.0, 0.0, 0.0)


def estimate_cost(
    tasks: Mapping[str, Task], jobs: Sequence[TrainingJob], workers: int, kept: int = 0
) -> Cost:
    """Estimate the cost of runs before they start.

    Args:
        tasks: the task of each arm, by its name.
        jobs: each counts up to its own ``until``, by default to its end.
        workers: the number of runs that train side by side.
        kept: further rounds of one run, the most expensive one.
    """
    config = tasks[jobs[0].arm].config
    full = int(config.federation.rounds or 1)
    most = sum(job.until or full for job in jobs) + kept
    waits = int(config.federation.patience or 0) * int(config.execution.eval_every or 1)
    likely = min(full, 2 * waits) if waits else full
    ends = [min(job.until or full, likely) for job in jobs]
    kept = min(kept, likely - min(ends))
    moved = [bytes_a_round(tasks[job.arm]) for job in jobs]
    steps = [round_steps(tasks[job.arm]) for job in jobs]
    together = sum(map(operator.mul, ends, steps)) / _side_by_side(len(jobs), workers)
    seconds = seconds_a_step(tasks[jobs[0].arm]) * (together + kept * max(steps))
    n_bytes = sum(map(operator.mul, ends, moved)) + kept * max(moved)
    rounds = sum(ends) + kept
    return Cost(len(jobs), rounds, rounds / full, n_bytes, seconds, most)


def measured_cost(task: Task, jobs: Sequence[TrainingJob], workers: int) -> Cost:
    """Return the cost of runs from their rows and clocks. Earlier training counts as well.

    For the arguments see :func:`estimate_cost`.
    """
    rounds, sent, seconds = 0, 0.0, 0.0
    for job in jobs:
        clock = job.path / "timing.jsonl"
        if not clock.is_file():  # it failed before its first round
            continue
        frame = store.Run(job.path).rows()[1]
        moved = frame["metric"].isin(["bytes_down", "bytes_up"])
        sent += float(frame.loc[moved, "value"].sum())
        by_round = recorder.by_round(clock)
        rounds += max(by_round, default=0)
        seconds += math.fsum(each["train"] for each in by_round.values())
    full = int(task.config.federation.rounds or 1)
    seconds /= _side_by_side(len(jobs), workers)
    return Cost(len(jobs), rounds, rounds / full, sent, seconds)


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


class _Short(FedAvg):
    """FedAvg with at most :data:`STEPS` steps per client and round."""

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return tuple(
            replace(phase, steps=STEPS) for phase in super().phases(rnd, client)
        )


def seconds_a_step(task: Task) -> float:
    """Return the seconds of one step in a client's round, with its share of batches, optimiser and messages.

    A client of median size trains with FedAvg for at most :data:`STEPS` steps, after one untimed round. It uses a copy
    of the model, and the learning rate is too small to diverge.
    """
    weights = task.data.weights
    client = sorted(range(len(weights)), key=weights.__getitem__)[len(weights) // 2]
    copied = replace(
        task, model=copy.deepcopy(task.model), config=task.config.with_keys(lr=1e-12)
    )
    client_runner, algorithm = copied.client_runner(), _Short(task.task_info)
    client_runner.use(algorithm)
    initial, rnd = tree.clone(tree.state_dict(task.model)), Round(0, sampled=(client,))
    seconds = steps = 0.0
    with torch.random.fork_rng():
        for _ in range(2):
            began = time.perf_counter()
            message = algorithm.server_message(
                algorithm.server_state(initial), client, rnd
            ).clone()
            state = algorithm.client_state(initial, client).clone()
            steps = client_runner.run(
                TrainRequest(client, rnd, message, state=state)
            ).work["train/steps"]
            seconds = time.perf_counter() - began
    return seconds / max(1.0, steps)


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
