"""Datasets by name, by path or from your own code, partitioned over clients. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.lazy import attach

if TYPE_CHECKING:
    from fl_core.data.federated import (
        ClientData as ClientData,
    )
    from fl_core.data.federated import (
        FederatedData as FederatedData,
    )
    from fl_core.data.federated import (
        Split as Split,
    )
    from fl_core.data.federated import (
        gather as gather,
    )
    from fl_core.data.held_out import extra_test_samples as extra_test_samples
    from fl_core.data.loading import (
        available_datasets as available_datasets,
    )
    from fl_core.data.loading import (
        default_scale as default_scale,
    )
    from fl_core.data.loading import (
        load as load,
    )
    from fl_core.data.loading import (
        open_named as open_named,
    )
    from fl_core.data.loading import (
        recipe as recipe,
    )
    from fl_core.data.partitions import (
        PARTITIONS as PARTITIONS,
    )
    from fl_core.data.partitions import (
        Partition as Partition,
    )
    from fl_core.data.partitions import (
        Partitioning as Partitioning,
    )
    from fl_core.data.partitions import (
        partition as partition,
    )
    from fl_core.data.recipes import Recipe as Recipe
    from fl_core.data.recipes import general as general
    from fl_core.data.registry import (
        DATASETS as DATASETS,
    )
    from fl_core.data.registry import (
        dataset as dataset,
    )
    from fl_core.data.registry import (
        datasets as datasets,
    )
    from fl_core.data.registry import (
        is_code as is_code,
    )
    from fl_core.data.registry import (
        register as register,
    )
    from fl_core.data.silos import from_clients as from_clients
    from fl_core.data.sources import Source as Source

__getattr__, __dir__, __all__ = attach(__name__, __file__)
