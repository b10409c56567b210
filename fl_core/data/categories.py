"""Columns of words, with their categories and a number for each word."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data import spelling
from fl_core.data.arrays import Cells, texts_of
from fl_core.data.columns import DataFault

MOST = 100
"""The maximum number of different words in a column."""
MOST_LISTED = 10_000
"""The maximum number of words that a list gives a column, in a file of a model or a run."""
FEW = 10
"""The number of different words that any column may have, even a short one."""

Categories = tuple[tuple[str, ...], ...]
"""The words of each column. A column of numbers has none."""


def holds_words(cells: Cells) -> bool:
    """Return whether a column has a word and no number; empty cells are neither."""
    if isinstance(cells, np.ndarray):
        return False
    values = {cell for cell in set(cells) if not spelling.is_missing(cell)}
    return bool(values) and not any(map(spelling.is_number, values))


def words_of(where: str, name: str, cells: Cells) -> tuple[str, ...]:
    """Return the words of a column; an empty cell is a word of its own.

    Args:
        where: the column, as messages name it. name: its name.

    Raises:
        DataFault: there are too many words.
    """
    words = tuple(
        sorted({spelling.name(cell.strip()) for cell in set(texts_of(cells))})
    )
    if len(words) > min(MOST, max(FEW, len(cells) // 2)):
        raise DataFault(
            f"{where} must hold numbers, or words that come again ({MOST} at most); got "
            f"{len(words):,} different words. Leave it out: --exclude-columns {shlex.quote(name)}.",
            exclude_columns=[name],
        )
    return words


def codes(cells: Cells, words: Sequence[str]) -> NDArray[np.float64]:
    """Return each cell's place among the words; a word that is not among them has the place after the last.

    >>> codes(["m", " f", "x"], ("f", "m")).tolist()
    [1.0, 0.0, 2.0]
    """
    place = {word: k for k, word in enumerate(words)}
    code, distinct = pd.factorize(np.array(texts_of(cells), dtype=object))
    places = [place.get(spelling.name(word.strip()), len(words)) for word in distinct]
    return np.array(places, dtype=np.float64)[code]


def learn_categories(x: NDArray[np.generic], words: Categories) -> Categories:
    """Return the words that rows [n, d] have, in their order."""
    present = [
        set(x[:, k].astype(np.int64).tolist()) if each else set()
        for k, each in enumerate(words)
    ]
    return tuple(
        tuple(word for j, word in enumerate(each) if j in present[k])
        for k, each in enumerate(words)
    )


def recode(
    x: NDArray[np.generic], words: Categories, target: Categories
) -> NDArray[np.generic]:
    """Return rows [n, d] with the places of their words among others."""
    x = x.copy()
    for k, (own, other) in enumerate(zip(words, target, strict=True)):
        if own:
            place = {word: j for j, word in enumerate(other)}
            table = np.array(
                [*(place.get(word, len(other)) for word in own), len(other)],
                dtype=x.dtype,
            )
            x[:, k] = table[x[:, k].astype(np.int64)]
    return x


def one_hot(x: NDArray[np.float32], words: Categories) -> NDArray[np.float32]:
    """Return rows with a column for each word, and one for all other words, instead of the words' places.

    >>> one_hot(np.array([[7, 0], [8, 2]], dtype=np.float32), ((), ("f", "m"))).tolist()
    [[7.0, 1.0, 0.0, 0.0], [8.0, 0.0, 0.0, 1.0]]
    """
    if not any(words):
        return x
    parts = [
        (x[:, [k]] == np.arange(len(each) + 1)).astype(np.float32)
        if each
        else x[:, [k]]
        for k, each in enumerate(words)
    ]
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def width(columns: int, words: Collection[Sequence[str]]) -> int:
    """Return the number of columns after :func:`one_hot`."""
    return columns + sum(len(each) for each in words)
