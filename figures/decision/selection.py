"""Train the runs of the study of scores for selection: every evaluation of four cuts at four rates.

Nothing stops early and nothing is selected here. So each rule can be replayed for rates, best rounds, stops and arms.
``REGISTERED_SCORE.md`` states the question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from figures.recipe import final_models, labels
from fl_core import rows, runner, tree
from fl_core.clients import LocalClients, executor
from fl_core.config import RunConfig
from fl_core.engine import Engine
from fl_core.errors import NonFiniteError
from fl_core.plan import LayerPlan
from fl_core.stopping import Schedule
from fl_core.training import evaluate

ROUNDS, EVERY = 60, 2
ARMS = ("nothing", "half", "all_but_last", "all")
FACTORS = (1.0, 3.0, 10.0, 30.0)
SPLITS = ("validation", "test")
TEMPERED, TEMPERATURE, SPREAD, BASE = "tempered", "temperature", "spread", "base_rate"
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Set:
    """A federation of the study. ``rare`` outcomes have at most 14 % positives."""

    family: str
    rare: bool
    config: RunConfig


def _set(dataset: str, family: str = "", rare: bool = False, lr: float = 1e-3) -> Set:
    named = dataset if dataset == "coded_digits" else f"figures.decision.sets:{dataset}"
    table = {"scale": "standard", "impute": "mean"} if family == "" else {}
    config = RunConfig(
        dataset=named,
        algorithm="fedper",
        model="mlp",
        rounds=ROUNDS,
        epochs=1,
        batch_size=32,
        lr=lr,
        optimizer="adamw",
        patience=0,
        partition="natural",
        eval_every=ROUNDS,
        checkpoint_every=ROUNDS,
        **table,
    )
    return Set(family or dataset, rare, config)


SETS: dict[str, Set] = {
    "rare_14": _set("rare_14", rare=True),
    "rare_5": _set("rare_5", rare=True),
    "rare_30": _set("rare_30"),
    "heart_yes": _set("heart_yes", family="heart", lr=3e-3),
    "coded_digits": _set("coded_digits", family="coded_digits"),
    "digits_turned": _set("digits_turned", family="digits"),
    "apart_14": _set("apart_14", rare=True),
    "apart_5": _set("apart_5", rare=True),
    "apart_30": _set("apart_30"),
}
JOBS: dict[str, RunConfig] = {
    f"{name}@{factor:g}": each.config.with_keys(lr=each.config.training.lr * factor)
    for name, each in SETS.items()
    if each.config.training.lr is not None
    for factor in FACTORS
}


def cut(task: runner.Task, arm: str) -> LayerPlan:
    """Return the plan of an arm, as ``choose`` names it."""
    none = LayerPlan(task.layers, ())
    count = len(none.trainable)
    shared = {
        "nothing": 0,
        "half": max(1, count // 2),
        "all_but_last": count - 1,
        "all": count,
    }
    return none.with_first(shared[arm])


def evaluations(task: runner.Task, plan: LayerPlan) -> Iterator[dict[str, list[Array]]]:
    """Train a cut; yield the clients' logits on both splits after each second round."""
    config, client_runner = task.config, task.client_runner({})
    initial = tree.state_dict(task.model)
    schedule = Schedule(ROUNDS, config.federation.participation, ROUNDS, ROUNDS)
    pool = executor(client_runner, 0, config.execution.stack == "on")
    clients = LocalClients(client_runner, pool, initial)
    engine = Engine(task.algorithm(plan), task.data, initial, clients, schedule)
    clients.use(engine.algorithm)
    while engine.done < ROUNDS:
        engine.step()
        if engine.done % EVERY:
            continue
        models = final_models(engine, task.model)
        with tree.one_thread():
            yield {
                split: [
                    task.criterion.logits(
                        evaluate.predict(models[client.name], client.split(split).x)
                    )
                    .double()
                    .log_softmax(dim=1)
                    .numpy()
                    for client in task.data.clients
                ]
                for split in SPLITS
            }


def log_loss(logs: Array, y: Array, weights: Array, temperature: float) -> float:
    """Return the weighted log loss of log-probabilities after a temperature."""
    hot = torch.from_numpy(logs / temperature).log_softmax(dim=1).numpy()
    return float(-(weights * hot[np.arange(len(y)), y]).sum() / weights.sum())


def fitted_temperature(logs: Array, y: Array, weights: Array) -> float:
    """Return the temperature with the least log loss, between 0.05 and 20."""
    found = minimize_scalar(
        lambda log_t: log_loss(logs, y, weights, float(np.exp(log_t))),
        bounds=(-3.0, 3.0),
        method="bounded",
    )
    return float(np.exp(found.x))


def measured(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Train the four cuts at one rate; return the scores of every evaluation."""
    sizes = np.array([len(client.train) for client in task.data.clients])
    y = {s: [c.split(s).y.numpy() for c in task.data.clients] for s in SPLITS}
    weights = {
        split: np.concatenate(
            [
                np.full(len(own), n / len(own))
                for own, n in zip(parts, sizes, strict=True)
            ]
        )
        for split, parts in y.items()
    }
    named = labels(task)
    lines = [
        rows.row(BASE, value, split=split, **named)
        for split, value in base_rates(task, sizes).items()
    ]
    kept: dict[str, Array] = {}
    for arm in ARMS:
        found: dict[str, list[Any]] = {split: [] for split in SPLITS}
        try:
            for k, logs in enumerate(evaluations(task, cut(task, arm)), 1):
                hot = 1.0
                for split in SPLITS:
                    whole = np.concatenate(logs[split])
                    truth = np.concatenate(y[split])
                    if split == "validation":
                        hot = fitted_temperature(whole, truth, weights[split])
                    values = _scores(task, logs[split], y[split], sizes)
                    values[TEMPERED] = log_loss(whole, truth, weights[split], hot)
                    values[TEMPERATURE] = hot
                    values[SPREAD] = _spread(whole, truth, weights[split], hot)
                    about: dict[str, Any] = {
                        "split": split,
                        "round": k * EVERY,
                        "variant": arm,
                    }
                    lines += [
                        rows.row(metric, round(value, 5), **about, **named)
                        for metric, value in values.items()
                    ]
                    found[split].append(
                        np.clip(1000 * whole, -32767, 0).astype(np.int16)
                    )
        except NonFiniteError as error:
            lines.append(
                rows.row("loss", None, status=str(error), variant=arm, **named)
            )
        kept |= {f"{arm}.{split}": np.array(each) for split, each in found.items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{run}-{task.config.execution.seed}.logs.npz", **kept)  # type: ignore[arg-type]
    return rows.frame(lines)


def base_rates(task: runner.Task, sizes: Array) -> dict[str, float]:
    """Return the log loss of each client's smoothed training shares, (n_k + 1) / (n + C)."""
    found = {}
    for split in SPLITS:
        losses = []
        for client in task.data.clients:
            n = np.bincount(client.train.y.numpy(), minlength=task.data.n_classes)
            shares = (n + 1) / (n.sum() + len(n))
            losses.append(-np.log(shares)[client.split(split).y.numpy()].mean())
        found[split] = float(np.average(losses, weights=sizes))
    return found


def _scores(
    task: runner.Task, logs: list[Array], y: list[Array], sizes: Array
) -> dict[str, float]:
    each = [
        evaluate.scores(
            torch.from_numpy(log),
            torch.from_numpy(own),
            task.criterion,
            task.data.positive_index,
        )
        for log, own in zip(logs, y, strict=True)
    ]
    found = {}
    for metric in ("macro_f1", "accuracy", "loss", "auroc"):
        values = np.array([one[metric] for one in each])
        there = ~np.isnan(values)
        found[metric] = float(np.average(values[there], weights=sizes[there]))
    return found


def _spread(logs: Array, y: Array, weights: Array, temperature: float) -> float:
    """Return the standard error of the weighted log loss over samples."""
    hot = torch.from_numpy(logs / temperature).log_softmax(dim=1).numpy()
    losses, share = -hot[np.arange(len(y)), y], weights / weights.sum()
    mean = float((share * losses).sum())
    return float(np.sqrt((share**2 * (losses - mean) ** 2).sum()))
