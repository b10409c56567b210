"""What tests of faults share: a command that fails."""

import pytest

from fedlayers.cli import app as cli

SMALL = ("--rounds", "3", "--epochs", "1", "--checkpoint-every", "1", "--out", "run")


@pytest.fixture
def fails(tmp_path, monkeypatch, capsys):
    """Run a command that fails, in a folder of its own; its last line."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 1
        return capsys.readouterr().err.splitlines()[-1]

    return call
