"""Worker processes in which clients train, with the same bits as in this process."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fl_core.algorithms.base import Algorithm
from fl_core.errors import UNGUARDED, RunError, UsageError, WorkerError, end_unguarded
from fl_core.progress import delay_signals, end_with_parent
from fl_core.rounds.clients import ClientReply, ClientRequest, ClientRunner

Worker = TypeVar("Worker")
Handle = TypeVar("Handle")
Sent = dict[int, tuple[Any, bytes | memoryview]]
"""The form and the bytes of a message's plain tensors, by their identity."""
FAST = (torch.float32, torch.float64, torch.int64, torch.bool)
"""Types of plain tensors. Only their bytes are sent; all others are pickled."""
Stream = io.BufferedRWPair
LOST = (ConnectionError, EOFError, pickle.UnpicklingError)
"""Errors of a stream whose other end has ended, perhaps within a message."""
BUFFER = 1 << 16
"""Bytes of a message that are gathered before they are moved."""
AHEAD = 4  # requests that may begin before the first reply is yielded, for each worker
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
"""Settings of glibc's allocator that keep the memory of one training step for the next.

Otherwise it returns the memory and every page faults again. They are read when a process starts."""
SAFE = {"PYTHONSAFEPATH": "1"}
"""Settings of a process that does not look for modules in the working directory first.

A stranger's file there could have the name of any module."""


class Child:
    """A process that this one has started, and the stream between the two.

    It never gets Ctrl-C, which a terminal sends to all of its processes.

    Args:
        serve: the function that it runs, with its end of the socket as the argument.
        settings: environment variables of the process, next to those of this one.
        last: an empty dict, if both ends store the tensors of the last message and equal ones are not sent again
            (:func:`send`). With None every message is sent whole.
    """

    def __init__(
        self,
        serve: Callable[[socket.socket], None],
        settings: Mapping[str, str],
        last: Sent | None = None,
    ) -> None:
        end_unguarded()
        main_module = sys.modules["__main__"]
        if getattr(main_module, "__file__", "") == "<stdin>":
            del main_module.__file__  # the process could not read it
        self.link, child_end = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(child_end,), daemon=True)
        with delay_signals(), environment({**settings, **SAFE}):
            resource_tracker.ensure_running()  # or the start would do it, and let interrupts through
            self.process.start()
        child_end.close()
        self.stream = stream_of(self.link)
        self.last = last

    def fileno(self) -> int:
        """Return the file descriptor, to wait for several processes at once."""
        return self.link.fileno()

    def send(self, message: object) -> None:
        """Send an object that can be pickled to the process.

        Raises:
            ConnectionError: the process has ended.
        """
        send(self.stream, message, self.last)

    def receive(self) -> Any:
        """Wait for the next answer of the process, and return it.

        Raises:
            ConnectionError, EOFError, UnpicklingError: the process has ended.
        """
        return receive(self.stream)

    def close(self) -> None:
        """Close the stream. The process then ends by itself."""
        with suppress(OSError):  # it has ended itself
            self.link.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):  # what it did not take is lost with it
            self.stream.close()
        self.link.close()

    def end(self, patience: float) -> int | None:
        """Close the stream, kill the process if it still runs after ``patience`` seconds, and return its exit code."""
        self.close()
        self.process.join(timeout=patience)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


def ready(children: list[Child], timeout: float | None = None) -> list[Child]:
    """Wait until some of the processes have an answer or have ended, and return these.

    Args:
        children: the processes.
        timeout: seconds after which the result may be empty. None means no limit.
    """
    return cast(list[Child], wait(cast(Any, children), timeout))


class Workers:
    """Persistent worker processes with one thread each, in which clients train and are scored.

    Call :meth:`use` before :meth:`run`, and :meth:`close` at the end. The processes end with this one in every case.

    Args:
        client_runner: the runner of clients, with model and data. Each process gets a copy.
        count: number of processes.

    Raises:
        WorkerError: a process ends at its start.
        UsageError: this is a script that trains without ``if __name__ == "__main__":``.
            Errors of pickling the runner keep their types.
    """

    def __init__(self, client_runner: ClientRunner, count: int) -> None:
        self._children: list[Child] = []
        self._broken = False
        settings = {
            name: os.environ.get(name, value) for name, value in ALLOCATOR.items()
        }
        try:
            for _ in range(count):
                self._children.append(Child(_serve, settings, {}))
            self.serve(client_runner)
        except BaseException:  # an interrupt too; no worker has anything to finish
            self._broken = True
            self.close()
            raise

    def serve(self, client_runner: ClientRunner) -> None:
        """Send a client runner to every worker, which runs later requests by it.

        It can replace another one, since new processes start slowly. :meth:`use` must
        follow before the next requests.

        Raises:
            WorkerError, UsageError: a worker has ended (:func:`ended`).
        """
        for child in self._children:
            self._send(child, ("client_runner", client_runner))

    def use(self, algorithm: Algorithm) -> None:
        """Load an algorithm in every worker.

        Raises:
            UsageError: it cannot be sent to another process (:func:`check_sendable`).
            WorkerError, UsageError: a worker has ended (:func:`ended`).
        """
        check_sendable(algorithm)
        for child in self._children:
            self._send(child, ("use", algorithm))

    def run(self, requests: Iterable[ClientRequest]) -> Iterator[ClientReply]:
        """Yield replies in the requests' order. A free worker takes the next request.

        No worker is left with an unread answer if the iteration ends early or with an
        error. After an interrupt or the loss of a worker, all must be closed.

        Raises:
            WorkerError, UsageError: a worker has ended (:func:`ended`). An error in a
            request is raised in the place of its reply.
        """
        busy: dict[Child, tuple[Child, int, ClientRequest]] = {}
        try:
            yield from in_order(
                requests, deque(self._children), busy, self._begin, ready, self._answer
            )
        except KeyboardInterrupt:
            self._broken = True
            raise
        finally:
            for child in () if self._broken else busy:
                self._answer(child, child)

    def _begin(self, child: Child, request: ClientRequest) -> Child:
        self._send(child, ("run", request))
        return child

    def close(self) -> None:
        """End the workers. After an interrupt or a loss this happens at once, even within a request."""
        for child in self._children:
            child.close()
        for child in self._children:
            child.end(0 if self._broken else 5)

    @contextmanager
    def _living(self, child: Child) -> Iterator[None]:
        """Raise the error of :func:`ended` if the worker ends inside the block."""
        try:
            yield
        except LOST:
            self._broken = True
            raise ended(child, "a worker process") from None

    def _send(self, child: Child, message: object) -> None:
        with self._living(child):
            child.send(message)

    def _answer(self, worker: Child, child: Child) -> Any:
        with self._living(child):
            return child.receive()


def ended(child: Child, what: str) -> Exception:
    """End a process that no longer answers, and return the error that describes its end.

    The error is a UsageError for a script that trains without ``if __name__ == "__main__":``, else a WorkerError with
    the exit code.

    Args:
        child: the process.
        what: the process in words, for the message.
    """
    code = child.end(5)
    if code == UNGUARDED:
        return UsageError(
            'a script with workers or a backend must train below if __name__ == "__main__":, and define its classes '
            f"above; got {sys.argv[0]}. Indent what trains below that line, and no class or function."
        )
    hint = "If it left a message, that is above."
    if code == -signal.SIGKILL:
        hint = "If memory ran out, use fewer workers."
    elif code is None or code < 0:
        hint = "Something outside this run ended it."
    return WorkerError(f"{what} ended with exit code {code}. {hint}")


def in_order(
    requests: Iterable[ClientRequest],
    idle: deque[Worker],
    busy: dict[Handle, tuple[Worker, int, ClientRequest]],
    begin: Callable[[Worker, ClientRequest], Handle],
    ready: Callable[[list[Handle]], Iterable[Handle]],
    answer: Callable[[Worker, Handle], tuple[str, Any] | None],
) -> Iterator[ClientReply]:
    """Yield replies in the requests' order. A free worker takes the next request.

    A slow request holds back the others: at most :data:`AHEAD` times as many requests as there are workers begin before
    its reply is yielded. An error in a request is raised in the place of its reply.

    Args:
        requests: the requests, which are taken as workers become free.
        idle: the workers. The function updates it.
        busy: {handle: (worker, position, request)} of the requests that are in progress. The function updates it.
        begin: a function that starts a request and returns its handle.
        ready: a function that waits until some of the handles have an answer, and returns these.
        answer: a function that returns a handle's answer, in the form of :func:`answer_of`. None means that the worker
            is lost. Another worker then takes its request.
    """
    queue = enumerate(requests)
    repeated_tasks = deque[tuple[int, ClientRequest]]()
    answers: dict[int, tuple[str, Any]] = {}
    n_begun = yielded = 0
    most_begun, is_exhausted = AHEAD * len(idle), False
    while True:
        while idle and (
            repeated_tasks or (not is_exhausted and n_begun - yielded < most_begun)
        ):
            task = repeated_tasks.popleft() if repeated_tasks else next(queue, None)
            if task is None:
                is_exhausted = True
                break
            position, request = task
            worker = idle.popleft()
            busy[begin(worker, request)] = worker, position, request
            n_begun = max(n_begun, position + 1)
        while yielded in answers:
            kind, value = answers.pop(yielded)
            yielded += 1
            if kind == "error":
                raise value
            yield value
        if not busy and not repeated_tasks:
            if is_exhausted:
                return
            continue
        for handle in ready(list(busy)):
            worker, position, request = busy.pop(handle)
            reply = answer(worker, handle)
            if reply is None:
                repeated_tasks.append((position, request))
            else:
                answers[position] = reply
                idle.append(worker)


def check_sendable(part: object) -> None:
    """Check that a part of a run can be sent to worker processes.

    Raises:
        UsageError: it cannot be pickled, or the processes cannot import its classes.
    """
    fault = "its class is of a notebook or a command, which no process can import"
    try:
        has_no_file = not hasattr(sys.modules["__main__"], "__file__")
        if not (b"__main__" in pickle.dumps(part) and has_no_file):
            return
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        fault = str(error)
    name = getattr(part, "__qualname__", type(part).__name__)
    raise UsageError(
        f"{name} must be sendable to worker processes; got: {fault}. "
        "Define its classes and functions at the top of a module, or train without workers and backend."
    )


def stream_of(link: socket.socket) -> Stream:
    """Return a buffered stream for reading from and writing to a socket, so that small tensors are moved together."""
    return cast(Stream, link.makefile("rwb", buffering=BUFFER))


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Give processes that start in the ``with`` block these environment variables, {name: value}.

    This process has them too until the block ends. Then it has its earlier ones again.
    """
    earlier_environment = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
        os.environ.update(earlier_environment)


class _Pickler(pickle.Pickler):
    """Pickle all of a message but its plain tensors. Each of these leaves its identity there."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, value: object) -> int | None:
        if type(value) is not Tensor or value.dtype not in FAST:
            return None
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        self.tensors[id(value)] = value
        return id(value)


class _Unpickler(pickle.Unpickler):
    """Unpickle a message. ``tensors`` holds its plain tensors."""

    def __init__(self, file: io.BytesIO, tensors: dict[int, Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, key: int) -> Tensor:
        return self.tensors[key]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except AttributeError:
            if module == "__main__":  # an import of the script does not define it
                sys.exit(UNGUARDED)
            raise


def send(stream: Stream, message: object, last: Sent | None = None) -> None:
    """Send a message: the bytes of its plain tensors, and then all else.

    Plain tensors are dense tensors on the CPU of a type in :data:`FAST`.

    A tensor arrives with its strides. One with gaps in memory arrives without them, as its clone would be.

    Args:
        last: the plain tensors of the last message, which the other end has, too. One whose form and bytes have not
            changed is not sent again. Those of this message replace them.
    """
    body = io.BytesIO()
    pickler = _Pickler(body)
    pickler.dump(message)
    sent_tensors: Sent = {}
    for key, tensor in pickler.tensors.items():
        dense_tensor = tensor.detach().resolve_neg()
        if not dense_tensor.is_contiguous():
            dense_tensor = dense_tensor.clone()  # has fewer gaps in memory
        form = (
            dense_tensor.dtype,
            dense_tensor.shape,
            dense_tensor.stride(),
            tensor.requires_grad,
        )
        memory = _bytes_of(dense_tensor)
        sent_tensors[key] = form, memory if last is None else bytes(memory)
    changed_keys = {
        key for key in sent_tensors if sent_tensors[key] != (last or {}).get(key)
    }
    forms = {key: form for key, (form, _) in sent_tensors.items()}
    pickle.dump((forms, changed_keys, body.tell()), stream)
    for key, (_, data) in sent_tensors.items():
        if key in changed_keys:
            stream.write(data)
    stream.write(body.getbuffer())
    stream.flush()
    _replace(last, sent_tensors)


def receive(stream: Stream, last: Sent | None = None) -> Any:
    """Receive the next message of a process of this run.

    Its tensors have the bits that were sent. They are aligned as torch aligns its own, since kernels may add in another
    order where memory is not.

    Args:
        last: as for :func:`send` at the other end.

    Raises:
        ConnectionError, EOFError, UnpicklingError: the stream has ended, perhaps within
            a message.
    """
    forms, changed_keys, size = pickle.load(stream)
    tensors: dict[int, Tensor] = {}
    received_tensors: Sent = {}
    for key, (dtype, shape, stride, _) in forms.items():
        tensors[key] = torch.empty_strided(shape, stride, dtype=dtype)
        memory = _bytes_of(tensors[key])
        if key in changed_keys:
            _fill(stream, memory)
        elif last is not None:
            memory[:] = last[key][1]
        received_tensors[key] = forms[key], memory if last is None else bytes(memory)
    _replace(last, received_tensors)
    body = bytearray(size)  # all of it, whatever may fail on loading it
    _fill(stream, memoryview(body))
    for key, (*_, requires_grad) in forms.items():
        tensors[key].requires_grad_(requires_grad)
    return _Unpickler(io.BytesIO(body), tensors).load()


def _replace(last: Sent | None, now: Sent) -> None:
    if last is not None:
        last.clear()
        last.update(now)


def _fill(stream: Stream, memory: memoryview) -> None:
    """Fill memory from a stream.

    Raises:
        EOFError: the stream ends before the memory is full.
    """
    if stream.readinto(memory) < len(memory):
        raise EOFError


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor without gaps."""
    flat_view = tensor.as_strided((tensor.numel(),), (1,))
    return flat_view.view(torch.uint8).numpy().data


def _serve(link: socket.socket) -> None:
    """Run a worker's main loop until the link closes. A worker never outlives its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    end_with_parent()
    torch.set_num_threads(1)
    client_runner: Any = None  # of the first message
    stream, last = stream_of(link), Sent()
    with suppress(ConnectionError, EOFError):  # the parent has closed the link
        while True:
            kind, value = receive(stream, last)
            if kind == "client_runner":
                client_runner = value
            elif kind == "use":
                client_runner.use(value)
            else:
                send(stream, answer_of(client_runner, value))


def answer_of(client_runner: ClientRunner, request: ClientRequest) -> tuple[str, Any]:
    """Run a request for another process. Return "ok" and the reply, or "error" and the error to raise there."""
    try:
        return "ok", client_runner.run(request)
    except Exception as error:  # sent to the process that asked
        return "error", portable(error)


def portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process.

    It is the same error, which gets its traceback as a note. If that cannot be pickled,
    it is a RunError with its type and text.
    """
    traceback_text = "".join(traceback.format_exception(error))
    note = f"in a worker process:\n{traceback_text}"
    error.add_note(note)
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # a class's own pickling may raise anything
        error_type = type(error).__name__
        plain_error = RunError(f"{error_type}: {error}")
        plain_error.add_note(note)
        return plain_error
