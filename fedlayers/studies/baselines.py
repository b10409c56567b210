"""Baseline scores for any federated model, computed from a federation's data alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_core import rows
from fl_core.data.federated import FederatedData
from fl_core.rows import Row
from fl_core.scores import OF_CLASS, why_missing
from fl_core.task import Task
from fl_core.tokens import PAD
from fl_core.training import evaluate
from fl_core.training.losses import ClassWeighted

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Predict = Callable[[str, Tensor], Tensor]
"""(client, samples [n, *shape]) -> logits [n, C]"""
ClassWeights = tuple[float, ...] | None
ITERATIONS = 1000
LEAST = math.log(1e-12)
"""The logit of a class without training samples."""


@dataclass(frozen=True)
class Baseline:
    """A classifier that needs no federation.

    Attributes:
        words: its description.
        model: ``personal`` or ``global``.
        fit: data and class weights (None: none) -> its logits, and a note on the fit.
    """

    words: str
    model: str
    fit: Callable[[FederatedData, ClassWeights], tuple[Predict, str]]


def majority(data: FederatedData, weights: ClassWeights = None) -> tuple[Predict, str]:
    """Predict each client's most frequent training class for every sample; for equal counts the first class.

    The logits are log((n_k + 1) / (n + C)) for n_k of the client's n training samples in class k. Class weights do not
    change it.
    """
    counts = {
        client.name: torch.bincount(client.train.y, minlength=data.n_classes)
        for client in data.clients
    }
    logits = {name: ((n + 1) / (n.sum() + len(n))).log() for name, n in counts.items()}
    return lambda client, x: logits[client].expand(
        len(x), -1
    ), "frequencies of training classes"


def pooled_logistic(
    data: FederatedData, weights: ClassWeights = None
) -> tuple[Predict, str]:
    """Fit a multinomial logistic regression on all clients' training samples together: a centralised bound.

    Samples are flattened and standardised. Texts are counts of their words, each divided by its largest. The penalty is
    (1/2) ||W||^2, added to the sum of cross-entropies (scikit-learn's C = 1). Class weights multiply each sample's
    cross-entropy.
    """
    from sklearn.exceptions import (
        ConvergenceWarning,
    )  # seconds, which a study's first lines go without
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler, StandardScaler

    texts = data.words is not None
    words = int(getattr(data.shape, "tokens", 0))
    pooled = torch.cat([client.train.x for client in data.clients])
    y = torch.cat([client.train.y for client in data.clients]).numpy()
    present = np.unique(y)
    if len(present) < 2:
        return majority(data)[0], "training samples of one class only"
    by_class = None if weights is None else {int(k): weights[k] for k in present}
    scaler = MaxAbsScaler() if texts else StandardScaler()
    model: Any = make_pipeline(
        scaler, LogisticRegression(max_iter=ITERATIONS, class_weight=by_class)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(_features(pooled, words), y)
    note = f"not converged after {ITERATIONS} iterations" if caught else "converged"

    def predict(client: str, x: Tensor) -> Tensor:
        logits = torch.full((len(x), data.n_classes), LEAST)
        logits[:, torch.from_numpy(present)] = torch.from_numpy(
            model.predict_log_proba(_features(x, words))
        ).float()
        return logits.clamp(min=LEAST)

    return (
        predict,
        f"logistic regression, C=1, {'class-weighted, ' * (weights is not None)}{note}",
    )


def _features(x: Tensor, words: int) -> NDArray[np.float32] | csr_matrix:
    """Return samples as vectors [n, d]; for token ids the counts of each word."""
    if not words:
        return x.flatten(1).numpy()
    from scipy.sparse import csr_matrix

    ids = x.numpy()
    sample, place = np.nonzero(ids != PAD)
    return csr_matrix(
        (np.ones(len(sample), dtype=np.float32), (sample, ids[sample, place])),
        (len(ids), words),
    )


BASELINES: dict[str, Baseline] = {
    "majority": Baseline(
        "each client's most frequent training class", "personal", majority
    ),
    "pooled_logistic": Baseline(
        "logistic regression on all clients' training samples together: centralised, as a bound",
        "global",
        pooled_logistic,
    ),
}
"""The baselines by their name in a comparison."""


def baseline_rows(task: Task) -> list[Row]:
    """Return the rows of every baseline on a task's data, as of a run after its last round.

    >>> import fedlayers as fl
    >>> found = rows.frame(baseline_rows(fl.assemble(fl.RunConfig(dataset="heart", rounds=3))))
    >>> sorted(found["algorithm"].unique()), int(found["round"].max()), sorted(found["split"].unique())
    (['majority', 'pooled_logistic'], 3, ['test', 'validation'])
    """
    found = []
    weights = (
        task.criterion.weights if isinstance(task.criterion, ClassWeighted) else None
    )
    for name, baseline in BASELINES.items():
        predict, note = baseline.fit(task.data, weights)
        for client in task.data.clients:
            for split in ("validation", "test"):
                samples = client.split(split)
                columns: dict[str, Any] = {
                    "algorithm": name,
                    "seed": task.config.execution.seed,
                    "round": task.config.federation.rounds,
                    "split": split,
                }
                columns |= {
                    "model": baseline.model,
                    "client": client.name,
                    "estimator": note,
                }
                columns |= {"n_samples": len(samples), "n_train": len(client.train)}
                logits, loss = (
                    predict(client.name, samples.x),
                    task.criterion.of_logits(),
                )
                for metric, value in evaluate.scores(
                    logits, samples.y, loss, task.data.positive_index
                ).items():
                    columns["variant"] = (
                        task.data.positive if metric in OF_CLASS else ""
                    )
                    found.append(
                        rows.row(
                            metric, value, status=why_missing(metric, value), **columns
                        )
                    )
    return found
