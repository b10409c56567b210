"""The command that lists what is available by name: list."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

from tyro.conf import Positional

from fedlayers import catalogue
from fedlayers.cli.options import Command, option
from fl_core.errors import check_known
from fl_core.models.registry import describe


@dataclasses.dataclass(frozen=True, kw_only=True)
class List(Command):
    """List algorithms, datasets, models, metrics or rules.

    Examples:
        fedlayers list algorithms
        fedlayers list datasets
    """

    what: Annotated[
        Positional[str],
        option(
            "What to list: algorithms, datasets, models, metrics, rules or loggers.",
            "WHAT",
        ),
    ]

    def main(self, line: str) -> None:
        print(LISTINGS[check_known("listing", self.what, LISTINGS)]())
        if self.what == "datasets":
            print(f"\n{own_data()}")


def algorithms() -> str:
    """List algorithms by family, with their papers, options and costs. The list says what is trained, sent and kept.

    The cost is the number of scalars that a client receives and sends in a round. P stands for all of the model's.
    """
    known = catalogue.registry("algorithm")
    summaries = known.summaries()
    width, left = _width(110), 2 + max(map(len, known)) + 2
    legend = "Cost: scalars that a client receives and sends a round; P = all of the model's. Plan: uses --plan."
    lines = [textwrap.fill(legend, width)]
    for family, names in known.families().items():
        lines.append("\n" + textwrap.fill(family, width))
        for name in names:
            if name in known.entry_points:  # not imported for a list
                told = [summaries[name]]
            else:
                told = _algorithm(known[name])
            indent = " " * left
            first = f"  {name}".ljust(left)
            for text in told:
                lines.append(
                    textwrap.fill(
                        text, width, initial_indent=first, subsequent_indent=indent
                    )
                )
                first = indent
    return "\n".join(lines)


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
    options = [f"{key}={value}" for key, value in defaults_of(member).items()]
    text = " | ".join(parts)
    return [text, "--option " + ", ".join(options)] if options else [text]


def datasets() -> str:
    """List every dataset with its defaults. Rounds are given as rounds x local epochs, unless there is one epoch."""
    from fl_core import data

    shown = (
        "model",
        "clients",
        "partition",
        "alpha",
        "max_samples",
        "rounds",
        "batch_size",
        "lr",
        "optimizer",
        "loss",
    )
    lines = []
    recipes = data.datasets()
    for name, recipe in recipes.items():
        values: dict[str, object] = {key: getattr(recipe, key) for key in shown}
        values["clients"] = recipe.clients or "natural"
        values["alpha"] = recipe.alpha if recipe.partition == "dirichlet" else ""
        values["max_samples"] = recipe.max_samples or "all"
        values["rounds"] = (
            recipe.rounds
            if recipe.epochs == 1
            else f"{recipe.rounds} x {recipe.epochs}"
        )
        values["optimizer"] = _with(recipe.optimizer, recipe.optimizer_options)
        values["loss"] = _with(recipe.loss, recipe.loss_options)
        lines.append({"name": name, **values})
    for name, summary in data.DATASETS.summaries().items():
        if name not in recipes:  # another package's, which is not imported to be listed
            lines.append({"name": name, **dict.fromkeys(shown, ""), "model": summary})
    lines = [
        {_HEADS.get(key, key): value for key, value in line.items()} for line in lines
    ]
    return _table(lines)


def own_data() -> str:
    """Describe the defaults for a user's own data."""
    from fl_core.data.recipes import SHARES, general
    from fl_core.tokens import TokenShape

    table, image, text = (
        general(shape, False) for shape in ((1,), (3, 32, 32), TokenShape((1,), 3))
    )
    shares = "/".join(f"{100 * share:.0f}" for share in SHARES)
    words = (
        f"Your own data, by path or code: {shares} % of each client's samples for training, validation and test; "
        f"at most {table.rounds} rounds with patience {table.patience}, batch {table.batch_size}, lr {table.lr:g}, "
        f"{_with(table.optimizer, table.optimizer_options)}, {table.loss}; {table.model} for tables, {image.model} for "
        f"images, {text.model} with batch {text.batch_size} for texts; the clients that the data name, or else "
        f"{table.clients} by {table.partition} with alpha {table.alpha:g}; columns of tables "
        "scaled to mean 0 and deviation 1 (--scale), other numbers as they are, missing ones refused (--impute)."
    )
    return textwrap.fill(words, _width(110))


def models() -> str:
    """List every model with one line."""
    return _table([{"name": name, "model": line} for name, line in describe().items()])


def metrics() -> str:
    """List every metric with its price, meaning, direction and variants."""
    known = catalogue.registry("metric")
    lines = []
    for name, summary in known.summaries().items():
        line = {"name": name, "price": "", "measures": summary}
        line |= {"direction": "", "variants": ""}
        if name not in known.entry_points:
            member = known[name]
            line["price"] = member.price
            line["measures"] = member.description
            line["direction"] = member.direction
            line["variants"] = ", ".join(member.variants)
        lines.append(line)
    return _table(lines)


def rules() -> str:
    """List every rule with one line."""
    return _summaries("rule")


def loggers() -> str:
    """List every logger with one line."""
    return _summaries("logger")


def _summaries(kind: str) -> str:
    """List the members of a kind with one line each."""
    summaries = catalogue.registry(kind).summaries()
    return _table([{"name": name, kind: line} for name, line in summaries.items()])


WIDTH = 160
_HEADS = {
    "max_samples": "samples",
    "batch_size": "batch",
}  # so that a line is no longer than that
LISTINGS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "datasets": datasets,
    "models": models,
    "metrics": metrics,
    "rules": rules,
    "loggers": loggers,
}


def _with(name: str, options: Mapping[str, Any]) -> str:
    """Format a name with its options. A list, with one number per class, is abbreviated."""

    def option_text(key: str, value: Any) -> str:
        if value is True:
            return key
        return f"{key}=…" if isinstance(value, list) else f"{key}={value:g}"

    return " ".join(
        [name, *(option_text(key, value) for key, value in options.items())]
    )


def _width(most: int) -> int:
    """Return the terminal's width, at most ``most``; without a terminal, ``most``."""
    return min(shutil.get_terminal_size((most, 0)).columns, most)


def _table(lines: Sequence[Mapping[str, object]]) -> str:
    """Format a table with aligned columns, wrapped to the width of the terminal (160 without one)."""
    rows = [
        [str(key) for key in lines[0]],
        *([str(value) for value in line.values()] for line in lines),
    ]
    least = [
        max(len(word) for cell in column for word in (cell.split() or [""]))
        for column in zip(*rows, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = _width(WIDTH) - 2 * (len(widths) - 1)
    while sum(widths) > room and any(
        width > most for width, most in zip(widths, least, strict=True)
    ):
        widths[max(range(len(widths)), key=lambda k: widths[k] - least[k])] -= 1
    printed = []
    for row in rows:
        cells = [
            textwrap.wrap(cell, width) or [""]
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            printed.append(
                "  ".join(
                    part.ljust(width) for part, width in zip(parts, widths, strict=True)
                ).rstrip()
            )
    return "\n".join(printed)
