"""What drawing gives: a picture with its table and caption, and findings, each an expectation with its verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.figure import Figure

COLUMNS = (
    "quantity", "definition", "layer", "threshold", "published_low", "published_high", "published_where",
    "measured", "measured_low", "measured_high", "measured_what",
)  # fmt: skip
"""Columns of every item's table. ``measured`` and its bounds are what ``measured_what`` says."""


@dataclass(frozen=True)
class Finding:
    """An expectation and its outcome.

    Attributes:
        expected: the expectation.
        measured: what was found.
        held: its outcome; None if the runs do not decide it.
        apart: why the measurement is too far from the paper's for a verdict on the paper; empty where it is not.
    """

    expected: str
    measured: str
    held: bool | None
    apart: str = ""

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`; not comparable goes before all others."""
        if self.apart:
            return "not comparable"
        return "open" if self.held is None else "held" if self.held else "did not hold"

    def __str__(self) -> str:
        reason = f" ({self.apart})" if self.apart else ""
        return f"{self.verdict}{reason}: {self.expected}. Measured: {self.measured}."


VERDICTS = ("held", "did not hold", "open", "not comparable")


def set_apart(findings: Iterable[Finding], reason: str) -> tuple[Finding, ...]:
    """The findings as not comparable with the paper's, for a reason; without a reason as they are."""
    return tuple(replace(each, apart=reason) if reason else each for each in findings)


@dataclass(frozen=True)
class Drawing:
    """A picture with its table, caption and findings, as a drawing function returns it.

    Attributes:
        figure: in the package's style, without a caption.
        table: columns :data:`COLUMNS`, or an item's own.
        caption: what is seen, and then the sizes behind it: the first sentences stand beneath the picture.
        findings: each expectation with its verdict.
        text: Markdown for the page, between caption and findings.
    """

    figure: Figure
    table: pd.DataFrame
    caption: str
    findings: tuple[Finding, ...]
    text: str = ""
