"""How a user's own data are read: the spellings of cells, and the settings for columns, files and numbers."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fl_core.errors import (
    OneOf,
    UsageError,
    at_least,
    check_known,
    check_values,
    listing,
    spelled,
)
from fl_core.rows import CLASSIFICATION, MULTILABEL, SURVIVAL, TASKS

MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Contents of a cell without a value, in small letters, for features and labels alike."""
MISSING_CELLS = sorted(
    {form(word) for word in MISSING for form in (str, str.upper, str.title)} | {"NaN"}
)
"""The usual spellings of these in tables."""
DIFFERENT = 6
"""The number of different numbers from which words with a number in them are suspicious."""
MINUS = "\u2212"
"""The minus sign of Unicode, which is read like the hyphen."""

_AFFIXED = re.compile(
    r"(?P<before>[^\w\s.,+-]*)\s*[+-]?(?P<number>[0-9]{1,3}(?:['\s][0-9]{3})+(?:[.,][0-9]*)?|[0-9][0-9.,]*)\s*"
    r"(?P<after>[^\W\d]*|[^\w\s]*|[^\d\s.,+-]+)"
)
_PADDED = re.compile(r"[+-]?0[0-9]+")
_DATE = re.compile(
    r"(?:[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{1,2}([-./])[0-9]{1,2}\1(?:[0-9]{2}){1,2}"
    r"|[0-9]{1,2}[- ]?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[- ]?(?:[0-9]{2}){1,2})"
    r"(?:[ T][0-9]{1,2}:[0-9]{2}.*)?|[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?",
    re.IGNORECASE,
)


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value."""
    return cell.strip().lower() in MISSING


def composed(text: str) -> str:
    """Return a name in Unicode's composed form (NFC), so that equal letters are equal characters."""
    return unicodedata.normalize("NFC", text)


def cell_text(value: Any) -> str:
    """Return a value of a typed file as a cell's text. A whole number has no point, and a missing value no text.

    >>> [cell_text(value) for value in (7.0, 1.5, None, True, "7.0")]
    ['7', '1.5', '', 'True', '7.0']
    """
    if value is None or value != value:
        return ""
    if isinstance(value, int | str) or not hasattr(value, "is_integer"):
        return str(value)
    return str(int(value)) if value.is_integer() else str(value)


def double_spelling(words: Iterable[str]) -> tuple[str, str] | None:
    """Return two different words that are one number, such as 007 and 7, or None."""
    seen: dict[float, str] = {}
    for word in words:
        if (
            is_number(word)
            and seen.setdefault(PLAIN_NUMBERS.number(word), word) != word
        ):
            return seen[PLAIN_NUMBERS.number(word)], word
    return None


def nearly_equal(words: Iterable[str]) -> list[list[str]]:
    """Return the groups of words that differ only by case or blanks.

    >>> nearly_equal(["North", "east", "north ", "NORTH"])
    [['North', 'north ', 'NORTH']]
    """
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault("".join(word.split()).casefold(), []).append(word)
    return [group for group in groups.values() if len(group) > 1]


@dataclass(frozen=True)
class NumberFormat:
    """The signs in numbers: a decimal sign, and one between groups of three digits.

    >>> form = NumberFormat(",", ".")
    >>> [form.fits(cell) for cell in ("1.250,5", "-3", "12.5", "1.25")], form.number("1.250,5")
    ([True, True, False, False], 1250.5)

    Attributes:
        decimal: ``.`` or ``,``.
        thousands: between groups of exactly three digits. Empty means none.
    """

    decimal: str = "."
    thousands: str = ""

    @cached_property
    def _form(self) -> re.Pattern[str]:
        decimal, whole = re.escape(self.decimal), "[0-9]+"
        if self.thousands:
            between = r"\s" if self.thousands == " " else re.escape(self.thousands)
            groups = f"(?:{between}[0-9]{{3}})+"
            whole = f"(?:[0-9]{{1,3}}{groups}|{whole})"
        digits = f"(?:{whole}(?:{decimal}[0-9]*)?|{decimal}[0-9]+)"
        number = f"{digits}(?:e[+{MINUS}-]?[0-9]+)?|inf(?:inity)?"
        return re.compile(f"[+{MINUS}-]?(?:{number})|nan", re.IGNORECASE)

    @property
    def signs(self) -> dict[str, str]:
        """Return the settings of its signs that are not those of plain numbers."""
        decimal = {"decimal": self.decimal} if self.decimal != "." else {}
        return decimal | ({"thousands": self.thousands} if self.thousands else {})

    def fits(self, cell: str) -> bool:
        """Return whether a cell is a number with these signs and no others."""
        return self._form.fullmatch(cell.strip()) is not None

    def number(self, cell: str) -> float:
        """Return the number of a cell that fits."""
        cell = cell.replace(MINUS, "-")
        if self.thousands:
            groups = cell.split(None if self.thousands == " " else self.thousands)
            cell = "".join(groups)
        return float(cell.replace(self.decimal, "."))


PLAIN_NUMBERS = NumberFormat()
"""Digits with an optional sign, point and exponent, and nothing else."""


def is_number(cell: str) -> bool:
    """Return whether a cell is a plain number.

    >>> [is_number(cell) for cell in ("-1.5e3", "10_20", "1,5", "\u22127")]
    [True, False, False, True]
    """
    return PLAIN_NUMBERS.fits(cell)


def is_padded(cell: str) -> bool:
    """Return whether a cell is a whole number with zeros before it, as codes have.

    >>> [is_padded(cell) for cell in ("0150", "0.5", "0")]
    [True, False, False]
    """
    return _PADDED.fullmatch(cell.strip()) is not None


def format_of(cells: Iterable[str], given: NumberFormat) -> NumberFormat | None:
    """Return the format that reads all cells with a value: the given one, or plain numbers. None means neither."""
    words = [cell for cell in cells if not is_missing(cell)]
    return next(
        (form for form in (given, PLAIN_NUMBERS) if all(map(form.fits, words))), None
    )


def other_reading(cells: Any, given: NumberFormat) -> str:
    """Return how a cell of text is read that is another number in another format, or a code; or an empty text.

    >>> import pandas as pd
    >>> other_reading(pd.Categorical(["1,250", "2,500"]), NumberFormat(","))
    "'1,250' is read as 1.25"
    """
    categories = getattr(cells, "categories", None)  # of text in a table
    if categories is None:
        return ""
    words = [cell for cell in categories if not is_missing(cell)]
    used = format_of(words, given) or given
    for word in filter(is_padded, words):
        return f"{word!r} is read as {used.number(word):g}"
    for form in (PLAIN_NUMBERS, *_formats(words)) if given != PLAIN_NUMBERS else ():
        for word in words if all(map(form.fits, words)) else ():
            if form.number(word) != used.number(word):
                return f"{word!r} is read as {used.number(word):g}"
    return ""


class Suspicion(NamedTuple):
    """What words are, what to do, and settings that read them."""

    what: str
    way: str
    repair: dict[str, Any]


def suspicion(cells: Iterable[str], column: str) -> Suspicion | None:
    """Return what is suspicious of a column of words: that they are numbers or dates in another spelling.

    Most of the words must be a number with one fixed affix, comma, percent or comparison sign, or a date, and
    :data:`DIFFERENT` of them must differ. Codes such as ``NYHA2`` and ``ward 3`` are words.

    Returns None if nothing is suspicious.
    """
    distinct = {cell.strip() for cell in cells if not is_missing(cell)}
    most = max(len(distinct) / 2, DIFFERENT - 1)
    if sum(1 for word in distinct if _DATE.fullmatch(word)) > most:
        repair = {"date_columns": [column]}
        way = f"Read them as numbers: {spelled(**repair)}"
        return Suspicion("dates or times", way, repair)
    found = [match for match in map(_AFFIXED.fullmatch, distinct) if match]
    affixes = Counter((match["before"], match["after"]) for match in found)
    for affix, count in affixes.most_common(1):
        numbers = {m["number"] for m in found if (m["before"], m["after"]) == affix}
        if count <= len(distinct) / 2 or len(numbers) < DIFFERENT:
            break
        if not any(affix):
            plain = list(map(is_number, numbers))
            readable = not any(plain) or bool(_formats(numbers))
            return signs(numbers) if readable and not all(plain) else None
        what = f"numbers with {''.join(affix)!r}"
        way = "Write the numbers alone"
        return Suspicion(what, way, {"exclude_columns": [column]})
    return None


def _formats(words: Collection[str]) -> list[NumberFormat]:
    """Return the formats that fit all words, with a sign that they have."""
    forms = [NumberFormat(","), NumberFormat(".", ",")]
    if any("." in word for word in words):
        forms.append(NumberFormat(",", "."))
    grouped = "'" if any("'" in word for word in words) else " "
    if any(grouped in " ".join(word.split()) for word in words):
        forms = [NumberFormat(sign, grouped) for sign in ".,"]
        if not any("," in word for word in words):
            forms = forms[:1]
    return [form for form in forms if all(map(form.fits, words))]


def signs(words: Collection[str]) -> Suspicion:
    """Return the settings for words that are numbers but for commas and points.

    There are no settings if several read the words, since they read other numbers.
    """
    fits = _formats(words)
    what = "numbers with signs between their digits"
    if not fits:
        return Suspicion(what, "Write them with a decimal point", {})
    ways = " or ".join(spelled(**form.signs) for form in fits)
    repair = {"decimal": fits[0].decimal, "thousands": fits[0].thousands or None}
    way = f"Read them with {ways}"
    return Suspicion(what, way, repair if len(fits) == 1 else {})


# --- settings --------------------------------------------------------------------------------------------------

CLIENT_COLUMN = "client"
LABEL_COLUMN = "label"
TEXT_COLUMN = "text"
SEPARATOR = ","
ENCODING = "utf-8"
_TAB = ("tab", "\\t")
SCALES = ("none", "standard", "minmax", "robust", "imagenet")
"""Scaling of columns of numbers: none, to mean 0 and deviation 1, to 0..1, or by median and quartiles. The last is of
colour images: by ImageNet's mean and deviation."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The mean and the standard deviation of ImageNet's channels in 0..1."""
IMPUTES = ("none", "mean", "median", "most_frequent")
"""Values for missing numbers: none (they are errors), or a statistic of the column's training samples."""
STANDARD = SCALES[1]
"""The default scaling of your own table."""
PARQUET = ".parquet"
TABLES = (".csv", ".tsv", PARQUET)
"""The suffixes of tables."""
IMAGES = (".png", ".jpg", ".jpeg")
"""The suffixes of images."""
BETWEEN = ","
"""What stands between the files in the name of a dataset that has several."""


def holds_images(path: Path) -> bool:
    """Return whether the subfolders of a folder hold images, as classes or as clients with classes."""
    return any(images_in(path, form) for form in ("[!.]*/[!.]*", "[!.]*/[!.]*/[!.]*"))


def images_in(path: Path, form: str) -> list[Path]:
    """Return the image files of a folder that a pattern finds, sorted."""
    return sorted(
        file
        for file in path.glob(form)
        if file.suffix.lower() in IMAGES and file.is_file()
    )


Place = Callable[[int], str]
"""The name of a row in messages."""


def row_of_array(row: int) -> str:
    """Return the name of an array's row in error messages."""
    return f"row {row} (rows count from 0)"


class DataFault(UsageError):
    """An error in data that other settings may repair.

    Attributes:
        what: what is wrong. The message adds what to do.
        way: what to do. After a colon at its end the repair is added.
        row: where, or None.
        repair: the settings, by key of :class:`Reading`. Empty means that no setting is certain to help.
        column: the column to leave out if nothing else helps.
    """

    def __init__(
        self,
        what: str,
        way: str = "",
        row: int | None = None,
        column: str = "",
        **repair: Any,
    ) -> None:
        if way.endswith(":"):
            way += f" {spelled(**repair)}."
        super().__init__(f"{what} {way}".strip())
        self.what, self.way, self.row = what, way, row
        self.column, self.repair = column, repair


@contextmanager
def located(where: str, place: Place = row_of_array) -> Iterator[None]:
    """Begin the message of a fault with its data, and with its row.

    >>> with located("t.csv", lambda row: f"line {row + 2}"):
    ...     raise DataFault("the text must not be empty.", "Fill it.", row=4)
    Traceback (most recent call last):
        ...
    fl_core.data.columns.DataFault: t.csv, line 6: the text must not be empty. Fill it.

    Args:
        where: the data. place: the name of a row.
    """
    try:
        yield
    except DataFault as fault:
        at = where if fault.row is None else f"{where}, {place(fault.row)}"
        what = f"{at}: {fault.what}"
        raise DataFault(what, fault.way, column=fault.column, **fault.repair) from fault


class DataFaults(UsageError):
    """An error of one or several faults, one line each."""

    def __init__(self, faults: Sequence[UsageError]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def faults_of(error: UsageError) -> Sequence[UsageError]:
    """Return the faults of an error."""
    return getattr(error, "faults", [error])


@dataclass(frozen=True)
class Reading:
    """Settings for reading data, the keys of a configuration about its files.

    Raises:
        UsageError: names the key and its possible values.
    """

    client_column: str = CLIENT_COLUMN
    """Column with the client in your own file."""
    label_column: str = LABEL_COLUMN
    """Column with the label in your own file. TIME,EVENT for survival; LABEL,LABEL,... for multilabel."""
    text_column: str = TEXT_COLUMN
    """Column with the text in your own file."""
    columns: list[str] | None = None
    """Feature columns of your own table. Default: all."""
    exclude_columns: list[str] | None = None
    """Feature columns of your own table to leave out."""
    separator: str = SEPARATOR
    """Separator of your own .csv file: one character, or tab."""
    encoding: str = ENCODING
    """Encoding of your own .csv or .jsonl file, such as latin-1."""
    scale: Annotated[str | None, OneOf("scale", SCALES)] = None
    """Scaling of features, fitted on all clients' training samples: none, standard, minmax or robust. imagenet is for
    colour images. Default: standard for your own table, else none."""
    impute: Annotated[str, OneOf("impute", IMPUTES)] = IMPUTES[0]
    """Fill missing numbers with the training samples' mean, median or most_frequent. With none they are an error."""
    task: Annotated[str, OneOf("task", TASKS)] = CLASSIFICATION
    """Task of your own data: classification, regression, survival or multilabel."""
    keep_ids: bool = False
    """Use a column that numbers the records, such as record_id, as a feature."""
    decimal: str = "."
    """Decimal sign in your own table: . or a comma."""
    thousands: str | None = None
    """Sign between groups of three digits in your own table, such as a comma. Default: none."""
    word_columns: list[str] | None = None
    """Columns of your own table that are words, although they look like numbers or dates."""
    date_columns: list[str] | None = None
    """Columns of your own table with dates or times, which become numbers of days."""
    group_column: str | None = None
    """Column of what several rows belong to, such as patient_id. Its rows stay in one split."""
    label_numbers: bool = False
    """Read labels as numbers, so that 007 and 7 are one class."""
    drop_missing_labels: bool = False
    """Leave out rows without a label."""
    fill_missing_columns: bool = False
    """Fill columns that a client lacks, by --impute."""
    image_size: Annotated[int | None, at_least(1)] = None
    """Crop the images of your own folder to squares, and scale them to this many pixels a side."""

    def __post_init__(self) -> None:
        for key in ("columns", "exclude_columns", "word_columns", "date_columns"):
            names = getattr(self, key)
            if isinstance(names, str) or not all(
                isinstance(name, str) for name in names or ()
            ):
                raise UsageError(f"{key} must be names of columns; got {names!r}.")
            if names is not None:
                names = [composed(name) for name in names]
                object.__setattr__(self, key, names)
            twice = first_duplicate(names or ())
            if twice:
                raise UsageError(f"{key} must be distinct names; got {twice!r} twice.")
        if self.columns is not None and self.exclude_columns is not None:
            raise UsageError(
                "columns and exclude_columns must not be given together. Use one of them."
            )
        for role in ROLES:
            object.__setattr__(self, role, composed(getattr(self, role)))
        signs = (self.decimal, self.thousands or "")
        if (
            self.decimal not in (".", ",")
            or self.thousands not in (None, ".", ",", "'", " ")
            or len(set(signs)) < 2
        ):
            raise UsageError(
                "decimal must be '.' or ',', and thousands another sign, one of . , ' and a blank; "
                f"got {self.decimal!r} and {self.thousands!r}."
            )
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise UsageError(
                f"separator must be one character, such as ';', or tab; got {self.separator!r}."
            )
        try:
            "".encode(self.encoding)  # also refuses codecs of bytes, such as zlib
        except LookupError as error:
            raise UsageError(
                "encoding must be one that Python knows, such as utf-8, utf-16, latin-1 or cp1252; "
                f"got {self.encoding!r}."
            ) from error
        check_values(vars(self), Reading)
        if self.fill_missing_columns and not self.may_be_missing:
            raise UsageError(
                "fill_missing_columns must come with impute mean, median or most_frequent; got none. "
                f"Add {spelled(impute='median')}."
            )

    @classmethod
    def with_keys(cls, keys: Mapping[str, Any]) -> Reading:
        """Return the settings with these keys.

        Raises:
            UsageError: a key is unknown, or a value is invalid.
        """
        for key in keys:
            check_known("key of how data are read", key, READING)
        return cls(**keys)

    def reading_options(self) -> dict[str, Any]:
        """Return the settings by name, without those of a subclass."""
        return {key: getattr(self, key) for key in READING}

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the label columns: one, or several for survival and multilabel."""
        several = self.task in (SURVIVAL, MULTILABEL)
        return (
            tuple(self.label_column.split(BETWEEN)) if several else (self.label_column,)
        )

    @property
    def names(self) -> tuple[str, ...] | None:
        """Return the declared names of several labels, or None for the data's own names of classes."""
        return self.labels if self.task == MULTILABEL else None

    def repaired(self, faults: Sequence[UsageError]) -> Reading:
        """Return the settings that repair faults. Columns without a certain reading are left out at last."""
        found = self
        for fault in faults:
            if isinstance(fault, DataFault):
                found = found._changed(fault.repair)
        out = [getattr(fault, "column", "") for fault in faults]
        if found == self and any(out):
            found = found._changed({"exclude_columns": list(filter(None, out))})
        return found

    def _changed(self, settings: Mapping[str, Any]) -> Reading:
        """Return the settings with some others. Names of columns are added to those that are given."""
        keys: dict[str, Any] = {}
        for key, value in settings.items():
            if isinstance(value, list):
                value = list(dict.fromkeys([*(getattr(self, key) or ()), *value]))
            keys[key] = value
        out = keys.get("exclude_columns", ())
        if self.columns is not None:
            keys.pop("exclude_columns", None)
            keys["columns"] = [name for name in self.columns if name not in out]
        return replace(self, **keys)

    @property
    def changed(self) -> dict[str, Any]:
        """Return the settings that are not the default."""
        found = self.reading_options()
        return {k: v for k, v in found.items() if v != getattr(Reading, k)}

    @property
    def predicts_numbers(self) -> bool:
        """Return whether labels are numbers, and not names of classes."""
        return self.task != CLASSIFICATION or self.label_numbers

    def takes(self, column: str) -> bool:
        """Return whether a column may be a feature by its name."""
        kept = self.columns is None or column in self.columns
        return kept and column not in (self.exclude_columns or ())

    def check_labels(self, what: str, likely: str = "") -> None:
        """Check that the task has the label columns that it needs.

        Args:
            what: the data, with which the message begins.
            likely: the label columns to name in it.

        Raises:
            DataFault: it does not.
        """
        count = len(self.labels)
        needed = {SURVIVAL: "TIME,EVENT", MULTILABEL: "LABEL,LABEL,..."}.get(self.task)
        fits = needed is None or count == 2 or (count > 2 and self.task == MULTILABEL)
        if not fits or len(set(self.labels)) < count:
            repair: dict[str, Any] = {"label_column": likely} if likely else {}
            raise DataFault(
                f"{what}: label columns of task {self.task} must be {needed}; got {self.label_column!r}.",
                f"Name them: {spelled(label_column=likely or needed)}.",
                **repair,
            )

    @property
    def numbers(self) -> NumberFormat:
        """Return the signs in numbers."""
        return NumberFormat(self.decimal, self.thousands or "")

    @property
    def delimiter(self) -> str:
        """Return the single character between cells."""
        return "\t" if self.separator in _TAB else self.separator

    def delimiter_of(self, path: Path) -> str:
        """Return the character between the cells of a file; a .tsv file has tabs unless another is asked for."""
        return (
            "\t"
            if path.suffix.lower() == ".tsv" and self.separator == SEPARATOR
            else self.delimiter
        )

    @property
    def python_encoding(self) -> str:
        """Return the encoding for opening a file. That of UTF-8 skips a byte order mark."""
        return (
            "utf-8-sig"
            if codecs.lookup(self.encoding).name == "utf-8"
            else self.encoding
        )

    @property
    def may_be_missing(self) -> bool:
        """Return whether features may be missing because they are filled."""
        return self.impute != IMPUTES[0]

    def check_unasked(self, what: str, *keys: str) -> None:
        """Check that keys without meaning for some data have their defaults, such as names of columns for images.

        Raises:
            UsageError: one of ``keys`` is not the default. The message begins with ``what``, which describes the data.
        """
        asked = [key for key in keys if getattr(self, key) != getattr(Reading, key)]
        if asked:
            raise UsageError(f"{what}. Leave out {listing(asked)}.")

    def check_plain(self, what: str) -> None:
        """Check that no column, sign or size of images is named for data without a header or image files.

        Raises:
            UsageError: names the keys. The message begins with ``what``, the data.
        """
        columns = "no columns to name: only tables and .jsonl files have them"
        self.check_unasked(f"{what} has {columns}", *CHOSEN)
        self.check_unasked(f"{what} is no text file", *WRITTEN)
        self.check_unasked(f"{what} has no image files", "image_size")


READING = tuple(field.name for field in fields(Reading))
ROLES = ("client_column", "label_column", "text_column")
CHOSEN = (
    *ROLES,
    "columns",
    "exclude_columns",
    "group_column",
    "word_columns",
    "date_columns",
    "drop_missing_labels",
    "fill_missing_columns",
)
WRITTEN = ("separator", "encoding")
SIGNS = ("decimal", "thousands")


def first_duplicate(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once, or None."""
    counts = Counter(names)
    return next((name for name in names if counts[name] > 1), None)


def check_distinct_columns(path: Path, header: Sequence[str]) -> None:
    """Check that no column's name is repeated.

    Raises:
        UsageError: names the first repeated one, with its places.
    """
    twice = first_duplicate(header)
    if twice is not None:
        at = " and ".join(str(k) for k, name in enumerate(header, 1) if name == twice)
        raise UsageError(
            f"{path}: names of columns must be distinct; got {twice!r} as columns {at}. Rename or remove one of them."
        )


PLAIN = Reading()
"""The default settings."""
