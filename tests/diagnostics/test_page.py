"""A page is one file that needs nothing else, shows its text as text, and is the same each time."""

from __future__ import annotations

import base64
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st

from diagnostics.plots.page import Page, in_words
from fl_core.errors import UsageError
from tests.conftest import refuses
from tests.diagnostics.made import Tree


@pytest.fixture
def figure():
    drawn, ax = plt.subplots(figsize=(3, 2))
    ax.plot([1, 2, 3])
    return drawn


@pytest.fixture
def full(figure):
    page = Page("Which layers", "Share **fc1** only.")
    page.text(
        "## Measured\n\nAll of `fc1`.\n\n- one\n- two\n\n### Detail\n\nlast\nline"
        "\n\n`a**b**c` and **d**"
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


def test_a_page_shows_its_parts_in_order_and_fetches_nothing(full):
    html = full.html()
    assert not re.search(r"http(?!-equiv)|@import|url\(", html.lower())
    tree = Tree(html)
    assert not tree.all("script")
    assert not tree.all("link")
    assert any("default-src 'none'" in m.get("content", "") for m in tree.all("meta"))
    parts = ("Figure 1. The plan.", "Table 1. Scores.", "Figure 2. Again.", "Table 2.")
    order = [tree.text.index(part) for part in parts]
    assert order == sorted(order)
    for part in (
        "<h1>Which layers</h1>",
        '<p class="lead">Share <strong>fc1</strong> only.</p>',
        "<h2>Measured</h2>",
        "<p>All of <code>fc1</code>.</p>",
        "<ul><li>one</li><li>two</li></ul>",
        "<h3>Detail</h3>",
        "<p>last line</p>",
        "<code>a**b**c</code> and <strong>d</strong>",
    ):
        assert part in html
    assert html.count('<div class="wide"><table>') == html.count("<table>") == 2


def test_pictures_are_whole_described_and_scroll_if_they_are_wide(full):
    drawn, ax = plt.subplots(figsize=(6, 2))
    ax.plot([1, 2], label="fedavg")
    ax.set(xlabel="round", ylabel="macro F1\n(higher is better)")
    full.figure(drawn, "<i>x</i>", 'a "quoted" <b>')
    full.figure(drawn, "c")
    tree = Tree(full.html())
    images = tree.all("img")
    description = "macro F1, (higher is better) over round: fedavg"
    names = ["boxes", "more boxes", 'a "quoted" <b>', description]
    assert [image["alt"] for image in images] == names
    assert not tree.all("i")
    for image in images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/png;base64"
        png = base64.b64decode(data, validate=True)
        assert png.startswith(b"\x89PNG")
        assert png.rstrip().endswith(b"IEND\xaeB`\x82")
        assert image["style"] == f"--width: {image['width']}px"
    wide = [element["class"] for element in tree.all("figure") if "class" in element]
    assert wide.count("scrolled") == 2
    ax.remove()
    assert in_words(drawn) == "a picture without axes"
    with refuses("figure"):
        full.figure(ax, "c", "a")


def test_numbers_are_to_the_right_and_missing_ones_a_dash():
    page, number = Page("t"), '<td class="number">'
    table = {"name": ["a", None], "score": [1 / 3, np.nan], "ok": [True, False]}
    page.table(pd.DataFrame({**table, "n": pd.array([4, pd.NA], "Int64")}), "c")
    for row in (
        '<th>name</th><th class="number">score</th>',
        f"<tr><td>a</td>{number}0.3333</td><td>True</td>{number}4</td></tr>",
        f"<tr><td>–</td>{number}–</td><td>False</td>{number}–</td></tr>",
    ):
        assert row in page.html()
    scores = pd.DataFrame({"score": [0.5], "name": ["a"]})
    for column, words in (("scores", "mean 'score'"), ("name", "column 'name'")):
        with refuses(words):
            page.table(scores, "c", {column: ".3f"})


@settings(max_examples=60, deadline=None)
@given(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]),
        max_size=40,
    )
)
def test_whatever_is_given_is_shown_as_text(text):
    wild = f"<script>{text}</script>&<img src=x>"
    page = Page(wild, wild)
    page.text(wild)
    page.table(pd.DataFrame({wild: [wild]}), wild)
    tree = Tree(page.html())
    names = {name for name, _ in tree.tags}
    assert not names & {"script", "img", "a", "link", "iframe", "i"}
    assert tree.text.count("<script>") == 7


def test_written_at_once_and_the_same_each_time(full, tmp_path):
    paths = [tmp_path / "again.html", tmp_path / "report.html"]
    full.write(paths[1])
    full.write(str(paths[0]))
    assert sorted(tmp_path.iterdir()) == paths
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_what_follows_a_folded_part_that_failed_is_outside_of_it():
    page = Page("t")
    with refuses("columns"), page.fold("more"):
        page.text("inside")
        raise UsageError("columns must be there")
    page.text("outside")
    html = page.html()
    assert html.index("inside") < html.index("</details>") < html.index("outside")


def test_folded_parts_and_the_glossary(full):
    """The glossary has the terms that the page uses."""
    with full.fold("More <b>"):
        full.text("inside the <layer>, a Round")
        full.table(pd.DataFrame({"n": [1]}), "c")
    html = full.html()
    assert not any("open" in element for element in Tree(html).all("details"))
    inside = html.partition("<details>")[2].partition("</details>")[0]
    for part in ("<p>inside", "<table>", "<summary>More &lt;b&gt;</summary>"):
        assert part in inside
    terms = {"client": "one", "round": "two", "layer": "three & four", "seed": "five"}
    full.glossary({**terms, "ayer": "six"})
    tree = Tree(full.html())
    assert len(tree.all("dt")) == 3
    assert "three & four" in tree.text
