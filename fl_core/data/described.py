"""One record for each column of a table: how its cells are read, what is odd, and what to decide, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.cells import (
    Cells,
    cell_text,
    date_text,
    dates,
    lacks_value,
    numbers,
    refuse_where,
    texts_of,
)
from fl_core.data.columns import Reading
from fl_core.data.faults import DataFault
from fl_core.data.opened import Opened, Part, joined
from fl_core.data.spelling import (
    LEFT_OUT as LEAVE_OUT,
    PLAIN_NUMBERS,
    SIGNED,
    WORDS_KEPT,
    NumberFormat,
    Ways,
    format_of,
    is_number,
    nearly_equal,
    other_reading,
    suspicion,
)
from fl_core.display import Displayed, Summary, aligned
from fl_core.errors import listing, plural

MOST_COLUMNS = 20
"""The maximum number of columns that a command prints."""
LONGEST = 40
"""The maximum number of characters of a cell in the printed table."""
NUMBER, YES_NO, WORDS, DATE, LEFT_OUT = "number", "yes/no", "words", "date", "left out"
MOST_WORDS = 100
"""The maximum number of different words in a column."""
FEW_WORDS = 10
"""The number of different words that any column may have, even a short one."""
DECIDED = 0.95
"""Share of numbers, or of words, from which the others are stray cells."""
STRAY = 5
"""Different stray words up to which they may be marks of missing cells."""


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

    def text(self, most: int) -> str:
        """Return the table with at most so many columns."""
        shown = self.summary()
        rows = [
            [*(_short(str(cell)) for cell in cells), odd]
            for *cells, odd in shown.rows[:most]
        ]
        lines = aligned([shown.columns, *rows])
        more = len(shown.rows) - most
        if more > 0:
            lines.append(f"and {more:,} more columns")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text(MOST_COLUMNS)

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


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


# --- features --------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """What must be decided about a column: why, the ways, and the first row that shows it."""

    column: str
    rule: str
    ways: Ways
    row: int | None = None


class Feature(NamedTuple):
    """How a column of features is read.

    Attributes:
        kind: number, words or date, as the first way reads it; left out if none does.
        cells: float64 with days for dates, or text.
        odd: what is unusual about it.
        question: why other settings are needed, or None.
    """

    kind: str
    cells: Cells
    odd: str = ""
    question: Question | None = None


CORRECT = ("Correct it, or leave the column out", "exclude_columns")
FILL = ("Fill empty cells, such as", {"impute": "median"})


def feature(opened: Opened, name: str, how: Reading) -> Feature:
    """Return how a column is read. Each file may have its own signs in numbers and its own form of dates."""
    dated = name in (how.date_columns or ())
    try:
        parts = opened.parts_of(name, how, dated)
        if dated:
            return _dated(parts)
        if name in (how.word_columns or ()):
            return _worded(name, texts_of(joined(parts)))
        own = [part.signs for part in opened.parts]
        forms = [NumberFormat(**signs) if signs else how.numbers for signs in own]
        if not all(_is_numeric(*each) for each in zip(parts, forms, strict=True)):
            return _mixed(name, parts, how)
        cells = joined([numbers(*each) for each in zip(parts, forms, strict=True)])
        shown = [other_reading(*each) for each in zip(parts, forms, strict=True)]
        if opened.client:
            shown = [
                text and f"{part.where.name}: {text}"
                for part, text in zip(opened.parts, shown, strict=True)
            ]
        with np.errstate(over="ignore"):
            beyond = np.isinf(cells.astype(np.float32))
        refuse_where(beyond, cells, "the value must be a finite float32")
        return Feature(NUMBER, cells, next(filter(None, reversed(shown)), ""))
    except DataFault as fault:
        question = Question(name, fault.what, (CORRECT,), fault.row)
        return Feature(LEFT_OUT, np.full(len(opened), np.nan), "", question)


def own_signs(part: Part, names: Sequence[str], how: Reading) -> list[Question]:
    """Return the columns of a file whose numbers have signs that nobody gave."""
    found = []
    free = (*(how.word_columns or ()), *(how.date_columns or ()))
    for name in names if how.numbers == PLAIN_NUMBERS else ():
        if name in free or name not in part.frame:
            continue
        with suppress(DataFault):  # told with the other faults of the column
            cells = part.cells(name, how)
            numeric = _is_numeric(cells, how.numbers)
            said = None if numeric else suspicion(texts_of(cells).categories)
            if said and SIGNED in said.rule:
                found.append(Question(name, *said))
    return found


def _is_numeric(cells: Cells, form: NumberFormat) -> bool:
    return (
        isinstance(cells, np.ndarray) or format_of(cells.categories, form) is not None
    )


def _dated(parts: Sequence[Cells]) -> Feature:
    days, start = [], 0
    for part in parts:
        try:
            days.append(dates(texts_of(part)))
        except DataFault as fault:
            row = None if fault.row is None else fault.row + start
            raise DataFault(f"{fault.what} {fault.way}", row=row) from fault
        start += len(part)
    return Feature(DATE, joined(days))


def _mixed(name: str, parts: Sequence[Cells], how: Reading) -> Feature:
    """Return how cells are read that are not all numbers: by what 95 % of them are, else both ways are named."""
    given, cells = how.numbers, texts_of(joined(parts))
    words = cells.categories
    signed = given != PLAIN_NUMBERS and any(map(given.fits, words))
    found = None if signed else suspicion(words)
    if found:
        if found.ways[0][1] != "date_columns":
            return Feature(LEFT_OUT, cells, "", Question(name, *found))
        try:
            return _dated(parts)._replace(question=Question(name, *found))
        except DataFault:
            later = "Or write 2024-12-31, and read them as numbers", "date_columns"
            ways = (LEAVE_OUT, later, WORDS_KEPT)
            return Feature(LEFT_OUT, cells, "", Question(name, found.rule, ways))
    fits = np.array([given.fits(word) or is_number(word) for word in words], dtype=bool)
    present = ~lacks_value(cells)
    numeric = fits[cells.codes] & present
    share = numeric.sum() / max(present.sum(), 1)
    if share <= 1 - DECIDED:
        odd = f"{plural(int(numeric.sum()), 'cell')} of numbers" if share else ""
        return _worded(name, cells, odd)
    try:
        numbers(cells, given)
    except DataFault as fault:
        asked = Question(name, fault.what, (CORRECT,), fault.row)
    stray = sorted({word.strip() for word in words[~fits]} - {""})
    if share >= DECIDED:
        if len(stray) > STRAY or any(map(str.isdigit, "".join(stray))):
            return Feature(LEFT_OUT, cells, "", asked)
        values = np.full(len(cells), np.nan)
        values[numeric] = numbers(cells[numeric].remove_unused_categories(), given)
        take = ("Take it as missing", {"missing": stray})
        return Feature(NUMBER, values, "", asked._replace(ways=(take, CORRECT)))
    kept = _worded(name, cells)
    if kept.question or "decimal" in asked.rule:
        return Feature(LEFT_OUT, cells, "", asked)
    keep = ("Keep all as words", "word_columns")
    return kept._replace(question=asked._replace(ways=(keep, CORRECT)))


def words_of(cells: pd.Categorical) -> tuple[str, ...]:
    """Return the words of a column; an empty cell is a word of its own."""
    return tuple(sorted({word.strip() for word in cells.categories}))


def _worded(name: str, cells: pd.Categorical, odd: str = "") -> Feature:
    """Return words, if they come again."""
    count = len(words_of(cells))
    if count <= min(MOST_WORDS, max(FEW_WORDS, len(cells) // 2)):
        return Feature(WORDS, cells, odd)
    rule = f"there must be numbers, or words that come again ({MOST_WORDS} at most); got {count:,} different words."
    alone = ("Or read these texts alone", {"text_column": name})
    question = Question(name, rule, (("Leave them out", "exclude_columns"), alone))
    return Feature(LEFT_OUT, cells, "", question)


# --- what is odd -----------------------------------------------------------------------------------------------

FAR = 1000.0
"""Times the range of all others from which one number is far from them."""
CLEAR = 0.99
"""Share of labels from which a column gives them away."""
SAMPLE = 2000
"""Rows that are looked at first: a column that gives the label away does so there."""
LEVELS = 20
"""Different values up to which each has its own label."""
KNOWN = 10
"""Values of a client from which they are compared with the others'."""


def describe(
    name: str, cells: Cells, taken_as: str, inputs: int = 0, *odd: str
) -> Column:
    """Return what the table says of a column.

    Args:
        taken_as: its role, or how its cells are read. Numbers and words of two values become yes/no.
        inputs: how many inputs of the model it makes.
        odd: what is known to be odd. What its values show is added: one value, spellings of one word, or a number far
            from the others.
    """
    lacking, example, more = lacks_value(cells), "", ""
    said = [text for text in odd if text]
    if not lacking.all():
        first = cells[int(np.argmin(lacking))]
        example = date_text(first) if taken_as == DATE else cell_text(first).strip()
    if isinstance(cells, np.ndarray):
        known = cells[~lacking]
        single = not len(known) or known.min() == known.max()
        two = bool(((known == 0) | (known == 1)).all())
        if not single:
            more = _far(known, date_text if taken_as == DATE else "{:g}".format)
    else:
        words = [word for word in cells.categories if word.strip()]
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
    if single and not said:
        said.append("one value only")
    elif more:
        said.append(more)
    return Column(name, taken_as, inputs, int(lacking.sum()), example, "; ".join(said))


def _far(known: NDArray[np.float64], spelt: Callable[[float], str]) -> str:
    """Return what is said of an end that is far from the other numbers: a mark of a missing one, or a mistake."""
    for end in (known.min(), known.max()):
        others = known[known != end]
        span = np.ptp(others) if len(others) else 0.0
        apart = np.abs(others - end).min(initial=np.inf)
        marks = not {*cell_text(end)} - {*"-9"} or spelt(end).startswith("9999")
        if len(others) and apart > span * (1 if marks else FAR) > 0:
            count = plural(len(known) - len(others), "cell")
            return f"{spelt(end)} far from the others in {count}: missing?"
    return ""


def gives_away(cells: Cells, y: NDArray[Any]) -> bool:
    """Return whether a column predicts the class: each of a few values has its own, or one threshold splits two.

    >>> y = np.arange(60) % 3
    >>> gives_away(2.0 * y, y), gives_away(np.arange(60.0), (np.arange(60) > 20).astype(int)), gives_away(y % 2, y)
    (True, True, False)
    """
    some = slice(None, None, len(y) // SAMPLE or 1)
    if len(y) > 2 * SAMPLE and not gives_away(cells[some], y[some]):
        return False
    lacking = lacks_value(cells)
    code, values = pd.factorize(cells)
    classes = int(y.max()) + 1
    counts = np.bincount(y, minlength=classes)
    if len(y) < LEVELS or counts.max() > CLEAR * len(y):
        return False
    if len(values) <= min(LEVELS, len(y) // 5):
        table = np.zeros((len(values) + 1, classes))
        np.add.at(table, (code, y), 1)
        return bool(table.max(axis=1).sum() >= CLEAR * len(y))
    if classes != 2 or lacking.any() or not isinstance(cells, np.ndarray):
        return False
    order = np.argsort(cells, kind="stable")
    ends = np.append(np.diff(cells[order]) > 0, True)
    ones = np.cumsum(y[order])
    right = np.arange(1, len(y) + 1) - ones + (ones[-1] - ones)
    right = np.maximum(right, len(y) - right)[ends]
    return bool(right.max() >= CLEAR * len(y))


def unlike_clients(cells: Cells, owner: NDArray[np.int64], names: Sequence[str]) -> str:
    """Return what is said of clients whose numbers or words do not meet those of the others, or an empty text.

    >>> unlike_clients(np.repeat([1.0, 88.0], 20) * np.linspace(1, 2, 40), np.repeat([0, 1], 20), ("a", "b"))
    "no value at 'a' (1 to 1.49) is in the range of the others: another unit?"
    """
    lacking = lacks_value(cells)
    if isinstance(cells, np.ndarray):
        short = owner.astype(np.min_scalar_type(len(names)))  # sorts fast
        order = np.argsort(short, kind="stable")
        starts = np.flatnonzero(np.diff(owner[order], prepend=-1))
        values = cells[order]
        low, high = (end.reduceat(values, starts) for end in (np.fmin, np.fmax))
        known = np.add.reduceat(~lacking[order], starts, dtype=np.int64)
        kept = (known >= KNOWN) & (high > low)
        if kept.sum() < 2:
            return ""
        low, high, client = low[kept], high[kept], owner[order][starts][kept]
        apart = (high < _of_others(low)) | (low > -_of_others(-high))
        for k in np.flatnonzero(apart):
            where = f"{names[int(client[k])]!r} ({low[k]:.3g} to {high[k]:.3g})"
            return f"no value at {where} is in the range of the others: another unit?"
        return ""
    counts = np.zeros((len(names), len(cells.categories)))
    np.add.at(counts, (owner[~lacking], cells.codes[~lacking]), 1)
    counts = np.where(counts.sum(axis=1, keepdims=True) >= KNOWN, counts, 0)
    total = counts.sum(axis=0)
    for k in np.flatnonzero(counts.any(axis=1)):
        others = total - counts[k]
        if others.any() and not others[counts[k] > 0].any():
            words = [repr(cells.categories[j]) for j in np.flatnonzero(counts[k])]
            return (
                f"{names[int(k)]!r} shares no word with the others: {listing(words, 3)}"
            )
    return ""


def _of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each value the smallest of the others."""
    first, second = np.partition(values, 1)[:2]
    others = np.full(len(values), first)
    others[np.argmin(values)] = second
    return others
