"""The cells of a table: their spellings, as text, numbers or days, what is missing, and faults in data."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.spelling import (
    DATE_FORMS,
    EXACT,
    MISSING,
    PLAIN_NUMBERS,
    SPANS,
    DataFault,
    NumberFormat,
    Way,
    cell_text,
    composed,
    format_of,
    is_number,
)

Array = NDArray[np.generic]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Cells: TypeAlias = "pd.Categorical | Floats"
"""A column of text, each word once, or of numbers, NaN where one is missing."""


def cells_of(
    column: pd.Series,
    text: bool = False,
    missing: Collection[str] = MISSING,
    fold: bool = False,
) -> Cells:
    """Return a column's cells: float64 [n], or text in Unicode's composed form.

    A missing number is NaN, and a missing text is empty. After this nothing asks again what is missing.

    >>> list(cells_of(pd.Series(["1", "#DIV/0!", "N/A"])))
    ['1', '', '']

    Args:
        text: keep the spelling of numbers.
        missing: marks of a cell without a value, in small letters.
        fold: make words equal that differ by case or blanks.

    Raises:
        DataFault: a cell is a list, an array or a dictionary, or numbers are complex.
    """
    types = pd.api.types
    if types.is_timedelta64_dtype(column.dtype):
        column = column / pd.Timedelta(days=1)
    kind = column.dtype
    if types.is_complex_dtype(kind):
        raise DataFault(
            f"cells must be real numbers; got {kind}.",
            "Make columns of the real and the imaginary part.",
        )
    if types.is_numeric_dtype(column) and not text:
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        if types.is_integer_dtype(kind):
            refuse_where(np.abs(values) > 2**53, column.to_numpy(), EXACT)
        marks = [float(mark) for mark in missing if is_number(mark)]
        marks = [mark for mark in marks if mark == mark]
        return np.where(np.isin(values, marks), np.nan, values) if marks else values
    if types.is_object_dtype(kind) and types.infer_dtype(column) != "string":
        nested = [isinstance(each, dict | list | np.ndarray) for each in column]
        rule = "a cell must have one number or text"
        refuse_where(np.array(nested, dtype=bool), column.to_numpy(), rule)
        column = column.map(cell_text)
    place, words = pd.factorize(column)
    names = [composed(cell_text(word)) for word in words.astype(object)]
    names = ["" if word.strip().lower() in missing else word for word in names]
    if fold:
        names = [" ".join(word.split()).casefold() for word in names]
    if (place < 0).any():
        names.append("")
    code, distinct = pd.factorize(np.array(names, dtype=object))
    code = code[place]
    cells = pd.Categorical.from_codes(code, pd.Index(distinct, dtype=object))
    used = np.bincount(code, minlength=len(distinct))
    return cells if used.all() else cells.remove_unused_categories()


def taken(cells: Any, rows: Any) -> Any:
    """Return some rows of a column. A column of text keeps its words there."""
    cells = cells[rows]
    return cells if isinstance(cells, np.ndarray) else cells.remove_unused_categories()


def texts_of(cells: Cells | Array) -> pd.Categorical:
    """Return a column's cells as text. A missing number has no text."""
    if isinstance(cells, pd.Categorical):
        return cells
    text = cells_of(pd.Series(cells), text=True)
    assert isinstance(text, pd.Categorical)
    return text


def numbers(
    cells: Cells, given: NumberFormat = PLAIN_NUMBERS, *ways: str | Way
) -> Floats:
    """Convert text to float64 [n], NaN for a cell without a value. Numbers stay as they are.

    Args:
        given: the signs in the numbers. Plain numbers are read, too.
        ways: what to do about other cells.

    Raises:
        DataFault: names the first cell that is not a number.
    """
    if isinstance(cells, np.ndarray):
        return cells
    words = cells.categories
    form = format_of(words, given) or given
    known = np.array([*map(form.fits, words)], dtype=bool)
    others = ~(known[cells.codes] | lacks_value(cells))
    if others.any():
        signs = ("point", "comma") if form.decimal == "." else ("comma", "point")
        other = is_number(cells[int(np.argmax(others))].replace(",", ".", 1))
        point = f" with a decimal {signs[0]}, not a {signs[1]}" if other else ""
        refuse_where(others, cells, f"the cell must be a number{point}", *ways)
    values = np.full(len(words), np.nan)
    values[known] = [form.number(word) for word in words[known]]
    return values[cells.codes]


def lacks_value(cells: Cells) -> Bools:
    """Return where a column has no value."""
    if isinstance(cells, np.ndarray):
        return np.isnan(cells)
    missing = [not word.strip() for word in cells.categories]
    return np.array(missing, dtype=bool)[cells.codes]


def dates(cells: pd.Categorical) -> Floats:
    """Return dates as days since 1970 [n], with NaN where a cell is missing.

    All cells have one form of :data:`DATE_FORMS` or :data:`SPANS`. Times alone are parts of a day, and durations such
    as ``2 days 06:00:00`` or ``54:00`` are days, too. A year has four digits.

    >>> dates(pd.Categorical(["1970-01-02", "", "1970-01-01T12:00"])).tolist()
    [1.0, nan, 0.5]
    >>> for cells in ("2.1.1970 13.1.1970", "1/13/1970 1/2/1970", "06:00 54:00", "02JAN1970 13Feb1970"):
    ...     dates(pd.Categorical(cells.split())).tolist()
    [1.0, 12.0]
    [12.0, 1.0]
    [0.25, 2.25]
    [1.0, 43.0]
    >>> dates(pd.Categorical(["3 days", "2 days 06:00:00"])).tolist()
    [3.0, 2.25]
    >>> dates(pd.Categorical(["2024-01-01", "soon"]))
    Traceback (most recent call last):
        ...
    fl_core.data.spelling.DataFault: dates must have one form; got 'soon'. Write 2024-12-31.
    >>> dates(pd.Categorical(["1/2/2024", "3/4/2024"]))
    Traceback (most recent call last):
        ...
    fl_core.data.spelling.DataFault: dates must not be day/month or month/day alike; got '1/2/2024'. Write 2024-12-31.

    Raises:
        DataFault: names the first cell that is no date, or cells that fit two forms.
    """
    words = pd.Series(cells.categories, dtype=object).str.strip()
    lacking = words == ""
    fits, refused, way = list[Floats](), list[int](), "Write 2024-12-31."
    for form in (*SPANS, *DATE_FORMS):
        if form in SPANS:
            spans = words.where(words.str.fullmatch(form), "") + SPANS[form]
            found = pd.to_timedelta(spans, errors="coerce")
        else:
            found = pd.to_datetime(words, format=form, utc=True, errors="coerce")
            found -= pd.Timestamp("1970-01-01", tz="UTC")
        bad = (found.isna() & ~lacking).to_numpy()
        if bad.any():
            refused.append(int(np.argmax(bad[cells.codes])))
            continue
        days = found / pd.Timedelta(days=1)
        fits.append(days.to_numpy(np.float64, na_value=np.nan))
    if not fits:
        first = max(refused)
        raise DataFault(
            f"dates must have one form; got {cells[first]!r}.", way, row=first
        )
    if any(not np.array_equal(other, fits[0], equal_nan=True) for other in fits[1:]):
        raise DataFault(
            f"dates must not be day/month or month/day alike; got {cells[0]!r}.", way
        )
    return fits[0][cells.codes]


def date_text(days: float) -> str:
    """Return days since 1970 as a date, or a part of a day as a time.

    >>> date_text(19358.0), date_text(0.25), date_text(2932896.0)
    ('2023-01-01', '06:00', '9999-12-31')
    """
    when = str(np.datetime64(round(days * 86_400), "s"))
    return when[11:16] if 0 <= days <= 1 else when.partition("T")[0]


def refuse_where(bad: Bools, values: Any, rule: str, *ways: str | Way) -> None:
    """Refuse values, and name the first bad one.

    Args:
        bad: whether a value is refused. rule: what values must be. ways: what to do.
    """
    if bad.any():
        got = values[int(np.argmax(bad))]
        shown = repr(str(got)) if isinstance(got, str) else got  # it may be empty
        raise fault_where(bad, shown, rule, *ways)


def fault_where(bad: Bools, got: Any, rule: str, *ways: str | Way) -> DataFault:
    """Return the fault of some rows, with their number. Its place is the first of them."""
    count = f"({bad.sum():,} of {len(bad):,} rows)"
    return DataFault(f"{rule}; got {got} {count}.", *ways, row=int(np.argmax(bad)))
