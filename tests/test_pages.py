"""What the pages say of the code is so: the glossary's places are there, the list of changes names what is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedlayers as fl
from fedlayers.cli.layers import Diagnose
from fedlayers.cli.main import COMMANDS
from fl_core import algorithms, data
from fl_core.algorithms.base import Algorithm
from fl_core.algorithms.contract import RENAMED
from fl_core.engine import Engine

ROOT = Path(__file__).parents[1]
PLACES = {
    (row.split("|")[1].strip(), place)
    for row in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if row.startswith("|")
    for place in re.findall(r"`([^`]+)`", row.split("|")[3])
}
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("term", "place"), sorted(PLACES), ids=lambda text: text)
def test_what_a_term_is_called_in_the_code_is_there(term: str, place: str) -> None:
    if "/" in place:
        assert (ROOT / place).exists()
    elif place.startswith("--"):
        name = place.removeprefix("--").replace("-", "_")
        assert name in {*fl.RunConfig.__dataclass_fields__, *Diagnose.__dataclass_fields__}
    elif place.startswith("fedlayers "):
        assert place.removeprefix("fedlayers ") in COMMANDS
    else:
        owner, _, member = place.partition(".")
        home = Engine if owner == Engine.__name__ else getattr(fl, owner, None) or getattr(data, owner)
        assert not member or hasattr(home, member) or member in home.__dataclass_fields__


def modules(cell: str) -> list[str]:
    """Dotted names in a cell; of several in one package only the first names it."""
    names = re.findall(r"`([\w.*]+)`", cell)
    package = names[0].rpartition(".")[0]
    return [name if "." in name else f"{package}.{name}" for name in names]


def exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_modules_that_moved_are_where_the_changes_say() -> None:
    table = CHANGES.partition("| module in 0.1.0 | now |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table
    for row in table:
        before, now = (modules(cell) for cell in row.strip("| ").split(" | "))
        if now[0].endswith(".*"):
            now = [now[0].replace("*", name.rpartition(".")[2]) for name in before]
        assert all(exists(name) for name in now), row
        assert "(the module)" in row or not any(exists(name) for name in before), row


def test_hooks_that_were_renamed_are_those_that_are_refused() -> None:
    table = CHANGES.partition("| hook or attribute in 0.1.0 | now |")[2].partition("| module")[0]
    before = {name.partition("(")[0]: now for was, now in re.findall(r"^\| (`.+?) \| (.+) \|$", table, re.MULTILINE)
              for name in re.findall(r"`([^`]+)`", was)}  # fmt: skip
    assert set(RENAMED) <= set(before)
    for name, now in RENAMED.items():
        assert now.partition(",")[0] in before[name]
        assert hasattr(Algorithm, now.partition(",")[0])
    assert hasattr(algorithms, "Observation")
