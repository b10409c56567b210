"""A run knows the source of the own code that trains it, and does not go on with another."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fedlayers as fl
from fedlayers.cli.app import main
from fl_core.config import RunConfig
from fl_core.records.store import Run
from fl_core.run import runner
from fl_core.run.own_code import digest_of
from fl_core.run.restore import load_models
from tests.conftest import refuses
from tests.faults.injected import contents

HELPERS = "RATE = 0.5\n\ndef act():\n    return nn.ReLU()\n"
SOURCE = """
import mine_helpers
from torch import nn

WIDTH = 8

class Base(nn.Module):
    slope = 0.5
    def forward(self, x):
        return self.layers(x.flatten(1))

class Net(Base):
    def __init__(self, shape, n_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, WIDTH), middle(), mine_helpers.act(), nn.Linear(WIDTH, n_classes))

def middle():
    return nn.Identity()

def unused():
    return 1
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Write and import the two modules, after changes of their text, as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(old="", new=""):
        for name, text in (
            ("mine_helpers", f"from torch import nn\n{HELPERS}"),
            ("mine", SOURCE),
        ):
            (tmp_path / f"{name}.py").write_text(
                text.replace(old, new) if old else text
            )
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("mine")

    yield write
    for name in ("mine", "mine_helpers"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nn.Identity()", "nn.Tanh()"),
        ("nn.ReLU()", "nn.Tanh()"),
        ("WIDTH = 8", "WIDTH = 4"),
        ("slope = 0.5", "slope = 0.1"),
        ("x.flatten(1)", "x.flatten(1) * 2"),
    ],
    ids=[
        "a function",
        "a function of another module",
        "a constant",
        "a class's value",
        "a base class",
    ],
)
def test_an_edit_of_what_a_class_uses_changes_its_digest(imported, old, new):
    before = digest_of([imported().Net])
    assert before == digest_of([imported().Net])
    assert before != digest_of([imported(old, new).Net])


def test_an_edit_of_what_nothing_uses_changes_nothing(imported):
    before = digest_of([imported().Net])
    assert before == digest_of([imported("return 1", "return 2").Net])
    assert before == digest_of([imported("RATE = 0.5", "RATE = 0.1").Net])


def cell(text):
    """Execute a notebook's cell, whose source is in no file."""
    names = {"__name__": "__main__", "nn": nn}
    exec(compile(text, "<cell>", "exec"), names)
    return names["f"]


def test_a_notebooks_cell_has_a_digest(monkeypatch):
    # of pytest, which may lie among installed packages; a notebook has none
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    text = "def g(x):\n    return {x in {'a', 'b', 'c'}}\ndef f(x):\n    return [g(y) for y in x]"
    assert digest_of([cell(text)]) == digest_of([cell(text)]) != ""
    assert digest_of([cell(text)]) != digest_of([cell(text.replace("'c'", "'d'"))])


NAMED = RunConfig(model="mine:Net", rounds=3, epochs=1, checkpoint_every=1, stack="off")


MEMBERS = """
import functools

class Net:
    @property
    def width(self):
        return 11

    @width.setter
    def width(self, value):
        self.half = value + 22

    @width.deleter
    def width(self):
        self.half = 33

    @functools.cached_property
    def depth(self):
        return 44

    class Block:
        def forward(self, x):
            return 55 * x

    def f(self):
        return self.Block().forward(1)
"""


@pytest.mark.parametrize("number", [11, 22, 33, 44, 55])
def test_an_edit_of_any_member_of_a_class_changes_its_digest(number):
    def digest(text):
        names = {"__name__": "mine"}
        exec(compile(text, "<mine>", "exec"), names)
        return digest_of([names["Net"]])

    assert digest(MEMBERS) == digest(MEMBERS)
    assert digest(MEMBERS) != digest(MEMBERS.replace(str(number), "66"))


def test_a_run_does_not_go_on_with_edited_code(imported, capsys):
    imported()
    runner.run(NAMED, "run", progress=False, until=1)
    imported("nn.ReLU()", "nn.Tanh()")
    before = contents(Path("run"), ())
    with pytest.raises(SystemExit):
        main(["resume", "run", "--allow-code", "mine:Net"])
    message = capsys.readouterr().err.strip()
    assert "other code of its layers, model" in message
    assert "--allow-changed-code" in message
    assert before == contents(Path("run"), ())
    with pytest.warns(UserWarning, match="other code of its layers, model"):
        load_models("run", which="global", allow_code="mine:Net")
    main(["resume", "run", "--allow-code", "mine:Net", "--allow-changed-code"])
    assert "code of layers, model: changed after round 1" in Run("run").verify()


def test_an_exported_model_with_edited_code_has_a_note(imported, recwarn):
    imported()
    runner.run(NAMED, "run")
    fl.export("run", "a", which="global", allow_code="mine:Net")
    new = torch.zeros(2, 10).numpy()
    fl.predict("a", new, allow_code="mine:Net")
    assert not [warning for warning in recwarn if "code" in str(warning.message)]
    imported("nn.ReLU()", "nn.Tanh()")
    with pytest.warns(UserWarning, match="other code of its model"):
        fl.predict("a", new, allow_code="mine:Net")
    imported("WIDTH = 8", "WIDTH = 3")
    with refuses("other code of its"):
        runner.resume("run", allow_code="mine:Net")


def test_edited_code_that_was_allowed_needs_no_permission_again(
    imported,
):
    imported()
    runner.run(NAMED.with_keys(rounds=4), "run", until=1)
    imported("x.flatten(1)", "x.flatten(1) * 2")
    runner.resume("run", allow_code="mine:Net", allow_changed_code=True, until=2)
    runner.resume("run", allow_code="mine:Net", until=3)
    imported()
    runner.resume("run", allow_code="mine:Net", allow_changed_code=True)
    assert Run("run").finished
    assert [line for line in Run("run").verify() if "code" in line] == [
        f"code of model: changed after round {done}" for done in (1, 3)
    ]
