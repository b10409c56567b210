"""The names of Flower that are not documented: all stand in one module, are used, and exist in this version."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fedlayers.remote.flower import internals

ROOT = Path(internals.__file__).parent
DOCUMENTED = {"flwr.app"}


def imported(file):
    """Yield (module, name) of each import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield node.module or "", name.name
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, ""


def test_only_documented_modules_of_flower_are_imported_elsewhere():
    found = {module for file in ROOT.rglob("*.py") for module, _ in imported(file) if module.startswith("flwr")}
    assert found == DOCUMENTED


@pytest.mark.parametrize("name", internals.NAMES)
def test_each_name_exists_and_is_needed(name):
    module, reason = internals.NAMES[name]
    assert module.startswith("flwr.")
    assert reason
    assert getattr(internals, name) is not None
    used = [file for file in ROOT.glob("*.py") if ("fedlayers.remote.flower.internals", name) in imported(file)]
    quoted = ROOT.joinpath("internals.py").read_text().count(f'"{name}"')
    attribute = [file for file in ROOT.glob("*.py") if f"internals.{name}" in file.read_text()]
    assert used or attribute or quoted > 1


def test_a_name_that_is_not_listed_is_refused():
    with pytest.raises(AttributeError, match="HttpGri"):
        _ = internals.HttpGri


def test_a_part_that_is_on_its_way_is_asked_for_again():
    class Reply:
        object_found, object_available = True, False

    class Client:
        asked = 0

        def PullObject(self, request):  # noqa: N802
            self.asked += 1
            reply = Reply()
            reply.object_available = self.asked == 3
            return reply

    client = Client()
    made = internals.grid(client, "127.0.0.1:1", "token", 7, 5)
    assert (made.run.run_id, made.node.node_id) == (7, 5)
    assert client.PullObject(None).object_available
    assert client.asked == 3
