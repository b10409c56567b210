"""Checks a built site: every link within it leads to a page and a place on it, and nothing comes from the network."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    "img": "src",
    "script": "src",
    "link": "href",
    "source": "src",
    "iframe": "src",
}
"""Tags with which a browser fetches something at once, and where they name it."""


class Page(HTMLParser):
    """The places of a page that can be linked to, and what it links to or fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.places |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(("a", named["href"]))
        elif tag in FETCHED and FETCHED[tag] in named:
            self.links.append((tag, named[FETCHED[tag]]))


def broken(site: Path) -> Iterator[str]:
    """A line on each link that leads nowhere, and on each thing that a page would fetch from the network.

    Args:
        site: the folder with its ``index.html``.
    """
    pages = {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    for path, page in pages.items():
        for tag, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if tag != "a" and parts.scheme != "data":
                    yield f"{path.relative_to(site)}: <{tag}> fetches {link}"
                continue
            target = (
                (path.parent / unquote(parts.path)).resolve()
                if parts.path
                else path.resolve()
            )
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{path.relative_to(site)}: {link} leads nowhere"
                continue
            there = pages.get(_within(site, target))
            if parts.fragment and there and unquote(parts.fragment) not in there.places:
                yield f"{path.relative_to(site)}: {link}: that page has no such place"


def _within(site: Path, target: Path) -> Path:
    """The source path of a page of the site."""
    root = site.resolve()
    return site / target.relative_to(root) if target.is_relative_to(root) else target
