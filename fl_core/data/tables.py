"""Tables with named columns: .csv files of numbers or texts, and .jsonl files of texts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fl_core.data import arrays, text
from fl_core.data.columns import CLIENT_COLUMN, LABEL_COLUMN, TEXT_COLUMN
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known, listing


def read_csv(
    path: Path,
    *,
    client_column: str = CLIENT_COLUMN,
    label_column: str = LABEL_COLUMN,
    text_column: str = TEXT_COLUMN,
) -> Source:
    """Read a dataset from a .csv table (see :func:`fl_core.data.files.read`).

    Features [n, d] in the order of their columns, or texts; classes are whole numbers or words.

    Raises:
        UsageError: a missing column, a ragged line, a cell that is not a finite number, or a word among the labels'
            numbers, by line and column.
    """
    lines, columns = csv_columns(path)
    header = list(columns)
    check_known(f"column of {path} (label_column)", label_column, header)
    if client_column != CLIENT_COLUMN:
        check_known(f"column of {path} (client_column)", client_column, header)
    if text_column != TEXT_COLUMN:
        check_known(f"column of {path} (text_column)", text_column, header)
    if client_column == label_column:
        raise UsageError(f"{path}: column {label_column!r} cannot be both the client and the label")
    if text_column in (client_column, label_column):
        raise UsageError(f"{path}: column {text_column!r} cannot be both the text and the client or label")

    def place(row: int) -> str:
        return f"line {lines[row]}"

    if text_column in columns:
        return text.source(path, columns, place, client=client_column, label=label_column, text=text_column)
    owner = None
    owner_names: tuple[str, ...] = ()
    if client_column in columns:
        where = f"{path}, column {client_column!r}"
        owner, owner_names = arrays.owners(np.array(columns.pop(client_column), dtype=str), where, place=place)
    y, classes = arrays.written_labels(columns.pop(label_column), f"{path}, column {label_column!r}", place)
    words = [name for name, column in columns.items() if not any(map(arrays.is_number, column))]
    if words and owner is None:
        raise UsageError(
            f"{path}: no number in {'column' if len(words) == 1 else 'columns'} {listing(words)}: features are "
            "numbers, so encode words or leave them out; what names the clients, client_column (--client-column) says"
        )
    numbers = {name: arrays.numbers(cells, f"{path}, column {name!r}", place) for name, cells in columns.items()}
    if not numbers:
        raise UsageError(f"{path}: no column of features beside {listing(header)}")
    x = np.concatenate(
        [arrays.features(cells[:, None], f"{path}, column {name!r}", place) for name, cells in numbers.items()], axis=1
    )
    return Source(name=str(path), x=x, y=y, classes=classes, owner=owner, owner_names=owner_names)


def csv_columns(path: Path) -> tuple[list[int], dict[str, tuple[str, ...]]]:
    """The cells of a .csv file by column, and the number of each row's line.

    Raises:
        UsageError: a ragged line, a column that is there twice, or no row.
    """
    rows = csv_rows(path)
    _, header = next(rows)
    for name in header:
        if header.count(name) > 1:
            raise UsageError(f"{path}: column {name!r} is there more than once")
    lines: list[int] = []
    table: list[list[str]] = []
    for line, cells in rows:
        lines.append(line)
        table.append(cells)
    if not table:
        raise UsageError(f"{path}: a header and no rows")
    return lines, dict(zip(header, zip(*table, strict=True), strict=True))


def names_clients(path: Path, client: str) -> bool:
    """Whether the first line of a .jsonl file has the client's key; reads nothing else."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = json.loads(next((line for line in file if line.strip()), "{}"))
    except ValueError as error:
        raise UsageError(f"{path} is not a readable .jsonl file: {error}") from error
    return isinstance(first, dict) and client in first


def read_jsonl(
    path: Path,
    *,
    client_column: str = CLIENT_COLUMN,
    label_column: str = LABEL_COLUMN,
    text_column: str = TEXT_COLUMN,
) -> Source:
    """Read texts from a file of one JSON object per line (see :func:`fl_core.data.files.read`).

    Raises:
        UsageError: not such a file, or a key that is missing, by line.
    """
    lines, entries = _entries(path)
    keys = {"text_column": text_column, "label_column": label_column}
    if client_column != CLIENT_COLUMN or client_column in entries[0]:
        keys["client_column"] = client_column
    if len(set(keys.values())) < len(keys):
        raise UsageError(f"{path}: text, label and client must be different columns, not {', '.join(keys.values())}")
    kinds = {text_column: str, label_column: object, client_column: str | int}
    columns = {key: _cells(path, lines, entries, key, flag, kinds[key]) for flag, key in keys.items()}

    def place(row: int) -> str:
        return f"line {lines[row]}"

    return text.source(path, columns, place, client=client_column, label=label_column, text=text_column)


def jsonl_texts(path: Path, text_column: str = TEXT_COLUMN) -> tuple[list[int], list[str]]:
    """The texts of a .jsonl file, whatever else its objects have, and the number of each one's line.

    Raises:
        UsageError: not such a file, or no text, by line.
    """
    lines, entries = _entries(path)
    return lines, _cells(path, lines, entries, text_column, "text_column", str)


def _entries(path: Path) -> tuple[list[int], list[dict[str, Any]]]:
    """The objects of a .jsonl file, and the number of each one's line."""
    lines: list[int] = []
    entries: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise UsageError(f"{path}, line {number}: {type(entry).__name__}, not an object of keys and values")
                lines.append(number)
                entries.append(entry)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a readable .jsonl file: {error}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {number}: no JSON: {error}") from error
    if not entries:
        raise UsageError(f"{path} is empty")
    return lines, entries


def _cells(path: Path, lines: list[int], entries: list[dict[str, Any]], key: str, flag: str, kind: Any) -> list[str]:
    """What the objects of a .jsonl file have under a key, as text."""
    for number, entry in zip(lines, entries, strict=True):
        check_known(f"column of {path}, line {number} ({flag})", key, entry)
        if not isinstance(entry[key], kind):
            raise UsageError(f"{path}, line {number}, column {key!r}: {entry[key]!r} is not text")
    return [str(entry[key]) for entry in entries]


def csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every line of a .csv file that is not blank, header first."""
    width = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for cells in reader:
                if not cells:
                    continue
                if width and len(cells) != width:
                    raise UsageError(f"{path}, line {reader.line_num}: {len(cells)} cells, but the header has {width}")
                width = width or len(cells)
                yield reader.line_num, cells
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a readable .csv file: {error}") from error
    if not width:
        raise UsageError(f"{path} is empty")
