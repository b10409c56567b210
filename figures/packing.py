"""The rows of a study as one compressed file: Parquet, with a header for each run in its metadata.

Runs that take long are trained into files of JSON lines (:mod:`figures.recipe`) and packed for the repository. A packed
file holds the same headers and rows, with numbers rounded to float32 where they are not whole. Reading it takes a
twentieth of the time.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from pyarrow import parquet

from fl_core import limits, rows
from fl_core.data.packed import table as stored_table
from fl_core.errors import CorruptError, UsageError
from fl_core.storage.files import check_version, write_atomically
from fl_core.storage.schema import COUNT, validate

SUFFIX = ".parquet"
KEY = b"fedlayers.rows"
"""The key of headers and numbers of rows in the metadata: JSON, deflated, and in base64 since metadata is text."""
_ABOUT = {"headers": [{"schema": COUNT}], "lengths": [COUNT]}
Header = dict[str, Any]
Part = tuple[Header, pd.DataFrame]
"""Header and rows of a run."""
_TYPES = {
    name: str(column.dtype)
    for name, column in rows.frame([rows.row("accuracy", 0.5)]).items()
}


def write(path: Path, parts: Iterable[Part]) -> None:
    """Write runs to one file, atomically. Equal runs give equal bytes."""
    parts = list(parts)
    about = {
        "headers": [{"schema": rows.SCHEMA, **header} for header, _ in parts],
        "lengths": [len(frame) for _, frame in parts],
    }
    frame = pd.concat([frame for _, frame in parts], ignore_index=True).astype(_TYPES)
    numbers = [name for name, kind in _TYPES.items() if kind == "float64"]
    for name in numbers:
        frame[name] = frame[name].where(
            frame[name] % 1 == 0, frame[name].astype("float32")
        )
    table = pyarrow.Table.from_pandas(
        frame, preserve_index=False
    ).replace_schema_metadata(None)
    stored = io.BytesIO()
    with parquet.ParquetWriter(
        stored, table.schema, compression="zstd", compression_level=22,
        use_dictionary=[name for name in _TYPES if name not in numbers], use_byte_stream_split=numbers,
    ) as file:  # fmt: skip
        file.write_table(table)
        file.add_key_value_metadata(
            {KEY: base64.b64encode(zlib.compress(rows.dumps(about).encode(), 9))}
        )
    write_atomically(path, stored.getvalue())


def headers(path: Path) -> list[Header]:
    """Return the header of each run as it was written.

    Raises:
        UsageError: the file does not exist, or has another version's schema.
        CorruptError: it is damaged.
    """
    if not path.is_file():
        return _about(path)[0]
    found = path.stat()
    return [dict(header) for header in _headers(path, found.st_mtime_ns, found.st_size)]


@functools.cache
def _headers(path: Path, changed: int, size: int) -> list[Header]:
    """Return the headers of a file in this state: lists of figures ask for them once for each figure."""
    return _about(path)[0]


def read(path: Path) -> list[Part]:
    """Return header and rows of each run. Errors are as in :func:`headers`."""
    found, lengths = _about(path)
    try:
        frame = _plain(path, stored_table(path)).to_pandas()
        if list(frame) != list(_TYPES) or sum(lengths) != len(frame):
            raise _damaged(path, "other columns, or another number of rows")
        frame = frame.astype(_TYPES)
    except UsageError as error:
        raise CorruptError(str(error)) from error
    except (ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    ends = itertools.accumulate(lengths)
    return [
        (header, frame.iloc[end - length : end])
        for header, end, length in zip(found, ends, lengths, strict=True)
    ]


def _plain(path: Path, table: pyarrow.Table) -> pyarrow.Table:
    """Return a table with texts instead of dictionaries, if they do not take far more memory than the file.

    Raises:
        UsageError: they do.
    """
    texts = [
        name
        for name in table.column_names
        if pyarrow.types.is_dictionary(table[name].type)
    ]
    longest = [max((len(text) for part in table[name].chunks for text in part.dictionary.to_pylist()), default=0)
               for name in texts]  # fmt: skip
    limits.check_unpacked(path, path.stat().st_size, sum(longest) * table.num_rows)
    for name in texts:
        column = table[name]
        table = table.set_column(
            table.column_names.index(name), name, column.cast(column.type.value_type)
        )
    return table


def _about(path: Path) -> tuple[list[Header], list[int]]:
    if not path.is_file():
        raise UsageError(
            f"rows must be at {path}; got no file. Make them with --train."
        )
    try:
        about = limits.parsed_json(
            _inflated(base64.b64decode(parquet.read_metadata(path).metadata[KEY]))
        )
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        zlib.error,
    ) as error:
        raise _damaged(path, str(error)) from error
    if wrong := validate(about, _ABOUT):
        raise _damaged(path, wrong)
    found, lengths = about["headers"], about["lengths"]
    if len(found) != len(lengths):
        raise _damaged(path, f"{len(found)} headers of {len(lengths)} runs")
    for header in found:
        check_version(
            path, f"fedlayers.rows/{header['schema']}", f"fedlayers.rows/{rows.SCHEMA}"
        )
    return found, lengths


def _inflated(data: bytes) -> bytes:
    """Return deflated data as they were.

    Raises:
        ValueError: the end is missing, or they have far more bytes than such data do.
    """
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(data, max(limits.UNPACKED, limits.RATIO * len(data)))
    if not unpacker.eof:
        raise ValueError(
            f"headers without an end, or of more than {limits.RATIO} times their packed size"
        )
    return text


def _damaged(path: Path, found: str) -> CorruptError:
    return CorruptError(
        f"{path} must be a file of packed rows; got {found}. Restore it, or make its rows again."
    )
