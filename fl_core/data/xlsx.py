"""Reading of the first sheet of .xlsx files with openpyxl, which is imported only for them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fl_core import limits
from fl_core.data import spelling
from fl_core.data.arrays import Cells
from fl_core.errors import UsageError, needs_package

ELEMENTS = 2**20
"""XML elements of a file at most, or two for each of its bytes if that is more. A cell has two, each with an end."""
ROWS = 2**20
"""Rows of a sheet at most, as in Excel."""
_UNPACKED = (
    2**26
)  # bytes to which a small file may unpack: usual ones unpack to about 10 times their size
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    KeyError,
    ValueError,
    TypeError,
    EOFError,
)


def header(path: Path) -> list[str]:
    """Return the names of the columns from the first row.

    Raises:
        UsageError: openpyxl is not installed, or the file is no .xlsx file.
    """
    with _rows(path) as rows:
        return _names(next(rows, ()))


def columns(
    path: Path, names: Sequence[str], texts: Collection[str]
) -> tuple[dict[str, Cells], list[int]]:
    """Return some columns by name, and the number of each row in the sheet.

    Columns of numbers are float64 [n], with NaN where a cell is empty. Others are text.

    Args:
        texts: columns that are text whatever they hold.

    Raises:
        UsageError: no rows, or rows that cannot be read.
    """
    with _rows(path) as rows:
        header = _names(next(rows, ()))
        chosen = [header.index(name) for name in names]
        found: list[list[Any]] = [[] for _ in names]
        numbers: list[int] = []
        for number, row in enumerate(rows, 2):
            if number > ROWS:
                raise UsageError(
                    f"{path} must have at most {ROWS:,} rows; got more. Save it as .csv or .parquet."
                )
            if any(cell is not None for cell in row):
                numbers.append(number)
                for cells, k in zip(found, chosen, strict=True):
                    cells.append(row[k] if k < len(row) else None)
    if not numbers:
        raise UsageError(
            f"{path} must have rows; got a header and no rows. Add samples."
        )
    return {
        name: _cells(cells, name in texts)
        for name, cells in zip(names, found, strict=True)
    }, numbers


@contextmanager
def _rows(path: Path) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Open the first sheet for reading, row by row."""
    try:
        import openpyxl
    except ModuleNotFoundError as error:
        raise needs_package("openpyxl", f"read {path}", "xlsx") from error
    try:
        _check_elements(path)
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        try:
            yield iter(book.worksheets[0].values)
        finally:
            book.close()
    except UsageError:
        raise
    except _DAMAGED as error:
        raise UsageError(
            f"{path} must be a readable .xlsx file; got a damaged one ({error}). Save it again."
        ) from error


def _check_elements(path: Path) -> None:
    """Refuse a file before it is parsed if it unpacks to far more bytes or XML elements than it has bytes.

    Raises:
        UsageError: names the limit.
    """
    packed, count = path.stat().st_size, 0
    most = max(ELEMENTS, 2 * packed)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        limits.check_unpacked(
            path, packed, sum(entry.file_size for entry in entries), _UNPACKED
        )
        for entry in entries:
            with archive.open(entry) as file:
                while part := file.read(2**20):
                    count += part.count(b"<")
    if count > most:
        raise UsageError(
            f"{path} must have at most {most:,} XML elements; got {count:,}. Save it as .csv or .parquet."
        )


def _names(row: Sequence[Any]) -> list[str]:
    """Return the header's cells as text, without the empty ones at its end."""
    names = [spelling.name(spelling.cell_text(cell)) for cell in row]
    while names and not names[-1]:
        names.pop()
    return names


def _cells(cells: Sequence[Any], text: bool) -> Cells:
    if not text and all(
        cell is None or isinstance(cell, int | float) for cell in cells
    ):
        return np.array(
            [np.nan if cell is None else cell for cell in cells], dtype=np.float64
        )
    return [spelling.cell_text(cell) for cell in cells]
