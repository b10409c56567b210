"""Names are shown by the numbers in them, unless somebody chose another order."""

from hypothesis import given, strategies as st

from fl_core.display import in_order


@given(st.lists(st.text(st.sampled_from("ab019 _"), max_size=4)))
def test_all_names_are_kept(names):
    assert sorted(in_order(sorted(names))) == sorted(names)
