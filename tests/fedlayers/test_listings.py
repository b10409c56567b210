"""What `fedlayers list` prints: everything that is registered, in columns that fit."""

import re
from dataclasses import fields

import pytest

from fedlayers.cli import folders
from fl_core import data, models
from fl_core.algorithms.base import ALGORITHMS


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def shown(text, name):
    """What stands of an algorithm, on one line."""
    found = re.search(rf"^  {name} .*(?:\n {{6,}}.*)*", text, flags=re.MULTILINE)
    assert found, name
    return " ".join(found.group().split())


@pytest.mark.parametrize("what", sorted(folders.LISTINGS))
def test_everything_registered_is_listed_once(what):
    text = folders.LISTINGS[what]()
    known = folders.registry(what.removesuffix("s")).names()
    for name in models.describe() if what == "models" else known:
        assert len(re.findall(rf"(?m)^ *{re.escape(name)}(  |$)", text)) == 1, name
    assert max(map(len, text.splitlines())) <= 180
    assert text == "\n".join(line.rstrip() for line in text.splitlines())


def test_datasets_show_their_defaults():
    text = folders.datasets()
    for name, recipe in data.datasets().items():
        line = shown(text, name)
        for key in ("model", "partition", "rounds", "batch_size", "lr", "loss"):
            assert f"{key}={getattr(recipe, key)}," in line
        assert f"weight_decay={recipe.optimizer_options['weight_decay']}" in line
        assert ("alpha=…" in line) == isinstance(recipe.loss_options.get("alpha"), list)
        used = recipe.partition == "dirichlet"
        assert (f"dirichlet, alpha={recipe.alpha}," in line) == used


def test_algorithms_show_what_is_trained_travels_stays_and_costs_and_their_keys():
    text = folders.algorithms()
    for name, kind in ALGORITHMS.members().items():
        parts = (
            kind.paper,
            f"trained: {kind.trains}",
            f"sent: {kind.travels}",
            f"kept: {kind.keeps}",
        )
        line = shown(text, name)
        assert " | ".join((*parts, f"cost: {kind.cost}")) in line
        assert (" | plan" in line) == kind.uses_plan
        keys = ", ".join(
            f"{field.name}={field.default}" for field in fields(kind.Config)
        )
        assert line.endswith(f"--option {keys}") if keys else "--option" not in line
