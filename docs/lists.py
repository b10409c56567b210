"""``python -m docs.lists``: writes the pages' lists of algorithms, metrics, rules, datasets and models.

A list stands between ``<!-- list:KIND -->`` and ``<!-- end -->``. The rest of a page stays as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedlayers import catalogue
from fl_core.errors import UsageError, check_known
from fl_core.models.registry import describe
from fl_core.source_scan import Entry

BLOCK = re.compile(r"(<!-- list:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def algorithms() -> str:
    """Return the table of algorithms, one row per family. Names in bold use a plan."""
    families = catalogue.families(_ours("algorithm"))
    rows = []
    for family, members in families.items():
        names = [
            f"**`{each.name}`**" if each.facts.get("uses_plan") else f"`{each.name}`"
            for each in members
        ]
        rows.append((family, " ".join(names)))
    return _table(("family", "algorithms"), rows)


def metrics() -> str:
    """Return the table of metrics, with their meaning and how they are computed."""
    return _table(
        ("metric", "what it says of a layer", "its value", "how"),
        (
            (
                f"`{each.name}`",
                *(
                    str(each.facts.get(fact, ""))
                    for fact in ("description", "direction", "how")
                ),
            )
            for each in _ours("metric")
        ),
    )


def rules() -> str:
    """Return the table of rules."""
    rows = (
        (f"`{each.name}`", str(each.facts.get("summary", each.summary)))
        for each in _ours("rule")
    )
    return _table(("rule", "what it decides"), rows)


def datasets() -> str:
    """Return the table of datasets, with their default clients and models."""
    from fl_core import data

    rows, recipes = [], data.datasets()
    for entry in sorted(_ours("dataset"), key=lambda each: each.name):
        recipe = recipes[entry.name]
        clients = (
            "its natural clients"
            if recipe.partition == "natural"
            else f"{recipe.clients}, {recipe.partition}"
        )
        rows.append((f"`{entry.name}`", entry.summary, clients, f"`{recipe.model}`"))
    return _table(("dataset", "samples", "clients", "model"), rows)


def models() -> str:
    """Return the table of models."""
    ours = catalogue.own_entries("model")
    summaries = {
        name: line for name, line in describe().items() if name in ours or ":" in name
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


def _ours(kind: str) -> list[Entry]:
    """Return this project's members of a kind. Other installed packages do not belong in the pages."""
    return list(catalogue.own_entries(kind).values())


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
