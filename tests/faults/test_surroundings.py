"""The machine misbehaves: clocks jump, limits are reached, disks fail, and memory is short."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing.synchronize
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedlayers.cli import main as cli
from fedlayers.studies.choose import choose
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.engine import Engine
from fl_core.errors import RunError
from fl_core.execution import shared_memory
from fl_core.execution.shared_memory import SharedBlock
from fl_core.records.store import Run
from fl_core.storage import files
from tests.faults.conftest import SMALL
from tests.faults.injected import FailingOS, contents

ROOT = Path(__file__).parents[2]
CONFIG = RunConfig(
    algorithm="fedper", rounds=3, epochs=1, checkpoint_every=1, eval_every=2
)
pytestmark = pytest.mark.filterwarnings("ignore:client 'switzerland' has")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The files of a run that nothing disturbed."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    runner.run(CONFIG, path, progress=False)
    return contents(path)


@pytest.mark.parametrize("how", ["backwards", "to and fro", "standing still"])
def test_clocks_that_jump(tmp_path, monkeypatch, undisturbed, how):
    """No result depends on the time of day, and no stored time is below 0."""
    at, draw = [1e9], random.Random(0)
    step = {
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
    held = []

    def lower():
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard),
        )
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", at_round(1, lower))
            said = fails("run", *SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for handle in held:
            os.close(handle)
    assert "files: 'run" in said
    assert "ulimit -n" in said
    assert "fedlayers resume run" in said
    assert Run("run").rounds == [1]
    cli.main(["resume", "run"])
    assert Run("run").verify()[-1] == "3 of 3 rounds"


WAYS = {
    ("fsync", errno.EIO): "network",
    ("fsync", errno.ESTALE): "network",
    ("replace", errno.EXDEV): "file system",
    ("write", errno.EDQUOT): "room",
    ("open", errno.EROFS): "writable",
    ("open", errno.EMFILE): "ulimit -n",
}


@pytest.mark.parametrize(
    ("call", "code"), WAYS, ids=lambda value: errno.errorcode.get(value, value)
)
def test_an_error_of_the_disk_names_the_path_and_what_to_do(
    fails, monkeypatch, call, code
):
    """In the round after the first checkpoint, for each call that can fail first."""
    with monkeypatch.context() as patch:
        patch.setattr(
            Engine,
            "step",
            at_round(1, lambda: patch.setattr(files, "os", FailingOS(call, 1, code))),
        )
        said = fails("run", *SMALL)
    assert f"{os.strerror(code)}: 'run" in said
    assert WAYS[call, code] in said
    assert "fedlayers resume run" in said
    cli.main(["resume", "run"])
    assert Run("run").verify()[-1] == "3 of 3 rounds"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A /dev/shm without room; afterwards another folder may be set that has none either."""
    full = {str(tmp_path / "shm")}
    (tmp_path / "shm").mkdir()
    reserve = os.posix_fallocate

    def reserving(handle, offset, n_bytes):
        if (
            os.path.dirname(
                os.readlink(f"/proc/self/fd/{handle}").removesuffix(" (deleted)")
            )
            in full
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(handle, offset, n_bytes)

    monkeypatch.setattr(os, "posix_fallocate", reserving)
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path / "shm")
    return full


def test_a_too_small_shared_memory_is_named_and_files_take_its_place(tmp_path, small):
    with pytest.warns(UserWarning, match=r"shm.*3.15 MB"):
        found = SharedBlock(3 << 20)
    found.tensor[-1] = 7
    assert (found.tensor.shape, found.tensor.dtype) == (
        torch.Size([3 << 20]),
        torch.uint8,
    )
    assert not list((tmp_path / "shm").iterdir())


def test_no_room_anywhere_says_what_to_do(tmp_path, small, monkeypatch):
    monkeypatch.setattr(shared_memory.tempfile, "tempdir", str(tmp_path))
    small.add(str(tmp_path))
    message = rf"{tmp_path}/shm.*{tmp_path}.*--workers 0"
    with (
        pytest.warns(UserWarning, match="no room"),
        pytest.raises(RunError, match=message),
    ):
        SharedBlock(10)


@pytest.mark.slow
def test_a_race_goes_on_where_no_lock_has_room(tmp_path, monkeypatch):
    """Its processes need none."""

    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", full)
    config = CONFIG.with_keys(rounds=2, eval_every=1, workers=2)
    told = []
    choice = choose(
        config, tmp_path, arms=("nothing", "all_but_last"), tell=told.append
    )
    assert len(choice.table) == 2
    assert len(told) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kibibytes", [4, 64])
def test_workers_where_shared_memory_is_too_small(tmp_path, kibibytes):
    """As in a container, with a small file system in place of /dev/shm."""
    mount = f"mount -t tmpfs -o size={kibibytes}k tmpfs /dev/shm"
    if (
        not shutil.which("unshare")
        or subprocess.run(
            ["unshare", "-Urm", "sh", "-c", mount], check=False
        ).returncode
    ):
        pytest.skip("no file system of its own may be mounted here")
    run = f"{sys.executable} -m fedlayers run --dataset heart --stack off {' '.join(SMALL[:-1])} {tmp_path}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = [
        subprocess.run(
            ["unshare", "-Urm", "sh", "-c", command],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for command in (f"{mount} && {run}/small --workers 2", f"{run}/none")
    ]
    assert [each.returncode for each in said] == [0, 0], said[0].stderr
    assert "/dev/shm has no room" in said[0].stderr
    ours, theirs = (
        [Run(tmp_path / name).manifest(k)["states"] for k in (1, 2, 3)]
        for name in ("small", "none")
    )
    assert ours == theirs
