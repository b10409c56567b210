"""Profile the time of whole commands: ``python -m benchmarks.commands choose --dataset heart``."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import pandas as pd

from benchmarks.pairs import RESULTS

ROOT = Path(__file__).parents[1]
EVERY = 0.005
"""CPU seconds between two looks at what is running."""
PARTS = {
    "imports": ("importlib",),
    "drawing": (
        "matplotlib/",
        "seaborn/",
        "diagnostics/plots/",
        "studies/report.py",
    ),
    "training": (
        "fl_core/training/",
        "fl_core/batched.py",
        "torch/optim/",
    ),
    "evaluation": ("fl_core/training/evaluate.py", "fl_core/rows.py"),
    "measuring": ("diagnostics/",),
    "reading and writing runs": ("fl_core/records/",),
    "baselines": ("studies/baselines.py",),
    "data and models": ("fl_core/data/", "fl_core/models/", "fl_core/task.py"),
    "deciding and comparing": ("fedlayers/studies/", "fl_core/statistics.py"),
    "rounds: messages, averages, clients": ("fl_core/",),
    "command line": ("fedlayers/",),
}
"""Parts by where the code of the innermost known function lies: of two that know it, the longer place."""
REST = "other"


def part_of(
    frame: FrameType | None, parts: Mapping[str, tuple[str, ...]] = PARTS
) -> str:
    """The part of the innermost function on the stack whose file a part names."""
    while frame is not None:
        found = part_of_file(frame.f_code.co_filename, parts)
        if found is not None:
            return found
        frame = frame.f_back
    return REST


def part_of_file(path: str, parts: Mapping[str, tuple[str, ...]] = PARTS) -> str | None:
    """The part that names this file, by the longest of the places that do; None: none does."""
    path = path.removeprefix(f"{ROOT}/")  # the checkout's own folder may have any name
    hits = [
        (len(place), part)
        for part, places in parts.items()
        for place in places
        if place in path
    ]
    return max(hits)[1] if hits else None


def sampled(
    work: Callable[[], object], parts: Mapping[str, tuple[str, ...]] = PARTS
) -> tuple[Counter[str], float, float]:
    """Do some work; looks at it by part, CPU seconds and seconds by the clock."""
    seen: Counter[str] = Counter()

    def look(number: int, frame: FrameType | None) -> None:
        seen[part_of(frame, parts)] += 1

    signal.signal(signal.SIGPROF, look)
    cpu, clock = time.process_time(), time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)
    try:
        work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return seen, time.process_time() - cpu, time.perf_counter() - clock


def _called(words: list[str]) -> None:
    from fedlayers.cli.app import main

    main(words)


def command(words: list[str]) -> Path:
    """Run a command with a new folder for its results, and write results/commands-NAME.csv: share and seconds by part.

    It runs in this process, so that workers' time is not seen.
    """
    with tempfile.TemporaryDirectory() as folder:
        seen, cpu, clock = sampled(
            lambda: _called([*words, "--out", str(Path(folder) / "out")])
        )
    table = pd.DataFrame({"part": list(seen), "share": list(seen.values())})
    table["share"] /= table["share"].sum()
    table["seconds"] = (table["share"] * cpu).round(2)
    table["share"] = table["share"].round(3)
    path = RESULTS / f"commands-{words[0]}.csv"
    with path.open("w", encoding="utf-8") as file:
        file.write(
            f"# python -m benchmarks.commands {' '.join(words)}\n# {cpu:.3g} s of CPU time\n"
        )
        table.sort_values("share", ascending=False).to_csv(file, index=False)
    print(f"{cpu:.3g} s of CPU time, {clock:.3g} s by the clock")
    print(table.sort_values("share", ascending=False).to_string(index=False))
    return path


if __name__ == "__main__":
    print(f"wrote {command(sys.argv[1:])}")
