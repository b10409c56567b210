"""How Ctrl-C ends a program: one line on how to continue, and exit code 130, from the first import to the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

CODE = 130


@contextmanager
def ending(goes_on: Callable[[], str] = lambda: "nothing was written") -> Iterator[None]:
    """Let Ctrl-C within the block end this process, with the text of ``goes_on`` as its last line.

    Within an import it ends at once, for an exception there could be swallowed, turned into another or end in a
    traceback; elsewhere ``KeyboardInterrupt`` is raised, so that workers are ended and files closed on the way. Where
    interrupts are ignored, as in a shell's background, or belong to another thread, they stay as they are.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        if _importing(frame):
            _say(goes_on())
            os._exit(CODE)  # a run directory is sound whenever its writer dies
        raise KeyboardInterrupt

    heard = _main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    earlier = signal.signal(signal.SIGINT, interrupted) if heard else None
    try:
        yield
    except KeyboardInterrupt:
        if heard:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one has nothing left to end
        _say(goes_on())
        sys.exit(CODE)
    finally:
        if heard and signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, earlier)


@contextmanager
def held_back() -> Iterator[None]:
    """Delay Ctrl-C in this process until the block ends; processes started inside never receive it."""
    came: list[int] = []
    heard = _main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    earlier = signal.signal(signal.SIGINT, lambda number, frame: came.append(number)) if heard else None
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what a new process inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if heard:
            signal.signal(signal.SIGINT, earlier)
    if came:
        signal.raise_signal(signal.SIGINT)


def _main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _say(goes_on: str) -> None:
    print(f"fedlayers: interrupted; {goes_on}", file=sys.stderr, flush=True)
