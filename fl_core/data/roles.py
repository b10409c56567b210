"""Guesses the role of a table's column from its name and its values."""

from __future__ import annotations

import re

import numpy as np

from fl_core.data.arrays import Cells, is_number

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_IDENTIFIERS = ("ids", "identifier", "mrn")
_OTHER = ("acid", "lipid", "fluid", "solid", "thyroid", "steroid", "rapid", "void", "said", "mid", "aid", "android")


def is_identifier(name: str, cells: Cells) -> bool:
    """Return whether a column numbers the records: it is named so, and no value is there twice.

    Values are whole numbers or words.

    >>> is_identifier("record_id", ["7", "8", "9"]), is_identifier("record_id", ["7", "7"])
    (True, False)
    """
    return _named_so(name) and len(cells) > 1 and _counts(cells)


def _named_so(name: str) -> bool:
    """Return whether a word of the name is ``id``, or ends in it as in ``patientid``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return any(word in _IDENTIFIERS or (word.endswith("id") and word not in _OTHER) for word in words)


def _counts(cells: Cells) -> bool:
    """Return whether all values differ and are whole numbers or words."""
    if not isinstance(cells, np.ndarray):
        words = [cell.strip() for cell in cells]
        if len(set(words)) < len(words):
            return False
        if not all(map(is_number, words)):
            return not any(map(is_number, words))
        cells = np.array(words, dtype=np.float64)
    return len(np.unique(cells)) == len(cells) and bool((np.isfinite(cells) & (cells == np.round(cells))).all())
