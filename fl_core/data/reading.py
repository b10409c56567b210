"""How a user's own data are read: the settings for columns, files and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from fl_core.data.names import Names, check_file_names, composed, first_duplicate
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

SCALES = ("none", "standard", "minmax", "robust", "imagenet")
"""Scaling of columns of numbers: none, to mean 0 and deviation 1, to 0..1, or by
median and quartiles. The method ``imagenet`` scales colour images by ImageNet's mean
and deviation."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The mean and the standard deviation of ImageNet's channels in 0..1."""
IMPUTES = ("none", "mean", "median", "most_frequent")
"""Values for missing numbers: none (they are errors), or a statistic of the column's training samples."""
CLIPS = ("fences", "none")
"""Bounds of a table's numbers: fences far outside of the clients' quartiles, or none."""
STANDARD = SCALES[1]
"""The default scaling of your own table."""
PARQUET = ".parquet"
JSONL = ".jsonl"
TABLES = (".csv", ".tsv", PARQUET)
"""The suffixes of tables."""
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif")
"""The suffixes of images."""
MAC = "__MACOSX"
"""A folder in archives of a Mac, without data."""
BETWEEN = ","
"""The separator of several paths of one dataset, and of several label columns."""


def holds_images(path: Path) -> bool:
    """Return whether the subfolders of a folder hold images, as classes or as clients with classes."""
    return any(images_in(path, form) for form in ("[!.]*/[!.]*", "[!.]*/[!.]*/[!.]*"))


def images_in(path: Path, form: str) -> list[Path]:
    """Return the sorted image files of a folder that match a pattern. Copies that macOS makes in archives are left out.

    Args:
        form: a pattern as for ``Path.glob``, such as ``**/*``.

    Raises:
        UsageError: as for :func:`fl_core.data.names.check_file_names`.
    """
    files = sorted(
        file
        for file in path.glob(form)
        if file.suffix.lower() in IMAGES
        and MAC not in file.relative_to(path).parts
        and file.is_file()
    )
    check_file_names(files)
    return files


@dataclass(frozen=True)
class Reading:
    """Settings for reading data, the keys of a configuration about its files.

    Raises:
        UsageError: a value is invalid. The message names the key and its possible values.
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
    categories: list[str] | None = None
    """Columns of your own table whose cells are words, though they are numbers or codes. A label may be one of them."""
    csv: dict[str, Any] | None = None
    """How pandas reads your own .csv file: sep, decimal, thousands, encoding, na_values, keep_default_na, skiprows,
    quotechar or comment, such as sep=';'."""
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
    group_column: str | None = None
    """Column of what several rows belong to, such as patient_id. Its rows stay in one split."""
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
            duplicate = first_duplicate(names)
            if duplicate:
                raise UsageError(
                    f"{key} must be distinct names; got {duplicate!r} twice."
                )
        for role in ROLES:
            object.__setattr__(self, role, composed(getattr(self, role)))
        if self.csv is not None:
            object.__setattr__(self, "csv", csv_options(self.csv))
        check_values(vars(self), Reading)
        if self.fill_missing_columns and not self.may_be_missing:
            raise UsageError(
                "fill_missing_columns must come with impute mean, median or most_frequent; got none. "
                f"Add {spelled(impute='median')}."
            )

    @classmethod
    def with_keys(cls, keys: Mapping[str, Any]) -> Reading:
        """Return settings from values by name. Those that are left out have their defaults.

        Raises:
            UsageError: a key is unknown or of an earlier version, or a value is
                invalid.
        """
        check_removed(keys)
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
        """Return the settings that differ from their defaults."""
        settings = self.reading_options()
        return {k: v for k, v in settings.items() if v != getattr(Reading, k)}

    @property
    def predicts_numbers(self) -> bool:
        """Return whether labels are numbers, and not names of classes.

        >>> Reading(task="regression").predicts_numbers, Reading().predicts_numbers
        (True, False)
        """
        return self.task != CLASSIFICATION

    @property
    def texts(self) -> Names:
        """Return the columns whose cells keep their spelling: clients, groups, texts, classes and categories."""
        names = [self.client_column, self.group_column, self.text_column]
        names += self.categories or []
        if not self.predicts_numbers:
            names += self.labels
        return tuple(name for name in names if name)

    @property
    def may_be_missing(self) -> bool:
        """Return whether features may be missing because they are filled."""
        return self.impute != IMPUTES[0]

    def check_unasked(self, what: str, *keys: str, way: str = "") -> None:
        """Refuse keys that have no meaning for some data, such as names of columns for images.

        Args:
            what: a clause on the data, with which the message begins.
            keys: the keys.
            way: further advice, which ends the message.

        Raises:
            UsageError: one of the keys does not have its default.
        """
        changed_keys = [
            key for key in keys if getattr(self, key) != getattr(Reading, key)
        ]
        if changed_keys:
            raise UsageError(f"{what}. Leave out {listing(changed_keys)}{way}.")

    def check_plain(self, what: str) -> None:
        """Refuse settings of columns, texts and image files for data without them.

        Only ``scale``, ``impute``, ``clip`` and ``task`` may differ from their
        defaults.

        Args:
            what: the data, with which the message begins.

        Raises:
            UsageError: another key does not have its default. The message names the
                keys.
        """
        accepted = [
            key for key in READING if key not in ("scale", "impute", "clip", "task")
        ]
        explanation = "has no columns to name, and no text or image files to read"
        self.check_unasked(f"{what} {explanation}", *accepted, way=", or name a table")


READING = tuple(field.name for field in fields(Reading))
ROLES = ("client_column", "label_column", "text_column")
LISTS = ("columns", "exclude_columns", "categories")


PLAIN = Reading()
"""The default settings."""


# --- options of pandas -------------------------------------------------------------------------------------------

CSV = {
    "sep": str,
    "decimal": str,
    "thousands": str,
    "encoding": str,
    "na_values": list,
    "keep_default_na": bool,
    "skiprows": int,
    "quotechar": str,
    "comment": str,
}
"""The options of ``pandas.read_csv`` that a table may be read with, each with its type."""
MOST_SKIPPED = 1000
"""The largest number of lines above a header."""


def csv_options(csv: Mapping[str, Any]) -> dict[str, Any]:
    """Check options of ``pandas.read_csv``, and return them. Their values may be texts, as on the command line.

    Stored settings of an earlier version (:class:`Earlier`) stay among them.

    >>> csv_options({"sep": ";", "skiprows": "2", "na_values": "-9,unknown", "keep_default_na": "true"})
    {'sep': ';', 'skiprows': 2, 'na_values': ['-9', 'unknown'], 'keep_default_na': True}
    >>> csv_options({"sep": "tab"})
    {'sep': '\\t'}
    >>> csv_options({"engine": "python"})
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: unknown option of csv 'engine': known: sep, decimal, ...

    Raises:
        UsageError: an option is unknown, a value is invalid, or two options have one
            sign. The message names what is possible.
    """
    if not isinstance(csv, Mapping):
        raise UsageError(f"csv must be options of pandas.read_csv; got {csv!r}.")
    options: dict[str, Any] = {}
    for key, value in csv.items():
        if isinstance(value, Earlier):
            options[EARLIER] = value
            continue
        check_known("option of csv", key, CSV)
        options[key] = _csv_option(key, value)
    signs = [options.get(key) for key in ("sep", "decimal", "thousands", "quotechar")]
    duplicate = first_duplicate([sign for sign in signs if sign])
    if duplicate:
        raise UsageError(
            f"sep, decimal, thousands and quotechar of csv must be different signs; got {duplicate!r} twice."
        )
    return options


def _csv_option(key: str, value: Any) -> Any:
    if key == "na_values":
        values = value
        if isinstance(value, str):
            values = value.split(",")
        if not isinstance(values, list | tuple):
            values = [values]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, str | int | float):
                raise UsageError(
                    f"{key} of csv must be texts or numbers; got {item!r}. An empty cell is missing anyway."
                )
        return [str(item) for item in values]
    if key == "keep_default_na":
        constants = {"true": True, "false": False}
        constant = constants.get(str(value).lower())
        if constant is None:
            raise UsageError(f"{key} of csv must be true or false; got {value!r}.")
        return constant
    if key == "skiprows":
        text = str(value)
        if not text.isdecimal() or int(text) > MOST_SKIPPED:
            raise UsageError(
                f"{key} of csv must be a number of lines, from 0 to {MOST_SKIPPED:,}; got {value!r}."
            )
        return int(text)
    if key == "encoding":
        try:
            "".encode(value)  # also refuses codecs of bytes, such as zlib
        except (LookupError, TypeError) as error:
            raise UsageError(
                f"{key} of csv must be such as utf-8, latin-1 or cp1252; got {value!r}."
            ) from error
        return value
    sign = value
    if key == "sep" and value in ("tab", "\\t"):
        sign = "\t"
    is_quote = key != "quotechar" and sign == '"'
    if not isinstance(sign, str) or len(sign) != 1 or sign in "\r\n" or is_quote:
        raise UsageError(f"{key} of csv must be one character; got {value!r}.")
    return sign


# --- settings of earlier versions --------------------------------------------------------------------------------

REMOVED = {
    "separator": "Write csv={'sep': VALUE}.",
    "encoding": "Write csv={'encoding': VALUE}.",
    "decimal": "Write csv={'decimal': VALUE}.",
    "thousands": "Write csv={'thousands': VALUE}.",
    "missing": "Write csv={'na_values': VALUE}.",
    "word_columns": "Write categories=NAME.",
    "keep_ids": "Name the columns to use: columns=NAME.",
    "fold_case": "Write `table[NAME] = table[NAME].str.strip().str.lower()`, and read that table.",
    "date_columns": "Write `table[NAME] = (pd.to_datetime(table[NAME], format=FORMAT, utc=True) - pd.Timestamp("
    "'1970-01-01 12:00', tz='UTC')) / pd.Timedelta(days=1)`, and read that table.",
    "label_numbers": "Write `table[NAME] = pd.to_numeric(table[NAME])`, and read that table.",
}
"""Settings of earlier versions, each with its new form."""


class Earlier(dict[str, Any]):
    """Settings of an earlier version that changed cells: date_columns, fold_case and label_numbers.

    Only stored settings of runs and models have them, next to the options of pandas.
    """

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Earlier:
        """Return the stored settings of this kind that differ from their defaults."""
        dates = stored.get("date_columns")
        settings = {
            "date_columns": [*map(str, dates if isinstance(dates, list) else ())],
            "fold_case": stored.get("fold_case") is True,
            "label_numbers": stored.get("label_numbers") is True,
        }
        return cls({key: value for key, value in settings.items() if value})


EARLIER = "earlier"
"""The key of :class:`Earlier` next to the options of pandas."""


def new_form(key: str, value: Any) -> str:
    """Return the advice on what replaces a removed setting with this value.

    >>> new_form("separator", ";"), new_form("word_columns", ["dose"])
    ("Write csv={'sep': ';'}.", "Write categories=['dose'].")
    """
    advice = REMOVED[key].replace("VALUE", repr(value))
    if not isinstance(value, list):
        return advice
    if "[NAME]" not in advice:
        return advice.replace("NAME", repr(value))
    return " ".join(advice.replace("NAME", repr(name)) for name in value)


def check_removed(keys: Iterable[str]) -> None:
    """Refuse settings of earlier versions with their new form.

    >>> check_removed(["separator"])
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: separator must be left out: it is no setting any more. Write csv={'sep': VALUE}.

    Raises:
        UsageError: there is such a setting. The message names the first.
    """
    for key in keys:
        if key in REMOVED:
            raise UsageError(
                f"{key} must be left out: it is no setting any more. {REMOVED[key]}"
            )


def current(
    stored: Mapping[str, Any], is_csv: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return stored settings in their present form, and the names of removed ones.

    Removed settings are named only if they did not have their default.

    Settings of an earlier version are recognised by their key ``separator``. That
    version took more marks as missing cells, and changed cells as :class:`Earlier`
    says. Other settings are copied, and have no removed ones.

    >>> current({"separator": ";", "keep_ids": False, "word_columns": ["dose"], "impute": "mean"})
    ({'impute': 'mean', 'categories': ['dose'], 'csv': {...'sep': ';'}}, ['separator', 'word_columns'])

    Args:
        stored: the settings by name, as a run or a model stored them.
        is_csv: whether the settings are for a .csv file.
    """
    if "separator" not in stored:
        settings = dict(stored)
        options = settings.get("csv")
        if isinstance(options, Mapping) and isinstance(options.get(EARLIER), Mapping):
            settings["csv"] = {**options, EARLIER: Earlier.of(options[EARLIER])}
        return settings, []
    settings = {key: value for key, value in stored.items() if key not in REMOVED}
    removed_keys = [
        key for key in REMOVED if stored.get(key) not in (None, False, *_USUAL)
    ]
    if stored.get("word_columns"):
        settings["categories"] = stored["word_columns"]
    missing_marks = ["?", ".", *(stored.get("missing") or ())]
    csv: dict[str, Any] = {}
    if is_csv:  # other files say themselves how they are written
        csv = {"keep_default_na": True, "na_values": missing_marks}
        option_of_setting = {
            "separator": "sep",
            "encoding": "encoding",
            "decimal": "decimal",
            "thousands": "thousands",
        }
        csv |= {
            name: stored[key]
            for key, name in option_of_setting.items()
            if key in removed_keys
        }
    if earlier_settings := Earlier.of(stored):
        csv[EARLIER] = earlier_settings
    if csv:
        settings["csv"] = csv
    return settings, removed_keys


_USUAL = (",", "utf-8", ".")
