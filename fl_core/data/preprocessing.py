"""The preparation of a table's columns for a model, which is fitted on training samples only."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_core.data.faults import DataFault
from fl_core.data.names import Names
from fl_core.data.values import Array, Bools, Cells, Floats, texts_of
from fl_core.errors import UsageError, listing, read_as

MOST_LISTED = 10_000
"""The maximum number of categories of a column, so that files of runs and models
stay small."""
Categories = tuple[Names, ...]
"""The words of each column. A column of numbers has none."""


def codes(cells: Cells, words: Sequence[str]) -> Floats:
    """Return the index of each cell's word in ``words``, [n]; unknown words get the index after the last.

    >>> codes(np.array(["m", " f", "x"]), ("f", "m")).tolist()
    [1.0, 0.0, 2.0]
    """
    text = texts_of(cells)
    index_of_word = {word: k for k, word in enumerate(words)}
    word_indices = [
        index_of_word.get(word.strip(), len(words)) for word in text.categories
    ]
    return np.array(word_indices, dtype=np.float64)[text.codes]


def learn_categories(x: Array, words: Categories) -> Categories:
    """Return each column's categories that occur in the rows, in the order of ``words``.

    Args:
        x: numbers [n, d]. In a column of categories a number is the index of a word in ``words``.
        words: each column's known words; empty for a column of numbers.
    """
    present_words = []
    for k, known_words in enumerate(words):
        present_places: Array = np.empty(0, dtype=np.int64)
        if known_words:
            present_places = np.flatnonzero(np.bincount(x[:, k].astype(np.int64)))
        present_words.append(
            tuple(known_words[position] for position in present_places)
        )
    return tuple(present_words)


def recode(x: Array, words: Categories, target: Categories) -> Array:
    """Return rows [n, d] whose words are indices into ``target`` in place of ``words``.

    A word that ``target`` lacks gets the index after the last. Equal lists return ``x``
    itself, and others a copy.
    """
    if words == target:
        return x
    x = x.copy()
    for k, known_words in enumerate(words):
        if known_words != target[k]:
            new_indices = codes(np.array(known_words, dtype=object), target[k])
            x[:, k] = new_indices[x[:, k].astype(np.int64)]
    return x


def one_hot(x: NDArray[np.float32], words: Categories) -> NDArray[np.float32]:
    """Return rows in which each column of words becomes a column for each word, and one for all other words.

    A word is given as its index, and any other word as the index after the last.
    Without columns of words the rows are returned as they are.

    >>> one_hot(np.array([[7, 0], [8, 2]], dtype=np.float32), ((), ("f", "m"))).tolist()
    [[7.0, 1.0, 0.0, 0.0], [8.0, 0.0, 0.0, 1.0]]
    """
    if not any(words):
        return x
    columns = [
        np.eye(len(known_words) + 1, dtype=np.float32)[x[:, k].astype(np.int64)]
        if known_words
        else x[:, [k]]
        for k, known_words in enumerate(words)
    ]
    return np.ascontiguousarray(np.concatenate(columns, axis=1))


FIXED = "fixed"
REACH = 10.0
"""Distance of a fence from the nearer quartile, in distances between the quartiles."""
NEAR = 1.5
"""Distance of a clipped value from the nearer quartile, in distances between the
quartiles."""
LEAST = 20
"""The minimum number of values other than the commonest that can give fences.

They are used if the quartiles of all values are equal."""
MOST_OUTSIDE = 0.01
"""Share of a column's training cells outside its fences, above which it is not clipped."""
NO_FENCE = float(np.finfo(np.float32).max)
"""The upper fence of a column without fences. The lower one is its negative.

Every value lies between them."""
ROWS, COLUMNS = 4096, 8
"""Rows that are prepared at once, and columns that are taken out of rows together."""
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
        scale, impute: the requested methods. Scale :data:`FIXED` means numbers that the dataset brings, which are not
            fitted.
        fill: the value for missing numbers in each column. Empty means that none may be missing.
        centre, spread: for each column the number that is subtracted, and then the divisor. Empty means no scaling.
        categories: the words of each column that become columns. A column of numbers has none. Empty means all numbers.
        low, high: the 1 % and 99 % quantiles of each column's training samples after
            clipping, to compare new rows with. Empty means no comparison.
        target: the training targets' mean and standard deviation, if a model predicts (target - mean) / deviation.
            Otherwise empty.
        lowest, highest: the fences of each column. Values outside are clipped (:func:`clipped`) before anything else.
            Empty means that nothing is clipped.

    Raises:
        UsageError: parts differ in their number of columns or are incomplete, or a
            column has more than :data:`MOST_LISTED` categories. Or a column of words is
            clipped or scaled.
    """

    columns: Names = ()
    scale: str = "none"
    impute: str = "none"
    fill: tuple[float, ...] = ()
    centre: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    categories: Categories = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    target: tuple[float, ...] = ()
    lowest: tuple[float, ...] = ()
    highest: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        pairs = (
            (self.centre, self.spread),
            (self.low, self.high),
            (self.lowest, self.highest),
        )
        fields_by_column = (self.columns, self.fill, self.categories, *sum(pairs, ()))
        widths = {
            len(field_values) for field_values in fields_by_column if field_values
        }
        is_complete = all(bool(bound) == bool(partner) for bound, partner in pairs)
        if len(widths) > 1 or not is_complete or len(self.target) not in (0, 2):
            widths_there = sorted(widths)
            raise UsageError(
                f"parts of a preprocessing must have one number for each column; got {widths_there} numbers. "
                "Store it again."
            )
        for k, words in enumerate(self.categories):
            ends = ((self.lowest[k], self.highest[k]) if self.lowest else (0.0, len(words)))  # fmt: skip
            scaling = (self.centre[k], self.spread[k]) if self.centre else (0.0, 1.0)
            is_whole = ends[0] <= 0 and ends[1] >= len(words)
            if words and not (is_whole and scaling == (0.0, 1.0)):
                raise UsageError(
                    f"a column of words must be neither clipped nor scaled; got other numbers for column {k}. "
                    "Store it again."
                )
        most_words = max(map(len, self.categories), default=0)
        if most_words > MOST_LISTED:
            raise UsageError(
                f"categories of a column must be at most {MOST_LISTED:,} words; got {most_words:,}. Store it again."
            )

    @property
    def width(self) -> int:
        """Return the number of columns that :meth:`transform` takes; 0 means any number."""
        return max(map(len, (self.columns, self.fill, self.centre, self.categories)))

    @property
    def inputs(self) -> Names:
        """Return the names of the prepared columns (:func:`one_hot`): ``sex=f`` for a word. Empty means no names."""
        names: list[str] = []
        for k, name in enumerate(self.columns):
            words = self.categories[k] if self.categories else ()
            names += [f"{name}={word}" for word in (*words, "other")] if words else [name]  # fmt: skip
        return tuple(names)

    def outside(self, x: Array) -> Bools:
        """Return which cells of rows [n, d] lie outside the fences, bool [n, d]. A missing cell does not."""
        if not self.lowest:
            return np.zeros(x.shape, dtype=bool)
        return (x < np.array(self.lowest)) | (x > np.array(self.highest))

    def transform(self, x: Array) -> NDArray[np.float32]:
        """Return rows [n, d] as the model takes them, float32 [n, D] with D prepared columns (:attr:`inputs`).

        Values outside the fences are clipped first. Filling and scaling are computed in float64.

        A word is given as its index in the column's categories, or the index after the last. It is never filled.

        Raises:
            UsageError: x is no array of rows with as many columns, or a value is missing
                and not filled.
        """
        if x.ndim != 2 or (self.width and x.shape[1] != self.width):
            got_shape = list(x.shape)
            raise UsageError(
                f"rows must have {self.width} columns; got an array of shape {got_shape}."
            )
        row_blocks = (x[start : start + ROWS] for start in range(0, len(x) or 1, ROWS))
        first_part = self._prepared(next(row_blocks), 0)
        prepared_rows = np.empty((len(x), first_part.shape[1]), dtype=np.float32)
        prepared_rows[:ROWS] = first_part
        for start, row_block in zip(range(ROWS, len(x), ROWS), row_blocks, strict=True):
            prepared_rows[start : start + ROWS] = self._prepared(row_block, start)
        return prepared_rows

    def _prepared(self, x: Array, start: int) -> NDArray[np.float32]:
        """Return some rows as the model takes them.

        Args:
            x: the rows [n, d].
            start: the number of the first one, for messages.

        Raises:
            DataFault: a value is missing and not filled.
        """
        is_missing = np.isnan(x)
        if self.fill:  # numbers alone
            has_words = [bool(words) for words in self.categories] or [False]
            is_missing = is_missing & has_words
        missing_cells = np.argwhere(is_missing)
        if len(missing_cells):
            row, column = missing_cells[0].tolist()
            column_text = column
            if self.columns:
                column_text = repr(self.columns[column])
            rule = f"the value of column {column_text} must not be missing."
            raise DataFault(rule, "Fill it first.", row=start + row)
        if self.outside(x).any():
            bounds = np.array(self.lowest), np.array(self.highest)
            x = clipped(x.astype(np.float64), *bounds)
        if not self.fill and not self.centre:
            return one_hot(np.ascontiguousarray(x, dtype=np.float32), self.categories)
        values = np.asarray(x, dtype=np.float64)
        if self.fill:
            values = np.where(np.isnan(values), self.fill, values)
        if self.centre:
            values = (values - self.centre) / self.spread
        return one_hot(values.astype(np.float32), self.categories)

    def oddities(self, x: Array) -> dict[str, tuple[str, Bools]]:
        """Return the columns of new rows [n, d] that differ from the training samples.

        The keys are the columns' names in quotation marks, or their numbers from 0. The
        values say how they differ, and in which rows, bool [n]. The dictionary is empty
        if no column differs.

        Let q1 and q99 be the 1 % and 99 % quantiles of the training samples, and w
        their distance. A column is odd in one of these cases: a word was not seen; a
        share above :data:`ODD` lies outside [q1 - 3 w, q99 + 3 w]; more than half of
        the values, and more than five, lie outside [q1, q99]; or all values are
        missing. Numbers without stored quantiles are not examined.
        """
        faults = {}
        for k, values in enumerate(x.T):
            name = repr(self.columns[k]) if self.columns else str(k)
            words = self.categories[k] if self.categories else ()
            if words:
                is_odd, n_values = values == len(words), len(values)
                some_words = listing(map(repr, words), 4)
                explanation = f"words that no training sample has, next to {some_words}"
            elif self.low:
                low, high = self.low[k], self.high[k]
                n_values = int((~np.isnan(values)).sum())
                distances = np.abs(values - np.clip(values, low, high))
                most_outside = (distances > 0).sum() > max(
                    n_values, 10
                ) / 2  # as in another unit
                is_odd = distances > (0 if most_outside else 3 * (high - low))
                ends = f"{low:g} to {high:g}"
                explanation = f"far outside of the training samples' range, {ends}"
            else:
                continue
            if is_odd.sum() > (0 if words else ODD * n_values):
                faults[name] = (
                    f"{is_odd.sum():,} of {n_values:,} values are {explanation}",
                    is_odd,
                )
            is_missing, outcome = np.isnan(values), "are filled"
            if "" in words:
                is_missing = values == words.index("")
                outcome = "are as the training samples without one"
            if is_missing.all() and (words or self.fill):
                faults[name] = f"no row has a value, so all {outcome}", is_missing
        return faults

    def to_json(self) -> dict[str, Any]:
        """Return the preprocessing as a dictionary of plain numbers and text."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Return the preprocessing from the dictionary of :meth:`to_json`.

        Raises:
            UsageError: a key is unknown, a value has another type, parts differ in
                their number of columns, or a column has too many categories.
        """
        preparation: Preprocessing = read_as(cls, values, "a preprocessing")
        return preparation


def fence(values: Floats) -> tuple[float, float]:
    """Return the fences of a client's values [n]: :data:`REACH` quartile distances below and above the quartiles.

    If the quartiles are equal, they are taken again without the commonest value. At
    least :data:`LEAST` values must remain. If these quartiles are equal, too, the
    commonest value and this one take their place. Columns of 0 and 1 have the quartiles
    0 and 1 if each of the two occurs :data:`LEAST` times.

    >>> fence(np.arange(101.0)), fence(np.repeat([0.0, 1.0], [9, 2]))
    ((-475.0, 575.0), (3.4028234663852886e+38, -3.4028234663852886e+38))
    >>> fence(np.repeat([0.0, 1.0, 1000.0], [90, 25, 1]))
    (-10.0, 11.0)

    Returns:
        The lower and the upper fence. Without fences the lower one is :data:`NO_FENCE`,
        and the upper one is its negative, so that neither changes a minimum or maximum
        over clients.
    """
    no_fences = NO_FENCE, -NO_FENCE
    # most columns that are not yes and no show it at once
    if all(
        np.isin(values_part, (0, 1)).all() for values_part in (values[:LEAST], values)
    ):
        n_rarer = min(values.sum(), len(values) - values.sum())
        return (-REACH, 1 + REACH) if n_rarer >= LEAST else no_fences
    quartile_1, quartile_3 = np.quantile(values, (0.25, 0.75))
    if quartile_1 == quartile_3:
        common_value = quartile_1  # half of all values equal it
        other_values = values[values != common_value]
        if len(other_values) < LEAST:
            return no_fences
        quartile_1, quartile_3 = np.quantile(other_values, (0.25, 0.75))
        if quartile_1 == quartile_3:
            quartile_1, quartile_3 = (
                min(common_value, quartile_1),
                max(common_value, quartile_3),
            )
    distance = REACH * (quartile_3 - quartile_1)
    if not distance:
        return no_fences
    return float(quartile_1 - distance), float(quartile_3 + distance)


def clipped(x: Floats, low: Floats, high: Floats) -> Floats:
    """Return rows [n, d] with values outside the fences [d] moved near the quartiles. Values within the fences stay.

    A value at its fence would still dominate means, scales and linear models. So it is moved to the nearer fence that
    :data:`NEAR` quartile distances give in place of :data:`REACH` (Tukey's fences).

    >>> clipped(np.array([[7.4], [9.0], [140.0]]), np.array([5.0]), np.array([9.2])).round(6).T.tolist()
    [[7.4, 9.0, 7.5]]
    """
    margin = (REACH - NEAR) / (2 * REACH + 1) * (high - low)
    row, column = np.nonzero((x < low) | (x > high))
    new_values = np.clip(
        x[row, column],
        (low + margin)[column],
        (high - margin)[column],
    )
    x = x.copy()
    x[row, column] = new_values
    return x


def columns_of(x: Floats) -> Iterator[Floats]:
    """Yield the columns [n] of rows [n, d], each contiguous in memory."""
    for start in range(0, x.shape[1], COLUMNS):
        yield from np.ascontiguousarray(x[:, start : start + COLUMNS].T)


def fences(
    x: Array, owner: NDArray[np.int64], categories: Categories = ()
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return the widest fences of each column over all clients, and the number of cells outside.

    >>> x = np.array([[7.0, 7.1, 7.2, 7.3, 7.4, 7.5] * 40 + [140.0]]).T
    >>> low, high, outside = fences(x, np.zeros(241, dtype=np.int64))
    >>> low.round(2).tolist(), high.round(2).tolist(), outside.tolist()
    ([4.1], [10.4], [1])

    Args:
        x: training samples [n, d], NaN where a value is missing.
        owner: the client of each sample, int64 [n].
        categories: the words of each column. Columns of words have no fences.

    Returns:
        The lower fences [d], the upper ones [d], and the counts [d]. A column without fences has
        :data:`NO_FENCE` above, and its negative below.
    """
    low = np.full(x.shape[1], NO_FENCE)
    high = -low
    n_outside = np.zeros(x.shape[1], dtype=np.int64)
    client_ends = np.flatnonzero(np.diff(np.sort(owner))) + 1
    order = None
    if (np.diff(owner) < 0).any():
        order = np.argsort(owner, kind="stable")
    for k, values in enumerate(columns_of(x.astype(np.float64, copy=False))):
        if categories and categories[k]:
            low[k], high[k] = -NO_FENCE, NO_FENCE
            continue
        if order is not None:
            values = values[order]
        for client_values in np.split(values, client_ends):
            lower, upper = fence(client_values[~np.isnan(client_values)])
            low[k] = min(low[k], lower)
            high[k] = max(high[k], upper)
        if low[k] > high[k]:
            low[k], high[k] = -NO_FENCE, NO_FENCE
        n_outside[k] = np.count_nonzero((values < low[k]) | (values > high[k]))
    return low, high, n_outside


def fitted(
    x: Array,
    scale: str,
    impute: str,
    columns: Sequence[str] = (),
    categories: Categories = (),
    owner: NDArray[np.int64] | None = None,
) -> Preprocessing:
    """Return a preprocessing fitted by scikit-learn's imputer and scalers.

    Numbers are clipped first, then filled, then scaled. A constant column has spread 1.
    A column with more than a share :data:`MOST_OUTSIDE` of its cells outside its fences
    is not clipped.

    Args:
        x: training samples [n, d] of all clients together. Missing values are NaN.
        scale, impute: methods of :data:`fl_core.data.reading.SCALES` and :data:`IMPUTES`.
        columns: names of the columns. Empty means no names.
        categories: the words of each column. Columns of words are neither filled nor scaled.
        owner: the client of each sample, to clip values to the clients' fences. None clips nothing.

    Raises:
        UsageError: a column to fill has no value in any training sample.
    """
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

    values = np.ascontiguousarray(x, dtype=np.float64)
    if any(categories):  # words are neither filled nor scaled
        values = values.copy()
        values[:, [k for k, words in enumerate(categories) if words]] = 0.0
    lowest: tuple[float, ...] = ()
    highest: tuple[float, ...] = ()
    if owner is not None:
        low, high, n_outside = fences(values, owner, categories)
        is_unclipped = n_outside > MOST_OUTSIDE * (~np.isnan(values)).sum(axis=0)
        low[is_unclipped], high[is_unclipped] = -NO_FENCE, NO_FENCE
        if (np.abs(np.concatenate([low, high])) < NO_FENCE).any():
            lowest, highest = tuple(low.tolist()), tuple(high.tolist())
            if n_outside[~is_unclipped].any():
                values = clipped(values, low, high)
    levels = 0.01, 0.99
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without values
        column_quantiles = [
            np.nanquantile(column, levels) for column in columns_of(values)
        ]
    quantiles = np.nan_to_num(np.array(column_quantiles).reshape(-1, 2).T)
    fill: list[float] = []
    if impute != "none":
        empty_columns = np.flatnonzero(np.isnan(values).all(axis=0)).tolist()
        if empty_columns:
            names = listing(columns[k] if columns else str(k) for k in empty_columns)
            raise UsageError(
                f"column {names} must have a value in a training sample to be filled. Leave it out."
            )
        imputer = SimpleImputer(strategy=impute).fit(values)
        fill = imputer.statistics_.tolist()
        values = imputer.transform(values)
    preparation = Preprocessing(
        tuple(columns),
        scale,
        impute,
        tuple(fill),
        categories=categories,
        low=tuple(quantiles[0].tolist()),
        high=tuple(quantiles[1].tolist()),
        lowest=lowest,
        highest=highest,
    )
    if scale == "none":
        return preparation
    if scale == "minmax":
        scaler = MinMaxScaler().fit(values)
        centre, spread = scaler.data_min_, 1 / scaler.scale_
    elif scale == "robust":
        scaler = RobustScaler().fit(values)
        centre, spread = scaler.center_, scaler.scale_
    else:
        scaler = StandardScaler().fit(values)
        # the same mean, so that filled values become 0
        centre = scaler.mean_
        if impute == "mean":
            centre = np.array(fill)
        spread = scaler.scale_
    return replace(
        preparation, centre=tuple(centre.tolist()), spread=tuple(spread.tolist())
    )
