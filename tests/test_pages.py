"""Each place in the code that the glossary names exists."""

import re
from pathlib import Path

import pytest

import fedlayers as fl
from fedlayers.cli.app import COMMANDS
from fedlayers.cli.measure import Diagnose
from fl_core import data
from fl_core.config import KEYS
from fl_core.engine import Engine

ROOT = Path(__file__).parents[1]
PLACES = {
    (row.split("|")[1].strip(), place)
    for row in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if row.startswith("|")
    for place in re.findall(r"`([^`]+)`", row.split("|")[3])
}


@pytest.mark.parametrize(("term", "place"), sorted(PLACES), ids=lambda text: text)
def test_what_a_term_is_called_in_the_code_is_there(term, place):
    if "/" in place:
        assert (ROOT / place).exists()
    elif place.startswith("--"):
        name = place.removeprefix("--").replace("-", "_")
        assert name in {
            *KEYS,
            *Diagnose.__dataclass_fields__,
        }
    elif place.startswith("fedlayers "):
        assert place.removeprefix("fedlayers ").partition(" --")[0] in COMMANDS
    else:
        owner, _, member = place.partition(".")
        home = (
            Engine
            if owner == Engine.__name__
            else getattr(fl, owner, None) or getattr(data, owner)
        )
        assert (
            not member or hasattr(home, member) or member in home.__dataclass_fields__
        )
