"""Handling of signals that end a program: one line on how to continue, and an exit code.

Ctrl-C (SIGINT) gives exit code 130 and SIGTERM 143. SIGHUP, from a closed terminal, gives 129.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to all of its processes at once."""


class TerminationSignal(KeyboardInterrupt):
    """A signal that ends the program, raised like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


def quiet_imports(program: str) -> None:
    """Let signals end this process with one line from now on, if it is the start of a program of this name."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    if module == [program] or os.path.basename(sys.argv[0]) == program:
        for number in _heard():
            signal.signal(
                number,
                lambda number, frame: _end_at_once(number, "nothing was written"),
            )


@contextmanager
def end_on_signals(
    goes_on: Callable[[], str] = lambda: "nothing was written",
) -> Iterator[None]:
    """Let signals within the block end this process, with the text of ``goes_on`` as its last line.

    Within an import the process ends at once, since an exception could be swallowed or changed there. Elsewhere
    ``KeyboardInterrupt`` is raised, so that workers end and files are closed. Signals stay as they are if they are
    ignored, as in a shell's background, or belong to another thread.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        if _importing(frame):
            _end_at_once(number, goes_on())
        raise TerminationSignal(number)

    earlier = {number: signal.signal(number, interrupted) for number in _heard()}
    try:
        yield
    except KeyboardInterrupt as error:
        for number in earlier:
            signal.signal(number, signal.SIG_IGN)  # a second signal has no effect
        _say(goes_on())
        sys.exit(
            error.code if isinstance(error, TerminationSignal) else 128 + signal.SIGINT
        )
    finally:
        for number, handler in earlier.items():
            if signal.getsignal(number) is interrupted:
                signal.signal(number, handler)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay signals in this process until the block ends. Processes started inside never get a terminal's signals."""
    came: list[int] = []
    earlier = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in _heard()
    }
    masked = signal.pthread_sigmask(
        signal.SIG_BLOCK, _PASSED_ON
    )  # new processes inherit this
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _heard() -> list[signal.Signals]:
    """Return the signals that this thread may handle and that are not ignored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [
        number
        for number in SIGNALS
        if signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]


def _end_at_once(number: int, goes_on: str) -> NoReturn:
    _say(goes_on)
    os._exit(128 + number)  # a run directory is valid whenever its writer dies


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended."""
    import multiprocessing  # here alone: who starts no processes goes without
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(
            target=lambda: os._exit(bool(wait([sentinel]))), daemon=True
        ).start()


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _say(goes_on: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"fedlayers: interrupted; {goes_on}", file=sys.stderr, flush=True)
