"""Ways to partition a dataset over clients, and the partition that a run stores.

To add one, write a file with a class under :func:`partition` (see :class:`Partitioning`). Its fields are its options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.data.partitions.registry import PARTITIONS, partition
from fl_core.lazy import attach

if TYPE_CHECKING:
    from fl_core.data.partitions.base import SPLITS, Partitioning, Pool, check_shares, split_sizes
    from fl_core.data.partitions.making import make
    from fl_core.data.partitions.stored import Partition

_HOMES = {
    "Partition": ".stored",
    "Partitioning": ".base",
    "Pool": ".base",
    "SPLITS": ".base",
    "check_shares": ".base",
    "make": ".making",
    "split_sizes": ".base",
}
__all__ = [
    "PARTITIONS",
    "SPLITS",
    "Partition",
    "Partitioning",
    "Pool",
    "check_shares",
    "make",
    "partition",
    "split_sizes",
]
__getattr__, __dir__ = attach(__name__, _HOMES)
