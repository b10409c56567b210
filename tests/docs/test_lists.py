"""The lists on the pages are those that would be made now."""

from pathlib import Path

import pytest

from docs import lists
from fedlayers.cli import folders

TEXTS = {
    path.name: path.read_text(encoding="utf-8")
    for path in (Path(__file__).parents[2] / "docs").glob("*.md")
}
LISTED = {name: text for name, text in TEXTS.items() if lists.BLOCK.search(text)}


@pytest.mark.parametrize("page", LISTED)
def test_a_page_is_up_to_date(page):
    """``make lists`` brings it up to date."""
    assert lists.updated(LISTED[page]) == LISTED[page]


@pytest.mark.parametrize("kind", lists.LISTS)
def test_a_list_names_everything_once(kind):
    table = lists.LISTS[kind]()
    assert (
        len({line.count("|") - 2 * line.count("\\|") for line in table.splitlines()})
        == 1
    )
    for name in folders.registry(kind.removesuffix("s")).own:
        assert table.count(f"`{name}`") == 1, name
