"""Train all subsets of layers of small federations, and store how good each plan is: the truth of ``fl.regret``.

Of a network with adapters it trains cuts and parts (:func:`diagnostics.regret.cuts_and_parts`).

Each row of ``diagnostics/truth.csv`` is one federation, seed and plan: accuracy in percent and calibrated log loss on
test samples, after the fine-tuning that is best on validation samples. Rows that exist are not made again, so the
command can be stopped and started: ``python -m figures.decision.truth --hours 1``.

The learning rate comes from two other seeds, with all layers shared. A run that diverges keeps its row, without scores.
"""

from __future__ import annotations

import csv
import math
import time
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor

import fedlayers as fl
from diagnostics.regret import TRUTH, plans_of, read_truth
from diagnostics.tuning.copies import EPOCHS, Held, Tuner
from diagnostics.tuning.profile import every
from fedlayers.rule_benchmark import start_of
from fl_core import tree
from fl_core.data.named.known import KINDS
from fl_core.errors import NonFiniteError, RunError
from fl_core.plan import LayerPlan
from fl_core.run.task import Task
from fl_core.statistics import halves
from fl_core.training import evaluate
from fl_core.training.phases import Training

SEEDS = {
    "known_labels": 10,
    "known_inputs": 10,
    "known_both": 10,
    "known_neither": 10,
    "known_outlier": 10,
    "known_clusters": 10,
    "heart": 5,
    "activity": 5,
    **{f"fashion_{kind}": 3 for kind in KINDS},
    "tweets_adapters": 2,
}
"""Federations, and the seeds of each, from 0."""
RATE_SEEDS = (100, 101)
"""Seeds that choose the learning rate. No row has them."""
RATES = (1.0, 3.0, 10.0)
"""Rates that are tried, times the dataset's."""
LATE = 1000
"""Rounds between evaluations: none before the last round, which alone is read."""
COLUMNS = ("federation", "seed", "shared", "lr", "accuracy", "loss", "seconds")


class Score(NamedTuple):
    """Validation loss, cross-fitted; accuracy in percent and log loss on test samples."""

    validation: float
    accuracy: float
    loss: float


def task_of(federation: str, seed: int, lr: float | None = None) -> Task:
    """Return the task of a federation, which trains to the last round."""
    config_keys: dict[str, Any] = {"eval_every": LATE, **start_of(federation)}
    if lr is not None:
        config_keys["lr"] = lr
    config = fl.RunConfig(
        dataset=federation, algorithm="fedper", seed=seed, patience=0, **config_keys
    )
    return fl.assemble(config)


def plan_score(task: Task, shared: tuple[str, ...]) -> Score:
    """Train with a plan, fine-tune each client, and return the scores.

    Clients fine-tune for 0, 1, 2 or 4 epochs at a third of the rate; with all layers shared, also at the whole rate.
    """
    plan = LayerPlan(task.layers, shared)
    result = fl.run(task.config, plan=plan, progress=False)
    clients, client_count = task.data.clients, len(task.data.clients)
    starts = [tree.state_dict(result.models[client.name]) for client in clients]
    tuner = Tuner(
        result.models[clients[0].name],
        task.criterion,
        Training.of(task.config.training),
        [(client.train, client.validation) for client in clients],
        task.config.execution.seed,
        result.done,
        starts,
        None,
        near=[[k, client_count + k] for k in range(client_count)],
        beside=[client.test for client in clients],
    )
    rate = tuner.training.lr
    rates = [rate / 3]
    if len(shared) == len(task.layers):
        rates.append(rate)
    candidates = [tuner.start]
    for tried_rate in rates:
        candidates += [*tuner.outputs(every(task.layers), tried_rate, EPOCHS)]
    scores = [scored(task, tuner, outputs) for outputs in candidates]
    return min(scores, key=lambda score: score.validation)


def scored(task: Task, tuner: Tuner, outputs: Tensor) -> Score:
    """Return the scores of outputs on validation and test samples, calibrated on validation samples."""
    clients, client_count = task.data.clients, len(task.data.clients)
    client_outputs = tuner.parts(outputs)
    training_sizes = [len(client.train) for client in clients]
    validation_set, test_set = (
        Held.of([client.split(split) for client in clients], training_sizes)
        for split in ("validation", "test")
    )
    logits, test_logits = (
        task.criterion.logits(
            torch.cat([client_outputs[k, offset + k] for k in range(client_count)])
        ).double()
        for offset in (0, client_count)
    )
    client_base_outputs = torch.stack(
        [evaluate.base_outputs(task.data, task.criterion, c.name) for c in clients]
    )
    base_outputs, test_base_outputs = (
        client_base_outputs[validation_set.client],
        client_base_outputs[test_set.client],
    )
    weight = torch.as_tensor(validation_set.weight)
    sample_half = halves(
        validation_set.group, validation_set.client, task.config.execution.seed
    )
    losses = np.zeros(len(validation_set.y))
    for half_number in (0, 1):
        is_fitted, is_left_out = sample_half != half_number, sample_half == half_number
        calibration = evaluate.fit(
            logits[is_fitted],
            validation_set.y[is_fitted],
            weight[is_fitted],
            base_outputs[is_fitted],
        )
        held_out_logits = evaluate.calibrated(
            logits[is_left_out], *calibration, base_outputs[is_left_out]
        )
        losses[is_left_out] = evaluate.log_losses(
            held_out_logits, validation_set.y[is_left_out]
        ).numpy()
    full_calibration = evaluate.fit(logits, validation_set.y, weight, base_outputs)
    calibrated_outputs = evaluate.calibrated(
        test_logits, *full_calibration, test_base_outputs
    )
    return Score(
        float(losses @ validation_set.weight),
        100 * float(test_set.right(test_logits) @ test_set.weight),
        float(
            evaluate.log_losses(calibrated_outputs, test_set.y).numpy()
            @ test_set.weight
        ),
    )


def rate_of(federation: str) -> float:
    """Return the rate with the lowest validation loss in other seeds, with all layers shared."""
    default_rate = float(task_of(federation, RATE_SEEDS[0]).config.training.lr or 0)
    losses = {}
    for factor in RATES:
        rate = default_rate * factor
        try:
            losses[rate] = sum(
                plan_score(task, tuple(layer.name for layer in task.layers)).validation
                for task in (task_of(federation, seed, rate) for seed in RATE_SEEDS)
            )
        except (NonFiniteError, RunError):
            losses[rate] = math.inf
    return min(losses, key=losses.__getitem__)


def main(hours: float = 6.0, name: str = "") -> None:
    """Train the plans without a row.

    Args:
        hours: hours of processor time after which no further run begins, all calls together.
        name: how the names of the federations begin that are trained.
    """
    torch.set_num_threads(1)
    rows = None
    if TRUTH.exists():
        rows = read_truth()
    done_keys, rates, spent_seconds = set(), {}, 0.0
    if rows is not None:
        done_keys = {
            *zip(rows["federation"], rows["seed"], rows["shared"], strict=True)
        }
        rates = dict(zip(rows["federation"], rows["lr"], strict=True))
        spent_seconds = float(rows["seconds"].sum())
    else:
        TRUTH.write_text(",".join(COLUMNS) + "\n")
    for seed in range(max(SEEDS.values())):
        for federation, seed_count in SEEDS.items():
            if seed >= seed_count or not federation.startswith(name):
                continue
            layer_names = tuple(
                layer.name for layer in task_of(federation, seed).layers
            )
            for shared_names in plans_of(federation, layer_names):
                plan_key = federation, seed, "+".join(shared_names)
                if plan_key in done_keys:
                    continue
                if spent_seconds > 3600 * hours:
                    return
                start = time.process_time()
                if federation not in rates:
                    rates[federation] = rate_of(federation)
                task = task_of(federation, seed, rates[federation])
                try:
                    score = plan_score(task, shared_names)
                except (NonFiniteError, RunError):
                    score = Score(math.nan, math.nan, math.nan)
                seconds = time.process_time() - start
                spent_seconds += seconds
                new_row = [
                    *plan_key,
                    f"{rates[federation]:g}",
                    f"{score.accuracy:.3f}",
                    f"{score.loss:.4f}",
                    f"{seconds:.1f}",
                ]
                with TRUTH.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow(new_row)
                print(*new_row, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
