"""The data of a site: one client's, with what a server may know of them, and the split that belongs to its number."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fl_core.data import FederatedData, files
from fl_core.data.arrays import Integers
from fl_core.data.columns import Reading
from fl_core.data.federated import ClientData, Split
from fl_core.data.hollow import digest_of
from fl_core.data.loading import open_named
from fl_core.data.partitions import SPLITS
from fl_core.data.partitions.base import check_shares, split_of
from fl_core.data.recipes import SHARES
from fl_core.data.registry import DATASETS
from fl_core.errors import UsageError, check_known
from fl_core.tokens import TokenShape


class Holding(Protocol):
    """What one site holds.

    Attributes:
        name: of the client. sizes: samples of each split.
    """

    name: str
    sizes: Mapping[str, int]

    def facts(self) -> dict[str, Any]:
        """Names and numbers for a hello; no sample."""

    def drawn(self, number: int, seed: int) -> ClientData:
        """The samples, split as the client of that number in a federation of that seed splits them."""


class Given:
    """A client of data that are split already.

    >>> import fedlayers as fl
    >>> holding = Given(fl.load_data("heart"), "va")
    >>> holding.name, holding.sizes
    ('va', {'train': 83, 'validation': 21, 'test': 26})
    """

    def __init__(self, data: FederatedData, client: str) -> None:
        self.name, self._data, self._client = client, data, data.client(client)
        self.sizes = {split: len(self._client.split(split)) for split in SPLITS}

    def facts(self) -> dict[str, Any]:
        return {"sizes": dict(self.sizes), "digest": digest_of(self._client), **common(self.name, self._data)}

    def drawn(self, number: int, seed: int) -> ClientData:
        return self._client


def common(name: str, data: FederatedData) -> dict[str, Any]:
    """What all sites of a federation must agree on."""
    words = None
    if data.words is not None:
        words = hashlib.sha256("\n".join(data.words).encode()).hexdigest()
    return {
        "name": name,
        "shape": list(data.shape),
        "classes": list(data.classes),
        "tokens": data.shape.tokens if isinstance(data.shape, TokenShape) else 0,
        "words": words,
        "mean": [float(each) for each in data.mean],
        "std": [float(each) for each in data.std],
        "images": data.images,
        "columns": [] if data.preprocessing is None else list(data.preprocessing.columns),
    }


class Silo:
    """One silo's own data, read where they are: its file, or one natural client of a dataset.

    Its split is the one that it has in a run on all clients' data together, for that depends on its number alone.

    >>> silo = Silo("va", "heart")
    >>> silo.sizes, len(silo.drawn(number=3, seed=0).test)
    ({'train': 83, 'validation': 21, 'test': 26}, 26)

    Args:
        name: of the client. dataset: a name, or the path of a file as :func:`fl_core.data.files.read` takes it.
        client: whose samples of the data they are, if those have clients; by default those of ``name``.
        classes: all classes of the federation, of which a file may lack some; by default those that it has.
        data_root: of named datasets.
        reading: how a file is read, as :class:`fl_core.data.columns.Reading` has it.

    Raises:
        UsageError: no such data or client, or data that one silo cannot prepare alone.
    """

    def __init__(
        self,
        name: str,
        dataset: Path | str,
        *,
        client: str | None = None,
        classes: Sequence[str] | None = None,
        data_root: Path | str | None = None,
        **reading: Any,
    ) -> None:
        self.name = name
        how = replace(Reading.of(reading), classes=None if classes is None else tuple(map(str, classes)))
        if str(dataset) in DATASETS:
            files.check_plain(str(dataset), how)
            if classes is not None:
                raise UsageError(f"{dataset} says its classes itself: leave classes out")
            source = open_named(str(dataset), data_root=data_root)
            pool = DATASETS[str(dataset)].recipe
            source = source.first(min(pool.samples or len(source) if pool else len(source), len(source)))
        else:
            path = Path(dataset)
            if not path.exists():
                raise UsageError(f"site {name!r}: there is no dataset or file {str(dataset)!r}")
            source = files.read(path, how)
        if source.owner is not None:
            own = check_known(f"client of {dataset}", client or name, source.owner_names)
            source = source.take(np.flatnonzero(source.owner == source.owner_names.index(own)))
        elif client is not None:
            raise UsageError(f"{dataset} names no clients, so that there is no {client!r} among them: leave client out")
        if source.words is not None or how.scale != "none" or how.impute != "none":
            what = "a vocabulary" if source.words is not None else "scale and impute"
            raise UsageError(f"site {name!r}: {what} would be fitted on all sites' samples, which no site has")
        self._source = source
        self._shares = check_shares(SHARES)
        self.sizes = {split: len(each) for split, each in zip(SPLITS, self._split(0, 0), strict=True)}

    def facts(self) -> dict[str, Any]:
        source = self._source
        scale = (source.mean, source.std) if source.is_image else ((), ())
        return {
            "name": self.name,
            "sizes": dict(self.sizes),
            "digest": source.digest,
            "shape": list(source.shape),
            "classes": list(source.classes),
            "columns": list(source.columns),
            "tokens": 0,
            "words": None,
            "images": source.is_image,
            **{key: [float(each) for each in values] for key, values in zip(("mean", "std"), scale, strict=True)},
        }

    def drawn(self, number: int, seed: int) -> ClientData:
        parts = zip(SPLITS, self._split(number, seed), strict=True)
        source = self._source

        def taken(indices: Integers) -> Split:
            return Split(source.tensor(indices), torch.from_numpy(source.y[indices]))

        return ClientData(self.name, **{split: taken(np.sort(each).astype(np.int64)) for split, each in parts})

    def _split(self, number: int, seed: int) -> tuple[Integers, ...]:
        source = self._source
        if source.is_train is None:
            return split_of(self.name, number, np.arange(len(source)), None, self._shares, seed)
        train, test = np.flatnonzero(source.is_train), np.flatnonzero(~source.is_train)
        return split_of(self.name, number, train, test, self._shares, seed)
