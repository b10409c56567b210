"""What ``fedlayers list`` prints."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from fedlayers.diagnostics.decide.select import RULES
from fedlayers.diagnostics.metrics.base import METRICS
from fl_core import data, models
from fl_core.algorithms import Algorithm, registry


def algorithms() -> str:
    """By family: name, paper, what is trained, what travels, what clients keep, the cost of a round, and its keys.

    The cost is in scalars that a client receives and sends in a round, P being all of the model's.
    """
    families: dict[str, dict[str, type[Algorithm]]] = {}
    for name, kind in sorted(registry().items(), key=lambda item: (item[1].__module__, item[0])):
        families.setdefault(kind.__module__, {})[name] = kind
    width, left = _width(110), 2 + max(map(len, registry())) + 2
    legend = "Cost: scalars that a client receives and sends a round; P = all of the model's. Plan: obeys --plan."
    said = [textwrap.fill(legend, width)]
    for module, members in families.items():
        family = ((sys.modules[module].__doc__ or "").strip() or module).partition("\n")[0]
        said.append("\n" + textwrap.fill(family, width))
        for name, kind in members.items():
            parts = [kind.paper, f"trained: {kind.trains}", f"travels: {kind.travels}", f"kept: {kind.keeps}"]
            parts += [f"cost: {kind.cost}", *["plan"] * kind.splits]
            keys = [f"{f.name}={f.default}" for f in dataclasses.fields(kind.Config)]
            lines = [" | ".join(parts), *["--set " + ", ".join(keys)] * bool(keys)]
            for k, line in enumerate(lines):
                first = f"  {name}".ljust(left) if not k else " " * left
                said.append(textwrap.fill(line, width, initial_indent=first, subsequent_indent=" " * left))
    return "\n".join(said)


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
            for m in METRICS.members().values()
        ]
    )


def rules() -> str:
    """Name and one line of every rule."""
    return _table([{"name": name, "rule": rule.summary} for name, rule in RULES.members().items()])


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


def _width(most: int) -> int:
    """Columns of the terminal, at most this many, and this many where there is none."""
    return min(shutil.get_terminal_size((most, 0)).columns, most)


def _table(lines: Sequence[Mapping[str, object]]) -> str:
    """Aligned columns, not wider than the terminal (160 elsewhere) where wrapping the widest ones allows it."""
    rows = [[str(key) for key in lines[0]], *([str(value) for value in line.values()] for line in lines)]
    least = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = _width(WIDTH) - 2 * (len(widths) - 1)
    while sum(widths) > room and any(width > most for width, most in zip(widths, least, strict=True)):
        widths[max(range(len(widths)), key=lambda k: widths[k] - least[k])] -= 1
    printed = []
    for row in rows:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            printed.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(printed)
