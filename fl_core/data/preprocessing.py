"""Fills missing numbers of a table and scales its columns, by what was fitted on training samples only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_core.data.arrays import Array
from fl_core.data.categories import Categories, one_hot
from fl_core.errors import UsageError, check_known, listing

FIXED = "fixed"


@dataclass(frozen=True)
class Preprocessing:
    """What a row of a table goes through before a model sees it: (x - centre) / spread, with missing x filled first.

    A run of a table keeps it in its ``config.json`` under ``preprocessing``, so that new rows can be treated alike.

    >>> import numpy as np
    >>> from fl_core.data.preprocessing import Preprocessing, fitted
    >>> made = fitted(np.array([[1.0, 5.0], [3.0, np.nan]]), "standard", "mean", ("age", "dose"))
    >>> made.fill, made.centre, made.spread
    ((2.0, 5.0), (2.0, 5.0), (1.0, 1.0))
    >>> Preprocessing.from_json(made.to_json()).transform(np.array([[np.nan, 7.0]])).tolist()
    [[0.0, 2.0]]

    Attributes:
        columns: the feature columns' names, in the order in which the model takes them; empty = they have none.
        scale, impute: how it was asked for; scale :data:`FIXED`: not fitted, but a dataset's own numbers.
        fill: of each column what a missing value becomes; empty = there may be none.
        centre, spread: of each column what is taken off, and then divided by; empty = nothing is.
        categories: of each column the words that become columns, none for numbers; empty = all are numbers.
    """

    columns: tuple[str, ...] = ()
    scale: str = "none"
    impute: str = "none"
    fill: tuple[float, ...] = ()
    centre: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    categories: Categories = ()

    def transform(self, x: Array) -> NDArray[np.float32]:
        """Rows [n, d] as the model takes them, float32 [n, D]; computed in float64 where anything is to be done.

        A word is given as its place among the column's categories, or the place after the last.

        Raises:
            UsageError: another number of columns, or a missing value that nothing fills.
        """
        width = max(map(len, (self.columns, self.fill, self.centre)))
        if x.ndim != 2 or (width and x.shape[1] != width):
            raise UsageError(f"rows of {width} columns are needed, not an array of shape {list(x.shape)}")
        missing = np.argwhere(np.isnan(x))
        if len(missing) and not self.fill:
            row, column = missing[0].tolist()
            named = repr(self.columns[column]) if self.columns else column
            raise UsageError(f"row {row} (rows count from 0), column {named}: the value is missing")
        if not self.fill and not self.centre:
            return one_hot(np.ascontiguousarray(x, dtype=np.float32), self.categories)
        values = x.astype(np.float64)
        if self.fill:
            values = np.where(np.isnan(values), self.fill, values)
        if self.centre:
            values = (values - self.centre) / self.spread
        return one_hot(values.astype(np.float32), self.categories)

    def to_json(self) -> dict[str, Any]:
        """It as a dictionary of plain numbers and text."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Preprocessing:
        """What :meth:`to_json` wrote.

        Raises:
            UsageError: an unknown key, or a value of another type.
        """
        for key, value in values.items():
            check_known("key of a preprocessing", key, cls.__dataclass_fields__)
            if key == "categories":
                continue
            kinds = (str,) if key in ("scale", "impute", "columns") else (int, float)
            listed = key not in ("scale", "impute")
            parts = value if listed and isinstance(value, (list, tuple)) else [None] if listed else [value]
            if not all(isinstance(part, kinds) and not isinstance(part, bool) for part in parts):
                what = "a list of " * listed + ("text" if str in kinds else "numbers")
                raise UsageError(f"{key} of a preprocessing must be {what}; got {str(value)[:60]!r}. Store it anew.")
        words = values.get("categories", [])
        if not isinstance(words, list | tuple) or not all(
            isinstance(each, list | tuple) and all(isinstance(word, str) for word in each) for each in words
        ):
            raise UsageError(
                f"categories of a preprocessing must be lists of text; got {str(words)[:60]!r}. Store it anew."
            )
        found: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**{**found, "categories": tuple(map(tuple, words))})


def fitted(
    x: Array, scale: str, impute: str, columns: Sequence[str] = (), categories: Categories = ()
) -> Preprocessing:
    """The preprocessing of these training samples, by scikit-learn's SimpleImputer, then its scaler of that name.

    A column that is the same everywhere has spread 1.

    Args:
        x: training samples [n, d] of all clients together; what is missing is NaN.
        scale, impute: of :data:`fl_core.choices.SCALES` and :data:`fl_core.choices.IMPUTES`.
        columns: their names.
        categories: of each column its words, if it is one of words; these are neither filled nor scaled.

    Raises:
        UsageError: nothing to fill a column with, for it has no value in any training sample.
    """
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

    values = x.astype(np.float64)
    values[:, [k for k, words in enumerate(categories) if words]] = 0.0  # which nothing fills, moves or stretches
    fill: list[float] = []
    if impute != "none":
        empty = np.flatnonzero(np.isnan(values).all(axis=0)).tolist()
        if empty:
            names = listing(columns[k] if columns else str(k) for k in empty)
            raise UsageError(f"no training sample has a value in column {names}, so that nothing can fill it: drop it")
        imputer = SimpleImputer(strategy=impute).fit(values)
        fill, values = imputer.statistics_.tolist(), imputer.transform(values)
    if scale == "none":
        return Preprocessing(tuple(columns), scale, impute, tuple(fill), categories=categories)
    if scale == "minmax":
        scaler = MinMaxScaler().fit(values)
        centre, spread = scaler.data_min_, 1 / scaler.scale_
    elif scale == "robust":
        scaler = RobustScaler().fit(values)
        centre, spread = scaler.center_, scaler.scale_
    else:
        scaler = StandardScaler().fit(values)
        centre = np.array(fill) if impute == "mean" else scaler.mean_  # one mean, so that what is filled becomes 0
        spread = scaler.scale_
    moved = (tuple(centre.tolist()), tuple(spread.tolist()))
    return Preprocessing(tuple(columns), scale, impute, tuple(fill), *moved, categories)
