"""The machine misbehaves: clocks jump, limits are reached, disks fail, and memory is short."""

import contextlib
import errno
import json
import math
import os
import random
import resource
import signal
import time

import pytest
import torch

from fedlayers.cli import app as cli
from fl_core import storage
from fl_core.records.store import Run
from fl_core.rounds.engine import Engine
from fl_core.run import runner
from tests.faults.conftest import CONFIG, SMALL
from tests.faults.injected import FailingOS, contents


@pytest.mark.parametrize(
    "how", ["backwards", "an hour back", "to and fro", "standing still"]
)
def test_clocks_that_jump(tmp_path, monkeypatch, undisturbed, how):
    """No result depends on the time of day, and no stored time is below 0."""
    at, draw = [1e9], random.Random(0)
    hour = iter([0.1] * 40 + [-3600.0])
    step = {
        "an hour back": lambda: next(hour, 0.1),
        "backwards": lambda: -draw.random(),
        "to and fro": lambda: draw.uniform(-1e6, 1e6),
        "standing still": lambda: 0,
    }

    def now():
        at[0] += step[how]()
        return at[0]

    with monkeypatch.context() as patch:
        for name in ("time", "monotonic", "perf_counter"):
            patch.setattr(time, name, now)
        runner.run(CONFIG, tmp_path / "run", progress=True, until=2)
        runner.resume(tmp_path / "run", progress=True)
    assert contents(tmp_path / "run") == undisturbed
    assert Run(tmp_path / "run").verify()
    for line in (tmp_path / "run/timing.jsonl").read_text().splitlines():
        assert all(value >= 0 for value in json.loads(line).values())


def test_a_fork_of_a_process_whose_threads_have_computed():
    """OpenMP's threads are not in a fork, and nobody tells the one who waits for them."""
    large = torch.ones(1 << 20)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = float(large.exp().sum())
    if not (child := os.fork()):
        signal.alarm(20)
        os._exit(not math.isclose(large.exp().sum(), expected, rel_tol=1e-6))
    torch.set_num_threads(before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def at_round(which, act):
    """Do something as a round begins."""
    one_round = Engine.step

    def acting(self):
        if self.done == which:
            act()
        one_round(self)

    return acting


def test_too_few_open_files(fails, monkeypatch):
    """With ``ulimit -n`` no more file may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    handles = []

    def lower():
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard),
        )
        with contextlib.suppress(OSError):
            while True:
                handles.append(os.dup(0))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", at_round(1, lower))
            message = fails("run", *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for handle in handles:
            os.close(handle)
    assert "files: 'run" in message
    assert "ulimit -n" in message
    assert "fedlayers resume run" in message
    assert Run("run").rounds == [1]
    cli.main(["resume", "run"])
    assert Run("run").verify()[-1] == "3 of 3 rounds"


WAYS = {
    ("fsync", errno.EIO): "network",
    ("fsync", errno.ESTALE): "network",
    ("replace", errno.EXDEV): "file system",
    ("write", errno.EDQUOT): "room",
    ("write", errno.ENOSPC): "room",
    ("open", errno.EROFS): "writable",
    ("open", errno.EMFILE): "ulimit -n",
}


@pytest.mark.parametrize(
    ("call", "code"),
    [
        pytest.param(
            *way,
            marks=[pytest.mark.slow] * (k % 3 > 0),
            id=f"{way[0]}-{errno.errorcode[way[1]]}",
        )
        for k, way in enumerate(WAYS)
    ],
)
def test_an_error_of_the_disk_names_the_path_and_what_to_do(
    fails, monkeypatch, call, code
):
    """In the round after the first checkpoint, for each call that can fail first."""
    with monkeypatch.context() as patch:
        patch.setattr(
            Engine,
            "step",
            at_round(1, lambda: patch.setattr(storage, "os", FailingOS(call, 1, code))),
        )
        message = fails("run", *SMALL)
    assert f"{os.strerror(code)}: 'run" in message
    assert WAYS[call, code] in message
    assert "fedlayers resume run" in message
    cli.main(["resume", "run"])
    assert Run("run").verify()[-1] == "3 of 3 rounds"


def test_a_system_that_does_not_tell_its_memory_refuses_no_file(monkeypatch):
    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(storage.os, "sysconf", unknown)
    storage.check_size("data.csv", 1 << 60)
