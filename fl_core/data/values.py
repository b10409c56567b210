"""Values of one column or array: numbers, or texts of which each is stored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.faults import DataFault, Way
from fl_core.data.names import composed, is_mark, is_number

Array = NDArray[np.generic]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Cells: TypeAlias = "pd.Categorical | Floats"
"""A column of text, each word once and an empty one for a missing cell; or of numbers, NaN where one is missing."""


def text_of(value: Any) -> str:
    """Return a value as text. A whole number is written without a decimal point, and a missing value is an empty text.

    >>> [text_of(value) for value in (7.0, 1.5, None, True, "7.0")]
    ['7', '1.5', '', 'True', '7.0']
    """
    if isinstance(value, str):
        return value
    if value is None or value is pd.NA or value != value:
        return ""
    if isinstance(value, int) or not hasattr(value, "is_integer"):
        return str(value)
    if value.is_integer():
        return str(int(value))
    return str(value)


def texts_of(values: Cells | Array | pd.Series) -> pd.Categorical:
    """Return values as text, in Unicode's composed form. A missing value becomes an empty text.

    Each distinct text is one category of the result. A Categorical is returned as it
    is.

    >>> list(texts_of(np.array([1.0, np.nan, 2.5])))
    ['1', '', '2.5']

    Raises:
        DataFault: a value is a list, an array or a dictionary.
    """
    if isinstance(values, pd.Categorical):
        return values
    column = pd.Series(values)
    types = pd.api.types
    if types.is_object_dtype(column.dtype) and types.infer_dtype(column) != "string":
        is_nested = [isinstance(value, dict | list | np.ndarray) for value in column]
        rule = "a cell must have one number or text"
        refuse_where(np.array(is_nested, dtype=bool), column.to_numpy(), rule)
        column = column.map(text_of)
    if isinstance(column.dtype, pd.CategoricalDtype):
        positions, words = column.cat.codes.to_numpy(), column.cat.categories
    else:
        positions, words = pd.factorize(column)
    names = [composed(text_of(word)) for word in words.astype(object)]
    if (positions < 0).any():
        names.append("")
    code, distinct_words = pd.factorize(np.array(names, dtype=object))
    cells = pd.Categorical.from_codes(
        code[positions], pd.Index(distinct_words, dtype=object)
    )
    word_counts = np.bincount(cells.codes, minlength=len(distinct_words))
    if word_counts.all():
        return cells
    return cells.remove_unused_categories()


def taken(cells: Any, rows: Any) -> Any:
    """Return a column's cells at these rows. A column of text keeps only the words of these rows.

    Args:
        cells: a Categorical of texts, or numbers [n].
        rows: positions, or a mask [n].
    """
    cells = cells[rows]
    if isinstance(cells, np.ndarray):
        return cells
    return cells.remove_unused_categories()


def lacks_value(cells: Cells) -> Bools:
    """Return whether each cell is NaN, an empty text or blanks only, bool [n]."""
    if isinstance(cells, np.ndarray):
        return np.isnan(cells)
    return _where(cells, lambda word: not word.strip())


def is_marked(cells: pd.Categorical) -> Bools:
    """Return whether each text is empty or marks a missing value, such as NA, bool [n]."""
    return _where(cells, is_mark)


def _where(cells: pd.Categorical, holds: Callable[[str], bool]) -> Bools:
    """Return whether ``holds`` is true of each cell's word, bool [n]."""
    word_holds = np.array([*map(holds, cells.categories)], dtype=bool)
    return (
        word_holds[cells.codes]
        if word_holds.any()
        else np.zeros(len(cells), dtype=bool)
    )


def numbers(cells: Cells, *ways: str | Way) -> Floats:
    """Convert text to float64 [n], NaN for a cell without a value. Numbers stay as they are.

    Args:
        ways: repairs that an error proposes for other cells.

    Raises:
        DataFault: a cell is not a number. The message names the first.
    """
    if isinstance(cells, np.ndarray):
        return cells
    words = cells.categories
    is_numeric = np.array([*map(is_number, words)], dtype=bool)
    is_other = ~(is_numeric[cells.codes] | lacks_value(cells))
    refuse_where(is_other, cells, "the cell must be a number", *ways)
    values = np.full(len(words), np.nan)
    values[is_numeric] = [float(word) for word in words[is_numeric]]
    return values[cells.codes]


def refuse_where(bad: Bools, values: Any, rule: str, *ways: str | Way) -> None:
    """Raise a fault if a value is refused, and name the first one.

    Args:
        bad: whether each value is refused, bool [n].
        values: the values [n].
        rule: what values must be.
        ways: repairs that the error proposes.

    Raises:
        DataFault: a value is refused.
    """
    if bad.any():
        refused_value = values[int(np.argmax(bad))]
        # it may be empty
        value_text = (
            repr(str(refused_value))
            if isinstance(refused_value, str)
            else refused_value
        )
        raise fault_where(bad, value_text, rule, *ways)


def fault_where(
    bad: Bools, got: Any, rule: str, *ways: str | Way, line: str = ""
) -> DataFault:
    """Return the fault of the rows marked in ``bad``, with their number. It names the first of them.

    Args:
        bad: whether each row is faulty, bool [n], at least one.
        got: the first faulty value, for the message.
        rule: what values must be.
        ways: repairs that the error proposes.
        line: a line of pandas that repairs the table.
    """
    count = f"({bad.sum():,} of {len(bad):,} rows)"
    return DataFault(
        f"{rule}; got {got} {count}.", *ways, row=int(np.argmax(bad)), line=line
    )
