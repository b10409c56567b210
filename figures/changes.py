"""Changed verdicts: every line that entered or left the scorecard, or whose verdict changed, with a date and a reason.

``first_verdicts.csv`` has the scorecard's lines when the record began, ``changed_verdicts.csv`` every change since.
Together they give the scorecard's verdicts at any date.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from figures import items
from figures.page import markdown
from fl_core.errors import UsageError

FIRST, CHANGES = items.HERE / "first_verdicts.csv", items.HERE / "changed_verdicts.csv"
PAGE = items.HERE / "changed_verdicts.md"
NEW, LEFT = "new", "left"
"""Stand for the verdict before a line's entry, and after its exit."""


class Change(NamedTuple):
    """A change of one line of the scorecard.

    Its cause is a ``repair`` of what is asked or how it is judged, or new ``runs``.
    """

    line: str
    date: str
    cause: str
    before: str
    after: str
    reason: str


def changes(path: Path = CHANGES) -> list[Change]:
    """Return all changes in their order."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Change(**entry) for entry in csv.DictReader(file)]


def verdicts(first: Path = FIRST, path: Path = CHANGES) -> dict[str, str]:
    """Return the verdict of every line, replayed from the record.

    Raises:
        UsageError: A change does not fit what was before it, or has no reason.
    """
    with first.open(encoding="utf-8", newline="") as file:
        now = {entry["line"]: entry["verdict"] for entry in csv.DictReader(file)}
    for each in changes(path):
        if (
            now.get(each.line, NEW) != each.before
            or each.before == each.after
            or not each.reason
        ):
            raise UsageError(
                f"{path.name}: a change must fit the verdict before it and have a reason; got {each.line}, "
                f"{each.before} to {each.after} after {now.get(each.line, NEW)}. Correct the entry."
            )
        now[each.line] = each.after
        if each.after == LEFT:
            del now[each.line]
    return now


def page() -> str:
    """Return the list of changes as a page."""
    made = changes()
    table = markdown(
        {
            "line": [f"`{each.line}`" for each in made],
            **{
                name: [getattr(each, name) for each in made]
                for name in Change._fields[1:]
            },
        }
    )
    return "\n\n".join([
        "# Changed verdicts",
        "Every change of the [scorecard](README.md), with its date and reason. A line of the scorecard is removed "
        "only with an entry here. `python -m figures scorecard` makes this page from `changed_verdicts.csv`.",
        table,
    ]) + "\n"  # fmt: skip


def write(folder: Path = PAGE.parent) -> Path:
    """Write the page into a folder and return its path."""
    path = folder / PAGE.name
    path.write_text(page(), encoding="utf-8")
    return path
