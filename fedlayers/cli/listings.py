"""The command that lists what is available by name, list, and the registries of all named things.

>>> registry("algorithm")["fedprox"].paper
'Li et al. 2020'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedlayers.cli.options import Command
from fl_core.errors import check_known
from fl_core.registry import Registry, import_object

WIDTH = 110
HOMES = {
    "algorithm": "fl_core.algorithms.base:ALGORITHMS",
    "metric": "diagnostics.metrics.base:METRICS",
    "rule": "diagnostics.select:RULES",
    "dataset": "fl_core.data.registry:DATASETS",
    "partition": "fl_core.data.partitions.base:PARTITIONS",
    "model": "fl_core.models.building:MODELS",
}
"""The registry of each kind."""


class List(Command):
    """List algorithms, datasets, models, metrics or rules.

    Examples:
        fedlayers list algorithms
        fedlayers list datasets
    """

    what: str
    """What to list: algorithms, datasets, models, metrics or rules."""

    argument = "what"

    def main(self, line: str) -> None:
        print(LISTINGS[check_known("listing", self.what, LISTINGS)]())


def registry(kind: str) -> Registry[Any]:
    """Return the registry of a kind, one of :data:`HOMES`."""
    return import_object("registry", HOMES[check_known("kind", kind, HOMES)])


def algorithms() -> str:
    """List algorithms by family, with their papers, options and costs. The list says what is trained, sent and kept.

    The cost is the number of scalars that a client receives and sends in a round. P stands for all of the model's.
    """
    from fl_core.algorithms.base import defaults_of

    known = registry("algorithm")
    blocks = [
        "Cost: scalars that a client receives and sends a round; P = all of the model's. Plan: uses --plan."
    ]
    for family, names in known.families().items():
        about = {}
        for name in names:
            kind = known[name]
            parts = [
                kind.paper,
                f"trained: {kind.trains}",
                f"sent: {kind.travels}",
                f"kept: {kind.keeps}",
                f"cost: {kind.cost}",
            ]
            if kind.uses_plan:
                parts.append("plan")
            if options := _options(defaults_of(kind)):
                parts.append(f"--option {options}")
            about[name] = " | ".join(parts)
        blocks.append(f"{family}\n{_entries(about)}")
    return "\n\n".join(blocks)


def datasets() -> str:
    """List every dataset with its defaults, and those of a user's own data."""
    from fl_core import data
    from fl_core.data.registry import general
    from fl_core.models.tokens import TokenShape

    shapes = {"table": (1,), "images": (3, 32, 32), "texts": TokenShape((1,), 3)}
    own = {f"your {name}": general(shape, False) for name, shape in shapes.items()}
    about = {}
    for name, recipe in {**data.datasets(), **own}.items():
        keys = {key: value for key, value in vars(recipe).items() if value}
        if recipe.partition != "dirichlet":
            del keys["alpha"]
        about[name] = _options(keys)
    return _entries(about)


def metrics() -> str:
    """List every metric with its meaning, price, direction and variants."""
    about = {}
    for name, kind in registry("metric").members().items():
        parts = [kind.description, f"price: {kind.price}", kind.direction]
        about[name] = " | ".join(filter(None, [*parts, ", ".join(kind.variants)]))
    return _entries(about)


def models() -> str:
    """List every model with a line about it."""
    from fl_core.models.building import describe

    return _entries(describe())


LISTINGS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "datasets": datasets,
    "models": models,
    "metrics": metrics,
    "rules": lambda: _entries(registry("rule").summaries()),
}


def _entries(about: Mapping[str, str]) -> str:
    """Format each name with its text, wrapped next to it."""
    import shutil
    import textwrap

    left = max(map(len, about)) + 4
    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    return "\n".join(
        textwrap.fill(
            text,
            width,
            initial_indent=f"  {name}".ljust(left),
            subsequent_indent=" " * left,
        )
        for name, text in about.items()
    )


def _options(options: Mapping[str, Any]) -> str:
    """Format options. A list, with one number per class, is abbreviated."""
    shown = []
    for key, value in options.items():
        if isinstance(value, dict):
            value = f"({_options(value)})"
        shown.append(f"{key}={'…' if isinstance(value, list) else value}")
    return ", ".join(shown)
