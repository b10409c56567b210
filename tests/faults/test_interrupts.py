"""Ctrl-C at any moment gives one line and exit code 130. Errors of workers and disks say how to resume."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlayers.cli import app as cli
from fl_core import progress
from fl_core.records.store import Run
from tests.faults.conftest import SMALL
from tests.processes import alive

ROOT = Path(__file__).parents[2]
FOLDER = "it's"
BEGUN = """fedlayers: interrupted; fedlayers resume 'it'"'"'s' continues it"""
NOTHING = "fedlayers: interrupted; nothing was written"
RUN = (
    "run",
    "--rounds",
    "400",
    "--epochs",
    "1",
    "--checkpoint-every",
    "1",
    "--stack",
    "off",
    "--out",
    FOLDER,
)
START = """
from fedlayers.__main__ import main
if __name__ == "__main__":  # as the installed program does
    print("on", flush=True)
    main()
"""

FIRST = """
import os, sys

class Signals:
    def find_spec(self, name, *_):
        if name == "fl_core.registry":
            os.kill(os.getpid(), int(sys.argv[1]))

sys.meta_path.insert(0, Signals())
import fedlayers
"""


def heard():
    """Hear signals that a shell's background jobs, or ``nohup``, would ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def interrupted(folder, *arguments, until, by=signal.SIGINT):
    """(exit code, lines on stderr without progress) of a command, interrupted as a terminal does: all processes."""
    (folder / "start.py").write_text(START)
    process = subprocess.Popen(
        [sys.executable, "start.py", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heard,
    )
    try:
        assert process.stdout.readline() == "on\n"
        until(process)
        os.killpg(process.pid, by)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    shown = [
        line
        for line in err.splitlines()
        if line and " % (" not in line and " note: " not in line
    ]
    return process.returncode, shown


def after(seconds):
    """Once the process has computed for so long, which on a busy machine takes longer."""

    def computed(pid):
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def until(process):
        begun = computed(process.pid)
        while alive(process.pid) and computed(process.pid) < begun + seconds:
            time.sleep(0.005)

    return until


@pytest.mark.parametrize("seconds", [0.1, 0.4, 0.9])
def test_in_the_first_seconds(tmp_path, seconds):
    """While modules are imported and arguments parsed."""
    code, lines = interrupted(tmp_path, *RUN, until=after(seconds))
    assert code == 130
    assert lines in ([NOTHING], [BEGUN])
    assert lines == [NOTHING] or seconds > 0.5


def workers_of(process):
    children = (
        Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    )
    return [pid for pid in children if b"spawn_main" in command_of(pid)]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return b""


def while_workers_start(seconds):
    def until(process):
        while not workers_of(process):
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(seconds)

    return until


@pytest.mark.parametrize("seconds", [0.4, pytest.param(0.0, marks=pytest.mark.slow)])
def test_while_workers_start(tmp_path, seconds):
    code, lines = interrupted(
        tmp_path, *RUN, "--workers", "2", until=while_workers_start(seconds)
    )
    assert (code, lines) == (130, [BEGUN])
    assert Run(tmp_path / FOLDER).config["workers"] == 2


@pytest.mark.parametrize(
    "by",
    [
        signal.SIGTERM,
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in (signal.SIGINT, signal.SIGHUP)
        ),
    ],
)
def test_while_the_package_itself_is_imported(tmp_path, by):
    """From the first line of the program on."""
    (tmp_path / "fedlayers").write_text(FIRST)
    for program in (["fedlayers"], ["-c", FIRST]):
        process = subprocess.run(
            [sys.executable, *program, str(int(by))],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            preexec_fn=heard,
            check=False,
        )
        if program == ["fedlayers"]:
            assert (process.returncode, process.stderr.splitlines()) == (
                128 + by,
                [NOTHING],
            )
        else:
            assert NOTHING not in process.stderr, (
                "who imports the package keeps Python's ways"
            )
            assert process.returncode != 0


@pytest.mark.slow
def test_while_workers_train(tmp_path):
    def until(process):
        while not list((tmp_path / FOLDER).glob("checkpoints/*.json")):
            assert process.poll() is None
            time.sleep(0.01)

    code, lines = interrupted(tmp_path, *RUN, "--workers", "2", until=until)
    assert (code, lines) == (130, [BEGUN])
    assert Run(tmp_path / FOLDER).verify()


@pytest.mark.slow
def test_while_runs_are_trained_side_by_side(tmp_path):
    """None of their processes is left."""
    pids = []

    def until(process):
        while_workers_start(2.0)(process)
        pids.extend(workers_of(process))

    side_by_side = (
        "choose",
        "--rounds",
        "400",
        "--eval-every",
        "1",
        "--backend",
        "local:2",
        "--out",
        FOLDER,
    )
    code, lines = interrupted(tmp_path, *side_by_side, until=until)
    messages = [line for line in lines if "run/s" not in line and "s/run" not in line]
    assert (code, messages) == (
        130,
        ["fedlayers: interrupted; the same command continues"],
    )
    assert pids
    assert not [pid for pid in pids if alive(pid)]


def test_what_was_there_before_is_there_after():
    earlier = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell may start its jobs deaf to it
    try:
        before = signal.getsignal(signal.SIGINT)
        with progress.end_on_signals():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(ValueError, match="mine"), progress.end_on_signals():
            raise ValueError("mine")
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, earlier)


@pytest.mark.parametrize("fault", [None, OSError("no process")])
def test_an_interrupt_that_is_held_back_comes_at_the_end(fault):
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []

    def interrupt_and_fail():
        reached.extend(os.kill(os.getpid(), signal.SIGINT) or [1])
        if fault:
            raise fault

    try:
        with pytest.raises(KeyboardInterrupt) as caught, progress.delay_signals():
            interrupt_and_fail()
        assert caught.value.__context__ is fault
        assert reached
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, earlier)


@pytest.mark.slow
def test_a_dead_worker_says_how_to_go_on(fails, monkeypatch):
    """The run then ends with the same bits as without the loss."""
    from fl_core.rounds.engine import Engine

    one_round = Engine.step

    def killing(self):
        if self.done == 1:
            os.kill(self.clients.executor._children[0].process.pid, signal.SIGKILL)
        one_round(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", killing)
        message = fails("run", *SMALL, "--workers", "2", "--stack", "off")
    assert "code -9" in message
    assert "fedlayers resume run" in message
    cli.main(["resume", "run"])
    assert Run("run").verify()[-1] == "3 of 3 rounds"
    cli.main(["run", *SMALL[:-1], "other", "--workers", "2", "--stack", "off"])
    assert [Run("run").manifest(k)["states"] for k in (1, 2, 3)] == [
        Run("other").manifest(k)["states"] for k in (1, 2, 3)
    ]
