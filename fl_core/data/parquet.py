"""Tables in .parquet files, by pyarrow, which is imported only for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fl_core import limits
from fl_core.data import spelling
from fl_core.data.arrays import Cells, Place, cells_of, row_of_array
from fl_core.errors import UsageError, needs_package

_UNNAMED = re.compile(r"__index_level_[0-9]+__")  # stored by pandas next to the columns


def header(path: Path) -> list[str]:
    """Return the names of a file's columns, without an index that has no name.

    Raises:
        UsageError: the file cannot be read, or needs a package that is not installed.
    """
    return [spelling.name(name) for name in _stored(path)]


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
