"""Reading of several tables as one. Each file is a client with the file's name."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from fl_core.data import spelling
from fl_core.data.arrays import Cells, Place
from fl_core.data.columns import (
    BETWEEN,
    TABLES,
    Reading,
    check_distinct_columns,
    first_duplicate,
)
from fl_core.data.image_folders import holds_images
from fl_core.errors import UsageError, listing

Header = Callable[[Path, Reading], list[str]]
Columns = Callable[[Path, Sequence[str]], tuple[dict[str, Cells], Place]]


def is_table(path: Path) -> bool:
    """Return whether a path is a table, or several tables."""
    return bool(files_of(path)) or (not path.is_dir() and path.suffix.lower() in TABLES)


def files_of(path: Path) -> list[Path]:
    """Return the tables of a folder or of a list of files, in sorted order; none for anything else.

    A folder whose subfolders hold images is a dataset of images, whatever else it has.

    >>> files_of(Path("b.csv,a.csv"))
    [PosixPath('a.csv'), PosixPath('b.csv')]

    Raises:
        UsageError: a file of the list is no table or is not there, or two files have one name.
    """
    if path.is_dir():
        found = [
            file
            for file in path.iterdir()
            if file.suffix.lower() in TABLES and not file.name.startswith(".")
        ]
        parts = [] if holds_images(path) else sorted(found)
    elif BETWEEN in str(path) and not path.exists():
        parts = sorted(map(Path, str(path).split(BETWEEN)))
    else:
        return []
    twice = first_duplicate([spelling.name(part.stem) for part in parts])
    if twice is not None:
        both = [str(part) for part in parts if spelling.name(part.stem) == twice]
        raise UsageError(
            f"each file must have its own name, the name of its client; got {twice!r} in {listing(both)}. "
            "Rename one of them."
        )
    return parts


def header(parts: Sequence[Path], reading: Reading, header_of: Header) -> list[str]:
    """Return the columns of all tables, after a column of the client's name.

    Raises:
        UsageError: a table lacks a column that is read, or has one of the clients' name.
    """
    headers = {part: header_of(part, reading) for part in parts}
    names = list(dict.fromkeys(name for each in headers.values() for name in each))
    client = reading.client_column
    for part, own in headers.items():
        check_distinct_columns(part, own)
        if client in own:
            raise UsageError(
                f"each file must be one client, or a column must name the clients; got both in {part}, column "
                f"{client!r}. Leave the column out: --client-column file --exclude-columns {client}"
            )
    read = {
        part: tuple(name for name in names if name in own and _is_read(name, reading))
        for part, own in headers.items()
    }
    usual = Counter(read.values()).most_common(1)[0][0]
    for part, own_names in read.items():
        lacking = [name for name in usual if name not in own_names]
        more = [name for name in own_names if name not in usual]
        if lacking or more:
            got = [f"no {listing(map(repr, lacking), 6)}"] * bool(lacking) + [
                listing(map(repr, more), 6)
            ] * bool(more)
            raise UsageError(
                f"{part} must have the columns of the other files; got {' and '.join(got)}. Rename them, or leave them "
                f"out of all files: --exclude-columns {' '.join([*lacking, *more][:12])}"
            )
    return [client, *names]


def _is_read(name: str, reading: Reading) -> bool:
    """Return whether a column is a feature or has a role."""
    if name in (*reading.labels, reading.text_column):
        return True
    return name not in (reading.exclude_columns or ()) and (
        reading.columns is None or name in reading.columns
    )


def columns(
    parts: Sequence[Path], names: Sequence[str], client: str, read: Columns
) -> tuple[dict[str, Cells], Place]:
    """Return some columns of all tables, one table after the other, and how messages name a row."""
    own = [name for name in names if name != client]
    found = [read(part, own) for part in parts]
    sizes = [len(next(iter(cells.values()))) for cells, _ in found]
    ends = list(accumulate(sizes))
    joined: dict[str, Cells] = {
        name: _join([cells[name] for cells, _ in found]) for name in own
    }
    if client in names:
        joined[client] = [
            spelling.name(part.stem)
            for part, size in zip(parts, sizes, strict=True)
            for _ in range(size)
        ]

    def place(row: int) -> str:
        number = bisect_right(ends, row)
        return f"{parts[number].name}, {found[number][1](row - (ends[number] - sizes[number]))}"

    return {name: joined[name] for name in names}, place


def _join(cells: Sequence[Cells]) -> Cells:
    """Return the cells of all files; numbers become text where another file has text."""
    arrays = [each for each in cells if isinstance(each, np.ndarray)]
    if len(arrays) == len(cells):
        return np.concatenate(arrays)
    return [
        cell
        for each in cells
        for cell in (_written(each) if isinstance(each, np.ndarray) else each)
    ]


def _written(values: np.ndarray) -> list[str]:
    return [spelling.cell_text(value) for value in values.tolist()]
