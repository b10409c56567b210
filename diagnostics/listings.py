"""What ``fedlayers list`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from diagnostics.diagnose import METRICS
from diagnostics.select import RULES
from fl_core import data, models
from fl_core.algorithms import registry


def algorithms() -> str:
    """Name, what is trained and travels, whether it obeys a plan, its configuration, and its source."""
    lines = []
    for name, kind in sorted(registry().items()):
        own = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(kind.Config))
        lines.append({"name": name, "what it does": kind.summary, "plan": "yes" if kind.splits else "", "--set": own})
        lines[-1]["source"] = kind.paper
    return _table(lines)


def datasets() -> str:
    """Name and defaults of every dataset."""
    shown = (
        "model",
        "clients",
        "partition",
        "alpha",
        "samples",
        "rounds",
        "epochs",
        "batch",
        "lr",
        "optimizer",
        "loss",
    )
    lines = []
    for name, recipe in data.datasets().items():
        values = {key: getattr(recipe, key) for key in shown}
        values["clients"] = recipe.clients or "natural"
        values["alpha"] = recipe.alpha if recipe.partition == "dirichlet" else ""
        values["samples"] = recipe.samples or "all"
        lines.append({"name": name, **values})
    return _table(lines)


def named_models() -> str:
    """Name and one line of every model."""
    return _table([{"name": name, "model": line} for name, line in models.describe().items()])


def metrics() -> str:
    """Name, meaning, direction and variants of every metric."""
    return _table(
        [
            {"name": m.name, "measures": m.description, "reads": m.direction, "variants": ", ".join(m.variants)}
            for m in METRICS.values()
        ]
    )


def rules() -> str:
    """Name and one line of every rule."""
    return _table([{"name": name, "rule": rule.summary} for name, rule in RULES.items()])


LISTINGS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "datasets": datasets,
    "models": named_models,
    "metrics": metrics,
    "rules": rules,
}


def _table(lines: Sequence[Mapping[str, object]]) -> str:
    frame = pd.DataFrame(lines).astype(str)
    widths = {column: max([len(str(column)), *frame[column].str.len()]) for column in frame}
    rows = [frame.columns.to_list(), *frame.to_numpy().tolist()]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths.values(), strict=True)).rstrip()
        for row in rows
    )
