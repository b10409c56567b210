"""A list of every figure and table of the five papers, each with its state of reproduction."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass

from figures import items
from figures.items import QUICK
from fl_core.errors import check_known

PATH = items.HERE / "catalogue.csv"


@dataclass(frozen=True)
class Entry:
    """One line of the list of figures and tables.

    Attributes:
        name: ``paper.fig1``, ``paper.tableA5``, ``paper.sec54``; or an item's.
        title: one line.
        note: why it cannot be had, where that is so.
    """

    name: str
    title: str
    note: str = ""

    @property
    def paper(self) -> str:
        """The paper, or the family of items, with which the name begins."""
        return self.name.partition(".")[0]

    def state(self, scale: str = QUICK) -> str:
        """``ready``, ``3 of 12 runs`` or ``no rows`` of an item, ``no paper scale`` of one that lacks it; else
        ``cannot`` where a note says why, or ``planned``."""
        item = items.REGISTRY.get(self.name)
        if item is None:
            return "cannot" if self.note else "planned"
        if scale != QUICK and not item.study.paper:
            return f"no {scale} scale"
        return item.at(scale).state


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
    others = [Entry(name, item.title) for name, item in sorted(items.REGISTRY.items()) if name not in names]
    listed = [*papers, *others]
    if paper:
        check_known("paper", paper, dict.fromkeys(entry.paper for entry in listed))
    return [entry for entry in listed if not paper or entry.paper == paper]


def lines(paper: str = "", scale: str = QUICK) -> Iterator[str]:
    """The list as text: name, state and title, and why something cannot be had, one per line."""
    states = [(entry, entry.state(scale)) for entry in entries(paper)]
    wide, deep = (max(len(text) for text in column) for column in zip(*((e.name, s) for e, s in states), strict=True))
    for entry, state in states:
        reason = f" ({entry.note})" if state == "cannot" else ""
        yield f"{entry.name:<{wide}}  {state:<{deep}}  {entry.title}{reason}"
