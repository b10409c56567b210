"""The ways to partition a dataset by name, known without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from fl_core.errors import UsageError
from fl_core.registry import Registry

if TYPE_CHECKING:
    from fl_core.data.partitions.base import Partitioning

Member = TypeVar("Member", bound="type[Partitioning]")


def _adopt(made: Any, name: str) -> type[Partitioning]:
    if not (isinstance(made, type) and hasattr(made, "assign")):
        raise UsageError(f"partition {name!r} is not a class made of fl_core.data.partitions.Partitioning")
    return made


PARTITIONS: Registry[type[Partitioning]] = Registry("partition", "fl_core.data.partitions", "partition", _adopt)


def partition(partitioning: Member) -> Member:
    """Class decorator: make a way to partition data known under its ``name``.

    The class is a frozen dataclass made of :class:`~fl_core.data.partitions.base.Partitioning`, the first line of whose
    docstring is its line in lists.

    Raises:
        UsageError: another one has that name.
    """
    PARTITIONS.add(partitioning.name, partitioning, partitioning)
    return partitioning
