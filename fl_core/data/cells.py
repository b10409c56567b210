"""The cells of a table: their spellings, as text, numbers or days, what is missing, and faults in data."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.errors import UsageError, listing, spelled

Array = NDArray[np.generic]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Cells: TypeAlias = "pd.Categorical | Floats"
"""A column of text, each word once, or of numbers, NaN where one is missing."""
DATE_FORMS = (
    *("ISO8601", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y"),
    *("%d-%m-%Y", "%m-%d-%Y", "%d-%b-%Y", "%d%b%Y"),
)
"""The forms of dates."""
SPANS = {".*day.*": "", "[0-9]+:[0-5][0-9]": ":00", "[0-9]+:[0-5][0-9]:[0-5][0-9]": ""}
"""The forms of times and durations, and what each lacks."""
Names = tuple[str, ...]
"""Names in their order."""
MISSING = (
    *("", "na", "n/a", "nan", "null", "none", "?", ".", "nat", "<na>", "#n/a", "#na"),
    *("-nan", "1.#qnan", "-1.#qnan", "1.#ind", "-1.#ind"),
)
"""Contents of a cell without a value, in small letters, for features, labels, clients and groups alike."""
EXACT = "whole numbers must be at most 2**53 to keep their digits"
DIFFERENT = 6
"""The number of different numbers from which words with a number in them are suspicious."""
MINUS = "\u2212"
"""The minus sign of Unicode, which is read like the hyphen."""

_AFFIXED = re.compile(
    r"(?P<before>[^\w\s.,+-]*)\s*[+-]?(?P<number>[0-9]{1,3}(?:['\s][0-9]{3})+(?:[.,][0-9]*)?|[0-9][0-9.,]*)\s*"
    r"(?P<after>[^\W\d]*|[^\w\s]*|[^\d\s.,+-]+)"
)
_PADDED = re.compile(r"[+-]?0[0-9]+")
_DATE = re.compile(
    r"(?:[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{1,2}([-./])[0-9]{1,2}\1(?:[0-9]{2}){1,2}"
    r"|[0-9]{1,2}[- ]?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[- ]?(?:[0-9]{2}){1,2})"
    r"(?:[ T][0-9]{1,2}:[0-9]{2}.*)?|(?:-?[0-9]+ days?)? ?(?:\+?[0-9]+:[0-9]{2}(?::[0-9.]+)?)?",
    re.IGNORECASE,
)


def composed(text: str) -> str:
    """Return a name in Unicode's composed form (NFC), so that equal letters are equal characters."""
    return unicodedata.normalize("NFC", text)


def cell_text(value: Any) -> str:
    """Return a value of a typed file as a cell's text. A whole number has no point, and a missing value no text.

    >>> [cell_text(value) for value in (7.0, 1.5, None, True, "7.0")]
    ['7', '1.5', '', 'True', '7.0']
    """
    if value is None or value != value:
        return ""
    if isinstance(value, int | str) or not hasattr(value, "is_integer"):
        return str(value)
    return str(int(value)) if value.is_integer() else str(value)


def first_duplicate(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once, or None."""
    counts = Counter(names)
    return next((name for name in names if counts[name] > 1), None)


def nearly_equal(words: Iterable[str]) -> list[list[str]]:
    """Return the groups of words that differ only by case or blanks.

    >>> nearly_equal(["North", "east", "north ", "NORTH"])
    [['North', 'north ', 'NORTH']]
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault("".join(word.split()).casefold(), []).append(word)
    return [group for group in groups.values() if len(group) > 1]


@dataclass(frozen=True)
class NumberFormat:
    """The signs in numbers: a decimal sign, and one between groups of three digits.

    >>> form = NumberFormat(",", ".")
    >>> [form.fits(cell) for cell in ("1.250,5", "-3", "12.5", "1.25")], form.number("1.250,5")
    ([True, True, False, False], 1250.5)

    Attributes:
        decimal: ``.`` or ``,``.
        thousands: between groups of exactly three digits. Empty means none.
    """

    decimal: str = "."
    thousands: str = ""

    @cached_property
    def _form(self) -> re.Pattern[str]:
        decimal, whole = re.escape(self.decimal), "[0-9]+"
        if self.thousands:
            between = r"\s" if self.thousands == " " else re.escape(self.thousands)
            groups = f"(?:{between}[0-9]{{3}})+"
            whole = f"(?:[0-9]{{1,3}}{groups}|{whole})"
        digits = f"(?:{whole}(?:{decimal}[0-9]*)?|{decimal}[0-9]+)"
        number = f"{digits}(?:e[+{MINUS}-]?[0-9]+)?|inf(?:inity)?"
        return re.compile(f"[+{MINUS}-]?(?:{number})|nan", re.IGNORECASE)

    @property
    def signs(self) -> dict[str, str]:
        """Return the settings of its signs that are not those of plain numbers."""
        decimal = {"decimal": self.decimal} if self.decimal != "." else {}
        return decimal | ({"thousands": self.thousands} if self.thousands else {})

    def fits(self, cell: str) -> bool:
        """Return whether a cell is a number with these signs and no others."""
        return self._form.fullmatch(cell.strip()) is not None

    def number(self, cell: str) -> float:
        """Return the number of a cell that fits."""
        cell = cell.replace(MINUS, "-")
        if self.thousands:
            groups = cell.split(None if self.thousands == " " else self.thousands)
            cell = "".join(groups)
        return float(cell.replace(self.decimal, "."))


PLAIN_NUMBERS = NumberFormat()
"""Digits with an optional sign, point and exponent, and nothing else."""


def is_number(cell: str) -> bool:
    """Return whether a cell is a plain number.

    >>> [is_number(cell) for cell in ("-1.5e3", "10_20", "1,5", "\u22127")]
    [True, False, False, True]
    >>> [is_number(cell) for cell in ("0x10", "\u0661", "1e", "1 000", "--1")]
    [False, False, False, False, False]
    """
    return PLAIN_NUMBERS.fits(cell)


def is_padded(cell: str) -> bool:
    """Return whether a cell is a whole number with zeros before it, as codes have.

    >>> [is_padded(cell) for cell in ("0150", "0.5", "0")]
    [True, False, False]
    """
    return _PADDED.fullmatch(cell.strip()) is not None


def format_of(cells: Iterable[str], given: NumberFormat) -> NumberFormat | None:
    """Return the format that reads all cells with a value: the given one, or plain numbers. None means neither."""
    words = [cell for cell in cells if cell.strip()]
    return next(
        (form for form in (given, PLAIN_NUMBERS) if all(map(form.fits, words))), None
    )


def other_reading(cells: Any, given: NumberFormat) -> str:
    """Return how a cell of text is read that is another number in another format, or a code; or an empty text.

    >>> import pandas as pd
    >>> other_reading(pd.Categorical(["1,250", "2,500"]), NumberFormat(","))
    "'1,250' is read as 1.25"
    >>> other_reading(pd.Categorical(["0150", "300", "1200"]), PLAIN_NUMBERS)
    "'0150' is read as 150"
    """
    categories = getattr(cells, "categories", None)  # of text in a table
    if categories is None:
        return ""
    words = [cell for cell in categories if cell.strip()]
    used = format_of(words, given) or given
    for word in filter(is_padded, words):
        return f"{word!r} is read as {used.number(word):g}"
    for form in (PLAIN_NUMBERS, *formats(words)) if given != PLAIN_NUMBERS else ():
        for word in words if all(map(form.fits, words)) else ():
            if form.number(word) != used.number(word):
                return f"{word!r} is read as {used.number(word):g}"
    return ""


SIGNED = "numbers with signs between their digits"


def suspicion(cells: Iterable[str], name: str = "") -> DataFault | None:
    """Return what is suspicious of a column of words: that they are numbers or dates in another spelling.

    Most of the words must be a number with one fixed affix, comma, percent or comparison sign, or a date, and
    :data:`DIFFERENT` of them must differ. Codes such as ``NYHA2`` and ``ward 3`` are words.

    Returns None if nothing is suspicious.
    """
    distinct = {cell.strip() for cell in cells} - {""}
    rule = f"cells must be numbers or words; got {listing(map(repr, sorted(distinct)), 3)}, "
    most = max(len(distinct) / 2, DIFFERENT - 1)
    keep = "Keep the words", {"word_columns": [name]}
    out: dict[str, Any] = {"exclude_columns": [name]}
    if sum(1 for word in distinct if _DATE.fullmatch(word)) > most:
        dated = "Read them as numbers", {"date_columns": [name]}
        return DataFault(f"{rule}dates or times.", dated, keep)
    found = [match for match in map(_AFFIXED.fullmatch, distinct) if match]
    affixes = Counter((match["before"], match["after"]) for match in found)
    for affix, count in affixes.most_common(1):
        numbers = {m["number"] for m in found if (m["before"], m["after"]) == affix}
        if count <= len(distinct) / 2 or len(numbers) < DIFFERENT:
            break
        if not any(affix):
            plain = list(map(is_number, numbers))
            readable = not any(plain) or bool(formats(numbers))
            if all(plain) or not readable:
                return None
            fits = formats(numbers)
            if len(fits) == 1:
                return DataFault(
                    f"{rule}{SIGNED}.", ("Read them with", fits[0].signs), keep
                )
            # they read other numbers, so none is certain
            some = " or ".join(spelled(**form.signs) for form in fits) or "a point"
            way = f"Write or read them with {some}, or leave the column out", out
            return DataFault(f"{rule}{SIGNED}.", way, keep)
        alone = "Write the numbers alone, or leave the column out", out
        return DataFault(f"{rule}numbers with {''.join(affix)!r}.", alone, keep)
    return None


def formats(words: Collection[str]) -> list[NumberFormat]:
    """Return the formats that fit all words, with a sign that they have."""
    forms = [NumberFormat(","), NumberFormat(".", ",")]
    if any("." in word for word in words):
        forms.append(NumberFormat(",", "."))
    grouped = "'" if any("'" in word for word in words) else " "
    if any(grouped in " ".join(word.split()) for word in words):
        forms = [NumberFormat(sign, grouped) for sign in ".,"]
        if not any("," in word for word in words):
            forms = forms[:1]
    return [form for form in forms if all(map(form.fits, words))]


# --- faults ----------------------------------------------------------------------------------------------------

Place = Callable[[int], str]
"""The name of a row in messages."""


def row_of_array(row: int) -> str:
    """Return the name of an array's row in error messages."""
    return f"row {row} (rows count from 0)"


def place_in(parts: Sequence[tuple[str, int, Place]]) -> Place:
    """Return how messages name a row of several parts, each with its name, its rows and its own names of rows."""

    def place(row: int) -> str:
        for name, size, inside in parts:
            if row < size:
                return f"{name}, {inside(row)}"
            row -= size
        return row_of_array(row)

    return place


Way = tuple[str, dict[str, Any]]
"""What to do about a fault: a sentence, and the settings for it."""


class DataFault(UsageError):
    """An error in data that other settings may repair.

    Attributes:
        rule: what is wrong.
        ways: what to do, each a sentence with its settings. The first one is proposed. The others are said after "Or".
        row: where, or None.
    """

    def __init__(self, rule: str, *ways: str | Way, row: int | None = None) -> None:
        pairs = [(way, {}) if isinstance(way, str) else way for way in ways]
        said = [f"{say}: {spelled(**keys)}." if keys else say for say, keys in pairs]
        said[1:] = [f"Or {say[0].lower()}{say[1:]}" for say in said[1:]]
        super().__init__(" ".join(filter(None, [rule, *said])))
        self.rule, self.ways, self.row = rule, pairs, row

    @property
    def repair(self) -> dict[str, Any]:
        """Return the settings of the first way. None means that no setting is certain to help."""
        return self.ways[0][1] if self.ways else {}

    def at(self, where: str, place: Place = row_of_array) -> DataFault:
        """Return the fault with its data, and with its row by a name."""
        if self.row is not None:
            where = f"{where}, {place(self.row)}"
        return DataFault(f"{where}: {self.rule}", *self.ways)


@contextmanager
def located(where: str, place: Place = row_of_array) -> Iterator[None]:
    """Begin the message of a fault with its data, and with its row.

    >>> with located("t.csv", lambda row: f"line {row + 2}"):
    ...     raise DataFault("the text must not be empty.", "Fill it.", row=4)
    Traceback (most recent call last):
        ...
    fl_core.data.cells.DataFault: t.csv, line 6: the text must not be empty. Fill it.

    Args:
        where: the data. place: the name of a row.
    """
    try:
        yield
    except DataFault as fault:
        raise fault.at(where, place) from fault


# --- as text, numbers or days ---------------------------------------------------------------------------------


def cells_of(
    column: pd.Series,
    text: bool = False,
    missing: Collection[str] = MISSING,
    fold: bool = False,
) -> Cells:
    """Return a column's cells: float64 [n], or text in Unicode's composed form.

    A missing number is NaN, and a missing text is empty. After this nothing asks again what is missing.

    Args:
        text: keep the spelling of numbers.
        missing: marks of a cell without a value, in small letters.
        fold: make words equal that differ by case or blanks.

    Raises:
        DataFault: a cell is a list, an array or a dictionary, or numbers are complex.
    """
    if pd.api.types.is_timedelta64_dtype(column.dtype):
        column = column / pd.Timedelta(days=1)
    kind = column.dtype
    if pd.api.types.is_complex_dtype(kind):
        raise DataFault(
            f"cells must be real numbers; got {kind}.",
            "Make columns of the real and the imaginary part.",
        )
    if pd.api.types.is_numeric_dtype(column) and not text:
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        if pd.api.types.is_integer_dtype(kind):
            refuse_where(np.abs(values) > 2**53, column.to_numpy(), EXACT)
        marks = [float(mark) for mark in missing if is_number(mark)]
        marks = [mark for mark in marks if mark == mark]
        return np.where(np.isin(values, marks), np.nan, values) if marks else values
    if isinstance(kind, pd.CategoricalDtype):
        place = column.cat.codes.to_numpy()
        words = kind.categories
    else:
        if pd.api.types.infer_dtype(column, skipna=True) != "string":
            nested = [isinstance(each, dict | list | np.ndarray) for each in column]
            rule = "a cell must have one number or text"
            refuse_where(np.array(nested, dtype=bool), column.to_numpy(), rule)
            column = column.map(cell_text)
        place, words = pd.factorize(column)
    names = [composed(cell_text(word)) for word in words]
    names = ["" if word.strip().lower() in missing else word for word in names]
    if fold:
        names = [" ".join(word.split()).casefold() for word in names]
    if (place < 0).any():
        names.append("")
    code, distinct = pd.factorize(np.array(names, dtype=object))
    code = code[place]
    cells = pd.Categorical.from_codes(code, pd.Index(distinct, dtype=object))
    used = np.bincount(code, minlength=len(distinct))
    return cells if used.all() else cells.remove_unused_categories()


def taken(cells: Any, rows: Any) -> Any:
    """Return some rows of a column. A column of text keeps its words there."""
    cells = cells[rows]
    return cells if isinstance(cells, np.ndarray) else cells.remove_unused_categories()


def texts_of(cells: Cells | Array) -> pd.Categorical:
    """Return a column's cells as text. A missing number has no text."""
    if isinstance(cells, pd.Categorical):
        return cells
    text = cells_of(pd.Series(cells), text=True)
    assert isinstance(text, pd.Categorical)
    return text


def numbers(
    cells: Cells, given: NumberFormat = PLAIN_NUMBERS, *ways: str | Way
) -> Floats:
    """Convert text to float64 [n], NaN for a cell without a value. Numbers stay as they are.

    Args:
        given: the signs in the numbers. Plain numbers are read, too.
        ways: what to do about other cells.

    Raises:
        DataFault: names the first cell that is not a number.
    """
    if isinstance(cells, np.ndarray):
        return cells
    words = cells.categories
    form = format_of(words, given) or given
    known = np.array([*map(form.fits, words)], dtype=bool)
    others = ~(known[cells.codes] | lacks_value(cells))
    if others.any():
        signs = ("point", "comma") if form.decimal == "." else ("comma", "point")
        other = is_number(cells[int(np.argmax(others))].replace(",", ".", 1))
        point = f" with a decimal {signs[0]}, not a {signs[1]}" if other else ""
        refuse_where(others, cells, f"the cell must be a number{point}", *ways)
    values = np.full(len(words), np.nan)
    values[known] = [form.number(word) for word in words[known]]
    return values[cells.codes]


def lacks_value(cells: Cells) -> Bools:
    """Return where a column has no value."""
    if isinstance(cells, np.ndarray):
        return np.isnan(cells)
    missing = [not word.strip() for word in cells.categories]
    return np.array(missing, dtype=bool)[cells.codes]


def dates(cells: pd.Categorical) -> Floats:
    """Return dates as days since 1970 [n], with NaN where a cell is missing.

    All cells have one form of :data:`DATE_FORMS` or :data:`SPANS`. Times alone are parts of a day, and durations such
    as ``2 days 06:00:00`` or ``54:00`` are days, too. A year has four digits.

    >>> dates(pd.Categorical(["1970-01-02", "", "1970-01-01T12:00"])).tolist()
    [1.0, nan, 0.5]
    >>> for cells in ("2.1.1970 13.1.1970", "1/13/1970 1/2/1970", "06:00 54:00", "02JAN1970 13Feb1970"):
    ...     dates(pd.Categorical(cells.split())).tolist()
    [1.0, 12.0]
    [12.0, 1.0]
    [0.25, 2.25]
    [1.0, 43.0]
    >>> dates(pd.Categorical(["3 days", "2 days 06:00:00"])).tolist()
    [3.0, 2.25]
    >>> dates(pd.Categorical(["2024-01-01", "soon"]))
    Traceback (most recent call last):
        ...
    fl_core.data.cells.DataFault: dates must have one form; got 'soon'. Write 2024-12-31.
    >>> dates(pd.Categorical(["1/2/2024", "3/4/2024"]))
    Traceback (most recent call last):
        ...
    fl_core.data.cells.DataFault: dates must not be day/month or month/day alike; got '1/2/2024'. Write 2024-12-31.

    Raises:
        DataFault: names the first cell that is no date, or cells that fit two forms.
    """
    words = pd.Series(cells.categories, dtype=object).str.strip()
    lacking = words == ""
    fits, first, way = [], 0, "Write 2024-12-31."
    for form in (*SPANS, *DATE_FORMS):
        if form in SPANS:
            spans = words.where(words.str.fullmatch(form), "") + SPANS[form]
            found = pd.to_timedelta(spans, errors="coerce")
        else:
            found = pd.to_datetime(words, format=form, utc=True, errors="coerce")
            found -= pd.Timestamp("1970-01-01", tz="UTC")
        bad = (found.isna() & ~lacking).to_numpy()[cells.codes]
        if bad.any():
            first = max(first, int(np.argmax(bad)))
            continue
        days = found / pd.Timedelta(days=1)
        fits.append(days.to_numpy(np.float64, na_value=np.nan)[cells.codes])
    if not fits:
        raise DataFault(
            f"dates must have one form; got {cells[first]!r}.", way, row=first
        )
    if any(not np.array_equal(other, fits[0], equal_nan=True) for other in fits[1:]):
        raise DataFault(
            f"dates must not be day/month or month/day alike; got {cells[0]!r}.", way
        )
    return fits[0]


def date_text(days: float) -> str:
    """Return days since 1970 as a date, or a part of a day as a time.

    >>> date_text(19358.0), date_text(0.25), date_text(2932896.0)
    ('2023-01-01', '06:00', '9999-12-31')
    """
    when = str(np.datetime64(round(days * 86_400), "s"))
    return when[11:16] if 0 <= days <= 1 else when.partition("T")[0]


def refuse_where(bad: Bools, values: Any, rule: str, *ways: str | Way) -> None:
    """Refuse values, and name the first bad one.

    Args:
        bad: whether a value is refused. rule: what values must be. ways: what to do.
    """
    if bad.any():
        got = values[int(np.argmax(bad))]
        shown = repr(str(got)) if isinstance(got, str) else got  # it may be empty
        raise fault_where(bad, shown, rule, *ways)


def fault_where(bad: Bools, got: Any, rule: str, *ways: str | Way) -> DataFault:
    """Return the fault of some rows, with their number. Its place is the first of them."""
    count = f"({bad.sum():,} of {len(bad):,} rows)"
    return DataFault(f"{rule}; got {got} {count}.", *ways, row=int(np.argmax(bad)))
