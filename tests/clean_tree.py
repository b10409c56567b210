"""Hooks of pytest: the list of all files of the repository is equal before and after the tests, ignored files too.

The session fails otherwise. With workers the process that controls them looks, after the last worker's end.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CACHES = {
    *(".git", ".venv", "__pycache__", ".hypothesis", ".benchmarks"),
    *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints"),
}
"""Names of folders in which tools keep what they need again."""
KEPT = ("out/coverage/", ".coverage")
"""What ``make coverage`` writes."""
BEFORE = pytest.StashKey[set[str]]()
CHANGED = pytest.StashKey[list[str]]()


def files(root: Path) -> set[str]:
    """Return the paths of all files below a folder, caches aside, and of its empty folders."""
    names_below = set()
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in CACHES and not name.endswith(".egg-info")
        ]
        inside = Path(folder).relative_to(root).as_posix()
        if not folders and not names:
            names_below.add(f"{inside}/")
        names_below |= {f"{inside}/{name}".removeprefix("./") for name in names}
    return {name for name in names_below if not name.startswith(KEPT)}


def changes(before: set[str], after: set[str]) -> list[str]:
    """Return a line for each file that is new or gone."""
    return sorted(
        [f"new: {name}" for name in after - before]
        + [f"gone: {name}" for name in before - after]
    )


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process runs tests for another one."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the files."""
    if not is_worker(session.config):
        session.config.stash[BEFORE] = files(ROOT)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if files are new or gone."""
    if is_worker(session.config):
        return
    changed = changes(session.config.stash[BEFORE], files(ROOT))
    session.config.stash[CHANGED] = changed
    if changed and session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the files that are new or gone."""
    if changed := config.stash.get(CHANGED, []):
        terminalreporter.section("tests must leave the files of the repository")
        for line in changed:
            terminalreporter.line(line)
