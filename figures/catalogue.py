"""A list of every figure and table of the five papers, each with its state of reproduction."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from difflib import get_close_matches

from figures import items
from figures.papers import PAPERS
from fl_core.errors import LONGEST, UsageError, check_known

PATH, HISTORY = items.HERE / "catalogue.csv", items.HERE / "history.md"


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
        """Return the paper, or the family of items, with which the name begins."""
        return self.name.partition(".")[0]

    def told(self) -> tuple[str, str, str]:
        """Return its name, state, and title with what is lacking.

        The state is ``ready``, ``3 of 12 runs``, ``no rows`` or ``damaged`` of an item; else ``ended`` with a line in
        the history, or ``absent``. The title says where the drawing has less than the published figure, and which item
        shows it.
        """
        item = items.by_name().get(self.name)
        if item is None:
            state = "ended" if self.name in ended() else "absent"
        else:
            state = item.state
        reason = self.note or (self.lacks and f"without {self.lacks}")
        title = (item or self).title
        if item and item.name != self.name:
            title = f"{self.title}, in {item.name}"
        if reason:
            title += f" ({reason})"
        return self.name, state, title


def published() -> list[Entry]:
    """Return the papers' figures and tables, paper by paper in their order."""
    with PATH.open(encoding="utf-8", newline="") as file:
        return [Entry(**csv_row) for csv_row in csv.DictReader(file)]


def entries(paper: str = "") -> list[Entry]:
    """Return the papers' figures and tables, then other registered items by name.

    Args:
        paper: the only paper or family to list; empty for all.

    Raises:
        UsageError: an unknown paper or family; names the nearest.
    """
    paper_entries = published()
    paper_names = {entry.name for entry in paper_entries}
    other_entries = [
        Entry(item_name, item.title)
        for item_name, item in sorted(items.REGISTRY.items())
        if item_name not in paper_names
    ]
    all_entries = [*paper_entries, *other_entries]
    if paper:
        check_known("paper", paper, dict.fromkeys(entry.paper for entry in all_entries))
    return [entry for entry in all_entries if not paper or entry.paper == paper]


def drawn(item_name: str) -> items.Item:
    """Return an item that is drawn here, by its name.

    Raises:
        UsageError: an unknown name, with near ones; a figure of a paper that is not drawn, with the reason; what
            has ended, with its commit.
    """
    items_by_name, ended_commits = items.by_name(), ended()
    if item_name in ended_commits:
        raise UsageError(
            f"{item_name} must have code to be drawn; got a figure that has ended. Commit {ended_commits[item_name]} "
            "has it: read "
            "figures/history.md."
        )
    entries_by_name = {entry.name: entry for entry in published()}
    if item_name in items_by_name:
        return items_by_name[item_name]
    if item_name not in entries_by_name:
        known_names = {*PAPERS, *items_by_name, *entries_by_name}
        name_by_fold = {name.casefold(): name for name in sorted(known_names)}
        matches = get_close_matches(item_name[:LONGEST].casefold(), name_by_fold, n=3)
        hint = ""
        if matches:
            near_text = ", ".join(name_by_fold[match] for match in matches)
            hint = f"Did you mean {near_text}? "
        raise UsageError(
            f"NAME must be a paper, a figure or a table; got {item_name!r}. {hint}See python -m figures list."
        )
    raise UsageError(
        f"{item_name} cannot be drawn: {entries_by_name[item_name].note}. Choose another: python -m figures list "
        f"{entries_by_name[item_name].paper}"
    )


def ended() -> dict[str, str]:
    """Return the figures and studies whose code has ended, each with the last commit that has it."""
    ended_rows = re.findall(
        r"^\| `(\S+)` \|.*\| ([0-9a-f]{8}) \|$",
        HISTORY.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return dict(ended_rows)


def lines(paper: str = "") -> list[str]:
    """Return the list as text, an item a line."""
    entry_texts = [entry.told() for entry in entries(paper)]
    widths = [max(len(entry_text[k]) for entry_text in entry_texts) for k in range(2)]
    return [
        f"{name:<{widths[0]}}  {state:<{widths[1]}}  {title}"
        for name, state, title in entry_texts
    ]
