"""The lock pins the contents of what constraints.txt pins the versions of, and names no host."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", LOCK, re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned(lock):
    """Return a lock's entries: a version and its hashes each."""
    return [part.strip() for part in re.split(r"^(?=\w)", lock, flags=re.MULTILINE)[1:]]


def test_every_line_is_a_version_or_a_hash():
    pattern = re.compile(
        r"[\w.-]+(\[[\w,-]+\])?==[\w.!+]+( ; [^/@]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?"
    )
    assert [line for line in LOCK.splitlines() if not pattern.fullmatch(line)] == []
    parts = pinned(LOCK)
    assert len(parts) == len(PINS) > 100
    assert all("--hash=sha256:" in part for part in parts)


def test_it_has_the_versions_of_the_constraints_and_all_that_the_project_needs():
    constraints = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
        )
    )
    versions = {
        canonicalize_name(name): version for name, version in constraints.items()
    }
    assert {
        name: versions.get(canonicalize_name(name))
        for name in PINS
        if name != "setuptools"
    } == {name: version for name, version in PINS.items() if name != "setuptools"}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    todo = ["dev"]
    while todo:
        for requirement in map(Requirement, extras[todo.pop()]):
            if requirement.name == "fedlayers":
                todo += requirement.extras
            else:
                wanted.append(str(requirement))
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("option", ["LOCKED=1", "UV=1", "UV="])
def test_setup_asks_for_hashes_where_it_is_told_to(option, tmp_path):
    locked = option == "LOCKED=1"
    command = ["make", "-n", "setup", f"VENV={tmp_path}/venv", option]
    printed = subprocess.check_output(command, cwd=ROOT, text=True)
    installs = [line for line in printed.splitlines() if "pip install" in line]
    checked = ["--require-hashes" in line or "--no-deps" in line for line in installs]
    assert checked == ([True, True] if locked else [False])
    assert ("constraints.txt" in "".join(installs)) is not locked
