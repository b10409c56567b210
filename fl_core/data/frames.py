"""Tables in files or in memory as one frame: .csv, .tsv, .jsonl, .parquet, several files, or a DataFrame."""

from __future__ import annotations

import codecs
import csv
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.errors import DtypeWarning, ParserWarning

from fl_core import storage
from fl_core.data.arrays import label_numbers, place_in
from fl_core.data.column_table import is_identifier
from fl_core.data.columns import (
    BETWEEN,
    ENCODING,
    MISSING_CELLS,
    PARQUET,
    PLAIN,
    PLAIN_NUMBERS,
    SIGNS,
    TABLES,
    WRITTEN,
    DataFault,
    DataFaults,
    Place,
    Reading,
    check_distinct_columns,
    composed,
    faults_of,
    first_duplicate,
    holds_images,
    is_missing,
    is_number,
    is_padded,
    located,
    other_reading,
    row_of_array,
)
from fl_core.data.preprocessing import cells_of, read_column
from fl_core.errors import UsageError, listing, needs_package, spelled, warn

SEPARATORS = (";", "\t", "|", ",")
EXCEL = (".xlsx", ".xls")
SEEN = 1000
"""Lines whose words show whether a quotation mark is open."""
TITLES = 5
"""The maximum number of titles above a header."""
TOTALS = ("total", "sum", "summe", "gesamt")
"""What a last row calls itself that holds sums of the rows above, and no sample."""
FIRST = 100
"""Lines whose words show what a column holds."""
_UNNAMED = re.compile(r"__index_level_[0-9]+__")  # stored by pandas next to the columns
Opened = tuple[pd.DataFrame, Place]


class Table(NamedTuple):
    """A table in memory.

    Attributes:
        where: its path, or a name for messages.
        frame: its columns. Features that are numbers or dates are float64. Names are distinct.
        place: how messages name a row.
        shown: how a cell of a column is read that has two readings, by name.
    """

    where: Path
    frame: pd.DataFrame
    place: Place
    shown: Mapping[str, str] = {}


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
    files = [path]
    parts: list[Path] = []
    if path.is_dir():
        files = [] if holds_images(path) else sorted(path.glob("[!.]*"))
        parts = [file for file in files if file.suffix.lower() in TABLES]
    elif BETWEEN in str(path) and not path.exists():
        parts = sorted(map(Path, str(path).split(BETWEEN)))
    excel = [file for file in files if file.suffix.lower() in EXCEL]
    if excel:
        raise UsageError(
            f"{excel[0]} must be a text table; got an Excel file. Save it as CSV UTF-8 (.csv)."
        )
    twice = first_duplicate([composed(part.stem) for part in parts])
    if twice is not None:
        both = [str(part) for part in parts if composed(part.stem) == twice]
        raise UsageError(
            f"each file must have its own name, the name of its client; got {twice!r} in {listing(both)}. "
            "Rename one of them."
        )
    return parts


def open_table(
    source: Path | pd.DataFrame,
    reading: Reading = PLAIN,
    texts: Collection[str] = (),
    whole: bool = True,
) -> Table:
    """Read a table. Several files have the column of the client first.

    Args:
        texts: columns whose cells keep their spelling, such as ``007``.
        whole: read all rows. Otherwise the columns matter alone, and there are a few rows at most.

    Raises:
        UsageError: the file does not exist, the separator does not split the line, there are no rows, a line has
            another number of cells, a name is repeated, or one of several files lacks a column that is read, or has
            one of the client's name.
    """
    table = Table(Path("the table"), pd.DataFrame(), row_of_array)
    if isinstance(source, pd.DataFrame):
        table = table._replace(frame=source.copy(deep=False))
    elif files_of(source):
        table = _several(source, reading, texts, whole)
    elif source.suffix.lower() == PARQUET:
        frame = _parquet(source, reading, texts, whole)
        table = table._replace(where=source, frame=frame)
    elif source.suffix.lower() == ".jsonl":
        table = Table(source, *_json_lines(source, reading, whole))
    else:
        table = Table(source, *_csv(source, reading, texts, whole))
    frame = table.frame
    frame.columns = [composed(str(name)) for name in frame]
    blank = [
        not name.strip() and (cells.isna() | (cells == "")).all()
        for name, cells in frame.items()
    ]
    if any(blank):
        frame = frame.loc[:, ~np.array(blank)]
        table = table._replace(frame=frame)
        warn(
            f"{table.where}: columns without a name and a value are left out: {sum(blank)}"
        )
    check_distinct_columns(table.where, list(frame))
    if whole and not len(frame):
        raise UsageError(f"{table.where} must have rows; got no rows. Add samples.")
    if whole:
        with located(str(table.where), table.place):
            _check_last_row(frame)
    known = reading.columns or {*reading.labels} <= {*frame}
    if whole and known and reading.text_column not in frame:
        return _read_columns(table, reading, texts)
    return table


def _check_last_row(frame: pd.DataFrame) -> None:
    """Refuse a last row of sums: a cell says so, alone in its column, and another one is empty or a sum."""
    last = frame.iloc[-1]
    for name, cell in last.items():
        named = str(cell).strip(" :").lower() in TOTALS
        if not named or (frame[name] == cell).sum() > 1:
            continue
        numbers = frame.astype(object).apply(pd.to_numeric, errors="coerce")
        above, end = numbers[:-1], numbers.iloc[-1]
        sums = (end > above.max()) & np.isclose(end, above.sum(), rtol=1e-3)
        if (sums | last.isna() | (last == "")).any():
            raise DataFault(
                f"each row must be a sample; got {cell!r}, a row of sums.",
                "Remove the row.",
                len(frame) - 1,
            )


def _read_columns(table: Table, reading: Reading, texts: Collection[str]) -> Table:
    """Return a table whose features are float64, or words.

    Raises:
        DataFaults: of all columns (:func:`fl_core.data.preprocessing.read_column`).
    """
    where, frame, place, shown = table
    faults, shown = [], {**shown}
    for name in frame:
        labels = name in reading.labels
        numbers = reading.predicts_numbers if labels else reading.takes(name)
        if name in texts or not numbers:
            continue
        cells = None
        try:
            with located(f"{where}, column {name!r}", place):
                cells = cells_of(frame[name])
                if labels:
                    found = label_numbers(cells, reading)
                else:
                    found = read_column(name, cells, reading)
                if frame[name].dtype != np.float64:
                    frame[name] = found
        except DataFault as fault:
            if cells is None or not is_identifier(name, cells):  # refused as such later
                faults.append(fault)
            continue
        if name not in (reading.date_columns or ()):
            other = other_reading(cells, reading.numbers)
            shown |= {name: other} if other else {}
    if faults:
        raise DataFaults(faults)
    return Table(where, frame, place, shown)


# --- several files, one for each client --------------------------------------------------------------------------


def _several(
    path: Path, reading: Reading, texts: Collection[str], whole: bool
) -> Table:
    """Read the files of a folder or of a list, each in its own forms."""
    client, tables = reading.client_column, []
    for part in files_of(path):
        table = open_own(part, reading, texts, whole)
        if client in table.frame:
            raise DataFault(
                f"each file must be one client, or a column must name the clients; got both in {part}, column "
                f"{client!r}.",
                "Leave the column out:",
                client_column="file",
                exclude_columns=[client],
            )
        tables.append(table)
    frames = [
        table.frame.assign(**{client: composed(table.where.stem)}) for table in tables
    ]
    frame = pd.concat(frames, ignore_index=True)
    shown: dict[str, str] = {}
    for part, found, _, own in tables:
        lacking = [
            name
            for name in (*reading.labels, reading.text_column)
            if name in frame and name not in found
        ]
        if lacking:
            raise UsageError(
                f"{part} must have the label and the text of the other files; got no {listing(map(repr, lacking))}. "
                "Add or rename the column."
            )
        shown |= {name: f"{part.name}: {text}" for name, text in own.items()}
    parts = [(table.where.name, len(table.frame), table.place) for table in tables]
    frame.insert(0, client, frame.pop(client))
    return Table(path, frame, place_in(parts), shown)


def open_own(
    part: Path | pd.DataFrame,
    reading: Reading,
    texts: Collection[str] = (),
    whole: bool = True,
) -> Table:
    """Read a table next to others (:func:`open_table`).

    It may have its own separator, encoding and signs in numbers, with a note.
    """
    if isinstance(part, Path) and part.suffix.lower() == PARQUET:
        reading = replace(reading, **{key: getattr(Reading, key) for key in WRITTEN})
    tried, own = [], {*WRITTEN, *SIGNS}
    while True:
        try:
            return open_table(part, reading, texts, whole)
        except (DataFault, DataFaults) as error:
            signs: dict[str, Any] = {}
            for fault in faults_of(error):
                if isinstance(fault, DataFault) and fault.repair.keys() <= own:
                    signs |= fault.repair
            tried.append(reading)
            reading = replace(reading, **signs)
            if reading in tried:
                raise
            known = vars(tried[-1])
            given = {k: sign for k, sign in signs.items() if sign and sign != known[k]}
            warn(f"{part} is read with {spelled(**given)}")


# --- .csv ----------------------------------------------------------------------------------------------------------


def _csv(path: Path, reading: Reading, texts: Collection[str], whole: bool) -> Opened:
    """Read a .csv file.

    Pandas pads short lines, and an open quotation mark swallows lines. Both leave a sign, which makes :func:`csv_rows`
    look for the line.
    """
    rows = csv_rows(path, reading)
    header = next(rows)[1]
    first: list[list[str]] = []
    if len(header) == 1 and header[0] != reading.text_column:
        _check_separator(
            path, header[0]
        )  # before the rows, which may have several cells
        first = [cells for _, cells in islice(rows, 1)]
        for cells in first:
            _check_separator(path, cells[0])
    first += [cells for _, cells in islice(rows, FIRST)]

    def place(row: int) -> str:
        return f"line {next(islice(csv_rows(path, reading), row + 1, None))[0]}"

    if not whole:
        return pd.DataFrame(first, columns=header), place
    words = {k for k, name in enumerate(header) if name in texts}
    if reading.numbers != PLAIN_NUMBERS:
        words |= {*range(len(header))}
    for cells in first:
        words |= {
            k
            for k, cell in enumerate(cells)
            if (not is_number(cell) and not is_missing(cell)) or is_padded(cell)
        }
    frame = _frame(path, header, words, reading)
    last = frame.iloc[:, -1]
    if (last.isna() | (last == "")).any() or _has_lines(frame):
        _check_rows(path, reading)
    frame.columns = header

    return frame, place


def _has_lines(frame: pd.DataFrame) -> bool:
    """Return whether a cell has several lines."""
    words = frame.select_dtypes(exclude=["number", "bool"])
    return any(words[k].str.contains("\n", regex=False).any() for k in words)


def _check_separator(path: Path, row: str) -> None:
    """Refuse a row of one cell if another separator gives it more."""
    sign = max(SEPARATORS, key=row.count)
    if sign in row:
        raise DataFault(
            f"{path} must have more than one column; got {row!r}.",
            f"With another separator it has {row.count(sign) + 1} columns:",
            separator="tab" if sign == "\t" else sign,
        )


def _frame(
    path: Path, header: Sequence[str], words: Collection[int], reading: Reading
) -> pd.DataFrame:
    """Return a .csv file with its columns by position, those of words as text."""
    missing = list(MISSING_CELLS)
    numeric = [k for k in range(len(header)) if k not in words]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)
            warnings.simplefilter("ignore", DtypeWarning)  # such a column is refused
            return pd.read_csv(
                path,
                sep=reading.delimiter_of(path),
                encoding=reading.python_encoding,
                names=list(range(len(header))),
                skiprows=_header_row(path, reading) + 1,
                index_col=False,
                dtype=dict.fromkeys(words, str),
                na_values=dict.fromkeys(numeric, missing),
                keep_default_na=False,
            )
    except (ValueError, ParserWarning) as error:
        _check_rows(path, reading)
        raise UsageError(
            f"{path} must be a readable .csv file: {error}. Correct the file."
        ) from error


def _check_rows(path: Path, reading: Reading) -> None:
    for _ in csv_rows(path, reading):
        pass


def csv_rows(path: Path, reading: Reading = PLAIN) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of every line of a .csv file that is not blank, header first.

    Titles above the header are left out.
    """
    delimiter = reading.delimiter_of(path)
    rows = islice(_lines(path, reading), _header_row(path, reading), None)
    _, line, cells = next(rows, (0, 0, []))
    header = list(map(composed, cells))
    if not header:
        raise UsageError(f"{path} must have rows; got an empty file.")
    yield line, header
    seen: list[Counter[str]] = [Counter() for _ in header]
    for first, line, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header):
            raise UsageError(
                f"{path}, line {first}: every line must have {len(header)} cells like the header; "
                f"got {len(cells)}. {'Correct the line' if any(cells[len(header) :]) else 'Add cells to the header'}."
            )
        if line > first and swallows_rows(cells, delimiter, seen):
            raise UsageError(
                f"{path}, line {first}: a quotation mark must be closed; got one that is open until line {line}. "
                "Close it, or double it within a cell."
            )
        if line < SEEN:
            for values, cell in zip(seen, cells, strict=True):
                values[cell] += 1
        yield line, cells


def _lines(path: Path, reading: Reading) -> Iterator[tuple[int, int, list[str]]]:
    """Yield first and last line and the cells of every row of a .csv file."""
    _check_encoding(path, reading)
    try:
        with path.open(newline="", encoding=reading.python_encoding) as file:
            reader = csv.reader(file, delimiter=reading.delimiter_of(path))
            line = 0
            for cells in reader:
                yield line + 1, reader.line_num, cells
                line = reader.line_num
    except UnicodeError as error:
        raise _undecodable(path, reading, error) from error
    except csv.Error as error:
        raise UsageError(
            f"{path} must be a readable .csv file: {error}. Correct the file."
        ) from error


def _header_row(path: Path, reading: Reading) -> int:
    """Return the number of rows of a .csv file above its header: blank lines, and titles of one cell above names.

    Rows of one cell with another separator are no titles.
    """
    given = reading.delimiter_of(path)
    above: list[int] = []
    title = ""
    for k, (_, _, cells) in enumerate(islice(_lines(path, reading), SEEN)):
        names = [cell for cell in cells if cell.strip()]
        line = given.join(cells)
        if len(names) > 1:
            signs = [sign for sign in SEPARATORS if sign in title and sign != given]
            alike = any(title.count(sign) == line.count(sign) for sign in signs)
            titled = len(above) <= TITLES and not alike
            if not above or (titled and not any(map(is_number, names))):
                return k
            break
        if names:
            above.append(k)
            title = line
    return above[0] if above else 0


def swallows_rows(
    cells: Sequence[str], delimiter: str, seen: Sequence[Counter[str]]
) -> bool:
    """Return whether a cell of several lines holds the next rows, because a quotation mark in it is not closed.

    Its lines then have the cells of rows: numbers, words that their columns have, or any text in columns of texts.

    Args:
        seen: words of each column in earlier rows.
    """

    def fits(part: str, k: int) -> bool:
        words = seen[k]
        texts = 2 * len(words) > words.total() and not any(map(is_number, words))
        return texts or is_number(part) or part in words

    width = len(cells)
    for k, cell in enumerate(cells):
        first, *rows = (line.split(delimiter) for line in cell.rstrip("\n").split("\n"))
        whole = all(len(row) == width for row in rows[:-1])
        if not rows or not whole or len(first) != width - k:
            continue
        if len(rows[-1]) not in (k + 1, width):
            continue
        parts = list(enumerate(first[1:], k + 1))
        for row in rows:
            parts += enumerate(row[:k])
        if all(fits(part, place) for place, part in parts):
            return True
    return False


# --- encodings -------------------------------------------------------------------------------------------------


def _check_encoding(path: Path, reading: Reading) -> None:
    """Check that a file is not clearly UTF-16 while another encoding is requested."""
    wide = codecs.lookup(reading.encoding).name.startswith(("utf-16", "utf-32"))
    if not wide and _likely_encoding(path) != "latin-1":
        raise _undecodable(path, reading)


def _undecodable(
    path: Path, reading: Reading, error: UnicodeError | None = None
) -> UsageError:
    """Return an error for a file that needs another encoding, with the likely one."""
    guess, at = _likely_encoding(path), ""
    if isinstance(error, UnicodeDecodeError):
        at = f" (byte {error.start})"
        if guess == "latin-1" and any(0x80 <= byte < 0xA0 for byte in error.object):
            guess = "cp1252"  # these bytes are no letters in latin-1
    if guess in ("latin-1", "cp1252") and reading.encoding != ENCODING:
        guess = ENCODING
    return DataFault(
        f"{path} is not a readable {path.suffix} file in {reading.encoding}{at}.",
        "Read it so:",
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


def _json_lines(path: Path, reading: Reading, whole: bool) -> Opened:
    """Read a .jsonl file. The keys of its first line are the columns, and a key that a later line lacks is missing."""
    reading.check_unasked(f"{path} holds lines of its own", "separator")
    entries = (entry for _, entry in _entries(path, reading))
    first = next(entries, None)
    if first is None:
        raise UsageError(f"{path} must have rows; got an empty file.")
    columns: dict[str, list[Any]] = {name: [] for name in first}
    for entry in chain([first], entries if whole else ()):
        for name, cells in columns.items():
            cells.append(entry.get(name))

    def place(row: int) -> str:
        return f"line {next(islice(_entries(path, reading), row, None))[0]}"

    return pd.DataFrame(columns, dtype=object), place


def _entries(path: Path, reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a .jsonl file with their line numbers."""
    try:
        with path.open(encoding=reading.python_encoding) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    entry = storage.parsed_json(line)
                except ValueError as error:
                    raise UsageError(
                        f"{path}, line {number} must be JSON: {error}. Correct the line."
                    ) from error
                if not isinstance(entry, dict):
                    raise UsageError(
                        f"{path}, line {number} must be an object of keys and values; got {type(entry).__name__}."
                    )
                yield number, entry
    except UnicodeError as error:
        raise _undecodable(path, reading, error) from error


# --- .parquet ------------------------------------------------------------------------------------------------------


def _parquet(
    path: Path, reading: Reading, texts: Collection[str], whole: bool
) -> pd.DataFrame:
    """Read a .parquet file, by pyarrow. Each text is in memory once.

    A file that unpacks to far more than it has bytes is refused.
    """
    reading.check_unasked(f"{path} says itself how it is written", *WRITTEN)
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise needs_package("pyarrow", f"read {path}", "parquet") from error
    try:
        file = parquet.ParquetFile(path)
        fields, about = file.schema_arrow, file.metadata
        names = [name for name in fields.names if not _UNNAMED.fullmatch(name)]
        table = fields.empty_table().select(names)
        if whole:
            groups = map(about.row_group, range(about.num_row_groups))
            stored = sum(group.total_byte_size for group in groups)
            each = sum(64 if name in texts else 8 for name in names)
            taken = max(about.num_rows * each, stored)
            storage.check_unpacked(path, path.stat().st_size, taken)
            words = [field.name for field in fields if "string" in str(field.type)]
            table = parquet.ParquetFile(path, read_dictionary=words).read(names)
        return table.to_pandas(ignore_metadata=True, integer_object_nulls=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} must be a readable .parquet file: {error}. Save it again."
        ) from error
