"""Tables with named columns of numbers, words or texts: from a file, several files or a frame to a source."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
    BETWEEN,
    PLAIN,
    READING,
    DataFault,
    DataFaults,
    Place,
    Reading,
    check_distinct_columns,
    located,
)
from fl_core.data.sources import Source
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
    path, header, read = frames.open_table(source, reading)
    taken = roles_of(path, header, reading)
    names = feature_columns(path, header, reading)
    unused = [name for name in header if name not in (*taken, *(names or ()))]
    aside = [name for name in unused if roles.names_rows(name)]
    columns, place = read(
        [*taken, *(names or ()), *aside], [*taken, *(reading.word_columns or ())]
    )
    if reading.drop_missing_labels:
        columns, place = drop_missing_labels(path, columns, place, reading.labels)
    source = Source(name or str(path), np.empty((0, 0)), np.empty(0), ())
    faults: list[UsageError] = []
    column = partial(_column, faults, path, place)
    answers = []
    for label in reading.labels:
        with column(label):
            answers.append(_answer(columns[label], reading))
    if len(answers) == len(reading.labels):
        with column(reading.label_column):
            y, classes = _targets(header, answers, reading)
            source = replace(source, y=y, classes=classes)
    if reading.client_column in columns:
        with column(reading.client_column):
            owner, clients = arrays.owners(columns[reading.client_column])
            source = replace(source, owner=owner, owner_names=clients)
    if reading.group_column:
        with column(reading.group_column):
            groups = _groups(columns[reading.group_column], source.owner)
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
        texts: list[str] = list(columns[reading.text_column])
        with column(reading.text_column):
            text.check(texts)
        _refuse(faults)
        text.warn_of_losses(texts, str(path))
        codes, vocabulary = text.encode(texts)
        seen = column_table.describe(header, columns, taken, {}, (), odd)
        return replace(source, x=codes, words=vocabulary, table=seen)
    features = {name: columns[name] for name in names}
    if not reading.keep_ids:
        ids = _identifiers(path, features, source.owner, reading)
        faults += ids.values()
        features = {name: features[name] for name in names if name not in ids}
    lacking = _lacking(path, features, source, reading)
    odd |= lacking
    words: dict[str, tuple[str, ...]] = {}
    made: dict[str, Array] = {}
    for name, cells in features.items():
        if name in lacking and not reading.fill_missing_columns:
            del columns[name]
            continue
        with column(name):
            if holds_words(name, cells, reading):
                words[name] = preprocessing.words_of(name, cells)
                made[name] = preprocessing.codes(cells, words[name])
                continue
            made[name] = numbers_of(name, cells, reading)
            _check_filled(name, made[name], reading)
            if name not in (reading.date_columns or ()):
                columns[name] = made[name]
    _refuse(faults)
    if not made:
        raise UsageError(
            f"{path} must have a column with values at each client; got none. Fill them: --fill-missing-columns "
            "--impute median."
        )
    dates = reading.date_columns or ()
    return replace(
        source,
        x=np.column_stack(list(made.values())),
        columns=tuple(made),
        categories=tuple(words.get(name, ()) for name in made) if words else (),
        table=column_table.describe(header, columns, taken, words, dates, odd),
    )


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
    """All faults of a table, one line each, and the settings that read it.

    Attributes:
        source: the data, or None if no settings read them.
        faults: one line each.
        reading: the last settings that were tried.
        lines: a heading, the faults, and what to do if settings do not help.
        options: of the command line, if settings help.
    """

    def __init__(
        self,
        data: Path | pd.DataFrame,
        source: Source | None,
        faults: list[str],
        left: int,
        reading: Reading,
    ) -> None:
        in_memory = isinstance(data, pd.DataFrame)
        count = plural(len(faults), "fault")
        self.source, self.faults, self.reading = source, faults, reading
        self.lines = [
            f"{'data' if in_memory else data} must be read with other settings; got {count}:",
            *(f"  {number}. {fault}" for number, fault in enumerate(faults, 1)),
        ]
        self.options = way = ""
        if source is None:
            last = f"the last {left}" if left > 1 else "the last one"
            self.lines.append(
                f"Correct or decide {last}: no setting is certain to repair it."
            )
        elif in_memory:
            keys = [key for key in READING if getattr(reading, key) != getattr(Reading, key)]  # fmt: skip
            given = ", ".join(f"{key}={getattr(reading, key)!r}" for key in keys)
            self.lines.append(f"With these settings it can be read: {given}")
        else:
            files = " ".join(map(shlex.quote, str(data).split(BETWEEN)))
            self.options = f"--dataset {files} {reading.options}".strip()
            way = f"\nThese options read it: {self.options}"
        super().__init__("\n".join(self.lines) + way)


def find_faults(
    data: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> Findings:
    """Read a table, each time with the settings that the last faults ask for."""
    found: list[str] = []
    tried: list[Reading] = []
    while True:
        tried.append(reading)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                source = read_table(data, reading, name)
                return Findings(data, source, found, 0, reading)
        except UsageError as error:
            faults = error.faults if isinstance(error, DataFaults) else [error]
        last = list(map(str, faults))
        found = [*(fault for fault in found if fault not in last), *last]
        better = reading.repaired(faults)
        if better in tried:
            return Findings(data, None, found, len(last), reading)
        reading = better


def read_or_report(
    data: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> Source:
    """Read a table (:func:`read_table`), or refuse it with all its faults and the settings that read it.

    Raises:
        UsageError: the only fault, or :class:`Findings`.
    """
    try:
        return read_table(data, reading, name)
    except UsageError as first:
        found = find_faults(data, reading, name)
        if len(found.faults) == 1:
            raise
        raise found from first


def _repeats(cells: Cells, owner: arrays.Integers | None) -> bool:
    """Return whether a client has a value twice."""
    clients = np.zeros(len(cells)) if owner is None else owner
    rows = pd.DataFrame({"client": clients, "value": cells})
    return bool(rows.duplicated().any())


def _identifiers(
    path: Path,
    columns: Mapping[str, Cells],
    owner: arrays.Integers | None,
    reading: Reading,
) -> dict[str, DataFault]:
    """Return the faults of columns that number the samples, or what several of them belong to."""
    faults: dict[str, DataFault] = {}
    group = reading.group_column
    for name, cells in columns.items():
        if not roles.is_identifier(name, cells, owner):
            continue
        given, out = shlex.quote(name), [*(reading.exclude_columns or ()), name]
        repair: dict[str, Any] = {"exclude_columns": [name]}
        option = f"--exclude-columns {' '.join(map(shlex.quote, out))}"
        way = f"Leave it out: {option}"
        whole = not arrays.lacks_value(cells).any()
        if whole and not group and _repeats(cells, owner):
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
    return faults


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
    if _has_strays(cells, reading):
        return False
    _check_spelling(cells, name)
    return not any(map(spelling.is_number, cells.categories))


def _has_strays(cells: pd.Categorical, reading: Reading) -> bool:
    """Return whether some cells are numbers with the signs that were given, and others are none with any signs."""
    given, words = reading.numbers, cells.categories
    if given == spelling.PLAIN or not any(map(given.fits, words)):
        return False
    others = (w for w in words if not given.fits(w) and not spelling.is_missing(w))
    return any(set(word.strip()) - set(spelling.IN_NUMBERS) for word in others)


def _check_spelling(cells: pd.Categorical, feature: str = "") -> None:
    """Check that words are no numbers or dates in another spelling (:func:`fl_core.data.spelling.suspicion`).

    Args:
        feature: the column's name if it is a feature. A label cannot be left out.
    """
    found = spelling.suspicion(cells.categories, feature)
    if not found:
        return
    way, repair = f"{found.way}.", found.repair
    if feature:
        way += f" Or keep the words: --word-columns {shlex.quote(feature)}."
    elif {"date_columns", "exclude_columns"} & repair.keys():
        way, repair = "Write the numbers alone.", {}
    some = listing(map(repr, sorted(cells.categories)), 3)
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
            values = _plain_numbers(cells, reading)
        return arrays.features(values[:, None], missing=True)[:, 0]
    except DataFault as fault:
        way = f"Correct it, or leave the column out: --exclude-columns {shlex.quote(name)}."
        raise DataFault(fault.what, way, fault.row, exclude_columns=[name]) from fault


def _check_filled(name: str, values: Array, reading: Reading) -> None:
    """Check that no number is missing, or that it will be filled."""
    lacking = np.isnan(values)
    if reading.may_be_missing or not lacking.any():
        return
    leave = f"eave the column out: --exclude-columns {shlex.quote(name)}."
    way = f"L{leave}"
    repair: dict[str, Any] = {"exclude_columns": [name]}
    if not lacking.all():
        fill = "Fill empty cells with --impute mean, median or most_frequent."
        way, repair = f"{fill} Or l{leave}", {"impute": "median"}
    count = f"{lacking.sum():,} of {len(lacking):,} cells have none"
    rule = f"the value must not be missing; got none ({count})."
    raise DataFault(rule, way, int(np.argmax(lacking)), **repair)


def _plain_numbers(cells: Cells, reading: Reading) -> NDArray[np.float64]:
    """Return numbers in the spelling that is given, or with a decimal point."""
    if isinstance(cells, np.ndarray):
        return cells
    form = spelling.format_of(cells.categories, reading.numbers)
    return arrays.numbers(cells, form or reading.numbers)


def _answer(cells: Cells, reading: Reading) -> Cells:
    """Return a column of labels, as numbers unless they name classes."""
    targets.check_present(cells)
    if reading.task == CLASSIFICATION and not reading.label_numbers:
        return cells
    if (
        isinstance(cells, pd.Categorical)
        and not spelling.format_of(cells.categories, reading.numbers)
        and not _has_strays(cells, reading)
    ):
        _check_spelling(cells)
    try:
        return _plain_numbers(cells, reading)
    except DataFault as fault:
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
    time, event = roles.survival_columns(header)
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
    texts = [each.strip() for each in cells]
    clients = np.zeros(len(texts), int) if owner is None else owner
    rows = pd.DataFrame({"client": clients, "group": texts})
    return rows.groupby(["client", "group"]).ngroup().to_numpy(np.int64)


def drop_missing_labels(
    path: Path, columns: Mapping[str, Cells], place: Place, labels: Sequence[str]
) -> tuple[dict[str, Cells], Place]:
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
    way = f"Name it with {flag}"
    repair: dict[str, Any] = {}
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
    time, event = roles.survival_columns(header)
    several = name.split(",")
    if key == "label_column" and len(several) > 1 and {*several} <= {*header}:
        task = SURVIVAL if several == [time, event] else MULTILABEL
        repair, way = {"task": task}, f"Name their task: --task {task}"
    elif key == "label_column" and time and event:
        both = shlex.quote(f"{time},{event}")
        way += f". To predict the time until an event: --task survival --label-column {both}"
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
