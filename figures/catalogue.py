"""A list of every figure and table of the five papers, each with its state of reproduction."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from figures import items
from fl_core.errors import UsageError, check_known

PATH = items.HERE / "catalogue.csv"


@dataclass(frozen=True)
class Entry:
    """One line of the list of figures and tables.

    Attributes:
        name: ``paper.fig1``, ``paper.tableA5``, ``paper.sec54``; or an item's.
        title: one line.
        note: why it is not drawn here, where that is so.
        lacks: data behind it that cannot be had (see ``README.md``), separated by semicolons.
    """

    name: str
    title: str
    note: str = ""
    lacks: str = ""

    @property
    def paper(self) -> str:
        """The paper, or the family of items, with which the name begins."""
        return self.name.partition(".")[0]

    def told(self) -> tuple[str, str, str]:
        """Return its name, state, and title with what is lacking.

        The state is ``ready``, ``3 of 12 runs``, ``no rows`` or ``damaged`` of an item; else ``ended`` with a page, or
        ``absent``. The title of an item says where the drawing has less than the published figure.
        """
        item = items.REGISTRY.get(self.name)
        if item is None:
            state = "ended" if page_of(self.name).is_file() else "absent"
        else:
            state = item.state
        reason = self.note or (self.lacks and f"without {self.lacks}")
        title = (item or self).title + (f" ({reason})" if reason else "")
        return self.name, state, title


def published() -> list[Entry]:
    """The papers' figures and tables, paper by paper in their order."""
    with PATH.open(encoding="utf-8", newline="") as file:
        return [Entry(**line) for line in csv.DictReader(file)]


def entries(paper: str = "") -> list[Entry]:
    """The papers' figures and tables, then other registered items by name; optionally of one paper or family only.

    Raises:
        UsageError: an unknown paper or family; names the nearest.
    """
    papers = published()
    names = {entry.name for entry in papers}
    others = [
        Entry(name, item.title)
        for name, item in sorted(items.REGISTRY.items())
        if name not in names
    ]
    listed = [*papers, *others]
    if paper:
        check_known("paper", paper, dict.fromkeys(entry.paper for entry in listed))
    return [entry for entry in listed if not paper or entry.paper == paper]


def drawn(name: str) -> items.Item:
    """Return an item that is drawn here, by its name.

    Raises:
        UsageError: an unknown name, with the nearest; a figure of a paper that is not drawn, with the reason; a study
            that has ended, with its page.
    """
    if name not in items.REGISTRY and page_of(name).is_file():
        raise UsageError(
            f"{name} must have code to be drawn; got a study that has ended. Read figures/pictures/{name}.md."
        )
    known = {entry.name: entry for entry in published()}
    if (
        check_known("figure or table", name, sorted({*items.REGISTRY, *known}))
        in items.REGISTRY
    ):
        return items.find(name)
    raise UsageError(
        f"{name} cannot be drawn: {known[name].note}. Choose another: python -m figures list {known[name].paper}"
    )


def page_of(name: str) -> Path:
    """Return the path of a figure's page."""
    return items.PICTURES / f"{name}.md"


def lines(paper: str = "") -> list[str]:
    """Return the list as text, an item a line."""
    cells = [entry.told() for entry in entries(paper)]
    wide = [max(len(line[k]) for line in cells) for k in range(2)]
    return [
        f"{name:<{wide[0]}}  {state:<{wide[1]}}  {title}"
        for name, state, title in cells
    ]
