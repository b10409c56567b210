"""A described table as a source, or all its faults at once with a script of pandas that repairs them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.data import arrays, preprocessing
from fl_core.data.columns import ColumnTable
from fl_core.data.faults import DataFault, Way
from fl_core.data.names import Names, is_mark, is_number, nearly_equal
from fl_core.data.reading import EARLIER, PLAIN, Reading
from fl_core.data.sources import Source, encode
from fl_core.data.table.describe import (
    LEFT_OUT,
    MOST_OTHERS,
    NUMBER,
    REFUSED,
    STRAY,
    WORDS,
    Described,
    are_marks,
    binds_rows,
    by_clients,
    dates_fault,
    dropping,
    forms_fault,
    gives_away,
    identifies,
    is_named_as_identifier,
    mark_of_nines,
    measures_fault,
    outside_fences,
    readings_fault,
    roles_of,
    spellings_fault,
    take,
    unlike_clients,
    words_of,
)
from fl_core.data.table.read import NAMELESS, Opened, open_table
from fl_core.data.values import (
    Array,
    Bools,
    Cells,
    fault_where,
    is_marked,
    lacks_value,
    numbers,
    text_of,
    texts_of,
)
from fl_core.errors import UsageError, listing, plural, spelled, warn
from fl_core.models.tokens import Tokenizer
from fl_core.rows import CLASSIFICATION, MULTILABEL

ROWS = 1024
"""Rows that are written together."""
MOST_NUMBERS, MOST_CLASSES = 20, 100
"""The maximum numbers of different numbers and of different words that labels may have.

Labels with more are refused, unless their column is among the ``categories``."""
FEW_CLASSES = 10
"""The maximum number of classes whose words look like dates or measurements."""
TEXTS = (".csv", ".tsv")
"""Suffixes of the files to which the setting ``csv`` applies."""
RARE = 0.05
"""Share of rows with a label of another kind below which leaving them out is proposed."""
COMPOSED = "table.columns = table.columns.str.normalize('NFC')"
"""The line of pandas that gives names of columns Unicode's composed form."""


class Findings(UsageError):
    """All faults of a table, a line each with its repair.

    Attributes:
        source: the samples of the table, or None if there are faults.
        faults: the faults in the order in which they were found.
        table: the role or kind of each column.
        notes: warnings of reading the table.
        lines: a heading, and a line for each fault.
        opened: the table as it was read, or None if it could not be opened.
        reading: the settings, with changes that repair faults without a line of pandas.
        settings: these settings as the caller types them.
        error: the fault if there is exactly one, or otherwise this object.
    """

    def __init__(
        self,
        data: Path | pd.DataFrame,
        reading: Reading,
        faults: Sequence[UsageError],
        source: Source | None,
        table: ColumnTable,
        opened: Opened | None,
        notes: Sequence[str],
    ) -> None:
        self.source = source
        self.faults = faults
        self.table = table
        self.notes = notes
        self.error = faults[0] if len(faults) == 1 else self
        self.reading = replace(reading, **proposed(reading, faults))
        self.opened = opened
        settings, name = self._changed(), "data"
        if isinstance(data, Path):
            name = str(data)
            settings = {"dataset": name, **settings}
        self.settings = spelled(**settings)
        self.lines = [
            f"{name} must be a tidy table; got {plural(len(faults), 'fault')}:",
            *(f"  {number}. {fault}" for number, fault in enumerate(faults, 1)),
        ]
        super().__init__("\n".join(self.lines))

    def _changed(self) -> dict[str, Any]:
        """Return the settings other than the defaults.

        If a label column is not in the table, ``label_column`` is the placeholder
        ``COLUMN``.
        """
        settings = self.reading.changed
        labels = {*self.reading.labels}
        if self.opened is not None and not labels <= {*self.opened.header}:
            settings = {**settings, "label_column": "COLUMN"}
        return settings

    @property
    def repairs(self) -> list[str]:
        """Return the lines of pandas of all faults, each once, in their order.

        If there are any and a column's name is not ASCII, :data:`COMPOSED` is the
        first.
        """
        lines = [getattr(fault, "line", "") for fault in self.faults]
        distinct = [line for line in dict.fromkeys(lines) if line]
        if distinct and self.opened and not "".join(self.opened.header).isascii():
            distinct.insert(0, COMPOSED)
        return distinct

    def settings_of(self, tidy: Path) -> str:
        """Return the settings for the file that the script writes, as the caller types them.

        Args:
            tidy: the path of that file.
        """
        settings = {"dataset": str(tidy), **self._changed()}
        settings.pop("csv", None)
        dropped = " ".join(line for line in self.repairs if ".drop(" in line)
        names = settings.pop("columns", None) or []
        if columns := [name for name in names if repr(name) not in dropped]:
            settings["columns"] = columns
        return spelled(**settings)

    def script(self, out: str) -> str:
        """Return a script that reads the files, repairs them line by line, and writes a tidy file.

        The files must have been opened: ``opened`` is not None.

        Args:
            out: the file that it writes.
        """
        assert self.opened is not None
        sources, client = self.opened.sources, self.opened.client
        lines = ["import pandas as pd", ""]
        if client:
            parts = [f"    {path.stem!r}: {read}," for path, read in sources.items()]
            joined = f"pd.concat(tables, names=[{client!r}]).reset_index(level=0)"
            lines += ["tables = {", *parts, "}", f"table = {joined}"]
        else:
            lines += [f"table = {read}" for read in sources.values()]
        lines += [line for line in self.repairs if "pd.read_csv" not in line]
        lines.append(f"table.to_csv({out!r}, index=False)")
        return "\n".join(lines) + "\n"


def proposed(reading: Reading, faults: Sequence[UsageError]) -> dict[str, Any]:
    """Return the settings that faults without a line of pandas propose, by name.

    A list of names has the earlier ones of ``reading`` first.
    """
    settings: dict[str, Any] = {}
    for fault in faults:
        if not isinstance(fault, DataFault) or fault.line:
            continue
        for key, value in fault.repair.items():
            if isinstance(value, list):
                earlier = settings.get(key) or getattr(reading, key) or []
                value = list(dict.fromkeys([*earlier, *value]))
            settings[key] = value
    return settings


def find_faults(
    data: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> Findings:
    """Read a table, and return findings with the source that it makes, or with all its faults.

    Faults and warnings are recorded in the result, and not raised.

    >>> frame = pd.DataFrame({"client": "a", "age": range(50, 110), "label": [*"01" * 29, "x1", "0"]})
    >>> (fault,) = find_faults(frame, Reading(columns=["age"])).faults
    >>> print(fault)
    the table, column 'label', row 58 (rows count from 0): labels must be numbers or words; got 'x1' (1 of 60 rows)...

    Args:
        data: the path of a table, a .jsonl file or several tables, or a DataFrame.
        reading: the settings.
        name: name of the dataset. Empty means the path, or ``the table`` for one in
            memory.
    """
    table = _Table(data, reading)
    source = None
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            source = table.read(name)
        except UsageError as error:
            table.faults.append(error)
    messages = list(dict.fromkeys(str(note.message) for note in notes))
    shown = table.shown()
    return Findings(data, reading, table.faults, source, shown, table.opened, messages)


def read_table(
    data: Path | pd.DataFrame, reading: Reading = PLAIN, name: str = ""
) -> Source:
    """Read a tidy table, or refuse it with all its faults.

    Samples are features [n, d] in the order of their columns, or texts. Classes are whole numbers or words.

    Args:
        data: the path of a table, a .jsonl file or several tables, or a DataFrame.
        reading: the settings.
        name: name of the dataset. Empty means the path, or ``the table`` for one in
            memory.

    Raises:
        UsageError: the table's only fault, or :class:`Findings` for several.
    """
    findings = find_faults(data, reading, name)
    if findings.source is None:
        raise findings.error
    for note in findings.notes:
        warn(note)
    return findings.source


class _Table:
    """A table while it is read: the descriptions of its columns, and its faults.

    Attributes:
        data: the path of the table, or the table itself.
        how: the settings, which never change.
        faults: the faults so far.
        opened: the table as it was opened, or None before :meth:`read` or if that
            failed.
        columns: the description of each column, by name.
        texts: the cells of label columns of text, by name, as far as they are known.
        source: the samples, as far as they are known.
    """

    def __init__(self, data: Path | pd.DataFrame, reading: Reading) -> None:
        self.data = data
        self.how = reading
        self.faults: list[UsageError] = []
        self.opened: Opened | None = None
        self.columns: dict[str, Described] = {}
        self.texts: dict[str, pd.Categorical] = {}
        self.source = Source("", np.empty((0, 0)), np.empty(0), ())

    def read(self, name: str) -> Source | None:
        """Return the source, or None if there are faults.

        Args:
            name: name of the dataset. Empty means that of the table.

        Raises:
            UsageError: a fault after which nothing else can be checked.
        """
        opened = self.opened = open_table(self.data, self.how)
        self.frame, self.where, self.place = opened.frame, opened.where, opened.place
        self.faults += opened.faults
        self.roles, faults = roles_of(opened.header, self.how, opened.where)
        self.faults += faults
        labelled = self._check_labelled()
        self.columns = {k: self._described(k) for k in opened.header}
        self._add_targets(labelled)
        self._add_clients()
        self._refuse_identifiers()
        self._refuse_gaps()
        self._add_faults()
        used = {k: column for k, column in self.columns.items() if column.is_feature}
        if "text" in self.roles.values():
            self._add_texts()
        elif not used and not self.faults:
            raise UsageError(
                f"{self.where}: there must be a column of features; got only {listing(opened.header)}. Add one."
            )
        if self.faults:
            return None
        self._mark(used)
        source = replace(self.source, name=name or self.where, table=self.shown())
        if not used:
            return source
        stored = self.frame[list(used)]
        if isinstance(self.data, Path) and (stored.dtypes == np.float64).all():
            # pandas has made these numbers of a file, and nothing changes them
            return replace(source, x=stored.to_numpy(), columns=tuple(used))
        return _with_features(source, used)

    def shown(self) -> ColumnTable:
        """Return the table of columns for display. Nearly equal names get a remark."""
        for group in nearly_equal(self.columns):
            for name in group:
                others = [repr(other) for other in group if other != name]
                oddity = f"next to {listing(others)}"
                if oddity not in self.columns[name].odd:
                    self.columns[name].odd.append(oddity)
        return ColumnTable(tuple(column.column() for column in self.columns.values()))

    # --- faults ----------------------------------------------------------------------------------------------------

    def refuse(self, fault: DataFault, *names: str) -> None:
        """Record a fault of some columns, with its place in the table.

        A repair that leaves the first column out leaves out all. Settings of the repair
        that list columns name those of the present settings, and then all of these.
        """
        ways = []
        for say, keys in fault.ways:
            settings = dict(keys)
            for key in keys.keys() & vars(PLAIN).keys():
                if isinstance(keys[key], list):
                    settings[key] = [*(getattr(self.how, key) or ()), *names]
            ways.append((say, settings))
        line = fault.line
        if line == dropping(names[:1]):
            line = dropping(names)
        what = "column"
        if len(names) > 1:
            what = "columns"
        shown = listing(map(repr, names), 4)
        where = f"{self.where}, {what} {shown}"
        whole = DataFault(fault.rule, *ways, row=fault.row, line=line)
        self.faults.append(whole.at(where, self.place))

    @contextmanager
    def checked(self, name: str) -> Iterator[None]:
        """Record a :class:`DataFault` of the ``with`` block as a fault of a column.

        The block then ends without an error.
        """
        try:
            yield
        except DataFault as fault:
            self.refuse(fault, name)

    def _add_faults(self) -> None:
        """Add the faults of features. Columns that have one fault for one reason are named together."""
        groups: dict[Any, list[str]] = {}
        for name, column in self.columns.items():
            fault = column.fault
            if fault is None or column.kind in self.roles.values():
                continue
            key: Any = name
            if fault.line in ("", dropping([name])):
                sentences = [say for say, _ in fault.ways]
                key = fault.rule.partition(";")[0], *sentences
            groups.setdefault(key, []).append(name)
        for names in groups.values():
            fault = self.columns[names[0]].fault
            assert fault is not None
            self.refuse(fault, *names)

    # --- columns ---------------------------------------------------------------------------------------------------

    def _described(self, name: str) -> Described:
        """Return the description of a column.

        One that has a role is text, unless it is left out or a label of numbers. Faults
        of such text are recorded at once. If it cannot be read, it has no cells.
        """
        column, role = self.frame[name], self.roles.get(name, "")
        if role == LEFT_OUT:
            return Described(name, LEFT_OUT, np.full(len(column), np.nan))
        if not role or (role == "label" and self.how.predicts_numbers):
            described = take(name, column, self.how)
        else:
            described = Described(name, role, np.empty(0))
            with self.checked(name):
                cells = self.texts.get(name)
                if cells is None:
                    cells = texts_of(column)
                described = Described(name, role, cells)
        cells = described.cells
        if not isinstance(cells, pd.Categorical):
            return described
        fault = forms_fault(name, column, cells)
        if described.kind != role and name not in (self.how.categories or ()):
            fault = fault or readings_fault(name, column, cells, self._csv())
        if fault and described.kind == role:
            self.refuse(fault, name)
        elif fault:
            described.refused(fault)
        return described

    def _csv(self) -> dict[str, Any] | None:
        """Return the options of pandas for a text file, or None for a table of another kind."""
        if isinstance(self.data, Path) and self.data.suffix.lower() in TEXTS:
            options = self.how.csv or {}
            return {key: options[key] for key in options if key != EARLIER}
        return None

    # --- labels ----------------------------------------------------------------------------------------------------

    def _check_labelled(self) -> bool:
        """Return whether each of the remaining rows has its labels.

        Rows without are a fault, or are left out with a warning for
        ``drop_missing_labels``.

        Raises:
            UsageError: each row lacks a label.
        """
        reading, frame = self.how, self.frame
        lacking = np.zeros(len(frame), dtype=bool)
        for name in filter(frame.__contains__, reading.labels):
            unlabelled = frame[name].isna().to_numpy()
            marks: list[str] = []
            if not pd.api.types.is_numeric_dtype(frame[name]):
                with suppress(DataFault):  # its description has the fault
                    cells = self.texts[name] = texts_of(frame[name])
                    unlabelled = unlabelled | _lacks_name(name, cells, reading)
                    marks = sorted({word for word in cells[unlabelled] if word.strip()})
            lacking |= unlabelled
            if unlabelled.any() and not reading.drop_missing_labels:
                got = listing(map(repr, marks), 3) or "an empty cell"
                ways: list[Way] = [
                    ("Leave these rows out", {"drop_missing_labels": True})
                ]
                if marks and reading.task == CLASSIFICATION:
                    ways.append((f"Keep {got} as a class", {"categories": [name]}))
                self.refuse(fault_where(unlabelled, got, arrays.LABELLED, *ways), name)
        if lacking.all():
            raise UsageError(
                f"{self.where}, column {reading.label_column!r}: each sample must have a label; got none at all. "
                "Check the label column."
            )
        if lacking.any() and reading.drop_missing_labels:
            warn(
                f"{self.where}: {lacking.sum():,} of {len(lacking):,} rows have no label and are left out"
            )
            rows, place = np.flatnonzero(~lacking), self.place
            self.frame, self.texts = frame.iloc[rows], {}
            self.place = lambda row: place(int(rows[row]))  # as before
            return True
        return not lacking.any()

    def _add_targets(self, labelled: bool) -> None:
        """Add the targets and the names of the classes, if the label columns are there and have no fault."""
        reading, count = self.how, len(self.faults)
        labels = [self.columns[name] for name in reading.labels if name in self.columns]
        if len(labels) < len(reading.labels):
            return
        if any(len(column.cells) < len(self.frame) for column in labels):
            return  # they could not be read
        for column in labels:
            fault = class_fault(column, reading)
            if fault:
                self.refuse(fault, column.name)
            column.kind, column.fault = "label", None
        if len(self.faults) > count or not labelled:
            return
        with self.checked(reading.label_column):
            y: Any = labels[0].cells
            names: Sequence[str] | None = None
            if len(labels) > 1:
                y = np.column_stack([column.cells for column in labels])
            if reading.task == MULTILABEL:
                names = reading.labels
            elif reading.labels[0] in (reading.categories or ()):
                words = words_of(y)
                names = sorted(words)
                if all(map(is_number, words)):
                    names.sort(key=float)
            y, classes = arrays.answers(y, reading.task, names)
            self.source = replace(self.source, y=y, classes=classes)

    # --- clients, groups and identifiers ---------------------------------------------------------------------------

    def _add_clients(self) -> None:
        """Add the clients and groups of the rows, or record a fault in their names."""
        for name, role in self.roles.items():
            if role not in ("client", "group") or not len(self.columns[name].cells):
                continue
            cells = texts_of(self.columns[name].cells)
            how = self.how
            if self.opened and name == self.opened.client:
                how = replace(how, categories=[name])  # a file has a name
            if fault := _name_fault(name, cells, role, how):
                self.refuse(fault, name)
                continue
            if role == "client":
                with self.checked(name):
                    owner, names = arrays.owners(cells)
                    self.source = replace(self.source, owner=owner, owner_names=names)
        group = self.columns.get(self.how.group_column or "")
        if group is not None and len(group.cells):
            # a name at two clients is two groups
            groups = by_clients(group.cells, self.source.owner)
            self.source = replace(self.source, groups=groups)

    def _refuse_identifiers(self) -> None:
        """Refuse features that number the rows, or what several rows belong to.

        Features that the settings name in ``columns`` are not examined. An identifier
        that is left out gives a warning if its values repeat and no group column is
        named.
        """
        reading, owner = self.how, self.source.owner
        ids = pd.DataFrame()
        for name, column in self.columns.items():
            is_named = name in (reading.columns or ()) or name.startswith(NAMELESS)
            named = column.kind == REFUSED and is_named_as_identifier(name)
            if (
                (column.is_feature or named)
                and not is_named
                and identifies(column, owner)
            ):
                ids[name] = by_clients(column.cells, owner)
        repeating = [
            k for k in ids if not reading.group_column and ids[k].duplicated().any()
        ]
        whole = [
            k for k in repeating if is_named_as_identifier(k) and ids[k].min() >= 0
        ]
        outer = [  # rows of one value of any other have one value of it
            k
            for k in whole
            if all((ids[k].groupby(ids[j]).nunique() == 1).all() for j in whole)
        ]
        for name in ids:
            column = self.columns[name]
            column.odd.append("like an identifier")
            say, got = "Leave it out", "values like an identifier's"
            if name in repeating:
                say = "Leave it out; its rows may then lie in training and test alike"
                row = int(np.argmax(ids[name].duplicated() & (ids[name] >= 0)))
                count = int((ids[name] == ids[name][row]).sum())
                value_text = text_of(column.cells[row]).strip()
                got = f"{value_text!r} in {plural(count, 'row')}, like an identifier"
            ways: list[Way | str] = [(say, {"exclude_columns": [name]})]
            if name in outer[:1]:
                ways.insert(0, ("Keep its rows in one split", {"group_column": name}))
            ways.append("Name it in columns, with all others, to use it.")
            rule = f"features must say something about a new sample; got {got}."
            column.refused(DataFault(rule, *ways))
        for name, role in self.roles.items():
            if (
                role != LEFT_OUT
                or reading.group_column
                or not is_named_as_identifier(name)
            ):
                continue
            if self.frame[name].duplicated().any():
                self.columns[name].odd.append("its rows may be in training and test")
                warn(
                    f"{self.where}: rows with one {name!r} may lie in training and test alike, so scores may be "
                    f"too good. Keep them together: {spelled(group_column=name)}"
                )

    # --- missing values --------------------------------------------------------------------------------------------

    def _refuse_gaps(self) -> None:
        """Leave out columns without a value at some client, and refuse other gaps.

        With ``fill_missing_columns`` the columns stay. Missing numbers are no fault if
        ``impute`` fills them. A column of numbers without any value at any client is
        always refused. Missing words are never a fault.
        """
        reading, source = self.how, self.source
        holes: dict[str, Bools] = {}
        for name, column in self.columns.items():
            lacking = column.lacking
            if column.emptied is not None:
                lacking = lacking | column.emptied
            if lacking.any() and (column.is_feature or column.kind == REFUSED):
                holes[name] = lacking
        lost: list[str] = []
        if source.owner is not None and holes:
            empty = pd.DataFrame(holes).groupby(source.owner).all()
            lost = list(empty.columns[empty.any() & ~empty.all()])
        filled = reading.fill_missing_columns
        for name in lost:
            clients = [source.owner_names[k] for k in empty.index[empty[name]]]
            done = "filled" if filled else "left out"
            self.columns[name].odd.append(f"no value at {listing(clients, 4)}: {done}")
        if lost and not filled:
            fill = spelled(fill_missing_columns=True, impute="median")
            shown = listing(map(repr, lost), 6)
            warn(
                f"{self.where}: columns without a value at some client are left out: {shown}. To fill them: {fill}"
            )
            for name in lost:
                self.columns[name].kind, self.columns[name].fault = LEFT_OUT, None
                del holes[name]
        missing = []
        for name, lacking in holes.items():
            column = self.columns[name]
            becomes = column.fault is not None and "to_" in column.fault.line
            if column.kind == WORDS or (column.kind == REFUSED and not becomes):
                continue
            if lacking.all():
                rule = "the column must have a value; got none."
                column.refused(DataFault(rule, line=dropping([name])))
            elif not reading.may_be_missing:
                missing.append(name)
        if missing:
            ways: list[Way] = [
                ("Fill empty cells, such as", {"impute": "median"}),
                ("Leave these columns out", {"exclude_columns": missing}),
            ]
            rule = "the value must not be missing"
            self.refuse(fault_where(holes[missing[0]], "none", rule, *ways), *missing)

    # --- the result ------------------------------------------------------------------------------------------------

    def _mark(self, used: Mapping[str, Described]) -> None:
        """Add what is odd about features and labels to their descriptions.

        Args:
            used: the columns of features, by name.
        """
        source, reading = self.source, self.how
        numeric = {k: other.cells for k, other in used.items() if other.kind == NUMBER}
        for name, column in self.columns.items():
            cells, feature = column.cells, name in used
            if not feature and column.kind != "label":
                continue
            if feature and _is_constant(column):
                column.odd = column.odd or ["one value only"]
                continue
            oddities: list[str] = []
            if name in numeric:
                outside = outside_fences(numeric[name], source.owner)
                oddities.append(self._marking(column) or outside)
            if (
                feature
                and source.task == CLASSIFICATION
                and gives_away(cells, source.y)
            ):
                oddities.append("gives the label away")
            if source.owner is not None:
                oddities.append(unlike_clients(cells, source.owner, source.owner_names))
            if (
                feature
                and not reading.group_column
                and name not in (reading.categories or ())
            ):
                others = [other for key, other in numeric.items() if key != name]
                oddities.append(self._binding(name, cells, others[:MOST_OTHERS]))
            column.odd += [text for text in oddities if text]

    def _marking(self, column: Described) -> str:
        """Return a remark on a number such as -999 that may mark missing values.

        A warning says the same. Without such a number the remark is empty.
        """
        mark, name = mark_of_nines(column), column.name
        if mark is None:
            return ""
        count = plural(int(np.count_nonzero(column.cells == mark)), "cell")
        way = f"table[{name!r}] = table[{name!r}].replace({mark:.0f}, None)"
        options = self._csv()
        if options is not None:
            marks = [*options.get("na_values", ()), f"{mark:.0f}"]
            way = spelled(csv={**options, "na_values": ",".join(map(str, marks))})
        warn(
            f"{self.where}, column {name!r}: {mark:.0f} in {count} is far from the others, and may mark missing "
            f"values. Say it: {way}"
        )
        return f"{mark:.0f} far from the others in {count}: missing?"

    def _binding(self, name: str, cells: Cells, others: Sequence[Any]) -> str:
        """Return a remark if rows with the same value of a column belong together.

        A warning says the same. Otherwise the remark is empty.
        """
        if not binds_rows(cells, self.source.y, others, self.source.owner):
            return ""
        warn(
            f"{self.where}: rows with one {name!r} belong together, as those of a patient do, and may lie in "
            f"training and test alike. Keep them together: {spelled(group_column=name)}"
        )
        return "its rows belong together: a patient's?"

    def _add_texts(self) -> None:
        """Add the codes of texts, and warn of columns of numbers that nothing reads."""
        name = self.how.text_column
        numeric = self.frame.select_dtypes(["number", "bool"])
        left_out = [
            repr(column) for column in numeric if self.roles[column] == LEFT_OUT
        ]
        if left_out:
            warn(
                f"{self.where}: a model of texts reads no other columns; left out are {listing(left_out, 6)}"
            )
        with self.checked(name):
            folder = self.how.tokenizer
            tokenizer = Tokenizer.read(folder) if folder else None
            texts = [*texts_of(self.columns[name].cells)]
            x, words = encode(texts, where=self.where, tokenizer=tokenizer)
            self.source = replace(self.source, x=x, words=words, tokenizer=tokenizer)


def _is_constant(column: Described) -> bool:
    if not isinstance(column.cells, np.ndarray):
        return len(words_of(column.cells)) < 2
    # most columns end at the first rows
    parts = column.cells[:1000], column.cells
    return all(not np.fmin.reduce(part) < np.fmax.reduce(part) for part in parts)


def _with_features(source: Source, used: Mapping[str, Described]) -> Source:
    """Return the source with its features, float64 [n, d].

    A word is stored as its position among the sorted words of its column.
    """
    words: list[Names] = []
    features: list[Array] = []
    for column in used.values():
        cells: Any = column.cells
        words.append(())
        if column.kind == WORDS:
            words[-1] = words_of(cells)
            cells = preprocessing.codes(cells, words[-1])
        features.append(cells)
    x = np.empty((len(features[0]), len(features)))
    for start in range(0, len(x), ROWS):  # these stay in the cache
        for k, cells in enumerate(features):
            x[start : start + ROWS, k] = cells[start : start + ROWS]
    categories = tuple(words) if any(words) else ()
    return replace(source, x=x, columns=tuple(used), categories=categories)


# --- faults of labels and names ------------------------------------------------------------------------------------


def _without(name: str, words: Sequence[str]) -> str:
    """Return the line that leaves out rows with some words in a column."""
    words = list(words)
    return f"table = table[~table[{name!r}].astype(str).isin({words!r})]"


def _lacks_name(name: str, cells: pd.Categorical, how: Reading) -> Bools:
    """Return whether each label, client or group is missing, bool [n].

    A mark such as NA is missing, too, unless the column is among the ``categories``.
    """
    if name in (how.categories or ()):
        return lacks_value(cells)
    return is_marked(cells)


def _name_fault(
    name: str, cells: pd.Categorical, role: str, how: Reading
) -> DataFault | None:
    """Return the fault of names of clients or groups, or None.

    A name must not be missing, nor differ from another by case or blanks only.
    """
    unnamed = _lacks_name(name, cells, how)
    if not unnamed.any():
        return spellings_fault(name, cells.categories, f"{role}s")
    marks = sorted({word for word in cells[unnamed] if word.strip()})
    got = listing(map(repr, marks), 3) or "an empty cell"
    line = f"table = table.dropna(subset=[{name!r}])"
    ways: list[Way] = []
    if marks:
        line = _without(name, marks)
        ways = [(f"Keep {got} as a name", {"categories": [name]})]
    return fault_where(unnamed, got, f"each row must have a {role}", *ways, line=line)


def _target_fault(column: Described) -> DataFault | None:
    """Return the fault of a label that must be numbers, or None."""
    fault, name = column.fault, column.name
    if fault is not None and fault.line and fault.line != dropping([name]):
        return DataFault(fault.rule, row=fault.row, line=fault.line)
    if fault is not None and len(fault.ways) > 1 and fault.line:
        return DataFault(fault.rule, *fault.ways)  # each way has its reading
    if column.kind == NUMBER:
        return None
    words = [word for word in words_of(column.cells) if word]
    strays = [word for word in words if not is_number(word)]
    got = listing(map(repr, words), 3)
    rule = (
        f"the cell must be a number; got {got}. Write numbers. An event is 1, or 0 if it was censored. Each of several "
        "labels is 1 or 0."
    )
    if len(words) == 2:
        codes = {word: k for k, word in enumerate(words)}
        return DataFault(rule, line=f"table[{name!r}] = table[{name!r}].map({codes!r})")
    if len(strays) <= STRAY and len(strays) < len(words):
        return DataFault(rule, line=_without(name, strays))
    return DataFault(rule, "Name another label.")


def class_fault(column: Described, how: Reading) -> DataFault | None:
    """Return the fault of a label column whose cells are no classes, or None.

    Classes are few. They are all whole numbers, or none of them is a number. A column
    in ``categories`` may have any classes. If the task predicts numbers, the cells must
    be numbers instead.

    >>> cells = pd.Categorical(["4", "f", "r", "4"])
    >>> print(class_fault(Described("label", "label", cells), Reading()))
    labels must be numbers or words; got 'f' (2 of 4 rows). Keep each as a class: categories=['label'].
    """
    name, cells = column.name, texts_of(column.cells)
    if how.predicts_numbers:
        return _target_fault(column)
    if name in (how.categories or ()):
        return None
    if fault := spellings_fault(name, cells.categories, "labels"):
        return fault
    keep: Way = ("Keep each as a class", {"categories": [name]})
    words = [word for word in words_of(cells) if not is_mark(word)]
    numeric = [word for word in words if is_number(word)]
    texts = cells.astype(object)

    def refused(
        strays: Sequence[str], rule: str, *ways: Way, line: str = ""
    ) -> DataFault:
        """Return the fault of some labels."""
        bad = np.isin(texts, strays)
        return fault_where(bad, repr(strays[0]), rule, *ways, keep, line=line)

    if numeric and len(numeric) < len(words):
        strays = [word for word in words if word not in numeric]
        share = np.isin(texts, strays).mean()
        line, rule = "", "labels must be numbers or words"
        if share < RARE and are_marks(strays):
            line = _without(name, strays)
        if share > 0.5:
            strays = numeric
        return refused(strays, rule, line=line)
    if not numeric:
        doubtful = dates_fault(name, words) or measures_fault(name, cells)
        if len(words) <= (FEW_CLASSES if doubtful else MOST_CLASSES):
            return None
        rule = f"classes must be few; got {len(words):,} different words."
        return DataFault(rule, ("Name another label, or keep each", keep[1]))
    values = np.array([float(word) for word in words])
    parts = [word for word in words if float(word) % 1]
    if parts:
        return refused(parts, "labels must be whole numbers or words", arrays.PREDICT)
    if not arrays.of_digits(words) and np.abs(values).max() >= 2**53:
        return refused(words, "labels must be whole numbers below 2**53, or words")
    try:
        arrays.check_spellings("labels", words)
    except DataFault as error:
        line = f"table[{name!r}] = pd.to_numeric(table[{name!r}])"
        return DataFault(error.rule, keep, line=line)
    if len(words) > MOST_NUMBERS:
        rule = f"classes must be few; got {len(words):,} different numbers."
        return DataFault(rule, arrays.PREDICT, keep)
    order = np.argsort(values)
    for end, others in ((order[0], values[order[1:]]), (order[-1], values[order[:-1]])):
        is_far = len(others) > 1 and np.abs(others - values[end]).min() > np.ptp(others)
        if is_far and {*text_of(values[end])} <= {*"-9"}:
            rule = "labels must be classes, not marks of a missing one"
            marks = [words[end]]
            return refused(marks, rule, line=_without(name, marks))
    return None


# --- new samples ---------------------------------------------------------------------------------------------------


def new_rows(
    opened: Opened,
    columns: Sequence[str],
    words: Mapping[str, Names],
    way: str,
) -> Array:
    """Return new rows [n, d] of a trained model's columns: numbers, and for words their index among the column's words.

    A missing column counts as one of missing cells. Missing words are a category of
    their own, if training samples had them.

    Args:
        opened: the table.
        columns: names of the d columns, in order.
        words: the words of each column of words, by its name.
        way: advice on how to write new samples, for errors.

    Raises:
        DataFault: a cell is no number, a column is written in another form, such as
            dates, or a column has no word at all and no training sample lacked one. The
            message names the column, and the first bad row where there is one.
    """
    features: list[Array] = []
    named = replace(PLAIN, columns=list(columns))
    for name in columns:
        place = f"{opened.where}, column {name!r}"
        try:
            column = pd.Series(np.full(len(opened.frame), np.nan))
            if name in opened.frame:
                column = opened.frame[name]
            if name in words:
                cells = texts_of(column)
                if "" not in words[name] and lacks_value(cells).all():
                    some = listing(map(repr, words[name]), 4)
                    rule = f"the column must have words of training samples, such as {some}; got none."
                    raise DataFault(rule, "Add them, or train without the column.")
                features.append(preprocessing.codes(cells, words[name]))
            elif name not in opened.frame:
                features.append(column.to_numpy())
            else:
                described = take(name, column, named)
                if described.fault is not None and described.kind != WORDS:
                    raise DataFault(described.fault.rule, way, row=described.fault.row)
                features.append(numbers(described.cells, way))
        except DataFault as fault:
            raise fault.at(place, opened.place) from fault
    return np.column_stack(features)
