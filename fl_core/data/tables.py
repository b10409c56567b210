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
    Cells,
    Integers,
    cell_text,
    cells_of,
    lacks_value,
    numbers,
    refuse_where,
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
    feature,
    gives_away,
    mixed,
    own_signs,
    unlike_clients,
    words_of,
)
from fl_core.data.faults import DataFault, Way
from fl_core.data.opened import Opened, open_table
from fl_core.data.sources import Source, check_texts, encode, warn_of_losses
from fl_core.data.spelling import is_number, nearly_equal, suspicion
from fl_core.errors import UsageError, check_known, listing, plural, spelled, warn
from fl_core.rows import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL

RARE = 0.05
"""Share of rows without a label below which leaving them out is proposed."""
MOST_NUMBERS, MOST_WORDS = 20, 100
"""Different numbers, or words, up to which labels are classes without being asked about."""
FEW_CLASSES = 10
"""The number of classes that are few, even if most of them have one sample."""
FORMS = {
    CLASSIFICATION: "Leave label_numbers out, since labels may be words.",
    REGRESSION: "Write numbers.",
    SURVIVAL: "Write times as numbers, and events as 1, or 0 where the sample was censored.",
    MULTILABEL: "Write each label as 0 or 1.",
}
"""What to write in label columns that hold words, by task."""


LEAVE = "Or leave it out; its rows may then lie in training and test alike"


class Findings(UsageError):
    """All faults of a table, one line each, and the settings that read it.

    Attributes:
        source: the data, or None if no settings read them.
        faults: in the order in which they were found.
        reading: the settings that read it, or the last ones that are certain.
        lines: a heading, and the faults.
        settings: as the caller types them.
        notes: warnings of reading with these settings.
    """

    def __init__(
        self,
        data: Path | pd.DataFrame,
        source: Source | None,
        faults: Sequence[UsageError],
        reading: Reading,
        notes: Sequence[str],
    ) -> None:
        given = reading.changed
        if isinstance(data, Path):
            given = {"dataset": str(data), **given}
        self.source, self.faults, self.reading = source, faults, reading
        self.settings, self.notes = spelled(**given), notes
        name = data if isinstance(data, Path) else "data"
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
    """Read a table once, with the settings that its faults ask for."""
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
        raise found if len(found.faults) > 1 else found.faults[0]
    for note in found.notes:
        warn(note)
    return found.source


def peek(path: Path, reading: Reading) -> tuple[list[str], bool]:
    """Return the names of a table's features, and whether a column names the clients, from its header alone.

    Raises:
        UsageError: all faults of the table, if one is seen in its header.
    """
    table = _Table(path, reading)
    names = table.head()
    if table.faults:
        read_table(path, reading)
    return names, reading.client_column in table.opened.header


class _Table:
    """One reading of a table. Each fault changes the settings for what comes after it, and is kept.

    Attributes:
        faults: so far.
        reading: the settings with those that the faults ask for.
        refused: columns that are named in a fault of a file.
        rows: the rows that have a label, or None for all.
    """

    def __init__(self, data: Path | pd.DataFrame, reading: Reading) -> None:
        self.data, self.reading = data, reading
        self.faults: list[UsageError] = []
        self.refused: set[str] = set()
        self.rows: Integers | None = None

    def head(self) -> list[str]:
        """Open the table, give its columns their roles, and return the names of its features.

        Raises:
            UsageError: a fault without which nothing else can be said.
        """
        self.opened = open_table(self.data, self.reading)
        for fault in self.opened.faults:
            self.ask(fault)
        self.taken = self._roles(self.opened.header)
        return self._feature_names()

    def read(self, name: str) -> Source | None:
        """Return the data, or None if a fault has no certain repair.

        Raises:
            UsageError: a fault without which nothing else can be said.
        """
        self.head()
        how = self.reading
        texts = [how.client_column, how.text_column, *(how.word_columns or ())]
        texts += [*(how.date_columns or ()), *filter(None, [how.group_column])]
        texts += [] if how.predicts_numbers else how.labels
        self.opened.read(texts)
        for part in self.opened.parts:
            self._check_part(part.header, part.where)
        self._signs(self._feature_names())
        self._ask_for_classes()
        self.taken = self._roles(self.opened.header)
        names = self._feature_names()
        self._leave_out_rows()
        where = str(self.opened.where)
        found = Source(name or where, np.empty((0, 0)), np.empty(0), ())
        found = self._clients(self._targets(found))
        features = {}
        for each in names:
            if each not in self.refused:
                column = feature(self.opened, each, self.reading)
                features[each] = column._replace(cells=self._kept(column.cells))
        odd = self._identifiers(features, found)
        found = self._grouped(found)
        odd |= self._gaps(features, found)
        self.ask_all({k: each.fault for k, each in features.items() if each.fault})
        used = {k: each for k, each in features.items() if each.kind != LEFT_OUT}
        if "text" in self.taken.values():
            found = self._texts(found)
        elif used:
            found = self._numbers_and_words(found, used)
        else:
            self.faults.append(self._no_features())
        if not all(getattr(fault, "repair", {}) for fault in self.faults):
            return None
        return replace(found, table=self._table(used, odd, found))

    # --- faults ----------------------------------------------------------------------------------------------------

    def ask(self, fault: DataFault) -> None:
        """Keep a fault, and take the settings that it asks for."""
        self.faults.append(fault)
        self.reading = self.reading.with_settings(fault.repair)

    def ask_all(self, faults: Mapping[str, DataFault], where: str = "") -> None:
        """Ask about columns: each kind of fault once, with its columns and the settings for all of them.

        Args:
            where: the file, if it is one of several.
        """
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
                    given = getattr(self.reading, key) or ()
                    more = [each.ways[k][1][key] for each in alike.values()]
                    keys[key] = list(dict.fromkeys(chain(given, *more)))
            columns = f"column{'s' * bool(others)} {listing(map(repr, alike), 4)}"
            fault = DataFault(first.rule, *ways, row=first.row)
            at = f"{where or self.opened.where}, {columns}"
            self.ask(fault.at(at, self.opened.place))

    @contextmanager
    def _checked(self, name: str) -> Iterator[None]:
        """Keep the fault of a column, with its place, instead of raising it."""
        try:
            yield
        except DataFault as fault:
            at = f"{self.opened.where}, column {name!r}"
            self.ask(fault.at(at, lambda row: self.opened.place(self._row(row))))

    def _row(self, row: Any) -> int:
        """Return the row of the file, of which some may be left out."""
        return int(row if self.rows is None else self.rows[row])

    def _kept(self, cells: Any) -> Any:
        """Return the cells of the rows that are not left out."""
        return cells if self.rows is None else taken(cells, self.rows)

    def _column(self, name: str, text: bool = True) -> Any:
        cells = self._kept(self.opened.cells(name, self.reading, text))
        return texts_of(cells) if text else cells

    # --- roles -----------------------------------------------------------------------------------------------------

    def _roles(self, header: Sequence[str]) -> dict[str, str]:
        """Return the role of each column that has one: client, label, text or group."""
        path = str(self.opened.where)
        for fault in self._unnamed(path, header):
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
        return {name: taken[name] for name in header if name in taken}

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
                task = SURVIVAL if (*several,) == pair else MULTILABEL
                yield DataFault(rule, ("Name their task", {"task": task}))
                continue
            if len(own) > 1:
                likely = [BETWEEN.join(likely[0] if k in lacking else k for k in own)]
                if how.task == SURVIVAL and all(pair):
                    likely = [BETWEEN.join(pair)]
            also = {}
            clients = roles.by_name("client_column", header)
            if key != "client_column" and clients and how.client_column not in header:
                also["client_column"] = clients[0]
            named: list[str | Way] = [
                ("Or" if k else "Name it", {key: each, **also})
                for k, each in enumerate(likely)
            ]
            if not named:
                named.append(f"Name it: {spelled(**{key: 'NAME'})}.")
            yield DataFault(rule, *named)

    def _check_part(self, header: Sequence[str], part: Path) -> None:
        """Refuse a file that lacks the label or the text of the others."""
        lacking = [
            name
            for name in (*self.reading.labels, self.reading.text_column)
            if name in self.taken and name not in header
        ]
        if lacking:
            others = {*self.opened.header} - {self.opened.client}
            way = "Add or rename the column."
            if not others - {*header} < others:
                way = "It shares no column with them: move it out of the folder."
            raise UsageError(
                f"{part} must have the label and the text of the other files; got no {listing(map(repr, lacking))}. "
                f"{way}"
            )

    def _feature_names(self) -> list[str]:
        """Return the names of the feature columns, in the order of the header. Texts have none.

        Raises:
            UsageError: a named column is missing, repeated, or used for two purposes.
        """
        path, how, header = self.opened.where, self.reading, self.opened.header
        if "text" in self.taken.values():
            how.check_unasked(f"{path} holds texts", "columns", "exclude_columns")
            return []
        found = [name for name in header if name not in self.taken]
        for key in ("columns", "exclude_columns", "word_columns", "date_columns"):
            for name in getattr(how, key) or ():
                role = self.taken.get(name, "")
                if role and not (key in LISTS[2:4] and role == "label"):
                    raise UsageError(
                        f"{path}: {key} must name features; got {name!r}, the {role}."
                    )
                check_known(f"column of {path} ({key})", name, [*found, *self.taken])
        kept = {*(found if how.columns is None else how.columns)}
        kept -= {*(how.exclude_columns or ())}
        if not kept:
            raise self._no_features()
        return [name for name in found if name in kept]

    def _no_features(self) -> UsageError:
        got = listing(self.opened.header)
        return UsageError(
            f"{self.opened.where}: there must be a column of features; got only {got}. Add one."
        )

    def _signs(self, names: Sequence[str]) -> None:
        """Find the signs in numbers of each file. A single table asks for them."""
        how = self.reading
        names = [*names, *(how.labels if how.predicts_numbers else ())]
        several = bool(self.opened.client)
        for part, found in own_signs(self.opened, names, how, several):
            if several:
                self.ask_all(found, str(part.where))
                self.refused |= {*found}
                continue
            ways = [each.repair for each in found.values()]
            first = next((way for way in ways if "exclude_columns" not in way), None)
            self.ask_all({k: each for k, each in found.items() if each.repair == first})

    # --- labels, clients and groups --------------------------------------------------------------------------------

    def _leave_out_rows(self) -> None:
        """Leave out rows without a label, or ask whether to."""
        how, rows = self.reading, len(self.opened.frame)
        lacking = np.zeros(rows, dtype=bool)
        for name in how.labels:
            own = lacks_value(self._column(name, not how.predicts_numbers))
            lacking |= own
            if own.any() and not how.drop_missing_labels:
                self._ask_for_labels(name, own)
        if lacking.any() and self.reading.drop_missing_labels:
            self.rows = np.flatnonzero(~lacking)
            warn(
                f"{self.opened.where}: {lacking.sum():,} of {rows:,} rows have no label and are left out"
            )

    def _ask_for_labels(self, name: str, lacking: Array) -> None:
        """Ask about labels that are missing. Leaving them out is proposed if they are rare."""
        spelt = texts_of(cells_of(self.opened.frame[name], True, ("",)))
        marks = {word.strip() for word in spelt[lacking]} - {""}
        some = listing(map(repr, sorted(marks)), 3)
        drop: Way = "Leave them out", {"drop_missing_labels": True}
        ways: list[str | Way] = [drop]
        rare = lacking.mean() < RARE
        if marks and self.reading.task == CLASSIFICATION:
            ways.append((f"Or keep {some} as a class", {"word_columns": [name]}))
            if not rare and {mark.lower() for mark in marks} == {"none"}:
                ways.reverse()
                rare = True
        count = f"{lacking.sum():,} of {len(lacking):,} rows"
        fault = DataFault(
            f"each sample must have a label; got {some or 'an empty cell'} ({count}).",
            *([] if rare else ["Decide what they are."]),
            *ways,
            row=int(np.argmax(lacking)),
        )
        with self._checked(name):
            raise fault

    def _ask_for_classes(self) -> None:
        """Ask what labels are that are not few classes, all of them numbers or none."""
        how = self.reading
        plain = how.task == CLASSIFICATION and not how.label_numbers
        if plain and how.labels[0] not in (how.word_columns or ()):
            with self._checked(how.labels[0]):
                check_classes(self.opened, how.labels[0], how)

    def _targets(self, found: Source) -> Source:
        """Return the source with its targets and the names of its classes."""
        how = self.reading
        made: list[Any] = []
        for name in how.labels:
            with self._checked(name):
                cells = self._column(name)
                if how.predicts_numbers:
                    cells = self._label_numbers(name)
                if not lacks_value(cells).any():
                    made.append(cells)
        if len(made) < len(how.labels):
            return found
        with self._checked(how.label_column):
            y = made[0] if len(made) == 1 else np.column_stack(made)
            names = how.names
            if how.labels[0] in (how.word_columns or ()):
                words = words_of(y)
                numeric = all(map(is_number, words))
                names = tuple(sorted(words, key=float if numeric else str))
            y, classes = arrays.answers(y, how.task, names)
            return replace(found, y=y, classes=classes)
        return found

    def _label_numbers(self, name: str) -> Array:
        """Return a column of labels as numbers."""
        column = feature(self.opened, name, self.reading)
        asked, way = column.fault, FORMS[self.reading.task]
        if asked:
            row = asked.row if self.rows is None else None
            raise DataFault(asked.rule, way, row=row)
        return numbers(self._kept(column.cells), self.reading.numbers, way)

    def _clients(self, found: Source) -> Source:
        """Return the source with the natural client of each row."""
        name = self.reading.client_column
        if name in self.taken:
            with self._checked(name):
                owner, names = arrays.owners(self._column(name))
                return replace(found, owner=owner, owner_names=names)
        return found

    def _grouped(self, found: Source) -> Source:
        """Return the source with the group of each row. The same name at two clients is two groups."""
        name = self.reading.group_column
        if not name:
            return found
        self.taken[name] = "group"
        with self._checked(name):
            cells = self._column(name)
            refuse_where(lacks_value(cells), cells, "each row must have a group")
            return replace(found, groups=roles.by_clients(cells, found.owner))
        return found

    # --- what identifies rows --------------------------------------------------------------------------------------

    def _identifiers(
        self, features: dict[str, Feature], found: Source
    ) -> dict[str, str]:
        """Ask about features that number the rows, or what several rows belong to, and note others that do.

        Returns:
            What is odd about them, by column.
        """
        how, where = self.reading, self.opened.where
        columns = {name: column.cells for name, column in features.items()}
        for name in self.opened.header:
            if name not in self.taken and name not in features:
                with suppress(DataFault):
                    columns[name] = self._column(name, False)
        ids = pd.DataFrame(
            {
                name: roles.by_clients(cells, found.owner)
                for name, cells in columns.items()
                if self._identifies(name, cells, features, found)
            }
        )
        several = [k for k in ids if not how.group_column and ids[k].duplicated().any()]
        own = [k for k in several if k in features and ids[k].min() >= 0]
        outer = [k for k in own if all(roles.nests(ids[k], ids[j]) for j in own)]
        odd, faults = dict.fromkeys(ids, "like an identifier"), {}
        for name in ids:
            if name not in features:
                if name in several:
                    odd[name] += ": its rows may be in training and test"
                    warn(
                        f"{where}: rows with one {name!r} may lie in training and test alike, so scores may be too "
                        f"good. Keep them together: {spelled(group_column=name)}"
                    )
                continue
            if how.keep_ids:
                continue
            del features[name]
            got = "values like an identifier's"
            leave = {"exclude_columns": [name]}
            ways: list[Way] = [("Leave it out", leave)]
            if name in own:
                row = int(np.argmax(ids[name].duplicated()))
                some = cell_text(columns[name][row]).strip()
                times = plural(int((ids[name] == ids[name][row]).sum()), "row")
                got = f"{some!r} in {times}, like an identifier"
                ways = [(LEAVE, leave)]
                if name in outer[:1]:
                    keep = {"group_column": name}
                    ways.insert(0, ("Keep its rows in one split", keep))
                elif not outer:
                    ways.insert(0, ("Name the column whose rows belong together.", {}))
            rule = f"features must say something about a new sample; got {got}."
            faults[name] = DataFault(rule, *ways, ("Or allow it", {"keep_ids": True}))
        self.ask_all(faults)
        return odd

    def _identifies(
        self, name: str, cells: Cells, features: Mapping[str, Feature], found: Source
    ) -> bool:
        """Return whether a column numbers the rows or what they belong to, by its name or by its values."""
        column = features.get(name)
        if column and column.kind == DATE:
            return False
        if roles.is_identifier(name, cells, found.owner):
            return True
        decided = name in (self.reading.word_columns or ())
        if decided or self.reading.group_column or not features or not len(found.y):
            return False
        others = [
            each.cells
            for key, each in features.items()
            if each.kind in (NUMBER, DATE) and key != name
        ]
        return roles.binds_rows(cells, found.y, others, found.owner)

    def _gaps(self, features: dict[str, Feature], found: Source) -> dict[str, str]:
        """Leave out columns without a value at some client, and ask about other missing numbers."""
        how, where = self.reading, self.opened.where
        holes = {
            name: lacks_value(column.cells)
            for name, column in features.items()
            if column.kind != LEFT_OUT
        }
        holes = {name: lacking for name, lacking in holes.items() if lacking.any()}
        odd: dict[str, str] = {}
        faults: dict[str, DataFault] = {}
        if found.owner is not None and holes:
            empty = pd.DataFrame(holes).groupby(found.owner).all()
            done = "filled" if how.fill_missing_columns else "left out"
            for name in empty.columns[empty.any() & ~empty.all()]:
                some = [found.owner_names[k] for k in empty.index[empty[name]]]
                odd[name] = f"no value at {listing(some, 4)}: {done}"
        if odd and not how.fill_missing_columns:
            fill = spelled(fill_missing_columns=True, impute="median")
            warn(
                f"{where}: columns without a value at some client are left out: {listing(map(repr, odd), 6)}. "
                f"To fill them: {fill}"
            )
            for name in odd:
                del features[name]
        for name, lacking in holes.items():
            if name not in features or features[name].kind == WORDS:
                continue
            ways: list[Way] = [
                ("Fill empty cells, such as", {"impute": "median"}),
                ("Or leave the column out", {"exclude_columns": [name]}),
            ]
            if lacking.all():
                ways = [("Leave the column out", {"exclude_columns": [name]})]
                features[name] = features[name]._replace(kind=LEFT_OUT)
            elif how.may_be_missing:
                continue
            count = f"{lacking.sum():,} of {len(lacking):,} cells have none"
            rule = f"the value must not be missing; got none ({count})."
            faults[name] = DataFault(rule, *ways, row=self._row(np.argmax(lacking)))
        self.ask_all(faults)
        return odd

    # --- the result ------------------------------------------------------------------------------------------------

    def _numbers_and_words(self, found: Source, used: Mapping[str, Feature]) -> Source:
        """Return the source with its features. Words are their places among the words of their column."""
        words: dict[str, tuple[str, ...]] = {}
        made: list[Array] = []
        for name, column in used.items():
            words[name] = words_of(column.cells) if column.kind == WORDS else ()
            cells: Any = column.cells
            if words[name]:
                cells = preprocessing.codes(cells, words[name])
            made.append(cells)
        return replace(
            found,
            x=arrays.stacked(made),
            columns=tuple(used),
            categories=tuple(words.values()) if any(words.values()) else (),
        )

    def _texts(self, found: Source) -> Source:
        """Return the source with the codes of its texts. Numbers next to them are named, since nothing reads them."""
        name, where = self.reading.text_column, str(self.opened.where)
        texts = list(texts_of(self._column(name)))
        with self._checked(name):
            check_texts(texts)
        warn_of_losses(texts, where)
        rest = [each for each in self.opened.header if each not in self.taken]
        numeric = []
        for column in rest:
            with suppress(DataFault):
                if isinstance(self._column(column, False), np.ndarray):
                    numeric.append(repr(column))
        if numeric:
            warn(
                f"{where}: a model of texts reads no other columns; left out are {listing(numeric, 6)}"
            )
        codes, vocabulary = encode(texts)
        return replace(found, x=codes, words=vocabulary)

    def _table(
        self, used: Mapping[str, Feature], odd: Mapping[str, str], found: Source
    ) -> ColumnTable:
        """Return what is said of each column."""
        header, numeric = self.opened.header, self.reading.predicts_numbers
        alike = {name: group for group in nearly_equal(header) for name in group}
        shown = {name: column.cells for name, column in used.items()}
        for name, role in self.taken.items():
            shown[name] = self._column(name, role != "label" or not numeric)
        unlike: dict[str, str] = {}
        if found.owner is not None:
            compared = (*used, *self.reading.labels)
            cells = {name: shown[name] for name in compared}
            unlike = unlike_clients(cells, found.owner, found.owner_names)
        rows = []
        for name in header:
            role = self.taken.get(name, "")
            said = ["" if role == "group" else odd.get(name, "")]
            others = [repr(each) for each in alike.get(name, ()) if each != name]
            if others:
                said.append(f"next to {listing(others)}")
            if name not in shown:
                rows.append(Column(name, LEFT_OUT, odd="; ".join(filter(None, said))))
                continue
            inputs, column = 0, used.get(name)
            if column:
                role, inputs = column.kind, 1
                said.append(column.odd)
                if found.task == CLASSIFICATION and gives_away(column.cells, found.y):
                    said.append("gives the label away")
                if role == WORDS:
                    inputs = len(words_of(column.cells)) + 1
            said.append(unlike.get(name, ""))
            rows.append(describe(name, shown[name], role, inputs, *said))
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
        asked = mixed(name, opened, cells, how).fault
        if asked:
            said, first = asked.ways[0]
            way: Way = (said, first) if "missing" in first else ("Correct it.", {})
            ways = [keep] if "word_columns" in first else [way, keep]
            raise DataFault(asked.rule, *ways, row=asked.row)
        return
    if numeric:
        whole = numbers(cells)
        arrays.whole_numbers(whole[~np.isnan(whole)], arrays.PREDICT)
        arrays.check_spellings("labels", words, arrays.AS_NUMBERS)
    doubtful = bool(numeric) or suspicion(words) is not None
    single = 2 * (np.bincount(cells.codes) == 1).sum() > len(words)
    time, event = roles.survival_columns(opened.header)
    timed = bool(event) and time == name
    many = len(words) > (MOST_NUMBERS if numeric else MOST_WORDS)
    if not many and (
        len(words) <= FEW_CLASSES or not doubtful or not (timed or single)
    ):
        return
    kind = "numbers" if numeric else "words"
    rule = f"classes must be few; got {len(words):,} different {kind}."
    if not doubtful:
        raise DataFault(rule, ("Name another label, or keep each", keep[1]))
    survival = {"task": SURVIVAL, "label_column": f"{time},{event}"}
    ways = [("Predict the time until an event", survival), arrays.PREDICT, keep]
    raise DataFault(rule, *ways[not timed :])
