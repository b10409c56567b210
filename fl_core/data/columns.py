"""How a user's own data are read: the settings for columns, files and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from fl_core.data.spelling import (
    MISSING,
    Names,
    NumberFormat,
    composed,
    first_duplicate,
)
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

SEPARATOR = ","
ENCODING = "utf-8"
SCALES = ("none", "standard", "minmax", "robust", "imagenet")
"""Scaling of columns of numbers: none, to mean 0 and deviation 1, to 0..1, or by median and quartiles. The last is of
colour images: by ImageNet's mean and deviation."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The mean and the standard deviation of ImageNet's channels in 0..1."""
IMPUTES = ("none", "mean", "median", "most_frequent")
"""Values for missing numbers: none (they are errors), or a statistic of the column's training samples."""
CLIPS = ("fences", "none")
"""Bounds of a table's numbers: fences far outside of the clients' quartiles, or none."""
STANDARD = SCALES[1]
"""The default scaling of your own table."""
PARQUET = ".parquet"
TABLES = (".csv", ".tsv", PARQUET)
"""The suffixes of tables."""
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif")
"""The suffixes of images."""
MAC = "__MACOSX"
"""A folder in archives of a Mac, without data."""
BETWEEN = ","
"""What stands between the files in the name of a dataset that has several."""


def holds_images(path: Path) -> bool:
    """Return whether the subfolders of a folder hold images, as classes or as clients with classes."""
    return any(images_in(path, form) for form in ("[!.]*/[!.]*", "[!.]*/[!.]*/[!.]*"))


def images_in(path: Path, form: str) -> list[Path]:
    """Return the image files of a folder that a pattern finds, sorted. A Mac's copies in an archive are left out."""
    return sorted(
        file
        for file in path.glob(form)
        if file.suffix.lower() in IMAGES
        and MAC not in file.relative_to(path).parts
        and file.is_file()
    )


@dataclass(frozen=True)
class Reading:
    """Settings for reading data, the keys of a configuration about its files.

    Raises:
        UsageError: names the key and its possible values.
    """

    client_column: str = "client"
    """Column with the client in your own file."""
    label_column: str = "label"
    """Column with the label in your own file. TIME,EVENT for survival; LABEL,LABEL,... for multilabel."""
    text_column: str = "text"
    """Column with the text in your own file."""
    tokenizer: str | None = None
    """Folder of transformers whose tokenizer reads texts. Default: that of a model hf:FOLDER, else words."""
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
    clip: Annotated[str, OneOf("clip", CLIPS)] = CLIPS[0]
    """Clip numbers of a table that lie far outside of the clients' training samples: fences (10 times the distance of
    the quartiles beyond them), or none."""
    task: Annotated[str, OneOf("task", TASKS)] = CLASSIFICATION
    """Task of your own data: classification, regression, survival or multilabel."""
    keep_ids: bool = False
    """Use a column that numbers the records, such as record_id, as a feature."""
    decimal: Annotated[str, OneOf("decimal", (".", ","))] = "."
    """Decimal sign in your own table: . or a comma."""
    thousands: Annotated[str | None, OneOf("thousands", tuple(".,' "))] = None
    """Sign between groups of three digits in your own table, such as a comma. Default: none."""
    missing: list[str] | None = None
    """More marks of a cell without a value in your own table, such as -9 or unknown."""
    fold_case: bool = False
    """Make words of your own table equal that differ by capitals or blanks."""
    word_columns: list[str] | None = None
    """Columns of your own table whose cells are words as they are written. They may look like numbers, dates or marks
    of missing cells. A label, a client or a group may be one of them."""
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
        for key in LISTS:
            names = getattr(self, key)
            if names is None:
                continue
            if isinstance(names, str) or {*map(type, names)} - {str}:
                raise UsageError(f"{key} must be a list of names; got {names!r}.")
            names = list(map(composed, names))
            object.__setattr__(self, key, names)
            twice = first_duplicate(names)
            if twice:
                raise UsageError(f"{key} must be distinct names; got {twice!r} twice.")
        for role in ROLES:
            object.__setattr__(self, role, composed(getattr(self, role)))
        if self.decimal == self.thousands:
            raise UsageError(
                f"thousands must be another sign than decimal; got {self.decimal!r} for both."
            )
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise UsageError(
                f"separator must be one character, such as ';', or tab; got {self.separator!r}."
            )
        try:
            "".encode(self.encoding)  # also refuses codecs of bytes, such as zlib
        except LookupError as error:
            raise UsageError(
                f"encoding must be such as utf-8, latin-1 or cp1252; got {self.encoding!r}."
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
    def labels(self) -> Names:
        """Return the names of the label columns: one, or several for survival and multilabel."""
        if self.task in (SURVIVAL, MULTILABEL):
            return tuple(self.label_column.split(BETWEEN))
        return (self.label_column,)

    @property
    def changed(self) -> dict[str, Any]:
        """Return the settings that are not the default."""
        found = self.reading_options()
        return {k: v for k, v in found.items() if v != getattr(Reading, k)}

    @property
    def predicts_numbers(self) -> bool:
        """Return whether labels are numbers, and not names of classes.

        >>> Reading(task="regression").predicts_numbers, Reading(label_numbers=True).predicts_numbers
        (True, True)
        >>> Reading().predicts_numbers
        False
        """
        return self.task != CLASSIFICATION or self.label_numbers

    @property
    def marks(self) -> frozenset[str]:
        """Return the marks of a cell without a value, in small letters."""
        more = (mark.strip().lower() for mark in self.missing or ())
        return frozenset((*MISSING, *more))

    @property
    def numbers(self) -> NumberFormat:
        """Return the signs in numbers."""
        return NumberFormat(self.decimal, self.thousands or "")

    @property
    def delimiter(self) -> str:
        """Return the single character between cells."""
        return "\t" if self.separator in ("tab", "\\t") else self.separator

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
        own = [key for key in READING if key not in ("scale", "impute", "clip", "task")]
        none = "has no columns to name, and no text or image files to read"
        self.check_unasked(f"{what} {none}", *own)


READING = tuple(field.name for field in fields(Reading))
ROLES = ("client_column", "label_column", "text_column")
LISTS = ("columns", "exclude_columns", "word_columns", "date_columns", "missing")
WRITTEN = ("separator", "encoding")


PLAIN = Reading()
"""The default settings."""
