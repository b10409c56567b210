"""What the runs of a decision cost: an estimate before they start, and the cost that was measured."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diagnostics.tuning.copies import Tuner
from diagnostics.tuning.profile import every
from fedlayers.decision.jobs import TrainingJob
from fl_core import tree
from fl_core.algorithms.averaging import FedAvg
from fl_core.algorithms.base import Round
from fl_core.errors import plural
from fl_core.rounds import recorder
from fl_core.run.task import Task
from fl_core.storage import format_bytes
from fl_core.training.phases import Training

EARLY = 0.1
"""The share of a run that most of the learning rates train for."""
STEPS = 16
"""Maximum number of training steps that are timed."""


@dataclass(frozen=True)
class Cost:
    """The cost of runs, estimated or measured.

    Attributes:
        runs, rounds: the number of runs, and the sum of their rounds.
        full_runs: the rounds as a number of runs of full length, fine-tuning included.
        n_bytes: bytes that all clients together send and receive. An estimate is that
            of ``rounds``, and counts all tensors of a run whose shared layers are not
            known before.
        seconds: time of training on this machine with the given workers, without
            evaluations. An estimate counts the steps that the algorithms make. Each
            step takes as long as one of FedAvg, timed at one client.
        most: in an estimate, the rounds if no run stops early. ``rounds`` assumes that a run improves for as many
            evaluations as its patience then waits.
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
        size_text = format_bytes(self.n_bytes)
        time_text = format_seconds(self.seconds)
        return (
            f"{plural(self.runs, 'run')}, {rounds} ({self.full_runs:.1f} full runs); "
            f"{size_text} sent and received, estimated {time_text}"
        )


NO_COST = Cost(0, 0, 0.0, 0.0, 0.0)


def estimate_cost(
    tasks: Mapping[str, Task],
    jobs: Sequence[TrainingJob],
    workers: int,
    tuning_epochs: int = 0,
    step: float | None = None,
) -> Cost:
    """Estimate the cost of runs before they start.

    Args:
        tasks: the task of each arm, by its name.
        jobs: each counts up to its own ``until``, by default to its end.
        workers: the number of runs that train side by side.
        tuning_epochs: epochs of fine-tuning of all clients together. They run one after another.
        step: seconds of a training step; timed by default.
    """
    first_task = tasks[jobs[0].arm]
    config = first_task.config
    full_rounds = int(config.federation.rounds or 1)
    most_rounds = sum(job.until or full_rounds for job in jobs)
    waiting_rounds = int(config.federation.patience or 0) * int(
        config.execution.eval_every or 1
    )
    likely_rounds = full_rounds
    if waiting_rounds:
        likely_rounds = min(full_rounds, 2 * waiting_rounds)
    end_rounds = [min(job.until or full_rounds, likely_rounds) for job in jobs]
    bytes_per_round = [bytes_a_round(tasks[job.arm]) for job in jobs]
    steps = [round_steps(tasks[job.arm]) for job in jobs]
    training_steps = sum(map(operator.mul, end_rounds, steps)) / _side_by_side(
        len(jobs), workers
    )
    steps_per_epoch = sum(
        math.ceil(n / Training.of(config.training).batch_size)
        for n in first_task.data.weights
    )
    step = step or seconds_a_step(first_task)
    seconds = step * (training_steps + tuning_epochs * steps_per_epoch)
    n_bytes = sum(map(operator.mul, end_rounds, bytes_per_round))
    total_rounds = sum(end_rounds) + tuning_epochs / max(
        1, int(config.training.epochs or 1)
    )
    return Cost(
        len(jobs),
        sum(end_rounds),
        total_rounds / full_rounds,
        n_bytes,
        seconds,
        most_rounds,
    )


def measured_cost(
    task: Task, jobs: Sequence[TrainingJob], workers: int, tuning_epochs: int = 0
) -> Cost:
    """Return the cost of runs from their rows and clocks.

    Training in earlier calls counts as well. Fine-tuning counts in ``full_runs`` alone.
    Runs that failed before their first round have no cost.

    Args:
        task: the FedAvg task, which has the rounds and the epochs of a full run.
        jobs: the runs, which have ended.
        workers: the number of runs that trained side by side.
        tuning_epochs: epochs of fine-tuning of all clients together.
    """
    rounds, sent_bytes, seconds = 0, 0.0, 0.0
    for job in jobs:
        clock = job.path / "timing.jsonl"
        if not clock.is_file():  # it failed before its first round
            continue
        is_traffic = job.rows["metric"].isin(["bytes_down", "bytes_up"])
        sent_bytes += float(job.rows.loc[is_traffic, "value"].sum())
        by_round = recorder.by_round(clock)
        rounds += max(by_round, default=0)
        seconds += math.fsum(spent_round["train"] for spent_round in by_round.values())
    full_rounds = int(task.config.federation.rounds or 1)
    seconds /= _side_by_side(len(jobs), workers)
    total_rounds = rounds + tuning_epochs / max(
        1, int(task.config.training.epochs or 1)
    )
    return Cost(len(jobs), rounds, total_rounds / full_rounds, sent_bytes, seconds)


def bytes_a_round(task: Task) -> float:
    """Return the bytes that all sampled clients send and receive in a round.

    If the run itself chooses the shared layers, or its messages differ between rounds,
    all tensors count in both directions.
    """
    algorithm, tensors = task.algorithm(task.plan), tree.named_tensors(task.model)
    clients, share = range(len(task.data.clients)), task.config.federation.participation
    if not algorithm.static_traffic or algorithm.decides:
        return 2.0 * tree.n_bytes(tensors) * len(clients) * share
    total = 0
    for client in clients:
        for names in (algorithm.shared, algorithm.uploaded):
            total += tree.n_bytes(tree.select(tensors, names(Round(0), client)))
    return share * total


def round_steps(task: Task) -> float:
    """Return the steps of the sampled clients in the first round, over all phases of local training.

    If the run itself chooses the shared layers, these are the steps of FedAvg.
    """
    algorithm = task.algorithm(task.plan)
    if algorithm.decides:
        algorithm = FedAvg(task.task_info)
    first_round = Round(0, sampled=tuple(range(len(task.data.weights))))
    size, steps = Training.of(task.config.training).batch_size, 0.0
    for client, n in enumerate(task.data.weights):
        phases = algorithm.phases(first_round, client)
        steps += sum(phase.length(math.ceil(n / size)) for phase in phases)
    return steps * task.config.federation.participation


def _side_by_side(runs: int, workers: int) -> int:
    return max(1, min(workers, runs))


def seconds_a_step(task: Task) -> float:
    """Return the seconds of one step at a client of median size, after one untimed epoch of at most :data:`STEPS`."""
    clients = sorted(task.data.clients, key=lambda client: len(client.train))
    split = clients[len(clients) // 2].train
    training = Training.of(task.config.training)
    samples = min(len(split), STEPS * training.batch_size)
    arguments = task.model, task.criterion, training, [(split, split)], 0, 0
    tuner, begin_time = Tuner(*arguments, samples=samples), 0.0
    for _ in range(2):
        begin_time = time.perf_counter()
        tuner.tuned(0, every(task.layers), rate=1e-12, epochs=1)
    return (time.perf_counter() - begin_time) / math.ceil(samples / training.batch_size)


def format_seconds(seconds: float) -> str:
    """Return a time in words, in seconds, minutes or hours.

    >>> format_seconds(0.04), format_seconds(1.04), format_seconds(48), format_seconds(600)
    ('< 0.1 s', '1.0 s', '48 s', '10 min')
    """
    if seconds < 0.1:
        return "< 0.1 s"
    if seconds < 90:
        digits = 1 if seconds < 9.95 else 0
        return f"{seconds:.{digits}f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
