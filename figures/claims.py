"""The papers' claims: which figure decides each, and its verdict and number in the words of the scorecard.

``claims.csv`` has a line for each claim. It names the figure that decides it and the beginning of the expectation on
its page. A regular expression picks the part of the measurement to show; an empty one shows all.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from figures.drawing import VERDICTS
from fl_core.errors import UsageError

CLAIMS = Path(__file__).with_name("claims.csv")
WORDS = dict(
    zip(
        VERDICTS,
        ("**reproduced**", "**contradicted**", "undecided", "not comparable"),
        strict=True,
    )
)
"""The scorecard's words for the verdicts on the pages."""
Expectation = tuple[str, str, str]
"""An expectation, its verdict and its measurement."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, with the figure that decides it.

    Attributes:
        line: its name, by which a change of its verdict is recorded.
        claim: the claim in plain words.
        place, words: where in the paper, and a quotation from there; ``…`` stands for what is left out.
        figure: the figure whose page decides it.
        finding: how the expectation on that page begins.
        shown: regular expression of what is shown of the measurement.
        theirs: the paper's value.
        setting: clients, images, rounds, seeds behind our number.
        written: date on which the criterion was written.
        rows_known: whether our rows were known then: ``yes``, ``no``, or ``in part`` where later seeds were registered.
    """

    line: str
    paper: str
    claim: str
    place: str
    words: str
    figure: str
    finding: str
    shown: str
    theirs: str
    setting: str
    written: str
    rows_known: str

    def judged(self, expectations: Iterable[Expectation]) -> tuple[str, str]:
        """Return the verdict in the scorecard's words, and our number, from the expectations of its figure.

        Raises:
            UsageError: there is not exactly one such expectation, or nothing of the measurement is shown.
        """
        matches = [
            expectation
            for expectation in expectations
            if expectation[0].startswith(self.finding)
        ]
        if len(matches) != 1:
            raise UsageError(
                f"{self.figure} must have one expectation that begins with {self.finding!r}; got {len(matches)}. "
                "Correct claims.csv."
            )
        _, verdict, measured_text = matches[0]
        shown_parts = re.findall(self.shown or ".+", measured_text)
        if not shown_parts:
            raise UsageError(
                f"{self.figure}: {measured_text!r} must match {self.shown!r}. Correct claims.csv."
            )
        return WORDS[verdict], "; ".join(shown_parts)


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table in their order."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def claims(path: Path = CLAIMS) -> list[Claim]:
    """Return all claims, paper by paper."""
    return [Claim(**csv_row) for csv_row in read(path)]


def opening_lines(figure: str, expectations: Iterable[Expectation]) -> list[str]:
    """Return the scorecard's lines of a figure, each as one sentence: the claim, its verdict and our number.

    A figure that decides no claim has none.
    """
    claim_lines, expectations = [], list(expectations)
    for claim in claims():
        if claim.figure == figure:
            verdict, number = claim.judged(expectations)
            claim_lines.append(f"{claim.claim}: {verdict} ({number}).")
    return claim_lines
