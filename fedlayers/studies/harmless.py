"""Predictors next to the base rate: trained runs, and baselines that need no federation, on the same samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fl_core import statistics, tree
from fl_core.data.arrays import nested_groups
from fl_core.records import store
from fl_core.rows import (
    CLASSIFICATION,
    MULTILABEL,
    SCORES,
)
from fl_core.run.own_code import code_in
from fl_core.run.restore import load_rounds
from fl_core.run.task import Task
from fl_core.statistics import Interval
from fl_core.training import evaluate
from fl_core.training.losses import ClassWeighted

BASE_RATE = "base_rate"
VALIDATION, TEST = "validation", "test"
PROBABLE = (CLASSIFICATION, MULTILABEL)
"""The tasks whose predictions are probabilities, which are calibrated."""
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
        outputs: by split, validation or test, its outputs on each client's samples. Clients without samples are
            missing.
        models: those of a linear model, by client.
    """

    name: str
    outputs: Mapping[str, Outputs]
    models: Mapping[str, nn.Module] = field(default_factory=dict)


class Bench:
    """The validation and test samples of a federation, on which predictors are compared.

    A loss is the calibrated log loss (:func:`fl_core.training.evaluate.fit`), of numbers and of survival that
    of training. Means are over clients by training samples. With class weights, samples count by these too.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.kind = task, task.data.task
        self.class_weights: Tensor | None = None
        if isinstance(task.criterion, ClassWeighted):
            self.class_weights = torch.tensor(task.criterion.weights).double()
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
            client.name: evaluate.base_outputs(task.data, task.criterion, client.name)
            for client in task.data.clients
        }

    # --- predictors ---

    def of_run(self, path: Path, name: str) -> Predictor:
        """Return a finished run's predictor. Under a stopping rule its best round counts.

        Raises:
            UsageError: the clients hold parts of the model, so that none predicts alone.
        """
        round = "last" if store.Run(path).stopping_rule() is None else "best"
        with warnings.catch_warnings(action="ignore"):
            code = code_in(self.task.config)
            found = load_rounds(path, [round], allow_code=code, **self.task.own)
            _, _, models, _ = next(found)
        logits = self.task.criterion.logits
        return self.predictor(
            name, lambda client, x: logits(evaluate.predict(models[client], x))
        )

    def of_start(self) -> Predictor:
        """Return the predictor of the model before training."""
        logits, model = self.task.criterion.logits, self.task.model
        return self.predictor(
            "start", lambda client, x: logits(evaluate.predict(model, x))
        )

    @cached_property
    def base_rate(self) -> Predictor:
        """The predictor that knows how often each client's training samples have each class."""
        return self.predictor(
            BASE_RATE, lambda client, x: self.bases[client].expand(len(x), -1)
        )

    def predictor(
        self, name: str, predict: Callable[[str, Tensor], Tensor]
    ) -> Predictor:
        """Return a predictor of a function (client, samples) -> outputs."""
        with tree.one_thread():
            outputs = {
                split: {
                    client.name: predict(client.name, client.split(split).x).double()
                    for client in self.task.data.clients
                    if client.name in labels
                }
                for split, labels in self.labels.items()
            }
        return Predictor(name, outputs)

    # --- losses ---

    def calibration(
        self, one: Predictor, part: slice = slice(None)
    ) -> tuple[float, float]:
        """Return the temperature and the weight of the base rate, of validation samples or a part of each client's."""
        if self.kind not in PROBABLE or one.name == BASE_RATE:
            return 1.0, 0.0
        parts = []
        for client, outputs in one.outputs[VALIDATION].items():
            own, y = outputs[part], self.labels[VALIDATION][client][part]
            base = self.bases[client].expand(len(y), -1)
            parts.append((own, y, self._weights(client, y), base))
        return evaluate.fit(*map(torch.cat, zip(*parts, strict=True)))

    def losses(self, one: Predictor, split: str) -> dict[str, Tensor]:
        """Return the loss of each sample by client.

        On validation the calibration is cross-fitted: each half of a client's samples has that of the other halves.
        """
        halves = [slice(1, None, 2), slice(0, None, 2)]
        fitted = [
            self.calibration(one, part)
            for part in (halves if split == VALIDATION else [slice(None)])
        ]
        found, criterion = {}, self.task.criterion.of_logits()
        for client, own in one.outputs[split].items():
            y = self.labels[split][client]
            if self.kind in PROBABLE:
                found[client] = evaluate.log_losses(
                    self.calibrated(client, own, fitted), y
                )
            else:
                found[client] = criterion.per_sample(own, y.double()).double()
        return found

    def calibrated(
        self, client: str, outputs: Tensor, fitted: Sequence[tuple[float, float]]
    ) -> Tensor:
        """Return the logits of a client's samples, with one calibration for all or one each for even and odd ones."""
        pairs = torch.tensor(fitted, dtype=torch.float64)
        pairs = pairs[torch.arange(len(outputs)) % len(fitted)]
        return outputs / pairs[:, :1] + pairs[:, 1:] * self.bases[client]

    def _weights(self, client: str, y: Tensor) -> Tensor:
        """Return the weights of a client's samples, which add up to its number of training samples."""
        weights = torch.ones(len(y), dtype=torch.float64)
        if self.class_weights is not None:
            weights = self.class_weights[y]
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

    def by_client(self, one: Predictor, split: str = TEST) -> pd.DataFrame:
        """Return the scores of each client (line), NaN where its samples give none. The loss is calibrated."""
        criterion, data = self.task.criterion.of_logits(), self.task.data
        found = {}
        for client, losses in self.losses(one, split).items():
            own, y = one.outputs[split][client].float(), self.labels[split][client]
            scores = evaluate.scores(
                own, y, criterion, data.positive_index, data.absent
            )
            weights = self._weights(client, y)
            scores["loss"] = float((weights * losses).sum() / weights.sum())
            found[client] = scores
        return pd.DataFrame.from_dict(found, orient="index", dtype=float)

    def scores(self, one: Predictor, split: str = TEST) -> dict[str, float]:
        """Return a predictor's scores, means over clients that have them by training samples."""
        table = self.by_client(one, split)
        sizes = pd.Series(self.sizes).reindex(table.index)
        means = table.mul(sizes, axis=0).sum() / table.notna().mul(sizes, axis=0).sum()
        return dict(means)

    def line(self, one: Predictor) -> dict[str, float]:
        """Return a predictor's validation scores, how far its loss is ``above`` the base rate's, and its ``score``.

        ``low`` and ``high`` are the ends of the interval of ``above``. ``score`` ranks finished runs, higher is better:
        minus the loss, or the score that selects.
        """
        scores = self.scores(one, VALIDATION)
        name = self.task.config.federation.monitor or "loss"
        scores["score"] = scores.get(name, math.nan) * (1 if SCORES[name] else -1)
        above = self.above(one, self.base_rate, VALIDATION)
        return scores | dict(zip(("above", "low", "high"), above, strict=True))

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
        scores = self.by_client(many[first])
        for client, outputs in many[first].outputs[TEST].items():
            y, n = self.labels[TEST][client], len(outputs)
            line: dict[str, Any] = {"client": client, "train": self.sizes[client]}
            line["test"] = n
            if self.kind == CLASSIFICATION:
                line["macro_f1"] = scores.loc[client, "macro_f1"]
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
        for client, own in one.outputs[TEST].items():
            shares = self.calibrated(client, own, calibration).softmax(dim=1)[:, k]
            table = {"client": client, "group": self.groups[TEST][client]}
            table["positive"] = (self.labels[TEST][client] == k).numpy()
            parts.append(pd.DataFrame(table | {"probability": shares.numpy()}))
        found = pd.concat(parts, ignore_index=True)
        return found.assign(group=found.groupby(["client", "group"]).ngroup())

    def covariance(self, many: Sequence[Predictor], score: str) -> pd.DataFrame:
        """Return the covariance of predictors' validation scores, by a bootstrap of each client's samples or groups.

        All predictors get the same resamples.
        """
        draw = np.random.default_rng(0)
        labels = self.labels[VALIDATION]
        members = {
            client: np.split(
                np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1]
            )
            for client, group in self.groups[VALIDATION].items()
            if client in labels
        }
        losses = [self.losses(one, VALIDATION) for one in many]
        drawn = []
        for _ in range(RESAMPLES):
            found = np.full((len(labels), len(many)), np.nan)
            for line, (client, parts) in zip(found, members.items(), strict=True):
                again = draw.integers(len(parts), size=len(parts))
                rows = torch.from_numpy(np.concatenate([parts[k] for k in again]))
                for k, one in enumerate(many):
                    own = one.outputs[VALIDATION][client][rows]
                    line[k] = (
                        float(losses[k][client][rows].mean())
                        if score == "loss"
                        else self._value(own, labels[client][rows], score)
                    )
            sizes = [self.sizes[client] for client in members]
            means = np.ma.average(np.ma.masked_invalid(found), axis=0, weights=sizes)
            drawn.append(np.ma.filled(means, math.nan))
        return pd.DataFrame(drawn, columns=[one.name for one in many]).cov()

    def _value(self, outputs: Tensor, y: Tensor, score: str) -> float:
        """Return one score; macro-F1 by itself, since a bootstrap asks for it often."""
        data = self.task.data
        if score != "macro_f1":
            criterion = self.task.criterion.of_logits()
            known = (data.positive_index, data.absent)
            return evaluate.scores(outputs.float(), y, criterion, *known)[score]
        classes = outputs.shape[1]
        table = torch.bincount(y * classes + outputs.argmax(1), minlength=classes**2)
        counts = table.reshape(classes, classes)
        involved = counts.sum(0) + counts.sum(1)
        present = involved > 0
        present[data.absent] = False
        return float((2 * counts.diagonal()[present] / involved[present]).mean())
