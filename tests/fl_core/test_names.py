"""Names are shown by the numbers in them, unless somebody chose another order."""

import pytest
from hypothesis import given, strategies as st

from fl_core.display import in_order


@pytest.mark.parametrize(
    ("given_names", "shown"),
    [
        (["client_1", "client_10", "client_2"], ["client_1", "client_2", "client_10"]),
        (["10", "9", "a"], ["9", "10", "a"]),
        (["a", "a10b2", "a10b9", "a9"], ["a", "a9", "a10b2", "a10b9"]),
        (["south", "north"], ["south", "north"]),
        (["s²", "s१"], ["s²", "s१"]),
        ([], []),
    ],
)
def test_numbers_within_names_are_numbers(given_names, shown):
    assert in_order(given_names) == shown


@given(st.lists(st.text(st.sampled_from("ab019 _"), max_size=4)))
def test_all_names_are_kept(names):
    assert sorted(in_order(sorted(names))) == sorted(names)
