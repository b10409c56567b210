"""What ``fedlayers list`` prints."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from diagnostics.metrics import METRICS
from diagnostics.select import RULES
from fl_core import data, models
from fl_core.algorithms import registry


def algorithms() -> str:
    """Name, paper, what is trained, what travels, what clients keep, the cost of a round, and how it is configured.

    The cost is in scalars that a client receives and sends in a round, P being all of the model's.
    """
    lines: list[dict[str, object]] = []
    for name, kind in sorted(registry().items()):
        own = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(kind.Config))
        own_parts = {"trained": kind.trains, "travels": kind.travels, "kept by clients": kind.keeps}
        obeys = {"plan": "yes" if kind.splits else "", "--set": own}
        lines.append({"name": name, "paper": kind.paper, **own_parts, "cost a round": kind.cost, **obeys})
    return _table(lines)


def datasets() -> str:
    """Name and defaults of every dataset; rounds are times local epochs where those are not 1."""
    shown = ("model", "clients", "partition", "alpha", "samples", "rounds", "batch", "lr", "optimizer", "loss")
    lines = []
    for name, recipe in data.datasets().items():
        values: dict[str, object] = {key: getattr(recipe, key) for key in shown}
        values["clients"] = recipe.clients or "natural"
        values["alpha"] = recipe.alpha if recipe.partition == "dirichlet" else ""
        values["samples"] = recipe.samples or "all"
        values["rounds"] = recipe.rounds if recipe.epochs == 1 else f"{recipe.rounds} x {recipe.epochs}"
        values["optimizer"] = _with(recipe.optimizer, recipe.optimizer_options)
        values["loss"] = _with(recipe.loss, recipe.loss_options)
        lines.append({"name": name, **values})
    return _table(lines)


def named_models() -> str:
    """Name and one line of every model."""
    return _table([{"name": name, "model": line} for name, line in models.describe().items()])


def metrics() -> str:
    """Name, meaning, direction and variants of every metric."""
    return _table(
        [
            {"name": m.name, "measures": m.description, "direction": m.direction, "variants": ", ".join(m.variants)}
            for m in METRICS.values()
        ]
    )


def rules() -> str:
    """Name and one line of every rule."""
    return _table([{"name": name, "rule": rule.summary} for name, rule in RULES.items()])


WIDTH = 160
LISTINGS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "datasets": datasets,
    "models": named_models,
    "metrics": metrics,
    "rules": rules,
}


def _with(name: str, options: Mapping[str, Any]) -> str:
    """A name with its options, in short; a list holds a number for every class."""

    def said(key: str, value: Any) -> str:
        if value is True:
            return key
        return f"{key}=…" if isinstance(value, list) else f"{key}={value:g}"

    return " ".join([name, *(said(key, value) for key, value in options.items())])


def _table(lines: Sequence[Mapping[str, object]]) -> str:
    """Aligned columns, not wider than the terminal (160 elsewhere) where wrapping the widest ones allows it."""
    rows = [[str(key) for key in lines[0]], *([str(value) for value in line.values()] for line in lines)]
    least = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH) - 2 * (len(widths) - 1)
    while sum(widths) > room and any(width > most for width, most in zip(widths, least, strict=True)):
        widths[max(range(len(widths)), key=lambda k: widths[k] - least[k])] -= 1
    printed = []
    for row in rows:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            printed.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(printed)
