"""Predictions of a finished run on its test samples: scores of each client with intervals, ROC and calibration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedlayers.studies.jobs import task_kind
from fl_core import statistics, tree
from fl_core.config import RunConfig
from fl_core.data.arrays import nested_groups
from fl_core.errors import UsageError
from fl_core.records import store
from fl_core.restore import allowed_by
from fl_core.scores import CLASSIFICATION
from fl_core.stored_models import load_kind
from fl_core.task import Task
from fl_core.training import evaluate

BINS = 8
"""Groups of equal size of the predicted probabilities in a calibration picture."""
POOLED = ""
"""The name of all clients together."""


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
            line["macro_f1"] = f1_score(labels, predicted, average="macro")
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
    round = "last" if store.Run(path).stopping_rule() is None else "best"
    _, models, task = load_kind(path, round, None, allow_code=allow_code, **own)
    probabilities, predicted, labels = {}, {}, {}
    bases = {name: evaluate.base_outputs(task, name) for name in models}
    found = evaluate.calibration_of(task, models, bases)
    with tree.one_thread():
        for client in task.data.clients:
            if client.name in models and len(client.test):
                logits = task.criterion.logits(
                    evaluate.predict(models[client.name], client.test.x)
                )
                hot = evaluate.calibrated(logits, *found, bases[client.name])
                probabilities[client.name] = hot.softmax(dim=1).numpy()
                predicted[client.name] = logits.argmax(dim=1).numpy()
                labels[client.name] = client.test.y.numpy()
    if not labels:
        raise UsageError(f"{path} must have test samples to predict; got none.")
    return Predictions(probabilities, predicted, labels, task)


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
