"""Spellings: names, dates, numbers and what is missing, as texts. Settings start without NumPy."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fl_core.errors import UsageError, listing, spelled

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
    *("#div/0!", "#value!", "#ref!", "#name?", "#num!", "#null!"),
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
    if isinstance(value, str):
        return value
    if value is None or value != value:
        return ""
    if isinstance(value, int) or not hasattr(value, "is_integer"):
        return str(value)
    return str(int(value)) if value.is_integer() else str(value)


def first_duplicate(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once, or None."""
    return next((name for name, n in Counter(names).items() if n > 1), None)


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

    It reads what it writes.

    >>> for decimal, thousands in (".,", ",.", ",'"):
    ...     signs = str.maketrans({",": thousands, ".": decimal})
    ...     form = NumberFormat(decimal, thousands)
    ...     for value in (0.0, -0.25, 12.5, 999.99, 1000.0, -1234567.89, 1e9):
    ...         written = f"{value:,.2f}".translate(signs)
    ...         assert form.fits(written) and form.number(written) == value

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
    words = [cell for cell in getattr(cells, "categories", ()) if cell.strip()]
    used = format_of(words, given) or given
    for word in filter(is_padded, words):
        return f"{word!r} is read as {used.number(word):g}"
    for form in (PLAIN_NUMBERS, *formats(words)) if given != PLAIN_NUMBERS else ():
        for word in words if all(map(form.fits, words)) else ():
            if form.number(word) != used.number(word):
                return f"{word!r} is read as {used.number(word):g}"
    return ""


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
        self.rule = rule
        self.ways = pairs
        self.row = row

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
    fl_core.data.spelling.DataFault: t.csv, line 6: the text must not be empty. Fill it.

    Args:
        where: the data. place: the name of a row.
    """
    try:
        yield
    except DataFault as fault:
        raise fault.at(where, place) from fault


# --- as text, numbers or days ---------------------------------------------------------------------------------
