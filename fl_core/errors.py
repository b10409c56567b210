"""The exceptions: a request that cannot be met is told apart from a run that failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class UsageError(ValueError):
    """The request is at fault: an unknown name, a missing file, data that do not fit. Exit code 2."""


class PrivateError(UsageError):
    """A server's hook asked for what only the client has."""


class RunError(RuntimeError):
    """The request was valid but running it failed. Exit code 1."""


class DivergedError(RunError):
    """Training came to a loss far above where it began; the message names where."""


class NonFiniteError(DivergedError):
    """Training or aggregation met NaN or infinity; the message names where."""


class WorkerError(RunError):
    """A worker process ended before its work was done."""


class CorruptError(RunError):
    """Stored bytes differ from the digest that was recorded for them."""


class ForeignError(CorruptError):
    """Stored bytes are intact, but belong to another run."""


class BusyError(RunError):
    """Another process is writing to the run directory."""


def listing(names: Iterable[str], most: int = 12) -> str:
    """Names separated by commas, at most ``most`` of them, followed by how many were left out."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def check_known(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``known``, else refuse it and name the nearest.

    Raises:
        UsageError: names the kind, the unknown name, the nearest valid one, and what is known.
    """
    known = list(known)
    if name in known:
        return name
    import difflib  # for a mistake only

    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown {kind} {name!r}: {hint}known: {listing(known, 40)}")


def check_distinct(asks: str, what: str, values: Sequence[object]) -> None:
    """Refuse an empty list, or one with duplicates.

    Args:
        asks: who needs it, as the message says it; ``what``: what each value is.

    Raises:
        UsageError: says which.
    """
    if not values:
        raise UsageError(f"{asks} needs at least one {what}")
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        raise UsageError(f"the {what} {twice[0]} is named twice")
