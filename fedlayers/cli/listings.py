"""The command that lists what is available by name: list."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedlayers import catalogue
from fedlayers.cli.options import Command
from fl_core.display import aligned
from fl_core.errors import check_known

WIDTH = 110
COLUMNS = {
    "model": "model",
    "clients": "clients",
    "partition": "partition",
    "alpha": "alpha",
    "max_samples": "samples",
    "rounds": "rounds",
    "epochs": "epochs",
    "batch_size": "batch",
    "lr": "lr",
}
"""Defaults of a dataset in its line of the list, with their headings."""


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


def algorithms() -> str:
    """List algorithms by family, with their papers, options and costs. The list says what is trained, sent and kept.

    The cost is the number of scalars that a client receives and sends in a round. P stands for all of the model's.
    """
    known = catalogue.registry("algorithm")
    about = {name: _algorithm(member) for name, member in known.members().items()}
    legend = "Cost: scalars that a client receives and sends a round; P = all of the model's. Plan: uses --plan."
    blocks = [textwrap.fill(legend, _width())]
    for family, names in known.families().items():
        heading = textwrap.fill(family, _width())
        blocks.append(f"{heading}\n{_entries({name: about[name] for name in names})}")
    return "\n\n".join(blocks)


def _algorithm(member: Any) -> list[str]:
    """Return the text of an algorithm, and that of its options if it has any."""
    from fl_core.algorithms.base import defaults_of

    parts = [
        member.paper,
        f"trained: {member.trains}",
        f"sent: {member.travels}",
        f"kept: {member.keeps}",
        f"cost: {member.cost}",
    ]
    if member.uses_plan:
        parts.append("plan")
    options = _options(defaults_of(member))
    return [" | ".join(parts), *([f"--option {options}"] if options else [])]


def datasets() -> str:
    """List every dataset with its defaults, and those of a user's own data."""
    from fl_core import data
    from fl_core.data.registry import SHARES, TokenShape, general

    rows = [["name", *COLUMNS.values(), "optimizer", "loss"]]
    shapes = {"table": (1,), "images": (3, 32, 32), "texts": TokenShape((1,), 3)}
    own = {f"your {name}": general(shape, False) for name, shape in shapes.items()}
    for name, recipe in {**data.datasets(), **own}.items():
        values = {key: getattr(recipe, key) for key in COLUMNS}
        values["clients"] = recipe.clients or "natural"
        values["max_samples"] = recipe.max_samples or "all"
        if recipe.partition != "dirichlet":
            values["alpha"] = ""
        optimizer = f"{recipe.optimizer} {_options(recipe.optimizer_options)}"
        loss = f"{recipe.loss} {_options(recipe.loss_options)}"
        rows.append([name, *map(str, values.values()), optimizer, loss])
    shares = "/".join(f"{100 * share:.0f}" for share in SHARES)
    note = f"Your own data: {shares} % of each client's samples for training, validation and test, with patience "
    patience = own["your table"].patience
    return "\n".join([*aligned(rows), "", f"{note}{patience}."])


def metrics() -> str:
    """List every metric with its meaning, price, direction and variants."""

    def about(member: Any) -> list[str]:
        parts = [member.description, f"price: {member.price}", member.direction]
        return [" | ".join(filter(None, [*parts, ", ".join(member.variants)]))]

    members = catalogue.registry("metric").members().items()
    return _entries({name: about(member) for name, member in members})


def _lines(about: Mapping[str, str]) -> str:
    """Format each name with its line."""
    return _entries({name: [line] for name, line in about.items()})


def models() -> str:
    """List every model with a line about it."""
    from fl_core.models.building import describe

    return _lines(describe())


LISTINGS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "datasets": datasets,
    "models": models,
    "metrics": metrics,
    "rules": lambda: _lines(catalogue.registry("rule").summaries()),
}


def _entries(about: Mapping[str, Sequence[str]]) -> str:
    """Format each name with its texts, wrapped next to it."""
    left = max(map(len, about)) + 4
    lines = []
    for name, parts in about.items():
        first = f"  {name}".ljust(left)
        for part in parts:
            lines.append(
                textwrap.fill(
                    part, _width(), initial_indent=first, subsequent_indent=" " * left
                )
            )
            first = " " * left
    return "\n".join(lines)


def _options(options: Mapping[str, Any]) -> str:
    """Format options. A list, with one number per class, is abbreviated."""
    return ", ".join(
        f"{key}=…" if isinstance(value, list) else f"{key}={value}"
        for key, value in options.items()
    )


def _width() -> int:
    return min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
