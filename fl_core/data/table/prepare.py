"""A described table as a source, or all its faults at once with a script of pandas that repairs them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_core.data import arrays, preprocessing
from fl_core.data.columns import ColumnTable
from fl_core.data.faults import DataFault, Way
from fl_core.data.names import Names, is_mark, is_number, nearly_equal
from fl_core.data.reading import PLAIN, Reading
from fl_core.data.sources import Source, encode
from fl_core.data.table.describe import (
    LEFT_OUT,
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
    outside_fences,
    roles_of,
    spelled_numbers,
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

ROWS = 4096
"""Rows that are written together."""
MOST_NUMBERS, MOST_CLASSES = 20, 100
"""Different numbers, or words, up to which labels are classes without being asked about."""
RARE = 0.05
"""Share of rows with a label of another kind below which leaving them out is proposed."""
FEW_CLASSES = 10
"""The number of classes that are few, even if they look like numbers or dates."""


COMPOSED = "table.columns = table.columns.str.normalize('NFC')"
"""The line that gives names of columns the form in which they are typed."""


class Findings(UsageError):
    """All that is wrong with a table, one line each with its repair.

    Attributes:
        source: the data, or None if there are faults.
        faults: in the order in which they were found.
        table: what each column is taken as.
        lines: a heading, and the faults.
        settings: as the caller types them, with those that faults propose.
        notes: warnings of reading the table.
        error: the only fault, or all of them.
        sources: how Python reads each file. client: the column that the names of several files make.
        renamed: whether names of columns had another form of Unicode.
    """

    def __init__(
        self,
        data: Path | pd.DataFrame,
        reading: Reading,
        faults: Sequence[UsageError],
        source: Source | None = None,
        table: ColumnTable | None = None,
        opened: Opened | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.faults = faults
        self.table = table or ColumnTable()
        self.notes = notes
        self.sources = {} if opened is None else opened.sources
        self.client = "" if opened is None else opened.client
        self.renamed = opened is not None and opened.renamed
        self.error = faults[0] if len(faults) == 1 else self
        self.reading = replace(reading, **proposed(reading, faults))
        given, name = self.reading.changed, "data"
        if isinstance(data, Path):
            name = str(data)
            given = {"dataset": name, **given}
        self.settings = spelled(**given)
        self.lines = [
            f"{name} must be a tidy table; got {plural(len(faults), 'fault')}:",
            *(f"  {number}. {fault}" for number, fault in enumerate(faults, 1)),
        ]
        super().__init__("\n".join(self.lines))

    @property
    def repairs(self) -> list[str]:
        """Return the lines of pandas of all faults."""
        lines = (getattr(fault, "line", "") for fault in self.faults)
        found = list(dict.fromkeys(line for line in lines if line))
        return [COMPOSED, *found] if found and self.renamed else found

    def settings_of(self, tidy: Path) -> str:
        """Return the settings for the file that the script writes. Its columns are those of the repaired table."""
        given = {"dataset": str(tidy), **self.reading.changed}
        given.pop("csv", None)
        dropped = {line for line in self.repairs if ".drop(" in line}
        for key in ("exclude_columns", "columns"):
            names = given.get(key)
            if names:
                kept = [
                    name
                    for name in names
                    if not any(repr(name) in line for line in dropped)
                ]
                given.pop(key)
                if kept:
                    given[key] = kept
        return spelled(**given)

    def script(self, out: str) -> str:
        """Return a script that reads the files, repairs them line by line, and writes a tidy file.

        Args:
            out: the file that it writes.
        """
        reads = list(self.sources.values())
        lines = ["import pandas as pd", ""]
        if self.client:
            lines.append("tables = {")
            for path, read in self.sources.items():
                lines.append(f"    {path.stem!r}: {read},")
            lines.append("}")
            lines.append(
                f"table = pd.concat(tables, names=[{self.client!r}]).reset_index(level=0)"
            )
        else:
            lines.append(f"table = {reads[0]}")
        lines += [line for line in self.repairs if "pd.read_csv" not in line]
        lines.append(f"table.to_csv({out!r}, index=False)")
        return "\n".join(lines) + "\n"


def proposed(reading: Reading, faults: Sequence[UsageError]) -> dict[str, Any]:
    """Return the settings that faults without a line of pandas propose."""
    found: dict[str, Any] = {}
    for fault in faults:
        if getattr(fault, "line", ""):
            continue
        for key, value in getattr(fault, "repair", {}).items():
            if isinstance(value, list):
                given = found.get(key) or getattr(reading, key) or []
                value = list(dict.fromkeys([*given, *value]))
            found[key] = value
    return found


def find_faults(
    data: Path | pd.DataFrame, reading: Reading, name: str = ""
) -> Findings:
    """Read a table and describe its columns once, and build a source, or find all that is wrong.

    >>> frame = pd.DataFrame({"client": "a", "age": range(50, 110), "label": [*"01" * 29, "x1", "0"]})
    >>> (fault,) = find_faults(frame, Reading(columns=["age"])).faults
    >>> print(fault)
    the table, column 'label', row 58 (rows count from 0): labels must be numbers or words; got 'x1' (1 of 60 rows)...
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
    shown = table.shown()
    return Findings(data, reading, table.faults, source, shown, table.opened, said)


def read_table(
    data: Path | pd.DataFrame, reading: Reading = PLAIN, name: str = ""
) -> Source:
    """Read a tidy table, or refuse it with all its faults.

    Samples are features [n, d] in the order of their columns, or texts. Classes are whole numbers or words.

    Args:
        data: the path of a table, a .jsonl file or several tables, or a table in memory.
        name: of the dataset. The default is the path.

    Raises:
        UsageError: the only fault, or :class:`Findings`.
    """
    found = find_faults(data, reading, name)
    if found.source is None:
        raise found.error
    for note in found.notes:
        warn(note)
    return found.source


class _Table:
    """One description of a table. Its settings never change.

    Attributes:
        faults: so far.
        columns: the description of each column, by name.
        source: the samples, as far as they are known.
    """

    def __init__(self, data: Path | pd.DataFrame, reading: Reading) -> None:
        self.data = data
        self.how = reading
        self.faults: list[UsageError] = []
        self.opened: Opened | None = None
        self.columns: dict[str, Described] = {}
        self.source = Source("", np.empty((0, 0)), np.empty(0), ())
        self.owner: Array | None = None
        self.gone: list[str] = []

    def read(self, name: str) -> Source | None:
        """Return the data, or None if there are faults.

        Raises:
            UsageError: a fault without which nothing else can be said.
        """
        opened = self.opened = open_table(self.data, self.how)
        self.faults += opened.faults
        self.roles, faults = roles_of(opened.header, self.how, opened.where)
        self.faults += faults
        self._describe()
        self._targets()
        self._clients()
        self._identifiers()
        self._gaps()
        self._add_faults()
        used = {k: each for k, each in self.columns.items() if each.is_feature}
        if "text" in self.roles.values():
            self._texts()
        elif not used and not self.faults:
            raise UsageError(
                f"{opened.where}: there must be a column of features; got only {listing(opened.header)}. Add one."
            )
        if self.faults:
            return None
        self._mark(used)
        where = name or opened.where
        source = replace(self.source, name=where, table=self.shown())
        return _with_features(source, used) if used else source

    def shown(self) -> ColumnTable:
        """Return what is said of each column."""
        header = [] if self.opened is None else self.opened.header
        alike = {name: group for group in nearly_equal(header) for name in group}
        for name, column in self.columns.items():
            others = [repr(each) for each in alike.get(name, ()) if each != name]
            said = f"next to {listing(others)}"
            if others and said not in column.odd:
                column.odd.append(said)
        return ColumnTable(tuple(column.column() for column in self.columns.values()))

    # --- faults ----------------------------------------------------------------------------------------------------

    def refuse(self, name: str, fault: DataFault) -> None:
        """Keep the fault of a column, with its place."""
        assert self.opened is not None
        at = f"{self.opened.where}, column {name!r}"
        self.faults.append(fault.at(at, self.opened.place))

    @contextmanager
    def checked(self, name: str) -> Iterator[None]:
        """Keep the fault of a column instead of raising it."""
        try:
            yield
        except DataFault as fault:
            self.refuse(name, fault)

    def _add_faults(self) -> None:
        """Add the faults of features. Columns that have one fault for one reason are named together."""
        kinds: dict[str, list[Described]] = {}
        for column in self.columns.values():
            if column.fault is None or column.kind in self.roles.values():
                continue
            fault = column.fault
            joined = not fault.line or fault.line == dropping([column.name])
            says = [say for say, _ in fault.ways]
            key = f"{fault.rule.partition(';')[0]} {says}" if joined else column.name
            kinds.setdefault(key, []).append(column)
        for group in kinds.values():
            first = group[0].fault
            assert first is not None
            if len(group) == 1:
                self.refuse(group[0].name, first)
                continue
            names = [column.name for column in group]
            ways = []
            for say, keys in first.ways:
                lists = [key for key, value in keys.items() if isinstance(value, list)]
                named = {
                    key: [*(getattr(self.how, key) or ()), *names] for key in lists
                }
                ways.append((say, keys | named))
            line = dropping(names) if first.line else ""
            fault = DataFault(first.rule, *ways, row=first.row, line=line)
            assert self.opened is not None
            at = f"{self.opened.where}, columns {listing(map(repr, names), 4)}"
            self.faults.append(fault.at(at, self.opened.place))

    # --- features --------------------------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Describe each column, once."""
        assert self.opened is not None
        for name, column in self.opened.frame.items():
            role = self.roles.get(str(name), "")
            if role == LEFT_OUT:
                empty = np.full(len(column), np.nan)
                described = Described(str(name), LEFT_OUT, empty)
            elif role == "label" and self.how.predicts_numbers:
                described = take(str(name), column, self.how)
            elif role:
                described = Described(str(name), role, np.empty(0))
                with self.checked(str(name)):
                    described = Described(str(name), role, texts_of(column))
            else:
                described = take(str(name), column, self.how)
            cells, texts = described.cells, pd.api.types.is_string_dtype(column)
            if texts and isinstance(cells, pd.Categorical) and len(cells):
                fault = forms_fault(str(name), column, cells)
                if fault and role:
                    self.refuse(str(name), fault)
                elif fault:
                    described.kind, described.fault = REFUSED, fault
            self.columns[str(name)] = described

    def _keep_rows(self, kept: Bools) -> None:
        """Leave out rows. Messages name them as before."""
        assert self.opened is not None
        rows, place = np.flatnonzero(kept), self.opened.place
        self.opened.frame = self.opened.frame.iloc[rows]
        self.opened.place = lambda row: place(int(rows[row]))
        self.columns = {}
        self._describe()

    # --- labels ----------------------------------------------------------------------------------------------------

    def _targets(self) -> None:
        """Add the targets and the names of the classes, if the label columns are there."""
        how = self.how
        labels = [self.columns[name] for name in how.labels if name in self.columns]
        if len(labels) < len(how.labels):
            return
        lacking = np.zeros(len(labels[0].lacking), dtype=bool)
        for column in labels:
            own = column.lacking
            named = column.name in (how.categories or ())
            if isinstance(column.cells, pd.Categorical) and not named:
                own = own | is_marked(column.cells)
            lacking |= own
            if own.any() and not how.drop_missing_labels:
                self.refuse(column.name, _missing_label(column, own, how))
        if lacking.all():
            rule = "each sample must have a label; got none at all."
            raise UsageError(
                f"column {labels[0].name!r}: {rule} Check the label column."
            )
        if lacking.any() and how.drop_missing_labels:
            assert self.opened is not None
            warn(
                f"{self.opened.where}: {lacking.sum():,} of {len(lacking):,} rows have no label and are left out"
            )
            self._keep_rows(~lacking)
            labels = [self.columns[name] for name in how.labels]
        count = len(self.faults)
        made: list[Any] = []
        for column in labels:
            if how.predicts_numbers:
                if fault := _target_fault(column):
                    self.refuse(column.name, fault)
                column.kind, column.fault = "label", None
            elif fault := class_fault(column, how):
                self.refuse(column.name, fault)
            made.append(column.cells)
        if len(self.faults) > count or (lacking.any() and not how.drop_missing_labels):
            return
        with self.checked(how.label_column):
            y = made[0] if len(made) == 1 else np.column_stack(made)
            names: Sequence[str] | None = None
            if how.task == MULTILABEL:
                names = how.labels
            elif how.labels[0] in (how.categories or ()):
                words = words_of(y)
                numeric = all(map(is_number, words))
                names = sorted(words, key=float if numeric else str)
            y, classes = arrays.answers(y, how.task, names)
            self.source = replace(self.source, y=y, classes=classes)

    def _clients(self) -> None:
        """Add the clients, and what rows belong to."""
        for name, role in self.roles.items():
            if role not in ("client", "group") or not len(self.columns[name].cells):
                continue
            cells = texts_of(self.columns[name].cells)
            if fault := _name_fault(name, cells, role, self.how):
                self.refuse(name, fault)
                continue
            if role == "client":
                with self.checked(name):
                    owner, names = arrays.owners(cells)
                    self.source = replace(self.source, owner=owner, owner_names=names)
        group = self.how.group_column
        if group and group in self.columns and len(self.columns[group].cells):
            # a name at two clients is two groups
            groups = by_clients(self.columns[group].cells, self.source.owner)
            self.source = replace(self.source, groups=groups)

    # --- what identifies rows --------------------------------------------------------------------------------------

    def _identifiers(self) -> None:
        """Refuse features that number the rows, or what several rows belong to."""
        how, owner = self.how, self.source.owner
        ids = pd.DataFrame()
        for name, column in self.columns.items():
            asked = name in (how.columns or ())
            asked = asked or name.startswith(NAMELESS)
            readable = column.is_feature or (
                column.kind == REFUSED and is_named_as_identifier(name)
            )
            if readable and not asked and identifies(column, owner):
                ids[name] = by_clients(column.cells, owner)
        several = [k for k in ids if not how.group_column and ids[k].duplicated().any()]
        whole = [k for k in several if ids[k].min() >= 0]
        outer = [  # rows of one value of any other have one value of it
            k
            for k in whole
            if all((ids[k].groupby(ids[j]).nunique() == 1).all() for j in whole)
        ]
        for name in ids:
            column = self.columns[name]
            column.odd.append("like an identifier")
            column.kind = REFUSED
            leave = "Leave it out", {"exclude_columns": [name]}
            got, ways = "values like an identifier's", [leave]
            if name in several:
                number = int(ids[name][ids[name].duplicated()].iloc[0])
                rows = np.flatnonzero(ids[name] == number)
                some = text_of(column.cells[rows[0]]).strip()
                got = f"{some!r} in {plural(len(rows), 'row')}, like an identifier"
                say = "Leave it out; its rows may then lie in training and test alike"
                ways = [(say, {"exclude_columns": [name]})]
                if name in outer[:1]:
                    ways.insert(
                        0, ("Keep its rows in one split", {"group_column": name})
                    )
            rule = f"features must say something about a new sample; got {got}."
            way = "Name it in columns, with all others, to use it."
            column.fault = DataFault(rule, *ways, way)
        for name, role in self.roles.items():
            if role != LEFT_OUT or how.group_column or not is_named_as_identifier(name):
                continue
            assert self.opened is not None
            if self.opened.frame[name].duplicated().any():
                self.columns[name].odd.append("its rows may be in training and test")
                warn(
                    f"{self.opened.where}: rows with one {name!r} may lie in training and test alike, so scores may be "
                    f"too good. Keep them together: {spelled(group_column=name)}"
                )

    # --- missing values --------------------------------------------------------------------------------------------

    def _gaps(self) -> None:
        """Leave out columns without a value at some client, and refuse other missing numbers."""
        how = self.how
        holes: dict[str, Bools] = {}
        for name, column in self.columns.items():
            lacking = column.lacking
            if column.emptied is not None:
                lacking = lacking | column.emptied
            if lacking.any() and (column.is_feature or column.kind == REFUSED):
                holes[name] = lacking
        if self.source.owner is not None and holes:
            empty = pd.DataFrame(holes).groupby(self.source.owner).all()
            lost = list(empty.columns[empty.any() & ~empty.all()])
            done = "filled" if how.fill_missing_columns else "left out"
            for name in lost:
                some = [self.source.owner_names[k] for k in empty.index[empty[name]]]
                self.columns[name].odd.append(f"no value at {listing(some, 4)}: {done}")
            if lost and not how.fill_missing_columns:
                fill = spelled(fill_missing_columns=True, impute="median")
                assert self.opened is not None
                warn(
                    f"{self.opened.where}: columns without a value at some client are left out: "
                    f"{listing(map(repr, lost), 6)}. To fill them: {fill}"
                )
                for name in lost:
                    self.columns[name].kind, self.columns[name].fault = LEFT_OUT, None
                    del holes[name]
        missing = []
        for name, lacking in holes.items():
            column, whole = self.columns[name], bool(lacking.all())
            becomes = column.fault is not None and "to_" in column.fault.line
            if column.kind == WORDS or (column.kind == REFUSED and not becomes):
                continue
            if whole:
                rule = "the column must have a value; got none."
                column.fault = DataFault(rule, line=dropping([name]))
                column.kind = REFUSED
            elif not how.may_be_missing:
                missing.append(name)
        if missing:
            self._refuse_missing(missing, holes)

    def _refuse_missing(self, names: Sequence[str], holes: Mapping[str, Bools]) -> None:
        """Refuse missing numbers of several columns in one fault."""
        assert self.opened is not None
        first = holes[names[0]]
        ways: list[Way] = [
            ("Fill empty cells, such as", {"impute": "median"}),
            (
                f"Leave the column{'s' * (len(names) > 1)} out",
                {"exclude_columns": [*(self.how.exclude_columns or ()), *names]},
            ),
        ]
        fault = fault_where(first, "none", "the value must not be missing", *ways)
        what = f"column{'s' * (len(names) > 1)} {listing(map(repr, names), 4)}"
        self.faults.append(fault.at(f"{self.opened.where}, {what}", self.opened.place))

    # --- the result ------------------------------------------------------------------------------------------------

    def _mark(self, used: Mapping[str, Described]) -> None:
        """Add what is odd about features and labels."""
        source, how = self.source, self.how
        numeric = {k: each.cells for k, each in used.items() if each.kind == NUMBER}
        for name, column in self.columns.items():
            cells = column.cells
            said: list[str] = []
            if name not in used and column.kind != "label":
                continue
            if name in used and _is_constant(column):
                said = [] if column.odd else ["one value only"]
                column.odd += said
                continue
            if name in numeric:
                said.append(outside_fences(numeric[name], source.owner))
            classes = name in used and source.task == CLASSIFICATION
            if classes and gives_away(cells, source.y):
                said.append("gives the label away")
            if source.owner is not None:
                said.append(unlike_clients(cells, source.owner, source.owner_names))
            if name in used and not how.group_column and name not in (how.categories or ()):  # fmt: skip
                others = [values for key, values in numeric.items() if key != name]
                said.append(self._binding(name, cells, others))
            column.odd += [text for text in said if text]

    def _binding(self, name: str, cells: Cells, others: Sequence[Any]) -> str:
        """Return what is said of a column whose rows with one value belong together, and warn of it."""
        if not binds_rows(cells, self.source.y, others, self.source.owner):
            return ""
        assert self.opened is not None
        warn(
            f"{self.opened.where}: rows with one {name!r} belong together, as those of a patient do, and may lie in "
            f"training and test alike. Keep them together: {spelled(group_column=name)}"
        )
        return "its rows belong together: a patient's?"

    def _texts(self) -> None:
        """Add the codes of texts. Numbers next to them are named, since nothing reads them."""
        assert self.opened is not None
        name, where = self.how.text_column, self.opened.where
        numeric = self.opened.frame.select_dtypes(["number", "bool"])
        left_out = [repr(each) for each in numeric if self.roles[each] == LEFT_OUT]
        if left_out:
            warn(
                f"{where}: a model of texts reads no other columns; left out are {listing(left_out, 6)}"
            )
        with self.checked(name):
            folder = self.how.tokenizer
            tokenizer = Tokenizer.read(folder) if folder else None
            texts = [*texts_of(self.columns[name].cells)]
            x, words = encode(texts, where=where, tokenizer=tokenizer)
            self.source = replace(self.source, x=x, words=words, tokenizer=tokenizer)


def _is_constant(column: Described) -> bool:
    if isinstance(column.cells, np.ndarray):
        for part in (column.cells[:1000], column.cells):  # most end at the first rows
            known = part[~np.isnan(part)]
            if len(known) and known.min() < known.max():
                return False
        return True
    return len(words_of(column.cells)) < 2


def _with_features(source: Source, used: Mapping[str, Described]) -> Source:
    """Return the source with its features. Words are their places among the words of their column."""
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
    categories = tuple(words) if any(words) else ()
    return replace(source, x=x, columns=tuple(used), categories=categories)


# --- labels, clients and groups ------------------------------------------------------------------------------------


def _without(name: str, words: Sequence[str]) -> str:
    """Return the line that leaves out rows with some words in a column."""
    return f"table = table[~table[{name!r}].astype(str).isin({list(words)!r})]"


def _missing_label(column: Described, own: Bools, how: Reading) -> DataFault:
    """Return the fault of rows without a label, or with a mark such as NA."""
    ways: list[Way] = [("Leave these rows out", {"drop_missing_labels": True})]
    got = "an empty cell"
    if isinstance(column.cells, pd.Categorical):
        marks = sorted({word for word in column.cells[own] if word.strip()})
        got = listing(map(repr, marks), 3) or got
        if marks and how.task == CLASSIFICATION:
            ways.append((f"Keep {got} as a class", {"categories": [column.name]}))
    return fault_where(own, got, arrays.LABELLED, *ways)


def _name_fault(
    name: str, cells: pd.Categorical, role: str, how: Reading
) -> DataFault | None:
    """Return the fault of names of clients or groups, or None."""
    own = lacks_value(cells)
    if name not in (how.categories or ()):
        own = own | is_marked(cells)
    if own.any():
        marks = sorted({word for word in cells[own] if word.strip()})
        got = listing(map(repr, marks), 3) or "an empty cell"
        line = f"table = table.dropna(subset=[{name!r}])"
        ways: list[Way] = []
        if marks:
            line = _without(name, marks)
            ways = [(f"Keep {got} as a name", {"categories": [name]})]
        return fault_where(own, got, f"each row must have a {role}", *ways, line=line)
    return spellings_fault(name, cells.categories, f"{role}s")


def _target_fault(column: Described) -> DataFault | None:
    """Return the fault of a label that must be numbers, or None."""
    fault, name = column.fault, column.name
    if fault is not None and fault.line and fault.line != dropping([name]):
        return DataFault(fault.rule, row=fault.row, line=fault.line)
    if column.kind == NUMBER:
        return None
    words = [word for word in words_of(column.cells) if word]
    rule = (
        f"the cell must be a number; got {listing(map(repr, words), 3)}. Write numbers. An event is 1, or 0 if it was "
        "censored. Each of several labels is 1 or 0."
    )
    if len(words) == 2:
        codes = {word: k for k, word in enumerate(words)}
        return DataFault(rule, line=f"table[{name!r}] = table[{name!r}].map({codes!r})")
    strays = [word for word in words if not is_number(word)]
    if len(strays) <= STRAY and len(strays) < len(words):
        return DataFault(rule, line=_without(name, strays))
    return DataFault(rule, "Name another label.")


def class_fault(column: Described, how: Reading) -> DataFault | None:
    """Return the fault of labels that are no classes, or None. Classes are few, and all of them numbers or none.

    >>> cells = pd.Categorical(["4", "f", "r", "4"])
    >>> print(class_fault(Described("label", "label", cells), Reading()))
    labels must be numbers or words; got 'f' (2 of 4 rows). Keep each as a class: categories=['label'].
    """
    name, cells = column.name, texts_of(column.cells)
    if name in (how.categories or ()):
        return None
    words = [word for word in words_of(cells) if not is_mark(word)]
    if fault := spellings_fault(name, cells.categories, "labels"):
        return fault
    numeric = [word for word in words if is_number(word)]
    keep: Way = ("Keep each as a class", {"categories": [name]})
    if 0 < len(numeric) < len(words):
        strays = [word for word in words if word not in numeric]
        stray = np.isin(cells.astype(object), strays)
        few = stray.mean() < RARE and are_marks(strays)
        line = _without(name, strays) if few else ""
        if stray.mean() > 0.5:  # the others are named
            stray, strays = ~stray, numeric
        rule = "labels must be numbers or words"
        return fault_where(stray, repr(strays[0]), rule, keep, line=line)
    if numeric:
        return _number_class_fault(name, cells, numeric, keep)
    doubtful = dates_fault(name, words) or spelled_numbers(name, words)
    many = len(words) > MOST_CLASSES or (doubtful and len(words) > FEW_CLASSES)
    if many:
        rule = f"classes must be few; got {len(words):,} different words."
        return DataFault(rule, ("Name another label, or keep each", keep[1]))
    return None


def _number_class_fault(
    name: str, cells: pd.Categorical, words: Sequence[str], keep: Way
) -> DataFault | None:
    """Return the fault of labels that are numbers, or None."""
    if not arrays.of_digits(words):
        try:
            arrays.whole_numbers(np.array([float(word) for word in words]))
        except DataFault:
            parts = [word for word in words if float(word) % 1 != 0]
            bad = np.isin(cells.astype(object), parts)
            rule = "labels must be whole numbers or words"
            return fault_where(bad, repr(parts[0]), rule, arrays.PREDICT, keep)
    try:
        arrays.check_spellings("labels", words)
    except DataFault as fault:
        line = f"table[{name!r}] = pd.to_numeric(table[{name!r}])"
        return DataFault(fault.rule, keep, line=line)
    if len(words) > MOST_NUMBERS:
        rule = f"classes must be few; got {len(words):,} different numbers."
        return DataFault(rule, arrays.PREDICT, keep)
    known = np.sort([float(word) for word in words])
    for end, others in ((known[0], known[1:]), (known[-1], known[:-1])):
        digits = {*text_of(end)}
        far = len(others) > 1 and np.abs(others - end).min() > np.ptp(others)
        if far and not digits - {*"-9"}:
            marks = [word for word in words if float(word) == end]
            rule = "labels must be classes, not marks of a missing one"
            bad = np.isin(cells.astype(object), marks)
            return fault_where(bad, f"{end:g}", rule, keep, line=_without(name, marks))
    return None


# --- new samples ---------------------------------------------------------------------------------------------------


def new_rows(
    opened: Opened,
    columns: Sequence[str],
    words: Mapping[str, Names],
    way: str,
) -> Array:
    """Return new rows [n, d] of a trained model's columns: numbers, and the places of words.

    A column that is not there has no value.

    Args:
        words: the words of each column of words. way: how to write new samples.

    Raises:
        DataFault: names the first cell that is no number.
    """
    made: list[Array] = []
    for name in columns:
        at = f"{opened.where}, column {name!r}"
        try:
            if name not in opened.frame:
                made.append(np.full(len(opened.frame), np.nan))
            elif name in words:
                cells = texts_of(opened.frame[name])
                made.append(preprocessing.codes(cells, words[name]))
            else:
                found = take(name, opened.frame[name], PLAIN)
                if found.fault is not None and found.kind != WORDS:
                    row = found.fault.row
                    raise DataFault(found.fault.rule, way, row=row)
                made.append(numbers(found.cells, way))
        except DataFault as fault:
            raise fault.at(at, opened.place) from fault
    return np.column_stack(made)
