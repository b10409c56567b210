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
    names = [str(name) for name in _open(path).schema_arrow.names]
    return [spelling.name(name) for name in names if not _UNNAMED.fullmatch(name)]


def columns(
    path: Path, names: Sequence[str], texts: Collection[str]
) -> tuple[dict[str, Cells], Place]:
    """Return columns by name, and how messages name a row.

    Numbers are float64 [n] with NaN for missing ones, everything else is text. Each text is in memory once.

    Args:
        texts: the columns to read as text in any case, such as whole numbers that name clients.

    Raises:
        UsageError: a column of lists or structures, no rows, a file that cannot be read, or one that unpacks to far
            more than it has bytes.
    """
    import pyarrow
    from pyarrow import types

    file = _open(path)
    about = file.metadata
    fields = {spelling.name(field.name): field for field in file.schema_arrow}
    each = [64 if name in texts else _bytes_each(fields[name].type) for name in names]
    groups = map(about.row_group, range(about.num_row_groups))
    stored = sum(group.total_byte_size for group in groups)
    limits.check_unpacked(
        path, path.stat().st_size, max(sum(each) * about.num_rows, stored)
    )
    if not about.num_rows:
        raise UsageError(f"{path} must have rows; got columns alone. Add samples.")
    for name in names:
        if types.is_nested(fields[name].type):
            raise UsageError(
                f"{path}, column {name!r} must have one number or text in each cell; got {fields[name].type}."
            )
    words = [field.name for field in fields.values() if _is_text(field.type)]
    try:
        found = _open(path, words).read(columns=[fields[name].name for name in names])
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} must be a readable .parquet file; got a damaged one ({error}). Save it again."
        ) from error
    cells = {}
    for name in names:
        column = found.column(fields[name].name)
        values = column.to_pandas(integer_object_nulls=name in texts)
        cells[name] = cells_of(values, name in texts)
    return cells, row_of_array


def _open(path: Path, texts: Sequence[str] = ()) -> Any:
    """Open a file. Each text of the columns ``texts`` will be in memory once."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise needs_package("pyarrow", f"read {path}", "parquet") from error
    try:
        return parquet.ParquetFile(path, read_dictionary=texts)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} must be a readable .parquet file: {error}. Save it again."
        ) from error


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _bytes_each(kind: Any) -> int:
    """Return the bytes of memory that a value takes. Texts are in memory once; others become Python's objects."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    numbers = (
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    )
    return 8 if numbers or _is_text(kind) else 64
