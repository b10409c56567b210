"""Conversion of data from Python: dictionaries, frames, pairs, datasets and loaders become a source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from torch.utils.data import DataLoader, Dataset

from fl_core.data import files, tables
from fl_core.data.columns import PLAIN, WRITTEN, Reading
from fl_core.data.federated import FederatedData
from fl_core.data.silos import pair_of, source_from_clients, source_from_pair
from fl_core.data.sources import Source
from fl_core.errors import UsageError
from fl_core.models.adapter import is_batch

OwnData = FederatedData | Source
NAME = "own"
"""The name of data from Python, in records and messages."""


def as_data(data: Any, reading: Reading = PLAIN) -> OwnData:
    """Return data from Python as a source. Each run partitions it with its seed. A federation stays as it is.

    >>> import numpy as np
    >>> source = as_data({"north": (np.zeros((4, 2)), [0, 1, 0, 1]), "south": (np.ones((2, 2)), [0, 1])})
    >>> source.owner_names, len(source)
    (('north', 'south'), 6)
    >>> frame = pd.DataFrame({"client": ["a", "a", "b", "b"], "age": [50, 61, 47, 70], "label": [0, 1, 1, 0]})
    >>> as_data(frame).columns
    ('age',)

    Args:
        data: {client: samples}, or samples alone, which a partition assigns to clients. Samples are a pair (x, y) of
            tensors or arrays, a Dataset or a DataLoader. x may be a tuple or dict of several inputs. Or a pandas
            DataFrame, read like a table in a file.
        reading: the names of a frame's columns, and how numbers are filled.

    Raises:
        UsageError: it is none of these, or its samples are invalid.
    """
    if isinstance(data, (FederatedData, Source)):
        return data
    if isinstance(data, pd.DataFrame):
        reading.check_unasked("a DataFrame is no text file", *WRITTEN)
        return tables.read_or_report(data, reading, NAME)
    files.check_plain("data= without a DataFrame", reading)
    if isinstance(data, Mapping) and not is_batch(data):
        return source_from_clients(
            data, name=NAME, missing=reading.may_be_missing, task=reading.task
        )
    if isinstance(data, (Mapping, tuple, list, Dataset, DataLoader)):
        return source_from_pair(
            *pair_of(data, "data"),
            name=NAME,
            missing=reading.may_be_missing,
            task=reading.task,
        )
    kind = (
        f"the class {data.__name__}" if isinstance(data, type) else type(data).__name__
    )
    raise UsageError(
        f"data must be {{client: (x, y)}}, a DataFrame, or a federation of fl.from_clients; got {kind}. "
        "Name a file or a dataset with dataset= instead."
    )
