"""The exceptions, which separate invalid requests from failed runs, and warnings."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = ("fl_core", "diagnostics", "fedlayers")
ON_COMMAND_LINE = ContextVar("ON_COMMAND_LINE", default=False)
"""Whether the program runs, so that messages name its options and not the keywords of Python."""


class UsageError(ValueError):
    """An invalid request: an unknown name, a missing file, data that do not fit. Exit code 2."""


class RunError(RuntimeError):
    """A failure while running a valid request. Exit code 1."""


class DivergedError(RunError):
    """Divergence of training: a loss far above the initial one. The message names the place."""


class NonFiniteError(DivergedError):
    """NaN or infinity in training or aggregation. The message names the place."""


class WorkerError(RunError):
    """The end of a worker process before its work was done."""


class CorruptError(RunError):
    """Stored bytes that differ from their recorded digest."""


class BusyError(RunError):
    """A run directory to which another process is writing."""


def warn(text: str) -> None:
    """Warn at the line that called this project, not at a line within it.

    From Python 3.12 on, the argument ``skip_file_prefixes`` of :func:`warnings.warn` would do.
    """
    frame: FrameType | None = sys._getframe()
    level = outside = 1
    while frame is not None:
        level += 1
        if str(frame.f_globals.get("__name__")).partition(".")[0] in PACKAGES:
            outside = level
        frame = frame.f_back
    warnings.warn(text, stacklevel=outside)


def listing(names: Iterable[str], most: int = 12) -> str:
    """Join names with commas, at most ``most`` of them, followed by the number of the others."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "round"), plural(3, "round")
    ('1 round', '3 rounds')
    """
    return f"{count} {noun}{'s' * (count != 1)}"


def spelled(**settings: Any) -> str:
    """Return settings as the caller types them: keywords in Python, options on the command line.

    >>> spelled(label_column="died at", exclude_columns=["id"], keep_ids=True)
    "label_column='died at', exclude_columns=['id'], keep_ids=True"
    """
    if not ON_COMMAND_LINE.get():
        return ", ".join(f"{key}={value!r}" for key, value in settings.items())
    words = []
    for key, value in settings.items():
        words.append(f"--{key.replace('_', '-')}")
        for text in map(str, () if value is True else as_list(key, value)):
            named = any(map(str.isalnum, text))  # a sign alone is quoted
            words.append(shlex.quote(text) if named else repr(text))
    return " ".join(words)


def needs_package(package: str, purpose: str, extra: str) -> UsageError:
    """Return the error for a missing optional package, with the command that installs it."""
    return UsageError(
        f"{package} must be installed to {purpose}. Run pip install 'fedlayers[{extra}]'."
    )


def check_known(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``known``.

    Raises:
        UsageError: it is unknown. The message names the kind, the nearest valid name, and the known ones.
    """
    known = list(known)
    if name in known:
        return name
    import difflib  # for a mistake only

    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown {kind} {name!r}: {hint}known: {listing(known, 40)}")


def as_list(
    name: str, given: Any, *, empty: bool = False, distinct: bool = False
) -> tuple[Any, ...]:
    """Return the values of an argument that takes a list. One text, number or other object is a list of one.

    None is an empty list. An array gives Python's numbers.

    >>> as_list("metrics", "cka"), as_list("rounds", 1), as_list("rounds", range(2))
    (('cka',), (1,), (0, 1))

    Args:
        name: of the argument, for the message.
        empty, distinct: whether it may have no value, and whether no value may be there twice.

    Raises:
        UsageError: there is no value, or one is there twice.
    """
    given = given.tolist() if hasattr(given, "tolist") else given  # an array
    given = () if given is None else given
    alone = isinstance(given, str) or not isinstance(given, Iterable)
    values = (given,) if alone else tuple(given)
    if not values and not empty:
        raise UsageError(f"{name} must have at least one value; got none. Name one.")
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice and distinct:
        raise UsageError(
            f"{name} must be distinct; got {twice[0]} twice. Leave one out."
        )
    return values


@contextmanager
def about(what: str, kind: type[Exception] = UsageError) -> Iterator[None]:
    """Begin the message of an error with what it is about.

    >>> with about("heart.csv"):
    ...     raise UsageError("a row is missing")
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: heart.csv: a row is missing
    """
    try:
        yield
    except kind as error:
        raise kind(f"{what}: {error}") from error


@contextmanager
def damaged(path: Path | str, *kinds: type[Exception]) -> Iterator[None]:
    """Report an error as damage of a stored file.

    Args:
        kinds: of errors; by default ValueError, which says that a value makes no sense.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, kinds or ValueError):
            raise CorruptError(f"{path} is damaged: {error}") from error
        raise


def check_options(what: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Check that a function or class takes all given options.

    Args:
        what: has the options, as in messages: ``model 'mlp'``.

    Raises:
        UsageError: an option is unknown. The message names it, the nearest known one, and all known ones.
    """
    known = sorted(known)
    for option in options:
        if not known:
            raise UsageError(
                f"{what} must have no options; got {option!r}. Leave it out."
            )
        check_known(f"option of {what}", option, known)
