"""A command with many runs, killed at any moment, resumes when it is given again and ends with the same files.

One child process imports everything once and forks a grandchild for each time that a command is given.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fl_core.records.store import Run
from tests.faults.injected import ROOT, contents, die

TRAINED = (
    "--dataset",
    "heart",
    "--rounds",
    "2",
    "--epochs",
    "1",
    "--checkpoint-every",
    "1",
    "--out",
    "out",
)
COMMANDS = {
    "compare": ("compare", "--algorithms", "local", "fedavg", "--seeds", "2", *TRAINED),
    "study": ("study", "--arms", "playerfl", "--seeds", "2", *TRAINED),
    "choose": (
        "choose",
        "--arms",
        "half",
        "--seeds",
        "2",
        "--eval-every",
        "1",
        *TRAINED,
    ),
    "tune": (
        "tune",
        "--algorithms",
        "fedavg",
        "fedprox",
        "--search",
        "lr=0.001,0.1",
        "mu=0.1",
        *TRAINED,
    ),
    "diagnose": [
        "diagnose",
        "../first",
        "--metrics",
        "grad_norm",
        "cka",
        "--out",
        "out",
    ],
    "map": ["map", "../first", "--out", "out"],
    "predict": [
        "predict",
        "../model.safetensors",
        "--data",
        "../new.csv",
        "--out",
        "out/new.csv",
    ],
}
SHARES = (0.05, 0.4, 0.7, 0.98)
"""When a command is killed: after which share of the files that it writes, and of its time."""
TIMED = ("cost",)
"""What a choice says of the time that it took."""


def given(folder, command, die_at=0, die_after=0.0):
    """Give a command in a forked process: its status, how many files it has put in place, and its seconds.

    Args:
        die_at: the process kills itself before it puts this file in place, counted from 1.
        die_after: or after so many seconds.
    """
    began = time.perf_counter()
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return (
            status,
            len((folder / "placed").read_bytes()),
            time.perf_counter() - began,
        )
    try:
        os.chdir(folder)
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        counter, replace, placed = (
            itertools.count(1),
            os.replace,
            os.open("placed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        )

        def counting(*names, **where):
            if next(counter) == die_at:
                die()
            replace(*names, **where)
            os.write(placed, b".")

        os.replace = counting
        if die_after:
            threading.Timer(die_after, die).start()
        from fedlayers.cli.app import main

        main(COMMANDS[command])
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def nursery(where, command, shares):
    """Give a command undisturbed, and for each share killed and given again; print what happened, a JSON line each."""
    base = Path(where)
    import torch

    from fedlayers.cli.app import main
    from fl_core.data import named

    torch.set_num_threads(1)
    os.fsync = lambda handle: (
        None
    )  # a kill, unlike a power cut, loses nothing that was written
    os.chdir(base)
    main(
        ("run", *TRAINED[:-1], str(base / "first"))
    )  # what is loaded on first use is loaded before the forks
    main(("export", str(base / "first"), "--out", str(base / "model.safetensors")))
    table = Path(named.__path__[0], "heart.csv").read_text().splitlines(True)[:40]
    (base / "new.csv").write_text("".join(table))
    status, files, seconds = given(base / "undisturbed", command)
    print("\n" + json.dumps({"name": "undisturbed", "ended": status}), flush=True)
    for index, share in enumerate(shares):
        moment = (
            {"die_after": max(share * seconds, 0.01)}
            if index % 2
            else {"die_at": max(1, round(share * files))}
        )
        killed = given(base / f"{share}", command, **moment)[0]
        print(
            json.dumps(
                {
                    "name": f"{share}",
                    "killed": killed,
                    "timed": bool(index % 2),
                    "ended": given(base / f"{share}", command)[0],
                }
            ),
            flush=True,
        )


def comparable(path):
    files = contents(path)
    for name in files:
        if name.endswith("choice.json"):
            entries = {
                key: value
                for key, value in json.loads(files[name]).items()
                if key not in TIMED
            }
            files[name] = json.dumps(entries).encode()
        if name == "report.html":
            files[name] = re.sub(
                rb"(?<=sent and received, )(&lt; )?[0-9.]+ (s|min|h)",
                b"some time",
                files[name],
            )
    return files


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_command_goes_on(tmp_path, command):
    """It is killed after some files, or after some time, and then given again."""
    script = f"import json, sys; from {__name__} import nursery; nursery(*json.load(sys.stdin))"
    child = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([str(tmp_path), command, SHARES]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=900,
    )
    assert child.returncode == 0, child.stderr
    lines = [
        json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")
    ]
    happened = {line["name"]: line for line in lines}
    assert happened.pop("undisturbed")["ended"] == 0, (
        tmp_path / "undisturbed/errors"
    ).read_text()
    undisturbed = comparable(tmp_path / "undisturbed/out")
    assert len(happened) == len(SHARES)
    for name, line in happened.items():
        errors = (tmp_path / name / "errors").read_text()
        assert line["ended"] == 0, errors
        assert line["killed"] in (
            (-signal.SIGKILL, 0) if line["timed"] else (-signal.SIGKILL,)
        ), errors
        ours = comparable(tmp_path / name / "out")
        assert ours.keys() == undisturbed.keys()
        assert [path for path in ours if ours[path] != undisturbed[path]] == []
        for config in (tmp_path / name / "out").rglob("config.json"):
            assert Run(config.parent).verify()
