"""Tables of numbers, words or texts: each column is described once, and a source is built from it or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.data import arrays, preprocessing, roles
from fl_core.data.cells import (
    Array,
    Bools,
    Cells,
    cells_of,
    fault_where,
    lacks_value,
    numbers,
    taken,
    texts_of,
)
from fl_core.data.columns import BETWEEN, LISTS, PLAIN, Reading
from fl_core.data.described import (
    DATE,
    LEFT_OUT,
    NUMBER,
    WORDS,
    Column,
    ColumnTable,
    Feature,
    describe,
    far_end,
    features,
    gives_away,
    mixed,
    unlike_clients,
    words_of,
)
from fl_core.data.opened import Opened, open_table
from fl_core.data.sources import Source, encode
from fl_core.data.spelling import (
    SIGNED,
    DataFault,
    Names,
    Way,
    cell_text,
    is_number,
    nearly_equal,
    suspicion,
)
from fl_core.errors import UsageError, check_known, listing, plural, spelled, warn
from fl_core.models.tokens import Tokenizer
from fl_core.rows import CLASSIFICATION, MULTILABEL, SURVIVAL

ROWS = 4096
"""Rows that are written together."""
RARE = 0.05
"""Share of rows without a label below which leaving them out is proposed."""
MOST_NUMBERS, MOST_WORDS = 20, 100
"""Different numbers, or words, up to which labels are classes without being asked about."""
FEW_CLASSES = 10
"""The number of classes that are few, even if most of them have one sample."""
NUMBERS = "Write numbers. An event is 1, or 0 if it was censored. Each of several labels is 1 or 0."
"""What to write in label columns that hold words, if the task needs numbers."""


class Findings(UsageError):
    """All faults of a table, one line each, and the settings that read it.

    Attributes:
        source: the data, or None if no settings read them.
        faults: in the order in which they were found.
        reading: the settings that read it, or the last ones that are certain.
        lines: a heading, and the faults.
        settings: as the caller types them.
        notes: warnings of reading with these settings.
        error: the only fault, or all of them.
    """

    def __init__(
        self,
        data: Path | pd.DataFrame,
        source: Source | None,
        faults: Sequence[UsageError],
        reading: Reading,
        notes: Sequence[str],
    ) -> None:
        given, name = reading.changed, "data"
        if isinstance(data, Path):
            given, name = {"dataset": str(data), **given}, str(data)
        self.source = source
        self.faults = faults
        self.reading = reading
        self.settings = spelled(**given)
        self.notes = notes
        self.error = faults[0] if len(faults) == 1 else self
        self.lines = [
            f"{name} must be read with other settings; got {plural(len(faults), 'fault')}:",
            *(f"  {number}. {fault}" for number, fault in enumerate(faults, 1)),
        ]
        way = f"This reads it: {self.settings}"
        if source is None:
            way = "Correct or decide what has no proposal: no setting is certain to repair it."
        super().__init__("\n".join([*self.lines, way]))


def find_faults(
    data: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> Findings:
    """Read a table once, with the settings that its faults ask for.

    >>> frame = pd.DataFrame({"client": "a", "age": range(60), "label": [*"01" * 29, "x1", "0"]})
    >>> (fault,) = find_faults(frame, Reading(keep_ids=True)).faults
    >>> print(fault)
    the table, column 'label', row 58 (rows count from 0): the cell must be a number; got 'x1' (1 of 60 rows). ...
    """
    table = _Table(data, reading)
    source = None
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            source = table.read(name)
        except UsageError as error:
            table.faults.append(error)
    said = list(dict.fromkeys(str(note.message) for note in notes))
    return Findings(data, source, table.faults, table.reading, said)


def read_table(
    data: Path | pd.DataFrame, reading: Reading = PLAIN, name: str = ""
) -> Source:
    """Read a table, or refuse it with all its faults and the settings that read it.

    Samples are features [n, d] in the order of their columns, or texts. Classes are whole numbers or words.

    Args:
        data: the path of a table, a .jsonl file or several tables, or a table in memory.
        name: of the dataset. The default is the path.

    Raises:
        UsageError: the only fault, or :class:`Findings`.
    """
    found = find_faults(data, reading, name)
    if found.source is None or found.faults:
        raise found.error
    for note in found.notes:
        warn(note)
    return found.source


class _Table:
    """One reading of a table. Each fault changes the settings for what comes after it, and is kept.

    Attributes:
        faults: so far.
        reading: the settings with those that the faults ask for.
        source: the samples, as far as they are known.
        features: how the columns of features are read.
        odd: what is odd about columns.
    """

    def __init__(self, data: Path | pd.DataFrame, reading: Reading) -> None:
        self.data = data
        self.reading = reading
        self.faults: list[UsageError] = []
        self.source = Source("", np.empty((0, 0)), np.empty(0), ())
        self.features: dict[str, Feature] = {}
        self.odd: dict[str, str] = {}

    def read(self, name: str) -> Source | None:
        """Return the data, or None if a fault has no certain repair.

        Raises:
            UsageError: a fault without which nothing else can be said.
        """
        self.opened = open_table(self.data, self.reading)
        for fault in self.opened.faults:
            self.ask(fault)
        self._roles()
        how = self.reading
        texts: list[Any] = [*(how.word_columns or ()), *(how.date_columns or ())]
        texts += [how.client_column, how.text_column, how.group_column]
        self.opened.read(texts if how.predicts_numbers else [*texts, *how.labels])
        named = [k for k in (*how.labels, how.text_column) if k in self.taken]
        for part in self.opened.parts:
            lacking = [repr(name) for name in named if name not in part.header]
            if lacking:
                raise UsageError(
                    f"{part.where} must have the label and the text of the other files; got no "
                    f"{listing(lacking)}. Add or rename the column, or move a file without samples out of the folder."
                )
        label = how.labels[0]
        if not how.predicts_numbers and label not in (how.word_columns or ()):
            with self._checked(label):
                check_classes(self.opened, label, how)
        names = self._roles()
        self._leave_out_rows()
        how = self.reading
        self._add_columns([*names, *(how.labels if how.predicts_numbers else ())])
        self._add_targets()
        if (client := self.reading.client_column) in self.taken:
            with self._checked(client):
                owner, clients = arrays.owners(self._names_of(client, "client"))
                self.source = replace(self.source, owner=owner, owner_names=clients)
        self._identifiers()
        if group := self.reading.group_column:  # a name at two clients is two groups
            self.taken[group] = "group"
            with self._checked(group):
                cells = self._names_of(group, "group")
                groups = roles.by_clients(cells, self.source.owner)
                self.source = replace(self.source, groups=groups)
        self._gaps()
        self.ask_all({k: each.fault for k, each in self.features.items() if each.fault})
        used = {k: each for k, each in self.features.items() if each.kind != LEFT_OUT}
        if "text" in self.taken.values():
            self._add_texts()
        elif used:
            self._add_features(used)
        else:
            self.faults.append(self._no_features())
        if not all(getattr(fault, "repair", {}) for fault in self.faults):
            return None
        where = name or str(self.opened.where)
        return replace(self.source, name=where, table=self._table(used))

    # --- faults ----------------------------------------------------------------------------------------------------

    def ask(self, fault: DataFault) -> None:
        """Keep a fault, once, and take the settings that it asks for."""
        if fault.rule in [getattr(each, "rule", "") for each in self.faults]:
            return
        self.faults.append(fault)
        self.reading = replace(self.reading, **fault.repair)

    def ask_all(self, faults: Mapping[str, DataFault]) -> None:
        """Ask about columns: each kind of fault once, with its columns and the settings for all of them."""
        kinds: dict[str, dict[str, DataFault]] = {}
        for name, fault in faults.items():
            ways: Any = [
                (say, {k: v for k, v in keys.items() if not isinstance(v, list)})
                for say, keys in fault.ways
            ]
            kind = f"{fault.rule.partition(';')[0]} {ways}"
            kinds.setdefault(kind, {})[name] = fault
        for alike in kinds.values():
            first, *others = alike.values()
            ways = [(say, dict(keys)) for say, keys in first.ways]
            for k, (_, keys) in enumerate(ways):
                for key in [key for key in keys if isinstance(keys[key], list)]:
                    more = [each.ways[k][1][key] for each in alike.values()]
                    given = getattr(self.reading, key) or ()
                    keys[key] = list(dict.fromkeys(chain(given, *more)))
            columns = f"column{'s' * bool(others)} {listing(map(repr, alike), 4)}"
            fault = DataFault(first.rule, *ways, row=first.row)
            at = f"{self.opened.where}, {columns}"
            self.ask(fault.at(at, self.opened.place))

    @contextmanager
    def _checked(self, name: str) -> Iterator[None]:
        """Keep the fault of a column, with its place, instead of raising it."""
        try:
            yield
        except DataFault as fault:
            self.ask_all({name: fault})

    def _texts_of(self, name: str) -> pd.Categorical:
        return texts_of(self.opened.cells(name, self.reading, True))

    def _names_of(self, name: str, what: str) -> pd.Categorical:
        """Return the names of clients or groups, none of which is missing."""
        cells = self._texts_of(name)
        own = lacks_value(cells)
        if own.any():
            got, keep = self._marks(name, own, "name")
            rule = f"each row must have a {what}"
            way = "Fill the cell, or remove the row."
            raise fault_where(own, got, rule, way, *keep)
        return cells

    def _marks(self, name: str, own: Bools, kind: str) -> tuple[str, list[Way]]:
        """Return what is written in cells of a column that have no value, and how to keep it as a name or a class."""
        spelt = texts_of(cells_of(self.opened.frame[name], True, ("",)))
        marks = {word.strip() for word in spelt[own]} - {""}
        got = listing(map(repr, sorted(marks)), 3)
        if not got:
            return "an empty cell", []
        return got, [(f"Keep {got} as a {kind}", {"word_columns": [name]})]

    # --- roles -----------------------------------------------------------------------------------------------------

    def _roles(self) -> list[str]:
        """Find the role of each column that has one: client, label, text or group. Return the names of the features.

        The names have the order of the header. Texts have none.

        Raises:
            UsageError: a named column is missing, repeated, or used for two purposes.
        """
        path, header = self.opened.where, self.opened.header
        for fault in self._unnamed(str(path), header):
            if not fault.repair:
                raise fault
            self.ask(fault)
        how = self.reading
        keys = [(how.client_column, "client"), (how.text_column, "text")]
        keys += [(name, "label") for name in how.labels]
        if how.group_column:
            keys.append((how.group_column, "group"))
        taken: dict[str, str] = {}
        for name, role in keys:
            if name in taken:
                raise UsageError(
                    f"{path}: {taken[name]} and {role} must be different columns; got {name!r} for both."
                )
            taken[name] = role
        self.taken = {name: taken[name] for name in header if name in taken}
        if "text" in self.taken.values():
            how.check_unasked(f"{path} holds texts", "columns", "exclude_columns")
            return []
        for key in LISTS[:4]:
            for name in getattr(how, key) or ():
                role = self.taken.get(name, "")
                apart = key in LISTS[:2] or (key == LISTS[3] and role != "label")
                if role and apart:
                    raise UsageError(
                        f"{path}: {key} must name features; got {name!r}, the {role}."
                    )
                check_known(f"column of {path} ({key})", name, header)
        kept = {*(header if how.columns is None else how.columns)}
        kept -= {*(how.exclude_columns or ()), *self.taken}
        if not kept:
            raise self._no_features()
        return [name for name in header if name in kept]

    def _unnamed(self, path: str, header: Sequence[str]) -> Iterator[DataFault]:
        """Yield the faults of label columns that the task needs, and of columns of roles that are not there."""
        pair = roles.survival_columns(header)
        how, labels = self.reading, self.reading.labels
        needed = {SURVIVAL: "TIME,EVENT", MULTILABEL: "LABEL,LABEL,..."}.get(how.task)
        most = 2 if how.task == SURVIVAL else len(header)
        if needed and not 2 <= len({*labels}) == len(labels) <= most:
            rule = f"label columns of task {how.task} must be {needed}; got {how.label_column!r}."
            way: str | Way = f"Name them: {spelled(label_column=needed)}."
            if how.task == SURVIVAL and all(pair):
                way = "Name them", {"label_column": BETWEEN.join(pair)}
            yield DataFault(f"{path}: {rule}", way)
        for key in ("label_column", "client_column", "text_column", "group_column"):
            how = self.reading
            name = getattr(how, key)
            own = how.labels if key == "label_column" else (name,)
            lacking = [each for each in own if each not in header]
            if not lacking or (key != "label_column" and name == getattr(Reading, key)):
                continue
            likely = roles.likely_columns(key, lacking[0], header)
            several = lacking[0].split(BETWEEN)
            rule = f"{key} must be one of the {len(header)} columns of {path}; got {lacking[0]!r}."
            if key == "label_column" and {*several} <= {*header}:
                task = SURVIVAL if {*several} == {*pair} else MULTILABEL
                yield DataFault(rule, ("Name their task", {"task": task}))
                continue
            if len(own) > 1:
                likely = [BETWEEN.join(likely[0] if k in lacking else k for k in own)]
                if how.task == SURVIVAL and all(pair):
                    likely = [BETWEEN.join(pair)]
            also = {}
            clients = roles.by_name("client_column", header, alone=True)
            if key != "client_column" and clients and how.client_column not in header:
                also["client_column"] = clients[0]
            named: list[str | Way] = [
                ("Name it", {key: each, **also}) for each in likely
            ]
            if key == "label_column" and all(pair) and how.task == CLASSIFICATION:
                named.append(_survival(pair))
            if not named:
                named.append(f"Name it: {spelled(**{key: 'NAME'})}.")
            yield DataFault(rule, *named)

    def _no_features(self) -> UsageError:
        got = listing(self.opened.header)
        return UsageError(
            f"{self.opened.where}: there must be a column of features; got only {got}. Add one."
        )

    def _add_columns(self, names: Sequence[str]) -> None:
        """Read the columns of features and of targets. Signs in numbers that one of them shows hold for all."""
        self.features = features(self.opened, names, self.reading)
        faults = {k: each.fault for k, each in self.features.items() if each.fault}
        ways = [each.repair for each in faults.values() if SIGNED in each.rule]
        certain = [way for way in ways if "exclude_columns" not in way]
        if certain and not self.opened.takes:
            alike = {k: each for k, each in faults.items() if each.repair == certain[0]}
            self.ask_all(alike)
            self.features = features(self.opened, names, self.reading)

    # --- labels, clients and groups --------------------------------------------------------------------------------

    def _leave_out_rows(self) -> None:
        """Leave out rows without a label, or ask whether to. This is proposed if they are rare."""
        how, rows = self.reading, len(self.opened.frame)
        lacking = np.zeros(rows, dtype=bool)
        for name in how.labels:
            own = lacks_value(self.opened.cells(name, how, not how.predicts_numbers))
            lacking |= own
            if not own.any() or how.drop_missing_labels:
                continue
            got, keep = self._marks(name, own, "class")
            ways: list[str | Way] = [("Leave them out", {"drop_missing_labels": True})]
            if how.task == CLASSIFICATION:
                ways += keep
            if own.mean() >= RARE:
                ways.insert(0, "Decide what they are.")
                if got.lower() == "'none'" and how.task == CLASSIFICATION:
                    ways = ways[:0:-1]
            self.ask_all({name: fault_where(own, got, arrays.LABELLED, *ways)})
        if lacking.any() and self.reading.drop_missing_labels:
            self.opened.take(np.flatnonzero(~lacking))
            warn(
                f"{self.opened.where}: {lacking.sum():,} of {rows:,} rows have no label and are left out"
            )

    def _add_targets(self) -> None:
        """Add the targets and the names of the classes."""
        how = self.reading
        made: list[Any] = []
        for name in how.labels:
            with self._checked(name):
                if how.predicts_numbers:
                    column, way = self.features.pop(name), NUMBERS
                    fault = column.fault
                    if (
                        fault
                        and column.kind == NUMBER
                        and "date_columns" in fault.repair
                    ):
                        self.ask_all(
                            {name: DataFault(fault.rule, *fault.ways[:1], way)}
                        )
                    elif fault:
                        raise DataFault(fault.rule, way, row=fault.row)
                    cells: Any = numbers(column.cells, how.numbers, way)
                else:
                    cells = self._texts_of(name)
                if not lacks_value(cells).any():
                    made.append(cells)
        if len(made) < len(how.labels):
            return
        with self._checked(how.label_column):
            y = made[0] if len(made) == 1 else np.column_stack(made)
            names = how.labels if how.task == MULTILABEL else None
            if how.labels[0] in (how.word_columns or ()):
                words = words_of(y)
                numeric = all(map(is_number, words))
                names = tuple(sorted(words, key=float if numeric else str))
            y, classes = arrays.answers(y, how.task, names)
            self.source = replace(self.source, y=y, classes=classes)

    # --- what identifies rows --------------------------------------------------------------------------------------

    def _identifiers(self) -> None:
        """Ask about features that number the rows, or what several rows belong to, and note others that do."""
        how, where, features = self.reading, self.opened.where, self.features
        ids = pd.DataFrame()
        for name in self.opened.header:
            with suppress(DataFault):
                column = features.get(name)
                cells = column.cells if column else self.opened.cells(name, how)
                if name not in self.taken and self._identifies(name, cells):
                    ids[name] = roles.by_clients(cells, self.source.owner)
        several = [k for k in ids if not how.group_column and ids[k].duplicated().any()]
        own = [k for k in several if k in features and ids[k].min() >= 0]
        outer = [  # rows of one value of any other have one value of it
            k
            for k in own
            if all((ids[k].groupby(ids[j]).nunique() == 1).all() for j in own)
        ]
        faults: dict[str, DataFault] = {}
        for name in ids:
            self.odd[name] = "like an identifier"
            if name not in features:
                if name in several:
                    self.odd[name] += ": its rows may be in training and test"
                    warn(
                        f"{where}: rows with one {name!r} may lie in training and test alike, so scores may be too "
                        f"good. Keep them together: {spelled(group_column=name)}"
                    )
                continue
            if how.keep_ids:
                continue
            column = features.pop(name)
            cells = column.cells
            got, leave = "values like an identifier's", {"exclude_columns": [name]}
            ways: list[Way] = [("Leave it out", leave)]
            if name in own:
                row = int(np.argmax(ids[name].duplicated()))
                some = cell_text(cells[row]).strip()
                times = plural(int((ids[name] == ids[name][row]).sum()), "row")
                got = f"{some!r} in {times}, like an identifier"
                ways = [
                    (
                        "Leave it out; its rows may then lie in training and test alike",
                        leave,
                    )
                ]
                if name in outer[:1]:
                    keep = {"group_column": name}
                    ways.insert(0, ("Keep its rows in one split", keep))
                elif not outer:
                    ways.insert(0, ("Name the column whose rows belong together.", {}))
            if column.fault is None:
                ways.append(("Allow it", {"keep_ids": True}))
            rule = f"features must say something about a new sample; got {got}."
            faults[name] = DataFault(rule, *ways)
        self.ask_all(faults)

    def _identifies(self, name: str, cells: Cells) -> bool:
        """Return whether a column numbers the rows or what they belong to, by its name or by its values."""
        y, owner, column = self.source.y, self.source.owner, self.features.get(name)
        if column and column.kind == DATE:
            return False
        if roles.is_identifier(name, cells, owner):
            return True
        decided = name in (self.reading.word_columns or ())
        if decided or self.reading.group_column or not self.features or not len(y):
            return False
        others = [
            each.cells
            for key, each in self.features.items()
            if each.kind in (NUMBER, DATE) and key != name
        ]
        return roles.binds_rows(cells, y, others, owner)

    def _gaps(self) -> None:
        """Leave out columns without a value at some client, and ask about other missing numbers."""
        how, features = self.reading, self.features
        holes = {
            name: column.lacking
            for name, column in features.items()
            if column.kind != LEFT_OUT and column.lacking.any()
        }
        lost: dict[str, str] = {}
        if self.source.owner is not None and holes:
            empty = pd.DataFrame(holes).groupby(self.source.owner).all()
            done = "filled" if how.fill_missing_columns else "left out"
            for name in empty.columns[empty.any() & ~empty.all()]:
                some = [self.source.owner_names[k] for k in empty.index[empty[name]]]
                lost[name] = f"no value at {listing(some, 4)}: {done}"
        self.odd |= lost
        if lost and not how.fill_missing_columns:
            fill = spelled(fill_missing_columns=True, impute="median")
            warn(
                f"{self.opened.where}: columns without a value at some client are left out: "
                f"{listing(map(repr, lost), 6)}. To fill them: {fill}"
            )
            for name in lost:
                del features[name], holes[name]
        faults: dict[str, DataFault] = {}
        for name, lacking in holes.items():
            column, whole = features[name], lacking.all()
            if column.kind == WORDS or (how.may_be_missing and not whole):
                continue
            ways: list[Way] = [("Leave the column out", {"exclude_columns": [name]})]
            if whole:
                features[name] = replace(column, kind=LEFT_OUT)
            else:
                ways.insert(0, ("Fill empty cells, such as", {"impute": "median"}))
            rule = "the value must not be missing"
            faults[name] = fault_where(lacking, "none", rule, *ways)
        self.ask_all(faults)

    # --- the result ------------------------------------------------------------------------------------------------

    def _add_features(self, used: Mapping[str, Feature]) -> None:
        """Add the features. Words are their places among the words of their column."""
        words: list[Names] = []
        made: list[Array] = []
        for column in used.values():
            words.append(words_of(column.cells) if column.kind == WORDS else ())
            cells: Any = column.cells
            made.append(preprocessing.codes(cells, words[-1]) if words[-1] else cells)
        x = np.empty((len(made[0]), len(made)))
        for start in range(0, len(x), ROWS):  # these stay in the cache
            for k, cells in enumerate(made):
                x[start : start + ROWS, k] = cells[start : start + ROWS]
        self.source = replace(
            self.source,
            x=x,
            columns=tuple(used),
            categories=tuple(words) if any(words) else (),
        )

    def _add_texts(self) -> None:
        """Add the codes of texts. Numbers next to them are named, since nothing reads them."""
        name, where = self.reading.text_column, str(self.opened.where)
        frame = self.opened.frame.select_dtypes(["number", "bool"])
        numeric = [repr(column) for column in frame if column not in self.taken]
        if numeric:
            warn(
                f"{where}: a model of texts reads no other columns; left out are {listing(numeric, 6)}"
            )
        with self._checked(name):
            folder = self.reading.tokenizer
            tokenizer = Tokenizer.read(folder) if folder else None
            texts = [*self._texts_of(name)]
            x, words = encode(texts, where=where, tokenizer=tokenizer)
            self.source = replace(self.source, x=x, words=words, tokenizer=tokenizer)

    def _table(self, used: Mapping[str, Feature]) -> ColumnTable:
        """Return what is said of each column."""
        header, source, how = self.opened.header, self.source, self.reading
        alike = {name: group for group in nearly_equal(header) for name in group}
        rows = []
        for name in header:
            role, column, inputs = self.taken.get(name, ""), used.get(name), 0
            said = ["" if role == "group" else self.odd.get(name, "")]
            others = [repr(each) for each in alike.get(name, ()) if each != name]
            if others:
                said.append(f"next to {listing(others)}")
            if not role and not column:
                rows.append(Column(name, LEFT_OUT, odd="; ".join(filter(None, said))))
                continue
            if column:
                inputs = 1
                said.append(column.odd)
                if source.task == CLASSIFICATION and gives_away(column.cells, source.y):
                    said.append("gives the label away")
                if column.kind == WORDS:
                    inputs = len(words_of(column.cells)) + 1
            else:
                text = role != "label" or not how.predicts_numbers
                column = Feature(role, self.opened.cells(name, how, text))
            if source.owner is not None and (inputs or role == "label"):
                said.append(
                    unlike_clients(column.cells, source.owner, source.owner_names)
                )
            rows.append(describe(name, column, inputs, *said))
        return ColumnTable(tuple(rows))


def check_classes(opened: Opened, name: str, how: Reading) -> None:
    """Check that labels are few classes, all of them numbers or none.

    Raises:
        DataFault: what they are is to be decided. ``word_columns`` takes each different cell as a class.
    """
    cells = texts_of(opened.cells(name, how, True))
    words = [word for word in words_of(cells) if word]
    numeric = [word for word in words if is_number(word)]
    keep: Way = "Keep each as a class", {"word_columns": [name]}
    if 0 < len(numeric) < len(words):
        rule = f"labels must be numbers or words; got {numeric[0]!r} among words."
        asked = mixed(name, opened, cells, how).fault or DataFault(rule, keep)
        missing: list[Any] = [way for way in asked.ways if "missing" in way[1]]
        ways = [*(missing or ["Correct it."]), keep]
        if "word_columns" in asked.repair:
            ways = [keep, *missing]
        raise DataFault(asked.rule, *ways, row=asked.row)
    if numeric:
        whole = numbers(cells)
        known = whole[~np.isnan(whole)]
        if not arrays.of_digits(words):
            arrays.whole_numbers(known, arrays.PREDICT)
        arrays.check_spellings("labels", words, arrays.AS_NUMBERS)
    doubtful = bool(numeric) or suspicion(words) is not None
    single = 2 * (np.bincount(cells.codes) == 1).sum() > len(words)
    time, event = roles.survival_columns(opened.header)
    timed = bool(event) and time == name
    many = len(words) > (MOST_NUMBERS if numeric else MOST_WORDS)
    if not many and (
        len(words) <= FEW_CLASSES or not doubtful or not (timed or single)
    ):
        end = far_end(known, "{:g}".format) if numeric else None
        if end is not None:
            mark = whole == end
            rule = "labels must be classes, not marks of a missing one"
            marks = [*words_of(taken(cells, mark))]
            as_missing: Way = (
                "Take it as missing in all columns, and leave its rows out",
                {"missing": marks, "drop_missing_labels": True},
            )
            way = "Remove the rows."
            raise fault_where(mark, f"{end:g}", rule, way, as_missing, keep)
        return
    kind = "numbers" if numeric else "words"
    rule = f"classes must be few; got {len(words):,} different {kind}."
    if not doubtful:
        raise DataFault(rule, ("Name another label, or keep each", keep[1]))
    ways = [_survival((time, event)), arrays.PREDICT, keep]
    raise DataFault(rule, *ways[not timed :])


def _survival(pair: Sequence[str]) -> Way:
    """Return the way to predict a time until an event."""
    keys = {"task": SURVIVAL, "label_column": BETWEEN.join(pair)}
    return "Predict the time until an event", keys
