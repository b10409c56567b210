"""Tables with named columns of numbers, words or texts: from a file, several files or a frame to a source."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.data import (
    arrays,
    column_table,
    frames,
    preprocessing,
    spelling,
    targets,
)
from fl_core.data.arrays import Array, Cells
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
    located,
)
from fl_core.data.sources import Source, check_texts, encode, warn_of_losses
from fl_core.errors import UsageError, check_known, listing, plural, warn
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
    roles = ("client_column", "text_column", "group_column")
    texts = [getattr(reading, key) for key in roles]
    texts += [*reading.labels, *(reading.word_columns or ())]
    path, frame, place = frames.open_table(source, reading, texts)
    header = list(frame)
    taken = roles_of(path, header, reading)
    features = feature_columns(path, header, taken, reading)
    if reading.drop_missing_labels:
        frame, place = _labelled(path, frame, place, reading.labels)
    cells: dict[str, Cells] = {}
    for column in header:
        if column in (*taken, *features) or column_table.names_rows(column):
            with located(f"{path}, column {column!r}", place):
                cells[column] = arrays.cells_of(frame.pop(column), column in texts)
    source = Source(name or str(path), np.empty((0, 0)), np.empty(0), ())
    faults: list[UsageError] = []
    checked = partial(_column, faults, path, place)
    answers = []
    for label in reading.labels:
        with checked(label):
            answers.append(_answer(cells[label], reading))
    if len(answers) == len(reading.labels):
        with checked(reading.label_column):
            y, classes = _targets(header, answers, reading)
            source = replace(source, y=y, classes=classes)
    if reading.client_column in cells:
        with checked(reading.client_column):
            owner, clients = arrays.owners(cells[reading.client_column])
            source = replace(source, owner=owner, owner_names=clients)
    if reading.group_column:
        with checked(reading.group_column):
            groups = _groups(cells[reading.group_column], source.owner)
            source = replace(source, groups=groups)
    rest = {name: cells[name] for name in cells if name not in taken}
    ids, odd = _identifiers(path, rest, features, source.owner, reading)
    faults += ids.values()
    own = {name: cells[name] for name in features if name not in ids}
    lacking = _lacking(path, own, source, reading)
    odd |= lacking
    kinds = {name: (role, 0) for name, role in taken.items()}
    made: dict[str, tuple[Array, tuple[str, ...]]] = {}
    for name in own:
        if name in lacking and not reading.fill_missing_columns:
            continue
        with checked(name):
            kind, values, own_words = _feature(name, cells[name], reading)
            made[name], kinds[name] = (values, own_words), (kind, len(own_words) + 1)
            if kind == NUMBER:
                odd.setdefault(
                    name, spelling.other_reading(cells[name], reading.numbers)
                )
                cells[name] = values
    if "text" in taken.values():
        words: list[str] = list(cells[reading.text_column])
        with checked(reading.text_column):
            check_texts(words)
    _refuse(faults)
    rows = [
        column_table.describe(name, cells[name], *kinds[name], odd.get(name, ""))
        if name in kinds
        else Column(name, LEFT_OUT, odd=odd.get(name, ""))
        for name in header
    ]
    source = replace(source, table=ColumnTable(tuple(rows)))
    if "text" in taken.values():
        warn_of_losses(words, str(path))
        codes, vocabulary = encode(words)
        return replace(source, x=codes, words=vocabulary)
    if not made:
        raise UsageError(
            f"{path} must have a column with values at each client; got none. Fill them: --fill-missing-columns "
            "--impute median."
        )
    columns, categories = zip(*made.values(), strict=True)
    return replace(
        source,
        x=np.column_stack(columns),
        columns=tuple(made),
        categories=categories if any(categories) else (),
    )


def _labelled(
    path: Path, frame: pd.DataFrame, place: Place, labels: Sequence[str]
) -> tuple[pd.DataFrame, Place]:
    """Return the rows that have all their labels, and warn of the number of others."""
    columns = [arrays.cells_of(frame[name], text=True) for name in labels]
    lacking = np.any([arrays.lacks_value(cells) for cells in columns], axis=0)
    rows = np.flatnonzero(~lacking)
    if lacking.any():
        warn(
            f"{path}: {lacking.sum():,} of {len(lacking):,} rows have no label and are left out"
        )
    return frame.iloc[rows], lambda row: place(int(rows[row]))


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
    """Raise one fault, or several together."""
    if faults:
        raise faults[0] if len(faults) == 1 else DataFaults(faults)


class Findings(UsageError):
    """All faults of a table, one line each, and the options that read it.

    Attributes:
        source: the data, or None if no settings read them.
        faults: of all readings.
        reading: the last settings that were tried.
        lines: a heading, and the faults.
        options: of the command line.
    """

    def __init__(
        self,
        data: Path | pd.DataFrame,
        source: Source | None,
        faults: Sequence[UsageError],
        left: int,
        reading: Reading,
    ) -> None:
        name, self.options = "data", reading.options
        if isinstance(data, Path):
            files = " ".join(map(shlex.quote, str(data).split(BETWEEN)))
            name, self.options = (
                str(data),
                f"--dataset {files} {reading.options}".strip(),
            )
        self.source, self.faults, self.reading = source, faults, reading
        self.lines = [
            f"{name} must be read with other settings; got {plural(len(faults), 'fault')}:",
            *(f"  {number}. {fault}" for number, fault in enumerate(faults, 1)),
        ]
        way = f"These options read it: {self.options}"
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
            with warnings.catch_warnings():
                if found:
                    warnings.simplefilter("ignore", UserWarning)
                return Findings(
                    data, read_table(data, reading, name), found, 0, reading
                )
        except UsageError as error:
            faults = error.faults if isinstance(error, DataFaults) else [error]
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
        given, out = shlex.quote(name), [*(reading.exclude_columns or ()), name]
        rows = pd.DataFrame({"client": 0 if owner is None else owner, "value": column})
        repeats = not group and bool(rows.duplicated().any())
        if name not in features:
            odd[name] = "like an identifier"
            if repeats:
                odd[name] += ": its rows may be in training and test"
                warn(
                    f"{path}: rows with one {name!r} may lie in training and test alike, so scores may be too good. "
                    f"Keep them together: --group-column {given}"
                )
            continue
        if reading.keep_ids:
            continue
        repair: dict[str, Any] = {"exclude_columns": [name]}
        option = f"--exclude-columns {' '.join(map(shlex.quote, out))}"
        way = f"Leave it out: {option}"
        if repeats and not arrays.lacks_value(column).any():
            group, repair = name, {"group_column": name}
            way = (
                f"Keep its rows in one split: --group-column {given}. Or leave it out: {option}; "
                "its rows may then lie in training and test alike"
            )
        faults[name] = DataFault(
            f"{path}: features must say something about a new sample; got {name!r}, named and filled like an "
            "identifier.",
            f"{way} (or allow it: --keep-ids).",
            **repair,
        )
    return faults, odd


def _lacking(
    path: Path, columns: Mapping[str, Cells], source: Source, reading: Reading
) -> dict[str, str]:
    """Return what the table says of columns without a value at some clients, and warn of those that are left out."""
    holes = {name: arrays.lacks_value(cells) for name, cells in columns.items()}
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
            "To fill them: --fill-missing-columns --impute median"
        )
    return found


def _feature(
    name: str, cells: Cells, reading: Reading
) -> tuple[str, Array, tuple[str, ...]]:
    """Return what a column is taken as, its numbers or the places of its words, and the words.

    Raises:
        DataFault: its cells are neither numbers nor words, or a number is missing and not filled.
    """
    if holds_words(name, cells, reading):
        words = preprocessing.words_of(name, cells)
        return WORDS, preprocessing.codes(cells, words), words
    values = numbers_of(name, cells, reading)
    lacking = np.isnan(values)
    if lacking.any() and not reading.may_be_missing:
        leave = f"eave the column out: --exclude-columns {shlex.quote(name)}."
        way = f"L{leave}"
        repair: dict[str, Any] = {"exclude_columns": [name]}
        if not lacking.all():
            fill = "Fill empty cells with --impute mean, median or most_frequent."
            way, repair = f"{fill} Or l{leave}", {"impute": "median"}
        count = f"{lacking.sum():,} of {len(lacking):,} cells have none"
        rule = f"the value must not be missing; got none ({count})."
        raise DataFault(rule, way, int(np.argmax(lacking)), **repair)
    return DATE if name in (reading.date_columns or ()) else NUMBER, values, ()


def holds_words(name: str, cells: Cells, reading: Reading) -> bool:
    """Return whether a column of features holds words: some, and no number.

    Raises:
        DataFault: the words are numbers or dates in another spelling.
    """
    if isinstance(cells, np.ndarray) or name in (reading.date_columns or ()):
        return False
    if name in (reading.word_columns or ()):
        return True
    if spelling.format_of(cells.categories, reading.numbers):
        return False
    _check_spelling(cells, reading, name)
    forms = (reading.numbers, spelling.PLAIN)
    return not any(form.fits(word) for word in cells.categories for form in forms)


def _check_spelling(cells: pd.Categorical, reading: Reading, feature: str = "") -> None:
    """Check that words are no numbers or dates in another spelling (:func:`fl_core.data.spelling.suspicion`).

    If signs are given and fit a cell, the others are stray words.

    Args:
        feature: the column's name if it is a feature. A label cannot be left out.
    """
    given, words = reading.numbers, cells.categories
    if given != spelling.PLAIN and any(map(given.fits, words)):
        return
    found = spelling.suspicion(words, feature)
    if not found:
        return
    way, repair = f"{found.way}.", found.repair
    if feature:
        way += f" Or keep the words: --word-columns {shlex.quote(feature)}."
    elif {"date_columns", "exclude_columns"} & repair.keys():
        way, repair = "Write the numbers alone.", {}
    known = sorted(word for word in words if not spelling.is_missing(word))
    some = listing(map(repr, known), 3)
    rule = f"cells must be numbers or words; got {some}, {found.what}."
    raise DataFault(rule, way, column=feature, **repair)


def numbers_of(name: str, cells: Cells, reading: Reading) -> Array:
    """Return a column of numbers or dates as float64 [n]. A missing value is NaN.

    Raises:
        DataFault: a value is no finite number.
    """
    try:
        if name in (reading.date_columns or ()) and not isinstance(cells, np.ndarray):
            values = arrays.dates(cells)
        else:
            values = arrays.numbers(cells, reading.numbers)
        return arrays.features(values[:, None], missing=True)[:, 0]
    except DataFault as fault:
        way = f"Correct it, or leave the column out: --exclude-columns {shlex.quote(name)}."
        raise DataFault(fault.what, way, fault.row, exclude_columns=[name]) from fault


def _answer(cells: Cells, reading: Reading) -> Cells:
    """Return a column of labels, as numbers unless they name classes."""
    targets.check_present(cells)
    if reading.task == CLASSIFICATION and not reading.label_numbers:
        return cells
    try:
        return arrays.numbers(cells, reading.numbers)
    except DataFault as fault:
        if isinstance(cells, pd.Categorical):
            _check_spelling(cells, reading)
        raise DataFault(fault.what, targets.FORMS[reading.task], fault.row) from fault


def _targets(
    header: Sequence[str], answers: Sequence[Cells], reading: Reading
) -> tuple[Array, tuple[str, ...]]:
    """Return the targets in label columns, with the names of classes (:func:`targets.answers`)."""
    y: Any = answers[0] if len(answers) == 1 else np.column_stack(answers)
    found = targets.answers(y, reading.task, reading.names)
    if reading.task == CLASSIFICATION:
        _check_classes(header, *found, reading)
    return found


def _check_classes(
    header: Sequence[str], y: Array, classes: Sequence[str], reading: Reading
) -> None:
    """Check that classes are no numbers to predict.

    Raises:
        DataFault: most numbers are there once, or the label is the time until an event of another column.
    """
    numbers = all(map(spelling.is_number, classes))
    if len(classes) <= FEW or not (numbers or spelling.suspicion(classes, "")):
        return
    time, event = column_table.survival_columns(header)
    timed = bool(event) and time == reading.label_column
    if timed or 2 * (np.bincount(y) == 1).sum() > len(classes):
        both, given = f"{time},{event}", shlex.quote(f"{time},{event}")
        way = "Predict a number: --task regression."
        repair: dict[str, Any] = {"task": REGRESSION}
        if timed:
            way = f"Predict the time until an event: --task survival --label-column {given}. Or p{way[1:]}"
            repair = {"task": SURVIVAL, "label_column": both}
        rule = f"classes must be few; got {len(classes):,} different numbers."
        raise DataFault(rule, way, **repair)


def _groups(cells: Cells, owner: arrays.Integers | None) -> arrays.Integers:
    """Return the group [n] of each row. The same name at two clients is two groups.

    Raises:
        DataFault: a row has no group.
    """
    arrays.refuse_where(arrays.lacks_value(cells), cells, "each row must have a group")
    groups = [each.strip() for each in cells]
    rows = pd.DataFrame({"client": 0 if owner is None else owner, "group": groups})
    return rows.groupby(["client", "group"]).ngroup().to_numpy(np.int64)


def roles_of(path: Path, header: Sequence[str], reading: Reading) -> dict[str, str]:
    """Return the role of each column that has one: client, label, text or group.

    Raises:
        DataFault: a column is missing. The message names the likeliest ones with their flags.
        UsageError: a name is repeated, or has two roles.
    """
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
    way = f"Name it with {flag}"
    repair: dict[str, Any] = {}
    likely = column_table.likely_columns(key, name, header)
    if likely:
        repair[key] = likely[0]
        others = "".join(f", or {flag} {shlex.quote(each)}" for each in likely[1:])
        way = f"Name it: {flag} {shlex.quote(likely[0])}{others}"
    clients = column_table.by_name("client_column", header)
    if key != "client_column" and clients and reading.client_column not in header:
        repair["client_column"] = clients[0]
        way += f". The column of the clients may be missing as well: --client-column {shlex.quote(clients[0])}"
    several = name.split(BETWEEN)
    if key == "label_column" and len(several) > 1 and {*several} <= {*header}:
        survival = (*several,) == column_table.survival_columns(header)
        task = SURVIVAL if survival else MULTILABEL
        repair, way = {"task": task}, f"Name their task: --task {task}"
    return DataFault(
        f"{flag} must be one of the {len(header)} columns of {path}; got {name!r}.",
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
