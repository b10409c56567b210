"""Rows of resampled batches: estimates of what a metric would give on other draws of a client's batches.

A client's batches are assigned in turn to at most :data:`PARTS` parts. A resample draws that many parts with
replacement, and gives the metric's rows for them. This is the bootstrap of the batches (Efron 1979) in groups. So a
gradient is stored for each part instead of each batch.

For a mean over k parts it shows (k - 1) / k of the variance, so few batches look more certain than they are. One part
cannot be resampled. Noise in the gradient inflates its variance and its length. A resample inflates them once more.
"""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from fl_core.bounds import at_least, check_value
from fl_core.rows import Row
from fl_core.seeds import numpy_generator

from .null import of_null

PARTS = 10
_MARK = ", resample "


def check_resamples(resamples: int) -> int:
    """Refuse a negative number of resamples.

    Raises:
        UsageError: the number is negative.
    """
    check_value("resamples", resamples, at_least(0))
    return resamples


def draws(parts: int, resamples: int, seed: int, client: str) -> list[list[int]]:
    """Return how often each part counts in each resample, [resamples, parts].

    Each row sums to ``parts``. There are no resamples of fewer than two parts. Only the seed and the client's name
    determine the draws, so metrics with the same batches draw the same ones.
    """
    if parts < 2:
        return []
    random = numpy_generator(seed, "resample", client)
    drawn: list[list[int]] = random.multinomial(
        parts, [1 / parts] * parts, size=resamples
    ).tolist()
    return drawn


def mark_resample(rows: Iterable[Row], number: int, parts: int) -> list[Row]:
    """Mark single clients' rows with resample ``number`` (from 1), in variant and estimator."""
    return [
        {
            **row,
            "variant": f"{row['variant']}{_MARK}{number}",
            "estimator": f"{row['estimator']}, {parts} parts of the batches redrawn",
            "stderr": None,
        }
        for row in rows
        if row["client"] and not row["client_b"]
    ]


def split_resamples(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split a frame into its own rows and the rows of resamples.

    Rows of :mod:`diagnostics.null` are in neither part.
    """
    table = table[~of_null(table)]
    redrawn = table["variant"].str.contains(_MARK, regex=False)
    return table[~redrawn], table[redrawn]


def resamples_of(table: pd.DataFrame, variant: str) -> pd.DataFrame:
    """Return the resamples of a variant, numbered in the column ``resample``."""
    start = f"{variant}{_MARK}"
    redrawn = table[table["variant"].str.startswith(start)]
    return redrawn.assign(
        resample=redrawn["variant"].str.removeprefix(start).astype(int)
    )
