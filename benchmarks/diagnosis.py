"""Benchmarks of a diagnosis by all metrics (J4), and of a monitor in a plain loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import fedlayers as fl
from benchmarks.pairs import PAIRS, Measured, alternate, compare, judged
from diagnostics.measure import diagnose
from diagnostics.metrics.base import METRICS
from fl_core import tree
from fl_core.tree import copied

CLIENTS = 3
EACH = 200
"""Samples of a client."""
NOTHING = "bn_scale"
"""Reads the batch normalisations, of which the network has none: what is left is the diagnosis itself."""
GRADIENTS = "the pass over the gradients"


def clients() -> tuple[
    dict[str, nn.Module], dict[str, tuple[Tensor, Tensor]], nn.Module
]:
    """Return models of 2 conv + 2 fc layers after some steps, their common start, and samples of 8 x 8 pixels."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
            ),
            *(
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(128, 64),
                nn.ReLU(),
                nn.Linear(64, 10),
            ),
        )

    models, data = {}, {}
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.randn(10, 1, 8, 8, generator=generator)
    for k in range(CLIENTS):
        y = torch.arange(EACH) % 10
        x = prototypes[y] + 1.5 * torch.randn(EACH, 1, 8, 8, generator=generator)
        model = network()
        models[f"client_{k}"], data[f"client_{k}"] = model, (x, y)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for start in range(0, EACH, 20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(x[start : start + 20]), y[start : start + 20]
            ).backward()
            optimizer.step()
    return models, data, network()


def all_metrics(pairs: int = PAIRS) -> list[Measured]:
    """J4: a diagnosis by all metrics against its distinct passes, and against the metrics one by one; CPU time.

    The passes are timed one by one, too. There is one over the gradients, and one for each metric that has its own.
    The diagnosis
    itself (checks, digests, the layers' trace) counts once.
    """
    torch.set_num_threads(1)
    frame = alternate(_sides(), pairs)
    fixed_seconds = frame[NOTHING]
    own_pass_metrics = [
        metric_name
        for metric_name, metric in METRICS.members().items()
        if not metric.uses_gradient_pass and metric_name != NOTHING
    ]
    gradient_metrics = [
        metric_name
        for metric_name, metric in METRICS.members().items()
        if metric.uses_gradient_pass
    ]
    distinct_seconds = frame[GRADIENTS] + sum(
        frame[metric_name] - fixed_seconds for metric_name in own_pass_metrics
    )
    single_seconds = fixed_seconds + sum(
        frame[metric_name] - fixed_seconds
        for metric_name in (*own_pass_metrics, *gradient_metrics)
    )
    rows = [
        _row(
            frame["all"],
            distinct_seconds,
            "its distinct passes, each timed alone",
            at_most=1.3,
        ),
        _row(frame["all"], single_seconds, "the metrics one after the other"),
    ]
    feature_metrics = [
        metric_name for metric_name in own_pass_metrics if METRICS[metric_name].features
    ]
    rows.append(
        _row(
            frame["all of features"],
            fixed_seconds
            + sum(
                frame[feature_metric] - fixed_seconds
                for feature_metric in feature_metrics
            ),
            "the same one by one",
        )
    )
    print((frame.median() / frame["all"].median()).round(3).sort_values().to_string())
    return rows


def _row(
    own_seconds: pd.Series,
    other_seconds: pd.Series,
    baseline: str,
    at_most: float | None = None,
) -> Measured:
    title = "diagnose, all metrics"
    if own_seconds.name == "all of features":
        title = "diagnose, metrics of features"
    seconds: dict[str, Any] = {
        "seconds": float(own_seconds.median()),
        "baseline_seconds": float(other_seconds.median()),
    }
    return judged(
        "J4",
        title,
        baseline,
        list(own_seconds / other_seconds),
        at_most=at_most,
        **seconds,
    )


def _sides() -> dict[str, Callable[[], float]]:
    """Return the timed groups: all metrics, metrics of gradients or features, and each alone."""
    models, data, common_start = clients()
    members = METRICS.members()

    def measured(*names: str) -> Callable[[], object]:
        options: dict[str, Any]
        if "update_magnitude" in names:
            options = {"update_magnitude": {"start": common_start}}
        else:
            options = {}
        return lambda: diagnose(models, data, names, options=options, progress=False)

    work_by_name = {
        "all": measured(*members),
        GRADIENTS: measured(
            *(
                metric_name
                for metric_name, metric in members.items()
                if metric.uses_gradient_pass
            )
        ),
        "all of features": measured(
            *(metric_name for metric_name, metric in members.items() if metric.features)
        ),
        **{metric_name: measured(metric_name) for metric_name in members},
    }
    return {metric_name: _timed(work) for metric_name, work in work_by_name.items()}


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return seconds


CHEAP = ("grad_norm", "grad_similarity", "weight_divergence")
ROUNDS, EVERY, EPOCHS = 10, 5, (1, 5)


def monitor(pairs: int = PAIRS) -> list[Measured]:
    """Time a plain loop of FedAvg that is measured by three cheap metrics, and the same loop that is not."""
    task = fl.assemble(fl.RunConfig(dataset="known_labels"))
    data = {
        client.name: (client.train.x, client.train.y) for client in task.data.clients
    }
    batch = task.config.training.batch_size or 16

    def loop(epochs: int, interval: int) -> None:
        torch.manual_seed(0)
        models = {name: copied(task.model) for name in data}
        round_monitor = fl.Monitor(data, CHEAP, every=interval)
        for round_number in range(1, ROUNDS + 1):
            for name, model in models.items():
                _train(model, *data[name], epochs, batch)
            round_monitor.step(models, round_number)
            trees = [tree.state_dict(model) for model in models.values()]
            mean_state = tree.mean(trees, [1.0] * len(trees))
            for model in models.values():
                model.load_state_dict(mean_state)

    return [
        compare(
            "monitor",
            f"{ROUNDS} rounds of {epochs} epochs, 6 clients with 192 samples, measured every {EVERY} rounds",
            partial(loop, epochs, EVERY),
            "the same loop, not measured",
            partial(loop, epochs, ROUNDS + 1),
            at_most=1.25,
            pairs=pairs,
        )
        for epochs in EPOCHS
    ]


def _train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for batch_rows in torch.randperm(len(y)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch_rows]), y[batch_rows]).backward()
            optimizer.step()


JOBS = {"j4": all_metrics, "monitor": monitor}
