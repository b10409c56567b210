"""Every block of CONTRIBUTING.md does what it says: files are written, commands run, tests pass, in this order."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

import fedlayers as fl
from fedlayers import catalogue
from fedlayers.cli.app import main
from fl_core.registry import GROUP, Registry

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
EXAMPLES = PAGE.parent / "examples" / "README.md"


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of a page's blocks."""
    return re.findall(
        r"^```(\w*)\n(.*?)^```$",
        page.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )


def run_lines(text: str) -> None:
    for line in text.splitlines():
        program, *words = shlex.split(line)
        assert program == "fedlayers", line
        main(words)


BLOCKS = blocks(PAGE)
REGISTRIES = (fl.METRICS, fl.RULES, *Registry.of_kind.values())


class Folder:
    """A folder that somebody works in, whose modules and their members can be forgotten as in a new process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = [
            (dict(registry._members), dict(registry._origins))
            for registry in REGISTRIES
        ]

    def forget(self) -> None:
        files = {
            name: str(getattr(module, "__file__", ""))
            for name, module in sys.modules.items()
        }
        for name in (
            name for name, file in files.items() if file.startswith(str(self.path))
        ):
            del sys.modules[name]
        for registry, (members, origins) in zip(REGISTRIES, self.before, strict=True):
            registry._members, registry._origins = dict(members), dict(origins)
            vars(registry).pop("entry_points", None)

    def announce(self, points: dict[str, str]) -> None:
        """Do what installing a package with these entry points does: leave its metadata on the path."""
        self.forget()
        assert not any(
            name.partition(".")[2] in catalogue.registry(name.partition(".")[0])
            for name in points
        )
        info = self.path / "of_my_own-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: of-my-own\nVersion: 1.0\n"
        )
        lines = [f"{name} = {place}" for name, place in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
        self.forget()
        assert all(
            name.partition(".")[2] in catalogue.registry(name.partition(".")[0])
            for name in points
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for registry in REGISTRIES:
        registry.members()  # lest one be imported by a block, and forgotten with it
    working = Folder(tmp_path)
    yield working
    working.forget()


@pytest.mark.filterwarnings("ignore:client")
def test_every_block_does_what_it_says(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []
    for language, text in BLOCKS:
        if language == "python":
            name = text.partition("\n")[0].removeprefix("# ")
            (folder.path / name).write_text(text)
            namespace: dict[str, object] = {"__name__": name.removesuffix(".py")}
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
        elif language == "toml":
            folder.announce(tomllib.loads(text)["project"]["entry-points"][GROUP])
        else:
            assert language == "text"  # what only a maintainer runs
        done.append(language)
    assert {"python", "sh", "toml", "text"} == set(done)
    assert "tempered_avg" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:client")
def test_the_examples_are_run_as_their_page_says(folder: Folder) -> None:
    ((language, text),) = blocks(EXAMPLES)
    assert language == "sh"
    run_lines(text)
    assert {path.name for path in folder.path.iterdir()} == {
        "runs",
        "diagnosis",
        "plan.json",
    }


def test_each_kind_has_its_row_and_its_example() -> None:
    rows = re.findall(
        r"^\| (\w+) \| `([\w/]+)/`.*?\| `--(\w+)`",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert {kind for kind, _, _ in rows} == set(catalogue.HOMES)
    for kind, inside, _ in rows:
        package = catalogue.registry(kind).package
        assert inside == package.replace(".", "/")
        assert any(
            f'"{kind}.' in text for language, text in BLOCKS if language == "toml"
        )


def test_links_lead_somewhere() -> None:
    for page in (
        PAGE,
        EXAMPLES,
        PAGE.with_name("README.md"),
        PAGE.with_name("CHANGELOG.md"),
    ):
        for target in re.findall(
            r"\]\(([^)#\s]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"",
            page.read_text(encoding="utf-8"),
        ):
            path = "".join(target)
            assert path.startswith("http") or (page.parent / path).exists(), (
                page.name,
                path,
            )
