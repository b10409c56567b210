"""A terminal: lines are typed as commands in a folder of their own, and what they said is remembered."""

from pathlib import Path

import pytest

from fedlayers.cli import app as cli


class Terminal:
    """Runs lines as commands in this process, in a folder of its own, and remembers what they said."""

    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *words, code=0):
        self.capsys.readouterr()
        try:
            cli.main(" ".join(map(str, words)).split())
            left = 0
        except SystemExit as end:
            left = end.code or 0
        self.out, self.err = self.capsys.readouterr()
        assert left == code, f"{words}: exit code {left}\n{self.out}\n{self.err}"
        return self.out

    def refused(self, *words, code=2):
        """The one line with which a command is refused, which writes nothing and shows no traceback."""
        before = contents()
        self(*words, code=code)
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert "Traceback" not in self.err
        assert len(lines) == 1, self.err
        assert lines[0].startswith("fedlayers: ")
        assert contents() == before
        return lines[0]


def contents():
    return {
        str(path): path.stat().st_mtime_ns
        for path in Path().rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.fixture
def fedlayers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLAYERS_DATA_ROOT", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal(capsys)
