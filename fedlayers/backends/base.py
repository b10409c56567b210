"""The interface of backends: studies and figures submit jobs and receive results.

A backend is named ``local:N`` (processes of this machine) or ``ray`` (:mod:`fedlayers.backends.cluster`). Without a
name it is this process. Results have the same bits on every backend.
"""

from __future__ import annotations

import re
import socket
import traceback
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
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from fl_core.data.root import local_root
from fl_core.errors import CorruptError, RunError, UsageError, WorkerError, warn
from fl_core.progress import progress_bar
from fl_core.records.store import BEGINNING
from fl_core.storage import Folder, sha

if TYPE_CHECKING:
    from fedlayers.live import Live

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
    """A unit of work that runs in one place. It can be sent elsewhere, and restarted if that place is lost.

    Attributes:
        name: its name in messages.
        path: its output folder. It resumes from the files there.
    """

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that it needs."""

    def carry_out(self) -> Any:
        """Do the work in the current process. Its value is sent back."""

    def sent_to(self, path: Path | None) -> Self:
        """Return the same job for another machine, with its folder there if one is given."""

    def held(self) -> AbstractContextManager[None]:
        """Keep other writers out of its folder while it runs elsewhere.

        Raises:
            BusyError: another process writes there.
        """

    def outgoing(self, sent: Sent) -> Iterator[FileBatch]:
        """Yield the files that another machine needs to resume the job."""

    def incoming(self, sent: Sent, over: bool) -> Iterator[FileBatch]:
        """Yield new files from its folder on the other machine. Called repeatedly."""

    def accept(self, parcel: FileBatch) -> None:
        """Write files from another machine to its folder."""


class Result(NamedTuple):
    """The outcome of a job: its value, or the exception that ended it."""

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
        live: the picture of its runs, if it is shown.
    """

    side_by_side = 1
    progress = True
    live: Live | None = None

    @abstractmethod
    def results(self, works: Iterable[Job], watch: Watch = no_progress) -> Results:
        """Run all jobs.

        Args:
            watch: is called with short progress messages.
        """

    def close(self) -> None:  # noqa: B027  (a place may have nothing to end)
        """End all processes of this backend at once."""


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

    What is received is at any moment no run yet, or a run that can be resumed. For this, ``config.json`` follows the
    other files that precede training, and a checkpoint's manifest follows all files that it names.

    Args:
        sent: is updated.
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
    """Yield those of the named files that have not been sent, or have changed since."""
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


def write_files(
    path: Path, parcel: FileBatch, allowed: re.Pattern[str] = RUN_FILES
) -> None:
    """Write a batch of files below a folder in their order, each atomically.

    Args:
        allowed: matches each name as a whole. The default matches the files of a run directory.

    Raises:
        CorruptError: a name is not allowed in such a folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    folder = Folder(path)
    for name, data in parcel.items():
        if not allowed.fullmatch(name):
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
    """Run a job for another process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            value, error = work.carry_out(), None
        except Exception as failure:  # carried to where the work came from
            value, error = None, picklable_error(failure)
    said = [
        str(each.message) for each in caught if issubclass(each.category, UserWarning)
    ]
    return Answer(value, error, list(dict.fromkeys(said)))


def picklable_error(error: Exception) -> Exception:
    """Return an exception that can be sent to another process. Unexpected ones become text."""
    if isinstance(error, (UsageError, RunError, OSError)):
        return error
    told = RunError(f"{type(error).__name__}: {error} (--debug shows where)")
    told.add_note("".join(traceback.format_exception(error)))
    return told


@contextmanager
def remote_errors(is_away: bool = True) -> Iterator[None]:
    """Use this machine's data within the block, and add its name to errors.

    Raises:
        UsageError, RunError: instead of such errors, and of OSError, within the block.
    """
    if not is_away:
        yield
        return
    with local_root():
        try:
            yield
        except (UsageError, OSError) as error:
            kind = UsageError if isinstance(error, UsageError) else RunError
            raise kind(f"on node {socket.gethostname()}: {error}") from error


class Event(NamedTuple):
    """A report of a process or node: an answer, files, or (neither) its loss.

    Attributes:
        handle: the job's handle from :meth:`WorkerPool.begin`.
        lost: a description of what is lost.
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
        source, again = iter(works), deque[Job]()
        running, lost = dict[H, Job](), Counter[int]()
        with ExitStack() as ended:
            ended.callback(lambda: self.stop(running))
            while True:
                while self.has_room(len(running)):
                    work = again.popleft() if again else next(source, None)
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
                        work.accept(event.parcel)
                        continue
                    del running[event.handle]
                    self.end(event.handle)
                    if event.answer is not None:
                        for text in event.answer.said:
                            warn(text)
                        yield Result(work, event.answer.value, event.answer.error)
                        continue
                    lost[id(work)] += 1
                    if lost[id(work)] == TRIES:
                        often = f"{work.name} was lost {TRIES} times, at last with {event.lost}"
                        yield Result(
                            work,
                            error=WorkerError(
                                f"{often}. If memory ran out, train fewer at a time."
                            ),
                        )
                        continue
                    warn(f"{event.lost} is lost: {work.name} continues elsewhere")
                    again.append(work)

    @abstractmethod
    def has_room(self, running: int) -> bool:
        """Return whether one more job can start while ``running`` jobs run."""

    @abstractmethod
    def begin(self, work: Job) -> H:
        """Start a job.

        Raises:
            RunError: it cannot be started.
        """

    @abstractmethod
    def events(self, running: dict[H, Job]) -> Sequence[Event]:
        """Wait briefly for events of the running jobs. The list may be empty."""

    @abstractmethod
    def words(self, running: dict[H, Job]) -> str:
        """Describe the running jobs in a few words."""

    def end(self, handle: H) -> None:
        """Release a job that sends nothing more."""

    def stop(self, running: dict[H, Job]) -> None:
        """End jobs whose results are not needed."""


def carry_out(
    works: Iterable[Job],
    place: Backend,
    done: Callable[[Result, int], None],
    *,
    total: int,
    what: str = "runs",
    progress: bool = True,
) -> None:
    """Run all jobs, with one progress line.

    Args:
        works: an iterable; a job is taken when there is room for it.
        done: receives each result and the number of results so far. An exception that it raises ends the other jobs.
        total: the number of jobs. ``what`` is their name in the progress line.
    """
    told = [""]

    def watch(words: str) -> None:
        if told[-1] != words:
            told[:] = [words]
            bar.set_postfix_str(words)

    with (
        progress_bar(total, what, "run", shown=progress) as bar,
        closing(place.results(works, watch)) as results,
    ):
        for count, result in enumerate(results, 1):
            bar.update()
            done(result, count)
