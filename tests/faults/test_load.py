"""Full disks, few open files, two writers, and interrupts in a notebook, for real."""

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from fedlayers.cli import app as cli
from fl_core.records.store import Run
from fl_core.storage import Folder
from tests.faults.conftest import SMALL
from tests.faults.injected import contents

CHOOSE = (
    *("choose", "--dataset", "heart", "--rounds", "2", "--epochs", "1"),
    *("--seeds", "1", "--no-baselines", "--out", "chosen"),
)
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def limit(what, most):
    """Lower a limit of this process for a while. Python stores no compiled module then, which it would cut off."""
    soft, hard = resource.getrlimit(what)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))
        sys.dont_write_bytecode = writes


def full(most):
    """No file can have more bytes than this."""
    return limit(resource.RLIMIT_FSIZE, most)


@contextlib.contextmanager
def few_files():
    """No more file can be opened."""
    most = max(map(int, os.listdir("/proc/self/fd"))) + 2
    held = []
    with limit(resource.RLIMIT_NOFILE, most):
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            yield
        finally:
            for handle in held:
                os.close(handle)


@pytest.mark.parametrize("most", [100, 20_000])
def test_a_full_disk_in_a_run(fails, most):
    """Before the first checkpoint, the same command begins again. Later, the run resumes."""
    with full(most):
        said = fails("run", *SMALL)
    assert "File too large: 'run" in said
    assert "make room there" in said
    again = ("run", *SMALL) if most == 100 else ("resume", "run")
    cli.main(again)
    assert Run("run").verify()[-1] == "3 of 3 rounds"


def test_limits_in_a_decision_and_its_export(fails):
    """The same command continues. What holds a lock is named, and nothing of it changes."""
    for most in (2_000, 40_000):
        with full(most):
            said = fails(*CHOOSE)
        assert "'chosen/arms/" in said
        assert "the same command continues" in said
    with few_files():
        assert "ulimit -n" in fails(*CHOOSE)
    with Folder(Path("chosen/arms/fedavg-0")).locked():
        before = contents(Path("chosen/arms"))
        assert f"pid {os.getpid()}" in fails(*CHOOSE)
        assert contents(Path("chosen/arms")) == before
    cli.main(CHOOSE)
    assert json.loads(Path("chosen/choice.json").read_text())["way"]
    for most in (50, 6_000):
        with full(most):
            assert "'models" in fails("export", "chosen", "--out", "models")
        assert not list(Path().glob("models/*.json"))
    with few_files():
        assert "ulimit -n" in fails("export", "chosen", "--out", "models")
    cli.main(("export", "chosen", "--out", "models"))
    assert len(list(Path().glob("models/*.json"))) == 4


CELL = """
import fedlayers as fl
print("begun", flush=True)
fl.run(dataset="heart", rounds=2000, epochs=1, checkpoint_every=1, out="run", progress=False)
"""


@pytest.mark.slow
def test_two_interrupts_in_a_notebook(tmp_path):
    """The kernel lives, its lock is released, and the run continues from its last round."""
    manager, client = start_new_kernel(
        cwd=str(tmp_path), env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        number = client.execute(CELL)
        end = time.monotonic() + 120
        while not (tmp_path / "run/checkpoints/000002.json").exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        manager.interrupt_kernel()
        manager.interrupt_kernel()
        reply = {"parent_header": {}}
        while reply["parent_header"].get("msg_id") != number:
            reply = client.get_shell_msg(timeout=120)
        assert reply["content"]["ename"] == "KeyboardInterrupt", reply
        done = max(Run(tmp_path / "run").rounds)
        assert done < 2000
        cell = f"found = fl.resume('run', until={done + 2}, progress=False)"
        reply = client.execute_interactive(cell, timeout=240)["content"]
        assert reply["status"] == "ok", reply
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert max(Run(tmp_path / "run").rounds) == done + 2
    assert Run(tmp_path / "run").verify()
