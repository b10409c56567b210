"""Check a built site on narrow screens: nothing on a page may be wider than a telephone without its own scrolling."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

SCREEN = 390
"""Width of the narrow screen, in CSS pixels."""
SCROLLING = frozenset(
    {"table-wrapper", "scorecard", "cell_output", "highlight", "indextable"}
)
"""Classes of boxes that scroll by themselves; ``static/site.css`` makes them do so."""
SHRINKING = frozenset({"img", "svg", "video"})
"""Tags that the style limits to the width of the page."""
VOID = frozenset(
    {
        "img",
        "br",
        "hr",
        "input",
        "meta",
        "link",
        "col",
        "source",
        "wbr",
        "area",
        "embed",
        "track",
        "base",
    }
)
PIXELS = re.compile(r"(?:^|[;\s])(?:min-)?width:\s*(\d+)px")


class Page(HTMLParser):
    """The parts of a page that would make it scroll sideways, and whether it fits its width to the screen."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.wide: list[str] = []
        self.fits = False
        self._open: list[tuple[str, bool]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        if tag == "meta" and named.get("name") == "viewport":
            self.fits |= "width=device-width" in named.get("content", "").replace(
                " ", ""
            )
        scrolls = bool(SCROLLING & set(named.get("class", "").split())) or tag == "pre"
        inside = any(each for _, each in self._open)
        if not inside and not scrolls and tag not in SHRINKING:
            style = named.get("style", "")
            width = max(
                [int(found) for found in PIXELS.findall(style)]
                + [_number(named.get("width", ""))]
            )
            if tag == "table" or width > SCREEN or "nowrap" in style:
                self.wide.append(tag)
        if tag not in VOID:
            self._open.append((tag, scrolls))

    def handle_endtag(self, tag: str) -> None:
        while any(name == tag for name, _ in self._open) and self._open.pop()[0] != tag:
            pass


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def too_wide(site: Path) -> Iterator[str]:
    """Yield a line for each part of a page that needs sideways scrolling at 390 pixels.

    Args:
        site: The folder with its ``index.html``.
    """
    for path in sorted(site.rglob("*.html")):
        page = Page(path.read_text(encoding="utf-8"))
        if not page.fits:
            yield f"{path.relative_to(site)}: no viewport of the device's width"
        for tag in page.wide:
            yield f"{path.relative_to(site)}: <{tag}> is wider than {SCREEN} pixels and does not scroll by itself"
