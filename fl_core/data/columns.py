"""How a user's own data are read: which column of a table is what, how the file is written, what is done to numbers."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fl_core import choices
from fl_core.errors import UsageError, check_known, listing
from fl_core.scores import CLASSIFICATION, TASKS

CLIENT_COLUMN = "client"
LABEL_COLUMN = "label"
TEXT_COLUMN = "text"
SEPARATOR = ","
ENCODING = "utf-8"
_TAB = ("tab", "\\t")
TABLES = (".csv", ".tsv", ".parquet", ".xlsx")
"""The suffixes of tables."""
BETWEEN = ","
"""What stands between the files in the name of a dataset that has several."""


@dataclass(frozen=True)
class Reading:
    """How data are read; every field is a key of a run's configuration.

    Attributes:
        client_column, label_column, text_column: what holds a table's clients, classes and texts.
        columns: the feature columns that are read; None = all that are there.
        drop: the feature columns that are not read.
        separator: of a .csv file's cells, one character, or ``tab``.
        encoding: of a .csv or .jsonl file, as Python names it.
        scale, impute: what is fitted on the training samples of a table, see :mod:`fl_core.data.preprocessing`;
            scale None: ``standard`` for tables of the user's own, ``none`` for other data.
        task: what the labels are: classes (``classification``), or numbers to be predicted (``regression``).
        keep_ids: whether a column that numbers the records may be a feature.
        classes: of a silo's data, all classes of its federation, some of which it may lack; no key of a run.
        categories: of a silo's columns of words, all words of its federation; no key of a run.

    Raises:
        UsageError: names the key and what it may be.
    """

    client_column: str = CLIENT_COLUMN
    label_column: str = LABEL_COLUMN
    text_column: str = TEXT_COLUMN
    columns: Sequence[str] | None = None
    exclude_columns: Sequence[str] | None = None
    separator: str = SEPARATOR
    encoding: str = ENCODING
    scale: str | None = None
    impute: str = choices.IMPUTES[0]
    task: str = CLASSIFICATION
    keep_ids: bool = False
    classes: tuple[str, ...] | None = None
    categories: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        for key in ("columns", "exclude_columns"):
            names = getattr(self, key)
            if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
                raise UsageError(f"{key} must be names of columns, not {names!r}")
            twice = repeated(names or ())
            if twice:
                raise UsageError(f"{key} names {twice!r} twice")
        if self.columns is not None and self.exclude_columns is not None:
            raise UsageError("columns says what is read, and exclude_columns what is not: give one of them")
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise UsageError(f"separator must be one character, such as ';', or tab, not {self.separator!r}")
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise UsageError(
                f"unknown encoding {self.encoding!r}: utf-8, utf-16, latin-1 and cp1252 are some"
            ) from error
        check_known("scale", self.scale or choices.SCALES[0], choices.SCALES)
        check_known("impute", self.impute, choices.IMPUTES)
        check_known("task", self.task, TASKS)

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Reading:
        """The reading that these keys say.

        Raises:
            UsageError: an unknown key, or a value that cannot be.
        """
        for key in keys:
            check_known("key of how data are read", key, READING)
        return cls(**keys)

    @property
    def delimiter(self) -> str:
        """The one character between cells."""
        return "\t" if self.separator in _TAB else self.separator

    def delimiter_of(self, path: Path) -> str:
        """Return the character between the cells of a file; a .tsv file has tabs unless another is asked for."""
        return "\t" if path.suffix.lower() == ".tsv" and self.separator == SEPARATOR else self.delimiter

    @property
    def python_encoding(self) -> str:
        """The encoding with which a file is opened: that of UTF-8 passes over a byte order mark."""
        return "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding

    @property
    def missing(self) -> bool:
        """Whether features may be missing, since something fills them."""
        return self.impute != choices.IMPUTES[0]

    def check_unasked(self, what: str, *keys: str) -> None:
        """Refuse keys that say nothing to data of a kind, such as names of columns to images.

        Raises:
            UsageError: one of ``keys`` is not the default; ``what`` says of which data.
        """
        asked = [key for key in keys if getattr(self, key) != getattr(Reading, key)]
        if asked:
            raise UsageError(f"{what}; leave out {listing(asked)}")


READING = tuple(field.name for field in fields(Reading) if field.name not in ("classes", "categories"))
ROLES = ("client_column", "label_column", "text_column")
CHOSEN = (*ROLES, "columns", "exclude_columns")
WRITTEN = ("separator", "encoding")


def repeated(names: Sequence[str]) -> str | None:
    """The first name that is there more than once; None = each once."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


PLAIN = Reading()
"""How data are read if nothing is asked for."""
