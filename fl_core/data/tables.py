"""Tables with named columns of numbers, words or texts: from a file, several files or a frame to a source."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.data import arrays, column_table, frames, preprocessing
from fl_core.data.arrays import Array
from fl_core.data.column_table import (
    DATE,
    LEFT_OUT,
    NUMBER,
    WORDS,
    Column,
    ColumnTable,
    is_identifier,
)
from fl_core.data.columns import (
    BETWEEN,
    PLAIN,
    DataFault,
    DataFaults,
    Place,
    Reading,
    faults_of,
    is_number,
    located,
    suspicion,
)
from fl_core.data.preprocessing import Cells, cells_of, lacks_value, refuse_where
from fl_core.data.sources import Source, check_texts, encode, warn_of_losses
from fl_core.errors import UsageError, check_known, listing, plural, spelled, warn
from fl_core.rows import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL

FEW = 10
"""The number of classes that are few, even if most of them have one sample."""


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
    texts = [reading.client_column, reading.text_column, *(reading.word_columns or ())]
    texts += [reading.group_column] if reading.group_column else []
    texts += [] if reading.predicts_numbers else reading.labels
    path, frame, place, odd = frames.open_table(source, reading, texts)
    header = list(frame)
    taken = roles_of(path, header, reading)
    features = feature_columns(path, header, taken, reading)
    if reading.drop_missing_labels:
        frame, place = _labelled(path, frame, place, reading.labels)
    faults: list[UsageError] = []
    checked = partial(_column, faults, path, place)
    cells: dict[str, Cells] = {}
    for column in header:
        if column in (*taken, *features) or column_table.names_rows(column):
            with checked(column):
                cells[column] = cells_of(frame[column], column in texts)
    _refuse(faults)
    found = Source(name or str(path), np.empty((0, 0)), np.empty(0), ())
    for label in reading.labels:
        with checked(label):
            arrays.check_present(cells[label])
    if not faults:
        with checked(reading.label_column):
            y, classes = _targets(cells, reading)
            found = replace(found, y=y, classes=classes)
    if reading.client_column in cells:
        with checked(reading.client_column):
            owner, clients = arrays.owners(cells[reading.client_column])
            found = replace(found, owner=owner, owner_names=clients)
    if reading.group_column:
        with checked(reading.group_column):
            groups = _groups(cells[reading.group_column], found.owner)
            found = replace(found, groups=groups)
    rest = {name: cells[name] for name in cells if name not in taken}
    ids, named = _identifiers(path, rest, features, found.owner, reading)
    faults += ids.values()
    own = {name: cells[name] for name in features if name not in ids}
    lacking = _lacking(path, own, found, reading)
    odd = {**odd, **named, **lacking}
    kinds = {name: (role, 0) for name, role in taken.items()}
    words: dict[str, tuple[str, ...]] = {}
    for name, column in own.items():
        if name in lacking and not reading.fill_missing_columns:
            continue
        with checked(name):
            kind = DATE if name in (reading.date_columns or ()) else NUMBER
            words[name] = ()
            if isinstance(column, pd.Categorical):
                kind, words[name] = WORDS, preprocessing.words_of(name, column)
                frame[name] = preprocessing.codes(column, words[name])
            elif not reading.may_be_missing:
                _check_filled(name, column)
            kinds[name] = (kind, len(words[name]) + 1)
    if "text" in taken.values():
        texts = list(cells[reading.text_column])
        with checked(reading.text_column):
            check_texts(texts)
    _refuse(faults)
    rows = [
        column_table.describe(name, cells[name], *kinds[name], odd.get(name, ""))
        if name in kinds
        else Column(name, LEFT_OUT, odd=odd.get(name, ""))
        for name in header
    ]
    found = replace(found, table=ColumnTable(tuple(rows)))
    if "text" in taken.values():
        warn_of_losses(texts, str(path))
        codes, vocabulary = encode(texts)
        return replace(found, x=codes, words=vocabulary)
    if not words:
        fill = spelled(fill_missing_columns=True, impute="median")
        some = listing((f"{name!r}: {text}" for name, text in lacking.items()), 3)
        raise UsageError(
            f"{path} must have a column with values at each client; got {some}. Fill them: {fill}."
        )
    return replace(
        found,
        x=arrays.stacked([frame[name].to_numpy() for name in words]),
        columns=tuple(words),
        categories=tuple(words.values()) if any(words.values()) else (),
    )


def _labelled(
    path: Path, frame: pd.DataFrame, place: Place, labels: Sequence[str]
) -> tuple[pd.DataFrame, Place]:
    """Return the rows that have all their labels, and warn of the number of others."""
    columns = [cells_of(frame[name], text=True) for name in labels]
    lacking = np.any([lacks_value(cells) for cells in columns], axis=0)
    rows = np.flatnonzero(~lacking)
    if not lacking.any():
        return frame, place
    warn(
        f"{path}: {lacking.sum():,} of {len(lacking):,} rows have no label and are left out"
    )
    return frame.iloc[rows].copy(), lambda row: place(int(rows[row]))


@contextmanager
def _column(
    faults: list[UsageError], path: Path, place: Place, name: str
) -> Iterator[None]:
    """Append the fault of a column to others, with its place, instead of raising it."""
    try:
        with located(f"{path}, column {name!r}", place):
            yield
    except UsageError as fault:
        faults.append(fault)


def _refuse(faults: Sequence[UsageError]) -> None:
    if faults:
        raise DataFaults(faults)


class Findings(UsageError):
    """All faults of a table, one line each, and the settings that read it.

    Attributes:
        source: the data, or None if no settings read them.
        faults: of all readings.
        reading: the last settings that were tried.
        lines: a heading, and the faults.
        settings: as the caller types them.
        notes: of the last reading.
    """

    notes: Sequence[str] = ()

    def __init__(
        self,
        data: Path | pd.DataFrame,
        source: Source | None,
        faults: Sequence[UsageError],
        left: int,
        reading: Reading,
    ) -> None:
        given = reading.changed
        if isinstance(data, Path):
            given = {"dataset": str(data), **given}
        self.source, self.faults, self.reading = source, faults, reading
        self.settings = spelled(**given)
        name = data if isinstance(data, Path) else "data"
        self.lines = [
            f"{name} must be read with other settings; got {plural(len(faults), 'fault')}:",
            *(f"  {number}. {fault}" for number, fault in enumerate(faults, 1)),
        ]
        way = f"This reads it: {self.settings}"
        if source is None:
            last = f"the last {left}" if left > 1 else "the last one"
            way = f"Correct or decide {last}: no setting is certain to repair it."
        super().__init__("\n".join([*self.lines, way]))


def find_faults(
    data: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> Findings:
    """Read a table, each time with the settings that the last faults ask for."""
    found: list[UsageError] = []
    tried: list[Reading] = []
    while reading not in tried:
        tried.append(reading)
        try:
            with warnings.catch_warnings(record=True) as notes:
                warnings.simplefilter("always")
                source = read_table(data, reading, name)
            findings = Findings(data, source, found, 0, reading)
            findings.notes = [str(note.message) for note in notes]
            return findings
        except UsageError as error:
            faults = faults_of(error)
        last = list(map(str, faults))
        found = [*(fault for fault in found if str(fault) not in last), *faults]
        reading = reading.repaired(faults)
    return Findings(data, None, found, len(last), tried[-1])


def read_or_report(
    data: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> Source:
    """Read a table (:func:`read_table`), or refuse it with all its faults and the settings that read it.

    Raises:
        UsageError: the only fault, or :class:`Findings`.
    """
    found = find_faults(data, reading, name)
    if found.source is None or found.faults:
        raise found if len(found.faults) > 1 else found.faults[0]
    for note in found.notes:
        warn(note)
    return found.source


def _identifiers(
    path: Path,
    cells: Mapping[str, Cells],
    features: Collection[str],
    owner: arrays.Integers | None,
    reading: Reading,
) -> tuple[dict[str, DataFault], dict[str, str]]:
    """Find columns that number the rows, or what several of them belong to.

    Returns:
        The faults of those that are features, and what is odd about the others. If their rows may be in two splits, a
        warning says so.
    """
    faults, odd = {}, {}
    group = reading.group_column
    for name, column in cells.items():
        if not is_identifier(name, column, owner):
            continue
        out = [*(reading.exclude_columns or ()), name]
        rows = pd.DataFrame({"client": 0 if owner is None else owner, "value": column})
        repeats = not group and bool(rows.duplicated().any())
        if name not in features:
            odd[name] = "like an identifier"
            if repeats:
                odd[name] += ": its rows may be in training and test"
                warn(
                    f"{path}: rows with one {name!r} may lie in training and test alike, so scores may be too good. "
                    f"Keep them together: {spelled(group_column=name)}"
                )
            continue
        if reading.keep_ids:
            continue
        repair: dict[str, Any] = {"exclude_columns": [name]}
        leave = spelled(exclude_columns=out)
        way = f"Leave it out: {leave}"
        if repeats and not lacks_value(column).any():
            group, repair = name, {"group_column": name}
            way = (
                f"Keep its rows in one split: {spelled(**repair)}. Or leave it out: {leave}; "
                "its rows may then lie in training and test alike"
            )
        faults[name] = DataFault(
            f"{path}: features must say something about a new sample; got {name!r}, named and filled like an "
            "identifier.",
            f"{way} (or allow it: {spelled(keep_ids=True)}).",
            **repair,
        )
    return faults, odd


def _lacking(
    path: Path, columns: Mapping[str, Cells], source: Source, reading: Reading
) -> dict[str, str]:
    """Return what the table says of columns without a value at some clients, and warn of those that are left out."""
    holes = {name: lacks_value(cells) for name, cells in columns.items()}
    holes = {name: lacking for name, lacking in holes.items() if lacking.any()}
    if source.owner is None or not holes:
        return {}
    everywhere = pd.DataFrame(holes).groupby(source.owner).all()
    done = "filled" if reading.fill_missing_columns else "left out"
    found = {}
    for name, empty in everywhere.items():
        if empty.any() and not empty.all():
            some = listing([source.owner_names[k] for k in empty.index[empty]], 4)
            found[str(name)] = f"no value at {some}: {done}"
    if found and not reading.fill_missing_columns:
        warn(
            f"{path}: columns without a value at some client are left out: {listing(map(repr, found), 6)}. "
            f"To fill them: {spelled(fill_missing_columns=True, impute='median')}"
        )
    return found


def _check_filled(name: str, values: Array) -> None:
    """Check that no number is missing.

    Raises:
        DataFault: names the first row without one.
    """
    lacking = np.isnan(values)
    if not lacking.any():
        return
    out: dict[str, Any] = {"exclude_columns": [name]}
    way, repair = "Leave the column out:", out
    if not lacking.all():
        way = f"Leave the column out: {spelled(**out)}. Or fill empty cells, such as:"
        repair = {"impute": "median"}
    count = f"{lacking.sum():,} of {len(lacking):,} cells have none"
    rule = f"the value must not be missing; got none ({count})."
    raise DataFault(rule, way, int(np.argmax(lacking)), **repair)


def _targets(
    cells: Mapping[str, Cells], reading: Reading
) -> tuple[Array, tuple[str, ...]]:
    """Return the targets in label columns, with the names of classes (:func:`arrays.answers`).

    Raises:
        DataFault: classes are numbers to predict: most are there once, or they are the time until an event of another
            column.
    """
    answers = [cells[name] for name in reading.labels]
    y: Any = answers[0] if len(answers) == 1 else np.column_stack(answers)
    y, classes = arrays.answers(y, reading.task, reading.names)
    numbers = all(map(is_number, classes))
    doubtful = len(classes) > FEW and (numbers or suspicion(classes, ""))
    if reading.task != CLASSIFICATION or not doubtful:
        return y, classes
    time, event = column_table.survival_columns(list(cells))
    timed = bool(event) and time == reading.label_column
    if timed or 2 * (np.bincount(y) == 1).sum() > len(classes):
        rule = f"classes must be few; got {len(classes):,} different numbers."
        way = "Predict a number:"
        repair: dict[str, Any] = {"task": REGRESSION}
        if timed:
            way = f"Predict a number: {spelled(**repair)}. Or the time until an event:"
            repair = {"task": SURVIVAL, "label_column": f"{time},{event}"}
        raise DataFault(rule, way, **repair)
    return y, classes


def _groups(cells: Cells, owner: arrays.Integers | None) -> arrays.Integers:
    """Return the group [n] of each row. The same name at two clients is two groups.

    Raises:
        DataFault: a row has no group.
    """
    refuse_where(lacks_value(cells), cells, "each row must have a group")
    groups = [each.strip() for each in cells]
    rows = pd.DataFrame({"client": 0 if owner is None else owner, "group": groups})
    return rows.groupby(["client", "group"]).ngroup().to_numpy(np.int64)


def roles_of(path: Path, header: Sequence[str], reading: Reading) -> dict[str, str]:
    """Return the role of each column that has one: client, label, text or group.

    Raises:
        DataFault: a column is missing. The message names the likeliest ones with their flags.
        UsageError: a name is repeated, or has two roles.
    """
    reading.check_labels(str(path), _survival_labels(header, reading))
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


def _survival_labels(header: Sequence[str], reading: Reading) -> str:
    """Return the labels of survival by their names, ``TIME,EVENT``, or an empty text."""
    pair = column_table.survival_columns(header)
    return BETWEEN.join(pair) if reading.task == SURVIVAL and all(pair) else ""


def _no_column(
    path: Path, key: str, name: str, header: Sequence[str], reading: Reading
) -> DataFault:
    """Return the fault of a role's column that is not there, with the likeliest columns."""
    likely = column_table.likely_columns(key, name, header)
    if key == "label_column" and len(reading.labels) > 1:
        own = [likely[0] if each == name else each for each in reading.labels]
        likely = [_survival_labels(header, reading) or BETWEEN.join(own)]
    repair: dict[str, Any] = {key: likely[0]} if likely else {}
    named = [spelled(**{key: each}) for each in likely or ["NAME"]]
    way = f"Name it: {', or '.join(named)}"
    clients = column_table.by_name("client_column", header)
    if key != "client_column" and clients and reading.client_column not in header:
        repair["client_column"] = clients[0]
        way += f". The column of the clients may be missing as well: {spelled(client_column=clients[0])}"
    several = name.split(BETWEEN)
    if key == "label_column" and len(several) > 1 and {*several} <= {*header}:
        survival = (*several,) == column_table.survival_columns(header)
        repair = {"task": SURVIVAL if survival else MULTILABEL}
        way = f"Name their task: {spelled(**repair)}"
    return DataFault(
        f"{key} must be one of the {len(header)} columns of {path}; got {name!r}.",
        f"{way}.",
        **repair,
    )


def feature_columns(
    path: Path, header: Sequence[str], taken: Mapping[str, str], reading: Reading
) -> list[str]:
    """Return the names of a table's feature columns, in the order of the header. Texts have none.

    Raises:
        UsageError: a named column is missing, repeated, or used for two purposes.
    """
    if "text" in taken.values():
        reading.check_unasked(f"{path} holds texts", "columns", "exclude_columns")
        return []
    found = [name for name in header if name not in taken]
    for key in ("columns", "exclude_columns", "word_columns", "date_columns"):
        for name in getattr(reading, key) or ():
            if name in taken:
                raise UsageError(
                    f"{path}: {key} must name features; got {name!r}, the {taken[name]}."
                )
            check_known(f"column of {path} ({key})", name, found)
    kept = {*(found if reading.columns is None else reading.columns)}
    kept -= {*(reading.exclude_columns or ())}
    if not kept:
        raise UsageError(
            f"{path}: there must be a column of features; got only {listing(header)}. Add one."
        )
    return [name for name in found if name in kept]
