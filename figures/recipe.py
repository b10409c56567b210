"""Configurations, training and rows that the items' measurements share."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from diagnostics import measure
from fl_core import rows, tree
from fl_core.config import RunConfig
from fl_core.records import store
from fl_core.rounds.engine import Engine
from fl_core.rounds.recorder import Recorder
from fl_core.run import runner

COUNT = "samples"
"""The metric of :func:`held`."""
PLAIN_SGD: dict[str, Any] = {
    "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "keep_optimizer": False,
}  # fmt: skip
"""Local training as several papers have it."""


def by_method(
    base: RunConfig,
    methods: Iterable[str],
    method_keys: Mapping[str, Mapping[str, Any]],
) -> dict[str, RunConfig]:
    """Return a configuration for each algorithm, under its name.

    Args:
        method_keys: what a method has beyond the base, by its name.
    """
    return {
        method: base.with_keys(algorithm=method, **method_keys.get(method, {}))
        for method in methods
    }


def scored_at_end(config: RunConfig) -> RunConfig:
    """Return the configuration with evaluation and saving after the last round only."""
    return config.with_keys(
        eval_every=config.federation.rounds, checkpoint_every=config.federation.rounds
    )


def trained(task: runner.Task, out: Path | None = None) -> tuple[Engine, pd.DataFrame]:
    """Train a task to its end; returns the run and its rows.

    Args:
        out: folder in which a long run keeps its checkpoints until it ends, and from which it goes on.
    """
    arguments: dict[str, Any] = {"instruments": measure.instruments, "progress": False}
    if out and out.exists():
        engine = runner.resume(out, data_root=task.config.data.data_root, **arguments)
    else:
        engine = runner.run(task.config, out, loaded=task.data, **arguments)
    if out is None:
        return engine, engine.listener(Recorder).frame()
    frame = store.Run(out).rows()[1]
    shutil.rmtree(out)
    return engine, frame


def paused(
    task: runner.Task, rounds: Sequence[int]
) -> Iterator[tuple[Engine, pd.DataFrame]]:
    """Train a task; yield the run and all its rows so far after each of these rounds.

    Args:
        rounds: the rounds in order; the last is the run's end.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        for k, last_round in enumerate(rounds):
            arguments: dict[str, Any] = {
                "instruments": measure.instruments,
                "until": last_round,
                "progress": False,
            }
            if k == 0:
                engine = runner.run(task.config, out, loaded=task.data, **arguments)
            else:
                engine = runner.resume(
                    out, data_root=task.config.data.data_root, **arguments
                )
            yield engine, store.Run(out).rows()[1]


def final_models(engine: Engine, model: nn.Module) -> dict[str, nn.Module]:
    """Return each client's model after the run's last round so far: the personal one, else the global one.

    Args:
        model: any of the run's structure; it is copied.
    """
    models = {}
    for client, client_name in enumerate(engine.names):
        trees = engine.models(client)
        models[client_name] = copy.deepcopy(model)
        tree.load(models[client_name], trees[rows.used_model(trees)])
    return models


def labels(task: runner.Task) -> dict[str, Any]:
    """Return the columns that identify a run in its rows: algorithm and seed."""
    return {
        "algorithm": task.config.federation.algorithm,
        "seed": task.config.execution.seed,
    }


def held(counts: pd.DataFrame, label_columns: Mapping[str, Any]) -> Iterator[rows.Row]:
    """Yield rows of the samples of each class that each client holds, from clients x classes."""
    for (client, label), n in counts.stack().items():
        yield rows.row(
            COUNT, int(n), client=str(client), variant=str(label), **label_columns
        )


def held_by(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the samples of :func:`held` in one run and seed, clients x classes in their order."""
    count_rows = where(frame, metric=COUNT)
    class_counts = count_rows.pivot(index="client", columns="variant", values="value")
    class_counts = class_counts.loc[
        count_rows["client"].unique(), count_rows["variant"].unique()
    ]
    return class_counts.rename_axis(columns=None)


def where(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Return the rows whose columns have these values."""
    for name, value in values.items():
        frame = frame[frame[name] == value]
    return frame


def tested(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of test accuracy, of every model and round."""
    return where(frame, metric="accuracy", split="test")


def mean_accuracy(
    frame: pd.DataFrame, label_columns: Mapping[str, Any]
) -> Iterator[rows.Row]:
    """Yield rows of the clients' mean test accuracy, of every round and model of a run."""
    for (round_number, model), group_rows in tested(frame).groupby(["round", "model"]):
        n = int(group_rows["n_samples"].sum())
        columns: dict[str, Any] = {
            "round": int(round_number),
            "model": model,
            "split": "test",
            "n_samples": n,
        }
        yield rows.row(
            "accuracy",
            group_rows["value"].mean(),
            estimator="mean over clients",
            **columns,
            **label_columns,
        )
