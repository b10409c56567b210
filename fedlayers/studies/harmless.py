"""Predictors next to the base rate: trained runs, and baselines that need no federation, on the same samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fl_core import statistics, tree
from fl_core.data.arrays import nested_groups
from fl_core.records import store
from fl_core.restore import allowed_by, load_kind
from fl_core.rows import CLASSIFICATION, MULTILABEL, SCORES
from fl_core.statistics import Interval
from fl_core.task import Task
from fl_core.training import evaluate
from fl_core.training.losses import ClassWeighted

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
        round = "last" if store.Run(path).stopping_rule() is None else "best"
        with warnings.catch_warnings(action="ignore"):
            _, models, _ = load_kind(
                path, round, None, allow_code=allowed_by(config), **own
            )
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

    def of_clients(self, many: Mapping[str, Predictor]) -> pd.DataFrame:
        """Return each client's test losses by several predictors, and the first one's scores.

        Args:
            many: by the column of its loss.

        Returns:
            Columns ``client``, ``train``, ``test``, for classes ``macro_f1`` and ``accuracy`` with Wilson's 95 %
            interval, which one model's samples give, and the losses. With ``alone`` among them ``loses`` says whether
            the first loss is higher than alone beyond chance.
        """
        losses = {name: self.losses(one, TEST) for name, one in many.items()}
        first, lines = next(iter(many)), []
        for client, outputs in many[first].test.items():
            y, n = self.labels[TEST][client], len(outputs)
            line: dict[str, Any] = {"client": client, "train": self.sizes[client]}
            line["test"] = n
            if self.kind == CLASSIFICATION:
                line["macro_f1"] = _value(outputs, y, "macro_f1", self)
                right = (outputs.argmax(1) == y).numpy()
                effect = statistics.design_effect(right, self.groups[TEST][client])
                share = statistics.share_interval(int(right.sum()), n, effect)
                line |= share.columns("accuracy")
            line |= {name: float(each[client].mean()) for name, each in losses.items()}
            if "alone" in losses:
                paired = losses[first][client] - losses["alone"][client]
                error = float(paired.std()) / math.sqrt(n) if n > 1 else math.inf
                line["loses"] = bool(paired.mean() - Z * error > 0)
            lines.append(line)
        return pd.DataFrame(lines)

    def positives(self, one: Predictor) -> pd.DataFrame:
        """Return a line for each test sample of two classes, with its calibrated probability of the positive one.

        Returns:
            Columns ``client``, ``group`` (numbered over all clients), ``positive`` and ``probability``.
        """
        k, calibration = self.task.data.positive_index, [self.calibration(one)]
        parts = []
        for client, own in one.test.items():
            shares = self.calibrated(client, own, calibration).softmax(dim=1)[:, k]
            table = {"client": client, "group": self.groups[TEST][client]}
            table["positive"] = (self.labels[TEST][client] == k).numpy()
            parts.append(pd.DataFrame(table | {"probability": shares.numpy()}))
        found = pd.concat(parts, ignore_index=True)
        return found.assign(group=found.groupby(["client", "group"]).ngroup())

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
