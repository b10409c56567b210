"""The runs of the leaderboard: each is a row, and is made again to the same bits."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.leaderboard.federations import FEDERATIONS, Scene, source_of
from benchmarks.leaderboard.methods import (
    ADVICE,
    MAJORITY,
    METHODS,
    POOLED,
    RATES,
    SCORED,
    TUNING,
    Method,
    Setting,
    best_setting,
    configuration_keys,
    next_setting,
)
from fedlayers.run_result import RunResult
from fedlayers.runs import default_instruments
from fedlayers.studies.choose import choose
from fedlayers.studies.harmless import Bench
from fl_core import tree
from fl_core.data.registry import Location
from fl_core.errors import NonFiniteError, UsageError, check_known
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.records.stopping import moving_mean, rule_of
from fl_core.rounds.clients import LocalClients
from fl_core.rounds.engine import Engine
from fl_core.rounds.recorder import Recorder
from fl_core.run import runner
from fl_core.training import evaluate, losses

STORED = Path(__file__).parent / "rows.parquet"
"""The stored rows."""
METRICS = ("accuracy", "macro_f1", "loss")
"""Held-out scores of a client, in the order of a row's ``clients``."""
SCHEMA = pa.schema({
    "federation": pa.string(), "method": pa.string(), "seed": pa.int64(), "setting": pa.string(),
    "validation": pa.float64(), "best": pa.int64(), "stopped": pa.int64(), "sent": pa.float64(),
    "computed": pa.float64(), "stored": pa.float64(), "clients": pa.string(), "status": pa.string(),
})  # fmt: skip
"""The columns of a file of rows. ``setting`` and ``clients`` are JSON."""
KEYS = frozenset(SCHEMA.names)
Row = dict[str, Any]


# --- rows --------------------------------------------------------------------------------------------------------


def read(*files: Path) -> list[Row]:
    """Return the rows of some files, each run once. A file that does not exist has none."""
    found: dict[str, Row] = {}
    for file in files:
        for row in pq.read_table(file).to_pylist() if file.is_file() else ():
            row |= {key: json.loads(row[key]) for key in ("setting", "clients")}
            found.setdefault(
                json.dumps(
                    [row[key] for key in ("federation", "method", "seed", "setting")]
                ),
                row,
            )
    return list(found.values())


def add(file: Path, *rows: Row) -> None:
    """Add rows to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {**row, **{key: json.dumps(row[key]) for key in ("setting", "clients")}}
        for row in (*read(file), *rows)
    ]
    part = file.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(lines, SCHEMA), part, compression="zstd")
    part.replace(file)


def number(value: float | None) -> float:
    """Return a stored number; NaN if it is missing."""
    return math.nan if value is None else value


# --- what is missing ---------------------------------------------------------------------------------------------


def next_run(
    rows: Sequence[Row], federation: str, name: str, method: Method
) -> tuple[int, Setting] | None:
    """Return the seed and the setting of a cell's next run; None if the cell is complete.

    A cell is a federation with a method. Its trials come first, then its scored runs at the best of them.
    """
    own = [
        row for row in rows if (row["federation"], row["method"]) == (federation, name)
    ]
    tried = [
        (row["setting"], number(row["validation"]))
        for row in own
        if row["seed"] == TUNING
    ]
    if method.kind == MAJORITY:
        setting: Setting | None = None
    elif method.kind == ADVICE:
        setting = None if tried else {}
    else:
        setting = next_setting(method, tried)
    if setting is not None:
        return TUNING, setting
    done = {row["seed"] for row in own}
    left = [seed for seed in SCORED if seed not in done]
    return (left[0], best_setting(tried) if tried else {}) if left else None


def complete(
    rows: Sequence[Row], federation: str, methods: Iterable[str] = METHODS
) -> bool:
    """Return whether every method has all its scored runs on a federation."""
    there = {
        (row["method"], row["seed"]) for row in rows if row["federation"] == federation
    }
    return all((name, seed) in there for name in methods for seed in SCORED)


def run(
    out: Path,
    federations: Sequence[str] = (),
    methods: Mapping[str, Method] = METHODS,
    data_root: Location | None = None,
    tell: Callable[[str], None] = lambda line: None,
    known: Path | None = None,
) -> int:
    """Make the missing runs, federation by federation. Return their number.

    Args:
        out: the file of new rows. Runs that it or ``known`` has are not made again; default :data:`STORED`.
        federations: their names; default all whose tables are there.
        tell: receives a line for each complete cell, and for each federation that is left out.

    Raises:
        UsageError: an unknown federation, or a table that is not there.
    """
    chosen = [
        check_known("federation", name, FEDERATIONS) for name in federations
    ] or list(FEDERATIONS)
    count, rows = 0, read(known or STORED, out)
    for federation in chosen:
        if not federations and (reason := absent(federation, data_root)):
            tell(f"{federation} is left out: {reason}")
            continue
        scenes: dict[int, Scene] = {}
        for name, method in methods.items():
            while (asked := next_run(rows, federation, name, method)) is not None:
                seed, setting = asked
                if seed not in scenes:
                    scenes[seed] = Scene(federation, seed, data_root)
                rows.append(make_run(scenes[seed], name, method, setting))
                add(out, rows[-1])
                count += 1
                if next_run(rows, federation, name, method) is None:
                    tell(f"{federation}: {method.title} is complete")
    return count


def absent(federation: str, data_root: Location | None) -> str:
    """Return why a federation's samples cannot be opened here, or an empty text."""
    try:
        source_of(federation, data_root)
    except UsageError as error:
        return str(error)
    return ""


def repeat_runs(
    rows: Sequence[Row],
    count: int,
    data_root: Location | None = None,
    methods: Mapping[str, Method] = METHODS,
) -> Iterator[tuple[Row, Row]]:
    """Make some stored runs, chosen at random, once more. Yield the stored and the new row.

    Raises:
        UsageError: there are fewer rows.
    """
    if not 1 <= count <= len(rows):
        raise UsageError(
            f"again must be from 1 to the {len(rows)} stored runs; got {count}."
        )
    for row in random.Random(0).sample(list(rows), count):
        method = methods[check_known("stored method", row["method"], methods)]
        setting = (
            {} if method.kind == ADVICE and row["seed"] == TUNING else row["setting"]
        )
        yield (
            row,
            make_run(
                Scene(row["federation"], row["seed"], data_root),
                row["method"],
                method,
                setting,
            ),
        )


# --- one run -----------------------------------------------------------------------------------------------------


def make_run(scene: Scene, name: str, method: Method, setting: Setting) -> Row:
    """Make one run, and return its row. Runs of the tuning seed are not scored on held-out samples."""
    row: Row = dict.fromkeys(sorted(KEYS))
    row |= {
        "federation": scene.name,
        "method": name,
        "seed": scene.seed,
        "setting": setting,
        "status": "ok",
    }
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # of small clients and single classes, the same in every run
            if method.kind == MAJORITY:
                shares = Bench(scene.task).base_rate.outputs["validation"]
                row["clients"] = scores(
                    scene, lambda client, x: shares[client][:1].expand(len(x), -1)
                )
            elif method.kind == ADVICE and scene.seed == TUNING:
                row["setting"] = recommended_setting(scene)
            else:
                row |= train_to_stop(scene, method, setting)
    except NonFiniteError as error:
        row["status"] = f"diverged: {error}"
    return row


def train_to_stop(scene: Scene, method: Method, setting: Setting) -> Row:
    """Train a method to its stop. Return its validation score, best round, costs and held-out scores."""
    data = scene.pooled() if method.kind == POOLED else scene.data
    config = scene.config
    plan = None
    if method.kind == ADVICE:
        plan = LayerPlan(
            scene.task.layers, tuple(setting["plan"]), Evidence(rule=CANDIDATE)
        )
    config = config.with_keys(**configuration_keys(method, setting))
    engine = runner.run(
        config,
        data=scene.own["data"],
        loaded=data,
        plan=plan,
        progress=False,
        instruments=default_instruments,
    )
    rule = rule_of(engine)
    assert rule is not None
    best = rule.best[rule.main]
    row: Row = {
        "validation": moving_mean(rule.scores[rule.main][rule.metrics[0]])[best],
        "best": best,
        "stopped": engine.done,
    }
    if scene.seed == TUNING:
        return row
    models = RunResult(engine).models
    pooled = method.kind == POOLED
    row["clients"] = scores(
        scene,
        lambda client, x: evaluate.predict(models["all" if pooled else client], x),
    )
    return row if pooled else row | costs(engine)


def costs(engine: Engine) -> Row:
    """Return what a client sends and receives, computes and stores in a run, means over clients: bytes, FLOPs, bytes.

    Storage is the state that a client keeps between rounds, without samples.
    """
    frame, clients = engine.listener(Recorder).frame(), len(engine.names)
    total = frame.groupby("metric")["value"].sum()
    assert isinstance(engine.clients, LocalClients)
    states = [engine.clients.states[name].trees for name in engine.names]
    kept = sum(tree.n_bytes(each) for trees in states for each in trees.values())
    sent = float(total.get("bytes_up", 0.0) + total.get("bytes_down", 0.0))
    return {
        "sent": sent / clients,
        "computed": float(total["flops"]) / clients,
        "stored": kept / clients,
    }


def scores(
    scene: Scene, predict: Callable[[str, torch.Tensor], torch.Tensor]
) -> dict[str, list[float | None]]:
    """Return each client's held-out scores, of :data:`METRICS`, and its number of training samples last."""
    found: dict[str, list[float | None]] = {}
    with tree.one_thread():
        for client in scene.data.clients:
            part = scene.held_out[client.name]
            values = evaluate.scores(
                predict(client.name, part.x), part.y, losses.CrossEntropy(), 1
            )
            finite = [
                float(values[metric]) if math.isfinite(values[metric]) else None
                for metric in METRICS
            ]
            found[client.name] = [*finite, len(client.train)]
    return found


def recommended_setting(scene: Scene) -> Setting:
    """Return what a whole race of ``choose`` advises for one's own data: a plan, and the rate that it tuned."""
    asked: dict[str, Any] = {"tune_rates": len(RATES), "thorough": True}
    with TemporaryDirectory() as folder:
        choice = choose(
            scene.config, Path(folder), seeds=(scene.seed,), **scene.own, **asked
        )
    assert choice.plan is not None
    assert choice.rates is not None
    return {
        "lr": choice.rates.lr,
        "keep_optimizer": False,
        "plan": list(choice.plan.shared),
    }
