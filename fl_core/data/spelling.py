"""Spellings of cells: numbers, dates, missing values, and names in one Unicode form."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fl_core.errors import spelled

MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Contents of a cell without a value, in small letters, for features and labels alike."""
MISSING_CELLS = sorted(
    {form(word) for word in MISSING for form in (str, str.upper, str.title)} | {"NaN"}
)
"""The usual spellings of these in tables."""
DIFFERENT = 6
"""The number of different numbers from which words with a number in them are suspicious."""
MINUS = "\u2212"
"""The minus sign of Unicode, which is read like the hyphen."""

_AFFIXED = re.compile(
    r"(?P<before>[^\w\s.,+-]*)\s*[+-]?(?P<number>[0-9]{1,3}(?:['\s][0-9]{3})+(?:[.,][0-9]*)?|[0-9][0-9.,]*)\s*"
    r"(?P<after>[^\W\d]*|[^\w\s]*|[^\d\s.,+-]+)"
)
_DATE = re.compile(
    r"(?:[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{1,2}([-./])[0-9]{1,2}\1(?:[0-9]{2}){1,2}"
    r"|[0-9]{1,2}[- ]?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[- ]?(?:[0-9]{2}){1,2})"
    r"(?:[ T][0-9]{1,2}:[0-9]{2}.*)?|[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?",
    re.IGNORECASE,
)


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value."""
    return cell.strip().lower() in MISSING


def name(text: str) -> str:
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


def double_spelling(words: Iterable[str]) -> tuple[str, str] | None:
    """Return two different words that are one number, such as 007 and 7, or None."""
    seen: dict[float, str] = {}
    for word in words:
        if is_number(word) and seen.setdefault(PLAIN.number(word), word) != word:
            return seen[PLAIN.number(word)], word
    return None


def alike(words: Iterable[str]) -> list[list[str]]:
    """Return the groups of words that differ only by case or blanks.

    >>> alike(["North", "east", "north ", "NORTH"])
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


PLAIN = NumberFormat()
"""Digits with an optional sign, point and exponent, and nothing else."""


def is_number(cell: str) -> bool:
    """Return whether a cell is a plain number.

    >>> [is_number(cell) for cell in ("-1.5e3", "10_20", "1,5", "\u22127")]
    [True, False, False, True]
    """
    return PLAIN.fits(cell)


def format_of(cells: Iterable[str], given: NumberFormat) -> NumberFormat | None:
    """Return the format that reads all cells with a value: the given one, or plain numbers. None means neither."""
    words = [cell for cell in cells if not is_missing(cell)]
    return next((form for form in (given, PLAIN) if all(map(form.fits, words))), None)


def other_reading(cells: Any, given: NumberFormat) -> str:
    """Return how a cell of text is read that is another number in another format, or an empty text.

    >>> import pandas as pd
    >>> other_reading(pd.Categorical(["1,250", "2,500"]), NumberFormat(","))
    "'1,250' is read as 1.25"
    """
    categories = getattr(cells, "categories", None)  # of text in a table
    if given == PLAIN or categories is None:
        return ""
    words = [cell for cell in categories if not is_missing(cell)]
    used = format_of(words, given) or given
    for form in (PLAIN, *_formats(words)):
        for word in words if all(map(form.fits, words)) else ():
            if form.number(word) != used.number(word):
                return f"{word!r} is read as {used.number(word):g}"
    return ""


class Suspicion(NamedTuple):
    """What words are, what to do, and settings that read them."""

    what: str
    way: str
    repair: dict[str, Any]


def suspicion(cells: Iterable[str], column: str) -> Suspicion | None:
    """Return what is suspicious of a column of words: that they are numbers or dates in another spelling.

    Most of the words must be a number with one fixed affix, comma, percent or comparison sign, or a date, and
    :data:`DIFFERENT` of them must differ. Codes such as ``NYHA2`` and ``ward 3`` are words.

    Returns None if nothing is suspicious.
    """
    distinct = {cell.strip() for cell in cells if not is_missing(cell)}
    most = max(len(distinct) / 2, DIFFERENT - 1)
    if sum(1 for word in distinct if _DATE.fullmatch(word)) > most:
        repair = {"date_columns": [column]}
        way = f"Read them as numbers: {spelled(**repair)}"
        return Suspicion("dates or times", way, repair)
    found = [match for match in map(_AFFIXED.fullmatch, distinct) if match]
    affixes = Counter((match["before"], match["after"]) for match in found)
    for affix, count in affixes.most_common(1):
        numbers = {m["number"] for m in found if (m["before"], m["after"]) == affix}
        if count <= len(distinct) / 2 or len(numbers) < DIFFERENT:
            break
        if not any(affix):
            plain = list(map(is_number, numbers))
            readable = not any(plain) or bool(_formats(numbers))
            return signs(numbers) if readable and not all(plain) else None
        what = f"numbers with {''.join(affix)!r}"
        way = "Write the numbers alone"
        return Suspicion(what, way, {"exclude_columns": [column]})
    return None


def _formats(words: Collection[str]) -> list[NumberFormat]:
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


def signs(words: Collection[str]) -> Suspicion:
    """Return the settings for words that are numbers but for commas and points.

    There are no settings if several read the words, since they read other numbers.
    """
    fits, what = _formats(words), "numbers with signs between their digits"
    if not fits:
        return Suspicion(what, "Write them with a decimal point", {})
    ways = " or ".join(spelled(**form.signs) for form in fits)
    repair = {"decimal": fits[0].decimal, "thousands": fits[0].thousands or None}
    way = f"Read them with {ways}"
    return Suspicion(what, way, repair if len(fits) == 1 else {})
