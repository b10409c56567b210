"""One description of each column: its role and kind, what is odd, or a fault with the line that repairs it."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.columns import Column
from fl_core.data.faults import DataFault, Way
from fl_core.data.names import Names, is_number, nearly_equal
from fl_core.data.preprocessing import MOST_OUTSIDE, NO_FENCE, fences
from fl_core.data.reading import BETWEEN, LISTS, Reading
from fl_core.data.values import (
    Bools,
    Cells,
    Floats,
    Integers,
    fault_where,
    lacks_value,
    text_of,
    texts_of,
)
from fl_core.errors import UsageError, check_known, listing, plural, spelled
from fl_core.rows import MULTILABEL, SURVIVAL

NUMBER, YES_NO, WORDS = "number", "yes/no", "words"
LEFT_OUT, REFUSED = "left out", "refused"
MOST_WORDS = 100
"""The maximum number of different words in a column."""
FEW_WORDS = 10
"""The number of different words that any column may have, even a short one."""
SOME = 0.05
"""Share of numbers in a column of text from which it is refused."""
STRAY = 5
"""Different words among numbers up to which they may be marks of missing cells."""
DIFFERENT = 6
"""The number of different numbers from which words with a number in them are suspicious."""
EXACT = 2**53
"""The largest whole number up to which float64 keeps all digits."""


@dataclass(eq=False)
class Described:
    """How a column is taken.

    Attributes:
        name: of the column.
        kind: number, words, refused or left out; or its role: client, group, label, text.
        cells: float64, or text.
        odd: what is unusual about it.
        fault: why it is refused, or None.
        emptied: where the line of its fault leaves no value, or None.
    """

    name: str
    kind: str
    cells: Cells
    odd: list[str] = field(default_factory=list)
    fault: DataFault | None = None
    emptied: Bools | None = None

    @cached_property
    def lacking(self) -> Bools:
        """Return where it has no value."""
        return lacks_value(self.cells)

    @property
    def is_feature(self) -> bool:
        """Return whether it makes inputs of a model."""
        return self.kind in (NUMBER, WORDS)

    def column(self) -> Column:
        """Return its record. Numbers and words of two values are yes/no."""
        if self.kind == LEFT_OUT:
            return Column(self.name, LEFT_OUT, odd="; ".join(self.odd))
        example, inputs = "", 0
        if len(self.cells) and not self.lacking.all():
            example = text_of(self.cells[int(np.argmin(self.lacking))]).strip()
        kind = self.kind
        if self.is_feature:
            inputs = 1 if kind == NUMBER else len(words_of(self.cells)) + 1
            if self._has_two_values():
                kind = YES_NO
        missing = int(np.count_nonzero(self.lacking))
        return Column(self.name, kind, inputs, missing, example, "; ".join(self.odd))

    def _has_two_values(self) -> bool:
        if isinstance(self.cells, np.ndarray):
            first = self.cells[:1000][~self.lacking[:1000]]
            if not np.isin(first, (0, 1)).all():
                return False
            return bool(np.isin(self.cells[~self.lacking], (0, 1)).all())
        return len(words_of(self.cells)) == 2


def words_of(cells: Cells) -> Names:
    """Return the words of a column; an empty cell is a word of its own."""
    return tuple(sorted({word.strip() for word in texts_of(cells).categories}))


# --- roles -----------------------------------------------------------------------------------------------------

LIKELY = {
    "label_column": "label outcome target class diagnosis died death event status result disease",
    "client_column": "client hospital site center centre clinic ward institution group region",
    "text_column": "text note report sentence comment message",
    "group_column": "patient subject person participant",
}
"""Words in the names of columns that often have a role, to name candidates where a role has no column."""
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")


def likely_columns(role: str, asked: str, header: Sequence[str]) -> list[str]:
    """Return up to three columns that may have a role: the nearest name, and those whose name says it.

    >>> likely_columns("label_column", "labl", ["age", "died", "label", "hospital"])
    ['label', 'died']
    """
    words = {word.removesuffix("s") for word in LIKELY[role].split()}
    near = difflib.get_close_matches(asked, header, n=1, cutoff=0.7)
    named = [
        name
        for name in header
        if {word.lower().removesuffix("s") for word in _PARTS.findall(name)} & words
    ]
    return list(dict.fromkeys([*near, *named]))[:3]


def roles_of(
    header: Sequence[str], how: Reading, where: str
) -> tuple[dict[str, str], list[DataFault]]:
    """Return the role of each column that has one, and faults of roles without a column.

    Roles are client, group, text, label and left out. All other columns are features.

    Raises:
        UsageError: a named column is not there, or has two roles.
    """
    roles: dict[str, str] = {}
    faults = _label_faults(header, how, where)
    named = [(name, "label", "label_column") for name in how.labels]
    named += [
        (how.client_column, "client", "client_column"),
        (how.text_column, "text", "text_column"),
        (how.group_column or "", "group", "group_column"),
    ]
    for name, role, key in named:
        if name in roles:
            raise UsageError(
                f"{where}: {roles[name]} and {role} must be different columns; got {name!r} for both."
            )
        if name in header:
            roles[name] = role
        elif name and role != "label" and name != getattr(Reading, key):
            likely = likely_columns(key, name, header)
            ways: list[Way | str] = [("Name it", {key: each}) for each in likely]
            rule = f"{key} must be one of the {len(header)} columns of {where}; got {name!r}."
            faults.append(DataFault(rule, *(ways or [f"It has {listing(header)}."])))
    for key in LISTS:
        for name in getattr(how, key) or ():
            check_known(f"column of {where} ({key})", name, header)
            if name in roles and key != "categories":
                raise UsageError(
                    f"{where}: {key} must name features; got {name!r}, the {roles[name]}."
                )
    if "text" in roles.values():
        how.check_unasked(f"{where} holds texts", "columns", "exclude_columns")
        kept: Collection[str] = ()
    else:
        kept = {*(header if how.columns is None else how.columns)}
        kept -= {*(how.exclude_columns or ())}
    left_out = [name for name in header if name not in kept and name not in roles]
    return roles | dict.fromkeys(left_out, LEFT_OUT), faults


def _label_faults(header: Sequence[str], how: Reading, where: str) -> list[DataFault]:
    """Return what is wrong with the names of the label columns."""
    labels = how.labels
    several = {SURVIVAL: "TIME,EVENT", MULTILABEL: "LABEL,LABEL,..."}.get(how.task)
    most = 2 if how.task == SURVIVAL else len(header)
    if several and not 2 <= len({*labels}) == len(labels) <= most:
        rule = f"label columns of task {how.task} must be {several}; got {how.label_column!r}."
        way = f"Name them: {spelled(label_column=several)}."
        return [DataFault(f"{where}: {rule}", way)]
    lacking = [name for name in labels if name not in header]
    if not lacking:
        return []
    rule = f"label_column must be one of the {len(header)} columns of {where}; got {lacking[0]!r}."
    parts = lacking[0].split(BETWEEN)
    if len(parts) > 1 and {*parts} <= {*header}:
        ways: list[Way | str] = [
            ("Predict several labels", {"task": MULTILABEL}),
            ("Predict a time until an event", {"task": SURVIVAL}),
        ]
        return [DataFault(rule, *ways)]
    ways = [f"It has {listing(header)}."]
    if len(labels) == 1:
        likely = likely_columns("label_column", lacking[0], header)
        clients = likely_columns("client_column", how.client_column, header)
        also = {}
        if clients and how.client_column not in header:
            also = {"client_column": clients[0]}
        ways = [("Name it", {"label_column": name, **also}) for name in likely] or ways
    return [DataFault(rule, *ways)]


# --- cells -----------------------------------------------------------------------------------------------------


def take(name: str, column: pd.Series, how: Reading) -> Described:
    """Return how a feature is taken: as numbers, as words, or refused with its repair.

    >>> take("dose", pd.Series(["1", "2", "unknown"]), Reading()).fault.line
    "table['dose'] = pd.to_numeric(table['dose'].replace(['unknown'], None))"
    """
    types, kind = pd.api.types, column.dtype
    if name in (how.categories or ()):
        return _worded(name, texts_of(column), how)
    days = "/ pd.Timedelta(days=1)"
    if isinstance(kind, pd.DatetimeTZDtype) or types.is_datetime64_dtype(kind):
        line = f"table[{name!r}] = (pd.to_datetime(table[{name!r}], utc=True) - {DAY_0}) {days}"
        return _refused(
            name, column, "cells must be numbers or words; got dates.", line
        )
    if types.is_timedelta64_dtype(kind):
        line = f"table[{name!r}] = table[{name!r}] {days}"
        return _refused(
            name, column, "cells must be numbers or words; got durations.", line
        )
    if types.is_complex_dtype(kind):
        rule = f"cells must be real numbers; got {kind}."
        return _refused(name, column.map(str), rule, dropping([name]))
    if types.is_object_dtype(kind) and types.infer_dtype(column) in _NUMERIC:
        column = pd.to_numeric(column.where(column.notna(), np.nan))
        if types.is_object_dtype(column.dtype):  # whole numbers beyond 64 bits
            return _inexact(name, column, how)
        kind = column.dtype
    if types.is_numeric_dtype(kind):
        return _numbers(name, column, how)
    try:
        cells = texts_of(column)
    except DataFault as fault:
        asked = DataFault(fault.rule, row=fault.row, line=dropping([name]))
        return Described(name, REFUSED, np.full(len(column), np.nan), fault=asked)
    return _texts(name, cells, how)


_NUMERIC = ("integer", "floating", "mixed-integer-float", "decimal", "boolean")
DAY_0 = "pd.Timestamp('1970-01-01 12:00', tz='UTC')"
"""Noon, so that days have a fraction, and no date looks like the number of its row."""


def dropping(names: Sequence[str]) -> str:
    """Return the line that leaves columns out."""
    return f"table = table.drop({list(names)!r}, axis=1)"


def _refused(
    name: str, column: pd.Series, rule: str, line: str, *ways: Way
) -> Described:
    return Described(
        name, REFUSED, texts_of(column), fault=DataFault(rule, *ways, line=line)
    )


def _numbers(name: str, column: pd.Series, how: Reading) -> Described:
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    found = Described(name, NUMBER, values)
    if not len(values) or found.lacking.all():
        return found
    low, high = np.nanmin(values), np.nanmax(values)
    largest = max(-low, high)
    if largest > np.finfo(np.float32).max:
        beyond = np.abs(values) > np.finfo(np.float32).max
        got = values[int(np.argmax(beyond))]
        line = f"table = table[~(table[{name!r}].abs() > 3.4e38)]"
        found.fault = fault_where(
            beyond, got, "the value must be a finite float32", line=line
        )
        found.kind = REFUSED
    elif largest >= EXACT and bool((values[~found.lacking] % 1 == 0).all()):
        if pd.api.types.is_integer_dtype(column.dtype) and largest == EXACT:
            exact = column.abs() <= EXACT
            if bool(exact.all()):
                return found
        return _inexact(name, column, how)
    return found


def _inexact(name: str, column: pd.Series, how: Reading) -> Described:
    cells = texts_of(column)
    ways: list[Way] = []
    if not _worded(name, cells, how).fault:
        ways.append(("Keep each as a word", {"categories": [name]}))
    rule = (
        f"whole numbers must be at most 2**53 to keep their digits; got {cells[0]!r}."
    )
    line = "" if ways else dropping([name])
    fault = DataFault(rule, *ways, line=line)
    return Described(name, REFUSED, cells, fault=fault)


def _texts(name: str, cells: pd.Categorical, how: Reading) -> Described:
    """Return how a column of text is taken: words, if hardly any cell is a number or a date."""
    counts = np.bincount(cells.codes, minlength=len(cells.categories))
    words = pd.Series(cells.categories, dtype=object)
    known = (words.str.strip() != "").to_numpy()
    if not known.any():
        return Described(name, NUMBER, np.full(len(cells), np.nan))
    values = pd.to_numeric(words, errors="coerce").to_numpy(np.float64)
    numeric = ~np.isnan(values) & known
    share = counts[numeric].sum() / counts[known].sum()
    found = Described(name, REFUSED, cells)
    distinct = list(words[known])
    if share == 1:
        rule = f"cells must be stored as numbers, or named as categories; got {distinct[0]!r}."
        line = f"table[{name!r}] = pd.to_numeric(table[{name!r}])"
        found.fault = DataFault(rule, *_as_words(name, cells, how), line=line)
    elif fault := dates_fault(name, distinct):
        found.fault = fault
    elif spelt := spelled_numbers(name, distinct):
        found.fault = spelt.fault
        values = np.array([spelt.values.get(word.strip(), np.nan) for word in words])
        found.emptied = (np.isnan(values) & known)[cells.codes]
        meant = Described(name, NUMBER, values[cells.codes])
        if spelt.values and identifies(meant):
            rule = f"{spelt.fault.rule[:-1]}, that are different in every row."
            found.fault = DataFault(rule, line=dropping([name]))
    elif share >= SOME:
        _refuse_mixture(found, numeric, how)
    else:
        count = int(counts[numeric].sum())
        odd = [f"{plural(count, 'cell')} of numbers"] if count else []
        return _worded(name, cells, how, odd)
    return found


def _refuse_mixture(found: Described, numeric: Bools, how: Reading) -> None:
    """Add the fault of numbers among words: marks of missing cells, or codes that are words.

    Args:
        numeric: which words are numbers.
    """
    cells, name = texts_of(found.cells), found.name
    others = [
        not word.strip() or bool(n)
        for word, n in zip(cells.categories, numeric, strict=True)
    ]
    bad = ~np.array(others)[cells.codes]
    strays = sorted({*cells[bad]})
    ways: list[Way | str] = [*_as_words(name, cells, how)]
    line = "" if ways else dropping([name])
    if are_marks(strays) and 2 * bad.sum() <= len(bad):
        line = f"table[{name!r}] = pd.to_numeric(table[{name!r}].replace({strays!r}, None))"
        found.emptied = bad
    rule = "the cell must be a number, or the column be named as words"
    got = listing(map(repr, strays), 3)
    if line == dropping([name]):
        ways = ["Correct the cells."]
    found.fault = fault_where(bad, got, rule, *ways, line=line)


def are_marks(words: Sequence[str]) -> bool:
    """Return whether a few words among numbers may be marks of missing cells."""
    return len(words) <= STRAY and not any(map(str.isdigit, "".join(words)))


def _as_words(name: str, cells: pd.Categorical, how: Reading) -> list[Way]:
    """Return the way to take cells as words, if they are few and differ."""
    if _worded(name, cells, how).fault:
        return []
    return [("Take them as words", {"categories": [name]})]


def _worded(
    name: str, cells: pd.Categorical, how: Reading, odd: Sequence[str] = ()
) -> Described:
    """Return words, if they come again and differ by more than case or blanks."""
    found = Described(name, WORDS, cells, list(odd))
    count = len(words_of(cells))
    asked = name in (how.columns or ()) or name in (how.categories or ())
    most = MOST_WORDS if asked else min(MOST_WORDS, max(FEW_WORDS, len(cells) // 2))
    if count > most:
        found.fault = DataFault(
            f"there must be numbers, or words that come again ({MOST_WORDS} at most); got {count:,} different words.",
            ("Leave them out", {"exclude_columns": [name]}),
            ("Read these texts alone", {"text_column": name}),
            line=dropping([name]),
        )
    else:
        found.fault = spellings_fault(name, cells.categories, "words")
    if found.fault:
        found.kind = REFUSED
    return found


def spellings_fault(name: str, words: Sequence[str], what: str) -> DataFault | None:
    """Return the fault of words that differ by case, blanks or Unicode's form only, or None."""
    groups = nearly_equal([word for word in words if word.strip()])
    if not groups:
        return None
    others: dict[str, str] = {}
    for group in groups:
        kept = max(group).strip()  # small letters come last
        others |= {word: kept for word in sorted(group) if word != kept}
    alike = " and ".join(map(repr, sorted(groups[0])))
    rule = f"{what} must not differ by case or blanks only; got {alike}."
    line = f"table[{name!r}] = table[{name!r}].replace({others!r})"
    return DataFault(rule, line=line)


def forms_fault(
    name: str, column: pd.Series, cells: pd.Categorical
) -> DataFault | None:
    """Return the fault of a column of text with one word in two of Unicode's forms, or None."""
    known = [word for word in cells.categories if word]
    if all(map(str.isascii, known)) or column.nunique() == len(known):
        return None
    rule = "words must not differ by Unicode's form only; got two forms of one."
    line = f"table[{name!r}] = table[{name!r}].str.normalize('NFC')"
    return DataFault(rule, line=line)


# --- numbers and dates in another spelling -----------------------------------------------------------------------

_AFFIXED = re.compile(
    r"(?P<before>[^\w\s.,+\u2212-]*)\s*[+\u2212-]?(?P<number>[0-9]{1,3}(?:['\s][0-9]{3})+(?:[.,][0-9]*)?|[0-9][0-9.,]*)\s*"
    r"(?P<after>[^\W\d]*|[^\w\s]*|[^\d\s.,+-]+)"
)
_DATE = re.compile(
    r"(?:[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{1,2}([-./])[0-9]{1,2}\1(?:[0-9]{2}){1,2}"
    r"|[0-9]{1,2}[- ]?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[- ]?(?:[0-9]{2}){1,2})"
    r"(?:[ T][0-9]{1,2}:[0-9]{2}.*)?|(?:-?[0-9]+ days?)? ?(?:\+?[0-9]+:[0-9]{2}(?::[0-9.]+)?)?",
    re.IGNORECASE,
)
DATE_FORMS = (
    *("ISO8601", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y"),
    *("%d-%m-%Y", "%m-%d-%Y", "%d-%b-%Y", "%d%b%Y"),
)
"""The forms of dates."""
SPANS = {
    r".*day.*": "",
    r"[0-9]+:[0-5][0-9]": ":00",
    r"[0-9]+:[0-5][0-9]:[0-5][0-9]": "",
}
"""The forms of times and durations, and what each lacks."""
SIGNS = (
    (".", ""),
    (",", ""),
    (".", ","),
    (",", "."),
    (".", "'"),
    (",", "'"),
    (".", " "),
    (",", " "),
)
"""Decimal signs, each with a sign between groups of three digits."""
SAMPLE = 2000
"""Words or rows that are looked at first."""


def dates_fault(name: str, words: Sequence[str]) -> DataFault | None:
    """Return the fault of a column of dates or times as text, with the line that makes days of them, or None.

    >>> dates_fault("day", [f"{k}.1.2024" for k in range(1, 20)]).line
    "table['day'] = (pd.to_datetime(table['day'], format='%d.%m.%Y', utc=True) - ...) / pd.Timedelta(days=1)"
    """
    distinct = {word.strip() for word in words}
    some = list(distinct)[:SAMPLE]
    if sum(1 for word in some if _DATE.fullmatch(word)) <= least_alike(some):
        return None
    cells, column = pd.Series(list(distinct)), f"table[{name!r}]"
    lines: list[str] = []
    seen: list[pd.Series] = []
    for form, lacking in SPANS.items():
        if cells.str.fullmatch(form).all():
            added = f" + {lacking!r}" if lacking else ""
            lines.append(f"pd.to_timedelta({column}{added})")
            seen.append(pd.Series([]))
            break
    for form in DATE_FORMS:
        found = pd.to_datetime(cells, format=form, utc=True, errors="coerce")
        if found.isna().any() or any(found.equals(other) for other in seen):
            continue
        seen.append(found)
        lines.append(f"(pd.to_datetime({column}, format={form!r}, utc=True) - {DAY_0})")
    got = listing(map(repr, sorted(distinct)), 3)
    rule = f"cells must be numbers or words; got {got}, dates or times."
    if len(lines) == 1:
        line = f"{column} = {lines[0]} / pd.Timedelta(days=1)"
        return DataFault(rule, line=line)
    if lines:
        rule = f"{rule[:-1]} that fit {len(lines)} forms."
    return DataFault(rule, "Write 2024-12-31.", line=dropping([name]))


def least_alike(words: Collection[str]) -> float:
    """Return how many of some words must be alike at least for the column to be so."""
    return max(len(words) / 2, DIFFERENT - 1)


class Spelled(NamedTuple):
    """The fault of numbers in another spelling, and the numbers of their words, as far as they are certain."""

    fault: DataFault
    values: Mapping[str, float]


def spelled_numbers(name: str, words: Sequence[str]) -> Spelled | None:
    """Return the fault of a column of numbers with other signs or with a unit, or None.

    Most of the words must be a number with one fixed affix, comma, percent or comparison sign, and
    :data:`DIFFERENT` of them must differ. Codes such as ``NYHA2`` and ``ward 3`` are words.

    >>> spelled_numbers("v", [f"{k},5" for k in range(9)]).fault.line
    "table['v'] = pd.to_numeric(table['v'].astype(str).str.replace(',', '.'))"
    >>> spelled_numbers("v", [f"{k} mg" for k in range(9)]).fault.line
    "table['v'] = pd.to_numeric(table['v'].astype(str).str.replace('mg', ''))"
    """
    distinct = sorted({word.strip() for word in words})
    matches = {word: _AFFIXED.fullmatch(word) for word in distinct}
    affixes = Counter((m["before"], m["after"]) for m in matches.values() if m)
    if not affixes:
        return None
    affix, count = affixes.most_common(1)[0]
    alike = [w for w, m in matches.items() if m and (m["before"], m["after"]) == affix]
    signed = [word for word in alike if not is_number(word)]
    if count <= least_alike(distinct) or len(signed) < len(alike) / 4:
        return None
    got = listing(map(repr, distinct), 3)
    rule = f"cells must be numbers or words; got {got}, numbers with "
    strays = [w for w in distinct if w not in alike and not is_number(w)]
    replaced = f".replace({strays!r}, None)" if strays else ""
    signs = f"{''.join(affix)!r}" if any(affix) else "other signs"
    readings = [("", "")]
    if any(affix):
        bare = [w.replace(affix[0], "").replace(affix[1], "") for w in alike]
        if not all(map(is_number, bare)):
            readings = []
    else:
        readings = signs_of([w for w in distinct if w not in strays])
    if len(readings) != 1 or (strays and not are_marks(strays)):
        way = "Write plain numbers."
        return Spelled(DataFault(f"{rule}{signs}.", way, line=dropping([name])), {})
    decimal, thousands = readings[0]
    steps = [(sign, "") for sign in (*affix, thousands) if sign]
    if decimal == ",":
        steps.append((",", "."))
    if any("\u2212" in word for word in alike):
        steps.append(("\u2212", "-"))
    changed = "".join(
        ".str.replace(r'\\s', '', regex=True)"
        if old == " "
        else f".str.replace({old!r}, {new!r})"
        for old, new in steps
    )
    line = f"table[{name!r}] = pd.to_numeric(table[{name!r}]{replaced}.astype(str){changed})"
    values = {
        word: number_of(word, decimal, (*affix, thousands))
        for word in distinct
        if word not in strays
    }
    return Spelled(DataFault(f"{rule}{signs}.", line=line), values)


def number_of(word: str, decimal: str, removed: Sequence[str]) -> float:
    """Return the number of a word without some signs.

    >>> number_of("1.250,5 mg", ",", (".", "mg"))
    1250.5
    """
    for sign in removed:
        word = re.sub(r"\s", "", word) if sign == " " else word.replace(sign, "")
    return float(word.replace(decimal or ".", ".").replace("\u2212", "-"))


def signs_of(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return the signs with which all words are numbers, without signs that give the same numbers.

    >>> signs_of(["1.250,5", "3"]), signs_of(["1,250"]), signs_of(["1 000.5"])
    ([(',', '.')], [(',', ''), ('.', ',')], [('.', ' ')])
    """
    found: list[tuple[str, str]] = []
    seen: list[list[float]] = []
    for decimal, thousands in SIGNS:
        point, between = re.escape(decimal), re.escape(thousands)
        if thousands == " ":
            between = r"\s"
        whole = f"(?:[0-9]{{1,3}}(?:{between}[0-9]{{3}})+|[0-9]+)" if thousands else "[0-9]+"  # fmt: skip
        form = re.compile(f"[+\u2212-]?(?:{whole}(?:{point}[0-9]*)?|{point}[0-9]+)")
        if not all(map(form.fullmatch, words)):
            continue
        values = [
            number_of(word, decimal, [thousands] if thousands else []) for word in words
        ]
        if values not in seen:
            seen.append(values)
            found.append((decimal, thousands))
    return found


# --- identifiers -------------------------------------------------------------------------------------------------

IDENTIFIERS = (
    *("id", "ids", "identifier", "mrn", "ssn", "barcode", "key", "index", "nr", "no"),
    *("nbr", "number", "patient", "record", "case", "subject", "person", "participant"),
    *("encounter", "uuid"),
)
"""Last words of the names of columns that identify rows, or what several rows belong to."""
FEW = 10
"""Different values up to which a column may be a feature, such as a visit's number."""
ROWS = 20
"""Rows for each value, at most, of a column that numbers what they belong to, and rows from which numbers may."""
MANY_ROWS = 100
"""Rows from which a column of any name is refused as a count of them."""
DISTINCT = 0.95
"""Share of distinct values from which a column counts as one without repeats."""
LARGE = 1000
"""Whole numbers above this that are different in every row identify it."""


def is_named_as_identifier(name: str) -> bool:
    """Return whether the last word of a name says that a column identifies rows.

    >>> [is_named_as_identifier(each) for each in ("patientid", "Fall-Nr", "subject", "number_of_visits", "acid")]
    [True, True, True, False, False]
    """
    words = [word.lower() for word in _PARTS.findall(name) if not word.isdigit()]
    last = words[-1] if words else ""
    return last in IDENTIFIERS or (
        last.endswith("id") and last.removesuffix("id") in IDENTIFIERS
    )


def identifies(column: Described, owner: Integers | None = None) -> bool:
    """Return whether a column numbers the rows or what they belong to.

    Whole numbers that are different in every row do, above 1,000 or as a count of the rows. So does a column with such
    a name that has many values.

    >>> rows = np.arange(120.0)
    >>> [identifies(Described("v", NUMBER, cells)) for cells in (rows, 7 * rows[::-1] + 4000, rows // 3, rows / 7)]
    [True, True, False, False]

    Args:
        owner: the client of each row, which may number its own records.
    """
    cells = column.cells
    known = ~column.lacking
    if isinstance(cells, np.ndarray):
        if _has_fractions(cells):
            return False
        values = cells if known.all() else cells[known]
        if len(values) >= ROWS and np.abs(values[: 10 * ROWS]).max() > LARGE:
            first = values[: 10 * ROWS]
            if len(np.unique(first)) == len(first) and pd.Series(values).is_unique:
                return True
        if len(values) > MANY_ROWS and counts_rows(values):
            return True
    if not is_named_as_identifier(column.name):
        return False
    code, values = pd.factorize(cells[known])
    clients = 0 if owner is None else owner[known]
    pairs = len(np.unique(clients * len(values) + code))
    return len(values) >= FEW and pairs >= len(code) / ROWS


def _has_fractions(values: Floats) -> bool:
    return any((part > np.floor(part)).any() for part in (values[:ROWS], values))


def counts_rows(values: Floats) -> bool:
    """Return whether whole numbers [n] count the rows: hardly repeated, and without large gaps or sorted."""
    for part in (values[: 10 * ROWS], values):  # most end at the first rows
        steps = np.diff(part)
        ordered = bool((steps >= 0).all() or (steps <= 0).all())
        counts = np.ptp(part) < 1.5 * len(values)
        if not (ordered or counts) or len(np.unique(part)) < DISTINCT * len(part):
            return False
    return True


def by_clients(cells: Cells, owner: Integers | None) -> Integers:
    """Return a number for each value of a column at each client, -1 where one is missing."""
    cells = texts_of(cells)
    words = pd.Series(cells.categories).str.strip().replace("", None)
    code = pd.factorize(words, sort=True)[0][cells.codes]
    pairs = code if owner is None else owner * len(words) + code
    number, _ = pd.factorize(np.where(code < 0, -1, pairs), sort=True)
    return number - (code.min() < 0)


# --- oddities: one function each ---------------------------------------------------------------------------------

CLEAR = 0.99
"""Share of labels from which a column gives them away."""
LEVELS = 20
"""Different values up to which each has its own label."""
KNOWN = 10
"""Values of a client from which they are compared with the others'."""


def outside_fences(cells: Floats, owner: Integers | None) -> str:
    """Return what is said of a few numbers far outside of all clients' quartiles, or an empty text."""
    clients = np.zeros(len(cells), dtype=np.int64) if owner is None else owner
    some = slice(
        None, None, len(cells) // SAMPLE or 1
    )  # most are within half of theirs
    low, high, _ = fences(cells[some, None], clients[some])
    margin = (high - low) / 4
    if (
        low[0] > -NO_FENCE
        and np.fmin.reduce(cells) > low[0] + margin[0]
        and np.fmax.reduce(cells) < high[0] - margin[0]
    ):
        return ""
    low, high, outside = fences(cells[:, None], clients)
    count = int(outside[0])
    if not 0 < count <= MOST_OUTSIDE * np.count_nonzero(~np.isnan(cells)):
        return ""
    ends = cells[(cells < low[0]) | (cells > high[0])]
    return f"{ends[0]:g} far from the others in {plural(count, 'cell')}: missing?"


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
    cells: Cells,
    y: NDArray[Any],
    others: Sequence[Floats],
    owner: Integers | None = None,
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
