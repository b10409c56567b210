"""What `fedlayers list` prints: everything that is registered, in columns that fit."""

import json
import re
from dataclasses import fields

import pytest

from docs import lists
from fedlayers.cli import folders, options
from fl_core.algorithms.base import ALGORITHMS


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def shown(text, name):
    """What stands of an algorithm, on one line."""
    match = re.search(rf"^  {name} .*(?:\n {{6,}}.*)*", text, flags=re.MULTILINE)
    assert match, name
    return " ".join(match.group().split())


@pytest.mark.parametrize("what", sorted(lists.LISTINGS))
def test_everything_registered_is_listed_once(what):
    """``make lists`` brings the stored file up to date."""
    text, listing = folders.listing_of(what), lists.LISTINGS[what]()
    stored = json.loads(options.STORED.read_text())[what]
    assert all(
        about.items() <= listing[title].items() for title, about in stored.items()
    )
    names = {name for about in stored.values() for name in about}
    assert names.issuperset(lists.registry(what.removesuffix("s")).own)
    assert max(map(len, text.splitlines())) <= 180
    assert text == "\n".join(line.rstrip() for line in text.splitlines())


def test_algorithms_show_what_is_trained_travels_stays_and_costs_and_their_keys():
    text = folders.listing_of("algorithms")
    for name, kind in ALGORITHMS.own.items():
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
