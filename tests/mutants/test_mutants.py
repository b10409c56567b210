"""Mutants are drawn, found again where their code stands, and killed by the tests that reach them."""

import ast

import pytest

from tests.mutants.changes import Mutant, changes, draw, functions
from tests.mutants.running import ROOT, load, reach, run, run_all

SOURCE = '''\
def part(values, low=0, *, strict=False):
    """Return the values above a limit."""
    if not values or len(values) > 9:
        raise ValueError("no values")
    return list(filter(lambda value: value - low > 0, values))
'''
TEST = """\
from fl_core.limits import part
def test_above(): assert part([1, 2], 1) == [2]
def test_other(): pass
"""


@pytest.fixture
def tree(tmp_path):
    """A small project with one function and two tests."""
    for name, text in (
        ("fl_core/__init__.py", ""),
        ("fl_core/limits.py", SOURCE),
        ("tests/test_limits.py", TEST),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def mutant(old, new):
    """Return a mutant of the small project."""
    return Mutant(
        "fl_core/limits.py", "part", old, new, ["tests/test_limits.py::test_above"]
    )


def test_changes_are_of_every_kind_and_can_be_read():
    ((_, function),) = functions(SOURCE)
    pairs = {(old, new) for _, old, new in changes(SOURCE, function)}
    assert {
        ("len(values) > 9", "len(values) <= 9"),
        ("value - low", "value + low"),
        ("not values", "values"),
        ("False", "True"),
        ("9", "10"),
        ('raise ValueError("no values")', "pass"),
        ("return list(filter(lambda value: value - low > 0, values))", "return None"),
        (
            "filter(lambda value: value - low > 0, values)",
            "filter(lambda value: value - low > 0)",
        ),
    } <= pairs
    for old, new in pairs:
        ast.parse(mutant(old, new).applied(SOURCE, function))


def test_code_that_has_moved_is_found_and_other_code_is_gone(tree):
    moved = mutant("value - low", "value + low")
    (tree / "fl_core/limits.py").rename(tree / "fl_core/parts.py")
    place = moved.find(tree)
    assert place is not None
    assert place[0] == tree / "fl_core/parts.py"
    assert run(moved, tree)[0] == "killed"
    assert moved.file == "fl_core/parts.py"
    (tree / "fl_core/parts.py").write_text(
        SOURCE.replace("value - low", "value - 2 * low")
    )
    assert run(moved, tree) == ("gone", "")


def test_a_mutant_is_killed_survives_or_has_no_test_and_leaves_the_tree_as_it_was(
    tree,
):
    killed = mutant("value - low", "value + low")
    assert run(killed, tree) == ("killed", "tests/test_limits.py::test_above")
    assert run(mutant("9", "10"), tree) == ("survived", "")
    assert (tree / "fl_core/limits.py").read_text() == SOURCE
    (tree / "tests/test_limits.py").write_text(TEST.replace("test_above", "test_below"))
    assert run(killed, tree) == ("untested", "")


def test_tests_that_end_from_outside_or_take_too_long_kill_nothing(tree, monkeypatch):
    (tree / "tests/test_limits.py").write_text(
        "import os\ndef test_above(): os.kill(os.getpid(), 9)\n"
    )
    assert run(mutant("9", "10"), tree) == ("stopped", "")
    monkeypatch.setattr("tests.mutants.running.pytest", lambda *_, **__: (-1, ""))
    assert run(mutant("9", "10"), tree) == ("stopped", "")


def test_a_mutant_that_was_killed_and_lives_is_named_until_it_is_killed_again(
    tree, capsys
):
    lives = mutant("9", "10")
    lives.state = "killed"
    assert not run_all([lives], [tree])
    assert (
        "survived, was killed before: fl_core/limits.py part: 9 -> 10"
        in capsys.readouterr().out
    )
    assert lives.state == "killed"


def test_mutants_are_drawn_by_a_seed_from_some_files(tree):
    (tree / "fl_core/parts.py").write_text(SOURCE)
    drawn = [*draw(tree, 3)]
    assert [drawn_mutant.file for drawn_mutant in drawn].count("fl_core/parts.py") == 1
    assert len(drawn) == 2
    (some,) = draw(tree, 3, ["fl_core/limits.py"])
    assert (some.file, some.seed) == ("fl_core/limits.py", 3)
    assert some == next(draw(tree, 3, ["fl_core/limits.py"]))


@pytest.mark.slow
def test_the_tests_that_reach_a_function_are_found(tree):
    drawn = mutant("9", "10")
    drawn.tests = []
    reach([drawn], tree)
    assert drawn.tests == ["tests/test_limits.py::test_above"]


def test_stored_mutants_have_tests_and_a_state():
    mutants = load()
    assert (
        len(mutants) == len({(stored.function, stored.old) for stored in mutants}) >= 90
    )
    assert all(
        (stored.tests or stored.note)
        and stored.state in ("killed", "survived", "untested", "stopped")
        for stored in mutants
    )


def test_stored_mutants_change_code_of_today():
    """A rename may leave one in twenty without its code until ``make mutants`` removes them."""
    mutants = load()
    gone = [(each.file, each.function) for each in mutants if each.find(ROOT) is None]
    assert len(gone) <= len(mutants) / 20, gone
