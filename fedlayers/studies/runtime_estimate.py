"""The cost of a race: estimated before it starts, and measured on its runs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedlayers.studies.race import Entry
from fl_core import tree
from fl_core.algorithms.averaging import FedAvg
from fl_core.algorithms.base import Round
from fl_core.client_runner import TrainRequest
from fl_core.errors import plural
from fl_core.limits import format_bytes
from fl_core.records import store, timing
from fl_core.task import Task
from fl_core.training.phases import Phase, Training

STEPS = 16
"""Maximum number of training steps that are timed."""


@dataclass(frozen=True)
class Cost:
    """The cost of a choice, estimated or measured.

    Attributes:
        runs, rounds: the number of runs, and of their rounds in total, with the winner's completion.
        full_runs: the same in runs of full length.
        n_bytes: bytes that all clients together send and receive; in an estimate the maximum.
        seconds: of local training on this machine with the given workers. An estimate counts the steps that the
            algorithms make. Each step takes as long as one of FedAvg, timed at one client.
    """

    runs: int
    rounds: int
    full_runs: float
    n_bytes: float
    seconds: float

    def text(self) -> str:
        """Return the estimated cost in one line."""
        took = format_seconds(self.seconds)
        full = (
            f" ({self.full_runs:.1f} full runs)"
            if f"{self.full_runs:.1f}" != f"{self.runs:.1f}"
            else ""
        )
        sent, about = format_bytes(self.n_bytes), "" if took[0] == "<" else "about "
        runs = f"{plural(self.runs, 'run')}, {plural(self.rounds, 'round')}"
        return f"{runs} in all{full}, up to {sent} sent and received, {about}{took} of training"

    def compare_line(self, measured: Cost) -> str:
        """Return the estimated and the measured cost in one line."""
        return (
            f"Cost, estimated / measured: {self.rounds} / {measured.rounds} rounds, "
            f"{format_bytes(self.n_bytes)} / {format_bytes(measured.n_bytes)} sent and received, "
            f"{format_seconds(self.seconds)} / {format_seconds(measured.seconds)} of training"
        )


def estimate_cost(
    tasks: Mapping[str, Task],
    entries: Sequence[Entry],
    until: int,
    workers: int,
    *,
    whole: int = 0,
) -> Cost:
    """Estimate the cost of a race before it starts.

    Args:
        tasks: the task of each arm, by its name.
        until: the round in which the race ends. One run then continues to the end.
        workers: the number of runs that train side by side.
        whole: the number of first runs that train to the end before the race.
    """
    task = tasks[entries[0].arm.name]
    full = int(task.config.federation.rounds or 1)
    rest = full - until
    ends = [full] * whole + [until] * (len(entries) - whole)
    rounds = sum(ends) + rest
    moved = [bytes_a_round(tasks[entry.arm.name]) for entry in entries]
    steps = [round_steps(tasks[entry.arm.name]) for entry in entries]
    seconds = seconds_a_step(task) * (
        sum(end * step for end, step in zip(ends, steps, strict=True))
        / _side_by_side(len(entries), workers)
        + rest * max(steps)
    )
    n_bytes = sum(
        end * each for end, each in zip(ends, moved, strict=True)
    ) + rest * max(moved)
    return Cost(len(entries), rounds, rounds / full, n_bytes, seconds)


def measured_cost(
    task: Task, entries: Sequence[Entry], until: int, workers: int
) -> Cost:
    """Return the cost of a race from its runs' rows and clocks. Earlier training counts as well.

    For the arguments see :func:`estimate_cost`.
    """
    rounds, sent, race_seconds, rest_seconds = 0, 0.0, 0.0, 0.0
    for entry in entries:
        if not (
            entry.path / "timing.jsonl"
        ).is_file():  # it failed before its first round
            continue
        frame = store.Run(entry.path).rows()[1]
        sent += float(
            frame.loc[frame["metric"].isin(["bytes_down", "bytes_up"]), "value"].sum()
        )
        by_round = {
            done: each["train"]
            for done, each in timing.by_round(entry.path / "timing.jsonl").items()
        }
        rounds += max(by_round, default=0)
        race_seconds += math.fsum(
            seconds for done, seconds in by_round.items() if done <= until
        )
        rest_seconds += math.fsum(
            seconds for done, seconds in by_round.items() if done > until
        )
    seconds = race_seconds / _side_by_side(len(entries), workers) + rest_seconds
    return Cost(
        len(entries),
        rounds,
        rounds / int(task.config.federation.rounds or 1),
        sent,
        seconds,
    )


def bytes_a_round(task: Task) -> float:
    """Return the bytes that all sampled clients send and receive in a round.

    If the run itself decides on its layers, it is the maximum.
    """
    algorithm, live = task.algorithm(task.plan), tree.named_tensors(task.model)
    clients, rnd = range(len(task.data.clients)), Round(0)
    if not algorithm.static_traffic or algorithm.decides:
        return (
            2.0
            * tree.n_bytes(live)
            * len(clients)
            * task.config.federation.participation
        )
    sent = (
        names
        for c in clients
        for names in (algorithm.shared(rnd, c), algorithm.uploaded(rnd, c))
    )
    return task.config.federation.participation * sum(
        tree.n_bytes(tree.select(live, names)) for names in sent
    )


def round_steps(task: Task) -> float:
    """Return the steps of the sampled clients in the first round, over all phases of local training.

    If the run itself decides on its layers, these are the steps of FedAvg.
    """
    asked = task.algorithm(task.plan)
    algorithm = FedAvg(task.task_info) if asked.decides else asked
    everyone = tuple(range(len(task.data.weights)))
    steps = []
    for client, n in enumerate(task.data.weights):
        batches = math.ceil(n / Training.of(task.config.training).batch_size)
        steps.append(
            sum(
                phase.length(batches)
                for phase in algorithm.phases(Round(0, sampled=everyone), client)
            )
        )
    return sum(steps) * task.config.federation.participation


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
