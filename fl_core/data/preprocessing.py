"""The columns of a table as numbers: their cells, and the preparation that is fitted on training samples only."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fl_core.data.columns import (
    PLAIN_NUMBERS,
    DataFault,
    NumberFormat,
    Reading,
    cell_text,
    composed,
    format_of,
    is_missing,
    is_number,
    suspicion,
)
from fl_core.errors import UsageError, listing, read_as, spelled

Cells: TypeAlias = "pd.Categorical | NDArray[np.float64]"
"""A column of text, each word once, or of numbers, NaN where one is missing."""
_EPOCH, _CLOCK = (pd.Timestamp(day, tz="UTC") for day in ("1970-01-01", "1900-01-01"))
DATE_FORMS = {
    "ISO8601": _EPOCH,
    **dict.fromkeys(("%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y"), _EPOCH),
    **dict.fromkeys(("%d-%m-%Y", "%m-%d-%Y", "%d-%b-%Y", "%d%b%Y"), _EPOCH),
    **dict.fromkeys(("%H:%M", "%H:%M:%S"), _CLOCK),
}
"""The forms of dates, and the day from which each counts."""


def cells_of(column: pd.Series, text: bool = False) -> Cells:
    """Return a column's cells: float64 [n] with NaN for missing numbers, or text in Unicode's composed form.

    Raises:
        DataFault: a cell is a list, an array or a dictionary, or numbers are complex.
    """
    kind = column.dtype
    if pd.api.types.is_complex_dtype(kind):
        raise DataFault(
            f"cells must be real numbers; got {kind}.",
            "Make columns of the real and the imaginary part.",
        )
    if pd.api.types.is_numeric_dtype(column) and not text:
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    if isinstance(kind, pd.CategoricalDtype):
        place = column.cat.codes.to_numpy()
        words = kind.categories
    else:
        if pd.api.types.infer_dtype(column, skipna=True) != "string":
            nested = [isinstance(each, dict | list | np.ndarray) for each in column]
            rule = "a cell must have one number or text"
            refuse_where(np.array(nested, dtype=bool), column.to_numpy(), rule)
            column = column.map(cell_text)
        place, words = pd.factorize(column)
    names = [composed(cell_text(word)) for word in words]
    if (place < 0).any():
        names.append("")
    code, distinct = pd.factorize(np.array(names, dtype=object))
    code = code[place]
    cells = pd.Categorical.from_codes(code, pd.Index(distinct, dtype=object))
    used = np.bincount(code, minlength=len(distinct))
    return cells if used.all() else cells.remove_unused_categories()


def texts_of(cells: Cells | NDArray[np.generic]) -> pd.Categorical:
    """Return a column's cells as text. A missing number has no text."""
    if isinstance(cells, pd.Categorical):
        return cells
    text = cells_of(pd.Series(cells), text=True)
    assert isinstance(text, pd.Categorical)
    return text


def read_column(name: str, cells: Cells, reading: Reading) -> Cells:
    """Return a column of features as numbers, with days for dates, or as words.

    Raises:
        DataFault: words are numbers or dates in another spelling, or a value is no finite number.
    """
    leave = f"Correct it, or leave the column out: {spelled(exclude_columns=[name])}."
    try:
        if not isinstance(cells, np.ndarray):
            given, words = reading.numbers, cells.categories
            if name in (reading.date_columns or ()):
                return dates(cells)
            if name in (reading.word_columns or ()):
                return cells
            if not format_of(words, given):
                check_spelling(cells, reading, name)
                forms = (given, PLAIN_NUMBERS)
                if not any(form.fits(word) for word in words for form in forms):
                    return cells
            cells = numbers(cells, given)
        with np.errstate(over="ignore"):
            beyond = np.isinf(cells.astype(np.float32))
        refuse_where(beyond, cells, "the value must be a finite float32")
    except DataFault as fault:
        if fault.repair or fault.column:
            raise
        raise DataFault(fault.what, leave, fault.row, exclude_columns=[name]) from fault
    return cells


def check_spelling(cells: pd.Categorical, reading: Reading, feature: str = "") -> None:
    """Check that words are no numbers or dates in another spelling (:func:`fl_core.data.columns.suspicion`).

    If signs are given and fit a cell, the others are stray words.

    Args:
        feature: the column's name if it is a feature. A label cannot be left out.
    """
    given, words = reading.numbers, cells.categories
    if given != PLAIN_NUMBERS and any(map(given.fits, words)):
        return
    found = suspicion(words, feature)
    if not found:
        return
    way, repair = f"{found.way}.", found.repair
    if feature:
        way += f" Or keep the words: {spelled(word_columns=[feature])}."
    elif {"date_columns", "exclude_columns"} & repair.keys():
        way, repair = "Write the numbers alone.", {}
    known = sorted(word for word in words if not is_missing(word))
    some = listing(map(repr, known), 3)
    rule = f"cells must be numbers or words; got {some}, {found.what}."
    raise DataFault(rule, way, column=feature, **repair)


def numbers(
    cells: Cells, given: NumberFormat = PLAIN_NUMBERS, way: str = ""
) -> NDArray[np.float64]:
    """Convert text to float64 [n], NaN for a cell without a value. Numbers stay as they are.

    Args:
        given: the signs in the numbers. Plain numbers are read, too.
        way: what to do about other cells.

    Raises:
        DataFault: names the first cell that is not a number.
    """
    if isinstance(cells, np.ndarray):
        return cells
    words = cells.categories
    form = format_of(words, given) or given
    known = np.array([*map(form.fits, words)], dtype=bool)
    others = ~(known[cells.codes] | lacks_value(cells))
    if others.any():
        row = int(np.argmax(others))
        signs = ("point", "comma") if form.decimal == "." else ("comma", "point")
        other = is_number(cells[row].replace(",", ".", 1))
        point = f" with a decimal {signs[0]}, not a {signs[1]}" if other else ""
        raise DataFault(
            f"the cell must be a number{point}; got {cells[row]!r} "
            f"({others.sum():,} of {len(cells):,} cells are no numbers).",
            way,
            row,
        )
    values = np.full(len(words), np.nan)
    values[known] = [form.number(word) for word in words[known]]
    return values[cells.codes]


def lacks_value(cells: Cells) -> NDArray[np.bool_]:
    """Return where a column has no value."""
    if isinstance(cells, np.ndarray):
        return np.isnan(cells)
    missing = [*map(is_missing, cells.categories)]
    return np.array(missing, dtype=bool)[cells.codes]


def dates(cells: pd.Categorical) -> NDArray[np.float64]:
    """Return dates as days since 1970 [n], with NaN where a cell is missing.

    All cells have one form of :data:`DATE_FORMS`. Times alone are parts of a day. A year has four digits.

    >>> dates(pd.Categorical(["1970-01-02", "", "1970-01-01T12:00"])).tolist()
    [1.0, nan, 0.5]

    Raises:
        DataFault: names the first cell that is no date, or cells that fit two forms.
    """
    words = [word.strip() for word in cells.categories]
    lacking = np.array([*map(is_missing, words)], dtype=bool)
    fits, first, way = [], 0, "Write 2024-12-31."
    for form in DATE_FORMS:
        found = pd.to_datetime(pd.Series(words), format=form, utc=True, errors="coerce")
        bad = (found.isna() & ~lacking).to_numpy()[cells.codes]
        if bad.any():
            first = max(first, int(np.argmax(bad)))
            continue
        days = (found - DATE_FORMS[form]) / pd.Timedelta(days=1)
        fits.append(days.to_numpy(np.float64, na_value=np.nan)[cells.codes])
    if not fits:
        raise DataFault(f"dates must have one form; got {cells[first]!r}.", way, first)
    if any(not np.array_equal(other, fits[0], equal_nan=True) for other in fits[1:]):
        raise DataFault(
            f"dates must not be day/month or month/day alike; got {cells[0]!r}.", way
        )
    return fits[0]


def date_text(days: float) -> str:
    """Return days since 1970 as a date, or a part of a day as a time.

    >>> date_text(19358.0), date_text(0.25)
    ('2023-01-01', '06:00')
    """
    when = pd.Timestamp(0) + pd.Timedelta(days=days)
    return f"{when:%H:%M}" if 0 <= days <= 1 else f"{when:%Y-%m-%d}"


def refuse_where(
    bad: NDArray[np.bool_], values: Any, rule: str, way: str = "", **repair: Any
) -> None:
    """Refuse values, and name the first bad one.

    Args:
        bad: whether a value is refused. rule: what values must be. way: what to do. repair: the settings for it.
    """
    if bad.any():
        row = int(np.argmax(bad))
        got = values[row]
        shown = repr(str(got)) if isinstance(got, str) else got  # it may be empty
        raise DataFault(f"{rule}; got {shown}.", way, row, **repair)


# --- preparation -----------------------------------------------------------------------------------------------

MOST = 100
"""The maximum number of different words in a column."""
MOST_LISTED = 10_000
"""The maximum number of words that a list gives a column, in a file of a model or a run."""
FEW = 10
"""The number of different words that any column may have, even a short one."""

Categories = tuple[tuple[str, ...], ...]
"""The words of each column. A column of numbers has none."""


def words_of(name: str, cells: Cells) -> tuple[str, ...]:
    """Return the words of a column; an empty cell is a word of its own.

    Raises:
        DataFault: there are too many words.
    """
    words = tuple(sorted({word.strip() for word in texts_of(cells).categories}))
    if len(words) > min(MOST, max(FEW, len(cells) // 2)):
        raise DataFault(
            f"there must be numbers, or words that come again ({MOST} at most); got "
            f"{len(words):,} different words.",
            f"Read these texts alone: {spelled(text_column=name)}. Or leave them out:",
            exclude_columns=[name],
        )
    return words


def codes(cells: Cells, words: Sequence[str]) -> NDArray[np.float64]:
    """Return each cell's place among the words; a word that is not among them has the place after the last.

    >>> codes(np.array(["m", " f", "x"]), ("f", "m")).tolist()
    [1.0, 0.0, 2.0]
    """
    text = texts_of(cells)
    place = {word: k for k, word in enumerate(words)}
    places = [place.get(word.strip(), len(words)) for word in text.categories]
    return np.array(places, dtype=np.float64)[text.codes]


def learn_categories(x: NDArray[np.generic], words: Categories) -> Categories:
    """Return the words that rows [n, d] have, in their order."""
    found = []
    for k, each in enumerate(words):
        present = set(x[:, k].tolist()) if each else ()
        found.append(tuple(word for j, word in enumerate(each) if j in present))
    return tuple(found)


def recode(
    x: NDArray[np.generic], words: Categories, target: Categories
) -> NDArray[np.generic]:
    """Return rows [n, d] with the places of their words among others."""
    x = x.copy()
    for k, own in enumerate(words):
        if own:
            cells = pd.Categorical.from_codes(x[:, k].astype(np.int64), own)
            x[:, k] = codes(cells, target[k])
    return x


def one_hot(x: NDArray[np.float32], words: Categories) -> NDArray[np.float32]:
    """Return rows with a column for each word, and one for all other words, instead of the words' places.

    >>> one_hot(np.array([[7, 0], [8, 2]], dtype=np.float32), ((), ("f", "m"))).tolist()
    [[7.0, 1.0, 0.0, 0.0], [8.0, 0.0, 0.0, 1.0]]
    """
    if not any(words):
        return x
    parts = [
        np.eye(len(each) + 1, dtype=np.float32)[x[:, k].astype(np.int64)]
        if each
        else x[:, [k]]
        for k, each in enumerate(words)
    ]
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def width(columns: int, words: Collection[Sequence[str]]) -> int:
    """Return the number of columns after :func:`one_hot`."""
    return columns + sum(len(each) for each in words)


FIXED = "fixed"
ODD = 0.05
"""Share of a column's new numbers far from the training samples', above which they are reported as odd."""


@dataclass(frozen=True)
class Preprocessing:
    """The preparation of a table's rows for a model: (x - centre) / spread, after filling missing x.

    A run of a table keeps it in its ``config.json`` under ``preprocessing``, so that new rows are prepared alike.

    >>> import numpy as np
    >>> from fl_core.data.preprocessing import Preprocessing, fitted
    >>> made = fitted(np.array([[1.0, 5.0], [3.0, np.nan]]), "standard", "mean", ("age", "dose"))
    >>> made.fill, made.centre, made.spread
    ((2.0, 5.0), (2.0, 5.0), (1.0, 1.0))
    >>> Preprocessing.from_json(made.to_json()).transform(np.array([[np.nan, 7.0]])).tolist()
    [[0.0, 2.0]]

    Attributes:
        columns: the feature columns' names, in the order in which the model takes them. Empty means without names.
        scale, impute: the requested methods. Scale :data:`FIXED` means a dataset's own numbers, which are not fitted.
        fill: the value for missing numbers in each column. Empty means that none may be missing.
        centre, spread: of each column, subtracted and then divided by. Empty means no scaling.
        categories: the words of each column that become columns. A column of numbers has none. Empty means all numbers.
        low, high: the 1 % and 99 % quantiles of each column's training samples, to compare new rows with.
        target: the training targets' mean and standard deviation, if a model predicts (target - mean) / deviation.
    """

    columns: tuple[str, ...] = ()
    scale: str = "none"
    impute: str = "none"
    fill: tuple[float, ...] = ()
    centre: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    categories: Categories = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    target: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        pairs = ((self.centre, self.spread), (self.low, self.high))
        parts = (self.columns, self.fill, self.categories, *sum(pairs, ()))
        widths = {len(part) for part in parts if part}
        whole = all(bool(one) == bool(other) for one, other in pairs)
        if len(widths) > 1 or not whole or len(self.target) not in (0, 2):
            raise UsageError(
                f"parts of a preprocessing must have one number for each column; got {sorted(widths)} numbers. "
                "Store it again."
            )
        most = max(map(len, self.categories), default=0)
        if most > MOST_LISTED:
            raise UsageError(
                f"categories of a column must be at most {MOST_LISTED:,} words; got {most:,}. Store it again."
            )

    @property
    def width(self) -> int:
        """Return the number of columns that it takes. 0 means any number."""
        return max(map(len, (self.columns, self.fill, self.centre, self.categories)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the prepared columns (:func:`one_hot`): ``sex=f`` for a word. Empty means no names."""
        found: list[str] = []
        for k, name in enumerate(self.columns):
            words = self.categories[k] if self.categories else ()
            found += [f"{name}={word}" for word in (*words, "other")] if words else [name]  # fmt: skip
        return tuple(found)

    def transform(self, x: NDArray[np.generic]) -> NDArray[np.float32]:
        """Return rows [n, d] as the model takes them, float32 [n, D]. Filling and scaling are computed in float64.

        A word is given as its place among the column's categories, or the place after the last.

        Raises:
            UsageError: the number of columns differs, or a value is missing and not filled.
        """
        if x.ndim != 2 or (self.width and x.shape[1] != self.width):
            raise UsageError(
                f"rows must have {self.width} columns; got an array of shape {list(x.shape)}."
            )
        missing = np.argwhere(np.isnan(x))
        if len(missing) and not self.fill:
            row, column = missing[0].tolist()
            named = repr(self.columns[column]) if self.columns else column
            rule = f"the value of column {named} must not be missing."
            raise DataFault(rule, "Fill it first.", row)
        if not self.fill and not self.centre:
            return one_hot(np.ascontiguousarray(x, dtype=np.float32), self.categories)
        values = x.astype(np.float64)
        if self.fill:
            values = np.where(np.isnan(values), self.fill, values)
        if self.centre:
            values = (values - self.centre) / self.spread
        return one_hot(values.astype(np.float32), self.categories)

    def oddities(
        self, x: NDArray[np.generic], dates: Collection[str] = ()
    ) -> dict[str, tuple[str, NDArray[np.bool_]]]:
        """Return what is odd about columns of new rows [n, d], next to the training samples, and in which rows.

        A word was not seen. Or more than :data:`ODD` of a column lie outside of [q1 - 3 w, q99 + 3 w], where q1 and
        q99 are the quantiles of the training samples and w is their distance. Or all values are missing.

        Args:
            dates: columns of days since 1970.
        """
        found = {}
        for k, values in enumerate(x.T):
            name = repr(self.columns[k]) if self.columns else str(k)
            words = self.categories[k] if self.categories else ()
            if words:
                odd, known = values == len(words), len(values)
                what = f"words that no training sample has, next to {listing(map(repr, words), 4)}"
            elif self.low:
                low, high = self.low[k], self.high[k]
                apart = 3 * (high - low)
                odd = (values < low - apart) | (values > high + apart)
                known = int((~np.isnan(values)).sum())
                ends = f"{low:g} to {high:g}"
                if self.columns and self.columns[k] in dates:
                    ends = " to ".join(map(date_text, (low, high)))
                what = f"far outside of the training samples' range, {ends}"
            else:
                continue
            if odd.sum() > (0 if words else ODD * known):
                found[name] = f"{odd.sum():,} of {known:,} values are {what}", odd
            lacking = values == words.index("") if "" in words else np.isnan(values)
            if lacking.all() and (words or self.fill):
                found[name] = "no row has a value, so all are filled", lacking
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as a dictionary of plain numbers and text."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Return the preprocessing from the dictionary of :meth:`to_json`.

        Raises:
            UsageError: a key is unknown, a value has another type, or a column has too many categories.
        """
        made: Preprocessing = read_as(cls, values, "a preprocessing")
        return made


def fitted(
    x: NDArray[np.generic],
    scale: str,
    impute: str,
    columns: Sequence[str] = (),
    categories: Categories = (),
) -> Preprocessing:
    """Fit the preprocessing on training samples, by scikit-learn's SimpleImputer and its scaler of that name.

    A constant column has spread 1.

    Args:
        x: training samples [n, d] of all clients together. Missing values are NaN.
        scale, impute: of :data:`fl_core.data.columns.SCALES` and :data:`IMPUTES`.
        columns: their names.
        categories: the words of each column. Columns of words are neither filled nor scaled.

    Raises:
        UsageError: a column to fill has no value in any training sample.
    """
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

    values = x.astype(np.float64)
    values[:, [k for k, words in enumerate(categories) if words]] = (
        0.0  # words are neither filled nor scaled
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without values
        quantiles = np.nan_to_num(np.nanquantile(values, (0.01, 0.99), axis=0))
    fill: list[float] = []
    if impute != "none":
        empty = np.flatnonzero(np.isnan(values).all(axis=0)).tolist()
        if empty:
            names = listing(columns[k] if columns else str(k) for k in empty)
            raise UsageError(
                f"column {names} must have a value in a training sample to be filled. Leave it out."
            )
        imputer = SimpleImputer(strategy=impute).fit(values)
        fill = imputer.statistics_.tolist()
        values = imputer.transform(values)
    found = Preprocessing(
        tuple(columns),
        scale,
        impute,
        tuple(fill),
        categories=categories,
        low=tuple(quantiles[0].tolist()),
        high=tuple(quantiles[1].tolist()),
    )
    if scale == "none":
        return found
    if scale == "minmax":
        scaler = MinMaxScaler().fit(values)
        centre, spread = scaler.data_min_, 1 / scaler.scale_
    elif scale == "robust":
        scaler = RobustScaler().fit(values)
        centre, spread = scaler.center_, scaler.scale_
    else:
        scaler = StandardScaler().fit(values)
        centre = (
            np.array(fill) if impute == "mean" else scaler.mean_
        )  # the same mean, so that filled values become 0
        spread = scaler.scale_
    return replace(found, centre=tuple(centre.tolist()), spread=tuple(spread.tolist()))
