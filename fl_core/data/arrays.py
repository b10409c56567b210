"""Converts raw arrays to features, labels and natural clients; errors name the place and the first bad row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fl_core.errors import UsageError, check_known, listing
from fl_core.scores import CLASSIFICATION, REGRESSION

Array = NDArray[np.generic]
Integers = NDArray[np.int64]
Place = Callable[[int], str]
Cells = Sequence[str] | NDArray[np.float64]
AS_NUMBERS = "; if numbers are to be predicted and not classes, say so: task regression (--task regression)"
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""What a cell without a value holds, in small letters."""


FEW = 4
"""Channels that a picture has at most, where its shape alone tells which axis they are."""


class MissingError(UsageError):
    """A feature has no value, and nothing fills it."""


class NotNumberError(UsageError):
    """A cell among numbers is none."""


def row_of_array(row: int) -> str:
    """How error messages name a row of an array."""
    return f"row {row} (rows count from 0)"


def features(x: Array, where: str, place: Place = row_of_array, missing: bool = False) -> Array:
    """Check features: images as uint8 [n, H, W] or [n, H, W, C] with C = 1 or 3, else finite float32 [n, ...].

    A uint8 array with more than two dimensions is a stack of images; numbers of other types are taken as they are.
    Floats [n, H, W, C] are turned to [n, C, H, W] with a warning, see :func:`channels_first`.

    Args:
        missing: NaN in a table [n, d] stays, for it will be filled.

    Raises:
        UsageError: no sample, no feature, not numeric, not finite (also after rounding to float32), or no such image.
    """
    if x.dtype.kind not in "buif":
        raise UsageError(f"{where}: {x.dtype} is not numeric")
    if x.ndim < 2 or x.size == 0:
        raise UsageError(
            f"{where}: shape {x.shape} holds no features; expected [samples, ...] with at least one of each"
        )
    if x.ndim > 2 and x.dtype.kind in "bui":
        if x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3))):
            return np.ascontiguousarray(x)
        raise UsageError(
            f"{where}: {x.dtype} {list(x.shape)} is no stack of images; images are uint8 [n, H, W], [n, H, W, 1] or "
            f"[n, H, W, 3], or floats with channels first"
        )
    shape = channels_first(x.shape[1:], where)
    if shape != x.shape[1:]:
        stored = ", ".join(map(str, x.shape[1:]))
        turned = ", ".join(map(str, shape))
        warnings.warn(f"pictures [n, {stored}] have their channels last and are turned to [n, {turned}]", stacklevel=2)
        x = np.moveaxis(x, -1, 1)
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(x, dtype=np.float32)
    finite = np.isfinite(out)
    if missing and x.ndim == 2:
        finite |= np.isnan(x)
    if not finite.all():
        row, *cell = np.unravel_index(int(np.argmin(finite)), finite.shape)
        at = f", position {[int(i) for i in cell]}"
        filled = x.ndim == 2 and np.isnan(x[(row, *cell)])
        way = "; impute (--impute mean, median or most_frequent) fills what is missing" if filled else ""
        raise UsageError(f"{where}, {place(int(row))}{at}: {x[(row, *cell)]} is not a finite float32{way}")
    return out


def channels_first(shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return the shape (C, H, W) of a float picture that is stored so or as (H, W, C); other shapes as they are.

    An axis can be that of the channels if it has at most :data:`FEW`, and the others have as many and more than one.

    >>> channels_first((28, 28, 1), "x"), channels_first((3, 32, 32), "x"), channels_first((16, 8, 8), "x")
    ((1, 28, 28), (3, 32, 32), (16, 8, 8))

    Raises:
        UsageError: the first axis can be that of the channels and so can the last.
    """
    if len(shape) != 3:
        return shape
    sides = ((shape[0], min(shape[1:])), (shape[2], min(shape[:2])))
    first, last = (count <= min(FEW, side) and side > 1 for count, side in sides)
    if first and last:
        raise UsageError(
            f"{where}: float pictures must have one axis that can be the channels; got {list(shape)}, whose first and "
            "last can. Store them as uint8 [n, H, W, C], or flatten them."
        )
    return (shape[2], shape[0], shape[1]) if last and not first else shape


def answers(
    y: Array,
    where: str,
    task: str,
    names: Sequence[str] | None = None,
    place: Place = row_of_array,
    whole: bool = True,
) -> tuple[Array, tuple[str, ...]]:
    """What is to be predicted: class indices with the classes' names (:func:`labels`), or targets without any.

    Raises:
        UsageError: as :func:`labels` and :func:`targets`; names of classes beside targets.
    """
    if task != REGRESSION:
        return labels(y, where, names, place, whole)
    if names is not None:
        raise UsageError(f"{where}: names of classes do not go with targets that are numbers (task {task})")
    return targets(y, where, place), ()


def targets(y: Array, where: str, place: Place = row_of_array) -> NDArray[np.float32]:
    """Check targets of a regression, finite numbers or text of such, as float32 [n].

    Raises:
        UsageError: names the first value that is no finite float32.
    """
    _check_flat(y, where)
    if y.dtype.kind == "U":
        y = numbers(y.tolist(), where, place)
    if y.dtype.kind not in "buif":
        raise UsageError(f"{where}, {place(0)}: {str(y[0])!r} is not a number")
    with np.errstate(over="ignore"):
        found = y.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(found))
    if bad.size:
        raise UsageError(f"{where}, {place(int(bad[0]))}: {y[bad[0]]} is not a finite float32")
    return found


def labels(
    y: Array,
    where: str,
    names: Sequence[str] | None = None,
    place: Place = row_of_array,
    whole: bool = True,
) -> tuple[Integers, tuple[str, ...]]:
    """Check labels: class indices 0..C-1 and the names of the C classes.

    Without ``names`` the distinct labels, in ascending order, are the classes, and a label's text is its class's name.
    Labels may be text, see :func:`written_labels`; each is one of ``names``, if these are given.

    Args:
        whole: whether these are all labels there are, so that each of ``names`` must be among them; a silo's are not.

    Raises:
        UsageError: a label that is no whole number or has no name; fewer than two classes; a class without samples.
    """
    if y.dtype.kind == "U":
        _check_flat(y, where)
        if names is None:
            return written_labels(y.tolist(), where, place)
        y = _codes(y.tolist(), names, where, place)
    values = whole_numbers(y, where, place, AS_NUMBERS)
    if names is None:
        distinct, codes = np.unique(values, return_inverse=True)
        if -1 in distinct and distinct.tolist() != [-1, 1]:
            raise UsageError(
                f"{where}, {place(int(np.argmax(values == -1)))}: labels must not be -1 unless all are -1 or 1; got "
                f"{listing(map(str, distinct), 6)}. Remove samples without a label, or give -1 another number."
            )
        values = codes
        names = [str(value) for value in distinct]
    else:
        _check_codes(values, names, where, place)
        empty = [names[k] for k in np.flatnonzero(np.bincount(values, minlength=len(names)) == 0).tolist()]
        if empty and whole:
            raise UsageError(f"{where}: no sample of class {listing(empty)}")
    if len(names) < 2:
        raise UsageError(f"{where}: only one class, {names[0]!r}; there is nothing to tell apart")
    return values.astype(np.int64), tuple(names)


def words_or_numbers(y: Array, where: str, task: str = CLASSIFICATION) -> Array:
    """Labels [n] as they are if they are text, else as whole numbers; objects that are all text are text.

    Of a regression, targets.

    Raises:
        UsageError: neither.
    """
    if y.dtype.kind == "O":
        others = [row for row, value in enumerate(y.flat) if not isinstance(value, str)]
        if not others:
            y = y.astype(np.str_)
        elif len(others) < y.size:
            raise UsageError(f"{where}, {row_of_array(others[0])}: {y.flat[others[0]]!r} is no text, as the others are")
        elif any(value is None for value in y.flat):
            row = next(row for row in others if y.flat[row] is None)
            raise UsageError(f"{where}, {row_of_array(row)}: None is no value")
    if task == REGRESSION:
        return targets(y, where)
    return y if y.dtype.kind == "U" else whole_numbers(y, where, else_=AS_NUMBERS)


def written_labels(cells: Sequence[str], where: str, place: Place) -> tuple[Integers, tuple[str, ...]]:
    """Class indices and class names from labels in text: whole numbers in ascending order, or words in sorted order.

    Classes are words where no cell is a number; spaces around a word do not count.

    Raises:
        UsageError: as :func:`labels`; an empty cell, or a word among numbers.
    """
    words = [cell.strip() for cell in cells]
    numeric = any(is_number(word) for word in words if word.lower() != "nan")
    lacking = [row for row, word in enumerate(words) if word.lower() in (MISSING if numeric else ("", "nan"))]
    if lacking:
        what = f"{words[lacking[0]]!r} is no value" if words[lacking[0]] else "the cell is empty"
        raise UsageError(
            f"{where}, {place(lacking[0])}: {what}. Each sample must have a label, and {len(lacking)} of {len(words)} "
            "have none. Remove these rows."
        )
    if numeric:
        return labels(numbers(cells, where, place), where, place=place)
    names = sorted(set(words))
    return labels(_codes(words, names, where, place), where, names, place)


def _codes(words: Sequence[str], names: Sequence[str], where: str, place: Place) -> Integers:
    """The place of each word among the names of the classes."""
    code = {name.strip(): k for k, name in enumerate(names)}
    known = [word.strip() in code for word in words]
    if not all(known):
        row = known.index(False)
        check_known(f"class of {where}, {place(row)}:", words[row], names)
    return np.array([code[word.strip()] for word in words], dtype=np.int64)


def is_number(cell: str) -> bool:
    """Return whether a cell reads as a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def owners(
    values: Array, where: str, names: Sequence[str] | None = None, place: Place = row_of_array
) -> tuple[Integers, tuple[str, ...]]:
    """The natural client of each sample, as indices into the clients' names.

    Text names clients directly, in sorted order; whole numbers do too, or point into ``names``. A name that no
    sample points to is no client.

    Raises:
        UsageError: neither text nor whole numbers, an empty name, or a number outside ``names``.
    """
    if values.dtype.kind == "U":
        _check_flat(values, where)
        if names is not None:
            raise UsageError(f"{where}: is text, so a separate list of names has no meaning")
        blank = np.flatnonzero(np.char.strip(values.astype(np.str_)) == "")
        if blank.size:
            raise UsageError(f"{where}, {place(int(blank[0]))}: the client's name is empty")
        distinct, owner = np.unique(values, return_inverse=True)
        return owner.astype(np.int64), tuple(str(value) for value in distinct)
    codes = whole_numbers(values, where, place)
    if names is not None:
        _check_codes(codes, names, where, place)
    distinct_codes, owner = np.unique(codes, return_inverse=True)
    return owner.astype(np.int64), tuple(str(k) if names is None else names[k] for k in distinct_codes)


def flags(values: Array, where: str) -> NDArray[np.bool_]:
    """Check a column of booleans (or 0 and 1), such as marks of test samples, with at least one of each.

    Raises:
        UsageError: any other value, or all the same.
    """
    whole = whole_numbers(values, where)
    bad = np.flatnonzero((whole != 0) & (whole != 1))
    if bad.size:
        raise UsageError(f"{where}, {row_of_array(int(bad[0]))}: {whole[bad[0]]} is neither 0 nor 1")
    if whole.min() == whole.max():
        raise UsageError(f"{where}: is {bool(whole[0])} throughout; both training and test samples are needed")
    return whole.astype(bool)


def texts(values: Array, where: str) -> tuple[str, ...]:
    """Check names: distinct and not empty.

    Raises:
        UsageError: not text, no name at all, an empty name, or a name twice.
    """
    _check_flat(values, where)
    if values.dtype.kind != "U":
        raise UsageError(f"{where}: {values.dtype} is not text")
    names = [str(value) for value in values]
    if any(not name.strip() for name in names):
        raise UsageError(f"{where}: an empty name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{where}: more than once: {listing(twice)}")
    return tuple(names)


def whole_numbers(values: Array, where: str, place: Place = row_of_array, else_: str = "") -> Integers:
    """Convert integers, booleans, or floats without a fraction to int64 [n].

    Args:
        else_: what to do about numbers with a fraction, for the message.

    Raises:
        UsageError: names the first value that is no whole number.
    """
    _check_flat(values, where)
    if values.dtype.kind not in "buif":
        raise UsageError(f"{where}, {place(0)}: {str(values[0])!r} is not a whole number")
    if values.dtype.kind == "f":
        numbers = values.astype(np.float64)
        bad = np.flatnonzero(~(np.isfinite(numbers) & (numbers == np.round(numbers)) & (np.abs(numbers) < 2**53)))
        if bad.size:
            raise UsageError(f"{where}, {place(int(bad[0]))}: {values[bad[0]]} is not a whole number{else_}")
    return values.astype(np.int64)


def holds_numbers(cells: Cells) -> bool:
    """Whether a column has a cell that reads as a number, or one that is empty."""
    return isinstance(cells, np.ndarray) or any(not cell or is_number(cell) for cell in cells)


def numbers(cells: Cells, where: str, place: Place = row_of_array, missing: bool = False) -> NDArray[np.float64]:
    """Convert text to float64 [n]; numbers stay as they are.

    Args:
        missing: cells without a value (:data:`MISSING`) become NaN.

    Raises:
        MissingError: names the first cell without a value, unless these may be.
        UsageError: names the first cell that is no number.
    """
    if isinstance(cells, np.ndarray):
        lacking = np.flatnonzero(np.isnan(cells))
        if lacking.size and not missing:
            raise MissingError(f"{where}, {place(int(lacking[0]))}: the value is missing")
        return cells
    values = np.empty(len(cells))
    for row, cell in enumerate(cells):
        if cell.strip().lower() in MISSING:
            if not missing:
                what = f"{cell!r} is no value" if cell.strip() else "the cell is empty"
                raise MissingError(f"{where}, {place(row)}: {what}")
            values[row] = np.nan
            continue
        try:
            values[row] = float(cell)
        except ValueError as error:
            comma = " (a decimal point is needed, not a comma)" if is_number(cell.replace(",", ".", 1)) else ""
            raise NotNumberError(f"{where}, {place(row)}: {cell!r} is not a number{comma}") from error
    return values


def _check_flat(values: Array, where: str) -> None:
    if values.ndim != 1 or values.size == 0:
        one_hot = values.ndim == 2 and values.dtype.kind in "buif" and bool((np.sort(values)[:, :-1] == 0).all())
        way = " Write y.argmax(axis=1)." if one_hot and values.shape[1] > 1 else ""
        way = " Write y.ravel()." if values.ndim == 2 and values.shape[1] == 1 else way
        raise UsageError(f"{where}: there must be one value a sample; got the shape {list(values.shape)}.{way}")


def _check_codes(values: Integers, names: Sequence[str], where: str, place: Place) -> None:
    bad = np.flatnonzero((values < 0) | (values >= len(names)))
    if bad.size:
        raise UsageError(
            f"{where}, {place(int(bad[0]))}: {values[bad[0]]} is outside 0..{len(names) - 1}, for which there are names"
        )
