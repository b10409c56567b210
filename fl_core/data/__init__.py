"""Datasets by name, by path or from your own code, partitioned over clients. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from fl_core.data.federated import ClientData, FederatedData, Split, gather
    from fl_core.data.held_out import extra_test_samples
    from fl_core.data.loading import available_datasets, default_scale, load, open_named, recipe
    from fl_core.data.partitions import PARTITIONS, Partition, Partitioning, partition
    from fl_core.data.recipes import Recipe, general
    from fl_core.data.registry import DATASETS, dataset, datasets, is_code, register
    from fl_core.data.silos import from_clients
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
    "available_datasets": ".loading",
    "dataset": ".registry",
    "default_scale": ".loading",
    "datasets": ".registry",
    "gather": ".federated",
    "general": ".recipes",
    "is_code": ".registry",
    "load": ".loading",
    "from_clients": ".silos",
    "open_named": ".loading",
    "partition": ".partitions",
    "recipe": ".loading",
    "register": ".registry",
    "extra_test_samples": ".held_out",
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
    "available_datasets",
    "dataset",
    "datasets",
    "default_scale",
    "extra_test_samples",
    "from_clients",
    "gather",
    "general",
    "is_code",
    "load",
    "open_named",
    "partition",
    "recipe",
    "register",
]
__getattr__, __dir__ = attach(__name__, _HOMES)
