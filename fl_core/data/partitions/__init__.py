"""Ways to partition a dataset over clients, and the partition that a run stores.

To add one, write a file with a class under :func:`partition` (see :class:`Partitioning`). Its fields are its options.
"""

# ruff: noqa: F401 - the names below are imported on first use, by `attach`

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.data.partitions.registry import PARTITIONS, partition
from fl_core.lazy import attach

if TYPE_CHECKING:
    from fl_core.data.partitions.assignment import make
    from fl_core.data.partitions.base import (
        SPLITS,
        Partitioning,
        Pool,
        check_shares,
        split_sizes,
    )
    from fl_core.data.partitions.stored_partition import Partition

__getattr__, __dir__, __all__ = attach(__name__, __file__)
