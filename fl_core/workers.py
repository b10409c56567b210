"""Worker processes in which clients train, with the same bits as in this process."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_core.algorithms.base import Algorithm
from fl_core.client_runner import ClientReply, ClientRequest, ClientRunner
from fl_core.errors import RunError, UsageError, WorkerError
from fl_core.progress import delay_signals, end_with_parent

Worker = TypeVar("Worker")
Handle = TypeVar("Handle")
FAST = (torch.float32, torch.float64, torch.int64, torch.bool)
"""Types of tensors that are sent by NumPy."""
AHEAD = 4  # requests that may begin before the first reply is yielded, for each worker
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
"""Settings of glibc's allocator that keep the memory of one training step for the next.

Otherwise it returns the memory and every page faults again. They are read when a process starts."""


class Workers:
    """Persistent worker processes with one thread each. They end with this process in every case."""

    transfer_seconds = 0.0

    def __init__(self, client_runner: ClientRunner, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        self._interrupted = False
        resource_tracker.ensure_running()  # otherwise the first worker's start would do so and let interrupts through
        with (
            delay_signals()
        ):  # a terminal sends Ctrl-C to all of them, but this process handles it
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                with allocator_settings():
                    process.start()
                theirs.close()
                self._links.append(ours)
                self._processes.append(process)
        try:
            self.serve(client_runner)
        except BaseException:  # an interrupt too; no worker has anything to finish
            self._interrupted = True
            self.close()
            raise

    def serve(self, client_runner: ClientRunner) -> None:
        """Serve a client runner from now on. It can replace another one, since new processes start slowly.

        Raises:
            WorkerError: a worker has ended.
        """
        for link in self._links:
            self._send(link, ("client_runner", client_runner.made_of()))

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm in every worker."""
        for link in self._links:
            self._send(link, ("use", algorithm))

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in the requests' order. A free worker takes the next request.

        No worker is left with an unread answer, however the iteration ends.
        """
        busy: dict[Connection, tuple[Connection, int, ClientRequest]] = {}
        ready: Any = wait
        try:
            yield from in_order(
                requests, deque(self._links), busy, self._begin, ready, self._answer
            )
        except KeyboardInterrupt:
            self._interrupted = True
            busy.clear()  # nobody waits for their replies
            raise
        finally:
            for link in busy:
                self._receive(link)

    def _begin(self, link: Connection, request: ClientRequest) -> Connection:
        with self._moving():
            self._send(link, ("run", request))
        return link

    def _answer(self, worker: Connection, link: Connection) -> Any:
        with self._moving():
            return self._receive(link)

    def close(self) -> None:
        """End the workers. After an interrupt this happens at once, even within a request."""
        if self._interrupted:
            for process in self._processes:
                process.kill()
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()

    @contextmanager
    def _moving(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.transfer_seconds += time.perf_counter() - began

    def _send(self, link: Connection, message: Any) -> None:
        try:
            send(link, message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died(link) from error

    def _receive(self, link: Connection) -> Any:
        try:
            return receive(link)
        except (EOFError, ConnectionResetError) as error:
            raise self._died(link) from error

    def _died(self, link: Connection) -> RunError:
        process = self._processes[self._links.index(link)]
        process.join(timeout=5)
        hint = (
            'its own message is above. A script must train below `if __name__ == "__main__":`, and a model\'s class '
            "must be importable, so not defined in a notebook or inside a function"
        )
        if process.exitcode == -signal.SIGKILL:
            hint = "if memory ran out, use fewer workers"
        elif process.exitcode is None or process.exitcode < 0:
            hint = "something outside this run ended it"
        return WorkerError(
            f"a worker process ended with exit code {process.exitcode}; {hint}"
        )


def in_order(
    requests: Iterable[ClientRequest],
    idle: deque[Worker],
    busy: dict[Handle, tuple[Worker, int, ClientRequest]],
    begin: Callable[[Worker, ClientRequest], Handle],
    ready: Callable[[list[Handle]], Iterable[Handle]],
    answer: Callable[[Worker, Handle], tuple[str, Any] | None],
) -> Iterator[ClientReply]:
    """Yield replies in the requests' order. A free worker takes the next request.

    A slow request holds back the others once :data:`AHEAD` requests a worker have begun.

    Args:
        busy: is filled with what runs: a request's handle, with its worker, its position and itself.
        begin: starts a request and returns its handle.
        ready: waits until some of the handles have an answer, and returns these.
        answer: returns a handle's answer, as of :func:`answer_of`. None means that the worker is lost. Another one then
            takes its request.
    """
    queue, again = enumerate(requests), deque[tuple[int, ClientRequest]]()
    done: dict[int, tuple[str, Any]] = {}
    begun = yielded = 0
    ahead, exhausted = AHEAD * len(idle), False
    while True:
        while idle and (again or (not exhausted and begun - yielded < ahead)):
            given = again.popleft() if again else next(queue, None)
            if given is None:
                exhausted = True
                break
            position, request = given
            worker = idle.popleft()
            busy[begin(worker, request)] = worker, position, request
            begun = max(begun, position + 1)
        while yielded in done:
            kind, value = done.pop(yielded)
            yielded += 1
            if kind == "error":
                raise value
            yield value
        if not busy and not again:
            if exhausted:
                return
            continue
        for handle in ready(list(busy)):
            worker, position, request = busy.pop(handle)
            found = answer(worker, handle)
            if found is None:
                again.append((position, request))
            else:
                done[position] = found
                idle.append(worker)


def check_sendable(model: nn.Module | Callable[..., nn.Module]) -> None:
    """Check that a model can be sent to worker processes.

    Raises:
        UsageError: a part cannot be sent. The message names it.
    """
    try:
        pickle.dumps(model)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(model, "__qualname__", type(model).__name__)
        raise UsageError(
            f"model {name} must be sendable to worker processes: {error}. "
            "Define its classes and functions at the top of a module, or use workers=0."
        ) from error


@contextmanager
def allocator_settings() -> Iterator[None]:
    """Start processes in the block with :data:`ALLOCATOR`. Variables that the environment already sets stay."""
    added = ALLOCATOR.keys() - os.environ.keys()
    os.environ.update({name: ALLOCATOR[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class _Pickler(pickle.Pickler):
    """Pickle plain tensors by NumPy, and all else as torch does.

    A message of two megabytes takes a quarter of the time of ``torch.save``.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.dtype not in FAST:
            return NotImplemented
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        return _aligned, (value.detach().numpy(), value.requires_grad)


def _aligned(array: np.ndarray, requires_grad: bool) -> Tensor:
    """Return a copy in torch's own memory: kernels may add in another order where memory is not aligned."""
    return torch.from_numpy(array).clone().requires_grad_(requires_grad)


def send(link: Connection, message: tuple[str, Any]) -> None:
    """Send a message of some kind. Its tensors arrive with the same bits, aligned as torch aligns its own."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    link.send_bytes(buffer.getbuffer())


def receive(link: Connection) -> tuple[str, Any]:
    """Receive the kind and contents of the next message, from a process of this run."""
    message: tuple[str, Any] = pickle.loads(link.recv_bytes())
    return message


def _serve(link: Connection) -> None:
    """Run a worker's main loop until the link closes. A worker never outlives its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    end_with_parent()
    torch.set_num_threads(1)
    client_runner: Any = None  # of the first message
    while True:
        try:
            kind, value = receive(link)
        except (EOFError, ConnectionResetError):
            return
        if kind == "client_runner":
            client_runner = ClientRunner(**value)
            continue
        if kind == "use":
            client_runner.use(value)
            continue
        try:
            send(link, answer_of(client_runner, value))
        except (
            BrokenPipeError,
            ConnectionResetError,
        ):  # the parent has closed the link
            return


def answer_of(client_runner: ClientRunner, request: ClientRequest) -> tuple[str, Any]:
    """Run a request for another process. Return "ok" and the reply, or "error" and the error to raise there."""
    try:
        return "ok", client_runner.run(request)
    except Exception as error:  # sent to the process that asked
        return "error", _portable(error, traceback.format_exc())


def _portable(error: Exception, where: str) -> Exception:
    """Return an error for the parent with its traceback as a note, or its text if it cannot be pickled."""
    note = f"in a worker process:\n{where}"
    error.add_note(note)
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # a class's own pickling may raise anything
        plain = RunError(f"{type(error).__name__}: {error}")
        plain.add_note(note)
        return plain
