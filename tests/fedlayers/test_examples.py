"""Every ``>>>`` in the packages does what it shows."""

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import fedlayers as fl
from fl_core.registry import Registry
from tests.conftest import with_slow

ROOT = Path(__file__).parents[2]


def shown():
    """The modules with examples."""
    examples = []
    for package in ("fl_core", "diagnostics", "fedlayers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if ">>> " in path.read_text(encoding="utf-8"):
                examples.append(
                    ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                )
    return examples


@pytest.fixture
def nothing_stays(monkeypatch, tmp_path, own_members):
    """What an example registers is known to it alone."""
    monkeypatch.chdir(tmp_path)
    for registry in (fl.METRICS, fl.RULES, *Registry.of_kind.values()):
        registry.members()  # lest one be imported by an example, and forgotten with it
        own_members(registry)


SLOW = [f"fedlayers.decision.{name}" for name in ("choose", "study", "tune")]


@pytest.mark.parametrize("name", with_slow(shown(), SLOW))
@pytest.mark.filterwarnings(
    "ignore:client"
)  # of a few samples, which is of no interest here
def test_examples_do_what_they_show(nothing_stays, name):
    module = import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(module):
        named = getattr(module, example.name.rpartition(".")[2], None)
        home = getattr(inspect.unwrap(named), "__module__", name) if named else name
        if home == name:  # others are shown where they are defined
            runner.run(example)
    assert runner.tries
    assert not runner.failures


def test_most_doors_show_a_run_of_themselves():
    """Those through which a newcomer goes first, among them."""
    doors = {name for name in fl.__all__ if ">>> " in (getattr(fl, name).__doc__ or "")}
    assert len(doors) >= 20
    first = {
        "Algorithm",
        "LayerPlan",
        "choose",
        "compare",
        "diagnose",
        "load_models",
        "from_clients",
        "run",
        "select",
    }
    assert doors >= first
