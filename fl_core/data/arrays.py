"""Conversion of raw arrays to features, natural clients, labels and targets.

A fault names the first bad row if a single row is to blame. Callers add the name of the
data with :func:`fl_core.data.faults.located`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeGuard

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.faults import DataFault, Place, Way, place_in, row_of_array
from fl_core.data.names import Names, composed, is_number
from fl_core.data.values import (
    Array,
    Integers,
    is_marked,
    lacks_value,
    numbers,
    refuse_where,
    texts_of,
)
from fl_core.errors import UsageError, check_known, listing, spelled, warn
from fl_core.rows import CLASSIFICATION, MULTILABEL, POSITIONS, REGRESSION

FEW = 4
"""The maximum number of channels of a float image whose shape must show their axis."""


def loses_digits(values: Array) -> bool:
    """Return whether some different float64 values [n] become equal in float32.

    >>> loses_digits(np.array([1.7e9, 1.7e9 + 1])), loses_digits(np.array([0.1, 0.2]))
    (True, False)
    """
    rounded = values.astype(np.float32)
    return bool((rounded != values).any()) and len(np.unique(rounded)) < len(
        np.unique(values)
    )


def features(x: Array, missing: bool = False) -> Array:
    """Return features after a check: uint8 images, or else finite numbers [n, ...].

    Images are uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3], and stay uint8. Other
    integers and booleans must be a table [n, d]. A table becomes float64, unless it
    came as float32 or float16. All other numbers become float32. No numbers are
    rescaled. Floats [n, H, W, C] are turned to [n, C, H, W] with a warning, see
    :func:`channels_first`.

    Args:
        x: the samples as an array.
        missing: whether a table [n, d] may have NaN, which will be filled later.

    Raises:
        DataFault: the values are no numbers, there is no sample or feature, a value is
            not finite in float32, or the shape is not that of images.
    """
    if x.dtype.kind not in "buif":
        raise DataFault(
            f"features must be numbers; got {x.dtype}.", "Convert them first."
        )
    if x.ndim < 2 or x.size == 0:
        got_shape = list(x.shape)
        raise DataFault(
            f"features must have shape [samples, ...] with at least one of each; got {got_shape}."
        )
    if x.ndim > 2 and x.dtype.kind in "bui":
        if x.dtype == np.uint8 and (
            x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3))
        ):
            return np.ascontiguousarray(x)
        got_shape = list(x.shape)
        raise DataFault(
            "images must be uint8 [n, H, W], [n, H, W, 1] or [n, H, W, 3], or floats with channels first; "
            f"got {x.dtype} {got_shape}."
        )
    shape = channels_first(x.shape[1:])
    if shape != x.shape[1:]:
        stored_shape = ", ".join(map(str, x.shape[1:]))
        wanted_shape = ", ".join(map(str, shape))
        warn(
            f"pictures [n, {stored_shape}] have their channels last and are turned to [n, {wanted_shape}]"
        )
        x = np.moveaxis(x, -1, 1)
    is_table = x.ndim == 2 and x.dtype not in (np.float16, np.float32)
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(
            x, dtype=np.float64 if is_table else np.float32
        )
        is_finite = np.isfinite(converted.astype(np.float32, copy=False))
    if missing and x.ndim == 2:
        is_finite |= np.isnan(x)
    if not is_finite.all():
        row, *cell = map(
            int, np.unravel_index(int(np.argmin(is_finite)), is_finite.shape)
        )
        value, advice = x[(row, *cell)], ""
        if x.ndim == 2 and np.isnan(value):
            advice = f"Fill missing values: {spelled(impute='median')}."
        rule = f"features at position {cell} must be finite float32; got {value}."
        raise DataFault(rule, advice, row=row)
    return converted


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
    first_fits, last_fits = (
        count <= min(FEW, side) and side > 1 for count, side in sides
    )
    if first_fits and last_fits:
        got_shape = list(shape)
        raise DataFault(
            f"float pictures must have one axis that can be the channels; got {got_shape}, whose first and last can.",
            "Store them as uint8 [n, H, W, C], or flatten them.",
        )
    if last_fits and not first_fits:
        return (shape[2], shape[0], shape[1])
    return shape


def is_text(values: Array | pd.Categorical) -> TypeGuard[pd.Categorical]:
    """Return whether all values are text: a Categorical, or an array of strings or of string objects."""
    if isinstance(values, pd.Categorical):
        return True
    type_code = values.dtype.kind
    return type_code == "U" or (
        type_code == "O" and set(map(type, values.flat)) <= {str, np.str_}
    )


def owners(
    values: Array | pd.Categorical, names: Sequence[str] | None = None
) -> tuple[Integers, Names]:
    """Return the natural client of each sample, as indices into the clients' names.

    Args:
        values: a client for each sample [n]: its name as text, its name as a whole
            number, or its index in ``names``.
        names: names of the clients. None means that ``values`` are the names.

    Returns:
        The indices, int64 [n], and the names of the clients that have samples. Text is
        sorted, in Unicode's composed form. Whole numbers are in ascending order, and
        ``names`` stay in their order.

    Raises:
        DataFault: a value is neither text nor a whole number, a name is empty, one
            number has two spellings, a number is no index of ``names``, or text comes
            with ``names``.
    """
    if is_text(values):
        if names is not None:
            raise DataFault("a list of names must be left out, since values are text.")
        check_flat(values)
        cells = texts_of(values)
        rule = "the client's name must not be empty"
        refuse_where(lacks_value(cells), cells, rule, "Fill it, or remove the row.")
        check_spellings("clients", cells.categories, "Write one of them, or words.")
        cells = cells.reorder_categories(sorted(cells.categories))
        return cells.codes.astype(np.int64), tuple(cells.categories)
    codes = whole_numbers(values)
    if names is not None:
        check_codes(codes, names)
    distinct_codes, owner = np.unique(codes, return_inverse=True)
    return owner.astype(np.int64), tuple(
        str(k) if names is None else names[k] for k in distinct_codes
    )


PREDICT: Way = "Predict numbers", {"task": REGRESSION}


def exact(word: str) -> Decimal:
    """Return the number that a word spells, with all its digits.

    >>> exact("9007199254740993") - exact("9007199254740992")
    Decimal('1')
    """
    return Decimal(word.strip())


def of_digits(words: Iterable[str]) -> bool:
    """Return whether all words consist of ASCII digits only.

    Such words are whole numbers of any size, without a sign or blanks.
    """
    return all(word.isascii() and word.isdigit() for word in words)


def check_spellings(
    what: str, words: Iterable[str], way: str = "Write one of them."
) -> None:
    """Refuse two different words that are one number, such as 007 and 7. Numbers of any size keep their digits.

    >>> check_spellings("labels", ["9007199254740992", "9007199254740993"])

    Args:
        what: the noun for the words, in the message.
        way: the repair that the error proposes.

    Raises:
        DataFault: there are two such words. The message has both.
    """
    word_of: dict[Decimal, str] = {}
    for word in filter(is_number, words):
        earlier_word = word_of.setdefault(exact(word), word)
        if earlier_word != word:
            rule = f"{what} must not be one number in two spellings"
            raise DataFault(f"{rule}; got {earlier_word!r}, {word!r}.", way)


def nested_groups(parts: Iterable[Any]) -> Integers:
    """Return the number of each sample's group, int64 [n]. Equal values in two parts are two groups.

    >>> nested_groups([["p", "q", "p"], ["p"]]).tolist()
    [0, 1, 0, 2]

    Args:
        parts: for each part the groups of its samples, numbers or texts.
    """
    numbers, n_groups = [], 0
    for values in parts:
        distinct_values, group = np.unique(np.asarray(values), return_inverse=True)
        numbers.append(n_groups + group)
        n_groups += len(distinct_values)
    return np.concatenate(numbers).astype(np.int64)


def whole_numbers(values: Array, *ways: str | Way) -> Integers:
    """Convert integers, booleans, or floats without a fraction to int64 [n].

    Args:
        values: the numbers [n].
        ways: repairs that an error proposes for floats that are no whole numbers.

    Raises:
        DataFault: a value is not a whole number, a float has a magnitude of 2**53 or
            more, an integer is 2**63 or more, or there is not one value for each sample.
            The message names the first bad value.
    """
    check_flat(values)
    rule = "values must be whole numbers"
    if values.dtype.kind not in "buif":
        raise DataFault(f"{rule}; got {str(values[0])!r}.", row=0)
    if values.dtype.kind == "f":
        numbers = values.astype(np.float64)
        is_whole = (numbers == np.round(numbers)) & (np.abs(numbers) < 2**53)
        refuse_where(~is_whole, values, rule, *ways)
    codes = values.astype(np.int64)
    if values.dtype.kind == "u":
        refuse_where(codes < 0, values, f"{rule} below 2**63")
    return codes


def check_flat(values: Array | pd.Categorical) -> None:
    """Check that there is one value for each sample.

    Raises:
        DataFault: there are several values for a sample, or no samples.
    """
    if values.ndim == 1 and values.size:
        return
    got_shape = list(values.shape)
    raise DataFault(
        f"there must be one value for each sample; got shape {got_shape}.",
        "Write y.argmax(axis=1) for one-hot labels, or take task multilabel for several labels.",
    )


def check_codes(values: Integers, names: Sequence[str]) -> None:
    """Check that values are indices of names.

    Raises:
        DataFault: a value is below 0, or too large.
    """
    rule = f"values must be from 0 to {len(names) - 1}, the indices of names"
    refuse_where((values < 0) | (values >= len(names)), values, rule)


# --- labels and targets ---------------------------------------------------------------------------------------

LABELLED = "each sample must have a label"


def answers(
    y: Array, task: str, names: Sequence[str] | None = None
) -> tuple[Array, Names]:
    """Return labels or targets after a check, with the names of the classes or labels.

    Args:
        y: labels or targets [n, ...], numbers or text. The shape [n, 1] counts as [n].
        task: one of :data:`fl_core.rows.TASKS`. The check is that of :func:`labels`,
            :func:`targets`, :func:`events` or :func:`several_labels`.
        names: names of the classes or labels. None means that they follow from ``y``.

    Returns:
        Class indices [n] with the names of the classes, labels of 0 and 1 [n, L] with
        the names of the labels, targets [n], or times and events [n, 2]. For regression
        and survival the names are empty.

    Raises:
        DataFault: the check of the task fails, or ``names`` are given for regression or
            survival.
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


def task_of_entries(y: Array, task: str) -> str:
    """Return the task of labels from Python with several numbers for each sample.

    In a classification whole numbers are labels at positions, unless they are one-hot:
    rows [n, C] of zeros but for at most one number above 0. In a classification floats
    are targets of a regression, unless all are 0 or 1. In a regression floats are
    always its targets.

    >>> task_of_entries(np.array([[3, 1], [0, 2]]), CLASSIFICATION)
    'labels at positions'

    Args:
        y: the labels [n, ...].
        task: the requested task, one of :data:`fl_core.rows.TASKS`.

    Returns:
        The task, or "" for all other labels, such as those of one number for each
        sample.
    """
    if y.ndim < 2 or y.shape[1:] == (1,) or y.dtype.kind not in "iuf":
        return ""
    is_one_hot = y.ndim == 2 and bool((np.sort(y)[:, :-1] == 0).all())
    if y.dtype.kind == "f":
        is_binary = task == CLASSIFICATION and bool(np.isin(y, (0, 1)).all())
        if task not in (CLASSIFICATION, REGRESSION) or is_binary:
            return ""
        return REGRESSION
    if task == CLASSIFICATION and not is_one_hot:
        return POSITIONS
    return ""


def finite_entries(y: Array) -> Array:
    """Return labels with several numbers for each sample: whole numbers as int64, and floats as float32.

    Args:
        y: numbers [n, ...]. The result has the same shape.

    Raises:
        DataFault: a number is not finite in float32.
    """
    targets_array = y.astype(np.float32 if y.dtype.kind == "f" else np.int64)
    is_bad = ~np.isfinite(targets_array).reshape(len(y), -1)
    refuse_where(
        np.logical_or.reduce(is_bad, 1), targets_array, "targets must be finite float32"
    )
    return targets_array


def labels(y: Array, names: Sequence[str] | None = None) -> tuple[Integers, Names]:
    """Check labels: return class indices 0..C-1 and the names of the C classes.

    Indices are int64 [n]. Without ``names`` the classes are the distinct labels in
    ascending order. Their names are the labels' text. Labels may be text, see
    :func:`written_classes`. With ``names`` a text must be one of them, and a number
    must be the index of one.

    >>> [labels(np.array([-1, 1, -1], dtype=kind))[1] for kind in (int, float, str)]
    [('-1', '1'), ('-1', '1'), ('-1', '1')]
    >>> labels(np.array(["0", "1", "-1"]))
    Traceback (most recent call last):
        ...
    fl_core.data.faults.DataFault: labels must not be -1 unless all are -1 or 1; got -1, 0, 1. Remove samples ...
    >>> labels(np.array([0, 1, np.nan]))
    Traceback (most recent call last):
        ...
    fl_core.data.faults.DataFault: each sample must have a label; got nan (1 of 3 rows). Remove the others.

    Raises:
        DataFault: a label is missing, is not a whole number or is not among ``names``;
            -1 is one of other labels than -1 and 1; or fewer than two classes have
            samples.
    """
    check_flat(y)
    if is_text(y):
        cells = texts_of(y)
        if names is None:
            names = written_classes(cells)
        code_by_name = {composed(name.strip()): k for k, name in enumerate(names)}
        code_of_word = [code_by_name.get(word.strip(), -1) for word in cells.categories]
        y = np.array(code_of_word, dtype=np.int64)[cells.codes]
        row = int(np.argmin(y))
        if y[row] < 0:
            try:
                check_known("class", cells[row].strip(), names)
            except UsageError as error:
                raise DataFault(str(error), row=row) from error
    refuse_where(y != y, y, LABELLED, "Remove the others.")
    values = whole_numbers(y, PREDICT)
    if names is None:
        distinct_labels, codes = np.unique(values, return_inverse=True)
        if -1 in distinct_labels and distinct_labels.tolist() != [-1, 1]:
            labels_text = listing(map(str, distinct_labels), 6)
            raise DataFault(
                f"labels must not be -1 unless all are -1 or 1; got {labels_text}.",
                "Remove samples without a label, or give -1 another number.",
                row=int(np.argmax(values == -1)),
            )
        values = codes
        names = [str(value) for value in distinct_labels]
    else:
        check_codes(values, names)
    present_classes = np.flatnonzero(np.bincount(values))
    if len(present_classes) < 2:
        raise DataFault(
            f"there must be at least 2 classes; got only {names[present_classes[0]]!r}.",
            "Check the label column.",
        )
    return values.astype(np.int64), tuple(names)


def written_classes(cells: pd.Categorical) -> list[str]:
    """Return the names of classes from labels in text: ascending whole numbers, or sorted words.

    Classes keep their text. They are words if no cell is a number. Spaces around a word
    do not count.

    Args:
        cells: the labels, from :func:`fl_core.data.values.texts_of`.

    Raises:
        DataFault: a cell is empty or a mark such as NA, there is a word among numbers,
            a number is not whole, or a number has two spellings, such as 007 and 7. Or
            as for :func:`labels`, if a number has a sign, a point or an exponent.
    """
    refuse_where(is_marked(cells), cells, LABELLED)
    names = sorted({word.strip() for word in cells.categories})
    if any(map(is_number, names)):
        if not of_digits(names):
            labels(numbers(cells))  # all are whole
        check_spellings("labels", names)
        names.sort(key=exact)
    return names


def targets(y: Array) -> NDArray[np.float32 | np.float64]:
    """Check targets of a regression, finite numbers or text of them, as float32 [n].

    They are float64 if different values would be equal in float32.

    Raises:
        DataFault: a value is missing, is no number or is not finite in float32, or
            there are several targets for a sample or no samples.
    """
    if y.ndim == 2 and len(y):
        raise DataFault(
            f"a regression must have one target for each sample; got {y.shape[1]}.",
            "Train a model for each.",
        )
    check_flat(y)
    if is_text(y):
        cells = texts_of(y)
        refuse_where(is_marked(cells), cells, LABELLED)
        y = numbers(cells)
    if y.dtype.kind not in "buif":
        raise DataFault(f"targets must be numbers; got {str(y[0])!r}.", row=0)
    with np.errstate(over="ignore"):
        rounded_targets = y.astype(np.float32)
    refuse_where(~np.isfinite(rounded_targets), y, "targets must be finite float32")
    if loses_digits(y):
        return y.astype(np.float64)
    return rounded_targets


def events(y: Array) -> NDArray[np.float32]:
    """Return times and events as float32 [n, 2], after a check.

    Args:
        y: numbers or text [n, 2]. Column 0 is the time, at least 0. Column 1 is 1 for an event and 0 for a censored
            sample.

    Raises:
        DataFault: another shape, a value that is no finite number, a time below 0,
            another event than 0 and 1, no event at all, or different times that are
            equal in float32.
    """
    if y.ndim != 2 or y.shape[1] != 2 or not len(y):
        got_shape = list(y.shape)
        raise DataFault(
            f"survival must have a time and an event for each sample; got {got_shape}."
        )
    numbers = np.stack([targets(column) for column in y.T], axis=1)
    time, event = numbers.T
    refuse_where(time < 0, y, "times must be at least 0", "The time comes first.")
    if time.dtype == np.float64 and loses_digits(time):
        raise DataFault(
            "different times must differ in float32; got times that become equal.",
            "Count them from a later start, or in another unit.",
        )
    rule = "events must be 1, or 0 where the sample was censored"
    advice = "Make other codes 1 and 0, and name the time first."
    refuse_where(~np.isin(event, (0, 1)), y, rule, advice)
    if not event.any():
        raise DataFault(
            "there must be an event; got only censored samples.",
            "Check the event column.",
        )
    return numbers.astype(np.float32)


def several_labels(
    y: Array, names: Sequence[str] | None = None
) -> tuple[NDArray[np.float32], Names]:
    """Return labels of 0 and 1 as float32 [n, L] after a check, and the labels' names.

    Args:
        y: the labels [n, L], as numbers or text.
        names: names of the labels. None means their numbers from 0.

    Raises:
        DataFault: a value is not 0 or 1, a label has the same value for all samples,
            there are fewer than two labels, or their number is not that of ``names``.
    """
    if y.ndim != 2 or y.shape[1] < 2 or not len(y):
        got_shape = list(y.shape)
        raise DataFault(
            f"multilabel must have two or more labels a sample; got {got_shape}."
        )
    names = tuple(names or map(str, range(y.shape[1])))
    if len(names) != y.shape[1]:
        raise DataFault(
            f"there must be a name for each of {y.shape[1]} labels; got {len(names)}."
        )
    numbers = np.stack([targets(column) for column in y.T], axis=1)
    for name, column in zip(names, numbers.T, strict=True):
        rule = f"label {name!r} must be 0 or 1"
        refuse_where(~np.isin(column, (0, 1)), column, rule)
        if column.min() == column.max():
            raise DataFault(
                f"label {name!r} must have both values; got {column[0]:g} everywhere."
            )
    return numbers.astype(np.float32), names


def joined(parts: Mapping[str, Array]) -> tuple[Array, Place]:
    """Return the labels of several parts as one array, and a function that names a row of it in messages.

    Args:
        parts: the labels [n, ...] of each part, by the part's name in messages. There
            must be at least one part. The shape [n, 1] counts as [n].

    Raises:
        UsageError: some labels are text and others are not, or the parts differ in the number of labels of a sample.
    """
    parts = {part_name: _squeezed(y) for part_name, y in parts.items()}
    for part_name, y in parts.items():
        value_types = map(type, y.flat if y.dtype.kind == "O" else "")
        if y.dtype.kind == "O" and all(
            issubclass(k, (int, float, np.number)) for k in value_types
        ):
            parts[part_name] = np.array(y.tolist())  # Python's numbers
    first_part, first_shape = next(
        (part_name, y.shape[1:]) for part_name, y in parts.items()
    )
    for part_name, y in parts.items():
        if y.shape[1:] != first_shape:
            expected = list(first_shape)
            got_shape = list(y.shape[1:])
            raise UsageError(
                f"{part_name}, y must have the shape of {first_part}, {expected} for each sample; "
                f"got {got_shape}. Write y.argmax(axis=1) for one-hot labels."
            )
        if y.dtype.kind == "O" and not is_text(y):
            first_type = type(y.flat[0])
            row = next(
                (
                    k
                    for k, v in enumerate(y.flat)
                    if v is None or type(v) is not first_type
                ),
                0,
            )
            place_text = row_of_array(row)
            raise UsageError(
                f"{part_name}, y, {place_text}: labels must be all numbers or all text; got {y.flat[row]!r}."
            )
    if len({is_text(y) for y in parts.values()}) > 1:
        raise UsageError(
            f"labels must be all numbers or all text; got both in {listing(parts, 4)}."
        )

    def place(row: int) -> str:
        place_text = row_of_array(row)
        return f"y, {place_text}"

    if len(parts) == 1:
        return parts[first_part], place
    sizes = [(part_name, len(y), place) for part_name, y in parts.items()]
    return np.concatenate(list(parts.values())), place_in(sizes)


def _squeezed(y: Array) -> Array:
    """Return labels or targets [n, 1] as [n], and those of another shape unchanged."""
    if y.ndim == 2 and y.shape[1] == 1:
        return y[:, 0]
    return y
