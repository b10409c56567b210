"""Formats numbers and tables for an item's page, and says which runs are missing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fl_core.names import in_markdown


def percent(mean: float, low: float, high: float, sign: str = "") -> str:
    """A share in percent with half the width of its interval; a dash if there is none."""
    if math.isnan(mean):
        return "–"
    half = "" if math.isnan(low) else f" ± {100 * (high - low) / 2:.1f}"
    return f"{100 * mean:{sign}.1f}{half}"


def seeds_in_words(count: int) -> str:
    """A number of seeds as text: ``1 seed``, ``3 seeds``."""
    return f"{count} seed{'s' * (count != 1)}"


def span(numbers: Iterable[int]) -> str:
    """The least and the greatest of some numbers, as text: ``3-4``, or ``4`` if they are one."""
    each = sorted(numbers)
    return f"{each[0]}" if each[0] == each[-1] else f"{each[0]}-{each[-1]}"


def markdown(columns: Mapping[str, Sequence[Any]]) -> str:
    """A Markdown table from columns of equal length."""
    rows = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    lines = [" | ".join(in_markdown(str(cell)) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def missing_runs(header: Mapping[str, Any], runs: Collection[str] | None = None) -> str:
    """A sentence on missing or diverged runs; empty without any.

    Args:
        header: as :meth:`figures.recipe.Recipe.read` gives it.
        runs: names of the runs to speak of; default all.
    """
    lacking = [*header["missing"], *(f"{name} (diverged)" for name in header["failed"])]
    lacking = [name for name in lacking if runs is None or name.partition(" ")[0] in runs]
    return f" Missing: {', '.join(lacking)}." if lacking else ""
