"""Pictures in four styles, from a file below the data root."""

from __future__ import annotations

from fl_core.data.registry import Location, dataset
from fl_core.data.root import open_packed
from fl_core.data.sources import Source


@dataset(
    "pacs",
    clients=4,
    partition="natural",
    rounds=60,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    note="no published recipe; values of the nearest dataset that has one; one client a style, ImageNet's statistics",
)
def pacs(data_root: Location | None) -> Source:
    """PACS: pictures of 7 kinds of things in four styles, which are the clients."""
    return open_packed("pacs", data_root)
