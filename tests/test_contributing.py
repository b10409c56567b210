"""Every block of CONTRIBUTING.md does what it says: files are written, commands run, tests pass, in this order."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import fedlayers as fl
from docs import lists
from fedlayers.cli.app import main
from fl_core.registry import Registry

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
EXAMPLES = PAGE.parent / "examples" / "README.md"


def blocks(page):
    """Language and text of a page's blocks."""
    return re.findall(
        r"^```(\w*)\n(.*?)^```$",
        page.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )


def run_lines(text):
    for line in text.splitlines():
        program, *words = shlex.split(line)
        assert program == "fedlayers", line
        main(words)


BLOCKS = blocks(PAGE)
REGISTRIES = (fl.METRICS, fl.RULES, *Registry.of_kind.values())


class Folder:
    """A folder that somebody works in, whose modules and their members can be forgotten as in a new process."""

    def __init__(self, path):
        self.path = path
        self.before = [
            (dict(registry._members), dict(registry._origins))
            for registry in REGISTRIES
        ]

    def forget(self):
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", "")).startswith(str(self.path)):
                del sys.modules[name]
        for registry, (members, origins) in zip(REGISTRIES, self.before, strict=True):
            registry._members, registry._origins = dict(members), dict(origins)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for registry in REGISTRIES:
        registry.members()  # lest one be imported by a block, and forgotten with it
    working = Folder(tmp_path)
    yield working
    working.forget()


@pytest.mark.filterwarnings("ignore:client")
def test_every_block_does_what_it_says(
    folder,
):
    for language, text in BLOCKS:
        if language == "python":
            name = text.partition("\n")[0].removeprefix("# ")
            (folder.path / name).write_text(text)
            namespace = {"__name__": name.removesuffix(".py")}
            if name.startswith("test_"):
                exec(compile(text, name, "exec"), namespace)
                tests = [
                    value for key, value in namespace.items() if key.startswith("test_")
                ]
                assert tests
                for test in tests:
                    test()
        elif language == "sh":
            run_lines(text)
        else:
            assert language == "text"  # what only a maintainer runs


@pytest.mark.filterwarnings("ignore:client")
def test_the_examples_are_run_as_their_page_says(folder):
    ((language, text),) = blocks(EXAMPLES)
    assert language == "sh"
    run_lines(text)
    assert {path.name for path in folder.path.iterdir()} == {
        "runs",
        "diagnosis",
        "plan.json",
    }


def test_each_kind_has_its_row_and_its_example():
    rows = re.findall(
        r"^\| (\w+) \| `([\w/]+)(?:/|\.py)`.*?\| `--(\w+)`",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert {kind for kind, _, _ in rows} == set(lists.HOMES)
    every = [*BLOCKS, *blocks(EXAMPLES)]
    shown = "\n".join(text for language, text in every if language == "sh")
    for kind, inside, flag in rows:
        package = lists.registry(kind).package
        assert inside == package.replace(".", "/")
        assert re.search(rf"--{flag} [\w.]+:\w+", shown), kind
