"""python -m docs.outputs [PAGE ...]: runs the commands of the pages, and writes their output below them.

A block ``console`` has lines ``$ command``, each followed by what it prints. A comment ``<!-- short: FLAGS -->`` after
a block gives flags with which a test runs the block's commands faster. After ``<!-- refused -->`` the commands must end
in an error, which is shown. At most 15 lines are shown; a block ``text`` in ``<details>`` below has the rest, from the
same line on as before. A block ``python`` that begins with ``# NAME.py`` is a file that the commands find.

Between ``<!-- seconds -->`` and ``<!-- end -->`` is a table of how long each command took.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MOST_LINES = 15
"""Lines of a block that a page shows before its reader unfolds it."""
FOLD = "\n\n<details>\n<summary>{summary}</summary>\n\n```text\n{rest}```\n\n</details>"
REST = "The rest of the output"
BLOCK = re.compile(
    r"```console\n(?P<text>.*?)```"
    + f"(?:{FOLD.format(summary='(?P<summary>.*?)', rest='(?P<rest>.*?)')})?"
    + r"(?:\n<!-- short: (?P<short>.*?) -->)?(?P<refused>\n<!-- refused -->)?",
    re.DOTALL,
)
FILE = re.compile(r"```python\n# (?P<name>\w+\.py)\n(?P<text>.*?)```", re.DOTALL)
TIMES = re.compile(r"<!-- seconds -->\n.*?<!-- end -->", re.DOTALL)
HOME = "/home/me"
"""How pages show the folder in which the commands run."""


@dataclass(frozen=True)
class Step:
    """A command of a page with the output that the page shows."""

    command: str
    output: str


def steps(block: re.Match[str]) -> list[Step]:
    """Return the commands of one block, with all their output.

    >>> steps(BLOCK.search("```console\\n$ fedlayers list\\nalgorithms\\n$ fedlayers --help\\n```"))
    [Step(command='fedlayers list', output='algorithms\\n'), Step(command='fedlayers --help', output='')]
    """
    text = block["text"] + (block["rest"] or "")
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)[1:]
    return [
        Step(command, output)
        for command, output in zip(parts[::2], parts[1::2], strict=True)
    ]


def in_one_go(text: str, word: str = "") -> list[re.Match[str]]:
    """Return the page's first block that has a word, and those that follow it without a sentence between.

    >>> page = "```console\\n1\\n```\\n\\n```console\\n2\\n```\\nThen:\\n```console\\n3\\n```"
    >>> [block["text"] for block in in_one_go(page)]
    ['1\\n', '2\\n']
    """
    blocks: list[re.Match[str]] = []
    for block in BLOCK.finditer(text):
        if blocks and text[blocks[-1].end() : block.start()].strip():
            return blocks
        if blocks or word in block["text"]:
            blocks.append(block)
    return blocks


def folded(printed: str, shown: int = 0, summary: str = REST) -> str:
    """Return a console block of what commands print. Below it are folded the lines that are too many.

    Args:
        shown: number of lines to show if there are too many. Default: those up to the last empty one of 15.
    """
    lines = [f"{line}\n" for line in printed.rstrip().splitlines()]
    if len(lines) <= MOST_LINES:
        shown, rest = len(lines), ""
    else:
        empty = [k for k, line in enumerate(lines[:MOST_LINES], 1) if line == "\n"]
        shown = shown or max(empty, default=MOST_LINES)
        shown += shown + 1 in empty  # the rest begins with words
        rest = FOLD.format(summary=summary, rest="".join(lines[shown:]))
    text = "".join(lines[:shown])
    return f"```console\n{text}```{rest}"


def folder(path: Path, text: str = "") -> Path:
    """Put the files that this page writes into a folder."""
    for file in FILE.finditer(text):
        (path / file["name"]).write_text(file["text"], encoding="utf-8")
    return path


def run(command: str, cwd: Path, short: str = "", refused: bool = False) -> str:
    """Run one command and return what it prints.

    Args:
        short: flags that replace those of the command, or are added to it.
        refused: whether the command must refuse its input. Then its message is returned.

    Raises:
        RuntimeError: the command fails, or does not though it must; has its messages.
    """
    program, *words = shlex.split(command)
    words = replaced(words, shlex.split(short))
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "110",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    call = (
        [sys.executable, *words]
        if program == "python"
        else [sys.executable, "-m", program, *words]
    )
    done = subprocess.run(
        call, cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    faults = 1 if words[:1] == ["check"] else 0  # its exit code for a table with faults
    if done.returncode not in ((2,) if refused else (0, faults)):
        raise RuntimeError(
            f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return (done.stderr if refused else done.stdout).replace(str(cwd), HOME)


def replaced(words: list[str], short: list[str]) -> list[str]:
    """Replace flags and their values, and add new ones.

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
    """Return a page's text with the output of its commands, and with how long they took."""
    took: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        cwd = folder(Path(name), text)

        def shown(command: str, refused: bool) -> str:
            began, used = time.perf_counter(), _processor_seconds()
            printed = run(command, cwd, refused=refused)
            wall, busy = time.perf_counter() - began, _processor_seconds() - used
            took.append((_called(command), wall, busy))
            return f"$ {command}\n{printed}"

        def rewritten(found: re.Match[str]) -> str:
            printed = "".join(
                shown(step.command, bool(found["refused"])) for step in steps(found)
            )
            before = found["text"].count("\n") if found["rest"] else 0
            block = folded(printed, before, found["summary"] or REST)
            short = f"\n<!-- short: {found['short']} -->" if found["short"] else ""
            return f"{block}{short}{found['refused'] or ''}"

        text = BLOCK.sub(rewritten, text)
    lines = [
        f"| {k} | `{called}` | {wall:.0f} | {busy:.0f} |"
        for k, (called, wall, busy) in enumerate(took, 1)
    ]
    lines.append(
        f"| | in all | {sum(each[1] for each in took):.0f} | {sum(each[2] for each in took):.0f} |"
    )
    table = "\n".join(
        [
            "| step | command | seconds | processor seconds |",
            "|---|---|---|---|",
            *lines,
        ]
    )
    return TIMES.sub(f"<!-- seconds -->\n{table}\n<!-- end -->", text)


def _processor_seconds() -> float:
    """Return the seconds of processor that all ended child processes have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _called(command: str) -> str:
    """Return the program, and its command or script.

    >>> _called("fedlayers run --dataset heart"), _called("python -m examples.handwriting writers")
    ('fedlayers run', 'python -m examples.handwriting')
    """
    words = command.split()
    return " ".join(words[: 3 if words[1] == "-m" else 2])


def main(*names: str) -> None:
    """Write the outputs of some pages, or of all."""
    for path in map(Path, names or PAGES):
        text = path.read_text(encoding="utf-8")
        if BLOCK.search(text):
            print(path, flush=True)
            path.write_text(updated(text), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
