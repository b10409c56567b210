"""Conversion of raw arrays to features, numbers and natural clients. Errors name the source and the first bad row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data import spelling
from fl_core.data.columns import DataFault, Place
from fl_core.errors import listing, warn

Array = NDArray[np.generic]
Integers = NDArray[np.int64]
Cells: TypeAlias = "pd.Categorical | NDArray[np.float64]"
"""A column of text, each word once, or of numbers, NaN where one is missing."""
_EPOCH, _CLOCK = (pd.Timestamp(day, tz="UTC") for day in ("1970-01-01", "1900-01-01"))
DATE_FORMS = {
    "ISO8601": _EPOCH,
    **dict.fromkeys(("%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y"), _EPOCH),
    **dict.fromkeys(("%H:%M", "%H:%M:%S"), _CLOCK),
}
"""The forms of dates, and the day from which each counts."""
FEW = 4
"""The largest number of channels of an image if only its shape shows their axis."""


def loses_digits(values: Array) -> bool:
    """Return whether different float64 values [n] become equal in float32.

    >>> loses_digits(np.array([1.7e9, 1.7e9 + 1])), loses_digits(np.array([0.1, 0.2]))
    (True, False)
    """
    rounded = values.astype(np.float32)
    return bool((rounded != values).any()) and len(np.unique(rounded)) < len(
        np.unique(values)
    )


def cells_of(column: pd.Series, text: bool = False) -> Cells:
    """Return a column's cells: float64 [n] with NaN for missing numbers, or text in Unicode's composed form.

    Raises:
        DataFault: a cell is a list, an array or a dictionary.
    """
    kind = column.dtype
    if pd.api.types.is_numeric_dtype(column) and not text:
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    if isinstance(kind, pd.CategoricalDtype):
        place, words = column.cat.codes.to_numpy(), kind.categories
    else:
        if pd.api.types.infer_dtype(column, skipna=True) != "string":
            nested = [isinstance(each, dict | list | np.ndarray) for each in column]
            rule = "a cell must have one number or text"
            refuse_where(np.array(nested, dtype=bool), column.to_numpy(), rule)
            column = column.map(spelling.cell_text)
        place, words = pd.factorize(column)
    names = [spelling.name(spelling.cell_text(word)) for word in words]
    if (place < 0).any():
        names.append("")
    code, distinct = pd.factorize(np.array(names, dtype=object))
    code = code[place]
    cells = pd.Categorical.from_codes(code, pd.Index(distinct, dtype=object))
    used = np.bincount(code, minlength=len(distinct))
    return cells if used.all() else cells.remove_unused_categories()


def texts_of(cells: Cells | Array) -> pd.Categorical:
    """Return a column's cells as text. A missing number has no text."""
    if isinstance(cells, pd.Categorical):
        return cells
    text = cells_of(pd.Series(cells), text=True)
    assert isinstance(text, pd.Categorical)
    return text


def place_in(parts: Sequence[tuple[str, int, Place]]) -> Place:
    """Return how messages name a row of several parts, each with its name, its rows and its own names of rows."""
    ends = np.cumsum([size for _, size, _ in parts])

    def place(row: int) -> str:
        number = int(np.searchsorted(ends, row, side="right"))
        name, size, inside = parts[number]
        return f"{name}, {inside(row - int(ends[number]) + size)}"

    return place


def features(x: Array, missing: bool = False) -> Array:
    """Check features: uint8 images [n, H, W] or [n, H, W, C] with C = 1 or 3, else finite numbers [n, ...].

    A table [n, d] keeps its digits: it is float64 unless it came as float32. Other numbers are float32. A uint8 array
    with more than two dimensions is a stack of images. Other numbers are not rescaled. Floats [n, H, W, C] are turned
    to [n, C, H, W] with a warning, see :func:`channels_first`.

    Args:
        missing: keep NaN in a table [n, d], since it will be filled.

    Raises:
        DataFault: there is no sample or feature, a value is not a finite number (also after rounding to float32), or
            the shape is not that of images.
    """
    if x.dtype.kind not in "buif":
        raise DataFault(
            f"features must be numbers; got {x.dtype}.", "Convert them first."
        )
    if x.ndim < 2 or x.size == 0:
        raise DataFault(
            f"features must have shape [samples, ...] with at least one of each; got {list(x.shape)}."
        )
    if x.ndim > 2 and x.dtype.kind in "bui":
        if x.dtype == np.uint8 and (
            x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3))
        ):
            return np.ascontiguousarray(x)
        raise DataFault(
            "images must be uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3], or floats with channels first; "
            f"got {x.dtype} {list(x.shape)}."
        )
    shape = channels_first(x.shape[1:])
    if shape != x.shape[1:]:
        stored = ", ".join(map(str, x.shape[1:]))
        turned = ", ".join(map(str, shape))
        warn(
            f"pictures [n, {stored}] have their channels last and are turned to [n, {turned}]"
        )
        x = np.moveaxis(x, -1, 1)
    table = x.ndim == 2 and x.dtype != np.float32
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(x, dtype=np.float64 if table else np.float32)
        finite = np.isfinite(out.astype(np.float32, copy=False))
    if missing and x.ndim == 2:
        finite |= np.isnan(x)
    if not finite.all():
        row, *cell = map(int, np.unravel_index(int(np.argmin(finite)), finite.shape))
        value, way = x[(row, *cell)], ""
        if x.ndim == 2 and np.isnan(value):
            way = "Fill missing values with --impute mean, median or most_frequent."
        rule = f"features at position {cell} must be finite float32; got {value}."
        raise DataFault(rule, way, row)
    return out


def channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape (C, H, W) of a float image stored as (C, H, W) or (H, W, C). Other shapes stay the same.

    The channels' axis has at most :data:`FEW` entries. The other axes have at least as many, and more than one.

    >>> channels_first((28, 28, 1)), channels_first((3, 32, 32)), channels_first((16, 8, 8))
    ((1, 28, 28), (3, 32, 32), (16, 8, 8))

    Raises:
        DataFault: both the first and the last axis can be the channels.
    """
    if len(shape) != 3:
        return shape
    sides = ((shape[0], min(shape[1:])), (shape[2], min(shape[:2])))
    first, last = (count <= min(FEW, side) and side > 1 for count, side in sides)
    if first and last:
        raise DataFault(
            f"float pictures must have one axis that can be the channels; got {list(shape)}, whose first and last can.",
            "Store them as uint8 [n, H, W, C], or flatten them.",
        )
    return (shape[2], shape[0], shape[1]) if last and not first else shape


def is_text(values: Array | pd.Categorical) -> TypeGuard[pd.Categorical]:
    """Return whether values are text alone: cells, or an array of one width or of objects."""
    if isinstance(values, pd.Categorical):
        return True
    kind = values.dtype.kind
    return kind == "U" or (
        kind == "O" and set(map(type, values.flat)) <= {str, np.str_}
    )


def owners(
    values: Array | pd.Categorical, names: Sequence[str] | None = None
) -> tuple[Integers, tuple[str, ...]]:
    """Return the natural client of each sample, as indices into the clients' names.

    Text names clients directly, in sorted order and in Unicode's composed form. Whole numbers do so too, or they index
    ``names``. A name without samples is not a client.

    Raises:
        DataFault: neither text nor whole numbers, an empty name, one number in two spellings, or a number outside
            ``names``.
    """
    if is_text(values):
        if names is not None:
            raise DataFault("a list of names must be left out, since values are text.")
        check_flat(values)
        cells = texts_of(values)
        words = cells.categories
        blank = np.array([not word.strip() for word in words])[cells.codes]
        rule = "the client's name must not be empty"
        refuse_where(blank, cells, rule, "Fill the cell, or remove the row.")
        twice = spelling.double_spelling(words)
        if twice:
            raise DataFault(
                f"clients must not be one number in two spellings; got {listing(map(repr, twice))}.",
                "Write one of them, or words.",
            )
        cells = cells.reorder_categories(sorted(words))
        return cells.codes.astype(np.int64), tuple(cells.categories)
    codes = whole_numbers(values)
    if names is not None:
        check_codes(codes, names)
    distinct_codes, owner = np.unique(codes, return_inverse=True)
    return owner.astype(np.int64), tuple(
        str(k) if names is None else names[k] for k in distinct_codes
    )


def nested_groups(parts: Iterable[Any]) -> Integers:
    """Return the group of each sample, numbered part after part. The same value in two parts is two groups.

    >>> nested_groups([["p", "q", "p"], ["p"]]).tolist()
    [0, 1, 0, 2]
    """
    found, count = [], 0
    for part in parts:
        distinct, group = np.unique(np.asarray(part), return_inverse=True)
        found.append(count + group)
        count += len(distinct)
    return np.concatenate(found).astype(np.int64)


def flags(values: Array) -> NDArray[np.bool_]:
    """Check a column of booleans (or 0 and 1), such as marks of test samples, with at least one of each.

    Raises:
        DataFault: another value occurs, or all values are equal.
    """
    whole = whole_numbers(values)
    refuse_where((whole != 0) & (whole != 1), whole, "values must be 0 or 1")
    if whole.min() == whole.max():
        raise DataFault(
            f"there must be both training and test samples; got {bool(whole[0])} everywhere."
        )
    return whole.astype(bool)


def texts(values: Array) -> tuple[str, ...]:
    """Check that names are distinct and not empty.

    Raises:
        DataFault: a name is not text, empty or repeated, or there is none.
    """
    if values.dtype.kind != "U":
        raise DataFault(f"names must be text; got {values.dtype}.")
    names = tuple(spelling.name(str(value)) for value in values.flat)
    if not all(map(str.strip, names)) or len(set(names)) < len(names):
        raise DataFault(
            f"names must be distinct and not empty; got {listing(map(repr, names))}."
        )
    return names


def whole_numbers(values: Array, way: str = "", **repair: Any) -> Integers:
    """Convert integers, booleans, or floats without a fraction to int64 [n].

    Args:
        way, repair: what to do with numbers with a fraction, and the settings for it.

    Raises:
        DataFault: names the first value that is not a whole number.
    """
    check_flat(values)
    rule = "values must be whole numbers"
    if values.dtype.kind not in "buif":
        raise DataFault(f"{rule}; got {str(values[0])!r}.", row=0)
    if values.dtype.kind == "f":
        numbers = values.astype(np.float64)
        whole = np.isfinite(numbers) & (numbers == np.round(numbers))
        whole &= np.abs(numbers) < 2**53
        refuse_where(~whole, values, rule, way, **repair)
    return values.astype(np.int64)


def numbers(
    cells: Cells, given: spelling.NumberFormat = spelling.PLAIN
) -> NDArray[np.float64]:
    """Convert text to float64 [n], NaN for a cell without a value. Numbers stay as they are.

    Args:
        given: the signs in the numbers. Plain numbers are read, too.

    Raises:
        DataFault: names the first cell that is not a number.
    """
    if isinstance(cells, np.ndarray):
        return cells
    words = cells.categories
    form = spelling.format_of(words, given) or given
    known = np.array([*map(form.fits, words)], dtype=bool)
    others = ~(known[cells.codes] | lacks_value(cells))
    if others.any():
        row = int(np.argmax(others))
        signs = ("point", "comma") if form.decimal == "." else ("comma", "point")
        other = spelling.is_number(cells[row].replace(",", ".", 1))
        point = f" with a decimal {signs[0]}, not a {signs[1]}" if other else ""
        raise DataFault(
            f"the cell must be a number{point}; got {cells[row]!r} "
            f"({others.sum():,} of {len(cells):,} cells are no numbers).",
            row=row,
        )
    values = np.full(len(words), np.nan)
    values[known] = [form.number(word) for word in words[known]]
    return values[cells.codes]


def lacks_value(cells: Cells) -> NDArray[np.bool_]:
    """Return where a column has no value."""
    if isinstance(cells, np.ndarray):
        return np.isnan(cells)
    missing = [*map(spelling.is_missing, cells.categories)]
    return np.array(missing, dtype=bool)[cells.codes]


def dates(cells: pd.Categorical) -> NDArray[np.float64]:
    """Return dates as days since 1970 [n], with NaN where a cell is missing.

    All cells have one form: ISO 8601, year/month/day, day.month.year, day/month/year or month/day/year. Times alone are
    parts of a day.

    >>> dates(pd.Categorical(["1970-01-02", "", "1970-01-01T12:00"])).tolist()
    [1.0, nan, 0.5]

    Raises:
        DataFault: names the first cell that is no date, or cells that fit two forms.
    """
    words = [word.strip() for word in cells.categories]
    lacking = np.array([*map(spelling.is_missing, words)], dtype=bool)
    fits, first, way = [], 0, "Write 2024-12-31."
    for form in DATE_FORMS:
        found = pd.to_datetime(pd.Series(words), format=form, utc=True, errors="coerce")
        bad = (found.isna() & ~lacking).to_numpy()[cells.codes]
        if bad.any():
            first = max(first, int(np.argmax(bad)))
            continue
        days = (found - DATE_FORMS[form]) / pd.Timedelta(days=1)
        fits.append(days.to_numpy(np.float64, na_value=np.nan)[cells.codes])
    if not fits:
        raise DataFault(f"dates must have one form; got {cells[first]!r}.", way, first)
    if any(not np.array_equal(other, fits[0], equal_nan=True) for other in fits[1:]):
        raise DataFault(
            f"dates must not be day/month or month/day alike; got {cells[0]!r}.", way
        )
    return fits[0]


def date_text(days: float) -> str:
    """Return days since 1970 as a date, or a part of a day as a time.

    >>> date_text(19358.0), date_text(0.25)
    ('2023-01-01', '06:00')
    """
    when = pd.Timestamp(0) + pd.Timedelta(days=days)
    return f"{when:%H:%M}" if 0 <= days <= 1 else f"{when:%Y-%m-%d}"


def check_flat(values: Array | pd.Categorical) -> None:
    """Check that there is one value for each sample.

    Raises:
        DataFault: there are more, or none.
    """
    if values.ndim == 1 and values.size:
        return
    way = ""
    if values.ndim == 2 and values.shape[1] > 1:
        way = "Train a model for each column, or take task multilabel for labels of 0 and 1."
        numeric = values.dtype.kind in "buif"
        if numeric and (np.sort(values)[:, :-1] == 0).all():
            way = "Write y.argmax(axis=1)."
    rule = "there must be one value for each sample"
    raise DataFault(f"{rule}; got shape {list(values.shape)}.", way)


def check_codes(values: Integers, names: Sequence[str]) -> None:
    """Check that values are indices of names."""
    rule = f"values must be from 0 to {len(names) - 1}, the indices of names"
    refuse_where((values < 0) | (values >= len(names)), values, rule)


def refuse_where(
    bad: NDArray[np.bool_], values: Any, rule: str, way: str = "", **repair: Any
) -> None:
    """Refuse values, and name the first bad one.

    Args:
        bad: whether a value is refused. rule: what values must be. way: what to do. repair: the settings for it.
    """
    if bad.any():
        row = int(np.argmax(bad))
        got = values[row]
        shown = repr(str(got)) if isinstance(got, str) else got  # it may be empty
        raise DataFault(f"{rule}; got {shown}.", way, row, **repair)
