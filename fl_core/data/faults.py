"""Errors in data that other settings may repair, with the place of the first bad row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fl_core.errors import UsageError, spelled

Place = Callable[[int], str]
"""The name of a row in messages."""


def row_of_array(row: int) -> str:
    """Return the name of an array's row in error messages."""
    return f"row {row} (rows count from 0)"


class DataFault(UsageError):
    """An error in data that other settings may repair.

    Attributes:
        what: what is wrong. The message adds what to do.
        way: what to do. After a colon at its end the repair is added.
        row: where, or None.
        repair: the settings, by key of :class:`fl_core.data.columns.Reading`. Empty means that no setting is certain
            to help.
    """

    def __init__(
        self, what: str, way: str = "", row: int | None = None, **repair: Any
    ) -> None:
        if way.endswith(":"):
            way += f" {spelled(**repair)}."
        super().__init__(f"{what} {way}".strip())
        self.what, self.way, self.row, self.repair = what, way, row, repair


@contextmanager
def located(where: str, place: Place = row_of_array) -> Iterator[None]:
    """Begin the message of a fault with its data, and with its row.

    >>> with located("t.csv", lambda row: f"line {row + 2}"):
    ...     raise DataFault("the text must not be empty.", "Fill it.", row=4)
    Traceback (most recent call last):
        ...
    fl_core.data.faults.DataFault: t.csv, line 6: the text must not be empty. Fill it.

    Args:
        where: the data. place: the name of a row.
    """
    try:
        yield
    except DataFault as fault:
        at = where if fault.row is None else f"{where}, {place(fault.row)}"
        what = f"{at}: {fault.what}"
        raise DataFault(what, fault.way, **fault.repair) from fault
