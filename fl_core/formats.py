"""Bounds on tables and images from untrusted files: the memory that a file takes is computed before it is read.

:mod:`fl_core.storage` opens the files, and bounds JSON, TOML, safetensors and archives.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core import storage
from fl_core.errors import UsageError, about, needs_package

if TYPE_CHECKING:
    import pandas as pd
    from pyarrow.parquet import FileMetaData, ParquetFile

COLUMNS = 2**16
"""Columns of a table at most."""
ROW_BYTES, CELL_BYTES = 160, 40
"""Bytes that preparing a table takes for each row, and for each of its cells, whatever they contain."""
FOOTER_BYTES = 2**26
"""Bytes of a Parquet file's list of columns at most; a column takes about 200 in each group of rows."""
_PLAIN = (
    *("null", "boolean", "integer", "floating", "decimal", "temporal"),
    *("string", "large_string", "string_view"),
)
"""Types of Arrow that a column may have, by the names of their tests in :mod:`pyarrow.types`."""


def check_table(path: Path, rows: int, columns: int) -> None:
    """Refuse a table before its rows are read, if they would take far more memory than the file has bytes.

    The rows take :data:`ROW_BYTES` each, and :data:`CELL_BYTES` for each cell.

    >>> check_table(Path(__file__), rows=20, columns=100_000)
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: ... must have at most 65,536 columns; got 100,000. Leave some out.

    Args:
        path: the file's path.
        rows, columns: the numbers of the table's rows and columns.

    Raises:
        UsageError: the rows would take far more memory, there are more than
            :data:`COLUMNS` columns, or the path is no regular file. The message names
            the file, and for memory also the setting of
            :func:`fl_core.storage.check_unpacked` that allows more.
    """
    if columns > COLUMNS:
        raise UsageError(
            f"{path} must have at most {COLUMNS:,} columns; got {columns:,}. Leave some out."
        )
    n_bytes = rows * (ROW_BYTES + CELL_BYTES * columns)
    storage.check_unpacked(path, storage.check_regular(path), n_bytes)


def check_lines(path: Path, data: bytes, keys: int) -> None:
    """Refuse lines of JSON whose table, with a cell for each line and key, would take far more memory than the file.

    Args:
        path: the file's path.
        data: the file's contents.
        keys: number of keys of a line.

    Raises:
        UsageError: as for :func:`check_table`.
    """
    check_table(path, data.count(b"\n") + 1, keys)


def open_parquet(path: Path, excluded: Collection[str] = ()) -> ParquetFile:
    """Open a Parquet file whose columns are numbers, truth values, times and texts. Each text is in memory once.

    Rows, columns and pages are bounded before any page is unpacked. :func:`read_parquet` then reads them.

    Args:
        path: the file's path.
        excluded: columns that may have any type, as they are not read.

    Raises:
        UsageError: pyarrow is not installed, the file cannot be read, a column is
            nested or binary, or the rows would take far more memory than the file has
            bytes.
    """
    size = storage.check_regular(path)
    with _readable_parquet(path):
        from pyarrow import parquet

        with storage.opened(path) as stream:
            stream.seek(max(0, size - 8))
            footer = int.from_bytes(stream.read(4), "little")
        if footer > FOOTER_BYTES:
            footer_size = storage.format_bytes(footer)
            raise ValueError(f"its footer has {footer_size}")
        file = parquet.ParquetFile(path)
        fields, metadata = list(file.schema_arrow), file.metadata
    fields = [field for field in fields if field.name not in excluded]
    for field in fields:
        check_plain(path, field)
    check_table(path, metadata.num_rows, len(fields))
    with _readable_parquet(path):
        pages = page_bytes(path, metadata)
    storage.check_unpacked(path, size, PAGE_COPIES * pages)
    text_names = [field.name for field in fields if "string" in str(field.type)]
    with _readable_parquet(path):
        return parquet.ParquetFile(path, read_dictionary=text_names)


def read_parquet(path: Path, file: ParquetFile, names: Sequence[str]) -> pd.DataFrame:
    """Return columns of a file from :func:`open_parquet`, without the metadata that pandas has stored.

    Args:
        path: the file's path, for messages.
        file: the opened file.
        names: the columns to read.

    Raises:
        UsageError: the file is damaged.
    """
    with _readable_parquet(path):
        table = file.read([*names]).replace_schema_metadata()
        frame: pd.DataFrame = table.to_pandas(integer_object_nulls=True)
        return frame


@contextmanager
def _readable_parquet(path: Path) -> Iterator[None]:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise needs_package("pyarrow", f"read {path}", "parquet") from error
    error_types = (
        *(pyarrow.ArrowException, OSError, ValueError, LookupError, RecursionError),
        OverflowError,
    )
    with about(
        f"{path} must be a readable .parquet file", error_types, way="Save it again."
    ):
        yield


def page_bytes(path: Path, metadata: FileMetaData) -> int:
    """Return the number of bytes that all pages of a Parquet file unpack to, as the pages' own headers say.

    The sizes in the file's list of columns may be too low. While a page is read, up to
    :data:`PAGE_COPIES` copies of its bytes are in memory. The caller must allow for them.

    Args:
        path: the file's path.
        metadata: the file's list of columns, as pyarrow has read it.

    Raises:
        ValueError, LookupError, RecursionError: a page is damaged, there are too many
            pages, or texts are written as differences. A few bytes of these stand for
            long texts.
    """
    n_bytes = 0
    with (
        storage.opened(path) as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        most_pages = MIN_PAGES + len(data) // PAGE_LEAST
        for chunk in product(
            range(metadata.num_row_groups), range(metadata.num_columns)
        ):
            column = metadata.row_group(chunk[0]).column(chunk[1])
            position = column.data_page_offset
            if column.has_dictionary_page:
                position = min(position, column.dictionary_page_offset or position)
            end = position + column.total_compressed_size
            if not 0 <= position <= end <= len(data):
                raise ValueError("a column lies outside of it")
            while position < end:
                header, position = _struct(data, position)
                unpacked_size, packed_size = header[UNPACKED_SIZE], header[PACKED_SIZE]
                forms = (header.get(DATA_PAGE, {}), header.get(DATA_PAGE_2, {}))
                whole = isinstance(unpacked_size, int) and isinstance(packed_size, int)
                if not whole or not all(isinstance(form, dict) for form in forms):
                    raise ValueError(_ANOTHER_FORM)
                most_pages -= 1
                if unpacked_size < 0 or packed_size < 0 or most_pages < 0:
                    raise ValueError("its pages are too many or have no size")
                if DIFFERENCES in (forms[0].get(2), forms[1].get(4)):
                    raise ValueError(
                        "texts must be written plainly or as a dictionary; got differences"
                    )
                n_bytes += unpacked_size
                position += packed_size
    return n_bytes


UNPACKED_SIZE, PACKED_SIZE, DATA_PAGE, DATA_PAGE_2 = 2, 3, 5, 8
"""Numbers of the fields in a page's header, by the Parquet format."""
DIFFERENCES = 7
"""The encoding DELTA_BYTE_ARRAY. Its field is 2 of a data page, or 4 of one of the second version."""
PAGE_COPIES = 3
"""Copies of a page's bytes while it is read."""
MIN_PAGES, PAGE_LEAST = 50_000, 100
"""Pages of a file at most are ``MIN_PAGES``, and one for each ``PAGE_LEAST`` of its bytes."""
_ANOTHER_FORM = "a page has a header of another form"
_Fields = dict[int, Any]


def _struct(data: mmap.mmap, position: int) -> tuple[_Fields, int]:
    """Return the fields of a structure in Thrift's compact form by number, and the position behind it.

    Only whole numbers and inner structures are returned. Other fields are skipped.

    Args:
        data: the file's bytes.
        position: where the structure begins.

    Raises:
        ValueError: a field has a type that no header of a page has, or a number has too
            many bytes.
        IndexError: the file ends within the structure.
    """
    fields: _Fields = {}
    number = 0
    while head := data[position]:
        position += 1
        type_code, step = head & 15, head >> 4
        if step:
            number += step
        else:
            number, position = _whole(data, position)
        if type_code in (1, 2):  # a truth value is its own type
            continue
        if type_code == 3:
            position += 1
        elif type_code in (4, 5, 6):
            fields[number], position = _whole(data, position)
        elif type_code == 7:
            position += 8
        elif type_code == 8:
            length, position = _varint(data, position)
            position += length
        elif type_code == 12:
            fields[number], position = _struct(data, position)
        else:
            raise ValueError(_ANOTHER_FORM)
    return fields, position + 1


def _whole(data: mmap.mmap, position: int) -> tuple[int, int]:
    """Return the signed number at a position, whose sign is the last bit, and the position behind it."""
    number, position = _varint(data, position)
    return (number >> 1) ^ -(number & 1), position


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, position
    raise ValueError("a number of a page has too many bytes")


def check_plain(path: Path, field: Any) -> None:
    """Refuse a column of Arrow whose values are not numbers, truth values, times or texts.

    Such a column is nested or binary, for example. A dictionary counts as the type of
    its values.

    Args:
        path: the file's path, for the message.
        field: the column, a ``pyarrow.Field``.

    Raises:
        UsageError: the values are of another type. The message names the file, the
            column and the type.
    """
    from pyarrow import types

    arrow_type = field.type
    if types.is_dictionary(field.type):
        arrow_type = field.type.value_type
    if not any(getattr(types, f"is_{name}")(arrow_type) for name in _PLAIN):
        raise UsageError(
            f"{path}, column {field.name!r} must be numbers, truth values, times or texts; got {field.type}. "
            "Leave it out of the file."
        )


SCANS = 100
"""Scans of a JPEG at most. Each takes the time of the whole image, and encoders write about ten."""
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
"""The two bytes that begin a part of a JPEG. Within pixels 0 or the number of a restart follows 255."""
_ALONE, _END, _SCAN = (b"\x01", b"\xd8"), b"\xd9", b"\xda"


def check_scans(data: bytes) -> None:
    r"""Refuse a JPEG with more than :data:`SCANS` scans, as each takes long to decode. Bytes after its end are ignored.

    >>> check_scans(b"\xff\xd8" + 101 * b"\xff\xda\0\2")
    Traceback (most recent call last):
        ...
    ValueError: it has more than 100 scans

    Raises:
        ValueError: the JPEG has too many scans.
    """
    position = scans = 0
    if data.count(b"\xff" + _SCAN) <= SCANS:
        return
    while mark := _MARKER.search(data, position):
        position = mark.end()
        if mark[1] == _END:
            return
        if mark[1] in _ALONE:
            continue
        scans += mark[1] == _SCAN
        if scans > SCANS:
            raise ValueError(f"it has more than {SCANS} scans")
        position += int.from_bytes(data[position : position + 2], "big")


COPIES = 4
"""Copies of an image, in its own size, that are in memory while it is prepared."""


def check_images(
    where: Path,
    files: Sequence[Path],
    sizes: Sequence[tuple[int, int]],
    prepared: tuple[int, int],
    channels: int,
) -> None:
    """Refuse images before any is decoded, by their own sizes, whatever size they are scaled to.

    Args:
        where: their folder, for the message.
        files: the image files.
        sizes: width and height of each file's image.
        prepared: width and height of all when they are prepared.
        channels: number of channels of the prepared images.

    Raises:
        UsageError: an image, or all together, would take far more memory than their
            files have bytes. The message names the file, or the folder.
    """
    file_sizes = [os.stat(file).st_size for file in files]
    n_pixels = [width * height for width, height in sizes]
    for file, n_bytes, pixels in zip(files, file_sizes, n_pixels, strict=True):
        storage.check_unpacked(file, n_bytes, COPIES * channels * pixels)
    n_prepared = len(files) * prepared[0] * prepared[1]
    storage.check_unpacked(
        where, sum(file_sizes), channels * max(sum(n_pixels), n_prepared)
    )
