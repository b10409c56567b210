"""The progress of long work, and signals that end it.

Progress is a bar on a terminal or in a notebook's cell, elsewhere a line after each tenth. A signal gives one line on
how to continue. Ctrl-C (SIGINT) gives exit code 130 and SIGTERM 143. SIGHUP, from a closed terminal, gives 129.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO

from fl_core.errors import plural, warn

if TYPE_CHECKING:
    from tqdm import tqdm

TENTHS = 10
"""Lines about the progress of one piece of work at most."""
SECONDS = 1.0
"""Least time between two lines, so that short work writes few."""


class Lines:
    """Progress as lines on standard error: one for each tenth of the steps, at most one a second, and one at the end.

    >>> import contextlib
    >>> with contextlib.redirect_stderr(sys.stdout), Lines(20, "runs", "run") as lines:
    ...     for _ in range(20):
    ...         lines.update()
    runs: 100 % (20 of 20 runs, 00:00)

    Args:
        total: number of steps.
        what: name of the work.
        unit: name of one step, in the singular.
        initial: number of steps that are done already.
        leave: whether the last line is written even if the work was short.
    """

    def __init__(
        self, total: int, what: str, unit: str, initial: int = 0, leave: bool = True
    ) -> None:
        self.total = total
        self.what = what
        self.unit = unit
        self.leave = leave
        self.done = float(initial)
        self.began = self.last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        """Add ``n`` steps that are done, and write a line if they complete another tenth.

        There is no line if the last one is less than a second old, except at the end
        with ``leave``.
        """
        done_before = self.done
        self.done = self.done + n
        time_now = time.monotonic()
        is_due = time_now - self.last >= SECONDS or (
            self.leave and self.done == self.total
        )
        if (
            is_due
            and self.total
            and self.done * TENTHS // self.total > done_before * TENTHS // self.total
        ):
            from tqdm import tqdm

            self.last = time_now
            seconds = tqdm.format_interval(time_now - self.began)
            steps = f"{self.done:,.9g} of {plural(self.total, self.unit)}"
            line = f"{self.what}: {100 * self.done / self.total:.0f} % ({steps}, {seconds})"
            print(line, file=sys.stderr, flush=True)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Ignore the text that a bar would show at its end."""


class Cell:
    """A place in a notebook's cell whose contents are replaced.

    Attributes:
        due: whether the last contents are a second old, or there are none.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = -SECONDS

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last >= SECONDS

    def show(self, contents: dict[str, Any], **how: Any) -> None:
        """Show contents, {MIME type: content}, in the cell, in place of what it showed before.

        Args:
            how: options of IPython's ``DisplayHandle.display``, such as ``metadata``.
        """
        from IPython.display import DisplayHandle

        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(contents, raw=True, **how)
        else:
            self._handle.update(contents, raw=True, **how)
        self._last = time.monotonic()

    def show_figure(self, axes: Any) -> None:
        """Show the figure of some axes at twice its resolution, and close it.

        Outside of a notebook it is only closed. The first time a warning says so.
        """
        import io

        import matplotlib.pyplot as plt

        figure = axes.get_figure(root=True)
        if not in_notebook():
            plt.close(figure)
            if self.due:
                warn("a live picture is drawn in a notebook's cell only; not here")
            self._last = math.inf
            return
        from IPython.display import Image

        png, dpi = io.BytesIO(), 2 * figure.dpi
        figure.savefig(png, dpi=dpi, bbox_inches="tight", facecolor="white")
        plt.close(figure)
        picture = Image(png.getvalue(), retina=True)
        size = {"width": picture.width, "height": picture.height}
        contents = {"image/png": picture.data, "text/plain": "a picture"}
        self.show(contents, metadata={"image/png": size})


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this code."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def progress_bar(
    total: int,
    what: str,
    unit: str,
    *,
    shown: bool = True,
    initial: int = 0,
    leave: bool = True,
) -> Lines | tqdm[NoReturn]:
    """Return the progress of some work, to be used in a ``with`` statement.

    It is a bar on a terminal or in a notebook, and :class:`Lines` elsewhere.

    Args:
        total: the number of steps.
        what: the name of the work.
        unit: the name of one step, in the singular.
        shown: whether anything is written.
        initial: the number of steps that are done already.
        leave: whether the bar stays on the terminal at the end, or the last line of short work is written.
    """
    if shown and not (sys.stderr.isatty() or in_notebook()):
        return Lines(total, what, unit, initial, leave)
    from tqdm import tqdm

    # the estimate to the end is from all steps, the slow ones too
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        disable=not shown,
        initial=initial,
        leave=leave,
        mininterval=SECONDS if in_notebook() else 0.1,
        smoothing=0.0,
    )


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line above the progress bar, if there is one, to ``file`` or by default to standard output."""
    tqdm_module = sys.modules.get("tqdm")
    file = file or sys.stdout
    (print if tqdm_module is None else tqdm_module.tqdm.write)(line, file=file)
    file.flush()


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGINT, signal.SIGHUP)
"""Signals that a terminal sends to all of its processes at once."""


class TerminationSignal(KeyboardInterrupt):
    """A signal that ends the program, raised like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


def quiet_imports(program: str) -> None:
    """End the process with one line on Ctrl-C, SIGTERM or SIGHUP while a command imports its libraries.

    This has no effect unless the process was started as ``program`` or ``python -m program``.
    """
    arguments = sys.orig_argv
    module_words = (
        arguments[arguments.index("-m") + 1 :][:1] if "-m" in arguments else []
    )
    if module_words == [program] or os.path.basename(sys.argv[0]) == program:
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

    Within an import, or where a class names its fields, the process ends at once, since
    an exception could be swallowed or changed there. Elsewhere ``KeyboardInterrupt`` is raised, so that workers end and
    files are closed. Signals stay as they are if they are ignored, as in a shell's
    background, or if another thread than the main one runs the block.

    Args:
        goes_on: a function that returns how to continue, such as a command.

    Raises:
        SystemExit: a signal came. The exit code is 128 plus its number.
    """

    def interrupted(number: int, frame: FrameType | None) -> None:
        codes = [caller.f_code for caller, _ in walk_stack(frame)]
        is_import = any(c.co_filename.startswith("<frozen importlib") for c in codes)
        if is_import or any(code.co_name == "__set_name__" for code in codes):
            _end_at_once(number, goes_on())
        raise TerminationSignal(number)

    earlier_handlers = {
        number: signal.signal(number, interrupted) for number in _heard()
    }
    try:
        yield
    except KeyboardInterrupt as error:
        for number in earlier_handlers:
            signal.signal(number, signal.SIG_IGN)  # a second signal has no effect
        _say(goes_on())
        sys.exit(
            error.code if isinstance(error, TerminationSignal) else 128 + signal.SIGINT
        )
    finally:
        for number, handler in earlier_handlers.items():
            if signal.getsignal(number) is interrupted:
                signal.signal(number, handler)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay signals in this process until the block ends. Processes started inside never get a terminal's signals.

    The first of the delayed signals is then raised, also if an error ends the block.
    """
    signals: list[int] = []
    earlier_handlers = {
        number: signal.signal(number, lambda number, frame: signals.append(number))
        for number in _heard()
    }
    # new processes inherit this
    earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
        if signals:
            signal.raise_signal(signals[0])


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
    _say(goes_on, sys.__stderr__)  # a parser may catch the texts of sys.stderr
    os._exit(128 + number)  # a run directory is valid whenever its writer dies


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended.

    It has no effect in a process that multiprocessing did not start.
    """
    import multiprocessing  # here alone: who starts no processes goes without
    from multiprocessing.connection import wait

    parent_process = multiprocessing.parent_process()
    if parent_process is not None:
        sentinel = parent_process.sentinel
        threading.Thread(
            target=lambda: os._exit(bool(wait([sentinel]))), daemon=True
        ).start()


def _say(goes_on: str, file: TextIO | None = None) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"fedlayers: interrupted; {goes_on}", file=file or sys.stderr, flush=True)
