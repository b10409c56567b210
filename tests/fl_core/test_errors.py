"""A request that cannot be met is refused by name, with the nearest name that is known."""

import pytest

from fl_core.errors import CorruptError, damaged


def test_damage_is_a_value_that_makes_no_sense_or_an_error_that_is_named():
    kinds = ((), (KeyError,))
    for named, error in zip(kinds, (ValueError("odd"), KeyError("odd")), strict=True):
        with (
            pytest.raises(CorruptError, match=r"f is damaged: .*odd"),
            damaged("f", *named),
        ):
            raise error
    with pytest.raises(KeyError), damaged("f"):
        raise KeyError("of another kind")
