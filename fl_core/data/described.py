"""One record for each column of a table: how its cells are read, what is odd, and what to decide, with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.cells import (
    Bools,
    Cells,
    Floats,
    Integers,
    date_text,
    dates,
    lacks_value,
    numbers,
    refuse_where,
    taken,
    texts_of,
)
from fl_core.data.columns import Reading
from fl_core.data.opened import Opened
from fl_core.data.spelling import (
    EXACT,
    PLAIN_NUMBERS,
    SIGNED,
    DataFault,
    Names,
    NumberFormat,
    Way,
    cell_text,
    format_of,
    is_number,
    nearly_equal,
    other_reading,
    suspicion,
)
from fl_core.display import Displayed, Summary, aligned
from fl_core.errors import listing, plural, spelled, warn

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
_SPAN = re.compile(r".*day|\s*(?:2[4-9]|[3-9][0-9]|[0-9]{3,}):")
"""The beginning of a duration that is no time of a day."""


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
        rows = [[*map(_short, known), odd] for *known, odd in cells]
        return Summary(
            f"{plural(len(rows), 'column')}, {plural(self.inputs, 'input')}",
            heads,
            rows,
        )

    def __str__(self) -> str:
        shown = self.summary()
        return "\n".join(aligned([shown.columns, *shown.rows]))

    def with_inputs(self, words: Mapping[str, Sequence[str]]) -> ColumnTable:
        """Return the table with the inputs of columns of words: one for each word, and one for all others."""
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
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


# --- features --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Feature:
    """How a column is read. What is asked of all its cells is found once.

    Attributes:
        kind: number, words or date, as the first way of its fault reads it; left out if none does; or its role.
        cells: float64 with days for dates, or text.
        odd: what is unusual about it.
        fault: why other settings are needed, or None.
    """

    kind: str
    cells: Cells
    odd: str = ""
    fault: DataFault | None = None

    @cached_property
    def lacking(self) -> Bools:
        """Return where it has no value."""
        return lacks_value(self.cells)


def features(opened: Opened, names: Sequence[str], how: Reading) -> dict[str, Feature]:
    """Return how columns are read. The signs in numbers that one column of a file shows hold for all of the file."""
    found = {name: feature(opened, name, how) for name in names}
    if any(part.signs for part in opened.parts):
        return {name: feature(opened, name, how) for name in names}
    return found


def feature(opened: Opened, name: str, how: Reading) -> Feature:
    """Return how a column is read. Each file may have its own signs in numbers and its own form of dates."""
    dated = name in (how.date_columns or ())
    try:
        cells = opened.cells(name, how, dated)
        if dated:
            return _dated(opened, cells)
        if name in (how.word_columns or ()):
            return _worded(name, texts_of(cells))
        values, odd = list[NDArray[np.float64]](), ""
        for part, own in zip(opened.parts, opened.split(cells), strict=True):
            words = getattr(own, "categories", ())  # none of numbers
            form = NumberFormat(**part.signs) if part.signs else how.numbers
            plain = form != PLAIN_NUMBERS or format_of(words, form)
            signs = None if plain or not opened.takes else suspicion(words, name)
            if signs and SIGNED in signs.rule:
                if "exclude_columns" in signs.repair:
                    row = sum(map(len, values))
                    asked = DataFault(signs.rule, *signs.ways, row=row)
                    return Feature(LEFT_OUT, texts_of(cells), "", asked)
                part.signs = signs.repair
                warn(f"{part.where} is read with {spelled(**part.signs)}")
                form = NumberFormat(**part.signs)
            try:
                values.append(numbers(own, form))
            except DataFault:
                return mixed(name, opened, cells, how)
            said = other_reading(own, form)
            if said:
                odd = f"{part.where.name}: {said}" if opened.client else said
        cells = values[0] if len(values) == 1 else np.concatenate(values)
        beyond = np.abs(cells) > np.finfo(np.float32).max
        refuse_where(beyond, cells, "the value must be a finite float32")
        return Feature(NUMBER, cells, odd)
    except DataFault as fault:
        asked = DataFault(fault.rule, correct(name), row=fault.row)
        if fault.rule.startswith(EXACT):
            worded = _worded(name, texts_of(opened.cells(name, how, True)))
            if not worded.fault:
                keep = "Keep each as a word", {"word_columns": [name]}
                asked = DataFault(fault.rule, keep, correct(name), row=fault.row)
                return replace(worded, fault=asked)
        return Feature(LEFT_OUT, np.full(len(opened.frame), np.nan), "", asked)


def correct(name: str) -> Way:
    """Return the way out of cells that no other setting reads."""
    return "Correct it, or leave the column out", {"exclude_columns": [name]}


def _dated(opened: Opened, cells: Cells) -> Feature:
    days = []
    for part in opened.split(texts_of(cells)):
        try:
            days.append(dates(part))
        except DataFault as fault:
            if fault.row is not None:
                fault.row += sum(map(len, days))
            raise
    spans = any(map(_SPAN.match, texts_of(cells).categories))
    return Feature(NUMBER if spans else DATE, np.concatenate(days))


def mixed(name: str, opened: Opened, cells: Cells, how: Reading) -> Feature:
    """Return how cells are read that are not all numbers: by what 95 % of them are, else both ways are named."""
    given, cells = how.numbers, texts_of(cells)
    words = cells.categories
    signed = given != PLAIN_NUMBERS and any(map(given.fits, words))
    said = None if signed else suspicion(words, name)
    if said and _worded(name, cells).fault:  # words that are refused are no way
        ways = [way for way in said.ways if "word_columns" not in way[1]]
        said = DataFault(said.rule, *ways)
    if said and "date_columns" not in said.repair:
        return Feature(LEFT_OUT, cells, "", said)
    if said:
        try:
            return replace(_dated(opened, cells), fault=said)
        except DataFault:
            out = "Leave the column out", {"exclude_columns": [name]}
            later = "Write 2024-12-31, and read them as numbers", said.repair
            asked = DataFault(said.rule, out, later, *said.ways[1:])
            return Feature(LEFT_OUT, cells, "", asked)
    fits = np.array([given.fits(word) or is_number(word) for word in words], dtype=bool)
    present = ~lacks_value(cells)
    numeric = fits[cells.codes] & present
    share = numeric.sum() / max(present.sum(), 1)
    if share <= 1 - DECIDED:
        odd = f"{plural(int(numeric.sum()), 'cell')} of numbers" if share else ""
        return _worded(name, cells, odd)
    kept = Feature(LEFT_OUT, cells)
    ways = []
    if share < DECIDED:
        worded = _worded(name, cells)
        if not worded.fault:
            kept = worded
            ways.append(("Keep all as words", {"word_columns": [name]}))
    stray = sorted({word.strip() for word in words[~fits]} - {""})
    if len(stray) <= STRAY and not any(map(str.isdigit, "".join(stray))):
        if not ways:
            values = np.full(len(cells), np.nan)
            values[numeric] = numbers(taken(cells, numeric), given)
            kept = Feature(NUMBER, values)
        ways.append(("Take it as missing", {"missing": stray}))
    ways.append(correct(name))
    try:
        numbers(cells, given)
    except DataFault as fault:
        if "decimal" in fault.rule:
            kept, ways = Feature(LEFT_OUT, cells), ways[-1:]
        asked = DataFault(fault.rule, *ways, row=fault.row)
        kept = replace(kept, fault=asked)
    return kept


def words_of(cells: pd.Categorical) -> Names:
    """Return the words of a column; an empty cell is a word of its own."""
    return tuple(sorted({word.strip() for word in cells.categories}))


def _worded(name: str, cells: pd.Categorical, odd: str = "") -> Feature:
    """Return words, if they come again."""
    count = len(words_of(cells))
    if count <= min(MOST_WORDS, max(FEW_WORDS, len(cells) // 2)):
        return Feature(WORDS, cells, odd)
    asked = DataFault(
        f"there must be numbers, or words that come again ({MOST_WORDS} at most); got {count:,} different words.",
        ("Leave them out", {"exclude_columns": [name]}),
        ("Read these texts alone", {"text_column": name}),
    )
    return Feature(LEFT_OUT, cells, "", asked)


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


def describe(name: str, column: Feature, inputs: int = 0, *odd: str) -> Column:
    """Return what the table says of a column. Numbers and words of two values become yes/no.

    Args:
        inputs: how many inputs of the model it makes.
        odd: what is known to be odd. What its values show is added: one value, spellings of one word, or a number far
            from the others.
    """
    cells, taken_as, example, more = column.cells, column.kind, "", ""
    said = [text for text in odd if text]
    first = int(np.argmin(column.lacking))
    if not column.lacking[first]:
        spelt = date_text if taken_as == DATE else cell_text
        example = spelt(cells[first]).strip()
    if isinstance(cells, np.ndarray):
        known = cells[~column.lacking] if column.lacking.any() else cells
        two = bool(np.isin(known, (0, 1)).all())
        single = not len(known) or known.min() == known.max()
        spelt = date_text if taken_as == DATE else "{:g}".format
        end = None if single else far_end(known, spelt)
        if end is not None:
            count = plural(int((cells == end).sum()), "cell")
            more = f"{spelt(end)} far from the others in {count}: missing?"
    else:
        words = [word for word in cells.categories if word.strip()]
        values = {word.strip() for word in words}
        if taken_as == WORDS and column.lacking.any():
            values.add("")  # an empty cell counts as a word
        single, two = len(values) < 2, len(values) == 2
        groups = nearly_equal(words) if len(values) <= MOST_WORDS else []
        alike = [" and ".join(map(repr, sorted(group))) for group in groups]
        if alike:
            more = f"differ by case or blanks: {listing(alike, 3)}"
    if two and taken_as in (NUMBER, WORDS):
        taken_as = YES_NO
    if single and not said:
        said.append("one value only")
    elif more:
        said.append(more)
    missing = int(np.count_nonzero(column.lacking))
    return Column(name, taken_as, inputs, missing, example, "; ".join(said))


def far_end(known: Floats, spelt: Callable[[float], str]) -> float | None:
    """Return the end that is far from the other numbers, a mark of a missing one or a mistake, or None."""
    for end in (known.min(), known.max()):
        marks = not {*cell_text(end)} - {*"-9"} or spelt(end).startswith("9999")
        for values in (known[:SAMPLE], known):  # most are refuted by the first rows
            others = values[values != end]
            span = np.ptp(others) if len(others) else 0.0
            far = np.abs(others - end).min(initial=np.inf) > span * (
                1 if marks else FAR
            )
            if not far:
                break
        if far and span > 0:
            return float(end)
    return None


def gives_away(cells: Cells, y: NDArray[Any]) -> bool:
    """Return whether a column predicts the class: each of a few values has its own, or one threshold splits two.

    >>> y = np.arange(60) % 3
    >>> gives_away(2.0 * y, y), gives_away(np.arange(60.0), (np.arange(60) > 20).astype(int)), gives_away(y % 2, y)
    (True, True, False)
    """
    some = slice(None, None, len(y) // SAMPLE or 1)
    if len(y) > 2 * SAMPLE and not gives_away(cells[some], y[some]):
        return False
    code, values = pd.factorize(cells)
    counts = np.bincount(y)
    if len(y) < LEVELS or counts.max() > CLEAR * len(y):
        return False
    if len(values) <= min(LEVELS, len(y) // 5):
        table = np.zeros((len(values) + 1, len(counts)))  # the last row has no value
        np.add.at(table, (code, y), 1)
        return bool(table.max(axis=1).sum() >= CLEAR * len(y))
    if len(counts) != 2 or (code < 0).any() or not isinstance(cells, np.ndarray):
        return False
    order = np.argsort(cells, kind="stable")
    ends = np.append(np.diff(cells[order]) > 0, True)
    ones = np.cumsum(y[order])
    right = np.arange(1, len(y) + 1) - ones + (ones[-1] - ones)
    right = np.maximum(right, len(y) - right)[ends]
    return bool(right.max() >= CLEAR * len(y))


def unlike_clients(cells: Cells, owner: Integers, names: Sequence[str]) -> str:
    """Return what is said of a column whose numbers or words at a client do not meet those of the others.

    >>> values = np.repeat([1.0, 88.0], 20) * np.linspace(1, 2, 40)
    >>> unlike_clients(values, np.repeat([0, 1], 20), ("a", "b"))
    "no value at 'a' (1 to 1.49) is in the range of the others: another unit?"
    """
    clients = len(names)
    if isinstance(cells, np.ndarray):
        some = slice(None, None, len(owner) // SAMPLE or 1)
        for rows in (some, slice(None)):
            kept, low, high = _ranges(cells[rows], owner[rows], clients)
            if len(kept) < 2:
                continue
            below = (low == low.min()) & (high < np.partition(low, 1)[1])
            above = (high == high.max()) & (low > np.partition(high, -2)[-2])
            apart = np.flatnonzero(below | above)
            if len(kept) == clients and not len(apart):
                return ""  # more rows only widen the ranges
        if len(kept) < 2 or not len(apart):
            return ""
        k = apart[0]
        where = f"{names[kept[k]]!r} ({low[k]:.3g} to {high[k]:.3g})"
        return f"no value at {where} is in the range of the others: another unit?"
    known = ~lacks_value(cells)
    enough = np.bincount(owner[known], minlength=clients) >= KNOWN
    words = cells.categories
    pairs = owner[known] * len(words) + cells.codes[known]
    counts = np.bincount(pairs, minlength=clients * len(words))
    has = (counts.reshape(clients, len(words)) > 0) & enough[:, None]
    alone = has.any(axis=1) & ~(has & (has.sum(axis=0) > 1)).any(axis=1)
    if not alone.any() or has.any(axis=1).sum() < 2:
        return ""
    k = int(np.argmax(alone))
    own = listing(map(repr, words[has[k]]), 3)
    return f"{names[k]!r} shares no word with the others: {own}"


def _ranges(
    cells: Floats, owner: Integers, clients: int
) -> tuple[Integers, Floats, Floats]:
    """Return the clients with some different numbers, and the ends of their ranges."""
    low, high = np.full((2, clients), np.nan)
    np.fmin.at(low, owner, cells)
    np.fmax.at(high, owner, cells)
    counts = np.bincount(owner[~np.isnan(cells)], minlength=clients)
    kept = np.flatnonzero((counts >= KNOWN) & (high > low))
    return kept, low[kept], high[kept]
