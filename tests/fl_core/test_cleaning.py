"""Runs on less disk: only the last and the best checkpoints stay."""

import shutil
from pathlib import Path

import pytest

from fedlayers.cli.app import main
from fl_core import storage
from fl_core.config import RunConfig
from fl_core.records.writing import clean
from fl_core.run import runner
from tests.faults.injected import contents

CONFIG = RunConfig(
    dataset="heart",
    algorithm="fedper",
    rounds=2,
    epochs=1,
    checkpoint_every=1,
    stack="off",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run after its first of two rounds, and a whole one with the same seed. Nobody touches them."""
    path = tmp_path_factory.mktemp("made")
    runner.run(CONFIG, path / "half", progress=False, until=1)
    runner.run(CONFIG, path / "whole", progress=False)
    return path


@pytest.fixture
def study(made, tmp_path):
    """A copy of both, to be cleaned."""
    return Path(shutil.copytree(made, tmp_path / "study"))


def test_incomplete_files_of_a_killed_writer_are_removed(study):
    for name in ("config.json.1.part", "mine.txt.1.part"):
        (study / "whole" / name).write_text("half")
    (study / "whole" / "checkpoints" / "000001.json").unlink()
    clean(study / "whole")
    names = [path.name for path in (study / "whole").glob("*.part")]
    assert names == ["mine.txt.1.part"]


def test_a_run_of_a_newer_version_stops_no_other(study, capsys):
    shutil.copytree(study / "whole", study / "newer")
    config = storage.Folder(study / "newer").read_signed("config.json")
    storage.Folder(study / "newer").write(
        "config.json", storage.sign({**config, "format": "fedlayers.run/9"})
    )
    before = contents(study / "newer")
    main(["clean", str(study)])
    assert "newer" in capsys.readouterr().out
    assert contents(study / "newer") == before
