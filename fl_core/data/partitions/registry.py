"""The registry of ways to partition a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from fl_core.errors import UsageError
from fl_core.registry import Registry

if TYPE_CHECKING:
    from fl_core.data.partitions.base import Partitioning

Member = TypeVar("Member", bound="type[Partitioning]")


def _adopt(member: Any, name: str) -> type[Partitioning]:
    if not (isinstance(member, type) and hasattr(member, "assign")):
        raise UsageError(
            f"partition {name!r} must be a subclass of fl_core.data.partitions.Partitioning; got {member!r}. "
            "Derive it from that class."
        )
    return member


PARTITIONS: Registry[type[Partitioning]] = Registry(
    "partition", "fl_core.data.partitions", _adopt
)


def partition(partitioning: Member) -> Member:
    """Register a way to partition data under its ``name``, as a class decorator.

    The class is a frozen dataclass and a subclass of :class:`~fl_core.data.partitions.base.Partitioning`. The first
    line of its docstring describes it in lists.

    Raises:
        UsageError: another partitioning has that name.
    """
    PARTITIONS.add(partitioning.name, partitioning, partitioning)
    return partitioning
