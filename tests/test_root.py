"""The repository holds sources: no file that a run, an example or a test has left."""

import re
import subprocess
import sys
from pathlib import Path, PurePath

import pytest

from docs.sources import PAGES
from fedlayers.cli.app import COMMANDS, command_class
from tests import clean_tree

ROOT = Path(__file__).parents[1]
LEFT_BY_RUNS = {".pt", ".pth", ".npz", ".npy", ".safetensors", ".pkl", ".csv", ".toml"}
ROOMS = {"docs", "figures", "benchmarks", "tests", "examples"}
KNOWN = {
    "pyproject.toml",
    "fedlayers/flower/app/pyproject.toml",
    "fl_core/data/named/heart.csv",
    "diagnostics/benchmark.csv",
    "diagnostics/truth.csv",
}


def test_git_has_no_file_that_a_run_left():
    if not (ROOT / ".git").exists():
        pytest.skip("needs git's list of files, which an installed copy lacks")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [PurePath(name) for name in listed.stdout.splitlines()]
    stray = [
        str(name)
        for name in names
        if name.suffix in LEFT_BY_RUNS
        and name.parts[0] not in ROOMS
        and str(name) not in KNOWN
    ]
    assert stray == []
    folders = {name.parts[0] for name in names if len(name.parts) > 1}
    assert not folders & {"out", "runs", "study", "comparison", "server"}


def test_what_a_command_writes_unasked_is_ignored_by_git():
    if not (ROOT / ".git").exists():
        pytest.skip("needs git's rules, which an installed copy lacks")
    kinds = [command_class(name) for name in COMMANDS]
    written = {str(kind.out) for kind in kinds if getattr(kind, "out", None)}
    written |= {"tidy.py", "tidy.csv", "out/choose_models/a.safetensors"}
    call = ["git", "check-ignore", *sorted(written)]
    ignored = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout.split() == sorted(written)


WRITES = """
import pathlib
def test_writes(): pathlib.Path("runs").mkdir(); pathlib.Path("runs/net.pt").touch()
def test_removes(): pathlib.Path("old.md").unlink()
def test_caches(): pathlib.Path("__pycache__").mkdir(exist_ok=True); pathlib.Path("__pycache__/a.pyc").touch()
"""
HOOKS = "from tests import clean_tree\nclean_tree.ROOT = clean_tree.Path.cwd()\nfrom tests.clean_tree import *\n"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_session_that_leaves_or_removes_a_file_fails(tmp_path, workers):
    """A file below an ignored folder counts, and a cache does not."""
    (tmp_path / "test_files.py").write_text(WRITES)
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "old.md").touch()

    def session(chosen):
        command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:cov"]
        done = subprocess.run(
            [*command, "-k", chosen, "--rootdir", str(tmp_path), str(tmp_path)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            capture_output=True,
            text=True,
        )
        lines = done.stdout.splitlines()
        changed = [line for line in lines if line.startswith(("new: ", "gone: "))]
        return done.returncode, changed

    assert session("caches") == (0, [])
    assert session("writes or removes") == (1, ["gone: old.md", "new: runs/net.pt"])
    assert clean_tree.files(tmp_path) >= {"runs/net.pt", "conftest.py"}


WRITERS = re.compile(
    r"\.to_(?:csv|json|parquet)\(|\bsavez?\w*\(|write_(?:text|bytes)\(|mkdir\(|\bout="
)
TEMPORARY = re.compile(r"mkdtemp\(|mktemp -d")
LISTINGS = re.compile(r"```(?:python|text)\n(.*?)```", re.DOTALL)


def written_in_place(text):
    """Return the listings of a page that write, without a temporary folder above or within them."""
    return [
        listing[1]
        for listing in LISTINGS.finditer(text)
        if WRITERS.search(listing[1]) and not TEMPORARY.search(text[: listing.end()])
    ]


def test_listings_of_pages_write_below_a_temporary_folder():
    """A reader who types them has no file in the folder where they stand."""
    stray = {page: written_in_place((ROOT / page).read_text("utf-8")) for page in PAGES}
    assert {page: listings for page, listings in stray.items() if listings} == {}
    listing = '```python\nnp.savez("x.npz", x=x)\n```'
    assert len(written_in_place(listing)) == 1
    assert written_in_place(f"`cd $(mktemp -d)`\n{listing}") == []
