"""What drawing gives: a picture with its table and caption, and findings; how captions and pictures are written."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from PIL import Image, ImageChops

COLUMNS = (
    "quantity", "definition", "layer", "threshold", "published_low", "published_high", "published_where",
    "measured", "measured_low", "measured_high", "measured_what",
)  # fmt: skip
"""Columns of every item's table. ``measured`` and its bounds are what ``measured_what`` says."""
DPI = 200
LINES = 3
"""Lines of text beneath a picture at most, unless its first sentence is longer."""
SEEN = 8
"""A difference of colours, of 255, above which a palette would be seen."""
SENTENCE = re.compile(r"(?<=\.)(?<!Fig\.)(?<!Figs\.) (?=[A-Z*])")
"""Where a sentence of a caption ends."""


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


def beneath(caption: str, width: int) -> str:
    """As many whole sentences of a caption as fit beneath a picture, at least the first; its page has them all.

    Args:
        width: characters a line, of which there are :data:`LINES`.
    """
    sentences = SENTENCE.split(caption.replace("`", ""))
    for count in range(len(sentences), 1, -1):
        if len(wrapped := textwrap.wrap(" ".join(sentences[:count]), width)) <= LINES:
            return "\n".join(wrapped)
    return textwrap.fill(sentences[0], width)


def save_png(figure: Figure, path: Path, dpi: int = DPI, **options: Any) -> None:
    """Write a picture with a palette of 256 colours, a third of the size that it has without, if it looks the same.

    Args:
        options: further ones of ``savefig``.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, facecolor="white", **options)
    with Image.open(drawn) as picture:
        all_of_them = picture.convert("RGB")
    few = all_of_them.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    off: Any = ImageChops.difference(all_of_them, few.convert("RGB")).getextrema()
    same = max(largest for _, largest in off) <= SEEN
    (few if same else all_of_them).save(path, optimize=True, dpi=(dpi, dpi))
