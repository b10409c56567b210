"""Predictors next to the base rate: trained runs, and baselines that need no federation, on the same samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlayers.studies.jobs import task_kind
from fl_core import statistics, tree
from fl_core.config import RunConfig
from fl_core.data.arrays import nested_groups
from fl_core.errors import UsageError
from fl_core.records import store
from fl_core.restore import allowed_by
from fl_core.rows import CLASSIFICATION, MULTILABEL, SCORES
from fl_core.statistics import Interval
from fl_core.stored_models import load_kind
from fl_core.task import Task
from fl_core.training import evaluate
from fl_core.training.losses import ClassWeighted

BINS = 8
"""Groups of equal size of the predicted probabilities in a calibration picture."""
POOLED = ""
"""The name of all clients together."""
BASE_RATE = "base_rate"
VALIDATION, TEST = "validation", "test"
RESAMPLES = 100
"""Bootstrap samples of the validation samples of each client."""
Z = 1.96
"""The normal quantile of a two-sided 95 % interval."""
Outputs = Mapping[str, Tensor]
"""Outputs of a predictor [n, C] by client: logits of classes or labels, numbers, or log hazards."""


@dataclass(frozen=True)
class Predictor:
    """A trained run, a baseline or the base rate.

    Attributes:
        validation, test: its outputs on each client's samples. Clients without samples are missing.
    """

    name: str
    validation: Outputs
    test: Outputs


class Bench:
    """The validation and test samples of a federation, on which predictors are compared.

    A loss is the calibrated log loss (:func:`fl_core.training.evaluate.fit`), of numbers and of survival that
    of training. Means are over clients by training samples. With class weights, samples count by these too.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.kind = task, task.data.task
        weighted = task.criterion if isinstance(task.criterion, ClassWeighted) else None
        self.class_weights = (
            None if weighted is None else torch.tensor(weighted.weights)
        )
        self.labels = {
            split: {
                client.name: client.split(split).y
                for client in task.data.clients
                if len(client.split(split))
            }
            for split in (VALIDATION, TEST)
        }
        self.groups = {
            split: {
                client.name: nested_groups([part.groups])
                if part.groups is not None
                else np.arange(len(part))
                for client in task.data.clients
                for part in [client.split(split)]
            }
            for split in (VALIDATION, TEST)
        }
        self.sizes = {client.name: len(client.train) for client in task.data.clients}
        self.bases = {
            client.name: evaluate.base_outputs(task, client.name)
            for client in task.data.clients
        }

    # --- predictors ---

    def of_run(self, path: Path, name: str) -> Predictor:
        """Return a finished run's predictor. Under a stopping rule its best round counts.

        Raises:
            UsageError: the clients hold parts of the model, so that none predicts alone.
        """
        config = self.task.config
        own = {"data": config.own_data, "model": config.own_model}
        models, _ = _models(path, allow_code=allowed_by(config), **own)
        return self.of_models(name, models)

    def of_models(self, name: str, models: Mapping[str, nn.Module]) -> Predictor:
        """Return the predictor of a model for each client."""
        logits = self.task.criterion.logits
        return self.predictor(
            name, lambda client, x: logits(evaluate.predict(models[client], x))
        )

    def rank_value(self, one: Predictor) -> float:
        """Return what finished runs are ranked by, higher is better: minus the loss, or the score that selects."""
        name = self.task.config.federation.monitor or "loss"
        value = self.scores(one, VALIDATION).get(name, math.nan)
        return value if SCORES[name] else -value

    def base_rate(self) -> Predictor:
        """Return the predictor that knows how often each client's training samples have each class."""
        return self.predictor(
            BASE_RATE, lambda client, x: self.bases[client].expand(len(x), -1)
        )

    def predictor(
        self, name: str, predict: Callable[[str, Tensor], Tensor]
    ) -> Predictor:
        """Return a predictor of a function (client, samples) -> outputs."""
        with tree.one_thread():
            validation, test = (
                {
                    client.name: predict(client.name, client.split(split).x).double()
                    for client in self.task.data.clients
                    if len(client.split(split))
                }
                for split in (VALIDATION, TEST)
            )
        return Predictor(name, validation, test)

    # --- losses ---

    def calibration(
        self, one: Predictor, part: Callable[[int], Tensor] | None = None
    ) -> tuple[float, float]:
        """Return the temperature and the weight of the base rate, of validation samples or a part of each client's.

        Args:
            part: number of samples -> indices of the part.
        """
        if self.kind not in (CLASSIFICATION, MULTILABEL) or one.name == BASE_RATE:
            return 1.0, 0.0
        outputs, y, weights, bases = [], [], [], []
        for client, own in one.validation.items():
            chosen = torch.arange(len(own)) if part is None else part(len(own))
            if len(chosen):
                outputs.append(own[chosen])
                y.append(self.labels[VALIDATION][client][chosen])
                weights.append(self._weights(client, y[-1]))
                bases.append(self.bases[client].expand(len(chosen), -1))
        parts = (torch.cat(each) for each in (outputs, y, weights, bases))
        return evaluate.fit(*parts)

    def losses(self, one: Predictor, split: str) -> dict[str, Tensor]:
        """Return the loss of each sample by client.

        On validation the calibration is cross-fitted: each half of a client's samples has that of the other halves.
        """
        if split == TEST:
            halves = [self.calibration(one)] * 2
        else:
            halves = [
                self.calibration(one, partial(torch.arange, first, step=2))
                for first in (1, 0)
            ]
        found, criterion = {}, self.task.criterion.of_logits()
        outputs = one.validation if split == VALIDATION else one.test
        for client, own in outputs.items():
            y = self.labels[split][client]
            if self.kind in (CLASSIFICATION, MULTILABEL):
                own = self.calibrated(client, own, halves)
                found[client] = evaluate.log_losses(own, y)
            else:
                found[client] = criterion.per_sample(own, y.double()).double()
        return found

    def calibrated(
        self, client: str, outputs: Tensor, halves: Sequence[tuple[float, float]]
    ) -> Tensor:
        """Return the logits of a client's samples, with one calibration for the even and one for the odd ones."""
        pairs = torch.tensor(halves, dtype=torch.float64)
        pairs = pairs[torch.arange(len(outputs)) % len(halves)]
        return outputs / pairs[:, :1] + pairs[:, 1:] * self.bases[client]

    def _weights(self, client: str, y: Tensor) -> Tensor:
        """Return the weights of a client's samples, which add up to its number of training samples."""
        weights = torch.ones(len(y), dtype=torch.float64)
        if self.class_weights is not None:
            weights = self.class_weights.double()[y]
        return weights * self.sizes[client] / weights.sum()

    def mean(self, values: Mapping[str, Tensor], split: str) -> Interval:
        """Return the mean of samples' values with its 95 % interval, each client a stratum, and each group a draw."""
        total = sum(self.sizes[client] for client in values)
        mean = variance = 0.0
        for client, own in values.items():
            weights = self._weights(client, self.labels[split][client]) / total
            mean += float((weights * own).sum())
            centre = float((weights * own).sum() / weights.sum())
            group = self.groups[split][client]
            sums = np.bincount(group, weights=(weights * (own - centre)).numpy())
            variance += float((sums**2).sum()) * len(sums) / max(1, len(sums) - 1)
        half = Z * math.sqrt(variance)
        return Interval(mean, mean - half, mean + half)

    def above(self, one: Predictor, other: Predictor, split: str) -> Interval:
        """Return how much higher the first one's loss is, paired by sample."""
        first, second = self.losses(one, split), self.losses(other, split)
        return self.mean({k: first[k] - second[k] for k in first}, split)

    # --- scores ---

    def scores(self, one: Predictor, split: str = TEST) -> dict[str, float]:
        """Return a predictor's scores, means over clients that have them. The loss is calibrated."""
        outputs = one.validation if split == VALIDATION else one.test
        criterion = self.task.criterion.of_logits()
        each = {
            client: evaluate.scores(
                own.float(),
                self.labels[split][client],
                criterion,
                self.task.data.positive_index,
                self.task.data.absent,
            )
            for client, own in outputs.items()
        }
        found = {}
        for name in next(iter(each.values()), {}):
            there = {k: v[name] for k, v in each.items() if not math.isnan(v[name])}
            weights = [self.sizes[client] for client in there]
            found[name] = (
                statistics.combine(list(there.values()), weights) if there else math.nan
            )
        if outputs:
            found["loss"] = self.mean(self.losses(one, split), split).value
        return found

    def without(self, score: str, split: str) -> list[str]:
        """Return the clients whose samples give no such score. It shows with equal predictions."""
        return [
            client
            for client, y in self.labels[split].items()
            if math.isnan(
                evaluate.scores(
                    torch.zeros(len(y), self.bases[client].shape[-1]),
                    y,
                    self.task.criterion.of_logits(),
                ).get(score, 0.0)
            )
        ]

    def covariance(self, many: Sequence[Predictor], score: str) -> pd.DataFrame:
        """Return the covariance of predictors' validation scores, by a bootstrap of each client's samples or groups.

        The loss is calibrated.

        All predictors get the same resamples.
        """
        draw = np.random.default_rng(0)
        drawn: list[list[float]] = []
        members = {
            client: np.split(
                np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1]
            )
            for client, group in self.groups[VALIDATION].items()
        }
        tempered = [self._tempered(one) if score == "loss" else one for one in many]
        for _ in range(RESAMPLES):
            chosen = {}
            for client in self.labels[VALIDATION]:
                parts = members[client]
                again = draw.integers(len(parts), size=len(parts))
                rows = np.concatenate([parts[k] for k in again])
                chosen[client] = torch.from_numpy(rows)
            drawn.append([self._score(one, score, chosen) for one in tempered])
        values = pd.DataFrame(drawn, columns=[one.name for one in many])
        return values.cov()

    def _tempered(self, one: Predictor) -> Predictor:
        found = [self.calibration(one)]
        outputs = {
            name: self.calibrated(name, own, found)
            for name, own in one.validation.items()
        }
        return replace(one, validation=outputs)

    def _score(self, one: Predictor, score: str, chosen: Mapping[str, Tensor]) -> float:
        values, weights = [], []
        for client, own in one.validation.items():
            y = self.labels[VALIDATION][client][chosen[client]]
            value = _value(own[chosen[client]], y, score, self)
            if not math.isnan(value):
                values.append(value)
                weights.append(self.sizes[client])
        return statistics.combine(values, weights) if values else math.nan


def _value(outputs: Tensor, y: Tensor, score: str, bench: Bench) -> float:
    """Return one score; macro-F1 by itself, since a bootstrap asks for it often."""
    if score != "macro_f1":
        data, criterion = bench.task.data, bench.task.criterion.of_logits()
        found = evaluate.scores(
            outputs.float(), y, criterion, data.positive_index, data.absent
        )
        return found[score]
    classes = outputs.shape[1]
    table = torch.bincount(y * classes + outputs.argmax(1), minlength=classes**2)
    counts = table.reshape(classes, classes)
    involved = counts.sum(0) + counts.sum(1)
    present = involved > 0
    present[bench.task.data.absent] = False
    return float((2 * counts.diagonal()[present] / involved[present]).mean())


# --- the test predictions of one run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """Predictions for the test samples of each client, by its own model or the global one.

    Attributes:
        probabilities: by client, samples x classes, after the temperature.
        predicted: by client, the class with the largest logit of each sample.
        labels: by client, the index of the class of each sample.
        task: of the run.
    """

    probabilities: Mapping[str, NDArray[np.float64]]
    predicted: Mapping[str, NDArray[np.int64]]
    labels: Mapping[str, NDArray[np.int64]]
    task: Task

    def table(self) -> pd.DataFrame:
        """Return a line for each client: its samples and its scores, and Wilson's 95 % interval of accuracy.

        The interval holds for one model, so it leaves out the differences between seeds.

        Returns:
            Columns ``client``, ``train``, ``test``, ``macro_f1`` and ``accuracy``, with ``accuracy_low`` and
            ``accuracy_high``.
        """
        from sklearn.metrics import f1_score

        lines: list[dict[str, Any]] = []
        for client in self.task.data.clients:
            if client.name not in self.labels:
                continue
            labels = self.labels[client.name]
            predicted = self.predicted[client.name]
            n, groups = len(labels), client.test.groups
            right = labels == predicted
            line: dict[str, Any] = {
                "client": client.name,
                "train": len(client.train),
                "test": n,
            }
            counted = {*labels, *predicted}.difference(self.task.data.absent)
            line["macro_f1"] = f1_score(
                labels, predicted, labels=sorted(counted), average="macro"
            )
            effect = 1.0 if groups is None else statistics.design_effect(right, groups)
            line |= statistics.share_interval(int(right.sum()), n, effect).columns(
                "accuracy"
            )
            lines.append(line)
        return pd.DataFrame(lines)

    def _positive(self) -> dict[str, tuple[NDArray[np.bool_], NDArray[np.float64]]]:
        """Return by client whether each sample is of the positive class of two, and the probability of that class."""
        k = self.task.data.positive_index
        return {
            name: (y == k, self.probabilities[name][:, k])
            for name, y in self.labels.items()
        }

    def roc(self) -> pd.DataFrame:
        """Return the ROC curves of two classes: of each client that has both classes, and of all samples together.

        Returns:
            Columns ``client`` (:data:`POOLED` for all), ``false_positive``, ``true_positive``, ``auroc`` and ``n``.
        """
        from sklearn.metrics import auc, roc_curve

        found = self._positive()
        pooled = tuple(
            np.concatenate(parts) for parts in zip(*found.values(), strict=True)
        )
        parts = []
        for name, (y, p) in [*found.items(), (POOLED, pooled)]:
            if 0 < y.sum() < len(y):
                false, true, _ = roc_curve(y, p)
                curve = {
                    "client": name,
                    "false_positive": false,
                    "true_positive": true,
                    "auroc": auc(false, true),
                }
                parts.append(pd.DataFrame({**curve, "n": len(y)}))
        columns = ["client", "false_positive", "true_positive", "auroc", "n"]
        return (
            pd.concat(parts, ignore_index=True)
            if parts
            else pd.DataFrame(columns=columns)
        )

    def calibration(self) -> pd.DataFrame:
        """Return groups of samples of all clients by their predicted probability of the positive class of two.

        Returns:
            Columns ``predicted`` (the group's mean), ``share`` (of positive samples) with Wilson's ``low`` and
            ``high``, and ``n``. Rows of one group, such as a patient, widen the interval.
        """
        found = self._positive()
        y, p = (np.concatenate(parts) for parts in zip(*found.values(), strict=True))
        clients = [each for each in self.task.data.clients if each.name in found]
        parts = [client.test.groups for client in clients]
        groups = None
        if all(part is not None for part in parts):
            groups = nested_groups(parts)
        lines = []
        for group in np.array_split(np.argsort(p, kind="stable"), min(BINS, len(p))):
            effect = 1.0
            if groups is not None:
                effect = statistics.design_effect(y[group], groups[group])
            interval = statistics.share_interval(
                int(y[group].sum()), len(group), effect
            )
            lines.append([float(p[group].mean()), *interval, len(group)])
        return pd.DataFrame(lines, columns=["predicted", "share", "low", "high", "n"])


def predictions_of(
    path: Path, allow_code: Collection[str] = (), **own: Any
) -> Predictions:
    """Predict the test samples of a finished run with the models that its clients would use, and its calibration.

    Args:
        path: the run directory. Under a stopping rule its best round counts.
        allow_code, own: as for :func:`fl_core.stored_models.load_models`.

    Raises:
        UsageError: the clients hold parts of the model, so that none predicts alone; or there are no test samples.
    """
    models, task = _models(path, allow_code=allow_code, **own)
    bench = Bench(task)
    one = bench.of_models(path.name, models)
    if not one.test:
        raise UsageError(f"{path} must have test samples to predict; got none.")
    found = [bench.calibration(one)]
    return Predictions(
        {
            name: bench.calibrated(name, own, found).softmax(dim=1).numpy()
            for name, own in one.test.items()
        },
        {name: own.argmax(dim=1).numpy() for name, own in one.test.items()},
        {name: y.numpy() for name, y in bench.labels[TEST].items()},
        task,
    )


def _models(path: Path, **own: Any) -> tuple[dict[str, nn.Module], Task]:
    """Return the models of a finished run by client, and its task. Under a stopping rule its best round counts."""
    round = "last" if store.Run(path).stopping_rule() is None else "best"
    with warnings.catch_warnings(action="ignore"):
        _, models, task = load_kind(path, round, None, **own)
    return models, task


def predict(path: Path | None, config: RunConfig) -> Predictions | str:
    """Return the test predictions of a run that was chosen, or why there are none."""
    if path is None:
        return "Nothing is recommended."
    if not path.is_dir():
        return f"{path.name} was not compared."
    if (kind := task_kind(config)) != CLASSIFICATION:
        return f"These scores are of classes, and the task is {kind}."
    own = {"data": config.own_data, "model": config.own_model}
    try:
        return predictions_of(path, allowed_by(config), **own)
    except UsageError as error:  # its clients hold parts of the model
        return str(error)
