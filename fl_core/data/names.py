"""Names and words as texts: of clients, classes, columns and categories.

This module imports no NumPy, so that settings are read fast.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from fl_core.data.faults import DataFault
from fl_core.errors import UsageError
from fl_core.storage import CONTROL

Names = tuple[str, ...]
"""Names in their order."""
MARKS = (
    *("", "na", "n/a", "nan", "null", "none", "?", ".", "-", "nat", "<na>", "#n/a"),
    *("#na", "#div/0!", "#value!", "#ref!", "#name?", "#num!", "#null!"),
)
"""Marks of a missing cell, in small letters. In a table such a cell is no label,
client or group, unless its column is among the ``categories``."""
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?)|nan",
    re.IGNORECASE,
)


_NO_NAME = re.compile(f"[{CONTROL}\ud800-\udfff]")
"""Control characters, line ends, and halves of surrogate pairs, which stand for bytes that are no UTF-8."""
MOST_MARKS, SHORT = 100, 1000
"""Combining marks in a row that a text may have, and the length up to which it is not checked.

The time that a form of Unicode takes grows with the square of the marks in a row."""


def composed(text: str, form: Literal["NFC", "NFKC"] = "NFC") -> str:
    """Return a text in a form of Unicode, such as the composed one, so that equal letters are equal characters.

    Raises:
        DataFault: a long text has more than :data:`MOST_MARKS` combining marks in a row.
    """
    if len(text) > SHORT and not text.isascii():
        marks = re.escape("".join(filter(unicodedata.combining, {*text})))
        if marks and re.search(f"[{marks}]{{{MOST_MARKS + 1}}}", text):
            raise DataFault(
                f"a text must have at most {MOST_MARKS} combining marks in a row; got {text[:9]!r}... with more.",
                "Remove them.",
            )
    return unicodedata.normalize(form, text)


def check_file_names(files: Iterable[Path]) -> None:
    """Refuse files and folders, after which clients and classes are named, that have control characters in their names.

    Raises:
        UsageError: there is such a name, or one that is no UTF-8. The message has it.
    """
    for file in files:
        if _NO_NAME.search(str(file)):
            raise UsageError(
                f"names of files and folders must be text without control characters; got {str(file)!r}. Rename it."
            )


def first_duplicate(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once, or None."""
    return next((name for name, n in Counter(names).items() if n > 1), None)


def nearly_equal(words: Iterable[str]) -> list[list[str]]:
    """Return the groups of words that differ only by case, blanks, invisible characters, or Unicode's form.

    >>> nearly_equal(["North", "east", "north ", "NORTH", "east\\u200b"])
    [['North', 'north ', 'NORTH'], ['east', 'east\\u200b']]
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        plain_word = composed("".join(word.split())).casefold()
        if not plain_word.isascii():
            visible_characters = [
                character
                for character in plain_word
                if unicodedata.category(character) != "Cf"
            ]
            plain_word = "".join(visible_characters)
        groups.setdefault(plain_word, []).append(word)
    return [group for group in groups.values() if len(group) > 1]


def is_number(cell: str) -> bool:
    """Return whether a cell is a plain number: digits with an optional sign, point and exponent.

    Infinity (``inf``) and ``nan`` are numbers, too. Blanks around a number do not
    count.

    >>> [is_number(cell) for cell in ("-1.5e3", " 7 ", "10_20", "1,5", "0x10", "1e", "1 000")]
    [True, True, False, False, False, False, False]
    """
    return _NUMBER.fullmatch(cell.strip()) is not None


def is_mark(word: str) -> bool:
    """Return whether a word marks a missing cell, such as ``NA`` or ``?``.

    >>> [is_mark(word) for word in ("N/A", " ", "none", "Nancy")]
    [True, True, True, False]
    """
    return word.strip().lower() in MARKS
