"""Spellings of cells: numbers, dates, missing values, and names in one Unicode form."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Contents of a cell without a value, in small letters, for features and labels alike."""
DIFFERENT = 6
"""The number of different numbers from which words with a number in them are suspicious."""
MINUS = "\u2212"
"""The minus sign of Unicode, which is read like the hyphen."""

_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?inf(?:inity)?|nan",
    re.IGNORECASE,
)
_AFFIXED = re.compile(
    r"(?P<before>[^\w\s.,+-]*)\s*[+-]?(?P<number>[0-9][0-9.,]*)\s*(?P<after>[^\W\d]*|[^\w\s]*)"
)
_DATE = re.compile(
    r"(?:[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{1,2}[./][0-9]{1,2}[./][0-9]{4})(?:[ T][0-9]{1,2}:[0-9]{2}.*)?"
    r"|[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?"
)


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value."""
    return cell.strip().lower() in MISSING


def is_number(cell: str) -> bool:
    """Return whether a cell is a number: digits with an optional sign, point and exponent, and nothing else.

    >>> [is_number(cell) for cell in ("-1.5e3", "10_20", "1,5", "\u22127")]
    [True, False, False, True]
    """
    return _NUMBER.fullmatch(cell.strip().replace(MINUS, "-")) is not None


def number(cell: str) -> float:
    """Return the number of a cell for which :func:`is_number` holds."""
    return float(cell.replace(MINUS, "-"))


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
        if is_number(word) and seen.setdefault(number(word), word) != word:
            return seen[number(word)], word
    return None


@dataclass(frozen=True)
class NumberFormat:
    """The signs in numbers: a decimal sign, and one between groups of three digits.

    >>> NumberFormat(",", ".").plain(["1.250,5", "-3", "12.5"])
    ['1250.5', '-3', '12.5']

    Attributes:
        decimal: ``.`` or ``,``.
        thousands: between groups of exactly three digits. Empty means none.
    """

    decimal: str = "."
    thousands: str = ""

    def plain(self, cells: Sequence[str]) -> list[str]:
        """Return the cells with their numbers as :func:`is_number` takes them. Other cells stay as they are."""
        if self == NumberFormat():
            return list(cells)
        whole = (
            r"[0-9]+"
            if not self.thousands
            else rf"(?:[0-9]{{1,3}}(?:{re.escape(self.thousands)}[0-9]{{3}})+|[0-9]+)"
        )
        form = re.compile(
            rf"[+{MINUS}-]?{whole}(?:{re.escape(self.decimal)}[0-9]*)?(?:[eE][+-]?[0-9]+)?"
        )
        found = []
        for cell in cells:
            if form.fullmatch(cell.strip()):
                digits = cell.replace(self.thousands, "") if self.thousands else cell
                cell = digits.replace(self.decimal, ".")
            found.append(cell)
        return found


def suspicion(cells: Iterable[str], name_: str) -> str:
    """Return what is suspicious of a column of words: that they are numbers or dates in another spelling.

    Most of the words must be a number with one fixed affix, comma, percent or comparison sign, or a date, and
    :data:`DIFFERENT` of them must differ. Codes such as ``NYHA2`` and ``ward 3`` are words.

    Returns:
        The words' kind and what to do, or an empty text.
    """
    words = [cell.strip() for cell in cells if not is_missing(cell)]
    distinct = set(words)
    if (
        sum(1 for word in distinct if _DATE.fullmatch(word)) > len(distinct) / 2
        and len(distinct) >= DIFFERENT
    ):
        return f"dates or times. Read them as numbers: --date-columns {name_}"
    kinds: Counter[tuple[str, str]] = Counter()
    numbers = defaultdict(set)
    for word in distinct:
        found = _AFFIXED.fullmatch(word)
        if found:
            kinds[found["before"], found["after"]] += 1
            numbers[found["before"], found["after"]].add(found["number"])
    if not kinds:
        return ""
    affix, count = kinds.most_common(1)[0]
    if count <= len(distinct) / 2 or len(numbers[affix]) < DIFFERENT:
        return ""
    before, after = affix
    if before or after:
        return f"numbers with {before or after!r}. Write the numbers alone"
    return _signs(numbers[affix])


def _signs(numbers: Iterable[str]) -> str:
    """Return which signs words have that are numbers but for commas and points."""
    numbers = [word for word in numbers if not is_number(word)]
    ways = {
        "--decimal ,": NumberFormat(","),
        "--thousands ,": NumberFormat(".", ","),
    }
    if any("." in word for word in numbers):
        ways = {
            "--decimal , --thousands .": NumberFormat(",", "."),
            "--thousands ,": ways["--thousands ,"],
        }
    fits = [
        way for way, form in ways.items() if all(map(is_number, form.plain(numbers)))
    ]
    way = (
        f"Read them with {' or '.join(fits)}"
        if fits
        else "Write them with a decimal point"
    )
    return f"numbers with commas. {way}"
