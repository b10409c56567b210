"""The site's pages are made from what there is; their links lead somewhere, and the check finds those that do not."""

import json
import re

import pytest

from docs import links, lists, sources
from figures import scorecard

LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]+)?\)")
CODE = re.compile(r"^(`{3,}).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
TREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    assert sources.write(out) > 100
    return out


def places(text):
    """The anchors of a page's headings, as they are made of their words."""
    headings = re.findall(
        r"^#{1,4} (.+)$",
        CODE.sub(lambda found: found[0] if "\n" not in found[0] else "", text),
        re.M,
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def test_every_link_of_every_page_leads_to_a_page_and_a_place_on_it(site):
    texts = {
        path.resolve(): path.read_text(encoding="utf-8") for path in site.rglob("*.md")
    }
    for path in site.rglob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts[path.resolve()] = "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    for path, text in texts.items():
        for target, place in LINK.findall(CODE.sub("", text)):
            if re.match(r"[a-z]+:", target):
                continue
            there = (path.parent / target).resolve() if target else path
            assert there.is_file(), (
                f"{path.relative_to(site.resolve())} links to {target}"
            )
            assert not place or place[1:] in places(texts[there]), (
                f"{path.name} links to {target}{place}"
            )


def test_a_figure_shows_its_command_while_it_has_code(site):
    for page in (site / "figures" / "pictures").glob("*.md"):
        text = page.read_text()
        assert ("\n| code | commit" in text) != ("\npython -m figures " in text)


def test_every_page_is_in_the_table_of_contents(site):
    listed = {
        re.sub(r"^.*<(.*)>$", r"\1", line).removeprefix("/")
        for page in ("catalogue.md", "commands/index.md", *site.glob("*.md"))
        for tree in TREE.findall((site / page).read_text(encoding="utf-8"))
        for line in tree.splitlines()
        if line and not line.startswith(":")
    }
    pages = {
        path.relative_to(site).as_posix()
        for kind in ("md", "ipynb")
        for path in site.rglob(f"*.{kind}")
    }
    listed_pages = {
        name
        for name in pages
        if not (site / name).read_text(encoding="utf-8").startswith("---\norphan: true")
    }
    assert listed - {"api/index.rst", "metrics.rst", "rules.rst"} == listed_pages - {
        "index.md"
    }


def test_the_scorecard_has_every_claim_and_can_be_filtered(site):
    text = (site / "scorecard.md").read_text(encoding="utf-8")
    rows = re.findall(r'<tr data-paper="([^"]+)" data-verdict="([^"]+)">', text)
    claims = scorecard.claims()
    assert [paper for paper, _ in rows] == [
        scorecard.TITLES[claim.paper] for claim in claims
    ]
    assert {f"<option>{verdict}</option>" in text for _, verdict in rows} == {True}
    linked = set(re.findall(r'href="(figures/pictures/[^"]+)\.html"', text))
    assert linked
    assert all((site / f"{name}.md").is_file() for name in linked)
    assert '<select name="paper">' in text
    assert '<select name="verdict">' in text


@pytest.mark.parametrize("kind", ["algorithm", "metric", "rule"])
def test_every_member_of_a_registry_has_its_place(site, kind):
    text = next(site.glob(f"{kind}s.*")).read_text(encoding="utf-8")
    assert set(re.findall(r"^(?:##+ )?`+(\w+)`+$", text, re.M)) == set(
        lists.registry(kind).own
    )


def test_the_check_of_links_finds_what_leads_nowhere(tmp_path):
    (tmp_path / "index.html").write_text(
        '<a href="other.html#there">fine</a><a href="other.html#gone">a</a><a href="lost.html">b</a>'
        '<a href="https://example.org">elsewhere, if somebody clicks</a><img src="data:image/png;base64,xx">'
        '<script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "other.html").write_text('<p id="there"><a href="#there">here</a></p>')
    assert list(links.broken(tmp_path)) == [
        "index.html: other.html#gone: that page has no such place",
        "index.html: lost.html leads nowhere",
        "index.html: <script> fetches https://example.org/x.js",
    ]


def test_links_to_colab_wait_for_the_owners_name():
    path = sources.ROOT / "notebooks" / "choose_layers.ipynb"
    text, name = path.read_text(encoding="utf-8"), "notebooks/choose_layers.ipynb"
    assert "colab" not in text.lower()
    assert sources.with_colab(text, name, "") == text
    first = json.loads(sources.with_colab(text, name, "someone"))["cells"][0]
    link = (
        f"https://colab.research.google.com/github/someone/fedlayers/blob/main/{name}"
    )
    assert link in "".join(first["source"])
    assert "pip install fedlayers" in "".join(first["source"])
