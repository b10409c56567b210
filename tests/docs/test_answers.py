"""The page of thirty answers is what the code says."""

import re

from docs.answers import PAGE, example, page


def words(text):
    """Return a page without its numbers, whose last digits belong to a processor."""
    return re.sub(r"-?\d*\.\d+", "N", text).split()


def test_the_page_of_answers_is_drawn_by_this_version():
    assert words(PAGE.read_text()) == words(page())


def test_its_answers_have_every_action():
    actions = {example(number).action for number in range(1, 31)}
    assert actions == {"share_all", "share_some", "alone", "none"}
