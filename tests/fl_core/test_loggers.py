"""Loggers: they get a run's very rows, live, and nothing of them is imported unless one is asked for."""

import subprocess
import sys

import pytest

import fedlayers as fl
from fl_core.recorder import Logger
from fl_core.rows import frame

pytestmark = pytest.mark.filterwarnings("ignore:client")
ASKED = {
    "dataset": "heart",
    "algorithm": "fedper",
    "rounds": 4,
    "checkpoint_every": 2,
    "progress": False,
}


class Kept(Logger):
    """Keeps everything, and may fail at a round."""

    def __init__(self, fails_at=None):
        self.runs, self.rows, self.ends, self.fails_at = [], [], [], fails_at

    def begin(self, run):
        self.runs.append(run)

    def log(self, rows):
        self.rows.append(list(rows))
        if rows[0]["round"] == self.fails_at:
            raise RuntimeError("the server is gone")

    def close(self, finished):
        self.ends.append(finished)


def test_a_logger_gets_the_rows_of_each_round_as_they_are_stored(
    tmp_path,
):
    logger = Kept()
    fl.run(**ASKED, out=tmp_path / "run", log=[logger])
    stored = fl.Run(tmp_path / "run")
    assert [sorted({each["round"] for each in rows}) for rows in logger.rows] == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]
    told = [each for rows in logger.rows for each in rows]
    assert stored.rows()[1].equals(frame(told))
    (run,) = logger.runs
    assert (run.path, run.id, run.done, run.config["rounds"]) == (
        stored.path,
        stored.id,
        0,
        4,
    )
    assert logger.ends == [True]
    unwritten = Kept()
    fl.run(**ASKED, log=[unwritten])
    assert [[r | {"run": ""} for r in rows] for rows in logger.rows] == unwritten.rows
    assert unwritten.runs[0].path is None


def test_a_logger_that_fails_ends_the_run_which_can_go_on_with_it(
    tmp_path,
):
    failing, going_on = Kept(fails_at=3), Kept()
    with pytest.raises(RuntimeError, match="gone"):
        fl.run(**ASKED, out=tmp_path / "run", log=[failing])
    assert failing.ends == [False]
    fl.resume(tmp_path / "run", log=[going_on], progress=False)
    assert going_on.runs[0].id == failing.runs[0].id
    assert (going_on.runs[0].done, going_on.ends) == (2, [True])
    assert [rows[0]["round"] for rows in going_on.rows] == [3, 4]
    assert (
        going_on.rows[0] == failing.rows[3]
    )  # repeated from the checkpoint, to the bit
    fl.Run(tmp_path / "run").verify()


@pytest.mark.slow
def test_a_logger_is_named_by_its_place_and_none_is_imported_unasked(
    tmp_path,
):
    (tmp_path / "mine.py").write_text(
        "import fedlayers as fl\nclass Dots(fl.Logger):\n"
        "    def log(self, rows):\n        print('round', rows[0]['round'])\n"
    )
    code = (
        "import sys; from fedlayers.cli.app import main\n"
        "main('run --rounds 1 --out a'.split())\n"
        "print('imported', [n for n in sys.modules if n.split('.')[0] in ('tensorboard', 'mine')])\n"
        "main('run --rounds 1 --logger mine:Dots --out b'.split())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "imported []\n" in done.stdout
    assert done.stdout.index("imported") < done.stdout.index("round 0\nround 1\n")
