"""Ways to partition a dataset over clients, and the partition that a run stores.

To add one, write a file with a class under :func:`partition` (see :class:`Partitioning`). Its fields are its options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_core.registry import attach

if TYPE_CHECKING:
    from fl_core.data.partitions.base import (
        PARTITIONS as PARTITIONS,
        SPLITS as SPLITS,
        Partition as Partition,
        Partitioning as Partitioning,
        make as make,
        partition as partition,
    )

__getattr__, __dir__, __all__ = attach(__name__, __file__)
