"""Executors that train clients in this process or in worker processes, with bit-identical results."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fl_core.algorithms.base import Algorithm
from fl_core.data import ClientData, Split
from fl_core.errors import RunError, UsageError, WorkerError
from fl_core.execution.batched_clients import BatchedClients
from fl_core.execution.client_runner import ClientRunner
from fl_core.execution.requests import ClientReply, ClientRequest
from fl_core.execution.shared_memory import SharedBlock, as_tensor, shared_copy
from fl_core.execution.transport import ALIGNED, Channel, Slot, allocator_settings
from fl_core.interrupts import delay_signals, end_with_parent

Worker = TypeVar("Worker")
Handle = TypeVar("Handle")
AHEAD = 4  # requests that may begin before the first reply is yielded, for each worker
SLOT_TREES = 3  # whole models in shared memory, each way and for each worker, next to a kept optimiser's


class Executor(Protocol):
    """An executor of requests that yields their replies in the requests' order."""

    transfer_seconds: float  # seconds that this process has spent on moving requests and replies between processes

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm for later requests. Call this again after its plan has changed."""

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in the requests' order. An error in a request is raised in the place of its reply."""

    def close(self) -> None:
        """End any worker processes."""


class Serial:
    """An executor that does every request in this process."""

    transfer_seconds = 0.0

    def __init__(self, client_runner: ClientRunner) -> None:
        self.client_runner = client_runner

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm."""
        self.client_runner.use(algorithm)

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in order. Messages and states are cloned, as between processes."""
        for request in requests:
            reply = self.client_runner.run(request)
            reply.message = reply.message.clone()
            yield reply

    def close(self) -> None:
        """Do nothing: there are no processes."""


class Workers:
    """Persistent worker processes with one thread each. They end with this process in every case.

    Args:
        repeats: whether tensors that a worker still has from its last request are not sent again.
    """

    transfer_seconds = 0.0

    def __init__(
        self, client_runner: ClientRunner, count: int, repeats: bool = True
    ) -> None:
        context = multiprocessing.get_context("spawn")
        trees = SLOT_TREES + client_runner.training.optimizer_slots
        room = trees * sum(
            tensor.nbytes + ALIGNED for tensor in client_runner.workspace.live.values()
        )
        self._links: list[Channel] = []
        self._processes: list[Any] = []
        self._interrupted = False
        resource_tracker.ensure_running()  # otherwise the first worker's start would do so and let interrupts through
        with (
            delay_signals()
        ):  # a terminal sends Ctrl-C to all of them, but this process handles it
            for _ in range(count):
                ours, theirs = context.Pipe()
                requests, replies = Slot.allocate(room, repeats), Slot.allocate(room)
                arguments = (
                    theirs,
                    requests.shared,
                    replies.shared,
                )  # few bytes: a start with many waits for a reader
                process = context.Process(target=_serve, args=arguments, daemon=True)
                with allocator_settings():
                    process.start()
                theirs.close()
                self._links.append(Channel(ours, requests, replies, keeps=True))
                self._processes.append(process)
        try:
            self.serve(client_runner)
        except BaseException:  # an interrupt too; no worker has anything to finish
            self._interrupted = True
            self.close()
            raise

    @property
    def copied(self) -> int:
        """Return the bytes of tensors that this process has copied to its workers' memory."""
        return sum(link.sends.copied for link in self._links)

    def serve(self, client_runner: ClientRunner) -> None:
        """Serve a client runner from now on. It can replace another one, since new processes start slowly.

        Raises:
            WorkerError: a worker has ended.
        """
        packed = _Packed(client_runner)
        for link in self._links:
            self._send(link, ("client_runner", packed))

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm in every worker."""
        for link in self._links:
            self._send(link, ("use", algorithm))

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in the requests' order. A free worker takes the next request.

        No worker is left with an unread answer, however the iteration ends.
        """
        busy: dict[Channel, tuple[Channel, int, ClientRequest]] = {}
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

    def _begin(self, link: Channel, request: ClientRequest) -> Channel:
        with self._moving():
            self._send(link, ("run", request))
        return link

    def _answer(self, worker: Channel, link: Channel) -> Any:
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

    def _send(self, link: Channel, message: Any) -> None:
        try:
            link.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died(link) from error

    def _receive(self, link: Channel) -> Any:
        try:
            return link.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._died(link) from error

    def _died(self, link: Channel) -> RunError:
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


MakesExecutor = Callable[[ClientRunner], Executor]


def executor(
    client_runner: ClientRunner, workers: int, stack: bool = False
) -> Executor:
    """Choose the executor: stacked clients if asked for, else this process (0 or 1 workers) or worker processes."""
    if stack:
        return BatchedClients(client_runner)
    return Serial(client_runner) if workers < 2 else Workers(client_runner, workers)


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


def check_main_block() -> None:
    """Refuse work that a script does while it is imported for a new process, which happens without a main block.

    Raises:
        UsageError: the caller runs in such an import.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if (
            frame.f_globals.get("__name__") == "__mp_main__"
            and frame.f_code.co_name == "<module>"
        ):
            raise UsageError(
                f'training in {frame.f_code.co_filename} must be below a line `if __name__ == "__main__":`; got line '
                f"{frame.f_lineno} above it. New processes import the script, and must not train again."
            )
        frame = frame.f_back


# --- crossing a process border ---------------------------------------------------------------------------------


class _Packed:
    """A client runner packed for a worker: clients' data in shared memory, and a pickle of the rest.

    The pickle is a plain one: multiprocessing would put each tensor of the model into its own shared memory.
    """

    def __init__(self, client_runner: ClientRunner) -> None:
        self.rest = pickle.dumps(
            {**client_runner.made_of(), "data": replace(client_runner.data, clients=())}
        )
        splits = [
            (client.train, client.validation, client.test)
            for client in client_runner.data.clients
        ]
        x, y = (
            torch.cat([getattr(split, part) for client in splits for split in client])
            for part in "xy"
        )
        self.parts = [
            (shared_copy(tensor), tensor.dtype, tensor.shape) for tensor in (x, y)
        ]
        names = [client.name for client in client_runner.data.clients]
        self.lengths = [
            (name, [len(s) for s in parts])
            for name, parts in zip(names, splits, strict=True)
        ]

    def unpack(self) -> ClientRunner:
        clients, at = [], 0
        x, y = (as_tensor(*part) for part in self.parts)
        for name, sizes in self.lengths:
            splits = []
            for size in sizes:
                splits.append(Split(x[at : at + size], y[at : at + size]))
                at += size
            clients.append(ClientData(name, *splits))
        rest = pickle.loads(self.rest)
        return ClientRunner(
            rest.pop("model"), replace(rest.pop("data"), clients=tuple(clients)), **rest
        )


def _serve(connection: Connection, requests: SharedBlock, replies: SharedBlock) -> None:
    """Run a worker's main loop until the link closes. A worker never outlives its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    end_with_parent()
    torch.set_num_threads(1)
    link = Channel(connection, Slot(replies), Slot(requests), keeps=False)
    client_runner: Any = None  # of the first message
    while True:
        try:
            kind, value = link.recv()
        except (EOFError, ConnectionResetError):
            return
        if kind == "client_runner":
            client_runner = value.unpack()
            continue
        if kind == "use":
            client_runner.use(value)
            continue
        try:
            link.send(answer_of(client_runner, value))
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
