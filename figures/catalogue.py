"""A list of every figure and table of the five papers, each with its state of reproduction."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from figures import items
from figures.page import seeds_in_words, span
from fl_core.errors import UsageError, check_known

PATH = items.HERE / "catalogue.csv"


MANY = 6


@dataclass(frozen=True)
class Entry:
    """One line of the list of figures and tables.

    Attributes:
        name: ``paper.fig1``, ``paper.tableA5``, ``paper.sec54``; or an item's.
        title: one line.
        note: why it is not drawn here, where that is so.
        lacks: data behind it that cannot be had (see ``README.md``), separated by semicolons.
        rounds: of the paper's runs, where ours have other numbers.
    """

    name: str
    title: str
    note: str = ""
    lacks: str = ""
    rounds: str = ""

    @property
    def paper(self) -> str:
        """The paper, or the family of items, with which the name begins."""
        return self.name.partition(".")[0]

    def told(self) -> tuple[str, str, str, str, str]:
        """Return its name, state, data, scale, and title with what is lacking.

        The state is ``ready``, ``3 of 12 runs`` or ``no rows`` of an item; else ``ended`` with a page, or ``absent``.
        The title of an item says where the drawing has less than the published figure.
        """
        item = items.REGISTRY.get(self.name)
        if item is None:
            state = "ended" if page_of(self.name).is_file() else "absent"
            data = scale = "-"
        else:
            state = item.state
            data, scale = _data(item), _scale(item, self.rounds)
        reason = self.note if state == "absent" else self.lacks
        words = "" if state == "absent" else "without "
        title = (item or self).title + (f" ({words}{reason})" if reason else "")
        return self.name, state, data, scale, title


def _data(item: items.Item) -> str:
    """The datasets of the runs that it shows; of more than :data:`MANY` their number."""
    names = list(dict.fromkeys(config.data.dataset for config in item.drawn))
    return f"{len(names)} datasets" if len(names) > MANY else ", ".join(names)


def _scale(item: items.Item, papers: str) -> str:
    """The rounds with the paper's, and the seeds.

    A pretraining counts only without other runs. It is the run of a single client.
    """
    study, runs = item.study, item.drawn
    if "nothing is trained" in study.budget:
        return "nothing trained"
    federated = [config for config in runs if config.data.clients != 1]
    rounds = span(config.federation.rounds or 1 for config in federated or runs)
    part = f" of {papers}" if papers else ""
    drawn = str(item.seeds) if item.source and item.seeds else ""
    seeds = drawn or span([study.seeds, *study.more_seeds.values()])
    return (
        f"{rounds}{part} round{'s' * (rounds + part != '1')}, {seeds_in_words(seeds)}"
    )


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
    wide = [max(len(line[k]) for line in cells) for k in range(4)]
    return [
        "  ".join(
            f"{text:<{size}}" for text, size in zip(line, [*wide, 0], strict=True)
        )
        for line in cells
    ]
