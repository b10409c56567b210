"""Faults in data: what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fl_core.errors import UsageError, spelled

Place = Callable[[int], str]
"""A function that returns the name of a row in messages, given its number from 0."""
Way = tuple[str, dict[str, Any]]
"""What to do about a fault: a sentence, and the settings for it."""


def row_of_array(row: int) -> str:
    """Return the name of an array's row in error messages."""
    return f"row {row} (rows count from 0)"


def place_in(parts: Sequence[tuple[str, int, Place]]) -> Place:
    """Return a function that names a row of joined parts.

    The name has the part and the row within it. A row after the last part gets the name
    from :func:`row_of_array`.

    Args:
        parts: for each part its name, its number of rows, and the function that names
            its rows.
    """

    def place(row: int) -> str:
        for name, size, name_row in parts:
            if row < size:
                inner_name = name_row(row)
                return f"{name}, {inner_name}"
            row -= size
        return row_of_array(row)

    return place


class DataFault(UsageError):
    """An error in data, with ways to repair it.

    >>> print(DataFault("labels must be few; got 40.", ("Predict numbers", {"task": "regression"}), line="x = 1"))
    labels must be few; got 40. Write `x = 1`. Or predict numbers: task='regression'.

    Attributes:
        rule: the rule that the data break, in words.
        line: a line of pandas that repairs the table, or an empty text.
        ways: other repairs, each a sentence with its settings, which may be empty. The
            message proposes the line first, if there is one, and then each way. From
            the second proposal on each one begins with "Or".
        row: the number of the faulty row, from 0, or None.
    """

    def __init__(
        self, rule: str, *ways: str | Way, row: int | None = None, line: str = ""
    ) -> None:
        ways_with_settings = [
            (way, {}) if isinstance(way, str) else way for way in ways
        ]
        sentences = [
            f"{sentence}: {spelled(**keys)}." if keys else sentence
            for sentence, keys in ways_with_settings
        ]
        if line:
            sentences.insert(0, f"Write `{line}`.")
        sentences[1:] = [
            f"Or {sentence[0].lower()}{sentence[1:]}" for sentence in sentences[1:]
        ]
        super().__init__(" ".join(filter(None, [rule, *sentences])))
        self.rule = rule
        self.line = line
        self.ways = ways_with_settings
        self.row = row

    @property
    def repair(self) -> dict[str, Any]:
        """Return the settings of the first of ``ways``.

        They are empty if there is no way, or if the first is a sentence without
        settings.
        """
        if self.ways:
            return self.ways[0][1]
        return {}

    def at(self, where: str, place: Place = row_of_array) -> DataFault:
        """Return a new fault whose message begins with ``where`` and the faulty row.

        The new fault has no ``row``, since its message names it. If no row is known,
        the message begins with ``where`` only.

        Args:
            where: the data's name.
            place: a function that names a row by its number from 0.
        """
        if self.row is not None:
            place_text = place(self.row)
            where = f"{where}, {place_text}"
        return DataFault(f"{where}: {self.rule}", *self.ways, line=self.line)


@contextmanager
def located(where: str, place: Place = row_of_array) -> Iterator[None]:
    """Add the data's name and the row to the message of each fault in the ``with`` block.

    >>> with located("t.csv", lambda row: f"line {row + 2}"):
    ...     raise DataFault("the text must not be empty.", "Fill it.", row=4)
    Traceback (most recent call last):
        ...
    fl_core.data.faults.DataFault: t.csv, line 6: the text must not be empty. Fill it.

    Args:
        where: the data's name.
        place: a function that names a row by its 0-based position.
    """
    try:
        yield
    except DataFault as fault:
        raise fault.at(where, place) from fault
