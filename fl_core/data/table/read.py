"""Opening of tables: files within bounds, or a DataFrame. pandas reads them, and what it would mend is a fault."""

from __future__ import annotations

import csv
import io
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals
from pandas.errors import DtypeWarning, ParserWarning

from fl_core import formats, storage
from fl_core.data.faults import DataFault, Place, place_in, row_of_array
from fl_core.data.names import (
    check_file_names,
    composed,
    first_duplicate,
    is_number,
)
from fl_core.data.reading import (
    BETWEEN,
    EARLIER,
    JSONL,
    MAC,
    PARQUET,
    TABLES,
    Reading,
    holds_images,
)
from fl_core.data.table.describe import EXACT, GROUPED, days_of
from fl_core.errors import UsageError, about, listing, plural, warn

SEPARATORS = (",", ";", "\t", "|")
"""Signs that may stand between cells."""
FILES = 1000
"""Tables of a folder or of a list at most. Each of them takes up to 4 ms."""
EXCEL = (".xlsx", ".xls")
FIRST = 100
"""Rows in which words and codes such as 007 are looked for."""
TITLES = 5
"""Lines above a header, at most, that are looked for."""
LOOKED_AT = 2**20
"""Signs at the beginning of a file that show whether it is a text, and bytes that are counted at once."""
UNPACK = "Unpack an archive, rename a text of commas to .csv, and put tables of clients into one folder."
"""The advice on a file or folder of another kind."""
CORRECT = "Correct the file."
LARGE, PART = 2**25, 50_000
"""Bytes from which a file is read in parts, and the rows of a part."""
DAYS = pd.Timedelta(days=1)
DAY_0 = pd.Timestamp("1970-01-01", tz="UTC")
NAMELESS = "Unnamed: "
"""The beginning of the name that pandas gives a column without one."""
_CODE = re.compile(r"\s*[+-]?0[0-9]+\s*")
"""A whole number with zeros before it, as codes have."""
_COMMA = re.compile(r"\s*[+-]?[0-9]+(?:,[0-9]+)?\s*")
"""A number with a decimal comma."""
_UNNAMED = re.compile(r"__index_level_[0-9]+__")  # stored by pandas next to the columns
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
"""Signs that no text has."""


@dataclass
class Opened:
    """A table with all its rows, and the faults of its files.

    Attributes:
        where: the table's path, or a name for messages.
        frame: all rows. Columns without a name have names such as ``Unnamed: 0``.
        place: a function that names a row in messages.
        faults: the faults so far.
        sources: the expression of pandas that reads each file, by its path.
        client: the column that holds the names of the files, or an empty text.
    """

    where: str
    frame: pd.DataFrame
    place: Place = row_of_array
    faults: list[DataFault] = field(default_factory=list)
    sources: dict[Path, str] = field(default_factory=dict)
    client: str = ""

    @property
    def header(self) -> list[str]:
        """Return the names of the table's columns."""
        return list(self.frame)


def is_table(path: Path) -> bool:
    """Return whether a path is a table, several tables, or a .jsonl file.

    Several tables are a folder or a list of files. A single file need not exist.

    Raises:
        UsageError: as for :func:`files_of`.
    """
    single = path.suffix.lower() in (*TABLES, JSONL)
    return bool(files_of(path)) or (not path.is_dir() and single)


def files_of(path: Path) -> list[Path]:
    """Return the sorted tables of a folder or of a list of files; an empty list for other paths.

    A folder gives its visible files with a suffix of :data:`TABLES`. One whose
    subfolders hold images gives none. A list is a path with commas that does not exist
    itself. Its files may have any suffix, and need not exist.

    >>> files_of(Path("b.csv,a.csv"))
    [PosixPath('a.csv'), PosixPath('b.csv')]

    Raises:
        UsageError: two files have one name without the suffix or one that is refused
            (:func:`fl_core.data.names.check_file_names`), there are more than
            :data:`FILES`, or the path or a file of the folder is an Excel file.
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
    if len(parts) > FILES:
        raise UsageError(
            f"{path} must have at most {FILES:,} tables, one for each client; got {len(parts):,}. "
            "Join them into one table with a column of clients."
        )
    check_file_names(parts)
    twice = first_duplicate([composed(part.stem) for part in parts])
    if twice is not None:
        equal_files = [str(part) for part in parts if composed(part.stem) == twice]
        raise UsageError(
            f"each file must have its own name, the name of its client; got {twice!r} in {listing(equal_files)}. "
            "Rename one of them."
        )
    return parts


def warn_of_others(path: Path, used: Collection[Path]) -> None:
    """Warn of files of a folder, at any depth, that are not among those in ``used``.

    Hidden files and copies that macOS makes do not count.
    """
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
    """Open a table and read all its rows. If it has several files, every file is a client.

    A named index of a frame counts as a column:

    >>> frame = pd.DataFrame({"age": [50, 61], "label": [0, 1]})
    >>> open_table(pd.concat({"north": frame, "south": frame}, names=["client"]), Reading()).header
    ['client', 'age', 'label']

    Faults such as equal names of columns are recorded in the result.

    Args:
        data: the path of a table or of several, or a frame, which stays unchanged.
        how: the settings.
        texts: columns whose cells keep their spelling, such as ``007``. None means those of the settings.

    Raises:
        UsageError: a file is not readable, the table or one of its files has no rows,
            or as for :func:`files_of`.
    """
    text_columns = how.texts if texts is None else texts
    if isinstance(data, pd.DataFrame):
        index = [name for name in data.index.names if name not in {None, *data}]
        opened = Opened("the table", data.reset_index(index).reset_index(drop=True))
    elif files := files_of(data):
        opened = _joined(data, files, how, text_columns)
    else:
        opened = _open_file(data, how, text_columns)
    if not len(opened.frame):
        raise UsageError(f"{opened.where} must have rows; got no rows. Add samples.")
    names = opened.frame.columns = [composed(str(name)) for name in opened.frame]
    twice = first_duplicate(names)
    if twice is not None:
        rule = f"names of columns must be distinct; got {twice!r} twice."
        line = "table = table.loc[:, ~table.columns.duplicated()]"
        opened.faults.append(DataFault(f"{opened.where}: {rule}", line=line))
        opened.frame = opened.frame.loc[:, ~opened.frame.columns.duplicated()]
    if how.csv and EARLIER in how.csv:
        opened.frame = _as_then(opened.frame, how.csv[EARLIER], how)
    nameless = [k for k in names if not k.strip() or k.startswith(NAMELESS)]
    if nameless:
        shown = listing(map(repr, nameless), 4)
        rule = f"each column must have a name; got none for {shown}."
        line = f"table = table.drop({nameless!r}, axis=1)"
        opened.faults.append(DataFault(f"{opened.where}: {rule}", line=line))
    return opened


def _as_then(
    frame: pd.DataFrame, earlier: Mapping[str, Any], how: Reading
) -> pd.DataFrame:
    """Return a copy of a table with the cells that an earlier version made of it.

    Dates become days since 1970, words get small letters and single blanks, and labels
    become numbers. Each of these is done only if the earlier settings ask for it.

    Args:
        frame: the table as pandas has read it.
        earlier: settings as in :class:`fl_core.data.reading.Earlier`.
        how: the present settings, which name the columns of labels and texts.
    """
    frame = frame.copy(deep=False)
    folded, dates = earlier.get("fold_case", False), earlier.get("date_columns", ())
    for name in dates:
        kind = getattr(frame.get(name), "dtype", np.dtype("O")).kind
        if kind == "M":
            frame[name] = (pd.to_datetime(frame[name], utc=True) - DAY_0) / DAYS
        elif kind == "m":
            frame[name] = frame[name] / DAYS
    for name in frame.select_dtypes(["str", "object", "category"]):
        if pd.api.types.infer_dtype(frame[name]) not in ("string", "categorical"):
            continue  # numbers of a .jsonl file
        cells = frame[name].astype("str")
        if name in dates:
            words = pd.Series(cells.str.strip().dropna().unique())
            for line, spans in days_of(words, name).items():
                days = (spans + pd.Timedelta(hours=12 * ("datetime" in line))) / DAYS
                frame[name] = cells.str.strip().map(dict(zip(words, days, strict=True)))
        elif name in how.labels and earlier.get("label_numbers"):
            frame[name] = pd.to_numeric(cells)
        elif folded and name != how.text_column:
            frame[name] = cells.str.split().str.join(" ").str.casefold()
    return frame


def _joined(
    folder: Path, files: Sequence[Path], how: Reading, texts: Sequence[str]
) -> Opened:
    """Open several files, and join their rows.

    A new first column names the file of each row. A file that has the column of clients
    itself is a recorded fault.

    Raises:
        UsageError: a file is not readable, or has no rows.
    """
    parts = [_open_file(file, how, texts, several=True) for file in files]
    joined = Opened(str(folder), pd.DataFrame(), client=how.client_column)
    for file, part in zip(files, parts, strict=True):
        joined.faults += part.faults
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
    """Open one file by its suffix.

    Args:
        path: the file.
        how: the settings.
        texts: columns whose cells keep their spelling.
        several: whether the file is one of several.

    Raises:
        UsageError: the file is not readable, or ``csv`` has options for a single file
            of another suffix.
    """
    kind, path_text = path.suffix.lower(), repr(str(path))
    if kind not in (PARQUET, JSONL):
        return Csv(path, how, texts).opened(several)
    if not several and {*(how.csv or ())} - {EARLIER}:
        how.check_unasked(f"{path} says itself how it is written", "csv")
    if kind == PARQUET:
        frame = _parquet(path, how.exclude_columns or ())
        return Opened(str(path), frame, sources={path: f"pd.read_parquet({path_text})"})
    frame, lines = _json_lines(path)
    source = f"pd.read_json({path_text}, lines=True, dtype=False, convert_dates=False)"
    return Opened(
        str(path), frame, lambda row: f"line {lines[row]}", sources={path: source}
    )


# --- .csv ----------------------------------------------------------------------------------------------------------


class Csv:
    """A .csv file in memory, as ``pandas.read_csv`` reads it.

    pandas fills short lines, an open quotation mark swallows lines, and equal names get numbers. Each of these is a
    fault here. So is an encoding, a separator or a header's line that differs from the settings.

    Args:
        path: the file, which is read at once.
        how: the settings.
        texts: columns whose cells keep their spelling, such as ``007``.
    """

    def __init__(self, path: Path, how: Reading, texts: Sequence[str]) -> None:
        self.path = path
        self.label = how.labels[0]
        self.texts = texts
        self.data = storage.read_bytes(path)
        self.given_options = {k: v for k, v in (how.csv or {}).items() if k != EARLIER}
        self.options: dict[str, Any] = {"keep_default_na": False, **self.given_options}
        self.options["na_values"] = ["", *self.options.get("na_values", ())]
        if path.suffix.lower() == ".tsv":
            self.options.setdefault("sep", "\t")
        self.options.setdefault("sep", ",")
        self.rules: list[str] = []

    def opened(self, several: bool) -> Opened:
        """Return the table. A fault in the file's form is recorded, and the rest is read as the repair proposes.

        Args:
            several: whether the file is one of several. A repair is then a line of pandas for this file alone.

        Raises:
            UsageError: the file is empty, no text, or far larger as a table, or a line
                has another number of cells or cannot be read. A file with a header
                alone gives a table without rows.
        """
        self._find_encoding()
        self._check_width()
        self._find_header()
        self._check_cells()
        first = self._first_rows()
        names_in_file = [
            name if name.strip() else f"{NAMELESS}{k}"
            for k, name in enumerate(first.iloc[0].fillna(""))
        ]
        counts = Counter[str]()
        repeats = np.zeros(len(names_in_file), dtype=np.int64)
        for k, name in enumerate(names_in_file):
            repeats[k] = counts[name]
            counts[name] += 1
        pairs = zip(names_in_file, repeats, strict=True)
        header = [f"{name}.{n}" if n else name for name, n in pairs]  # as pandas does
        frame = self._rows(header, first)
        if self._has_commas(frame):
            rule = "must be read with its decimal sign; got ','."
            self._refuse(rule, decimal=",")
            frame = self._rows(header, first)
        frame.columns = header
        self._check_lines(frame)
        source, faults = self.source(header), []
        broken = " It ".join(self.rules)
        rule = f"{self.path} {broken}"
        if self.rules and several:  # the options of one file are none of the others
            faults.append(DataFault(rule, line=f"table = {source}"))
        elif self.rules:
            faults.append(DataFault(rule, ("Read it so", {"csv": self.given_options})))
        if repeats.any():
            twice = list(frame.columns[repeats > 0])
            got = names_in_file[int(repeats.argmax())]
            rule = f"names of columns must be distinct; got {got!r} twice."
            line = f"table = table.drop({twice!r}, axis=1)"
            faults.append(DataFault(f"{self.path}: {rule}", line=line))
        return Opened(str(self.path), frame, self._place, faults, {self.path: source})

    def source(self, header: Sequence[str]) -> str:
        """Return the expression of pandas that reads the file, as text.

        Args:
            header: the names of the file's columns.
        """
        options = {k: v for k, v in self.options.items() if (k, v) != ("sep", ",")}
        texts = [name for name in header if composed(name) in self.texts]
        if texts:
            options["dtype"] = dict.fromkeys(texts, "str")
        pairs = [f"{key}={value!r}" for key, value in options.items()]
        arguments = ", ".join([repr(str(self.path)), *pairs])
        return f"pd.read_csv({arguments})"

    def _refuse(self, rule: str, **options: Any) -> None:
        """Record a rule that the file breaks, and set the options that repair it."""
        self.rules.append(rule)
        self.given_options |= options
        self.options |= options

    def _find_encoding(self) -> None:
        """Find the encoding of the file.

        Another one than that of the settings is a fault.

        Raises:
            UsageError: the file is no text.
        """
        encoding = self.options.get("encoding", "utf-8")
        first = self.data[:4]
        encodings = [encoding, "utf-8", "latin-1", "cp1252"]
        if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
            encodings = [encoding, "utf-16"]
        elif first[:1] == b"\0":
            encodings = [encoding, "utf-16-be"]
        elif b"\0" in first:
            encodings = [encoding, "utf-16-le"]
        plain = self.data.isascii()
        for name in encodings:
            n_bytes = LOOKED_AT if plain and name in ("utf-8", "latin-1") else None
            try:
                text = self.data[:n_bytes].decode(name)
            except UnicodeError:
                continue
            if _CONTROL.search(text if name == "latin-1" else text[:LOOKED_AT]):
                continue
            if name != encoding:
                self._refuse(f"must be in {encoding}; got other bytes.", encoding=name)
            if name == "utf-8" and text.startswith("\ufeff"):
                self.options["encoding"] = "utf-8-sig"
            return
        raise UsageError(
            f"{self.path} must be a text table; got bytes that are no text. Save it as CSV UTF-8 (.csv)."
        )

    def _check_width(self) -> None:
        """Refuse a table with too many cells in a first line, by any usual separator.

        Raises:
            UsageError: as for :func:`fl_core.formats.check_table`.
        """
        signs = {self.options["sep"], *SEPARATORS}
        for line in islice(self._lines_of_text(), TITLES + 1):
            most = max(map(line.count, signs))
            formats.check_table(self.path, rows=0, columns=most + 1)

    def _check_cells(self) -> None:
        """Refuse lines that pandas would fill with far more cells than the file has bytes.

        Raises:
            UsageError: as for :func:`fl_core.formats.check_table`.
        """
        *_, header = next(self._lines(), (0, 0, []))
        formats.check_table(self.path, self.most_rows, len(header))

    @cached_property
    def most_rows(self) -> int:
        """Return the number of line ends in the file. There are at most as many rows below its header."""
        return max(self._count(b"\n"), self._count(b"\r"))

    def _find_header(self) -> None:
        """Find the line and the separator of a header with the label.

        Lines above the header, and another separator than that of the settings, are
        faults. Without such a header only the separator of the first line is examined.
        """
        lines = list(islice(self._lines_of_text(), TITLES + 1))
        separator = self.options["sep"]
        for above, line in enumerate(lines):
            for sign in (separator, *SEPARATORS):
                cells: list[str] = []
                with suppress(csv.Error):  # a long cell, which has no label
                    cells = next(csv.reader([line], delimiter=sign), [])
                if self.label not in [composed(cell.strip()) for cell in cells]:
                    continue
                if above:
                    rule = f"must begin with its header; got {plural(above, 'line')} above it."
                    skipped = above + self.options.get("skiprows", 0)
                    self._refuse(rule, skiprows=skipped)
                return self._check_separator(line)
        if lines:
            self._check_separator(lines[0])
        return None

    def _check_separator(self, header: str) -> None:
        """Record a fault if only another separator gives a header several columns."""
        other = max(SEPARATORS, key=header.count)
        if self.options["sep"] not in header and other in header:
            rule = f"must have more than one column; got the header {header.strip()!r}."
            self._refuse(rule, sep=other)

    def _lines_of_text(self) -> Iterator[str]:
        encoding = self.options.get("encoding", "utf-8")
        text = io.TextIOWrapper(io.BytesIO(self.data), encoding, newline="")
        return islice(text, self.options.get("skiprows", 0), None)

    def _rows(self, header: Sequence[str], first: pd.DataFrame) -> pd.DataFrame:
        """Return all rows. Their columns have numbers from 0 as names.

        Args:
            header: the names of the file's columns.
            first: the header and the first rows, which show the columns of text.
        """
        names, types = list(range(len(header))), self._types(header, first)
        options = {"header": 0, "names": names, "dtype": types}
        numeric = [k for k in names if k not in types]
        if len(self.data) < LARGE:
            return self._at_once(**options)
        with self._checked():
            try:
                numbers, others = self._in_parts(numeric, options)
            except (DtypeWarning, TypeError):
                return self._at_once(**options)
        return pd.concat([numbers, others], axis=1)[names]

    def _in_parts(
        self, numeric: Sequence[int], options: Mapping[str, Any]
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the columns of numbers, and those of words.

        The numbers are written into one array while pandas reads them, so that nothing copies them again.

        Raises:
            DtypeWarning, TypeError: some cells of a column are no numbers, or a number is not exact.
        """
        values, count = np.empty((len(numeric), self.most_rows + 1)), 0
        texts: list[pd.DataFrame] = []
        for part in self._opened(**options, chunksize=PART):
            stop = count + len(part)
            for row, k in zip(values, numeric, strict=True):
                cells = part[k].to_numpy()
                whole = cells.dtype == np.int64
                inexact = whole and bool((np.abs(cells) >= EXACT).any())
                if inexact or not (whole or cells.dtype == np.float64):
                    raise TypeError("a column must be of exact numbers")
                row[count:stop] = cells
            texts.append(part.drop(columns=list(numeric)))
            count = stop
        read = pd.DataFrame(values[:, :count].T, columns=numeric, copy=False)
        words = {
            k: union_categoricals([part[k] for part in texts])
            if isinstance(texts[0][k].dtype, pd.CategoricalDtype)
            else pd.concat([part[k] for part in texts], ignore_index=True)
            for k in texts[0]
        }
        return read, pd.DataFrame(words, index=read.index)

    def _at_once(self, **more: Any) -> pd.DataFrame:
        """Return the rows that pandas reads with these options, under :meth:`_checked`.

        If pandas finds parts of a column with different types, it reads all rows at
        once.
        """
        with self._checked():
            try:
                return self._opened(**more)
            except DtypeWarning:
                return self._opened(**more, low_memory=False)

    def _opened(self, **more: Any) -> Any:
        """Return the rows as pandas reads them with these options.

        With ``chunksize`` this is an iterator over parts of the rows.
        """
        file: Any = io.BytesIO(self.data)
        if self.options.get("encoding", "utf-8") == "utf-8":
            file = Undecoded(self.data)
        return pd.read_csv(
            file,
            **{**self.options, **more},
            index_col=False,
            on_bad_lines="error",
        )

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise an error, with its line if known, for what pandas would mend or cannot read.

        Raises:
            UsageError: the file is empty, or pandas cannot read it without mending it.
            DtypeWarning: parts of a column have different types.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", ParserWarning)
                warnings.simplefilter("error", DtypeWarning)
                yield
        except pd.errors.EmptyDataError as error:
            raise UsageError(
                f"{self.path} must have rows; got an empty file."
            ) from error
        except (ValueError, OverflowError, ParserWarning) as error:
            self._refuse_lines()
            raise UsageError(
                f"{self.path} must be a readable .csv file: {error}. {CORRECT}"
            ) from error

    def _first_rows(self) -> pd.DataFrame:
        """Return the header and the first rows as texts.

        With a sign between thousands these are all rows, since each of them is checked.
        """
        rows = None if self.options.get("thousands") else FIRST + 1
        return self._at_once(header=None, nrows=rows, dtype="object", na_values=[""])

    def _types(self, header: Sequence[str], first: pd.DataFrame) -> dict[int, str]:
        """Return the types of columns whose cells keep their spelling, by number.

        Numbers count from 0. These are the columns that the settings name, words, and
        codes such as 007. So are numbers with a sign between thousands at a wrong
        place, which pandas would leave out.
        """
        types = {}
        sign, point = self.options.get("thousands"), self.options.get("decimal", ".")
        marks = {np.nan, *self.options["na_values"]}
        for k, name in enumerate(header):
            cells = first[k].iloc[1:]
            distinct = {*cells.head(FIRST)} - marks
            if any(map(self._is_word, distinct)):
                types[k] = "category"  # each word is stored once
            elif composed(name) in self.texts or any(map(_CODE.fullmatch, distinct)):
                types[k] = "str"
            elif sign:
                separator_pattern, after = re.escape(sign), re.escape(point)
                form = rf"\s*[+-]?[0-9]{{1,3}}({separator_pattern}[0-9]{{3}})*({after}[0-9]*)?\s*"
                filled = cells[~cells.isin(marks)].astype("str")
                signed = filled[filled.str.contains(sign, regex=False)]
                if not signed.str.fullmatch(form).all():
                    types[k] = "str"
        return types

    def _is_word(self, cell: str) -> bool:
        """Return whether a cell is neither a number nor a truth value."""
        bare = cell.replace(self.options.get("thousands", ""), "")
        bare = bare.replace(self.options.get("decimal", "."), ".").strip().lower()
        return not is_number(bare) and bare not in ("true", "false")

    def _has_commas(self, frame: pd.DataFrame) -> bool:
        """Return whether the file seems to have decimal commas.

        All words of some column must be numbers with or without a comma. Some comma
        must have another place than one between thousands, as in 1,5. No column of
        numbers may have fractions. The answer is no if the settings have a sign for
        decimals or thousands.
        """
        if {"decimal", "thousands"} & self.options.keys():
            return False
        has_commas = False
        for k in frame.select_dtypes("category"):
            words = frame[k].cat.categories
            numeric = len(words) > 1 and bool(words.str.fullmatch(_COMMA).all())
            with_comma = words[words.str.contains(",")].str.strip()
            has_commas |= numeric and not with_comma.str.fullmatch(GROUPED[","]).all()
        if not has_commas:
            return False
        numbers = [frame[k].dropna() for k in frame.select_dtypes("float")]
        return all((values % 1 == 0).all() for values in numbers)

    # --- lines -----------------------------------------------------------------------------------------------------

    def _check_lines(self, frame: pd.DataFrame) -> None:
        """Refuse a file with a line of another number of cells than the header, or with an open quotation mark.

        Lines are read one by one only if needed. They are not if the file has as many
        separators as its header and rows need, the separator is one byte, and the
        settings neither skip lines nor have a sign of comments.

        Args:
            frame: the rows that pandas has read from the file.

        Raises:
            UsageError: as for :meth:`_refuse_lines`.
        """
        sign = self.options["sep"].encode(self.options.get("encoding", "utf-8"))
        skips = self.options.get("skiprows") or self.options.get("comment")
        cells = (frame.shape[1] - 1) * (len(frame) + 1)
        if skips or len(sign) > 1 or self._count(sign) != cells:
            self._refuse_lines()

    def _count(self, sign: bytes) -> int:
        """Return how often a byte is in the file."""
        data = np.frombuffer(self.data, np.uint8)
        blocks = np.array_split(data, 1 + len(data) // LOOKED_AT)  # stay in the cache
        return sum(int(np.count_nonzero(block == sign[0])) for block in blocks)

    def _lines(self) -> Iterator[tuple[int, int, list[str]]]:
        """Yield first and last line and the cells of each row, header first.

        Blank rows are skipped.

        Raises:
            UsageError: Python's reader cannot read a line.
        """
        sign, skipped = self.options["sep"], self.options.get("skiprows", 0)
        quote, comment = self.options.get("quotechar", '"'), self.options.get("comment")
        reader = csv.reader(self._lines_of_text(), delimiter=sign, quotechar=quote)
        last = 0
        try:
            for cells in reader:
                first, last = last + 1, reader.line_num
                if comment and cells:
                    row, mark, _ = sign.join(cells).partition(comment)
                    if mark:
                        cells = row.split(sign) if row else []
                if cells:
                    yield skipped + first, skipped + last, cells
        except csv.Error as error:
            raise UsageError(
                f"{self.path} must be a readable .csv file: {error}. {CORRECT}"
            ) from error

    def _refuse_lines(self) -> None:
        """Refuse the first line with another number of cells than the header, or with an open quotation mark.

        A cell that swallows m line ends holds the cells of m rows: m times the separators of a row.

        Raises:
            UsageError: there is such a line. The message has its number.
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
        first, _, _ = next(islice(self._lines(), row + 1, None))
        return f"line {first}"


class Undecoded:
    """A file in memory whose bytes pandas takes as they are. Those of a BytesIO are decoded, and encoded again."""

    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most ``size`` of them; all that remain for -1."""
        return self.file.read(size)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.file)


def swallows(cell: str, separator: str, width: int) -> bool:
    r"""Return whether a cell seems to contain following rows, by an open quotation mark.

    It does if it has line ends, and for each of them the separators of one row.

    >>> swallows("b,1\nnorth,c,0\nsouth,d", ",", 3), swallows("fine, well\nyes", ",", 3)
    (True, False)

    Args:
        width: the number of cells of a row.
    """
    breaks = cell.rstrip("\r\n").count("\n")
    return breaks > 0 and cell.count(separator) == breaks * (width - 1)


# --- .jsonl and .parquet -------------------------------------------------------------------------------------------


def _json_lines(path: Path) -> tuple[pd.DataFrame, Sequence[int]]:
    """Return the rows of a .jsonl file, and their lines. The keys of the first line are the columns of all.

    A key that a later line lacks gives None there. Keys that the first line lacks are
    ignored. Lines count from 1, and blank ones are skipped.

    Raises:
        UsageError: a line is no object of JSON, the first object or the file is empty,
            or the table would take far more memory than the file.
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
            kind = type(entry).__name__
            raise UsageError(
                f"{path}, line {number} must be an object of keys and values; got {kind}."
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
    """Return the rows of a .parquet file.

    Columns in ``excluded`` may have any type, and are empty.

    Raises:
        UsageError: the file is not readable, or another column is neither numbers,
            truth values, times nor texts.
    """
    file = formats.open_parquet(path, excluded)
    names = [name for name in file.schema_arrow.names if not _UNNAMED.fullmatch(name)]
    read = [name for name in names if name not in excluded]
    frame = formats.read_parquet(path, file, read).reindex(columns=names)
    frame.columns = [composed(str(name)) for name in names]
    return frame
