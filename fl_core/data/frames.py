"""Files of tables as columns of cells: .csv, .tsv, .jsonl, .parquet, or several files, one for each client."""

from __future__ import annotations

import codecs
import csv
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.errors import DtypeWarning, ParserError, ParserWarning

from fl_core.data import parquet, spelling
from fl_core.data.arrays import Cells, Place, cells_of, row_of_array, texts_of
from fl_core.data.columns import (
    BETWEEN,
    ENCODING,
    PARQUET,
    PLAIN,
    TABLES,
    WRITTEN,
    DataFault,
    Reading,
    check_distinct_columns,
    first_duplicate,
)
from fl_core.data.image_folders import holds_images
from fl_core.errors import UsageError, check_known, listing, warn
from fl_core.limits import parsed_json

SEPARATORS = (";", "\t", "|", ",")
EXCEL = (".xlsx", ".xls")
SEEN = 1000
"""Lines whose words show whether a quotation mark is open."""
FIRST = 100
"""Lines whose words show what a column holds. Words after numbers are read again as text."""
Columns = tuple[dict[str, Cells], Place]
"""Cells by column, and how messages name a row."""


def is_table(path: Path) -> bool:
    """Return whether a path is a table, or several tables."""
    return bool(files_of(path)) or (not path.is_dir() and path.suffix.lower() in TABLES)


def files_of(path: Path) -> list[Path]:
    """Return the tables of a folder or of a list of files, in sorted order; none for anything else.

    A folder whose subfolders hold images is a dataset of images, whatever else it has.

    >>> files_of(Path("b.csv,a.csv"))
    [PosixPath('a.csv'), PosixPath('b.csv')]

    Raises:
        UsageError: two files have one name, or there is an Excel file.
    """
    excel = [path] if path.suffix.lower() in EXCEL else []
    if path.is_dir():
        files = [] if holds_images(path) else sorted(path.iterdir())
        files = [file for file in files if not file.name.startswith(".")]
        parts = [file for file in files if file.suffix.lower() in TABLES]
        excel = [file for file in files if file.suffix.lower() in EXCEL]
    elif BETWEEN in str(path) and not path.exists():
        parts = sorted(map(Path, str(path).split(BETWEEN)))
    else:
        parts = []
    if excel:
        raise UsageError(
            f"{excel[0]} must be a text table; got an Excel file. Save it as CSV UTF-8 (.csv)."
        )
    twice = first_duplicate([spelling.name(part.stem) for part in parts])
    if twice is not None:
        both = [str(part) for part in parts if spelling.name(part.stem) == twice]
        raise UsageError(
            f"each file must have its own name, the name of its client; got {twice!r} in {listing(both)}. "
            "Rename one of them."
        )
    return parts


def header_of(path: Path, reading: Reading = PLAIN) -> list[str]:
    """Return the names of a table's columns. Only the first lines of a .csv file are read.

    Several files have the column of the client first.

    Raises:
        UsageError: the file does not exist, the separator does not split the line, or one of several files lacks a
            column that is read, or has one of the client's name.
    """
    parts = files_of(path)
    if parts:
        return _common_header(parts, reading)
    if path.suffix.lower() == PARQUET:
        reading.check_unasked(f"{path} says itself how it is written", *WRITTEN)
        return parquet.header(path)
    if path.suffix.lower() == ".jsonl":
        reading.check_unasked(f"{path} holds lines of its own", "separator")
        entry = next(_entries(path, reading), None)
        if entry is None:
            raise UsageError(f"{path} must have rows; got an empty file.")
        return list(entry[1])
    rows = csv_rows(path, reading)
    header = next(rows)[1]
    if len(header) > 1 or header[0] == reading.text_column:
        return header
    first = header[0]
    if not any(other in first for other in SEPARATORS):  # it may be a title
        first = next(rows, (0, [first]))[1][0]
    counts = {other: first.count(other) for other in SEPARATORS}
    other = max(counts, key=lambda each: counts[each], default="")
    if counts.get(other):
        named = "tab" if other == "\t" else f"'{other}'"
        raise DataFault(
            f"{path} must have more than one column; got {first!r}. "
            f"With another separator it has {counts[other] + 1} columns: --separator {named}.",
            separator="tab" if other == "\t" else other,
        )
    return header


class Table(NamedTuple):
    """A table in a file, in several files or in memory.

    Attributes:
        where: its path, or a name for messages.
        header: the names of its columns.
        columns: returns the cells of some columns in the order of their names, and how messages name a row. Numbers
            are float64 [n], with NaN where a cell is missing. Others are text, as are those of a second list.
    """

    where: Path
    header: list[str]
    columns: Callable[[Sequence[str], Collection[str]], Columns]


def open_table(source: Path | pd.DataFrame, reading: Reading = PLAIN) -> Table:
    """Open a table, and read its header.

    Raises:
        UsageError: as :func:`header_of` and :func:`columns_of`, or a frame has no rows.
    """
    if isinstance(source, Path):
        header = header_of(source, reading)
        return Table(
            source,
            header,
            lambda names, texts: columns_of(source, names, texts, reading),
        )
    where = Path("the table")
    header = [spelling.name(str(name)) for name in source.columns]
    if not len(source):
        raise UsageError(f"{where} must have rows; got none. Add samples.")

    def columns(names: Sequence[str], texts: Collection[str]) -> Columns:
        _check_there(where, header, names)
        return {
            name: cells_of(source.iloc[:, header.index(name)], name in texts)
            for name in names
        }, row_of_array

    return Table(where, header, columns)


def columns_of(
    path: Path, names: Sequence[str], texts: Collection[str], reading: Reading = PLAIN
) -> Columns:
    """Return the cells of some columns of a file (:class:`Table`).

    Raises:
        UsageError: a column is missing or repeated, or the file cannot be read. The message names the line.
    """
    parts = files_of(path)
    if parts:
        return _joined(parts, names, texts, reading)
    header = header_of(path, reading)
    _check_there(path, header, names)
    if path.suffix.lower() == ".jsonl":
        return _json_columns(path, names, reading)
    if path.suffix.lower() == PARQUET:
        return parquet.columns(path, names, texts)
    frame = _csv(path, header, {header.index(name) for name in texts}, reading)
    if not len(frame):
        raise UsageError(
            f"{path} must have rows; got a header and no rows. Add samples."
        )

    def place(row: int) -> str:
        return f"line {next(islice(csv_rows(path, reading), row + 1, None))[0]}"

    cells = {name: cells_of(frame.pop(header.index(name)), name in texts) for name in names}  # fmt: skip
    return cells, place


def _check_there(where: Path, header: Sequence[str], names: Sequence[str]) -> None:
    lacking = [name for name in names if name not in header]
    if lacking:
        raise UsageError(
            f"{where} must have the columns {listing(names)}; got no {listing(map(repr, lacking))}. "
            f"Add or rename columns: it has {listing(map(repr, header))}."
        )
    check_distinct_columns(where, header, names)


# --- several files, one for each client --------------------------------------------------------------------------


def _own(part: Path, reading: Reading) -> Reading:
    """Return the settings for one of several files, which may have its own separator and encoding."""
    if part.suffix.lower() == PARQUET:
        return replace(reading, **{key: getattr(Reading, key) for key in WRITTEN})
    for _ in WRITTEN:
        try:
            header_of(part, reading)
        except DataFault as fault:
            reading = reading.repaired(fault.repair)
            warn(f"{part} is read with {Reading(**fault.repair).options}")
    return reading


def _common_header(parts: Sequence[Path], reading: Reading) -> list[str]:
    headers = {part: header_of(part, _own(part, reading)) for part in parts}
    names = list(dict.fromkeys(name for each in headers.values() for name in each))
    client = reading.client_column
    for part, own in headers.items():
        check_distinct_columns(part, own)
        if client in own:
            raise DataFault(
                f"each file must be one client, or a column must name the clients; got both in {part}, column "
                f"{client!r}. Leave the column out: --client-column file --exclude-columns {client}",
                client_column="file",
                exclude_columns=[client],
            )
        needed = [
            name for name in (*reading.labels, reading.text_column) if name in names
        ]
        lacking = [name for name in needed if name not in own]
        if lacking:
            raise UsageError(
                f"{part} must have the label and the text of the other files; got no {listing(map(repr, lacking))}. "
                "Add or rename the column."
            )
    return [client, *names]


def _joined(
    parts: Sequence[Path],
    names: Sequence[str],
    texts: Collection[str],
    reading: Reading,
) -> Columns:
    """Return some columns of all files, one file after the other."""
    client = reading.client_column
    own = [name for name in names if name != client]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the header's reading said it
        settings = [_own(part, reading) for part in parts]
    found, sizes = [], []
    for part, each in zip(parts, settings, strict=True):
        header = header_of(part, each)
        there = [name for name in own if name in header]
        cells, place_of = columns_of(part, there, {*texts} & {*there}, each)
        sizes.append(len(cells[there[0]]))
        lacking = dict.fromkeys({*own} - {*there}, np.full(sizes[-1], np.nan))
        found.append(({**cells, **lacking}, place_of))
    ends = list(accumulate(sizes))
    joined: dict[str, Cells] = {}
    for name in own:
        parts_of = [cells[name] for cells, _ in found]
        if all(isinstance(cells, np.ndarray) for cells in parts_of):
            joined[name] = np.concatenate(parts_of)
        else:  # numbers become text where another file has text
            joined[name] = [text for cells in parts_of for text in texts_of(cells)]
    if client in names:
        stems = np.array([spelling.name(part.stem) for part in parts], dtype=object)
        joined[client] = np.repeat(stems, sizes).tolist()

    def place(row: int) -> str:
        number = bisect_right(ends, row)
        return f"{parts[number].name}, {found[number][1](row - (ends[number] - sizes[number]))}"

    return {name: joined[name] for name in names}, place


# --- .csv ----------------------------------------------------------------------------------------------------------


def _csv(path: Path, header: Sequence[str], texts: set[int], reading: Reading) -> pd.DataFrame:  # fmt: skip
    """Return a .csv file, with its columns by position.

    Pandas pads short lines, and an open quotation mark swallows lines. Both leave a sign, which makes
    :func:`csv_rows` look for the line.

    Args:
        texts: columns that stay text.
    """
    rows = csv_rows(path, reading)
    next(rows)
    texts = texts | _words(islice(rows, FIRST), len(header), reading)
    numeric = set(range(len(header))) - texts
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)
            warnings.simplefilter("ignore", DtypeWarning)  # words after numbers
            frame = pd.read_csv(
                path,
                sep=reading.delimiter_of(path),
                encoding=reading.python_encoding,
                names=list(range(len(header))),
                skiprows=_header_row(path, reading) + 1,
                index_col=False,
                dtype=dict.fromkeys(texts, object),
                na_values={k: list(spelling.MISSING_CELLS) for k in numeric},
                keep_default_na=False,
            )
    except UnicodeError as error:
        raise _undecodable(path, reading, error) from error
    except (ParserError, ParserWarning, ValueError) as error:
        _check_rows(path, reading)
        raise UsageError(
            f"{path} must be a readable .csv file: {error}. Correct the file."
        ) from error
    read_again = {
        k
        for k in numeric
        if frame[k].dtype.kind not in "iuf" and not _is_text(frame[k])
    }  # words such as TRUE, and very large numbers
    if read_again:
        return _csv(path, header, texts | read_again, reading)
    last = frame[len(header) - 1]
    open_mark = any(
        any("\n" in str(cell) for cell in frame[k].unique())
        for k in frame
        if frame[k].dtype.kind not in "iuf"
    )
    if open_mark or bool((last.isna() | (last == "")).any()):
        _check_rows(path, reading)
    return frame


def _is_text(column: pd.Series) -> bool:
    return pd.api.types.infer_dtype(column, skipna=True) in ("string", "empty")


def _words(rows: Iterator[tuple[int, list[str]]], width: int, reading: Reading) -> set[int]:  # fmt: skip
    """Return the columns that hold a word in the first rows. With other signs in numbers all columns are text."""
    if reading.numbers != spelling.NumberFormat():
        return set(range(width))
    return {
        k
        for _, cells in rows
        for k, cell in enumerate(cells)
        if not spelling.is_number(cell) and not spelling.is_missing(cell)
    }


def _check_rows(path: Path, reading: Reading) -> None:
    for _ in csv_rows(path, reading):
        pass


def csv_rows(path: Path, reading: Reading = PLAIN) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of every line of a .csv file that is not blank, header first.

    A title above the header is left out (:func:`fl_core.data.spelling.is_title`).
    """
    delimiter = reading.delimiter_of(path)
    try:
        with path.open(newline="", encoding=reading.python_encoding) as file:
            start = _header_row(path, reading)
            reader = csv.reader(file, delimiter=delimiter)
            for _ in range(start):
                next(reader)
            line = reader.line_num
            header = list(map(spelling.name, next(reader, [])))
            if not header:
                raise UsageError(f"{path} must have rows; got an empty file.")
            _check_encoding(path, reading)
            yield (line := reader.line_num), header
            seen: list[set[str]] = [set() for _ in header]
            for cells in reader:
                if cells:
                    if len(cells) != len(header):
                        raise UsageError(
                            f"{path}, line {line + 1}: every line must have {len(header)} cells like the header; "
                            f"got {len(cells)}. Correct the line."
                        )
                    if reader.line_num > line + 1 and swallows_rows(
                        cells, delimiter, seen
                    ):
                        raise UsageError(
                            f"{path}, line {line + 1}: a quotation mark must be closed; got one that is open until "
                            f"line {reader.line_num}. Close it, or double it within a cell."
                        )
                    if line < SEEN:
                        for values, cell in zip(seen, cells, strict=True):
                            values.add(cell)
                    yield reader.line_num, cells
                line = reader.line_num
    except UnicodeError as error:
        raise _undecodable(path, reading, error) from error
    except csv.Error as error:
        raise UsageError(
            f"{path} must be a readable .csv file: {error}. Correct the file."
        ) from error


def _header_row(path: Path, reading: Reading) -> int:
    """Return the number of rows of a .csv file above its header: blank lines and a title."""
    delimiter = reading.delimiter_of(path)
    with path.open(newline="", encoding=reading.python_encoding) as file:
        reader = csv.reader(file, delimiter=delimiter)
        filled = ((k, cells) for k, cells in enumerate(islice(reader, SEEN)) if cells)
        rows = list(islice(filled, 2))
    if len(rows) == 2 and spelling.is_title(rows[0][1], rows[1][1]):
        title, below = (delimiter.join(cells) for _, cells in rows)
        if any(0 < title.count(sign) == below.count(sign) for sign in SEPARATORS):
            return rows[0][0]  # a header whose cells have another separator
        return rows[1][0]
    return rows[0][0] if rows else 0


def swallows_rows(
    cells: Sequence[str], delimiter: str, seen: Sequence[Collection[str]]
) -> bool:
    """Return whether a cell of several lines holds the next rows, because a quotation mark in it is not closed.

    Its last line then begins with the cells of another row: numbers, or words that their columns have.

    Args:
        seen: words of each column in earlier rows.
    """

    def fits(parts: Sequence[str], columns: Sequence[int]) -> bool:
        return all(
            spelling.is_number(part) or part in seen[k]
            for part, k in zip(parts, columns, strict=True)
        )

    width = len(cells)
    for k, cell in enumerate(cells):
        first, *lines = cell.rstrip("\n").split("\n")
        if not lines or first.count(delimiter) != width - 1 - k:
            continue
        if k == 0:
            if fits(first.split(delimiter)[1:], range(1, width)):
                return True
            continue
        starts = [line.split(delimiter) for line in lines]
        whole = all(len(parts) == width for parts in starts[:-1]) and len(
            starts[-1]
        ) in (k + 1, width)
        if whole and all(fits(parts[:k], range(k)) for parts in starts):
            return True
    return False


# --- encodings -------------------------------------------------------------------------------------------------


def _check_encoding(path: Path, reading: Reading) -> None:
    """Check that a file is not clearly UTF-16 while another encoding is requested."""
    likely = _likely_encoding(path)
    if likely != "latin-1" and not codecs.lookup(reading.encoding).name.startswith(
        ("utf-16", "utf-32")
    ):
        raise _undecodable(path, reading, None)


def _undecodable(
    path: Path, reading: Reading, error: UnicodeError | None
) -> UsageError:
    """Return an error for a file that needs another encoding, with the likely one."""
    guess, at = _likely_encoding(path), ""
    if isinstance(error, UnicodeDecodeError):
        at = f" (byte {error.start})"
        windows = any(
            0x80 <= byte < 0xA0 for byte in error.object
        )  # not letters in latin-1
        guess = "cp1252" if guess == "latin-1" and windows else guess
    if guess in ("latin-1", "cp1252") and reading.encoding != ENCODING:
        guess = ENCODING
    return DataFault(
        f"{path} is not a readable {path.suffix} file in {reading.encoding}{at}. Try --encoding {guess}.",
        encoding=guess,
    )


def _likely_encoding(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(4)
    if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if b"\0" in first:
        return "utf-16-be" if first[:1] == b"\0" else "utf-16-le"
    return "latin-1"


# --- .jsonl --------------------------------------------------------------------------------------------------------


def _json_columns(path: Path, names: Sequence[str], reading: Reading) -> Columns:
    """Return the values of keys in a .jsonl file as text, and how messages name a row."""
    columns: dict[str, list[str]] = {name: [] for name in names}
    lines = array("q")
    for number, entry in _entries(path, reading):
        lines.append(number)
        for name, cells in columns.items():
            check_known(f"column of {path}, line {number}", name, entry)
            value = entry[name]
            text = name == reading.text_column
            if isinstance(value, dict | list) or (text and not isinstance(value, str)):
                raise UsageError(
                    f"{path}, line {number}, column {name!r}: the value must be text; got {value!r}."
                )
            cells.append(spelling.cell_text(value))
    return {**columns}, lambda row: f"line {lines[row]}"


def _entries(path: Path, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a .jsonl file with their line numbers."""
    try:
        with path.open(encoding=reading.python_encoding) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    entry = parsed_json(line)
                except ValueError as error:
                    raise UsageError(
                        f"{path}, line {number} must be JSON: {error}. Correct the line."
                    ) from error
                if not isinstance(entry, dict):
                    raise UsageError(
                        f"{path}, line {number} must be an object of keys and values; got {type(entry).__name__}."
                    )
                yield (
                    number,
                    {spelling.name(key): value for key, value in entry.items()},
                )
    except UnicodeError as error:
        raise _undecodable(path, reading, error) from error
