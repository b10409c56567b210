"""Datasets by name, by path or from your own code, partitioned over clients. Names are imported on first use."""

# ruff: noqa: F401 - the names below are imported on first use, by `attach`

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

__getattr__, __dir__, __all__ = attach(__name__, __file__)
