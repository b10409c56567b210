"""The order in which names are shown: client_2 before client_10."""

from __future__ import annotations

import re
from collections.abc import Iterable

MANY = 8
"""Clients up to which each is shown or named by itself, and not the lowest, the median and the highest alone."""


def natural(name: str) -> tuple[list[str | int], str]:
    """A key to sort names by, in which the numbers within them count as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if k % 2 else part for k, part in enumerate(parts)], name


def in_order(names: Iterable[str]) -> list[str]:
    """Names as they are to be shown: those in the order of text by their numbers; another order is meant, and stays.

    >>> in_order(["ward_1", "ward_10", "ward_2"])
    ['ward_1', 'ward_2', 'ward_10']
    >>> in_order(["south", "north"])
    ['south', 'north']
    """
    given = list(names)
    return sorted(given, key=natural) if given == sorted(given) else given
