"""Tables in files or in memory, each opened and parsed once: .csv, .tsv, .jsonl, .parquet, several, or a frame."""

from __future__ import annotations

import codecs
import csv
import io
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.errors import ParserWarning

from fl_core import formats, storage
from fl_core.data.cells import Cells, Integers, cells_of, taken
from fl_core.data.columns import (
    BETWEEN,
    ENCODING,
    MAC,
    PARQUET,
    SEPARATOR,
    TABLES,
    WRITTEN,
    Reading,
    holds_images,
)
from fl_core.data.spelling import (
    PLAIN_NUMBERS,
    DataFault,
    composed,
    first_duplicate,
    is_number,
    is_padded,
    place_in,
    row_of_array,
)
from fl_core.errors import UsageError, about, listing, spelled, warn

SEPARATORS = (";", "\t", "|", ",")
EXCEL = (".xlsx", ".xls")
SEEN = 1000
"""Lines whose words show whether a quotation mark is open."""
TITLES = 5
"""The maximum number of titles above a header."""
TRUTHS = ("true", "false")
"""Words in small letters that pandas takes as truth values, whatever their spelling."""
FIRST = 100
"""Lines whose words show what a column holds."""
_UNNAMED = re.compile(r"__index_level_[0-9]+__")  # stored by pandas next to the columns
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
"""Signs that no text has."""


@dataclass
class Part:
    """One file of a table, or a frame.

    Attributes:
        where: its path, or a name for messages.
        header: the names of its columns.
        load: returns its rows, where the spelling of some columns is kept.
        lines: yields each row with the number of its line, if the file has lines.
        faults: how its separator and encoding differ from those asked for.
        signs: its own settings for signs in numbers, among several files.
    """

    where: Path
    header: list[str]
    load: Callable[[Collection[str]], pd.DataFrame]
    lines: Callable[[], Iterator[tuple[int, Any]]] | None = None
    faults: list[DataFault] = field(default_factory=list)
    signs: Mapping[str, str] = field(default_factory=dict)

    def place(self, row: int) -> str:
        """Return how messages name a row."""
        if self.lines is None:
            return row_of_array(row)
        return f"line {next(islice(self.lines(), row, None))[0]}"

    def read(self, texts: Collection[str]) -> pd.DataFrame:
        """Return the rows. Columns without a name and a value are left out.

        Raises:
            UsageError: there are no rows, a line has another number of cells, a name is repeated, or the last row has
                sums.
        """
        frame = self.load(texts)
        frame.columns = self.header
        kept = [
            bool(name.strip()) or not (cells.isna() | (cells == "")).all()
            for name, cells in frame.items()
        ]
        if not all(kept):
            frame = frame.loc[:, kept]
            warn(
                f"{self.where}: columns without a name and a value are left out: {kept.count(False)}"
            )
        self.header = list(frame)
        twice = first_duplicate(self.header)
        if twice is not None:
            raise UsageError(
                f"{self.where}: names of columns must be distinct; got {twice!r} twice. Rename or remove one."
            )
        if not len(frame):
            raise UsageError(f"{self.where} must have rows; got no rows. Add samples.")
        row, got = no_sample(frame)
        if got:
            rule = f"each row must be a sample; got {got}."
            raise DataFault(rule, "Remove the row.", row=row).at(
                str(self.where), self.place
            )
        return frame


@dataclass
class Opened:
    """A table of one or several parts.

    Attributes:
        where: its path, or a name for messages.
        parts: its files, or one frame.
        client: the name of the column that the names of the files make, or an empty text.
        takes: take other settings of a file with a note, such as a decimal comma.
        faults: other settings that read it.
        frame: all rows, after :meth:`read`.
        ends: the first row of each part, and the number of rows.
        rows: of these the rows that the frame still has.
    """

    where: Path
    parts: list[Part]
    client: str = ""
    takes: bool = False
    faults: list[DataFault] = field(default_factory=list)
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)
    ends: list[int] = field(default_factory=list)
    rows: Integers = field(default_factory=lambda: np.arange(0))
    _known: dict[Any, Cells] = field(default_factory=dict)

    @property
    def header(self) -> list[str]:
        """Return the names of all columns, that of the clients first if each file is one."""
        names = [name for part in self.parts for name in part.header]
        return list(dict.fromkeys([self.client, *names] if self.client else names))

    def read(self, texts: Collection[str]) -> None:
        """Read the rows, once.

        Args:
            texts: columns whose cells keep their spelling, such as ``007``.
        """
        frames = [part.read(texts) for part in self.parts]
        sizes = list(map(len, frames))
        self.ends = [0, *accumulate(sizes)]
        self.rows = np.arange(self.ends[-1])
        self.frame = frames[0]
        if self.client:
            names = [composed(part.where.stem) for part in self.parts]
            self.frame = pd.concat(frames, ignore_index=True)
            self.frame[self.client] = np.repeat(np.array(names, dtype=object), sizes)

    def take(self, rows: Integers) -> None:
        """Keep some rows. Messages name them as before."""
        self.frame, self.rows = self.frame.iloc[rows], self.rows[rows]
        self._known.clear()

    def place(self, row: int) -> str:
        """Return how messages name a row."""
        row = int(self.rows[row]) if len(self.rows) else row
        if not self.client:
            return self.parts[0].place(row)
        parts = zip(self.parts, pairwise(self.ends), strict=True)
        return place_in([(p.where.name, b - a, p.place) for p, (a, b) in parts])(row)

    def cells(self, name: str, how: Reading, text: bool = False) -> Cells:
        """Return the cells of a column, all empty if it is not there."""
        if name not in self.frame:
            return np.full(len(self.frame), np.nan)
        spelt = name in (how.word_columns or ())
        free = name in (how.text_column, self.client)
        marks = frozenset([""]) if spelt or free else how.marks
        asked = (text or spelt, marks, how.fold_case and not free)
        if (name, asked) not in self._known:
            self._known[name, asked] = cells_of(self.frame[name], *asked)
        return self._known[name, asked]

    def split(self, cells: Cells) -> list[Cells]:
        """Return the cells of each part."""
        if len(self.parts) == 1:
            return [cells]
        ends = np.searchsorted(self.rows, self.ends)
        return [taken(cells, slice(*rows)) for rows in pairwise(ends)]


def is_table(path: Path) -> bool:
    """Return whether a path is a table, several tables, or texts in lines."""
    single = path.suffix.lower() in (*TABLES, ".jsonl")
    return bool(files_of(path)) or (not path.is_dir() and single)


UNPACK = "Unpack an archive, rename a text of commas to .csv, and put tables of clients into one folder."
"""What makes tables of a file or folder of another kind."""


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


def warn_of_others(path: Path, used: Collection[Path]) -> None:
    """Warn of files of a folder, at any depth, that are not used. Hidden files and a Mac's copies do not count."""
    others = [
        str(file.relative_to(path))
        for file in sorted(path.glob("**/[!.]*"))
        if file.is_file() and file not in used and MAC not in file.parts
    ]
    if others:
        warn(f"{path}: other files are left out: {listing(others, 4)}")


def open_table(
    source: Path | pd.DataFrame, reading: Reading, take: bool = False
) -> Opened:
    """Open a table and read its header. :meth:`Part.read` then reads the rows of each part.

    A named index of a frame is a column, too:

    >>> frame = pd.DataFrame({"age": [50, 61], "label": [0, 1]})
    >>> open_table(pd.concat({"north": frame, "south": frame}, names=["client"]), Reading()).header
    ['client', 'age', 'label']

    Args:
        take: take other settings of a single file, with a note, as those of several files are.

    Raises:
        UsageError: the file is no text, or has no rows.
    """
    if isinstance(source, pd.DataFrame):
        index = [name for name in source.index.names if name not in {None, *source}]
        frame = source.reset_index(index)
        header = [composed(str(name)) for name in frame]
        where = Path("the table")
        return Opened(where, [Part(where, header, lambda _: frame)])
    several = files_of(source)
    client = reading.client_column if several else ""
    found = Opened(source, [], client, take or bool(several))
    for path in several or [source]:
        kind = path.suffix.lower()
        if kind == PARQUET:
            plain = {key: getattr(Reading, key) for key in WRITTEN if several}
            part = _parquet(path, replace(reading, **plain))
        else:
            part = _json_lines(path, reading) if kind == ".jsonl" else Csv(path, reading).part  # fmt: skip
        found.parts.append(part)
        if several and found.client in part.header and not found.faults:
            name, found.client = found.client, "file"
            rule = (
                f"each file must be one client, or a column must name the clients; got both in {path}, "
                f"column {name!r}."
            )
            out = [*(reading.exclude_columns or ()), name]
            keys = {"client_column": "file", "exclude_columns": out}
            found.faults.append(DataFault(rule, ("Leave the column out", keys)))
        if not found.takes:
            found.faults += part.faults
            continue
        for fault in part.faults:
            warn(f"{path} is read with {spelled(**fault.repair)}")
    if source.is_dir():
        warn_of_others(source, several)
    return found


# --- .csv ----------------------------------------------------------------------------------------------------------


class Csv:
    """A .csv file in memory, in UTF-8. Its separator and its encoding are those that read it.

    Pandas pads short lines, and an open quotation mark swallows lines. Then the file has another number of separators,
    and each line is looked at.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path = path
        self.reading = reading
        tabs = path.suffix.lower() == ".tsv" and reading.separator == SEPARATOR
        self.delimiter = "\t" if tabs else reading.delimiter
        self.data, faults = _decoded(path, reading)
        self.above = self._header_row()
        header = next(self.rows())[1]
        single = len(header) == 1 and header[0] != reading.text_column
        for _, (row, *_) in islice(self.rows(), 2) if single else ():
            sign = max(SEPARATORS, key=row.count)
            if sign in row:
                rule = f"{path} must have more than one column; got {row!r}."
                say = f"With another separator it has {row.count(sign) + 1} columns"
                separator = {"separator": "tab" if sign == "\t" else sign}
                faults.append(DataFault(rule, (say, separator)))
                self.delimiter = sign
                self.above = self._header_row()
                header = next(self.rows())[1]
                break
        self.part = Part(path, header, self.load, self._samples, faults)

    def _samples(self) -> Iterator[tuple[int, list[str]]]:
        return islice(self.rows(), 1, None)

    def load(self, texts: Collection[str]) -> pd.DataFrame:
        """Return all rows. Words keep their spelling, and so do all cells if numbers have other signs."""
        header, marks = self.part.header, self.reading.marks
        if self.reading.numbers != PLAIN_NUMBERS:
            texts = header
        spelt = {k for k, name in enumerate(header) if name in texts}
        words = set[int]()  # pandas keeps them as they are, and faster by itself
        for _, cells in islice(self._samples(), FIRST):
            for k, cell in enumerate(cells):
                word = cell.strip().lower()
                if is_padded(cell) or word in TRUTHS:
                    spelt.add(k)
                elif word not in marks and not is_number(cell):
                    words.add(k)
        missing = {form(mark) for mark in marks for form in (str, str.upper, str.title)}
        others = {*range(len(header))} - spelt
        file = self._text()
        deque(islice(file, next(self.rows())[0]), maxlen=0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", ParserWarning)
                frame = pd.read_csv(
                    file,
                    sep=self.delimiter,
                    names=list(range(len(header))),
                    index_col=False,
                    dtype=dict.fromkeys(spelt - words, "str"),
                    na_values=dict.fromkeys(others, sorted({*missing, "NaN"})),
                    keep_default_na=False,
                    low_memory=False,
                )
        except (ValueError, ParserWarning) as error:
            deque(self.rows(), maxlen=0)
            raise self._unreadable(error) from error
        data = np.frombuffer(self.data, np.uint8)
        blocks = np.array_split(data, 1 + len(data) // LOOKED_AT)  # stay in the cache
        sign = ord(self.delimiter)
        found = sum(np.count_nonzero(block == sign) for block in blocks)
        if self.above or found != (len(header) - 1) * (len(frame) + 1):
            deque(self.rows(), maxlen=0)
        return frame

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield line number and cells of every line that is not blank, header first. Titles above it are left out.

        Raises:
            UsageError: a line has another number of cells, or a quotation mark is open.
        """
        rows = islice(self._lines(), self.above, None)
        _, line, cells = next(rows, (0, 0, []))
        header = list(map(composed, cells))
        if not header:
            raise UsageError(f"{self.path} must have rows; got an empty file.")
        yield line, header
        seen: list[Counter[str]] = [Counter() for _ in header]
        for first, line, cells in rows:
            if not cells:
                continue
            if len(cells) != len(header):
                raise UsageError(
                    f"{self.path}, line {first}: every line must have {len(header)} cells like the header; "
                    f"got {len(cells)}. Correct the line, or add cells to the header."
                )
            if line > first and swallows_rows(cells, self.delimiter, seen):
                raise UsageError(
                    f"{self.path}, line {first}: a quotation mark must be closed; got one that is open until line "
                    f"{line}. Close it, or double it within a cell."
                )
            if line < SEEN:
                for values, cell in zip(seen, cells, strict=True):
                    values[cell] += 1
            yield line, cells

    def _lines(self) -> Iterator[tuple[int, int, list[str]]]:
        """Yield first and last line and the cells of every row."""
        reader = csv.reader(self._text(), delimiter=self.delimiter)
        line = 0
        try:
            for cells in reader:
                yield line + 1, reader.line_num, cells
                line = reader.line_num
        except csv.Error as error:
            raise self._unreadable(error) from error

    def _text(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BytesIO(self.data), "utf-8", newline="")

    def _unreadable(self, error: Exception) -> UsageError:
        return UsageError(
            f"{self.path} must be a readable .csv file: {error}. Correct the file."
        )

    def _header_row(self) -> int:
        """Return the number of rows above the header: it has a column that is asked for, or titles are above it.

        Titles are blank lines, and rows of one cell above names.

        Rows of one cell with another separator are no titles.
        """
        how = self.reading
        asked = {*how.labels, how.client_column, how.text_column}
        for k, (_, _, cells) in enumerate(islice(self._lines(), TITLES + 1)):
            if asked & {*map(composed, cells)} and not any(map(is_number, cells)):
                return k
        above: list[int] = []
        title = ""
        others = {*SEPARATORS} - {self.delimiter}
        for k, (_, _, cells) in enumerate(islice(self._lines(), SEEN)):
            names = [cell for cell in cells if cell.strip()]
            line = self.delimiter.join(cells)
            if len(names) > 1:
                alike = any(
                    0 < title.count(sign) == line.count(sign) for sign in others
                )
                numeric = any(map(is_number, names))
                if above and (numeric or alike or len(above) > TITLES):
                    break
                return k
            if names:
                above.append(k)
                title = line
        return above[0] if above else 0


def no_sample(frame: pd.DataFrame) -> tuple[int, str]:
    """Return a row that is no sample and what it is, or an empty text: the header again, or a note or sums at the end.

    >>> ages = [50, 61, 42, 38, 77, 56, 49, 63, 70, 44]
    >>> frame = pd.DataFrame({"client": "a", "age": [*ages, sum(ages)], "visits": [*range(1, 11), 55]})
    >>> no_sample(frame), no_sample(frame[:10])
    ((10, 'sums of the rows above'), (0, ''))

    A few rows may add up by chance, and a sample may lack all but one value:

    >>> no_sample(pd.DataFrame({"client": "a", "year": [2020, 2021]})), no_sample(pd.DataFrame({"count": [1, 0, 1, 2]}))
    ((0, ''), (0, ''))
    >>> no_sample(pd.DataFrame({"label": ["yes", "no", "no"], "age": [50, 61, None], "visits": [2, 1, None]}))
    (0, '')
    >>> no_sample(pd.DataFrame({"client": ["a", "client", "b"], "age": ["50", "age", "61"]}))
    (1, 'the header again')
    >>> no_sample(pd.DataFrame({"client": ["a", "Source: a register"], "age": [50, None], "visits": [2, None]}))
    (1, "'Source: a register', a note")
    """
    if all(isinstance(kind, pd.StringDtype) for kind in frame.dtypes):
        again = (frame == list(frame)).all(axis=1)
        if again.any():
            return int(again.argmax()), "the header again"
    end = len(frame) - 1
    last = frame.iloc[end].replace("", None).dropna()
    note = last.iloc[0] if len(last) == 1 < frame.shape[1] - 1 else None
    if isinstance(note, str) and (frame == note).sum().sum() == 1:
        return end, f"{note!r}, a note"
    known = frame[last.index].select_dtypes("number")
    above, own = known[:end], known.iloc[end]
    if (own > above[:SEEN].max()).mean() <= 0.5:
        return 0, ""
    sums = (own > above.max()) & np.isclose(own, above.sum(), rtol=1e-3)
    sums &= (above != 0).sum() >= 10  # fewer may add up by chance
    return (end, "sums of the rows above") if sums.mean() > 0.5 else (0, "")


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


def _decoded(path: Path, reading: Reading) -> tuple[bytes, list[DataFault]]:
    """Return a file's bytes in UTF-8, and a fault if another encoding than the one asked for reads it.

    Raises:
        UsageError: the file is no text.
    """
    data = storage.read_bytes(path)
    asked, first = reading.encoding, data[:4]
    tried = [asked]
    if not codecs.lookup(asked).name.startswith(("utf-16", "utf-32")):
        if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            tried = ["utf-16"]
        elif b"\0" in first:
            tried = ["utf-16-be" if first[:1] == b"\0" else "utf-16-le"]
    for encoding in dict.fromkeys([*tried, ENCODING, "latin-1", "cp1252"]):
        plain = codecs.lookup(encoding).name == ENCODING
        start = len(codecs.BOM_UTF8) * (plain and data.startswith(codecs.BOM_UTF8))
        end = LOOKED_AT if plain and data.isascii() else None
        try:
            text = data[start:end].decode(encoding)
        except UnicodeError:
            continue
        if not _CONTROL.search(text if encoding == "latin-1" else text[:LOOKED_AT]):
            what = f"{path} is not a readable {path.suffix} file in {asked}."
            fault = DataFault(what, ("Read it so", {"encoding": encoding}))
            data = data[start:] if plain else text.encode()
            return data, [] if encoding == asked else [fault]
    raise UsageError(
        f"{path} must be a text table; got bytes that are no text. Save it as CSV UTF-8 (.csv)."
    )


LOOKED_AT = 2**20
"""Signs at the beginning of a file that show whether it is a text, and of which kind."""


# --- .jsonl --------------------------------------------------------------------------------------------------------


def _json_lines(path: Path, reading: Reading) -> Part:
    """Open a .jsonl file. The keys of its first line are the columns, and a key that a later line lacks is missing."""
    reading.check_unasked(f"{path} holds lines of its own", "separator")
    data, faults = _decoded(path, reading)

    def entries() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(io.BytesIO(data), 1):
            if not line.strip():
                continue
            what = f"{path}, line {number} must be JSON"
            with about(what, ValueError, way="Correct the line."):
                entry = storage.parsed_json(line.decode())
            if not isinstance(entry, dict):
                raise UsageError(
                    f"{path}, line {number} must be an object of keys and values; got {type(entry).__name__}."
                )
            yield number, entry

    rows = entries()
    first = next(rows, None)
    if first is None:
        raise UsageError(f"{path} must have rows; got an empty file.")
    formats.check_lines(path, data, len(first[1]))

    def load(texts: Collection[str]) -> pd.DataFrame:
        columns: dict[str, list[Any]] = {name: [] for name in first[1]}
        for _, entry in chain([first], rows):
            for name, cells in columns.items():
                cells.append(entry.get(name))
        return pd.DataFrame(columns, dtype=object)

    return Part(path, list(map(composed, first[1])), load, entries, faults)


# --- .parquet ------------------------------------------------------------------------------------------------------


def _parquet(path: Path, reading: Reading) -> Part:
    """Open a .parquet file."""
    reading.check_unasked(f"{path} says itself how it is written", *WRITTEN)
    file = formats.open_parquet(path, reading.exclude_columns or ())
    names = [name for name in file.schema_arrow.names if not _UNNAMED.fullmatch(name)]

    def load(texts: Collection[str]) -> pd.DataFrame:
        plain = formats.read_parquet(path, file, names)
        return plain.to_pandas(integer_object_nulls=True)

    return Part(path, list(map(composed, names)), load)
