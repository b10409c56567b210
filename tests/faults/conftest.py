"""What tests of faults share: a run that nothing disturbed, and a command that fails."""

import shutil
from pathlib import Path

import pytest

from fedlayers.cli import app as cli
from fl_core.config import RunConfig
from fl_core.run import runner
from tests.faults.injected import contents

SMALL = ("--rounds", "3", "--epochs", "1", "--checkpoint-every", "1", "--out", "run")
CONFIG = RunConfig(
    algorithm="fedper", rounds=3, epochs=1, checkpoint_every=1, eval_every=2
)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The files of a run that nothing disturbed."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    runner.run(CONFIG, path)
    return contents(path)


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


@pytest.fixture
def run(sound, tmp_path):
    """A copy of the module's finished run, to be changed."""
    return Path(shutil.copytree(sound, tmp_path / "run"))
