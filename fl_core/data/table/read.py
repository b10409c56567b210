"""Opening of tables: files within bounds, or a DataFrame. pandas reads them, and what it would mend is a fault."""

from __future__ import annotations

import csv
import io
import re
import warnings
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_string_dtype
from pandas.errors import ParserWarning

from fl_core import formats, storage
from fl_core.data.faults import DataFault, Place, place_in, row_of_array
from fl_core.data.names import composed, first_duplicate, is_number
from fl_core.data.reading import (
    BETWEEN,
    JSONL,
    MAC,
    PARQUET,
    TABLES,
    Reading,
    holds_images,
)
from fl_core.data.table.describe import signs_of
from fl_core.errors import UsageError, about, listing, warn

SEPARATORS = (";", "\t", "|")
"""Signs next to the comma that may stand between cells."""
EXCEL = (".xlsx", ".xls")
TITLES = 5
"""Lines above a header, at most, that are looked for."""
FIRST = 100
"""Lines in which codes such as 007 are looked for."""
SEEN, LEAST = 2000, 2
"""Rows of a column that show its signs in numbers, and more signed words than this."""
UNPACK = "Unpack an archive, rename a text of commas to .csv, and put tables of clients into one folder."
"""What makes tables of a file or folder of another kind."""
CORRECT = "Correct the file."
NAMELESS = "Unnamed: "
"""The beginning of the name that pandas gives a column without one."""
_CODE = re.compile(r"\s*[+-]?0[0-9]+\s*")
"""A whole number with zeros before it, as codes have."""
_UNNAMED = re.compile(r"__index_level_[0-9]+__")  # stored by pandas next to the columns
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
"""Signs that no text has."""


@dataclass
class Opened:
    """A table with all its rows, and what is wrong with its files.

    Attributes:
        where: its path, or a name for messages.
        frame: all rows. Columns without a name have names such as ``Unnamed: 0``.
        place: the name of a row in messages.
        faults: so far.
        sources: how Python reads each file, by its path.
        client: the column that the names of the files make, or an empty text.
        renamed: whether names of columns had another form of Unicode.
    """

    where: str
    frame: pd.DataFrame
    place: Place = row_of_array
    faults: list[DataFault] = field(default_factory=list)
    sources: dict[Path, str] = field(default_factory=dict)
    client: str = ""
    renamed: bool = False

    @property
    def header(self) -> list[str]:
        """Return the names of its columns."""
        return list(self.frame)


def is_table(path: Path) -> bool:
    """Return whether a path is a table, several tables, or texts in lines."""
    single = path.suffix.lower() in (*TABLES, JSONL)
    return bool(files_of(path)) or (not path.is_dir() and single)


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
    data: Path | pd.DataFrame, how: Reading, texts: Sequence[str] | None = None
) -> Opened:
    """Open a table and read all its rows. Of several files each is a client.

    A named index of a frame is a column, too:

    >>> frame = pd.DataFrame({"age": [50, 61], "label": [0, 1]})
    >>> open_table(pd.concat({"north": frame, "south": frame}, names=["client"]), Reading()).header
    ['client', 'age', 'label']

    Args:
        texts: columns whose cells keep their spelling, such as ``007``. None means those of the settings.

    Raises:
        UsageError: a file is not readable, or has no rows.
    """
    kept = how.texts if texts is None else texts
    if isinstance(data, pd.DataFrame):
        index = [name for name in data.index.names if name not in {None, *data}]
        frame = data.reset_index(index).reset_index(drop=True)
        names = [composed(str(name)) for name in frame.columns]
        renamed = names != [*map(str, frame.columns)]
        frame.columns = names
        opened = Opened("the table", frame, renamed=renamed)
        twice = first_duplicate(opened.header)
        if twice is not None:
            rule = f"names of columns must be distinct; got {twice!r} twice."
            line = "table = table.loc[:, ~table.columns.duplicated()]"
            opened.faults.append(DataFault(rule, line=line))
            opened.frame = frame.loc[:, ~frame.columns.duplicated()]
    elif files := files_of(data):
        opened = _joined(data, files, how, kept)
    else:
        opened = _open_file(data, how, kept)
    if not len(opened.frame):
        raise UsageError(f"{opened.where} must have rows; got no rows. Add samples.")
    nameless = [k for k in opened.header if not k.strip() or k.startswith(NAMELESS)]
    if nameless:
        rule = f"each column must have a name; got none for {listing(map(repr, nameless), 4)}."
        line = f"table = table.drop({nameless!r}, axis=1)"
        opened.faults.append(DataFault(f"{opened.where}: {rule}", line=line))
    return opened


def _joined(
    folder: Path, files: Sequence[Path], how: Reading, texts: Sequence[str]
) -> Opened:
    """Open several files, and join their rows."""
    parts = [_open_file(file, how, texts, several=True) for file in files]
    joined = Opened(str(folder), pd.DataFrame(), client=how.client_column)
    for file, part in zip(files, parts, strict=True):
        joined.faults += part.faults
        joined.renamed |= part.renamed
        joined.sources |= part.sources
        if not len(part.frame):
            raise UsageError(f"{file} must have rows; got no rows. Add samples.")
        if joined.client in part.header:
            name, joined.client = joined.client, "file"
            rule = (
                f"each file must be one client, or a column must name the clients; got both in {file}, "
                f"column {name!r}."
            )
            out = [*(how.exclude_columns or ()), name]
            keys = {"client_column": "file", "exclude_columns": out}
            joined.faults.append(DataFault(rule, ("Leave the column out", keys)))
    sizes = [len(part.frame) for part in parts]
    names = np.array([composed(file.stem) for file in files], dtype=object)
    joined.frame = pd.concat([part.frame for part in parts], ignore_index=True)
    joined.frame.insert(0, joined.client, np.repeat(names, sizes))
    places = zip([file.name for file in files], sizes, parts, strict=True)
    joined.place = place_in([(name, size, part.place) for name, size, part in places])
    if folder.is_dir():
        warn_of_others(folder, files)
    return joined


def _open_file(
    path: Path, how: Reading, texts: Sequence[str], several: bool = False
) -> Opened:
    """Open one file by its suffix."""
    kind = path.suffix.lower()
    if kind in (PARQUET, JSONL) and not several:
        how.check_unasked(f"{path} says itself how it is written", "csv")
    if kind == PARQUET:
        source = f"pd.read_parquet({str(path)!r})"
        return Opened(
            str(path), _parquet(path, how.exclude_columns or ()), sources={path: source}
        )
    if kind == JSONL:
        frame, lines = _json_lines(path)
        source = (
            f"pd.read_json({str(path)!r}, lines=True, dtype=False, convert_dates=False)"
        )
        return Opened(
            str(path), frame, lambda row: f"line {lines[row]}", sources={path: source}
        )
    return Csv(path, how, texts).opened(several)


# --- .csv ----------------------------------------------------------------------------------------------------------


class Csv:
    """A .csv file in memory, as ``pandas.read_csv`` reads it.

    pandas pads short lines, an open quotation mark swallows lines, and equal names get numbers. Each of these is a
    fault here.
    """

    def __init__(self, path: Path, how: Reading, texts: Sequence[str]) -> None:
        self.path = path
        self.how = how
        self.texts = texts
        self.data = storage.read_bytes(path)
        self.options: dict[str, Any] = {"keep_default_na": False, **(how.csv or {})}
        self.options["na_values"] = ["", *self.options.get("na_values", ())]
        if path.suffix.lower() == ".tsv":
            self.options.setdefault("sep", "\t")
        self.options.setdefault("sep", ",")
        self.faults: list[DataFault] = []
        self.renamed = False

    def opened(self, several: bool) -> Opened:
        """Return the table. A fault in how the file is written is kept, and the rest is read as it proposes."""
        asked = dict(self.how.csv or {})
        self._encoding(asked)
        self._check_width()
        self._titles(asked)
        self._separator(asked)
        self._check_cells()
        header = self._header()
        spelt = [k for k, name in enumerate(header) if name in self.texts]
        spelt += [k for k in self._codes(header) if k not in spelt]
        frame = self._signs(asked, self._parse(header, spelt), header, spelt)
        frame.columns = self._named(header)
        self._check_lines(header, frame)
        if several:  # the options of one file are none of the others
            written = [fault.rule for fault in self.faults if not fault.line]
            self.faults = [fault for fault in self.faults if fault.line]
            if written:
                rule, line = " ".join(written), f"table = {self.source(frame)}"
                self.faults.insert(0, DataFault(rule, line=line))
        return Opened(
            str(self.path),
            frame,
            self._place,
            self.faults,
            {self.path: self.source(frame)},
            renamed=self.renamed,
        )

    def source(self, frame: pd.DataFrame) -> str:
        """Return how Python reads the file."""
        options = {k: v for k, v in self.options.items() if (k, v) != ("sep", ",")}
        texts = [name for name in frame if name in self.texts]
        if texts:
            options["dtype"] = dict.fromkeys(texts, "str")
        said = [f"{key}={value!r}" for key, value in options.items()]
        return f"pd.read_csv({', '.join([repr(str(self.path)), *said])})"

    def _fault(self, rule: str, asked: dict[str, Any], **options: Any) -> None:
        asked |= options
        self.options |= options
        for fault in self.faults:  # one command with all of them
            fault.ways[0][1]["csv"] = asked
        self.faults.append(
            DataFault(f"{self.path} {rule}", ("Read it so", {"csv": asked}))
        )

    def _encoding(self, asked: dict[str, Any]) -> None:
        """Find the encoding, a fault if it is not the one asked for.

        Raises:
            UsageError: the file is no text.
        """
        encoding = self.options.get("encoding", "utf-8")
        tried = [encoding, "utf-8", "latin-1", "cp1252"]
        first = self.data[:4]
        if "16" not in encoding and "32" not in encoding:
            if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
                tried = ["utf-16"]
            elif b"\0" in first:
                tried = ["utf-16-be" if first[:1] == b"\0" else "utf-16-le"]
        for name in tried:
            plain = name in ("utf-8", "latin-1") and self.data.isascii()
            try:
                text = self.data[: LOOKED_AT if plain else None].decode(name)
            except UnicodeError:
                continue
            if _CONTROL.search(text if name == "latin-1" else text[:LOOKED_AT]):
                continue
            if name != encoding:
                self._fault(
                    f"must be in {encoding}; got other bytes.", asked, encoding=name
                )
            if name == "utf-8" and first.startswith(b"\xef\xbb\xbf"):
                self.options["encoding"] = "utf-8-sig"
            return
        raise UsageError(
            f"{self.path} must be a text table; got bytes that are no text. Save it as CSV UTF-8 (.csv)."
        )

    def _check_width(self) -> None:
        """Refuse a table whose first lines have more cells than a table may have columns, whatever stands between.

        Raises:
            UsageError: as of :func:`fl_core.formats.check_table`.
        """
        signs = {self.options["sep"], ",", *SEPARATORS}
        for line in self._first_lines(TITLES + 1):
            most = max(map(line.count, signs))
            formats.check_table(self.path, rows=0, columns=most + 1)

    def _check_cells(self) -> None:
        """Refuse lines that pandas would fill with far more cells than the file has bytes.

        Raises:
            UsageError: as of :func:`fl_core.formats.check_table`.
        """
        *_, header = next(self._lines(), (0, 0, []))
        rows = max(self.data.count(b"\n"), self.data.count(b"\r"))
        formats.check_table(self.path, rows, len(header))

    def _separator(self, asked: dict[str, Any]) -> None:
        """Find a header of one column with another separator."""
        (line,) = self._first_lines(1) or [""]
        sign = self.options["sep"]
        others = [other for other in (",", *SEPARATORS) if other in line]
        if sign in line or not others:
            return
        other = max(others, key=line.count)
        rule = f"must have more than one column; got the header {line.strip()!r}."
        self._fault(rule, asked, sep=other)

    def _titles(self, asked: dict[str, Any]) -> None:
        """Find lines above a header that has the label."""
        lines = self._first_lines(TITLES + 1)
        label, above = self.how.labels[0], list[int]()
        for sign in dict.fromkeys((self.options["sep"], ",", *SEPARATORS)):
            with suppress(csv.Error):  # a long cell, which has no label
                rows = csv.reader(lines, delimiter=sign)
                names = [[composed(cell.strip()) for cell in row] for row in rows]
                above = above or [k for k, row in enumerate(names) if label in row]
        if not above or above[0] == 0:
            return
        rule = f"must begin with its header; got {plural_lines(above[0])} above it."
        skipped = above[0] + self.options.get("skiprows", 0)
        self._fault(rule, asked, skiprows=skipped)

    def _first_lines(self, most: int) -> list[str]:
        lines = islice(self._text(), self.options.get("skiprows", 0), None)
        return list(islice(lines, most))

    def _cells(self, lines: Sequence[str]) -> Iterator[list[str]]:
        quote = self.options.get("quotechar", '"')
        return csv.reader(lines, delimiter=self.options["sep"], quotechar=quote)

    def _text(self) -> io.TextIOWrapper:
        encoding = self.options.get("encoding", "utf-8")
        return io.TextIOWrapper(io.BytesIO(self.data), encoding, newline="")

    def _read(self, **more: Any) -> pd.DataFrame:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", ParserWarning)
                return pd.read_csv(
                    io.BytesIO(self.data),
                    **{**self.options, **more},
                    index_col=False,
                    on_bad_lines="error",
                    low_memory=False,
                )
        except pd.errors.EmptyDataError as error:
            raise UsageError(
                f"{self.path} must have rows; got an empty file."
            ) from error
        except (ValueError, OverflowError, ParserWarning) as error:
            self._refuse_lines()
            raise UsageError(
                f"{self.path} must be a readable .csv file: {error}. {CORRECT}"
            ) from error

    def _header(self) -> list[str]:
        """Return the names of the columns, those without one by their place as pandas names them."""
        frame = self._read(header=None, nrows=1, dtype="str", na_values=[""])
        given = ["" if name != name else name for name in frame.iloc[0]]
        cells = [*map(composed, given)]
        self.renamed = cells != given
        return [
            name if name.strip() else f"{NAMELESS}{k}" for k, name in enumerate(cells)
        ]

    def _codes(self, header: Sequence[str]) -> list[int]:
        """Return the columns with codes such as 007 in their first lines, which keep their spelling.

        So do all with a sign between thousands at another place: pandas would leave it out.
        """
        names = list(range(len(header)))
        sign, point = self.options.get("thousands"), self.options.get("decimal", ".")
        rows = None if sign else FIRST
        frame = self._read(header=0, names=names, nrows=rows, dtype="str")
        cells = [frame[k].head(FIRST).dropna() for k in names]
        found = [k for k in names if any(map(_CODE.fullmatch, cells[k]))]
        if sign:
            between, point = re.escape(sign), re.escape(point)
            form = rf"\s*[+-]?[0-9]{{1,3}}({between}[0-9]{{3}})*({point}[0-9]*)?\s*"
            for k in names:
                signed = frame[k][frame[k].str.contains(sign, regex=False, na=False)]
                if not signed.str.fullmatch(form).all():
                    found.append(k)
        return found

    def _signs(
        self,
        asked: dict[str, Any],
        frame: pd.DataFrame,
        header: Sequence[str],
        spelt: Sequence[int],
    ) -> pd.DataFrame:
        """Return the rows, read with the signs that all numbers of the file have, if these are others: a fault."""
        if {"decimal", "thousands"} & self.options.keys():
            return frame
        found = set()
        texts = [k for k in frame if is_string_dtype(frame[k]) and k not in spelt]
        for k in texts:
            words = [
                word.strip().replace("\u2212", "-")
                for word in frame[k].head(SEEN).dropna().unique()
            ]
            signed = [word for word in words if not is_number(word)]
            if len(signed) > LEAST and len(signs := signs_of(words)) == 1:
                found.add(signs[0])
        if len(found) != 1:
            return frame
        decimal, thousands = found.pop()
        if thousands in ("'", " "):
            return frame
        before = dict(self.options)
        options = {"decimal": decimal}
        if thousands:
            options["thousands"] = thousands
        self.options |= options
        more = [k for k in self._codes(header) if k not in spelt] if thousands else []
        again = self._parse(header, [*spelt, *more])
        kept = [k for k in frame if k not in texts]
        self.options = before
        if not again[kept].equals(frame[kept]):
            return frame  # other columns have other signs
        said = " and ".join(f"{key} {sign!r}" for key, sign in options.items())
        rule = f"must be read with its signs in numbers; got {said}."
        self._fault(rule, asked, **options)
        return again

    def _parse(self, header: Sequence[str], spelt: Sequence[int]) -> pd.DataFrame:
        names = list(range(len(header)))
        return self._read(header=0, names=names, dtype=dict.fromkeys(spelt, "str"))

    def _named(self, header: Sequence[str]) -> list[str]:
        """Return distinct names of the columns, as pandas names equal ones."""
        twice = [name for k, name in enumerate(header) if name in header[:k]]
        named: list[str] = []
        for k, name in enumerate(header):
            again = header[:k].count(name)
            named.append(f"{name}.{again}" if again else name)
        if twice:
            rule = f"names of columns must be distinct; got {twice[0]!r} twice."
            out = [
                name for name, given in zip(named, header, strict=True) if name != given
            ]
            line = f"table = table.drop({out!r}, axis=1)"
            self.faults.append(DataFault(f"{self.path}: {rule}", line=line))
        return named

    # --- lines -----------------------------------------------------------------------------------------------------

    def _check_lines(self, header: Sequence[str], frame: pd.DataFrame) -> None:
        """Look at each line if the file has another number of separators than its cells need."""
        sign = self.options["sep"].encode(self.options.get("encoding", "utf-8"))
        data = np.frombuffer(self.data, np.uint8)
        blocks = np.array_split(data, 1 + len(data) // LOOKED_AT)  # stay in the cache
        single = len(sign) == 1
        found = sum(np.count_nonzero(block == sign[0]) for block in blocks)
        skips = self.options.get("skiprows") or self.options.get("comment")
        if skips or not single or found != (len(header) - 1) * (len(frame) + 1):
            self._refuse_lines()

    def _lines(self) -> Iterator[tuple[int, int, list[str]]]:
        """Yield first and last line and the cells of every row that is not blank, header first."""
        skipped = self.options.get("skiprows", 0)
        comment = self.options.get("comment")
        reader = self._cells(islice(self._text(), skipped, None))  # type: ignore[arg-type]
        line = 0
        try:
            for cells in reader:
                first, line = line + 1, reader.line_num  # type: ignore[attr-defined]
                if comment and cells:
                    row, found, _ = self.options["sep"].join(cells).partition(comment)
                    cells = row.split(self.options["sep"]) if found else cells
                    if found and not row:
                        continue
                if cells:
                    yield skipped + first, skipped + line, cells
        except csv.Error as error:
            raise UsageError(
                f"{self.path} must be a readable .csv file: {error}. {CORRECT}"
            ) from error

    def _refuse_lines(self) -> None:
        """Refuse the first line with another number of cells than the header, or with an open quotation mark.

        A cell that swallows m line ends holds the cells of m rows: m times the separators of a row.

        Raises:
            UsageError: names the line.
        """
        width, sign = 0, self.options["sep"]
        for first, last, cells in self._lines():
            width = width or len(cells)
            if len(cells) != width:
                raise UsageError(
                    f"{self.path}, line {first}: every line must have {width} cells like the header; "
                    f"got {len(cells)}. Correct the line, or add cells to the header."
                )
            if last > first and any(swallows(cell, sign, width) for cell in cells):
                raise UsageError(
                    f"{self.path}, line {first}: a quotation mark must be closed; got one that is open until line "
                    f"{last}. Close it, or double it within a cell."
                )

    def _place(self, row: int) -> str:
        lines = islice(self._lines(), row + 1, None)
        return f"line {next(lines)[0]}"


LOOKED_AT = 2**20
"""Signs at the beginning of a file that show whether it is a text, and bytes that are counted at once."""


def plural_lines(count: int) -> str:
    """Return a number of lines in words."""
    return "a line" if count == 1 else f"{count} lines"


def swallows(cell: str, separator: str, width: int) -> bool:
    r"""Return whether a cell holds the next rows, because a quotation mark in it is not closed.

    >>> swallows("b,1\nnorth,c,0\nsouth,d", ",", 3), swallows("fine, well\nyes", ",", 3)
    (True, False)
    """
    breaks = cell.rstrip("\r\n").count("\n")
    return breaks > 0 and cell.count(separator) == breaks * (width - 1)


# --- .jsonl and .parquet -------------------------------------------------------------------------------------------


def _json_lines(path: Path) -> tuple[pd.DataFrame, Sequence[int]]:
    """Return the rows of a .jsonl file, and their lines. The keys of the first line are the columns of all.

    Raises:
        UsageError: names the line that is no object, or says that there is none.
    """
    data = storage.read_bytes(path)
    columns: dict[str, list[Any]] = {}
    lines = array("q")
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
        if not columns:
            columns = {key: [] for key in entry}
            formats.check_lines(path, data, len(columns))
        lines.append(number)
        for name, cells in columns.items():
            cells.append(entry.get(name))
    if not columns:
        raise UsageError(f"{path} must have rows; got an empty file.")
    frame = pd.DataFrame(columns, dtype=object)
    frame.columns = [composed(name) for name in columns]
    return frame, lines


def _parquet(path: Path, excluded: Collection[str]) -> pd.DataFrame:
    """Return the rows of a .parquet file. Columns that are left out may have any type, and are empty."""
    file = formats.open_parquet(path, excluded)
    names = [name for name in file.schema_arrow.names if not _UNNAMED.fullmatch(name)]
    read = [name for name in names if name not in excluded]
    plain = formats.read_parquet(path, file, read)
    frame: pd.DataFrame = plain.to_pandas(integer_object_nulls=True)
    frame = frame.reindex(columns=names)
    frame.columns = [composed(str(name)) for name in names]
    return frame
