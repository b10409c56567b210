"""Pictures in four styles, from a file below the data root."""

from __future__ import annotations

from fl_core.choices import IMAGENET
from fl_core.data.registry import Location, dataset
from fl_core.data.root import open_packed
from fl_core.data.sources import Source


@dataset(
    "pacs",
    clients=4,
    partition="natural",
    rounds=60,
    mean=IMAGENET[0],
    std=IMAGENET[1],
    note="no published recipe; values of the nearest dataset that has one; one client a style, ImageNet's statistics",
)
def pacs(data_root: Location | None) -> Source:
    """PACS: pictures of 7 kinds of things in four styles, which are the clients."""
    return open_packed("pacs", data_root)
