"""The rule that shares the layers that a person names."""

from __future__ import annotations

from collections.abc import Sequence

from .base import rule


@rule(summary="share exactly the layers that are named", reads="names")
def manual(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the layers to share, as they are given."""
    return tuple(names)
