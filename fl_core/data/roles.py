"""The roles of a table's columns, guessed from names and values: labels, clients, record numbers and groups."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from fl_core.data.cells import (
    Array,
    Cells,
    Floats,
    Integers,
    lacks_value,
    taken,
    texts_of,
)

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_COUNTED = (
    "record|case|fall|patient|pat|subject|subj|person|participant|proband|individual|customer|user|member|animal|"
    "sample|specimen"
)
"""What a table has rows of."""
_NUMBERED = "no|nr|nbr|num|number|nummer|index|idx|code|key"
"""Words after these, or alone, that make a column of numbers for rows."""
_IDENTIFIER = re.compile(
    rf"(.*_)?(ids?|oid|identifier|mrn|ssn|barcode|({_COUNTED}|item|stay|visit|encounter|admission|hadm|event)s?id)(_.*)?"
    rf"|({_COUNTED})|(.*_)?({_COUNTED})s?_?({_NUMBERED})"
)
_NAMELESS = re.compile(r"(?i)#?|unnamed.*")
"""The name of the index of a table that was saved with it."""
_NUMBER = re.compile(rf"(.*_)?(|#|unnamed|{_NUMBERED}|.*(number|nummer))")


_LIKELY = {
    "label_column": "label lable outcome target class diagnosis species died death dead mortality survived readmitted",
    "label_name": "event disease status result response grade stage num y",
    "client_column": "client hospital site center centre clinic ward institution icu unit practice region country "
    "state city user writer group facility location",
    "time_column": "time duration followup futime tte",
    "event_column": "event died death dead censored",
    "text_column": "text note notes report sentence comment message tweet",
    "group_column": "patient subject person participant family",
}
"""Words in the names of columns that often have a role. Those of ``label_name`` are a label alone: ``marital-status``
is none."""
_BESIDE = {"id", "name", "code"}
"""Words next to the word of a role that do not change it."""


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
    if role == "label_column":
        named += by_name("label_name", header, alone=True)
        others = by_name("client_column", header, alone=True)
        others += filter(is_named_as_identifier, header)
        named += [name for name in (header[-1], header[0]) if name not in others]
    return list(dict.fromkeys([*near, *named]))[:3]


def by_name(role: str, header: Sequence[str], alone: bool = False) -> list[str]:
    """Return the columns whose names say a role, in the order of the words that say it.

    >>> header = ["time_in_hospital", "Hospital_ID"]
    >>> by_name("client_column", header), by_name("client_column", header, alone=True)
    (['time_in_hospital', 'Hospital_ID'], ['Hospital_ID'])

    Args:
        alone: whether the name may have no other words.
    """
    found = []
    for word in _LIKELY[role].split():
        for name in header:
            words = {*_words(name)}
            own = words & {word, f"{word}s"}
            if own and not (alone and words - own - _BESIDE):
                found.append(name)
    return found


def survival_columns(header: Sequence[str]) -> tuple[str, str]:
    """Return the columns of a time and of the event at its end, by their names. An empty text means none."""
    time, event = (
        [*by_name(role, header), ""] for role in ("time_column", "event_column")
    )
    return time[0], event[0]


ROWS = 20
"""Rows for each value, at most, of a column that numbers what they belong to."""
FEW = 10
"""Different values up to which a column may be a feature, such as a visit's number."""
LEAST_ROWS = 20
"""Rows from which a column may be recognised as a count of the rows."""
MANY_ROWS = 100
"""Rows from which a column of any name is refused so."""
DISTINCT = 0.95
"""Share of distinct values from which a column counts as one without repeats."""


def is_identifier(name: str, cells: Cells, owner: Integers | None = None) -> bool:
    """Return whether a column numbers the records or what they belong to: it is named so, and has many values.

    Values are whole numbers or words. No value is there twice, or there are at least :data:`FEW` and, counted at each
    client, one for each :data:`ROWS` rows. Hospitals number their records each for itself, so a value may be at two
    clients. A column that is named as any number, such as ``Nr``, must also count the rows.

    >>> is_identifier("record_id", np.arange(3.0)), is_identifier("record_id", np.ones(2))
    (True, False)
    >>> counts, squares = np.arange(1000.0, 1060), np.arange(60.0) ** 2 % 89
    >>> is_identifier("lab_nr", counts), is_identifier("lab_nr", squares)
    (True, False)

    Records have such names, and whole numbers or words as values.

    >>> for name in "PatientID patientid id stayId itemid MRN subject Fallnummer Fall-Nr case_no".split():
    ...     for values in (counts, counts[::-1], np.repeat(counts[:20], 3), np.array([np.nan, *counts])):
    ...         words = pd.Categorical([f"P{k:.0f}" for k in values])
    ...         assert is_identifier(name, values) and is_identifier(name, words)
    ...     assert not is_identifier(name, counts + 0.5) and not is_identifier(name, counts % 4)
    >>> [is_identifier("id", pd.Categorical(words.split())) for words in ("1 2 P3", "1 2 2")]
    [True, False]

    Others count or measure something.

    >>> for name in ("age", "hypothyroid_years", "Opioid dose", "covid_days", "carotid_stenosis", "Triglycerid"):
    ...     assert not is_identifier(name, counts)
    >>> is_identifier("zip_code", np.cumsum(1 + counts % 7)), is_identifier("body_mass_index", counts / 7)
    (False, False)
    >>> is_identifier("visit_no", squares % 8 + 1), is_identifier("number_of_visits", squares % 8 + 1)
    (False, False)

    From 100 rows on, a count of the rows is one by any name.

    >>> draw, rows = np.random.default_rng(0), np.arange(120.0)
    >>> steps, ages = np.cumsum(draw.integers(1, 50, 120)) / 1, draw.integers(0, 90, 120) / 1
    >>> numbers = rows + 7000, -3 * rows, draw.permutation(rows), rows - rows % 25 // 24, steps
    >>> [is_identifier("any name", each) for each in numbers]
    [True, True, True, True, True]
    >>> [is_identifier("any name", each) for each in (ages, draw.permutation(rows) / 7, rows // 3)]
    [False, False, False]

    Each client may number its records.

    >>> owner, numbers = np.repeat([0, 1, 2], 20), np.tile(np.arange(20.0), 3)
    >>> is_identifier("record_id", numbers, owner), is_identifier("visit_id", np.arange(60.0) % 5, np.arange(60) // 5)
    (True, False)

    Args:
        owner: the client of each sample, if there are natural ones.
    """
    numeric = isinstance(cells, np.ndarray)
    if numeric and _has_fractions(cells):
        return False
    known = ~lacks_value(cells)
    if not known.all():
        cells = taken(cells, known)
    if numeric and len(cells) > MANY_ROWS and counts_rows(cells):
        return True
    if not is_named_as_identifier(name):
        words = "_".join(_words(name)) or name.strip()
        if not numeric or not _NUMBER.fullmatch(words):
            return False
        nameless = _NAMELESS.fullmatch(name.strip()) is not None
        index = nameless and len(cells) > 1 and bool((np.diff(cells) > 0).all())
        return index or counts_rows(cells, sorts=False)
    code, values = pd.factorize(cells)
    if len(values) == len(cells):
        return len(cells) > 1
    clients = 0 if owner is None else owner[known]
    pairs = len(np.unique(clients * len(values) + code))
    return len(values) >= FEW and pairs >= len(cells) / ROWS


def _has_fractions(values: Floats) -> bool:
    return any((part > np.floor(part)).any() for part in (values[:ROWS], values))


def is_named_as_identifier(name: str) -> bool:
    """Return whether a name says that a column identifies rows, or what several rows belong to.

    >>> [is_named_as_identifier(each) for each in ("patientid", "Fall-Nr", "subject", "number_of_visits", "acid")]
    [True, True, True, False, False]
    """
    return _IDENTIFIER.fullmatch("_".join(_words(name))) is not None


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name) if not word.isdigit()]


def counts_rows(values: Floats, sorts: bool = True) -> bool:
    """Return whether whole numbers [n] count the rows: hardly repeated, and without large gaps or sorted.

    Args:
        sorts: whether it is enough that they are sorted. A table may also be sorted by a feature, such as a zip code.
    """
    if len(values) < LEAST_ROWS:
        return False
    for part in (values[: 10 * LEAST_ROWS], values):  # most end at the first rows
        steps = np.diff(part)
        ordered = sorts and ((steps >= 0).all() or (steps <= 0).all())
        counts = np.ptp(part) < 1.5 * len(values)
        if not (ordered or counts) or len(np.unique(part)) < DISTINCT * len(part):
            return False
    return True


# --- groups ----------------------------------------------------------------------------------------------------

GROUPS = 30
"""Different values from which a column may name groups, whatever its name."""
PAIRS = 20
"""Pairs of rows with one value from which their values may show a group."""
MOST_PAIRS = 2000
"""Pairs at most that are compared."""
BLOCKS, BLOCK = 8, 500
"""Blocks of rows that are looked at first, and the rows of each."""
OTHERS = 3
"""Other columns of numbers from which their values may show a group."""
NEAR = 0.5
"""Distance of two rows of a group at most, as a share of that of two random rows."""
ALIKE = 0.95
"""Share of the other columns in which rows of a group must be near."""
CHANCE = 1e-6
"""The largest probability of equal labels by chance."""


def binds_rows(
    cells: Cells, y: Array, others: Sequence[Floats], owner: Integers | None = None
) -> bool:
    """Return whether rows with one value of a column belong together, as those of a patient do, whatever its name.

    Their labels are equal, or they are nearer than random pairs in most other columns. For numbers this must not hold
    for the next value as well: then they measure something. Values are whole numbers or words.

    >>> draw = np.random.default_rng(0)
    >>> patient = np.repeat(draw.permutation(50), 4)
    >>> label, noise = draw.integers(0, 2, 50)[patient], draw.normal(size=(3, 200))
    >>> binds_rows(patient.astype(float), label, noise), binds_rows(noise[0].round(1), label, noise)
    (True, False)

    Args:
        y: targets [n] or [n, k]. others: columns of numbers [n], NaN where one is missing.
        owner: the client of each row, since one value at two clients is two groups.
    """
    numeric = isinstance(cells, np.ndarray)
    if numeric and _has_fractions(cells):
        return False
    if len(cells) > 2 * BLOCKS * BLOCK:  # most columns bind nothing in some rows
        starts = np.arange(BLOCKS) * (len(cells) // BLOCKS)
        part = (starts[:, None] + np.arange(BLOCK)).ravel()
        own = None if owner is None else owner[part]
        parts = cells[part], y[part], [each[part] for each in others], own
        repeats = GROUPS <= pd.Series(parts[0]).nunique() <= len(part) / 2
        if repeats and not binds_rows(*parts):
            return False
    known = ~lacks_value(cells)
    code, values = pd.factorize(cells[known], sort=True)
    if len(values) < GROUPS:
        return False
    if owner is not None:
        code, values = pd.factorize(owner[known] * len(values) + code, sort=True)
    if 2 * len(values) > len(code):
        return False
    code = code.astype(np.min_scalar_type(len(values)))  # small ones are sorted faster
    order = np.argsort(code, kind="stable")
    rows, step = np.flatnonzero(known)[order], np.diff(code[order].astype(np.int64))
    draw = np.random.default_rng(0)

    some = rows[:: len(rows) // MOST_PAIRS or 1]
    random = some, draw.permutation(some)

    def distance(each: Floats, one: Integers, other: Integers) -> float:
        gaps = np.abs(each[one] - each[other])
        known = gaps[~np.isnan(gaps)]
        return float(known.mean()) if len(known) else 0.0

    def alike(one: Integers, other: Integers) -> tuple[float, bool]:
        """Return the share of pairs with one label, and whether they are near in most other columns."""
        equal = (y[one] == y[other]).reshape(len(one), -1).all(axis=1).mean()
        near = list[bool]()
        for each in others:
            far = distance(each, *random)
            if far > 0:
                near.append(distance(each, one, other) < NEAR * far)
            if near.count(False) > (1 - ALIKE) * len(others):
                break
        return equal, len(near) >= OTHERS and sum(near) >= ALIKE * len(near)

    chance, _ = alike(*random)

    def bound(steps: int) -> tuple[bool, bool]:
        """Return whether pairs of values at a distance have one label, and whether they are near."""
        at = np.flatnonzero(step == steps)
        at = draw.permutation(at[:: len(at) // MOST_PAIRS or 1])[:MOST_PAIRS]
        if len(at) < PAIRS:
            return False, False
        equal, near = alike(rows[at], rows[at + 1])
        labelled = equal >= (1 if steps == 0 else ALIKE)
        return labelled and chance ** len(at) < CHANCE, near

    same, following = bound(0), bound(1) if numeric else (False, False)
    return any(one and not other for one, other in zip(same, following, strict=True))


def by_clients(cells: Cells, owner: Integers | None) -> Integers:
    """Return a number for each value of a column at each client, -1 where one is missing."""
    cells = texts_of(cells)
    words = pd.Series(cells.categories).str.strip().replace("", None)
    code = pd.factorize(words, sort=True)[0][cells.codes]
    pairs = code if owner is None else owner * len(words) + code
    number, _ = pd.factorize(np.where(code < 0, -1, pairs), sort=True)
    return number - (code.min() < 0)
