"""The progress of long work: a bar on a terminal or in a notebook's cell, elsewhere a line after each tenth."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

from fl_core.errors import plural

TENTHS = 10
"""Lines about the progress of one piece of work at most."""
SECONDS = 1.0
"""Least time between two lines, so that short work writes few."""
T = TypeVar("T")


class Lines:
    """A line on standard error when another tenth of the steps is done, at most one a second, and one at the end.

    >>> import contextlib
    >>> with contextlib.redirect_stderr(sys.stdout), Lines(20, "runs", "run") as lines:
    ...     for _ in range(20):
    ...         lines.update()
    runs: 100 % (20 of 20 runs, 00:00)

    Args:
        leave: write the line at the end even if the work was short.
    """

    def __init__(
        self, total: int, what: str, unit: str, initial: int = 0, leave: bool = True
    ) -> None:
        self.total, self.what, self.unit, self.leave = total, what, unit, leave
        self.done, self.began = float(initial), time.monotonic()
        self.last = self.began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        """Add steps that are done, and write a line if they complete another tenth."""
        before, self.done, now = self.done, self.done + n, time.monotonic()
        due = now - self.last >= SECONDS or (self.leave and self.done == self.total)
        if (
            due
            and self.total
            and self.done * TENTHS // self.total > before * TENTHS // self.total
        ):
            from tqdm import tqdm

            self.last, seconds = now, tqdm.format_interval(now - self.began)
            steps = f"{self.done:g} of {plural(self.total, self.unit)}"
            line = f"{self.what}: {100 * self.done / self.total:.0f} % ({steps}, {seconds})"
            print(line, file=sys.stderr, flush=True)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Ignore the words after a bar."""


class InCell(Lines):
    """A bar in a notebook's cell, drawn again at most once a second."""

    def __enter__(self) -> Self:
        self.words, self.place = "", Cell()
        self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self._draw(last=True)

    def update(self, n: float = 1) -> None:
        """Add steps that are done."""
        self.done += n
        self._draw()

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Set the words behind the bar."""
        self.words = s

    def _draw(self, last: bool = False) -> None:
        if not (last or self.place.due):
            return
        from html import escape

        from tqdm import tqdm

        seconds = tqdm.format_interval(time.monotonic() - self.began)
        steps = f"{self.done:g} of {plural(self.total, self.unit)}, {seconds}"
        words = escape(f"{self.what}: {steps} {self.words}".strip())
        bar = f'<progress value="{self.done:g}" max="{self.total}"></progress>'
        self.place.show({"text/html": f"{bar} {words}", "text/plain": words})


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
        """Show contents by their type."""
        from IPython.display import DisplayHandle

        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(contents, raw=True, **how)
        else:
            self._handle.update(contents, raw=True, **how)
        self._last = time.monotonic()

    def show_figure(self, axes: Any) -> None:
        """Show the figure of some axes with two dots a pixel, and close it."""
        import io

        import matplotlib.pyplot as plt
        from IPython.display import Image

        figure = axes.get_figure(root=True)
        png, dpi = io.BytesIO(), 2 * figure.dpi
        figure.savefig(png, dpi=dpi, bbox_inches="tight", facecolor="white")
        plt.close(figure)
        picture = Image(png.getvalue(), retina=True)
        size = {"width": picture.width, "height": picture.height}
        contents = {"image/png": picture.data, "text/plain": "a picture"}
        self.show(contents, metadata={"image/png": size})


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this code."""
    made = sys.modules.get("IPython")
    shell = None if made is None else made.get_ipython()
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

    Args:
        total: the number of steps. ``initial`` of them are done already.
        what: the name of the work. ``unit`` is that of one step.
        shown: write anything at all.
        leave: leave the bar on the terminal at the end, or the last line of short work.
    """
    if shown and in_notebook():
        return InCell(total, what, unit, initial, leave)
    if shown and not sys.stderr.isatty():
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
        smoothing=0.0,
    )


def say(line: str) -> None:
    """Print a line above the progress bar, if there is one."""
    bars = sys.modules.get("tqdm")
    (print if bars is None else bars.tqdm.write)(line)
    sys.stdout.flush()


def with_progress(
    items: Sequence[T], what: str, unit: str, *, shown: bool = True
) -> Iterator[T]:
    """Give items one by one, and show how many are done."""
    with progress_bar(len(items), what, unit, shown=shown) as bar:
        for item in items:
            yield item
            bar.update()
