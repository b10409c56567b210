"""Conversion of raw labels to the targets of each task. Errors name the source and the first bad row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.arrays import (
    Array,
    Integers,
    check_codes,
    check_flat,
    is_text,
    loses_digits,
    place_in,
    whole_numbers,
)
from fl_core.data.cells import (
    Cells,
    check_spelling,
    lacks_value,
    numbers,
    refuse_where,
    texts_of,
)
from fl_core.data.columns import (
    PLAIN_NUMBERS,
    DataFault,
    Place,
    Reading,
    composed,
    double_spelling,
    is_number,
    row_of_array,
)
from fl_core.errors import UsageError, check_known, listing
from fl_core.rows import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL

FORMS = {
    CLASSIFICATION: "Leave label_numbers out, since labels may be words.",
    REGRESSION: "Write numbers.",
    SURVIVAL: "Write times as numbers, and events as 1, or 0 where the sample was censored.",
    MULTILABEL: "Write each label as 0 or 1.",
}
"""What to write in label columns that hold words, by task."""
_EVENT = "events must be 1, or 0 where the sample was censored"


def answers(
    y: Array, task: str, names: Sequence[str] | None = None
) -> tuple[Array, tuple[str, ...]]:
    """Check labels or targets: class indices with the classes' names (:func:`labels`), or targets without names.

    Raises:
        DataFault: as :func:`labels` and :func:`targets`, or targets come with names of classes.
    """
    y = _squeezed(y)
    if task == CLASSIFICATION:
        return labels(y, names)
    if task == MULTILABEL:
        return several_labels(y, names)
    if names is not None:
        raise DataFault(
            f"names of classes must be left out for task {task}, which predicts numbers."
        )
    return (targets(y) if task == REGRESSION else events(y)), ()


def labels(
    y: Array, names: Sequence[str] | None = None
) -> tuple[Integers, tuple[str, ...]]:
    """Check labels: return class indices 0..C-1 and the names of the C classes.

    Without ``names`` the classes are the distinct labels in ascending order. Their names are the labels' text. Labels
    may be text, see :func:`written_classes`. If ``names`` are given, each label must be one of them.

    Raises:
        DataFault: a label is not a whole number or has no name, or there are fewer than two classes with samples.
    """
    if is_text(y):
        check_flat(y)
        cells = texts_of(y)
        names = written_classes(cells) if names is None else names
        y = _codes(cells, names)
    values = whole_numbers(y, "Predict numbers:", task=REGRESSION)
    if names is None:
        distinct, codes = np.unique(values, return_inverse=True)
        if -1 in distinct and distinct.tolist() != [-1, 1]:
            raise DataFault(
                "labels must not be -1 unless all are -1 or 1; "
                f"got {listing(map(str, distinct), 6)}.",
                "Remove samples without a label, or give -1 another number.",
                int(np.argmax(values == -1)),
            )
        values = codes
        names = [str(value) for value in distinct]
    else:
        check_codes(values, names)
    present = np.flatnonzero(np.bincount(values))
    if len(present) < 2:
        raise DataFault(
            f"there must be at least 2 classes; got only {names[present[0]]!r}.",
            "Check the label column.",
        )
    return values.astype(np.int64), tuple(names)


def written_classes(cells: pd.Categorical) -> list[str]:
    """Return the names of classes from labels in text: ascending whole numbers, or sorted words.

    Classes keep their text, in Unicode's composed form. They are words if no cell is a number. Spaces around a word do
    not count.

    Raises:
        DataFault: a cell has no value, there is a word among numbers, or a number has two spellings, as 007 and 7.
    """
    check_present(cells)
    names = sorted({word.strip() for word in cells.categories})
    if any(map(is_number, names)):
        labels(numbers(cells))  # all are whole
        twice = double_spelling(names)
        if twice:
            raise DataFault(
                f"labels must not be one number in two spellings; got {listing(map(repr, twice))}.",
                "Read labels as numbers:",
                label_numbers=True,
            )
        names.sort(key=PLAIN_NUMBERS.number)
    return names


def label_numbers(cells: Cells, reading: Reading) -> NDArray[np.float64]:
    """Return a column of labels as numbers.

    Raises:
        DataFault: a cell is no number, or in another spelling.
    """
    try:
        return numbers(cells, reading.numbers)
    except DataFault as fault:
        if isinstance(cells, pd.Categorical):
            check_spelling(cells, reading)
        raise DataFault(fault.what, FORMS[reading.task], fault.row) from fault


def check_present(cells: Cells) -> None:
    """Check that each sample has a label.

    Raises:
        DataFault: names the first row without one.
    """
    lacking = lacks_value(cells)
    if lacking.any():
        row = int(np.argmax(lacking))
        got = "" if isinstance(cells, np.ndarray) else cells[row].strip()
        raise DataFault(
            f"each sample must have a label; got {repr(got) if got else 'an empty cell'} "
            f"({lacking.sum():,} of {len(cells):,} rows).",
            "Leave them out:",
            row,
            drop_missing_labels=True,
        )


def targets(y: Array) -> NDArray[np.float32 | np.float64]:
    """Check targets of a regression, finite numbers or text of them, as float32 [n].

    They are float64 if different values would be equal in float32.

    Raises:
        DataFault: names the first value that is not a finite float32, or there are several targets for a sample.
    """
    if y.ndim == 2 and len(y):
        raise DataFault(
            f"a regression must have one target for each sample; got {y.shape[1]}.",
            "Train a model for each.",
        )
    check_flat(y)
    if is_text(y):
        cells = texts_of(y)
        check_present(cells)
        y = numbers(cells)
    if y.dtype.kind not in "buif":
        raise DataFault(f"targets must be numbers; got {str(y[0])!r}.", row=0)
    with np.errstate(over="ignore"):
        found = y.astype(np.float32)
    refuse_where(~np.isfinite(found), y, "targets must be finite float32")
    return y.astype(np.float64) if loses_digits(y) else found


def events(y: Array) -> NDArray[np.float32]:
    """Check times and events, numbers [n, 2] or text of them, as float32 [n, 2].

    Raises:
        DataFault: names the first time below 0, or the first event other than 0 and 1.
    """
    if y.ndim != 2 or y.shape[1] != 2 or not len(y):
        raise DataFault(
            f"survival must have a time and an event for each sample; got {list(y.shape)}."
        )
    found = np.stack([targets(column) for column in y.T], axis=1)
    time, event = found.T
    order = "The time comes first."
    refuse_where(time < 0, y, "times must be at least 0", order)
    refuse_where(_not_binary(event), y, _EVENT, order)
    if not event.any():
        raise DataFault(
            "there must be an event; got only censored samples.",
            "Check the event column.",
        )
    return found.astype(np.float32)


def several_labels(
    y: Array, names: Sequence[str] | None = None
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Check labels of 0 and 1 [n, C], or text of them. Return them as float32 with the names of the C labels.

    Raises:
        DataFault: another value, a label with one value only, or less than two labels.
    """
    if y.ndim != 2 or y.shape[1] < 2 or not len(y):
        raise DataFault(
            f"multilabel must have two or more labels a sample; got {list(y.shape)}."
        )
    names = tuple(names or map(str, range(y.shape[1])))
    if len(names) != y.shape[1]:
        raise DataFault(
            f"there must be a name for each of {y.shape[1]} labels; got {len(names)}."
        )
    found = np.stack([targets(column) for column in y.T], axis=1)
    for name, column in zip(names, found.T, strict=True):
        rule = f"label {name!r} must be 0 or 1"
        refuse_where(_not_binary(column), column, rule)
        if column.min() == column.max():
            raise DataFault(
                f"label {name!r} must have both values; got {column[0]:g} everywhere."
            )
    return found.astype(np.float32), names


def joined(parts: Mapping[str, Array]) -> tuple[Array, Place]:
    """Return the labels of several parts as one, and how messages name a row of it.

    Raises:
        UsageError: some are text and some are none, or they differ in the number of labels of a sample.
    """
    parts = {part: _unboxed(_squeezed(y)) for part, y in parts.items()}
    first_part, width = next((part, y.shape[1:]) for part, y in parts.items())
    for part, y in parts.items():
        if y.shape[1:] != width:
            raise UsageError(
                f"{part}, y must have the shape of {first_part}, {list(width)} for each sample; "
                f"got {list(y.shape[1:])}. Write y.argmax(axis=1) for one-hot labels."
            )
        if y.dtype.kind == "O" and not is_text(y):
            first = type(y.flat[0])
            odd = [k for k, v in enumerate(y.flat) if v is None or type(v) is not first]
            row = odd[0] if odd else 0
            raise UsageError(
                f"{part}, y, {row_of_array(row)}: labels must be all numbers or all text; got {y.flat[row]!r}."
            )
    if len({is_text(y) for y in parts.values()}) > 1:
        raise UsageError(
            f"labels must be all numbers or all text; got both in {listing(parts, 4)}."
        )

    def place(row: int) -> str:
        return f"y, {row_of_array(row)}"

    if len(parts) == 1:
        return parts[first_part], place
    sizes = [(part, len(y), place) for part, y in parts.items()]
    return np.concatenate(list(parts.values())), place_in(sizes)


def _unboxed(y: Array) -> Array:
    """Return an array of Python's numbers as an array of numbers. Other arrays stay."""
    boxed = y.dtype.kind == "O"
    if boxed and all(isinstance(value, int | float | np.number) for value in y.flat):
        return np.array(y.tolist())
    return y


def _squeezed(y: Array) -> Array:
    """Return targets [n, 1] as [n]."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _codes(cells: pd.Categorical, names: Sequence[str]) -> Integers:
    """Return the position of each cell among the names of the classes."""
    code = {composed(name.strip()): k for k, name in enumerate(names)}
    codes = np.array([code.get(word.strip(), -1) for word in cells.categories])[
        cells.codes
    ]
    row = int(np.argmin(codes))
    if codes[row] < 0:
        try:
            check_known("class", cells[row].strip(), names)
        except UsageError as error:
            raise DataFault(str(error), row=row) from error
    return codes.astype(np.int64)


def _not_binary(values: Array) -> NDArray[np.bool_]:
    return (values != 0) & (values != 1)
