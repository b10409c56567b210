"""Backends: studies and figures submit jobs and receive results, from this process or from parallel ones.

A backend is named ``local:N`` (processes of this machine) or ``ray`` (:mod:`fedlayers.backends.cluster`). Without a
name it is this process. Results have the same bits on every backend.
"""

from __future__ import annotations

import re
import socket
import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from tqdm import tqdm

from fl_core.errors import CorruptError, RunError, UsageError, WorkerError, warn
from fl_core.progress import end_with_parent, progress_bar
from fl_core.records.store import BEGINNING
from fl_core.rounds.workers import (
    LOST,
    Child,
    ended,
    portable,
    ready,
    receive,
    send,
    stream_of,
)
from fl_core.storage import Folder, sha

if TYPE_CHECKING:
    from fedlayers.run_result import Live

TRIES = 5
"""How often a job is started if its process or node is lost each time."""
FileBatch = dict[str, bytes]
"""Files that travel together: contents by relative name."""
Sent = MutableMapping[str, str]
"""Files sent already: digests by relative name."""
BYTES = 64 * 2**20
"""Bytes from which a batch is complete. Memory then holds at most this and one file."""
RUN_FILES = re.compile(
    r"[a-z]+\.(json|jsonl|safetensors)|checkpoints/[0-9]{6,}\.json|blobs/[0-9a-f]{64}\.safetensors"
)
"""The names of the files of a run directory."""


class Job(Protocol):
    """Work of one directory that a backend runs, here or on another machine."""

    @property
    def path(self) -> Path:
        """Return the job's directory."""

    @property
    def name(self) -> str:
        """Return the name that messages use for the job."""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that the job needs."""

    def carry_out(self) -> object:
        """Run the job in this process, and return its value."""

    def sent_to(self, path: Path | None) -> Job:
        """Return the same job for another machine.

        Args:
            path: the job's directory there. None while it is not known, before sending:
                the job then keeps its directory.
        """


class Result(NamedTuple):
    """The outcome of a job: its value, or the exception that ended it.

    Attributes:
        work: the job.
        value: what it returned; None after an exception.
        error: the exception, or None.
    """

    work: Any
    value: Any = None
    error: Exception | None = None


Results = Generator[Result, None, None]
"""A generator of results. Close it to end the jobs that still run."""
Watch = Callable[[str], None]


def no_progress(words: str) -> None:
    """Ignore progress messages."""


class Backend(ABC):
    """A place that runs jobs. Results come in order of completion.

    Attributes:
        side_by_side: the number of jobs that run at a time.
        progress: whether the progress of a study's runs is shown.
        live: the picture of its runs; None if none is drawn.
    """

    side_by_side = 1
    progress = True
    live: Live | None = None

    @abstractmethod
    def results(self, works: Iterable[Job], watch: Watch = no_progress) -> Results:
        """Run all jobs, and yield each job with its result, in order of completion.

        An exception in a job is its result's ``error``, and the other jobs go on.

        Args:
            works: the jobs. The next one is taken when there is room for it.
            watch: receives short progress messages.
        """

    def close(self) -> None:  # noqa: B027  (a place may have nothing to end)
        """End all processes of this backend without waiting for their jobs."""


class InProcessBackend(Backend):
    """The current process. It runs one job after another."""

    def results(self, works: Iterable[Job], watch: Watch = no_progress) -> Results:
        for work in works:
            watch(work.name)
            try:
                yield Result(work, work.carry_out())
            except Exception as error:  # the caller's to judge
                yield Result(work, error=error)


# --- files of a job on another machine -------------------------------------------------------------------------


def changed_files(path: Path, sent: Sent, over: bool) -> Iterator[FileBatch]:
    """Yield the files of a run directory that are not ``sent`` yet, possibly while it is written to.

    The copy is at any moment no run yet, or a run that can be resumed. For this, ``config.json`` follows the other
    files that precede training, and a checkpoint's manifest follows all files that it names.

    Args:
        path: the run directory.
        sent: the digest of each file that was sent, by name. The function updates it.
        over: whether nothing more will be written. Otherwise nothing is read unless there is a new checkpoint.
    """
    folder = Folder(path)
    if not folder.has("config.json"):
        return  # no run yet
    manifests = [f"checkpoints/{name}" for name in folder.names("checkpoints")]
    if over or not sent.keys() >= {*filter(RUN_FILES.fullmatch, manifests)}:
        blobs = [f"blobs/{name}" for name in folder.names("blobs")]
        root = sorted(
            folder.names(),
            key=lambda name: (name not in BEGINNING, name == "config.json"),
        )
        names = filter(RUN_FILES.fullmatch, [*root, *blobs, *manifests])
        yield from batches(folder, names, sent)


def batches(folder: Folder, names: Iterable[str], sent: Sent) -> Iterator[FileBatch]:
    """Yield those of the named files that are new or have changed since they were sent, in batches.

    Args:
        folder: the run directory.
        names: names of files in it, in the order in which they are sent.
        sent: the digest of each file that was sent, by name. The function updates it.
    """
    parcel: FileBatch = {}
    for name in names:
        if name in sent and "/" in name:  # such files never change
            continue
        data = folder.read(name)
        digest = sha(data)
        if sent.get(name) == digest:
            continue
        sent[name] = digest
        parcel[name] = data
        if sum(map(len, parcel.values())) >= BYTES:
            yield parcel
            parcel = {}
    if parcel:
        yield parcel


def write_files(path: Path, parcel: FileBatch) -> None:
    """Write a batch of files below a run directory in their order, each atomically.

    Args:
        path: the run directory.
        parcel: the contents of the files, by name.

    Raises:
        CorruptError: a name is not that of a file of a run.
    """
    path.mkdir(parents=True, exist_ok=True)
    folder = Folder(path)
    for name, data in parcel.items():
        if not RUN_FILES.fullmatch(name):
            raise CorruptError(
                f"name of a file in {path} must be that of a stored file; got {name!r}."
            )
        folder.write(name, data)


# --- elsewhere -------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A process's answer: a value or an exception, and the warnings."""

    value: Any
    error: Exception | None
    said: list[str]


def answer_job(work: Job) -> Answer:
    """Run a job, and return its value or its exception, with the texts of its warnings.

    The warnings are those of class UserWarning, each text once.
    """
    with warnings.catch_warnings(record=True) as warnings_caught:
        warnings.simplefilter("always", UserWarning)
        try:
            value, error = work.carry_out(), None
        except Exception as failure:  # carried to where the work came from
            value, error = None, portable(failure)
    messages = [
        str(warning.message)
        for warning in warnings_caught
        if issubclass(warning.category, UserWarning)
    ]
    return Answer(value, error, list(dict.fromkeys(messages)))


class Event(NamedTuple):
    """A report about a job: its answer, some of its files, or else the loss of its process or node.

    Attributes:
        handle: the job's handle from :meth:`WorkerPool.begin`.
        answer: the answer; None in another report.
        parcel: some files of the job's directory; None in another report.
        lost: which process or node was lost, in words; empty in another report.
    """

    handle: Any
    answer: Answer | None = None
    parcel: FileBatch | None = None
    lost: str = ""


H = TypeVar("H")


class WorkerPool(Backend, Generic[H]):
    """A pool of processes or nodes. A free one takes the next job; a lost job is started again.

    Raises:
        WorkerError: as a result's error, if a job was lost :data:`TRIES` times.
    """

    def results(self, works: Iterable[Job], watch: Watch = no_progress) -> Results:
        source, loss_counts = iter(works), Counter[int]()
        jobs_to_repeat: deque[Job] = deque()
        running: dict[H, Job] = {}
        with ExitStack() as ended:
            ended.callback(lambda: self.stop(running))
            while True:
                while self.has_room(len(running)):
                    work = (
                        jobs_to_repeat.popleft()
                        if jobs_to_repeat
                        else next(source, None)
                    )
                    if work is None:
                        break
                    try:
                        running[self.begin(work)] = work
                    except (
                        RunError
                    ) as error:  # such as a run that another process is writing
                        yield Result(work, error=error)
                if not running:
                    return
                watch(self.words(running))
                for event in self.events(running):
                    work = running[event.handle]
                    if event.parcel is not None:
                        write_files(work.path, event.parcel)
                        continue
                    del running[event.handle]
                    self.end(event.handle)
                    if event.answer is not None:
                        for text in event.answer.said:
                            warn(text)
                        yield Result(work, event.answer.value, event.answer.error)
                        continue
                    loss_counts[id(work)] += 1
                    if loss_counts[id(work)] == TRIES:
                        reason = f"{work.name} was lost {TRIES} times, at last with {event.lost}"
                        yield Result(
                            work,
                            error=WorkerError(
                                f"{reason}. If memory ran out, train fewer at a time."
                            ),
                        )
                        continue
                    warn(f"{event.lost} is lost: {work.name} continues elsewhere")
                    jobs_to_repeat.append(work)

    @abstractmethod
    def has_room(self, running: int) -> bool:
        """Return whether one more job can start while ``running`` jobs are in progress."""

    @abstractmethod
    def begin(self, work: Job) -> H:
        """Start a job, and return its handle.

        Raises:
            RunError: it cannot be started.
        """

    @abstractmethod
    def events(self, running: dict[H, Job]) -> Sequence[Event]:
        """Wait briefly for events of the running jobs, and return them.

        The list may be empty.
        """

    @abstractmethod
    def words(self, running: dict[H, Job]) -> str:
        """Return the running jobs in a few words, for the progress line."""

    def end(self, handle: H) -> None:
        """Release what a finished or lost job used."""

    def stop(self, running: dict[H, Job]) -> None:
        """Stop jobs at once; their results are not needed."""


def carry_out(
    works: Iterable[Job],
    place: Backend,
    done: Callable[[Result, int], None],
    *,
    total: int,
    progress: bool = True,
) -> None:
    """Run all jobs, with one progress line.

    Args:
        works: the jobs. The next one is taken when there is room for it.
        place: the backend that runs them.
        done: receives each result and the number of results so far. An exception that it raises ends the other jobs.
        total: the number of jobs.
        progress: whether the progress line is shown.
    """
    printed_words = [""]

    def watch(words: str) -> None:
        if printed_words[-1] != words:
            printed_words[:] = [words]
            bar.set_postfix_str(words)

    with (
        progress_bar(total, "runs", "run", shown=progress) as bar,
        closing(place.results(works, watch)) as results,
    ):
        for count, result in enumerate(results, 1):
            bar.update()
            done(result, count)


# --- processes of this machine ----------------------------------------------------------------------------------------

RAY = "ray"
PERIOD = 1.0
"""Seconds between checks for other work."""
AT_ONCE = 0.1
"""Seconds for a process to end before it is killed.

A run directory stays valid whenever its writer dies."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Local(WorkerPool[Child]):
    """A pool of processes of this machine, each with one thread.

    The processes start with the first jobs, and take further ones. They end when the pool
    is closed, and at the latest when this process ends.

    Args:
        count: the number of processes.
    """

    def __init__(self, count: int) -> None:
        self.side_by_side = count
        self._idle: list[Child] = []

    def has_room(self, running: int) -> bool:
        return running < self.side_by_side

    def begin(self, work: Job) -> Child:
        while True:
            child = self._idle.pop() if self._idle else Child(_serve, ONE_THREAD)
            try:
                child.send(work)
                return child
            except ConnectionError:  # it ended while it was idle
                child.end(AT_ONCE)

    def events(self, running: dict[Child, Job]) -> Sequence[Event]:
        events = []
        for child in ready(list(running), PERIOD):
            try:
                answer: Answer = child.receive()
            except LOST:
                error = ended(child, f"{running[child].name}: its process")
                code = child.process.exitcode
                if code is not None and code > 0:  # it ended itself, and would again
                    events.append(Event(child, Answer(None, error, [])))
                else:
                    events.append(Event(child, lost=f"a process (exit code {code})"))
            else:
                self._idle.append(child)
                events.append(Event(child, answer))
        return events

    def words(self, running: dict[Child, Job]) -> str:
        return f"{len(running)} running"

    def stop(self, running: dict[Child, Job]) -> None:
        for child in running:
            if child in self._idle:  # its answer had come
                self._idle.remove(child)
            child.end(AT_ONCE)

    def close(self) -> None:
        for child in self._idle:
            child.end(AT_ONCE)
        self._idle.clear()


def _serve(link: socket.socket) -> None:
    """Run jobs until the link closes. The process never outlives its parent."""
    end_with_parent()
    # its own lock is a semaphore, which a killed process leaves behind
    tqdm.set_lock(threading.RLock())
    stream = stream_of(link)
    with suppress(ConnectionError):  # the parent has closed the link
        while True:
            try:
                work: Job = receive(stream)
            except EOFError:
                return
            except Exception as error:  # whatever a module of the user's raises that is imported for it
                error_type = type(error).__name__
                words = f"a process cannot start: {error_type}: {error}"
                answer = Answer(None, RunError(words), [])
            else:
                answer = answer_job(work)
            send(stream, answer)


# --- by name ---------------------------------------------------------------------------------------------------


def check_backend(name: str) -> None:
    """Refuse an unknown name of a backend.

    Raises:
        UsageError: the name is unknown. The message lists the known ones.

    >>> check_backend("local:2"), check_backend("ray"), check_backend("ray:10.0.0.1:6379")
    (None, None, None)
    >>> check_backend("x")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: backend must be local:N, ray or ray:HOST:PORT; got 'x'. Use local:2 for two processes.
    >>> for name in ("local", "local:0", "local:x", "ray:", "ray:host", "ray:ray://h:1"):
    ...     try:
    ...         check_backend(name)
    ...     except UsageError as error:
    ...         print(str(error).partition("; ")[2].partition(".")[0])
    got 'local'
    got 'local:0'
    got 'local:x'
    got 'ray:'
    got 'ray:host'
    got 'ray:ray://h:1'
    """
    kind, colon, argument = name.partition(":")
    if kind == "local" and re.fullmatch("[1-9][0-9]{0,3}", argument):
        return
    if kind == RAY and (not colon or re.fullmatch(r"[^\s/]+:[0-9]{1,5}", argument)):
        return
    raise UsageError(
        f"backend must be local:N, {RAY} or {RAY}:HOST:PORT; got {name!r}. Use local:2 for two processes."
    )
