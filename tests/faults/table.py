"""``python -m tests.faults.table``: writes the table of faults, with the number of times each is tried.

README.md next to this file lists the tests of this folder. A fault is a test's name in words, and what must hold is the
first line of its docstring.
Tries are a test's cases, those that hypothesis draws and those that a marker ``tries`` counts included.
"""

import contextlib
import inspect
import io
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
TOP = ["| fault | what must hold | tries | slow tries |", "|---|---|---|---|"]
HEAD = """# Faults, and how often each is tried

`make lists` writes this page from the names and first lines of the tests. Each case of a test counts as one try.
`make test-slow` runs the slow ones, and `make test` all others. [SECURITY.md](../../SECURITY.md) has the promises.
"""


@dataclass
class Fault:
    """One test function: its file's first line, its name, its first line, and how often it is tried."""

    file: str
    about: str
    name: str
    held: str
    tries: int = 0
    slow: int = 0

    @property
    def words(self):
        """The name in words."""
        return self.name.removeprefix("test_").replace("_", " ")


class _Collected:
    def __init__(self):
        self.items = []

    def pytest_collection_finish(self, session):
        self.items = list(session.items)


def collected():
    """Every test in this folder, in the order of files and of lines, whether slow or not."""
    found = _Collected()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "", str(HERE)],
            plugins=[found],
        )
    assert code == pytest.ExitCode.OK, said.getvalue()
    faults = {}
    for item in sorted(
        found.items, key=lambda item: item.path.name
    ):  # stable: lines stay in order
        key = item.path.name, item.originalname
        if key not in faults:
            faults[key] = Fault(
                key[0], _first_line(item.module), key[1], _first_line(item.function)
            )
        drawn = getattr(item.obj, "_hypothesis_internal_use_settings", None)
        counted = item.get_closest_marker("tries")
        tries = (
            drawn.max_examples
            if drawn is not None
            else counted.args[0]
            if counted
            else 1
        )
        faults[key].tries += tries
        faults[key].slow += tries if item.get_closest_marker("slow") else 0
    return list(faults.values())


def page(faults):
    """The page's text."""
    faults = list(faults)
    lines = [HEAD]
    for file in dict.fromkeys(fault.file for fault in faults):
        of_file = [fault for fault in faults if fault.file == file]
        lines += [f"## [{file}]({file})\n", f"{of_file[0].about}\n", *TOP]
        lines += [
            f"| {each.words} | {_cell(each.held)} | {each.tries} | {each.slow or ''} |"
            for each in of_file
        ]
        lines.append("")
    total, slow = sum(each.tries for each in faults), sum(each.slow for each in faults)
    lines.append(f"{total:,} tries in all, {slow:,} of them slow.\n")
    return "\n".join(lines)


def _first_line(documented):
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _cell(text):
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(collected()), encoding="utf-8")
