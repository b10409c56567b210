"""Packed tables: .parquet files by pyarrow and .xlsx files by openpyxl, which are imported only for them."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fl_core import limits
from fl_core.data import spelling
from fl_core.data.arrays import Cells, Place, cells_of, row_of_array
from fl_core.errors import UsageError, needs_package

SUFFIXES = (".parquet", ".xlsx")
ELEMENTS = 2**20
"""XML elements of an .xlsx file at most, or two for each of its bytes if that is more. A cell has two, with an end."""
ROWS = 2**20
"""Rows of a sheet at most, as in Excel."""
_SHEETS = (
    2**26
)  # bytes to which a small .xlsx file may unpack: usual ones unpack to about 10 times their size
_UNNAMED = re.compile(r"__index_level_[0-9]+__")  # stored by pandas next to the columns
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
    """Return the names of a file's columns: of a .parquet file without an index, of an .xlsx file from its first row.

    Raises:
        UsageError: the file cannot be read, or needs a package that is not installed.
    """
    if path.suffix.lower() == ".parquet":
        return [spelling.name(name) for name in _stored(path)]
    with _sheet(path) as (names, _):
        return names


def columns(
    path: Path, names: Sequence[str], texts: Collection[str]
) -> tuple[dict[str, Cells], Place]:
    """Return columns by name, and how messages name a row.

    Numbers are float64 [n] with NaN for missing ones, everything else is text.

    Args:
        texts: the columns to read as text in any case, such as whole numbers that name clients.

    Raises:
        UsageError: a column of lists or structures, no rows, or rows that cannot be read.
    """
    if path.suffix.lower() == ".xlsx":
        return _sheet_columns(path, names, texts)
    stored = {spelling.name(name): name for name in _stored(path)}
    import pyarrow

    found = table(
        path,
        [stored[name] for name in names],
        [stored[name] for name in texts if name in names],
    )
    if not found.num_rows:
        raise UsageError(f"{path} must have rows; got columns alone. Add samples.")
    cells = {}
    for name in names:
        column = found.column(stored[name])
        if pyarrow.types.is_nested(column.type):
            raise UsageError(
                f"{path}, column {name!r} must have one number or text in each cell; got {column.type}."
            )
        values = column.to_pandas(integer_object_nulls=name in texts)
        cells[name] = cells_of(values, name in texts)
    return cells, row_of_array


# --- .parquet ------------------------------------------------------------------------------------------------------


def _stored(path: Path) -> list[str]:
    names = [str(name) for name in _open(path).schema_arrow.names]
    return [name for name in names if not _UNNAMED.fullmatch(name)]


def table(
    path: Path, names: Sequence[str] | None = None, objects: Collection[str] = ()
) -> Any:
    """Return columns of a .parquet file as pyarrow's table, by default all. Each text is in memory once.

    Args:
        objects: columns whose numbers become Python's objects.

    Raises:
        UsageError: the file cannot be read, or unpacks to far more than it has bytes.
    """
    import pyarrow
    from pyarrow import parquet, types

    file = _open(path)
    schema, about = file.schema_arrow, file.metadata
    read = [field for field in schema if names is None or field.name in names]
    rows = (
        sum(64 if field.name in objects else _bytes_each(field.type) for field in read)
        * about.num_rows
    )
    stored = sum(
        about.row_group(k).total_byte_size for k in range(about.num_row_groups)
    )
    limits.check_unpacked(path, path.stat().st_size, max(rows, stored))
    texts = [
        field.name
        for field in schema
        if types.is_string(field.type) or types.is_large_string(field.type)
    ]
    try:
        return parquet.ParquetFile(path, read_dictionary=texts).read(
            columns=None if names is None else list(names)
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} must be a readable .parquet file; got a damaged one ({error}). Save it again."
        ) from error


def _open(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise needs_package("pyarrow", f"read {path}", "parquet") from error
    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} must be a readable .parquet file: {error}. Save it again."
        ) from error


def _bytes_each(kind: Any) -> int:
    """Return the bytes of memory that a value takes. Texts are in memory once; others become Python's objects."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    numbers = (
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    )
    return 8 if numbers or types.is_string(kind) or types.is_large_string(kind) else 64


# --- .xlsx ---------------------------------------------------------------------------------------------------------


def _sheet_columns(
    path: Path, names: Sequence[str], texts: Collection[str]
) -> tuple[dict[str, Cells], Place]:
    """Return some columns of the first sheet, and how messages name a row."""
    with _sheet(path) as (header, rows):
        chosen = [header.index(name) for name in names]
        found: list[list[Any]] = [[] for _ in names]
        numbers: list[int] = []
        for number, row in rows:
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
        name: _values(cells, name in texts)
        for name, cells in zip(names, found, strict=True)
    }, lambda row: f"row {numbers[row]}"


@contextmanager
def _sheet(
    path: Path,
) -> Iterator[tuple[list[str], Iterator[tuple[int, tuple[Any, ...]]]]]:
    """Open the first sheet. Yield its header, and its further rows with their numbers. A title above it is left out."""
    try:
        import openpyxl
    except ModuleNotFoundError as error:
        raise needs_package("openpyxl", f"read {path}", "xlsx") from error
    try:
        _check_elements(path)
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        try:
            rows: Iterator[tuple[int, tuple[Any, ...]]] = enumerate(
                book.worksheets[0].values, 1
            )
            names = _names(next(rows, (1, ()))[1])
            if sum(map(bool, names)) == 1:
                second = next(rows, None)
                if second and spelling.is_title(names, _names(second[1])):
                    names = _names(second[1])
                elif second:
                    rows = chain([second], rows)
            yield names, rows
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
            path, packed, sum(entry.file_size for entry in entries), _SHEETS
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


def _values(cells: Sequence[Any], text: bool) -> Cells:
    if not text and all(
        cell is None or isinstance(cell, int | float) for cell in cells
    ):
        return np.array(
            [np.nan if cell is None else cell for cell in cells], dtype=np.float64
        )
    return [spelling.cell_text(cell) for cell in cells]
