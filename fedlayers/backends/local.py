"""Backends by name, and whole runs in parallel processes of this machine, with one thread each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tqdm import tqdm

from fedlayers.backends.base import (
    Answer,
    Backend,
    Event,
    InProcessBackend,
    Job,
    WorkerPool,
    answer_job,
)
from fedlayers.live import open_live
from fl_core.errors import RunError, UsageError, WorkerError
from fl_core.progress import delay_signals, end_with_parent

RAY = "ray"
PERIOD = 1.0
"""Seconds between checks for other work."""


class Process(NamedTuple):
    """A process with the parent's end of its pipe."""

    link: Connection
    process: Any


class Local(WorkerPool[Process]):
    """A pool of processes. They start with the first jobs, and end when this process ends."""

    def __init__(self, count: int) -> None:
        self.side_by_side = count
        self._idle: list[Process] = []

    def has_room(self, running: int) -> bool:
        return running < self.side_by_side

    def begin(self, work: Job) -> Process:
        data = pickle.dumps(work)
        while True:
            process = self._idle.pop() if self._idle else _start_process()
            try:
                process.link.send_bytes(data)
                return process
            except (
                BrokenPipeError,
                ConnectionResetError,
            ):  # it ended while it was idle
                _end_process(process)

    def events(self, running: dict[Process, Job]) -> Sequence[Event]:
        by_link = {process.link: process for process in running}
        found = []
        for link in wait(list(by_link), timeout=PERIOD):
            process = by_link[link]  # type: ignore[index]
            try:
                answer: Answer = pickle.loads(process.link.recv_bytes())
            except (EOFError, ConnectionResetError):
                code = _end_process(process)
                if code is not None and code > 0:  # it ended itself, and would again
                    said = f"{running[process].name}: its process ended with exit code {code}"
                    error = WorkerError(f"{said}. If it left a message, that is above.")
                    found.append(Event(process, Answer(None, error, [])))
                else:
                    found.append(Event(process, lost=f"a process (exit code {code})"))
            else:
                self._idle.append(process)
                found.append(Event(process, answer))
        return found

    def words(self, running: dict[Process, Job]) -> str:
        return f"{len(running)} running"

    def stop(self, running: dict[Process, Job]) -> None:
        for process in running:
            if process in self._idle:  # its answer had come
                self._idle.remove(process)
            _end_process(process)

    def close(self) -> None:
        for process in self._idle:
            _end_process(process)
        self._idle.clear()


def _start_process() -> Process:
    resource_tracker.ensure_running()  # or the first process would start it, and let interrupts through
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs,), daemon=True
    )
    with (
        delay_signals(),
        _one_thread(),
    ):  # Ctrl-C, which a terminal sends to all of them, is this process's to answer
        process.start()
    theirs.close()
    return Process(ours, process)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give one thread to processes that start within the block."""
    earlier = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if earlier is not None:
            os.environ["OMP_NUM_THREADS"] = earlier


def _end_process(process: Process) -> int | None:
    """Kill a process and return its exit code. A run directory stays valid whenever its writer dies."""
    process.link.close()
    process.process.join(timeout=0.1)  # a process that ended by itself has its own code
    process.process.kill()
    process.process.join()
    return process.process.exitcode


def _serve(link: Connection) -> None:
    """Run jobs until the link closes. The process never outlives its parent."""
    end_with_parent()
    tqdm.set_lock(
        threading.RLock()
    )  # its own lock is a semaphore, which a killed process leaves behind
    while True:
        try:
            work: Job = pickle.loads(link.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        except (
            Exception
        ) as error:  # whatever a module of the user's raises that is imported for it
            answer = Answer(
                None,
                RunError(f"a process cannot start: {type(error).__name__}: {error}"),
                [],
            )
        else:
            answer = answer_job(work)
        try:
            link.send_bytes(pickle.dumps(answer))
        except (
            BrokenPipeError,
            ConnectionResetError,
        ):  # the parent has closed the link
            return


# --- by name ---------------------------------------------------------------------------------------------------


def check_backend(name: str) -> None:
    """Refuse an unknown name of a backend.

    Raises:
        UsageError: lists the names.

    >>> check_backend("local:2"), check_backend("ray"), check_backend("ray:10.0.0.1:6379")
    (None, None, None)
    >>> check_backend("x")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: backend must be local:N, ray or ray:HOST:PORT; got 'x'. Use local:2 for two processes.
    """
    kind, colon, rest = name.partition(":")
    if kind == "local" and re.fullmatch("[1-9][0-9]{0,3}", rest):
        return
    if kind == RAY and (not colon or re.fullmatch(r"[^\s/]+:[0-9]{1,5}", rest)):
        return
    raise UsageError(
        f"backend must be local:N, {RAY} or {RAY}:HOST:PORT; got {name!r}. Use local:2 for two processes."
    )


@contextmanager
def open_backend(
    backend: Backend | str,
    workers: int = 0,
    *,
    parallel: bool = False,
    progress: bool = True,
    live: bool = False,
) -> Iterator[Backend]:
    """Open a backend by name and close it at the end. An open one stays open. No name means this process.

    Args:
        workers: the configuration's; runs that are trained elsewhere have none.
        parallel: without a name, so many processes train the runs, each without workers.
        progress: show the progress of the runs that are trained there.
        live: draw them in the notebook's cell, again at most once a second.

    Raises:
        UsageError: an unknown name, a package that is not installed, or workers as well.
    """
    if parallel and workers > 1 and not backend:
        backend, workers = f"local:{workers}", 0
    found: AbstractContextManager[Backend]
    if isinstance(backend, Backend):
        found = nullcontext(backend)
    elif backend and workers > 1:
        raise UsageError(
            "--backend trains whole runs side by side, each in one process. Leave --workers out."
        )
    else:
        found = closing(_backend(backend))
    with found as place, open_live(live) as place.live:
        place.progress = progress
        yield place


def _backend(name: str) -> Backend:
    if not name:
        return InProcessBackend()
    check_backend(name)
    kind, _, rest = name.partition(":")
    if kind == RAY:
        from fedlayers.backends.cluster import Cluster

        return Cluster(rest)
    return Local(int(rest)) if int(rest) > 1 else InProcessBackend()
