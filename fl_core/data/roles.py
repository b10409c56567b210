"""Guesses of a column's role in a table, from its name and its values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fl_core.data.arrays import Cells, Integers, texts_of

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_IDENTIFIERS = ("ids", "identifier", "mrn")
_OTHER = (
    "acid",
    "lipid",
    "fluid",
    "solid",
    "thyroid",
    "steroid",
    "rapid",
    "void",
    "said",
    "mid",
    "aid",
    "android",
)


_LIKELY = {
    "label_column": "label lable outcome target class diagnosis died death dead mortality survived event disease "
    "status result response readmitted grade stage num y",
    "client_column": "client hospital site center centre clinic ward institution icu unit practice region country "
    "state city user writer group facility location",
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
    found = {name: [word.lower() for word in _WORDS.findall(name)] for name in header}
    words = {
        name: {*own, *(word.removesuffix("s") for word in own)}
        for name, own in found.items()
    }
    return [
        name for word in _LIKELY[role].split() for name in header if word in words[name]
    ]


ROWS = 20
"""Rows for each value, at most, of a column that numbers what they belong to."""
FEW = 10
"""Samples per client up to which a column that counts within each client may be a feature, such as a visit's number."""


def is_identifier(name: str, cells: Cells, owner: Integers | None = None) -> bool:
    """Return whether a column numbers the records or what they belong to: it is named so, and has many values.

    Values are whole numbers or words. No value is there twice, or there are at least :data:`FEW` and one for each
    :data:`ROWS` rows. Hospitals number their records each for itself, so a value may be at two clients.

    >>> is_identifier("record_id", np.arange(3.0)), is_identifier("record_id", np.ones(2))
    (True, False)

    Args:
        owner: the client of each sample, if there are natural ones.
    """
    if not is_named_as_identifier(name) or len(cells) < 2:
        return False
    values: Any
    if isinstance(cells, np.ndarray):
        if not (np.isfinite(cells) & (cells == np.round(cells))).all():
            return False
        values, code = np.unique(cells, return_inverse=True)
    else:
        text = texts_of(cells)
        code, values = text.codes.astype(np.int64), text.categories
    if len(values) == len(cells) or len(values) >= max(FEW, len(cells) / ROWS):
        return True
    if owner is None:
        return False
    many = len(cells) >= FEW * len(np.unique(owner))
    return many and len(np.unique(owner * len(values) + code)) == len(cells)


def is_named_as_identifier(name: str) -> bool:
    """Return whether a word of the name is ``id``, or ends in it as in ``patientid``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return any(
        word in _IDENTIFIERS or (word.endswith("id") and word not in _OTHER)
        for word in words
    )
