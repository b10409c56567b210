"""Tables of numbers, words or texts: each column is described once, and a source is built from it or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.data import arrays, preprocessing, roles
from fl_core.data.arrays import Array, Integers
from fl_core.data.cells import (
    Cells,
    cell_text,
    cells_of,
    lacks_value,
    numbers,
    refuse_where,
    texts_of,
)
from fl_core.data.columns import BETWEEN, PLAIN, Reading
from fl_core.data.described import (
    DATE,
    DECIDED,
    FILL,
    LEFT_OUT,
    NUMBER,
    WORDS,
    Column,
    ColumnTable,
    Feature,
    Question,
    describe,
    feature,
    gives_away,
    own_signs,
    unlike_clients,
    words_of,
)
from fl_core.data.faults import DataFault, located
from fl_core.data.opened import joined, open_table
from fl_core.data.sources import Source, check_texts, encode, warn_of_losses
from fl_core.data.spelling import (
    LEFT_OUT as LEAVE_OUT,
    Ways,
    double_spelling,
    is_number,
    nearly_equal,
    suspicion,
)
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


LEAVE = (
    "Or leave it out; its rows may then lie in training and test alike",
    "exclude_columns",
)
ALLOW = ("Or allow it", {"keep_ids": True})


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
        for part in self.opened.parts:
            part.read(texts)
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
        self.ask_all([each.question for each in features.values() if each.question])
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

    def ask_all(self, questions: Sequence[Question], where: Path | None = None) -> None:
        """Ask each kind of question once, with its columns. The first way is proposed.

        Args:
            where: the file, if it is one of several.
        """
        kinds: dict[tuple[str, str], list[Question]] = {}
        for each in questions:
            kind = each.rule.partition(";")[0], str(each.ways)
            kinds.setdefault(kind, []).append(each)
        for alike in kinds.values():
            first, names = alike[0], [each.column for each in alike]
            ways = [(way, self._settings(key, names)) for way, key in first.ways]
            said = [f"{way}: {spelled(**k)}." if k else f"{way}." for way, k in ways]
            columns = f"column {names[0]!r}"
            if len(names) > 1:
                columns = f"columns {listing(map(repr, names), 4)}"
            at = f"{where or self.opened.where}, {columns}"
            try:
                with located(at, self.opened.place):
                    raise DataFault(first.rule, " ".join(said), first.row, **ways[0][1])
            except DataFault as placed:
                self.ask(placed)

    def _settings(self, key: Any, names: list[str]) -> dict[str, Any]:
        """Return the settings of a way: its own, or a list of columns."""
        if key == "exclude_columns":
            names = [*(self.reading.exclude_columns or ()), *names]
        return {key: list(dict.fromkeys(names))} if isinstance(key, str) else key

    @contextmanager
    def _checked(self, name: str) -> Iterator[None]:
        """Keep the fault of a column, with its place, instead of raising it."""
        try:
            with located(f"{self.opened.where}, column {name!r}", self._place):
                yield
        except DataFault as fault:
            self.ask(fault)

    def _place(self, row: int) -> str:
        return self.opened.place(row if self.rows is None else int(self.rows[row]))

    def _kept(self, cells: Any) -> Any:
        """Return the cells of the rows that are not left out."""
        if self.rows is None:
            return cells
        cells = cells[self.rows]
        if isinstance(cells, np.ndarray):
            return cells
        return cells.remove_unused_categories()

    def _column(self, name: str, text: bool = True) -> Cells:
        parts = self.opened.parts_of(name, self.reading, text)
        return self._kept(joined(parts))

    # --- roles -----------------------------------------------------------------------------------------------------

    def _roles(self, header: Sequence[str]) -> dict[str, str]:
        """Return the role of each column that has one: client, label, text or group."""
        path = str(self.opened.where)
        self._check_labels(path, header)
        self._check_columns(path, header)
        self._check_labels(path, header)
        how = self.reading
        taken: dict[str, str] = {}
        keys = [("client", how.client_column), ("text", how.text_column)]
        keys += [("label", name) for name in how.labels]
        if how.group_column:
            keys.append(("group", how.group_column))
        for role, name in keys:
            if name in taken:
                raise UsageError(
                    f"{path}: {taken[name]} and {role} must be different columns; got {name!r} for both."
                )
            taken[name] = role
        return {name: taken[name] for name in header if name in taken}

    def _check_labels(self, path: str, header: Sequence[str]) -> None:
        """Ask for the label columns that the task needs."""
        try:
            self.reading.check_labels(path, _survival_labels(header, self.reading))
        except DataFault as fault:
            if not fault.repair:
                raise
            self.ask(fault)

    def _check_columns(self, path: str, header: Sequence[str]) -> None:
        """Ask for the columns of roles that are not there."""
        for key in ("label_column", "client_column", "text_column", "group_column"):
            name = getattr(self.reading, key)
            own = self.reading.labels if key == "label_column" else (name,)
            if key != "label_column" and name == getattr(Reading, key):
                continue
            lacking = [each for each in own if each not in header]
            if lacking:
                fault = _no_column(path, key, lacking[0], header, self.reading)
                if not fault.repair:
                    raise fault
                self.ask(fault)

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
                if role and key != "word_columns":
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
        for part in self.opened.parts:
            found = own_signs(part, names, how)
            certain = [each for each in found if isinstance(each.ways[0][1], dict)]
            if certain and self.opened.client:
                part.signs = certain[0].ways[0][1]
                warn(f"{part.where} is read with {spelled(**part.signs)}")
            elif certain:
                first = certain[0].ways
                self.ask_all([each for each in certain if each.ways == first])
            elif self.opened.client:
                self.ask_all(found, part.where)
                self.refused |= {each.column for each in found}

    # --- labels, clients and groups --------------------------------------------------------------------------------

    def _leave_out_rows(self) -> None:
        """Leave out rows without a label, or ask whether to."""
        how, rows = self.reading, len(self.opened)
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
        frames = [part.frame[name] for part in self.opened.parts]
        spelt = texts_of(joined([cells_of(each, True, ("",)) for each in frames]))
        marks = {word.strip() for word in spelt[lacking]} - {""}
        drop: dict[str, Any] = {"drop_missing_labels": True}
        words: dict[str, Any] = {"word_columns": [name]}
        repair = drop if lacking.mean() < RARE else {}
        some = listing(map(repr, sorted(marks)), 3)
        count = f"{lacking.sum():,} of {len(lacking):,} rows"
        rule = (
            f"each sample must have a label; got {some or 'an empty cell'} ({count})."
        )
        way = f"Leave them out: {spelled(**drop)}."
        if marks and self.reading.task == CLASSIFICATION:
            way += f" Or keep {some} as a class: {spelled(**words)}."
            if not repair and {mark.lower() for mark in marks} == {"none"}:
                repair = words
        with self._checked(name):
            raise DataFault(rule, way, int(np.argmax(lacking)), **repair)

    def _ask_for_classes(self) -> None:
        """Ask what labels are that are not few classes, all of them numbers or none."""
        how = self.reading
        plain = how.task == CLASSIFICATION and not how.label_numbers
        if plain and how.labels[0] not in (how.word_columns or ()):
            with self._checked(how.labels[0]):
                cells = texts_of(self._column(how.labels[0]))
                check_classes(cells, how.labels[0], self.opened.header)

    def _targets(self, found: Source) -> Source:
        """Return the source with its targets and the names of its classes."""
        how = self.reading
        made: list[Any] = []
        for name in how.labels:
            with self._checked(name):
                cells = self._column(name, not how.predicts_numbers)
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
        asked, way = column.question, FORMS[self.reading.task]
        if asked:
            row = asked.row if self.rows is None else None
            raise DataFault(asked.rule, way, row)
        return numbers(self._kept(column.cells), self.reading.numbers, way)

    def _clients(self, found: Source) -> Source:
        """Return the source with the natural client of each row."""
        name = self.reading.client_column
        if name in self.taken:
            with self._checked(name):
                owner, names = arrays.owners(texts_of(self._column(name)))
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
            group = [each.strip() for each in texts_of(cells)]
            client = 0 if found.owner is None else found.owner
            rows = pd.DataFrame({"client": client, "group": group})
            number = rows.groupby(["client", "group"]).ngroup()
            return replace(found, groups=number.to_numpy(np.int64))
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
        ids = {
            name: roles.by_clients(cells, found.owner)
            for name, cells in columns.items()
            if self._identifies(name, cells, features, found)
        }
        several = {
            name: code
            for name, code in ids.items()
            if not how.group_column and len(np.unique(code)) < len(code)
        }
        own = [k for k, code in several.items() if k in features and code.min() >= 0]
        outer = [
            k for k in own if all(roles.nests(several[k], several[j]) for j in own)
        ]
        odd, questions = dict.fromkeys(ids, "like an identifier"), []
        for name, code in ids.items():
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
            ways: Ways = (("Leave it out", "exclude_columns"), ALLOW)
            if name in own:
                row = int(np.argmax(pd.Series(code).duplicated()))
                some = cell_text(columns[name][row]).strip()
                times = plural(int((code == code[row]).sum()), "row")
                got = f"{some!r} in {times}, like an identifier"
                if outer and name == outer[0]:
                    keep = ("Keep its rows in one split", {"group_column": name})
                    ways = (keep, LEAVE, ALLOW)
                elif not outer:
                    ways = (("Name the column whose rows belong together", {}), LEAVE, ALLOW)  # fmt: skip
            rule = f"features must say something about a new sample; got {got}."
            questions.append(Question(name, rule, ways))
        self.ask_all(questions)
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
        odd, questions = {}, []
        if found.owner is not None and holes:
            everywhere = pd.DataFrame(holes).groupby(found.owner).all()
            done = "filled" if how.fill_missing_columns else "left out"
            for name, empty in everywhere.items():
                if empty.any() and not empty.all():
                    some = [found.owner_names[k] for k in empty.index[empty]]
                    odd[str(name)] = f"no value at {listing(some, 4)}: {done}"
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
            count = f"{lacking.sum():,} of {len(lacking):,} cells have none"
            rule = f"the value must not be missing; got none ({count})."
            row = int(np.argmax(lacking))
            row = row if self.rows is None else int(self.rows[row])
            if lacking.all():
                questions.append(Question(name, rule, (LEAVE_OUT,), row))
                features[name] = features[name]._replace(kind=LEFT_OUT)
            elif not how.may_be_missing:
                out = ("Or leave the column out", "exclude_columns")
                questions.append(Question(name, rule, (FILL, out), row))
        self.ask_all(questions)
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
        header = self.opened.header
        alike = {name: group for group in nearly_equal(header) for name in group}
        rows = []
        for name in header:
            said = [] if self.taken.get(name) == "group" else [odd.get(name, "")]
            others = [repr(each) for each in alike.get(name, ()) if each != name]
            if others:
                said.append(f"next to {listing(others)}")
            column = used.get(name)
            role = self.taken.get(name, "")
            if column is None and not role:
                rows.append(Column(name, LEFT_OUT, odd="; ".join(filter(None, said))))
                continue
            if column is None:
                numeric = role == "label" and self.reading.predicts_numbers
                cells, inputs = self._column(name, not numeric), 0
            else:
                role, cells, inputs = column.kind, column.cells, 1
                said.append(column.odd)
                if found.task == CLASSIFICATION and gives_away(cells, found.y):
                    said.append("gives the label away")
                if role == WORDS:
                    inputs = len(words_of(cells)) + 1
            if found.owner is not None and (column or role == "label"):
                said.append(unlike_clients(cells, found.owner, found.owner_names))
            rows.append(describe(name, cells, role, inputs, *said))
        return ColumnTable(tuple(rows))


def check_classes(cells: pd.Categorical, name: str, header: Sequence[str]) -> None:
    """Check that labels are few classes, all of them numbers or none.

    Raises:
        DataFault: what they are is to be decided. ``word_columns`` takes each different cell as a class.
    """
    words = [word for word in words_of(cells) if word]
    numeric = [word for word in words if is_number(word)]
    keep: dict[str, Any] = {"word_columns": [name]}
    if 0 < len(numeric) < len(words):
        fits = np.array([is_number(word) for word in cells.categories], dtype=bool)
        known = ~lacks_value(cells)
        others = ~fits[cells.codes] & known
        share = 1 - others.sum() / known.sum()
        if share <= 1 - DECIDED:
            return
        row = int(np.argmax(others))
        count = f"{others.sum():,} of {len(cells):,} cells are no numbers"
        rule = f"the cell must be a number; got {cells[row]!r} ({count})."
        if share < DECIDED:
            raise DataFault(rule, "Keep each as a class:", row, **keep)
        stray = sorted({word.strip() for word in cells[others]})
        missing: dict[str, Any] = {"missing": stray, "drop_missing_labels": True}
        way = f"Correct it, or keep each as a class: {spelled(**keep)}. Or take it as missing: {spelled(**missing)}."
        raise DataFault(rule, way, row, **(missing if others.mean() < RARE else {}))
    if numeric:
        whole = numbers(cells)
        whole = whole[~np.isnan(whole)]
        arrays.whole_numbers(whole, "Predict numbers:", task=REGRESSION)
        twice = double_spelling(words)
        if twice:
            rule = f"labels must not be one number in two spellings; got {listing(map(repr, twice))}."
            raise DataFault(rule, "Read labels as numbers:", label_numbers=True)
    doubtful = bool(numeric) or suspicion(words) is not None
    single = 2 * (np.bincount(cells.codes) == 1).sum() > len(words)
    time, event = roles.survival_columns(header)
    timed = bool(event) and time == name
    many = len(words) > (MOST_NUMBERS if numeric else MOST_WORDS)
    if not many and (
        len(words) <= FEW_CLASSES or not doubtful or not (timed or single)
    ):
        return
    kind = "numbers" if numeric else "words"
    rule = f"classes must be few; got {len(words):,} different {kind}."
    if not doubtful:
        raise DataFault(rule, "Name another label, or keep each as a class:", **keep)
    task: dict[str, Any] = {"task": REGRESSION}
    way = f"Keep each as a class: {spelled(**keep)}. Or predict a number:"
    if timed:
        way += f" {spelled(**task)}. Or the time until an event:"
        task = {"task": SURVIVAL, "label_column": f"{time},{event}"}
    raise DataFault(rule, way, **task)


def _survival_labels(header: Sequence[str], reading: Reading) -> str:
    """Return the labels of survival by their names, ``TIME,EVENT``, or an empty text."""
    pair = roles.survival_columns(header)
    return BETWEEN.join(pair) if reading.task == SURVIVAL and all(pair) else ""


def _no_column(
    path: str, key: str, name: str, header: Sequence[str], reading: Reading
) -> DataFault:
    """Return the fault of a role's column that is not there, with the likeliest columns."""
    likely = roles.likely_columns(key, name, header)
    if key == "label_column" and len(reading.labels) > 1:
        own = [likely[0] if each == name else each for each in reading.labels]
        likely = [_survival_labels(header, reading) or BETWEEN.join(own)]
    repair: dict[str, Any] = {key: likely[0]} if likely else {}
    named = [spelled(**{key: each}) for each in likely or ["NAME"]]
    way = f"Name it: {', or '.join(named)}"
    clients = roles.by_name("client_column", header)
    if key != "client_column" and clients and reading.client_column not in header:
        repair["client_column"] = clients[0]
        way += f". The column of the clients may be missing as well: {spelled(client_column=clients[0])}"
    several = name.split(BETWEEN)
    if key == "label_column" and len(several) > 1 and {*several} <= {*header}:
        survival = (*several,) == roles.survival_columns(header)
        repair = {"task": SURVIVAL if survival else MULTILABEL}
        way = f"Name their task: {spelled(**repair)}"
    return DataFault(
        f"{key} must be one of the {len(header)} columns of {path}; got {name!r}.",
        f"{way}.",
        **repair,
    )
