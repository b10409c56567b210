"""Time the commands that train nothing: CPU time and peak memory against an empty program."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.pairs import PAIRS, Measured, alternate, judged
from fl_core.config import RunConfig
from fl_core.run import runner

RUN = "RUN"  # stands for the path of a finished run
ASKED = {
    "fedlayers --help": ("-m", "fedlayers", "--help"),
    "import fedlayers": ("-c", "import fedlayers"),
    "fedlayers verify": ("-m", "fedlayers", "verify", RUN),
    "an unknown algorithm": ("-m", "fedlayers", "run", "--algorithm", "fedavgg"),
    "fedlayers run --help": ("-m", "fedlayers", "run", "--help"),
    "fedlayers list algorithms": ("-m", "fedlayers", "list", "algorithms"),
    "fedlayers plot": ("-m", "fedlayers", "plot", RUN),
}
TARGETED = [*ASKED][:4]
AT_MOST = 10
PEAK = 80.0  # MB
USED = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


def usage(*words: str) -> tuple[float, float]:
    """Return CPU seconds and peak MB of Python with these arguments.

    A small process starts it, because a child's peak begins at its parent's.
    """
    process = subprocess.run(
        [sys.executable, "-c", USED, *words], check=True, capture_output=True, text=True
    )
    seconds, peak = map(float, process.stdout.split())
    return seconds, peak


def startup(pairs: int = PAIRS) -> list[Measured]:
    """Measure CPU time and peak memory of help, lists, a small check and mistakes, relative to an empty program."""
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        runner.run(RunConfig(rounds=3), run, progress=False)
        for title, arguments in ASKED.items():
            command = [str(run) if word == RUN else word for word in arguments]
            rows += _measured(title, command, pairs)
    return rows


def _measured(title: str, command: list[str], pairs: int) -> list[Measured]:
    peaks: list[float] = []

    def command_seconds() -> float:
        seconds, peak = usage(*command)
        peaks.append(peak)
        return seconds

    frame = alternate(
        {"command": command_seconds, "empty": lambda: usage("-c", "pass")[0]}, pairs
    )
    has_target = title in TARGETED
    return [
        judged(
            "startup",
            title,
            "python -c pass",
            list(frame["command"] / frame["empty"]),
            at_most=AT_MOST if has_target else None,
            seconds=float(frame["command"].median()),
            baseline_seconds=float(frame["empty"].median()),
            unit="CPU time",
        ),
        judged(
            "startup",
            title,
            "1 MB",
            peaks[1:],
            at_most=PEAK if has_target else None,
            unit="MB at the peak",
        ),
    ]
