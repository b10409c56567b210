"""The description of a table's columns: one record for each, as printed and stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fl_core.display import Displayed, Summary, aligned
from fl_core.errors import plural

LONGEST = 40
"""The maximum number of characters of a cell in the printed table, remarks aside."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: the column's name.
        taken_as: number, yes/no, words, left out, refused, or a role: client, group, label, text. The images of a
            folder are ``pixels in 0..1``.
        inputs: how many inputs of the model it makes.
        missing: how many cells have no value. It is 0 for a column that is left out.
        example: the first cell that has a value, or an empty text.
        odd: what is unusual about the column, or an empty text.
    """

    name: str
    taken_as: str
    inputs: int = 0
    missing: int = 0
    example: str = ""
    odd: str = ""


@dataclass(frozen=True, repr=False)
class ColumnTable(Displayed):
    """The columns of a table, in their order. A notebook shows this table as HTML.

    >>> print(ColumnTable((Column("age", "number", 1, 2, "50"), Column("ward", "client"))))
    column  taken as  inputs  missing  example  odd
    age     number    1       2        50
    ward    client    0       0

    In a notebook, and where a run begins, a wide table shows its first lines.

    >>> print(repr(ColumnTable(tuple(Column(f"gene {k}", "number", 1) for k in range(302)))))
    302 columns, 302 inputs
    column    taken as  inputs  missing  example  odd
    gene 0    number    1       0
    ...
    ... 293 more lines

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
        cells = map(dict.values, self.to_json())
        rows = [[*map(_short, cell_values), oddity] for *cell_values, oddity in cells]
        return Summary(
            f"{plural(len(rows), 'column')}, {plural(self.inputs, 'input')}",
            heads,
            rows,
        )

    def __str__(self) -> str:
        summary = self.summary()
        return "\n".join(aligned([summary.columns, *summary.rows]))

    def with_inputs(self, words: Mapping[str, Sequence[str]]) -> ColumnTable:
        """Return a table that counts the inputs of columns of words by known words.

        Such a column makes one input for each known word, and one for all other words.

        Args:
            words: the known words by the column's name. A column without known words
                stays unchanged, and so does one that makes no input.
        """
        columns = []
        for column in self.columns:
            if words.get(column.name) and column.inputs:
                column = replace(column, inputs=len(words[column.name]) + 1)
            columns.append(column)
        return ColumnTable(tuple(columns))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the columns as plain dictionaries."""
        return [asdict(column) for column in self.columns]


def _short(cell: object) -> str:
    text = " ".join(str(cell).split())
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - 1] + "…"
