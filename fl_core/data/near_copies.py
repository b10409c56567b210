"""Near copies over a split: rows of a test set that training rows nearly repeat, by two signs.

Windows of one recording, visits of one patient, and rows that are repeated with noise are such copies. A random split
puts them on both sides, and test scores are then too good. Columns of words make many rows equal by chance, so only
rows of numbers are measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fl_core.data.partitions import Partition, make
from fl_core.data.sources import Source
from fl_core.data.values import Array, Floats, Integers
from fl_core.errors import UsageError, spelled

NEAR = 5
"""Rows of the file within which a nearest training row is a neighbour."""
NEIGHBOURS, TIMES = 0.1, 20.0
"""For a warning, the least share of test rows whose nearest training row is a
neighbour, and the least multiple of the share that chance gives."""
RANK, CLOSE, COPIES = 10, 0.3, 0.5
"""A test row is a copy if its least distance is below the share ``CLOSE`` of its
distance of rank ``RANK``. For a warning ``COPIES`` is the least share of copies."""
LEAST_COLUMNS = 3
"""Columns from which copies are counted. With one or two, most nearest distances are below ``CLOSE`` by chance."""
MOST_TESTED = 2_000
"""Test rows at most. More are thinned evenly."""
BLOCK = 20_000
"""Training rows of a block at most."""
NUMBERS = 2**22
"""Distances of a block at most."""
CONSTANT = 1e-9
"""Standard deviation, as a share of the mean, below which a column is constant."""
EQUAL = 1e-12
"""Squared distance, as a share of the rows' squared lengths, below which rows are equal: float32 rounds so much."""


@dataclass(frozen=True)
class NearCopies:
    """The evidence that test rows of a split are near copies of its training rows.

    Attributes:
        neighbours: share of test rows whose nearest training row is within :data:`NEAR` rows in the file.
        chance: the mean share of training rows that are so near in the file.
        copies: share of test rows that are far nearer to one training row than to the
            tenth. It is 0 for fewer than :data:`LEAST_COLUMNS` columns.
    """

    neighbours: float
    chance: float
    copies: float

    @property
    def note(self) -> str:
        """Return a warning in one line with what to do, or "" without a sign of copies."""
        in_file = self.neighbours >= max(NEIGHBOURS, TIMES * self.chance)
        if not in_file and self.copies < COPIES:
            return ""
        evidence = "almost equal"
        if in_file:
            evidence = "near in the file"
        return (
            f"many test rows have a near copy among the training rows, {evidence}: scores may be too good. "
            "Name the column of what rows belong to, such as a patient or a recording: "
            f"{spelled(group_column='NAME')}"
        )


NONE = NearCopies(0.0, 0.0, 0.0)


def near_copies(
    train: Array, test: Array, train_places: Integers, test_places: Integers
) -> NearCopies:
    """Return how near test rows are to training rows, by Euclidean distance of standardised columns.

    >>> rows = np.random.default_rng(0).normal(size=(400, 3))
    >>> places = np.arange(400)
    >>> tests = places % 5 == 0
    >>> near_copies(rows[~tests], rows[tests], places[~tests], places[tests]).note
    ''
    >>> again = np.concatenate([rows, rows + 0.001])
    >>> "almost equal" in near_copies(again[:400], again[400:], places, places + 400).note
    True

    All shares are 0 if a number is missing, if there is no test row, or if there are at
    most :data:`RANK` training rows. Columns are standardised by the training rows. Those
    that are constant there do not count.

    Args:
        train, test: rows as numbers, [n, ...]. Rows of several dimensions are flattened.
        train_places, test_places: their rows in the file, ascending int64 [n].
    """
    is_finite = np.isfinite(train).all() and np.isfinite(test).all()
    if len(train) <= RANK or not len(test) or not is_finite:
        return NONE
    flat_rows = [x.reshape(len(x), -1).astype(np.float64) for x in (train, test)]
    centre, spread = flat_rows[0].mean(axis=0), flat_rows[0].std(axis=0)
    is_varied = spread > CONSTANT * np.abs(centre)
    train_rows, test_rows = (
        (x - centre)[:, is_varied] / spread[is_varied] for x in flat_rows
    )
    if len(test) > MOST_TESTED:
        sampled_rows = (
            np.linspace(0, len(test) - 1, MOST_TESTED).round().astype(np.int64)
        )
        test_rows, test_places = test_rows[sampled_rows], test_places[sampled_rows]
    first_places = np.searchsorted(train_places, test_places - NEAR, side="left")
    last_places = np.searchsorted(train_places, test_places + NEAR, side="right")
    chance = float((last_places - first_places).mean() / len(train))
    neighbours = copies = 0
    for rows, distances, nearest_rows in _nearest(train_rows, test_rows):
        gaps = np.abs(train_places[nearest_rows] - test_places[rows])
        neighbours += int((gaps <= NEAR).sum())
        if is_varied.sum() >= LEAST_COLUMNS:
            copies += int((distances[:, 0] < CLOSE * distances[:, -1]).sum())
    return NearCopies(neighbours / len(test_rows), chance, copies / len(test_rows))


def copies_of(source: Source) -> NearCopies:
    """Return how near a table's test rows are to its training rows, in the default split with seed 0.

    The split is that of the natural clients if the table has them, or else that of one
    client with all rows. The partition of the run is not used. A missing number is
    replaced by its column's mean over training rows. All shares are 0 for images and
    texts, for columns of words, for samples with groups, and for too few rows to split.
    """
    has_words = source.words is not None or any(source.categories)
    if has_words or source.is_image or source.groups is not None or not source.x.size:
        return NONE
    has_clients = source.owner is not None
    try:
        if has_clients:
            partition = make(source, "natural")
        else:
            partition = make(source, "iid", clients=1)
    except UsageError:
        return NONE
    train, test = rows_of(partition, "train"), rows_of(partition, "test")
    masked_values = np.ma.masked_invalid(source.x)
    x = np.where(
        masked_values.mask, masked_values[train].mean(axis=0).filled(0), source.x
    )
    return near_copies(x[train], x[test], train, test)


def rows_of(partition: Partition, split: str) -> Integers:
    """Return the positions of all clients' samples of a split, each once, ascending."""
    client_rows = [splits[split] for splits in partition.indices.values()]
    return np.unique(np.concatenate(client_rows))


def _nearest(train: Floats, test: Floats) -> Iterator[tuple[slice, Floats, Integers]]:
    """Yield slices of the test rows with their nearest training rows.

    Each comes with the :data:`RANK` least distances of its rows, ascending [n, RANK],
    and with the positions of their nearest training rows [n].
    """
    block_rows = min(BLOCK, len(train))
    test_step = max(1, NUMBERS // block_rows)
    for start in range(0, len(test), test_step):
        rows = slice(start, min(start + test_step, len(test)))
        rows_here = test[rows]
        squares = (rows_here**2).sum(axis=1, keepdims=True)
        least_distances = np.full((len(rows_here), RANK), np.inf)
        nearest_rows = np.zeros(len(rows_here), dtype=np.int64)
        for block_start in range(0, len(train), block_rows):
            block = train[block_start : block_start + block_rows]
            squared_lengths = squares + (block**2).sum(axis=1)
            distances = squared_lengths - 2 * rows_here @ block.T
            distances[distances <= EQUAL * squared_lengths] = 0
            best_rows = distances.argmin(axis=1)
            is_closer = (
                distances[np.arange(len(rows_here)), best_rows] < least_distances[:, 0]
            )
            nearest_rows[is_closer] = block_start + best_rows[is_closer]
            least_distances = np.concatenate([least_distances, distances], axis=1)
            least_distances = np.sort(
                np.partition(least_distances, RANK - 1)[:, :RANK], axis=1
            )
        yield rows, np.sqrt(least_distances), nearest_rows
