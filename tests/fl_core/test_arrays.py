"""Labels, targets, clients and features of samples, each with what is taken and what is refused."""

import numpy as np
import pytest

from fl_core.data import arrays
from fl_core.rows import CLASSIFICATION, MULTILABEL, POSITIONS, REGRESSION, SURVIVAL
from tests.conftest import refuses


def obj(*values):
    return np.array(values, dtype=object)


BOTH = np.array([[0, 1], [1, 0]])
SHAPES = {
    (28, 28, 1): (1, 28, 28),
    (3, 32, 32): (3, 32, 32),
    (32, 32, 3): (3, 32, 32),
    (16, 8, 8): (16, 8, 8),
    (5, 7): (5, 7),
    (1, 1, 9): (1, 1, 9),
    (arrays.FEW, 40, 50): (arrays.FEW, 40, 50),
    (40, 50, arrays.FEW): (arrays.FEW, 40, 50),
    (40, 50, arrays.FEW + 1): (40, 50, arrays.FEW + 1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_channels_come_first(shape):
    assert arrays.channels_first(shape) == SHAPES[shape]


TAKEN = {
    "clients by names": (lambda: arrays.owners(obj("b", "a", "b")), ([1, 0, 1], ("a", "b"))),
    "clients by numbers": (lambda: arrays.owners(np.array([7, 3, 7])), ([1, 0, 1], ("3", "7"))),
    "clients of a list": (lambda: arrays.owners(np.array([2, 0]), ["x", "y", "z"]), ([1, 0], ("x", "z"))),
    "labels of numbers": (lambda: arrays.labels(np.array([5.0, 2.0])), ([1, 0], ("2", "5"))),
    "labels of -1 and 1": (lambda: arrays.labels(np.array([1, -1])), ([1, 0], ("-1", "1"))),
    "labels of words": (lambda: arrays.labels(obj(" b", "a", "b ")), ([1, 0, 1], ("a", "b"))),
    "labels in digits": (lambda: arrays.labels(obj("10", "9", "10")), ([1, 0, 1], ("9", "10"))),
    "labels of truth": (lambda: arrays.labels(np.array([True, False])), ([1, 0], ("0", "1"))),
    "labels of names": (lambda: arrays.labels(obj("n", "y", "n"), ["y", "n"]), ([1, 0, 1], ("y", "n"))),
    "codes of names": (lambda: arrays.labels(np.array([2, 0]), ["x", "y", "z"]), ([2, 0], ("x", "y", "z"))),
    "targets": (lambda: arrays.answers(np.array([[1], [3]]), REGRESSION), ([1.0, 3.0], ())),
    "targets in text": (lambda: arrays.answers(obj("1.5", " -2"), REGRESSION), ([1.5, -2.0], ())),
    "times and events": (lambda: arrays.answers(np.array([[0, 1], [3, 0]]), SURVIVAL), ([[0, 1], [3, 0]], ())),
    "several labels": (lambda: arrays.answers(BOTH, MULTILABEL, ["p", "q"]), ([[0, 1], [1, 0]], ("p", "q"))),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_taken(case):
    call, (values, names) = TAKEN[case]
    found, found_names = call()
    assert (found.tolist(), tuple(found_names)) == (values, names)


REFUSED = {
    "two axes of channels": (lambda: arrays.channels_first((3, 32, 3)), r"one axis.*\[3, 32, 3\], whose first", None),
    "names of clients twice": (lambda: arrays.owners(obj("a"), ["a"]), "list of names must be left out", None),
    "an empty client": (lambda: arrays.owners(obj("a", " ")), r"must not be empty; got ' ' \(1 of 2", 1),
    "a client in two spellings": (lambda: arrays.owners(obj("07", "7")), "clients must not be one .*'07', '7'", None),
    "a client beyond the list": (lambda: arrays.owners(np.array([0, 2]), ["x", "y"]), "from 0 to 1.*got 2", 1),
    "a client below the list": (lambda: arrays.owners(np.array([0, -1]), ["x", "y"]), "from 0 to 1.*got -1", 1),
    "half a client": (lambda: arrays.owners(np.array([0, 0.5])), "whole numbers; got 0.5", 1),
    "a client beyond float64": (lambda: arrays.owners(np.array([0, 2.0**53])), "whole numbers; got 9", 1),
    "complex clients": (lambda: arrays.owners(np.array([1j])), "whole numbers; got '1j'", 0),
    "several values": (lambda: arrays.labels(np.zeros((2, 2))), r"one value for each sample; got shape \[2, 2\]", None),
    "no values": (lambda: arrays.labels(np.zeros(0)), r"got shape \[0\]", None),
    "one class": (lambda: arrays.labels(np.array([4, 4])), "at least 2 classes; got only '4'", None),
    "one class of two": (lambda: arrays.labels(np.array([1, 1]), ["x", "y"]), "got only 'y'", None),
    "no label": (lambda: arrays.labels(np.array([0, np.nan])), "must have a label; got nan", 1),
    "-1 among others": (lambda: arrays.labels(np.array([0, -1, 1])), "must not be -1 unless.*got -1, 0, 1", 1),
    "a marked label": (lambda: arrays.labels(obj("a", "NA")), "must have a label; got 'NA'", 1),
    "a word among numbers": (lambda: arrays.labels(obj("1", "x")), "must be a number; got 'x'", 1),
    "labels with a fraction": (lambda: arrays.labels(obj("1", "1.5")), "whole numbers; got 1.5.*regression", 1),
    "a label in two spellings": (lambda: arrays.labels(obj("1", "01")), "labels must not be one number", None),
    "an unknown label": (lambda: arrays.labels(obj("yes", "yess"), ["yes", "no"]), "'yess'.*'yes'", 1),
    "names of numbers": (lambda: arrays.answers(np.array([1.0]), REGRESSION, ["x"]), "left out for task", None),
    "two targets": (lambda: arrays.targets(np.zeros((2, 3))), "one target for each sample; got 3", None),
    "an endless target": (lambda: arrays.targets(np.array([1.0, 1e39])), r"finite float32; got 1e\+39", 1),
    "complex targets": (lambda: arrays.targets(np.array([1j])), "targets must be numbers; got '1j'", 0),
    "no events": (lambda: arrays.events(np.zeros((2, 3))), r"a time and an event.*got \[2, 3\]", None),
    "a time below 0": (lambda: arrays.events(np.array([[1, 1], [-1, 0]])), "times must be at least 0", 1),
    "another event": (lambda: arrays.events(np.array([[1, 1], [1, 2]])), "events must be 1, or 0", 1),
    "only censored": (lambda: arrays.events(np.array([[1, 0], [2, 0]])), "there must be an event", None),
    "an endless entry": (lambda: arrays.finite_entries(np.array([[0.0], [np.inf]])), "finite float32", 1),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, message, row = REFUSED[case]
    with refuses(message) as caught:
        call()
    assert caught.value.row == row
    assert "\n" not in str(caught.value)


def test_the_task_of_several_numbers_a_sample():
    whole, one_hot = np.array([[3, 1], [0, 2]]), np.array([[0, 1], [3, 0]])
    for y, task, found in (
        (whole, CLASSIFICATION, POSITIONS),
        (one_hot, CLASSIFICATION, ""),
        (whole, REGRESSION, ""),
        (whole[:, :1], CLASSIFICATION, ""),
        (whole[:, 0], CLASSIFICATION, ""),
        (whole.astype("U1"), CLASSIFICATION, ""),
        (whole / 2, CLASSIFICATION, REGRESSION),
        (whole / 2, REGRESSION, REGRESSION),
        (whole / 2, MULTILABEL, ""),
        (np.array([[0.0, 1.0]]), CLASSIFICATION, ""),
        (np.array([[0.0, 1.0]]), REGRESSION, REGRESSION),
    ):
        assert arrays.task_of_entries(y, task) == found


def test_entries_have_one_type():
    assert arrays.finite_entries(np.array([[1, 2]], np.int8)).dtype == np.int64
    assert arrays.finite_entries(np.array([[1.0, 2.0]])).dtype == np.float32


def test_digits_that_float32_loses_are_kept():
    assert arrays.targets(np.array([16777216, 16777217])).dtype == np.float64
    assert arrays.targets(np.array([16777216, 16777218])).dtype == np.float32
    with refuses("different times must differ in float32"):
        arrays.events(np.array([[16777216, 1], [16777217, 1]]))
