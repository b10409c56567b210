"""What `fedlayers list` prints: everything that is registered, in columns that fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedlayers.cli import listings
from fedlayers.diagnostics.decide.select import RULES
from fedlayers.diagnostics.metrics import METRICS
from fl_core import data, models
from fl_core.algorithms import registry


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def column(text, name):
    """The cells of a column, by the place of its heading."""
    head, *lines = text.splitlines()
    start = head.index(name)
    after = head[start:].find("  ")
    rest = head[start + after :].lstrip() if after >= 0 else ""
    end = head.index(rest) if rest else None
    return [line[start:end].strip() for line in lines]


def entry(text, name):
    """What stands of an algorithm, on one line."""
    found = re.search(rf"^  {name} .*(?:\n {{6,}}.*)*", text, flags=re.MULTILINE)
    assert found, name
    return " ".join(found.group().split())


@pytest.mark.parametrize(
    ("what", "known"),
    [
        ("datasets", data.datasets),
        ("models", models.describe),
        ("metrics", lambda: METRICS),
        ("rules", lambda: RULES),
    ],
)
def test_everything_registered_is_listed_once(what, known):
    text = listings.LISTINGS[what]()
    assert sorted(filter(None, column(text, "name"))) == sorted(known())
    assert max(map(len, text.splitlines())) <= 160
    assert text == "\n".join(line.rstrip() for line in text.splitlines())


def test_datasets_show_the_defaults_one_line_each():
    text = listings.datasets()
    assert len(text.splitlines()) == 1 + len(data.datasets())
    for line, recipe in zip(text.splitlines()[1:], data.datasets().values(), strict=True):
        for value in (
            recipe.model,
            recipe.partition,
            recipe.rounds,
            recipe.batch,
            recipe.lr,
            recipe.loss,
        ):
            assert f" {value}" in line
        assert f"weight_decay={recipe.optimizer_options['weight_decay']}" in line
    assert "player_focal gamma=3 alpha=…" in text


def test_alpha_is_shown_only_where_it_is_used():
    for name, alpha in zip(data.datasets(), column(listings.datasets(), "alpha"), strict=True):
        assert bool(alpha) == (data.recipe(name).partition == "dirichlet")


def test_algorithms_show_their_keys_and_whether_they_obey_a_plan():
    text = listings.algorithms()
    assert entry(text, "fedrep").endswith("| plan --set head_epochs=None")
    assert entry(text, "fedprox").endswith("| cost: 2P --set mu=0.1")


def test_algorithms_show_what_is_trained_travels_stays_and_costs():
    text = listings.algorithms()
    for name, kind in registry().items():
        parts = (kind.paper, f"trained: {kind.trains}", f"travels: {kind.travels}", f"kept: {kind.keeps}")
        assert " | ".join((*parts, f"cost: {kind.cost}")) in entry(text, name)
    for name, cost in {
        "fedavg": "2P",
        "scaffold": "4P",
        "local": "0",
        "fedper": "2 body",
        "fedlp": "P + keep P",
    }.items():
        assert f"| cost: {cost}" in entry(text, name), name


@pytest.mark.parametrize("width", [80, 100, 200])
def test_algorithms_stand_once_under_their_family_and_fit(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    text = listings.algorithms()
    assert max(map(len, text.splitlines())) <= min(width, 120)
    blocks = [block.splitlines() for block in text.split("\n\n")[1:]]
    names = [line.split()[0] for block in blocks for line in block if re.match(r"  \S", line)]
    assert sorted(names) == sorted(registry())
    partial = next(block for block in blocks if "obey a layer plan" in " ".join(block))
    assert {"fedper", "fedrep", "playerfl"} <= {line.split()[0] for line in partial if re.match(r"  \S", line)}


@pytest.mark.parametrize("width", [60, 100, 160])
def test_long_cells_are_wrapped_under_their_heading_and_lose_nothing(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [{"name": "a", "says": "word " * 40 + "end"}, {"name": "b", "says": "short"}, {"name": "c", "says": ""}]
    text = listings._table(lines)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(" ".join(column(text, "says")).split()) == "word " * 40 + "end short"
    assert [cell for cell in column(text, "name") if cell] == ["a", "b", "c"]


def test_a_word_longer_than_the_terminal_is_not_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert "x" * 40 in listings._table([{"name": "a", "long": "x" * 40}])


@pytest.mark.parametrize("known", [registry, lambda: METRICS])
def test_the_front_page_names_everything(known):
    page = (Path(__file__).parents[2] / "README.md").read_text()
    assert [name for name in known() if not re.search(rf"[`|]{name}\b|`[^`\n]*\b{name}\b[^`\n]*`", page)] == []
