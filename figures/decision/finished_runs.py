"""Measure the runs of the tuned and finished study, and pack their rows into one file a federation.

A run (a federation, a rate, a seed) has a file of rows and one of log-probabilities.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from figures import items, packing
from figures.decision import runs
from figures.decision.federations import cuts
from figures.decision.finished import CUTS, DITTO, JOBS, MAIN_CUT, RESTARTS, STARTS, STUDY, jobs
from figures.recipe import Recipe, labels, rows_file
from fl_core import rows, runner, tree
from fl_core.algorithms.model_template import ModelTemplate
from fl_core.config import RunConfig
from fl_core.engine import Engine
from fl_core.errors import NonFiniteError, check_known
from fl_core.execution.requests import TUNED, FinetuneRequest
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.storage.files import write_atomically
from fl_core.training import evaluate
from fl_core.tree import Tree

NAME = "decision.finished"
PERSONAL = "personal"
CURVE, STOPPED, SHARED = "curve", "stopped after", "shared layers"
VALIDATION, HELD_OUT = "validation", runs.HELD_OUT
OWN_EPOCHS = (1, 2, 4)
"""Epochs of fine-tuning that follow FedAvg."""
STEPS, LEAST = 100, -300
"""Log-probabilities are stored in hundredths of a nat, at least so many nats."""
ROWS, LOGS = ".rows.parquet", ".logs.parquet"
"""Ends of the names of packed files."""


@dataclass(frozen=True)
class Ended:
    """A run that trained to its stop.

    Attributes:
        models: each client's personal model at the best round.
        best: the best round, one for all clients.
        stopped: rounds that were trained.
        curve: the score on validation of each evaluated round.
        server: the server's model at the best round.
    """

    models: dict[int, Tree]
    best: int
    stopped: int
    curve: dict[int, float]
    server: Tree


def stopping(engine: Engine) -> tuple[int, dict[int, float]]:
    """Return a run's best round by its stopping rule, and the score on validation of each evaluated round."""
    rule = engine.stopping
    assert rule is not None
    return rule.best[PERSONAL], {done: score for done, score in rule.scores[PERSONAL].items() if done > 0}


def to_stop(task: runner.Task, config: RunConfig, plan: LayerPlan | None, initial: Tree | None = None) -> Ended:
    """Train on a task's data to the stop.

    Args:
        initial: the model to start from; default the seed's.

    Raises:
        NonFiniteError: training met NaN or infinity.
    """
    with TemporaryDirectory() as out:
        engine = runner.run(config, Path(out) / "run", loaded=task.data, plan=plan, initial=initial, progress=False)
        assert engine.writer is not None
        stopped = engine.done
        best, curve = stopping(engine)
        engine.restore(engine.writer.run.checkpoint(best))
        models = {number: dict(engine.models(number)[PERSONAL]) for number in range(len(task.data.clients))}
        server = dict(engine.server.trees["model"])
    return Ended(models, best, stopped, curve, server)


class Outputs:
    """Scores of each client's model on validation and held-out samples, and log-probabilities of the latter."""

    def __init__(self, task: runner.Task) -> None:
        self.task, self.scores = task, runs.Scores(task)
        self.logs: dict[str, Any] = {}

    def of_run(self, kind: str, variant: str, ended: Ended) -> Iterator[rows.Row]:
        """Yield the rows of a run: when it stopped, its scores on validation by round, and every client's scores."""
        own = {"estimator": kind, "variant": variant, **labels(self.task)}
        yield rows.row(STOPPED, ended.stopped, round=ended.best, **own)
        for done, score in ended.curve.items():
            yield rows.row(CURVE, score, round=done, split=VALIDATION, **own)
        yield from self.rows(kind, variant, ended.models, ended.best)

    def rows(self, kind: str, variant: str, models: Mapping[int, Tree], done: int) -> Iterator[rows.Row]:
        """Yield every client's scores on both splits; keep the log-probabilities of the held-out samples."""
        logs = []
        for number, model in models.items():
            client = self.task.data.clients[number]
            for split in (VALIDATION, HELD_OUT):
                part = client.validation if split == VALIDATION else self.scores.held_out(number)
                tree.load(self.scores.model, model)
                with tree.one_thread():
                    outputs = evaluate.predict(self.scores.model, part.x)
                    found = evaluate.scores(outputs, part.y, self.task.criterion, self.task.data.positive_index)
                about: dict[str, Any] = {
                    "estimator": kind, "variant": variant, "split": split, "client": client.name, "round": done,
                    "n_samples": len(part), "n_train": len(client.train), **labels(self.task),
                }  # fmt: skip
                for metric in runs.SCORES:
                    yield rows.row(metric, found[metric], **about)
                if split == HELD_OUT:
                    logs.append(torch.log_softmax(self.task.criterion.logits(outputs).double(), dim=1).numpy())
        self.logs[f"{kind}, {variant}"] = rounded(np.concatenate(logs))

    def save(self, path: Path) -> None:
        """Write the log-probabilities with each sample's class and client."""
        parts = [self.scores.held_out(number).y.numpy() for number in range(len(self.task.data.clients))]
        clients = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        stored = io.BytesIO()
        np.savez_compressed(stored, label=np.concatenate(parts), client=clients, **self.logs)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, stored.getvalue())


def rounded(logs: NDArray[np.float64]) -> NDArray[np.int16]:
    """Return log-probabilities in hundredths of a nat, at least -300 nats."""
    return np.rint(STEPS * np.maximum(logs, LEAST)).astype(np.int16)


# --- what a run of the study trains ----------------------------------------------------------------------------


def measured(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Train what a run of the study has to train, each to its stop."""
    kind, outputs = JOBS[run].kind, Outputs(task)
    lines: list[rows.Row] = []
    for variant, config, plan in _todo(task, kind):
        own = {"estimator": kind, "variant": variant, **labels(task)}
        if plan is not None:
            lines.append(rows.row(SHARED, len(plan.shared), **own))
        try:
            ended = to_stop(task, config, plan)
        except NonFiniteError as error:
            lines.append(rows.row(STOPPED, None, status=str(error), **own))
            continue
        lines += outputs.of_run(kind, variant, ended)
        if (kind, variant) == (CUTS, "all"):
            lines += _finetuned(outputs, ended.models)
    if kind == CUTS and task.config.lr == STUDY[JOBS[run].federation].config.lr:
        lines += runs.decisions(task)
    outputs.save(logs_file(folder, run, task.config.seed))
    return rows.frame(lines)


def _todo(task: runner.Task, kind: str) -> Iterator[tuple[str, RunConfig, LayerPlan | None]]:
    """Yield the trainings of a kind: name, configuration and plan."""
    nothing = LayerPlan(task.layers, (), Evidence(rule=CANDIDATE))
    named = cuts(len(nothing.trainable))
    if kind == DITTO:
        yield DITTO, task.config, None
    elif kind == RESTARTS:
        for k in range(1, STARTS + 1):
            seed = task.config.seed + 1000 * k  # of start and batches; the partition stays
            yield f"start {k}", replace(task.config, seed=seed), nothing.with_first(named[MAIN_CUT])
    else:
        yield from ((cut, task.config, nothing.with_first(count)) for cut, count in named.items())


def _finetuned(outputs: Outputs, models: Mapping[int, Tree]) -> Iterator[rows.Row]:
    """Yield the scores of FedAvg's best model after a few epochs of each client's own."""
    task = outputs.task
    client_runner = task.client_runner()
    nothing = LayerPlan(task.layers, (), Evidence(rule=CANDIDATE))
    client_runner.use(runs.Personalised(task.task_info, nothing, {}))
    for epochs in OWN_EPOCHS:
        trees = {}
        for number, model in models.items():
            with tree.one_thread():
                result = client_runner.run(FinetuneRequest(number, epochs, ModelTemplate({TUNED: model}), TUNED))
            trees[number] = {**model, **result.models[TUNED]}
        yield from outputs.rows(runs.PERSONALISED, f"{epochs} epochs", trees, epochs)


ITEM = items.register(
    Recipe(
        NAME,
        "Every cut at four rates, each to its stop",
        {name: job.config for name, job in JOBS.items()},
        seeds=max(each.seeds for each in STUDY.values()),
        budget="at most 40 hours of one core",
        measure=measured,
    )
)


def planned(names: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """Yield every (run, seed) of these federations in the order of training. The default is all federations."""
    for quick in (True, False):
        for name in names or STUDY:
            each = STUDY[check_known("federation", name, STUDY)]
            if each.quick == quick:
                yield from ((job.name, seed) for seed in range(each.seeds) for job in jobs(name))


# --- packed rows -----------------------------------------------------------------------------------------------


def logs_file(folder: Path, run: str, seed: int) -> Path:
    """Return the file of one run's log-probabilities."""
    return folder / f"{run}-{seed}.npz"


def pack(folder: Path, out: Path) -> list[str]:
    """Write the rows and log-probabilities of each federation whose runs are all stored; returns their names."""
    out.mkdir(parents=True, exist_ok=True)
    done = []
    for name in STUDY:
        wanted = list(planned((name,)))
        if not all(rows_file(folder, run, seed).is_file() for run, seed in wanted):
            continue
        packing.write(out / f"{name}{ROWS}", [rows.read(rows_file(folder, run, seed)) for run, seed in wanted])
        logs = [part for run, seed in wanted for part in _logs(run, seed, logs_file(folder, run, seed))]
        words = {"run": "category", "what": "category"}
        stored = pd.concat(logs, ignore_index=True).astype(words).to_parquet(compression="zstd", index=False)
        write_atomically(out / f"{name}{LOGS}", stored)
        done.append(name)
    return done


def _logs(run: str, seed: int, path: Path) -> Iterator[pd.DataFrame]:
    """Yield the log-probabilities of a run's cuts as tables: one line a sample, one column a class."""
    if not path.is_file():  # a run that diverged before it had any
        return
    with np.load(path, allow_pickle=False) as found:
        for what in found.files:
            if what.startswith(f"{CUTS}, "):
                values = pd.DataFrame(found[what]).add_prefix("class_")
                about = {"client": found["client"].astype(np.int16), "label": found["label"].astype(np.int16)}
                yield values.assign(run=run, seed=np.int16(seed), what=what, **about)
