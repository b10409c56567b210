"""``python -m docs.lists``: writes the pages' lists of algorithms, metrics, rules, datasets and models.

A list stands between ``<!-- list:KIND -->`` and ``<!-- end -->``. The rest of a page stays as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedlayers.cli import folders
from fl_core.errors import UsageError, check_known
from fl_core.models.building import describe
from fl_core.registry import first_line

BLOCK = re.compile(r"(<!-- list:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def algorithms() -> str:
    """Return the table of algorithms, one row per family. Names in bold use a plan."""
    own = _own("algorithm")
    rows = []
    for family, members in folders.registry("algorithm").families().items():
        names = [
            f"**`{name}`**" if own[name].uses_plan else f"`{name}`"
            for name in members
            if name in own
        ]
        if names:
            rows.append((family, " ".join(names)))
    return _table(("family", "algorithms"), rows)


def metrics() -> str:
    """Return the table of metrics, with their meaning and how they are computed."""
    return _table(
        ("metric", "what it says of a layer", "its value", "how", "price"),
        (
            (
                f"`{name}`",
                member.description,
                member.direction,
                member.how,
                member.price,
            )
            for name, member in _own("metric").items()
        ),
    )


def rules() -> str:
    """Return the table of rules."""
    rows = ((f"`{name}`", member.summary) for name, member in _own("rule").items())
    return _table(("rule", "what it decides"), rows)


def datasets() -> str:
    """Return the table of datasets, with their default clients and models."""
    from fl_core import data

    rows, recipes = [], data.datasets()
    for name, member in _own("dataset").items():
        recipe = recipes[name]
        clients = (
            "its natural clients"
            if recipe.partition == "natural"
            else f"{recipe.clients}, {recipe.partition}"
        )
        summary = first_line(member.__doc__)
        rows.append((f"`{name}`", summary, clients, f"`{recipe.model}`"))
    return _table(("dataset", "samples", "clients", "model"), rows)


def models() -> str:
    """Return the table of models."""
    own = _own("model")
    summaries = {
        name: line for name, line in describe().items() if name in own or ":" in name
    }
    return _table(
        ("model", "what it is"),
        ((f"`{name}`", summary) for name, summary in summaries.items()),
    )


LISTS: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "metrics": metrics,
    "rules": rules,
    "datasets": datasets,
    "models": models,
}


def updated(text: str) -> str:
    """Return a page's text with its lists written again.

    >>> page = "Rules:\\n<!-- list:rules -->\\nan old list\\n<!-- end -->\\nThe end."
    >>> print(updated(page).splitlines()[2])
    | rule | what it decides |

    Raises:
        UsageError: an unknown kind of list, or a page without lists.
    """
    if not BLOCK.search(text):
        raise UsageError("The page has no <!-- list:KIND --> ... <!-- end -->.")
    return BLOCK.sub(
        lambda found: (
            found[1] + LISTS[check_known("list", found[2], LISTS)]() + found[3]
        ),
        text,
    )


def _own(kind: str) -> dict[str, Any]:
    """Return this project's members of a kind. Other installed packages do not belong in the pages."""
    return folders.registry(kind).own


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [
        heads,
        ["---"] * len(heads),
        *([_cell(text) for text in row] for row in rows),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _cell(text: str) -> str:
    return text.rstrip(".").replace("``", "`").replace("|", "\\|")


def main(*paths: Path) -> None:
    """Write the lists of the given pages, by default all pages of ``docs``."""
    for path in paths or sorted(Path("docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if paths or BLOCK.search(text):
            path.write_text(updated(text), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
