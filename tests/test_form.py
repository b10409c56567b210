"""The code reads as comparable packages do: few conditional expressions, plain texts, names that say what they hold."""

import ast
import itertools
import pathlib

import pytest

from tests import form, made

LIMITS = {"conditional": 2, "nested": 0, "two for": 4, "code in text": 0, "vague": 1}


@pytest.mark.parametrize("part", form.PARTS)
def test_a_part_keeps_the_limits(part):
    paths = form.files(part)
    assert len(paths) > 10
    reached = form.densities(paths)
    beyond = {name: n for name, n in reached.items() if n > LIMITS[name]}
    assert not beyond, f"python -m tests.form FILE names the places: {beyond}"


def test_names_in_tests_say_what_they_hold():
    paths = form.files("tests")
    assert len(paths) > 200
    assert form.densities(paths)["vague"] <= 1, "python -m tests.form FILE names them"


def test_helpers_of_all_tests_take_at_most_four_arguments():
    tree = ast.parse(pathlib.Path(made.__file__).read_text(encoding="utf-8"))
    helpers = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert len(helpers) > 10
    for helper in helpers:
        arguments = helper.args
        assert len(arguments.args + arguments.kwonlyargs) <= 4, helper.name


def test_no_name_only_dodges_another():
    """``listing_`` next to ``listing`` does not say which of the two is which."""
    assert form.dodging_names("a_, b, __c__, _ = 1, d.e_, 2, 3") == [(1, "a_")]
    assert form.dodging_names("import a as a_\nlambda b_: c_") == [(1, "a_"), (2, "b_")]
    assert form.dodging_names("self.a_ = 1") == [(1, "a_")]
    parts = [*form.PARTS, "docs", "examples", "tests"]
    paths = itertools.chain.from_iterable(map(form.files, parts))
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    assert len(sources) > 500
    assert not {
        path: names
        for path, source in sources.items()
        if (names := form.dodging_names(source))
    }


@pytest.mark.parametrize(
    ("source", "counted"),
    [
        ("x = a if b else c", {"conditional": 1}),
        ("x = b and 'a' or c", {"conditional": 1}),
        ("x = {True: a, False: c}[b]", {"conditional": 1}),
        ("x = ('', ' ')[a > b]", {"conditional": 1}),
        ("x = a if b else c if d else e", {"conditional": 2, "nested": 1}),
        ("x = [a for b in c for a in b]", {"two for": 1}),
        ("x = [a for a, b in itertools.product(c, d)]", {"two for": 1}),
        ("x = [a for a in b]", {}),
        ("x = f'{len(a)} {a:.2f} {a.strip()} {listing(a)}'", {}),
        ("x = f'{join(a)}'", {"code in text": 1}),
        ("x = f'{a or 1}'", {"code in text": 1}),
        ("x = a or b, a and b, {1: a}[b], a[b]", {}),
        ("def f(given):\n    found = given\n    count = 1", {"vague": 1, "locals": 2}),
    ],
)
def test_each_form_is_counted(source, counted):
    counts, places = form.measure(source)
    del counts["statements"]
    assert +counts == counted
    assert len(places) == sum(
        n for k, n in counted.items() if k not in ("conditional", "locals")
    )
