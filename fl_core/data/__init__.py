"""Datasets by name, by path or from your own code, partitioned over clients; names are imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from fl_core.data.federated import ClientData, FederatedData, Split, gather
    from fl_core.data.leftover import unused
    from fl_core.data.loading import at_hand, load, open_named, recipe
    from fl_core.data.partitions import PARTITIONS, Partition, Partitioning, partition
    from fl_core.data.recipes import Recipe, general
    from fl_core.data.registry import DATASETS, dataset, datasets, is_code, register
    from fl_core.data.silos import of_silos
    from fl_core.data.sources import Source

_HOMES = {
    "ClientData": ".federated",
    "DATASETS": ".registry",
    "FederatedData": ".federated",
    "PARTITIONS": ".partitions",
    "Partition": ".partitions",
    "Partitioning": ".partitions",
    "Recipe": ".recipes",
    "Source": ".sources",
    "Split": ".federated",
    "at_hand": ".loading",
    "dataset": ".registry",
    "datasets": ".registry",
    "gather": ".federated",
    "general": ".recipes",
    "is_code": ".registry",
    "load": ".loading",
    "of_silos": ".silos",
    "open_named": ".loading",
    "partition": ".partitions",
    "recipe": ".loading",
    "register": ".registry",
    "unused": ".leftover",
}
__all__ = [
    "DATASETS",
    "PARTITIONS",
    "ClientData",
    "FederatedData",
    "Partition",
    "Partitioning",
    "Recipe",
    "Source",
    "Split",
    "at_hand",
    "dataset",
    "datasets",
    "gather",
    "general",
    "is_code",
    "load",
    "of_silos",
    "open_named",
    "partition",
    "recipe",
    "register",
    "unused",
]
__getattr__, __dir__ = attach(__name__, _HOMES)
