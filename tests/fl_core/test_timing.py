"""Where the time goes: the parts of a round add up, and a run's file says what its progress bar said."""

import json
import math

import pytest

from fl_core.errors import CorruptError
from fl_core.rounds import recorder
from fl_core.rounds.recorder import Timer
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, network, refuses


def test_a_run_writes_where_its_time_went(tmp_path):
    config = CONFIG.with_keys(rounds=3, eval_every=2)
    engine = runner.run(config, tmp_path / "run", data=TOY, model=network("plain"))
    lines = [
        json.loads(line)
        for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()
    ]
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    steps = sum(math.ceil(n / 8) for n in TOY.weights)
    assert [line["steps"] for line in lines] == [0, steps, steps, steps]
    assert all(
        line[part] > 0 for line in lines[1:] for part in ("train", "save", "other")
    )
    assert [line["evaluate"] > 0 for line in lines] == [True, False, True, True]
    pace = recorder.read_pace(tmp_path / "run" / "timing.jsonl")
    assert pace == engine.listener(Timer).pace
    assert (pace.steps, pace.rate) == (3 * steps, 3 * steps / pace.total)


WHOLE = json.dumps({"round": 1, "steps": 3, **dict.fromkeys(recorder.PARTS, 0.5)})
LINES = [
    "{",
    "[]",
    "{}",
    '{"round": 1, "steps": 3}',
    WHOLE.replace("0.5", '"long"'),
    WHOLE.replace("1", "Infinity"),
]


@pytest.mark.parametrize("line", LINES)
def test_what_is_no_timing_is_refused(tmp_path, line):
    with refuses("does not exist"):
        recorder.read_pace(tmp_path / "timing.jsonl")
    (tmp_path / "timing.jsonl").write_text(line + "\n")
    with refuses("line 1", CorruptError):
        recorder.read_pace(tmp_path / "timing.jsonl")
