"""Runs a job by several sides, each in a process of its own with the same environment."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.training import THREADS, federation
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.errors import RunError, UsageError, check_known
from fl_core.run.task import assemble

PATIENCE = 600.0  # seconds that a side may take to begin


@dataclass(frozen=True)
class Job:
    """Rounds of FedAvg that every side can run in the same way.

    Attributes:
        config: optimiser, batch, share of clients a round, and how this package runs it.
        clients, samples, shape, classes: random data, the same in every process. ``samples`` of a client are whole
            batches, since some packages drop a smaller last one.
        network: builds the model where the configuration does not name it.
        rounds: a turn; more than one where a round is too short for the clock.
    """

    name: str
    config: RunConfig
    clients: int
    samples: int
    shape: tuple[int, ...]
    classes: int = 10
    network: Callable[[], nn.Module] | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        """Refuse settings that some side would silently treat differently.

        Raises:
            UsageError: batches that are not whole, several epochs, no learning rate, or an optimiser other than AdamW
                and SGD without momentum and weight decay.
        """
        if self.samples % self.batch:
            raise UsageError(
                f"{self.name}: samples must be a multiple of {self.batch}; got {self.samples}."
            )
        config = self.config
        if config.training.epochs != 1:
            raise UsageError(
                f"{self.name}: epochs must be 1; got {config.training.epochs}."
            )
        check_known("optimizer", str(config.training.optimizer), ("sgd", "adamw"))
        if not config.training.lr:
            raise UsageError(
                f"{self.name}: lr must be above 0; got {config.training.lr}."
            )
        if config.training.momentum or (
            config.training.weight_decay and config.training.optimizer == "sgd"
        ):
            raise UsageError(
                f"{self.name}: SGD must be without momentum and weight decay. Set both to 0."
            )

    @property
    def batch(self) -> int:
        """Return samples per step."""
        return int(self.config.training.batch_size or 1)

    @property
    def lr(self) -> float:
        """Return the learning rate."""
        return float(self.config.training.lr or 0.0)

    @property
    def decay(self) -> float:
        """Return AdamW's weight decay."""
        return float(self.config.training.weight_decay or 0.0)

    @property
    def taken(self) -> int:
        """Return the number of clients that take part in a round."""
        return max(1, int(self.config.federation.participation * self.clients))

    @property
    def steps(self) -> int:
        """Return optimiser steps of a round, summed over clients."""
        return self.taken * (self.samples // self.batch)

    def data(self) -> FederatedData:
        """Return the clients' samples."""
        return federation(self.clients, self.samples, self.shape, self.classes)

    def model(self, data: FederatedData) -> nn.Module:
        """Return the model with which every side starts."""
        return assemble(
            self.config, data=data, model=self.network() if self.network else None
        ).model

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return PyTorch's own optimiser, as used in a plain loop."""
        if self.config.training.optimizer == "adamw":
            return torch.optim.AdamW(
                parameters, lr=self.lr, weight_decay=self.decay, fused=True
            )
        return torch.optim.SGD(parameters, lr=self.lr)


class Side(Protocol):
    """One implementation of a job."""

    def round(self) -> int:
        """Run one round without evaluation.

        Returns:
            Optimiser steps that the side itself counted, all clients together.
        """

    def weights(self) -> list[Tensor]:
        """Return the global model's parameters, in the PyTorch model's shapes and order."""

    def peak(self) -> int:
        """Return the most bytes of PyTorch on a CUDA device in the rounds since the last reset; 0 without one."""


@dataclass
class Plain:
    """A side made from functions."""

    round: Callable[[], int]
    weights: Callable[[], list[Tensor]]
    peak: Callable[[], int] = torch.cuda.max_memory_allocated


Open = Callable[[Job], AbstractContextManager[Side]]
"""Prepares a side for a job."""


class Remote:
    """A side in another process that times itself, so that neither the pipe nor other sides' threads count."""

    def __init__(self, name: str, job: Job, connection: Connection) -> None:
        self.name, self.job, self.connection = name, job, connection
        self.peak = 0

    def turn(self) -> float:
        """Run one turn and return its seconds.

        Raises:
            RunError: the side failed, or took another number of steps than the job has.
        """
        seconds, steps, peak = self.ask("turn")
        self.peak = max(self.peak, peak)
        expected_steps = self.job.rounds * self.job.steps
        if steps != expected_steps:
            raise RunError(
                f"{self.job.name}: a turn has {expected_steps} steps, {self.name} took {steps}"
            )
        return float(seconds)

    def weights(self) -> list[Tensor]:
        """Return the global model's parameters."""
        return [torch.from_numpy(array) for array in self.ask("weights")[0]]

    def ask(self, request: str) -> tuple:
        """Send a request to the process and return its answer.

        Args:
            request: ``turn`` or ``weights``; ``ready`` only waits until the process has started.

        Raises:
            RunError: the process failed, ended, or did not start within :data:`PATIENCE` seconds.
        """
        try:
            if request != "ready":
                self.connection.send(request)
            elif not self.connection.poll(PATIENCE):
                raise RunError(
                    f"{self.job.name}: {self.name} has not begun within {PATIENCE:g} s"
                )
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise RunError(
                f"{self.job.name}: the process of {self.name} has ended"
            ) from None
        if isinstance(answer, str):
            raise RunError(f"{self.job.name}: {self.name} failed: {answer}")
        return tuple(answer)


@contextmanager
def remote(sides: Mapping[str, Open], job: Job) -> Iterator[dict[str, Remote]]:
    """Start all sides and wait until they are ready; their processes end with the block.

    Raises:
        RunError: a side could not be prepared; its own error is in the message.
    """
    context = multiprocessing.get_context(
        "spawn"
    )  # with the environment, but no thread or module, of this process
    processes, remote_by_name = [], {}
    try:
        for side_name, open_side in sides.items():
            parent_end, child_end = context.Pipe()
            remote_by_name[side_name] = Remote(side_name, job, parent_end)
            processes.append(
                context.Process(
                    target=_serve, args=(child_end, open_side, job), name=side_name
                )
            )
            processes[-1].start()
            child_end.close()
            remote_by_name[side_name].ask("ready")
        yield remote_by_name
    finally:
        for side in remote_by_name.values():
            side.connection.close()  # which a process takes as the end
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()


def _serve(connection: Connection, open_side: Open, job: Job) -> None:
    """Serve a side in its process until the other end closes the pipe."""
    torch.set_num_threads(THREADS)
    try:
        with open_side(job) as side:
            connection.send(())
            while True:
                try:
                    request = connection.recv()
                except EOFError:
                    return
                if request == "weights":
                    connection.send(
                        (
                            [
                                tensor.detach().cpu().numpy().copy()
                                for tensor in side.weights()
                            ],
                        )
                    )
                    continue
                if torch.cuda.is_initialized():
                    torch.cuda.reset_peak_memory_stats()
                start_time = time.perf_counter()
                step_count = sum(side.round() for _ in range(job.rounds))
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start_time
                connection.send((seconds, step_count, side.peak()))
    except Exception:  # told to the parent, which raises it as a RunError
        connection.send(traceback.format_exc())
