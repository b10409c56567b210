"""Guesses of a column's role in a table, from its name and its values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_core.data.arrays import Cells, Integers, lacks_value, texts_of

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
"""Samples per client up to which a column that counts within each client may be a feature, such as a visit's number."""
LEAST = 20
"""Rows from which a column may be recognised as a count of the rows."""
MANY_ROWS = 100
"""Rows from which a column of any name may be recognised so."""
DISTINCT = 0.95
"""Share of distinct values from which a column counts as one without repeats."""


def is_identifier(name: str, cells: Cells, owner: Integers | None = None) -> bool:
    """Return whether a column numbers the records or what they belong to: it is named so, and has many values.

    Values are whole numbers or words. No value is there twice, or there are at least :data:`FEW` and one for each
    :data:`ROWS` rows. Hospitals number their records each for itself, so a value may be at two clients. A column that
    is named as any number, such as ``Nr``, must also count the rows.

    >>> is_identifier("record_id", np.arange(3.0)), is_identifier("record_id", np.ones(2))
    (True, False)
    >>> is_identifier("lab_nr", np.arange(30.0)), is_identifier("lab_nr", np.arange(30.0) ** 2 % 89)
    (True, False)

    Args:
        owner: the client of each sample, if there are natural ones.
    """
    if not isinstance(cells, np.ndarray):
        cells = texts_of(cells)
    known = ~lacks_value(cells)
    cells, owner = cells[known], None if owner is None else owner[known]
    values: Any
    if isinstance(cells, np.ndarray):
        if not (np.isfinite(cells) & (cells == np.round(cells))).all():
            return False
        if not is_named_as_identifier(name):
            return is_named_as_number(name) and counts_rows(cells, sorts=False)
        values, code = np.unique(cells, return_inverse=True)
    else:
        cells = cells.remove_unused_categories()
        code, values = cells.codes.astype(np.int64), cells.categories
    if len(cells) < 2 or not is_named_as_identifier(name):
        return False
    if len(values) == len(cells) or len(values) >= max(FEW, len(cells) / ROWS):
        return True
    if owner is None:
        return False
    many = len(cells) >= FEW * len(np.unique(owner))
    return many and len(np.unique(owner * len(values) + code)) == len(cells)


def names_rows(name: str) -> bool:
    """Return whether a column may number rows, by its name."""
    return is_named_as_identifier(name) or is_named_as_number(name)


def is_named_as_identifier(name: str) -> bool:
    """Return whether a name says that a column identifies rows, or what several rows belong to.

    >>> [is_named_as_identifier(each) for each in ("patientid", "Fall-Nr", "subject", "number_of_visits", "acid")]
    [True, True, True, False, False]
    """
    return _IDENTIFIER.fullmatch("_".join(_words(name))) is not None


def is_named_as_number(name: str) -> bool:
    """Return whether a name is that of any number, such as ``Nr`` and ``row_index``, or that of a stored index."""
    words = "_".join(_words(name)) or name.strip()
    return _NUMBER.fullmatch(words) is not None


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
