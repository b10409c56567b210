"""The repository holds sources: no file that a run or an example has left."""

import subprocess
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[1]
LEFT_BY_RUNS = {".pt", ".pth", ".npz", ".npy", ".safetensors", ".pkl", ".csv", ".toml"}
ROOMS = {"docs", "figures", "benchmarks", "tests", "examples"}
KNOWN = {
    "pyproject.toml",
    "fedlayers/flower/app/pyproject.toml",
    "fl_core/data/named/heart.csv",
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
