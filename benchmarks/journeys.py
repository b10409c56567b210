"""``python -m benchmarks.journeys``: the files of this project that a FedAvg run calls into."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fedlayers as fl

ROOT = Path(__file__).parents[1]
PACKAGES = ("fl_core", "diagnostics", "fedlayers")


def files(work: Callable[[], Any]) -> dict[str, int]:
    """Return the project's files with functions that a call runs, and their number of functions.

    What a module does when it is imported does not count, so that the work runs twice.
    """
    work()
    called_files: dict[str, set[str]] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path.name != "__init__.py":
            file_name = str(path.relative_to(ROOT))
            if file_name.split("/")[0] in PACKAGES:
                called_files.setdefault(file_name, set()).add(frame.f_code.co_qualname)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {
        file_name: len(functions)
        for file_name, functions in sorted(called_files.items())
    }


def train() -> None:
    """Train FedAvg for two rounds, into a run directory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        fl.run(dataset="heart", algorithm="fedavg", rounds=2, out=out, progress=False)


if __name__ == "__main__":
    function_counts = files(train)
    for name, count in function_counts.items():
        print(f"{count:4} {name}")
    print(f"{len(function_counts)} files")
