"""Full disks, few open files, two writers, interrupts in a notebook, many clients and many rounds, for real."""

import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from fedlayers.cli import app as cli
from fl_core.config import RunConfig
from fl_core.records.store import Run
from fl_core.run import runner
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
    handles = []
    with limit(resource.RLIMIT_NOFILE, most):
        try:
            with contextlib.suppress(OSError):
                while True:
                    handles.append(os.dup(0))
            yield
        finally:
            for handle in handles:
                os.close(handle)


@pytest.mark.parametrize("most", [100, 20_000])
def test_a_full_disk_in_a_run(fails, most):
    """Before the first checkpoint, the same command begins again. Later, the run resumes."""
    with full(most):
        message = fails("run", *SMALL)
    assert "File too large: 'run" in message
    assert "make room there" in message
    again = ("run", *SMALL) if most == 100 else ("resume", "run")
    cli.main(again)
    assert Run("run").verify()[-1] == "3 of 3 rounds"


def test_limits_in_a_decision_and_its_export(fails):
    """The same command continues. What holds a lock is named, and nothing of it changes."""
    for most in (2_000, 40_000):
        with full(most):
            message = fails(*CHOOSE)
        assert "'chosen/arms/" in message
        assert "the same command continues" in message
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


@pytest.mark.slow
def test_five_thousand_rounds_resume_to_the_same_bits(tmp_path):
    keys = {
        "dataset": "heart",
        "algorithm": "local_head",
        "epochs": 1,
        "batch_size": 512,
    }
    config = RunConfig(**keys, rounds=5000, model="linear", checkpoint_every=4900)
    whole = runner.run(config, tmp_path / "whole/run", progress=False)
    runner.run(config, tmp_path / "cut/run", progress=False, until=4900)
    cut = runner.resume(tmp_path / "cut/run", progress=False)
    assert whole.done == cut.done == 5000
    assert contents(tmp_path / "whole/run") == contents(tmp_path / "cut/run")


MANY = """
import sys, time, warnings
warnings.simplefilter("ignore")
import numpy as np
import fedlayers as fl
from tests.faults.limited import growth
count, draw = int(sys.argv[1]), np.random.default_rng(0)
fl.run(dataset="heart", rounds=1, progress=False)  # what is made once
x = draw.normal(size=(count, 12, 8)).astype(np.float32)
y = (x[:, :, 0] > 0).astype(np.int64)
began = time.process_time()
clients = {f"client {k:06d}": (x[k], y[k]) for k in range(count)}
found = fl.run(data=fl.from_clients(clients), model="mlp", rounds=1, eval_every=1, participation=0.01, progress=False)
seconds = time.process_time() - began
assert len(found.to_frame()) > 20 * count
print(seconds, growth()[1] * 2**20)
"""


def many(count):
    """Return the seconds of the processor and the peak of memory of a round with so many clients of 12 rows.

    ``ru_maxrss`` would begin at the peak of the process that starts the child.
    """
    command = [sys.executable, "-c", MANY, str(count)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=env, check=True
    )
    return map(float, done.stdout.split()[-2:])


@pytest.mark.slow
def test_100_000_clients_take_time_and_memory_in_proportion():
    """Ten times as many clients take ten times as long, and less than 3 GB. It takes seven minutes."""
    (few, _), (most, peak) = many(10_000), many(100_000)
    exponent = math.log10(most / few)
    print(f"exponent {exponent:.3f}, {peak / 1e9:.2f} GB")
    assert exponent < 1.1  # 1.03 on a busy machine of two cores
    assert peak < 3e9
