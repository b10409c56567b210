"""The scorecard: each paper's claims with verdict and number, made from claims and stored pages.

``claims.csv`` has a line for each claim. It names the figure that decides it and the beginning of the expectation on
its page. A regular expression picks the part of the measurement to show; an empty one shows all. The verdict and the
number are read off that page.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from figures import changes, items
from figures.page import markdown, read_expectations
from figures.papers import PAPERS
from fl_core.errors import UsageError

CLAIMS = items.HERE / "claims.csv"
README = items.HERE / "README.md"
BEGIN, END = "<!-- scorecard -->", "<!-- end of the scorecard -->"
WORDS = dict(
    zip(
        items.VERDICTS,
        ("**reproduced**", "**contradicted**", "undecided", "not comparable"),
        strict=True,
    )
)
"""The scorecard's words for the verdicts on the pages."""
TITLES = {
    "player_fl": "PLayer-FL",
    "scheduling": "Layer scheduling",
    "fedpft": "FedPFT",
    "pfedla": "pFedLA",
    "fedra": "FedRA",
}


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, with the figure that decides it.

    Attributes:
        line: its name, by which a change of its verdict is recorded (:mod:`figures.changes`).
        claim: in plain words.
        place, words: where in the paper, and a quotation from there; ``…`` stands for what is left out.
        figure: whose page decides it.
        finding: how the expectation on that page begins.
        shown: regular expression of what is shown of the measurement.
        data, scale: behind the number.
    """

    line: str
    paper: str
    claim: str
    place: str
    words: str
    figure: str
    finding: str
    shown: str
    data: str
    scale: str


class Said(NamedTuple):
    """A finding as its page has it."""

    expected: str
    verdict: str
    measured: str


def claims(path: Path = CLAIMS) -> list[Claim]:
    """All claims, paper by paper."""
    with path.open(encoding="utf-8", newline="") as file:
        return [Claim(**line) for line in csv.DictReader(file)]


def findings(page: Path) -> list[Said]:
    """The findings on an item's page."""
    return [
        Said(*cells) for cells in read_expectations(page.read_text(encoding="utf-8"))
    ]


def judged(claim: Claim, pictures: Path | None = None) -> tuple[str, str]:
    """The verdict on a claim in the scorecard's words, and our number.

    Raises:
        UsageError: its page has not exactly one such expectation, or nothing of the measurement is shown.
    """
    page = (items.PICTURES if pictures is None else pictures) / f"{claim.figure}.md"
    found = [each for each in findings(page) if each.expected.startswith(claim.finding)]
    if len(found) != 1:
        raise UsageError(
            f"{page.name} must have one expectation that begins with {claim.finding!r}; got {len(found)}. "
            "Correct claims.csv."
        )
    parts = (
        re.findall(claim.shown, found[0].measured)
        if claim.shown
        else [found[0].measured]
    )
    if not parts:
        raise UsageError(
            f"{page.name}: {found[0].measured!r} must match {claim.shown!r}. Correct claims.csv."
        )
    return WORDS[found[0].verdict], "; ".join(parts)


def verdicts() -> dict[str, str]:
    """Return today's verdict of every line, as plain words."""
    return {claim.line: judged(claim)[0].strip("*") for claim in claims()}


def table() -> str:
    """The scorecard in Markdown, a table for each paper."""
    return "\n\n".join(f"**{TITLES[paper]}**\n\n{part}" for paper, part in _tables())


def _tables() -> Iterator[tuple[str, str]]:
    for paper in PAPERS:
        columns: dict[str, list[str]] = {
            name: []
            for name in (
                "the paper claims",
                "here",
                "our number",
                "data",
                "scale",
                "page",
            )
        }
        for each in (claim for claim in claims() if claim.paper == paper):
            link = f"[{each.figure}](pictures/{each.figure}.md)"
            quoted = f"{each.claim}: “{each.words}” ({each.place})"
            cells = (quoted, *judged(each), each.data, each.scale, link)
            for column, cell in zip(columns.values(), cells, strict=True):
                column.append(cell.replace("|", "\\|"))
        yield paper, markdown(columns)


def renewed(text: str) -> str:
    """A page's text with its scorecard made again.

    Raises:
        UsageError: the text has no place for it.
    """
    if BEGIN not in text or END not in text:
        raise UsageError(
            f"the page must have {BEGIN} and {END}; got neither or one. Add both lines."
        )
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def write(path: Path = README) -> Path:
    """Update the scorecard in the README and the list of changed verdicts. Return the README's path."""
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
    changes.write(path.parent)
    return path
