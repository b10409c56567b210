"""The display order of names: client_2 before client_10."""

from __future__ import annotations

import re
from collections.abc import Iterable

MANY = 8
"""The largest number of clients that are shown or named one by one.

Of more only the lowest, the median and the highest are shown."""


def natural(name: str) -> tuple[list[str | int], str]:
    """Return a sort key for names, with the numbers in them compared as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if k % 2 else part for k, part in enumerate(parts)], name


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in display order. Alphabetical names are sorted by their numbers; any other order is kept.

    >>> in_order(["ward_1", "ward_10", "ward_2"])
    ['ward_1', 'ward_2', 'ward_10']
    >>> in_order(["south", "north"])
    ['south', 'north']
    """
    given = list(names)
    return sorted(given, key=natural) if given == sorted(given) else given
