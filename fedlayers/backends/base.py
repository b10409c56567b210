"""The one interface by which studies and figures have many runs trained, wherever that is: works go in, results come.

A place is named ``local:N`` (processes of this machine) or ``ray`` (:mod:`fedlayers.backends.cluster`); without a name
it is this process. The bits of results are the same everywhere.
"""

from __future__ import annotations

import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from fl_core.errors import RunError, UsageError, WorkerError

if TYPE_CHECKING:
    from fl_core.records.sync import FileBatch, Sent

TRIES = 5
"""How often a work is begun whose process or node is lost each time."""


class Job(Protocol):
    """What is done as a whole in one place: it can be sent there, and begun again where another was lost.

    Attributes:
        name: for messages.
        path: the folder that it writes to; what is there already it goes on from.
    """

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def gpus(self) -> int:
        """How many GPUs it needs."""

    def carry_out(self) -> Any:
        """Do it, in whichever process; what is returned crosses back."""

    def sent_to(self, path: Path | None) -> Self:
        """The same for another machine; with a folder there, writing to that one."""

    def held(self) -> AbstractContextManager[None]:
        """Keep other writers from its folder while it is done elsewhere.

        Raises:
            BusyError: one is writing there.
        """

    def outgoing(self, sent: Sent) -> Iterator[FileBatch]:
        """What of its folder it goes on from, to be carried to another machine."""

    def incoming(self, sent: Sent, over: bool) -> Iterator[FileBatch]:
        """What has come about in its folder on that machine and has not been sent; asked again and again."""

    def accept(self, parcel: FileBatch) -> None:
        """Write to its folder what came from elsewhere."""


class Result(NamedTuple):
    """What came of a work: its value, or the exception that ended it."""

    work: Any
    value: Any = None
    error: Exception | None = None


Results = Generator[Result, None, None]
"""To be closed: what is still carried out then ends."""
Watch = Callable[[str], None]


def nobody(words: str) -> None:
    """Hear nothing of what is going on."""


class Backend(ABC):
    """Where works are carried out; the order of results is that in which they come.

    Attributes:
        side_by_side: how many works are carried out at a time.
    here: whether they see this machine's files.
    """

    side_by_side = 1
    here = True

    @abstractmethod
    def results(self, works: Iterable[Job], watch: Watch = nobody) -> Results:
        """Carry out all works.

        Args:
            watch: hears in a few words what is going on.
        """

    def close(self) -> None:  # noqa: B027  (a place may have nothing to end)
        """End every process that was started, at once."""


class InProcessBackend(Backend):
    """Train one run after another in this process."""

    def results(self, works: Iterable[Job], watch: Watch = nobody) -> Results:
        for work in works:
            watch(work.name)
            try:
                yield Result(work, work.carry_out())
            except Exception as error:  # the caller's to judge
                yield Result(work, error=error)


# --- elsewhere -------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a process elsewhere tells: its value or the exception, and the warnings on the way."""

    value: Any
    error: Exception | None
    said: list[str]


def answered(work: Job) -> Answer:
    """Carry out a work for another process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            value, error = work.carry_out(), None
        except Exception as failure:  # carried to where the work came from
            value, error = None, portable(failure)
    said = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    return Answer(value, error, list(dict.fromkeys(said)))


def portable(error: Exception) -> Exception:
    """An exception as it crosses between processes: the foreseen ones as they are, others told in words."""
    if isinstance(error, (UsageError, RunError, OSError)):
        return error
    told = RunError(f"{type(error).__name__}: {error} (--debug shows where)")
    told.add_note("".join(traceback.format_exception(error)))
    return told


class Event(NamedTuple):
    """What came from a process or node: an answer, files, or (neither) that it is lost.

    Attributes:
        handle: what :meth:`Pool.begin` gave for the work.
        lost: what is lost, in words.
    """

    handle: Any
    answer: Answer | None = None
    parcel: FileBatch | None = None
    lost: str = ""


H = TypeVar("H")


class WorkerPool(Backend, Generic[H]):
    """Processes or nodes: a free one takes the next work, and the work of a lost one is begun again.

    Raises:
        WorkerError: as a result's error, where a work was lost :data:`TRIES` times.
    """

    def results(self, works: Iterable[Job], watch: Watch = nobody) -> Results:
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
                    except RunError as error:  # such as a run that another process is writing
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
                            warnings.warn(text, stacklevel=2)
                        yield Result(work, event.answer.value, event.answer.error)
                        continue
                    lost[id(work)] += 1
                    if lost[id(work)] == TRIES:
                        often = f"{work.name} was lost {TRIES} times, at last with {event.lost}"
                        yield Result(work, error=WorkerError(f"{often}; if memory ran out, train fewer at a time"))
                        continue
                    warnings.warn(f"{event.lost} is lost: {work.name} goes on elsewhere", stacklevel=2)
                    again.append(work)

    @abstractmethod
    def has_room(self, running: int) -> bool:
        """Whether one more work may be begun beside so many."""

    @abstractmethod
    def begin(self, work: Job) -> H:
        """Have a work carried out.

        Raises:
            RunError: it cannot be begun.
        """

    @abstractmethod
    def events(self, running: dict[H, Job]) -> Sequence[Event]:
        """Wait a little for what comes of the works that are carried out; perhaps nothing has."""

    @abstractmethod
    def words(self, running: dict[H, Job]) -> str:
        """What is going on, in a few words."""

    def end(self, handle: H) -> None:
        """Hear that nothing more comes of a work."""

    def stop(self, running: dict[H, Job]) -> None:
        """End works whose results nobody takes."""


def carry_out(
    works: Iterable[Job],
    place: Backend,
    done: Callable[[Result, int], None],
    *,
    total: int,
    what: str = "runs",
    progress: bool = True,
) -> None:
    """Have all works carried out, with one progress line.

    Args:
        works: are taken one by one, each when there is room for it.
        done: hears each result, and how many there are by then; what it raises ends the others.
        total: how many there are, and ``what`` they are, for the progress line.
    """
    from tqdm.auto import tqdm

    told = [""]

    def watch(words: str) -> None:
        if told[-1] != words:  # a bar that is no terminal's has a line for each
            told[:] = [words]
            bar.set_postfix_str(words)

    with (
        tqdm(total=total, desc=what, unit="run", disable=not progress) as bar,
        closing(place.results(works, watch)) as results,
    ):
        for count, result in enumerate(results, 1):
            bar.update()
            done(result, count)
