"""Redraws everything that has stored rows: items and views, the gallery and the benchmarks' picture."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt

from figures import gallery, items
from fl_core.errors import RunError, UsageError, listing


def jobs(out: Path | None) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that can be drawn: names, each with a function that draws."""
    for name, item in sorted(items.REGISTRY.items()):
        if item.draw is not None and item.state != "no rows":
            yield name, partial(items.redraw, item, item.path(), out or items.PICTURES)
    yield gallery.NAME, partial(gallery.redraw, gallery.STUDY.path(), out)
    if (
        importlib.util.find_spec("benchmarks") is not None
    ):  # a checkout has it, an installed package has not
        from benchmarks import picture

        yield (
            "benchmarks",
            partial(picture.draw, *([out / "benchmarks.png"] if out else [])),
        )


def redraw(out: Path | None = None) -> int:
    """Draw everything that has rows, into ``out`` or where the project keeps it; returns how much was drawn.

    A failure is reported on the error stream and stops nothing else.

    Raises:
        RunError: something failed; names it.
    """
    drawn, failed = 0, []
    for name, job in jobs(out):
        try:
            job()
        except Exception as error:
            plt.close("all")
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            if not isinstance(error, (UsageError, RunError)):
                traceback.print_exc()
        else:
            drawn += 1
            print(name)
    if failed:
        raise RunError(
            f"{len(failed)} of {drawn + len(failed)} could not be drawn: {listing(failed)}"
        )
    return drawn
