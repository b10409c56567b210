"""The lists on the pages are those that would be made now."""

from pathlib import Path

import pytest

from diagnostics.metrics import STORED
from docs import lists
from fl_core.storage import json_bytes

TEXTS = {
    path.name: path.read_text(encoding="utf-8")
    for path in (Path(__file__).parents[2] / "docs").glob("*.md")
}
LISTED = {name: text for name, text in TEXTS.items() if lists.BLOCK.search(text)}


@pytest.mark.parametrize("page", LISTED)
def test_a_page_is_up_to_date(page):
    """``make lists`` brings it up to date."""
    assert lists.updated(LISTED[page]) == LISTED[page]


def test_stored_facts_of_metrics_are_up_to_date():
    """``make lists`` brings them up to date."""
    assert STORED.read_bytes() == json_bytes(lists.facts())


def test_types_of_keys_are_up_to_date():
    """``make lists`` brings them up to date."""
    assert lists.KEYS_FILE.read_text(encoding="utf-8") == lists.typed_keys()


@pytest.mark.parametrize("kind", lists.LISTS)
def test_a_list_names_everything_once(kind):
    table = lists.LISTS[kind]()
    assert (
        len({line.count("|") - 2 * line.count("\\|") for line in table.splitlines()})
        == 1
    )
    for name in lists.registry(kind.removesuffix("s")).own:
        assert table.count(f"`{name}`") == 1, name
