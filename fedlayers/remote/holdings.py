"""The data of a site: one client's, with what a server may know of them, and the split that belongs to its number."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from fl_core.data import FederatedData
from fl_core.data.federated import ClientData
from fl_core.data.hollow import digest_of
from fl_core.data.partitions import SPLITS
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
    }
