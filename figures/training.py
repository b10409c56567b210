"""Training of an item's runs, one after another, each stored for good as soon as it ends.

So a study can be interrupted, made within a budget, or made by several processes. :func:`pack` puts its runs into the
one file that the repository has. A run whose training diverged is finished too: its one row says why.
"""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from figures import packing
from figures.items import FAILED, Item, check_owner, packed_file, rows_file
from figures.recipe import labels
from fl_core import __version__, rows
from fl_core.config import RunConfig
from fl_core.errors import NonFiniteError, UsageError, check_known, listing
from fl_core.progress import progress_bar
from fl_core.run import runner

ELSEWHERE = ("data_root", "device", "workers", "download")
"""Keys that say where a run was made, which does not change its rows."""


def about(task: runner.Task) -> dict[str, Any]:
    """Return a run's description: configuration, layers, and data by its seed; nothing of this machine."""
    config = {
        k: v for k, v in task.config.to_json().items() if k not in (*ELSEWHERE, "seed")
    }
    config["init"] = config["init"] and Path(config["init"]).name
    return {
        "config": config,
        "layers": [asdict(layer) for layer in task.layers],
        "data": {str(task.config.execution.seed): task.data.digest},
    }


def train(
    item: Item,
    folder: Path,
    *,
    only: Sequence[str] = (),
    seeds: int | None = None,
    budget: float | None = None,
    data_root: str | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> float:
    """Train the runs that are missing and store each at once; return the seconds taken.

    Args:
        only: names of the runs to make; default all.
        seeds: number of seeds in place of the item's own.
        budget: minutes after which no run is begun. One that took longer with another seed than is left is not
            begun either.
        device: where models are trained, as PyTorch names it.

    Raises:
        UsageError: an unknown run or device, no seed at all, data that are not there, or a stored run of another
            configuration; RunError: a run failed.
    """
    for run_name in only:
        check_known(f"run of {item.name}", run_name, item.runs)
    if seeds is not None and seeds < 1:
        raise UsageError(f"seeds of {item.name} must be at least 1; got {seeds}.")
    if budget is not None and not budget > 0:
        raise UsageError(
            f"--budget must be above 0 minutes; got {budget:g}. Choose more."
        )
    if device != "cpu":
        runner.check_device(device)
    headers, seconds_by_run, runs_left = item.headers(folder), dict[str, float](), []
    for run, seed in item.planned(seeds):
        if (run, seed) in headers:
            seconds_by_run[run] = _check_same(item, folder, headers[run, seed])
        elif not only or run in only:
            runs_left.append((run, seed))
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with progress_bar(len(runs_left), item.name, "run", shown=progress) as bar:
        for run, seed in runs_left:
            spent_seconds = time.perf_counter() - start
            excess = (
                spent_seconds + seconds_by_run.get(run, 0.0) - 60 * (budget or math.inf)
            )
            with _own(rows_file(folder, run, seed)) as file:
                if excess < 0 and file is not None:
                    config = item.runs[run].with_keys(
                        seed=seed, data_root=data_root, device=device
                    )
                    frame, description = _made(item, config, run, folder)
                    seconds_by_run[run] = round(
                        time.perf_counter() - start - spent_seconds, 1
                    )
                    header = {
                        "item": item.name,
                        "version": __version__,
                        "device": device,
                        "run": run,
                        "seed": seed,
                        "seconds": seconds_by_run[run],
                        "asked": _asked(item, run),
                        "about": description,
                    }
                    rows.write(file, header, rows.records(frame))
            bar.update()
    return time.perf_counter() - start


@contextmanager
def _own(file: Path) -> Iterator[Path | None]:
    """Yield a run's file, locked by this process; None if it is there, or another process makes it."""
    lock = file.with_suffix(".lock")
    with lock.open("w") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        try:
            yield None if file.is_file() else file
        finally:
            lock.unlink(missing_ok=True)


def _made(
    item: Item, config: RunConfig, run: str, folder: Path
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the rows of one run, and its description. A diverged run has a row with the reason."""
    task = runner.assemble(item.prepare(config, run, folder))
    assert item.measure is not None  # what has runs has it
    try:
        frame = item.measure(task, run, folder)
    except NonFiniteError as error:
        frame = rows.frame([rows.row(FAILED, None, status=str(error), **labels(task))])
    return frame.assign(run=run), about(task)


def pack(item: Item, folder: Path) -> Path:
    """Write all stored runs of a folder to one file next to it, and remove their own files.

    Raises:
        UsageError: no run is stored, or one of another item; CorruptError: rows are damaged.
    """
    run_parts, files = item.parts(folder), sorted(folder.glob("*.jsonl"))
    if not run_parts:
        raise UsageError(
            f"{folder} must hold rows to pack; got none. Train first: {item.command}"
        )
    packing.write(packed_file(folder), run_parts.values())
    for file in files:
        file.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return packed_file(folder)


def _asked(item: Item, run: str) -> dict[str, Any]:
    """Return a run's configuration as it was requested, without anything of one machine."""
    return {
        config_key: value
        for config_key, value in item.runs[run].to_json().items()
        if config_key not in ELSEWHERE
    }


_SPELLED_OUT = (("scale", "none", None), ("scale", None, "none"))
"""Keys with their stored value and today's that mean the same for named data: one is the other's default."""


def _check_same(item: Item, folder: Path, header: packing.Header) -> float:
    """Return the training time of a stored run; refuse one made with another configuration."""
    check_owner(item, folder, header)
    expected = json.loads(json.dumps(_asked(item, header["run"])))
    differing_keys = [
        config_key
        for config_key, value in header["asked"].items()
        if config_key in expected
        and value != expected[config_key]
        and (config_key, value, expected[config_key]) not in _SPELLED_OUT
    ]
    if differing_keys:
        raise UsageError(
            f"{folder}: {header['run']}, seed {header['seed']}, must be of this configuration; got another "
            f"{listing(differing_keys)}. Remove it, or choose another folder."
        )
    return float(header["seconds"])
