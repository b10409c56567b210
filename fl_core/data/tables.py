"""Tables with named columns: .csv and .parquet files of numbers or texts, and .jsonl files of texts."""

from __future__ import annotations

import codecs
import csv
import shlex
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_core.data import (
    arrays,
    categories,
    client_tables,
    parquet,
    roles,
    spelling,
    text,
    xlsx,
)
from fl_core.data.arrays import Array, Cells
from fl_core.data.columns import (
    CLIENT_COLUMN,
    ENCODING,
    PLAIN,
    WRITTEN,
    Reading,
    check_distinct_columns,
)
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known, listing, warn
from fl_core.limits import parsed_json

PARQUET, XLSX = ".parquet", ".xlsx"
SEPARATORS = (";", "\t", "|", ",")
SEEN = 1000
"""Lines whose words show what a column holds."""


def read_table(path: Path, reading: Reading = PLAIN) -> Source:
    """Read a dataset from a .csv or .parquet table (see :func:`fl_core.data.files.read`).

    Samples are features [n, d] in the order of their columns, or texts. Classes are whole numbers or words.

    Raises:
        UsageError: a column is missing, a line has another number of cells, a cell is not a finite number, or a word is
            among the labels' numbers. The message names line and column.
    """
    header = header_of(path, reading)

    def columns(
        names: Sequence[str], texts: Sequence[str]
    ) -> tuple[dict[str, Cells], arrays.Place]:
        return _columns(path, header, names, texts, reading)

    return table(path, str(path), header, columns, reading)


Columns = Callable[
    [Sequence[str], Sequence[str]], tuple[dict[str, Cells], arrays.Place]
]
"""Reads columns, given their names and those of them that are text; also returns how messages name a row."""


def table(
    path: Path, called: str, header: Sequence[str], read: Columns, reading: Reading
) -> Source:
    """Return the source of a table, in a file or in memory.

    Args:
        path: the table in messages. called: the source's name.
        read: reads columns of ``header``.

    Raises:
        UsageError: as for :func:`read_table`.
    """
    names = feature_columns(path, header, reading)
    client, labels, text_column = (
        reading.client_column,
        reading.labels,
        reading.text_column,
    )
    group = [reading.group_column] if reading.group_column else []
    beside = [
        name
        for name in (client, *group, *labels, *[text_column] * (names is None))
        if name in header
    ]
    columns, place = read(
        [*beside, *(names or ())], [*beside, *(reading.word_columns or ())]
    )
    if reading.drop_missing_labels:
        columns, place = drop_missing_labels(path, columns, place, labels)
    texts: dict[str, Sequence[str]] = {name: columns[name] for name in beside}  # type: ignore[misc]
    groups = None
    if reading.group_column:
        groups = groups_of(path, texts, place, reading)
    if names is None:
        return replace(text.source(path, texts, place, reading), groups=groups)
    owner, owner_names = text.clients(path, texts, place, client)
    y, classes = text.answers(path, texts, place, reading)
    ids = (
        []
        if reading.keep_ids
        else [name for name in names if roles.is_identifier(name, columns[name], owner)]
    )
    if ids:
        out = " ".join(map(shlex.quote, [*(reading.exclude_columns or ()), *ids]))
        again = [
            shlex.quote(name)
            for name in ids
            if len(set(columns[name])) < len(columns[name])
        ]
        together = (
            f"Keep its rows in one split: --group-column {again[0]}. Or leave"
            if again
            else "Leave"
        )
        raise UsageError(
            f"{path}: features must say something about a new sample; got {listing(map(repr, ids))}, named and filled "
            f"like an identifier. {together} it out: --exclude-columns {out} (or allow it: --keep-ids)."
        )
    found = typed(path, {name: columns[name] for name in names}, place, reading)
    forced = reading.word_columns or ()
    for name, cells in found.items():
        suspicious = name not in forced and categories.holds_words(cells)
        odd = spelling.suspicion(cells, shlex.quote(name)) if suspicious else ""
        if odd:
            some = listing(map(repr, sorted({*cells})), 3)
            raise UsageError(
                f"{path}, column {name!r} must hold numbers or words; got {some}, {odd}. "
                f"Or keep the words: --word-columns {shlex.quote(name)}."
            )
    words = categories.find_categories(str(path), found, forced)
    x = features(path, found, place, reading.may_be_missing, words)
    coded = tuple(words.get(name, ()) for name in names) if words else ()
    return Source(
        called,
        x,
        y,
        classes,
        owner,
        owner_names,
        groups=groups,
        columns=tuple(names),
        categories=coded,
    )


def groups_of(
    path: Path,
    columns: Mapping[str, Sequence[str]],
    place: arrays.Place,
    reading: Reading,
) -> arrays.Integers:
    """Return the group [n] of each row. The same name at two clients is two groups.

    Raises:
        UsageError: a row has no group.
    """
    name = reading.group_column or ""
    for row, cell in enumerate(columns[name]):
        if spelling.is_missing(cell):
            raise UsageError(
                f"{path}, column {name!r}, {place(row)}: each row must have a group; got {cell!r}."
            )
    clients = columns.get(reading.client_column, [""] * len(columns[name]))
    keys = [
        spelling.name(f"{client}\0{cell.strip()}")
        for client, cell in zip(clients, columns[name], strict=True)
    ]
    return np.unique(arrays.text_array(keys), return_inverse=True)[1].astype(np.int64)


def typed(
    path: Path, columns: Mapping[str, Cells], place: arrays.Place, reading: Reading
) -> dict[str, Cells]:
    """Return columns with their dates as days, and their numbers in plain spelling.

    Raises:
        UsageError: a cell in a column of dates is no date.
    """
    found: dict[str, Cells] = {}
    for name, cells in columns.items():
        if isinstance(cells, np.ndarray) or name in (reading.word_columns or ()):
            found[name] = cells
        elif name in (reading.date_columns or ()):
            found[name] = arrays.dates(cells, f"{path}, column {name!r}", place)
        else:
            found[name] = reading.numbers.plain(cells)
    return found


def drop_missing_labels(
    path: Path, columns: Mapping[str, Cells], place: arrays.Place, labels: Sequence[str]
) -> tuple[dict[str, Cells], arrays.Place]:
    """Return the rows that have all their labels, and warn of the number of others."""
    kept = [row for row, cells in enumerate(zip(*(columns[name] for name in labels), strict=True))
            if not any(map(spelling.is_missing, cells))]  # fmt: skip
    total = len(columns[labels[0]])
    if len(kept) == total:
        return dict(columns), place
    warn(f"{path}: {total - len(kept)} of {total} rows have no label and are left out")
    found: dict[str, Cells] = {
        name: cells[kept]
        if isinstance(cells, np.ndarray)
        else [cells[row] for row in kept]
        for name, cells in columns.items()
    }
    return found, lambda row: place(kept[row])


def read_texts(
    path: Path, reading: Reading = PLAIN
) -> tuple[Sequence[str], arrays.Place]:
    """Return the texts of a .csv or .parquet table, and how messages name a row. Other columns are ignored.

    Raises:
        UsageError: there is no such column.
    """
    name = reading.text_column
    columns, place = named_columns(path, (name,), (name,), reading)
    return [str(cell) for cell in columns[name]], place


def named_columns(
    path: Path, names: Sequence[str], texts: Collection[str], reading: Reading
) -> tuple[dict[str, Cells], arrays.Place]:
    """Return columns of a .csv or .parquet table in the order of ``names``, and how messages name a row.

    The columns in ``texts`` are text.

    Raises:
        UsageError: a column is missing or repeated.
    """
    header = header_of(path, reading)
    if lacking := [repr(name) for name in names if name not in header]:
        raise UsageError(
            f"{path} must have the columns {listing(names)}; got no {listing(lacking)}. "
            f"Add or rename columns: it has {listing(map(repr, header))}."
        )
    check_distinct_columns(path, header, names)
    return _columns(path, header, names, texts, reading)


def features(
    path: Path,
    columns: Mapping[str, Cells],
    place: arrays.Place,
    missing: bool,
    words: Mapping[str, Sequence[str]] = {},
) -> Array:
    """Return columns as float64 [n, d].

    Args:
        missing: whether a cell may have no value. It is then NaN.
        words: the words that the codes of a column stand for (:func:`fl_core.data.categories.codes`).

    Raises:
        UsageError: a value is missing, or not a finite number.
    """
    x = np.empty((len(next(iter(columns.values()))), len(columns)))
    for k, (name, cells) in enumerate(columns.items()):
        if name in words:
            x[:, k] = categories.codes(cells, words[name])
            continue
        where = f"{path}, column {name!r}"
        try:
            values = arrays.numbers(cells, where, place, missing)
        except arrays.MissingError as error:
            raise UsageError(
                f"{error}. Fill empty cells with --impute mean, median or most_frequent. "
                f"Or leave the column out: --exclude-columns {shlex.quote(name)}."
            ) from error
        except arrays.NotNumberError as error:
            others = sum(
                not spelling.is_number(cell) and not spelling.is_missing(cell)
                for cell in cells
            )
            raise UsageError(
                f"{error} ({others:,} of {len(cells):,} cells are no numbers). Correct them in the file, "
                f"or leave the column out: --exclude-columns {shlex.quote(name)}."
            ) from error
        x[:, k] = arrays.features(values[:, None], where, place, missing)[:, 0]
    return x


def _check_role(
    path: Path, role: str, name: str, header: Sequence[str], reading: Reading
) -> None:
    """Refuse a role's column that is not there, and name the likeliest columns with their flags.

    Raises:
        UsageError: there is no such column.
    """
    if name in header:
        return
    flag, (first, *others) = (
        f"--{role.replace('_', '-')}",
        roles.likely_columns(role, name, header) or [""],
    )
    also = f" ({listing(others)} may be it, too)" if others else ""
    way = (
        f"Name it: {flag} {shlex.quote(first)}{also}"
        if first
        else f"Name it with {flag}"
    )
    clients = (
        roles.by_name("client_column", header)
        if reading.client_column not in header
        else []
    )
    if role != "client_column" and clients:
        way += f". The column of the clients may be missing as well: --client-column {shlex.quote(clients[0])}"
    raise UsageError(
        f"{flag} must be one of the {len(header)} columns of {path}; got {name!r}. {way}."
    )


def feature_columns(
    path: Path, header: Sequence[str], reading: Reading
) -> list[str] | None:
    """Return the names of a table's feature columns, in the order of the header, or None if its samples are texts.

    Raises:
        UsageError: a named column is missing, repeated, or used for two purposes.
    """
    check_distinct_columns(path, header)
    client, labels, text_column = (
        reading.client_column,
        reading.labels,
        reading.text_column,
    )
    reading.check_labels(str(path))
    group = reading.group_column
    named = {
        "client_column": (client,),
        "label_column": labels,
        "text_column": (text_column,),
    }
    named |= {"group_column": (group,)} if group else {}
    for role, name in ((role, name) for role, names in named.items() for name in names):
        if name != getattr(Reading, role) or role == "label_column":
            _check_role(path, role, name, header, reading)
    if group in (client, *labels, text_column):
        raise UsageError(
            f"{path}: group_column must not be the client, the label or the text; got {group!r}."
        )
    if client in labels:
        raise UsageError(
            f"{path}: client and label must be different columns; got {client!r} for both."
        )
    if text_column in (client, *labels):
        raise UsageError(
            f"{path}: the text column must not be the client or the label; got {text_column!r}."
        )
    if text_column in header:
        reading.check_unasked(f"{path} holds texts", "columns", "exclude_columns")
        return None
    found = [name for name in header if name not in (client, group, *labels)]
    for key in ("columns", "exclude_columns", "word_columns", "date_columns"):
        for name in sorted(set(getattr(reading, key) or ()) - set(found)):
            if name in (client, group, *labels):
                role = (
                    "client"
                    if name == client
                    else "group"
                    if name == group
                    else "label"
                )
                raise UsageError(
                    f"{path}: {key} must name features; got {name!r}, the {role}."
                )
            check_known(
                f"column of {path} ({key}, --{key.replace('_', '-')})", name, found
            )
    kept = set(found if reading.columns is None else reading.columns) - set(
        reading.exclude_columns or ()
    )
    found = [name for name in found if name in kept]
    if not found:
        raise UsageError(
            f"{path}: there must be a column of features; got only {listing(header)}. Add one."
        )
    return found


def header_of(path: Path, reading: Reading) -> list[str]:
    """Return the names of a table's columns. Only the first line of a .csv file is read.

    Raises:
        UsageError: the file does not exist, or the separator does not split the line.
    """
    parts = client_tables.files_of(path)
    if parts:
        return client_tables.header(parts, reading, header_of)
    kind = path.suffix.lower()
    if kind in (PARQUET, XLSX):
        reading.check_unasked(f"{path} says itself how it is written", *WRITTEN)
        return parquet.header(path) if kind == PARQUET else xlsx.header(path)
    header = next(csv_rows(path, reading))[1]
    counts = {other: header[0].count(other) for other in SEPARATORS if len(header) == 1}
    other = max(counts, key=lambda each: counts[each], default="")
    if counts.get(other):
        named = "tab" if other == "\t" else f"'{other}'"
        raise UsageError(
            f"{path} must have more than one column; got {header[0]!r}. "
            f"With another separator it has {counts[other] + 1} columns: --separator {named}."
        )
    return header


def _columns(
    path: Path,
    header: Sequence[str],
    names: Sequence[str],
    texts: Collection[str],
    reading: Reading,
) -> tuple[dict[str, Cells], arrays.Place]:
    """Return the cells of some columns in the order of ``names``, and how messages name a row.

    The columns in ``texts`` are text in any file.
    """
    parts = client_tables.files_of(path)
    if parts:

        def read(
            part: Path, own: Sequence[str]
        ) -> tuple[dict[str, Cells], arrays.Place]:
            return _columns(part, header_of(part, reading), own, texts, reading)

        return client_tables.columns(parts, names, reading.client_column, read)
    kind = path.suffix.lower()
    if kind == PARQUET:
        return parquet.columns(path, names, texts), arrays.row_of_array
    if kind == XLSX:
        cells_of, numbers = xlsx.columns(path, names, texts)
        return cells_of, lambda row: f"row {numbers[row]}"
    rows = csv_rows(path, reading)
    next(rows)
    found: dict[str, list[str]] = {name: [] for name in names}
    columns = [(header.index(name), cells.append) for name, cells in found.items()]
    lines = array("q")
    for line, cells in rows:
        lines.append(line)
        for k, append in columns:
            append(cells[k])
    if not lines:
        raise UsageError(
            f"{path} must have rows; got a header and no rows. Add samples."
        )
    return {**found}, lambda row: f"line {lines[row]}"


def names_clients(path: Path, reading: Reading) -> bool:
    """Return whether the first line of a .jsonl file has the client's key, without reading more."""
    try:
        with path.open(encoding=reading.python_encoding) as file:
            first = parsed_json(next((line for line in file if line.strip()), "{}"))
    except UnicodeError as error:
        raise _undecodable(path, reading, error) from error
    except ValueError as error:
        raise UsageError(
            f"{path} must be a readable .jsonl file: {error}. Correct the file."
        ) from error
    return isinstance(first, dict) and reading.client_column in first


def read_jsonl(path: Path, reading: Reading = PLAIN) -> Source:
    """Read texts from a file of one JSON object per line (see :func:`fl_core.data.files.read`).

    Raises:
        UsageError: it is not such a file, or a key is missing. The message names the line.
    """
    client_column, text_column = reading.client_column, reading.text_column
    reading.check_labels(str(path))
    reading.check_unasked(
        f"{path} holds texts in lines of its own",
        "columns",
        "exclude_columns",
        "separator",
    )
    keys = [
        ("text_column", text_column),
        *(("label_column", name) for name in reading.labels),
    ]
    first = next((entry for _, entry in _entries(path, reading)), {})
    if client_column != CLIENT_COLUMN or client_column in first:
        keys.append(("client_column", client_column))
    if len({key for _, key in keys}) < len(keys):
        named = ", ".join(key for _, key in keys)
        raise UsageError(
            f"{path}: text, label and client must be different columns; got {named}."
        )
    columns, place = _jsonl_columns(path, reading, keys)
    if reading.drop_missing_labels:
        kept, kept_place = drop_missing_labels(path, columns, place, reading.labels)
        return text.source(path, kept, kept_place, reading)  # type: ignore[arg-type]
    return text.source(path, columns, place, reading)


def read_jsonl_texts(
    path: Path, reading: Reading = PLAIN
) -> tuple[list[str], arrays.Place]:
    """Return the texts of a .jsonl file, and how messages name a row. Other keys are ignored.

    Raises:
        UsageError: it is not such a file, or a text is missing. The message names the line.
    """
    columns, place = _jsonl_columns(
        path, reading, [("text_column", reading.text_column)]
    )
    return columns[reading.text_column], place


_KINDS = {"text_column": str, "label_column": object, "client_column": str | int}
"""Types of the values in .jsonl files, by role."""


def _jsonl_columns(
    path: Path, reading: Reading, keys: Sequence[tuple[str, str]]
) -> tuple[dict[str, list[str]], arrays.Place]:
    """Return the values of keys in a .jsonl file as text, and how messages name a row.

    Args:
        keys: role and name of each key.
    """
    columns: dict[str, list[str]] = {key: [] for _, key in keys}
    lines = array("q")
    for number, entry in _entries(path, reading):
        lines.append(number)
        for role, key in keys:
            check_known(f"column of {path}, line {number} ({role})", key, entry)
            if not isinstance(entry[key], _KINDS[role]):
                raise UsageError(
                    f"{path}, line {number}, column {key!r}: the value must be text; got {entry[key]!r}."
                )
            columns[key].append(spelling.cell_text(entry[key]))
    if not lines:
        raise UsageError(f"{path} must have rows; got an empty file.")
    return columns, lambda row: f"line {lines[row]}"


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


def csv_rows(path: Path, reading: Reading = PLAIN) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of every line of a .csv file that is not blank, header first."""
    width = line = 0
    delimiter = reading.delimiter_of(path)
    seen: list[set[str]] = []
    try:
        with path.open(newline="", encoding=reading.python_encoding) as file:
            reader = csv.reader(file, delimiter=delimiter)
            for cells in reader:
                if not cells:
                    line = reader.line_num
                    continue
                if not width:
                    _check_encoding(path, reading)
                if width and len(cells) != width:
                    raise UsageError(
                        f"{path}, line {line + 1}: every line must have {width} cells like the header; "
                        f"got {len(cells)}. Correct the line."
                    )
                if not width:
                    width, cells = len(cells), list(map(spelling.name, cells))
                    seen = [set() for _ in cells]
                elif reader.line_num > line + 1 and swallows_rows(
                    cells, delimiter, seen
                ):
                    raise UsageError(
                        f"{path}, line {line + 1}: a quotation mark must be closed; got one that is open until line "
                        f"{reader.line_num}. Close it, or double it within a cell."
                    )
                elif line < SEEN:
                    for values, cell in zip(seen, cells, strict=True):
                        values.add(cell)
                line = reader.line_num
                yield line, cells
    except UnicodeError as error:
        raise _undecodable(path, reading, error) from error
    except csv.Error as error:
        raise UsageError(
            f"{path} must be a readable .csv file: {error}. Correct the file."
        ) from error
    if not width:
        raise UsageError(f"{path} must have rows; got an empty file.")


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
    return UsageError(
        f"{path} is not a readable {path.suffix} file in {reading.encoding}{at}. Try --encoding {guess}."
    )


def _likely_encoding(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(4)
    if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if b"\0" in first:
        return "utf-16-be" if first[:1] == b"\0" else "utf-16-le"
    return "latin-1"
