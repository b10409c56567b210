"""Members found in a folder, announced by a package, named by their place, or made in this process."""

import sys

import pytest

from examples.algorithms.half_way import HalfWay
from fl_core.algorithms.base import ALGORITHMS, Algorithm
from fl_core.config import RunConfig
from fl_core.registry import Registry
from tests.conftest import refuses

MEMBERS = '''
"""Members of a test."""

from fl_core.config import RunConfig
from fl_core.errors import UsageError
from test_kind import thing

LIMIT = 3

@thing(about="a round thing", most=2 + 1)
def wheel():
    """Turns.

    More of it.
    """

@thing("other")
def hidden(): ...

def plain():
    """No member."""
'''


@pytest.fixture
def things(tmp_path, monkeypatch):
    folder = tmp_path / "things_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "members.py").write_text(MEMBERS)
    (tmp_path / "test_kind.py").write_text(
        "REGISTRY = None\n"
        "def thing(name=None, **facts):\n"
        "    def add(made):\n"
        "        REGISTRY.add(name or made.__name__, made, made)\n"
        "        return made\n"
        "    return add\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import test_kind

    test_kind.REGISTRY = Registry("thing", "things_of_a_test", lambda made, name: made)
    yield test_kind.REGISTRY
    Registry.of_kind.pop("thing")
    for name in ("test_kind", "things_of_a_test", "things_of_a_test.members"):
        sys.modules.pop(name, None)


def test_the_modules_of_a_folder_are_imported_once_when_it_is_read(
    things,
):
    assert "things_of_a_test.members" not in sys.modules
    assert things.names() == ["other", "wheel"]
    assert things["other"].__name__ == "hidden"
    assert things.summaries() == {"other": "", "wheel": "Turns."}
    assert things.families() == {"Members of a test.": ["other", "wheel"]}


def test_an_unknown_name_is_told_with_the_nearest(things):
    with refuses(r"'whel'.*'wheel'"):
        things["whel"]


def test_an_outside_name_is_imported_from_where_it_says(things):
    assert things["things_of_a_test.members:plain"].__doc__ == "No member."
    assert things["things_of_a_test.members:hidden"] is things["other"]
    with refuses("'plain'"):
        things["things_of_a_test.members:plaine"]
    with refuses("'nowhere_at_all'"):
        things["nowhere_at_all:x"]


def test_a_name_is_given_once(things):
    def wheel(): ...

    with refuses(r"'wheel'.*things_of_a_test\.members:wheel"):
        things.add("wheel", wheel, wheel)
    things.add("mine", wheel, wheel)
    things.add("mine", wheel, wheel)  # a notebook's cell, executed twice
    assert things["mine"] is wheel


def test_algorithms_are_their_own_classes():
    for name, member in ALGORITHMS.own.items():
        assert issubclass(member, Algorithm)
        assert member.name == name


def test_an_algorithm_from_outside_must_be_one():
    with refuses("a class"):
        ALGORITHMS["fl_core.seeds:seed_of"]
    with refuses("name ="):
        ALGORITHMS["fl_core.algorithms.base:Algorithm"]


def test_a_class_is_an_algorithm_by_itself(own_members):
    own_members(ALGORITHMS)

    class Cell(Algorithm):
        """As in a notebook's cell."""

        name = "cell_of_a_test"

    for kind, name in (
        (ALGORITHMS["fedper"], "fedper"),
        (HalfWay, "examples.algorithms.half_way:HalfWay"),
        (Cell, "cell_of_a_test"),
    ):
        config = RunConfig(algorithm=kind)
        assert config.federation.algorithm == name
        assert ALGORITHMS[name] is kind
        with refuses(f"be a name.*'{kind.name}'"):
            ALGORITHMS[kind]
    with refuses("a class made of"):
        RunConfig(algorithm=int)
