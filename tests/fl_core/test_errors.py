"""A request that cannot be met is refused by name, with the nearest name that is known."""

import pytest

from fl_core.errors import CorruptError, UsageError, check_known, damaged


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("fedvag", ["fedavg", "ditto"], "fedavg"),
        ("conv11", ["conv1", "fc1"], "conv1"),
        ("DITTO", ["xyz"], None),
    ],
)
def test_unknown_name_and_its_neighbour(name, known, near):
    with pytest.raises(UsageError) as error:
        check_known("algorithm", name, known)
    message = str(error.value)
    assert "algorithm" in message
    assert repr(name) in message
    assert ("did you" in message) == (near is not None)
    assert near is None or repr(near) in message
    assert all(each in message for each in known)


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
