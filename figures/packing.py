"""The rows of a study as one compressed file: Parquet, with a header for each run in its metadata.

Runs are trained into files of JSON lines (:mod:`figures.training`) and packed for the repository. A packed file holds
the same headers and rows, with numbers rounded to float32 where they are not whole. Reading it takes a twentieth of
the time.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from pyarrow import parquet

from fl_core import rows
from fl_core.errors import CorruptError
from fl_core.storage import write_atomically

SUFFIX = ".parquet"
KEY = b"fedlayers.rows"
"""The key of headers and numbers of rows in the metadata: JSON, deflated, and in base64 since metadata is text."""
Header = dict[str, Any]
Part = tuple[Header, pd.DataFrame]
"""Header and rows of a run."""
_TYPES = {
    name: str(column.dtype)
    for name, column in rows.frame([rows.row("accuracy", 0.5)]).items()
}


def write(path: Path, run_parts: Iterable[Part]) -> None:
    """Write runs to one file, atomically. Equal runs give equal bytes."""
    run_parts = list(run_parts)
    metadata = {
        "headers": [{"schema": rows.SCHEMA, **header} for header, _ in run_parts],
        "lengths": [len(frame) for _, frame in run_parts],
    }
    frame = pd.concat([frame for _, frame in run_parts], ignore_index=True).astype(
        _TYPES
    )
    float_columns = [
        column for column, type_name in _TYPES.items() if type_name == "float64"
    ]
    for column in float_columns:
        frame[column] = frame[column].where(
            frame[column] % 1 == 0, frame[column].astype("float32")
        )
    arrow_table = pyarrow.Table.from_pandas(
        frame, preserve_index=False
    ).replace_schema_metadata(None)
    buffer = io.BytesIO()
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 22}
    with parquet.ParquetWriter(
        buffer, arrow_table.schema, use_dictionary=False, **options
    ) as file:
        file.write_table(arrow_table)
        file.add_key_value_metadata(
            {KEY: base64.b64encode(zlib.compress(rows.dumps(metadata).encode(), 9))}
        )
    write_atomically(path, buffer.getvalue())


def headers(path: Path) -> list[Header]:
    """Return the header of each run as it was written.

    Raises:
        CorruptError: the file is damaged, or of another format.
    """
    status = path.stat()
    return [
        dict(header) for header in _headers(path, status.st_mtime_ns, status.st_size)
    ]


@functools.cache
def _headers(path: Path, changed: int, size: int) -> list[Header]:
    """Return the headers of a file in this state: lists of figures ask for them once for each figure."""
    return _about(path)[0]


def read(path: Path) -> list[Part]:
    """Return header and rows of each run. Errors are as in :func:`headers`."""
    run_headers, lengths = _about(path)
    try:
        frame = pd.read_parquet(path)[list(_TYPES)].astype(_TYPES)
    except (pyarrow.ArrowException, OSError, ValueError, LookupError) as error:
        raise _damaged(path, error) from error
    if sum(lengths) != len(frame):
        raise _damaged(path, f"{len(frame)} rows in place of {sum(lengths)}")
    end_rows = itertools.accumulate(lengths)
    return [
        (header, frame.iloc[end_row - length : end_row])
        for header, end_row, length in zip(run_headers, end_rows, lengths, strict=True)
    ]


def _about(path: Path) -> tuple[list[Header], list[int]]:
    try:
        compressed = base64.b64decode(parquet.read_metadata(path).metadata[KEY])
        metadata = json.loads(zlib.decompress(compressed))
        run_headers, lengths = metadata["headers"], metadata["lengths"]
        schemas = {header["schema"] for header in run_headers}
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        zlib.error,
    ) as error:
        raise _damaged(path, error) from error
    if schemas != {rows.SCHEMA} or len(run_headers) != len(lengths):
        raise _damaged(path, f"schemas {schemas} of {len(lengths)} runs")
    return run_headers, lengths


def _damaged(path: Path, contents: object) -> CorruptError:
    contents_text = " ".join(repr(contents).split())  # one line
    return CorruptError(
        f"{path} must be a file of packed rows; got {contents_text}. Restore it, or make its rows again."
    )
