"""The results of drawing: a picture with its table, caption and findings. Functions write captions and pictures."""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

COLUMNS = (
    "quantity", "definition", "layer", "threshold", "published_low", "published_high", "published_where",
    "measured", "measured_low", "measured_high", "measured_what",
)  # fmt: skip
"""Columns of every item's table. ``measured`` and its bounds are what ``measured_what`` says."""
DPI = 120
LINES = 4
"""Lines of text beneath a picture at most, unless its lead and the first sentence of its caption are longer."""
SENTENCE = re.compile(r"(?<=\.)(?<!Fig\.)(?<!Figs\.) (?=[A-Z*])")
"""Where a sentence of a caption ends."""


@dataclass(frozen=True)
class Finding:
    """An expectation and its outcome.

    Attributes:
        expected: the expectation.
        measured: what was found.
        held: its outcome; None if the runs do not decide it.
        incomparable: why the measurement is too far from the paper's for a verdict on the paper; empty where it is not.
    """

    expected: str
    measured: str
    held: bool | None
    incomparable: str = ""

    @property
    def verdict(self) -> str:
        """Return one of :data:`VERDICTS`; not comparable goes before all others."""
        if self.incomparable:
            return "not comparable"
        if self.held is None:
            return "open"
        return "held" if self.held else "did not hold"

    def __str__(self) -> str:
        reason = ""
        if self.incomparable:
            reason = f" ({self.incomparable})"
        return f"{self.verdict}{reason}: {self.expected}. Measured: {self.measured}."


VERDICTS = ("held", "did not hold", "open", "not comparable")
_CAME_OUT = {
    "held": ("held", "held"),
    "did not hold": ("did not hold", "did not hold"),
    "open": ("is open", "are open"),
    "not comparable": ("is not comparable", "are not comparable"),
}
_MEANS = {
    "open": " Our runs do not decide this.",
    "not comparable": " Our runs differ too much from the paper's.",
}
_DETAIL = re.compile(r"(;.*| \([^()]*\)|(, [^\s,]+ \d[\d.-]*)+)$")
"""The end of an expectation that a page's first sentence leaves out: an addition, a bracket or a list of numbers."""


def set_apart(findings: Iterable[Finding], reason: str) -> tuple[Finding, ...]:
    """Return the findings as not comparable with the paper's, for a reason; without a reason as they are."""
    return tuple(
        replace(finding, incomparable=reason) if reason else finding
        for finding in findings
    )


@dataclass(frozen=True)
class Drawing:
    """A table with its caption and findings, and most often a picture, as a drawing function returns it.

    Attributes:
        figure: the picture in the package's style, without a caption; None for a table alone.
        table: columns :data:`COLUMNS`, or an item's own.
        caption: what is shown, and then the sizes behind it: the first sentences stand beneath the picture.
        findings: each expectation with its verdict.
        text: Markdown for the page, after the findings.
        lead: the finding that the page begins with, in one or two sentences; default :func:`opening`. A figure that
            decides a claim begins with the claim's line in the scorecard instead.
    """

    figure: Figure | None
    table: pd.DataFrame
    caption: str
    findings: tuple[Finding, ...]
    text: str = ""
    lead: str = ""


def opening(findings: Sequence[Finding]) -> str:
    """Return the first finding of a page, and how the others came out.

    >>> opening([Finding("a lies above b (F1)", "+0.1 ± 0.5", None), Finding("c lies above d", "+2.0 ± 0.5", True)])
    '**Open: a lies above b.** Our runs do not decide this. The other expectation held.'
    """
    if not findings:
        return ""
    first_finding, *other_findings = findings
    other_verdicts = Counter(finding.verdict for finding in other_findings)
    verdict = f"{first_finding.verdict[0].upper()}{first_finding.verdict[1:]}"
    expected = _DETAIL.sub("", first_finding.expected)
    meaning_text, others_text = (
        _MEANS.get(first_finding.verdict, ""),
        _of_others(other_verdicts),
    )
    return f"**{verdict}: {expected}.**{meaning_text}{others_text}"


def _of_others(verdicts: Counter[str]) -> str:
    """Return a sentence on the verdicts of a page's other findings; empty without any."""
    if not verdicts:
        return ""
    counted_verdicts = []
    for verdict in VERDICTS:
        singular, plural = _CAME_OUT[verdict]
        if verdicts[verdict]:
            counted_verdicts.append(
                (verdicts[verdict], plural if verdicts[verdict] > 1 else singular)
            )
    ((verdict_count, outcome), *more_verdicts) = counted_verdicts
    if not more_verdicts and verdict_count == 1:
        return f" The other expectation {outcome}."
    if not more_verdicts:
        return f" The other {verdict_count} expectations {outcome}."
    verdicts_text = enumeration(
        [f"{number} {text}" for number, text in counted_verdicts]
    )
    return f" Of {verdicts.total()} other expectations, {verdicts_text}."


def enumeration(words: Iterable[object]) -> str:
    """Return words as a text, the last one after ``and``.

    >>> enumeration([12, 10, 6])
    '12, 10 and 6'
    """
    texts = list(map(str, words))
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def beneath(lead: str, caption: str, width: int) -> str:
    """Return a lead, and as many whole sentences of a caption as fit beneath a picture; its page has them all.

    The lead and the caption's first sentence, which says what is drawn, always stand there whole.

    Args:
        lead: the scorecard's lines or the first finding; may be empty.
        width: characters a line, of which there are :data:`LINES`.
    """
    first_sentence, *sentences = SENTENCE.split(caption.replace("`", ""))
    texts = [f"{lead} {first_sentence}".replace("`", "").strip(), *sentences]
    for text_count in range(len(texts), 1, -1):
        wrapped_lines = textwrap.wrap(" ".join(texts[:text_count]), width)
        if len(wrapped_lines) <= LINES:
            return "\n".join(wrapped_lines)
    return textwrap.fill(texts[0], width)


def save_png(figure: Figure, path: Path, dpi: int = DPI, **options: Any) -> None:
    """Write a picture with all its colours.

    A file that has these pixels already stays as it is, whatever library has compressed it.

    Args:
        options: further ones of ``savefig``.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi, facecolor="white", **options)
    with Image.open(content) as image:
        picture = image.convert("RGB")
    if not _has(path, picture):
        picture.save(path, optimize=True, dpi=(dpi, dpi))


def _has(path: Path, picture: Image.Image) -> bool:
    """Return whether a file has the pixels of a picture."""
    if not path.is_file():
        return False
    try:
        with Image.open(path) as image:
            pixels = image.convert("RGB")
    except OSError:  # no picture, or a damaged one
        return False
    return pixels.size == picture.size and pixels.tobytes() == picture.tobytes()
