"""A run directory has one writer, and a refused request leaves no files."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_core.errors import BusyError, RunError
from fl_core.records import writing
from fl_core.records.store import Run
from fl_core.run import runner
from tests.conftest import refuses
from tests.faults.conftest import CONFIG
from tests.faults.injected import BEGUN, contents

ROOT = Path(__file__).parents[2]


def run_until_told(out):
    """Run, and wait within the last round until a line comes in."""
    from fl_core.rounds.engine import Engine

    one_round = Engine.step

    def waiting(self):
        if self.done == 2:
            print("waiting", flush=True)
            sys.stdin.readline()
        one_round(self)

    Engine.step = waiting
    runner.run(CONFIG, out, progress=False)


@pytest.fixture
def other(tmp_path):
    """A process that is in the midst of a run."""
    script = f"from {__name__} import run_until_told; run_until_told({str(tmp_path / 'run')!r})"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdout.readline() == "waiting\n"
            yield process
        finally:
            process.kill()


def refused_as_busy(out, pid):
    before = contents(out)
    with pytest.raises(BusyError, match=f"pid {pid}"):
        runner.resume(out, progress=False)
    with refuses("Resume"):
        runner.run(CONFIG, out, progress=False)
    assert contents(out) == before


def test_a_second_writer_waits_for_no_one_and_can_go_on_after_a_kill(
    other, tmp_path, undisturbed
):
    out = tmp_path / "run"
    refused_as_busy(out, other.pid)
    assert Run(out).rounds == [1, 2]  # reading is free
    Run(out).verify()
    other.kill()
    assert other.wait() == -signal.SIGKILL
    runner.resume(out)
    assert contents(out) == undisturbed


def test_a_lock_file_without_a_holder_locks_nothing(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "lock").write_text(
        "1\n"
    )  # a number that a live process has: what counts is the lock, not the number
    runner.run(CONFIG, out)
    Run(out).verify()


def test_a_lock_is_released_by_a_run_that_fails(tmp_path, monkeypatch, undisturbed):
    from fl_core.rounds.engine import Engine

    def failing(self):
        raise RunError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", failing)
        with refuses("on fire", RunError):
            runner.run(CONFIG, tmp_path / "run")
    runner.resume(tmp_path / "run")
    assert contents(tmp_path / "run") == undisturbed


def test_of_two_that_begin_at_once_one_is_refused(tmp_path):
    out = tmp_path / "run"
    with writing.create(out, BEGUN, {}, {}) as first:
        shutil.move(
            out / "config.json", tmp_path / "kept"
        )  # as if the first had only just locked
        with (
            pytest.raises(BusyError, match=f"pid {os.getpid()}"),
            writing.create(out, BEGUN, {}, {}),
        ):
            pass
        shutil.move(tmp_path / "kept", out / "config.json")
        assert first.run.config["dataset"] == "heart"


@pytest.mark.parametrize(
    "name",
    ["thesis.tex", ".hidden", "checkpoints/000001.json", "rows.jsonl", "lock.old"],
)
def test_a_directory_that_is_not_empty_is_refused_unchanged(tmp_path, name):
    out = tmp_path / "run"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    with refuses("empty"):
        runner.run(CONFIG, out)
    assert contents(tmp_path) == {f"run/{name}": b"mine"}
    assert not (out / "lock").exists()
