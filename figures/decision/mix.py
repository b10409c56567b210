"""Run the study of mixtures, and of one run instead of four: four cuts and Ditto, each at a stored rate.

No rate is tuned here. Each cut has the rate that validation chose in the other seeds of the finished study.
``REGISTERED_MIX.md`` states the questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import optimize, special

from fedlayers.studies.mixture import fit_weights, mixture_log_probabilities
from figures import items, packing
from figures.decision import finished_ways, runs, stitch
from figures.decision.federations import cuts
from figures.decision.finished import DITTO, EVERY, MAIN_CUT, STUDY
from figures.decision.finished_runs import HELD_OUT, NAME as FINISHED, ROWS, STOPPED, VALIDATION, to_stop
from figures.decision.finished_ways import ARMS
from figures.recipe import Recipe, labels
from fl_core import rows, runner, tree
from fl_core.data import Split
from fl_core.errors import NonFiniteError
from fl_core.plan import CANDIDATE, Evidence, LayerPlan
from fl_core.training import evaluate, losses
from fl_core.tree import Tree

NAME = "decision.mix"
ARM, MIXTURE, SCALED, STITCH = "arm", "mixture", "scaled", "stitch"
"""What is scored: a cut; a mixture of the cuts; a cut with a temperature; Ditto and what is made of it."""
FITTED, EQUAL = "fitted", "equal"
STITCHED, CONTINUED = "stitched", "continued"
WEIGHT, TEMPERATURE, DEPTH, RATE = "weight", "temperature", "depth", "rate"
Array = NDArray[np.float64]
Logs = dict[str, list[Array]]
"""Log-probabilities [n, C] by split, one array a client."""


class Federation:
    """A federation's samples for scoring models and mixtures."""

    def __init__(self, task: runner.Task) -> None:
        self.task, self.scores = task, runs.Scores(task)
        clients = range(len(task.data.clients))
        self.samples: dict[str, list[Split]] = {
            VALIDATION: [task.data.clients[number].validation for number in clients],
            HELD_OUT: [self.scores.held_out(number) for number in clients],
        }
        self.sizes = [len(client.train) for client in task.data.clients]
        own = self.samples[VALIDATION]
        self.weights = np.concatenate([np.full(len(p), size / len(p)) for p, size in zip(own, self.sizes, strict=True)])

    def logs(self, models: Mapping[int, Tree]) -> Logs:
        """Return the log-probabilities of clients' models."""
        found: Logs = {split: [] for split in self.samples}
        for number, model in models.items():
            tree.load(self.scores.model, model)
            for split, parts in self.samples.items():
                with tree.one_thread():
                    outputs = evaluate.predict(self.scores.model, parts[number].x)
                found[split].append(torch.log_softmax(self.task.criterion.logits(outputs).double(), dim=1).numpy())
        return found

    def truths(self, logs: Logs) -> Array:
        """Return the log-probability of each validation sample's class, [n], client by client."""
        parts = zip(logs[VALIDATION], self.samples[VALIDATION], strict=True)
        return np.concatenate([log[np.arange(len(part)), part.y.numpy()] for log, part in parts])

    def validation(self, logs: Logs) -> tuple[float, float]:
        """Return macro-F1 and minus the log loss on validation, means over clients by training samples."""
        found = [self._scores(VALIDATION, k, log) for k, log in enumerate(logs[VALIDATION])]
        means = [np.average([each[name] for each in found], weights=self.sizes) for name in ("macro_f1", "loss")]
        return float(means[0]), -float(means[1])

    def rows(self, kind: str, variant: str, logs: Logs, done: int = 0) -> Iterator[rows.Row]:
        """Yield every client's scores on both splits. The loss is the log loss."""
        for split, parts in self.samples.items():
            for number, part in enumerate(parts):
                found = self._scores(split, number, logs[split][number])
                about: dict[str, Any] = {
                    "estimator": kind, "variant": variant, "split": split, "round": done, "n_samples": len(part),
                    "client": self.task.data.clients[number].name, "n_train": self.sizes[number], **labels(self.task),
                }  # fmt: skip
                yield from (rows.row(metric, found[metric], **about) for metric in runs.SCORES)

    def _scores(self, split: str, number: int, log: Array) -> dict[str, float]:
        part = self.samples[split][number]
        return evaluate.scores(torch.from_numpy(log), part.y, losses.CrossEntropy(), self.task.data.positive_index)


# --- what a run trains -----------------------------------------------------------------------------------------


def measured(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Train the four cuts and mix them; train Ditto, stitch it, and continue with FedPer at the chosen depth."""
    federation, nothing = Federation(task), LayerPlan(task.layers, (), Evidence(rule=CANDIDATE))
    rates = tuned_rates(run, task.config.seed)
    lines: list[rows.Row] = []
    arms: dict[str, Logs] = {}
    for arm in ARMS:
        own = {"estimator": ARM, "variant": arm, **labels(task)}
        plan = nothing.with_first(cuts(len(nothing.trainable))[arm])
        lines.append(rows.row(RATE, rates[arm], **own))
        try:
            ended = to_stop(task, replace(task.config, lr=rates[arm]), plan)
        except NonFiniteError as error:
            lines.append(rows.row(STOPPED, None, status=str(error), **own))
            continue
        arms[arm] = federation.logs(ended.models)
        lines.append(rows.row(STOPPED, ended.stopped, round=ended.best, **own))
        lines += federation.rows(ARM, arm, arms[arm], ended.best)
    lines += mixtures(federation, arms)
    try:
        lines += one_run(federation, nothing, rates[MAIN_CUT])
    except NonFiniteError as error:
        lines.append(rows.row(STOPPED, None, status=str(error), estimator=STITCH, variant=DITTO, **labels(task)))
    return rows.frame(lines)


def tuned_rates(name: str, seed: int, folder: Path | None = None) -> dict[str, float]:
    """Return each arm's rate: the one that validation chooses in the other seeds of the finished study."""
    stored = packing.read((folder or items.ROWS / FINISHED) / f"{name}{ROWS}")
    (part,) = finished_ways.parts_of(pd.concat([frame for _, frame in stored]))
    return {arm: STUDY[name].rates[part.cuts.rate(seed, part.cut(arm))] for arm in ARMS}


def mixtures(federation: Federation, arms: Mapping[str, Logs]) -> Iterator[rows.Row]:
    """Yield the scores of the fitted and the equal mixture, and of each arm with a temperature, all by validation."""
    named = labels(federation.task)
    truths = np.stack([federation.truths(logs) for logs in arms.values()])
    fitted = fit_weights(truths, federation.weights)
    for name, weights in ((FITTED, fitted), (EQUAL, np.full(len(arms), 1 / len(arms)))):
        for arm, weight in zip(arms, weights, strict=True):
            yield rows.row(WEIGHT, weight, estimator=name, variant=arm, **named)
        yield from federation.rows(MIXTURE, name, _mixed(list(arms.values()), weights))
    for arm, logs in arms.items():
        hot = temperature(federation, logs)
        yield rows.row(TEMPERATURE, hot, estimator=SCALED, variant=arm, **named)
        yield from federation.rows(SCALED, arm, _scaled(logs, hot))


def _mixed(arms: Sequence[Logs], weights: Array) -> Logs:
    return {
        split: [
            mixture_log_probabilities(np.stack(each), weights)
            for each in zip(*(arm[split] for arm in arms), strict=True)
        ]
        for split in arms[0]
    }


def _scaled(logs: Logs, hot: float) -> Logs:
    return {split: [special.log_softmax(log / hot, axis=1) for log in parts] for split, parts in logs.items()}


def temperature(federation: Federation, logs: Logs) -> float:
    """Return the temperature, from 0.05 to 20, with the least log loss on validation (Guo et al. 2017)."""

    def loss(power: float) -> float:
        return float(-np.average(federation.truths(_scaled(logs, np.exp(power))), weights=federation.weights))

    return float(np.exp(optimize.minimize_scalar(loss, bounds=(np.log(0.05), np.log(20)), method="bounded").x))


def one_run(federation: Federation, nothing: LayerPlan, rate: float) -> Iterator[rows.Row]:
    """Yield the scores of Ditto, of Ditto stitched, and of the stitched models after FedPer's last rounds."""
    task = federation.task
    about = {"estimator": STITCH, **labels(task)}
    config = replace(task.config, lr=rate)
    ditto = to_stop(task, replace(config, algorithm=DITTO), None)
    yield rows.row(STOPPED, ditto.stopped, round=ditto.best, variant=DITTO, **about)
    yield from federation.rows(STITCH, DITTO, federation.logs(ditto.models), ditto.best)
    plans = [nothing.with_first(depth) for depth in range(len(nothing.trainable) + 1)]
    logs = [federation.logs(stitch.stitched(plan, ditto.server, ditto.models)) for plan in plans]
    depth = max(range(len(plans)), key=lambda k: federation.validation(logs[k]))
    yield rows.row(DEPTH, depth, variant=STITCHED, **about)
    yield from federation.rows(STITCH, STITCHED, logs[depth], ditto.best)
    rounds = EVERY * max(1, round(stitch.last_rounds(ditto.stopped) / EVERY))
    with TemporaryDirectory() as folder:
        heads = Path(folder) / "heads.safetensors"
        stitch.save_heads(heads, ditto.models)
        options: dict[str, Any] = {"algorithm": stitch.NAME, "options": {"heads": str(heads)}}
        config = replace(config, rounds=rounds, checkpoint_every=rounds, **options)
        ended = to_stop(task, config, plans[depth], ditto.server)
    yield rows.row(STOPPED, ended.stopped, round=ended.best, variant=CONTINUED, **about)
    yield from federation.rows(STITCH, CONTINUED, federation.logs(ended.models), ended.best)


SLOW = ("medpar", "fashion_mnist", "cifar10", "pacs", "fed_isic")
"""The federations whose runs take minutes. They are run last."""
ITEM = items.register(
    Recipe(
        NAME,
        "Four cuts mixed, and one run in place of four",
        {name: STUDY[name].config for name in sorted(STUDY, key=lambda name: name in SLOW and SLOW.index(name) + 1)},
        seeds=3,
        budget="about 4 hours of one core; the quick federations' first seed 20 minutes",
        measure=measured,
    )
)
