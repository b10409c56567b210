"""python -m docs.outputs [PAGE ...]: runs the commands of the pages, and writes their output below them.

A block ``console`` has lines ``$ command``, each followed by what it prints. A comment ``<!-- short: FLAGS -->`` after
a block gives flags with which a test runs the block's commands faster.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"```console\n(?P<text>.*?)```(?:\n<!-- short: (?P<short>.*?) -->)?", re.DOTALL)
FILES = ("fl_core/data/named/heart.csv",)
"""What lies in the folder in which the commands run."""


@dataclass(frozen=True)
class Step:
    """A command of a page with the output that the page shows."""

    command: str
    output: str


def steps(text: str) -> list[Step]:
    """Return the commands of one block.

    >>> steps("$ fedlayers list\\nalgorithms\\n$ fedlayers --help\\n")
    [Step(command='fedlayers list', output='algorithms\\n'), Step(command='fedlayers --help', output='')]
    """
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)[1:]
    return [Step(command, output) for command, output in zip(parts[::2], parts[1::2], strict=True)]


def folder(path: Path) -> Path:
    """Put the files that pages name into a folder."""
    for name in FILES:
        shutil.copyfile(ROOT / name, path / Path(name).name)
    (path / "hospitals").mkdir(exist_ok=True)
    for hospital, rows in pd.read_csv(path / "heart.csv").groupby("hospital"):
        rows.drop(columns="hospital").to_csv(path / f"hospitals/{hospital}.csv", index=False)
    return path


def run(command: str, cwd: Path, short: str = "") -> str:
    """Run one command and return what it prints.

    Args:
        short: flags that replace those of the command, or are added to it.

    Raises:
        RuntimeError: the command fails; has its messages.
    """
    program, *words = shlex.split(command)
    words = replaced(words, shlex.split(short))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "110", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    call = [sys.executable, "-m", program, *words]
    done = subprocess.run(call, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def replaced(words: list[str], short: list[str]) -> list[str]:
    """Replace flags and their values, and add those that are new.

    >>> replaced(["run", "--rounds", "20", "--seeds", "3"], ["--rounds", "2", "--workers", "2"])
    ['run', '--seeds', '3', '--rounds', '2', '--workers', '2']
    """
    flags = {word for word in short if word.startswith("--")}
    kept, dropping = [], False
    for word in words:
        dropping = word in flags if word.startswith("--") else dropping
        kept += [] if dropping else [word]
    return [*kept, *short]


def updated(text: str) -> str:
    """Return a page's text with the output of its commands."""
    with tempfile.TemporaryDirectory() as name:
        cwd = folder(Path(name))

        def rewritten(found: re.Match[str]) -> str:
            shown = "".join(f"$ {step.command}\n{run(step.command, cwd)}" for step in steps(found["text"]))
            rest = f"\n<!-- short: {found['short']} -->" if found["short"] else ""
            return f"```console\n{shown.rstrip()}\n```{rest}"

        return BLOCK.sub(rewritten, text)


def main(*names: str) -> None:
    """Write the outputs of some pages, or of all."""
    for path in map(Path, names or PAGES):
        text = path.read_text(encoding="utf-8")
        if BLOCK.search(text):
            print(path, flush=True)
            path.write_text(updated(text), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
