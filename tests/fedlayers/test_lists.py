"""The README's lists: they are those that would be made now."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlayers import catalogue, lists
from fl_core.errors import UsageError

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_is_up_to_date():
    """``make lists`` brings it up to date."""
    text = README.read_text(encoding="utf-8")
    assert lists.updated(text) == text


@pytest.mark.parametrize("kind", lists.LISTS)
def test_a_list_names_everything_once(kind):
    table = lists.LISTS[kind]()
    assert len({line.count("|") - 2 * line.count("\\|") for line in table.splitlines()}) == 1
    for name in catalogue.own_entries(kind.removesuffix("s")):
        assert table.count(f"`{name}`") == 1, name


def test_all_that_can_be_named_stands_in_the_readme():
    text = README.read_text(encoding="utf-8")
    for kind in lists.LISTS:
        for name in catalogue.own_entries(kind.removesuffix("s")):
            assert f"`{name}`" in text, name


def test_a_page_without_a_list_or_with_an_unknown_one_is_refused():
    with pytest.raises(UsageError, match="there is no"):
        lists.updated("nothing")
    with pytest.raises(UsageError, match="unknown list 'algorithm': did you mean 'algorithms'"):
        lists.updated("<!-- list:algorithm -->\n<!-- end -->")
