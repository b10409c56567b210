"""Columns of words, with their categories and a number for each word."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_core.data import spelling
from fl_core.data.arrays import Cells
from fl_core.errors import UsageError, check_known

MOST = 100
"""The maximum number of different words in a column."""
MOST_LISTED = 10_000
"""The maximum number of words that a list gives a column, in a file of a model, a run or a site."""
FEW = 10
"""The number of different words that any column may have, even a short one."""

Categories = tuple[tuple[str, ...], ...]
"""The words of each column. A column of numbers has none."""


def holds_words(cells: Cells) -> bool:
    """Return whether a column has a word and no number; empty cells are neither."""
    if isinstance(cells, np.ndarray):
        return False
    values = {cell for cell in cells if not spelling.is_missing(cell)}
    return bool(values) and not any(map(spelling.is_number, values))


def find_categories(
    where: str, columns: Mapping[str, Cells], forced: Collection[str], listed: Mapping[str, Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    """Return the categories of all columns of words; an empty cell is a category of its own.

    Args:
        where: the data, as messages name them.
        forced: columns that are words, whatever they hold.
        listed: the categories that a federation has agreed on; None: those that the column has.

    Raises:
        UsageError: a column has too many words, or a federation's has no list.
    """
    for name in listed or ():
        check_known(f"column of {where} (categories)", name, columns)
    asked = {name: cells for name, cells in columns.items() if name in (*forced, *(listed or ())) or holds_words(cells)}
    words = {name: tuple(sorted({*_texts(cells)})) for name, cells in asked.items()}
    for name, distinct in words.items():
        if name not in (listed or ()) and len(distinct) > min(MOST, max(FEW, len(columns[name]) // 2)):
            raise UsageError(
                f"{where}, column {name!r} must hold numbers, or words that come again ({MOST} at most); got "
                f"{len(distinct):,} different words. Leave it out: --exclude-columns {name}."
            )
    if listed is None:
        return words
    lacking = [name for name in words if name not in listed]
    if lacking:
        lists = ", ".join(f"{_key(name)} = {json.dumps(list(words[name]), ensure_ascii=False)}" for name in lacking)
        also = "".join(f", {_key(name)} = [...]" for name in listed)
        raise UsageError(
            f"columns of words must have their categories listed, for all sites alike; got none for {lacking[0]!r}. "
            f"Write below [data], with all sites' words: categories = {{ {lists}{also} }}"
        )
    return {name: tuple(listed[name]) for name in words}


def check_categories(categories: Any) -> Mapping[str, Sequence[str]]:
    """Check the lists of categories in a site's file.

    Raises:
        UsageError: says what they must be.
    """
    lists = list(categories.values()) if isinstance(categories, Mapping) else [None]
    for words in lists:
        if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) for word in words):
            raise UsageError(
                f'categories must be lists of words by column, such as {{ sex = ["f", "m"] }}; got {categories!r}'
            )
        if len(words) > MOST_LISTED:
            raise UsageError(f"categories must be at most {MOST_LISTED:,} words of a column; got {len(words):,}")
        if len(set(words)) < len(words):
            raise UsageError(f"categories must be different words; got {words!r}")
    return categories


def codes(cells: Cells, words: Sequence[str]) -> NDArray[np.float64]:
    """Return each cell's place among the words; a word that is not among them has the place after the last.

    >>> codes(["m", " f", "x"], ("f", "m")).tolist()
    [1.0, 0.0, 2.0]
    """
    place = {word: k for k, word in enumerate(words)}
    return np.array([place.get(cell, len(words)) for cell in _texts(cells)], dtype=np.float64)


def learn_categories(x: NDArray[np.generic], words: Categories) -> Categories:
    """Return the words that rows [n, d] have, in their order."""
    present = [set(x[:, k].astype(np.int64).tolist()) if each else set() for k, each in enumerate(words)]
    return tuple(tuple(word for j, word in enumerate(each) if j in present[k]) for k, each in enumerate(words))


def recode(x: NDArray[np.generic], words: Categories, target: Categories) -> NDArray[np.generic]:
    """Return rows [n, d] with the places of their words among others."""
    x = x.copy()
    for k, (own, other) in enumerate(zip(words, target, strict=True)):
        if own:
            place = {word: j for j, word in enumerate(other)}
            table = np.array([*(place.get(word, len(other)) for word in own), len(other)], dtype=x.dtype)
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
        (x[:, [k]] == np.arange(len(each) + 1)).astype(np.float32) if each else x[:, [k]]
        for k, each in enumerate(words)
    ]
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def width(columns: int, words: Collection[Sequence[str]]) -> int:
    """Return the number of columns after :func:`one_hot`."""
    return columns + sum(len(each) for each in words)


def _texts(cells: Cells) -> list[str]:
    if isinstance(cells, np.ndarray):
        return [spelling.cell_text(cell) for cell in cells.tolist()]
    return [spelling.name(cell.strip()) for cell in cells]


def _key(name: str) -> str:
    """Return a column's name as a key of TOML."""
    return name if name.isascii() and name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)
