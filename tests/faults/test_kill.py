"""A run killed at any moment resumes from its last checkpoint and ends with the same bytes as without the kill.

One child process imports everything once and forks a grandchild for each kill and each recovery.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.faults.injected import ROOT, contents, die
from tests.processes import alive

ROUNDS = 6
RANDOM = random.Random(22)
BEFORE, FIRST_CHECKPOINT = 3, 13
"""Files up to the configuration, and up to the first checkpoint: 9 blobs and its own file."""
FILES = (FIRST_CHECKPOINT, FIRST_CHECKPOINT + 10 * (ROUNDS - 1))

# A moment is a list: where, and which; several for a run that is killed again while it recovers.
MOMENTS = {
    "before the first file": [["before file", 1]],
    "before the configuration": [["before file", BEFORE]],
    "after the configuration": [["after file", BEFORE]],
    "before the first rows": [["in rows", 1]],
    "in the rows of round 1": [["in rows", 2]],
    "in the first checkpoint": [
        ["before file", RANDOM.randrange(BEFORE + 1, FIRST_CHECKPOINT)]
    ],
    **{
        f"{where} {k}": [[where, k]]
        for where in ("before file", "after file")
        for k in RANDOM.sample(range(*FILES), 1)
    },
    **{f"in rows {k}": [["in rows", k]] for k in RANDOM.sample(range(3, ROUNDS), 1)},
    **{
        f"{delay:.3f} s into round {k}": [["in round", k, delay]]
        for k, delay in zip(
            RANDOM.sample(range(ROUNDS - 2), 2), (0.01, 0.04), strict=True
        )
    },
    "at the last checkpoint": [["before file", FILES[1]]],
    "three times": [["in round", 2, 0.02], ["in rows", 3], ["before file", 10]],
}


def drawn_moments(count, seed):
    """Return so many moments by a seed: at any file, in the rows of any round, or within a round."""
    draw, moments = random.Random(seed), {}
    while len(moments) < count:
        where = draw.choice(["before file", "after file", "in rows", "in round"])
        moment = [where, draw.randint(1, FILES[1])]
        if where == "in rows":
            moment = [where, draw.randint(1, ROUNDS)]
        elif where == "in round":
            delay = round(draw.uniform(0, 0.04), 3)
            moment = [where, draw.randrange(ROUNDS - 2), delay]
        moments[f"drawn: {moment}"] = [moment]
    return moments


DRAWN = drawn_moments(40, seed=40)

QUICK = ("before the first rows", "three times")


def arm(where, which, delay=0.0):
    """Let this process kill itself at a moment."""
    from fl_core import rows
    from fl_core.records.writing import Writer
    from fl_core.rounds.engine import Engine

    counter = itertools.count(1)
    replace, one_round = os.replace, Engine.step

    def dying_replace(*given, **named):
        now = next(counter) == which
        if now and where == "before file":
            die()
        replace(*given, **named)
        if now:
            die()

    def dying_rows(self, new):
        data = "".join(rows.dumps(record) + "\n" for record in new).encode()
        now = next(counter) == which
        with (self.path / "rows.jsonl").open("ab") as file:
            file.write(data[: len(data) // 2] if now else data)
        if now:
            die()
        self.count(data)

    def dying_round(self):
        if self.done == which:
            threading.Timer(delay, die).start()
        one_round(self)

    if where == "in rows":
        Writer.add_rows = dying_rows
    elif where == "in round":
        Engine.step = dying_round
    else:
        os.replace = dying_replace


def go(out, algorithm, workers):
    """Run, or go on where there is a run."""
    from diagnostics.measure import instruments
    from fl_core.config import RunConfig
    from fl_core.rounds import workers as pools
    from fl_core.run import runner

    start = pools.Workers.__init__

    def noting(self, *given):
        start(self, *given)
        (out.parent / "workers").write_text(
            "\n".join(str(child.process.pid) for child in self._children)
        )

    pools.Workers.__init__ = noting
    if (out / "config.json").exists():
        runner.resume(out, instruments=instruments, progress=False)
        return
    stack = {"playerfl": "off", "ditto": "on"}[
        algorithm
    ]  # in stacks there is no work for other processes
    often = {"eval_every": 4, "checkpoint_every": 1}
    config = RunConfig(
        dataset="heart",
        algorithm=algorithm,
        rounds=ROUNDS,
        epochs=1,
        workers=workers,
        stack=stack,
        **often,
    )
    runner.run(config, out, instruments=instruments, progress=False)


def forked(out, algorithm, workers, moment=None):
    """Go in a forked process; its status, negative for the signal that killed it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        if moment:
            arm(*moment)
        go(out, algorithm, workers)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def nursery(cases):
    """Kill and recover every case; print what happened, a JSON line each."""
    import torch

    from diagnostics.measure import instruments
    from fl_core.config import RunConfig
    from fl_core.run import runner

    torch.set_num_threads(1)
    os.fsync = lambda handle: (
        None
    )  # a kill, unlike a power cut, loses nothing that was written
    first = RunConfig(
        algorithm="playerfl", rounds=1, epochs=1
    )  # what is loaded on first use is loaded before the forks
    runner.run(first, instruments=instruments, progress=False)
    for name, case in cases.items():
        out, algorithm, workers = Path(case["out"]), case["algorithm"], case["workers"]
        out.parent.mkdir()
        killed, checkpoints, orphans = [], [], []
        for moment in case["moments"]:
            killed.append(forked(out, algorithm, workers, moment))
            checkpoints.append(len(list(out.glob("checkpoints/*.json"))))
            orphans += (out.parent / "workers").read_text().split() if workers else []
        ended = forked(out, algorithm, workers)
        deadline = time.monotonic() + 20
        while any(map(alive, orphans)) and time.monotonic() < deadline:
            time.sleep(0.05)
        outlived = [alive(pid) for pid in orphans]
        happened = {
            "killed": killed,
            "checkpoints": checkpoints,
            "ended": ended,
            "outlived": outlived,
        }
        print(json.dumps({"name": name, **happened}), flush=True)


def nursed(cases, base):
    """For every case what happened, and where."""
    for index, case in enumerate(cases.values()):
        case["out"] = str(base / str(index) / "run")
    script = f"import json, sys; from {__name__} import nursery; nursery(json.load(sys.stdin))"
    child = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=1200,
    )
    assert child.returncode == 0, child.stderr
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    return {
        line["name"]: {**line, **cases[line["name"]], "errors": child.stderr}
        for line in lines
    }


def cases_of(names):
    """Runs that are killed at the moments of these names, and undisturbed ones: the cases without moments."""
    cases = {
        name: {"algorithm": name, "workers": 0, "moments": []}
        for name in ("playerfl", "ditto")
    }
    for index, (name, moments) in enumerate((MOMENTS | DRAWN).items()):
        if name in names:
            cases[name] = {
                "algorithm": ("playerfl", "ditto")[index % 6 == 3],
                "workers": 0,
                "moments": moments,
            }
    return cases


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What happened at the moments that ``make test`` has, and where."""
    return nursed(cases_of(QUICK), tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def happened(tmp_path_factory):
    """What happened at every moment, and where."""
    cases = cases_of(MOMENTS)
    cases["workers"] = {
        "algorithm": "playerfl",
        "workers": 2,
        "moments": [["in round", 3, 0.02]],
    }
    return nursed(cases, tmp_path_factory.mktemp("kill"))


def check_same(case, undisturbed):
    """Killed as often as it was to be, then ended, with the very files of the run that was not."""
    from fl_core.records.store import Run

    assert case["killed"] == [-signal.SIGKILL] * len(case["moments"]), case["errors"]
    assert case["ended"] == undisturbed["ended"] == 0, case["errors"]
    ours, theirs = contents(Path(case["out"])), contents(Path(undisturbed["out"]))
    assert ours.keys() == theirs.keys()
    assert [path for path in ours if ours[path] != theirs[path]] == []
    run = Run(case["out"])
    assert run.rounds == list(range(1, run.config["rounds"] + 1))
    run.verify()


@pytest.mark.parametrize("name", QUICK)
def test_ends_with_the_same_bytes(quick, name):
    check_same(quick[name], quick[quick[name]["algorithm"]])


@pytest.mark.slow
@pytest.mark.parametrize("name", MOMENTS)
def test_ends_with_the_same_bytes_at_every_moment(happened, name):
    check_same(happened[name], happened[happened[name]["algorithm"]])


@pytest.mark.slow
def test_forty_kills_at_drawn_moments_end_with_the_same_bytes(tmp_path):
    happened = nursed(cases_of(DRAWN), tmp_path)
    for name in DRAWN:
        check_same(happened[name], happened[happened[name]["algorithm"]])
    assert len({happened[name]["checkpoints"][0] for name in DRAWN}) >= 5


@pytest.mark.slow
def test_moments_are_spread_over_the_run(happened):
    assert len(MOMENTS) == 13
    saved = [count for name in MOMENTS for count in happened[name]["checkpoints"]]
    assert saved.count(0) >= 5
    assert saved.count(ROUNDS) == 0
    assert len(set(saved)) >= 5
    assert max(saved) == ROUNDS - 1


@pytest.mark.slow
def test_with_worker_processes(happened):
    """Workers end with the killed run and keep no lock. The resumed run has the same bits as one without workers."""
    case = happened["workers"]
    assert (case["killed"], case["ended"]) == ([-signal.SIGKILL], 0), case["errors"]
    assert 3 <= case["checkpoints"][0] < ROUNDS
    assert case["outlived"] == [False, False]
    ours, theirs = (
        contents(Path(case["out"])),
        contents(Path(happened["playerfl"]["out"])),
    )
    assert ours.keys() == theirs.keys()
    differ = {path for path in ours if ours[path] != theirs[path]}
    checkpoints = {path for path in ours if path.startswith("checkpoints/")}
    assert differ == {
        "config.json",
        *checkpoints,
    }  # they say how many workers there were, and whose
    for path in checkpoints:
        assert json.loads(ours[path])["states"] == json.loads(theirs[path])["states"]
