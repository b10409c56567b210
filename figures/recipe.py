"""Recipes of data, methods and seeds, whose runs are trained one after another and stored for good.

A recipe is an item (:mod:`figures.items`) whose runs take long. It keeps a file of rows for each run and seed. So it
can be interrupted, made within a budget, or made by several processes. :func:`pack` puts them into the one file that
the repository has. A run whose training diverged is finished too: its one row says why it has no value. Drawing takes
what is there and says what is missing. A figure's module adds what is its own: the configurations, what is measured on
a run, the picture.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from diagnostics import measure
from fedlayers.backends.base import Backend, Result, carry_out
from fedlayers.backends.names import open_backend
from figures import items, packing
from figures.making import Making
from fl_core import __version__, rows, runner, tree
from fl_core.config import RunConfig
from fl_core.engine import Engine
from fl_core.errors import NonFiniteError, UsageError, check_known, listing
from fl_core.recorder import Recorder
from fl_core.records import store

FAILED = "finished"
"""The metric of the row, without a value, that stands for a run whose training diverged."""
PLAIN_SGD: dict[str, Any] = {
    "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "keep_optimizer": False,
}  # fmt: skip
"""Local training as several papers have it."""


# --- configurations and rows that recipes share ----------------------------------------------------------------


def by_method(
    base: RunConfig, methods: Iterable[str], own: Mapping[str, Mapping[str, Any]]
) -> dict[str, RunConfig]:
    """A configuration for each algorithm, under its name.

    Args:
        own: what a method has beyond the base, by its name.
    """
    return {
        name: base.with_keys(algorithm=name, **own.get(name, {})) for name in methods
    }


def scored_at_end(config: RunConfig) -> RunConfig:
    """The configuration with evaluation and saving after the last round only."""
    return config.with_keys(
        eval_every=config.federation.rounds, checkpoint_every=config.federation.rounds
    )


def trained(task: runner.Task) -> tuple[Engine, pd.DataFrame]:
    """Train a task to its end; returns the run and its rows."""
    engine = runner.run(
        task.config, loaded=task.data, instruments=measure.instruments(), progress=False
    )
    return engine, engine.listener(Recorder).frame()


def paused(
    task: runner.Task, rounds: Sequence[int]
) -> Iterator[tuple[Engine, pd.DataFrame]]:
    """Train a task; yield the run and all its rows so far after each of these rounds.

    Args:
        rounds: in order; the last is the run's end.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        for k, done in enumerate(rounds):
            how: dict[str, Any] = {
                "instruments": measure.instruments(),
                "until": done,
                "progress": False,
            }
            if k == 0:
                engine = runner.run(task.config, out, loaded=task.data, **how)
            else:
                engine = runner.resume(out, data_root=task.config.data.data_root, **how)
            yield engine, store.Run(out).rows()[1]


def final_models(engine: Engine, model: nn.Module) -> dict[str, nn.Module]:
    """Each client's model as it is evaluated after the run's last round so far: the personal one, else the global one.

    Args:
        model: any of the run's structure; it is copied.
    """
    models = {}
    for client, name in enumerate(engine.names):
        trees = engine.models(client)
        models[name] = copy.deepcopy(model)
        tree.load(
            models[name], trees["personal"] if "personal" in trees else trees["global"]
        )
    return models


def labels(task: runner.Task) -> dict[str, Any]:
    """The columns that identify a run in its rows: algorithm and seed."""
    return {
        "algorithm": task.config.federation.algorithm,
        "seed": task.config.execution.seed,
    }


def tested(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of test accuracy, of every model and round."""
    return frame[(frame["metric"] == "accuracy") & (frame["split"] == "test")]


def mean_accuracy(frame: pd.DataFrame, named: Mapping[str, Any]) -> Iterator[rows.Row]:
    """Rows of the clients' mean test accuracy, of every round and model of a run."""
    for (done, model), part in tested(frame).groupby(["round", "model"]):
        n = int(part["n_samples"].sum())
        columns: dict[str, Any] = {
            "round": int(done),
            "model": model,
            "split": "test",
            "n_samples": n,
        }
        yield rows.row(
            "accuracy",
            part["value"].mean(),
            estimator="mean over clients",
            **columns,
            **named,
        )


def unchanged(config: RunConfig, run: str, folder: Path) -> RunConfig:
    """The same configuration, for runs that need no preparation."""
    return config


# --- the recipe ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe(items.Item):
    """A figure or table whose rows are stored run by run, in a folder of its name.

    ``measure`` is given the folder too: (task, run, folder) -> rows.

    Attributes:
        one_seed: runs that have the seed 0 only.
        more_seeds: runs that have more seeds than ``seeds``, and how many.
        newcomers: runs that can be made but that nothing waits for: of algorithms without rows so far.
        prepare: (configuration with its seed and data root, run, folder) -> the configuration that runs; called before
            a run, to provide what it starts from.
    """

    one_seed: frozenset[str] = frozenset()
    more_seeds: Mapping[str, int] = field(default_factory=dict)
    newcomers: frozenset[str] = frozenset()
    prepare: Callable[[RunConfig, str, Path], RunConfig] = unchanged

    def planned(self, seeds: int | None = None) -> list[tuple[str, int]]:
        """Every (run, seed), the first seed of all runs first."""
        count = self.seeds if seeds is None else seeds
        counts = {run: 1 if run in self.one_seed else count for run in self.runs}
        if seeds is None:
            counts |= {run: max(count, more) for run, more in self.more_seeds.items()}
        most = max(counts.values(), default=0)
        return [
            (run, seed)
            for seed in range(most)
            for run in self.runs
            if seed < counts[run]
        ]

    def awaited(self) -> list[tuple[str, int]]:
        """Every (run, seed) that the figure needs: all except newly added runs."""
        return [
            (run, seed) for run, seed in self.planned() if run not in self.newcomers
        ]

    def state_of(self, runs: Collection[str]) -> str:
        """``ready`` if all rows are stored, else the number of stored runs."""
        awaited = [
            (run, seed) for run, seed in self.awaited() if not runs or run in runs
        ]
        stored = len(headers(self.path()).keys() & awaited)
        return (
            "no rows"
            if not stored
            else "ready"
            if stored == len(awaited)
            else f"{stored} of {len(awaited)} runs"
        )

    @property
    def without_rows(self) -> str:
        """A line on newly added runs and the command that trains them; empty without any."""
        if not self.newcomers:
            return ""
        names = sorted(self.newcomers)
        return f"no rows yet: {listing(names)}; train with: {self.command} --only {' '.join(names)}"

    def make(self, run: str, seed: int, folder: Path, data_root: str | None) -> Any:
        """The rows of one run and seed, its description, and its seconds. A diverged run has a row with the reason."""
        began = time.perf_counter()
        task = runner.assemble(
            self.prepare(
                self.runs[run].with_keys(seed=seed, data_root=data_root), run, folder
            )
        )
        try:
            frame = self.measure(task, run, folder).assign(run=run)
        except NonFiniteError as error:
            frame = rows.frame(
                [rows.row(FAILED, None, status=str(error), run=run, **labels(task))]
            )
        return frame, items.described(task), round(time.perf_counter() - began, 1)

    def path(self, folder: Path | None = None) -> Path:
        """Return the folder of its runs' files; the packed file is next to it."""
        return (items.ROWS if folder is None else folder) / self.name

    def parts(self, folder: Path) -> dict[tuple[str, int], packing.Part]:
        """Return header and rows of each stored run and seed, packed or not, in the order of their files' names.

        Raises:
            UsageError: a header is another item's; CorruptError: rows are damaged.
        """
        files = sorted(folder.glob("*.jsonl"))
        found = [
            (whole, part)
            for whole in packed_files(folder)
            for part in packing.read(whole)
        ]
        found += [(file, rows.read(file)) for file in files]
        for path, (header, _) in found:
            if header.get("item") != self.name:
                raise UsageError(
                    f"rows at {path} must be of {self.name!r}; got rows of {header.get('item')!r}."
                )
        parts = {(part[0]["run"], int(part[0]["seed"])): part for _, part in found}
        return {
            key: parts[key]
            for key in sorted(parts, key=lambda key: rows_file(folder, *key).name)
        }

    def read(self, path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
        """Read the stored runs, with a header like any item's.

        The header also has the seeds of each run that ended (``had``), are ``missing``, or ``failed`` with a reason.
        """
        parts = self.parts(path)
        if not parts:
            raise UsageError(
                f"{self.name} has no rows in {path}. Make them with --train ({self.budget})."
            )
        frames: dict[tuple[str, int], pd.DataFrame] = {}
        runs: dict[str, dict[str, Any]] = {}
        seconds = 0.0
        for (run, seed), (header, frame) in parts.items():
            check_known("run", run, self.runs)
            described = runs.setdefault(run, header["about"])
            described["data"] |= header["about"]["data"]
            seconds += header["seconds"]
            frames[run, seed] = frame
        reasons = {
            key: frame["status"][frame["metric"] == FAILED]
            for key, frame in frames.items()
        }
        failed = {
            f"{run} {seed}": reason.iloc[0]
            for (run, seed), reason in reasons.items()
            if len(reason)
        }
        order = sorted(frames, key=lambda key: (list(self.runs).index(key[0]), key[1]))
        finished = {
            run: [
                seed
                for name, seed in order
                if name == run and f"{name} {seed}" not in failed
            ]
            for run in self.runs
        }
        sound = [frames[key] for key in order if not len(reasons[key])]
        if not sound:
            raise UsageError(
                f"{self.name} must have a finished run in {path}; got failures, first {next(iter(failed.values()))}. "
                "Train again."
            )
        header = {
            "item": self.name,
            "version": __version__,
            "command": self.command,
            "seeds": max(len(seeds) for seeds in finished.values()),
            "seconds": round(seconds, 1),
            "runs": runs,
            "had": finished,
            "failed": failed,
            "missing": [
                f"{run} {seed}"
                for run, seed in self.awaited()
                if (run, seed) not in frames
            ],
        }
        return header, pd.concat(sound, ignore_index=True)


def rows_file(folder: Path, run: str, seed: int) -> Path:
    """The file of one run's rows."""
    return folder / f"{run}-{seed}.jsonl"


def packed_file(folder: Path) -> Path:
    """Return the file of all runs of a folder, for the repository."""
    return folder.with_name(folder.name + packing.SUFFIX)


def packed_files(folder: Path) -> list[Path]:
    """Return the existing packed files: the file of all runs, and the files in the folder with some runs."""
    whole = packed_file(folder)
    return [
        *([whole] if whole.is_file() else []),
        *sorted(folder.glob(f"*.rows{packing.SUFFIX}")),
    ]


def headers(folder: Path) -> dict[tuple[str, int], packing.Header]:
    """Return the header of each stored run and seed, packed or not, as it was written."""
    found = [
        header for whole in packed_files(folder) for header in packing.headers(whole)
    ]
    found += map(rows.read_header, folder.glob("*.jsonl"))
    return {(header["run"], int(header["seed"])): header for header in found}


def newcomers(name: str, runs: Iterable[str]) -> frozenset[str]:
    """Return newly added runs, without committed rows of seed 0."""
    known = headers(items.ROWS / name)
    return frozenset(run for run in runs if (run, 0) not in known)


def pack(item: Recipe, folder: Path) -> Path:
    """Write all stored runs of a folder to one file next to it, and remove their own files.

    Raises:
        UsageError: no run is stored, or one of another item; CorruptError: rows are damaged.
    """
    parts, files = item.parts(folder), sorted(folder.glob("*.jsonl"))
    if not parts:
        raise UsageError(
            f"{folder} must hold rows to pack; got none. Train {item.name} first, with --train."
        )
    packing.write(packed_file(folder), parts.values())
    for file in files:
        file.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    return packed_file(folder)


# --- training --------------------------------------------------------------------------------------------------


def train(
    item: Recipe,
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
    """Train the runs that are missing and store each at once; returns the seconds taken.

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
        item = replace(
            item,
            runs={
                name: config.with_keys(device=device)
                for name, config in item.runs.items()
            },
        )
    took: dict[str, float] = {}
    planned = [
        (run, seed) for run, seed in item.planned(seeds) if not only or run in only
    ]
    known = headers(folder)
    for run, seed in item.planned(seeds):
        if (run, seed) in known:
            took[run] = _check_same(item, folder, known[run, seed])
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    left = [(run, seed) for run, seed in planned if (run, seed) not in known]

    def affordable() -> Iterator[Making]:
        for run, seed in left:
            spent = time.perf_counter() - began
            if budget is not None and (
                spent >= 60 * budget or spent + took.get(run, 0.0) > 60 * budget
            ):
                continue
            if not rows_file(
                folder, run, seed
            ).is_file():  # another process may have made it meanwhile
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
        rows.write(rows_file(folder, run, seed), header, items.records(frame))

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


def _asked(item: Recipe, run: str) -> dict[str, Any]:
    """A run's configuration as it was requested, without anything of one machine."""
    return {
        name: value
        for name, value in item.runs[run].to_json().items()
        if name not in items.ELSEWHERE
    }


_SPELLED_OUT = (("scale", "none", None), ("scale", None, "none"))
"""Keys with their stored value and today's that mean the same for named data: one is the other's default."""


def _check_same(item: Recipe, folder: Path, header: packing.Header) -> float:
    """Return the training time of a stored run; refuse one made with another configuration."""
    path, now = (
        rows_file(folder, header["run"], header["seed"]),
        _asked(item, header["run"]),
    )
    path = path if path.is_file() else packed_file(folder)
    if header.get("item") != item.name:
        raise UsageError(
            f"rows at {path} must be of {item.name!r}; got rows of {header.get('item')!r}."
        )
    differ = [
        name
        for name, value in header["asked"].items()
        if name in now
        and value != json.loads(json.dumps(now[name]))
        and (name, value, now[name]) not in _SPELLED_OUT
    ]
    if differ:
        what = f"{header['run']}, seed {header['seed']},"
        raise UsageError(
            f"{path}: {what} must be of this configuration; got another {listing(differ)}. "
            "Remove it, or choose another folder."
        )
    return float(header["seconds"])
