"""Items whose runs take long: a file of rows for each run and seed, made one after another and never twice.

What is finished stays, so such an item can be made in parts: interrupted, within a budget, or by several processes
that were given different runs. A run whose training diverged is finished too: its one row says why it has no value.
Drawing takes what is there and says what is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from fedlayers.diagnostics import measure
from figures import items
from fl_core import __version__, rows, runner
from fl_core.config import RunConfig
from fl_core.engine import Engine
from fl_core.errors import NonFiniteError, UsageError, check_known, listing

FAILED = "finished"
"""The metric of the row, without a value, that stands for a run whose training diverged."""


def as_it_is(config: RunConfig, run: str, folder: Path) -> RunConfig:
    """A run that needs nothing but its configuration."""
    return config


@dataclass(frozen=True)
class Pieces(items.Item):
    """A figure or table whose rows are kept run by run, in a folder of its name.

    ``measure`` is given the folder too: (task, run, folder) -> rows.

    Attributes:
        once: runs that have the seed 0 only.
        more: runs that have more seeds than ``seeds``, and how many.
        begin: (configuration with its seed and data root, run, folder) -> the configuration that runs; called before
            a run, to provide what it starts from.
    """

    once: frozenset[str] = frozenset()
    more: Mapping[str, int] = field(default_factory=dict)
    begin: Callable[[RunConfig, str, Path], RunConfig] = as_it_is

    def wanted(self, seeds: int | None = None) -> list[tuple[str, int]]:
        """Every (run, seed), the first seed of all runs first."""
        count = self.seeds if seeds is None else seeds
        counts = {run: 1 if run in self.once else count for run in self.runs}
        if seeds is None:
            counts |= {run: max(count, more) for run, more in self.more.items()}
        most = max(counts.values(), default=0)
        return [(run, seed) for seed in range(most) for run in self.runs if seed < counts[run]]

    @property
    def state(self) -> str:
        """``ready`` where all rows are stored, else how many runs are."""
        have = sum(piece(self.path(), *each).is_file() for each in self.wanted())
        every = len(self.wanted())
        return "no rows" if not have else "ready" if have == every else f"{have} of {every} runs"

    def path(self, folder: Path | None = None) -> Path:
        return (items.ROWS if folder is None else folder) / self.name

    def read(self, path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
        """All that is there, with a header like any item's.

        It also has ``had``, the seeds of each run that came to its end, ``failed``, the reasons of those that did not,
        and ``missing``.
        """
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise UsageError(f"{self.name} has no rows in {path}; --train makes them ({self.budget})")
        frames: dict[tuple[str, int], pd.DataFrame] = {}
        runs: dict[str, dict[str, Any]] = {}
        seconds = 0.0
        for each in found:
            header, frame = rows.read(each)
            if header.get("item") != self.name:
                raise UsageError(f"{each} holds rows of {header.get('item')!r}, not of {self.name!r}")
            run, seed = check_known("run", header["run"], self.runs), int(header["seed"])
            described = runs.setdefault(run, header["about"])
            described["data"] |= header["about"]["data"]
            seconds += header["seconds"]
            frames[run, seed] = frame
        broken = {key: frame[frame["metric"] == FAILED] for key, frame in frames.items()}
        failed = {f"{run} {seed}": own["status"].iloc[0] for (run, seed), own in broken.items() if len(own)}
        order = sorted(frames, key=lambda key: (list(self.runs).index(key[0]), key[1]))
        had = {
            run: [seed for name, seed in order if name == run and f"{name} {seed}" not in failed] for run in self.runs
        }
        sound = [frames[key] for key in order if not len(broken[key])]
        if not sound:
            raise UsageError(f"{self.name}: no run in {path} came to its end; the first: {next(iter(failed.values()))}")
        header = {
            "item": self.name,
            "version": __version__,
            "command": self.command,
            "seeds": max(len(seeds) for seeds in had.values()),
            "seconds": round(seconds, 1),
            "runs": runs,
            "had": had,
            "failed": failed,
            "missing": [f"{run} {seed}" for run, seed in self.wanted() if (run, seed) not in frames],
        }
        return header, pd.concat(sound, ignore_index=True)


def piece(folder: Path, run: str, seed: int) -> Path:
    """The file of one run."""
    return folder / f"{run}-{seed}.jsonl"


def absent(header: Mapping[str, Any], runs: Collection[str] | None = None) -> str:
    """A sentence on the runs that are missing or diverged, of all or of the named ones; empty where none is."""
    gone = [*header["missing"], *(f"{name} (diverged)" for name in header["failed"])]
    gone = [each for each in gone if runs is None or each.partition(" ")[0] in runs]
    return f" Missing: {', '.join(gone)}." if gone else ""


def train(
    item: Pieces,
    folder: Path,
    *,
    only: Sequence[str] = (),
    seeds: int | None = None,
    budget: float | None = None,
    data_root: str | None = None,
    command: str = "",
    progress: bool = True,
) -> float:
    """Make the runs that are not there yet, and store each as soon as it is finished; returns the seconds taken.

    Args:
        only: names of the runs to make; default all.
        seeds: number of seeds in place of the item's own.
        budget: minutes after which no run is begun. One that took longer with another seed than is left is not
            begun either.

    Raises:
        UsageError: an unknown run, no seed at all, data that are not there, or a stored run of another configuration;
            RunError: a run failed.
    """
    for name in only:
        check_known(f"run of {item.name}", name, item.runs)
    if seeds is not None and seeds < 1:
        raise UsageError(f"{item.name} over {seeds} seeds: at least 1 is needed")
    if budget is not None and not budget > 0:
        raise UsageError(f"a budget of {budget:g} minutes leaves no time for a run")
    if not folder.parent.is_dir():
        raise UsageError(f"there is no folder {folder.parent}")
    took: dict[str, float] = {}
    wanted = [(run, seed) for run, seed in item.wanted(seeds) if not only or run in only]
    for run, seed in item.wanted(seeds):
        if piece(folder, run, seed).is_file():
            took[run] = _check_same(item, folder, run, seed)
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    left = [each for each in wanted if not piece(folder, *each).is_file()]
    with tqdm(total=len(left), desc=item.name, unit="run", disable=not progress) as bar:
        for run, seed in left:
            spent = time.perf_counter() - began
            if budget is not None and (spent >= 60 * budget or spent + took.get(run, 0.0) > 60 * budget):
                continue
            bar.set_postfix_str(f"{run}, seed {seed}")
            if not piece(folder, run, seed).is_file():  # another process may have made it meanwhile
                took[run] = _make(item, folder, run, seed, data_root, command)
            bar.update()
    return time.perf_counter() - began


def _make(item: Pieces, folder: Path, run: str, seed: int, data_root: str | None, command: str) -> float:
    began = time.perf_counter()
    task = runner.assemble(item.begin(replace(item.runs[run], seed=seed, data_root=data_root), run, folder))
    try:
        frame = item.measure(task, run, folder).assign(run=run)
    except NonFiniteError as error:
        told: dict[str, Any] = {"status": str(error), "algorithm": task.config.algorithm, "seed": seed, "run": run}
        frame = rows.frame([rows.row(FAILED, None, **told)])
    seconds = round(time.perf_counter() - began, 1)
    about = items.about(task)
    about["data"][str(seed)] = task.data.digest
    header = {
        "item": item.name,
        "version": __version__,
        "command": command,
        "run": run,
        "seed": seed,
        "seconds": seconds,
        "asked": _asked(item, run),
        "about": about,
    }
    rows.write(piece(folder, run, seed), header, items.records(frame))
    return seconds


def _asked(item: Pieces, run: str) -> dict[str, Any]:
    return {name: value for name, value in item.runs[run].to_json().items() if name not in items.ELSEWHERE}


def _check_same(item: Pieces, folder: Path, run: str, seed: int) -> float:
    """How long a stored run took; refuses one that was made with another configuration."""
    path = piece(folder, run, seed)
    header, now = rows.read_header(path), _asked(item, run)
    if header.get("item") != item.name:
        raise UsageError(f"{path} holds rows of {header.get('item')!r}, not of {item.name!r}")
    differ = [
        name for name, value in header["asked"].items() if name in now and value != json.loads(json.dumps(now[name]))
    ]
    if differ:
        raise UsageError(f"{path} was made with another {listing(differ)}: remove it, or choose another folder")
    return float(header["seconds"])


def ran(task: runner.Task) -> tuple[Engine, pd.DataFrame]:
    """The finished run of a task, and its rows."""
    engine = runner.run(task.config, loaded=task.data, instruments=measure.instruments(), progress=False)
    return engine, runner.frame(engine)
