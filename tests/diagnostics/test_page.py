"""A page is one file that needs nothing else, shows its text as text, and is the same each time."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.figure import Figure

from diagnostics.plots.page import Page, in_words
from fl_core.errors import UsageError

VOID = {"meta", "img", "br"}


class Tree(HTMLParser):
    """Checks that tags close in order, and keeps tags with their attributes and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.seen: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: Any, attrs: Any) -> None:
        self.tags.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: Any) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: Any) -> None:
        if "style" not in self.open:
            self.seen.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.seen).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def figure() -> Iterator[Figure]:
    mpl.use("Agg")
    drawn, ax = plt.subplots(figsize=(3, 2))
    ax.plot([1, 2, 3])
    yield drawn
    plt.close("all")


@pytest.fixture
def full(figure: Figure) -> Page:
    page = Page("Which layers", "Share **fc1** only.")
    page.text(
        "## Measured\n\nAll of `fc1`.\n\n- one\n- two\n\n### Detail\n\nlast\nline"
    )
    page.figure(figure, "The plan.", "boxes")
    page.table(
        pd.DataFrame({"algorithm": ["fedavg"], "macro F1": [0.51234]}),
        "Scores.",
        {"macro F1": ".3f"},
    )
    page.figure(figure.axes[0], "Again.", "more boxes")
    page.table(
        pd.DataFrame({"n": [3]}, index=pd.Index(["VA"], name="client")), "Samples."
    )
    return page


def test_nothing_is_fetched(full: Page) -> None:
    html = full.html()
    assert "http" not in html.replace("http-equiv", "").lower()
    assert "@import" not in html
    assert "url(" not in html
    tree = Tree(html)
    assert not tree.all("script")
    assert not tree.all("link")
    assert all(
        image["src"].startswith("data:image/png;base64,") for image in tree.all("img")
    )
    assert any(
        "default-src 'none'" in (meta.get("content") or "") for meta in tree.all("meta")
    )


def test_figures_and_tables_are_numbered_apart(full: Page) -> None:
    text = Tree(full.html()).text
    order = [
        text.index(part)
        for part in (
            "Figure 1. The plan.",
            "Table 1. Scores.",
            "Figure 2. Again.",
            "Table 2.",
        )
    ]
    assert order == sorted(order)


def test_pictures_are_whole_and_described(full: Page) -> None:
    images = Tree(full.html()).all("img")
    assert [image["alt"] for image in images] == ["boxes", "more boxes"]
    for image in images:
        png = base64.b64decode(image["src"].partition(",")[2], validate=True)
        assert png.startswith(b"\x89PNG")
        assert png.rstrip().endswith(b"IEND\xaeB`\x82")
        assert 250 < int(image["width"]) < 400


def test_a_picture_without_a_description_is_described_from_what_is_drawn(
    figure: Figure,
) -> None:
    ax = figure.axes[0]
    ax.lines[0].set_label("fedavg")
    ax.set(xlabel="round", ylabel="macro F1\n(higher is better)")
    ax.set_xticks([0, 1, 2], ["fc1", "fc2", "fc3"])
    page = Page("t")
    page.figure(figure, "c")
    alt = Tree(page.html()).all("img")[0]["alt"]
    assert alt == "macro F1, (higher is better) over round: fedavg"
    drawn, _ = plt.subplots(1, 2)
    assert in_words(drawn) == "a picture without axes"


def _luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    ]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_the_page_is_legible_by_day_and_in_the_dark(full: Page) -> None:
    """Text has at least the contrast of 4.5 that WCAG 2 asks for, on the page's ground and in code."""
    style = full.html().partition("<style>")[2].partition("</style>")[0]
    rooms = [
        dict(re.findall(r"--(\w+): (#\w+);", block))
        for block in re.findall(r":root \{([^}]*--[^}]*)\}", style)
    ]
    assert len(rooms) == 2
    for colours in rooms:
        colours = {
            name: c if len(c) == 7 else "#" + "".join(2 * digit for digit in c[1:])
            for name, c in colours.items()
        }
        for ink in ("ink", "soft"):
            for ground in ("paper", "inset"):
                bright, dark = sorted(
                    (_luminance(colours[ink]), _luminance(colours[ground])),
                    reverse=True,
                )
                assert (bright + 0.05) / (dark + 0.05) > 4.5
    assert _luminance(rooms[1]["ink"]) > 0.5 > _luminance(rooms[1]["paper"])
    assert "screen and (prefers-color-scheme: dark)" in style
    used = set(re.findall(r"var\(--(\w+)\)", style)) - {"width"}
    assert used == set(rooms[0]) == set(rooms[1])


def test_wide_pictures_scroll_on_narrow_screens(figure: Figure) -> None:
    page = Page("t")
    figure.set_size_inches(6, 2)
    page.figure(figure, "c")
    figure.set_size_inches(2, 2)
    page.figure(figure, "c")
    tree = Tree(page.html())
    assert [each.get("class", "") for each in tree.all("figure")] == ["scrolled", ""]
    for image in tree.all("img"):
        assert image["style"] == f"--width: {image['width']}px"
    viewport = next(
        meta["content"] for meta in tree.all("meta") if meta.get("name") == "viewport"
    )
    assert viewport == "width=device-width, initial-scale=1"


def test_text_has_headings_lists_and_paragraphs(full: Page) -> None:
    html = full.html()
    for part in (
        "<h1>Which layers</h1>", '<p class="lead">Share <strong>fc1</strong> only.</p>', "<h2>Measured</h2>",
        "<p>All of <code>fc1</code>.</p>", "<ul><li>one</li><li>two</li></ul>", "<h3>Detail</h3>", "<p>last line</p>",
    ):  # fmt: skip
        assert part in html


def test_numbers_are_to_the_right_and_missing_ones_a_dash() -> None:
    page = Page("t")
    page.table(
        pd.DataFrame({
            "name": ["a", None], "score": [1 / 3, np.nan], "n": pd.array([4, pd.NA], "Int64"), "ok": [True, False],
        }),
        "c",
    )  # fmt: skip
    html = page.html()
    assert (
        '<tr><td>a</td><td class="number">0.3333</td><td class="number">4</td><td>True</td></tr>'
        in html
    )
    assert (
        '<tr><td>–</td><td class="number">–</td><td class="number">–</td><td>False</td></tr>'
        in html
    )
    assert '<th>name</th><th class="number">score</th>' in html


@pytest.mark.parametrize(
    ("index", "head"),
    [
        (pd.RangeIndex(2), ["n"]),
        (pd.Index(["x", "y"]), ["", "n"]),
        (pd.Index([3, 5], name="seed"), ["seed", "n"]),
        (pd.MultiIndex.from_tuples([("a", 1), ("b", 2)]), ["", "", "n"]),
    ],
)
def test_index_is_shown_unless_it_only_counts(index: Any, head: Any) -> None:
    page, table = Page("t"), pd.DataFrame({"n": [1, 2]}, index=index)
    copy = table.copy()
    page.table(table, "c")
    assert re.findall(r"<th(?: class=.number.)?>(.*?)</th>", page.html()) == head
    pd.testing.assert_frame_equal(table, copy)


def test_bad_formats_are_refused() -> None:
    table = pd.DataFrame({"score": [0.5], "name": ["a"]})
    with pytest.raises(UsageError, match="mean 'score'"):
        Page("t").table(table, "c", {"scores": ".3f"})
    with pytest.raises(UsageError, match="column 'name'"):
        Page("t").table(table, "c", {"name": ".3f"})


def test_axes_without_a_figure_are_refused(figure: Figure) -> None:
    ax = figure.axes[0]
    ax.remove()
    with pytest.raises(UsageError, match="figure"):
        Page("t").figure(ax, "c", "a")


@settings(max_examples=60, deadline=None)
@given(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]),
        max_size=40,
    )
)
def test_whatever_is_given_is_shown_as_text(text: Any) -> None:
    wild = f"<script>{text}</script>&<img src=x>"
    page = Page(wild, wild)
    page.text(wild)
    page.table(pd.DataFrame({wild: [wild]}), wild)
    tree = Tree(page.html())
    names = {name for name, _ in tree.tags}
    assert names <= {
        "html", "head", "meta", "title", "style", "body", "h1", "p", "figure", "figcaption", "b", "div", "table",
        "thead", "tbody", "tr", "th", "td", "strong", "code",
    }  # fmt: skip
    assert tree.text.count("<script>") == 7


def test_description_and_caption_are_escaped(figure: Figure) -> None:
    page = Page("t")
    page.figure(figure, "<i>x</i>", 'a "quoted" <b>')
    tree = Tree(page.html())
    assert tree.all("img")[0]["alt"] == 'a "quoted" <b>'
    assert not tree.all("i")


def test_strong_inside_code_is_left_alone() -> None:
    page = Page("t")
    page.text("`a**b**c` and **d**")
    assert "<code>a**b**c</code> and <strong>d</strong>" in page.html()


def test_written_at_once_and_the_same_each_time(
    full: Page, figure: Figure, tmp_path: Path
) -> None:
    full.write(tmp_path / "report.html")
    full.write(str(tmp_path / "again.html"))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "again.html",
        "report.html",
    ]
    assert (tmp_path / "report.html").read_bytes() == (
        tmp_path / "again.html"
    ).read_bytes()
    one, two = Page("t"), Page("t")
    one.figure(figure, "c", "a")
    two.figure(figure, "c", "a")
    assert one.html() == two.html()


def test_folded_parts_are_closed_and_hold_what_was_added(full: Page) -> None:
    with full.fold("More <b>"):
        full.text("inside")
        full.table(pd.DataFrame({"n": [1]}), "c")
    html = full.html()
    tree = Tree(html)
    assert [each for each in tree.all("details") if "open" in each] == []
    inside = html.partition("<details>")[2].partition("</details>")[0]
    assert "<p>inside</p>" in inside
    assert "<table>" in inside
    assert "<summary>More &lt;b&gt;</summary>" in inside


def test_the_glossary_has_the_terms_that_the_page_uses() -> None:
    page = Page("Layers", "Which <layer>?")
    page.text("The clients and a Round.")
    page.glossary(
        {
            "client": "one",
            "round": "two",
            "layer": "three & four",
            "seed": "five",
            "ayer": "six",
        }
    )
    tree = Tree(page.html())
    assert len(tree.all("dt")) == 3
    assert "three & four" in tree.text
    assert "five" not in tree.text
    assert "six" not in tree.text
    page = Page("t")
    page.glossary({"client": "one"})
    assert not Tree(page.html()).all("details")


def test_every_table_scrolls_in_a_place_of_its_own(full: Page) -> None:
    """So that a page of 390 pixels does not scroll sideways."""
    html = full.html()
    assert html.count('<div class="wide"><table>') == html.count("<table>") > 0
    assert re.search(r"\.wide \{[^}]*overflow-x: auto", html)
