"""One description of each column: its role and kind, what is odd, or a fault with the line that repairs it."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.columns import Column
from fl_core.data.faults import DataFault, Way
from fl_core.data.names import Names, composed, is_number, nearly_equal
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
"""The maximum number of different words in a column of features."""
FEW_WORDS = 10
"""The number of different words that any column may have, even a short one."""
SOME = 0.05
"""Share of numbers among the filled cells of a column of text, from which it is
refused."""
TRUTHS = {"true", "false", "yes", "no"}
"""Words that are no marks of a missing cell, in small letters."""
STRAY = 5
"""The maximum number of different words among numbers that may be marks of missing
cells."""
DIFFERENT = 6
"""The minimum number of different words of one form, such as dates, that show this
form."""
EXACT = 2**53
"""The largest whole number up to which float64 keeps all digits."""
UNITS = 3
"""The maximum number of different units in a column of measurements with several
units."""
SAMPLE = 2000
"""Words or rows that are looked at first."""


@dataclass(eq=False)
class Described:
    """A column of a table with its role or kind, and the fault if it is refused.

    Attributes:
        name: the column's name.
        kind: number, words, refused or left out; or its role: client, group, label, text.
        cells: float64 [n], NaN where one is missing; or text, empty where one is
            missing. They are all NaN for a column that is left out. A column with a role
            whose cells cannot be read has no cells.
        odd: what is unusual about the column; empty if nothing is.
        fault: why the column is refused, or None.
        emptied: the rows that the repair of the fault leaves without a value, bool [n].
            None means that no such rows are known.
    """

    name: str
    kind: str
    cells: Cells
    odd: list[str] = field(default_factory=list)
    fault: DataFault | None = None
    emptied: Bools | None = None

    @cached_property
    def lacking(self) -> Bools:
        """Return whether each cell has no value, bool [n]."""
        return lacks_value(self.cells)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Return the least and the largest of a column's numbers; both are NaN if all are missing."""
        return float(np.fmin.reduce(self.cells)), float(np.fmax.reduce(self.cells))

    @property
    def is_feature(self) -> bool:
        """Return whether the column makes inputs of a model."""
        return self.kind in (NUMBER, WORDS)

    def refused(self, fault: DataFault) -> Described:
        """Mark this column as refused for a fault, and return it, not a copy."""
        self.kind, self.fault = REFUSED, fault
        return self

    def column(self) -> Column:
        """Return the column's line for display.

        Features of the two numbers 0 and 1 are shown as yes/no, and so are those of two
        words. Missing cells do not count.
        """
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
        if not isinstance(self.cells, np.ndarray):
            return len({*words_of(self.cells)} - {""}) == 2
        if self.ends != (0, 1):
            return False
        # most columns end at the first rows
        first = self.cells[:SAMPLE][~self.lacking[:SAMPLE]]
        if not np.isin(first, (0, 1)).all():
            return False
        return bool(np.isin(self.cells[~self.lacking], (0, 1)).all())


def words_of(cells: Cells) -> Names:
    """Return the sorted different words of a column, without blanks around them; an empty cell counts as a word."""
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


def likely_columns(role: str, wanted: str, header: Sequence[str]) -> list[str]:
    """Return up to three columns that may have a role: the name nearest to ``wanted``, and usual names of the role.

    >>> likely_columns("label_column", "labl", ["age", "died", "label", "hospital"])
    ['label', 'died']

    Args:
        role: the setting of the role, a key of :data:`LIKELY`.
        wanted: the name that this setting has.
        header: the names of the table's columns.
    """
    words = {word.removesuffix("s") for word in LIKELY[role].split()}
    nearest_names = difflib.get_close_matches(wanted, header, n=1, cutoff=0.7)
    named = [
        name
        for name in header
        if {word.lower().removesuffix("s") for word in _PARTS.findall(name)} & words
    ]
    return list(dict.fromkeys([*nearest_names, *named]))[:3]


def roles_of(
    header: Sequence[str], how: Reading, where: str
) -> tuple[dict[str, str], list[DataFault]]:
    """Return the role of each column that has one, and faults of the settings that give roles.

    A role whose column is missing is a fault, and so is a wrong number of label columns
    for survival or multilabel. A client or text column of the default name may be
    missing without a fault. Roles are client, group, text, label and left out. Columns
    without a role are features. In a table of texts all of them are left out.

    Args:
        header: the names of the table's columns.
        how: the settings that name columns.
        where: the table's name, for messages.

    Raises:
        UsageError: a column has two roles, a list of columns names one that is not
            there, ``columns`` or ``exclude_columns`` name one with a role, or one of
            these two is set for a table of texts.
    """
    roles: dict[str, str] = {}
    faults: list[DataFault] = []
    form_of_labels = {SURVIVAL: "TIME,EVENT", MULTILABEL: "LABEL,LABEL,..."}.get(
        how.task
    )
    most = 2 if how.task == SURVIVAL else len(header)
    named = [(name, "label") for name in how.labels]
    if form_of_labels and not 2 <= len({*how.labels}) == len(how.labels) <= most:
        rule = f"label columns of task {how.task} must be {form_of_labels}; got {how.label_column!r}."
        way = f"Name them: {spelled(label_column=form_of_labels)}."
        faults.append(DataFault(f"{where}: {rule}", way))
        named = []
    named += [(how.client_column, "client"), (how.text_column, "text")]
    named.append((how.group_column or "", "group"))
    for name, role in named:
        key = f"{role}_column"
        if name in roles:
            raise UsageError(
                f"{where}: {roles[name]} and {role} must be different columns; got {name!r} for both."
            )
        if name in header:
            roles[name] = role
        elif name and (role == "label" or name != getattr(Reading, key)):
            faults.append(_lacking_fault(key, name, header, how, where))
    for key in LISTS:
        for name in getattr(how, key) or ():
            check_known(f"column of {where} ({key})", name, header)
            if name in roles and key != "categories":
                raise UsageError(
                    f"{where}: {key} must name features; got {name!r}, the {roles[name]}."
                )
    features: Collection[str] = ()
    if "text" in roles.values():
        how.check_unasked(f"{where} holds texts", "columns", "exclude_columns")
    else:
        features = {*(header if how.columns is None else how.columns)}
        features -= {*(how.exclude_columns or ())}
    left_out = [name for name in header if name not in features and name not in roles]
    return roles | dict.fromkeys(left_out, LEFT_OUT), faults


def _lacking_fault(
    key: str, name: str, header: Sequence[str], how: Reading, where: str
) -> DataFault:
    """Return the fault of a role whose column is missing, with likely columns.

    Args:
        key: the setting of the role, such as ``client_column``.
        name: the column's name in this setting.
        header: the names of the table's columns.
        how: the settings.
        where: the table's name, for the message.
    """
    rule = f"{key} must be one of the {len(header)} columns of {where}; got {name!r}."
    parts = name.split(BETWEEN)
    ways: list[Way | str] = []
    if key == "label_column" and len(parts) > 1 and {*parts} <= {*header}:
        ways = [
            ("Predict several labels", {"task": MULTILABEL}),
            ("Predict a time until an event", {"task": SURVIVAL}),
        ]
    elif key != "label_column" or len(how.labels) == 1:
        settings = {}
        clients = likely_columns("client_column", how.client_column, header)
        if key == "label_column" and clients and how.client_column not in header:
            settings = {"client_column": clients[0]}
        likely = likely_columns(key, name, header)
        ways = [("Name it", {key: candidate, **settings}) for candidate in likely]
        if settings and not ways:
            rule += f" It has {listing(header)}."
            ways = [("Name it, and the clients", settings)]
    return DataFault(rule, *(ways or [f"It has {listing(header)}."]))


# --- cells -----------------------------------------------------------------------------------------------------

_NUMERIC = ("integer", "floating", "mixed-integer-float", "decimal", "boolean")
DAY = "pd.Timedelta(days=1)"
DAY_0 = "pd.Timestamp('1970-01-01 12:00', tz='UTC')"
FIRST_DAY, LAST_DAY = 19_000_101, 21_001_231
"""The least and the largest whole number that may be a date, as 20240131 is."""
NOON = pd.Timestamp("1970-01-01 12:00", tz="UTC")
"""Noon, so that days have a fraction, and no date looks like the number of its row."""


def take(name: str, column: pd.Series, how: Reading) -> Described:
    """Return the description of a column of features: numbers, words, or refused with a repair.

    A column in ``categories`` of the settings ``how`` is taken as words, or refused if
    it has too many.

    >>> take("dose", pd.Series(["1", "2", "unknown"]), Reading()).fault.line
    "table['dose'] = pd.to_numeric(table['dose'].replace(['unknown'], None))"

    Raises:
        DataFault: a cell of a column in ``categories`` is a list, an array or a
            dictionary. In other columns this is the description's fault.
    """
    types, cell = pd.api.types, f"table[{name!r}]"
    if name in (how.categories or ()):
        return _of_text(name, column, how, _worded)
    stored = {  # what dtypes hold that are neither numbers nor words
        "M": ("dates", f"{cell} = (pd.to_datetime({cell}, utc=True) - {DAY_0}) / {DAY}"),
        "m": ("durations", f"{cell} = {cell} / {DAY}"),
        "c": ("complex numbers", dropping([name])),
    }  # fmt: skip
    if column.dtype.kind in stored:
        got, line = stored[column.dtype.kind]
        fault = DataFault(f"cells must be numbers or words; got {got}.", line=line)
        return Described(name, REFUSED, texts_of(column), fault=fault)
    if types.is_object_dtype(column.dtype) and types.infer_dtype(column) in _NUMERIC:
        try:
            column = pd.to_numeric(column.where(column.notna(), np.nan))
        except OverflowError:  # beyond float64
            return _inexact(name, column, how)
        if types.is_object_dtype(column.dtype):  # whole numbers beyond 64 bits
            return _inexact(name, column, how)
    if types.is_numeric_dtype(column.dtype):
        return _numbers(name, column, how)
    return _of_text(name, column, how, _texts)


def _of_text(
    name: str,
    column: pd.Series,
    how: Reading,
    describe: Callable[[str, pd.Categorical, Reading], Described],
) -> Described:
    """Return what ``describe`` makes of a column's cells as text; refused if a cell is no text or number."""
    try:
        cells = texts_of(column)
    except DataFault as fault:
        refusal = DataFault(fault.rule, row=fault.row, line=dropping([name]))
        return Described(name, REFUSED, np.full(len(column), np.nan), fault=refusal)
    return describe(name, cells, how)


def dropping(names: Sequence[str]) -> str:
    """Return the line of pandas that leaves these columns out."""
    columns = list(names)
    return f"table = table.drop({columns!r}, axis=1)"


def _numbers(name: str, column: pd.Series, how: Reading) -> Described:
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    described = Described(name, NUMBER, values)
    low, high = described.ends
    may_be_days = low >= FIRST_DAY and high <= LAST_DAY
    is_named = name in (how.columns or ())
    if may_be_days and not is_named and are_days(values[~described.lacking]):
        rule = f"cells must be numbers or words; got {low:.0f} to {high:.0f}, dates as numbers."
        words = f"table[{name!r}].astype('Int64').astype('string')"
        line = f"table[{name!r}] = (pd.to_datetime({words}, format='%Y%m%d', utc=True) - {DAY_0}) / {DAY}"
        return described.refused(DataFault(rule, line=line))
    largest = max(-low, high)
    most = np.finfo(np.float32).max
    if largest > most:
        beyond = np.abs(values) > most
        rule, got = "the value must be a finite float32", values[int(np.argmax(beyond))]
        line = f"table = table[~(table[{name!r}].abs() > 3.4e38)]"
        return described.refused(fault_where(beyond, got, rule, line=line))
    if largest >= EXACT and bool((values[~described.lacking] % 1 == 0).all()):
        whole = pd.api.types.is_integer_dtype(column.dtype)
        if not whole or bool((column.abs() > EXACT).any()):
            return _inexact(name, column, how)
    return described


def are_days(values: Floats) -> bool:
    """Return whether numbers [n] are dates such as 20240131.

    They are dates if each spells a day that exists, and at least :data:`DIFFERENT`
    values differ.

    >>> are_days(np.arange(20240125.0, 20240131.0)), are_days(np.arange(20240125.0, 20240133.0))
    (True, False)
    """
    distinct = np.unique(values)
    if len(distinct) < DIFFERENT or (distinct % 1).any():
        return False
    words = pd.Series(distinct.astype(np.int64)).astype("str")
    days = pd.to_datetime(words, format="%Y%m%d", errors="coerce")
    return bool(days.notna().all())


def _inexact(name: str, column: pd.Series, how: Reading) -> Described:
    cells = texts_of(column)
    numbers = filter(is_number, cells.categories)
    largest = max(numbers, key=lambda word: abs(float(word)))
    rule = f"whole numbers must be at most 2**53 to keep their digits; got {largest[:40]!r}."
    ways = _as_words(name, cells, how)
    described = Described(name, REFUSED, cells)
    if not ways:
        return described.refused(DataFault(rule, line=dropping([name])))
    return described.refused(DataFault(rule, *ways))


def _texts(name: str, cells: pd.Categorical, how: Reading) -> Described:
    """Return the description of a column of text: words, or refused with a repair.

    It is words if fewer than a share :data:`SOME` of its filled cells are numbers, and
    its words are no dates, measurements or the like, and not too many
    (:func:`_worded`). A column without any value counts as numbers.
    """
    counts = np.bincount(cells.codes, minlength=len(cells.categories))
    words = pd.Series(cells.categories, dtype=object)
    filled = (words.str.strip() != "").to_numpy()
    if not filled.any():
        return Described(name, NUMBER, np.full(len(cells), np.nan))
    values = pd.to_numeric(words, errors="coerce").to_numpy(np.float64)
    numeric = ~np.isnan(values) & filled
    share = counts[numeric].sum() / counts[filled].sum()
    described = Described(name, REFUSED, cells)
    distinct = list(words[filled])
    ways: list[Way | str] = [*_as_words(name, cells, how)]
    numbers_rows = identifies(Described(name, NUMBER, values[cells.codes]))
    if share == 1:
        rule = f"cells must be stored as numbers, or named as categories; got {distinct[0]!r}."
        line = f"table[{name!r}] = pd.to_numeric(table[{name!r}])"
        if numbers_rows:
            line = dropping([name])
        return described.refused(DataFault(rule, *ways, line=line))
    fault = dates_fault(name, distinct) or measures_fault(name, cells)
    if fault := fault or other_numbers_fault(name, distinct):
        without_digits = filled & ~words.str.contains("[0-9]").to_numpy()
        described.emptied = without_digits[cells.codes]
        return described.refused(fault)
    if share < SOME:
        count = int(counts[numeric].sum())
        if not count:
            return _worded(name, cells, how)
        return _worded(name, cells, how, [f"{plural(count, 'cell')} of numbers"])
    others = filled & ~numeric
    bad, strays = others[cells.codes], sorted(words[others])
    line = "" if ways else dropping([name])
    if (
        (are_marks(strays) or strays == [name])
        and 2 * bad.sum() <= len(bad)
        and not numbers_rows
    ):
        line = f"table[{name!r}] = pd.to_numeric(table[{name!r}].replace({strays!r}, None))"
        described.emptied = bad
    elif line:
        ways = ["Correct the cells."]
    rule = "the cell must be a number, or the column be named as words"
    got = listing(map(repr, strays), 3)
    return described.refused(fault_where(bad, got, rule, *ways, line=line))


def are_marks(words: Sequence[str]) -> bool:
    """Return whether words among numbers may be marks of missing cells.

    There may be at most :data:`STRAY` of them. None may have a digit, or be one of
    :data:`TRUTHS`.
    """
    says_something = TRUTHS.intersection(word.strip().lower() for word in words)
    has_digits = any(map(str.isdigit, "".join(words)))
    return len(words) <= STRAY and not has_digits and not says_something


def _as_words(name: str, cells: pd.Categorical, how: Reading) -> list[Way]:
    """Return the way to take cells as words, in a list.

    The list is empty if :func:`_worded` refuses the cells.
    """
    if _worded(name, cells, how).fault:
        return []
    return [("Take them as words", {"categories": [name]})]


def _worded(
    name: str, cells: pd.Categorical, how: Reading, odd: Sequence[str] = ()
) -> Described:
    """Return the description of a column of words, refused if they are no categories.

    There may be :data:`FEW_WORDS` different words, or half as many as rows if that is
    more, but at most :data:`MOST_WORDS`. They must differ by more than case or blanks.

    Args:
        name: the column's name.
        cells: its cells.
        how: the settings. A column that they name may have :data:`MOST_WORDS` words,
            however few its rows are.
        odd: what is unusual about the column.
    """
    described = Described(name, WORDS, cells, list(odd))
    count = len(words_of(cells))
    is_named = name in (how.columns or ()) or name in (how.categories or ())
    most = MOST_WORDS if is_named else min(MOST_WORDS, max(FEW_WORDS, len(cells) // 2))
    if count > most:
        rule = f"there must be numbers, or words that come again ({MOST_WORDS} at most); got {count:,} different words."
        leave = "Leave them out", {"exclude_columns": [name]}
        read = "Read these texts alone", {"text_column": name}
        return described.refused(DataFault(rule, leave, read, line=dropping([name])))
    fault = spellings_fault(name, cells.categories, "words")
    return described.refused(fault) if fault else described


def spellings_fault(name: str, words: Sequence[str], what: str) -> DataFault | None:
    """Return the fault of a column whose words differ only by case, blanks or Unicode's form, or None.

    Args:
        name: the column's name.
        words: its different words.
        what: the noun for them, in the message.
    """
    groups = nearly_equal([word for word in words if word.strip()])
    if not groups:
        return None
    others: dict[str, str] = {}
    for group in groups:
        # small letters come last, and signs that nobody sees are left out
        first = max(group, key=lambda word: (-len(word.strip()), word)).strip()
        others |= {word: first for word in sorted(group) if word != first}
    alike = " and ".join(map(repr, sorted(groups[0])))
    rule = f"{what} must not differ by case or blanks only; got {alike}."
    line = f"table[{name!r}] = table[{name!r}].replace({others!r})"
    return DataFault(rule, line=line)


def forms_fault(
    name: str, column: pd.Series, cells: pd.Categorical
) -> DataFault | None:
    """Return the fault of a column of text with one word in two of Unicode's forms, or None.

    Args:
        name: the column's name.
        column: the column as it was read.
        cells: its cells in Unicode's composed form.
    """
    if all(map(str.isascii, cells.categories)):
        return None
    words = {*column.dropna().map(text_of).unique()}
    if len({*map(composed, words)}) == len(words):
        return None
    texts = f"table[{name!r}]"
    if pd.api.types.infer_dtype(column) not in ("string", "categorical"):
        texts += ".astype('str')"  # else the line would lose numbers among words
    rule = "words must not differ by Unicode's form only; got two forms of one."
    line = f"table[{name!r}] = {texts}.str.normalize('NFC')"
    return DataFault(rule, line=line)


# --- dates, and numbers with a unit or other signs ---------------------------------------------------------------

_DATE = re.compile(
    r"(?:[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{4}-(?:0[1-9]|1[0-2]|W[0-9]{2})|[0-9]{1,2}([-./])[0-9]{1,2}\1(?:[0-9]{2}){1,2}"
    r"|(?:[a-z]{3,9},? )?[0-9]{1,2}[- ]?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[- ]?(?:[0-9]{2}){1,2}"
    r"|(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[- ](?:[0-9]{1,2},? )?[0-9]{4}"
    r"|q[1-4][-/ ]?[0-9]{4}|[0-9]{4}[-/ ]?q[1-4])"
    r"(?:[ T][0-9]{1,2}:[0-9]{2}.*)?|(?:-?[0-9]+ days?)? ?(?:\+?[0-9]+:[0-9]{2}(?::[0-9.]+)?)?",
    re.IGNORECASE,
)
DATES = (
    *("ISO8601", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d-%b-%Y", "%d%b%Y", "%d %b %Y", "%B %d, %Y", "%b %d, %Y", "%a %d %b %Y"),
)
"""The forms of dates that a line of pandas reads."""
_MEASURE = re.compile(
    r"(?P<before>[^\w\s.,+\u2212-]*)\s*[+\u2212-]?(?:[0-9]{1,3}(?:['\s][0-9]{3})+(?:[.,][0-9]*)?|[0-9][0-9.,]*)\s*"
    r"(?P<after>[^\W\d]*|[^\w\s]*|[^\d\s.,+-]+)"
)
"""A number next to what may be its unit."""
_OTHER = re.compile(
    r"(?a:[0-9][0-9.,]*\s*/\s*[0-9][0-9.,]*|0x[0-9a-f]+|[+-]?[0-9.]+d[+-]?[0-9]+)|[+-]?(?=.*[^\x00-\x7f])\d[\d.,\u066b\u066c]*",
    re.IGNORECASE,
)
"""Two numbers with a stroke, or a number that is hexadecimal, of Fortran, or has digits
or separators of another script."""
SIGNS = (
    (r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", "'", "."),
    (r"-?(?:[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]*)(?:,[0-9]*)?", ".", ","),
    (r"-?[0-9]{1,3}(?:,[0-9]{3})*(?:\.[0-9]*)?", ",", "."),
)
"""The forms of numbers, each with its sign between thousands and its decimal sign."""


def least_alike(words: Collection[str]) -> float:
    """Return the number that words of one form, such as dates, must exceed for their column to have that form.

    Args:
        words: the different words of the column.
    """
    return max(len(words) / 2, DIFFERENT - 1)


def days_of(words: pd.Series, column: str) -> dict[str, pd.Series]:
    """Return the time spans of a column of dates or times, by each pandas expression that reads all of its words.

    The span of a date is the time since :data:`NOON`. Expressions that read the same
    spans as an earlier one are left out. The dictionary is empty if no expression reads
    all words.

    Args:
        words: the different words of the column.
        column: the column as an expression of pandas, such as ``table['day']``.
    """
    spans = {}
    for form in DATES:
        days = pd.to_datetime(words, format=form, utc=True, errors="coerce") - NOON
        spans[f"(pd.to_datetime({column}, format={form!r}, utc=True) - {DAY_0})"] = days
    if words.str.contains(":|day").all():
        for end, line in (
            ("", f"pd.to_timedelta({column}.astype(str))"),
            (":00", f"pd.to_timedelta({column}.astype(str) + ':00')"),
        ):
            spans[line] = pd.to_timedelta(words + end, errors="coerce")
    readings: dict[str, pd.Series] = {}
    for line, span in spans.items():
        if span.notna().all() and not any(map(span.equals, readings.values())):
            readings[line] = span
    return readings


def dates_fault(name: str, words: Sequence[str]) -> DataFault | None:
    """Return the fault of a column of dates or times as text, with the line that converts them to days, or None.

    If no form of dates fits all words, or several do, the line leaves the column out.

    >>> dates_fault("day", [f"{k}.1.2024" for k in range(1, 20)]).line
    "table['day'] = (pd.to_datetime(table['day'], format='%d.%m.%Y', utc=True) - ...) / pd.Timedelta(days=1)"
    """
    distinct = sorted({word.strip() for word in words})
    sampled = distinct[:: len(distinct) // SAMPLE or 1]
    if sum(1 for word in sampled if _DATE.fullmatch(word)) <= least_alike(sampled):
        return None
    column = f"table[{name!r}]"
    lines = [*days_of(pd.Series(distinct), column)]
    got = listing(map(repr, distinct), 3)
    rule = f"cells must be numbers or words; got {got}, dates or times"
    if len(lines) == 1:
        return DataFault(f"{rule}.", line=f"{column} = {lines[0]} / {DAY}")
    fits = f"{rule} that fit {plural(len(lines), 'form')}."
    return DataFault(fits, "Write 2024-12-31.", line=dropping([name]))


def measures_fault(name: str, cells: pd.Categorical) -> DataFault | None:
    """Return the fault of a column of numbers with a unit or other signs, or None.

    More than half of the different words, and at least :data:`DIFFERENT`, must be a
    number with the same unit or sign. At least a quarter of these must not be plain
    numbers. Codes such as ``NYHA2`` and ``ward 3`` are words. The fault's line makes
    plain numbers of the cells. It leaves the column out if that is not clear, or if the
    numbers identify rows (:func:`identifies`). If the cells can be read in two ways,
    the message has the line of each.

    >>> measures_fault("v", pd.Categorical([f"{k},5" for k in range(9)])).line
    "table['v'] = pd.to_numeric(table['v'].astype(str)....str.replace('.', '').str.replace(',', '.'))"
    >>> print(measures_fault("v", pd.Categorical([f"{k % 7} mg" for k in range(19)])))
    cells must be numbers or words; got '0 mg', '1 mg', '2 mg' and 4 more, numbers with mg. Write `table['v'] = ...
    """
    words = cells.categories.str.strip()
    distinct = sorted({*words} - {""})
    matches = {word: _MEASURE.fullmatch(word) for word in distinct}
    units = Counter((m["before"], m["after"]) for m in matches.values() if m)
    if not units:
        return None
    unit, count = units.most_common(1)[0]
    alike = {w for w, m in matches.items() if m and (m["before"], m["after"]) == unit}
    signed = [word for word in alike if not is_number(word)]
    if count <= least_alike(distinct) or len(signed) < len(alike) / 4:
        return None
    got = listing(map(repr, distinct), 3)
    sign = "".join(unit)
    what = sign or "other signs"
    rule = f"cells must be numbers or words; got {got}, numbers with {what}"
    leave = DataFault(f"{rule}.", "Write plain numbers.", line=dropping([name]))
    strays = [w for w in distinct if w not in alike and not re.fullmatch("[0-9.]+", w)]
    if not are_marks(strays) or {*sign} & {*".,+-("}:  # brackets may mean a minus
        return leave
    steps = ""
    if strays:
        steps = f".replace({strays!r}, None)"
    steps += ".astype(str).str.replace('\u2212', '-').str.replace('[^0-9.,-]', '', regex=True)"
    plain = words.where(~words.isin(strays), "").str.replace("\u2212", "-")
    plain = plain.str.replace("[^0-9.,-]", "", regex=True)
    lines: dict[tuple[float, ...], str] = {}  # by what they read
    for form, thousands, decimal in SIGNS:
        if plain[plain != ""].str.fullmatch(form).all():
            read = plain.str.replace(thousands, "").str.replace(decimal, ".")
            values = pd.to_numeric(read).to_numpy(np.float64)
            if identifies(Described(name, NUMBER, values[cells.codes])):
                return DataFault(f"{rule}, different in every row.", line=leave.line)
            signs = f".str.replace({thousands!r}, '').str.replace({decimal!r}, '.')"
            line = f"table[{name!r}] = pd.to_numeric(table[{name!r}]{steps}{signs})"
            lines.setdefault(tuple(values[plain != ""]), line)
    if not lines:
        return leave
    if len(lines) > 1:
        ways = [f"Write `{line}`." for line in lines.values()]
        return DataFault(f"{rule} and two readings.", *ways, line=leave.line)
    (line,) = lines.values()
    return DataFault(f"{rule}.", line=line)


_WHOLE = re.compile(r"[+-]?[0-9]+")
GROUPED = {sign: rf"[+-]?[1-9][0-9]{{0,2}}[{sign}][0-9]{{3}}" for sign in ",."}
"""A number such as 1,234 with a sign that stands between thousands, or is decimal."""


def readings_fault(
    name: str,
    column: pd.Series,
    cells: pd.Categorical,
    csv: Mapping[str, Any] | None,
) -> DataFault | None:
    """Return the fault of a column of whole numbers and of ones such as 1,234, or None.

    The sign may stand between thousands, or be decimal. The message names the repair
    for each, and none is chosen. The sign is a point if the settings have a decimal
    comma. A meaning that the settings give to another sign is left out.

    >>> column = pd.Series(["1,234", "5"])
    >>> fault = readings_fault("dose", column, texts_of(column), {"sep": ";"})
    >>> [way for way, _ in fault.ways]  # doctest: +NORMALIZE_WHITESPACE
    ["Read '1,234' as 1234: csv={'sep': ';', 'thousands': ','}.",
     "Read '1,234' as 1.234: csv={'sep': ';', 'decimal': ','}."]

    Args:
        name: the column's name.
        column: the column as it was read. Its cells that are numbers do not count.
        cells: the column as text.
        csv: the options of a text file. None means a table of another kind, which is
            repaired by a line of pandas.
    """
    options = csv or {}
    sign = ","
    if options.get("decimal") == sign:
        sign = "."
    if not any(sign in word for word in cells.categories):
        return None
    texts = {word.strip() for word in column if isinstance(word, str)}
    grouped = sorted(word for word in texts if sign in word)
    if not all(re.fullmatch(GROUPED[sign], word) for word in grouped):
        return None
    if not grouped or not all(map(_WHOLE.fullmatch, texts - {*grouped, ""})):
        return None
    ways, lines = [], []
    for key, replaced in (("thousands", ""), ("decimal", ".")):
        if key in options:
            continue
        line = f"table[{name!r}] = pd.to_numeric(table[{name!r}].astype(str).str.replace({sign!r}, {replaced!r}))"
        way = f"write `{line}`"
        if csv is not None:
            way = spelled(csv={**csv, key: sign})
        number = grouped[0].replace(sign, replaced)
        ways.append(f"Read {grouped[0]!r} as {number}: {way}.")
        lines.append(line)
    if not ways:
        return None
    if len(ways) == 1:
        rule = f"cells must be numbers or words; got {grouped[0]!r}."
        return DataFault(rule, *ways, line=lines[0])
    rule = f"numbers must have one reading; got {grouped[0]!r}, which has two."
    return DataFault(rule, *ways, line=dropping([name]))


_NUMERAL = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
_BAND = re.compile(r"[^\w(]*(?:[-\u2013\u2014]|\bto\b|\band\b)[^\w(]*")
"""What stands between the ends of a band such as 10-19."""


def is_structured(word: str) -> bool:
    """Return whether a cell is a list or an object, as JSON and Python write them.

    A list of one number or of one bare word does not count.

    >>> [is_structured(cell) for cell in ('{"age": 7}', "['a', 'b']", "[]", "[low]", "[10-20)")]
    [True, True, True, False, False]
    """
    inside = word[1:-1].strip()
    if word[:1] + word[-1:] not in ("[]", "{}"):
        return False
    return not inside or any(sign in inside for sign in ",:'\"")


def holds_several(word: str) -> bool:
    """Return whether a cell holds several numbers.

    Bands such as 10-19 do not count, nor do cells that begin with a letter, such as the
    code T1N0.

    >>> [holds_several(cell) for cell in ("5' 11", "7 of 10", "50.5, 10.2", "10 (8-12)")]
    [True, True, True, True]
    >>> [holds_several(cell) for cell in ("10-19", "0 to 4", "(0, 10]", "1,5 mg", "T1N0")]
    [False, False, False, False, False]
    """
    if word[:1].isalpha() or word[:1] + word[-1:] in ("(]", "[)"):
        return False
    gaps = _NUMERAL.split(word)[1:-1]
    return any(not _BAND.fullmatch(gap) for gap in gaps)


def other_numbers_fault(name: str, words: Sequence[str]) -> DataFault | None:
    """Return the fault of a column of cells in a form that pandas does not read, or None.

    Such forms are lists and objects of JSON, several numbers in a cell, hexadecimal numbers, digits of another script,
    and numbers with several units.

    >>> print(other_numbers_fault("pressure", [f"{100 + k}/{60 + k}" for k in range(9)]))
    cells must be numbers or words; got '100/60', '101/61', '102/62' and 6 more, numbers in another form. Write `...
    """
    distinct = sorted({word.strip() for word in words} - {""})
    least = least_alike(distinct)
    structured = list(filter(is_structured, distinct))
    others = [w for w in distinct if _OTHER.fullmatch(w) or holds_several(w)]
    count = len(others)
    matches = [_MEASURE.fullmatch(word) for word in distinct]
    measures = [m["after"] for m in matches if m and m["after"].isalpha()]
    has_units = len(distinct) >= GROUPS and len({*measures}) <= UNITS
    form = "numbers in another form"
    if 2 * len(structured) > len(distinct):
        form = "lists or objects"
    elif count <= least and not (has_units and len(measures) > least):
        return None
    got = listing(map(repr, distinct), 3)
    rule = f"cells must be numbers or words; got {got}, {form}."
    keep = "Take them as words", {"categories": [name]}
    return DataFault(rule, keep, line=dropping([name]))


# --- identifiers -------------------------------------------------------------------------------------------------

IDENTIFIERS = (
    *("id", "ids", "identifier", "mrn", "ssn", "barcode", "key", "index", "nr", "no"),
    *("nbr", "number", "patient", "record", "case", "subject", "person", "participant"),
    *("encounter", "uuid"),
)
"""Last words of the names of columns that identify rows, or what several rows belong to."""
FEW = 10
"""Different values from which a column named as an identifier is one. A visit's
number has fewer."""
ROWS = 20
"""The maximum mean number of rows for each value of a column named as an identifier.

It is also the minimum number of rows for which large numbers identify them."""
MANY_ROWS = 100
"""Rows above which a column of any name is refused as a count of them."""
DISTINCT = 0.95
"""Share of distinct values from which a column counts as one without repeats."""
LARGE = 1000
"""Whole numbers that are different in every row identify it if some are larger, with
either sign."""


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
    """Return whether a column of whole numbers or words identifies rows or groups of rows.

    Missing cells do not count. One of three conditions must hold:

    - At least :data:`ROWS` numbers are all different, and one of the first
      ``10 * ROWS`` is above :data:`LARGE` in magnitude.
    - More than :data:`MANY_ROWS` numbers count the rows (:func:`counts_rows`).
    - The column's name is that of an identifier (:func:`is_named_as_identifier`). It
      has at least :data:`FEW` different numbers or words, and each stands in at most
      :data:`ROWS` rows of a client on average.

    Numbers with fractions identify nothing.

    >>> rows = np.arange(120.0)
    >>> [identifies(Described("v", NUMBER, cells)) for cells in (rows, 7 * rows[::-1] + 4000, rows // 3, rows / 7)]
    [True, True, False, False]

    Args:
        column: the column.
        owner: the client of each row [n]. Each client may number its own records. None
            means one client.
    """
    cells, filled = column.cells, ~column.lacking
    if isinstance(cells, np.ndarray):
        if has_fractions(cells):
            return False
        values = cells if filled.all() else cells[filled]
        parts = values[: 10 * ROWS], values  # most columns end at the first rows
        large = len(values) >= ROWS and bool((np.abs(parts[0]) > LARGE).any())
        if large and all(pd.Series(part).is_unique for part in parts):
            return True
        if len(values) > MANY_ROWS and counts_rows(values):
            return True
    if not is_named_as_identifier(column.name):
        return False
    code, values = pd.factorize(cells[filled])
    clients = 0 if owner is None else owner[filled]
    pairs = len(pd.unique(clients * len(values) + code))
    return len(values) >= FEW and pairs >= len(code) / ROWS


def counts_rows(values: Floats) -> bool:
    """Return whether whole numbers [n] count the rows.

    At least a share :data:`DISTINCT` of them must be different. They must be sorted, up
    or down, or their range must be below 1.5 n. Both must hold for the first
    ``10 * ROWS`` of them, too.
    """
    for part in (values[: 10 * ROWS], values):  # most columns end at the first rows
        steps = np.diff(part)
        ordered = bool((steps >= 0).all() or (steps <= 0).all())
        dense = np.ptp(part) < 1.5 * len(values)
        if not (ordered or dense) or len(pd.unique(part)) < DISTINCT * len(part):
            return False
    return True


def has_fractions(values: Floats) -> bool:
    """Return whether some numbers [n] are not whole."""
    return any((part > np.floor(part)).any() for part in (values[:ROWS], values))


def by_clients(cells: Cells, owner: Integers | None) -> Integers:
    """Return for each row the number of its (value, client) pair, int64 [n]; -1 where the value is missing.

    Args:
        cells: the column, numbers or text [n].
        owner: the client of each row [n]. None means one client.
    """
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
"""Different values up to which the labels of each value are counted, and the least
number of rows."""
KNOWN = 10
"""The minimum number of a client's values that are compared with those of the
others."""


def outside_fences(cells: Floats, owner: Integers | None) -> str:
    """Return a remark on a few numbers far outside all clients' quartiles.

    It is empty if there are none, or more than a share
    :data:`~fl_core.data.preprocessing.MOST_OUTSIDE` of the numbers.

    Args:
        cells: the numbers of a column [n], NaN where one is missing.
        owner: the client of each row [n], or None for one client.
    """
    clients = np.zeros(len(cells), dtype=np.int64) if owner is None else owner
    sampled = slice(None, None, len(cells) // SAMPLE or 1)
    low, high, _ = fences(cells[sampled, None], clients[sampled])
    margin = (high - low) / 4  # most columns are within half of their fences
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
    far_values = cells[(cells < low[0]) | (cells > high[0])]
    return f"{far_values[0]:g} far from the others in {plural(count, 'cell')}: missing?"


REPEATED = 3
"""Cells from which a number of nines may mark missing values."""


def mark_of_nines(column: Described) -> float | None:
    """Return a number of nines that stands for missing values, such as -999 or 9999, or None.

    It is the least or the largest number, and occurs at least :data:`REPEATED` times.
    It is further from the other values than these are from each other, or the only one
    below 0. The other values must not all be equal. A 9 is no mark, but -9 and 99 may
    be.

    >>> amounts = np.append(np.arange(60.0), [-9.0, -9.0, -9.0])
    >>> mark_of_nines(Described("dose", NUMBER, amounts)), mark_of_nines(Described("dose", NUMBER, abs(amounts)))
    (-9.0, None)
    """
    cells = column.cells
    assert isinstance(cells, np.ndarray)
    for mark in column.ends:
        digits = text_of(mark).removeprefix("-")
        if {*digits} != {"9"} or -9 < mark < 99:
            continue
        equal = cells == mark
        others = cells[~(equal | np.isnan(cells))]
        if np.count_nonzero(equal) < REPEATED or not len(others) or not np.ptp(others):
            continue
        gap = np.abs(others - mark).min()
        if gap > np.ptp(others) or mark < 0 <= others.min():
            return mark
    return None


def gives_away(cells: Cells, y: NDArray[Any]) -> bool:
    """Return whether a column gives the class away.

    It does if each of its few values has one class. It also does if there are two
    classes, which a threshold splits, and the column has numbers without missing ones.
    One sample in a hundred may be an exception. No column does if there are fewer than
    :data:`LEVELS` samples, or if nearly all have one class.

    >>> y = np.arange(60) % 3
    >>> gives_away(2.0 * y, y), gives_away(np.arange(60.0), (np.arange(60) > 20).astype(int)), gives_away(y % 2, y)
    (True, True, False)

    Args:
        cells: the column, numbers or text [n].
        y: class indices [n].
    """
    sampled = slice(None, None, len(y) // SAMPLE or 1)
    if len(y) > 2 * SAMPLE and not gives_away(cells[sampled], y[sampled]):
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
    cumulated = np.cumsum(y[order])
    right = np.arange(1, len(y) + 1) - cumulated + (cumulated[-1] - cumulated)
    right = np.maximum(right, len(y) - right)[ends]
    return bool(right.max() >= CLEAR * len(y))


def unlike_clients(cells: Cells, owner: Integers, names: Sequence[str]) -> str:
    """Return a remark on a column whose numbers or words at a client do not overlap those of the others; else empty.

    >>> values = np.repeat([1.0, 88.0], 20) * np.linspace(1, 2, 40)
    >>> unlike_clients(values, np.repeat([0, 1], 20), ("a", "b"))
    "no value at 'a' (1 to 1.49) is in the range of the others: another unit?"

    The remark names the first such client. Clients with fewer than :data:`KNOWN` values
    do not count.

    Args:
        cells: the column, numbers or text [n].
        owner: the client of each row [n], as an index into ``names``.
        names: the clients' names.
    """
    if isinstance(cells, np.ndarray):
        return _unlike_ranges(cells, owner, names)
    filled = ~lacks_value(cells)
    words = cells.categories
    shape = len(names), len(words)
    pairs = owner[filled] * len(words) + cells.codes[filled]
    counts = np.bincount(pairs, minlength=len(names) * len(words)).reshape(shape)
    has = (counts > 0) & (counts.sum(axis=1, keepdims=True) >= KNOWN)
    alone = has.any(axis=1) & ~(has & (has.sum(axis=0) > 1)).any(axis=1)
    if not alone.any() or has.any(axis=1).sum() < 2:
        return ""
    k = int(np.argmax(alone))
    client_words = listing(map(repr, words[has[k]]), 3)
    return f"{names[k]!r} shares no word with the others: {client_words}"


def _unlike_ranges(cells: Floats, owner: Integers, names: Sequence[str]) -> str:
    """Return a remark on a client whose range of numbers is below or above all others.

    It is empty if there is none. The arguments are those of :func:`unlike_clients`. A
    client with a single value has no range.
    """
    sampled = slice(None, None, len(owner) // SAMPLE or 1)
    for rows in (sampled, slice(None)):  # more rows only widen the ranges
        clients, values = owner[rows], cells[rows]
        low, high = np.full((2, len(names)), np.nan)
        np.fmin.at(low, clients, values)
        np.fmax.at(high, clients, values)
        counts = np.bincount(clients[~np.isnan(values)], minlength=len(names))
        compared = np.flatnonzero((counts >= KNOWN) & (high > low))
        low, high = low[compared], high[compared]
        if len(compared) < 2:
            continue
        below = (low == low.min()) & (high < np.partition(low, 1)[1])
        above = (high == high.max()) & (low > np.partition(high, -2)[-2])
        outside = np.flatnonzero(below | above)
        if not len(outside) and len(compared) == len(names):
            return ""
    if len(compared) < 2 or not len(outside):
        return ""
    k = outside[0]
    range_text = f"{names[compared[k]]!r} ({low[k]:.3g} to {high[k]:.3g})"
    return f"no value at {range_text} is in the range of the others: another unit?"


GROUPS = 30
"""Different values from which a column may name groups, whatever its name."""
PAIRS, MOST_PAIRS = 20, 2000
"""The minimum and the maximum number of pairs of rows with one value that are
compared."""
BLOCKS, BLOCK = 8, 500
"""Blocks of rows that are looked at first, and the rows of each."""
OTHERS, MOST_OTHERS = 3, 40
"""Other columns of numbers, at least and at most, that may show a group."""
NEAR = 0.5
"""Distance of two rows of a group at most, as a share of that of two random rows."""
ALIKE = 0.95
"""Share of the other columns in which rows of a group must be near.

It is also the least share of equal labels by which rows of neighbouring values count as
alike."""
CHANCE = 1e-6
"""The largest probability of equal labels by chance."""


def binds_rows(
    cells: Cells,
    y: NDArray[Any],
    others: Sequence[Floats],
    owner: Integers | None = None,
) -> bool:
    """Return whether rows with the same value of a column form groups, such as the rows of a patient.

    This holds if their labels are equal, by more than chance. It also holds if their
    distance is below a share :data:`NEAR` of that of random pairs in nearly all other
    columns (:data:`ALIKE`), at least :data:`OTHERS` of them. For numbers it must not
    hold for rows with neighbouring values, because a measured quantity does that, too.
    There must be at least :data:`GROUPS` different values, with two rows each on
    average. Numbers with fractions bind no rows.

    >>> draw = np.random.default_rng(0)
    >>> patient = np.repeat(draw.permutation(50), 4)
    >>> label, noise = draw.integers(0, 2, 50)[patient], draw.normal(size=(3, 200))
    >>> binds_rows(patient.astype(float), label, noise), binds_rows(noise[0].round(1), label, noise)
    (True, False)

    Args:
        cells: the column, numbers or text [n].
        y: labels or targets [n, ...].
        others: the other columns of numbers, [n] each, NaN where one is missing.
        owner: the client of each row [n], since one value at two clients is two groups.
            None means one client.
    """
    numeric = isinstance(cells, np.ndarray)
    has_few_words = isinstance(cells, pd.Categorical) and len(cells.categories) < GROUPS
    if has_few_words or (numeric and has_fractions(cells)):
        return False
    if len(cells) > 2 * BLOCKS * BLOCK:  # most columns bind nothing in some rows
        starts = np.arange(BLOCKS) * (len(cells) // BLOCKS)
        part = (starts[:, None] + np.arange(BLOCK)).ravel()
        some = cells[part]
        if GROUPS <= pd.Series(some).nunique() <= len(part) / 2:
            owner_of_part = None if owner is None else owner[part]
            if not binds_rows(
                some,
                y[part],
                [values[part] for values in others],
                owner_of_part,
            ):
                return False
    filled = ~lacks_value(cells)
    code, values = pd.factorize(cells[filled], sort=True)
    if owner is not None and len(values) >= GROUPS:
        code, values = pd.factorize(owner[filled] * len(values) + code, sort=True)
    if not GROUPS <= len(values) <= len(code) / 2:
        return False
    code = code.astype(np.min_scalar_type(len(values)))  # small ones are sorted faster
    order = np.argsort(code, kind="stable")
    rows, steps = np.flatnonzero(filled)[order], np.diff(code[order].astype(np.int64))
    draw = np.random.default_rng(0)
    some = rows[:: len(rows) // MOST_PAIRS or 1]
    shuffled = draw.permutation(some)

    def alike(one: Integers, other: Integers) -> float:
        """Return the share of pairs of rows that have the same labels."""
        return float((y[one] == y[other]).reshape(len(one), -1).all(axis=1).mean())

    def gap(values: Floats, one: Integers, other: Integers) -> float:
        """Return the mean distance of pairs of rows, without missing values."""
        gaps = np.abs(values[one] - values[other])
        return float(np.nansum(gaps) / max(np.count_nonzero(~np.isnan(gaps)), 1))

    chance = alike(some, shuffled)
    usual = [gap(numbers, some, shuffled) for numbers in others]
    measured = [k for k, far in enumerate(usual) if far > 0]

    def bound(step: int) -> tuple[bool, bool]:
        """Return whether rows of values ``step`` apart have one label, and are near.

        Step 0 means rows with the same value, and step 1 rows with neighbouring values.
        Both answers are false for too few pairs.
        """
        positions = np.flatnonzero(steps == step)
        positions = draw.permutation(positions)[:MOST_PAIRS]
        if len(positions) < PAIRS:
            return False, False
        one, other = rows[positions], rows[positions + 1]
        least = 1 if step == 0 else ALIKE
        labelled = alike(one, other) >= least and chance ** len(positions) < CHANCE
        is_near = [gap(others[k], one, other) < NEAR * usual[k] for k in measured]
        return labelled, len(is_near) >= OTHERS and sum(is_near) >= ALIKE * len(is_near)

    same_bound, following = bound(0), bound(1) if numeric else (False, False)
    return any(
        one and not other for one, other in zip(same_bound, following, strict=True)
    )
