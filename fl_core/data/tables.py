"""Tables with named columns of numbers, words or texts: from a file, several files or a frame to a source."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from fl_core.errors import UsageError, check_known, listing, plural, warn
from fl_core.rows import CLASSIFICATION


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
    taken = roles_of(path, header, reading)
    used = [*taken, *(names or ())]
    aside = [
        name
        for name in header
        if name not in used and roles.is_named_as_identifier(name)
    ]
    columns, place = read([*used, *aside], [*taken, *(reading.word_columns or ())])
    if reading.drop_missing_labels:
        columns, place = drop_missing_labels(path, columns, place, reading.labels)
    source = Source(called, np.empty((0, 0)), np.empty(0), ())
    faults: list[DataFault] = []
    with _collected(faults):
        y, classes = _answers(path, columns, place, reading)
        source = replace(source, y=y, classes=classes)
    if client in columns:
        where = f"{path}, column {client!r}"
        owner, clients = arrays.owners(columns[client], where, place=place)
        source = replace(source, owner=owner, owner_names=clients)
    if reading.group_column:
        groups = _groups(path, columns, place, reading, source.owner)
        source = replace(source, groups=groups)
    odd = {}
    for name in aside:
        cells = columns.pop(name)
        if roles.is_identifier(name, cells, source.owner):
            odd[name] = "like an identifier"
            if _repeats(cells, source.owner) and not reading.group_column:
                odd[name] += ": its rows may be in training and test"
                warn(
                    f"{path}: rows with one {name!r} may lie in training and test alike, so scores may be too good. "
                    f"Keep them together: --group-column {shlex.quote(name)}"
                )
    if names is None:
        _refuse(faults)
        texts: list[str] = list(columns[text_column])
        text.check(texts, f"{path}, column {text_column!r}", place)
        text.warn_of_losses(texts, str(path))
        codes, vocabulary = text.encode(texts)
        seen = column_table.describe(header, columns, taken, {}, (), odd)
        return replace(source, x=codes, words=vocabulary, table=seen)
    ids = [] if reading.keep_ids else names
    ids = [n for n in ids if roles.is_identifier(n, columns[n], source.owner)]
    found = {name: columns[name] for name in ids}
    faults += _identifiers(path, found, source.owner, reading)
    features = {name: columns.pop(name) for name in names if name not in ids}
    lacking = _lacking(path, features, source, reading)
    odd |= lacking
    if not reading.fill_missing_columns:
        features = {name: features[name] for name in features if name not in lacking}
    words: dict[str, tuple[str, ...]] = {}
    made: list[Array] = []
    for name, cells in features.items():
        where = f"{path}, column {name!r}"
        with _collected(faults):
            read_as = typed(where, name, cells, place, reading)
            kept = name in (reading.word_columns or ())
            if not kept:
                _check_spelling(where, name, read_as)
            if kept or preprocessing.holds_words(read_as):
                words[name] = preprocessing.words_of(where, name, read_as)
                made.append(preprocessing.codes(read_as, words[name]))
            else:
                missing = reading.may_be_missing
                read_as = numbers_of(where, name, read_as, place, missing)
                made.append(read_as)
            dated = name in (reading.date_columns or ())
            columns[name] = cells if dated else read_as
    _refuse(faults, names)
    dates = reading.date_columns or ()
    return replace(
        source,
        x=np.column_stack(made),
        columns=tuple(features),
        categories=tuple(words.get(name, ()) for name in features) if words else (),
        table=column_table.describe(header, columns, taken, words, dates, odd),
    )


@contextmanager
def _collected(faults: list[DataFault]) -> Iterator[None]:
    """Append a fault to others, instead of raising it."""
    try:
        yield
    except DataFault as fault:
        faults.append(fault)


def find_faults(
    source: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> tuple[Source | None, list[str], Reading]:
    """Read a table, each time with the settings that the last faults ask for.

    Returns:
        The data, or None if settings do not help; all faults, one line each; and the last settings.
    """
    faults: list[str] = []
    tried = [reading]
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                return read_table(source, reading, name), faults, reading
        except DataFault as fault:
            faults = list(dict.fromkeys([*faults, *fault.faults]))
            better = reading.repaired(fault.repair)
            if better in tried:
                return None, faults, reading
            reading = better
            tried.append(reading)
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
        raise reported(found, faults, settings, source) from first


def reported(
    found: Source | None,
    faults: Sequence[str],
    settings: Reading,
    source: Path | pd.DataFrame,
) -> DataFaults:
    """Return the error of all faults (:func:`find_faults`), with the settings that read the table."""
    table = isinstance(source, pd.DataFrame)
    where = "data" if table else source
    count = plural(len(faults), "fault")
    lines = [f"{where} must be read with other settings; got {count}:"]
    lines += [f"  {number}. {fault}" for number, fault in enumerate(faults, 1)]
    if found is None:
        lines.append(
            "Correct or decide the last one first: no setting is certain to read it."
        )
        return DataFaults(lines)
    if table:
        keys = [key for key in READING if getattr(settings, key) != getattr(Reading, key)]  # fmt: skip
        given = ", ".join(f"{key}={getattr(settings, key)!r}" for key in keys)
        return DataFaults([*lines, f"With these settings it can be read: {given}"])
    dataset = " ".join(map(shlex.quote, str(source).split(",")))
    return DataFaults(lines, f"--dataset {dataset} {settings.options}".strip())


def _refuse(faults: Sequence[DataFault], names: Sequence[str] = ()) -> None:
    """Raise one error of several faults, with all their settings.

    Raises:
        UsageError: the settings leave none of the features ``names``.
    """
    if not faults:
        return
    settings = PLAIN
    for fault in faults:
        settings = settings.repaired(fault.repair)
    keys = {key for fault in faults for key in fault.repair}
    repair = {key: getattr(settings, key) for key in keys}
    lines = [str(fault) for fault in faults]
    gone = {*repair.get("exclude_columns", ()), repair.get("group_column")}
    if names and {*names} <= gone:
        raise UsageError(f"{' '.join(lines)} No feature is left then: add a column.")
    if len(faults) == 1:
        raise faults[0]
    joined = DataFault(" ".join(lines[:-1]), lines[-1], **repair)
    joined.faults = lines
    raise joined


def _repeats(cells: Cells, owner: arrays.Integers | None) -> bool:
    """Return whether a client has a value twice."""
    clients = np.zeros(len(cells)) if owner is None else owner
    rows = pd.DataFrame({"client": clients, "value": cells})
    return bool(rows.duplicated().any())


def _identifiers(
    path: Path,
    ids: Mapping[str, Cells],
    owner: arrays.Integers | None,
    reading: Reading,
) -> list[DataFault]:
    """Return the faults of columns that number the samples, or what several of them belong to."""
    faults, group = [], reading.group_column
    for name, cells in ids.items():
        given, out = shlex.quote(name), [*(reading.exclude_columns or ()), name]
        repair: dict[str, Any] = {"exclude_columns": [name]}
        option = f"--exclude-columns {' '.join(map(shlex.quote, out))}"
        way = f"Leave it out: {option}"
        whole = not arrays.lacks_value(cells).any()
        if _repeats(cells, owner) and whole and not group:
            group, repair = name, {"group_column": name}
            way = (
                f"Keep its rows in one split: --group-column {given}. Or leave it out: {option}; "
                "its rows may then lie in training and test alike"
            )
        faults.append(
            DataFault(
                f"{path}: features must say something about a new sample; got {name!r}, named and filled like an "
                "identifier.",
                f"{way} (or allow it: --keep-ids).",
                **repair,
            )
        )
    return faults


def _lacking(
    path: Path, columns: Mapping[str, Cells], source: Source, reading: Reading
) -> dict[str, str]:
    """Return what the table says of columns without a value at some clients, and warn of those that are left out."""
    if source.owner is None:
        return {}
    done = "filled" if reading.fill_missing_columns else "left out"
    clients, found = np.array(source.owner_names), {}
    for name, cells in columns.items():
        known = ~arrays.lacks_value(cells)
        if not known.all():
            counts = np.bincount(source.owner[known], minlength=len(clients))
            if counts.any() and not counts.all():
                some = listing(clients[counts == 0], 4)
                found[name] = f"no value at {some}: {done}"
    if found and not reading.fill_missing_columns:
        warn(
            f"{path}: columns without a value at some client are left out: {listing(map(repr, found), 6)}. "
            "To fill them: --fill-missing-columns --impute median"
        )
        if len(found) == len(columns):
            raise UsageError(
                f"{path} must have a column with values at each client; got none. Fill them: --fill-missing-columns "
                "--impute median."
            )
    return found


def _check_spelling(where: str, name: str, cells: Cells) -> None:
    """Check a column's words.

    Raises:
        DataFault: they are numbers or dates in another spelling.
    """
    if isinstance(cells, np.ndarray):
        return
    found = spelling.suspicion(cells.categories, name)
    if found:
        raise _misspelt(where, name, cells.categories, *found)


def _misspelt(
    where: str,
    name: str,
    words: Iterable[str],
    what: str,
    way: str,
    repair: Mapping[str, Any],
) -> DataFault:
    """Return the fault of numbers or dates in another spelling (:func:`fl_core.data.spelling.suspicion`)."""
    some = listing(map(repr, sorted(words)), 3)
    return DataFault(
        f"{where} must hold numbers or words; got {some}, {what}.",
        f"{way}. Or keep the words: --word-columns {shlex.quote(name)}.",
        **repair,
    )


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
        empty = arrays.lacks_value(cells).all()
        raise DataFault(
            f"{error}.",
            "Fill empty cells with --impute mean, median or most_frequent. "
            f"Or leave the column out: --exclude-columns {shlex.quote(name)}.",
            **(out if empty else {"impute": "median"}),
        ) from error
    except arrays.NotNumberError as error:
        raise DataFault(
            f"{error}.",
            "Correct them in the file, "
            f"or leave the column out: --exclude-columns {shlex.quote(name)}.",
            **out,
        ) from error
    return arrays.features(values[:, None], where, place, missing)[:, 0]


def _answers(
    path: Path, columns: Mapping[str, Cells], place: arrays.Place, reading: Reading
) -> tuple[Array, tuple[str, ...]]:
    """Return the targets in a table's label columns, with the names of classes (:func:`targets.answers`)."""
    where = f"{path}, column {reading.label_column!r}"
    answers: list[Cells] = []
    for name in reading.labels:
        cells = columns[name]
        if reading.label_numbers or reading.task != CLASSIFICATION:
            cells = plain(f"{path}, column {name!r}", name, cells, reading)
            cells = arrays.numbers(cells, f"{path}, column {name!r}", place)
        answers.append(cells)
    y: Any = answers[0] if len(answers) == 1 else np.column_stack(answers)
    return targets.answers(y, where, reading.task, reading.names, place)


def _groups(
    path: Path,
    columns: Mapping[str, Cells],
    place: arrays.Place,
    reading: Reading,
    owner: arrays.Integers | None,
) -> arrays.Integers:
    """Return the group [n] of each row. The same name at two clients is two groups.

    Raises:
        UsageError: a row has no group.
    """
    name = reading.group_column or ""
    cells = columns[name]
    lacking = arrays.lacks_value(cells)
    if lacking.any():
        row = int(np.argmax(lacking))
        raise UsageError(
            f"{path}, column {name!r}, {place(row)}: each row must have a group; got {cells[row]!r}."
        )
    codes = pd.Categorical([each.strip() for each in cells]).codes
    group = codes.astype(np.int64)
    if owner is not None:
        group = owner * len(group) + group
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def typed(
    where: str, name: str, cells: Cells, place: arrays.Place, reading: Reading
) -> Cells:
    """Return a column with its dates as days, and its numbers in plain spelling.

    Raises:
        UsageError: a cell in a column of dates is no date.
    """
    if isinstance(cells, np.ndarray) or name in (reading.word_columns or ()):
        return cells
    if name in (reading.date_columns or ()):
        return arrays.dates(cells, where, place)
    return plain(where, name, cells, reading)


def plain(where: str, name: str, cells: Cells, reading: Reading) -> Cells:
    """Return a column with its numbers in plain spelling.

    Raises:
        DataFault: some numbers have the signs that are given, and some have others.
    """
    if isinstance(cells, np.ndarray):
        return cells
    given, form = list(cells.categories), reading.numbers
    words = form.plain(given)
    if words != given:
        read = [word for word in given if form.fits(word)]
        others = [word for word in given if "." in word and not form.fits(word)]
        others = list(filter(spelling.is_number, others))
        if others:
            both = [read[0], others[0]]
            raise _misspelt(where, name, both, *spelling.signs([*read, *others]))
    return arrays.categories(cells.codes, words)


def drop_missing_labels(
    path: Path, columns: Mapping[str, Cells], place: arrays.Place, labels: Sequence[str]
) -> tuple[dict[str, Cells], arrays.Place]:
    """Return the rows that have all their labels, and warn of the number of others."""
    lacking = np.any([arrays.lacks_value(columns[name]) for name in labels], axis=0)
    if not lacking.any():
        return dict(columns), place
    rows = np.flatnonzero(~lacking)
    warn(
        f"{path}: {lacking.sum()} of {len(lacking)} rows have no label and are left out"
    )
    found: dict[str, Cells] = {}
    for name, cells in columns.items():
        found[name] = cells[rows]
        if isinstance(cells, pd.Categorical):
            found[name] = cells[rows].remove_unused_categories()
    return found, lambda row: place(int(rows[row]))


def roles_of(path: Path, header: Sequence[str], reading: Reading) -> dict[str, str]:
    """Return the role of each column that has one: client, label, text or group.

    Raises:
        DataFault: a column is missing. The message names the likeliest ones with their flags.
        UsageError: a name is repeated, or has two roles.
    """
    check_distinct_columns(path, header)
    reading.check_labels(str(path))
    taken: dict[str, str] = {}
    keys = [
        ("client_column", reading.client_column),
        ("text_column", reading.text_column),
        *(("label_column", name) for name in reading.labels),
    ]
    if reading.group_column:
        keys.append(("group_column", reading.group_column))
    for key, name in keys:
        role = key.removesuffix("_column")
        if name in taken:
            raise UsageError(
                f"{path}: {taken[name]} and {role} must be different columns; got {name!r} for both."
            )
        taken[name] = role
        asked = role == "label" or name != getattr(Reading, key)
        if asked and name not in header:
            raise _no_column(path, key, name, header, reading)
    return {name: taken[name] for name in header if name in taken}


def _no_column(
    path: Path, key: str, name: str, header: Sequence[str], reading: Reading
) -> DataFault:
    """Return the fault of a role's column that is not there, with the likeliest columns and their flags."""
    flag = f"--{key.replace('_', '-')}"
    way, repair = f"Name it with {flag}", {}
    likely = roles.likely_columns(key, name, header)
    if likely:
        repair[key] = likely[0]
        way = f"Name it: {flag} {shlex.quote(likely[0])}"
        if likely[1:]:
            way += f" ({listing(likely[1:])} may be it, too)"
    clients = roles.by_name("client_column", header)
    if key != "client_column" and clients and reading.client_column not in header:
        repair["client_column"] = clients[0]
        way += f". The column of the clients may be missing as well: --client-column {shlex.quote(clients[0])}"
    return DataFault(
        f"{flag} must be one of the {len(header)} columns of {path}; got {name!r}.",
        f"{way}.",
        **repair,
    )


def feature_columns(
    path: Path, header: Sequence[str], reading: Reading
) -> list[str] | None:
    """Return the names of a table's feature columns, in the order of the header, or None if its samples are texts.

    Raises:
        UsageError: a named column is missing, repeated, or used for two purposes.
    """
    taken = roles_of(path, header, reading)
    if "text" in taken.values():
        reading.check_unasked(f"{path} holds texts", "columns", "exclude_columns")
        return None
    found = [name for name in header if name not in taken]
    for key in ("columns", "exclude_columns", "word_columns", "date_columns"):
        for name in getattr(reading, key) or ():
            if name in taken:
                raise UsageError(
                    f"{path}: {key} must name features; got {name!r}, the {taken[name]}."
                )
            check_known(
                f"column of {path} ({key}, --{key.replace('_', '-')})", name, found
            )
    kept = {*(found if reading.columns is None else reading.columns)}
    kept -= {*(reading.exclude_columns or ())}
    if not kept:
        raise UsageError(
            f"{path}: there must be a column of features; got only {listing(header)}. Add one."
        )
    return [name for name in found if name in kept]
