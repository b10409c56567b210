"""The table of a dataset's columns: what each is taken as, its inputs, what is odd, and the guesses from its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.arrays import Integers
from fl_core.data.columns import cell_text, is_missing, nearly_equal
from fl_core.data.preprocessing import Cells, date_text, lacks_value, texts_of
from fl_core.display import Displayed, Summary, aligned
from fl_core.errors import listing, plural

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
    name: str, cells: Cells, taken_as: str, inputs: int = 0, odd: str = ""
) -> Column:
    """Return what the table says of a column.

    Args:
        taken_as: its role, or how its cells are read. Numbers and words of two values become yes/no.
        inputs: how many inputs of the model it makes.
        odd: what is known to be odd. The default is what its values show: one value, spellings of one word, or a
            count of the rows.
    """
    lacking, example, more = lacks_value(cells), "", ""
    if not lacking.all():
        first = cells[int(np.argmin(lacking))]
        example = date_text(first) if taken_as == DATE else cell_text(first).strip()
    if isinstance(cells, np.ndarray):
        known = cells[~lacking]
        single = not len(known) or known.min() == known.max()
        two = bool(((known == 0) | (known == 1)).all())
        if taken_as == NUMBER and len(known) > MANY_ROWS and counts_rows(known):
            more = "like a record number"
        for end in () if single else (known.min(), known.max()):
            if {*cell_text(end)} - {*"-9"}:
                continue
            others = known[known != end]
            if np.abs(others - end).min() > np.ptp(others) > 0:
                count = plural(len(known) - len(others), "cell")
                more = f"{end:g} far from the others in {count}: missing?"
    else:
        words = [word for word in cells.categories if not is_missing(word)]
        values = {word.strip() for word in words}
        if taken_as == WORDS and lacking.any():
            values.add("")  # an empty cell counts as a word
        single, two = len(values) < 2, len(values) == 2
        groups = nearly_equal(words) if taken_as != "text" else []
        alike = [" and ".join(map(repr, sorted(group))) for group in groups]
        if alike:
            more = f"differ by case or blanks: {listing(alike, 3)}"
    if two and taken_as in (NUMBER, WORDS):
        taken_as = YES_NO
    odd = odd or ("one value only" if single else more)
    return Column(name, taken_as, inputs, int(lacking.sum()), example, odd)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


# --- guesses from names and values -----------------------------------------------------------------------------

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_COUNTED = (
    "record|case|fall|patient|pat|subject|subj|person|participant|proband|individual|customer|user|member|animal|"
    "sample|specimen"
)
"""What a table has rows of."""
_NUMBERED = "no|nr|num|number|nummer|index|idx|code|key"
"""Words after these, or alone, that make a column of numbers for rows."""
_IDENTIFIER = re.compile(
    rf"(.*_)?(ids?|oid|identifier|mrn|ssn|barcode|({_COUNTED}|item|stay|visit|encounter|admission|hadm|event)s?id)(_.*)?"
    rf"|({_COUNTED})|(.*_)?({_COUNTED})s?_?({_NUMBERED})"
)
_NUMBER = re.compile(rf"(.*_)?(|#|unnamed|{_NUMBERED}|.*(number|nummer))")


_LIKELY = {
    "label_column": "label lable outcome target class diagnosis died death dead mortality survived event disease "
    "status result response readmitted grade stage num y",
    "client_column": "client hospital site center centre clinic ward institution icu unit practice region country "
    "state city user writer group facility location",
    "time_column": "time duration followup futime tte",
    "event_column": "event died death dead censored",
    "text_column": "text note notes report sentence comment message tweet",
    "group_column": "patient subject person participant family",
}
"""Words in the names of columns that often have a role."""


def likely_columns(role: str, asked: str, header: Sequence[str]) -> list[str]:
    """Return the columns that most likely have a role, the likeliest first.

    >>> likely_columns("label_column", "label", ["age", "died", "hospital"])
    ['died', 'age']

    Args:
        role: of :data:`fl_core.data.columns.ROLES`.
        asked: the name that is not there, which may be misspelt.
    """
    near = difflib.get_close_matches(asked, header, n=1, cutoff=0.7)
    named = by_name(role, header)
    ends = [header[-1], header[0]] if role == "label_column" else []
    ends = [name for name in ends if name not in by_name("client_column", header)]
    return list(dict.fromkeys([*near, *named, *ends]))[:3]


def by_name(role: str, header: Sequence[str]) -> list[str]:
    """Return the columns whose names say a role, in the order of the words that say it."""
    found = {name: _words(name) for name in header}
    words = {
        name: {*own, *(word.removesuffix("s") for word in own)}
        for name, own in found.items()
    }
    return [
        name for word in _LIKELY[role].split() for name in header if word in words[name]
    ]


def survival_columns(header: Sequence[str]) -> tuple[str, str]:
    """Return the columns of a time and of the event at its end, by their names. An empty text means none."""
    time, event = (
        [*by_name(role, header), ""] for role in ("time_column", "event_column")
    )
    return time[0], event[0]


ROWS = 20
"""Rows for each value, at most, of a column that numbers what they belong to."""
FEW = 10
"""Different values up to which a column may be a feature, such as a visit's number."""
LEAST = 20
"""Rows from which a column may be recognised as a count of the rows."""
MANY_ROWS = 100
"""Rows from which a column of any name may be recognised so."""
DISTINCT = 0.95
"""Share of distinct values from which a column counts as one without repeats."""


def is_identifier(name: str, cells: Cells, owner: Integers | None = None) -> bool:
    """Return whether a column numbers the records or what they belong to: it is named so, and has many values.

    Values are whole numbers or words. No value is there twice, or there are at least :data:`FEW` and, counted at each
    client, one for each :data:`ROWS` rows. Hospitals number their records each for itself, so a value may be at two
    clients. A column that is named as any number, such as ``Nr``, must also count the rows.

    >>> is_identifier("record_id", np.arange(3.0)), is_identifier("record_id", np.ones(2))
    (True, False)
    >>> is_identifier("lab_nr", np.arange(30.0)), is_identifier("lab_nr", np.arange(30.0) ** 2 % 89)
    (True, False)

    Args:
        owner: the client of each sample, if there are natural ones.
    """
    if not names_rows(name):
        return False
    if not isinstance(cells, np.ndarray):
        cells = texts_of(cells)
    known = ~lacks_value(cells)
    cells = cells[known]
    numeric = isinstance(cells, np.ndarray)
    if numeric and not (np.isfinite(cells) & (cells == np.round(cells))).all():
        return False
    if not is_named_as_identifier(name):
        return numeric and counts_rows(cells, sorts=False)
    code, values = pd.factorize(cells)
    if len(values) == len(cells):
        return len(cells) > 1
    clients = 0 if owner is None else owner[known]
    pairs = len(np.unique(clients * len(values) + code))
    return len(values) >= FEW and pairs >= len(cells) / ROWS


def names_rows(name: str) -> bool:
    """Return whether a column may number rows: by its name, or by that of any number, as ``Nr``, or of an index."""
    words = "_".join(_words(name)) or name.strip()
    return is_named_as_identifier(name) or _NUMBER.fullmatch(words) is not None


def is_named_as_identifier(name: str) -> bool:
    """Return whether a name says that a column identifies rows, or what several rows belong to.

    >>> [is_named_as_identifier(each) for each in ("patientid", "Fall-Nr", "subject", "number_of_visits", "acid")]
    [True, True, True, False, False]
    """
    return _IDENTIFIER.fullmatch("_".join(_words(name))) is not None


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name) if not word.isdigit()]


def counts_rows(values: NDArray[np.float64], sorts: bool = True) -> bool:
    """Return whether numbers [n] count the rows: hardly repeated, and whole without large gaps, or sorted.

    Args:
        sorts: whether it is enough that they are sorted. A table may also be sorted by a feature, such as a zip code.
    """
    if len(values) < LEAST or not np.isfinite(values).all():
        return False
    for part in (values[: 10 * LEAST], values):  # most columns end at the first rows
        steps = np.diff(part)
        ordered = sorts and ((steps >= 0).all() or (steps <= 0).all())
        counts = (part % 1 == 0).all() and np.ptp(part) < 1.5 * len(values)
        if not (ordered or counts) or len(np.unique(part)) < DISTINCT * len(part):
            return False
    return True
