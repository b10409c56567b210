"""Training of an item's runs, one after another, each stored for good as soon as it ends.

So a study can be interrupted, made within a budget, or made by several processes. :func:`pack` puts its runs into the
one file that the repository has. A run whose training diverged is finished too: its one row says why.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.backends.base import (
    Backend,
    FileBatch,
    Result,
    Sent,
    batches,
    carry_out,
    remote_errors,
    write_files,
)
from fedlayers.backends.names import open_backend
from figures import packing
from figures.items import FAILED, Item, check_owner, headers, packed_file, rows_file
from figures.recipe import labels
from fl_core import __version__, rows, runner
from fl_core.errors import NonFiniteError, UsageError, check_known, listing
from fl_core.storage.files import Folder

ELSEWHERE = ("data_root", "device", "workers", "download")
"""Keys that say where a run was made, which does not change its rows."""
FILES = re.compile(r"\w[\w.-]*")
"""The names of files in an item's folder."""


@dataclass(frozen=True)
class Making:
    """One run and seed of an item as a job of a backend: in this process, in others or on a cluster.

    Attributes:
        path: the item's folder, where runs find what they start from and leave it for others.
        away: whether it is on another machine than the one that asked for it.
    """

    item: Item
    run: str
    seed: int
    path: Path
    data_root: str | None = None
    away: bool = False

    @property
    def name(self) -> str:
        return f"{self.run}, seed {self.seed}"

    @property
    def gpus(self) -> int:
        return int(self.item.runs[self.run].execution.device != "cpu")

    def carry_out(self) -> tuple[pd.DataFrame, dict[str, Any], float]:
        """Return the rows of the run, its description, and its seconds. A diverged run has a row with the reason."""
        with remote_errors(self.away):
            began, item = time.perf_counter(), self.item
            config = item.runs[self.run].with_keys(
                seed=self.seed, data_root=self.data_root
            )
            task = runner.assemble(item.prepare(config, self.run, self.path))
            try:
                frame = item.measure(task, self.run, self.path).assign(run=self.run)
            except NonFiniteError as error:
                row = rows.row(
                    FAILED, None, status=str(error), run=self.run, **labels(task)
                )
                frame = rows.frame([row])
            return frame, about(task), round(time.perf_counter() - began, 1)

    def sent_to(self, path: Path | None) -> Making:
        return replace(self, away=True, path=path or self.path)

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()  # runs of an item share their folder

    def outgoing(self, sent: Sent) -> Iterator[FileBatch]:
        folder = Folder(self.path)
        names = [
            name
            for name in folder.names()
            if not name.endswith((".jsonl", ".part")) and (self.path / name).is_file()
        ]
        return batches(folder, names, sent)

    def incoming(self, sent: Sent, over: bool) -> Iterator[FileBatch]:
        return self.outgoing(sent) if over else iter(())

    def accept(self, parcel: FileBatch) -> None:
        write_files(self.path, parcel, FILES)


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
    backend: Backend | str = "",
    device: str = "cpu",
    command: str = "",
    progress: bool = True,
) -> float:
    """Train the runs that are missing and store each at once; return the seconds taken.

    Args:
        only: names of the runs to make; default all.
        seeds: number of seeds in place of the item's own.
        budget: minutes after which no run is begun. One that took longer with another seed than is left is not
            begun either.
        backend: where they are trained (:mod:`fedlayers.backends.names`); default this process.
        device: where models are trained, as PyTorch names it.

    Raises:
        UsageError: an unknown run or device, no seed at all, data that are not there, or a stored run of another
            configuration; RunError: a run failed.
    """
    for name in only:
        check_known(f"run of {item.name}", name, item.runs)
    if seeds is not None and seeds < 1:
        raise UsageError(f"seeds of {item.name} must be at least 1; got {seeds}.")
    if budget is not None and not budget > 0:
        raise UsageError(
            f"--budget must be above 0 minutes; got {budget:g}. Choose more."
        )
    if not folder.parent.is_dir():
        raise UsageError(f"folder {folder.parent} must exist; got none. Make it first.")
    if device != "cpu":
        runner.check_device(device)
        moved = {
            name: each.with_keys(device=device) for name, each in item.runs.items()
        }
        item = replace(item, runs=moved)
    known, took = headers(folder), dict[str, float]()
    for run, seed in item.planned(seeds):
        if (run, seed) in known:
            took[run] = _check_same(item, folder, known[run, seed])
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    left = [
        (run, seed)
        for run, seed in item.planned(seeds)
        if (run, seed) not in known and (not only or run in only)
    ]

    def affordable() -> Iterator[Making]:
        for run, seed in left:
            spent = time.perf_counter() - began
            if budget is not None and (
                spent >= 60 * budget or spent + took.get(run, 0.0) > 60 * budget
            ):
                continue
            if not rows_file(folder, run, seed).is_file():  # by another process
                yield Making(item, run, seed, folder, data_root)

    def store(result: Result, _: int) -> None:
        if result.error is not None:
            raise result.error
        frame, described, seconds = result.value
        run, seed = result.work.run, result.work.seed
        took[run] = seconds
        header = {
            "item": item.name,
            "version": __version__,
            "command": command,
            "run": run,
            "seed": seed,
            "seconds": seconds,
            "asked": _asked(item, run),
            "about": described,
        }
        rows.write(rows_file(folder, run, seed), header, _records(frame))

    with open_backend(backend) as place:
        carry_out(
            affordable(),
            place,
            store,
            total=len(left),
            what=item.name,
            progress=progress,
        )
    return time.perf_counter() - began


def pack(item: Item, folder: Path) -> Path:
    """Write all stored runs of a folder to one file next to it, and remove their own files.

    Raises:
        UsageError: no run is stored, or one of another item; CorruptError: rows are damaged.
    """
    parts, files = item.parts(folder), sorted(folder.glob("*.jsonl"))
    if not parts:
        raise UsageError(
            f"{folder} must hold rows to pack; got none. Train first: {item.command}"
        )
    packing.write(packed_file(folder), parts.values())
    for file in files:
        file.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return packed_file(folder)


def _records(frame: pd.DataFrame) -> Iterator[rows.Row]:
    """Yield the rows of a frame as records to be written."""
    table = frame.astype(object).where(frame.notna(), None)
    for record in table.to_dict("records"):
        yield {str(name): value for name, value in record.items()}


def _asked(item: Item, run: str) -> dict[str, Any]:
    """Return a run's configuration as it was requested, without anything of one machine."""
    return {
        name: value
        for name, value in item.runs[run].to_json().items()
        if name not in ELSEWHERE
    }


_SPELLED_OUT = (("scale", "none", None), ("scale", None, "none"))
"""Keys with their stored value and today's that mean the same for named data: one is the other's default."""


def _check_same(item: Item, folder: Path, header: packing.Header) -> float:
    """Return the training time of a stored run; refuse one made with another configuration."""
    path = rows_file(folder, header["run"], header["seed"])
    path = path if path.is_file() else packed_file(folder)
    check_owner(item, path, header)
    now = json.loads(json.dumps(_asked(item, header["run"])))
    differ = [
        name
        for name, value in header["asked"].items()
        if name in now
        and value != now[name]
        and (name, value, now[name]) not in _SPELLED_OUT
    ]
    if differ:
        raise UsageError(
            f"{path}: {header['run']}, seed {header['seed']}, must be of this configuration; got another "
            f"{listing(differ)}. Remove it, or choose another folder."
        )
    return float(header["seconds"])
