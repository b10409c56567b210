"""Loggers: they get a run's very rows, live, and nothing of them is imported unless one is asked for."""

import pandas as pd
import pytest

import fedlayers as fl
from fl_core.rounds import recorder
from fl_core.rounds.recorder import Logger
from fl_core.rows import frame

pytestmark = pytest.mark.filterwarnings("ignore:client")
ASKED = {
    "dataset": "heart",
    "algorithm": "fedper",
    "rounds": 4,
    "checkpoint_every": 2,
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
    assert [sorted({line["round"] for line in rows}) for rows in logger.rows] == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]
    logged = [line for rows in logger.rows for line in rows]
    assert stored.rows()[1].equals(frame(logged))
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
    fl.resume(tmp_path / "run", log=[going_on])
    assert going_on.runs[0].id == failing.runs[0].id
    assert (going_on.runs[0].done, going_on.ends) == (2, [True])
    assert [rows[0]["round"] for rows in going_on.rows] == [3, 4]
    assert (
        going_on.rows[0] == failing.rows[3]
    )  # repeated from the checkpoint, to the bit
    fl.Run(tmp_path / "run").verify()


@pytest.mark.filterwarnings("ignore:client")
def test_rows_in_memory_are_the_same_however_few_are_buffered(monkeypatch):
    frames = []
    for most in (recorder.BUFFER, 7, 1):
        monkeypatch.setattr(recorder, "BUFFER", most)
        result = fl.run(dataset="heart", rounds=1, progress=False)
        frames.append(result.to_frame().drop(columns="run"))
    assert len(frames[0]) > 7
    for frame_in_parts in frames[1:]:
        pd.testing.assert_frame_equal(frame_in_parts, frames[0])
