"""The table of a dataset's columns: what each is taken as, how many inputs it makes, and what is odd about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fl_core.data import spelling
from fl_core.data.arrays import Cells, lacks_value
from fl_core.data.roles import MANY_ROWS, counts_rows
from fl_core.display import Displayed, Summary, aligned
from fl_core.errors import listing

MOST = 20
"""The maximum number of columns that a command prints."""
LONGEST = 40
"""The maximum number of characters of a cell in the printed table."""
NUMBER, YES_NO, WORDS, DATE, LEFT_OUT = "number", "yes/no", "words", "date", "left out"


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: of the column.
        taken_as: number, yes/no, words, date, left out, or a role: client, group, label, text.
        inputs: how many inputs of the model it makes.
        missing: how many cells have no value.
        example: the first cell that has a value.
        odd: what is unusual about it, or an empty text.
    """

    name: str
    taken_as: str
    inputs: int = 0
    missing: int = 0
    example: str = ""
    odd: str = ""


@dataclass(frozen=True, repr=False)
class ColumnTable(Displayed):
    """The columns of a table, in their order. It shows itself as HTML in a notebook.

    >>> print(ColumnTable((Column("age", "number", 1, 2, "50"), Column("ward", "client"))))
    column  taken as  inputs  missing  example  odd
    age     number    1       2        50
    ward    client    0       0

    Attributes:
        columns: the columns.
    """

    columns: tuple[Column, ...] = ()

    @property
    def inputs(self) -> int:
        """Return the number of the model's inputs that all columns make."""
        return sum(column.inputs for column in self.columns)

    def summary(self) -> Summary:
        heads = ["column", "taken as", "inputs", "missing", "example", "odd"]
        rows = [list(asdict(column).values()) for column in self.columns]
        return Summary(f"{len(rows)} columns, {self.inputs} inputs", heads, rows)

    def __str__(self) -> str:
        shown = self.summary()
        rows = [
            [*(_short(str(cell)) for cell in cells), odd]
            for *cells, odd in shown.rows[:MOST]
        ]
        lines = aligned([shown.columns, *rows])
        more = len(shown.rows) - MOST
        if more > 0:
            lines.append(f"and {more:,} more columns")
        return "\n".join(lines)

    def with_inputs(
        self, words: Mapping[str, Sequence[str]], standardised: bool
    ) -> ColumnTable:
        """Return the table with the inputs of columns of words: one for each word, and one for all others.

        Args:
            standardised: whether the labels are targets that are standardised for the model.
        """
        columns = []
        for column in self.columns:
            if words.get(column.name) and column.inputs:
                column = replace(column, inputs=len(words[column.name]) + 1)
            elif column.taken_as == "label" and standardised:
                column = replace(column, odd="standardised inside")
            columns.append(column)
        return ColumnTable(tuple(columns))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the columns as plain dictionaries."""
        return [asdict(column) for column in self.columns]


def describe(
    header: Sequence[str],
    cells: Mapping[str, Cells],
    roles: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    dates: Sequence[str],
    notes: Mapping[str, str],
) -> ColumnTable:
    """Return the table of all columns of a header.

    Args:
        cells: the columns that are read. Others are left out.
        roles: the role of each column that has one.
        words: the words of each column of words.
        dates: the columns of dates.
        notes: what is odd about columns.
    """
    found = []
    for name in header:
        if name not in cells:
            found.append(Column(name, LEFT_OUT, odd=notes.get(name, "")))
            continue
        column = cells[name]
        lacking = lacks_value(column)
        known = column[~lacking]
        example = spelling.cell_text(known[0]).strip() if len(known) else ""
        if isinstance(known, np.ndarray):
            single = not len(known) or known.min() == known.max()
            two = bool(((known == 0) | (known == 1)).all())
        else:
            values = {
                word.strip() for word in known.remove_unused_categories().categories
            }
            if name in words and lacking.any():
                values.add("")  # an empty cell counts as a word
            single, two = len(values) < 2, len(values) == 2
        taken_as = YES_NO if two else WORDS if name in words else NUMBER
        if name in roles:
            taken_as = roles[name]
        elif name in dates:
            taken_as = DATE
        odd = notes.get(name, "")
        if not odd:
            odd = _odd(column, single, roles.get(name))
        inputs = 0 if name in roles else len(words.get(name, ())) + 1
        found.append(Column(name, taken_as, inputs, int(lacking.sum()), example, odd))
    return ColumnTable(tuple(found))


def _odd(column: Cells, single: bool, role: str | None) -> str:
    """Return what is odd about the values of a column: one, spellings of one word, or a count of the rows."""
    if single:
        return "one value only"
    if isinstance(column, np.ndarray):
        counts = role is None and len(column) > MANY_ROWS and counts_rows(column)
        return "like a record number" if counts else ""
    groups = spelling.alike(column.categories) if role != "text" else []
    alike = [" and ".join(map(repr, sorted(group))) for group in groups]
    return f"differ by case or blanks: {listing(alike, 3)}" if alike else ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
