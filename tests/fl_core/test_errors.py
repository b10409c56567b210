"""A request that cannot be met is refused by name, with the nearest name that is known."""

import pytest

from fl_core import errors
from fl_core.errors import CorruptError, UsageError, check_known, damaged, listing


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


def test_known_name_comes_back_from_any_iterable():
    assert check_known("metric", "cka", iter(["cka", "acc"])) == "cka"


@pytest.mark.parametrize("count", [0, 1, 12, 13, 40])
def test_listing_says_how_many_it_leaves_out(count):
    text = listing((f"n{k}" for k in range(count)), 12)
    assert text.count("n") - text.count("and") == min(count, 12)
    assert text.endswith(f"{count - 12} more") == (count > 12)


def test_whose_fault_it_is_can_be_told_by_type():
    for ours in (
        errors.DivergedError,
        errors.NonFiniteError,
        errors.CorruptError,
        errors.BusyError,
    ):
        assert issubclass(ours, errors.RunError)
        assert not issubclass(ours, UsageError)
    assert issubclass(UsageError, ValueError)


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
