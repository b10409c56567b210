"""What can go wrong, by whose hand: a request that cannot be met, or a run that failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class UsageError(ValueError):
    """The request itself is at fault: an unknown name, a missing file, data that do not fit. Exit code 2."""


class RunError(RuntimeError):
    """The request was sound and its execution failed. Exit code 1."""


class NonFiniteError(RunError):
    """Training or aggregation met NaN or infinity; the message names where."""


class CorruptError(RunError):
    """Stored bytes differ from the digest that was recorded for them."""


class BusyError(RunError):
    """Another process is writing to the run directory."""


def listing(names: Iterable[str], most: int = 12) -> str:
    """Comma-separated names, at most ``most`` of them, with the count of those left out."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def check_known(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``known``.

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
    """Refuse a list that is empty, or that holds something twice.

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
