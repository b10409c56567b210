"""Baselines that need no federation: a linear model and gradient boosting, of each client and of all together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlayers.studies.harmless import BASE_RATE, VALIDATION, Bench, Predictor
from fl_core import rows
from fl_core.data.federated import FederatedData
from fl_core.rows import Row
from fl_core.scores import CLASSIFICATION, MULTILABEL, OF_CLASS, REGRESSION, why_missing
from fl_core.task import Task
from fl_core.tokens import PAD
from fl_core.training import evaluate

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

PENALTIES = (0.01, 0.1, 1.0)
"""Inverse strengths C of the linear models' penalty; the one with the least validation loss is used."""
BASELINES = {
    BASE_RATE: "the share of each class among a client's training samples",
    "linear_own": "a linear model on each client's own training samples",
    "linear_pooled": "a linear model on all clients' training samples: centralised",
    "boosting_own": "gradient boosting on each client's own training samples",
    "boosting_pooled": "gradient boosting on all clients' training samples: centralised",
}
"""The baselines by name, in words. Boosting is for tables."""
Array = NDArray[Any]
Predict = Callable[[Array], Array]
"""Samples [n, d] -> outputs [n, C]."""


def is_table(data: FederatedData) -> bool:
    """Return whether samples are rows of numbers."""
    return len(data.shape) == 1 and data.words is None


def predictors(bench: Bench) -> Iterator[Predictor]:
    """Fit the baselines of a federation. Settings are chosen by validation loss.

    A client with training samples of one class only has its base rate.
    """
    data, base = bench.task.data, bench.base_rate()
    yield base
    kinds = ("linear", "boosting") if is_table(data) else ("linear",)
    if bench.kind not in (CLASSIFICATION, REGRESSION, MULTILABEL):
        kinds = ("linear",)
    for kind in kinds:
        for pooled in (False, True):
            name = f"{kind}_{'pooled' if pooled else 'own'}"
            tried = [
                _fitted(bench, base, name, kind, pooled, penalty)
                for penalty in (PENALTIES if kind == "linear" else PENALTIES[:1])
            ]
            yield min(
                tried,
                key=lambda one: (
                    bench.mean(bench.losses(one, VALIDATION), VALIDATION).value
                ),
            )


def _fitted(
    bench: Bench, base: Predictor, name: str, kind: str, pooled: bool, penalty: float
) -> Predictor:
    data = bench.task.data
    words = int(getattr(data.shape, "tokens", 0)) if data.words is not None else 0
    groups = [list(data.clients)] if pooled else [[client] for client in data.clients]
    models: dict[str, Predict | None] = {}
    for clients in groups:
        x = features(torch.cat([client.train.x for client in clients]), words)
        y = torch.cat([client.train.y for client in clients]).numpy()
        model = _model(bench, kind, x, y, penalty, texts=bool(words))
        models |= {client.name: model for client in clients}

    def predict(client: str, x: Tensor) -> Tensor:
        model = models[client]
        if model is None:
            known = base.validation.get(client, base.test.get(client))
            assert known is not None
            return known[:1].expand(len(x), -1)
        return torch.from_numpy(np.ascontiguousarray(model(features(x, words))))

    return bench.predictor(name, predict)


def _model(
    bench: Bench, kind: str, x: Any, y: Array, penalty: float, texts: bool
) -> Predict | None:
    """Fit one model; None where the training samples have a single class or value."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler, StandardScaler
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    def estimator(classes: bool) -> Any:
        from sklearn import ensemble, linear_model

        if kind == "boosting":
            of_kind = (
                ensemble.HistGradientBoostingClassifier
                if classes
                else ensemble.HistGradientBoostingRegressor
            )
            early = len(y) >= 50  # it sets samples of each class aside
            if classes and y.ndim == 1:
                early &= np.unique(y, return_counts=True)[1].min() > 1
            return of_kind(
                learning_rate=0.1, max_iter=100, early_stopping=early, random_state=0
            )
        linear = (
            linear_model.LogisticRegression(C=penalty, max_iter=1000)
            if classes
            else linear_model.Ridge(alpha=1 / penalty)
        )
        return make_pipeline(MaxAbsScaler() if texts else StandardScaler(), linear)

    with warnings.catch_warnings(action="ignore"), threadpool_limits(1):
        if bench.kind == CLASSIFICATION:
            return _of_classes(bench, estimator(classes=True), x, y)
        if bench.kind == MULTILABEL:
            labels = [
                _of_label(estimator(classes=True), x, column) for column in y.T > 0
            ]
            return lambda new: np.column_stack([label(new) for label in labels])
        if bench.kind == REGRESSION:
            if np.ptp(y) == 0:
                return None
            model = estimator(classes=False).fit(x, y)
            return lambda new: model.predict(new)[:, None]
        return _cox(bench, x, y, penalty)


def _of_classes(bench: Bench, model: Any, x: Any, y: Array) -> Predict | None:
    """Return log-probabilities of all classes. An absent class has that of one sample more."""
    present = np.unique(y)
    if len(present) < 2:
        return None
    sample_weight = None
    if bench.class_weights is not None:
        sample_weight = bench.class_weights.numpy()[y]
    name = getattr(model, "steps", [("",)])[-1][0]
    key = f"{name}__sample_weight" if name else "sample_weight"
    model.fit(x, y, **({} if sample_weight is None else {key: sample_weight}))
    floor = -math.log(len(y) + bench.task.data.n_classes)

    def predict(new: Any) -> Array:
        logits = np.full((new.shape[0], bench.task.data.n_classes), floor)
        with np.errstate(divide="ignore"):
            logits[:, present] = np.log(model.predict_proba(new))
        return np.maximum(logits, math.log(1e-6))

    return predict


def _of_label(model: Any, x: Any, y: Array) -> Predict:
    """Return the logit of one label of 0 and 1."""
    if y.all() or not y.any():
        share = (y.sum() + 1) / (len(y) + 2)
        return lambda new: np.full(new.shape[0], math.log(share / (1 - share)))
    model.fit(x, y)

    def predict(new: Any) -> Array:
        share = np.clip(model.predict_proba(new)[:, 1], 1e-6, 1 - 1e-6)
        return np.log(share / (1 - share))

    return predict


def _cox(bench: Bench, x: Array, y: Array, penalty: float) -> Predict | None:
    """Fit a linear Cox model with the loss of training and a ridge penalty."""
    if not y[:, 1].any():
        return None
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-9
    inputs = torch.from_numpy((x - mean) / spread).double()
    targets = torch.from_numpy(y).double()
    weights = nn.Parameter(torch.zeros(x.shape[1], 1, dtype=torch.float64))
    search = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        fit = bench.task.criterion(inputs @ weights, targets)
        loss = fit + (weights**2).sum() / (2 * penalty * len(y))
        loss.backward()
        return loss

    search.step(closure)
    found = weights.detach().numpy()
    return lambda new: ((new - mean) / spread) @ found


def features(x: Tensor, words: int) -> NDArray[np.float32] | csr_matrix:
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


def baseline_rows(task: Task) -> list[Row]:
    """Return the rows of every baseline on a task's data, as of a run after its last round.

    >>> import fedlayers as fl
    >>> found = rows.frame(baseline_rows(fl.assemble(fl.RunConfig(dataset="heart", rounds=3))))
    >>> sorted(found["algorithm"].unique())
    ['base_rate', 'boosting_own', 'boosting_pooled', 'linear_own', 'linear_pooled']
    """
    bench = Bench(task)
    criterion = task.criterion.of_logits()
    found = []
    for one in predictors(bench):
        calibration = bench.calibration(one)
        for split in ("validation", "test"):
            outputs = one.validation if split == "validation" else one.test
            for client in task.data.clients:
                if client.name not in outputs:
                    continue
                columns: dict[str, Any] = {
                    "algorithm": one.name,
                    "seed": task.config.execution.seed,
                    "round": task.config.federation.rounds,
                    "split": split,
                    "model": "global" if one.name.endswith("pooled") else "personal",
                    "client": client.name,
                    "estimator": f"{BASELINES[one.name]}, temperature {calibration[0]:.2f}",
                    "n_samples": len(client.split(split)),
                    "n_train": len(client.train),
                }
                values = evaluate.scores(
                    outputs[client.name].float(),
                    client.split(split).y,
                    criterion,
                    task.data.positive_index,
                )
                base = bench.bases[client.name]
                hot = evaluate.calibrated(outputs[client.name], *calibration, base)
                losses = criterion.per_sample(hot, client.split(split).y)
                values["loss"] = float(losses.mean())
                for metric, value in values.items():
                    variant = task.data.positive if metric in OF_CLASS else ""
                    found.append(
                        rows.row(
                            metric,
                            value,
                            status=why_missing(metric, value),
                            variant=variant,
                            **columns,
                        )
                    )
    return found
