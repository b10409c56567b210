"""Tables with named columns of numbers, words or texts: from a file, several files or a frame to a source."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.data import (
    arrays,
    column_table,
    frames,
    preprocessing,
    roles,
    spelling,
    targets,
    text,
)
from fl_core.data.arrays import Array, Cells
from fl_core.data.columns import (
    PLAIN,
    READING,
    DataFault,
    DataFaults,
    Reading,
    check_distinct_columns,
)
from fl_core.data.sources import Source
from fl_core.errors import UsageError, check_known, listing, warn
from fl_core.scores import CLASSIFICATION

BLOCK = 4096


def read_table(
    source: Path | pd.DataFrame, reading: Reading = PLAIN, name: str = ""
) -> Source:
    """Read a dataset from a table, a .jsonl file or several tables (see :func:`fl_core.data.files.read`).

    Samples are features [n, d] in the order of their columns, or texts. Classes are whole numbers or words.

    Args:
        source: the path, or a table in memory.
        name: of the dataset. The default is the path.

    Raises:
        DataFault: other settings are needed.
        UsageError: a line has another number of cells, a cell is not a finite number, or a word is among the labels'
            numbers. The message names line and column.
    """
    path, header, read = frames.open_table(source, reading)
    called = name or str(path)
    names = feature_columns(path, header, reading)
    client, text_column = reading.client_column, reading.text_column
    given_roles = {client: "client", **dict.fromkeys(reading.labels, "label")}
    if reading.group_column:
        given_roles[reading.group_column] = "group"
    if names is None:
        given_roles[text_column] = "text"
    beside = [name for name in header if name in given_roles]
    words = reading.word_columns or ()
    columns, place = read([*beside, *(names or ())], [*beside, *words])
    if reading.drop_missing_labels:
        columns, place = drop_missing_labels(path, columns, place, reading.labels)
    texts: dict[str, Sequence[str]] = {name: columns[name] for name in beside}  # type: ignore[misc]
    groups = groups_of(path, texts, place, reading) if reading.group_column else None
    faults: list[DataFault] = []
    try:
        y, classes = _answers(path, texts, place, reading)
    except DataFault as fault:
        faults.append(fault)
    owner: arrays.Integers | None = None
    owner_names: tuple[str, ...] = ()
    if client in texts:
        owner, owner_names = arrays.owners(
            arrays.text_array(texts[client]), f"{path}, column {client!r}", place=place
        )
    if names is None:
        _refuse(faults)
        text.check(texts[text_column], f"{path}, column {text_column!r}", place)
        text.warn_of_losses(texts[text_column], str(path))
        codes, vocabulary = text.encode(texts[text_column])
        seen = column_table.describe(header, texts, given_roles, {}, (), {})
        return Source(
            called,
            codes,
            y,
            classes,
            owner,
            owner_names,
            groups=groups,
            words=vocabulary,
            table=seen,
        )
    ids, refused = _identifiers(path, {name: columns[name] for name in names}, owner, reading)  # fmt: skip
    faults += refused
    names = [name for name in names if name not in ids]
    odd = _lacking(path, columns, names, owner, owner_names, reading)
    if not reading.fill_missing_columns:
        names = [name for name in names if name not in odd]
    found = typed(path, {name: columns[name] for name in names}, place, reading)
    coded: dict[str, tuple[str, ...]] = {}
    made: list[Array] = []
    for name, cells in found.items():
        where = f"{path}, column {name!r}"
        try:
            if preprocessing.holds_words(cells) or name in words:
                coded[name] = _categories(where, name, cells, name in words)
                made.append(preprocessing.codes(cells, coded[name]))
            else:
                made.append(
                    numbers_of(where, name, cells, place, reading.may_be_missing)
                )
        except DataFault as fault:
            faults.append(fault)
    _refuse(faults)
    dates = [name for name in reading.date_columns or () if name in found]
    shown = {**texts, **found, **{name: columns[name] for name in dates}}
    seen = column_table.describe(header, shown, given_roles, coded, dates, odd)
    return Source(
        called,
        as_rows(made),
        y,
        classes,
        owner,
        owner_names,
        groups=groups,
        columns=tuple(names),
        categories=tuple(coded.get(name, ()) for name in names) if coded else (),
        table=seen,
    )


def find_faults(
    source: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> tuple[Source | None, list[str], Reading]:
    """Read a table, each time with the settings that the last faults ask for.

    Returns:
        The data, or None if settings do not help; all faults, one line each; and the last settings.
    """
    faults: list[str] = []
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                return read_table(source, reading, name), faults, reading
        except DataFault as fault:
            faults += fault.faults
            better = reading.repaired(fault.repair)
            if better == reading:
                return None, faults, reading
            reading = better
        except UsageError as error:
            return None, [*faults, str(error)], reading


def read_or_report(
    source: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> Source:
    """Read a table (:func:`read_table`), or refuse it with all its faults and the settings that read it.

    Raises:
        UsageError: the only fault, or a line for each and one for the command.
    """
    try:
        return read_table(source, reading, name)
    except DataFault as first:
        found, faults, settings = find_faults(source, reading, name)
        if len(faults) == 1:
            raise
        path = source if isinstance(source, Path) else None
        raise DataFaults(report_faults(found, faults, settings, path)) from first


def report_faults(
    source: Source | None, faults: Sequence[str], settings: Reading, path: Path | None
) -> list[str]:
    """Return a line for each fault, and one with a command that works."""
    heading = (
        f"{path or 'data'} must be read with other settings; got {len(faults)} faults:"
    )
    lines = [heading] if faults else []
    lines += [f"  {number}. {fault}" for number, fault in enumerate(faults, 1)]
    if source is None:
        lines.append("Correct the last one first: no setting reads it.")
    elif path is None:
        keys = [key for key in READING if getattr(settings, key) != getattr(Reading, key)]  # fmt: skip
        given = ", ".join(f"{key}={getattr(settings, key)!r}" for key in keys)
        lines.append(f"With these settings it can be read: {given}")
    else:
        dataset = " ".join(map(shlex.quote, str(path).split(",")))
        lines.append(
            f"This works: fedlayers run --dataset {dataset} {settings.options}"
        )
    return lines


def as_rows(columns: Sequence[Array]) -> Array:
    """Return columns [n] as rows [n, d], float64, in blocks that fit a processor's cache."""
    x = np.empty((len(columns[0]), len(columns)))
    for start in range(0, len(x), BLOCK):
        block = slice(start, start + BLOCK)
        for k, column in enumerate(columns):
            x[block, k] = column[block]
    return x


def _refuse(faults: Sequence[DataFault]) -> None:
    """Raise one error of several faults, with all their settings."""
    if not faults:
        return
    settings = PLAIN
    for fault in faults:
        settings = settings.repaired(fault.repair)
    keys = {key for fault in faults for key in fault.repair}
    raise DataFault(
        *(line for fault in faults for line in fault.faults),
        **{key: getattr(settings, key) for key in keys},
    )


def _identifiers(
    path: Path,
    columns: Mapping[str, Cells],
    owner: arrays.Integers | None,
    reading: Reading,
) -> tuple[list[str], list[DataFault]]:
    """Return the columns that number the samples, and what is wrong with them."""
    if reading.keep_ids:
        return [], []
    ids = [name for name, cells in columns.items() if roles.is_identifier(name, cells, owner)]  # fmt: skip
    if not ids:
        return [], []
    out = " ".join(map(shlex.quote, [*(reading.exclude_columns or ()), *ids]))
    again = [name for name in ids if len(set(columns[name])) < len(columns[name])]
    group = again[0] if again and not reading.group_column else None
    together = (
        f"Keep its rows in one split: --group-column {shlex.quote(group)}. Or leave"
        if group
        else "Leave"
    )
    repair: dict[str, Any] = {"group_column": group} if group else {}
    others = [name for name in ids if name != group]
    if others:
        repair["exclude_columns"] = others
    fault = DataFault(
        f"{path}: features must say something about a new sample; got {listing(map(repr, ids))}, named and filled "
        f"like an identifier. {together} it out: --exclude-columns {out} (or allow it: --keep-ids).",
        **repair,
    )
    return ids, [fault]


def _lacking(
    path: Path,
    columns: Mapping[str, Cells],
    names: Sequence[str],
    owner: arrays.Integers | None,
    clients: Sequence[str],
    reading: Reading,
) -> dict[str, str]:
    """Return what the table says of columns without a value at some clients, and warn of those that are left out."""
    found: dict[str, str] = {}
    if owner is None:
        return found
    done = "filled" if reading.fill_missing_columns else "left out"
    for name in names:
        cells = columns[name]
        if isinstance(cells, np.ndarray):
            known = ~np.isnan(cells)
        else:
            code, words = pd.factorize(arrays.text_array(cells))
            known = np.array([not spelling.is_missing(word) for word in words])[code]
        if known.all():
            continue
        counts = np.bincount(owner[known], minlength=len(clients))
        lacking = [clients[k] for k in np.flatnonzero(counts == 0).tolist()]
        if 0 < len(lacking) < len(clients):
            found[name] = f"no value at {listing(lacking, 4)}: {done}"
    if found and not reading.fill_missing_columns:
        warn(
            f"{path}: {listing(map(repr, found), 6)} are left out, since a client has no value in them. To fill them: "
            "--fill-missing-columns --impute median"
        )
    if len(found) == len(names) and not reading.fill_missing_columns:
        raise UsageError(
            f"{path} must have a column with values at each client; got none. Fill them: --fill-missing-columns "
            "--impute median."
        )
    return found


def _categories(where: str, name: str, cells: Cells, forced: bool) -> tuple[str, ...]:
    """Return the words of a column.

    Raises:
        DataFault: they are numbers or dates in another spelling, or too many.
    """
    odd, repair = ("", {}) if forced else spelling.suspicion(cells, name)
    if odd:
        some = listing(map(repr, sorted({*cells})), 3)
        raise DataFault(
            f"{where} must hold numbers or words; got {some}, {odd}. "
            f"Or keep the words: --word-columns {shlex.quote(name)}.",
            **repair,
        )
    return preprocessing.words_of(where, name, cells)


def numbers_of(
    where: str, name: str, cells: Cells, place: arrays.Place, missing: bool
) -> Array:
    """Return a column of numbers as float64 [n].

    Args:
        missing: whether a cell may have no value. It is then NaN.

    Raises:
        DataFault: a value is missing, or no finite number.
    """
    out = {"exclude_columns": [name]}
    try:
        values = arrays.numbers(cells, where, place, missing)
    except arrays.MissingError as error:
        empty = all(spelling.is_missing(str(cell)) for cell in cells)
        raise DataFault(
            f"{error}. Fill empty cells with --impute mean, median or most_frequent. "
            f"Or leave the column out: --exclude-columns {shlex.quote(name)}.",
            **(out if empty else {"impute": "median"}),
        ) from error
    except arrays.NotNumberError as error:
        others = sum(
            not spelling.is_number(cell) and not spelling.is_missing(cell)
            for cell in cells
        )
        raise DataFault(
            f"{error} ({others:,} of {len(cells):,} cells are no numbers). Correct them in the file, "
            f"or leave the column out: --exclude-columns {shlex.quote(name)}.",
            **out,
        ) from error
    return arrays.features(values[:, None], where, place, missing)[:, 0]


def _answers(
    path: Path,
    columns: Mapping[str, Sequence[str]],
    place: arrays.Place,
    reading: Reading,
) -> tuple[Array, tuple[str, ...]]:
    """Return the targets in a table's label columns, with the names of classes (:func:`targets.answers`)."""
    numbers = reading.label_numbers or reading.task != CLASSIFICATION
    cells = arrays.text_array(
        [
            reading.numbers.plain(columns[name]) if numbers else columns[name]
            for name in reading.labels
        ]
    )
    where = f"{path}, column {reading.label_column!r}"
    y = cells[0] if len(cells) == 1 else cells.T
    if reading.label_numbers and reading.task == CLASSIFICATION:
        y = arrays.numbers(y.tolist(), where, place)
    return targets.answers(y, where, reading.task, reading.names, place)


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
    repair = {role: first} if first else {}
    if role != "client_column" and clients:
        repair["client_column"] = clients[0]
    raise DataFault(
        f"{flag} must be one of the {len(header)} columns of {path}; got {name!r}. {way}.",
        **repair,
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
