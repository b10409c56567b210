"""Datasets by name, by path or from your own code, partitioned over clients. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.registry import attach

if TYPE_CHECKING:
    from fl_core.data.federated import (
        ClientData as ClientData,
        FederatedData as FederatedData,
        Split as Split,
        gather as gather,
    )
    from fl_core.data.loading import (
        from_clients as from_clients,
        load as load,
        recipe as recipe,
    )
    from fl_core.data.partitions import (
        PARTITIONS as PARTITIONS,
        Partition as Partition,
        Partitioning as Partitioning,
        partition as partition,
    )
    from fl_core.data.registry import (
        DATASETS as DATASETS,
        Recipe as Recipe,
        dataset as dataset,
        datasets as datasets,
        general as general,
        is_code as is_code,
    )
    from fl_core.data.sources import Source as Source

__getattr__, __dir__, __all__ = attach(__name__, __file__)
